#include "all_reduce.h"

#include <memory>
#include <mutex>

#include "choose.h"
#include "communicator.h"
#include "host_ring.h"
#include "kernel_cache.h"
#include "kernel_ring.h"

namespace skipreduce::cuda {

Status AllReduce(const Request& request) {
  if (request.slice_elements == 0) return Status();
  const CudaApi* cuda = nullptr;
  const NcclApi* nccl = nullptr;
  SKIPREDUCE_RETURN_IF_ERROR(CudaApi::Load(&cuda));
  SKIPREDUCE_RETURN_IF_ERROR(NcclApi::Load(&nccl));
  ScopedContext context(*cuda);
  SKIPREDUCE_RETURN_IF_ERROR(context.Enter(request.stream));

  std::shared_ptr<Communicator> communicator;
  SKIPREDUCE_RETURN_IF_ERROR(Communicator::Get(*cuda, *nccl, request, &communicator));
  const std::lock_guard lock(communicator->mutex);
  SKIPREDUCE_RETURN_IF_ERROR(communicator->CheckNotFailed());
  Algorithm algorithm;
  SKIPREDUCE_RETURN_IF_ERROR(Choose(communicator->wishes, communicator->capability, request.num_workers,
                                    request.slice_elements, request.type, request.wire, &algorithm));
  Kernels kernels;
  SKIPREDUCE_RETURN_IF_ERROR(GetKernels(*cuda, context.context(), communicator->architecture, request.type,
                                        request.wire, &kernels));
  switch (algorithm) {
    case Algorithm::kRing:
      return RunKernelRing(*communicator, kernels, request);
    case Algorithm::kDirect:
      return RunDirect(*communicator, kernels, request);
    default:
      return RunHostRing(*communicator, kernels, request);
  }
}

void ReleaseAll() {
  ReleaseCommunicators();
  const CudaApi* cuda = nullptr;
  if (CudaApi::Load(&cuda).ok()) ReleaseKernels(*cuda);
}

}  // namespace skipreduce::cuda
