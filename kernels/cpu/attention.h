// Attention over a paged KV cache, one key head of one request at a time, with a softmax that goes on from part to part
// (FlashAttention; Dao et al., 2022). Few rows read keys and values straight from the cache and see a whole part at
// once; many rows share a copy of each tile in float.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace servekit {

constexpr int kPart = 512;    // Positions of a context that one task reads.
constexpr int kTile = 64;     // Keys in one tile of many rows.
constexpr int kMaxRows = 96;  // Query rows (query tokens times heads of the group) that share a pass over the keys.
constexpr int kFewRows = 8;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

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

// Which keys a pass reads, and for which query rows. Row r of each key head is at position `positions[r]` and sees
// (positions[r] - window, positions[r]], of which this pass has [start, end).
struct Pass {
  const int32_t* table;
  int64_t first_head, num_heads;  // Key heads; the rows of the second come after all rows of the first.
  int64_t start, end, window;
  int64_t positions[kMaxRows];
  int rows;
  bool are_many;  // Rows of one request.

  // The part of the keys [first, first + count) that row r sees, counted from `first`.
  int seen_from(int r, int64_t first) const { return int(std::max<int64_t>(0, positions[r] - window + 1 - first)); }
  int seen_to(int r, int64_t first, int count) const {
    return int(std::min<int64_t>(count, positions[r] + 1 - first));
  }
};

// The softmax of some rows, as far as it has been computed.
struct Partial {
  float* out;    // [rows, head_dim], not yet divided by `total`.
  float* peak;   // [rows]
  float* total;  // [rows]

  Partial from(int64_t row, int64_t head_dim) const { return {out + row * head_dim, peak + row, total + row}; }
};

struct Scratch {
  Buffer<float> scaled;        // [rows, head_dim]: queries.
  Buffer<float> out, peak, total;  // What `Partial` says.
  std::vector<int64_t> rows;   // Where each key, and its value, lies in the cache.
  std::vector<float> queries;  // [rows, padded head_dim], for few rows: in the order of `Columns`.
  std::vector<float> mixed;    // The same: what becomes the result.
  Buffer<uint32_t> tiles;      // Of many rows: keys, values, queries and weights.
  std::vector<float> scores;   // [rows, kTile], for few rows [rows, kPart].

  void require(int64_t rows, int64_t head_dim) {
    scaled.require(rows * head_dim);
    out.require(rows * head_dim);
    peak.require(rows);
    total.require(rows);
  }
};

constexpr int kAhead = 32;  // Keys between the one that is used and the one that memory is asked for.

