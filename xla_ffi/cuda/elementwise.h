// What the kernels do with elements: convert, add, round, in vectors of 16 bytes where they can. No thread waits here.
// Included by kernels.cu, which says for which T and W.

#ifndef SKIPREDUCE_CUDA_ELEMENTWISE_H_
#define SKIPREDUCE_CUDA_ELEMENTWISE_H_

#ifdef __CUDACC__
#define __builtin_memcpy memcpy  // NVRTC knows this one without a header
#endif

#include "../element_types.h"
#include "../ring_schedule.h"
#include "kernel_params.h"

#ifdef __CUDACC__
// By name, because the compiler takes some plain copies of a uint4 apart, and over a link four stores are not one.
__device__ inline uint4 LoadVector(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline void StoreVector(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#endif  // __CUDACC__

namespace skipreduce::cuda {

struct Float32 {
  float value;

  __device__ static Float32 FromFloat(float value) { return {value}; }
  __device__ float ToFloat() const { return value; }
};

#ifdef __CUDACC__
// One instruction each way, with the bits of Float16 but for what NaN carries.
struct DeviceFloat16 {
  unsigned short bits;

  __device__ static DeviceFloat16 FromFloat(float value) {
    DeviceFloat16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
  __device__ float ToFloat() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
#else
using DeviceFloat16 = Float16;
#endif  // __CUDACC__

template <int code>
struct ElementOf;
template <>
struct ElementOf<0> {
  using Type = Float32;
};
template <>
struct ElementOf<1> {
  using Type = BFloat16;
};
template <>
struct ElementOf<2> {
  using Type = DeviceFloat16;
};

using T = ElementOf<SKIPREDUCE_T>::Type;
using W = ElementOf<SKIPREDUCE_W>::Type;
// So to round to T and then to W is to round to W.
static_assert(SKIPREDUCE_W == SKIPREDUCE_T || SKIPREDUCE_T == 0, "W must be T, or T float32");

constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(W));
constexpr int kAhead = 4;  // packs that a thread loads before it stores the first of them

template <int width_>
struct Width {
  static constexpr int width = width_;
};

template <typename Element, int width>
struct Values {
  Element at[width];
};

template <int width, typename Element>
__device__ Values<Element, width> Load(const Element* from) {
  Values<Element, width> values;
  if constexpr (width == 1) {
    values.at[0] = *from;
  } else {
    constexpr int num_vectors = sizeof(values) / kVectorBytes;
    constexpr int per_vector = kVectorBytes / sizeof(Element);
    uint4 vectors[num_vectors];
    for (int i = 0; i < num_vectors; ++i) vectors[i] = LoadVector(from + i * per_vector);
    __builtin_memcpy(&values, vectors, sizeof(values));
  }
  return values;
}

template <typename Element, int width>
__device__ void Store(Element* to, const Values<Element, width>& values) {
  if constexpr (width == 1) {
    *to = values.at[0];
  } else {
    constexpr int num_vectors = sizeof(values) / kVectorBytes;
    constexpr int per_vector = kVectorBytes / sizeof(Element);
    uint4 vectors[num_vectors];
    __builtin_memcpy(vectors, &values, sizeof(values));
    for (int i = 0; i < num_vectors; ++i) StoreVector(to + i * per_vector, vectors[i]);
  }
}

template <typename... Pointer>
__device__ bool Aligned(const Pointer*... pointers) {
  return ((reinterpret_cast<unsigned long long>(pointers) | ...) % kVectorBytes) == 0;
}

// Which threads share the elements of an array: those of a block, or those of the grid.
struct Share {
  long long first;
  long long stride;
};

__device__ Share OfBlock() { return {threadIdx.x, blockDim.x}; }
__device__ Share OfGrid() { return {1LL * blockIdx.x * blockDim.x + threadIdx.x, 1LL * gridDim.x * blockDim.x}; }

// store(w, i, load(w, i)) for elements begin .. end-1, `w.width` of them (a pack) at a time.
template <int width, int ahead, typename LoadFunction, typename StoreFunction>
__device__ void ForEachOf(Share share, long long begin, long long end, LoadFunction load, StoreFunction store) {
  constexpr Width<width> w;
  const long long num_packs = (end - begin) / width;
  long long pack = share.first;
  if constexpr (ahead > 1) {
    for (; pack + (ahead - 1) * share.stride < num_packs; pack += ahead * share.stride) {
      decltype(load(w, begin)) loaded[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) loaded[i] = load(w, begin + (pack + i * share.stride) * width);
#pragma unroll
      for (int i = 0; i < ahead; ++i) store(w, begin + (pack + i * share.stride) * width, loaded[i]);
    }
  }
#pragma unroll 1
  for (; pack < num_packs; pack += share.stride) store(w, begin + pack * width, load(w, begin + pack * width));
}

// The same for elements 0 .. count-1, by vectors where `aligned` says that all pointers allow it. Slices of odd sizes
// do not begin at multiples of 16 bytes; neighbouring threads then take neighbouring elements.
template <int ahead = kAhead, typename LoadFunction, typename StoreFunction>
__device__ void ForEach(Share share, long long count, bool aligned, LoadFunction load, StoreFunction store) {
  const long long by_vectors = aligned ? count / kPerVector * kPerVector : 0;
  ForEachOf<kPerVector, ahead>(share, 0, by_vectors, load, store);
  ForEachOf<1, ahead>(share, by_vectors, count, load, store);
}

__device__ RingSchedule Schedule(const Collective& c) { return {c.num_workers, c.num_skipped, *c.shift}; }
__device__ const T* Own(const Collective& c, int slice, long long begin) {
  return static_cast<const T*>(c.block) + slice * c.slice_elements + begin;
}
__device__ T* Out(const Collective& c, int slice, long long begin) {
  return static_cast<T*>(c.out) + slice * c.slice_elements + begin;
}

__device__ float Finished(const Collective& c, float total) { return c.divide ? total * c.reciprocal : total; }

template <int width>
struct Sources {
  Values<W, width> received;
  Values<T, width> own;
};

// One hop of the chain of additions: `received` (null at its first worker) plus `own`, normalized if this is the `last`
// worker, to `send` as it travels, and to `out` as all workers will have it. `send` or `out` may be null.
__device__ void Reduce(const Collective& c, Share share, long long count, bool last, const W* received, const T* own,
                       W* send, T* out) {
  auto load = [&](auto w, long long i) {
    Sources<w.width> sources{};
    if (received != nullptr) sources.received = Load<w.width>(received + i);
    sources.own = Load<w.width>(own + i);
    return sources;
  };
  auto store = [&](auto w, long long i, const auto& sources) {
    Values<W, w.width> sums;
    Values<T, w.width> results;
    for (int e = 0; e < w.width; ++e) {
      float total = sources.own.at[e].ToFloat();
      if (received != nullptr) total = sources.received.at[e].ToFloat() + total;
      sums.at[e] = W::FromFloat(last ? Finished(c, total) : total);
      results.at[e] = T::FromFloat(sums.at[e].ToFloat());
    }
    if (send != nullptr) Store(send + i, sums);
    if (out != nullptr) Store(out + i, results);
  };
  ForEach(share, count, Aligned(received, own, send, out), load, store);
}

// One hop of the all-gather: a reduced slice that has come goes to `out`, and on to `send` unless that is null.
__device__ void Place(Share share, long long count, const W* received, W* send, T* out) {
  auto load = [&](auto w, long long i) { return Load<w.width>(received + i); };
  auto store = [&](auto w, long long i, const auto& values) {
    Values<T, w.width> results;
    for (int e = 0; e < w.width; ++e) results.at[e] = T::FromFloat(values.at[e].ToFloat());
    if (send != nullptr) Store(send + i, values);
    Store(out + i, results);
  };
  ForEach(share, count, Aligned(received, send, out), load, store);
}

// Elements begin .. begin+count-1 of all slices: nobody shall take them for a result.
__device__ void FillWithNaN(const Collective& c, long long begin, long long count) {
  for (int slice = 0; slice < c.num_workers; ++slice) {
    T* out = Out(c, slice, begin);
    for (long long i = threadIdx.x; i < count; i += blockDim.x) out[i] = T::FromFloat(FloatFromBits(0x7fc00000u));
  }
}

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_ELEMENTWISE_H_
