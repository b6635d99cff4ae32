#include "dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include <mutex>
#include <sstream>

namespace skipreduce::cuda {
namespace {

std::mutex folders_mutex;

std::vector<std::string>& Folders() {
  static auto* folders = new std::vector<std::string>;  // never destroyed: threads may outlive main
  return *folders;
}

std::string PathOf(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name == nullptr) return fallback;
  return map->l_name;
}

std::string LastError() {
  const char* error = dlerror();
  return error == nullptr ? "no reason given" : error;
}

}  // namespace

void SetLibraryFolders(const std::string& folders) {
  std::vector<std::string> parts;
  std::stringstream stream(folders);
  for (std::string part; std::getline(stream, part, ':');) {
    if (!part.empty()) parts.push_back(part);
  }
  const std::lock_guard lock(folders_mutex);
  Folders() = std::move(parts);
}

Status DynamicLibrary::Open(const std::vector<std::string>& names, DynamicLibrary* library) {
  std::vector<std::string> candidates;
  {
    const std::lock_guard lock(folders_mutex);
    for (const std::string& name : names) {
      for (const std::string& folder : Folders()) candidates.push_back(folder + "/" + name);
    }
  }
  candidates.insert(candidates.end(), names.begin(), names.end());

  void* handle = nullptr;
  std::string found;
  for (const std::string& name : names) {
    if (handle == nullptr) handle = dlopen(found.assign(name).c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  }
  std::string errors;
  for (const std::string& candidate : candidates) {
    if (handle != nullptr) break;
    handle = dlopen(found.assign(candidate).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) errors += (errors.empty() ? "" : "; ") + LastError();
  }
  if (handle == nullptr) {
    std::string wanted;
    for (const std::string& name : names) wanted += (wanted.empty() ? "" : " or ") + name;
    return Status(Code::kFailedPrecondition, "cannot load " + wanted + " (" + errors + ")");
  }
  library->handle_ = handle;
  library->path_ = PathOf(handle, found);
  return Status();
}

void* DynamicLibrary::Find(const char* symbol) const { return handle_ == nullptr ? nullptr : dlsym(handle_, symbol); }

Status DynamicLibrary::Missing(const char* symbol) const {
  dlerror();
  (void)Find(symbol);
  return Status(Code::kFailedPrecondition,
                path_ + " has no function " + symbol + " (" + LastError() + ")");
}

}  // namespace skipreduce::cuda