// Finds where the keys [start, end) lie; the last one is repeated for those who look ahead.
template <typename T>
inline void find_rows(const Cache<T>& cache, const Pass& pass, int64_t start, int64_t end, std::vector<int64_t>& rows) {
  rows.resize(end - start + kLanes + kAhead);
  int64_t* row = rows.data();
  for (int64_t position = start; position < end;) {
    const int64_t offset = position % cache.block_size, count = std::min(cache.block_size - offset, end - position);
    const int64_t first = cache.row(pass.table[position / cache.block_size], pass.first_head, offset);
    for (int64_t i = 0; i < count; ++i) *row++ = first + i * cache.head_dim;
    position += count;
  }
  std::fill(row, rows.data() + rows.size(), row[-1]);
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

// Turns a row's scores into weights relative to the highest score so far; returns the factor for what came before.
// Columns outside [from, to) get weight 0, up to `width`, a multiple of kLanes; there may be none inside.
inline float weigh(float* scores, int from, int to, int width, float& peak, float& total) {
  std::fill(scores, scores + std::min(from, width), kLowest);
  std::fill(scores + std::max(to, 0), scores + width, kLowest);
  floats high = splat(kLowest);
  for (int j = 0; j < width; j += kLanes) high = max(high, load(scores + j));
  const float new_peak = std::max(peak, largest_of(high));
  if (new_peak == kLowest) {
    std::fill(scores, scores + width, 0.0f);
    return 1.0f;
  }
  floats weights = splat(0.0f);
  for (int j = 0; j < width; j += kLanes) {
    const floats weight = exponential(load(scores + j) - new_peak);
    store(scores + j, weight);
    weights += weight;
  }
  const float factor = peak == new_peak ? 1.0f : peak == kLowest ? 0.0f : std::exp(peak - new_peak);
  total = total * factor + sum_of(weights);
  peak = new_peak;
  return factor;
}

// --- Few rows -------------------------------------------------------------------------------------------------------

inline int64_t padded(int64_t head_dim) { return (head_dim + kColumns - 1) / kColumns * kColumns; }

// The column that comes at place i when columns are ordered as `Columns` has them.
template <typename T>
inline int64_t column_at(const T* format, int64_t i) {
  return i / kColumns * kColumns + column_of_lane(format, int(i % kColumns));
}

// Asks memory for what a later load_columns(p) reads. Calls of it must not stand alone in a loop: GCC removes those.
template <typename T>
inline void prefetch_columns(const T* p) {
  for (int i = 0; i < kColumns; i += int(64 / sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

// scores[r][j] = queries[r] . key j for kLanes keys: each is read, and widened to float, once for all rows.
template <int Rows, typename T, typename Dim>
inline void score_few(const T* keys, const int64_t* rows, Dim head_dim, const float* queries, float* scores) {
  const int64_t width = padded(head_dim);
  floats folded[Rows][kLanes / 4];
  for (int four = 0; four < kLanes / 4; ++four, rows += 4) {
    floats sums[Rows][4] = {};
    auto add = [&](int64_t d, Columns k0, Columns k1, Columns k2, Columns k3) {
      for (int r = 0; r < Rows; ++r) {
        const floats q0 = load(queries + r * width + d), q1 = load(queries + r * width + d + kLanes);
        sums[r][0] += q0 * k0.first;
        sums[r][1] += q0 * k1.first;
        sums[r][2] += q0 * k2.first;
        sums[r][3] += q0 * k3.first;
        sums[r][0] += q1 * k0.second;
        sums[r][1] += q1 * k1.second;
        sums[r][2] += q1 * k2.second;
        sums[r][3] += q1 * k3.second;
      }
    };
    int64_t d = 0;
    for (; d + kColumns <= head_dim; d += kColumns) {
      for (int j = 0; j < 4; ++j) prefetch_columns(keys + rows[kAhead + j] + d);
      add(d, load_columns(keys + rows[0] + d), load_columns(keys + rows[1] + d), load_columns(keys + rows[2] + d),
          load_columns(keys + rows[3] + d));
    }
    if (const int rest = int(head_dim - d); rest > 0)
      add(d, load_columns(keys + rows[0] + d, rest), load_columns(keys + rows[1] + d, rest),
          load_columns(keys + rows[2] + d, rest), load_columns(keys + rows[3] + d, rest));
    for (int r = 0; r < Rows; ++r) folded[r][four] = fold(sums[r]);
  }
  for (int r = 0; r < Rows; ++r) store(scores + r * kPart, sums_of_folded(folded[r]));
}

// out[r] += sum over j of weights[r][j] * value j, for Chunks times kColumns columns; `load_value(j, c)` gives some.
template <int Rows, int Chunks, typename Load>
inline void mix_columns_few(float* out, int64_t width, const float* weights, int count, Load load_value) {
  floats sums[Rows][2 * Chunks];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2 * Chunks; ++c) sums[r][c] = load(out + r * width + c * kLanes);
  for (int j = 0; j < count; ++j)
    for (int c = 0; c < Chunks; ++c) {
      const Columns value = load_value(j, c);
      for (int r = 0; r < Rows; ++r) {
        sums[r][2 * c] += weights[r * kPart + j] * value.first;
        sums[r][2 * c + 1] += weights[r * kPart + j] * value.second;
      }
    }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2 * Chunks; ++c) store(out + r * width + c * kLanes, sums[r][c]);
}

template <int Rows, typename T, typename Dim>
inline void mix_few(const T* values, const int64_t* rows, Dim head_dim, const float* weights, int count, float* out) {
  const int64_t width = padded(head_dim);
  int64_t d = 0;
  for (; d + 2 * kColumns <= head_dim; d += 2 * kColumns)
    mix_columns_few<Rows, 2>(out + d, width, weights, count, [&](int j, int c) {
      prefetch_columns(values + rows[j + kAhead] + d + c * kColumns);
      return load_columns(values + rows[j] + d + c * kColumns);
    });
  for (; d + kColumns <= head_dim; d += kColumns)
    mix_columns_few<Rows, 1>(out + d, width, weights, count,
                             [&](int j, int) { return load_columns(values + rows[j] + d); });
  if (d < head_dim)
    mix_columns_few<Rows, 1>(out + d, width, weights, count,
                             [&](int j, int) { return load_columns(values + rows[j] + d, int(head_dim - d)); });
}

// Attends few rows of each request to at most kPart keys. Where a block ends its keys of one head, those of
// the next follow: all heads are read together, so that the processor sees longer runs of memory.
template <typename T, typename Dim>
void attend_few(const Cache<T>& cache, Dim dim, const Pass& pass, const float* queries, Scratch& scratch,
                Partial partial) {
  const int64_t width = padded(dim), head_stride = cache.block_size * dim;
  const int count = int(pass.end - pass.start), rows = pass.rows, all_rows = int(pass.num_heads * rows);
  find_rows(cache, pass, pass.start, pass.end, scratch.rows);
  scratch.scores.resize(all_rows * kPart);
  scratch.queries.resize(all_rows * width);
  scratch.mixed.assign(all_rows * width, 0.0f);
  for (int r = 0; r < all_rows; ++r)
    for (int64_t i = 0; i < width; ++i) {
      const int64_t d = column_at(cache.keys, i);
      scratch.queries[r * width + i] = d < dim ? queries[r * dim + d] : 0.0f;
    }
  float* scores = scratch.scores.data();
  for (int first = 0; first < count; first += kLanes) {
    const int64_t* own = scratch.rows.data() + first;
    for (int64_t head = 0; head < pass.num_heads; ++head)
      by_rows(rows, [&](auto n, int r) {
        const int64_t row = head * rows + r;
        score_few<n>(cache.keys + head * head_stride, own, dim, scratch.queries.data() + row * width,
                     scores + row * kPart + first);
      });
  }
  for (int r = 0; r < all_rows; ++r)
    weigh(scores + r * kPart, pass.seen_from(r % rows, pass.start), pass.seen_to(r % rows, pass.start, count),
          (count + kLanes - 1) / kLanes * kLanes, partial.peak[r], partial.total[r]);
  for (int first = 0; first < count; first += kLanes) {
    const int64_t* own = scratch.rows.data() + first;
    for (int64_t head = 0; head < pass.num_heads; ++head)
      by_rows(rows, [&](auto n, int r) {
        const int64_t row = head * rows + r;
        mix_few<n>(cache.values + head * head_stride, own, dim, scores + row * kPart + first,
                   std::min(kLanes, count - first), scratch.mixed.data() + row * width);
      });
  }
  for (int r = 0; r < all_rows; ++r)
    for (int64_t i = 0; i < width; ++i)
      if (const int64_t d = column_at(cache.keys, i); d < dim) partial.out[r * dim + d] = scratch.mixed[r * width + i];
}

// --- Many rows ------------------------------------------------------------------------------------------------------
// Two matrix products on a tile of keys and values, whose elements are floats, or pairs of bf16 where the processor
// multiplies and adds two at once: then queries and weights are rounded to bf16 too, as the keys are.

template <typename T>
struct TileOf {
  using Element = float;
};

inline floats multiply_add(floats sum, float factor, floats v) { return sum + factor * v; }

#if defined(__AVX512BF16__)
template <>
struct TileOf<bf16> {
  using Element = bf16_pair;
};

inline floats multiply_add(floats sum, bf16_pair factor, uints v) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(factor)), (__m512bh)v);
}
#endif

