// XLA's FFI extension for collectives, by the declarations of xla/ffi/api/c_api.h and collectives_c_api.h in jaxlib
// 0.11.2 (API 0.4, extension 0.1) and 0.12.0 (API 0.5, extension 0.2, which appends to the structs).
//
// Declared here because those headers do not exist before jaxlib 0.11, and the library is to be built against the
// oldest headers that the package supports (jaxlib 0.10, API 0.3). XLA takes a handler if
//     oldest supported API <= API of the headers that the handler was built with <= API of the running XLA
// (the oldest is 0.1 in 0.11.2), so what is built with the oldest headers runs everywhere, and this extension is looked
// for at run time. Where it is missing, the call gives an error that says which jaxlib has it.
//
// Ranks. XLA's communicator has its ranks in the order of the ids in the replica group that it was requested for: the
// clique's key keeps the devices in that order (GetGpuCliqueKey takes what GetParticipatingDevices returns; only the
// list of all groups is sorted), and XLA:GPU's own all-gather and reduce-scatter are bare ncclAllGather and
// ncclReduceScatter, which are only right if rank i is position i of the group. So Python gives groups in the order of
// lax.axis_index, and ncclCommUserRank is this worker's number.

#ifndef SKIPREDUCE_CUDA_COLLECTIVES_EXTENSION_H_
#define SKIPREDUCE_CUDA_COLLECTIVES_EXTENSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace skipreduce::cuda {

namespace extension {

constexpr std::int64_t kCollectivesType = 129;  // XLA_FFI_Extension_Collectives
constexpr std::int32_t kMajorVersion = 0;
constexpr std::int32_t kMinorVersion = 1;       // the first one; later ones append
constexpr int kFlattenedId = 3;                 // XLA_FFI_GROUP_FLATTENED_ID

// XLA_FFI_ExtensionId, XLA_FFI_Extension
struct Id {
  std::int64_t type;
  std::int32_t major_version;
  std::int32_t minor_version;
};
struct Header {
  std::size_t struct_size;
  Id id;
  const Header* next;
};

// XLA_FFI_InvokeContext_FindExtension_Args
struct FindArgs {
  std::size_t struct_size;
  void* extension_start;
  void* context;
  std::int64_t type;
  const Header* extension;  // out
};
using Find = XLA_FFI_Error*(FindArgs*);

// XLA_FFI_ReplicaGroup
struct ReplicaGroup {
  const std::int64_t* ids;
  std::size_t size;
};

// XLA_FFI_Communicator_Request_Args
struct RequestArgs {
  std::size_t struct_size;
  void* extension_start;
  int group_mode;
  const ReplicaGroup* groups;
  std::size_t num_groups;
  std::int64_t communication_id;
};

// XLA_FFI_Communicator_Get_Args
struct GetArgs {
  std::size_t struct_size;
  void* extension_start;
  int group_mode;
  const ReplicaGroup* groups;
  std::size_t num_groups;
  std::int64_t communication_id;
  void* communicator;  // out
};

// XLA_FFI_Collectives_Extension, version 0.1
struct Collectives {
  Header header;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const Collectives* self, RequestArgs* args);
  XLA_FFI_Error* (*get_communicator)(const Collectives* self, GetArgs* args);
};

static_assert(sizeof(Header) == 32 && sizeof(FindArgs) == 40 && sizeof(ReplicaGroup) == 16, "as in c_api.h");
static_assert(sizeof(RequestArgs) == 48 && sizeof(GetArgs) == 56 && sizeof(Collectives) == 56,
              "as in collectives_c_api.h");

// Where XLA_FFI_Api has XLA_FFI_InvokeContext_FindExtension: behind its last member of API 0.3, since API 0.4.
constexpr std::size_t kFindOffset = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*);
static_assert(kFindOffset == 192, "as in c_api.h");

}  // namespace extension

