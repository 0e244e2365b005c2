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

void SharedTable::pull(const uint64_t* keys, size_t n, float* out) const {
  by_turns(n, [&](size_t at, size_t size) {
    table_.read([&](const Table& t) { t.pull(keys + at, size, out + at * layout_.dim); });
  });
}

Found SharedTable::lookup(const uint64_t* keys, size_t n) const {
  Found result{std::vector<uint8_t>(n), std::vector<uint32_t>(n), std::vector<uint32_t>(n)};
  by_turns(n, [&](size_t at, size_t size) {
    table_.read([&](const Table& t) {
      t.lookup(keys + at, size, result.found.data() + at, result.counts.data() + at, result.last_seen.data() + at);
    });
  });
  return result;
}

std::optional<uint32_t> SharedTable::scan(uint32_t cursor, uint32_t limit, Rows& out) const {
  std::optional<uint32_t> next = cursor;
  for (uint32_t part; limit && next; limit -= part) {
    part = std::min(limit, kTurn);
    next = table_.read([&](const Table& t) { return t.scan(*next, part, out); });
  }
  return next;
}

void SharedTable::pull_state(const uint64_t* keys, size_t n, float* out, uint8_t* awaited) const {
  const size_t width = layout_.dim + layout_.state_size;
  by_turns(n, [&](size_t at, size_t size) {
    table_.read([&](const Table& t) { t.pull_state(keys + at, size, out + at * width, awaited + at); });
  });
}

PushResult SharedTable::push(const RowGradients& of, std::optional<float> rate) {
  PushResult result;
  bool exceeded = false;
  size_t first = 0;  // gradient of the turn
  by_turns(of.n, [&](size_t at, size_t size) {
    const RowGradients turn{of.keys + at, of.repeats ? of.repeats + at : nullptr, of.gradients + first * layout_.dim,
                            of.counts + first, of.times + at, size};
    const PushResult part = table_.write([&](Table& t) {
      PushResult pushed = t.push(turn, rate);
      if (at + size == of.n) exceeded = t.begin_eviction();
      return pushed;
    });
    result.applied += part.applied;
    result.inserted += part.inserted;
    result.unadmitted += part.unadmitted;
    for (uint32_t i : part.non_finite) result.non_finite.push_back(static_cast<uint32_t>(first + i));
    first += of.repeats ? std::accumulate(turn.repeats, turn.repeats + size, size_t{0}) : size;
  });
  result.evicted = enforce_capacity(exceeded);
  return result;
}

uint64_t SharedTable::load(const uint64_t* keys, const float* embeddings, const float* state, const uint32_t* counts,
                           const uint32_t* last_seen, size_t n) {
  check_finite(embeddings, n * layout_.dim, state, n * layout_.state_size);
  uint64_t inserted = 0;
  bool exceeded = false;
  by_turns(n, [&](size_t at, size_t size) {
    table_.write([&](Table& t) {
      inserted += t.load(keys + at, embeddings + at * layout_.dim, state + at * layout_.state_size, counts + at,
                         last_seen + at, size);
      if (at + size == n) exceeded = t.begin_eviction();
    });
  });
  enforce_capacity(exceeded);
  return inserted;
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
    table_.write([&](Table& t) { removed += t.remove(keys + at, size); });
  });
  return removed;
}

uint64_t SharedTable::expire(uint32_t now, uint32_t limit) {
  uint64_t expired = 0;
  const uint32_t ids = table_.read([](const Table& t) { return t.ids(); });
  by_turns(std::min(limit, ids), [&](size_t, size_t size) {
    table_.write([&](Table& t) { expired += t.expire(now, static_cast<uint32_t>(size)); });
  });
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
  std::optional<uint64_t> last_turn;
  bool sealed = false;
  const auto next_part = [&](Table& t) {
    if (!last_turn) sealed = t.sealed(channel);
    else if (!sealed && table_.turn() != *last_turn + 1) return false;
    last_turn = table_.turn();
    const uint32_t part = std::min(limit, kTurn);
    limit -= part;
    return t.drain(channel, part, out, tombstones) && limit;
  };
  while (table_.write(next_part)) {
  }
}

void SharedTable::mark_dirty(uint32_t channel, const uint64_t* keys, size_t n) {
  by_turns(n, [&](size_t at, size_t size) {
    table_.write([&](Table& t) { t.mark_dirty(channel, keys + at, size); });
  });
}

void SharedTable::begin_snapshot() {
  table_.write([](Table& t) { t.begin_snapshot(); });
}

bool SharedTable::read_snapshot(uint32_t limit, Rows& out) {
  bool some = false;
  for (uint32_t part; limit; limit -= part, some = true) {
    part = std::min(limit, kTurn);
    if (!table_.write([&](Table& t) { return t.read_snapshot(part, out); })) break;
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

void SharedTable::merge_admission(const uint8_t* data, size_t size) {
  table_.write([&](Table& t) { t.merge_admission(data, size); });
}

}  // namespace streamtrain
