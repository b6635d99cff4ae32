#include "kernel_ring.h"

#include <algorithm>

namespace skipreduce::cuda {
namespace {

// 32 channels of 8 slots of 64 KiB: 16 MiB in each window. Not measured.
constexpr int kSlotsPerBlock = 8;
constexpr long long kSlotBytes = 64 << 10;
constexpr long long kPageBytes = 4096;
// What a block shall at least have to do, in bytes that travel.
constexpr long long kMinBytesPerBlock = 32 << 10;

// The same number on all workers, as their blocks talk to each other by number; and no more than the smallest of the
// devices runs at the same time, as they wait for each other.
int NumBlocks(const Communicator& communicator, long long bytes) {
  const long long most = std::min(kMaxBlocks, std::max(1, communicator.multiprocessors));
  return static_cast<int>(std::clamp<long long>(CeilDivide(bytes, kMinBytesPerBlock), 1, most));
}

Status LaunchWithWindow(const Communicator& communicator, Kernel kernel, const Request& request, int num_blocks) {
  Collective collective = CollectiveOf(request, communicator.rank);
  Window window = communicator.window;
  window.time_limit_ns = 1000000ULL * request.time_limit_ms;
  void* parameters[] = {&collective, &window};
  return communicator.cuda.Launch(kernel, num_blocks, kMaxThreads, request.stream, parameters);
}

}  // namespace

Window WindowLayout(long long direct_bytes) {
  Window window{};
  window.channel_offset = 0;
  window.slot_offset = RoundUp(static_cast<long long>(kMaxBlocks * sizeof(Channel)), kPageBytes);
  window.slot_bytes = kSlotBytes;
  window.slots_per_block = kSlotsPerBlock;
  window.staged_offset = window.slot_offset + kMaxBlocks * kSlotsPerBlock * kSlotBytes;
  window.result_offset = window.staged_offset + RoundUp(direct_bytes, kPageBytes);
  window.capacity = window.result_offset + RoundUp(direct_bytes, kPageBytes);
  return window;
}

Collective CollectiveOf(const Request& request, int rank) {
  return Collective{request.block,
                    request.out,
                    request.shift,
                    request.slice_elements,
                    request.num_workers,
                    request.num_skipped,
                    rank,
                    request.divisor != 0,
                    request.divisor == 0 ? 1.0f : 1.0f / static_cast<float>(request.divisor)};
}

Status RunKernelRing(const Communicator& communicator, const Kernels& kernels, const Request& request) {
  return LaunchWithWindow(communicator, kernels.ring, request,
                          NumBlocks(communicator, request.slice_elements * SizeOf(request.wire)));
}

Status RunDirect(const Communicator& communicator, const Kernels& kernels, const Request& request) {
  return LaunchWithWindow(communicator, kernels.direct, request,
                          NumBlocks(communicator, request.num_workers * request.slice_elements * SizeOf(request.wire)));
}

}  // namespace skipreduce::cuda
