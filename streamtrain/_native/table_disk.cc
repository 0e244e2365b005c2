// What a table does with rows on disk: which leave memory, how they come back, and how those there are gone through.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "table.h"

namespace streamtrain {

// What the budget leaves for rows, at least one.
uint32_t Table::rows_of_memory() const {
  const uint64_t others =
      index_.bytes() + disk_->memory_bytes() + dirty_.bytes() + (sketch_ ? sketch_->byte_size() : 0);
  const uint64_t left = config_.memory > others ? config_.memory - others : 0;
  return static_cast<uint32_t>(std::clamp<uint64_t>(left / (layout_.stride + 1), 1, kNoRow - 1));
}

void Table::bring(const DiskRead& read) {
  for (size_t i = 0; i < read.items.size(); ++i) {
    const DiskRead::Item& item = read.items[i];
    if (RowLayout::header(read.row(i))->key == item.key && disk_->holds(item)) bring(item.row, read.row(i));
  }
  totals_.disk_reads += read.items.size();
}

void Table::expect(uint64_t rows) {
  if (!disk_) return;
  const uint64_t others = disk_->memory_bytes() + 2 * disk_->layout().chunk_bytes();
  const double bytes = static_cast<double>(config_.memory - std::min(config_.memory, others));
  const double in_all = static_cast<double>(rows);
  // In memory, a row has its bytes, those of index.h and one of hand.h.
  const double each = static_cast<double>(layout_.stride) + Index::kKeyBytes + 1;
  const double on_disk = (in_all * each - bytes) / (each - DiskIndex::kKeyBytes);
  if (on_disk > 0) disk_->reserve(static_cast<uint64_t>(std::min({on_disk, in_all, bytes / DiskIndex::kKeyBytes})));
}

// The id of the row, now in memory; none if it was foreign and is to be swept.
uint32_t Table::bring(uint64_t row, const std::byte* bytes) {
  const uint64_t key = RowLayout::header(bytes)->key;
  const bool own = is_own(key);
  if (!own && sweeps_foreign()) {
    disk_->take(key, row);
    dirty_.forget(key);
    return kNoRow;
  }
  index_.reserve(key, KeyOf{rows_});
  const uint32_t id = rows_.allocate();
  index_.insert(key, id);
  snapshot_.inserted(id);
  if (own && disk_->view_open() && disk_->unread(row)) snapshot_.put_aside(bytes, layout_.stride);
  disk_->take(key, row);
  hand_.came(id);
  std::byte* to = rows_.row(id);
  std::memcpy(to, bytes, layout_.stride);
  RowHeader* header = RowLayout::header(to);
  header->meta &= RowHeader::kMaxCount | RowHeader::kLive;
  dirty_.returns(header, id, bytes, layout_.stride);
  return id;
}

void Table::set_memory(uint64_t bytes) {
  if (!disk_ || !bytes)
    throw std::invalid_argument("only a table that began with a budget of memory can get another one, of some bytes");
  config_.memory = bytes;
}

bool Table::spill(uint32_t limit) {
  if (sweep_ == Sweep::kGaps) sweep(limit);
  const uint32_t most = rows_of_memory();
  if (disk_->backlog() >= DiskRows::kBacklog || rows_.live() <= most) return false;
  uint32_t passed = rows_.end();  // by all who scan memory
  for (const TableScan* scan : scans_)
    if (scan->in_memory) passed = std::min(passed, scan->id);
  // Where they are in both indexes is asked for, of some at a time: to wait for one after another takes most of the time.
  std::array<uint32_t, 32> leaving;
  uint32_t n = 0;
  const auto let_go = [&] {
    std::for_each_n(leaving.begin(), n, [&](uint32_t id) {
      const uint64_t key = rows_.header(id)->key;
      index_.prefetch(key);
      disk_->prefetch(key);
    });
    std::for_each_n(leaving.begin(), n, [&](uint32_t id) { leave(id); });
    n = 0;
  };
  const uint32_t left = hand_.run(passed, std::min(limit, passed), rows_.live() - most, [&](uint32_t id) {
    if (!rows_.header(id)->live()) return false;
    leaving[n++] = id;
    if (n == leaving.size()) let_go();
    return true;
  });
  let_go();
  if (passed < rows_.end() && !left) return false;  // later
  // The index of what is on disk grows: rows in memory then become fewer, and their memory is to go with them.
  constexpr uint32_t kSlack = 1u << 15;
  if (sweep_ == Sweep::kNone && !snapshot_.open() && scans_.empty() && rows_.end() > uint64_t{most} + most / 16 + kSlack) {
    rows_.begin_closing();
    sweep_ = Sweep::kGaps;
  }
  return rows_.live() > most;
}

void Table::leave(uint32_t id) {
  std::byte* row = rows_.row(id);
  RowHeader* header = RowLayout::header(row);
  const uint64_t key = header->key;
  if (!is_own(key) && sweeps_foreign()) return erase(id);
  if (is_own(key)) before_change(id, row);
  disk_->append(key, row, layout_.last_seen(row));
  dirty_.leaves(header);
  index_.erase(key, id, KeyOf{rows_});
  rows_.release(id);
}

std::optional<DiskPart> Table::compact_part(uint32_t limit) {
  if (compacting_ || disk_->view_open()) return std::nullopt;
  if (!victim_) {
    victim_ = disk_->victim();
    if (!victim_) return std::nullopt;
    victim_place_ = {victim_->number, 0};
  }
  std::optional<DiskPart> part = disk_->part(victim_place_, limit);
  if (!part || part->segment->serial != victim_->serial) {  // to its end, or gone
    victim_.reset();
    return std::nullopt;
  }
  compacting_ = true;
  return part;
}

void Table::compact(const DiskPart& part) {
  compacting_ = false;
  if (disk_->view_open()) victim_place_ = {part.segment->number, part.begin};  // later
  else each_on_disk(part, [&](uint64_t key, uint64_t row, const std::byte* bytes) {
    if (is_own(key) || !sweeps_foreign()) return disk_->relocate(key, row, bytes, layout_.last_seen(bytes));
    disk_->take(key, row);
    dirty_.forget(key);
  });
}

std::optional<DiskPart> Table::expire_part(uint32_t now, uint32_t limit) {
  if (!config_.expire_after || now <= config_.expire_after) return std::nullopt;
  const uint32_t oldest = now - config_.expire_after;
  std::optional<DiskPart> part = disk_->part(expire_place_, limit, oldest);
  if (part) return part;
  expire_place_ = {};
  return disk_->part(expire_place_, limit, oldest);
}

uint64_t Table::expire(uint32_t now, const DiskPart& part) {
  const uint32_t oldest = now - config_.expire_after;
  uint64_t expired = 0;
  uint32_t oldest_left = UINT32_MAX;
  each_on_disk(part, [&](uint64_t key, uint64_t row, const std::byte* bytes) {
    const uint32_t seen = layout_.last_seen(bytes);
    if (seen >= oldest || !is_own(key)) {
      oldest_left = std::min(oldest_left, seen);
      return;
    }
    const uint32_t id = bring(row, bytes);
    if (seen) {
      erase(id);
      ++expired;
    } else {
      before_change(id, rows_.row(id));
      layout_.set_last_seen(rows_.row(id), now);
      dirty_.mark(rows_.header(id), id);
    }
  });
  if (disk_->has(part)) disk_->looked_at(part, oldest_left);
  totals_.expired += expired;
  return expired;
}

void Table::read_snapshot(const DiskPart& part, Rows& out) {
  if (!disk_->view_open() || !disk_->viewed(part)) return;
  each_on_disk(part, [&](uint64_t key, uint64_t, const std::byte* bytes) {
    if (is_own(key)) append(bytes, out);
  });
}

void Table::scan(const DiskPart& part, Rows& out) const {
  each_on_disk(part, [&](uint64_t key, uint64_t, const std::byte* bytes) {
    if (is_own(key)) append(bytes, out);
  });
}

std::optional<DiskPart> Table::next_part(TableScan& scan, uint32_t limit) {
  std::optional<DiskPart> part = disk_->part_since(scan.serial, scan.position, limit);
  if (!part && sweep_ == Sweep::kNone) scan.in_memory = true;
  return part;
}

void Table::read_part(TableScan& of, const DiskPart& part, Rows& out) const {
  scan(part, out);
  of.serial = part.segment->serial;
  of.position = part.end;
}

std::optional<DiskPart> Table::sweep_part(uint32_t limit) {
  if (sweep_ != Sweep::kForeignOnDisk) return std::nullopt;
  std::optional<DiskPart> part = disk_->part(sweep_place_, limit);
  if (part) return part;
  rows_.begin_closing();
  sweep_ = Sweep::kGaps;
  return std::nullopt;
}

void Table::sweep(const DiskPart& part) {
  each_on_disk(part, [&](uint64_t key, uint64_t row, const std::byte*) {
    if (is_own(key) || !sweeps_foreign()) return;
    disk_->take(key, row);
    dirty_.forget(key);
  });
}

void Table::want_changed(uint32_t channel, uint32_t limit, DiskRead& wanted) const {
  const KeySet& keys = dirty_.get(channel).on_disk;
  for (uint32_t i = 0; i < std::min<size_t>(limit, keys.size()); ++i) disk_->want(keys.last(i), i, wanted);
}

uint32_t Table::drain(uint32_t channel, const DiskRead& read, Rows& out) {
  KeySet& keys = dirty_.get(channel).on_disk;
  uint32_t taken = 0;
  for (size_t i = 0; i < read.items.size(); ++i) {
    const DiskRead::Item& item = read.items[i];
    if (RowLayout::header(read.row(i))->key != item.key || !disk_->holds(item) || !keys.remove(item.key)) continue;
    if (is_own(item.key)) append(read.row(i), out);
    ++taken;
  }
  return taken;
}

}  // namespace streamtrain
