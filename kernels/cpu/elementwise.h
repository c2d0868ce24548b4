// Operations on one row at a time: normalisation, gated activation, rotation.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace servekit {

// x / sqrt(mean(x^2) + eps) * gain.
inline void normalize(const float* x, const float* gain, int64_t width, float eps, float* out) {
  f32x8 squares = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    f32x8 v = load8(x + i);
    squares += v * v;
  }
  float total = sum8(squares);
  for (; i < width; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / float(width) + eps);
  for (i = 0; i + 8 <= width; i += 8) store8(out + i, load8(x + i) * factor * load8(gain + i));
  for (; i < width; ++i) out[i] = x[i] * factor * gain[i];
}

// silu(gate) * up. For a large negative gate e^gate is 0 and so is the result.
inline void gate(const float* gates, const float* ups, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    f32x8 x = load8(gates + i);
    // The exponential is asked for -|x|, where it cannot overflow.
    f32x8 e = exp8(x < 0.0f ? x : -x);
    f32x8 sigmoid = (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
    store8(out + i, x * sigmoid * load8(ups + i));
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
