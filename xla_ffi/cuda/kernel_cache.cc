#include "kernel_cache.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_sources.h"
#include "nvrtc_api.h"

namespace skipreduce::cuda {
namespace {

using ImageKey = std::tuple<int, Element, Element>;
using KernelsKey = std::tuple<Context, int, Element, Element>;

// One lock for both maps: devices that ask at the same time wait for one compilation (a tenth of a second) instead of
// making it twice. Never destroyed: threads may outlive main.
std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<ImageKey, std::string>& Images() {
  static auto* images = new std::map<ImageKey, std::string>;
  return *images;
}
std::map<KernelsKey, Kernels>& Loaded() {
  static auto* loaded = new std::map<KernelsKey, Kernels>;
  return *loaded;
}

class ScopedProgram {
 public:
  explicit ScopedProgram(const NvrtcApi& nvrtc) : nvrtc_(nvrtc) {}
  ScopedProgram(const ScopedProgram&) = delete;
  ScopedProgram& operator=(const ScopedProgram&) = delete;
  ~ScopedProgram() {
    if (program != nullptr) Report(nvrtc_.Call(nullptr, nvrtc_.DestroyProgram, &program));
  }
  Program program = nullptr;

 private:
  const NvrtcApi& nvrtc_;
};

// The target to compile for. An NVRTC that does not know the device yet makes PTX for the newest one that it knows, and
// the driver does the rest.
Status Target(const NvrtcApi& nvrtc, int architecture, std::string* target, bool* is_ptx) {
  int count = 0;
  SKIPREDUCE_RETURN_IF_ERROR(nvrtc.Call(nullptr, nvrtc.GetNumSupportedArchs, &count));
  std::vector<int> supported(count);
  SKIPREDUCE_RETURN_IF_ERROR(nvrtc.Call(nullptr, nvrtc.GetSupportedArchs, supported.data()));
  int best = 0;
  for (const int candidate : supported) {
    if (candidate <= architecture && candidate > best) best = candidate;
  }
  if (best == 0) {
    return Status(Code::kUnimplemented, nvrtc.path + " compiles for no architecture as old as sm_" +
                                            std::to_string(architecture));
  }
  *is_ptx = best != architecture;
  *target = (*is_ptx ? "compute_" : "sm_") + std::to_string(best);
  return Status();
}

Status Compile(const NvrtcApi& nvrtc, int architecture, Element type, Element wire, std::string* image) {
  std::string target;
  bool is_ptx = false;
  SKIPREDUCE_RETURN_IF_ERROR(Target(nvrtc, architecture, &target, &is_ptx));
  const std::string options[] = {
      "--gpu-architecture=" + target,
      "--std=c++17",
      "-default-device",  // NVRTC 12 takes lambdas in kernels for functions of the host
      "-fmad=false",  // sums are to have the bits of the ring around ppermute
      "-DSKIPREDUCE_T=" + std::to_string(static_cast<int>(type)),
      "-DSKIPREDUCE_W=" + std::to_string(static_cast<int>(wire)),
  };
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());

  ScopedProgram scoped(nvrtc);
  SKIPREDUCE_RETURN_IF_ERROR(nvrtc.Call(nullptr, nvrtc.CreateProgram, &scoped.program, sources::kKernels, "kernels.cu",
                                        sources::kNumHeaders, sources::kHeaders, sources::kHeaderNames));
  const Program program = scoped.program;
  SKIPREDUCE_RETURN_IF_ERROR(
      nvrtc.Call(program, nvrtc.CompileProgram, program, static_cast<int>(arguments.size()), arguments.data()));
  std::size_t size = 0;
  SKIPREDUCE_RETURN_IF_ERROR(nvrtc.Call(program, is_ptx ? nvrtc.GetPtxSize : nvrtc.GetCubinSize, program, &size));
  image->assign(size, '\0');
  return nvrtc.Call(program, is_ptx ? nvrtc.GetPtx : nvrtc.GetCubin, program, image->data());
}

Status FindAll(const CudaApi& cuda, Kernels* kernels) {
  const std::pair<Kernel*, const char*> wanted[] = {
      {&kernels->first, "skr_first"}, {&kernels->add, "skr_add"},   {&kernels->finish_own, "skr_finish_own"},
      {&kernels->place, "skr_place"}, {&kernels->ring, "skr_ring"}, {&kernels->direct, "skr_direct"},
  };
  for (const auto& [kernel, name] : wanted) {
    SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.ModuleGetFunction, kernel, kernels->module, name));
  }
  return Status();
}

}  // namespace

Status GetKernels(const CudaApi& cuda, Context context, int architecture, Element type, Element wire,
                  Kernels* kernels) {
  const std::lock_guard lock(Mutex());
  const KernelsKey key{context, architecture, type, wire};
  if (const auto found = Loaded().find(key); found != Loaded().end()) {
    *kernels = found->second;
    return Status();
  }
  const ImageKey image_key{architecture, type, wire};
  auto image = Images().find(image_key);
  if (image == Images().end()) {
    int driver_version = 0;
    SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.DriverGetVersion, &driver_version));
    const NvrtcApi* nvrtc = nullptr;
    SKIPREDUCE_RETURN_IF_ERROR(NvrtcApi::Load(driver_version, &nvrtc));
    std::string compiled;
    SKIPREDUCE_RETURN_IF_ERROR(Compile(*nvrtc, architecture, type, wire, &compiled));
    image = Images().emplace(image_key, std::move(compiled)).first;
  }
  Kernels loaded{};
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.ModuleLoadData, &loaded.module, image->second.data()));
  if (const Status status = FindAll(cuda, &loaded); !status.ok()) {
    Report(cuda.Call(cuda.ModuleUnload, loaded.module));
    return status;
  }
  *kernels = Loaded().emplace(key, loaded).first->second;
  return Status();
}

Status CompileOnly(int driver_version, int architecture, Element type, Element wire) {
  const NvrtcApi* nvrtc = nullptr;
  SKIPREDUCE_RETURN_IF_ERROR(NvrtcApi::Load(driver_version, &nvrtc));
  std::string image;
  return Compile(*nvrtc, architecture, type, wire, &image);
}

void ReleaseKernels(const CudaApi& cuda) {
  const std::lock_guard lock(Mutex());
  for (const auto& [key, kernels] : Loaded()) Report(cuda.Call(cuda.ModuleUnload, kernels.module));
  Loaded().clear();
  Images().clear();
}

}  // namespace skipreduce::cuda
