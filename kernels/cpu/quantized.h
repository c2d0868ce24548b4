// Products with quantised weights: y = x W^T for W [N, K] in four or in eight bits, by groups of columns.
//
// Weights are packed in tiles of 16 or 32 output channels, one or two of the longest registers wide. Activations are
// rounded to eight bits row by row as they come, by the same groups of columns. Every sum over a group is an exact
// integer, and a row's floats are added in an order that does not depend on the other rows: a row's result is the same
// bits in any batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <variant>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "simd.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SERVEKIT_VNNI
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define SERVEKIT_AVX2
#endif

namespace servekit {

constexpr int64_t kGroup = 32;     // Weights that share a scale in the four-bit format.
constexpr int64_t kChannels = 16;  // Output channels that one 512-bit register holds, and one tile of four-bit weights.
constexpr int64_t kChannels8 = 32; // Output channels of a tile of eight-bit weights.
constexpr int kOffset = 128;       // What is added to an eight-bit weight: it is multiplied as an unsigned number.
constexpr float kMost = 127.0f;    // The largest integer of an activation.

inline int32_t word(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// --- Activations ----------------------------------------------------------------------------------------------------

// Rows of activations as integers with a scale for each group of columns.
struct Rows {
  int64_t k, group;
  Buffer<int8_t> q;        // [rows, k]
  Buffer<float> scale;     // [rows, k / group]
  Buffer<float> sum;       // The same: of a group's numbers, for weights that have a minimum.
  Buffer<int32_t> offset;  // The same: what kOffset in each weight adds to the sum of the products, negated.

  Rows(int64_t rows, int64_t columns, int64_t columns_of_group)
      : k(columns),
        group(columns_of_group),
        q(rows * k),
        scale(rows * groups()),
        sum(rows * groups()),
        offset(rows * groups()) {}

  int64_t groups() const { return k / group; }

  void set(int64_t row, const float* x) {
    for (int64_t g = 0; g < groups(); ++g) round_group(x + g * group, q.data() + row * k + g * group, row * groups() + g);
  }

 private:
  // No integer stands for NaN or infinity: the scale becomes NaN then, and so does the row's result.
  void round_group(const float* x, int8_t* integers, int64_t at) {
    typedef int8_t bytes __attribute__((vector_size(kLanes)));
    const int64_t whole = group / kLanes * kLanes;
    ints peaks = {};
    for (int64_t i = 0; i < whole; i += kLanes) peaks = max(peaks, magnitude_bits(load(x + i)));
    int32_t peak = largest_of(peaks);
    for (int64_t i = whole; i < group; ++i) peak = std::max(peak, word(x + i) & 0x7fffffff);
    float most;
    std::memcpy(&most, &peak, 4);
    const float inverse = most > 0.0f ? kMost / most : 0.0f;
    ints totals = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const ints nearest = rounded(load(x + i) * inverse);
      const bytes narrow = __builtin_convertvector(nearest, bytes);
      std::memcpy(integers + i, &narrow, kLanes);
      totals += nearest;
    }
    int32_t total = sum_of(totals);
    for (int64_t i = whole; i < group; ++i) {
      integers[i] = int8_t(int32_t(std::nearbyint(x[i] * inverse)));
      total += integers[i];
    }
    scale.data()[at] = most / kMost + (most - most);
    sum.data()[at] = scale.data()[at] * float(total);
    offset.data()[at] = -kOffset * total;
  }
};

// --- Four bits ------------------------------------------------------------------------------------------------------

// A tile of 16 channels and one group: 4 x 64 bytes, whose low halves are the integers of columns 8s .. 8s + 3 and
// whose high halves those of 8s + 4 .. 8s + 7 (channel by channel, four columns each); then scale and minimum of each
// channel as half floats.
struct Group4 {
  uint8_t integers[4][4 * kChannels];
  uint16_t scale[kChannels];
  uint16_t minimum[kChannels];
};
static_assert(sizeof(Group4) == 320, "five bits a weight");

// Asks memory for the group of another tile.
inline void prefetch(const Group4* group) {
  const char* bytes = reinterpret_cast<const char*>(group);
  for (int line = 0; line < 5; ++line) __builtin_prefetch(bytes + 64 * line, 0, 2);
}

#if defined(SERVEKIT_VNNI)

// `Count` rows times one tile, which is one 512-bit register wide; one instruction multiplies and adds four columns.
template <int Count>
SERVEKIT_APART void product4(const Rows& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  const int64_t groups = x.k / kGroup;
  __m512 sums[Count];
  for (int r = 0; r < Count; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    prefetch(weights + groups + g);
    __m512i exact[Count];
    for (int r = 0; r < Count; ++r) exact[r] = _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      const __m512i both = _mm512_loadu_si512(weights[g].integers[s]);
      const __m512i low = _mm512_and_si512(both, low_half);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
      for (int r = 0; r < Count; ++r) {
        const int8_t* q = x.q.data() + (row + r) * x.k + g * kGroup + 8 * s;
        exact[r] = _mm512_dpbusd_epi32(exact[r], low, _mm512_set1_epi32(word(q)));
        exact[r] = _mm512_dpbusd_epi32(exact[r], high, _mm512_set1_epi32(word(q + 4)));
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights[g].scale)));
    const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights[g].minimum)));
    for (int r = 0; r < Count; ++r) {
      const int64_t at = (row + r) * groups + g;
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale.data()[at]));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), both, sums[r]);
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sum.data()[at]), sums[r]);
    }
  }
  for (int r = 0; r < Count; ++r) _mm512_storeu_ps(y + (row + r) * stride, sums[r]);
}

