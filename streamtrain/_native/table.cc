#include "table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace streamtrain {
namespace {

const TableConfig& checked(const TableConfig& c) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
  };
  require(c.dim >= 1 && c.dim <= kMaxDim, "dim must be between 1 and 4096");
  require(std::isfinite(c.rate) && c.rate >= 0, "rate must be finite and not negative");
  require(std::isfinite(c.init.scale), "init_scale must be finite");
  require(c.init.kind == InitKind::kConstant || c.init.scale >= 0, "init_scale must not be negative");
  require(c.min_count >= 1 && c.min_count <= 255, "min_count must be between 1 and 255");
  require(c.capacity < kNoRow, "capacity must be below 2^32 - 1");
  require(!c.memory || !c.capacity, "a table has a capacity or a budget of memory, not both");
  require(!c.memory || !c.folder.empty(), "a budget of memory needs a folder for the rows on disk");
  return c;
}

size_t state_size(const TableConfig& c) {
  return std::visit([&](const auto& optimizer) { return optimizer.state_size(c.dim); }, c.optimizer);
}

float checked_rate(const TableConfig& c, std::optional<float> rate) {
  const float value = rate.value_or(c.rate);
  if (!std::isfinite(value) || value < 0) throw std::invalid_argument("rate must be finite and not negative");
  if (value == 0 && std::holds_alternative<Ftrl>(c.optimizer))
    throw std::invalid_argument("the rate of ftrl must be positive");
  return value;
}

}  // namespace

Table::Table(const TableConfig& config)
    : config_(checked(config)),
      layout_(config.storage, config.expire_after || config.capacity, config.dim, state_size(config)),
      rows_(layout_) {
  checked_rate(config_, std::nullopt);
  if (config_.min_count > 1) sketch_.emplace(config_.sketch_width);
  if (config_.memory) disk_ = std::make_unique<DiskRows>(layout_.stride, config_.folder, config_.segment_bytes);
}

// Calls visit(i, first look) for each key in turn, having asked for the memory it will touch some keys ahead: the
// index bucket; then the first bytes of the row found there, or for one key in five the next bucket; then the row
// found in that. Random keys so wait for many cache lines at a time instead of one after another. A prefetch whose
// address translation is not cached holds up the instructions behind it; so each step is a tight loop over a chunk of
// keys, in which the processor sees and translates many addresses at once, and up to four chunks are under way.
template <int kForWriting, typename Visit>
void Table::pipelined(const uint64_t* keys, size_t n, size_t row_bytes, Visit visit) const {
  constexpr size_t kChunk = 32, kRing = 4 * kChunk;
  std::array<uint32_t, kRing> looks;
  const auto prefetch_row = [&](uint32_t id) {
    if (id < kUndecided) rows_.prefetch<kForWriting>(id, row_bytes);
  };
  for (size_t at = 0; at < n + 3 * kChunk; at += kChunk) {
    const auto chunk = [&](size_t behind, auto step) {
      if (at < behind * kChunk) return;
      const size_t begin = at - behind * kChunk, end = std::min(begin + kChunk, n);
      for (size_t i = begin; i < end; ++i) step(i, looks[i % kRing]);
    };
    chunk(0, [&](size_t i, uint32_t&) { index_.prefetch(keys[i]); });
    chunk(1, [&](size_t i, uint32_t& look) { look = index_.glance(keys[i]); });
    chunk(1, [&](size_t, uint32_t look) { prefetch_row(look); });
    chunk(2, [&](size_t i, uint32_t& look) {
      if (look == kUndecided) prefetch_row(look = index_.find(keys[i], [](uint32_t) { return true; }));
      if (disk_ && look == kNoRow) disk_->prefetch(keys[i]);
    });
    chunk(3, [&](size_t i, uint32_t look) { visit(i, look); });
  }
}

uint32_t Table::confirmed(uint64_t key, uint32_t look) const {
  return look != kNoRow && rows_.header(look)->key == key ? look : find(key);
}

void Table::pull(const uint64_t* keys, size_t n, float* out, DiskRead* wanted) const {
  const size_t dim = layout_.dim;
  const Storage storage = layout_.storage;
  const size_t row_bytes = layout_.embedding_offset + dim * element_size(storage);
  pipelined<0>(keys, n, row_bytes, [&, dim, storage](size_t i, uint32_t look) {
    const uint32_t id = look == kNoRow ? kNoRow : confirmed(keys[i], look);
    if (id != kNoRow) return widen(storage, layout_.embedding(rows_.row(id)), out + i * dim, dim);
    birth(config_.init, storage, keys[i], out + i * dim, dim);
    if (wanted) disk_->want(keys[i], static_cast<uint32_t>(i), *wanted);
  });
}

