// Products with quantised weights: y = x W^T for W [N, K] in four bits by groups, or in eight bits.
//
// Weights are packed in tiles of eight output channels, so that a vector register holds all eight. Activations are
// quantised row by row as they come. Every sum over a group is an exact integer, and a row's floats are added in an
// order that does not depend on the other rows: a row's result is the same bits in any batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace servekit {

constexpr int64_t kGroup = 32;    // Weights that share a scale in the four-bit format.
constexpr int64_t kChannels = 8;  // Output channels of one tile.

// --- Activations ----------------------------------------------------------------------------------------------------
// No integer stands for NaN or infinity: the scale becomes NaN then, and so does the row's result.

// One row as eight-bit integers with a scale for each group, for the four-bit weights.
inline void quantize_groups(const float* x, int64_t k, int8_t* q, float* scale, float* sum) {
  typedef int8_t i8x8 __attribute__((vector_size(8)));
  for (int64_t g = 0; g < k / kGroup; ++g) {
    f32x8 group[4], largest = splat(0.0f), spoilt = largest;
    for (int i = 0; i < 4; ++i) {
      group[i] = load8(x + g * kGroup + 8 * i);
      largest = max(largest, abs8(group[i]));
      spoilt += group[i] * 0.0f;
    }
    const float most = max8(largest), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    i32x8 total = {};
    for (int i = 0; i < 4; ++i) {
      const i32x8 integers = round8(group[i] * inverse);
      const i8x8 narrow = __builtin_convertvector(integers, i8x8);
      std::memcpy(q + g * kGroup + 8 * i, &narrow, 8);
      total += integers;
    }
    scale[g] = most / 127.0f + sum8(spoilt);
    sum[g] = scale[g] * sum8(__builtin_convertvector(total, f32x8));
  }
}

// One row as 16-bit integers with one scale, for the eight-bit weights. `most` keeps the integer sums below 2^31.
inline void quantize_row(const float* x, int64_t k, float most, int16_t* q, float* scale) {
  typedef int16_t i16x8 __attribute__((vector_size(16)));
  f32x8 peaks = splat(0.0f), zeros = peaks;
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) {
    peaks = max(peaks, abs8(load8(x + i)));
    zeros += load8(x + i) * 0.0f;
  }
  float largest = max8(peaks), spoilt = sum8(zeros);
  for (; i < k; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    spoilt += x[i] * 0.0f;
  }
  const float inverse = largest > 0.0f ? most / largest : 0.0f;
  for (i = 0; i + 8 <= k; i += 8) {
    const i16x8 narrow = __builtin_convertvector(round8(load8(x + i) * inverse), i16x8);
    std::memcpy(q + i, &narrow, 16);
  }
  for (; i < k; ++i) q[i] = int16_t(int32_t(std::nearbyint(x[i] * inverse)));
  *scale = largest / most + spoilt;
}

// --- Four bits ------------------------------------------------------------------------------------------------------

// A tile of eight channels and one group: 4 x 32 bytes, whose low halves are the integers of columns 8s .. 8s + 3 and
// whose high halves those of 8s + 4 .. 8s + 7 (channel by channel, four columns each); then scale and minimum of each
// channel as half floats.
struct Group4 {
  uint8_t integers[4][32];
  uint16_t scale[kChannels];
  uint16_t minimum[kChannels];
};
static_assert(sizeof(Group4) == 160, "five bits a weight");

struct Rows4 {
  const int8_t* q;
  const float* scale;
  const float* sum;
  int64_t k;
};

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

inline __m256 half8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline int32_t word(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

inline __m256i four_columns(const void* p) { return _mm256_set1_epi32(word(p)); }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SERVEKIT_VNNI

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m512i join(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m512 join(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

#endif

// `Rows` rows times `Tiles` tiles of eight channels. The integers of a group add up in 16 bits without overflow:
// 8 steps x 2 products of at most 15 x 127.
template <int Rows, int Tiles>
inline void product4(const Rows4& x, int64_t row, const Group4* weights, int64_t groups, float* y, int64_t stride) {
  const __m256i low_half = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
  __m256 sums[Rows][Tiles];
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) sums[r][t] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m256i exact[Rows][Tiles];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t) exact[r][t] = _mm256_setzero_si256();
    for (int s = 0; s < 4; ++s) {
      __m256i low[Tiles], high[Tiles];
      for (int t = 0; t < Tiles; ++t) {
        const Group4* tile = weights + t * groups + g;
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile->integers[s]));
        low[t] = _mm256_and_si256(both, low_half);
        high[t] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
      }
      for (int r = 0; r < Rows; ++r) {
        const int8_t* q = x.q + (row + r) * x.k + g * kGroup + 8 * s;
        __m256i first = four_columns(q), second = four_columns(q + 4);
        for (int t = 0; t < Tiles; ++t) {
          exact[r][t] = _mm256_add_epi16(exact[r][t], _mm256_maddubs_epi16(low[t], first));
          exact[r][t] = _mm256_add_epi16(exact[r][t], _mm256_maddubs_epi16(high[t], second));
        }
      }
    }
    for (int t = 0; t < Tiles; ++t) {
      const Group4* tile = weights + t * groups + g;
      __m256 scale = half8(tile->scale), minimum = half8(tile->minimum);
      for (int r = 0; r < Rows; ++r) {
        int64_t at = (row + r) * groups + g;
        __m256 integer = _mm256_cvtepi32_ps(_mm256_madd_epi16(exact[r][t], ones));
        __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale + at));
        sums[r][t] = _mm256_fmadd_ps(integer, both, sums[r][t]);
        sums[r][t] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(x.sum + at), sums[r][t]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) _mm256_storeu_ps(y + (row + r) * stride + t * kChannels, sums[r][t]);
}

