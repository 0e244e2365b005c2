// Dirty channels: which rows changed and which keys went away since a consumer last looked.
//
// A channel is an independent consumer of changes, such as publishing or delta checkpoints. It holds a queue of row
// ids, each once (the row's dirty bit says "in the queue"), and a set of tombstones: keys removed since. A key is
// never in both: removing a row adds a tombstone, inserting its key again takes it back. A removed row stays in the
// queue with its dirty bit and is skipped when its turn comes, or serves the next key that gets its id.
//
// A sealed channel takes no more changes and holds what it does as of the moment it was sealed. Its bit in a row then
// says "to be read from the row itself": before such a row changes or goes away its bytes are put aside and the bit is
// cleared, and a row that comes to an id gets no such bit. The reader takes what was put aside, and skips ids in the
// queue without the bit. So little piles up as long as it keeps reading, and sealing takes no time.
//
// A row that gets another id is in queues under both; at the first one it is no longer live, as if it had been removed.
//
// A row that leaves memory for the disk is no longer live either, and its key waits instead (on_disk); when it comes back
// it is queued again. What is on disk does not change, so a sealed channel needs it put aside only when it comes back.
//
// What becomes of a row, by the state of the channel and the row's bit in it:
//
//                 it changes              it is removed            a key comes to its id     its turn comes
//   open, clear   queued, bit set         tombstone                tombstone taken back      (not in the queue)
//   open, set     -                       tombstone, bit stays     tombstone taken back      read if live, bit cleared
//   sealed, clear -                       -                        -                         skipped
//   sealed, set   put aside, bit cleared  put aside, bit cleared   bit cleared               read if live, bit cleared
//   closing       -                       -                        -                         bit cleared, not read
//   free          no bits are set, and nothing is done
//
// Tombstones of a sealed channel stay what they are. A channel goes from free to open to sealed; from either to closing,
// and from there, once no row has its bit, to free.
//
// Thread safety: external synchronisation. Queues are deques: they grow and shrink without copying.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <utility>

#include "aside.h"
#include "index.h"
#include "rows.h"

namespace streamtrain {

// A set of keys.
class KeySet {
 public:
  void add(uint64_t key) {
    if (!index_) index_ = std::make_unique<Index>();  // 24 KiB, which a table without removals does not need
    if (find(key) != kNoRow) return;
    index_->reserve(key, KeyOf{keys_});
    keys_.push_back(key);
    index_->insert(key, static_cast<uint32_t>(keys_.size() - 1));
  }

  // Whether it was there.
  bool remove(uint64_t key) noexcept {
    if (keys_.empty()) return false;
    const uint32_t at = find(key);
    if (at == kNoRow) return false;
    index_->erase(key, at, KeyOf{keys_});
    const auto last = static_cast<uint32_t>(keys_.size() - 1);
    if (at != last) {
      index_->replace(keys_[last], last, at);
      keys_[at] = keys_[last];
    }
    keys_.pop_back();
    if (keys_.empty()) index_.reset();
    return true;
  }

  // REQUIRES: size() > 0.
  uint64_t take() noexcept {
    const uint64_t key = keys_.back();
    index_->erase(key, static_cast<uint32_t>(keys_.size() - 1), KeyOf{keys_});
    keys_.pop_back();
    if (keys_.empty()) index_.reset();
    return key;
  }

  // The i-th from the end.
  uint64_t last(size_t i) const { return keys_[keys_.size() - 1 - i]; }

  size_t size() const { return keys_.size(); }
  size_t bytes() const { return keys_.size() * sizeof(uint64_t) + (index_ ? index_->bytes() : 0); }

 private:
  struct KeyOf {
    const std::deque<uint64_t>& keys;

    uint64_t operator()(uint32_t at) const { return keys[at]; }
    void prefetch(uint32_t) const {}
  };

  uint32_t find(uint64_t key) const {
    return index_->find(key, [&](uint32_t at) { return keys_[at] == key; });
  }

  std::deque<uint64_t> keys_;
  std::unique_ptr<Index> index_;
};

class DirtyChannels {
 public:
  static constexpr uint32_t kChannels = 3;

  enum class State : uint8_t { kFree, kOpen, kSealed, kClosing };

  struct Channel {
    State state = State::kFree;
    std::deque<uint32_t> rows;
    KeySet tombstones;
    KeySet on_disk;   // keys of changed rows
    RowsAside aside;  // of a sealed channel

    bool sealed() const { return state == State::kSealed; }
    // At most how many entries there still are: rows put aside may also be in the queue.
    size_t pending() const { return rows.size() + tombstones.size() + on_disk.size() + aside.size(); }
  };

  static constexpr uint32_t bit(uint32_t channel) { return 1u << (RowHeader::kDirtyShift + channel); }

  uint32_t open() {
    for (uint32_t c = 0; c < kChannels; ++c) {
      if (channels_[c].state != State::kFree) continue;
      channels_[c].state = State::kOpen;
      open_bits_ |= bit(c);
      return c;
    }
    throw std::logic_error("all 3 channels are open");
  }

