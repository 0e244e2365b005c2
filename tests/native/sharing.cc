// What threads share, under ThreadSanitizer: tables with all that is read of them meanwhile, rings and lanes.
//
// Ends with 1, and says why, if a value is not one that was written. Usage: sharing [SECONDS]
#include <fcntl.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bits.h"
#include "lane.h"
#include "ring.h"
#include "shared_table.h"

namespace streamtrain {
namespace {

std::atomic<bool> stop{false};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// All floats of a row are the same, and grow by one with every gradient of -1.
constexpr size_t kDim = 8;
constexpr uint64_t kKeys = 30'000;

TableConfig config() {
  TableConfig of;
  of.dim = kDim;
  of.optimizer = Sgd{};
  of.rate = 1.0f;
  of.init = {InitKind::kConstant, 0.0f, 0};
  of.min_count = 2;
  of.sketch_width = 4096;
  of.expire_after = 5;
  of.capacity = 20'000;
  return of;
}

// The same with most of its rows on disk.
TableConfig on_disk() {
  TableConfig of = config();
  of.capacity = 0;
  of.memory = 400'000;
  of.folder = "/tmp";
  of.segment_bytes = 100'000;
  return of;
}

Rows rows_of(const SharedTable& table) {
  Rows rows;
  rows.dim = kDim;
  rows.state_size = table.layout().state_size;
  return rows;
}

std::vector<uint64_t> some_keys(std::mt19937_64& random, size_t most) {
  std::vector<uint64_t> keys(1 + random() % most);
  for (uint64_t& key : keys) key = mix64(random() % kKeys);
  return keys;
}

void check_rows(const float* values, size_t rows, const char* what) {
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 1; j < kDim; ++j) require(values[i * kDim + j] == values[i * kDim], what);
}

void learn(SharedTable& table, uint64_t seed) {
  static std::atomic<uint32_t> now{1000};
  std::mt19937_64 random(seed);
  while (!stop) {
    const auto keys = some_keys(random, 6000);
    const std::vector<float> gradients(keys.size() * kDim, -1.0f);
    const std::vector<uint32_t> counts(keys.size(), 1), times(keys.size(), now.fetch_add(1));
    table.push({keys.data(), nullptr, gradients.data(), counts.data(), times.data(), keys.size()}, std::nullopt);
    table.expire(now, 512);
    if (random() % 8 == 0) table.remove(keys.data(), std::min<size_t>(keys.size(), 10));
  }
}

void look(const SharedTable& table, uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop) {
    const auto keys = some_keys(random, 5000);
    std::vector<float> rows(keys.size() * kDim);
    table.pull(keys.data(), keys.size(), rows.data());
    check_rows(rows.data(), keys.size(), "half a row was pulled");
    table.lookup(keys.data(), keys.size());
    table.stats();
    table.admission_bytes();
  }
}

// A consumer of changes, whose channel is sealed now and then.
void drain(SharedTable& table, uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop) {
    const uint32_t channel = table.open_channel();
    Rows rows = rows_of(table);
    std::vector<uint64_t> gone;
    for (int i = 0; i < 20 && !stop; ++i) {
      table.drain(channel, 4096, rows, gone);
      table.mark_dirty(channel, rows.keys.data(), std::min<size_t>(rows.keys.size(), 10));
    }
    if (random() % 2) {
      table.seal(channel);
      while (table.pending(channel) && !stop) table.drain(channel, 1000, rows, gone);
    }
    check_rows(rows.embeddings.data(), rows.keys.size(), "half a row was drained");
    table.close_channel(channel);
  }
}

void view(SharedTable& table) {
  while (!stop) {
    Rows rows = rows_of(table);
    table.begin_snapshot();
    while (table.read_snapshot(3000, rows) && !stop) continue;
    table.end_snapshot();
    for (std::optional<uint64_t> cursor = 0; cursor && !stop;) cursor = table.scan(*cursor, 9000, rows);
    check_rows(rows.embeddings.data(), rows.keys.size(), "half a row was in a view");
  }
}

// A shard that loses half of its slots now and then, and gets them back, while others use the rows of all.
void change_slots(SharedTable& table) {
  const auto are = [&](uint32_t end) {
    try {
      table.set_slots(0, end);
      return true;
    } catch (const std::logic_error&) {  // a snapshot is open, or a channel is sealed
      std::this_thread::yield();
      return false;
    }
  };
  while (!stop) {
    if (are(kHashSlots / 2))
      for (int i = 0; i < 20 && table.sweep(3000) && !stop; ++i) continue;
    while (!stop && !are(kHashSlots)) continue;
    while (table.sweep(3000) && !stop) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // in which rows may be evicted
  }
}

