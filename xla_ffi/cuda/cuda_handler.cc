// The XLA FFI handlers of platform "CUDA", and what Python asks of the library besides. Only this file knows XLA.
//
// Operands: block (N, S) T; shift s32[]. Results: out (N, S) T; scratch u8[skipreduce_cuda_scratch_bytes(N, S, W)].
// Attributes, all s64: num_workers N, num_skipped k, divisor (0: the plain sum), wire_type (-1: T itself, or a code
// of Element), time_limit_ms, and the array replica_groups: flattened device ids, N to a group, in the ring's order.
//
// Not declared compatible with command buffers (CUDA graphs). The kernels could be replayed, since their counters lie
// in device memory; but a replay calls no handler, so the error of a worker that did not come would not be raised (its
// NaNs would be there), and nothing of it has been tried on a device. XLA then runs the call between its graphs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "../export.h"
#include "all_reduce.h"
#include "collectives_extension.h"
#include "cuda_api.h"
#include "dynamic_library.h"
#include "kernel_cache.h"
#include "nccl_api.h"
#include "nvrtc_api.h"
#include "xla/ffi/api/ffi.h"

namespace skipreduce::cuda {
namespace {

namespace ffi = ::xla::ffi;
using Ids = ffi::Span<const std::int64_t>;

constexpr std::int64_t kMostWorkers = 65536;

ffi::Error AsError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(static_cast<XLA_FFI_Error_Code>(status.code()), "skipreduce: " + status.message());
}

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("skipreduce_all_reduce: " + what);
}

ffi::Error CheckGroups(const Communicators& communicators, std::int64_t num_workers, Ids groups) {
  if (!communicators.available()) {
    return ffi::Error(XLA_FFI_Error_Code_FAILED_PRECONDITION,
                      "skipreduce: this XLA gives custom calls no access to its communicators (the FFI extension for "
                      "collectives, in jaxlib and the CUDA plugin since 0.11.2). Update JAX, or use backend='xla'");
  }
  if (num_workers < 1 || num_workers > kMostWorkers) {
    return Invalid("num_workers=" + std::to_string(num_workers) + ": expected 1 to " + std::to_string(kMostWorkers));
  }
  if (groups.size() == 0 || groups.size() % num_workers != 0) {
    return Invalid("replica_groups has " + std::to_string(groups.size()) + " ids: expected a multiple of num_workers=" +
                   std::to_string(num_workers));
  }
  return ffi::Error::Success();
}

// Before the program runs: XLA makes, or finds, the communicator of the group.
ffi::Error Prepare(Communicators communicators, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const auto num_workers = attributes.get<std::int64_t>("num_workers");
  const auto groups = attributes.get<Ids>("replica_groups");
  if (num_workers.has_error()) return num_workers.error();
  if (groups.has_error()) return groups.error();
  if (ffi::Error error = CheckGroups(communicators, *num_workers, *groups); error.failure()) return error;
  return communicators.Request(groups->begin(), groups->size(), *num_workers);
}

bool ElementOf(ffi::DataType type, Element* element) {
  switch (type) {
    case ffi::DataType::F32:
      *element = Element::kFloat32;
      return true;
    case ffi::DataType::BF16:
      *element = Element::kBFloat16;
      return true;
    case ffi::DataType::F16:
      *element = Element::kFloat16;
      return true;
    default:
      return false;
  }
}

ffi::Error Execute(Stream stream, Communicators communicators, ffi::AnyBuffer block, ffi::AnyBuffer shift,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, std::int64_t num_workers,
                   std::int64_t num_skipped, std::int64_t divisor, std::int64_t wire_type, std::int64_t time_limit_ms,
                   Ids replica_groups) {
  if (ffi::Error error = CheckGroups(communicators, num_workers, replica_groups); error.failure()) return error;
  if (num_skipped < 0 || num_skipped >= num_workers) {
    return Invalid("num_skipped=" + std::to_string(num_skipped) + ": expected 0 to num_workers-1");
  }
  if (divisor < 0) return Invalid("divisor=" + std::to_string(divisor) + ": expected 0 (the plain sum) or more");
  if (time_limit_ms < 1) return Invalid("time_limit_ms=" + std::to_string(time_limit_ms) + ": expected 1 or more");

  Element type;
  if (!ElementOf(block.element_type(), &type)) {
    return Invalid("the block's dtype has the number " + std::to_string(static_cast<int>(block.element_type())) +
                   " (xla.PrimitiveType): expected float32, bfloat16 or float16");
  }
  const Element wire = wire_type == -1 ? type : static_cast<Element>(wire_type);
  if (wire_type < -1 || wire_type > 2 || (wire != type && type != Element::kFloat32)) {
    return Invalid("wire_type=" + std::to_string(wire_type) +
                   ": expected -1 (the block's dtype), or of a float32 block 0 (float32), 1 (bfloat16), 2 (float16)");
  }
  if (block.element_count() % num_workers != 0) {
    return Invalid("the block has " + std::to_string(block.element_count()) + " elements: expected a multiple of " +
                   std::to_string(num_workers));
  }
  if (out->element_type() != block.element_type() || out->element_count() != block.element_count()) {
    return Invalid("the first result has another dtype or size than the block");
  }
  if (shift.element_type() != ffi::DataType::S32 || shift.element_count() != 1) {
    return Invalid("the shift is not one int32");
  }
  const long long slice_elements = block.element_count() / num_workers;
  if (static_cast<long long>(scratch->size_bytes()) < ScratchBytes(num_workers, slice_elements, wire)) {
    return Invalid("the second result, scratch, has " + std::to_string(scratch->size_bytes()) + " bytes: expected " +
                   std::to_string(ScratchBytes(num_workers, slice_elements, wire)));
  }
  void* communicator = nullptr;
  if (ffi::Error error =
          communicators.Get(replica_groups.begin(), replica_groups.size(), num_workers, &communicator);
      error.failure()) {
    return error;
  }
  return AsError(AllReduce(Request{static_cast<NcclComm>(communicator), stream, block.untyped_data(),
                                   out->untyped_data(), static_cast<const int*>(shift.untyped_data()),
                                   scratch->untyped_data(), static_cast<long long>(scratch->size_bytes()),
                                   slice_elements, static_cast<int>(num_workers), static_cast<int>(num_skipped),
                                   divisor, type, wire, time_limit_ms}));
}

