// The part of NCCL that is used, by the declarations of nccl.h and nccl_device/core.h (2.29.2; 2.32.3 has the same,
// there in nccl_device/host.h).

#ifndef SKIPREDUCE_CUDA_NCCL_API_H_
#define SKIPREDUCE_CUDA_NCCL_API_H_

#include <cstddef>
#include <string>

#include "cuda_api.h"
#include "dynamic_library.h"
#include "status.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace skipreduce::cuda {

using NcclComm = ncclComm*;
using NcclWindow = ncclWindow_vidmem*;

// By value, as ncclTeamLsa returns it: the workers that reach each other's memory with loads and stores.
struct NcclTeam {
  int num_ranks;
  int rank;
  int stride;
};
static_assert(sizeof(NcclTeam) == 12, "ncclTeam is three ints");

constexpr int kNcclInProgress = 7;         // ncclInProgress: of communicators that do not block
constexpr int kNcclUint8 = 1;              // ncclUint8
constexpr int kNcclInt64 = 4;              // ncclInt64
constexpr int kNcclMin = 3;                // ncclMin
constexpr int kNcclWinCollSymmetric = 1;   // NCCL_WIN_COLL_SYMMETRIC
constexpr int kNcclWindowVersion = 22902;  // the first with ncclGetLsaDevicePointer on the host

struct NcclApi {
  Function<int*> GetVersion{"ncclGetVersion"};
  Function<NcclComm, int*> CommCount{"ncclCommCount"};
  Function<NcclComm, int*> CommUserRank{"ncclCommUserRank"};
  Function<NcclComm, int*> CommGetAsyncError{"ncclCommGetAsyncError"};
  Function<> GroupStart{"ncclGroupStart"};
  Function<> GroupEnd{"ncclGroupEnd"};
  Function<const void*, std::size_t, int, int, NcclComm, Stream> Send{"ncclSend"};
  Function<void*, std::size_t, int, int, NcclComm, Stream> Recv{"ncclRecv"};
  Function<const void*, void*, std::size_t, int, NcclComm, Stream> AllGather{"ncclAllGather"};
  Function<const void*, void*, std::size_t, int, int, NcclComm, Stream> AllReduce{"ncclAllReduce"};
  const char* (*GetErrorString)(int) = nullptr;
  const char* (*GetLastError)(NcclComm) = nullptr;

  // Of the kernels that reach peers. Null pointers where `why_no_windows` says why.
  Function<void**, std::size_t> MemAlloc{"ncclMemAlloc"};
  Function<void*> MemFree{"ncclMemFree"};
  Function<NcclComm, void*, std::size_t, NcclWindow*, int> CommWindowRegister{"ncclCommWindowRegister"};
  Function<NcclComm, NcclWindow> CommWindowDeregister{"ncclCommWindowDeregister"};
  Function<NcclWindow, std::size_t, int, void**> GetLsaDevicePointer{"ncclGetLsaDevicePointer"};
  NcclTeam (*TeamLsa)(NcclComm) = nullptr;

  int version = 0;  // as NCCL codes it: 22902 is 2.29.2
  std::string path;
  std::string why_no_windows;

  // Finds libnccl.so.2, once per process; tried again after a failure.
  static Status Load(const NcclApi** api);

  // Calls `function` outside of any group, and waits until NCCL has taken it where the communicator does not block.
  template <typename... Parameters, typename... Arguments>
  Status Call(NcclComm comm, const Function<Parameters...>& function, Arguments... arguments) const {
    return Finish(comm, function.name, function.pointer(arguments...), /*wait=*/true);
  }

  // Calls `function` inside a group: only the group's end can be waited for.
  template <typename... Parameters, typename... Arguments>
  Status CallInGroup(NcclComm comm, const Function<Parameters...>& function, Arguments... arguments) const {
    return Finish(comm, function.name, function.pointer(arguments...), /*wait=*/false);
  }

 private:
  Status Finish(NcclComm comm, const char* call, int result, bool wait) const;
};

// "2.29.2"
std::string NcclVersionText(int version);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_NCCL_API_H_