template <typename Element>
constexpr int64_t kNumbersOf = 1;
template <>
inline constexpr int64_t kNumbersOf<bf16_pair> = 2;

template <typename Element>
using Vector = std::conditional_t<kNumbersOf<Element> == 1, floats, uints>;

// keys[i][j] is element i of key j; [elements of a row, kTile].
template <typename T, typename Element>
inline void load_keys_transposed(const Cache<T>& cache, const int64_t* rows, int count, Element* keys) {
  const int64_t width = cache.head_dim / kNumbersOf<Element>, whole = width / 8 * 8;
  for (int first = 0; first < kTile; first += 8) {
    const int present = std::max(0, std::min(8, count - first));
    for (int64_t i = 0; i < whole; i += 8) {
      f32x8 block[8] = {};
      for (int j = 0; j < present; ++j) block[j] = load8<Element>(cache.keys + rows[first + j], i);
      transpose8(block);
      for (int k = 0; k < 8; ++k) std::memcpy(keys + (i + k) * kTile + first, block + k, sizeof(f32x8));
    }
    for (int64_t i = whole; i < width; ++i)
      for (int j = 0; j < 8; ++j)
        keys[i * kTile + first + j] = j < present ? element<Element>(cache.keys + rows[first + j], i) : Element{};
  }
}

