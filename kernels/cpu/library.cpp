// The CPU operations as torch operators. The arithmetic is in the headers; here are arguments, threads and tensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <vector>

#include "attention.h"
#include "draw.h"
#include "elementwise.h"
#include "pool.h"
#include "quantized.h"

namespace servekit {
namespace {

using at::Tensor;

constexpr int64_t kSplit = 512;       // Positions of a context that one task of paged_attention reads.
constexpr int64_t kBlockOfRows = 64;  // Rows whose activations stay in the second cache.

bool is_floats(const Tensor& x) { return x.scalar_type() == at::kFloat && x.is_contiguous(); }

// --- Attention ------------------------------------------------------------------------------------------------------

// A pass over one part of one request's context for some of its queries and one key head.
struct Task {
  int64_t request, head, first_query, num_queries, start, end, part, num_parts, slot;
};

struct Batch {
  const int32_t *query_start, *context_lens, *tables;
  int64_t num_requests, max_blocks;
};

std::vector<Task> plan_tasks(const Batch& batch, int64_t num_kv_heads, int64_t heads_per_kv, int64_t window) {
  std::vector<Task> tasks;
  const int64_t most_queries = std::max<int64_t>(1, kMaxRows / heads_per_kv);
  int64_t slot = 0;
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    const int64_t queries = batch.query_start[request + 1] - batch.query_start[request];
    const int64_t context = batch.context_lens[request];
    for (int64_t first = 0; first < queries; first += most_queries) {
      const int64_t count = std::min(most_queries, queries - first);
      const int64_t end = context - queries + first + count;
      const int64_t begin = std::max<int64_t>(0, end - count - window + 1) / kSplit * kSplit;
      const int64_t parts = (end - begin + kSplit - 1) / kSplit;
      for (int64_t head = 0; head < num_kv_heads; ++head, ++slot)
        for (int64_t part = 0; part < parts; ++part)
          tasks.push_back({request, head, first, count, begin + part * kSplit,
                           std::min(end, begin + (part + 1) * kSplit), part, parts, slot});
    }
  }
  return tasks;
}

template <typename T>
void run_tasks(const std::vector<Task>& tasks, const Batch& batch, const Cache<T>& cache, const float* q, float* out,
               int64_t num_heads, double scale, int64_t window) {
  const int64_t dim = cache.head_dim, group = num_heads / cache.num_kv_heads;
  // Parts of one context are neighbours in `tasks`: those that share a slot are merged after all have run.
  std::vector<Partial> partials(tasks.size());
  parallel_for(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    std::vector<int64_t> positions(kMaxRows);
    for (int64_t index = begin; index < end; ++index) {
      const Task& task = tasks[index];
      const int64_t rows = task.num_queries * group, first_token = batch.query_start[task.request] + task.first_query;
      const int64_t queries = batch.query_start[task.request + 1] - batch.query_start[task.request];
      scratch.queries.resize(std::max<int64_t>(rows, 1) * dim);
      for (int64_t r = 0; r < rows; ++r) {
        const float* query = q + ((first_token + r / group) * num_heads + task.head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; ++d) scratch.queries[r * dim + d] = query[d] * float(scale);
        positions[r] = batch.context_lens[task.request] - queries + task.first_query + r / group;
      }
      partials[index].reset(int(rows), dim);
      attend(cache, batch.tables + task.request * batch.max_blocks, task.head, task.start, task.end, int(rows),
             positions.data(), window, scratch, partials[index]);
    }
  });
  parallel_for(int64_t(tasks.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Task& task = tasks[index];
      if (task.part != 0) continue;
      const int64_t first_token = batch.query_start[task.request] + task.first_query;
      for (int64_t r = 0; r < task.num_queries * group; ++r) {
        float* target = out + ((first_token + r / group) * num_heads + task.head * group + r % group) * dim;
        merge(&partials[index], task.num_parts, r, dim, target);
      }
    }
  });
}

Tensor paged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& query_start,
                       const Tensor& context_lens, const Tensor& tables, double scale, int64_t window) {
  TORCH_CHECK(is_floats(q) && keys.is_contiguous() && values.is_contiguous(), "paged_attention: layout");
  TORCH_CHECK(q.size(1) / keys.size(1) <= kMaxRows, "paged_attention: too many query heads share a key head");
  Tensor out = at::empty_like(q);
  const Batch batch{query_start.const_data_ptr<int32_t>(), context_lens.const_data_ptr<int32_t>(),
                    tables.const_data_ptr<int32_t>(), context_lens.size(0), tables.size(1)};
  const auto tasks = plan_tasks(batch, keys.size(1), q.size(1) / keys.size(1), window);
  auto run = [&](auto* key_data, auto* value_data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(key_data)>>;
    const Cache<T> cache{key_data, value_data, keys.size(1), keys.size(2), keys.size(3)};
    run_tasks(tasks, batch, cache, q.const_data_ptr<float>(), out.mutable_data_ptr<float>(), q.size(1), scale, window);
  };
  if (keys.scalar_type() == at::kFloat)
    run(keys.const_data_ptr<float>(), values.const_data_ptr<float>());
  else if (keys.scalar_type() == at::kBFloat16)
    run(static_cast<const bf16*>(keys.const_data_ptr()), static_cast<const bf16*>(values.const_data_ptr()));
  else
    TORCH_CHECK(false, "paged_attention: the cache must be float32 or bfloat16");
  return out;
}

