// Rows in RocksDB, for benchmarks/disk.py: keys and rows are columns, so that nothing is done per row in Python.
//
// Within `budget` bytes: a cache of blocks, indexes and filters for 3/4 of it, and two write buffers. The page cache is
// passed by, and there is no log: as with the table's own segments, what is on disk need not outlive the process.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

rocksdb::Slice slice(const uint64_t& key) { return {reinterpret_cast<const char*>(&key), sizeof key}; }

}  // namespace

extern "C" {

void* rows_open(const char* path, uint64_t budget) {
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(budget / 4 * 3);
  table.cache_index_and_filter_blocks = true;
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  table.filter_policy.reset(rocksdb::NewRibbonFilterPolicy(10));
  table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  rocksdb::Options options;
  options.create_if_missing = true;
  options.IncreaseParallelism(2);
  options.write_buffer_size = std::min<uint64_t>(budget / 8, 32 << 20);
  options.max_write_buffer_number = 2;
  options.compression = rocksdb::kNoCompression;
  options.use_direct_reads = options.use_direct_io_for_flush_and_compaction = true;
  options.optimize_filters_for_hits = true;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, path, &db);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return db;
}

// Writes the rows of the keys that have one; returns how many those are.
uint64_t rows_get(void* db, const uint64_t* keys, size_t n, size_t stride, char* out) {
  std::vector<rocksdb::Slice> slices;
  for (size_t i = 0; i < n; ++i) slices.push_back(slice(keys[i]));
  std::vector<rocksdb::PinnableSlice> values(n);
  std::vector<rocksdb::Status> statuses(n);
  auto* const of = static_cast<rocksdb::DB*>(db);
  of->MultiGet({}, of->DefaultColumnFamily(), n, slices.data(), values.data(), statuses.data());
  uint64_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!statuses[i].ok()) continue;
    std::memcpy(out + i * stride, values[i].data(), stride);
    ++found;
  }
  return found;
}

bool rows_put(void* db, const uint64_t* keys, size_t n, size_t stride, const char* rows) {
  rocksdb::WriteBatch batch(n * (stride + 16));
  for (size_t i = 0; i < n; ++i) batch.Put(slice(keys[i]), {rows + i * stride, stride});
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  return static_cast<rocksdb::DB*>(db)->Write(options, &batch).ok();
}

}
