// A decoder layer on rows in memory. Each function computes some rows, with all threads or as one thread of several.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "attention.h"
#include "buffer.h"
#include "elementwise.h"
#include "pool.h"
#include "quantized.h"

namespace servekit {

constexpr int64_t kBlockOfRows = 32;  // Rows whose activations stay in the first cache.

// Rows times columns of a tile that are worth a part of their own: the processor reads ahead only within a part.
constexpr int64_t kWorth = 16384;

// A matrix, whose outputs come in whole tiles: rows of `stride()` numbers.
inline int64_t stride(const Matrix& matrix) {
  return std::visit([](const auto& m) { return m.tiles * m.kWidth; }, matrix);
}

// y = x W^T. Each thread has its own tiles, and walks through the rows in blocks.
template <typename Threads>
void product(Threads threads, const Matrix& matrix, const float* x, int64_t rows, float* y) {
  std::visit(
      [&](const auto& m) {
        auto rounded = m.rows(rows);
        threads.share(rows, 4, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) rounded.set(i, x + i * m.k);
        });
        const int64_t all_that_a_thread_has = std::max<int64_t>(1, m.tiles / pool()->num_threads());
        const int64_t grain = std::clamp<int64_t>(kWorth / (rows * m.k), 1, all_that_a_thread_has);
        threads.share(m.tiles, grain, [&](int64_t begin, int64_t end) {
          for (int64_t block = 0; block < rows; block += kBlockOfRows)
            for (int64_t tile = begin; tile < end; ++tile)
              m.multiply(rounded, block, std::min(rows, block + kBlockOfRows), tile, y + tile * m.kWidth,
                         m.tiles * m.kWidth);
        });
      },
      matrix);
}

// Where the tokens of some rows stand: in their contexts, and in the cache.
struct Places {
  const float* cos_sin;  // [positions, head_dim]
  const int64_t* positions;
  const int64_t* slots;

  Places from(int64_t row) const { return {cos_sin, positions + row, slots + row}; }
};

// [rows, heads, head_dim], the rows `stride` numbers apart.
struct Heads {
  const float* data;
  int64_t stride;
};

// Rotates queries and keys, and writes keys and values to the cache.
template <typename Threads, typename T>
void rope_rows(Threads threads, Heads q, Heads k, Heads v, const Places& places, int64_t rows, int64_t num_heads,
               const Cache<T>& cache, float* q_out) {
  const int64_t dim = cache.head_dim;
  T *keys = const_cast<T*>(cache.keys), *values = const_cast<T*>(cache.values);
  threads.share(rows, 32, [&](int64_t begin, int64_t end) {
    Buffer<float> rotated(dim);
    for (int64_t t = begin; t < end; ++t) {
      const float* angles = places.cos_sin + places.positions[t] * dim;
      for (int64_t h = 0; h < num_heads; ++h)
        rotate(q.data + t * q.stride + h * dim, angles, dim, q_out + (t * num_heads + h) * dim);
      const int64_t block = places.slots[t] / cache.block_size, offset = places.slots[t] % cache.block_size;
      for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
        const int64_t row = cache.row(block, h, offset);
        rotate(k.data + t * k.stride + h * dim, angles, dim, rotated.data());
        for (int64_t d = 0; d < dim; ++d) store_as(rotated.data()[d], keys + row + d);
        for (int64_t d = 0; d < dim; ++d) store_as(v.data[t * v.stride + h * dim + d], values + row + d);
      }
    }
  });
}

// A layer without biases and without norms of its queries and keys.
struct Layer {
  Matrix qkv, o, gate_up, down;
  const float* mlp_norm;
  const float* next_norm;
  int64_t hidden, intermediate, num_heads;
  float eps;
};

// From the normed input [rows, hidden] to the rotated queries [rows, num_heads, head_dim] and the cache.
template <typename Threads, typename T>
void before_attention(Threads threads, const Layer& layer, const float* normed, int64_t rows, const Places& places,
                      const Cache<T>& cache, float* q) {
  const int64_t width = stride(layer.qkv), keys = layer.num_heads * cache.head_dim;
  Buffer<float> heads(rows * width);
  product(threads, layer.qkv, normed, rows, heads.data());
  const float* data = heads.data();
  rope_rows(threads, {data, width}, {data + keys, width}, {data + keys + cache.num_kv_heads * cache.head_dim, width},
            places, rows, layer.num_heads, cache, q);
}

// From what the heads found and the residual to the next layer's normed input and residual, all [rows, hidden].
template <typename Threads>
void after_attention(Threads threads, const Layer& layer, const float* attended, const float* residual, int64_t rows,
                     float* next_normed, float* next_residual) {
  const int64_t hidden = layer.hidden, intermediate = layer.intermediate;
  const int64_t o_width = stride(layer.o), wide_width = stride(layer.gate_up), down_width = stride(layer.down);
  Buffer<float> half(rows * std::max(o_width, down_width)), wide(rows * wide_width), gated(rows * intermediate);
  product(threads, layer.o, attended, rows, half.data());
  threads.share(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      add_normalize(half.data() + i * o_width, residual + i * hidden, layer.mlp_norm, hidden, layer.eps,
                    next_residual + i * hidden, next_normed + i * hidden);
  });
  product(threads, layer.gate_up, next_normed, rows, wide.data());
  threads.share(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      gate(wide.data() + i * wide_width, wide.data() + i * wide_width + intermediate, intermediate,
           gated.data() + i * intermediate);
  });
  product(threads, layer.down, gated.data(), rows, half.data());
  threads.share(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      add_normalize(half.data() + i * down_width, next_residual + i * hidden, layer.next_norm, hidden, layer.eps,
                    next_residual + i * hidden, next_normed + i * hidden);
  });
}

// Calls f(threads, first row, number of rows): few rows are computed by all threads together, many in blocks of which
// each thread computes its own from end to end, in its own caches.
template <typename F>
void over_blocks_of_rows(int64_t rows, F f) {
  const int64_t threads = pool()->num_threads();
  if (rows < 2 * kBlockOfRows * threads) return f(AllThreads{}, int64_t(0), rows);
  const int64_t evenly = (rows / (4 * threads) + 7) / 8 * 8, block = std::min(kBlockOfRows, evenly);
  parallel_for((rows + block - 1) / block, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * block; first < std::min(rows, end * block); first += block)
      f(ThisThread{}, first, std::min(block, rows - first));
  });
}

}  // namespace servekit