void Table::pull_state(const uint64_t* keys, size_t n, float* out, uint8_t* awaited, DiskRead* wanted) const {
  const size_t dim = layout_.dim, width = dim + layout_.state_size;
  pipelined<0>(keys, n, layout_.stride, [&](size_t i, uint32_t look) {
    const uint32_t id = look == kNoRow ? kNoRow : confirmed(keys[i], look);
    float* to = out + i * width;
    awaited[i] = 0;
    if (id != kNoRow) {
      const std::byte* row = rows_.row(id);
      widen(layout_.storage, layout_.embedding(row), to, dim);
      std::copy_n(layout_.state(row), layout_.state_size, to + dim);
      return;
    }
    birth(config_.init, layout_.storage, keys[i], to, dim);
    std::visit([&](const auto& optimizer) { optimizer.start(config_.rate, to, to + dim, dim); }, config_.optimizer);
    if (wanted) disk_->want(keys[i], static_cast<uint32_t>(i), *wanted);
    if (!sketch_) return;
    const uint32_t seen = sketch_->estimate(keys[i]);
    if (seen < config_.min_count) awaited[i] = static_cast<uint8_t>(config_.min_count - seen);
  });
}

PushResult Table::push(const RowGradients& of, std::optional<float> rate_override) {
  const float rate = checked_rate(config_, rate_override);
  PushResult result;
  uint32_t next = 0;  // gradient
  pipelined<1>(of.keys, of.n, layout_.stride, [&](size_t i, uint32_t look) {
    const uint64_t key = of.keys[i];
    uint32_t id = confirmed(key, look);
    bool changed = false;
    for (const uint32_t end = next + (of.repeats ? of.repeats[i] : 1); next < end; ++next) {
      const float* gradient = of.gradients + size_t{next} * layout_.dim;
      if (!usable_gradient(gradient, layout_.dim)) {
        result.non_finite.push_back(next);
        continue;
      }
      if (id == kNoRow) {
        if (sketch_ && sketch_->add(key, of.counts[next]) < config_.min_count) {
          ++result.unadmitted;
          continue;
        }
        id = insert(key);
        give_birth(rows_.row(id), key, rate);
        ++result.inserted;
      }
      std::byte* row = rows_.row(id);
      if (!changed) before_change(id, row);
      if (!changed && disk_) hand_.used(id);
      changed = true;
      update(row, gradient, rate);
      RowHeader* header = RowLayout::header(row);
      header->set_count(uint64_t{header->count()} + of.counts[next]);
      ++result.applied;
    }
    if (!changed) return;
    std::byte* row = rows_.row(id);
    layout_.set_last_seen(row, std::max(layout_.last_seen(row), of.times[i]));
    dirty_.mark(RowLayout::header(row), id);
  });
  totals_.inserted += result.inserted;
  totals_.unadmitted += result.unadmitted;
  totals_.non_finite += result.non_finite.size();
  return result;
}

// A live row for an absent key, with count and time zero; the caller fills in the rest.
uint32_t Table::insert(uint64_t key) {
  index_.reserve(key, KeyOf{rows_});
  const uint32_t id = rows_.allocate();
  index_.insert(key, id);
  snapshot_.inserted(id);
  RowHeader* header = rows_.header(id);
  if (disk_) hand_.came(id);
  if (!is_own(key)) {
    if (!sweeps_foreign()) ++foreign_;
    else sweep_cursor_ = 0, sweep_ = Sweep::kForeign;
  }
  dirty_.inserted(header, key);
  header->key = key;
  header->meta |= RowHeader::kLive;
  layout_.set_last_seen(rows_.row(id), 0);
  return id;
}

void Table::give_birth(std::byte* row, uint64_t key, float rate) {
  const size_t dim = layout_.dim;
  float values[kMaxDim];
  birth(config_.init, layout_.storage, key, values, dim);
  narrow(layout_.storage, values, layout_.embedding(row), dim);
  std::visit([&](const auto& optimizer) { optimizer.start(rate, values, layout_.state(row), dim); }, config_.optimizer);
}

