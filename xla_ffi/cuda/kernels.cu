// The kernels of the skipping ring on NVIDIA GPUs: docs/design/kernels.md has the protocol, and why it ends.
//
// Compiled by NVRTC at first use, one module per (T, W): -D SKIPREDUCE_T=, SKIPREDUCE_W= of 0 float32, 1 bfloat16,
// 2 float16; W = T, or narrower where T is float32. Options: --std=c++17, --fmad=false (the ring adds and multiplies
// apart), --device-as-default-execution-space (lambdas). The grid is one-dimensional, 32 .. 512 threads in each block.
//
// One communicator's launches of skr_ring and skr_direct follow one another on each worker, in the same order on all of
// them, with the same grid and Collective but for rank and pointers. All blocks of a launch have to run at once.

#include "elementwise.h"
#include "kernel_params.h"
#include "messages.h"

namespace skipreduce::cuda {

__device__ T* Staged(const Window& w, const Collective& c, int rank, int slice, long long begin) {
  const long long row = slice * RowBytes(c.slice_elements, sizeof(T));
  return reinterpret_cast<T*>(w.peers[rank] + w.staged_offset + row) + begin;
}

__device__ W* Result(const Window& w, const Collective& c, int rank, int slice, long long begin) {
  const long long row = slice * RowBytes(c.slice_elements, sizeof(W));
  return reinterpret_cast<W*>(w.peers[rank] + w.result_offset + row) + begin;
}

// The slice that this worker owns, out of its contributors' windows, rounded where the ring would have sent it.
__device__ void ReduceDirectly(const Collective& c, const Window& w, const RingSchedule& schedule, long long begin,
                               long long count) {
  const int slice = schedule.OwnedSlice(c.rank);
  const int first = schedule.Contributor(slice, 0);
  const int num_others = schedule.NumContributors() - 1;  // this worker is the last one in the chain
  const T* own = Own(c, slice, begin);
  T* out = Out(c, slice, begin);
  auto load = [&](auto width, long long i) {
    constexpr int n = width.width;
    float totals[n] = {};
    int rank = first;
#pragma unroll 4
    for (int position = 0; position < num_others; ++position) {
      const auto part = Load<n>(Staged(w, c, rank, slice, begin) + i);
      for (int e = 0; e < n; ++e) {
        const float total = position == 0 ? part.at[e].ToFloat() : totals[e] + part.at[e].ToFloat();
        totals[e] = W::FromFloat(total).ToFloat();
      }
      rank = rank + 1 == c.num_workers ? 0 : rank + 1;
    }
    const auto part = Load<n>(own + i);
    Values<W, n> sums;
    for (int e = 0; e < n; ++e) {
      const float total = num_others == 0 ? part.at[e].ToFloat() : totals[e] + part.at[e].ToFloat();
      sums.at[e] = W::FromFloat(Finished(c, total));
    }
    return sums;
  };
  auto store = [&](auto width, long long i, const auto& sums) {
    Values<T, width.width> results;
    for (int e = 0; e < width.width; ++e) results.at[e] = T::FromFloat(sums.at[e].ToFloat());
    Store(out + i, results);
    int rank = c.rank;
#pragma unroll 1
    for (int others = c.num_workers - 1; others > 0; --others) {  // each worker begins with another one
      rank = rank + 1 == c.num_workers ? 0 : rank + 1;
      Store(Result(w, c, rank, slice, begin) + i, sums);
    }
  };
  // One pack at a time: here the loads ahead are those of the next contributors.
  ForEach<1>(OfBlock(), count, Aligned(own, out), load, store);
}

}  // namespace skipreduce::cuda

using skipreduce::cuda::Chunk;
using skipreduce::cuda::Collective;
using skipreduce::cuda::kMaxThreads;
using skipreduce::cuda::T;
using skipreduce::cuda::W;
using skipreduce::cuda::Window;

// The ring over the host API, step by step. `send` and `received` begin where the slice does; any grid.

// What a worker sends first: its own part of the slice of step k (k < N-1).
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_first(const __grid_constant__ Collective c, const __grid_constant__ Chunk chunk, W* send) {
  using namespace skipreduce::cuda;
  const int slice = Schedule(c).SliceToSend(c.rank, c.num_skipped);
  Reduce(c, OfGrid(), chunk.count, false, nullptr, Own(c, slice, chunk.begin), send + chunk.begin, nullptr);
}

// What a worker makes of what it received in reduce-scatter step `step`: what it sends in the next one, or, after the
// last one (N-2), what it sends into the all-gather.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_add(const __grid_constant__ Collective c, const __grid_constant__ Chunk chunk, int step, const W* received,
            W* send) {
  using namespace skipreduce::cuda;
  const T* own = Own(c, Schedule(c).SliceToReceive(c.rank, step), chunk.begin);
  const bool last = step == c.num_workers - 2;
  Reduce(c, OfGrid(), chunk.count, last, received + chunk.begin, own, send + chunk.begin, nullptr);
}

// k = N-1, no reduce-scatter step: the slice that this worker owns goes into the all-gather.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_finish_own(const __grid_constant__ Collective c, const __grid_constant__ Chunk chunk, W* send) {
  using namespace skipreduce::cuda;
  const T* own = Own(c, Schedule(c).OwnedSlice(c.rank), chunk.begin);
  Reduce(c, OfGrid(), chunk.count, true, nullptr, own, send + chunk.begin, nullptr);
}

