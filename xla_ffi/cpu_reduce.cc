#include "cpu_reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "element_types.h"
#include "ring_schedule.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace skipreduce {
namespace {

// Elements of a piece: the sum and what every worker has of it stay in the caches of one core.
constexpr std::int64_t kPieceElements = 4096;

// Results of this size and more are out of the cache before anybody reads them.
constexpr std::int64_t kStreamedBytes = std::int64_t{8} << 20;

// How an array's elements T are added up and rounded. `Sum` is what they are added up in.
struct Float32 {
  using Element = float;
  using Sum = float;
  static float Widen(float value) { return value; }
  static float Narrow(float value) { return value; }
};

struct Float64 {
  using Element = double;
  using Sum = double;
  static double Widen(double value) { return value; }
  static double Narrow(double value) { return value; }
};

template <typename Bits>
struct Float16Bits {
  using Element = Bits;
  using Sum = float;
  static float Widen(Bits value) { return value.ToFloat(); }
  static Bits Narrow(float value) { return Bits::FromFloat(value); }
};

// What a sum looks like when it has travelled as T, or as the narrower W.
template <typename Type, typename Wire>
typename Type::Sum Travelled(typename Type::Sum sum) {
  return static_cast<typename Type::Sum>(Wire::Widen(Wire::Narrow(Type::Widen(Type::Narrow(sum)))));
}

// Writes past the cache: lines that are overwritten whole need not be read first.
void CopyStreaming(char* target, const char* source, std::size_t bytes) {
#if defined(__SSE2__)
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % 16;
  const std::size_t head = std::min(bytes, misaligned == 0 ? 0 : 16 - misaligned);
  std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + 16 <= bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
  }
  std::memcpy(target + at, source + at, bytes - at);
#else
  std::memcpy(target, source, bytes);
#endif
}

// Makes streamed writes visible to who learns from this thread that they are done.
void FenceStreaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Elements begin .. begin+count-1 of array `array`, which lie in slice `slice`.
struct Range {
  std::size_t array;
  int slice;
  std::int64_t begin;
  std::int64_t count;
};

template <typename Type, typename Wire>
void Reduce(const ReductionSettings& settings, const std::vector<std::vector<Array>>& workers, const Range& range,
            bool streams) {
  using Element = typename Type::Element;
  using Sum = typename Type::Sum;
  const RingSchedule schedule{settings.num_workers, settings.num_skipped, settings.shift};
  const auto own = [&](int position) {
    const int rank = schedule.Contributor(range.slice, position);
    return static_cast<const Element*>(workers[rank][range.array].in) + range.begin;
  };

  Sum sum[kPieceElements];
  const std::int64_t count = range.count;
  const Element* first = own(0);
  for (std::int64_t i = 0; i < count; ++i) sum[i] = Type::Widen(first[i]);
  for (int position = 1; position < schedule.NumContributors(); ++position) {
    const Element* next = own(position);
    for (std::int64_t i = 0; i < count; ++i) sum[i] = Travelled<Type, Wire>(sum[i]) + Type::Widen(next[i]);
  }
  // A reciprocal, because that is what XLA makes of a division, and results are to have the same bits.
  const int divisor = settings.divide == Divide::kNot         ? 1
                      : settings.divide == Divide::kByWorkers ? settings.num_workers
                                                              : schedule.NumContributors();
  const Sum factor = Sum{1} / static_cast<Sum>(divisor);
  Element result[kPieceElements];
  for (std::int64_t i = 0; i < count; ++i) {
    // The owner's copy is what the others receive, rounded as it travels. One worker sends nothing.
    const Sum total = Type::Widen(Type::Narrow(sum[i] * factor));
    result[i] = Type::Narrow(settings.num_workers > 1 ? Travelled<Type, Wire>(total) : total);
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(Element);
  for (const auto& worker : workers) {
    char* out = static_cast<char*>(worker[range.array].out) + range.begin * static_cast<std::int64_t>(sizeof(Element));
    const bool in_place = worker[range.array].out == worker[range.array].in;
    if (streams && !in_place) {
      CopyStreaming(out, reinterpret_cast<const char*>(result), bytes);
    } else {
      std::memcpy(out, result, bytes);
    }
  }
  if (streams) FenceStreaming();
}

std::int64_t ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

}  // namespace

Reduction::Reduction(ReductionSettings settings, std::vector<std::vector<Array>> workers)
    : settings_(std::move(settings)), workers_(std::move(workers)) {
  std::int64_t pieces = 0, elements = 0;
  for (const std::int64_t size : settings_.sizes) {
    first_piece_.push_back(pieces);
    const std::int64_t per_slice =
        (SliceSize(size, settings_.num_workers) + kPieceElements - 1) / kPieceElements;
    pieces += settings_.num_workers * per_slice;
    elements += size;
  }
  first_piece_.push_back(pieces);
  streams_ = elements * ElementBytes(settings_.type) * settings_.num_workers >= kStreamedBytes;
}

void Reduction::RunPiece(std::int64_t piece) const {
  const auto after = std::upper_bound(first_piece_.begin(), first_piece_.end(), piece);
  const std::size_t array = static_cast<std::size_t>(after - first_piece_.begin()) - 1;
  const std::int64_t size = settings_.sizes[array];
  const std::int64_t slice_size = SliceSize(size, settings_.num_workers);
  const std::int64_t per_slice = (slice_size + kPieceElements - 1) / kPieceElements;
  const std::int64_t index = piece - first_piece_[array];
  const std::int64_t slice = index / per_slice;
  const std::int64_t begin = slice * slice_size + index % per_slice * kPieceElements;
  const std::int64_t end = std::min({begin + kPieceElements, (slice + 1) * slice_size, size});
  if (begin >= end) return;  // padding, which is not there
  const Range range{array, static_cast<int>(slice), begin, end - begin};
  switch (settings_.type) {
    case ElementType::kFloat32:
      switch (settings_.wire) {
        case ElementType::kBFloat16:
          return Reduce<Float32, Float16Bits<BFloat16>>(settings_, workers_, range, streams_);
        case ElementType::kFloat16:
          return Reduce<Float32, Float16Bits<Float16>>(settings_, workers_, range, streams_);
        default:
          return Reduce<Float32, Float32>(settings_, workers_, range, streams_);
      }
    case ElementType::kBFloat16:
      return Reduce<Float16Bits<BFloat16>, Float32>(settings_, workers_, range, streams_);
    case ElementType::kFloat16:
      return Reduce<Float16Bits<Float16>, Float32>(settings_, workers_, range, streams_);
    default:
      return Reduce<Float64, Float64>(settings_, workers_, range, streams_);
  }
}

}  // namespace skipreduce
