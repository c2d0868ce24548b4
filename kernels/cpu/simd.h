// Eight floats at a time, on any processor: GCC's and Clang's vector types become AVX2, NEON or whatever -march says.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

inline float sum8(f32x8 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

inline float max8(f32x8 v) {
  float largest = v[0];
  for (int i = 1; i < 8; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

inline f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }

// e^x for x <= 0 or so, relative error below 2e-7 (a degree-6 polynomial on [-ln2/2, ln2/2]); 0 below -87.
inline f32x8 exp8(f32x8 x) {
  const f32x8 lowest = splat(-87.0f);
  i32x8 is_tiny = x < lowest;
  x = max(x, lowest);
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
