// Runs the kernels of xla_ffi/cuda on the CPU, one OS thread per (rank, block, thread), against an oracle in the words
// of the paper. Compiled per -D SKIPREDUCE_T=, SKIPREDUCE_W=. Prints "ok" and how much was run, or what differs.

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernel_on_cpu.h"
// After it:
#include "../../xla_ffi/cuda/kernels.cu"

namespace {

using skipreduce::FloatBits;
using skipreduce::FloatFromBits;
using skipreduce::cuda::Channel;
using skipreduce::cuda::ChunkElements;
using skipreduce::cuda::kMaxBlocks;
using skipreduce::cuda::RowBytes;

constexpr int kBlocks = 3;  // at most
constexpr long long kMaxSlice = 403;

static_assert(ChunkElements(1LL << 33, 8, 4, 1 << 20, 2) == 1 << 19, "what a slot holds");
static_assert(ChunkElements(1 << 20, 8, 4, 1 << 20, 4) == 1 << 16, "one group");
static_assert(ChunkElements(1, 8, 4, 1 << 20, 4) == 1024, "what is worth a message");
static_assert(ChunkElements(100001, 3, 2, 1 << 20, 2) == 33336, "whole vectors");

struct Launch {
  bool direct;
  int num_skipped;
  int shift;
  long long slice_elements;
  unsigned int num_blocks;
  bool divide;
  bool in_place;
};

std::string Name(const Launch& launch, int num_workers) {
  char text[200];
  std::snprintf(text, sizeof text, "%s N=%d k=%d c=%d S=%lld blocks=%u divide=%d in_place=%d",
                launch.direct ? "direct" : "ring", num_workers, launch.num_skipped, launch.shift, launch.slice_elements,
                launch.num_blocks, launch.divide, launch.in_place);
  return text;
}

// Ordinary numbers, now and then one that is none, or at the end of the range of some float.
T Value(std::mt19937& random) {
  static const unsigned int kSpecial[] = {0x00000001, 0x80012345, 0x007fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                          0x477fe000, 0xc77ff000, 0x7f7fffff, 0x33800001, 0x38800000, 0x80000000};
  const unsigned int bits = random();
  if (bits % 256 == 0) return T::FromFloat(FloatFromBits(kSpecial[random() % 12]));
  const float sign = bits & 1 ? -1.0f : 1.0f;
  return T::FromFloat(sign * static_cast<float>(bits >> 8) * (1.0f / (1 << 24)) * static_cast<float>(1 << (bits % 7)));
}

bool Same(T a, T b) {
  if (a.ToFloat() != a.ToFloat()) return b.ToFloat() != b.ToFloat();
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// What one launch takes and gives, of all workers.
struct Arrays {
  std::vector<std::vector<T>> input, output;  // by rank, (N, S)
  std::vector<T> expected;                    // the same on all workers

  Arrays(const Launch& launch, int num_workers, std::mt19937& random) {
    const long long size = num_workers * launch.slice_elements;
    for (int rank = 0; rank < num_workers; ++rank) {
      input.emplace_back(size);
      for (T& value : input.back()) value = Value(random);
    }
    output.assign(num_workers, std::vector<T>(size, T::FromFloat(123.0f)));
    for (long long i = 0; i < size; ++i) expected.push_back(Expected(launch, num_workers, i));
    if (launch.in_place) output = input;
  }

  // Slice j is begun by worker j + k, and passed on from worker to worker until it is at worker j - 1: the workers
  // j .. j+k-1 are left out. A shift of c renames slice j to j + c.
  T Expected(const Launch& launch, int num_workers, long long i) const {
    const long long renamed =
        i / launch.slice_elements - static_cast<long long>(launch.shift) + (1LL << 40) * num_workers;
    const int slice = static_cast<int>(renamed % num_workers);
    float sum = 0;
    for (int worker = slice + launch.num_skipped; worker <= slice + num_workers - 1; ++worker) {
      const float own = input[worker % num_workers][i].ToFloat();
      const bool begins = worker == slice + launch.num_skipped;
      sum = begins ? own : W::FromFloat(T::FromFloat(sum).ToFloat()).ToFloat() + own;
    }
    if (launch.divide) sum *= 1.0f / static_cast<float>(num_workers);
    return T::FromFloat(W::FromFloat(T::FromFloat(sum).ToFloat()).ToFloat());
  }

  long long NumWrong(int rank) const {
    long long wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) wrong += !Same(output[rank][i], expected[i]);
    return wrong;
  }
};

Collective CollectiveOf(const Launch& launch, const Arrays& arrays, int num_workers, int rank) {
  T* out = const_cast<T*>(arrays.output[rank].data());
  const void* block = launch.in_place ? out : arrays.input[rank].data();
  return {block,
          out,
          &launch.shift,
          launch.slice_elements,
          num_workers,
          launch.num_skipped,
          rank,
          launch.divide,
          1.0f / static_cast<float>(num_workers)};
}

// The windows of N workers, laid out as a host might.
class Windows {
 public:
  Windows(int num_workers, int slots_per_block, unsigned long long time_limit_ns) : failed_(num_workers, 0) {
    Window& w = window_;
    w.channel_offset = 128;
    w.slot_offset = w.channel_offset + kMaxBlocks * static_cast<long long>(sizeof(Channel));
    w.slot_bytes = 160;
    w.slots_per_block = slots_per_block;
    w.staged_offset = w.slot_offset + kMaxBlocks * slots_per_block * w.slot_bytes;
    w.result_offset = w.staged_offset + num_workers * RowBytes(kMaxSlice, sizeof(T));
    w.capacity = w.result_offset + num_workers * RowBytes(kMaxSlice, sizeof(W));
    w.time_limit_ns = time_limit_ns;
    for (int rank = 0; rank < num_workers; ++rank) {
      const long long size = skipreduce::cuda::RoundUp(w.capacity, 128);
      memory_.emplace_back(static_cast<char*>(std::aligned_alloc(128, size)), std::free);
      std::memset(memory_.back().get(), 0, size);
      w.peers[rank] = memory_.back().get();
    }
  }

