// Operations on one row at a time: normalisation, gated activation, rotation.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace servekit {

// x / sqrt(mean(x^2) + eps) * gain.
inline void normalize(const float* x, const float* gain, int64_t width, float eps, float* out) {
  floats squares = splat(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    floats v = load(x + i);
    squares += v * v;
  }
  float total = sum_of(squares);
  for (; i < width; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, load(x + i) * factor * load(gain + i));
  for (; i < width; ++i) out[i] = x[i] * factor * gain[i];
}

// The sum x + residual, which may replace `residual`, and its normalisation.
inline void add_normalize(const float* x, const float* residual, const float* gain, int64_t width, float eps,
                          float* sum, float* out) {
  for (int64_t i = 0; i < width; ++i) sum[i] = x[i] + residual[i];
  normalize(sum, gain, width, eps, out);
}

// silu(gate) * up. For a large negative gate e^gate is 0 and so is the result.
inline void gate(const float* gates, const float* ups, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    floats x = load(gates + i);
    // The exponential is asked for -|x|, where it cannot overflow.
    floats e = exponential(x < 0.0f ? x : -x);
    floats sigmoid = (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
    store(out + i, x * sigmoid * load(ups + i));
  }
  for (; i < width; ++i) out[i] = gates[i] / (1.0f + std::exp(-gates[i])) * ups[i];
}

// Dimension i is rotated together with i + dim / 2; `angles` holds dim / 2 cosines, then as many sines.
inline void rotate(const float* x, const float* angles, int64_t dim, float* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float cosine = angles[i], sine = angles[half + i], a = x[i], b = x[half + i];
    out[i] = a * cosine - b * sine;
    out[half + i] = b * cosine + a * sine;
  }
}

}  // namespace servekit
