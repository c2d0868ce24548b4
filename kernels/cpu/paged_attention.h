// Attention of a step's requests: which passes over which keys there are, and who computes them.
//
// Requests whose tables begin with the same blocks (a cached prefix) read those keys together. How a row is computed
// and in which order its parts are added does not depend on the company: its result is the same bits in any batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace servekit {

struct Batch {
  const int32_t *query_start, *context_lens, *tables;
  int64_t num_requests, max_blocks, block_size;

  int64_t queries(int64_t request) const { return query_start[request + 1] - query_start[request]; }
  const int32_t* table(int64_t request) const { return tables + request * max_blocks; }
};

// Query tokens of one request that see keys together: of [first_key, end), where `end` is after the last token's own.
struct Chunk {
  int64_t request, first_query, num_queries, first_key, end;
  int64_t row;  // Of its partial results, if its keys are in several parts.

  int64_t first_part() const { return first_key / kPart; }
  int64_t end_part() const { return (end + kPart - 1) / kPart; }
  int64_t num_parts() const { return end_part() - first_part(); }
};

// A pass over one part of the keys of some key heads, for chunks that have the same blocks there.
struct Task {
  int64_t first_chunk, num_chunks, part, first_head, num_heads;
};

struct Plan {
  std::vector<Chunk> chunks;  // Those with the same blocks are neighbours.
  std::vector<Task> tasks;
  int64_t num_rows = 0;  // Of partial results.
};

constexpr int64_t kRowsOfHeads = 16;    // Rows of several heads that one task computes where there are tasks enough.
constexpr int64_t kRowsOfSharers = 24;  // Rows of several requests.

// The requests in the order of their tables.
inline std::vector<int64_t> by_table(const Batch& batch) {
  std::vector<int64_t> order(batch.num_requests);
  std::iota(order.begin(), order.end(), int64_t(0));
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    auto end = [&](int64_t request) { return batch.table(request) + batch.context_lens[request] / batch.block_size; };
    return std::lexicographical_compare(batch.table(a), end(a), batch.table(b), end(b));
  });
  return order;
}

// Parts from the first on that two chunks see completely and read from the same blocks.
inline int64_t shared_parts(const Batch& batch, const Chunk& a, const Chunk& b) {
  if (a.num_queries != b.num_queries || a.first_key > 0 || b.first_key > 0) return 0;
  const int32_t *blocks = batch.table(a.request), *end = blocks + std::min(a.end, b.end) / batch.block_size;
  return (std::mismatch(blocks, end, batch.table(b.request)).first - blocks) * batch.block_size / kPart;
}

inline Plan plan_attention(const Batch& batch, int64_t num_kv_heads, int64_t group, int64_t window) {
  Plan plan;
  std::vector<int64_t> shared;  // Parts that a chunk shares with the one before.
  const int64_t most_queries = std::max<int64_t>(1, kMaxRows / group);
  for (int64_t request : by_table(batch)) {
    const int64_t queries = batch.queries(request), context = batch.context_lens[request];
    for (int64_t first = 0; first < queries; first += most_queries) {
      const int64_t count = std::min(most_queries, queries - first), end = context - queries + first + count;
      const Chunk chunk{request, first, count, std::max<int64_t>(0, end - count - window + 1), end, plan.num_rows};
      const bool is_alone = plan.chunks.empty() || queries * group > kFewRows;
      shared.push_back(is_alone ? 0 : shared_parts(batch, plan.chunks.back(), chunk));
      plan.chunks.push_back(chunk);
      if (chunk.num_parts() > 1) plan.num_rows += chunk.num_parts() * num_kv_heads * count * group;
    }
  }
  const bool are_many = batch.num_requests >= 4 * pool()->num_threads();
  auto add_tasks = [&](int64_t first, int64_t sharers, int64_t part) {
    const int64_t rows = plan.chunks[first].num_queries * group;
    const int64_t most_sharers = std::max<int64_t>(1, kRowsOfSharers / rows);
    const int64_t most_heads = sharers == 1 && are_many && rows <= kFewRows ? kRowsOfHeads / rows : 1;
    for (int64_t head = 0; head < num_kv_heads; head += most_heads)
      for (int64_t i = 0; i < sharers; i += most_sharers)
        plan.tasks.push_back({first + i, std::min(most_sharers, sharers - i), part, head,
                              std::min(most_heads, num_kv_heads - head)});
  };
  const int64_t count = int64_t(plan.chunks.size());
  for (int64_t first = 0; first < count; ++first)
    for (int64_t part = std::max(plan.chunks[first].first_part(), shared[first]); part < plan.chunks[first].end_part();
         ++part) {
      int64_t end = first + 1;
      while (end < count && part < shared[end]) ++end;
      add_tasks(first, end - first, part);
    }
  return plan;
}

