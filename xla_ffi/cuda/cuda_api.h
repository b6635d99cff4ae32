// The part of the CUDA driver API that is used, by the declarations of cuda.h (CUDA 12.0 and 13.0 alike; the suffixes
// _v2 are what that header's macros make of the plain names). Declared here so that no CUDA header is needed.

#ifndef SKIPREDUCE_CUDA_CUDA_API_H_
#define SKIPREDUCE_CUDA_CUDA_API_H_

#include <cstddef>
#include <string>

#include "dynamic_library.h"
#include "status.h"

// The names of cuda.h: the handles of JAX are of these types.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct CUstream_st;

namespace skipreduce::cuda {

using Context = CUctx_st*;
using Event = CUevent_st*;
using Kernel = CUfunc_st*;
using Module = CUmod_st*;
using Stream = CUstream_st*;
using DevicePointer = unsigned long long;

static_assert(sizeof(DevicePointer) == sizeof(void*), "CUdeviceptr is as wide as a pointer");

constexpr unsigned int kStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned int kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr unsigned int kHostMemoryPortable = 1;    // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned int kHostMemoryDeviceMap = 2;   // CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kMultiprocessorCount = 16;           // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kComputeCapabilityMajor = 75;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMinor = 76;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int kStreamNotCapturing = 0;             // CU_STREAM_CAPTURE_STATUS_NONE

struct CudaApi {
  Function<int, const char**> GetErrorName{"cuGetErrorName"};
  Function<int, const char**> GetErrorString{"cuGetErrorString"};
  Function<int*> DriverGetVersion{"cuDriverGetVersion"};
  Function<Stream, Context*> StreamGetCtx{"cuStreamGetCtx"};
  Function<Context> CtxPushCurrent{"cuCtxPushCurrent_v2"};
  Function<Context*> CtxPopCurrent{"cuCtxPopCurrent_v2"};
  Function<int*> CtxGetDevice{"cuCtxGetDevice"};
  Function<int*, int, int> DeviceGetAttribute{"cuDeviceGetAttribute"};
  Function<Module*, const void*> ModuleLoadData{"cuModuleLoadData"};
  Function<Module> ModuleUnload{"cuModuleUnload"};
  Function<Kernel*, Module, const char*> ModuleGetFunction{"cuModuleGetFunction"};
  Function<Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**>
      LaunchKernel{"cuLaunchKernel"};
  Function<Stream*, unsigned> StreamCreate{"cuStreamCreate"};
  Function<Stream> StreamDestroy{"cuStreamDestroy_v2"};
  Function<Stream> StreamSynchronize{"cuStreamSynchronize"};
  Function<Stream, Event, unsigned> StreamWaitEvent{"cuStreamWaitEvent"};
  Function<Stream, int*> StreamIsCapturing{"cuStreamIsCapturing"};
  Function<Event*, unsigned> EventCreate{"cuEventCreate"};
  Function<Event> EventDestroy{"cuEventDestroy_v2"};
  Function<Event, Stream> EventRecord{"cuEventRecord"};
  Function<void**, std::size_t, unsigned> MemHostAlloc{"cuMemHostAlloc"};
  Function<void*> MemFreeHost{"cuMemFreeHost"};
  Function<DevicePointer, const void*, std::size_t, Stream> MemcpyHtoDAsync{"cuMemcpyHtoDAsync_v2"};
  Function<void*, DevicePointer, std::size_t, Stream> MemcpyDtoHAsync{"cuMemcpyDtoHAsync_v2"};
  Function<DevicePointer, unsigned char, std::size_t, Stream> MemsetD8Async{"cuMemsetD8Async"};

  std::string path;

  // Finds libcuda.so.1, once per process; tried again after a failure.
  static Status Load(const CudaApi** api);

  // Calls `function`; an error names it, the code, and what the driver says of the code.
  template <typename... Parameters, typename... Arguments>
  Status Call(const Function<Parameters...>& function, Arguments... arguments) const {
    const int result = function.pointer(arguments...);
    return result == 0 ? Status() : Error(function.name, result);
  }

  // The launch that is used: one-dimensional.
  Status Launch(Kernel kernel, int num_blocks, int num_threads, Stream stream, void** parameters) const {
    return Call(LaunchKernel, kernel, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, parameters, nullptr);
  }

 private:
  Status Error(const char* call, int result) const;
};

inline DevicePointer AsDevicePointer(const void* pointer) { return reinterpret_cast<DevicePointer>(pointer); }

// Makes the context of a stream the current one of this thread for as long as it lives.
class ScopedContext {
 public:
  explicit ScopedContext(const CudaApi& cuda) : cuda_(cuda) {}
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  ~ScopedContext();

  Status Enter(Stream stream);
  Context context() const { return context_; }

 private:
  const CudaApi& cuda_;
  Context context_ = nullptr;
};

// Says on stderr what went wrong where no error can be returned: while things are given back.
void Report(const Status& status);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_CUDA_API_H_