inline void load_values(const Cache<float>& cache, const int64_t* rows, int count, float* values) {
  for (int j = 0; j < count; ++j)
    std::copy(cache.values + rows[j], cache.values + rows[j] + cache.head_dim, values + j * cache.head_dim);
}

inline void load_values(const Cache<bf16>& cache, const int64_t* rows, int count, float* values) {
  const int64_t dim = cache.head_dim;
  for (int j = 0; j < count; ++j)
    for (int64_t d = 0; d < dim; ++d) values[j * dim + d] = to_float(cache.values[rows[j] + d]);
}

// The values of every second key beside those of the next one.
inline void load_values(const Cache<bf16>& cache, const int64_t* rows, int count, bf16_pair* values) {
  const int64_t dim = cache.head_dim;
  for (int j = 0; j < count; j += 2) {
    const bf16 *even = cache.values + rows[j], *odd = cache.values + rows[j + 1];
    const uint32_t has_odd = j + 1 < count ? 0xffffffff : 0;
    for (int64_t d = 0; d < dim; ++d)
      values[j / 2 * dim + d] = bf16_pair(even[d].bits | (uint32_t(odd[d].bits) << 16 & has_odd));
  }
}

// scores[r][j] = queries[r] . key j: Rows times two vectors of keys at a time in registers.
template <int Rows, typename Element>
SERVEKIT_APART void score_tile(const Element* queries, const Element* keys, int64_t width, float* scores, int count) {
  for (int j = 0; j < count; j += 2 * kLanes) {
    floats low[Rows] = {}, high[Rows] = {};
    for (int64_t i = 0; i < width; ++i) {
      const auto k0 = load(keys + i * kTile + j), k1 = load(keys + i * kTile + j + kLanes);
      for (int r = 0; r < Rows; ++r) {
        low[r] = multiply_add(low[r], queries[r * width + i], k0);
        high[r] = multiply_add(high[r], queries[r * width + i], k1);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      store(scores + r * kTile + j, low[r]);
      store(scores + r * kTile + j + kLanes, high[r]);
    }
  }
}

template <typename Element>
inline void score_many(const Element* queries, const Element* keys, int64_t width, int rows, float* scores, int count) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) score_tile<6>(queries + r * width, keys, width, scores + r * kTile, count);
  for (; r + 2 <= rows; r += 2) score_tile<2>(queries + r * width, keys, width, scores + r * kTile, count);
  for (; r < rows; ++r) score_tile<1>(queries + r * width, keys, width, scores + r * kTile, count);
}

// out[r] = out[r] * factors[r] + weights[r] . values, for kLanes * Chunks columns of Rows rows.
template <int Rows, int Chunks, typename Element>
SERVEKIT_APART void mix_columns(float* out, int64_t dim, const Element* weights, const float* factors, int count,
                        const Element* values) {
  floats sums[Rows][Chunks];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Chunks; ++c) sums[r][c] = load(out + r * dim + kLanes * c) * factors[r];
  for (int j = 0; j < count; ++j)
    for (int c = 0; c < Chunks; ++c) {
      const auto columns = load(values + j * dim + kLanes * c);
      for (int r = 0; r < Rows; ++r)
        sums[r][c] = multiply_add(sums[r][c], weights[r * (kTile / kNumbersOf<Element>) + j], columns);
    }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Chunks; ++c) store(out + r * dim + kLanes * c, sums[r][c]);
}

