// Vectors of floats on any processor: GCC's and Clang's vector types become AVX-512, AVX2, NEON or what -march says.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

// Inner loops that need all registers: inlined, they would share them with their callers' values.
#define SERVEKIT_APART [[gnu::noinline]] static

namespace servekit {

typedef float f32x8 __attribute__((vector_size(32)));

// As many floats, and integers of their size, as one register holds.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t uints __attribute__((vector_size(4 * kLanes)));

// A number format whose upper half of the bits is that of a float.
struct bf16 {
  uint16_t bits;
};

// Two of them, the first in the lower half.
enum class bf16_pair : uint32_t {};

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

inline floats load(const float* p) {
  floats v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline uints load(const bf16_pair* p) {
  uints v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, floats v) { std::memcpy(p, &v, sizeof(v)); }

inline floats splat(float x) { return x - floats{}; }

inline floats max(floats a, floats b) { return a > b ? a : b; }

inline ints max(ints a, ints b) { return a > b ? a : b; }

// Without their signs, floats are in the order of their bits; infinity and NaN come last.
inline ints magnitude_bits(floats v) { return (ints)v & 0x7fffffff; }

// The nearest integers of numbers below 2^22, ties to even.
inline ints rounded(floats v) { return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, ints); }

// f over all lanes, halves first.
template <typename T, typename Vector, typename F>
inline T reduce(Vector v, F f) {
  T lanes[kLanes];
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = f(lanes[i], lanes[i + width]);
  return lanes[0];
}

#if defined(__AVX512F__)
inline float sum_of(floats v) { return _mm512_reduce_add_ps((__m512)v); }
inline float largest_of(floats v) { return _mm512_reduce_max_ps((__m512)v); }
inline int32_t sum_of(ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline int32_t largest_of(ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
inline float sum_of(floats v) { return reduce<float>(v, std::plus<>{}); }
inline float largest_of(floats v) {
  return reduce<float>(v, [](float a, float b) { return a > b ? a : b; });
}
inline int32_t sum_of(ints v) { return reduce<int32_t>(v, std::plus<>{}); }
inline int32_t largest_of(ints v) {
  return reduce<int32_t>(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
#endif

// Two vectors of a row's columns, as the row's format gives them at the least cost: floats one after the other, of bf16
// the even and the odd columns.
struct Columns {
  floats first, second;
};
constexpr int kColumns = 2 * kLanes;

inline Columns load_columns(const float* p) { return {load(p), load(p + kLanes)}; }

inline Columns load_columns(const bf16* p) {
  uints pairs;
  std::memcpy(&pairs, p, sizeof(pairs));
  return {(floats)(pairs << 16), (floats)(pairs & 0xffff0000u)};
}

// The column that lane i of `first`, or lane i - kLanes of `second`, holds.
constexpr int column_of_lane(const float*, int i) { return i; }
constexpr int column_of_lane(const bf16*, int i) { return i < kLanes ? 2 * i : 2 * (i - kLanes) + 1; }

// The same for the first `count` columns; the others are zero, and nothing is read behind them.
template <typename T>
inline Columns load_columns(const T* p, int count) {
  T padded[kColumns] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load_columns(padded);
}

#if defined(__AVX512BW__)
inline Columns load_columns(const bf16* p, int count) {
  const uints pairs = (uints)_mm512_maskz_loadu_epi16((1u << count) - 1, p);
  return {(floats)(pairs << 16), (floats)(pairs & 0xffff0000u)};
}
#endif

// Four vectors into one, whose lane 4q + i is the sum of lanes 4q .. 4q + 3 of vector i.
inline floats fold(const floats* v) {
#if defined(__AVX512F__)
  auto add_pairs = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const __m512d low = (__m512d)add_pairs((__m512)v[0], (__m512)v[1]);
  const __m512d high = (__m512d)add_pairs((__m512)v[2], (__m512)v[3]);
  return (floats)_mm512_unpacklo_pd(low, high) + (floats)_mm512_unpackhi_pd(low, high);
#elif defined(__AVX__)
  auto add_pairs = [](floats a, floats b) { return _mm256_hadd_ps((__m256)a, (__m256)b); };
  return (floats)_mm256_hadd_ps(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
#else
  floats folded;
  for (int i = 0; i < kLanes; ++i) {
    const int quarter = i / 4 * 4;
    const floats& from = v[i % 4];
    folded[i] = (from[quarter] + from[quarter + 1]) + (from[quarter + 2] + from[quarter + 3]);
  }
  return folded;
#endif
}

// The sums of the kLanes vectors that became kLanes / 4 folded ones.
inline floats sums_of_folded(const floats* v) {
#if defined(__AVX512F__)
  auto add_pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (floats)add_pairs(add_pairs((__m512)v[0], (__m512)v[1]), add_pairs((__m512)v[2], (__m512)v[3]));
#elif defined(__AVX__)
  const __m256 a = (__m256)v[0], b = (__m256)v[1];
  return (floats)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  floats sums;
  for (int i = 0; i < kLanes; ++i) {
    sums[i] = 0.0f;
    for (int quarter = 0; quarter < kLanes; quarter += 4) sums[i] += v[i / 4][quarter + i % 4];
  }
  return sums;
#endif
}

// e^x for x <= 0 or so, relative error below 2e-7 (a degree-6 polynomial on [-ln2/2, ln2/2]); 0 below -87.
inline floats exponential(floats x) {
  const floats lowest = splat(-87.0f);
  const ints is_tiny = x < lowest;
  x = max(lowest, x);  // In this order a NaN stays a NaN.
  const floats shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer.
  const floats n = shifted - 12582912.0f;
  floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const ints exponent = (__builtin_convertvector(n, ints) + 127) << 23;
  return is_tiny ? splat(0.0f) : p * (floats)exponent;
}

// --- Eight floats, whatever the processor ---------------------------------------------------------------------------

// Elements i .. i + 7 of a row whose numbers become floats, or stay pairs of bf16, which count as one element.
template <typename Element, typename T>
inline f32x8 load8(const T* row, int64_t i) {
  f32x8 v;
  if constexpr (std::is_same_v<T, bf16> && std::is_same_v<Element, float>) {
    typedef uint16_t u16x8 __attribute__((vector_size(16)));
    typedef uint32_t u32x8 __attribute__((vector_size(32)));
    u16x8 halves;
    std::memcpy(&halves, row + i, sizeof(halves));
    v = (f32x8)(__builtin_convertvector(halves, u32x8) << 16);
  } else {
    std::memcpy(&v, reinterpret_cast<const Element*>(row) + i, sizeof(v));
  }
  return v;
}

template <typename Element, typename T>
inline Element element(const T* row, int64_t i) {
  if constexpr (std::is_same_v<Element, float>) {
    return to_float(row[i]);
  } else {
    return bf16_pair(row[2 * i].bits | uint32_t(row[2 * i + 1].bits) << 16);
  }
}

inline void to_elements(const float* x, int64_t count, float* elements) { std::copy(x, x + count, elements); }

#if defined(__AVX512BF16__)
inline void to_elements(const float* x, int64_t count, bf16_pair* pairs) {
  bf16* numbers = reinterpret_cast<bf16*>(pairs);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)load(x + i));
    std::memcpy(numbers + i, &narrow, sizeof(narrow));
  }
  for (; i < count; ++i) numbers[i] = to_bf16(x[i]);
}
#endif

inline float product_of(float a, float b) { return a * b; }

inline float product_of(bf16_pair a, bf16_pair b) {
  auto half = [](bf16_pair pair, int shift) { return to_float(bf16{uint16_t(uint32_t(pair) >> shift)}); };
  return half(a, 0) * half(b, 0) + half(a, 16) * half(b, 16);
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

}  // namespace servekit
