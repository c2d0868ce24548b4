// Attention over a paged KV cache, one key head of one request at a time, with an online softmax
// (FlashAttention; Dao et al., 2022) over tiles of kTile keys.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace servekit {

constexpr int kTile = 64;     // Keys in one tile.
constexpr int kMaxRows = 48;  // Query rows (query tokens times heads of the group) that share a pass over the keys.

// The cache of one layer as [num_blocks, num_kv_heads, block_size, head_dim].
template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;

  int64_t row(int64_t block, int64_t head, int64_t offset) const {
    return ((block * num_kv_heads + head) * block_size + offset) * head_dim;
  }
};

// Running softmax of some rows: what has been seen of the context so far.
struct Partial {
  std::vector<float> out;  // [rows, head_dim], not yet divided by `total`.
  std::vector<float> peak;
  std::vector<float> total;

  void reset(int rows, int64_t head_dim) {
    out.assign(rows * head_dim, 0.0f);
    peak.assign(rows, -std::numeric_limits<float>::infinity());
    total.assign(rows, 0.0f);
  }
};

struct Scratch {
  std::vector<float> queries;  // [rows, head_dim], scaled.
  std::vector<float> keys;     // [head_dim, kTile]: transposed, for many rows.
  std::vector<float> values;   // [kTile, head_dim]
  std::vector<float> scores;   // [rows, kTile]
};

// Gives the address of each key of a tile.
template <typename T>
struct TileRows {
  int64_t rows[kTile];
  int count;

  void find(const Cache<T>& cache, const int32_t* table, int64_t head, int64_t start, int64_t end) {
    count = int(end - start);
    int64_t block = start / cache.block_size, offset = start % cache.block_size;
    for (int i = 0; i < count; ++i) {
      rows[i] = cache.row(table[block], head, offset);
      if (++offset == cache.block_size) {
        offset = 0;
        ++block;
      }
    }
  }

  // Asks for one key and its value, if the tile has that many.
  void prefetch(const Cache<T>& cache, int i) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (i >= count) return;
    for (int64_t d = 0; d < cache.head_dim; d += kLine) {
      __builtin_prefetch(cache.keys + rows[i] + d);
      __builtin_prefetch(cache.values + rows[i] + d);
    }
  }
};

// scores[r][j] = queries[r] . key j for a few rows: each key is read, and widened to float, once for all of them.
template <int Rows, typename T>
inline void score_rows(const Cache<T>& cache, const TileRows<T>& tile, const TileRows<T>& next, const float* queries,
                       float* scores) {
  const int64_t dim = cache.head_dim, whole = dim / 8 * 8;
  for (int first = 0; first < tile.count; first += 8) {
    const int keys = std::min(8, tile.count - first);
    f32x8 products[Rows][8];
    for (int j = 0; j < keys; ++j) {
      const T* key = cache.keys + tile.rows[first + j];
      next.prefetch(cache, first + j);
      f32x8 sums[Rows];
      for (int r = 0; r < Rows; ++r) sums[r] = splat(0.0f);
      for (int64_t d = 0; d < whole; d += 8) {
        f32x8 columns = load8(key + d);
        for (int r = 0; r < Rows; ++r) sums[r] += load8(queries + r * dim + d) * columns;
      }
      for (int64_t d = whole; d < dim; ++d)
        for (int r = 0; r < Rows; ++r) sums[r][0] += queries[r * dim + d] * to_float(key[d]);
      for (int r = 0; r < Rows; ++r) products[r][j] = sums[r];
    }
    for (int j = keys; j < 8; ++j)
      for (int r = 0; r < Rows; ++r) products[r][j] = splat(0.0f);
    for (int r = 0; r < Rows; ++r) store8(scores + r * kTile + first, sums8(products[r]));
  }
}

// Runs f<Rows>(first row) for all rows, at most four at a time. How a row is computed does not depend on its company.
template <typename F>
inline void by_rows(int rows, F f) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>{}, r);
  if (rows - r == 3) f(std::integral_constant<int, 3>{}, r);
  if (rows - r == 2) f(std::integral_constant<int, 2>{}, r);
  if (rows - r == 1) f(std::integral_constant<int, 1>{}, r);
}

