#include "disk_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "hash.h"
#include "rows.h"

namespace streamtrain {
namespace {

constexpr size_t kSumBytes = sizeof(uint32_t);

std::atomic<uint64_t> serials{0};

// Of a block's rows, and of where it is: a block at the wrong place is found as well.
uint32_t checksum(const std::byte* block, size_t block_bytes, const Segment& segment, uint64_t index) {
  const uint64_t sum = hash_bytes(reinterpret_cast<const char*>(block), block_bytes - kSumBytes);
  return static_cast<uint32_t>(mix64(sum ^ mix64(segment.serial << 32 ^ index)));
}

void check(const std::byte* block, const DiskLayout& layout, const Segment& segment, uint64_t index) {
  uint32_t stored;
  std::memcpy(&stored, block + layout.block_bytes - kSumBytes, kSumBytes);
  if (stored != checksum(block, layout.block_bytes, segment, index))
    throw std::runtime_error("rows on disk are damaged: block " + std::to_string(index) + " of a file of " +
                             std::to_string(segment.rows) + " rows does not have its checksum");
}

}  // namespace

// The smallest blocks of which an eighth at most is wasted, or which hold 16 rows.
DiskLayout::DiskLayout(size_t of_row, size_t segment_bytes) : stride(of_row) {
  const size_t step = segment_bytes < (size_t{64} << 10) ? kBlockAlign : 4096;  // small ones are those of tests
  block_bytes = step;
  const auto wasted = [&] { return block_bytes - (block_bytes - kSumBytes) / stride * stride; };
  while (block_bytes < stride + kSumBytes || (wasted() * 8 > block_bytes && block_bytes < 16 * stride))
    block_bytes += step;
  block_rows = static_cast<uint32_t>((block_bytes - kSumBytes) / stride);
  const size_t chunk = std::clamp(segment_bytes / 4, block_bytes, std::max(size_t{256} << 10, block_bytes));
  chunk_blocks = static_cast<uint32_t>(chunk / block_bytes);
  segment_chunks = static_cast<uint32_t>(std::max<size_t>(1, segment_bytes / chunk_bytes()));
}

uint32_t Chunk::rows() const { return of->layout().chunk_rows(); }

void Chunk::write() const {
  const DiskLayout& layout = of->layout();
  for (uint32_t b = 0; b < layout.chunk_blocks; ++b) {
    std::byte* block = memory.data() + b * layout.block_bytes;
    const uint32_t sum = checksum(block, layout.block_bytes, *segment, uint64_t{index} * layout.chunk_blocks + b);
    std::memcpy(block + layout.block_bytes - kSumBytes, &sum, kSumBytes);
  }
  {
    const std::lock_guard hold(segment->opening);
    if (!segment->file) segment->file = std::make_unique<const BlockFile>(of->folder());
  }
  segment->file->write(memory.data(), layout.chunk_bytes(), index * layout.chunk_bytes());
}

void DiskRead::leave_out(const std::vector<Item>& others) {
  if (others.empty()) return;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto same = [&](const Item& other) { return other.row == items[i].row && other.segment == items[i].segment; };
    if (std::any_of(others.begin(), others.end(), same)) continue;
    if (kept != i) {
      items[kept] = std::move(items[i]);
      std::memcpy(bytes.data() + kept * layout->stride, bytes.data() + i * layout->stride, layout->stride);
    }
    ++kept;
  }
  items.resize(kept);
  bytes.resize(kept * layout->stride);
}

void DiskRead::read() {
  if (items.empty()) return;
  const size_t stride = layout->stride, block_bytes = layout->block_bytes;
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < items.size(); ++i)
    if (!items[i].in_memory) order.push_back(i);
  if (order.empty()) return;
  const auto block = [&](uint32_t i) {
    return std::pair(items[i].segment.get(),
                     items[i].row % layout->segment_rows() / layout->block_rows);
  };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return block(a) < block(b); });
  constexpr size_t kPart = 512;  // blocks that are in memory at a time
  for (size_t at = 0; at < order.size();) {
    std::vector<BlockRead> reads;
    std::vector<size_t> firsts;  // in order
    size_t end = at;
    for (; end < order.size(); ++end) {
      const bool another = end == at || block(order[end]) != block(order[end - 1]);
      if (!another) continue;
      if (firsts.size() == kPart) break;
      firsts.push_back(end);
    }
    const BlockMemory memory(firsts.size() * block_bytes);
    for (size_t f = 0; f < firsts.size(); ++f) {
      const auto [segment, index] = block(order[firsts[f]]);
      reads.push_back({segment->file.get(), index * block_bytes, memory.data() + f * block_bytes, block_bytes});
    }
    read_blocks(reads);
    firsts.push_back(end);
    for (size_t f = 0; f + 1 < firsts.size(); ++f) {
      const std::byte* data = memory.data() + f * block_bytes;
      const auto [segment, index] = block(order[firsts[f]]);
      check(data, *layout, *segment, index);
      for (size_t j = firsts[f]; j < firsts[f + 1]; ++j) {
        const auto position = static_cast<uint32_t>(items[order[j]].row % layout->segment_rows());
        std::memcpy(bytes.data() + order[j] * stride, data + layout->within(position), stride);
      }
    }
    at = end;
  }
}

