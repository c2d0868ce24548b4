// Attention over a paged KV cache, one key head of one request at a time, with an online softmax
// (FlashAttention; Dao et al., 2022) over tiles of kTile keys.
#pragma once

#include <algorithm>
#include <limits>
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
    for (int i = 0; i < count; ++i) {
      int64_t position = start + i;
      rows[i] = cache.row(table[position / cache.block_size], head, position % cache.block_size);
    }
  }
};

// scores[r][j] = queries[r] . key j, for few rows: each key is read once from memory and then from the first cache.
template <typename T>
inline void score_few(const Cache<T>& cache, const TileRows<T>& tile, const float* queries, int rows, float* scores) {
  const int64_t dim = cache.head_dim, whole = dim / 8 * 8;
  for (int j = 0; j < tile.count; ++j) {
    const T* key = cache.keys + tile.rows[j];
    for (int r = 0; r < rows; ++r) {
      const float* query = queries + r * dim;
      f32x8 a = splat(0.0f), b = a;
      int64_t d = 0;
      for (; d + 16 <= whole; d += 16) {
        a += load8(query + d) * load8(key + d);
        b += load8(query + d + 8) * load8(key + d + 8);
      }
      for (; d < whole; d += 8) a += load8(query + d) * load8(key + d);
      float dot = sum8(a + b);
      for (; d < dim; ++d) dot += query[d] * to_float(key[d]);
      scores[r * kTile + j] = dot;
    }
  }
}

template <typename T>
inline void load_keys_transposed(const Cache<T>& cache, const TileRows<T>& tile, float* keys) {
  const int64_t dim = cache.head_dim;
  for (int j = 0; j < tile.count; ++j) {
    const T* key = cache.keys + tile.rows[j];
    for (int64_t d = 0; d < dim; ++d) keys[d * kTile + j] = to_float(key[d]);
  }
  for (int j = tile.count; j < kTile; ++j)
    for (int64_t d = 0; d < dim; ++d) keys[d * kTile + j] = 0.0f;
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
// Columns outside [from, count) get weight 0.
inline float weigh(float* scores, int from, int count, float& peak, float& total) {
  const float lowest = -std::numeric_limits<float>::infinity();
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

// out[r] = out[r] * factor + sum over j of weights[r][j] * value j, `Chunks` times 8 columns in registers.
template <int Chunks, typename Row>
inline void mix_columns(float* out, const float* weights, float factor, int count, Row value) {
  f32x8 sums[Chunks];
  for (int c = 0; c < Chunks; ++c) sums[c] = load8(out + 8 * c) * factor;
  for (int j = 0; j < count; ++j) {
    f32x8 weight = splat(weights[j]);
    const auto* row = value(j);
    for (int c = 0; c < Chunks; ++c) sums[c] += weight * load8(row + 8 * c);
  }
  for (int c = 0; c < Chunks; ++c) store8(out + 8 * c, sums[c]);
}

template <typename Row>
inline void mix(float* out, const float* weights, float factor, int count, int64_t dim, Row value) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) mix_columns<8>(out + d, weights, factor, count, [&](int j) { return value(j) + d; });
  for (; d + 8 <= dim; d += 8) mix_columns<1>(out + d, weights, factor, count, [&](int j) { return value(j) + d; });
  for (; d < dim; ++d) {
    float sum = out[d] * factor;
    for (int j = 0; j < count; ++j) sum += weights[j] * to_float(value(j)[d]);
    out[d] = sum;
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
  TileRows<T> tile;
  for (int64_t first = start; first < end; first += kTile) {
    tile.find(cache, table, head, first, std::min(first + kTile, end));
    float* scores = scratch.scores.data();
    if (many) {
      load_keys_transposed(cache, tile, scratch.keys.data());
      score_many(scratch.queries.data(), scratch.keys.data(), dim, rows, scores, tile.count);
      for (int j = 0; j < tile.count; ++j) {
        const T* row = cache.values + tile.rows[j];
        for (int64_t d = 0; d < dim; ++d) scratch.values[j * dim + d] = to_float(row[d]);
      }
    } else {
      score_few(cache, tile, scratch.queries.data(), rows, scores);
    }
    for (int r = 0; r < rows; ++r) {
      int64_t seen_from = std::max<int64_t>(0, positions[r] - window + 1 - first);
      int64_t seen_to = std::min<int64_t>(tile.count, positions[r] + 1 - first);
      if (seen_to <= seen_from) continue;
      float factor = weigh(scores + r * kTile, int(seen_from), int(seen_to), partial.peak[r], partial.total[r]);
      float* out = partial.out.data() + r * dim;
      const float* weights = scores + r * kTile;
      if (many)
        mix(out, weights, factor, int(seen_to), dim, [&](int j) { return scratch.values.data() + j * dim; });
      else
        mix(out, weights, factor, int(seen_to), dim, [&](int j) { return cache.values + tile.rows[j]; });
    }
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