template <typename T>
inline void load_keys_transposed(const Cache<T>& cache, const TileRows<T>& tile, float* keys) {
  const int64_t dim = cache.head_dim, whole = dim / 8 * 8;
  for (int first = 0; first < kTile; first += 8) {
    const int count = std::max(0, std::min(8, tile.count - first));
    for (int64_t d = 0; d < whole; d += 8) {
      f32x8 block[8];
      for (int j = 0; j < 8; ++j)
        block[j] = j < count ? load8(cache.keys + tile.rows[first + j] + d) : splat(0.0f);
      transpose8(block);
      for (int i = 0; i < 8; ++i) store8(keys + (d + i) * kTile + first, block[i]);
    }
    for (int64_t d = whole; d < dim; ++d)
      for (int j = 0; j < 8; ++j)
        keys[d * kTile + first + j] = j < count ? to_float(cache.keys[tile.rows[first + j] + d]) : 0.0f;
  }
}

template <typename T>
inline void load_values(const Cache<T>& cache, const TileRows<T>& tile, float* values) {
  const int64_t dim = cache.head_dim;
  for (int j = 0; j < tile.count; ++j) {
    const T* row = cache.values + tile.rows[j];
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) store8(values + j * dim + d, load8(row + d));
    for (; d < dim; ++d) values[j * dim + d] = to_float(row[d]);
  }
}

// scores for many rows: Rows x 16 keys at a time in registers.
template <int Rows>
inline void score_tile(const float* queries, const float* keys, int64_t dim, float* scores, int count) {
  for (int j = 0; j < count; j += 16) {
    f32x8 low[Rows], high[Rows];
    for (int r = 0; r < Rows; ++r) low[r] = high[r] = splat(0.0f);
    for (int64_t d = 0; d < dim; ++d) {
      f32x8 k0 = load8(keys + d * kTile + j), k1 = load8(keys + d * kTile + j + 8);
      for (int r = 0; r < Rows; ++r) {
        f32x8 q = splat(queries[r * dim + d]);
        low[r] += q * k0;
        high[r] += q * k1;
      }
    }
    for (int r = 0; r < Rows; ++r) {
      store8(scores + r * kTile + j, low[r]);
      store8(scores + r * kTile + j + 8, high[r]);
    }
  }
}

inline void score_many(const float* queries, const float* keys, int64_t dim, int rows, float* scores, int count) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) score_tile<6>(queries + r * dim, keys, dim, scores + r * kTile, count);
  for (; r + 2 <= rows; r += 2) score_tile<2>(queries + r * dim, keys, dim, scores + r * kTile, count);
  for (; r < rows; ++r) score_tile<1>(queries + r * dim, keys, dim, scores + r * kTile, count);
}

// Turns a row's scores into weights relative to the highest score so far; returns the factor for what came before.
// Columns outside [from, count) get weight 0; there may be none inside.
inline float weigh(float* scores, int from, int count, float& peak, float& total) {
  const float lowest = -std::numeric_limits<float>::infinity();
  if (count <= from) {
    std::fill(scores, scores + kTile, 0.0f);
    return 1.0f;
  }
  for (int j = 0; j < from; ++j) scores[j] = lowest;
  for (int j = count; j < kTile; ++j) scores[j] = lowest;
  f32x8 high = load8(scores);
  for (int j = 8; j < kTile; j += 8) high = max(high, load8(scores + j));
  float new_peak = std::max(peak, max8(high));
  if (new_peak == lowest) {
    std::fill(scores, scores + kTile, 0.0f);
    return 1.0f;
  }
  f32x8 sum = splat(0.0f), shift = splat(new_peak);
  for (int j = 0; j < kTile; j += 8) {
    f32x8 weight = exp8(load8(scores + j) - shift);
    store8(scores + j, weight);
    sum += weight;
  }
  float factor = peak == lowest ? 0.0f : std::exp(peak - new_peak);
  total = total * factor + sum8(sum);
  peak = new_peak;
  return factor;
}

