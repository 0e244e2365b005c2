// A table that threads share. Functions are those of Table (table.h), with the same results.
//
// Each call takes the lock for at most kTurn rows at a time, so that no call waits for all of another long one.
// What that means for calls of more than kTurn rows, while others write:
// * Other threads' changes may come between the parts of a call; no one ever sees half of a row's change.
// * The capacity is enforced at the end of a push or load; meanwhile the table may be larger.
// * drain of a channel that is not sealed returns what it has as soon as another thread wrote between two turns: a key
//   is at most once in what it returns.
// Exceptions: merge_admission and admission_bytes work on the whole sketch in one turn.
//
// Of a table with a budget of memory, rows that a call needs come from disk first: what is found there under the lock is
// read without it, and then brought into memory. Whoever makes rows come takes care that others leave: by turns, too,
// and by writing chunks and compacting segments without the lock. A chunk that cannot be written stays in memory, is
// tried again by the next calls, and shows in disk_error; what cannot be read ends the call (DiskRead::read).
//
// Thread safety: any thread may call anything, at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "guarded.h"
#include "table.h"

namespace streamtrain {

class SharedTable {
 public:
  static constexpr uint32_t kTurn = 4096;  // rows

  explicit SharedTable(const TableConfig& config)
      : table_(config), layout_(table_.read([](const Table& t) { return t.layout(); })), has_disk_(config.memory > 0) {}

  const RowLayout& layout() const { return layout_; }
  uint32_t size() const;
  TableStats stats() const;

  void pull(const uint64_t* keys, size_t n, float* out) const;
  void pull_state(const uint64_t* keys, size_t n, float* out, uint8_t* awaited) const;
  Found lookup(const uint64_t* keys, size_t n) const;
  std::optional<uint64_t> scan(uint64_t cursor, uint32_t limit, Rows& out) const;

  // Registers a scan, and goes on with it: appends about `limit` rows, perhaps none; false at the end. One thread at a
  // time. Rows of slots that are being lost may be among them: sweep first.
  void begin_scan(TableScan& scan) const;
  void end_scan(TableScan& scan) const;
  bool scan(TableScan& scan, uint32_t limit, Rows& out) const;

  PushResult push(const RowGradients& of, std::optional<float> rate);
  uint64_t load(const RowColumns& of, bool cold, bool only_new);
  void expect(uint64_t rows);
  uint64_t remove(const uint64_t* keys, size_t n);
  uint64_t expire(uint32_t now, uint32_t limit);

  void set_slots(uint32_t begin, uint32_t end);
  bool sweep(uint32_t limit);

  uint32_t open_channel();
  void seal(uint32_t channel);
  void close_channel(uint32_t channel);
  uint64_t pending(uint32_t channel) const;
  void drain(uint32_t channel, uint32_t limit, Rows& out, std::vector<uint64_t>& tombstones);
  void mark_dirty(uint32_t channel, const uint64_t* keys, size_t n);

  void begin_snapshot();
  bool read_snapshot(uint32_t limit, Rows& out);
  void end_snapshot();

  std::vector<uint8_t> admission_bytes() const;
  void merge_admission(const uint8_t* data, size_t size);
  void reset_admission();
  void set_capacity(uint32_t capacity);
  void set_memory(uint64_t bytes);

  // Why rows could not be written to disk the last time that they could not, and how often that was.
  std::string disk_error() const;
  uint64_t disk_errors() const;

 private:
  uint64_t enforce_capacity(bool exceeded);
  template <typename Change>
  auto change(const uint64_t* keys, size_t n, Change change);
  template <typename Look, typename Put>
  void look_up(Look look, Put put) const;
  void keep_within_memory() const;
  bool write(const std::shared_ptr<Chunk>& chunk) const;
  void compact(uint64_t rows) const;

  mutable Guarded<Table> table_;  // rows come into memory by looking at them, too
  const RowLayout layout_;
  const bool has_disk_;
  mutable std::mutex failing_;
  mutable std::string disk_error_;
  mutable uint64_t disk_errors_ = 0;
};

}  // namespace streamtrain
