// The kernels, compiled by NVRTC when they are first asked for: once per process, device architecture, T and W; loaded
// once per CUDA context. Never unloaded.

#ifndef SKIPREDUCE_CUDA_KERNEL_CACHE_H_
#define SKIPREDUCE_CUDA_KERNEL_CACHE_H_

#include "all_reduce.h"
#include "cuda_api.h"
#include "status.h"

namespace skipreduce::cuda {

// The kernels of kernels.cu for one T and W.
struct Kernels {
  Module module;
  Kernel first;
  Kernel add;
  Kernel finish_own;
  Kernel place;
  Kernel ring;
  Kernel direct;
};

// The kernels for the current `context`, of a device of `architecture` (90 for compute capability 9.0).
Status GetKernels(const CudaApi& cuda, Context context, int architecture, Element type, Element wire, Kernels* kernels);

// Compiles without a device, to see that it can be done.
Status CompileOnly(int driver_version, int architecture, Element type, Element wire);

// Unloads all modules, for tests.
void ReleaseKernels(const CudaApi& cuda);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_KERNEL_CACHE_H_
