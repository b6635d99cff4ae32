// What the host passes to the kernels, and the sizes that both work out. Shared by host code (a C++ compiler), kernels
// (NVRTC) and the kernels on the CPU (tests), so: no includes but ours, fixed sizes, no constructors.

#ifndef SKIPREDUCE_CUDA_KERNEL_PARAMS_H_
#define SKIPREDUCE_CUDA_KERNEL_PARAMS_H_

#include "../ring_schedule.h"

namespace skipreduce::cuda {

constexpr int kMaxWorkers = 64;         // of the kernels that reach peers; the ring over the host API has no limit
constexpr int kMaxBlocks = 32;          // blocks (channels) of one launch of those kernels
constexpr int kMaxThreads = 512;        // per block, of any kernel
constexpr int kVectorBytes = 16;        // what a thread loads or stores at once
constexpr int kMinMessageBytes = 4096;  // below, a message costs more in flags than in bytes (a guess, not measured)

// The arrays of one all-reduce. T is the dtype of the array, W what travels (T, or a narrower float).
struct Collective {
  const void* block;         // (N, S) T: this worker's slices
  void* out;                 // (N, S) T: the reduced slices, all of them; may be `block` itself
  const int* shift;          // c, any int32, on the device
  long long slice_elements;  // S
  int num_workers;           // N
  int num_skipped;           // k
  int rank;                  // of this worker
  int divide;                // 0: the plain sum; 1: multiply it with `reciprocal`
  float reciprocal;
};

// A part of a slice: elements begin .. begin+count-1.
struct Chunk {
  long long begin;
  long long count;
};

// What lies in each worker's window, for each block (channel) of the kernels. Counters only ever grow, in device
// memory, so that nothing has to be reset between launches and a CUDA graph may replay them. Each on a cache line of
// its own: `arrived`, `freed` and `barrier` are written by other workers. All zero before any worker's first launch.
struct alignas(128) Counter {
  unsigned long long value;
  unsigned long long padding[15];
};

struct Channel {
  Counter arrived;               // messages that the previous worker has put into this worker's slots
  Counter freed;                 // messages that the next worker has taken out of its slots
  Counter sent;                  // messages that this worker has put into the next worker's slots
  Counter taken;                 // messages that this worker has taken out of its own slots
  Counter epoch;                 // barriers that this worker has passed (direct form)
  Counter barrier[kMaxWorkers];  // barriers that each worker has arrived at (direct form), written by that worker
};

// The symmetric window of this communicator: the same layout on every worker, in every launch.
struct Window {
  char* peers[kMaxWorkers];  // where each worker's window is mapped here, by rank; multiples of 128
  long long channel_offset;  // bytes from the front to Channel[kMaxBlocks]; a multiple of 128
  long long slot_offset;     // to the slots of the ring: [kMaxBlocks][slots_per_block][slot_bytes]
  long long slot_bytes;      // not 0; this and the offsets are multiples of kVectorBytes
  int slots_per_block;       // D, even
  long long staged_offset;   // direct form: to this worker's input, N rows of RowBytes(S, sizeof(T)) by slice
  long long result_offset;   // direct form: to the reduced slices, N rows of RowBytes(S, sizeof(W)) by slice
  long long capacity;        // bytes of the window
  unsigned long long time_limit_ns;
  int* failed;  // 0 at first, set to 1 by a block that waited for longer, and left so. Device memory, or mapped host
                // memory
};

SKIPREDUCE_HOST_DEVICE constexpr long long CeilDivide(long long value, long long divisor) {
  return (value + divisor - 1) / divisor;
}

SKIPREDUCE_HOST_DEVICE constexpr long long RoundUp(long long value, long long multiple) {
  return CeilDivide(value, multiple) * multiple;
}

// Bytes from slice to slice in a window (direct form): every row begins at a multiple of kVectorBytes.
SKIPREDUCE_HOST_DEVICE constexpr long long RowBytes(long long slice_elements, int element_bytes) {
  return RoundUp(slice_elements * element_bytes, kVectorBytes);
}

// Elements of a chunk, the unit that travels in the ring in one kernel: what makes one group of D/2 chunks per block,
// but no less than is worth a message and no more than a slot holds. Whole vectors of W (and so of T, which is no
// narrower).
SKIPREDUCE_HOST_DEVICE constexpr long long ChunkElements(long long slice_elements, int num_blocks, int slots_per_block,
                                                         long long slot_bytes, int wire_bytes) {
  const long long per_vector = kVectorBytes / wire_bytes;
  const long long most = slot_bytes / kVectorBytes * per_vector;
  const long long least = kMinMessageBytes / wire_bytes;
  const long long even = RoundUp(CeilDivide(slice_elements, num_blocks * (slots_per_block / 2LL)), per_vector);
  const long long wanted = even < least ? least : even;
  return wanted < most ? wanted : most;
}

// Elements of each slice that one block takes in the direct form: whole vectors of W.
SKIPREDUCE_HOST_DEVICE constexpr long long ElementsPerBlock(long long slice_elements, int num_blocks, int wire_bytes) {
  return RoundUp(CeilDivide(slice_elements, num_blocks), kVectorBytes / wire_bytes);
}

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_KERNEL_PARAMS_H_
