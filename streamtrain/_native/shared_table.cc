#include "shared_table.h"

#include <algorithm>
#include <numeric>

namespace streamtrain {
namespace {

// Calls part(begin, size) for parts of n rows, one turn each; once also if there are none, for the checks of the call.
template <typename Part>
void by_turns(size_t n, Part part) {
  size_t at = 0;
  do {
    const size_t size = std::min<size_t>(n - at, SharedTable::kTurn);
    part(at, size);
    at += size;
  } while (at < n);
}

}  // namespace

uint32_t SharedTable::size() const {
  return table_.read([](const Table& t) { return t.size(); });
}

TableStats SharedTable::stats() const {
  return table_.read([](const Table& t) { return t.stats(); });
}

// Calls look(table, wanted), which adds to wanted what it has not found in memory, and put(position, row) for each row
// of that which is on disk; these are in memory then.
template <typename Look, typename Put>
void SharedTable::look_up(Look look, Put put) const {
  if (!has_disk_) return table_.read([&](const Table& t) { look(t, nullptr); });
  DiskRead wanted = table_.read([&](const Table& t) {
    DiskRead found = t.disk_read();
    look(t, &found);
    return found;
  });
  if (wanted.empty()) return;
  wanted.read();
  for (size_t i = 0; i < wanted.items.size(); ++i)
    if (RowLayout::header(wanted.row(i))->key == wanted.items[i].key) put(wanted.items[i].position, wanted.row(i));
  table_.write([&](Table& t) { t.bring(wanted); });
  keep_within_memory();
}

// Calls change(table) when no row of the keys is on disk.
template <typename Change>
auto SharedTable::change(const uint64_t* keys, size_t n, Change change) {
  if (!has_disk_) return table_.write(change);
  DiskRead read = table_.read([](const Table& t) { return t.disk_read(); });
  std::vector<DiskRead::Item> others;  // rows of other keys, which may be taken for some of these
  for (;;) {
    const auto result = table_.write([&](Table& t) -> std::optional<decltype(change(t))> {
      t.bring(read);
      read.clear();
      t.want(keys, n, read);
      read.leave_out(others);
      return read.empty() ? std::optional(change(t)) : std::nullopt;
    });
    if (result) return *result;
    read.read();
    for (size_t i = 0; i < read.items.size(); ++i)
      if (RowLayout::header(read.row(i))->key != read.items[i].key) others.push_back(read.items[i]);
  }
}

void SharedTable::keep_within_memory() const {
  if (!has_disk_) return;
  while (table_.write([](Table& t) { return t.spill(kTurn); })) {
  }
  uint64_t left = 0;
  const auto next = [&] { return table_.write([](Table& t) { return t.next_chunk(); }); };
  for (auto chunk = next(); chunk; chunk = next()) {
    if (!write(chunk)) return;
    left += chunk->rows();
  }
  // A victim is less than two thirds full on average: so holes are let go of as fast as they come.
  if (!left) return;
  compact(3 * left);
  for (auto chunk = next(); chunk && write(chunk); chunk = next()) {
  }
}

// Whether it is on disk now.
bool SharedTable::write(const std::shared_ptr<Chunk>& chunk) const {
  bool well = true;
  try {
    chunk->write();
  } catch (const std::exception& error) {
    const std::lock_guard hold(failing_);
    disk_error_ = error.what();
    ++disk_errors_;
    well = false;
  }
  table_.write([&](Table& t) { t.written(chunk, well); });
  return well;
}

// Visits about so many rows of segments that have become holes for the larger part.
void SharedTable::compact(uint64_t rows) const {
  for (uint64_t visited = 0; visited < rows;) {
    auto part = table_.write([](Table& t) { return t.compact_part(kTurn); });
    if (!part) return;
    try {
      part->read();
    } catch (...) {
      table_.write([](Table& t) { t.compact_failed(); });
      throw;
    }
    table_.write([&](Table& t) { t.compact(*part); });
    visited += part->end - part->begin;
  }
}

std::string SharedTable::disk_error() const {
  const std::lock_guard hold(failing_);
  return disk_error_;
}

uint64_t SharedTable::disk_errors() const {
  const std::lock_guard hold(failing_);
  return disk_errors_;
}

void SharedTable::pull(const uint64_t* keys, size_t n, float* out) const {
  const size_t dim = layout_.dim;
  by_turns(n, [&](size_t at, size_t size) {
    float* const to = out + at * dim;
    look_up([&](const Table& t, DiskRead* wanted) { t.pull(keys + at, size, to, wanted); },
            [&](size_t i, const std::byte* row) { widen(layout_.storage, layout_.embedding(row), to + i * dim, dim); });
  });
}

Found SharedTable::lookup(const uint64_t* keys, size_t n) const {
  Found result{std::vector<uint8_t>(n), std::vector<uint32_t>(n), std::vector<uint32_t>(n)};
  by_turns(n, [&](size_t at, size_t size) {
    look_up(
        [&](const Table& t, DiskRead* wanted) {
          t.lookup(keys + at, size, result.found.data() + at, result.counts.data() + at, result.last_seen.data() + at,
                   wanted);
        },
        [&](size_t i, const std::byte* row) {
          result.found[at + i] = 1;
          result.counts[at + i] = RowLayout::header(row)->count();
          result.last_seen[at + i] = layout_.last_seen(row);
        });
  });
  return result;
}

// A cursor is a row id, or with its upper bit a place on disk.
std::optional<uint64_t> SharedTable::scan(uint64_t cursor, uint32_t limit, Rows& out) const {
  constexpr uint64_t kOnDisk = uint64_t{1} << 63;
  std::optional<uint64_t> next = cursor;
  for (uint32_t size; limit && next; limit -= size) {
    size = std::min(limit, kTurn);
    if (!(*next & kOnDisk)) {
      const auto id = static_cast<uint32_t>(std::min<uint64_t>(*next, kNoRow));
      next = table_.read([&](const Table& t) { return t.scan(id, size, out); });
      if (!next && has_disk_) next = kOnDisk;
      continue;
    }
    if (!has_disk_) return std::nullopt;
    DiskRows::Place place{static_cast<uint32_t>((*next & ~kOnDisk) >> 32), static_cast<uint32_t>(*next)};
    auto part = table_.read([&](const Table& t) { return t.scan_part(place, size); });
    if (!part) return std::nullopt;
    part->read();
    table_.read([&](const Table& t) { t.scan(*part, out); });
    next = kOnDisk | uint64_t{place.segment} << 32 | place.row;
  }
  return next;
}

void SharedTable::begin_scan(TableScan& scan) const {
  table_.write([&](Table& t) {
    scan.in_memory = !has_disk_;
    t.begin_scan(&scan);
  });
}

void SharedTable::end_scan(TableScan& scan) const {
  table_.write([&](Table& t) { t.end_scan(&scan); });
}

bool SharedTable::scan(TableScan& scan, uint32_t limit, Rows& out) const {
  bool more = true;
  for (uint32_t size; limit && more; limit -= size) {
    size = std::min(limit, kTurn);
    if (scan.in_memory) {
      const auto next = table_.read([&](const Table& t) { return t.scan(scan.id, size, out); });
      // Under the lock that those take who let rows leave memory.
      table_.write([&](Table&) { scan.id = next.value_or(kNoRow); });
      more = next.has_value();
      continue;
    }
    auto part = table_.write([&](Table& t) {
      auto next = t.next_part(scan, size);
      if (!next && !scan.in_memory) t.sweep(size);
      return next;
    });
    if (!part) continue;
    part->read();
    table_.write([&](Table& t) { t.read_part(scan, *part, out); });
  }
  return more;
}

void SharedTable::pull_state(const uint64_t* keys, size_t n, float* out, uint8_t* awaited) const {
  const size_t dim = layout_.dim, width = dim + layout_.state_size;
  by_turns(n, [&](size_t at, size_t size) {
    look_up(
        [&](const Table& t, DiskRead* wanted) {
          t.pull_state(keys + at, size, out + at * width, awaited + at, wanted);
        },
        [&](size_t i, const std::byte* row) {
          float* const to = out + (at + i) * width;
          widen(layout_.storage, layout_.embedding(row), to, dim);
          std::copy_n(layout_.state(row), layout_.state_size, to + dim);
          awaited[at + i] = 0;
        });
  });
}

PushResult SharedTable::push(const RowGradients& of, std::optional<float> rate) {
  PushResult result;
  bool exceeded = false;
  size_t first = 0;  // gradient of the turn
  by_turns(of.n, [&](size_t at, size_t size) {
    const RowGradients turn{of.keys + at, of.repeats ? of.repeats + at : nullptr, of.gradients + first * layout_.dim,
                            of.counts + first, of.times + at, size};
    const PushResult part = change(turn.keys, size, [&](Table& t) {
      PushResult pushed = t.push(turn, rate);
      if (at + size == of.n) exceeded = t.begin_eviction();
      return pushed;
    });
    result.applied += part.applied;
    result.inserted += part.inserted;
    result.unadmitted += part.unadmitted;
    for (uint32_t i : part.non_finite) result.non_finite.push_back(static_cast<uint32_t>(first + i));
    first += of.repeats ? std::accumulate(turn.repeats, turn.repeats + size, size_t{0}) : size;
    keep_within_memory();
  });
  result.evicted = enforce_capacity(exceeded);
  return result;
}

uint64_t SharedTable::load(const RowColumns& of, bool cold, bool only_new) {
  const size_t dim = layout_.dim, state_size = layout_.state_size;
  check_finite(of.embeddings, of.n * dim, of.state, of.n * state_size);
  uint64_t inserted = 0;
  bool exceeded = false;
  by_turns(of.n, [&](size_t at, size_t size) {
    const RowColumns turn{of.keys + at,   of.embeddings + at * dim, of.state + at * state_size,
                          of.counts + at, of.last_seen + at,        size};
    inserted += change(turn.keys, size, [&](Table& t) {
      const uint64_t born = t.load(turn, cold, only_new);
      if (at + size == of.n) exceeded = t.begin_eviction();
      return born;
    });
    keep_within_memory();
  });
  enforce_capacity(exceeded);
  return inserted;
}

void SharedTable::expect(uint64_t rows) {
  table_.write([&](Table& t) { t.expect(rows); });
  keep_within_memory();
}

uint64_t SharedTable::enforce_capacity(bool exceeded) {
  uint64_t evicted = 0;
  while (exceeded)
    exceeded = table_.write([&](Table& t) {
      evicted += t.evict(kTurn);
      return t.excess() > 0;
    });
  return evicted;
}

uint64_t SharedTable::remove(const uint64_t* keys, size_t n) {
  uint64_t removed = 0;
  by_turns(n, [&](size_t at, size_t size) {
    removed += change(keys + at, size, [&](Table& t) { return t.remove(keys + at, size); });
    keep_within_memory();
  });
  return removed;
}

uint64_t SharedTable::expire(uint32_t now, uint32_t limit) {
  uint64_t expired = 0;
  const uint32_t ids = table_.read([](const Table& t) { return t.ids(); });
  by_turns(std::min(limit, ids), [&](size_t, size_t size) {
    table_.write([&](Table& t) { expired += t.expire(now, static_cast<uint32_t>(size)); });
  });
  if (!has_disk_) return expired;
  for (uint64_t left = std::min<uint64_t>(limit, table_.read([](const Table& t) { return t.disk_rows(); })); left;) {
    const auto size = static_cast<uint32_t>(std::min<uint64_t>(left, kTurn));
    auto part = table_.write([&](Table& t) { return t.expire_part(now, size); });
    if (!part) break;
    part->read();
    expired += table_.write([&](Table& t) { return t.expire(now, *part); });
    left -= part->end - part->begin;
    keep_within_memory();
  }
  return expired;
}

void SharedTable::set_slots(uint32_t begin, uint32_t end) {
  table_.write([&](Table& t) { t.set_slots(begin, end); });
}

bool SharedTable::sweep(uint32_t limit) {
  bool more = true;
  for (uint32_t part; limit && more; limit -= part) {
    part = std::min(limit, kTurn);
    more = table_.write([&](Table& t) { return t.sweep(part); });
    if (!has_disk_ || !more) continue;
    auto on_disk = table_.write([&](Table& t) { return t.sweep_part(part); });
    if (!on_disk) continue;
    on_disk->read();
    table_.write([&](Table& t) { t.sweep(*on_disk); });
  }
  return more;
}

uint32_t SharedTable::open_channel() {
  return table_.write([](Table& t) { return t.open_channel(); });
}

void SharedTable::seal(uint32_t channel) {
  table_.write([&](Table& t) { t.seal(channel); });
}

void SharedTable::close_channel(uint32_t channel) {
  // What it held is let go of without the lock.
  auto rest = table_.write([&](Table& t) { return t.begin_close(channel); });
  while (table_.write([&](Table& t) { return t.close(channel, rest, kTurn); })) {
  }
}

uint64_t SharedTable::pending(uint32_t channel) const {
  return table_.read([&](const Table& t) { return t.pending(channel); });
}

void SharedTable::drain(uint32_t channel, uint32_t limit, Rows& out, std::vector<uint64_t>& tombstones) {
  std::optional<DiskRead> on_disk;
  do {
    if (has_disk_) {
      on_disk = table_.read([&](const Table& t) {
        DiskRead changed = t.disk_read();
        t.want_changed(channel, std::min(limit, kTurn), changed);
        return changed;
      });
      on_disk->read();
    }
    std::optional<uint64_t> last_turn;
    bool sealed = false;
    const auto next_part = [&](Table& t) {
      if (!last_turn) {
        sealed = t.sealed(channel);
        if (on_disk) limit -= t.drain(channel, *on_disk, out);
      } else if (!sealed && table_.turn() != *last_turn + 1) {
        return false;
      }
      last_turn = table_.turn();
      const uint32_t part = std::min(limit, kTurn);
      limit -= part;
      return t.drain(channel, part, out, tombstones) && limit;
    };
    while (table_.write(next_part)) {
    }
    // What was looked for on disk may have moved meanwhile: nothing at all would mean that there is nothing.
  } while (on_disk && limit && out.keys.empty() && tombstones.empty() && pending(channel));
}

void SharedTable::mark_dirty(uint32_t channel, const uint64_t* keys, size_t n) {
  by_turns(n, [&](size_t at, size_t size) {
    change(keys + at, size, [&](Table& t) {
      t.mark_dirty(channel, keys + at, size);
      return true;
    });
    keep_within_memory();
  });
}

void SharedTable::begin_snapshot() {
  table_.write([](Table& t) { t.begin_snapshot(); });
}

bool SharedTable::read_snapshot(uint32_t limit, Rows& out) {
  bool some = false;
  for (uint32_t size; limit; limit -= size, some = true) {
    size = std::min(limit, kTurn);
    if (table_.write([&](Table& t) { return t.read_snapshot(size, out); })) continue;
    if (!has_disk_) break;
    auto part = table_.read([&](const Table& t) { return t.snapshot_part(size); });
    if (!part) break;
    part->read();
    table_.write([&](Table& t) { t.read_snapshot(*part, out); });
  }
  return some;
}

void SharedTable::end_snapshot() {
  // What it held is let go of without the lock.
  const auto rest = table_.write([](Table& t) { return t.end_snapshot(); });
}

std::vector<uint8_t> SharedTable::admission_bytes() const {
  return table_.read([](const Table& t) { return t.admission_bytes(); });
}

void SharedTable::reset_admission() {
  table_.write([](Table& t) { t.reset_admission(); });
}

void SharedTable::set_capacity(uint32_t capacity) {
  table_.write([&](Table& t) { t.set_capacity(capacity); });
}

void SharedTable::set_memory(uint64_t bytes) {
  table_.write([&](Table& t) { t.set_memory(bytes); });
  keep_within_memory();
}

void SharedTable::merge_admission(const uint8_t* data, size_t size) {
  table_.write([&](Table& t) { t.merge_admission(data, size); });
}

}  // namespace streamtrain
