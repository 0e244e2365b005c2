// A table read in parts: scans, channels, snapshots, and the figures of the whole.
#include <algorithm>
#include <stdexcept>

#include "table.h"

namespace streamtrain {
namespace {

void reserve(Rows& rows, size_t n) {
  rows.keys.reserve(n);
  rows.embeddings.reserve(n * rows.dim);
  rows.state.reserve(n * rows.state_size);
  rows.counts.reserve(n);
  rows.last_seen.reserve(n);
}

}  // namespace

void Table::append(const std::byte* row, Rows& out) const {
  const RowHeader* header = RowLayout::header(row);
  const std::byte* embedding = layout_.embedding(row);
  const size_t dim = layout_.dim;
  out.keys.push_back(header->key);
  if (layout_.storage == Storage::kFloat32) {
    const auto* values = reinterpret_cast<const float*>(embedding);
    out.embeddings.insert(out.embeddings.end(), values, values + dim);
  } else {
    out.embeddings.resize(out.embeddings.size() + dim);
    widen(layout_.storage, embedding, out.embeddings.data() + out.embeddings.size() - dim, dim);
  }
  const float* state = layout_.state(row);
  out.state.insert(out.state.end(), state, state + layout_.state_size);
  out.counts.push_back(header->count());
  out.last_seen.push_back(layout_.last_seen(row));
}

std::optional<uint32_t> Table::scan(uint32_t cursor, uint32_t limit, Rows& out) const {
  const uint32_t end = rows_.end();
  const auto stop = static_cast<uint32_t>(std::min<uint64_t>(end, uint64_t{cursor} + limit));
  reserve(out, stop - std::min(cursor, stop));
  for (; cursor < stop; ++cursor)
    if (const RowHeader* header = rows_.header(cursor); header->live() && is_own(header->key))
      append(rows_.row(cursor), out);
  return cursor < end ? std::optional(cursor) : std::nullopt;
}

uint64_t Table::pending(uint32_t channel) const {
  return dirty_.get(channel).pending();
}

bool Table::drain(uint32_t channel, uint32_t limit, Rows& out, std::vector<uint64_t>& tombstones) {
  auto& c = dirty_.get(channel);
  tombstones.reserve(std::min<size_t>(limit, c.tombstones.size()));
  for (; limit && c.tombstones.size(); --limit)
    if (const uint64_t key = c.tombstones.take(); is_own(key)) tombstones.push_back(key);
  reserve(out, std::min<size_t>(limit, c.aside.size() + c.rows.size()));
  for (; limit && !c.aside.empty(); --limit) c.aside.take([&](const std::byte* row) { append(row, out); });
  constexpr size_t kAhead = 16;
  for (; limit && !c.rows.empty(); --limit) {
    if (c.rows.size() > kAhead) rows_.prefetch<1>(c.rows[kAhead], layout_.stride);
    const uint32_t id = c.rows.front();
    c.rows.pop_front();
    RowHeader* header = rows_.header(id);
    const bool marked = header->meta & DirtyChannels::bit(channel);
    header->meta &= ~DirtyChannels::bit(channel);
    if (marked && header->live() && is_own(header->key)) append(rows_.row(id), out);
  }
  return c.pending() > 0;
}

void Table::mark_dirty(uint32_t channel, const uint64_t* keys, size_t n) {
  auto& c = dirty_.get_unsealed(channel);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t id = find(keys[i]);
    if (id == kNoRow) c.tombstones.add(keys[i]);
    else dirty_.mark(rows_.header(id), id, channel);
  }
}

void Table::begin_snapshot() {
  snapshot_.begin(rows_.end());
  if (disk_) disk_->begin_view();
}

Snapshot Table::end_snapshot() {
  if (disk_ && snapshot_.open()) disk_->end_view();
  return snapshot_.end();
}

bool Table::read_snapshot(uint32_t limit, Rows& out) {
  reserve(out, std::min(limit, rows_.end()));
  return snapshot_.read(rows_, limit, [&](const std::byte* row) {
    if (is_own(RowLayout::header(row)->key)) append(row, out);
  });
}

std::vector<uint8_t> Table::admission_bytes() const {
  std::vector<uint8_t> bytes(sketch_ ? sketch_->byte_size() : 0);
  if (sketch_) sketch_->bytes(bytes.data());
  return bytes;
}

void Table::merge_admission(const uint8_t* data, size_t size) {
  if (sketch_) sketch_->merge(data, size);
  else if (size) throw std::invalid_argument("a table with min_count 1 has no sketch");
}

void Table::reset_admission() {
  if (sketch_) sketch_.emplace(config_.sketch_width);
}

void Table::set_capacity(uint32_t capacity) {
  if (capacity >= kNoRow) throw std::invalid_argument("capacity must be below 2^32 - 1");
  if (capacity && !layout_.keeps_time) throw std::invalid_argument("a capacity needs last_seen, which is not kept");
  config_.capacity = capacity;
}

TableStats Table::stats() const {
  TableStats s = totals_;
  s.rows = size();
  s.row_bytes = layout_.stride;
  s.rows_bytes = rows_.bytes();
  s.index_bytes = index_.bytes();
  s.dirty_bytes = dirty_.bytes();
  s.sketch_bytes = sketch_ ? sketch_->byte_size() : 0;
  s.snapshot_bytes = snapshot_.bytes();
  if (!disk_) return s;
  s.rows_on_disk = disk_->live();
  s.disk_index_bytes = disk_->memory_bytes() + hand_.bytes();
  s.disk_bytes = disk_->disk_bytes();
  s.disk_written_bytes = disk_->written_bytes();
  return s;
}

}  // namespace streamtrain
