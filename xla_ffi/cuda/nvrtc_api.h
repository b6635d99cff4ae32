// The part of NVRTC that is used, by the declarations of nvrtc.h (CUDA 12.0 and 13.5 alike).

#ifndef SKIPREDUCE_CUDA_NVRTC_API_H_
#define SKIPREDUCE_CUDA_NVRTC_API_H_

#include <cstddef>
#include <string>

#include "dynamic_library.h"
#include "status.h"

struct _nvrtcProgram;

namespace skipreduce::cuda {

using Program = _nvrtcProgram*;

struct NvrtcApi {
  Function<int*, int*> Version{"nvrtcVersion"};
  Function<int*> GetNumSupportedArchs{"nvrtcGetNumSupportedArchs"};
  Function<int*> GetSupportedArchs{"nvrtcGetSupportedArchs"};
  Function<Program*, const char*, const char*, int, const char* const*, const char* const*> CreateProgram{
      "nvrtcCreateProgram"};
  Function<Program*> DestroyProgram{"nvrtcDestroyProgram"};
  Function<Program, int, const char* const*> CompileProgram{"nvrtcCompileProgram"};
  Function<Program, std::size_t*> GetCubinSize{"nvrtcGetCUBINSize"};
  Function<Program, char*> GetCubin{"nvrtcGetCUBIN"};
  Function<Program, std::size_t*> GetPtxSize{"nvrtcGetPTXSize"};
  Function<Program, char*> GetPtx{"nvrtcGetPTX"};
  Function<Program, std::size_t*> GetProgramLogSize{"nvrtcGetProgramLogSize"};
  Function<Program, char*> GetProgramLog{"nvrtcGetProgramLog"};
  const char* (*GetErrorString)(int) = nullptr;

  std::string path;

  // Finds libnvrtc.so.13 or .12, once per process; tried again after a failure. `driver_version` is that of
  // cuDriverGetVersion (12040 is CUDA 12.4): what NVRTC compiles runs on drivers of its own major version and later.
  static Status Load(int driver_version, const NvrtcApi** api);

  // Calls `function`; an error names it, the code and its text, and quotes the log of `program` unless that is null.
  template <typename... Parameters, typename... Arguments>
  Status Call(Program program, const Function<Parameters...>& function, Arguments... arguments) const {
    const int result = function.pointer(arguments...);
    return result == 0 ? Status() : Error(program, function.name, result);
  }

 private:
  Status Error(Program program, const char* call, int result) const;
};

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_NVRTC_API_H_
