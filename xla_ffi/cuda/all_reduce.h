// One all-reduce with skipping on one GPU of a communicator: what the handler asks for, and the step that does it.

#ifndef SKIPREDUCE_CUDA_ALL_REDUCE_H_
#define SKIPREDUCE_CUDA_ALL_REDUCE_H_

#include <string>

#include "cuda_api.h"
#include "nccl_api.h"
#include "status.h"

namespace skipreduce::cuda {

// The codes that the kernels are compiled with (-D SKIPREDUCE_T, -D SKIPREDUCE_W).
enum class Element : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int SizeOf(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// What one worker hands in. All workers of the communicator give the same numbers, and a shift of the same value.
struct Request {
  NcclComm comm;
  Stream stream;
  const void* block;          // (N, S) T, on the device
  void* out;                  // (N, S) T
  const int* shift;           // c, on the device
  void* scratch;              // ScratchBytes(N, S, W), on the device
  long long scratch_bytes;
  long long slice_elements;   // S
  int num_workers;            // N
  int num_skipped;            // k
  long long divisor;          // 0: the plain sum
  Element type;               // T
  Element wire;               // W
  long long time_limit_ms;
};

// Enqueues the all-reduce on the request's stream. The first call on a communicator waits for the other workers.
Status AllReduce(const Request& request);

// Bytes of scratch that any of the algorithms needs: all slices as they travel, and room for what workers agree on.
constexpr long long ScratchBytes(long long num_workers, long long slice_elements, Element wire) {
  const long long bytes = num_workers * slice_elements * SizeOf(wire);
  return bytes < 256 ? 256 : bytes;
}

// Gives back all that is kept between calls, for tests: no communicator may be used while or after it is destroyed.
void ReleaseAll();

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_ALL_REDUCE_H_
