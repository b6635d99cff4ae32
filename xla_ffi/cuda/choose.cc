#include "choose.h"

#include <algorithm>
#include <cstdlib>

#include "kernel_params.h"

namespace skipreduce::cuda {
namespace {

// The direct form moves as many bytes over the links as the ring, in 2 steps instead of 2(N-1)-k, but stages all slices
// in the worker's own memory first: better for what is short. A guess: not measured.
constexpr long long kDirectMib = 8;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

long long StagedBytes(int num_workers, long long slice_elements, Element type, Element wire) {
  return num_workers * RowBytes(slice_elements, std::max(SizeOf(type), SizeOf(wire)));
}

}  // namespace

const char* NameOf(Algorithm algorithm) {
  constexpr const char* kNames[] = {"auto", "host", "ring", "direct"};
  return kNames[static_cast<int>(algorithm)];
}

Status ReadWishes(Wishes* wishes) {
  const std::string name = Environment("SKIPREDUCE_ALGORITHM");
  const std::string mib = Environment("SKIPREDUCE_DIRECT_MIB");
  wishes->direct_bytes = kDirectMib << 20;
  if (!mib.empty()) {
    char* end = nullptr;
    const long long value = std::strtoll(mib.c_str(), &end, 10);
    if (*end != '\0' || value < 0 || value > (1 << 20)) {
      return Status(Code::kInvalidArgument, "SKIPREDUCE_DIRECT_MIB=" + mib + ": expected 0 to 1048576");
    }
    wishes->direct_bytes = value << 20;
  }
  for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kHost, Algorithm::kRing, Algorithm::kDirect}) {
    if (name == NameOf(algorithm) || (name.empty() && algorithm == Algorithm::kAuto)) {
      wishes->algorithm = algorithm;
      return Status();
    }
  }
  return Status(Code::kInvalidArgument,
                "SKIPREDUCE_ALGORITHM=" + name + ": expected auto, host, ring or direct");
}

bool IsDebugging() {
  const std::string value = Environment("SKIPREDUCE_DEBUG");
  return !value.empty() && value != "0";
}

Status Choose(const Wishes& wishes, const Capability& capability, int num_workers, long long slice_elements,
              Element type, Element wire, Algorithm* chosen) {
  const long long staged = StagedBytes(num_workers, slice_elements, type, wire);
  const bool fits = staged <= wishes.direct_bytes;
  *chosen = wishes.algorithm;
  switch (wishes.algorithm) {
    case Algorithm::kHost:
      return Status();
    case Algorithm::kAuto:
      *chosen = !capability.window ? Algorithm::kHost : fits ? Algorithm::kDirect : Algorithm::kRing;
      return Status();
    case Algorithm::kRing:
    case Algorithm::kDirect:
      break;
  }
  const std::string asked = std::string("SKIPREDUCE_ALGORITHM=") + NameOf(wishes.algorithm);
  if (!capability.window) return Status(Code::kFailedPrecondition, asked + ": " + capability.why_not);
  if (wishes.algorithm == Algorithm::kDirect && !fits) {
    return Status(Code::kFailedPrecondition, asked + ": the array takes " + std::to_string(staged) +
                                                 " bytes, the window has room for " +
                                                 std::to_string(wishes.direct_bytes) +
                                                 ". Set SKIPREDUCE_DIRECT_MIB to as many MiB on all workers");
  }
  return Status();
}

}  // namespace skipreduce::cuda