// out[r] = out[r] * factors[r] + sum over j of weights[r][j] * value j, for 8 * Chunks columns of Rows rows.
template <int Rows, int Chunks, typename Row>
inline void mix_columns(float* out, int64_t dim, const float* weights, const float* factors, int count, Row value) {
  f32x8 sums[Rows][Chunks];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Chunks; ++c) sums[r][c] = load8(out + r * dim + 8 * c) * factors[r];
  for (int j = 0; j < count; ++j) {
    const auto* row = value(j);
    f32x8 weight[Rows];
    for (int r = 0; r < Rows; ++r) weight[r] = splat(weights[r * kTile + j]);
    for (int c = 0; c < Chunks; ++c) {
      f32x8 columns = load8(row + 8 * c);
      for (int r = 0; r < Rows; ++r) sums[r][c] += weight[r] * columns;
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Chunks; ++c) store8(out + r * dim + 8 * c, sums[r][c]);
}

template <int Rows, typename Row>
inline void mix(float* out, int64_t dim, const float* weights, const float* factors, int count, Row value) {
  constexpr int kChunks = Rows <= 1 ? 8 : Rows <= 3 ? 4 : 2;  // What the registers hold.
  int64_t d = 0;
  for (; d + 8 * kChunks <= dim; d += 8 * kChunks)
    mix_columns<Rows, kChunks>(out + d, dim, weights, factors, count, [&](int j) { return value(j) + d; });
  for (; d + 8 <= dim; d += 8)
    mix_columns<Rows, 1>(out + d, dim, weights, factors, count, [&](int j) { return value(j) + d; });
  for (; d < dim; ++d)
    for (int r = 0; r < Rows; ++r) {
      float sum = out[r * dim + d] * factors[r];
      for (int j = 0; j < count; ++j) sum += weights[r * kTile + j] * to_float(value(j)[d]);
      out[r * dim + d] = sum;
    }
}

// Attends the rows to the positions [start, end) of one request and one key head.
// Row r is at position `positions[r]` and sees (positions[r] - window, positions[r]].
template <typename T>
void attend(const Cache<T>& cache, const int32_t* table, int64_t head, int64_t start, int64_t end, int rows,
            const int64_t* positions, int64_t window, Scratch& scratch, Partial& partial) {
  const int64_t dim = cache.head_dim;
  const bool many = rows > 8;
  scratch.scores.resize(kMaxRows * kTile);
  if (many) {
    scratch.keys.resize(dim * kTile);
    scratch.values.resize(kTile * dim);
  }
  TileRows<T> tile, next;
  tile.find(cache, table, head, start, std::min(start + kTile, end));
  for (int64_t first = start; first < end; first += kTile, tile = next) {
    // Blocks lie anywhere: few rows ask for each key of the next tile while they use one of this.
    next.find(cache, table, head, first + kTile, std::max(first + kTile, std::min(first + 2 * kTile, end)));
    float* scores = scratch.scores.data();
    if (many) {
      load_keys_transposed(cache, tile, scratch.keys.data());
      score_many(scratch.queries.data(), scratch.keys.data(), dim, rows, scores, tile.count);
      load_values(cache, tile, scratch.values.data());
    } else {
      by_rows(rows, [&](auto n, int r) {
        score_rows<n>(cache, tile, next, scratch.queries.data() + r * dim, scores + r * kTile);
      });
    }
    float factors[kMaxRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t seen_from = std::max<int64_t>(0, positions[r] - window + 1 - first);
      const int64_t seen_to = std::min<int64_t>(tile.count, positions[r] + 1 - first);
      factors[r] = weigh(scores + r * kTile, int(seen_from), int(seen_to), partial.peak[r], partial.total[r]);
    }
    by_rows(rows, [&](auto n, int r) {
      float* out = partial.out.data() + r * dim;
      const float* weights = scores + r * kTile;
      if (many)
        mix<n>(out, dim, weights, factors + r, tile.count, [&](int j) { return scratch.values.data() + j * dim; });
      else
        mix<n>(out, dim, weights, factors + r, tile.count, [&](int j) { return cache.values + tile.rows[j]; });
    });
  }
}

// Joins what `count` passes over parts of the context found for row `r`.
inline void merge(const Partial* parts, int64_t count, int64_t r, int64_t dim, float* out) {
  float peak = parts[0].peak[r];
  for (int64_t i = 1; i < count; ++i) peak = std::max(peak, parts[i].peak[r]);
  float total = 0.0f;
  for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (parts[i].total[r] == 0.0f) continue;
    const float factor = std::exp(parts[i].peak[r] - peak);
    total += factor * parts[i].total[r];
    for (int64_t d = 0; d < dim; ++d) out[d] += factor * parts[i].out[r * dim + d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= total;
}

}  // namespace servekit
