// Eight floats at a time, on any processor: GCC's and Clang's vector types become AVX2, NEON or whatever -march says.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace servekit {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

// A number format whose upper half of the bits is that of a float.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void store_as(float x, float* target) { *target = x; }
inline void store_as(float x, bf16* target) { *target = to_bf16(x); }

inline f32x8 load8(const float* p) {
  f32x8 v;
  std::memcpy(&v, p, 32);
  return v;
}

inline f32x8 load8(const bf16* p) {
  typedef uint16_t u16x8 __attribute__((vector_size(16)));
  typedef uint32_t u32x8 __attribute__((vector_size(32)));
  u16x8 halves;
  std::memcpy(&halves, p, 16);
  u32x8 bits = __builtin_convertvector(halves, u32x8) << 16;
  f32x8 v;
  std::memcpy(&v, &bits, 32);
  return v;
}

inline void store8(float* p, f32x8 v) { std::memcpy(p, &v, 32); }

inline f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }

inline f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }

inline float sum8(f32x8 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The sums of eight vectors, as one.
inline f32x8 sums8(const f32x8* v) {
#if defined(__AVX__)
  auto m = [&](int i) { return (__m256)v[i]; };
  __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(m(0), m(1)), _mm256_hadd_ps(m(2), m(3)));
  __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(m(4), m(5)), _mm256_hadd_ps(m(6), m(7)));
  return (f32x8)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  return f32x8{sum8(v[0]), sum8(v[1]), sum8(v[2]), sum8(v[3]), sum8(v[4]), sum8(v[5]), sum8(v[6]), sum8(v[7])};
#endif
}

// Eight rows of eight become eight columns.
inline void transpose8(f32x8* v) {
#if defined(__AVX__)
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i + 0] = _mm256_shuffle_ps(a[4 * i + 0], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i + 0], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = (f32x8)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = (f32x8)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < i; ++j) {
      float other = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = other;
    }
#endif
}

inline f32x8 abs8(f32x8 v) { return max(v, -v); }

// The nearest integers of numbers below 2^22, ties to even.
inline i32x8 round8(f32x8 v) { return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, i32x8); }

inline float max8(f32x8 v) {
  float largest = v[0];
  for (int i = 1; i < 8; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// e^x for x <= 0 or so, relative error below 2e-7 (a degree-6 polynomial on [-ln2/2, ln2/2]); 0 below -87.
inline f32x8 exp8(f32x8 x) {
  const f32x8 lowest = splat(-87.0f);
  i32x8 is_tiny = x < lowest;
  x = max(lowest, x);  // In this order a NaN stays a NaN.
  f32x8 scaled = x * 1.44269504088896341f;
  f32x8 shifted = scaled + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer.
  f32x8 n = shifted - 12582912.0f;
  f32x8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x8 exponent = (__builtin_convertvector(n, i32x8) + 127) << 23;
  f32x8 power;
  std::memcpy(&power, &exponent, 32);
  f32x8 result = p * power;
  return is_tiny ? splat(0.0f) : result;
}

}  // namespace servekit