// `text` as a JSON string.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + "\"";
}

std::string Failed(const Status& status) { return "{\"error\": " + Quoted(status.message()) + "}"; }

std::string ProbeCuda(int* driver_version) {
  const CudaApi* cuda = nullptr;
  if (const Status status = CudaApi::Load(&cuda); !status.ok()) return Failed(status);
  if (const Status status = cuda->Call(cuda->DriverGetVersion, driver_version); !status.ok()) return Failed(status);
  return "{\"path\": " + Quoted(cuda->path) + ", \"version\": \"" + std::to_string(*driver_version / 1000) + "." +
         std::to_string(*driver_version % 1000 / 10) + "\"}";
}

std::string ProbeNvrtc(int driver_version) {
  const NvrtcApi* nvrtc = nullptr;
  if (const Status status = NvrtcApi::Load(driver_version, &nvrtc); !status.ok()) return Failed(status);
  int major = 0;
  int minor = 0;
  if (const Status status = nvrtc->Call(nullptr, nvrtc->Version, &major, &minor); !status.ok()) return Failed(status);
  return "{\"path\": " + Quoted(nvrtc->path) + ", \"version\": \"" + std::to_string(major) + "." +
         std::to_string(minor) + "\"}";
}

std::string ProbeNccl() {
  const NcclApi* nccl = nullptr;
  if (const Status status = NcclApi::Load(&nccl); !status.ok()) return Failed(status);
  const std::string why = nccl->why_no_windows.empty() ? "null" : Quoted(nccl->why_no_windows);
  return "{\"path\": " + Quoted(nccl->path) + ", \"version\": \"" + NcclVersionText(nccl->version) +
         "\", \"no_windows\": " + why + "}";
}

// Copies `text` and a zero to `buffer` if they fit; returns how many bytes they take.
long long CopyOut(const std::string& text, char* buffer, long long size) {
  const long long needed = static_cast<long long>(text.size()) + 1;
  if (buffer != nullptr && size >= needed) std::memcpy(buffer, text.c_str(), needed);
  return needed;
}

XLA_FFI_DEFINE_HANDLER(PrepareHandler, Prepare,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                           .Ctx<Communicators>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<Stream>>()
                           .Ctx<Communicators>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::int64_t>("num_workers")
                           .Attr<std::int64_t>("num_skipped")
                           .Attr<std::int64_t>("divisor")
                           .Attr<std::int64_t>("wire_type")
                           .Attr<std::int64_t>("time_limit_ms")
                           .Attr<Ids>("replica_groups"));

}  // namespace
}  // namespace skipreduce::cuda

SKIPREDUCE_EXPORT XLA_FFI_Error* skipreduce_cuda_prepare(XLA_FFI_CallFrame* call_frame) {
  return skipreduce::cuda::PrepareHandler(call_frame);
}

SKIPREDUCE_EXPORT XLA_FFI_Error* skipreduce_cuda_execute(XLA_FFI_CallFrame* call_frame) {
  return skipreduce::cuda::ExecuteHandler(call_frame);
}

// The bytes of the second result. `wire` is a code of Element.
SKIPREDUCE_EXPORT long long skipreduce_cuda_scratch_bytes(long long num_workers, long long slice_elements, int wire) {
  return skipreduce::cuda::ScratchBytes(num_workers, slice_elements, static_cast<skipreduce::cuda::Element>(wire));
}

// Where to look for NVIDIA's libraries: folders, colon by colon. Before the first call.
SKIPREDUCE_EXPORT void skipreduce_cuda_set_library_folders(const char* folders) {
  skipreduce::cuda::SetLibraryFolders(folders);
}

// JSON: for each of "cuda", "nvrtc" and "nccl" its path and version, or the error. Of NCCL also "no_windows": why the
// kernels that reach other workers' memory cannot be used, or null. Returns the bytes that it takes, with a zero.
SKIPREDUCE_EXPORT long long skipreduce_cuda_probe(char* buffer, long long size) {
  using namespace skipreduce::cuda;
  int driver_version = 13000;  // without a driver: whichever NVRTC is there
  const std::string cuda = ProbeCuda(&driver_version);
  const std::string json =
      "{\"cuda\": " + cuda + ", \"nvrtc\": " + ProbeNvrtc(driver_version) + ", \"nccl\": " + ProbeNccl() + "}";
  return CopyOut(json, buffer, size);
}

// Compiles the kernels without a device. Returns 0, or the bytes that the error takes, which goes to `buffer`.
SKIPREDUCE_EXPORT long long skipreduce_cuda_compile(int architecture, int type, int wire, char* buffer,
                                                    long long size) {
  using namespace skipreduce::cuda;
  const Status status = CompileOnly(13000, architecture, static_cast<Element>(type), static_cast<Element>(wire));
  return status.ok() ? 0 : CopyOut(status.message(), buffer, size);
}
