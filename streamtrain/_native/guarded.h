// A value that threads share, with its lock: many readers or one writer, by turns.
//
// Turns are fair between the two kinds. A reader that comes while a writer is at work or waits goes in when the next
// writer leaves, together with all other readers that wait by then; writers go in one by one, in the order they came,
// when the readers ahead of them have left. So no stream of readers starves a writer; and whoever does long work in
// short turns lets readers in between any two of them.
//
// Thread safety: any thread may call anything. A function that is given to read or write must not call either of the
// same value again, nor wait for a thread that does; above all it must not ask for a language runtime's own lock.
#pragma once

#include <concepts>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace streamtrain {

class FairLock {
 public:
  void lock() {
    std::unique_lock hold(mutex_);
    writers_.wait(hold, [&, turn = next_turn_++] { return turn_ == turn && readers_inside_ == 0; });
  }

  void unlock() {
    const std::lock_guard hold(mutex_);
    ++turn_;
    readers_inside_ = std::exchange(readers_waiting_, 0);
    if (readers_inside_) readers_.notify_all();
    else if (writers_about()) writers_.notify_all();
  }

  void lock_shared() {
    std::unique_lock hold(mutex_);
    if (!writers_about()) {
      ++readers_inside_;
      return;
    }
    ++readers_waiting_;  // the writer who leaves next counts this reader in
    readers_.wait(hold, [&, turn = turn_] { return turn_ != turn; });
  }

  void unlock_shared() {
    const std::lock_guard hold(mutex_);
    if (--readers_inside_ == 0 && writers_about()) writers_.notify_all();
  }

  // The number of the writer's turn, one more than the last writer's. REQUIRES: the caller has the lock for writing.
  uint64_t turn() const { return turn_; }

 private:
  bool writers_about() const { return turn_ != next_turn_; }

  std::mutex mutex_;
  std::condition_variable readers_, writers_;
  uint64_t turn_ = 0, next_turn_ = 0;  // of writers: whose it is, and what the next one to come gets
  uint32_t readers_inside_ = 0, readers_waiting_ = 0;
};

template <typename T>
class Guarded {
 public:
  template <typename... Args>
    requires std::constructible_from<T, Args...>
  explicit Guarded(Args&&... args) : value_(std::forward<Args>(args)...) {}

  // Runs look(value) together with other readers and returns what it does, by value.
  template <typename Look>
  auto read(Look look) const {
    const std::shared_lock hold(lock_);
    return look(value_);
  }

  // Runs change(value) alone and returns what it does, by value.
  template <typename Change>
  auto write(Change change) {
    const std::lock_guard hold(lock_);
    return change(value_);
  }

  // The number of this call of write: consecutive numbers mean that nothing was written in between.
  // REQUIRES: called inside write.
  uint64_t turn() const { return lock_.turn(); }

 private:
  mutable FairLock lock_;
  T value_;
};

}  // namespace streamtrain