// After the all-gather: `gathered` is (N, S) by rank, `out` is by slice.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_place(const __grid_constant__ Collective c, const W* gathered) {
  using namespace skipreduce::cuda;
  const skipreduce::RingSchedule schedule = Schedule(c);
  for (int rank = 0; rank < c.num_workers; ++rank) {
    const W* received = gathered + rank * c.slice_elements;
    Place(OfGrid(), c.slice_elements, received, nullptr, Out(c, schedule.OwnedSlice(rank), 0));
  }
}

// The ring in one kernel. Block b takes chunks b, b + gridDim.x, .. of every slice, in groups of D/2, and goes through
// all hops of a group, each fused with the receive before it: hop k-1 only sends, hops k .. N-2 are the reduce-scatter
// steps, hops N-1 .. 2N-3 the all-gather. The slice of a hop is the same arithmetic in all of them.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_ring(const __grid_constant__ Collective c, const __grid_constant__ Window w) {
  using namespace skipreduce::cuda;
  const skipreduce::RingSchedule schedule = Schedule(c);
  Queues queues(w, schedule.Previous(c.rank), c.rank, schedule.Next(c.rank));
  const long long chunk =
      ChunkElements(c.slice_elements, gridDim.x, w.slots_per_block, w.slot_bytes, static_cast<int>(sizeof(W)));
  const long long stride = chunk * gridDim.x;
  const long long group = stride * (w.slots_per_block / 2);
  const long long end_of_slice = c.slice_elements;
  const int reduced = c.num_workers - 2;
  const int end = 2 * c.num_workers - 2;

  bool ready = !HasFailed(w);
  for (long long first = blockIdx.x * chunk; ready && first < end_of_slice; first += group) {
    for (int hop = c.num_skipped - 1; ready && hop < end; ++hop) {
      const int slice = schedule.SliceToReceive(c.rank, hop);
      const bool receive = hop >= c.num_skipped;
      const bool send = hop < end - 1;
      for (long long begin = first; begin < first + group && begin < end_of_slice; begin += stride) {
        const long long count = end_of_slice - begin < chunk ? end_of_slice - begin : chunk;
        ready = queues.Ready(receive, send);
        if (!ready) break;
        const W* received = receive ? queues.Incoming() : nullptr;
        W* next = send ? queues.Outgoing() : nullptr;
        T* out = hop >= reduced ? Out(c, slice, begin) : nullptr;
        if (hop <= reduced) {
          Reduce(c, OfBlock(), count, hop == reduced, received, Own(c, slice, begin), next, out);
        } else {
          Place(OfBlock(), count, received, next, out);
        }
        queues.Done(receive, send);
      }
    }
  }
  if (ready) {
    queues.Save();
    return;
  }
  for (long long begin = blockIdx.x * chunk; begin < end_of_slice; begin += stride) {
    FillWithNaN(c, begin, end_of_slice - begin < chunk ? end_of_slice - begin : chunk);
  }
}

// The direct form: each worker reads its slice out of the contributors' windows, and writes the result into
// everybody's. Block b takes one range of every slice, and meets the blocks b of the other workers twice:
//
//   1. All inputs are staged. Nobody copies results of the last launch out of a window any more, because each worker's
//      launches follow one another. So now inputs may be read, and results pushed.
//   2. All results are pushed, and nobody reads staged inputs any more. So now results may be copied out, and the next
//      launch may stage its inputs.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    skr_direct(const __grid_constant__ Collective c, const __grid_constant__ Window w) {
  using namespace skipreduce::cuda;
  const skipreduce::RingSchedule schedule = Schedule(c);
  const long long share = ElementsPerBlock(c.slice_elements, gridDim.x, static_cast<int>(sizeof(W)));
  const long long begin = blockIdx.x * share;
  const long long left = c.slice_elements - begin;
  const long long count = left < 0 ? 0 : left < share ? left : share;
  unsigned long long& epochs = ChannelOf(w, c.rank)->epoch.value;
  const unsigned long long epoch = epochs;

  bool ready = !HasFailed(w);
  if (ready) {
    // As T, though W would be fewer bytes: the ring rounds sums to W, not each worker's part.
    for (int step = c.num_skipped; step < c.num_workers - 1; ++step) {
      const int slice = schedule.SliceToSend(c.rank, step);
      const T* own = Own(c, slice, begin);
      T* staged = Staged(w, c, c.rank, slice, begin);
      auto load = [&](auto width, long long i) { return Load<width.width>(own + i); };
      auto store = [&](auto, long long i, const auto& values) { Store(staged + i, values); };
      ForEach(OfBlock(), count, Aligned(own), load, store);
    }
    ready = Barrier(w, c, epoch + 1);
  }
  if (ready) {
    ReduceDirectly(c, w, schedule, begin, count);
    ready = Barrier(w, c, epoch + 2);
  }
  if (!ready) {
    FillWithNaN(c, begin, count);
    return;
  }
  for (int distance = 1; distance < c.num_workers; ++distance) {
    const int slice = schedule.OwnedSlice(c.rank + distance);
    Place(OfBlock(), count, Result(w, c, c.rank, slice, begin), nullptr, Out(c, slice, begin));
  }
  if (threadIdx.x == 0) epochs = epoch + 2;
}