#elif defined(SERVEKIT_AVX2)

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256 half8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// `Count` rows times one tile, whose halves are a 256-bit register each. The integers of a group add up in 16 bits
// without overflow: 8 steps x 2 products of at most 15 x 127.
template <int Count>
SERVEKIT_APART void product4(const Rows& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const __m256i low_half = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
  const int64_t groups = x.k / kGroup;
  __m256 sums[Count][2];
  for (int r = 0; r < Count; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    prefetch(weights + groups + g);
    __m256i exact[Count][2];
    for (int r = 0; r < Count; ++r) exact[r][0] = exact[r][1] = _mm256_setzero_si256();
    for (int s = 0; s < 4; ++s) {
      __m256i low[2], high[2];
      for (int h = 0; h < 2; ++h) {
        const __m256i both = load256(weights[g].integers[s] + 32 * h);
        low[h] = _mm256_and_si256(both, low_half);
        high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
      }
      for (int r = 0; r < Count; ++r) {
        const int8_t* q = x.q.data() + (row + r) * x.k + g * kGroup + 8 * s;
        const __m256i first = _mm256_set1_epi32(word(q)), second = _mm256_set1_epi32(word(q + 4));
        for (int h = 0; h < 2; ++h) {
          exact[r][h] = _mm256_add_epi16(exact[r][h], _mm256_maddubs_epi16(low[h], first));
          exact[r][h] = _mm256_add_epi16(exact[r][h], _mm256_maddubs_epi16(high[h], second));
        }
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = half8(weights[g].scale + 8 * h), minimum = half8(weights[g].minimum + 8 * h);
      for (int r = 0; r < Count; ++r) {
        const int64_t at = (row + r) * groups + g;
        const __m256 integer = _mm256_cvtepi32_ps(_mm256_madd_epi16(exact[r][h], ones));
        const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale.data() + at));
        sums[r][h] = _mm256_fmadd_ps(integer, both, sums[r][h]);
        sums[r][h] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(x.sum.data() + at), sums[r][h]);
      }
    }
  }
  for (int r = 0; r < Count; ++r)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(y + (row + r) * stride + 8 * h, sums[r][h]);
}

#else