  // Sealed channels are drained and closed as others are.
  void seal(uint32_t channel) {
    Channel& c = get_unsealed(channel);
    c.state = State::kSealed;
    open_bits_ &= ~bit(channel);
    sealed_bits_ |= bit(channel);
  }

  // What the channel held, for the calls of close that follow.
  Channel begin_close(uint32_t channel) {
    Channel rest = std::exchange(get(channel), Channel());
    channels_[channel].state = State::kClosing;
    open_bits_ &= ~bit(channel);
    sealed_bits_ &= ~bit(channel);
    return rest;
  }

  // Clears up to `limit` rows; whether there are more.
  bool close(uint32_t channel, Channel& rest, RowStore& rows, uint32_t limit) {
    for (; limit && !rest.rows.empty(); --limit) {
      rows.header(rest.rows.front())->meta &= ~bit(channel);
      rest.rows.pop_front();
    }
    if (rest.rows.empty()) channels_[channel].state = State::kFree;
    return !rest.rows.empty();
  }

  bool any_sealed() const { return sealed_bits_; }
  bool all_free() const {
    return std::all_of(channels_.begin(), channels_.end(), [](const Channel& c) { return c.state == State::kFree; });
  }

  const Channel& get(uint32_t channel) const {
    if (channel >= kChannels || (channels_[channel].state != State::kOpen && !channels_[channel].sealed()))
      throw std::invalid_argument("no such open channel");
    return channels_[channel];
  }
  Channel& get(uint32_t channel) { return const_cast<Channel&>(std::as_const(*this).get(channel)); }
  Channel& get_unsealed(uint32_t channel) {
    Channel& c = get(channel);
    if (c.sealed()) throw std::invalid_argument("the channel is sealed: it takes no more changes, another one has to");
    return c;
  }

  // To be called before a live row changes or goes away.
  void before_change(std::byte* row, size_t stride) {
    RowHeader* header = RowLayout::header(row);
    const uint32_t unread = header->meta & sealed_bits_;
    if (!unread) return;
    for (uint32_t c = 0; c < kChannels; ++c)
      if (unread & bit(c)) channels_[c].aside.put(row, stride);
    header->meta &= ~unread;
  }

  // The row changed.
  void mark(RowHeader* row, uint32_t id) {
    const uint32_t missing = open_bits_ & ~row->meta;
    if (!missing) return;
    for (uint32_t c = 0; c < kChannels; ++c)
      if (missing & bit(c)) channels_[c].rows.push_back(id);
    row->meta |= missing;
  }
  void mark(RowHeader* row, uint32_t id, uint32_t channel) {
    if (row->meta & bit(channel)) return;
    channels_[channel].rows.push_back(id);
    row->meta |= bit(channel);
  }

  // The id got a new row, whose key this is.
  void inserted(RowHeader* row, uint64_t key) noexcept {
    row->meta &= ~sealed_bits_;
    for (Channel& c : channels_)
      if (c.state == State::kOpen) c.tombstones.remove(key);
  }
  // A live row gets another id, at which there is none; if the one that was there waits in an open channel, it is taken
  // for changed, too. REQUIRES: before_change.
  void moved(RowHeader* from, RowHeader* to, uint32_t id) {
    to->meta &= ~sealed_bits_;
    const uint32_t waits = from->meta & open_bits_;
    for (uint32_t c = 0; c < kChannels; ++c)
      if (waits & bit(c)) mark(to, id, c);
  }
  void removed(uint64_t key) {
    for (Channel& c : channels_)
      if (c.state == State::kOpen) c.tombstones.add(key);
  }

  // The row leaves its id for the disk. REQUIRES: before_change.
  void leaves(RowHeader* row) {
    for (uint32_t c = 0; c < kChannels; ++c)
      if (row->meta & open_bits_ & bit(c)) channels_[c].on_disk.add(row->key);
    row->meta &= ~open_bits_;
  }
  // A row from the disk gets this id, and has no bits yet.
  void returns(RowHeader* row, uint32_t id, const std::byte* bytes, size_t stride) {
    for (uint32_t c = 0; c < kChannels; ++c) {
      if (!channels_[c].on_disk.remove(row->key)) continue;
      if (channels_[c].sealed()) channels_[c].aside.put(bytes, stride);
      else mark(row, id, c);
    }
  }

  // A row on disk goes that is in no channel.
  void forget(uint64_t key) {
    for (Channel& c : channels_) c.on_disk.remove(key);
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const Channel& c : channels_)
      sum += c.rows.size() * sizeof(uint32_t) + c.tombstones.bytes() + c.on_disk.bytes() + c.aside.bytes();
    return sum;
  }

 private:
  std::array<Channel, kChannels> channels_;
  uint32_t open_bits_ = 0, sealed_bits_ = 0;
};

}  // namespace streamtrain
