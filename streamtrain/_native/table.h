// The embedding table: rows by 64-bit key that are born at their first gradient, updated by a row optimizer, and
// forgotten.
//
// What a table promises:
// * A key reads its first value (birth.h) until it has a row; reading inserts nothing.
// * push applies gradients in the order given. A key may occur more than once; its gradients are applied one after
//   another.
// * A gradient that is not finite (optimizer.h) changes nothing: no row, no count, no admission.
// * Admission, expiry and capacity decide which keys have rows: sketch.h, expire(), eviction.h.
// * Changes reach up to three independent consumers through channels (dirty.h), as they come or as of one moment, and the whole table can be read as of
//   one moment while training continues (snapshot.h).
// * Everything is a function of the sequence of calls: a replay gives the same bits. Without admission, expiry and
//   capacity, rows do not depend on how the stream is cut into calls either.
// * The rows of a table may be those of some hash slots (hash.h) only. Others are foreign: they can be loaded, pulled and
//   removed, but they are in no channel, snapshot, scan or count, and neither expire nor are evicted. So rows can be
//   brought before slots are gained, and those of lost ones go bit by bit, together with their memory.
//
// * A table with a budget of memory keeps the rest of its rows on disk (disk_rows.h, hand.h), without a difference in any
//   result. What is asked for by key has to be in memory first: calls for that are `Rows on disk` below, and who makes
//   them is shared_table.h.
//
// Memory: a row's bytes (rows.h) and 6.4 to 7 bytes of index per row, growth included, and 4 bytes per row and open
// channel with a change. Growth moves no rows and rebuilds 1/1024 of the index at a time.
//
// Thread safety: external synchronisation: one writer, or many callers of const functions. shared_table.h adds that.
// Calls may be cut anywhere into calls with fewer keys or rows; results are those of the whole.
// Invariant: the index holds exactly the live rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "birth.h"
#include "dirty.h"
#include "disk_rows.h"
#include "eviction.h"
#include "hand.h"
#include "hash.h"
#include "index.h"
#include "optimizer.h"
#include "rows.h"
#include "sketch.h"
#include "snapshot.h"

namespace streamtrain {

struct TableConfig {
  size_t dim = 0;
  Optimizer optimizer = Sgd{};
  float rate = 0.05f;
  Init init;
  Storage storage = Storage::kFloat32;
  uint32_t min_count = 1;  // 1: every key is admitted
  uint32_t sketch_width = 1u << 20;
  uint32_t expire_after = 0;  // seconds; 0: never
  uint32_t capacity = 0;      // rows; 0: no limit. last_seen is kept only with expire_after or capacity
  uint64_t memory = 0;        // bytes, approximately; 0: all rows are in memory
  std::string folder;         // where rows are that are not in memory
  uint64_t segment_bytes = DiskLayout::kSegmentBytes;
};

// A part of a table, column by column.
struct Rows {
  uint32_t dim = 0, state_size = 0;
  std::vector<uint64_t> keys;
  std::vector<float> embeddings;  // [n, dim]
  std::vector<float> state;       // [n, state_size]
  std::vector<uint32_t> counts, last_seen;
};

struct PushResult {
  uint64_t applied = 0;     // gradients that changed a row
  uint64_t inserted = 0;    // rows born
  uint64_t unadmitted = 0;  // gradients dropped because their key has not been seen often enough
  uint64_t evicted = 0;     // rows removed to stay within the capacity: of SharedTable
  std::vector<uint32_t> non_finite;  // positions of gradients that were not finite
};

// Gradients of n keys, in order; see Table::push.
struct RowGradients {
  const uint64_t* keys;
  const uint32_t* repeats;  // null: one gradient each
  const float* gradients;
  const uint32_t* counts;  // by gradient
  const uint32_t* times;   // by key
  size_t n;
};

// n whole rows.
struct RowColumns {
  const uint64_t* keys;
  const float* embeddings;  // [n, dim]
  const float* state;       // [n, state_size]
  const uint32_t *counts, *last_seen;
  size_t n;
};

struct Found {
  std::vector<uint8_t> found;  // 1 or 0
  std::vector<uint32_t> counts, last_seen;
};

struct TableStats {
  uint64_t rows, inserted, removed, expired, evicted, unadmitted, non_finite;
  uint64_t row_bytes, rows_bytes, index_bytes, dirty_bytes, sketch_bytes, snapshot_bytes;
  uint64_t rows_on_disk, disk_index_bytes, disk_bytes, disk_written_bytes, disk_reads;
};

// Where somebody is who goes through all rows of a table while it changes: first those on disk, in the order in which
// they came there, then those in memory. Rows that leave memory meanwhile come after the former; in the latter part only
// rows leave memory that have been passed. So none is missed, and a row can be met again.
struct TableScan {
  bool in_memory = false;
  uint64_t serial = 0;  // of a segment on disk
  uint32_t position = 0;
  uint32_t id = 0;
};

// Throws std::invalid_argument if a value is not finite.
void check_finite(const float* embeddings, size_t n, const float* state, size_t m);

class Table {
 public:
  // Throws std::invalid_argument for a configuration that makes no sense.
  explicit Table(const TableConfig& config);

