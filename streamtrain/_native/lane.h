// Lane: messages between two processes of one machine, through memory that both have mapped.
//
// One process makes a lane, the other takes it by its file descriptor. There is a ring of bytes for each direction; a
// message is its length, eight bytes little-endian, and its bytes, and may be longer than the ring. Who has nothing to
// read, or no room to write, sleeps on a futex of its side, which the other one wakes.
//
// The other side is not trusted. What it writes is copied before anybody looks at it; its positions are checked; and the
// file is sealed, so that it cannot be cut short under who reads it.
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
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace streamtrain {

class Lane {
 public:
  using Nonce = std::array<unsigned char, 16>;

  static constexpr size_t kRing = size_t{1} << 20;  // bytes of each direction: both fit into a core's second-level cache

  // A new lane. The side that calls this is its maker.
  static Lane make() {
    const int fd = memfd_create("streamtrain-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) fail("memfd_create");
    Lane lane(fd, 0);
    if (ftruncate(fd, sizeof(Shared)) < 0 || fcntl(fd, F_ADD_SEALS, kSeals) < 0) fail("a lane's memory");
    lane.map();
    if (getrandom(lane.shared_->nonce.data(), lane.shared_->nonce.size(), 0) != ssize_t(lane.shared_->nonce.size()))
      fail("getrandom");
    return lane;
  }

  // The other side of a lane: takes over `fd`.
  // Throws: std::invalid_argument if it is no lane, or not the one with this nonce.
  static Lane take(int fd, const Nonce& nonce) {
    Lane lane(fd, 1);
    struct stat about;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &about) < 0 || about.st_size != off_t(sizeof(Shared)))
      throw std::invalid_argument("the file is no lane");
    lane.map();
    if (lane.shared_->nonce != nonce) throw std::invalid_argument("the file is another lane");
    return lane;
  }

  Lane(Lane&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), side_(other.side_), shared_(std::exchange(other.shared_, nullptr)) {}
  Lane& operator=(Lane&&) = delete;
  ~Lane() {
    if (shared_ != nullptr) munmap(shared_, sizeof(Shared));
    if (fd_ >= 0) ::close(fd_);
  }

  int fd() const { return fd_; }
  const Nonce& nonce() const { return shared_->nonce; }

  // Writes a message; false: the lane is closed. A maker that finds no room takes in what there is to read, so that two
  // sides that write to each other never wait for each other.
  bool write(const char* data, size_t size) {
    std::lock_guard guard(writing_);
    const uint64_t length = size;
    return put(reinterpret_cast<const char*>(&length), sizeof(length)) && put(data, size);
  }

  enum class Heard { kMessage, kNothing, kClosed };

  // Waits for the beginning of a message, for at most so long; kMessage: `size` is its length, and `finish` must follow.
  // Throws: std::invalid_argument if the other side has written nonsense.
  Heard begin(uint64_t& size, int milliseconds) {
    while (true) {
      const uint32_t seen = event().load();
      if (closed_.load()) return Heard::kClosed;  // also if there is more to read: nobody waits for the answer
      if (available() >= sizeof(size)) break;
      if (!sleep(seen, milliseconds)) return Heard::kNothing;
    }
    get(reinterpret_cast<char*>(&size), sizeof(size));
    return Heard::kMessage;
  }

  // How much of what is being read is there already.
  size_t ready() { return available(); }

  // Reads the bytes of a message that has begun; false: the lane is closed.
  bool finish(char* to, size_t size) {
    while (size > 0) {
      const uint32_t seen = event().load();
      const size_t part = std::min(size, available());
      if (part == 0) {
        if (closed_.load()) return false;
        sleep(seen, kLook);
        continue;
      }
      get(to, part);
      to += part;
      size -= part;
    }
    return true;
  }

  // Ends what this side waits for. The other side does not notice.
  void close() {
    closed_.store(true);
    event().fetch_add(1);
    wake(event());
  }

 private:
  static constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  static constexpr int kLook = 1000;  // milliseconds after which a sleeper looks again, whatever happens
  static constexpr size_t kPart = kRing / 4;  // how much is written before the other side may begin to read it

  struct Ring {
    alignas(64) std::atomic<uint64_t> written{0};
    alignas(64) std::atomic<uint64_t> read{0};
    alignas(64) char bytes[kRing];
  };
  struct Side {
    alignas(64) std::atomic<uint32_t> event{0};  // grows whenever the other side has written or read
    std::atomic<uint32_t> sleeping{0};
  };
  struct Shared {
    Nonce nonce;
    Side sides[2];
    Ring rings[2];  // the maker writes the first one
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

  Lane(int fd, int side) : fd_(fd), side_(side) {}

  void map() {
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) fail("mmap");
    shared_ = static_cast<Shared*>(at);
  }

  [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

  Ring& out() { return shared_->rings[side_]; }
  Ring& in() { return shared_->rings[1 - side_]; }
  std::atomic<uint32_t>& event() { return shared_->sides[side_].event; }

  // False: the time is over, or a signal has come. `seen` is the event from before there was nothing to do.
  bool sleep(uint32_t seen, int milliseconds) {
    std::atomic<uint32_t>& sleeping = shared_->sides[side_].sleeping;
    const timespec time{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
    sleeping.fetch_add(1);
    const long result = syscall(SYS_futex, &event(), FUTEX_WAIT, seen, &time, nullptr, 0);
    const int error = errno;
    sleeping.fetch_sub(1);
    return result == 0 || error == EAGAIN;
  }

  static void wake(std::atomic<uint32_t>& event) { syscall(SYS_futex, &event, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

  // Tells the other side that there is something to read, or room to write.
  void notify() {
    Side& other = shared_->sides[1 - side_];
    other.event.fetch_add(1);
    if (other.sleeping.load() != 0) wake(other.event);
  }

  // Bytes of `count` that may lie in a ring, by the positions that its two sides tell.
  static size_t within(uint64_t count) {
    if (count > kRing) throw std::invalid_argument("the other side of a lane has damaged it");
    return size_t(count);
  }

  static size_t at(uint64_t position) { return size_t(position % kRing); }

  bool put(const char* data, size_t size) {
    Ring& ring = out();
    while (size > 0) {
      const uint32_t seen = event().load();
      if (closed_.load()) return false;
      const size_t room = kRing - within(written_ - ring.read.load(std::memory_order_acquire));
      const size_t part = std::min({size, room, kPart});
      if (part == 0) {
        if (!take_in()) sleep(seen, kLook);
        continue;
      }
      const size_t first = std::min(part, kRing - at(written_));
      std::memcpy(ring.bytes + at(written_), data, first);
      std::memcpy(ring.bytes, data + first, part - first);
      written_ += part;
      ring.written.store(written_, std::memory_order_release);
      notify();
      data += part;
      size -= part;
    }
    return true;
  }

  // Moves what has been written to this side out of the other one's way; false: there is nothing, or it is being read.
  bool take_in() {
    if (side_ != 0) return false;
    std::unique_lock guard(reading_, std::try_to_lock);
    if (!guard.owns_lock()) return false;
    const size_t count = in_ring();
    if (count == 0) return false;
    const size_t before = aside_.size();
    aside_.resize(before + count);
    from_ring(aside_.data() + before, count);
    return true;
  }

  size_t available() {
    std::lock_guard guard(reading_);
    return aside_.size() - aside_read_ + in_ring();
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
    if (size > kept) from_ring(to + kept, size - kept);
  }

  size_t in_ring() { return within(in().written.load(std::memory_order_acquire) - read_); }

  void from_ring(char* to, size_t size) {
    Ring& ring = in();
    const size_t first = std::min(size, kRing - at(read_));
    std::memcpy(to, ring.bytes + at(read_), first);
    std::memcpy(to + first, ring.bytes, size - first);
    read_ += size;
    ring.read.store(read_, std::memory_order_release);
    notify();
  }

  int fd_;
  const int side_;
  Shared* shared_ = nullptr;
  std::atomic<bool> closed_{false};
  std::mutex writing_, reading_;
  uint64_t written_ = 0, read_ = 0;  // this side's own positions: those in the ring can be changed by the other one
  std::string aside_;                // what was read before anybody asked for it
  size_t aside_read_ = 0;
};

}  // namespace streamtrain
