// Lane: messages between two processes of one machine, through memory that both have mapped.
//
// One process makes a lane, the other takes it by its file descriptor. There is a ring of bytes for each direction
// (ring.h); a message is its length, eight bytes little-endian, and its bytes, and may be longer than the ring. Who has
// nothing to read, or no room to write, sleeps on a futex of its side, which the other one wakes.
//
// The other side is not trusted. What it writes is copied before it is read; its positions are checked; the file
// is sealed, so that it cannot be cut short under its reader; and no wait lasts longer than its caller has allowed. A
// message that is given up in the middle closes this side of the lane, as nothing could follow on it.
//
// Thread safety: each side may read in one thread and write in several; `close` may be called by any.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "ring.h"

namespace streamtrain {

class Lane {
 public:
  using Nonce = std::array<unsigned char, 16>;

  static constexpr size_t kRing = size_t{1} << 20;  // bytes of each direction: both fit into a core's second-level cache

  // What became of a message. kLate: the other side has done nothing for too long; kStopped: `Patience::go_on` said so.
  enum class Result { kDone, kClosed, kLate, kStopped };

  // How long to wait.
  struct Patience {
    double seconds;                // in which the other side does nothing at all: it neither reads nor writes; may be infinite
    std::function<bool()> go_on;   // asked now and then, at least every second while waiting
  };

  // A new lane. The side that calls this is its maker.
  static Lane make() {
    const int fd = memfd_create("streamtrain-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) fail("memfd_create");
    auto memory = std::make_unique<Memory>(fd);
    if (ftruncate(fd, sizeof(Shared)) < 0 || fcntl(fd, F_ADD_SEALS, kSeals) < 0) fail("a lane's memory");
    memory->map();
    Nonce& nonce = memory->shared->nonce;
    if (getrandom(nonce.data(), nonce.size(), 0) != ssize_t(nonce.size())) fail("getrandom");
    return Lane(std::move(memory), 0);
  }

  // The other side of a lane: takes over `fd`.
  // Throws: std::invalid_argument if it is not a lane, or not the one with this nonce.
  static Lane take(int fd, const Nonce& nonce) {
    auto memory = std::make_unique<Memory>(fd);
    struct stat about;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &about) < 0 || about.st_size != off_t(sizeof(Shared)))
      throw std::invalid_argument("the file is not a lane");
    memory->map();
    if (memory->shared->nonce != nonce) throw std::invalid_argument("the file is another lane");
    return Lane(std::move(memory), 1);
  }

  Lane(Lane&& other) noexcept  // before anybody uses it
      : memory_(std::move(other.memory_)), side_(other.side_), out_(other.out_), in_(other.in_) {}
  Lane& operator=(Lane&&) = delete;

  int fd() const { return memory_->fd; }
  const Nonce& nonce() const { return memory_->shared->nonce; }

  // Writes a message. A maker that finds no room takes in what there is to read, so that two sides that write to each
  // other never wait for each other.
  // Throws: std::invalid_argument if the other side has damaged the lane.
  Result write(const char* data, size_t size, const Patience& patience) {
    std::lock_guard guard(writing_);
    const uint64_t length = size;
    Wait wait(*this, patience);
    Result result = put(reinterpret_cast<const char*>(&length), sizeof(length), wait);
    if (result == Result::kDone) result = put(data, size, wait);
    if (result != Result::kDone) close();
    return result;
  }

  // Writes a message if that takes no waiting at all; false: it does, or the lane is closed. Errors as of `write`.
  bool try_write(const char* data, size_t size) {
    std::unique_lock guard(writing_, std::try_to_lock);
    const uint64_t length = size;
    if (!guard.owns_lock() || closed_.load() || out_.room() < sizeof(length) + size) return false;
    out_.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out_.write(data, size);
    notify();
    return true;
  }

  // Waits for the beginning of a message, whose length is then `size`; `finish` must follow. Not kDone: nothing was read.
  // Throws: std::invalid_argument if the other side has written nonsense, or a message of more than `limit` bytes.
  Result begin(uint64_t& size, uint64_t limit, const Patience& patience) {
    Wait wait(*this, patience);
    while (true) {
      const uint32_t seen = event().load();
      if (closed_.load()) return Result::kClosed;  // even if there is more to read: the answer is not awaited
      if (ready() >= sizeof(size)) break;
      if (const Result result = wait.more(seen); result != Result::kDone) return result;
    }
    get(reinterpret_cast<char*>(&size), sizeof(size));
    if (size <= limit) return Result::kDone;
    close();
    throw std::invalid_argument("a message of " + std::to_string(size) + " bytes; at most " + std::to_string(limit));
  }

  // How much of what is being read is there already.
  size_t ready() {
    std::lock_guard guard(reading_);
    return aside_.size() - aside_read_ + in_.available();
  }

  // Reads the bytes of a message that has begun.
  Result finish(char* to, size_t size, const Patience& patience) {
    Wait wait(*this, patience);
    while (size > 0) {
      const uint32_t seen = event().load();
      const size_t part = std::min(size, ready());
      if (part == 0) {
        const Result result = closed_.load() ? Result::kClosed : wait.more(seen);
        if (result == Result::kDone) continue;
        close();
        return result;
      }
      get(to, part);
      wait.moved();
      to += part;
      size -= part;
    }
    return Result::kDone;
  }