// --- Rotation and cache ---------------------------------------------------------------------------------------------

template <typename T>
void rope_rows(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
               const float* cos_sin, const int64_t* positions, const int64_t* slots, int64_t num_tokens,
               int64_t num_heads, const Cache<T>& cache, float* q_out) {
  const int64_t dim = cache.head_dim;
  T *keys = const_cast<T*>(cache.keys), *values = const_cast<T*>(cache.values);
  parallel_for(num_tokens, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> rotated(dim);
    for (int64_t t = begin; t < end; ++t) {
      const float* angles = cos_sin + positions[t] * dim;
      for (int64_t h = 0; h < num_heads; ++h)
        rotate(q + t * q_stride + h * dim, angles, dim, q_out + (t * num_heads + h) * dim);
      const int64_t block = slots[t] / cache.block_size, offset = slots[t] % cache.block_size;
      for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
        const int64_t row = cache.row(block, h, offset);
        rotate(k + t * k_stride + h * dim, angles, dim, rotated.data());
        for (int64_t d = 0; d < dim; ++d) store_as(rotated[d], keys + row + d);
        for (int64_t d = 0; d < dim; ++d) store_as(v[t * v_stride + h * dim + d], values + row + d);
      }
    }
  });
}

// A [T, heads, head_dim] view whose heads lie next to one another; the tokens may be further apart.
bool is_rows(const Tensor& x) {
  return x.scalar_type() == at::kFloat && x.stride(2) == 1 && x.stride(1) == x.size(2);
}

Tensor rope_and_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin,
                      const Tensor& positions, const Tensor& keys, const Tensor& values, const Tensor& slots) {
  TORCH_CHECK(is_rows(q) && is_rows(k) && is_rows(v) && is_floats(cos_sin), "rope_and_cache: layout");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "rope_and_cache: layout");
  Tensor out = at::empty(q.sizes(), q.options());
  auto run = [&](auto* key_data, auto* value_data) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(key_data)>>;
    const Cache<T> cache{key_data, value_data, keys.size(1), keys.size(2), keys.size(3)};
    rope_rows(q.const_data_ptr<float>(), q.stride(0), k.const_data_ptr<float>(), k.stride(0),
              v.const_data_ptr<float>(), v.stride(0), cos_sin.const_data_ptr<float>(),
              positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), q.size(0), q.size(1), cache,
              out.mutable_data_ptr<float>());
  };
  if (keys.scalar_type() == at::kFloat)
    run(keys.const_data_ptr<float>(), values.const_data_ptr<float>());
  else if (keys.scalar_type() == at::kBFloat16)
    run(static_cast<const bf16*>(keys.const_data_ptr()), static_cast<const bf16*>(values.const_data_ptr()));
  else
    TORCH_CHECK(false, "rope_and_cache: the cache must be float32 or bfloat16");
  return out;
}

// --- Norms and activation -------------------------------------------------------------------------------------------

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous();
  Tensor out = at::empty_like(rows);
  const int64_t width = x.size(-1), count = x.numel() / width;
  const float *source = rows.const_data_ptr<float>(), *gain = weight.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  parallel_for(count, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) normalize(source + i * width, gain, width, float(eps), target + i * width);
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  TORCH_CHECK(is_floats(x) && is_floats(residual), "add_rms_norm: layout");
  Tensor out = at::empty_like(x), total = at::empty_like(x);
  const int64_t width = x.size(-1), count = x.numel() / width;
  const float *a = x.const_data_ptr<float>(), *b = residual.const_data_ptr<float>();
  const float* gain = weight.const_data_ptr<float>();
  float *target = out.mutable_data_ptr<float>(), *sum = total.mutable_data_ptr<float>();
  parallel_for(count, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < width; ++j) sum[i * width + j] = a[i * width + j] + b[i * width + j];
      normalize(sum + i * width, gain, width, float(eps), target + i * width);
    }
  });
  return {out, total};
}

