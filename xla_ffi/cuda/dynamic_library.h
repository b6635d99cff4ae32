// Libraries of NVIDIA's, found while the program runs: nothing is linked, so that one wheel serves machines without a
// GPU, CUDA 12 and CUDA 13.

#ifndef SKIPREDUCE_CUDA_DYNAMIC_LIBRARY_H_
#define SKIPREDUCE_CUDA_DYNAMIC_LIBRARY_H_

#include <string>
#include <vector>

#include "status.h"

namespace skipreduce::cuda {

// A function of a library: its name there, and where it was found. Statuses of CUDA, NVRTC and NCCL are all enums, as
// wide as an int.
template <typename... Parameters>
struct Function {
  const char* name;
  int (*pointer)(Parameters...) = nullptr;
};

// A loaded library. Never unloaded: others in the process use it as well.
class DynamicLibrary {
 public:
  // Tries `names` in this order: what the process has loaded already (that is the one JAX uses), then in the folders of
  // SetLibraryFolders, then wherever the dynamic linker looks.
  static Status Open(const std::vector<std::string>& names, DynamicLibrary* library);

  const std::string& path() const { return path_; }

  // Null if the library has no `symbol`.
  void* Find(const char* symbol) const;

  template <typename... Parameters>
  Status Require(Function<Parameters...>& function) const {
    function.pointer = reinterpret_cast<int (*)(Parameters...)>(Find(function.name));
    return function.pointer == nullptr ? Missing(function.name) : Status();
  }

  // Finds all of them, or says which one there is not.
  template <typename... Functions>
  Status RequireAll(Functions&... functions) const {
    Status status;
    ((status.ok() ? (void)(status = Require(functions)) : (void)0), ...);
    return status;
  }

 private:
  Status Missing(const char* symbol) const;

  void* handle_ = nullptr;
  std::string path_;
};

// The folders of the wheels that JAX installs, colon by colon. Python knows them.
void SetLibraryFolders(const std::string& folders);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_DYNAMIC_LIBRARY_H_
