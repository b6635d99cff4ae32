// What xla_ffi/cuda/kernels.cu needs of CUDA, for a C++ compiler: one OS thread stands for each thread of a block. It
// shows the schedule, the roundings and the protocol, and ThreadSanitizer sees what no flag orders; GPU's memory it is
// not.

#ifndef SKIPREDUCE_TESTS_NATIVE_KERNEL_ON_CPU_H_
#define SKIPREDUCE_TESTS_NATIVE_KERNEL_ON_CPU_H_

#include <sched.h>
#include <time.h>

#include <atomic>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct Coordinate {
  unsigned int x;
};
inline thread_local Coordinate threadIdx{0}, blockIdx{0}, blockDim{1}, gridDim{1};

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

// A barrier that also tells whether any of its threads said yes.
class ThreadBarrier {
 public:
  explicit ThreadBarrier(unsigned int num_threads) : num_threads_(num_threads) {}

  int Wait(int predicate = 0) {
    const unsigned int generation = generation_.load(std::memory_order_relaxed);
    if (predicate) any_[generation % 2].store(1, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      any_[(generation + 1) % 2].store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
    } else {
      while (generation_.load(std::memory_order_acquire) == generation) sched_yield();
    }
    return any_[generation % 2].load(std::memory_order_relaxed);
  }

 private:
  const unsigned int num_threads_;
  std::atomic<unsigned int> arrived_{0};
  std::atomic<unsigned int> generation_{0};
  std::atomic<int> any_[2] = {{0}, {0}};
};

inline thread_local ThreadBarrier* block_barrier = nullptr;  // null: a block of one thread

inline int __syncthreads_or(int predicate) { return block_barrier ? block_barrier->Wait(predicate) : predicate; }
inline void __syncthreads() { __syncthreads_or(0); }

// Operations, not fences: ThreadSanitizer does not understand fences.
inline unsigned long long LoadRelaxed(const unsigned long long* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline int LoadRelaxed(const int* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline unsigned long long LoadAcquire(const unsigned long long* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void StoreRelaxed(int* to, int value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
inline void StoreRelease(unsigned long long* to, unsigned long long value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

// Through a pointer whose type tells UndefinedBehaviorSanitizer what alignment they need on a GPU.
inline uint4 LoadVector(const void* from) { return *static_cast<const uint4*>(from); }
inline void StoreVector(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

inline unsigned long long Nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1000000000ull * now.tv_sec + now.tv_nsec;
}

inline void Pause() { sched_yield(); }

#endif  // SKIPREDUCE_TESTS_NATIVE_KERNEL_ON_CPU_H_