void Table::update(std::byte* row, const float* gradient, float rate) {
  const size_t dim = layout_.dim;
  const auto apply = [&](float* w) {
    std::visit([&](const auto& optimizer) { optimizer.apply(rate, w, layout_.state(row), gradient, dim); },
               config_.optimizer);
  };
  std::byte* stored = layout_.embedding(row);
  if (layout_.storage == Storage::kFloat32) return apply(reinterpret_cast<float*>(stored));
  float values[kMaxDim];
  uint16_t noise[kMaxDim];
  const RowHeader* header = RowLayout::header(row);
  widen(layout_.storage, stored, values, dim);
  apply(values);
  rounding_noise(config_.init.seed, header->key, header->count(), noise, dim);
  narrow(layout_.storage, values, noise, stored, dim);
}

void Table::erase(uint32_t id) {
  std::byte* row = rows_.row(id);
  const uint64_t key = RowLayout::header(row)->key;
  if (is_own(key)) {
    before_change(id, row);
    dirty_.removed(key);
  } else if (!sweeps_foreign()) {
    --foreign_;
  }
  index_.erase(key, id, KeyOf{rows_});
  rows_.release(id);
}

uint32_t Table::excess() const {
  if (!config_.capacity || sweeps_foreign()) return 0;
  return size() > config_.capacity ? size() - config_.capacity : 0;
}

bool Table::begin_eviction() {
  if (!excess()) return false;
  clock_.begin(rows_, excess());
  return true;
}

uint64_t Table::evict(uint32_t limit) {
  const auto is_own = [&](uint32_t id) { return this->is_own(rows_.header(id)->key); };
  const uint32_t evicted = clock_.run(rows_, layout_, excess(), limit, is_own, [&](uint32_t id) { erase(id); });
  totals_.evicted += evicted;
  return evicted;
}

void check_finite(const float* embeddings, size_t n, const float* state, size_t m) {
  const auto finite = [](float value) { return std::isfinite(value); };
  if (!std::all_of(embeddings, embeddings + n, finite) || !std::all_of(state, state + m, finite))
    throw std::invalid_argument("embeddings and state must be finite");
}

uint64_t Table::load(const RowColumns& of, bool cold, bool only_new) {
  uint64_t inserted = 0;
  const bool to_disk = cold && disk_ && !sweeps_foreign() && !snapshot_.open() && dirty_.all_free() &&
                       disk_->backlog() < DiskRows::kBacklog;
  // Two chunks are in memory for a while: rows that take turns with them would come and leave at once.
  const uint64_t chunks = to_disk ? 2 * uint64_t{disk_->layout().chunk_rows()} : 0;
  const uint64_t most = to_disk ? rows_of_memory() : 0;
  std::vector<std::byte> bytes(to_disk ? layout_.stride : 0);
  pipelined<1>(of.keys, of.n, layout_.stride, [&](size_t i, uint32_t look) {
    const uint64_t key = of.keys[i];
    uint32_t id = confirmed(key, look);
    if (id == kNoRow && to_disk && rows_.live() + chunks >= most && is_own(key)) {
      const std::optional<uint64_t> before = disk_->unwritten(key);  // if the key comes twice
      if (before && only_new) return;
      if (before) disk_->take(key, *before);
      else ++inserted;
      *RowLayout::header(bytes.data()) = {key, RowHeader::kLive};
      fill(bytes.data(), of, i);
      disk_->append(key, bytes.data(), layout_.last_seen(bytes.data()));
      return;
    }
    if (id == kNoRow) {
      id = insert(key);
      ++inserted;
    } else if (only_new) {
      return;
    }
    std::byte* row = rows_.row(id);
    before_change(id, row);
    fill(row, of, i);
    if (is_own(key)) dirty_.mark(RowLayout::header(row), id);
  });
  // Should fewer rows have room in the end, those that came later are the first to leave.
  if (to_disk && rows_.live() + chunks >= most) hand_.put(rows_.end() / 2);
  totals_.inserted += inserted;
  return inserted;
}

// All but the key.
void Table::fill(std::byte* row, const RowColumns& from, size_t i) const {
  const size_t dim = layout_.dim, state_size = layout_.state_size;
  narrow(layout_.storage, from.embeddings + i * dim, layout_.embedding(row), dim);
  std::copy_n(from.state + i * state_size, state_size, layout_.state(row));
  RowLayout::header(row)->set_count(from.counts[i]);
  layout_.set_last_seen(row, from.last_seen[i]);
}

uint64_t Table::remove(const uint64_t* keys, size_t n) {
  uint64_t removed = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t id = find(keys[i]);
    if (id == kNoRow) continue;
    erase(id);
    ++removed;
  }
  totals_.removed += removed;
  return removed;
}

