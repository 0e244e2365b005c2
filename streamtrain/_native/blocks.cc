#include "blocks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define STREAMTRAIN_URING 1
#endif

namespace streamtrain {
namespace {

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

int open_unnamed(const std::string& folder) {
#if defined(O_TMPFILE)
#if defined(O_DIRECT)
  if (const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600); fd >= 0) return fd;
#endif
  if (const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); fd >= 0) return fd;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) return -1;
#endif
  std::string name = folder + "/rows-XXXXXX";
  const int fd = ::mkstemp(name.data());
  if (fd >= 0) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    ::unlink(name.c_str());
  }
  return fd;
}

void check_read(ssize_t result, const BlockRead& of) {
  if (result < 0) fail(static_cast<int>(-result), "reading rows from disk");
  if (static_cast<size_t>(result) != of.size) throw std::runtime_error("a file with rows of a table has become shorter");
}

void read_one(const BlockRead& of) {
  ssize_t result;
  do result = ::pread(of.file->descriptor(), of.to, of.size, static_cast<off_t>(of.offset));
  while (result < 0 && errno == EINTR);
  check_read(result < 0 ? -errno : result, of);
}

void read_by_threads(const std::vector<BlockRead>& reads) {
  constexpr size_t kThreads = 16, kEach = 4;
  std::atomic<size_t> next{0};
  std::exception_ptr failed;
  std::mutex mutex;
  const auto work = [&] {
    try {
      for (size_t i; (i = next.fetch_add(1)) < reads.size();) read_one(reads[i]);
    } catch (...) {
      const std::lock_guard hold(mutex);
      failed = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (size_t n = std::min(kThreads, reads.size() / kEach); threads.size() < n;) threads.emplace_back(work);
  work();
  for (std::thread& one : threads) one.join();
  if (failed) std::rethrow_exception(failed);
}

#if STREAMTRAIN_URING

// A ring of the kernel's, used by one thread at a time. All that was asked for is there when a call returns, also by
// an exception: the kernel writes into memory of the caller's.
class Ring {
 public:
  static constexpr unsigned kDepth = 128;

  // Nothing where the kernel has no rings, or does not allow them.
  static std::unique_ptr<Ring> open() {
    io_uring_params params{};
    const long fd = ::syscall(__NR_io_uring_setup, kDepth, &params);
    if (fd < 0) return nullptr;
    std::unique_ptr<Ring> ring(new Ring(static_cast<int>(fd)));
    return ring->map(params) ? std::move(ring) : nullptr;
  }

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    for (const auto& [data, size] : maps_)
      if (data) ::munmap(data, size);
    ::close(fd_);
  }

  void read(const std::vector<BlockRead>& reads) {
    std::exception_ptr failed;
    size_t asked = 0, done = 0;
    while (done < reads.size()) {
      unsigned tail = *sq_tail_, fresh = 0;
      for (; asked < reads.size() && asked - done < kDepth; ++asked, ++fresh) {
        const BlockRead& of = reads[asked];
        io_uring_sqe& entry = entries_[tail & *sq_mask_];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = IORING_OP_READ;
        entry.fd = of.file->descriptor();
        entry.addr = reinterpret_cast<uint64_t>(of.to);
        entry.len = static_cast<uint32_t>(of.size);
        entry.off = of.offset;
        entry.user_data = asked;
        sq_array_[tail & *sq_mask_] = tail & *sq_mask_;
        ++tail;
      }
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
      submit(fresh);
      // Half of the ring is waited for at once: fewer calls, and the disk stays busy.
      enter(0, static_cast<unsigned>(std::min<size_t>(asked - done, asked < reads.size() ? kDepth / 2 : kDepth)));
      unsigned head = *cq_head_;
      for (const unsigned end = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); head != end; ++head, ++done) {
        const io_uring_cqe& ended = completions_[head & *cq_mask_];
        try {
          const BlockRead& of = reads[ended.user_data];
          if (ended.res == -EAGAIN || ended.res == -EINTR) read_one(of);
          else check_read(ended.res, of);
        } catch (...) {
          failed = std::current_exception();
        }
      }
      __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    }
    if (failed) std::rethrow_exception(failed);
  }

 private:
  explicit Ring(int fd) : fd_(fd) {}

  bool map(const io_uring_params& p) {
    std::byte* sq = map(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    std::byte* cq = map(p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    std::byte* entries = map(p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (!sq || !cq || !entries) return false;
    const auto at = [](std::byte* base, uint32_t offset) { return reinterpret_cast<unsigned*>(base + offset); };
    sq_tail_ = at(sq, p.sq_off.tail);
    sq_mask_ = at(sq, p.sq_off.ring_mask);
    sq_array_ = at(sq, p.sq_off.array);
    cq_head_ = at(cq, p.cq_off.head);
    cq_tail_ = at(cq, p.cq_off.tail);
    cq_mask_ = at(cq, p.cq_off.ring_mask);
    entries_ = reinterpret_cast<io_uring_sqe*>(entries);
    completions_ = reinterpret_cast<io_uring_cqe*>(cq + p.cq_off.cqes);
    return true;
  }
  std::byte* map(size_t size, uint64_t offset) {
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    if (data == MAP_FAILED) return nullptr;
    maps_[mapped_++] = {data, size};
    return static_cast<std::byte*>(data);
  }

  void submit(unsigned count) {
    while (count) count -= enter(count, 0);
  }
  unsigned enter(unsigned count, unsigned wait) {
    for (;;) {
      const long result = ::syscall(__NR_io_uring_enter, fd_, count, wait, wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
      if (result >= 0) return static_cast<unsigned>(result);
      if (errno == EINTR || errno == EAGAIN || errno == EBUSY) continue;
      // Reads may be under way into memory that its owner would let go of.
      std::terminate();
    }
  }

  int fd_;
  std::array<std::pair<void*, size_t>, 3> maps_{};
  size_t mapped_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_mask_ = nullptr, *sq_array_ = nullptr;
  unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr, *cq_mask_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
};

// Rings that nobody uses just now. Never destroyed: threads may outlive static objects.
class Rings {
 public:
  std::unique_ptr<Ring> take() {
    const std::lock_guard hold(mutex_);
    if (!allowed_) return nullptr;
    if (const pid_t own = ::getpid(); process_ != own) {  // a fork: those are its parent's, whose memory they share
      for (auto& ring : rings_) static_cast<void>(ring.release());
      rings_.clear();
      process_ = own;
    }
    if (rings_.empty()) {
      auto ring = Ring::open();
      allowed_ = ring != nullptr;
      return ring;
    }
    auto ring = std::move(rings_.back());
    rings_.pop_back();
    return ring;
  }
  void give(std::unique_ptr<Ring> ring) {
    const std::lock_guard hold(mutex_);
    rings_.push_back(std::move(ring));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_;
  pid_t process_ = ::getpid();
  bool allowed_ = !std::getenv("STREAMTRAIN_NO_IO_URING");
};

Rings& rings() {
  static auto* const all = new Rings;
  return *all;
}

#endif

}  // namespace

BlockFile::BlockFile(const std::string& folder) : descriptor_(open_unnamed(folder)), process_(::getpid()) {
  if (descriptor_ < 0) fail(errno, ("a new file in " + folder).c_str());
}

BlockFile::~BlockFile() { ::close(descriptor_); }

void BlockFile::write(const std::byte* data, size_t size, uint64_t offset) const {
  if (::getpid() != process_) throw std::runtime_error("this is a fork of the process whose file it is");
  while (size) {
    const ssize_t result = ::pwrite(descriptor_, data, size, static_cast<off_t>(offset));
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) fail(errno, "writing rows to disk");
    // A full disk can take a part of a block, which direct writes could not go on from.
    const size_t whole = static_cast<size_t>(result) / kBlockAlign * kBlockAlign;
    if (!whole) fail(ENOSPC, "writing rows to disk");
    data += whole;
    offset += whole;
    size -= whole;
  }
}

void read_blocks(const std::vector<BlockRead>& reads) {
  if (reads.empty()) return;
  if (reads.size() == 1) return read_one(reads.front());
#if STREAMTRAIN_URING
  if (auto ring = rings().take()) {
    struct Back {
      std::unique_ptr<Ring>& ring;
      ~Back() { rings().give(std::move(ring)); }
    } const back{ring};
    return ring->read(reads);
  }
#endif
  read_by_threads(reads);
}

}  // namespace streamtrain