  // Ends what this side waits for. The other side does not notice.
  void close() {
    closed_.store(true);
    Side& mine = memory_->shared->sides[side_];
    Word(mine.event).fetch_add(1);
    wake(mine);
  }

  // Whether this call begins to be the one that reads; `leave` must follow.
  bool enter() { return !is_read_.exchange(true); }
  void leave() { is_read_.store(false); }

 private:
  static constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  static constexpr double kLook = 1.0;        // seconds after which a sleeper looks again, whatever happens
  static constexpr size_t kPart = kRing / 4;  // how much is written before the other side may begin to read it

  struct Side {
    alignas(64) uint32_t event;  // grows whenever the other side has written or read
    uint32_t sleeping;
  };
  struct Shared {
    Nonce nonce;
    Side sides[2];
    RingMemory<kRing> rings[2];  // the maker writes the first one
  };
  using Word = std::atomic_ref<uint32_t>;
  static_assert(Word::is_always_lock_free);

  // The file, and where it is mapped.
  struct Memory {
    explicit Memory(int fd_) : fd(fd_) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() {
      if (shared != nullptr) munmap(shared, sizeof(Shared));
      ::close(fd);
    }

    void map() {
      void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (at == MAP_FAILED) fail("mmap");
      shared = static_cast<Shared*>(at);
    }

    const int fd;
    Shared* shared = nullptr;
  };

  // The waiting of one call. Time counts from when there is first nothing to do, and from each time that it has moved on.
  class Wait {
   public:
    Wait(Lane& lane, const Patience& patience) : lane_(lane), patience_(patience) {}

    void moved() { has_moved_ = true; }

    // Sleeps until something may have happened since `seen`; kDone: look again.
    Result more(uint32_t seen) {
      const auto now = std::chrono::steady_clock::now();
      if (std::exchange(has_moved_, false)) since_ = now;
      const double left = patience_.seconds - std::chrono::duration<double>(now - since_).count();
      if (left <= 0) return Result::kLate;
      if (!lane_.sleep(seen, std::min(left, kLook)) && !patience_.go_on()) return Result::kStopped;
      return Result::kDone;
    }

   private:
    Lane& lane_;
    const Patience& patience_;
    bool has_moved_ = true;
    std::chrono::steady_clock::time_point since_;
  };

  Lane(std::unique_ptr<Memory> memory, int side)
      : memory_(std::move(memory)), side_(side), out_(memory_->shared->rings[side]), in_(memory_->shared->rings[1 - side]) {}

  [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

  Word event() { return Word(memory_->shared->sides[side_].event); }

  // False: the time is over, or a signal has come. `seen` is the event from before there was nothing to do.
  bool sleep(uint32_t seen, double seconds) {
    Side& side = memory_->shared->sides[side_];
    const auto whole = static_cast<time_t>(seconds);
    const timespec time{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
    Word(side.sleeping).fetch_add(1);
    const long result = syscall(SYS_futex, &side.event, FUTEX_WAIT, seen, &time, nullptr, 0);
    const int error = errno;
    Word(side.sleeping).fetch_sub(1);
    return result == 0 || error == EAGAIN;
  }

  static void wake(Side& side) { syscall(SYS_futex, &side.event, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

  // Tells the other side that there is something to read, or room to write.
  void notify() {
    Side& other = memory_->shared->sides[1 - side_];
    Word(other.event).fetch_add(1);
    if (Word(other.sleeping).load() != 0) wake(other);
  }

  Result put(const char* data, size_t size, Wait& wait) {
    while (size > 0) {
      const uint32_t seen = event().load();
      if (closed_.load()) return Result::kClosed;
      const size_t part = std::min({size, out_.room(), kPart});
      if (part == 0) {
        if (take_in()) {
          wait.moved();
        } else if (const Result result = wait.more(seen); result != Result::kDone) {
          return result;
        }
        continue;
      }
      out_.write(data, part);
      notify();
      wait.moved();
      data += part;
      size -= part;
    }
    return Result::kDone;
  }

  // Moves what has been written to this side out of the other one's way; false: there is nothing, or it is being read.
  bool take_in() {
    if (side_ != 0) return false;
    std::unique_lock guard(reading_, std::try_to_lock);
    if (!guard.owns_lock()) return false;
    const size_t count = in_.available();
    if (count == 0) return false;
    const size_t before = aside_.size();
    aside_.resize(before + count);
    in_.read(aside_.data() + before, count);
    notify();
    return true;
  }

  void get(char* to, size_t size) {
    std::lock_guard guard(reading_);
    const size_t kept = std::min(size, aside_.size() - aside_read_);
    std::memcpy(to, aside_.data() + aside_read_, kept);
    aside_read_ += kept;
    if (aside_read_ == aside_.size()) {
      aside_.clear();
      aside_read_ = 0;
    }
    if (size == kept) return;
    in_.read(to + kept, size - kept);
    notify();
  }

  std::unique_ptr<Memory> memory_;
  const int side_;
  RingWriter<kRing> out_;
  RingReader<kRing> in_;
  std::atomic<bool> closed_{false}, is_read_{false};
  std::mutex writing_, reading_;
  std::string aside_;  // what was read before anybody asked for it
  size_t aside_read_ = 0;
};

}  // namespace streamtrain
