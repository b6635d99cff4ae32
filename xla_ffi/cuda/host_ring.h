// The ring over NCCL's host API: any NCCL, any network between the workers.

#ifndef SKIPREDUCE_CUDA_HOST_RING_H_
#define SKIPREDUCE_CUDA_HOST_RING_H_

#include "all_reduce.h"
#include "communicator.h"
#include "kernel_cache.h"
#include "status.h"

namespace skipreduce::cuda {

// Enqueues the ring on the request's stream. What a worker waits for here is NCCL's, which has no time limit of ours.
Status RunHostRing(const Communicator& communicator, const Kernels& kernels, const Request& request);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_HOST_RING_H_