// One step's attention of one layer. `q` and `out` are [tokens, num_heads, head_dim].
template <typename T>
class Attention {
 public:
  Attention(const Batch& batch, const Cache<T>& cache, const float* q, float* out, int64_t num_heads, float scale,
            int64_t window)
      : batch_(batch),
        cache_(cache),
        q_(q),
        out_(out),
        num_heads_(num_heads),
        group_(num_heads / cache.num_kv_heads),
        scale_(scale),
        window_(window),
        plan_(plan_attention(batch, cache.num_kv_heads, group_, window)),
        partial_(plan_.num_rows * (cache.head_dim + 2)) {}

  void run() {
    parallel_for(int64_t(plan_.tasks.size()), 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t index = begin; index < end; ++index) run_task(plan_.tasks[index], scratch);
    });
    if (plan_.num_rows == 0) return;
    parallel_for(int64_t(plan_.chunks.size()), 4, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index)
        if (plan_.chunks[index].num_parts() > 1) merge_parts(plan_.chunks[index]);
    });
  }

 private:
  int64_t rows(const Chunk& chunk) const { return chunk.num_queries * group_; }

  // Where a row of a chunk lies in `q` and `out`.
  int64_t place(const Chunk& chunk, int64_t head, int64_t row) const {
    const int64_t token = batch_.query_start[chunk.request] + chunk.first_query + row / group_;
    return (token * num_heads_ + head * group_ + row % group_) * cache_.head_dim;
  }

  // Where the results of one part of a chunk lie, from the given row of a head on.
  Partial part_of(const Chunk& chunk, int64_t part, int64_t head, int64_t row) {
    const int64_t heads = (part - chunk.first_part()) * cache_.num_kv_heads + head;
    const int64_t at = chunk.row + heads * rows(chunk) + row;
    float* peaks = partial_.data() + plan_.num_rows * cache_.head_dim;
    return {partial_.data() + at * cache_.head_dim, peaks + at, peaks + plan_.num_rows + at};
  }

  void run_task(const Task& task, Scratch& scratch) {
    const Chunk* chunks = plan_.chunks.data() + task.first_chunk;
    const int64_t dim = cache_.head_dim, own = rows(chunks[0]), rows_of_head = own * task.num_chunks;
    auto each_row = [&](auto f) {
      for (int64_t head = 0; head < task.num_heads; ++head)
        for (int64_t row = 0; row < rows_of_head; ++row)
          f(head * rows_of_head + row, chunks[row / own], task.first_head + head, row % own);
    };
    Pass pass{batch_.table(chunks->request), task.first_head, task.num_heads, 0, 0, window_, {}, int(rows_of_head),
              own > kFewRows};
    pass.start = std::max(chunks->first_key, task.part * kPart);
    pass.end = std::min(chunks->end, (task.part + 1) * kPart);
    each_row([&](int64_t index, const Chunk& chunk, int64_t, int64_t row) {
      if (index < rows_of_head) pass.positions[index] = chunk.end - chunk.num_queries + row / group_;
    });
    scratch.require(task.num_heads * rows_of_head, dim);
    each_row([&](int64_t index, const Chunk& chunk, int64_t head, int64_t row) {
      const float* query = q_ + place(chunk, head, row);
      for (int64_t d = 0; d < dim; ++d) scratch.scaled.data()[index * dim + d] = query[d] * scale_;
    });
    const Partial found{scratch.out.data(), scratch.peak.data(), scratch.total.data()};
    attend(cache_, pass, scratch.scaled.data(), scratch, found);
    each_row([&](int64_t index, const Chunk& chunk, int64_t head, int64_t row) {
      const Partial from = found.from(index, dim);
      if (chunk.num_parts() == 1) return merge(from, 1, 0, dim, out_ + place(chunk, head, row));
      const Partial to = part_of(chunk, task.part, head, row);
      std::copy(from.out, from.out + dim, to.out);
      *to.peak = *from.peak;
      *to.total = *from.total;
    });
  }

  void merge_parts(const Chunk& chunk) {
    for (int64_t head = 0; head < cache_.num_kv_heads; ++head)
      for (int64_t row = 0; row < rows(chunk); ++row)
        merge(part_of(chunk, chunk.first_part(), head, row), chunk.num_parts(), cache_.num_kv_heads * rows(chunk),
              cache_.head_dim, out_ + place(chunk, head, row));
  }

  const Batch& batch_;
  const Cache<T>& cache_;
  const float* q_;
  float* out_;
  int64_t num_heads_, group_;
  float scale_;
  int64_t window_;
  Plan plan_;
  Buffer<float> partial_;  // [rows, head_dim], peaks [rows], totals [rows]
};

}  // namespace servekit