template <int Rows, typename Element>
inline void mix(float* out, int64_t dim, const Element* weights, const float* factors, int count,
                const Element* values) {
  constexpr int kChunks = kLanes == 16 || Rows <= 3 ? 4 : 2;  // What the registers hold.
  int64_t d = 0;
  for (; d + kLanes * kChunks <= dim; d += kLanes * kChunks)
    mix_columns<Rows, kChunks>(out + d, dim, weights, factors, count, values + d);
  for (; d + kLanes <= dim; d += kLanes) mix_columns<Rows, 1>(out + d, dim, weights, factors, count, values + d);
  for (; d < dim; ++d)
    for (int r = 0; r < Rows; ++r) {
      float sum = out[r * dim + d] * factors[r];
      for (int j = 0; j < count; ++j)
        sum += product_of(weights[r * (kTile / kNumbersOf<Element>) + j], values[j * dim + d]);
      out[r * dim + d] = sum;
    }
}

// Attends any number of rows up to kMaxRows to any number of keys.
template <typename T>
void attend_many(const Cache<T>& cache, const Pass& pass, const float* queries, Scratch& scratch, Partial partial) {
  using Element = typename TileOf<T>::Element;
  constexpr int64_t kNumbers = kNumbersOf<Element>;
  const int64_t dim = cache.head_dim, width = dim / kNumbers;
  scratch.scores.resize(kMaxRows * kTile);
  scratch.tiles.require((2 * kTile * dim + kMaxRows * (dim + kTile)) / kNumbers);
  Element* keys = reinterpret_cast<Element*>(scratch.tiles.data());
  Element *values = keys + kTile * width, *own = values + kTile * width, *weights = own + kMaxRows * width;
  float* scores = scratch.scores.data();
  to_elements(queries, pass.rows * dim, own);
  for (int64_t first = pass.start; first < pass.end; first += kTile) {
    const int count = int(std::min<int64_t>(kTile, pass.end - first));
    find_rows(cache, pass, first, first + count, scratch.rows);
    load_keys_transposed(cache, scratch.rows.data(), count, keys);
    load_values(cache, scratch.rows.data(), count, values);
    score_many(own, keys, width, pass.rows, scores, count);
    float factors[kMaxRows];
    for (int r = 0; r < pass.rows; ++r)
      factors[r] = weigh(scores + r * kTile, pass.seen_from(r, first), pass.seen_to(r, first, count), kTile,
                         partial.peak[r], partial.total[r]);
    to_elements(scores, pass.rows * kTile, weights);
    by_rows(pass.rows, [&](auto n, int r) {
      mix<n>(partial.out + r * dim, dim, weights + r * (kTile / kNumbers), factors + r,
             int((count + kNumbers - 1) / kNumbers), values);
    });
  }
}

// `queries` is [heads * rows, head_dim], scaled; more than one head only with few rows. Fills `partial`.
template <typename T>
void attend(const Cache<T>& cache, const Pass& pass, const float* queries, Scratch& scratch, Partial partial) {
  const int64_t rows = pass.num_heads * pass.rows;
  std::fill(partial.out, partial.out + rows * cache.head_dim, 0.0f);
  std::fill(partial.peak, partial.peak + rows, kLowest);
  std::fill(partial.total, partial.total + rows, 0.0f);
  if (pass.are_many)
    attend_many(cache, pass, queries, scratch, partial);
  else if (cache.head_dim == 64)  // The compiler makes better code for a known number.
    attend_few(cache, std::integral_constant<int64_t, 64>{}, pass, queries, scratch, partial);
  else
    attend_few(cache, cache.head_dim, pass, queries, scratch, partial);
}

// Joins what passes over `count` parts of the context found for one row: part i has its row `stride` rows after part
// i - 1.
inline void merge(Partial first, int64_t count, int64_t stride, int64_t dim, float* out) {
  float peak = *first.peak;
  for (int64_t i = 1; i < count; ++i) peak = std::max(peak, first.peak[i * stride]);
  float total = 0.0f;
  std::fill(out, out + dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (first.total[i * stride] == 0.0f) continue;
    const float factor = std::exp(first.peak[i * stride] - peak);
    const float* part = first.out + i * stride * dim;
    total += factor * first.total[i * stride];
    for (int64_t d = 0; d < dim; ++d) out[d] += factor * part[d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= total;
}

}  // namespace servekit