Tensor silu_and_mul(const Tensor& gate_up) {
  TORCH_CHECK(is_floats(gate_up), "silu_and_mul: layout");
  const int64_t width = gate_up.size(-1) / 2, count = gate_up.numel() / gate_up.size(-1);
  auto sizes = gate_up.sizes().vec();
  sizes.back() = width;
  Tensor out = at::empty(sizes, gate_up.options());
  const float* source = gate_up.const_data_ptr<float>();
  float* target = out.mutable_data_ptr<float>();
  parallel_for(count, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      gate(source + 2 * i * width, source + (2 * i + 1) * width, width, target + i * width);
  });
  return out;
}

// --- Quantised products ---------------------------------------------------------------------------------------------

// Runs `product(row, rows_at_once, tile, tiles_at_once)` over all rows and tiles: each thread has its own tiles, and
// walks through the rows in blocks whose activations stay in its cache.
template <typename Product>
void over_rows_and_tiles(int64_t rows, int64_t tiles, Product product) {
  parallel_for((tiles + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = 0; block < rows; block += kBlockOfRows) {
      const int64_t block_end = std::min(rows, block + kBlockOfRows);
      for (int64_t tile = 2 * begin; tile < std::min(2 * end, tiles); tile += 2) product(block, block_end, tile);
    }
  });
}

// The products write whole tiles: an output of `n` columns is made in a wider one, of which the rest is dropped.
Tensor empty_tiles(const Tensor& x, int64_t tiles) {
  auto sizes = x.sizes().vec();
  sizes.back() = tiles * kChannels;
  return at::empty(sizes, x.options());
}

Tensor first_columns(const Tensor& out, int64_t n) {
  return out.size(-1) == n ? out : out.narrow(-1, 0, n).contiguous();
}

template <typename F>
void over_rows(int64_t rows, F f) {
  parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

Tensor linear_int4(const Tensor& x, const Tensor& packed, int64_t n) {
  const Tensor input = x.contiguous();
  TORCH_CHECK(is_floats(input) && packed.is_contiguous(), "linear_int4: layout");
  const int64_t k = x.size(-1), rows = x.numel() / k, groups = k / kGroup, tiles = packed.size(0);
  Tensor out = empty_tiles(x, tiles);
  const int64_t stride = tiles * kChannels;
  std::vector<int8_t> q(rows * k);
  std::vector<float> scale(rows * groups), sum(rows * groups);
  const float* source = input.const_data_ptr<float>();
  over_rows(rows, [&](int64_t i) {
    quantize_groups(source + i * k, k, q.data() + i * k, scale.data() + i * groups, sum.data() + i * groups);
  });
  const Rows4 activations{q.data(), scale.data(), sum.data(), k};
  const auto* weights = static_cast<const Group4*>(packed.const_data_ptr());
  float* y = out.mutable_data_ptr<float>();
  over_rows_and_tiles(rows, tiles, [&](int64_t row, int64_t end, int64_t tile) {
    const Group4* own = weights + tile * groups;
    float* target = y + tile * kChannels;
    if (tile + 2 <= tiles) {
      two_tiles4(activations, row, end, own, groups, target, stride);
    } else {
      for (; row < end; ++row) product4<1, 1>(activations, row, own, groups, target, stride);
    }
  });
  return first_columns(out, n);
}

Tensor linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, int64_t n) {
  const Tensor input = x.contiguous();
  TORCH_CHECK(is_floats(input) && packed.is_contiguous() && is_floats(scales), "linear_int8: layout");
  const int64_t k = x.size(-1), rows = x.numel() / k, tiles = packed.size(0), group = k / scales.size(1);
  Tensor out = empty_tiles(x, tiles);
  const int64_t stride = tiles * kChannels;
  std::vector<int16_t> q(rows * k);
  std::vector<float> scale(rows);
  const float* source = input.const_data_ptr<float>();
  const float most = std::floor(std::min(8191.0, 2147483647.0 / (127.0 * double(group))));
  over_rows(rows, [&](int64_t i) { quantize_row(source + i * k, k, most, q.data() + i * k, scale.data() + i); });
  const Rows8 activations{q.data(), scale.data(), k};
  const auto* weights = packed.const_data_ptr<int8_t>();
  const float* weight_scales = scales.const_data_ptr<float>();
  float* y = out.mutable_data_ptr<float>();
  over_rows_and_tiles(rows, tiles, [&](int64_t row, int64_t end, int64_t tile) {
    const int8_t* own = weights + tile * k * kChannels;
    const float* own_scales = weight_scales + tile * (k / group) * kChannels;
    float* target = y + tile * kChannels;
    if (tile + 2 <= tiles) {
      two_tiles8(activations, row, end, own, own_scales, group, target, stride);
    } else {
      for (; row < end; ++row) product8<1, 1>(activations, row, own, own_scales, group, target, stride);
    }
  });
  return first_columns(out, n);
}

