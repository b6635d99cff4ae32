#include "nccl_api.h"

#include <chrono>
#include <mutex>
#include <thread>

namespace skipreduce::cuda {
namespace {

// How long NCCL may take to begin what it was asked for (to connect, say) on a communicator that does not block.
constexpr std::chrono::minutes kBeginLimit{10};

}  // namespace

Status NcclApi::Load(const NcclApi** api) {
  static std::mutex mutex;
  static NcclApi* loaded = nullptr;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    DynamicLibrary library;
    SKIPREDUCE_RETURN_IF_ERROR(DynamicLibrary::Open({"libnccl.so.2"}, &library));
    NcclApi a;
    a.GetErrorString = reinterpret_cast<const char* (*)(int)>(library.Find("ncclGetErrorString"));
    a.GetLastError = reinterpret_cast<const char* (*)(NcclComm)>(library.Find("ncclGetLastError"));
    SKIPREDUCE_RETURN_IF_ERROR(library.RequireAll(a.GetVersion, a.CommCount, a.CommUserRank, a.CommGetAsyncError,
                                                  a.GroupStart, a.GroupEnd, a.Send, a.Recv, a.AllGather, a.AllReduce));
    SKIPREDUCE_RETURN_IF_ERROR(a.Call(nullptr, a.GetVersion, &a.version));
    a.path = library.path();
    if (a.version < kNcclWindowVersion) {
      a.why_no_windows = "NCCL " + NcclVersionText(a.version) + " is older than " + NcclVersionText(kNcclWindowVersion);
    } else {
      const Status status = library.RequireAll(a.MemAlloc, a.MemFree, a.CommWindowRegister, a.CommWindowDeregister,
                                               a.GetLsaDevicePointer);
      a.TeamLsa = reinterpret_cast<NcclTeam (*)(NcclComm)>(library.Find("ncclTeamLsa"));
      if (!status.ok()) a.why_no_windows = status.message();
      if (a.TeamLsa == nullptr) a.why_no_windows = a.path + " has no function ncclTeamLsa";
    }
    loaded = new NcclApi(a);
  }
  *api = loaded;
  return Status();
}

Status NcclApi::Finish(NcclComm comm, const char* call, int result, bool wait) const {
  std::string when;
  if (result == kNcclInProgress && wait && comm != nullptr) {
    when = " (while in progress)";
    const auto limit = std::chrono::steady_clock::now() + kBeginLimit;
    int state = kNcclInProgress;
    while (state == kNcclInProgress) {
      const int asked = CommGetAsyncError.pointer(comm, &state);
      if (asked != 0) return Finish(comm, CommGetAsyncError.name, asked, /*wait=*/false);
      if (state == kNcclInProgress && std::chrono::steady_clock::now() > limit) {
        return Status(Code::kDeadlineExceeded, std::string(call) + " was not begun in 10 minutes");
      }
      if (state == kNcclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    result = state;
  }
  if (result == 0 || (result == kNcclInProgress && !wait)) return Status();
  std::string message = std::string(call) + " failed with " + std::to_string(result) + when + ", " +
                        (GetErrorString == nullptr ? "no text" : GetErrorString(result));
  const char* last = GetLastError == nullptr ? nullptr : GetLastError(comm);
  if (last != nullptr && *last != '\0') message += ": " + std::string(last);
  return Status(Code::kInternal, message);
}

std::string NcclVersionText(int version) {
  // NCCL_VERSION of nccl.h: X.Y.Z is X*1000 + Y*100 + Z up to 2.8, X*10000 + Y*100 + Z since.
  const int unit = version < 10000 ? 1000 : 10000;
  return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace skipreduce::cuda
