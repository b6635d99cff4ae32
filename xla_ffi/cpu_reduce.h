// The all-reduce with skipping of workers that share memory: each slice is added up out of its contributors' buffers,
// in the order and with the roundings of the ring, and copied into everybody's.

#ifndef SKIPREDUCE_CPU_REDUCE_H_
#define SKIPREDUCE_CPU_REDUCE_H_

#include <cstdint>
#include <vector>

namespace skipreduce {

// Of an array, and of what travels. The numbers are those that Python passes.
enum class ElementType : int { kNone = -1, kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// What sums are divided by: nothing, the number of workers N, or that of contributors N-k.
enum class Divide : int { kNot = 0, kByWorkers = 1, kByContributors = 2 };

// One array of one worker. `out` may be `in`.
struct Array {
  const void* in;
  void* out;
};

struct ReductionSettings {
  int num_workers;
  int num_skipped;
  int shift;
  Divide divide;
  ElementType type;
  ElementType wire;      // kNone: values travel as they are
  std::vector<std::int64_t> sizes;  // elements of each array; all workers have the same
};

// One all-reduce, cut in pieces that any thread may do in any order, each once.
class Reduction {
 public:
  // `workers[r]` has the arrays of rank r, as many as there are sizes.
  Reduction(ReductionSettings settings, std::vector<std::vector<Array>> workers);

  std::int64_t num_pieces() const { return first_piece_.back(); }
  void RunPiece(std::int64_t piece) const;

 private:
  ReductionSettings settings_;
  std::vector<std::vector<Array>> workers_;
  std::vector<std::int64_t> first_piece_;  // of each array, and the number of all
  bool streams_;                           // whether results go past the cache
};

}  // namespace skipreduce

#endif  // SKIPREDUCE_CPU_REDUCE_H_