  Window Of(int rank) {
    Window window = window_;
    window.failed = &failed_[rank];
    return window;
  }
  int Failed(int rank) const { return failed_[rank]; }

 private:
  std::vector<int> failed_;
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  Window window_{};
};

// Launches follow one another on each worker, as in a stream, and nothing else keeps workers together.
void RunWorkers(const std::vector<int>& ranks, int num_workers, unsigned int num_threads, Windows& windows,
                const std::vector<Launch>& launches, const std::vector<Arrays>& arrays) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<ThreadBarrier>> barriers;
  for (int rank : ranks) {
    barriers.push_back(std::make_unique<ThreadBarrier>(kBlocks * num_threads));
    ThreadBarrier* const stream = barriers.back().get();
    for (unsigned int block = 0; block < kBlocks; ++block) {
      barriers.push_back(std::make_unique<ThreadBarrier>(num_threads));
      ThreadBarrier* const of_block = barriers.back().get();
      for (unsigned int thread = 0; thread < num_threads; ++thread) {
        threads.emplace_back([=, &windows, &launches, &arrays] {
          blockIdx.x = block;
          threadIdx.x = thread;
          blockDim.x = num_threads;
          block_barrier = of_block;
          for (size_t i = 0; i < launches.size(); ++i) {
            stream->Wait();
            if (block >= launches[i].num_blocks) continue;
            gridDim.x = launches[i].num_blocks;
            const Collective c = CollectiveOf(launches[i], arrays[i], num_workers, rank);
            (launches[i].direct ? skr_direct : skr_ring)(c, windows.Of(rank));
          }
        });
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// The kernels of the ring over the host API, one after the other, on a grid; sends are copies.
void RunHostRing(int num_workers, const Launch& launch, const Arrays& arrays) {
  const long long size = launch.slice_elements;
  std::vector<Chunk> chunks;
  for (long long begin = 0; begin < size; begin += 48) chunks.push_back({begin, std::min(48LL, size - begin)});
  std::vector<std::vector<W>> send(num_workers, std::vector<W>(size)), received = send;
  auto on_grid = [&](const std::function<void(int, const Collective&, Chunk)>& kernel) {
    for (int rank = 0; rank < num_workers; ++rank) {
      for (const Chunk& chunk : chunks) {
        for (blockDim.x = 3, gridDim.x = 2, blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
          for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            kernel(rank, CollectiveOf(launch, arrays, num_workers, rank), chunk);
          }
        }
      }
    }
  };
  on_grid([&](int rank, const Collective& c, Chunk chunk) {
    (launch.num_skipped == num_workers - 1 ? skr_finish_own : skr_first)(c, chunk, send[rank].data());
  });
  for (int step = launch.num_skipped; step < num_workers - 1; ++step) {
    for (int rank = 0; rank < num_workers; ++rank) received[(rank + 1) % num_workers] = send[rank];
    on_grid([&](int rank, const Collective& c, Chunk chunk) {
      skr_add(c, chunk, step, received[rank].data(), send[rank].data());
    });
  }
  std::vector<W> gathered;
  for (const auto& own : send) gathered.insert(gathered.end(), own.begin(), own.end());
  chunks = {{0, size}};
  on_grid([&](int, const Collective& c, Chunk) { skr_place(c, gathered.data()); });
}

int Report(const std::vector<Launch>& launches, const std::vector<Arrays>& arrays, int num_workers, const char* how) {
  int num_bad = 0;
  for (size_t i = 0; i < launches.size(); ++i) {
    for (int rank = 0; rank < num_workers; ++rank) {
      const long long wrong = arrays[i].NumWrong(rank);
      if (wrong == 0 || ++num_bad > 5) continue;
      std::printf("%s, launch %zu, rank %d: %lld of %zu elements differ: %s\n", how, i, rank, wrong,
                  arrays[i].expected.size(), Name(launches[i], num_workers).c_str());
    }
  }
  return num_bad;
}

std::vector<Launch> AllLaunches(int num_workers, std::mt19937& random) {
  const int shifts[] = {0, 1, -1, num_workers + 3, -3 * num_workers - 2, INT_MIN, INT_MAX};
  const long long sizes[] = {1, 5, 64, 160, 333, kMaxSlice};
  std::vector<Launch> launches;
  for (int k = 0; k < num_workers; ++k) {
    for (int shift : shifts) {
      for (int i = 0; i < 6; ++i) {
        launches.push_back({i % 2 == 0, k, shift, sizes[random() % 6], static_cast<unsigned>(1 + random() % kBlocks),
                            random() % 4 != 0, random() % 4 == 0});
      }
    }
  }
  std::shuffle(launches.begin(), launches.end(), random);
  return launches;
}

// One worker does not come, or too late. The others end, and nobody has a wrong number.
int RunWithout(int absent, bool direct, std::mt19937& random) {
  const int num_workers = 4;
  std::vector<Launch> launches(2, {direct, static_cast<int>(random() % 4), 1, kMaxSlice, kBlocks, true, false});
  std::vector<Arrays> arrays;
  for (const Launch& launch : launches) arrays.emplace_back(launch, num_workers, random);
  std::vector<int> present;
  for (int rank = 0; rank < num_workers; ++rank) {
    if (rank != absent) present.push_back(rank);
  }
  Windows windows(num_workers, 4, 50000000);
  RunWorkers(present, num_workers, 1, windows, launches, arrays);
  int num_bad = 0;
  for (int rank : present) {
    num_bad += windows.Failed(rank) != 1;
    for (const Arrays& of_launch : arrays) {
      for (T value : of_launch.output[rank]) num_bad += value.ToFloat() == value.ToFloat();
    }
  }
  RunWorkers({absent}, num_workers, 1, windows, launches, arrays);
  for (const Arrays& of_launch : arrays) {
    for (size_t i = 0; i < of_launch.expected.size(); ++i) {
      const T value = of_launch.output[absent][i];
      num_bad += value.ToFloat() == value.ToFloat() && !Same(value, of_launch.expected[i]);
    }
  }
  if (num_bad) std::printf("without worker %d: %d bad, %s\n", absent, num_bad, Name(launches[0], num_workers).c_str());
  return num_bad;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  std::mt19937 random(num_arguments > 1 ? std::atoi(arguments[1]) : 1);
  int num_bad = 0;
  size_t num_launches = 0;
  for (int num_workers = 2; num_workers <= 8; ++num_workers) {
    const std::vector<Launch> launches = AllLaunches(num_workers, random);
    std::vector<Arrays> arrays;
    for (const Launch& launch : launches) arrays.emplace_back(launch, num_workers, random);
    std::vector<int> ranks;
    for (int rank = 0; rank < num_workers; ++rank) ranks.push_back(rank);

    if (num_workers < 8) {
      const std::vector<Arrays> copies = arrays;
      for (size_t i = 0; i < launches.size(); ++i) RunHostRing(num_workers, launches[i], copies[i]);
      num_bad += Report(launches, copies, num_workers, "host ring");
    }

    Windows windows(num_workers, num_workers % 2 ? 2 : 4, 60000000000);
    RunWorkers(ranks, num_workers, num_workers <= 4 ? 2 : 1, windows, launches, arrays);
    num_bad += Report(launches, arrays, num_workers, "peers");
    for (int rank : ranks) num_bad += windows.Failed(rank);
    num_launches += launches.size();
  }
  for (int absent = 0; absent < 4; ++absent) num_bad += RunWithout(absent, absent % 2, random);
  if (num_bad) return 1;
  std::printf("ok: %zu launches\n", num_launches);
  return 0;
}
