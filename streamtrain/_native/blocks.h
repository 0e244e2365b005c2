// Files without a name that are read in blocks, many at a time.
//
// A file goes with the process that has it open, whatever ends it, so there is nothing to clean up. The page cache is
// passed by where the file system allows it: what is in memory is then what the caller keeps there.
//
// Thread safety: any thread may call anything at any time, if nobody reads what is being written.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace streamtrain {

// What offsets, sizes and addresses are multiples of.
inline constexpr size_t kBlockAlign = 512;

// Memory that blocks can be read into and written from.
class BlockMemory {
 public:
  BlockMemory() = default;
  explicit BlockMemory(size_t size)
      : data_(static_cast<std::byte*>(::operator new(size, std::align_val_t{4096}))), size_(size) {}

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{4096}); }
  };

  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

class BlockFile {
 public:
  // A new file in a folder. Throws std::system_error.
  explicit BlockFile(const std::string& folder);
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;
  ~BlockFile();

  // Throws std::system_error, above all if the disk is full, and std::runtime_error in a fork of the process that made
  // the file, which goes on writing it; what was to be written is then not there.
  void write(const std::byte* data, size_t size, uint64_t offset) const;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
  pid_t process_;
};

struct BlockRead {
  const BlockFile* file;
  uint64_t offset;
  std::byte* to;
  size_t size;
};

// Reads them all, as many at a time as disks like: by io_uring, or where that is not allowed by threads.
// Throws std::system_error, or std::runtime_error if a file is too short.
void read_blocks(const std::vector<BlockRead>& reads);

}  // namespace streamtrain
