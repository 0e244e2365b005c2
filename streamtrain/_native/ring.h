// Ring: bytes from one writer to one reader, through memory that both have and either may damage.
//
// Positions count all bytes that were ever written and read. Each side goes by its own one, which nobody else can
// change, and only tells it to the other; what the other tells is checked. So the worst that a damaged ring does is to
// be refused, or to give bytes that were never written.
//
// Thread safety: the writer and the reader may be of two threads or processes; each is used by one thread at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace streamtrain {

// Plain memory, zero at first, which may lie in a file that two processes have mapped. Read and written by both: what is
// not `bytes`, through atomic_ref only.
template <size_t kSize>
struct RingMemory {
  alignas(64) uint64_t written = 0;
  alignas(64) uint64_t read = 0;
  alignas(64) char bytes[kSize];
};

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free && std::atomic_ref<uint64_t>::required_alignment <= 64);

// Bytes that may lie in a ring of `size`, by the positions that its two sides tell.
inline size_t bytes_within(uint64_t count, size_t size) {
  if (count > size) throw std::invalid_argument("the other side of a lane has damaged it");
  return size_t(count);
}

template <size_t kSize>
class RingWriter {
 public:
  // REQUIRES: nothing has been written to the memory; it outlives this.
  explicit RingWriter(RingMemory<kSize>& memory) : memory_(memory) {}

  // Throws: std::invalid_argument if the other side has damaged the ring.
  size_t room() const {
    const uint64_t read = std::atomic_ref(memory_.read).load(std::memory_order_acquire);
    return kSize - bytes_within(written_ - read, kSize);
  }

  // REQUIRES: size <= room().
  void write(const char* data, size_t size) {
    const size_t at = size_t(written_ % kSize), first = std::min(size, kSize - at);
    std::memcpy(memory_.bytes + at, data, first);
    std::memcpy(memory_.bytes, data + first, size - first);
    written_ += size;
    std::atomic_ref(memory_.written).store(written_, std::memory_order_release);
  }

 private:
  RingMemory<kSize>& memory_;
  uint64_t written_ = 0;
};

template <size_t kSize>
class RingReader {
 public:
  // REQUIRES: nothing has been read from the memory; it outlives this.
  explicit RingReader(RingMemory<kSize>& memory) : memory_(memory) {}

  // Throws: std::invalid_argument if the other side has damaged the ring.
  size_t available() const {
    return bytes_within(std::atomic_ref(memory_.written).load(std::memory_order_acquire) - read_, kSize);
  }

  // REQUIRES: size <= available().
  void read(char* to, size_t size) {
    const size_t at = size_t(read_ % kSize), first = std::min(size, kSize - at);
    std::memcpy(to, memory_.bytes + at, first);
    std::memcpy(to + first, memory_.bytes, size - first);
    read_ += size;
    std::atomic_ref(memory_.read).store(read_, std::memory_order_release);
  }

 private:
  RingMemory<kSize>& memory_;
  uint64_t read_ = 0;
};

}  // namespace streamtrain
