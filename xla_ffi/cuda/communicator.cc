#include "communicator.h"

#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "kernel_ring.h"

namespace skipreduce::cuda {
namespace {

// XLA keeps its communicators until the process ends, so neither are these given back before. Never destroyed: CUDA may
// be gone when the process ends. (Were XLA to make a new communicator where a destroyed one lay, it would be taken for
// that one. It does so only after a worker was lost and replaced, which ends the program.)
using Key = std::pair<NcclComm, Context>;
std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<Key, std::shared_ptr<Communicator>>& All() {
  static auto* all = new std::map<Key, std::shared_ptr<Communicator>>;
  return *all;
}

// What SKIPREDUCE_DEBUG prints.
std::string Describe(const Wishes& wishes, const Capability& capability) {
  const std::string asked = std::string("SKIPREDUCE_ALGORITHM=") + NameOf(wishes.algorithm);
  if (wishes.algorithm == Algorithm::kHost) return asked + ", the ring over ncclSend and ncclRecv";
  if (!capability.window && wishes.algorithm == Algorithm::kAuto) {
    return "the ring over ncclSend and ncclRecv (" + capability.why_not + ")";
  }
  if (!capability.window) return asked + " cannot be had (" + capability.why_not + ")";
  if (wishes.algorithm != Algorithm::kAuto) return asked + ", one kernel that reaches all workers";
  return "one kernel that reaches all workers: the direct form up to " + std::to_string(wishes.direct_bytes >> 20) +
         " MiB, the ring beyond";
}

// How far a worker has come on its own, which the least of all decides.
enum State : long long { kFailed = 0, kWithoutWindow = 1, kWithWindow = 2 };

}  // namespace

Status Communicator::Get(const CudaApi& cuda, const NcclApi& nccl, const Request& request,
                         std::shared_ptr<Communicator>* communicator) {
  Context context = nullptr;
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.StreamGetCtx, request.stream, &context));
  const Key key{request.comm, context};
  {
    const std::lock_guard lock(Mutex());
    auto& entry = All()[key];
    if (entry == nullptr) entry = std::make_shared<Communicator>(cuda, nccl, request.comm);
    *communicator = entry;
  }
  Status status;
  {
    // Not under the lock of the map: the other devices of this process have to get here too.
    const std::lock_guard lock((*communicator)->mutex);
    if (!(*communicator)->ready_) status = (*communicator)->SetUp(request);
  }
  if (!status.ok()) {
    const std::lock_guard lock(Mutex());
    All().erase(key);
    communicator->reset();
  }
  return status;
}

void ReleaseCommunicators() {
  const std::lock_guard lock(Mutex());
  All().clear();
}

Status Communicator::CheckNotFailed() const {
  if (window.failed == nullptr || *static_cast<volatile int*>(window.failed) == 0) return Status();
  return Status(Code::kDeadlineExceeded,
                "in an earlier all-reduce of this communicator a worker did not come within the time limit "
                "(SKIPREDUCE_TIMEOUT). The result is NaN on the workers that waited; the program cannot go on");
}

Status Communicator::SetUp(const Request& request) {
  int capturing = kStreamNotCapturing;
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.StreamIsCapturing, request.stream, &capturing));
  if (capturing != kStreamNotCapturing) {
    return Status(Code::kFailedPrecondition,
                  "the first call on a communicator cannot be captured into a CUDA graph");
  }
  const Status alone = SetUpAlone(request);

  // A window is registered by all workers or by none, and who waits for a worker that has failed would wait for ever.
  // So all tell how far they have come before anyone goes on, also if that is nowhere: two tiny all-reduces, once per
  // communicator. What is taken from the environment has to be the same as well.
  const long long wanted = static_cast<long long>(wishes.algorithm);
  const State state = !alone.ok() ? kFailed : wants_window_ ? kWithWindow : kWithoutWindow;
  long long values[] = {state, multiprocessors, wanted, -wanted, wishes.direct_bytes, -wishes.direct_bytes};
  const Status agreed = Agree(request, values, 6);
  SKIPREDUCE_RETURN_IF_ERROR(alone);
  SKIPREDUCE_RETURN_IF_ERROR(agreed);
  if (values[0] == kFailed) {
    return Status(Code::kFailedPrecondition, "another worker could not be set up, and says why");
  }
  if (values[2] != -values[3] || values[4] != -values[5]) {
    return Status(Code::kInvalidArgument,
                  "SKIPREDUCE_ALGORITHM or SKIPREDUCE_DIRECT_MIB differs between the workers");
  }
  multiprocessors = static_cast<int>(values[1]);
  capability.window = values[0] == kWithWindow;
  if (capability.window) {
    const Status registered = RegisterWindow();
    // This also is the barrier before the first kernel: every worker has zeroed its counters.
    long long value = registered.ok() ? kWithWindow : kWithoutWindow;
    SKIPREDUCE_RETURN_IF_ERROR(Agree(request, &value, 1));
    capability.window = value == kWithWindow;
    if (!registered.ok()) capability.why_not = registered.message();
  }
  if (!capability.window) {
    if (capability.why_not.empty()) capability.why_not = "another worker cannot, and says why with SKIPREDUCE_DEBUG=1";
    FreeWindow();
  }
  ready_ = true;
  if (IsDebugging()) {
    std::fprintf(stderr, "skipreduce: worker %d of %d, NCCL %s: %s\n", rank, size,
                 NcclVersionText(nccl.version).c_str(), Describe(wishes, capability).c_str());
  }
  return Status();
}

