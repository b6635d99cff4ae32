// What is kept of each communicator of XLA's between calls: who this worker is, a second stream, and the window through
// which the kernels reach the other workers.

#ifndef SKIPREDUCE_CUDA_COMMUNICATOR_H_
#define SKIPREDUCE_CUDA_COMMUNICATOR_H_

#include <memory>
#include <mutex>

#include "all_reduce.h"
#include "choose.h"
#include "cuda_api.h"
#include "kernel_params.h"
#include "nccl_api.h"
#include "status.h"

namespace skipreduce::cuda {

constexpr int kMaxHostChunks = 8;

class Communicator {
 public:
  Communicator(const CudaApi& cuda, const NcclApi& nccl, NcclComm comm) : cuda(cuda), nccl(nccl), comm(comm) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  // The communicator of a request, set up with the other workers if this is its first call: a collective that waits for
  // them. After an error the next call tries again, as on the other workers.
  static Status Get(const CudaApi& cuda, const NcclApi& nccl, const Request& request,
                    std::shared_ptr<Communicator>* communicator);

  // An error if a kernel has given up waiting for a worker: the counters in the window are of no use after that.
  Status CheckNotFailed() const;

  const CudaApi& cuda;
  const NcclApi& nccl;
  const NcclComm comm;
  std::mutex mutex;  // held while a call is enqueued

  int size = 0;
  int rank = 0;
  int device = 0;
  int architecture = 0;      // 90 for compute capability 9.0
  int multiprocessors = 0;   // the fewest of all workers
  Wishes wishes;
  Capability capability;
  Window window{};           // of the kernels, if `capability.window`

  // Of the ring over the host API.
  Stream side_stream = nullptr;
  Event forked = nullptr;
  Event received[kMaxHostChunks] = {};
  Event added[kMaxHostChunks] = {};

 private:
  Status SetUp(const Request& request);
  Status SetUpAlone(const Request& request);
  Status MakeWindow(const Request& request);
  Status RegisterWindow();
  Status Agree(const Request& request, long long* values, int count) const;
  void FreeWindow();

  bool ready_ = false;
  bool wants_window_ = false;
  void* window_memory_ = nullptr;    // of ncclMemAlloc
  NcclWindow nccl_window_ = nullptr;
};

// Forgets all communicators, for tests.
void ReleaseCommunicators();

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_COMMUNICATOR_H_