// Bytes through a ring in plain memory, which ThreadSanitizer sees as one: of a lane it sees two mappings.
using Memory = RingMemory<4096>;

void write_ring(Memory& memory) {
  RingWriter<4096> writer(memory);
  std::mt19937_64 random(1);
  std::string part;
  for (uint8_t next = 0; !stop;) {
    part.resize(std::min<size_t>(writer.room(), random() % 3000));
    for (char& c : part) c = static_cast<char>(next++);
    writer.write(part.data(), part.size());
  }
}

void read_ring(Memory& memory) {
  RingReader<4096> reader(memory);
  std::mt19937_64 random(2);
  std::string part;
  for (uint8_t next = 0; !stop;) {
    part.resize(std::min<size_t>(reader.available(), random() % 3000));
    reader.read(part.data(), part.size());
    for (const char c : part) require(c == static_cast<char>(next++), "a ring gave bytes in another order");
  }
}

const Lane::Patience kPatience{60.0, [] { return !stop.load(); }};

void say(Lane& lane, uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!stop) {
    const std::string message(random() % (3u << 20), static_cast<char>('a' + random() % 26));
    if (random() % 4 == 0) lane.try_write(message.data(), message.size() / 8);
    else if (lane.write(message.data(), message.size(), kPatience) != Lane::Result::kDone) return;
  }
}

void hear(Lane& lane) {
  uint64_t size = 0;
  while (lane.begin(size, 3u << 20, kPatience) == Lane::Result::kDone) {
    std::string message(size, ' ');
    if (lane.finish(message.data(), size, kPatience) != Lane::Result::kDone) return;
    require(message.find_first_not_of(message[0]) == std::string::npos, "a message was torn");
  }
}

int run(int seconds) {
  SharedTable table(config()), larger(on_disk());
  auto memory = std::make_unique<Memory>();
  Lane maker = Lane::make();
  Lane taker = Lane::take(fcntl(maker.fd(), F_DUPFD_CLOEXEC, 0), maker.nonce());
  std::vector<std::thread> threads;
  for (const uint64_t seed : {1, 2}) threads.emplace_back([&, seed] { learn(table, seed); });
  for (const uint64_t seed : {3, 4}) threads.emplace_back([&, seed] { look(table, seed); });
  for (const uint64_t seed : {5, 6}) threads.emplace_back([&, seed] { drain(table, seed); });
  threads.emplace_back([&] { view(table); });
  threads.emplace_back([&] { change_slots(table); });
  for (const uint64_t seed : {9, 10}) threads.emplace_back([&, seed] { learn(larger, seed); });
  threads.emplace_back([&] { look(larger, 11); });
  for (const uint64_t seed : {12, 13}) threads.emplace_back([&, seed] { drain(larger, seed); });
  threads.emplace_back([&] { view(larger); });
  threads.emplace_back([&] { change_slots(larger); });
  threads.emplace_back([&] { write_ring(*memory); });
  threads.emplace_back([&] { read_ring(*memory); });
  for (Lane* lane : {&maker, &taker}) {
    for (const uint64_t seed : {7, 8}) threads.emplace_back([lane, seed] { say(*lane, seed); });
    threads.emplace_back([lane] { hear(*lane); });
  }
  const auto is_enough = [&] {
    const TableStats stats = table.stats();
    const TableStats disk = larger.stats();
    return stats.inserted && stats.expired && stats.evicted && stats.removed && disk.disk_written_bytes && disk.expired &&
           disk.disk_reads;
  };
  for (int second = 0; second < seconds || (!is_enough() && second < 60 * seconds); ++second) {
    std::this_thread::sleep_for(std::chrono::seconds(1));  // the time to run; more of it on a busy machine
  }
  stop = true;
  maker.close();
  taker.close();
  for (std::thread& one : threads) one.join();
  const TableStats stats = table.stats();
  std::printf("rows: %llu born, %llu expired, %llu evicted, %llu removed\n",
              static_cast<unsigned long long>(stats.inserted), static_cast<unsigned long long>(stats.expired),
              static_cast<unsigned long long>(stats.evicted), static_cast<unsigned long long>(stats.removed));
  const TableStats disk = larger.stats();
  std::printf("with rows on disk: %llu born, %llu expired, %llu read, %llu MB written\n",
              static_cast<unsigned long long>(disk.inserted), static_cast<unsigned long long>(disk.expired),
              static_cast<unsigned long long>(disk.disk_reads),
              static_cast<unsigned long long>(disk.disk_written_bytes >> 20));
  require(is_enough(), "too little was done");
  return 0;
}

}  // namespace
}  // namespace streamtrain

int main(int count, char** arguments) { return streamtrain::run(count > 1 ? std::atoi(arguments[1]) : 5); }
