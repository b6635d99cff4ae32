#include "host_ring.h"

#include <algorithm>

#include "../ring_schedule.h"
#include "kernel_params.h"
#include "kernel_ring.h"

namespace skipreduce::cuda {
namespace {

constexpr long long kMinChunkBytes = 1 << 20;  // a group of send and receive costs some 10 us. Not measured
constexpr long long kElementsPerThread = 16;

class HostRing {
 public:
  HostRing(const Communicator& communicator, const Kernels& kernels, const Request& request)
      : c_(communicator), cuda_(communicator.cuda), nccl_(communicator.nccl), kernels_(kernels), request_(request),
        collective_(CollectiveOf(request, communicator.rank)),
        schedule_{request.num_workers, request.num_skipped, /*shift=*/0},  // neighbours do not depend on the shift
        wire_bytes_(SizeOf(request.wire)),
        slice_bytes_(request.slice_elements * wire_bytes_) {
    // `gathered` holds (N, S) W by rank. Before the all-gather only two of its rows are in use: the worker's own, where
    // the total lies that it sends next, and its neighbour's, for what arrives. The last sum is written where
    // ncclAllGather, in place, expects it.
    gathered_ = static_cast<char*>(request.scratch);
    total_ = gathered_ + c_.rank * slice_bytes_;
    arriving_ = gathered_ + schedule_.Next(c_.rank) * slice_bytes_;
    const long long wanted = std::clamp<long long>(slice_bytes_ / kMinChunkBytes, 1, kMaxHostChunks);
    chunk_elements_ = RoundUp(CeilDivide(request.slice_elements, wanted), kVectorBytes);
    num_chunks_ = static_cast<int>(CeilDivide(request.slice_elements, chunk_elements_));
  }

  Status Run() {
    const int first_step = request_.num_skipped;
    const int last_step = request_.num_workers - 2;
    if (first_step > last_step) {
      SKIPREDUCE_RETURN_IF_ERROR(Launch(kernels_.finish_own, Whole(), total_));
    } else {
      SKIPREDUCE_RETURN_IF_ERROR(Launch(kernels_.first, Whole(), total_));
      // With one chunk there is nothing to overlap, so nothing to hand to and fro.
      const Status status = num_chunks_ == 1 ? ReduceInOrder() : ReduceOverlapped();
      SKIPREDUCE_RETURN_IF_ERROR(status);
    }
    SKIPREDUCE_RETURN_IF_ERROR(nccl_.Call(c_.comm, nccl_.AllGather, total_, gathered_, slice_bytes_, kNcclUint8,
                                          c_.comm, request_.stream));
    const void* gathered = gathered_;
    void* parameters[] = {&collective_, &gathered};
    return cuda_.Launch(kernels_.place, NumBlocks(request_.num_workers * request_.slice_elements), kMaxThreads,
                        request_.stream, parameters);
  }

 private:
  Status ReduceInOrder() {
    for (int step = request_.num_skipped; step <= request_.num_workers - 2; ++step) {
      SKIPREDUCE_RETURN_IF_ERROR(Exchange(Whole()));
      SKIPREDUCE_RETURN_IF_ERROR(Add(Whole(), step, request_.stream));
    }
    return Status();
  }

  // NCCL works on the request's stream, the additions on another one: while chunk i of a step is added, chunk i+1 of
  // the same step travels, after the last one chunk 0 of the next step. Chunk i travels again when its addition has
  // been done: then the sum is there to be sent, and what had arrived may be overwritten.
  Status ReduceOverlapped() {
    SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.EventRecord, c_.forked, request_.stream));
    SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.StreamWaitEvent, c_.side_stream, c_.forked, 0));
    const Status status = EnqueueOverlapped();
    // Also after an error: XLA takes the buffers back when its own stream is done.
    SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.EventRecord, c_.forked, c_.side_stream));
    SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.StreamWaitEvent, request_.stream, c_.forked, 0));
    return status;
  }

  Status EnqueueOverlapped() {
    for (int step = request_.num_skipped; step <= request_.num_workers - 2; ++step) {
      for (int i = 0; i < num_chunks_; ++i) {
        if (step > request_.num_skipped) {
          SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.StreamWaitEvent, request_.stream, c_.added[i], 0));
        }
        SKIPREDUCE_RETURN_IF_ERROR(Exchange(ChunkAt(i)));
        SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.EventRecord, c_.received[i], request_.stream));
        SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.StreamWaitEvent, c_.side_stream, c_.received[i], 0));
        SKIPREDUCE_RETURN_IF_ERROR(Add(ChunkAt(i), step, c_.side_stream));
        SKIPREDUCE_RETURN_IF_ERROR(cuda_.Call(cuda_.EventRecord, c_.added[i], c_.side_stream));
      }
    }
    return Status();
  }

  // One group: a chunk of the total goes to the next worker while the previous worker's comes in.
  Status Exchange(Chunk chunk) {
    const long long offset = chunk.begin * wire_bytes_;
    const std::size_t bytes = chunk.count * wire_bytes_;
    SKIPREDUCE_RETURN_IF_ERROR(nccl_.CallInGroup(c_.comm, nccl_.GroupStart));
    Status status = nccl_.CallInGroup(c_.comm, nccl_.Send, total_ + offset, bytes, kNcclUint8,
                                      schedule_.Next(c_.rank), c_.comm, request_.stream);
    if (status.ok()) {
      status = nccl_.CallInGroup(c_.comm, nccl_.Recv, arriving_ + offset, bytes, kNcclUint8,
                                 schedule_.Previous(c_.rank), c_.comm, request_.stream);
    }
    // A group that was begun has to be ended, or the thread's next NCCL call would be part of it.
    const Status ended = nccl_.Call(c_.comm, nccl_.GroupEnd);
    return status.ok() ? ended : status;
  }

  Status Add(Chunk chunk, int step, Stream stream) {
    const void* received = arriving_;
    void* send = total_;
    void* parameters[] = {&collective_, &chunk, &step, &received, &send};
    return cuda_.Launch(kernels_.add, NumBlocks(chunk.count), kMaxThreads, stream, parameters);
  }

  Status Launch(Kernel kernel, Chunk chunk, void* send) {
    void* parameters[] = {&collective_, &chunk, &send};
    return cuda_.Launch(kernel, NumBlocks(chunk.count), kMaxThreads, request_.stream, parameters);
  }

  Chunk Whole() const { return {0, request_.slice_elements}; }
  Chunk ChunkAt(int i) const {
    const long long begin = i * chunk_elements_;
    return {begin, std::min(chunk_elements_, request_.slice_elements - begin)};
  }

  int NumBlocks(long long num_elements) const {
    const long long most = 4LL * std::max(1, c_.multiprocessors);
    return static_cast<int>(std::clamp<long long>(CeilDivide(num_elements, kElementsPerThread * kMaxThreads), 1, most));
  }

  const Communicator& c_;
  const CudaApi& cuda_;
  const NcclApi& nccl_;
  const Kernels& kernels_;
  const Request& request_;
  Collective collective_;
  const RingSchedule schedule_;
  const int wire_bytes_;
  const long long slice_bytes_;
  char* gathered_;
  char* total_;
  char* arriving_;
  long long chunk_elements_;
  int num_chunks_;
};

}  // namespace

Status RunHostRing(const Communicator& communicator, const Kernels& kernels, const Request& request) {
  return HostRing(communicator, kernels, request).Run();
}

}  // namespace skipreduce::cuda
