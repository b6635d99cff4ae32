#include "completions.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace skipreduce {
namespace {

class Threads {
 public:
  void Run(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // A thread that waits takes one task, so there have to be as many of them.
      if (tasks_.size() < waiting_ || Start()) {
        tasks_.push_back(std::move(task));
        wake_.notify_one();
        return;
      }
    }
    // No more threads are to be had. Late is better than never: this may wait for who waits for this.
    task();
  }

 private:
  // Adds a thread, which counts as waiting from now on. Whether there is one.
  bool Start() {
    try {
      std::thread([this] { Loop(); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    ++waiting_;
    return true;
  }

  void Loop() {
    for (bool is_new = true;; is_new = false) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!is_new) ++waiting_;
        wake_.wait(lock, [this] { return !tasks_.empty(); });
        --waiting_;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::size_t waiting_ = 0;  // threads that will take the next task
};

}  // namespace

void RunInOwnThread(std::function<void()> task) {
  // Never destroyed: its threads wait in it until the process ends.
  static Threads* const threads = new Threads;
  threads->Run(std::move(task));
}

}  // namespace skipreduce
