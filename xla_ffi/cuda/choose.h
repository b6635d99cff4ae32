// Which algorithm an all-reduce takes. Nothing here asks a library: all is decided from numbers that the workers have
// agreed on, so that all of them decide alike.

#ifndef SKIPREDUCE_CUDA_CHOOSE_H_
#define SKIPREDUCE_CUDA_CHOOSE_H_

#include <string>

#include "all_reduce.h"
#include "status.h"

namespace skipreduce::cuda {

enum class Algorithm : int {
  kAuto = 0,
  kHost = 1,    // a ring of ncclSend and ncclRecv: any NCCL, any network
  kRing = 2,    // the ring in one kernel, which stores into the next worker's memory
  kDirect = 3,  // each worker reads its slice out of all contributors' memory
};

const char* NameOf(Algorithm algorithm);

// What the environment asks for.
struct Wishes {
  Algorithm algorithm = Algorithm::kAuto;  // SKIPREDUCE_ALGORITHM
  long long direct_bytes = 0;              // SKIPREDUCE_DIRECT_MIB: the largest array of the direct form
};
Status ReadWishes(Wishes* wishes);
bool IsDebugging();  // SKIPREDUCE_DEBUG

// What the workers of a communicator can do, the least of all of them.
struct Capability {
  bool window = false;     // they have a window of shared memory
  std::string why_not;     // if not
};

// The algorithm for arrays of this size, or why the one that was asked for cannot be had.
Status Choose(const Wishes& wishes, const Capability& capability, int num_workers, long long slice_elements,
              Element type, Element wire, Algorithm* chosen);

}  // namespace skipreduce::cuda

#endif  // SKIPREDUCE_CUDA_CHOOSE_H_
