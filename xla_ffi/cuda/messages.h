// How blocks on different GPUs wait for one another: counters in windows, queues of messages, a barrier. Every wait
// ends. The same lines run on the CPU in tests/native: kernel_on_cpu.h stands in for what only a CUDA compiler sees.

#ifndef SKIPREDUCE_CUDA_MESSAGES_H_
#define SKIPREDUCE_CUDA_MESSAGES_H_

#include "elementwise.h"
#include "kernel_params.h"

#ifdef __CUDACC__
// Strong operations of system scope, for counters that other GPUs write or read. A release by one thread, after a
// __syncthreads, covers what the whole block has done before; an acquire by one thread, before a __syncthreads, covers
// what the whole block does after it (causality order of the PTX memory model). It also empties the SM's L1, so plain
// loads of peers' data are right afterwards, but for ld.global.nc: a test looks that the compiler has made none.
__device__ inline unsigned long long LoadRelaxed(const unsigned long long* from) {
  unsigned long long value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline int LoadRelaxed(const int* from) {
  int value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline unsigned long long LoadAcquire(const unsigned long long* from) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline void StoreRelaxed(int* to, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ inline void StoreRelease(unsigned long long* to, unsigned long long value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

__device__ inline unsigned long long Nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void Pause() {}
#endif  // __CUDACC__

namespace skipreduce::cuda {

__device__ Channel* ChannelOf(const Window& w, int rank) {
  return reinterpret_cast<Channel*>(w.peers[rank] + w.channel_offset) + blockIdx.x;
}

// Whether `counter` gets to `at_least` in time: one thread of the block waits. It polls without order, which leaves the
// L1 cache of the other blocks alone, and acquires once. Ends early if another block of this worker has given up.
__device__ bool WaitFor(const Window& w, const Counter& counter, unsigned long long at_least) {
  unsigned long long start = 0;
  for (unsigned int polls = 1; LoadRelaxed(&counter.value) < at_least; ++polls) {
    Pause();
    if (polls % 64 != 0) continue;  // the clock is far away
    if (LoadRelaxed(w.failed) != 0) return false;
    const unsigned long long now = Nanoseconds();
    if (start == 0) start = now;
    if (now - start > w.time_limit_ns) {
      StoreRelaxed(w.failed, 1);
      return false;
    }
  }
  return LoadAcquire(&counter.value) >= at_least;
}

// A worker that has failed once is out of step with its neighbours for good.
__device__ bool HasFailed(const Window& w) { return __syncthreads_or(threadIdx.x == 0 && LoadRelaxed(w.failed) != 0); }

// This block's queues: messages come from the previous worker through slots in this worker's window, and go to the next
// worker through slots in its window. All threads hold the same counts.
class Queues {
 public:
  __device__ Queues(const Window& w, int previous, int rank, int next)
      : window_(w),
        previous_(ChannelOf(w, previous)),
        own_(ChannelOf(w, rank)),
        next_(ChannelOf(w, next)),
        incoming_(Slots(rank)),
        outgoing_(Slots(next)),
        sent_(own_->sent.value),
        taken_(own_->taken.value) {}

  // Waits for what the next hop needs. False if it did not come in time.
  __device__ bool Ready(bool receive, bool send) {
    bool ready = true;
    if (threadIdx.x == 0) {
      if (receive) ready = WaitFor(window_, own_->arrived, taken_ + 1);
      const unsigned long long depth = window_.slots_per_block;
      if (ready && send && sent_ >= depth) ready = WaitFor(window_, own_->freed, sent_ + 1 - depth);
    }
    return !__syncthreads_or(!ready);
  }

  __device__ const W* Incoming() const { return Slot(incoming_, taken_); }
  __device__ W* Outgoing() const { return Slot(outgoing_, sent_); }

  // Publishes what the block has stored, and gives back the slot that it has read. The release of `freed` also keeps
  // those reads before it.
  __device__ void Done(bool receive, bool send) {
    __syncthreads();
    sent_ += send;
    taken_ += receive;
    if (threadIdx.x != 0) return;
    if (send) StoreRelease(&next_->arrived.value, sent_);
    if (receive) StoreRelease(&previous_->freed.value, taken_);
  }

  // For the next launch. Every thread has read the old counts: a Ready or Done, or HasFailed, lies between.
  __device__ void Save() {
    if (threadIdx.x != 0) return;
    own_->sent.value = sent_;
    own_->taken.value = taken_;
  }

 private:
  __device__ char* Slots(int rank) const {
    const long long first = 1LL * blockIdx.x * window_.slots_per_block;
    return window_.peers[rank] + window_.slot_offset + first * window_.slot_bytes;
  }
  __device__ W* Slot(char* slots, unsigned long long message) const {
    return reinterpret_cast<W*>(slots + message % window_.slots_per_block * window_.slot_bytes);
  }

  const Window& window_;
  Channel* previous_;
  Channel* own_;
  Channel* next_;
  char* incoming_;
  char* outgoing_;
  unsigned long long sent_;
  unsigned long long taken_;
};

// Waits until this block has got here on all workers. False if one of them did not come in time. Thread t speaks with
// worker t (and t + blockDim.x).
__device__ bool Barrier(const Window& w, const Collective& c, unsigned long long epoch) {
  __syncthreads();  // what the block has stored and loaded comes before each thread's release
  for (int peer = threadIdx.x; peer < c.num_workers; peer += blockDim.x) {
    StoreRelease(&ChannelOf(w, peer)->barrier[c.rank].value, epoch);
  }
  bool ready = true;
  for (int peer = threadIdx.x; peer < c.num_workers; peer += blockDim.x) {
    ready = ready && WaitFor(w, ChannelOf(w, c.rank)->barrier[peer], epoch);
  }
  return !__syncthreads_or(!ready);
}

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_MESSAGES_H_