// Eight bits with their scales apart, or four bits with their scales among them.
Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& scales, int64_t n) {
  return scales.numel() == 0 ? linear_int4(x, packed, n) : linear_int8(x, packed, scales, n);
}

// --- A whole layer --------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> layer(const Tensor& normed, const Tensor& residual, at::TensorList matrices,
                                 at::IntArrayRef rows, const Tensor& mlp_norm, const Tensor& next_norm,
                                 const Tensor& cos_sin, const Tensor& positions, const Tensor& slots,
                                 const Tensor& query_start, const Tensor& context_lens, const Tensor& tables,
                                 const Tensor& keys, const Tensor& values, int64_t num_heads, double scale,
                                 int64_t window, double eps) {
  auto product = [&](const Tensor& x, int index) {
    return linear(x, matrices[2 * index], matrices[2 * index + 1], rows[index]);
  };
  const int64_t num_kv_heads = keys.size(1), dim = keys.size(3);
  const Tensor heads = product(normed, 0).view({normed.size(0), num_heads + 2 * num_kv_heads, dim});
  const Tensor q = rope_and_cache(heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, num_kv_heads),
                                  heads.narrow(1, num_heads + num_kv_heads, num_kv_heads), cos_sin, positions, keys,
                                  values, slots);
  const Tensor attended = paged_attention(q, keys, values, query_start, context_lens, tables, scale, window);
  const Tensor o = product(attended.view({normed.size(0), num_heads * dim}), 1);
  const auto [mlp_input, middle] = add_rms_norm(o, residual, mlp_norm, eps);
  return add_rms_norm(product(silu_and_mul(product(mlp_input, 2)), 3), middle, next_norm, eps);
}

// --- Sampling -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> argmax(const Tensor& logits) {
  TORCH_CHECK(is_floats(logits), "argmax: layout");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor values = at::empty({rows}, logits.options()), indices = at::empty({rows}, logits.options().dtype(at::kLong));
  const float* source = logits.const_data_ptr<float>();
  float* value = values.mutable_data_ptr<float>();
  int64_t* index = indices.mutable_data_ptr<int64_t>();
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) largest(source + i * vocab, vocab, value + i, index + i);
  });
  return {values, indices};
}

Tensor draw(const Tensor& logits, const Tensor& temperatures, const Tensor& keys) {
  TORCH_CHECK(is_floats(logits) && keys.is_contiguous() && temperatures.is_contiguous(), "draw: layout");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor tokens = at::empty({rows}, logits.options().dtype(at::kLong));
  const float* source = logits.const_data_ptr<float>();
  const double* temperature = temperatures.const_data_ptr<double>();
  const int64_t* key = keys.const_data_ptr<int64_t>();
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      token[i] = draw_row(source + i * vocab, vocab, temperature[i], uint32_t(key[2 * i]), uint32_t(key[2 * i + 1]));
  });
  return tokens;
}

void set_threads(int64_t count) {
  TORCH_CHECK(count >= 1, "set_threads: at least one thread computes");
  if (pool()->num_threads() != count) pool() = std::make_unique<Pool>(int(count));
}

}  // namespace
}  // namespace servekit

TORCH_LIBRARY(servekit_cpu, m) {
  m.def(
      "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor query_start, Tensor context_lens, Tensor tables, "
      "float scale, int window) -> Tensor",
      &servekit::paged_attention);
  m.def(
      "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor positions, Tensor(a!) keys, "
      "Tensor(b!) values, Tensor slots) -> Tensor",
      &servekit::rope_and_cache);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", &servekit::rms_norm);
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        &servekit::add_rms_norm);
  m.def("silu_and_mul(Tensor gate_up) -> Tensor", &servekit::silu_and_mul);
  m.def("set_threads(int count) -> ()", &servekit::set_threads);
  m.def("argmax(Tensor logits) -> (Tensor, Tensor)", &servekit::argmax);
  m.def("draw(Tensor logits, Tensor temperatures, Tensor keys) -> Tensor", &servekit::draw);
  m.def("linear(Tensor x, Tensor packed, Tensor scales, int n) -> Tensor", &servekit::linear);
  m.def(
      "layer(Tensor normed, Tensor residual, Tensor[] matrices, int[] rows, Tensor mlp_norm, Tensor next_norm, "
      "Tensor cos_sin, Tensor positions, Tensor slots, Tensor query_start, Tensor context_lens, Tensor tables, "
      "Tensor(a!) keys, Tensor(b!) values, int num_heads, float scale, int window, float eps) -> (Tensor, Tensor)",
      &servekit::layer);
}
