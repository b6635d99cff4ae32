// The ring with skipping: which slice a worker sends, receives and ends up owning (Algorithm 2 of the paper, with
// the shift of its section 4.3). The same arithmetic as jax_skipreduce/_topologies/ring.py; a test compares the two.
//
// For host and device, without any include, so that NVRTC and a C++ compiler take the same lines.

#ifndef SKIPREDUCE_RING_SCHEDULE_H_
#define SKIPREDUCE_RING_SCHEDULE_H_

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define SKIPREDUCE_HOST_DEVICE __host__ __device__
#else
#define SKIPREDUCE_HOST_DEVICE
#endif

namespace skipreduce {

// The modulo whose result is never negative.
SKIPREDUCE_HOST_DEVICE constexpr int Modulo(long long value, int num_workers) {
  return static_cast<int>(((value % num_workers) + num_workers) % num_workers);
}

// The ring of `num_workers` = N workers that leaves out its first `num_skipped` = k reduce-scatter steps and adds
// `shift` = c to every slice index. Slice j is reduced over the workers j-c+k, .., j-c+N-1 (mod N).
struct RingSchedule {
  int num_workers;
  int num_skipped;
  int shift;

  // The neighbour that `rank` sends to in every step, and the one it receives from.
  SKIPREDUCE_HOST_DEVICE constexpr int Next(int rank) const { return Modulo(rank + 1LL, num_workers); }
  SKIPREDUCE_HOST_DEVICE constexpr int Previous(int rank) const { return Modulo(rank - 1LL, num_workers); }

  // The slice that `rank` sends in reduce-scatter step `step`, k..N-2.
  SKIPREDUCE_HOST_DEVICE constexpr int SliceToSend(int rank, int step) const {
    return Modulo(0LL + rank - step + shift, num_workers);
  }

  // The slice that `rank` receives in reduce-scatter step `step`, and adds its own to.
  SKIPREDUCE_HOST_DEVICE constexpr int SliceToReceive(int rank, int step) const {
    return Modulo(0LL + rank - step - 1 + shift, num_workers);
  }

  // The slice that `rank` holds, reduced, when the reduce-scatter ends.
  SKIPREDUCE_HOST_DEVICE constexpr int OwnedSlice(int rank) const {
    return Modulo(1LL + rank + shift, num_workers);
  }

  // The rank that holds slice `slice`, reduced, when the reduce-scatter ends.
  SKIPREDUCE_HOST_DEVICE constexpr int Owner(int slice) const { return Modulo(-1LL + slice - shift, num_workers); }

  // How many workers are in the sum of each slice.
  SKIPREDUCE_HOST_DEVICE constexpr int NumContributors() const { return num_workers - num_skipped; }

  // The rank that is number `position` (0..N-k-1) in the chain of additions of slice `slice`; the last one owns it.
  SKIPREDUCE_HOST_DEVICE constexpr int Contributor(int slice, int position) const {
    return Modulo(0LL + slice - shift + num_skipped + position, num_workers);
  }
};

// Elements of one slice of a vector of `num_elements`, the last one padded.
SKIPREDUCE_HOST_DEVICE constexpr long long SliceSize(long long num_elements, int num_workers) {
  return (num_elements + num_workers - 1) / num_workers;
}

}  // namespace skipreduce

#endif  // SKIPREDUCE_RING_SCHEDULE_H_