  const TableConfig& config() const { return config_; }
  const RowLayout& layout() const { return layout_; }
  // After set_slots, rows that have become foreign by it count until they are swept.
  uint32_t size() const { return rows_.live() + (disk_ ? static_cast<uint32_t>(disk_->live()) : 0) - foreign_; }
  uint32_t ids() const { return rows_.end(); }  // all row ids are below this one
  TableStats stats() const;

  // out[n, dim] = the rows of n keys, or their first values; those that may be on disk are added to `wanted`, if given,
  // and are written by fill.
  void pull(const uint64_t* keys, size_t n, float* out, DiskRead* wanted = nullptr) const;

  // The same with the optimizer's state: out[n, dim + state_size]. awaited[n]: how many more occurrences a key without
  // a row needs for one (min_count); 0: none, its next gradient is applied.
  void pull_state(const uint64_t* keys, size_t n, float* out, uint8_t* awaited, DiskRead* wanted = nullptr) const;

  // Applies gradients[m, dim]: repeats[i] of them, one after another, to the row of key i, or one each where there are
  // no repeats. Each stands for counts[g] occurrences of its key, the last one of all at times[i] (seconds). A rate
  // replaces the configured one for this call. The capacity is left to evict.
  PushResult push(const RowGradients& of, std::optional<float> rate);

  // Writes whole rows, as from a checkpoint; returns how many were new. Embeddings are rounded to nearest. New ones that
  // are `cold` go straight to disk once memory is full, unless a channel or snapshot is open or foreign rows are swept.
  // `only_new`: rows that there are stay as they are. The capacity is left to evict. REQUIRES: check_finite.
  uint64_t load(const RowColumns& of, bool cold, bool only_new);

  // So many rows are to come: makes room in the index of those that will be on disk, as far as memory allows.
  void expect(uint64_t rows);

  // How many rows the capacity is exceeded by.
  uint32_t excess() const;
  // To be called after a push or load, and before evict: whether the capacity is exceeded.
  bool begin_eviction();
  // Visits at most `limit` rows and removes some (eviction.h), none if there is no excess; returns how many.
  uint64_t evict(uint32_t limit);

  // Removes rows; returns how many there were.
  uint64_t remove(const uint64_t* keys, size_t n);

  // Writes whether each key has a row; of those that have one, also counts and last_seen (0 where it is not kept).
  void lookup(const uint64_t* keys, size_t n, uint8_t* found, uint32_t* counts, uint32_t* last_seen,
              DiskRead* wanted = nullptr) const;

  // Visits the next `limit` row ids, in a circle, and removes the rows that were last seen more than expire_after
  // seconds before `now`; returns how many. A row whose last_seen is 0 is taken for one last seen now.
  uint64_t expire(uint32_t now, uint32_t limit);

  // The slots of the table from now on, begin to end - 1. A sweep of what is foreign then begins; until it has ended,
  // what is loaded must be own (anything foreign is swept, too), and nothing is evicted. Throws if they are others than
  // before, and a snapshot is open or a channel sealed.
  void set_slots(uint32_t begin, uint32_t end);
  // Visits at most `limit` ids: removes foreign rows, and then closes the gaps and lets memory go; false when that is
  // done.
  bool sweep(uint32_t limit);