#if defined(SERVEKIT_VNNI)

// The same for two tiles in one 512-bit register; one instruction multiplies four columns and adds them up. The floats
// are added in the same order as above, so that rows get the same bits whatever number of them is computed at once.
template <int Rows>
inline void wide_product4(const Rows4& x, int64_t row, const Group4* weights, int64_t groups, float* y, int64_t stride) {
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  __m512 sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const Group4 *own = weights + g, *next = weights + groups + g;
    __m512i exact[Rows];
    for (int r = 0; r < Rows; ++r) exact[r] = _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      const __m512i both = join(load256(own->integers[s]), load256(next->integers[s]));
      const __m512i low = _mm512_and_si512(both, low_half);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
      for (int r = 0; r < Rows; ++r) {
        const int8_t* q = x.q + (row + r) * x.k + g * kGroup + 8 * s;
        exact[r] = _mm512_dpbusd_epi32(exact[r], low, _mm512_set1_epi32(word(q)));
        exact[r] = _mm512_dpbusd_epi32(exact[r], high, _mm512_set1_epi32(word(q + 4)));
      }
    }
    const __m512 scale = join(half8(own->scale), half8(next->scale));
    const __m512 minimum = join(half8(own->minimum), half8(next->minimum));
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * groups + g;
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale[at]));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), both, sums[r]);
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sum[at]), sums[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(y + (row + r) * stride, sums[r]);
}

#endif

#else

inline float half(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(fraction + 1024), int(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

template <int Rows, int Tiles>
inline void product4(const Rows4& x, int64_t row, const Group4* weights, int64_t groups, float* y, int64_t stride) {
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) {
      float sums[kChannels] = {};
      for (int64_t g = 0; g < groups; ++g) {
        const Group4& tile = weights[t * groups + g];
        int32_t exact[kChannels] = {};
        for (int s = 0; s < 4; ++s)
          for (int c = 0; c < kChannels; ++c)
            for (int i = 0; i < 4; ++i) {
              uint8_t both = tile.integers[s][4 * c + i];
              const int8_t* q = x.q + (row + r) * x.k + g * kGroup + 8 * s + i;
              exact[c] += (both & 15) * q[0] + (both >> 4) * q[4];
            }
        int64_t at = (row + r) * groups + g;
        for (int c = 0; c < kChannels; ++c)
          sums[c] += float(exact[c]) * (half(tile.scale[c]) * x.scale[at]) + half(tile.minimum[c]) * x.sum[at];
      }
      std::memcpy(y + (row + r) * stride + t * kChannels, sums, sizeof(sums));
    }
}

#endif

// Rows [row, end) of two tiles: as many at once as the registers hold.
inline void two_tiles4(const Rows4& x, int64_t row, int64_t end, const Group4* weights, int64_t groups, float* y,
                       int64_t stride) {
#if defined(SERVEKIT_VNNI)
  for (; row + 8 <= end; row += 8) wide_product4<8>(x, row, weights, groups, y, stride);
  for (; row + 4 <= end; row += 4) wide_product4<4>(x, row, weights, groups, y, stride);
  for (; row + 2 <= end; row += 2) wide_product4<2>(x, row, weights, groups, y, stride);
  for (; row < end; ++row) wide_product4<1>(x, row, weights, groups, y, stride);
#else
  for (; row + 4 <= end; row += 4) product4<4, 2>(x, row, weights, groups, y, stride);
  for (; row + 2 <= end; row += 2) product4<2, 2>(x, row, weights, groups, y, stride);
  for (; row < end; ++row) product4<1, 2>(x, row, weights, groups, y, stride);
#endif
}

// --- Eight bits -----------------------------------------------------------------------------------------------------

// A tile of eight channels: for each pair of columns 16 bytes, channel by channel, two columns each.
struct Rows8 {
  const int16_t* q;
  const float* scale;
  int64_t k;
};

#if defined(__AVX2__) && defined(__FMA__)

inline __m256i two_columns(const int16_t* p) { return four_columns(p); }

template <int Rows, int Tiles>
inline void product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group, float* y,
                     int64_t stride) {
  const int64_t groups = x.k / group;
  __m256 sums[Rows][Tiles];
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) sums[r][t] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m256i exact[Rows][Tiles];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < Tiles; ++t) exact[r][t] = _mm256_setzero_si256();
    for (int64_t column = g * group; column < (g + 1) * group; column += 2) {
      __m256i pair[Tiles];
      for (int t = 0; t < Tiles; ++t)
        pair[t] = _mm256_cvtepi8_epi16(_mm_loadu_si128(
            reinterpret_cast<const __m128i*>(weights + t * x.k * kChannels + column * kChannels)));
      for (int r = 0; r < Rows; ++r) {
        __m256i activation = two_columns(x.q + (row + r) * x.k + column);
        for (int t = 0; t < Tiles; ++t)
          exact[r][t] = _mm256_add_epi32(exact[r][t], _mm256_madd_epi16(pair[t], activation));
      }
    }
    for (int t = 0; t < Tiles; ++t) {
      __m256 scale = _mm256_loadu_ps(scales + (t * groups + g) * kChannels);
      for (int r = 0; r < Rows; ++r)
        sums[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r][t]), scale, sums[r][t]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    __m256 own = _mm256_broadcast_ss(x.scale + row + r);
    for (int t = 0; t < Tiles; ++t)
      _mm256_storeu_ps(y + (row + r) * stride + t * kChannels, _mm256_mul_ps(sums[r][t], own));
  }
}

