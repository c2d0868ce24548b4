// The CPU operations as torch operators. The arithmetic is in the headers; here are arguments, threads and tensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "elementwise.h"
#include "layer.h"
#include "paged_attention.h"
#include "pool.h"
#include "truncate.h"

namespace servekit {
namespace {

using at::Tensor;

bool is_floats(const Tensor& x) { return x.scalar_type() == at::kFloat && x.is_contiguous(); }

// Calls f with the cache in its number format.
template <typename F>
void with_cache(const Tensor& keys, const Tensor& values, F f) {
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "cache: layout");
  if (keys.scalar_type() == at::kFloat)
    f(Cache<float>{keys.const_data_ptr<float>(), values.const_data_ptr<float>(), keys.size(1), keys.size(2),
                   keys.size(3)});
  else if (keys.scalar_type() == at::kBFloat16)
    f(Cache<bf16>{static_cast<const bf16*>(keys.const_data_ptr()), static_cast<const bf16*>(values.const_data_ptr()),
                  keys.size(1), keys.size(2), keys.size(3)});
  else
    TORCH_CHECK(false, "the cache must be float32 or bfloat16");
}

// --- Attention ------------------------------------------------------------------------------------------------------

Tensor paged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& query_start,
                       const Tensor& context_lens, const Tensor& tables, double scale, int64_t window) {
  TORCH_CHECK(is_floats(q), "paged_attention: layout");
  TORCH_CHECK(q.size(1) / keys.size(1) <= kMaxRows, "paged_attention: too many query heads share a key head");
  Tensor out = at::empty_like(q);
  const Batch batch{query_start.const_data_ptr<int32_t>(), context_lens.const_data_ptr<int32_t>(),
                    tables.const_data_ptr<int32_t>(), context_lens.size(0), tables.size(1), keys.size(2)};
  with_cache(keys, values, [&]<typename T>(const Cache<T>& cache) {
    Attention<T>(batch, cache, q.const_data_ptr<float>(), out.mutable_data_ptr<float>(), q.size(1), float(scale),
                 window)
        .run();
  });
  return out;
}

// --- Rotation and cache ---------------------------------------------------------------------------------------------

// A [T, heads, head_dim] view whose heads lie next to one another; the tokens may be further apart.
bool is_rows(const Tensor& x) {
  return x.scalar_type() == at::kFloat && x.stride(2) == 1 && x.stride(1) == x.size(2);
}

Places places_of(const Tensor& cos_sin, const Tensor& positions, const Tensor& slots) {
  TORCH_CHECK(is_floats(cos_sin) && positions.is_contiguous() && slots.is_contiguous(), "places: layout");
  return {cos_sin.const_data_ptr<float>(), positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>()};
}

Tensor rope_and_cache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin,
                      const Tensor& positions, const Tensor& keys, const Tensor& values, const Tensor& slots) {
  TORCH_CHECK(is_rows(q) && is_rows(k) && is_rows(v), "rope_and_cache: layout");
  Tensor out = at::empty(q.sizes(), q.options());
  auto heads = [](const Tensor& x) { return Heads{x.const_data_ptr<float>(), x.stride(0)}; };
  with_cache(keys, values, [&](const auto& cache) {
    rope_rows(AllThreads{}, heads(q), heads(k), heads(v), places_of(cos_sin, positions, slots), q.size(0), q.size(1),
              cache, out.mutable_data_ptr<float>());
  });
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
    for (int64_t i = begin; i < end; ++i)
      add_normalize(a + i * width, b + i * width, gain, width, float(eps), sum + i * width, target + i * width);
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

// Eight bits with their scales apart, or four bits with their scales among them.
Matrix matrix_of(const Tensor& packed, const Tensor& scales) {
  TORCH_CHECK(packed.is_contiguous() && is_floats(scales), "matrix: layout");
  const int64_t tiles = packed.size(0);
  if (scales.numel() == 0)
    return Matrix4{static_cast<const Group4*>(packed.const_data_ptr()), tiles, packed.size(1) * kGroup};
  const int64_t k = packed.size(1) / kChannels8;
  return Matrix8{packed.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), tiles, k, k / scales.size(1)};
}