  // Appends the live rows among the `limit` ids from `cursor` on; returns the next cursor, or nothing at the end.
  // For tables at rest, which are swept: see begin_snapshot for others.
  std::optional<uint32_t> scan(uint32_t cursor, uint32_t limit, Rows& out) const;

  // Opens a channel, from now on: changes before are not in it.
  uint32_t open_channel() { return dirty_.open(); }
  // Ends what the channel takes; drain gives it as of now, whatever changes. Throws if it is sealed already.
  void seal(uint32_t channel) { dirty_.seal(channel); }
  bool sealed(uint32_t channel) const { return dirty_.get(channel).sealed(); }
  // Closing takes as many calls of close as it says that there is more; the channel counts as closed from the first on.
  DirtyChannels::Channel begin_close(uint32_t channel) { return dirty_.begin_close(channel); }
  bool close(uint32_t channel, DirtyChannels::Channel& rest, uint32_t limit) {
    return dirty_.close(channel, rest, rows_, limit);
  }
  // At most how many rows and tombstones the channel still has.
  uint64_t pending(uint32_t channel) const;
  // Takes up to `limit` entries out of the channel: tombstones first, then rows, first changed first; false when it is
  // empty. Rows are as they are now, those of a sealed channel as they were then.
  bool drain(uint32_t channel, uint32_t limit, Rows& out, std::vector<uint64_t>& tombstones);
  // Puts keys back into a channel that is not sealed: those with a row as changed, the others as tombstones.
  void mark_dirty(uint32_t channel, const uint64_t* keys, size_t n);

  void begin_snapshot();
  // Appends the next part, visiting at most `limit` rows; false when all in memory has been read.
  bool read_snapshot(uint32_t limit, Rows& out);
  Snapshot end_snapshot();  // what it held

  // Another budget of memory, which spill keeps to. Throws without one, or for none.
  void set_memory(uint64_t bytes);

  // Rows on disk. All but has_disk require it; what is read is read without a lock.
  bool has_disk() const { return disk_ != nullptr; }
  DiskRead disk_read() const { return DiskRead(disk_->layout()); }
  // Adds to `wanted` what may be on disk of keys that are to be in memory.
  void want(const uint64_t* keys, size_t n, DiskRead& wanted) const;
  // Takes what was read into memory, but for what has changed its place since.
  void bring(const DiskRead& read);
  // Visits at most `limit` rows in memory and lets some go to disk; whether there are more that should.
  bool spill(uint32_t limit);
  std::shared_ptr<Chunk> next_chunk() { return disk_->next_chunk(); }
  void written(const std::shared_ptr<Chunk>& chunk, bool well) { disk_->written(chunk, well); }
  // The next rows of the segment that is being compacted, if one is or ought to be, and their removal from there. One
  // after the other: until compact, or compact_failed, there are none.
  std::optional<DiskPart> compact_part(uint32_t limit);
  void compact(const DiskPart& part);
  void compact_failed() { compacting_ = false; }
  // The next rows that are to be asked whether they have expired, in a circle and without segments in which none can
  // have, and how many had.
  std::optional<DiskPart> expire_part(uint32_t now, uint32_t limit);
  uint64_t expire(uint32_t now, const DiskPart& part);
  // Rows of the snapshot, and rows at rest: the latter from a place on, which becomes that after them.
  std::optional<DiskPart> snapshot_part(uint32_t limit) const { return disk_->view_part(limit); }
  void read_snapshot(const DiskPart& part, Rows& out);
  std::optional<DiskPart> scan_part(DiskRows::Place& from, uint32_t limit) const { return disk_->part(from, limit); }
  void scan(const DiskPart& part, Rows& out) const;
  // The rows of a scan that is known to the table, at most `limit` of them. On disk, what is next is read first; none is
  // left if there is nothing, and then, if no row is about to get another id, the scan is in memory.
  void begin_scan(TableScan* scan) { scans_.push_back(scan); }
  void end_scan(TableScan* scan) { std::erase(scans_, scan); }
  std::optional<DiskPart> next_part(TableScan& scan, uint32_t limit);
  void read_part(TableScan& scan, const DiskPart& part, Rows& out) const;
  // Rows that are to be swept; nothing if there are none, or none yet. REQUIRES: sweep was called before.
  std::optional<DiskPart> sweep_part(uint32_t limit);
  void sweep(const DiskPart& part);
  // Keys of changed rows on disk, and those rows themselves.
  void want_changed(uint32_t channel, uint32_t limit, DiskRead& wanted) const;
  uint32_t drain(uint32_t channel, const DiskRead& read, Rows& out);
  uint64_t disk_rows() const { return disk_->rows(); }
  const std::string& folder() const { return config_.folder; }

