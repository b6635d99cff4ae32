// Where the workers of one collective call meet.

#ifndef SKIPREDUCE_MEETING_H_
#define SKIPREDUCE_MEETING_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu_reduce.h"

namespace skipreduce {

// Told when a worker's part in a collective has ended: with null, or with what went wrong. Called once.
using Completion = std::function<void(const std::string* error)>;

// A worker that has come to a call.
struct Arrival {
  int rank;  // in range, unless `refused`
  int num_skipped;
  int shift;
  std::vector<std::int64_t> sizes;
  std::vector<Array> arrays;
  Completion complete;
  std::string refused = {};  // why it cannot take part, which ends the call for all; empty if it can
};

// Which call of a call site: executions of the program have each a number, and each group of workers meets by itself.
struct MeetingKey {
  std::int64_t run;
  int group;
  bool operator<(const MeetingKey& other) const {
    return run != other.run ? run < other.run : group < other.group;
  }
};

// One place in a program at which `num_workers` workers meet, again and again. Its functions may be called from any
// thread, and none of them waits for another worker.
class CallSite {
 public:
  CallSite(int num_workers, std::chrono::milliseconds time_limit);

  // Notes that a worker has arrived. If it is the last one, and all agree, returns the arrivals by rank, which the
  // caller then serves and completes. Completes with an error all who met where one was refused, where workers disagree,
  // where one is missing when the time limit has passed since the first arrived, and whoever comes later than that.
  std::optional<std::vector<Arrival>> Arrive(MeetingKey key, Arrival arrival);

  // Shared with the watchdog, which may outlive the call site. Defined in meeting.cc.
  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace skipreduce

#endif  // SKIPREDUCE_MEETING_H_