// All that needs no other worker.
Status Communicator::SetUpAlone(const Request& request) {
  SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.CommCount, comm, &size));
  SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.CommUserRank, comm, &rank));
  if (size != request.num_workers) {
    return Status(Code::kInternal, "the communicator has " + std::to_string(size) + " ranks, the call " +
                                       std::to_string(request.num_workers) + " workers");
  }
  int major = 0;
  int minor = 0;
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.CtxGetDevice, &device));
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.DeviceGetAttribute, &major, kComputeCapabilityMajor, device));
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.DeviceGetAttribute, &minor, kComputeCapabilityMinor, device));
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.DeviceGetAttribute, &multiprocessors, kMultiprocessorCount, device));
  architecture = 10 * major + minor;
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.StreamCreate, &side_stream, kStreamNonBlocking));
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.EventCreate, &forked, kEventDisableTiming));
  for (int i = 0; i < kMaxHostChunks; ++i) {
    SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.EventCreate, &received[i], kEventDisableTiming));
    SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.EventCreate, &added[i], kEventDisableTiming));
  }
  SKIPREDUCE_RETURN_IF_ERROR(ReadWishes(&wishes));

  NcclTeam team{};
  if (wishes.algorithm == Algorithm::kHost) {
    capability.why_not = "it was asked for";
  } else if (size == 1) {
    capability.why_not = "there is one worker";
  } else if (size > kMaxWorkers) {
    capability.why_not = std::to_string(size) + " workers are more than " + std::to_string(kMaxWorkers);
  } else if (!nccl.why_no_windows.empty()) {
    capability.why_not = nccl.why_no_windows;
  } else if (team = nccl.TeamLsa(comm); team.num_ranks != size) {
    capability.why_not = "only " + std::to_string(team.num_ranks) + " of " + std::to_string(size) +
                         " workers reach each other's memory";
  } else if (const Status made = MakeWindow(request); !made.ok()) {
    capability.why_not = made.message();
    FreeWindow();
  } else {
    wants_window_ = true;
  }
  return Status();
}

Status Communicator::MakeWindow(const Request& request) {
  window = WindowLayout(wishes.direct_bytes);
  void* flag = nullptr;
  // Memory of the host that kernels see: so a call looks at it without waiting for the device.
  SKIPREDUCE_RETURN_IF_ERROR(
      cuda.Call(cuda.MemHostAlloc, &flag, sizeof(int), kHostMemoryPortable | kHostMemoryDeviceMap));
  window.failed = static_cast<int*>(flag);
  *window.failed = 0;
  SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.MemAlloc, &window_memory_, window.capacity));
  SKIPREDUCE_RETURN_IF_ERROR(
      cuda.Call(cuda.MemsetD8Async, AsDevicePointer(window_memory_), 0, window.slot_offset, request.stream));
  return cuda.Call(cuda.StreamSynchronize, request.stream);
}

Status Communicator::RegisterWindow() {
  SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.CommWindowRegister, comm, window_memory_, window.capacity,
                                       &nccl_window_, kNcclWinCollSymmetric));
  if (nccl_window_ == nullptr) {
    return Status(Code::kInternal, "ncclCommWindowRegister gave no window (is NCCL_CUMEM_ENABLE=0 set?)");
  }
  for (int peer = 0; peer < size; ++peer) {
    // All ranks are in one team, so the rank in the team is the rank.
    void* pointer = nullptr;
    SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.GetLsaDevicePointer, nccl_window_, 0, peer, &pointer));
    if (pointer == nullptr) {
      return Status(Code::kInternal, "ncclGetLsaDevicePointer gave no pointer to the window of worker " +
                                         std::to_string(peer));
    }
    window.peers[peer] = static_cast<char*>(pointer);
  }
  return Status();
}

// Replaces each value with the least of all workers.
Status Communicator::Agree(const Request& request, long long* values, int count) const {
  const std::size_t bytes = count * sizeof(*values);
  const DevicePointer on_device = AsDevicePointer(request.scratch);
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.MemcpyHtoDAsync, on_device, values, bytes, request.stream));
  SKIPREDUCE_RETURN_IF_ERROR(nccl.Call(comm, nccl.AllReduce, request.scratch, request.scratch, count, kNcclInt64,
                                       kNcclMin, comm, request.stream));
  SKIPREDUCE_RETURN_IF_ERROR(cuda.Call(cuda.MemcpyDtoHAsync, values, on_device, bytes, request.stream));
  return cuda.Call(cuda.StreamSynchronize, request.stream);
}

void Communicator::FreeWindow() {
  if (nccl_window_ != nullptr) Report(nccl.Call(comm, nccl.CommWindowDeregister, comm, nccl_window_));
  if (window_memory_ != nullptr) Report(nccl.Call(comm, nccl.MemFree, window_memory_));
  if (window.failed != nullptr) Report(cuda.Call(cuda.MemFreeHost, window.failed));
  nccl_window_ = nullptr;
  window_memory_ = nullptr;
  window = Window{};
}

Communicator::~Communicator() {
  FreeWindow();
  for (int i = 0; i < kMaxHostChunks; ++i) {
    if (received[i] != nullptr) Report(cuda.Call(cuda.EventDestroy, received[i]));
    if (added[i] != nullptr) Report(cuda.Call(cuda.EventDestroy, added[i]));
  }
  if (forked != nullptr) Report(cuda.Call(cuda.EventDestroy, forked));
  if (side_stream != nullptr) Report(cuda.Call(cuda.StreamDestroy, side_stream));
}

}  // namespace skipreduce::cuda