  // The bytes of the admission sketch, empty without admission (sketch.h).
  std::vector<uint8_t> admission_bytes() const;
  void merge_admission(const uint8_t* data, size_t size);
  // As if nothing had been seen.
  void reset_admission();
  // Another number of rows. REQUIRES: last_seen is kept, or both are 0.
  void set_capacity(uint32_t capacity);

 private:
  enum class Sweep : uint8_t { kNone, kForeign, kForeignOnDisk, kGaps };

  struct KeyOf {  // for the index
    const RowStore& rows;

    uint64_t operator()(uint32_t id) const { return rows.header(id)->key; }
    void prefetch(uint32_t id) const { prefetch_line(rows.row(id)); }
  };

  uint32_t find(uint64_t key) const {
    return index_.find(key, [&](uint32_t id) { return rows_.header(id)->key == key; });
  }
  uint32_t confirmed(uint64_t key, uint32_t look) const;
  bool is_own(uint64_t key) const { return hash_slot(key) - slots_begin_ < slots_; }
  uint32_t insert(uint64_t key);
  void move(uint32_t from, uint32_t to);
  void give_birth(std::byte* row, uint64_t key, float rate);
  void update(std::byte* row, const float* gradient, float rate);
  void erase(uint32_t id);
  void before_change(uint32_t id, std::byte* row) {
    snapshot_.before_change(id, row, layout_.stride);
    dirty_.before_change(row, layout_.stride);
  }
  void append(const std::byte* row, Rows& out) const;
  bool sweeps_foreign() const { return sweep_ == Sweep::kForeign || sweep_ == Sweep::kForeignOnDisk; }
  uint32_t rows_of_memory() const;
  void leave(uint32_t id);
  void fill(std::byte* row, const RowColumns& from, size_t i) const;
  uint32_t bring(uint64_t row, const std::byte* bytes);
  // Calls visit(key, row, bytes) for each row of a part that is still there.
  template <typename Visit>
  void each_on_disk(const DiskPart& part, Visit visit) const {
    if (!disk_->has(part)) return;
    constexpr uint32_t kChunk = 32;  // whose places in the index are asked for together
    for (uint32_t at = part.begin; at < part.end; ++at) {
      if ((at - part.begin) % kChunk == 0)
        for (uint32_t i = at; i < std::min(at + kChunk, part.end); ++i)
          disk_->prefetch(RowLayout::header(part.row(i))->key);
      const std::byte* bytes = part.row(at);
      const uint64_t key = RowLayout::header(bytes)->key;
      if (disk_->has(key, part.number(at))) visit(key, part.number(at), bytes);
    }
  }
  template <int kForWriting, typename Visit>
  void pipelined(const uint64_t* keys, size_t n, size_t row_bytes, Visit visit) const;

  TableConfig config_;
  RowLayout layout_;
  RowStore rows_;
  Index index_;
  DirtyChannels dirty_;
  Snapshot snapshot_;
  EvictionClock clock_;
  std::optional<Sketch> sketch_;
  uint32_t expire_cursor_ = 0;
  uint32_t slots_begin_ = 0, slots_ = kHashSlots;
  uint32_t foreign_ = 0;  // foreign rows; 0 while they are swept
  Sweep sweep_ = Sweep::kNone;
  uint32_t sweep_cursor_ = 0;
  std::unique_ptr<DiskRows> disk_;
  ClockHand hand_;
  DiskRows::Place expire_place_, sweep_place_;
  std::optional<DiskRows::Victim> victim_;  // of the compaction
  DiskRows::Place victim_place_;
  bool compacting_ = false;
  std::vector<TableScan*> scans_;
  TableStats totals_{};
};

}  // namespace streamtrain
