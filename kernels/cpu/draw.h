// One random token a row by the Gumbel-max trick; see kernels/draw.py for the noise.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace servekit {

inline uints mix(uints x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Natural logarithm of positive normal numbers, absolute error below 1e-6 (Cephes' polynomial).
inline floats logarithm(floats x) {
  ints bits;
  std::memcpy(&bits, &x, sizeof(x));
  ints exponent = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  floats m;
  std::memcpy(&m, &bits, sizeof(m));
  ints is_small = m < 0.707106781186547524f;
  floats e = __builtin_convertvector(is_small ? exponent - 1 : exponent, floats);
  m = is_small ? m + m - 1.0f : m - 1.0f;
  floats z = m * m;
  floats y = m * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  y += e * -2.12194440e-4f - z * 0.5f;
  return m + y + e * 0.693359375f;
}

// More than the noise of two tokens can differ: -log(-log(u)) lies in [-2.82, 16.64] for the numbers u that there are.
constexpr float kNoiseRange = 20.0f;

inline int64_t draw_row(const float* logits, int64_t vocab, double temperature, uint32_t first_key,
                        uint32_t second_key) {
  float peak = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab; ++i) peak = logits[i] > peak ? logits[i] : peak;
  // In float, a temperature that small would divide by zero; the peak alone is meant.
  const float inverse = float(std::fmin(1.0 / temperature, 1e30));
  uints steps;
  for (int lane = 0; lane < kLanes; ++lane) steps[lane] = lane;
  floats best = splat(-std::numeric_limits<float>::infinity());
  ints where = {};
  float best_value = -std::numeric_limits<float>::infinity();
  int64_t best_index = 0;
  auto noise = [&](uint32_t id) {
    uints hashed = mix(mix(steps + (id + first_key)) ^ second_key);
    floats uniform = (__builtin_convertvector((ints)(hashed >> 9), floats) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const floats scaled = (load(logits + i) - peak) * inverse;
    if (largest_of(scaled) < -kNoiseRange) continue;  // The most likely token beats them whatever the noise.
    floats value = scaled + noise(uint32_t(i));
    ints is_better = value > best;
    best = is_better ? value : best;
    where = is_better ? (ints)(steps + uint32_t(i)) : where;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (best[lane] > best_value || (best[lane] == best_value && where[lane] < best_index)) {
      best_value = best[lane];
      best_index = where[lane];
    }
  if (i < vocab) {
    floats rest = noise(uint32_t(i));
    for (int lane = 0; i + lane < vocab; ++lane) {
      float value = (logits[i + lane] - peak) * inverse + rest[lane];
      if (value > best_value) {
        best_value = value;
        best_index = i + lane;
      }
    }
  }
  return best_index;
}

// The largest number of a row and where it is, the first of equals. A NaN anywhere makes the largest a NaN.
inline void largest(const float* row, int64_t count, float* value, int64_t* index) {
  floats best = splat(-std::numeric_limits<float>::infinity()), sum = splat(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    floats v = load(row + i);
    best = max(best, v);
    sum += v * 0.0f;  // NaN and infinity leave a NaN here.
  }
  float peak = largest_of(best), spoilt = sum_of(sum);
  for (; i < count; ++i) {
    peak = row[i] > peak ? row[i] : peak;
    spoilt += row[i] * 0.0f;
  }
  bool has_nan = false;
  if (spoilt != spoilt)
    for (int64_t j = 0; j < count && !has_nan; ++j) has_nan = row[j] != row[j];
  *value = has_nan ? std::numeric_limits<float>::quiet_NaN() : peak;
  *index = 0;
  for (int64_t j = 0; j < count; ++j)
    if (row[j] == peak) {
      *index = j;
      break;
    }
}

}  // namespace servekit
