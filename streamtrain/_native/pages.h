// Zeroed memory straight from the operating system, aligned to huge pages.
//
// The table's rows and the larger parts of its index live here rather than on the heap: untouched pages cost nothing,
// freed ones go back, and 2 MiB pages spare random reads most of their TLB misses.
//
// Thread safety: a Pages object is a plain owner, like a vector.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace streamtrain {

inline constexpr size_t kHugePage = size_t{2} << 20;

// Asks for a cache line. GCC takes a function that only prefetches for one without effect and drops calls of it; the
// empty statement, which it may not drop, keeps them.
template <int kForWriting = 0>
inline void prefetch_line(const void* p) {
  __builtin_prefetch(p, kForWriting);
  asm volatile("");
}

class Pages {
 public:
  Pages() = default;

  // `bytes` of zeroes, whose start is a multiple of kHugePage. The first `small_head` bytes (a multiple of kHugePage)
  // keep small pages, so that an almost empty mapping stays small in memory.
  explicit Pages(size_t bytes, size_t small_head = 0) : size_((bytes + 4095) & ~size_t{4095}) {
    void* mapped = ::mmap(nullptr, size_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* const begin = static_cast<std::byte*>(mapped);
    const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    data_ = begin + head;
    if (head) ::munmap(begin, head);
    if (head < kHugePage) ::munmap(data_ + size_, kHugePage - head);
#if defined(__linux__)
    // Only advice: without huge pages everything works, more slowly.
    if (small_head < size_) ::madvise(data_ + small_head, size_ - small_head, MADV_HUGEPAGE);
#else
    (void)small_head;
#endif
  }

  Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Pages() {
    if (data_) ::munmap(data_, size_);
  }

  // Lets the memory go of all whole pages from `begin` on, whose contents may be lost with it.
  void release(size_t begin) {
    begin = (begin + 4095) & ~size_t{4095};
    if (begin < size_) ::madvise(data_ + begin, size_ - begin, MADV_DONTNEED);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace streamtrain