void DiskPart::read() {
  if (in_memory) return;
  const size_t first = layout->offset(begin), size = layout->offset(end - 1) + layout->block_bytes - first;
  memory = BlockMemory(size);
  read_blocks({{segment->file.get(), first, memory.data(), size}});
  for (size_t at = 0; at < size; at += layout->block_bytes)
    check(memory.data() + at, *layout, *segment, (first + at) / layout->block_bytes);
}

size_t DiskRows::memory_bytes() const { return index_.bytes() + chunks_ * layout_.chunk_bytes(); }

void DiskRows::want(uint64_t key, uint32_t position, DiskRead& out) const {
  index_.find(key, [&](uint64_t row) {
    const std::shared_ptr<Segment>& segment = segments_[segment_of(row)];
    const uint32_t at = position_of(row);
    const Chunk* chunk = segment->chunks[at / layout_.chunk_rows()].get();
    out.items.push_back({key, position, row, segment, chunk != nullptr});
    out.bytes.resize(out.items.size() * layout_.stride);
    if (!chunk) return;
    const uint32_t in_chunk = at % layout_.chunk_rows();
    std::memcpy(out.bytes.data() + (out.items.size() - 1) * layout_.stride,
                chunk->memory.data() + layout_.offset(in_chunk) + layout_.within(in_chunk), layout_.stride);
  });
}

void DiskRows::take(uint64_t key, uint64_t row) noexcept {
  index_.erase(key, row);
  --live_;
  const uint32_t number = segment_of(row);
  --segments_[number]->live;
  drop_if_empty(number);
}

std::optional<uint64_t> DiskRows::unwritten(uint64_t key) const {
  std::optional<uint64_t> found;
  index_.find(key, [&](uint64_t row) {
    const uint32_t at = position_of(row), in_chunk = at % layout_.chunk_rows();
    const Chunk* chunk = segments_[segment_of(row)]->chunks[at / layout_.chunk_rows()].get();
    if (!chunk) return;
    const std::byte* bytes = chunk->memory.data() + layout_.offset(in_chunk) + layout_.within(in_chunk);
    if (RowLayout::header(bytes)->key == key) found = row;
  });
  return found;
}

void DiskRows::drop_if_empty(uint32_t number) noexcept {
  const std::shared_ptr<Segment>& segment = segments_[number];
  if (segment->live || segment == active_ || view_open_) return;
  rows_ -= segment->rows;
  for (const auto& chunk : segment->chunks) {
    if (!chunk) {
      disk_bytes_ -= layout_.chunk_bytes();
    } else if (const auto at = std::find(full_.begin(), full_.end(), chunk); at != full_.end()) {
      full_.erase(at);
      --chunks_;
    }
  }
  for (auto& chunk : segment->chunks) chunk.reset();  // chunks and segments hold each other
  free_.push_back(number);
  by_serial_.erase(segment->serial);
  segments_[number].reset();
}

uint64_t DiskRows::place(const std::byte* row, uint32_t time) {
  if (!active_) {
    const auto number = free_.empty() ? static_cast<uint32_t>(segments_.size()) : free_.back();
    if ((uint64_t{number} + 1) * layout_.segment_rows() > DiskIndex::kMaxRows)
      throw std::length_error("the table has run out of row numbers on disk (2^34)");
    if (free_.empty()) segments_.emplace_back();
    else free_.pop_back();
    active_ = std::make_shared<Segment>(number, ++serials);
    segments_[number] = active_;
    by_serial_.emplace(active_->serial, active_.get());
  }
  Segment& s = *active_;
  const uint32_t position = s.rows, in_chunk = position % layout_.chunk_rows();
  if (in_chunk == 0) {
    auto chunk = std::make_shared<Chunk>(
        Chunk{this, active_, position / layout_.chunk_rows(), BlockMemory(layout_.chunk_bytes())});
    std::memset(chunk->memory.data(), 0, layout_.chunk_bytes());
    s.chunks.push_back(std::move(chunk));
    ++chunks_;
  }
  std::memcpy(s.chunks.back()->memory.data() + layout_.offset(in_chunk) + layout_.within(in_chunk), row, layout_.stride);
  s.oldest = std::min(s.oldest, time);
  s.looked_oldest = std::min(s.looked_oldest, time);
  ++s.rows;
  ++s.live;
  ++rows_;
  const uint64_t number = uint64_t{s.number} * layout_.segment_rows() + position;
  if (in_chunk + 1 == layout_.chunk_rows()) full_.push_back(s.chunks.back());
  if (s.rows == layout_.segment_rows()) active_.reset();
  return number;
}

void DiskRows::append(uint64_t key, const std::byte* row, uint32_t time) {
  index_.insert(key, place(row, time));
  ++live_;
}

