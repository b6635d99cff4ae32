#include "cuda_api.h"

#include <cstdio>
#include <mutex>

namespace skipreduce::cuda {

Status CudaApi::Load(const CudaApi** api) {
  static std::mutex mutex;
  static CudaApi* loaded = nullptr;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    DynamicLibrary library;
    SKIPREDUCE_RETURN_IF_ERROR(DynamicLibrary::Open({"libcuda.so.1"}, &library));
    CudaApi a;
    SKIPREDUCE_RETURN_IF_ERROR(library.RequireAll(
        a.GetErrorName, a.GetErrorString, a.DriverGetVersion, a.StreamGetCtx, a.CtxPushCurrent, a.CtxPopCurrent,
        a.CtxGetDevice, a.DeviceGetAttribute, a.ModuleLoadData, a.ModuleUnload, a.ModuleGetFunction, a.LaunchKernel,
        a.StreamCreate, a.StreamDestroy, a.StreamSynchronize, a.StreamWaitEvent, a.StreamIsCapturing, a.EventCreate,
        a.EventDestroy, a.EventRecord, a.MemHostAlloc, a.MemFreeHost, a.MemcpyHtoDAsync, a.MemcpyDtoHAsync,
        a.MemsetD8Async));
    a.path = library.path();
    loaded = new CudaApi(a);
  }
  *api = loaded;
  return Status();
}

Status CudaApi::Error(const char* call, int result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  (void)GetErrorName.pointer(result, &name);
  (void)GetErrorString.pointer(result, &text);
  return Status(Code::kInternal, std::string(call) + " failed with " + std::to_string(result) + ", " +
                                     (name == nullptr ? "a code unknown to the driver" : name) + ": " +
                                     (text == nullptr ? "no text" : text));
}

Status ScopedContext::Enter(Stream stream) {
  Context context = nullptr;
  SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.StreamGetCtx, stream, &context));
  SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.CtxPushCurrent, context));
  context_ = context;
  return Status();
}

ScopedContext::~ScopedContext() {
  Context popped = nullptr;
  if (context_ != nullptr) Report(cuda_.Call(cuda_.CtxPopCurrent, &popped));
}

void Report(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "skipreduce: %s\n", status.message().c_str());
}

}  // namespace skipreduce::cuda