#if defined(SERVEKIT_VNNI)

template <int Rows>
inline void wide_product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group,
                          float* y, int64_t stride) {
  const int64_t groups = x.k / group;
  const int8_t *own = weights, *next = weights + x.k * kChannels;
  __m512 sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i exact[Rows];
    for (int r = 0; r < Rows; ++r) exact[r] = _mm512_setzero_si512();
    for (int64_t column = g * group; column < (g + 1) * group; column += 2) {
      const __m256i bytes = _mm256_set_m128i(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(next + column * kChannels)),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(own + column * kChannels)));
      const __m512i pair = _mm512_cvtepi8_epi16(bytes);
      for (int r = 0; r < Rows; ++r)
        exact[r] = _mm512_dpwssd_epi32(exact[r], pair, _mm512_set1_epi32(word(x.q + (row + r) * x.k + column)));
    }
    const __m512 scale = join(_mm256_loadu_ps(scales + g * kChannels), _mm256_loadu_ps(scales + (groups + g) * kChannels));
    for (int r = 0; r < Rows; ++r) sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), scale, sums[r]);
  }
  for (int r = 0; r < Rows; ++r)
    _mm512_storeu_ps(y + (row + r) * stride, _mm512_mul_ps(sums[r], _mm512_set1_ps(x.scale[row + r])));
}

#endif

#else

template <int Rows, int Tiles>
inline void product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group, float* y,
                     int64_t stride) {
  const int64_t groups = x.k / group;
  for (int r = 0; r < Rows; ++r)
    for (int t = 0; t < Tiles; ++t) {
      float sums[kChannels] = {};
      for (int64_t g = 0; g < groups; ++g) {
        int32_t exact[kChannels] = {};
        for (int64_t column = g * group; column < (g + 1) * group; column += 2)
          for (int c = 0; c < kChannels; ++c) {
            const int8_t* pair = weights + t * x.k * kChannels + column * kChannels + 2 * c;
            const int16_t* q = x.q + (row + r) * x.k + column;
            exact[c] += pair[0] * q[0] + pair[1] * q[1];
          }
        for (int c = 0; c < kChannels; ++c) sums[c] += float(exact[c]) * scales[(t * groups + g) * kChannels + c];
      }
      for (int c = 0; c < kChannels; ++c) y[(row + r) * stride + t * kChannels + c] = sums[c] * x.scale[row + r];
    }
}

#endif

inline void two_tiles8(const Rows8& x, int64_t row, int64_t end, const int8_t* weights, const float* scales,
                       int64_t group, float* y, int64_t stride) {
#if defined(SERVEKIT_VNNI)
  for (; row + 8 <= end; row += 8) wide_product8<8>(x, row, weights, scales, group, y, stride);
  for (; row + 4 <= end; row += 4) wide_product8<4>(x, row, weights, scales, group, y, stride);
  for (; row + 2 <= end; row += 2) wide_product8<2>(x, row, weights, scales, group, y, stride);
  for (; row < end; ++row) wide_product8<1>(x, row, weights, scales, group, y, stride);
#else
  for (; row + 4 <= end; row += 4) product8<4, 2>(x, row, weights, scales, group, y, stride);
  for (; row + 2 <= end; row += 2) product8<2, 2>(x, row, weights, scales, group, y, stride);
  for (; row < end; ++row) product8<1, 2>(x, row, weights, scales, group, y, stride);
#endif
}

}  // namespace servekit