// What the handlers get from XLA of the collectives: never null where XLA has the extension.
class Communicators {
 public:
  Communicators() = default;
  Communicators(const XLA_FFI_Api* api, const extension::Collectives* collectives)
      : api_(api), collectives_(collectives) {}

  bool available() const { return collectives_ != nullptr; }

  // Prepare stage: has XLA make the communicator of the group that this device is in. `ids` are flattened device ids,
  // by rows of `group_size`.
  xla::ffi::Error Request(const std::int64_t* ids, std::size_t num_ids, std::size_t group_size) const {
    const std::vector<extension::ReplicaGroup> groups = Groups(ids, num_ids, group_size);
    extension::RequestArgs args = {sizeof(args), nullptr, extension::kFlattenedId, groups.data(), groups.size(), 0};
    return Taken(collectives_->request_communicator(collectives_, &args));
  }

  // Execute stage: XLA's own communicator, an ncclComm_t.
  xla::ffi::Error Get(const std::int64_t* ids, std::size_t num_ids, std::size_t group_size, void** communicator) const {
    const std::vector<extension::ReplicaGroup> groups = Groups(ids, num_ids, group_size);
    extension::GetArgs args = {sizeof(args),  nullptr,       extension::kFlattenedId, groups.data(),
                               groups.size(), /*id=*/0, nullptr};
    xla::ffi::Error error = Taken(collectives_->get_communicator(collectives_, &args));
    *communicator = args.communicator;
    return error;
  }

 private:
  // The id of the communication is 0, that of XLA's own collectives, so XLA makes no further communicator for us. NCCL
  // orders what different streams do on one communicator, by the order of the calls, which is that of the program.
  static std::vector<extension::ReplicaGroup> Groups(const std::int64_t* ids, std::size_t num_ids,
                                                     std::size_t group_size) {
    std::vector<extension::ReplicaGroup> groups;
    for (std::size_t begin = 0; begin < num_ids; begin += group_size) groups.push_back({ids + begin, group_size});
    return groups;
  }

  xla::ffi::Error Taken(XLA_FFI_Error* error) const {
    if (error == nullptr) return xla::ffi::Error::Success();
    const std::string message = xla::ffi::internal::GetErrorMessage(api_, error);
    xla::ffi::internal::DestroyError(api_, error);
    return xla::ffi::Error::Internal("skipreduce: XLA's communicator: " + message);
  }

  const XLA_FFI_Api* api_ = nullptr;
  const extension::Collectives* collectives_ = nullptr;
};

}  // namespace skipreduce::cuda

namespace xla::ffi {

// Lets a handler bind `Ctx<skipreduce::cuda::Communicators>()`. Missing is no error here, so that the handler can say
// what to do about it.
template <>
struct CtxDecoding<skipreduce::cuda::Communicators> {
  using Type = skipreduce::cuda::Communicators;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx, DiagnosticEngine&) {
    namespace extension = skipreduce::cuda::extension;
    if (api->struct_size < extension::kFindOffset + sizeof(void*)) return Type();
    extension::Find* find = nullptr;
    __builtin_memcpy(&find, reinterpret_cast<const char*>(api) + extension::kFindOffset, sizeof(find));
    if (find == nullptr) return Type();
    extension::FindArgs args = {sizeof(args), nullptr, ctx, extension::kCollectivesType, nullptr};
    if (XLA_FFI_Error* error = find(&args)) {
      internal::DestroyError(api, error);
      return Type();
    }
    const extension::Header* found = args.extension;
    if (found == nullptr || found->struct_size < sizeof(extension::Collectives) ||
        found->id.major_version != extension::kMajorVersion || found->id.minor_version < extension::kMinorVersion) {
      return Type();
    }
    return Type(api, reinterpret_cast<const extension::Collectives*>(found));
  }
};

}  // namespace xla::ffi

#endif  // SKIPREDUCE_CUDA_COLLECTIVES_EXTENSION_H_