void Table::lookup(const uint64_t* keys, size_t n, uint8_t* found, uint32_t* counts, uint32_t* last_seen,
                   DiskRead* wanted) const {
  pipelined<0>(keys, n, layout_.embedding_offset, [&](size_t i, uint32_t look) {
    const uint32_t id = look == kNoRow ? kNoRow : confirmed(keys[i], look);
    found[i] = id != kNoRow;
    if (id == kNoRow) {
      if (wanted) disk_->want(keys[i], static_cast<uint32_t>(i), *wanted);
      return;
    }
    const std::byte* row = rows_.row(id);
    counts[i] = RowLayout::header(row)->count();
    last_seen[i] = layout_.last_seen(row);
  });
}

void Table::want(const uint64_t* keys, size_t n, DiskRead& wanted) const {
  pipelined<1>(keys, n, layout_.stride, [&](size_t i, uint32_t look) {
    if (confirmed(keys[i], look) == kNoRow) disk_->want(keys[i], static_cast<uint32_t>(i), wanted);
  });
}

uint64_t Table::expire(uint32_t now, uint32_t limit) {
  if (config_.expire_after == 0 || now <= config_.expire_after) return 0;
  const uint32_t oldest = now - config_.expire_after, end = rows_.end();
  uint64_t expired = 0;
  for (uint32_t visits = std::min(limit, end); visits; --visits, ++expire_cursor_) {
    if (expire_cursor_ >= end) expire_cursor_ = 0;
    std::byte* row = rows_.row(expire_cursor_);
    RowHeader* header = RowLayout::header(row);
    const uint32_t seen = layout_.last_seen(row);
    if (!header->live() || seen >= oldest || !is_own(header->key)) continue;
    if (seen) {
      erase(expire_cursor_);
      ++expired;
    } else {  // from a time when it was not kept: the row's time begins
      before_change(expire_cursor_, row);
      layout_.set_last_seen(row, now);
      dirty_.mark(header, expire_cursor_);
    }
  }
  totals_.expired += expired;
  return expired;
}

void Table::set_slots(uint32_t begin, uint32_t end) {
  if (begin >= end || end > kHashSlots) throw std::invalid_argument("slots must be from 0 to 65536, and some");
  const bool others = begin != slots_begin_ || end - begin != slots_;
  const bool any = rows_.live() || (disk_ && disk_->live());
  if (others && any && (snapshot_.open() || dirty_.any_sealed()))
    throw std::logic_error("a snapshot is open, or a channel is sealed");
  slots_begin_ = begin;
  slots_ = end - begin;
  foreign_ = 0;
  sweep_ = any ? Sweep::kForeign : Sweep::kNone;
  sweep_cursor_ = 0;
  sweep_place_ = {};
}

bool Table::sweep(uint32_t limit) {
  for (; limit && sweep_ == Sweep::kForeign; --limit) {
    if (sweep_cursor_ < rows_.end()) {
      const RowHeader* header = rows_.header(sweep_cursor_);
      if (header->live() && !is_own(header->key)) erase(sweep_cursor_);
      ++sweep_cursor_;
    } else if (disk_) {
      sweep_ = Sweep::kForeignOnDisk;
      sweep_place_ = {};
    } else {
      rows_.begin_closing();
      sweep_ = Sweep::kGaps;
    }
  }
  while (limit && sweep_ == Sweep::kGaps) {
    const uint32_t visits = rows_.close_gaps([&](uint32_t from, uint32_t to) { move(from, to); });
    if (!visits) sweep_ = Sweep::kNone;
    limit -= std::min(limit, visits);
  }
  return sweep_ != Sweep::kNone;
}

void Table::move(uint32_t from, uint32_t to) {
  std::byte *source = rows_.row(from), *target = rows_.row(to);
  before_change(from, source);
  snapshot_.inserted(to);
  RowHeader *was = RowLayout::header(source), *is = RowLayout::header(target);
  dirty_.moved(was, is, to);
  if (disk_) hand_.moved(from, to);
  index_.replace(was->key, from, to);
  constexpr uint32_t kContent = RowHeader::kMaxCount | RowHeader::kLive;
  const uint32_t meta = (is->meta & ~kContent) | (was->meta & kContent);
  std::memcpy(target, source, layout_.stride);
  is->meta = meta;
  was->meta &= ~kContent;
}

}  // namespace streamtrain