inline float half(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(fraction + 1024), int(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

template <int Count>
SERVEKIT_APART void product4(const Rows& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const int64_t groups = x.k / kGroup;
  for (int r = 0; r < Count; ++r) {
    float sums[kChannels] = {};
    for (int64_t g = 0; g < groups; ++g) {
      int32_t exact[kChannels] = {};
      for (int s = 0; s < 4; ++s)
        for (int c = 0; c < kChannels; ++c)
          for (int i = 0; i < 4; ++i) {
            const uint8_t both = weights[g].integers[s][4 * c + i];
            const int8_t* q = x.q.data() + (row + r) * x.k + g * kGroup + 8 * s + i;
            exact[c] += (both & 15) * q[0] + (both >> 4) * q[4];
          }
      const int64_t at = (row + r) * groups + g;
      for (int c = 0; c < kChannels; ++c)
        sums[c] += float(exact[c]) * (half(weights[g].scale[c]) * x.scale.data()[at]) +
                   half(weights[g].minimum[c]) * x.sum.data()[at];
    }
    std::memcpy(y + (row + r) * stride, sums, sizeof(sums));
  }
}

#endif

// --- Eight bits -----------------------------------------------------------------------------------------------------
// A tile of 32 channels: for each four columns 128 bytes, channel by channel, four columns each; kOffset is added to
// each weight.

// Asks memory for the same place of the next tile.
inline void prefetch_next(const uint8_t* weights, int64_t k) {
  __builtin_prefetch(weights + k * kChannels8, 0, 2);
  __builtin_prefetch(weights + k * kChannels8 + 64, 0, 2);
}

#if defined(SERVEKIT_VNNI)

template <int Count>
SERVEKIT_APART void product8(const Rows& x, int64_t row, const uint8_t* weights, const float* scales, float* y,
                     int64_t stride) {
  __m512 sums[Count][2];
  for (int r = 0; r < Count; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < x.groups(); ++g) {
    const int64_t at = row * x.groups() + g;
    __m512i exact[Count][2];
    for (int r = 0; r < Count; ++r)
      exact[r][0] = exact[r][1] = _mm512_set1_epi32(x.offset.data()[at + r * x.groups()]);
    for (int64_t column = g * x.group; column < (g + 1) * x.group; column += 4) {
      const uint8_t* four = weights + column * kChannels8;
      prefetch_next(four, x.k);
      const __m512i low = _mm512_loadu_si512(four), high = _mm512_loadu_si512(four + 64);
      for (int r = 0; r < Count; ++r) {
        const __m512i activations = _mm512_set1_epi32(word(x.q.data() + (row + r) * x.k + column));
        exact[r][0] = _mm512_dpbusd_epi32(exact[r][0], low, activations);
        exact[r][1] = _mm512_dpbusd_epi32(exact[r][1], high, activations);
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m512 scale = _mm512_loadu_ps(scales + g * kChannels8 + 16 * h);
      for (int r = 0; r < Count; ++r) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale.data()[at + r * x.groups()]));
        sums[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r][h]), both, sums[r][h]);
      }
    }
  }
  for (int r = 0; r < Count; ++r)
    for (int h = 0; h < 2; ++h) _mm512_storeu_ps(y + (row + r) * stride + 16 * h, sums[r][h]);
}

#elif defined(SERVEKIT_AVX2)

// Eight channels after the other. The product of unsigned and signed bytes adds pairs in 16 bits, where a weight with
// its offset may overflow: its magnitude is multiplied by the activation with its sign.
template <int Count>
SERVEKIT_APART void product8(const Rows& x, int64_t row, const uint8_t* weights, const float* scales, float* y,
                     int64_t stride) {
  const __m256i ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8(char(kOffset));
  for (int64_t channel = 0; channel < kChannels8; channel += 8) {
    __m256 sums[Count];
    for (int r = 0; r < Count; ++r) sums[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < x.groups(); ++g) {
      __m256i exact[Count];
      for (int r = 0; r < Count; ++r) exact[r] = _mm256_setzero_si256();
      for (int64_t column = g * x.group; column < (g + 1) * x.group; column += 4) {
        const __m256i weight = _mm256_xor_si256(load256(weights + column * kChannels8 + 4 * channel), offset);
        const __m256i size = _mm256_abs_epi8(weight);
        for (int r = 0; r < Count; ++r) {
          const __m256i activations = _mm256_set1_epi32(word(x.q.data() + (row + r) * x.k + column));
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(activations, weight));
          exact[r] = _mm256_add_epi32(exact[r], _mm256_madd_epi16(pairs, ones));
        }
      }
      const __m256 scale = _mm256_loadu_ps(scales + g * kChannels8 + channel);
      for (int r = 0; r < Count; ++r) {
        const float* own = x.scale.data() + (row + r) * x.groups() + g;
        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r]), _mm256_mul_ps(scale, _mm256_broadcast_ss(own)), sums[r]);
      }
    }
    for (int r = 0; r < Count; ++r) _mm256_storeu_ps(y + (row + r) * stride + channel, sums[r]);
  }
}

