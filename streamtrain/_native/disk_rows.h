// The rows of a table that are not in memory: an index in memory, and rows in append-only segments on disk.
//
// Rows are appended in blocks with a checksum, blocks gather in chunks of up to 256 KiB that are written at once, and
// chunks follow one another in segments, files of their own. What is not yet written is read from memory. A row that is
// taken back leaves a hole; a segment of holes only goes, and what little lives in others can be moved (see victim).
// Rows on disk never change: who has found one under a lock can read it without.
//
// A row's number is segment number * rows of a segment + its position. A number can be used again once its segment has
// gone; whoever read a row shows the segment as well (holds).
//
// There can be a view: the rows as of one moment. A row of it that is taken before it has been read is to be put aside;
// no segment goes meanwhile, and none should be compacted.
//
// Thread safety: external synchronisation, but for DiskRead::read, DiskPart::read and Chunk::write, which need none.
// Invariants: the index holds exactly the live rows; segment.live counts them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "disk_index.h"

namespace streamtrain {

// How rows are laid out on disk.
struct DiskLayout {
  static constexpr size_t kSegmentBytes = size_t{64} << 20;

  size_t stride, block_bytes;
  uint32_t block_rows, chunk_blocks, segment_chunks;

  DiskLayout(size_t stride, size_t segment_bytes);

  size_t chunk_bytes() const { return chunk_blocks * block_bytes; }
  uint32_t chunk_rows() const { return chunk_blocks * block_rows; }
  uint32_t segment_rows() const { return segment_chunks * chunk_rows(); }
  size_t offset(uint32_t row) const { return row / block_rows * block_bytes; }  // of its block
  size_t within(uint32_t row) const { return row % block_rows * stride; }       // its block
};

class DiskRows;
struct Segment;

struct Chunk {
  const DiskRows* of;
  std::shared_ptr<Segment> segment;
  uint32_t index;  // in the segment
  BlockMemory memory;

  // Throws std::system_error. REQUIRES: it is full, and nobody else does.
  void write() const;
  uint32_t rows() const;
};

struct Segment {
  Segment(uint32_t its_number, uint64_t its_serial) : number(its_number), serial(its_serial) {}

  const uint32_t number;
  const uint64_t serial;  // of all segments of this process; part of checksums
  uint32_t rows = 0, live = 0;
  uint32_t oldest = UINT32_MAX;          // no row has a time before; see DiskRows::looked_at
  uint32_t looked_until = 0, looked_oldest = UINT32_MAX;
  uint32_t view_read = 0, view_end = 0;  // rows of the view that are still to be read
  std::vector<std::shared_ptr<Chunk>> chunks;  // null: written
  std::mutex opening;                          // of the file, as several chunks may be written at a time
  std::unique_ptr<const BlockFile> file;       // from the first chunk that is written on
};

// Rows that a call needs, found on disk, and then what they are.
struct DiskRead {
  struct Item {
    uint64_t key;
    uint32_t position;  // in the call
    uint64_t row;
    std::shared_ptr<const Segment> segment;
    bool in_memory;
  };

  explicit DiskRead(const DiskLayout& of) : layout(&of) {}

  bool empty() const { return items.empty(); }
  void clear() {
    items.clear();
    bytes.clear();
  }
  const std::byte* row(size_t i) const { return bytes.data() + i * layout->stride; }
  void leave_out(const std::vector<Item>& others);

  // Reads those that are not in memory. Throws as read_blocks does, and std::runtime_error for a block that is damaged.
  void read();

  const DiskLayout* layout;
  std::vector<Item> items;
  std::vector<std::byte> bytes;  // [items, stride]
};

// Rows that follow one another on disk.
struct DiskPart {
  std::shared_ptr<const Segment> segment;
  uint32_t begin = 0, end = 0;  // positions in the segment
  const DiskLayout* layout = nullptr;
  bool in_memory = false;
  BlockMemory memory;  // their blocks, once read

  const std::byte* row(uint32_t position) const {
    return memory.data() + layout->offset(position) - layout->offset(begin) + layout->within(position);
  }
  uint64_t number(uint32_t position) const { return uint64_t{segment->number} * layout->segment_rows() + position; }

  void read();  // throws as DiskRead::read does
};

class DiskRows {
 public:
  static constexpr size_t kBacklog = 16;  // chunks

  DiskRows(size_t stride, std::string folder, size_t segment_bytes)
      : layout_(stride, segment_bytes), folder_(std::move(folder)) {}
  DiskRows(const DiskRows&) = delete;
  DiskRows& operator=(const DiskRows&) = delete;
  ~DiskRows() {
    for (const auto& segment : segments_)
      if (segment) segment->chunks.clear();  // chunks and segments hold each other
  }