std::shared_ptr<Chunk> DiskRows::next_chunk() {
  if (full_.empty()) return nullptr;
  auto chunk = std::move(full_.front());
  full_.pop_front();
  ++writing_;
  return chunk;
}

void DiskRows::written(const std::shared_ptr<Chunk>& chunk, bool well) {
  --writing_;
  auto& chunks = chunk->segment->chunks;
  if (!chunks[chunk->index]) {  // the segment has gone meanwhile
    --chunks_;
  } else if (well) {
    chunks[chunk->index].reset();
    --chunks_;
    disk_bytes_ += layout_.chunk_bytes();
    written_bytes_ += layout_.chunk_bytes();
  } else {
    full_.push_front(chunk);
  }
}

DiskPart DiskRows::rows_of(const std::shared_ptr<Segment>& segment, uint32_t begin, uint32_t limit, uint32_t end) const {
  const uint32_t chunk_rows = layout_.chunk_rows(), in_chunk = begin % chunk_rows;
  DiskPart part;
  part.segment = segment;
  part.layout = &layout_;
  part.begin = begin;
  part.end = std::min({end, begin + limit, begin - in_chunk + chunk_rows});
  const Chunk* chunk = segment->chunks[begin / chunk_rows].get();
  part.in_memory = chunk != nullptr;
  if (!chunk) return part;
  const size_t first = layout_.offset(part.begin), size = layout_.offset(part.end - 1) + layout_.block_bytes - first;
  part.memory = BlockMemory(size);
  // Not the checksums, which another thread may be about to put there.
  for (size_t at = 0; at < size; at += layout_.block_bytes)
    std::memcpy(part.memory.data() + at, chunk->memory.data() + layout_.offset(in_chunk) + at,
                layout_.block_rows * layout_.stride);
  return part;
}

std::optional<DiskPart> DiskRows::part(Place& from, uint32_t limit, uint32_t before) const {
  for (; from.segment < segments_.size(); from = {from.segment + 1, 0}) {
    const auto& segment = segments_[from.segment];
    if (!segment || from.row >= segment->rows || segment->oldest >= before) continue;
    DiskPart part = rows_of(segment, from.row, limit, segment->rows);
    from.row = part.end;
    return part;
  }
  return std::nullopt;
}

std::optional<DiskPart> DiskRows::part_since(uint64_t serial, uint32_t position, uint32_t limit) const {
  for (auto at = by_serial_.lower_bound(serial); at != by_serial_.end(); ++at) {
    const Segment& s = *at->second;
    const uint32_t begin = s.serial == serial ? position : 0;
    if (begin < s.rows) return rows_of(segments_[s.number], begin, limit, s.rows);
  }
  return std::nullopt;
}

void DiskRows::looked_at(const DiskPart& part, uint32_t oldest) {
  Segment& s = *segments_[part.segment->number];
  if (part.begin == 0) s.looked_until = 0, s.looked_oldest = UINT32_MAX;
  if (part.begin != s.looked_until) return;
  s.looked_until = part.end;
  s.looked_oldest = std::min(s.looked_oldest, oldest);
  if (s.looked_until == s.rows) s.oldest = s.looked_oldest;
}

std::optional<DiskRows::Victim> DiskRows::victim() const {
  if (view_open_ || (rows_ - live_) * 3 <= rows_ + 3 * uint64_t{layout_.segment_rows()}) return std::nullopt;
  const Segment* emptiest = nullptr;
  for (const auto& segment : segments_) {
    if (!segment || segment == active_) continue;
    if (std::any_of(segment->chunks.begin(), segment->chunks.end(), [](const auto& chunk) { return chunk != nullptr; }))
      continue;
    if (!emptiest || segment->live < emptiest->live) emptiest = segment.get();
  }
  return emptiest ? std::optional(Victim{emptiest->number, emptiest->serial}) : std::nullopt;
}

void DiskRows::relocate(uint64_t key, uint64_t row, const std::byte* bytes, uint32_t time) {
  index_.replace(key, row, place(bytes, time));
  const uint32_t number = segment_of(row);
  --segments_[number]->live;
  drop_if_empty(number);
}

void DiskRows::begin_view() {
  view_open_ = true;
  for (const auto& segment : segments_)
    if (segment) segment->view_end = segment->rows;
}

std::optional<DiskPart> DiskRows::view_part(uint32_t limit) const {
  for (const auto& segment : segments_)
    if (segment && segment->view_read < segment->view_end)
      return rows_of(segment, segment->view_read, limit, segment->view_end);
  return std::nullopt;
}

bool DiskRows::viewed(const DiskPart& part) {
  uint32_t& read = segments_[part.segment->number]->view_read;
  if (read != part.begin) return false;
  read = part.end;
  return true;
}

void DiskRows::end_view() {
  view_open_ = false;
  for (uint32_t number = 0; number < segments_.size(); ++number) {
    if (!segments_[number]) continue;
    segments_[number]->view_read = segments_[number]->view_end = 0;
    drop_if_empty(number);
  }
}

}  // namespace streamtrain
