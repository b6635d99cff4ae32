// The meeting, the sums and the completions of the CPU handler without XLA, for the sanitizers: N threads meet
// thousands of times, in groups and runs of their own, in place and not, some never come. Prints what went wrong.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "completions.h"
#include "cpu_reduce.h"
#include "meeting.h"

using skipreduce::Arrival;
using skipreduce::CallSite;
using skipreduce::Divide;
using skipreduce::ElementType;
using skipreduce::MeetingKey;
using skipreduce::Reduction;

namespace {

// One worker's wait for its completion.
struct Ended {
  std::mutex mutex;
  std::condition_variable wake;
  bool is_done = false;
  std::string error;

  void Complete(const std::string* text) {
    const std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    if (text != nullptr) error = *text;
    wake.notify_all();
  }
  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait(lock, [this] { return is_done; });
    return error;
  }
};

struct Work {
  Work(Reduction reduction, std::vector<Arrival> arrivals)
      : reduction(std::move(reduction)), arrivals(std::move(arrivals)), left(this->reduction.num_pieces()) {}
  Reduction reduction;
  std::vector<Arrival> arrivals;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> left;
  void Help() {
    for (;;) {
      const std::int64_t piece = next.fetch_add(1);
      if (piece >= reduction.num_pieces()) return;
      reduction.RunPiece(piece);
      if (left.fetch_sub(1) == 1) {
        for (Arrival& arrival : arrivals) {
          skipreduce::RunInOwnThread([complete = std::move(arrival.complete)] { complete(nullptr); });
        }
      }
    }
  }
};

// Comes to a call as `rank` and waits for its end.
std::string Reduce(CallSite& site, MeetingKey key, int num_workers, int num_skipped, int shift, int rank,
                   const std::vector<float>& in, std::vector<float>& out) {
  auto ended = std::make_shared<Ended>();
  const auto size = static_cast<std::int64_t>(in.size());
  Arrival arrival{rank,   num_skipped, shift, {size}, {{in.data(), out.data()}}, [ended](const std::string* error) {
                    ended->Complete(error);
                  }};
  auto arrivals = site.Arrive(key, std::move(arrival));
  if (arrivals) {
    std::vector<std::vector<skipreduce::Array>> workers;
    for (const Arrival& other : *arrivals) workers.push_back(other.arrays);
    auto work = std::make_shared<Work>(Reduction({num_workers, num_skipped, shift, Divide::kNot, ElementType::kFloat32,
                                                  ElementType::kNone, {size}},
                                                 std::move(workers)),
                                       *std::move(arrivals));
    skipreduce::RunInOwnThread([work] { work->Help(); });
    work->Help();
  }
  return ended->Wait();
}

int Fail(const char* what) {
  std::printf("FAILED: %s\n", what);
  return 1;
}

// What worker `rank`'s slice sums look like in the paper's words: slice j lacks the workers j-c .. j-c+k-1.
float Expected(int num_workers, int num_skipped, int shift, int slice) {
  int sum = 0;
  for (int rank = 0; rank < num_workers; ++rank) {
    const int distance = (((rank - slice + shift) % num_workers) + num_workers) % num_workers;
    if (distance >= num_skipped) sum += 1 << rank;
  }
  return static_cast<float>(sum);
}

}  // namespace

int main() {
  constexpr int kWorkers = 4, kGroups = 2, kRounds = 300;
  constexpr std::size_t kSize = 5003;  // two pieces a slice, the last one short
  CallSite site(kWorkers, std::chrono::milliseconds(20000));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int group = 0; group < kGroups; ++group) {
    for (int rank = 0; rank < kWorkers; ++rank) {
      threads.emplace_back([&, group, rank] {
        for (int round = 0; round < kRounds; ++round) {
          const int k = round % kWorkers, shift = 3 * round - 40;
          std::vector<float> values(kSize, static_cast<float>(1 << rank)), other(kSize);
          std::vector<float>& out = round % 2 ? values : other;
          // The same call again and again, as in a loop, and in a new run now and then.
          const std::string error = Reduce(site, {round / 7, group}, kWorkers, k, shift, rank, values, out);
          if (!error.empty()) ++wrong;
          const std::size_t slice_size = (kSize + kWorkers - 1) / kWorkers;
          for (std::size_t i = 0; i < kSize; ++i) {
            if (out[i] != Expected(kWorkers, k, shift, static_cast<int>(i / slice_size))) ++wrong;
          }
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (wrong != 0) return Fail("wrong sums");

  // One that does not come: an error for the others, and for itself when it comes after all. Then all is as before.
  CallSite short_site(2, std::chrono::milliseconds(50));
  for (int round = 0; round < 5; ++round) {
    std::vector<float> in(10, 1), out(10);
    const std::string early = Reduce(short_site, {round, 0}, 2, 0, 0, 0, in, out);
    const std::string late = Reduce(short_site, {round, 0}, 2, 0, 0, 1, in, out);
    if (early.find("1 of 2 workers") == std::string::npos || early.find("rank 1.") == std::string::npos) {
      return Fail("no error, or an unclear one, where a worker is missing");
    }
    if (late != early) return Fail("no error for who came late");
  }
  // Two that disagree.
  std::string errors[2];
  std::vector<std::thread> pair;
  for (int rank = 0; rank < 2; ++rank) {
    pair.emplace_back([&, rank] {
      std::vector<float> in(10, 1), out(10);
      errors[rank] = Reduce(short_site, {99, 0}, 2, 0, rank, rank, in, out);
    });
  }
  for (std::thread& thread : pair) thread.join();
  if (errors[0].find("the shift is 0 on rank 0 and 1 on rank 1") == std::string::npos || errors[0] != errors[1]) {
    return Fail("no error where shifts differ");
  }
  // One that is refused: an error for all, at once and whoever comes first, and nothing is left of it.
  CallSite refusing(2, std::chrono::milliseconds(20000));
  for (int first = 0; first < 2; ++first) {
    std::shared_ptr<Ended> ended[2] = {std::make_shared<Ended>(), std::make_shared<Ended>()};
    for (int i = 0; i < 2; ++i) {
      const bool is_refused = i == first;
      Arrival arrival{is_refused ? 7 : 0, 0, 0, {1}, {{nullptr, nullptr}}, [one = ended[i]](const std::string* error) {
                        one->Complete(error);
                      }};
      if (is_refused) arrival.refused = "no such rank";
      if (refusing.Arrive({0, 0}, std::move(arrival))) return Fail("met with one who was refused");
    }
    if (ended[0]->Wait() != "no such rank" || ended[1]->Wait() != "no such rank") return Fail("a refusal was lost");
  }
  // A call site that goes while the watchdog still has its meeting.
  {
    CallSite gone(2, std::chrono::milliseconds(20));
    auto ended = std::make_shared<Ended>();
    gone.Arrive({0, 0}, {0, 0, 0, {1}, {{nullptr, nullptr}}, [ended](const std::string* error) {
                           ended->Complete(error);
                         }});
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  std::printf("ok\n");
  return 0;
}
