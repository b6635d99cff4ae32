#include "nvrtc_api.h"

#include <mutex>
#include <vector>

namespace skipreduce::cuda {

Status NvrtcApi::Load(int driver_version, const NvrtcApi** api) {
  static std::mutex mutex;
  static NvrtcApi* loaded = nullptr;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    std::vector<std::string> names = {"libnvrtc.so.12"};
    if (driver_version >= 13000) names.insert(names.begin(), "libnvrtc.so.13");
    DynamicLibrary library;
    SKIPREDUCE_RETURN_IF_ERROR(DynamicLibrary::Open(names, &library));
    NvrtcApi a;
    SKIPREDUCE_RETURN_IF_ERROR(library.RequireAll(a.Version, a.GetNumSupportedArchs, a.GetSupportedArchs,
                                                  a.CreateProgram, a.DestroyProgram, a.CompileProgram, a.GetCubinSize,
                                                  a.GetCubin, a.GetPtxSize, a.GetPtx, a.GetProgramLogSize,
                                                  a.GetProgramLog));
    a.GetErrorString = reinterpret_cast<const char* (*)(int)>(library.Find("nvrtcGetErrorString"));
    a.path = library.path();
    loaded = new NvrtcApi(a);
  }
  *api = loaded;
  return Status();
}

Status NvrtcApi::Error(Program program, const char* call, int result) const {
  std::string message = std::string(call) + " failed with " + std::to_string(result) + ", " +
                        (GetErrorString == nullptr ? "no text" : GetErrorString(result));
  std::size_t size = 0;
  if (program != nullptr && GetProgramLogSize.pointer(program, &size) == 0 && size > 1) {
    std::string log(size, '\0');
    if (GetProgramLog.pointer(program, log.data()) == 0) message += "\n" + std::string(log.c_str());
  }
  return Status(Code::kInternal, message);
}

}  // namespace skipreduce::cuda