#else

template <int Count>
SERVEKIT_APART void product8(const Rows& x, int64_t row, const uint8_t* weights, const float* scales, float* y,
                     int64_t stride) {
  for (int r = 0; r < Count; ++r) {
    float sums[kChannels8] = {};
    for (int64_t g = 0; g < x.groups(); ++g) {
      const int64_t at = (row + r) * x.groups() + g;
      int32_t exact[kChannels8];
      std::fill(exact, exact + kChannels8, x.offset.data()[at]);
      for (int64_t column = g * x.group; column < (g + 1) * x.group; column += 4)
        for (int c = 0; c < kChannels8; ++c)
          for (int i = 0; i < 4; ++i)
            exact[c] += weights[column * kChannels8 + 4 * c + i] * x.q.data()[(row + r) * x.k + column + i];
      for (int c = 0; c < kChannels8; ++c)
        sums[c] += float(exact[c]) * (scales[g * kChannels8 + c] * x.scale.data()[at]);
    }
    std::memcpy(y + (row + r) * stride, sums, sizeof(sums));
  }
}

#endif

// --- Matrices -------------------------------------------------------------------------------------------------------

// Calls f<Count>(first row) for the rows [row, end), at most `Most` at a time: what the registers hold.
template <int Most, typename F>
inline void by_rows_at_once(int64_t row, int64_t end, F f) {
  for (; row + Most <= end; row += Most) f(std::integral_constant<int, Most>{}, row);
  for (; row + 4 <= end; row += 4) f(std::integral_constant<int, 4>{}, row);
  for (; row + 2 <= end; row += 2) f(std::integral_constant<int, 2>{}, row);
  for (; row < end; ++row) f(std::integral_constant<int, 1>{}, row);
}

#if defined(SERVEKIT_VNNI)
constexpr int kRowsAtOnce4 = 8;
#else
constexpr int kRowsAtOnce4 = 4;
#endif

struct Matrix4 {
  static constexpr int64_t kWidth = kChannels;
  const Group4* weights;
  int64_t tiles, k;

  Rows rows(int64_t count) const { return {count, k, kGroup}; }

  // Rows [row, end) times one tile, to y + row * stride.
  void multiply(const Rows& x, int64_t row, int64_t end, int64_t tile, float* y, int64_t stride) const {
    const Group4* own = weights + tile * (k / kGroup);
    by_rows_at_once<kRowsAtOnce4>(row, end, [&](auto n, int64_t first) { product4<n>(x, first, own, y, stride); });
  }
};

struct Matrix8 {
  static constexpr int64_t kWidth = kChannels8;
  const uint8_t* weights;
  const float* scales;  // [tiles, k / group, kChannels8]
  int64_t tiles, k, group;

  Rows rows(int64_t count) const { return {count, k, group}; }

  void multiply(const Rows& x, int64_t row, int64_t end, int64_t tile, float* y, int64_t stride) const {
    const uint8_t* own = weights + tile * k * kChannels8;
    const float* own_scales = scales + tile * (k / group) * kChannels8;
    by_rows_at_once<4>(row, end, [&](auto n, int64_t first) { product8<n>(x, first, own, own_scales, y, stride); });
  }
};

using Matrix = std::variant<Matrix4, Matrix8>;

}  // namespace servekit
