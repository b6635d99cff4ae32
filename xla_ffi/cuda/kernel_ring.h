// The kernels that reach all workers through the window: the ring in one kernel, and the direct form.

#ifndef SKIPREDUCE_CUDA_KERNEL_RING_H_
#define SKIPREDUCE_CUDA_KERNEL_RING_H_

#include "all_reduce.h"
#include "communicator.h"
#include "kernel_cache.h"
#include "kernel_params.h"
#include "status.h"

namespace skipreduce::cuda {

// Where things lie in a window that has room for arrays of `direct_bytes` in the direct form. No pointers, no time
// limit yet.
Window WindowLayout(long long direct_bytes);

// Enqueues the one kernel.
Status RunKernelRing(const Communicator& communicator, const Kernels& kernels, const Request& request);
Status RunDirect(const Communicator& communicator, const Kernels& kernels, const Request& request);

// What the kernels are told of the arrays.
Collective CollectiveOf(const Request& request, int rank);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_KERNEL_RING_H_