Tensor linear(const Tensor& x, const Tensor& packed, const Tensor& scales, int64_t n) {
  const Matrix matrix = matrix_of(packed, scales);
  const Tensor input = x.contiguous();
  TORCH_CHECK(is_floats(input), "linear: layout");
  auto sizes = x.sizes().vec();
  sizes.back() = stride(matrix);
  const Tensor out = at::empty(sizes, x.options());
  product(AllThreads{}, matrix, input.const_data_ptr<float>(), x.numel() / x.size(-1), out.mutable_data_ptr<float>());
  return stride(matrix) == n ? out : out.narrow(-1, 0, n).contiguous();
}

// --- A whole layer --------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> layer(const Tensor& normed, const Tensor& residual, at::TensorList matrices,
                                 const Tensor& mlp_norm, const Tensor& next_norm, const Tensor& cos_sin,
                                 const Tensor& positions, const Tensor& slots, const Tensor& query_start,
                                 const Tensor& context_lens, const Tensor& tables, const Tensor& keys,
                                 const Tensor& values, int64_t num_heads, int64_t intermediate, double scale,
                                 int64_t window, double eps) {
  TORCH_CHECK(is_floats(normed) && is_floats(residual), "layer: layout");
  auto matrix = [&](int index) { return matrix_of(matrices[2 * index], matrices[2 * index + 1]); };
  const int64_t rows = normed.size(0), hidden = normed.size(1), width = num_heads * keys.size(3);
  const Layer own{matrix(0), matrix(1), matrix(2), matrix(3), mlp_norm.const_data_ptr<float>(),
                  next_norm.const_data_ptr<float>(), hidden, intermediate, num_heads, float(eps)};
  const Places places = places_of(cos_sin, positions, slots);
  const Tensor q = at::empty({rows, num_heads, keys.size(3)}, normed.options());
  with_cache(keys, values, [&](const auto& cache) {
    over_blocks_of_rows(rows, [&](auto threads, int64_t first, int64_t count) {
      before_attention(threads, own, normed.const_data_ptr<float>() + first * hidden, count, places.from(first), cache,
                       q.mutable_data_ptr<float>() + first * width);
    });
  });
  const Tensor attended = paged_attention(q, keys, values, query_start, context_lens, tables, scale, window);
  const Tensor next_normed = at::empty_like(normed), next_residual = at::empty_like(residual);
  over_blocks_of_rows(rows, [&](auto threads, int64_t first, int64_t count) {
    after_attention(threads, own, attended.const_data_ptr<float>() + first * width,
                    residual.const_data_ptr<float>() + first * hidden, count,
                    next_normed.mutable_data_ptr<float>() + first * hidden,
                    next_residual.mutable_data_ptr<float>() + first * hidden);
  });
  return {next_normed, next_residual};
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

Tensor truncate(const Tensor& logits, const Tensor& temperatures, const Tensor& top_k, const Tensor& top_p,
                const Tensor& min_p) {
  TORCH_CHECK(is_floats(logits) && temperatures.is_contiguous() && top_k.is_contiguous() && top_p.is_contiguous() &&
                  min_p.is_contiguous(),
              "truncate: layout");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor out = at::empty_like(logits);
  const float* source = logits.const_data_ptr<float>();
  const double *temperature = temperatures.const_data_ptr<double>(), *share = top_p.const_data_ptr<double>();
  const double* relative = min_p.const_data_ptr<double>();
  const int64_t* count = top_k.const_data_ptr<int64_t>();
  float* target = out.mutable_data_ptr<float>();
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    Truncation truncation(vocab);
    for (int64_t i = begin; i < end; ++i)
      truncation.row(source + i * vocab, temperature[i], {count[i], share[i], relative[i]}, target + i * vocab);
  });
  return out;
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
  m.def("truncate(Tensor logits, Tensor temperatures, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
        &servekit::truncate);
  m.def("draw(Tensor logits, Tensor temperatures, Tensor keys) -> Tensor", &servekit::draw);
  m.def("linear(Tensor x, Tensor packed, Tensor scales, int n) -> Tensor", &servekit::linear);
  m.def(
      "layer(Tensor normed, Tensor residual, Tensor[] matrices, Tensor mlp_norm, Tensor next_norm, "
      "Tensor cos_sin, Tensor positions, Tensor slots, Tensor query_start, Tensor context_lens, Tensor tables, "
      "Tensor(a!) keys, Tensor(b!) values, int num_heads, int intermediate, float scale, int window, float eps) "
      "-> (Tensor, Tensor)",
      &servekit::layer);
}
