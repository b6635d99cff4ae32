#include "meeting.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "completions.h"

namespace skipreduce {
namespace {

using Clock = std::chrono::steady_clock;

struct Meeting {
  std::int64_t id = 0;
  std::int64_t ticket = -1;                      // with the watchdog
  std::vector<std::optional<Arrival>> arrivals;  // by rank
  int num_arrived = 0;
  std::string error;  // not empty once it has failed
};

void Complete(std::vector<std::optional<Arrival>>& arrivals, const std::string& error) {
  for (std::optional<Arrival>& arrival : arrivals) {
    if (!arrival) continue;
    RunInOwnThread([complete = std::move(arrival->complete), error] { complete(&error); });
    arrival.reset();
  }
}

std::string Missing(const Meeting& meeting, std::chrono::milliseconds time_limit) {
  std::ostringstream text;
  const int num_workers = static_cast<int>(meeting.arrivals.size());
  const int missing = num_workers - meeting.num_arrived;
  text << "skipreduce: " << meeting.num_arrived << " of " << num_workers << " workers came to an all-reduce and waited "
       << static_cast<double>(time_limit.count()) / 1e3 << " s for rank" << (missing > 1 ? "s" : "");
  constexpr int kMostNamed = 8;
  for (int rank = 0, named = 0; rank < num_workers && named <= kMostNamed; ++rank) {
    if (meeting.arrivals[rank]) continue;
    text << (named == 0 ? " " : ", ");
    if (named++ == kMostNamed) {
      text << "..";
    } else {
      text << rank;
    }
  }
  text << ". A branch or a loop bound that differs between workers makes some of them miss it. Where a step takes "
          "longer than that, set SKIPREDUCE_TIMEOUT (seconds) before the program is compiled";
  return text.str();
}

// What the workers do not agree on, or nothing.
std::string Disagreement(const std::vector<std::optional<Arrival>>& arrivals) {
  const Arrival& first = *arrivals.front();
  for (const std::optional<Arrival>& arrival : arrivals) {
    std::ostringstream text;
    const auto differs = [&](const char* name, int value, int other) {
      text << "skipreduce: " << name << " is " << value << " on rank 0 and " << other << " on rank " << arrival->rank
           << ": it has to be the same on all workers. Compute it from values that all share";
    };
    if (arrival->num_skipped != first.num_skipped) {
      differs("the number of skipped steps", first.num_skipped, arrival->num_skipped);
    } else if (arrival->shift != first.shift) {
      differs("the shift", first.shift, arrival->shift);
    } else if (arrival->sizes != first.sizes) {
      text << "skipreduce: ranks 0 and " << arrival->rank << " came with arrays of different sizes";
    }
    if (std::string found = text.str(); !found.empty()) return found;
  }
  return {};
}

}  // namespace

struct CallSite::State {
  std::size_t num_workers;
  std::chrono::milliseconds time_limit;
  std::mutex mutex;
  std::map<MeetingKey, Meeting> meetings;
  std::int64_t next_id = 0;

  void Expire(MeetingKey key, std::int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = meetings.find(key);
    if (found == meetings.end() || found->second.id != id || !found->second.error.empty()) return;
    Meeting& meeting = found->second;
    meeting.error = Missing(meeting, time_limit);
    Complete(meeting.arrivals, meeting.error);
  }
};

namespace {

// One thread that ends meetings which last too long.
class Watchdog {
 public:
  static Watchdog& Get() {
    // Never destroyed: its thread looks at it until the process ends.
    static Watchdog* const watchdog = new Watchdog;
    return *watchdog;
  }

  // Returns a ticket with which the meeting can be taken off.
  std::int64_t Watch(std::weak_ptr<CallSite::State> site, MeetingKey key, std::int64_t id, Clock::time_point deadline) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t ticket = next_ticket_++;
    open_.emplace(ticket, Entry{std::move(site), key, id, deadline});
    if (deadline < wakes_at_) wake_.notify_one();
    return ticket;
  }

  void Forget(std::int64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(ticket);
  }

 private:
  struct Entry {
    std::weak_ptr<CallSite::State> site;
    MeetingKey key;
    std::int64_t id;
    Clock::time_point deadline;
  };

  Watchdog() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const Clock::time_point now = Clock::now();
      std::vector<Entry> late;
      wakes_at_ = Clock::time_point::max();
      for (auto entry = open_.begin(); entry != open_.end();) {
        if (entry->second.deadline <= now) {
          late.push_back(std::move(entry->second));
          entry = open_.erase(entry);
        } else {
          wakes_at_ = std::min(wakes_at_, entry->second.deadline);
          ++entry;
        }
      }
      if (!late.empty()) {
        // Without the lock: a call site holds its own while it asks to be watched.
        lock.unlock();
        for (const Entry& entry : late) {
          if (const auto site = entry.site.lock()) site->Expire(entry.key, entry.id);
        }
        lock.lock();
        continue;
      }
      if (wakes_at_ == Clock::time_point::max()) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, wakes_at_);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::int64_t, Entry> open_;
  Clock::time_point wakes_at_ = Clock::time_point::max();
  std::int64_t next_ticket_ = 0;
};

}  // namespace

CallSite::CallSite(int num_workers, std::chrono::milliseconds time_limit) : state_(std::make_shared<State>()) {
  state_->num_workers = static_cast<std::size_t>(num_workers);
  state_->time_limit = time_limit;
}

std::optional<std::vector<Arrival>> CallSite::Arrive(MeetingKey key, Arrival arrival) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto [found, is_new] = state_->meetings.try_emplace(key);
  Meeting& meeting = found->second;
  if (is_new) {
    meeting.id = state_->next_id++;
    meeting.arrivals.resize(state_->num_workers);
    meeting.ticket = Watchdog::Get().Watch(state_, key, meeting.id, Clock::now() + state_->time_limit);
  }
  ++meeting.num_arrived;
  const std::size_t rank = static_cast<std::size_t>(arrival.rank);
  if (meeting.error.empty()) {
    if (!arrival.refused.empty()) {
      meeting.error = arrival.refused;
    } else if (meeting.arrivals[rank]) {
      meeting.error = "skipreduce: two workers came to an all-reduce as rank " + std::to_string(rank);
    }
    if (!meeting.error.empty()) Complete(meeting.arrivals, meeting.error);
  }
  if (!meeting.error.empty()) {
    RunInOwnThread([complete = std::move(arrival.complete), error = meeting.error] { complete(&error); });
  } else {
    meeting.arrivals[rank] = std::move(arrival);
  }
  if (meeting.num_arrived < static_cast<int>(state_->num_workers)) return std::nullopt;

  Meeting ended = std::move(meeting);
  state_->meetings.erase(found);
  Watchdog::Get().Forget(ended.ticket);
  if (!ended.error.empty()) return std::nullopt;
  if (const std::string error = Disagreement(ended.arrivals); !error.empty()) {
    Complete(ended.arrivals, error);
    return std::nullopt;
  }
  std::vector<Arrival> arrivals;
  arrivals.reserve(ended.arrivals.size());
  for (std::optional<Arrival>& present : ended.arrivals) arrivals.push_back(std::move(*present));
  return arrivals;
}

}  // namespace skipreduce