  const DiskLayout& layout() const { return layout_; }
  const std::string& folder() const { return folder_; }
  uint64_t live() const { return live_; }
  uint64_t rows() const { return rows_; }  // with holes
  size_t memory_bytes() const;
  uint64_t disk_bytes() const { return disk_bytes_; }
  uint64_t written_bytes() const { return written_bytes_; }

  // Adds the rows that may be the key's. REQUIRES: the key is not in memory.
  void want(uint64_t key, uint32_t position, DiskRead& out) const;
  void prefetch(uint64_t key) const { index_.prefetch(key); }
  void reserve(uint64_t keys) { index_.reserve(keys); }
  bool has(uint64_t key, uint64_t row) const { return index_.has(key, row); }
  // Whether the part's segment is still there.
  bool has(const DiskPart& part) const { return segments_[part.segment->number] == part.segment; }
  // Whether the row is still there. It is its key's if the keys are equal.
  bool holds(const DiskRead::Item& item) const {
    return segments_[segment_of(item.row)] == item.segment && index_.has(item.key, item.row);
  }

  // The row will be in memory, or nowhere. REQUIRES: has(key, row).
  void take(uint64_t key, uint64_t row) noexcept;
  // The key's row if it is in a chunk that is not yet written.
  std::optional<uint64_t> unwritten(uint64_t key) const;
  // REQUIRES: the key is absent. Throws std::length_error. The time is that of `before` below.
  void append(uint64_t key, const std::byte* row, uint32_t time);

  // Chunks to be written: the next one, which then is the caller's to write, and what became of it.
  std::shared_ptr<Chunk> next_chunk();
  void written(const std::shared_ptr<Chunk>& chunk, bool well);
  size_t backlog() const { return full_.size() + writing_; }

  // The rows from a place on, at most `limit` and perhaps fewer; the place is that after them. Nothing at the end.
  struct Place {
    uint32_t segment = 0, row = 0;  // numbers

    bool operator==(const Place&) const = default;
  };
  // `before`: segments are left out that have no row with a time before it.
  std::optional<DiskPart> part(Place& from, uint32_t limit, uint32_t before = UINT32_MAX) const;
  // A part was gone through, the earliest time in which is this: so a segment knows its oldest row better when all of it
  // was, one part after another.
  void looked_at(const DiskPart& part, uint32_t oldest);
  // The rows from a position of a segment on, or of the next one that came later; nothing at the end. Rows that are
  // appended or relocated meanwhile are in what comes then.
  std::optional<DiskPart> part_since(uint64_t serial, uint32_t position, uint32_t limit) const;

  // The segment with the fewest rows, if more than a third of all that is there are holes.
  struct Victim {
    uint32_t number;
    uint64_t serial;
  };
  std::optional<Victim> victim() const;
  // To the end of the segments, from a segment that is no longer appended to. REQUIRES: has(key, row).
  void relocate(uint64_t key, uint64_t row, const std::byte* bytes, uint32_t time);

  void begin_view();
  bool view_open() const { return view_open_; }
  bool unread(uint64_t row) const {
    const Segment& s = *segments_[segment_of(row)];
    const uint32_t position = position_of(row);
    return position >= s.view_read && position < s.view_end;
  }
  // The next rows of the view, some of which may have been taken.
  std::optional<DiskPart> view_part(uint32_t limit) const;
  // It is read now; false if it was before.
  bool viewed(const DiskPart& part);
  void end_view();

 private:
  uint32_t segment_of(uint64_t row) const { return static_cast<uint32_t>(row / layout_.segment_rows()); }
  uint32_t position_of(uint64_t row) const { return static_cast<uint32_t>(row % layout_.segment_rows()); }
  DiskPart rows_of(const std::shared_ptr<Segment>& segment, uint32_t begin, uint32_t limit, uint32_t end) const;
  uint64_t place(const std::byte* row, uint32_t time);
  void drop_if_empty(uint32_t number) noexcept;

  DiskLayout layout_;
  std::string folder_;
  DiskIndex index_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by number; null: free
  std::map<uint64_t, Segment*> by_serial_;
  std::vector<uint32_t> free_;                      // numbers
  std::shared_ptr<Segment> active_;
  std::deque<std::shared_ptr<Chunk>> full_;
  size_t writing_ = 0, chunks_ = 0;
  uint64_t live_ = 0, rows_ = 0, disk_bytes_ = 0, written_bytes_ = 0;
  bool view_open_ = false;
};

}  // namespace streamtrain
