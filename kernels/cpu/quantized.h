// Products with quantised weights: y = x W^T for W [N, K] in four bits by groups, or in eight bits.
//
// Weights are packed in tiles of 16 output channels, so that one or two vector registers hold them all. Activations are
// quantised row by row as they come. Every sum over a group is an exact integer, and a row's floats are added in an
// order that does not depend on the other rows: a row's result is the same bits in any batch.
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

constexpr int64_t kGroup = 32;      // Weights that share a scale in the four-bit format.
constexpr int64_t kChannels = 16;   // Output channels of one tile.
constexpr float kMost4 = 127.0f;    // The largest integer of an activation for four-bit weights,
constexpr float kMost8 = 8191.0f;   // and for eight-bit ones.

inline int32_t word(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// --- Activations ----------------------------------------------------------------------------------------------------
// No integer stands for NaN or infinity: the scale becomes NaN then, and so does the row's result.

// One row as eight-bit integers with a scale for each group, for the four-bit weights.
inline void quantize_groups(const float* x, int64_t k, int8_t* q, float* scale, float* sum) {
  typedef int8_t bytes __attribute__((vector_size(kLanes)));
  constexpr int kVectors = kGroup / kLanes;
  for (int64_t g = 0; g < k / kGroup; ++g) {
    floats group[kVectors], peaks = splat(0.0f), zeros = peaks;
    for (int i = 0; i < kVectors; ++i) {
      group[i] = load(x + g * kGroup + kLanes * i);
      peaks = max(peaks, magnitude(group[i]));
      zeros += group[i] * 0.0f;
    }
    const float most = largest_of(peaks), inverse = most > 0.0f ? kMost4 / most : 0.0f;
    ints total = {};
    for (int i = 0; i < kVectors; ++i) {
      const ints integers = rounded(group[i] * inverse);
      const bytes narrow = __builtin_convertvector(integers, bytes);
      std::memcpy(q + g * kGroup + kLanes * i, &narrow, kLanes);
      total += integers;
    }
    scale[g] = most / kMost4 + sum_of(zeros);
    sum[g] = scale[g] * sum_of(__builtin_convertvector(total, floats));
  }
}

// One row as 16-bit integers with one scale, for the eight-bit weights. `most` keeps the integer sums below 2^31.
inline void quantize_row(const float* x, int64_t k, float most, int16_t* q, float* scale) {
  typedef int16_t shorts __attribute__((vector_size(2 * kLanes)));
  floats peaks = splat(0.0f), zeros = peaks;
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    peaks = max(peaks, magnitude(load(x + i)));
    zeros += load(x + i) * 0.0f;
  }
  float largest = largest_of(peaks), spoilt = sum_of(zeros);
  for (; i < k; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    spoilt += x[i] * 0.0f;
  }
  const float inverse = largest > 0.0f ? most / largest : 0.0f;
  for (i = 0; i + kLanes <= k; i += kLanes) {
    const shorts narrow = __builtin_convertvector(rounded(load(x + i) * inverse), shorts);
    std::memcpy(q + i, &narrow, sizeof(narrow));
  }
  for (; i < k; ++i) q[i] = int16_t(int32_t(std::nearbyint(x[i] * inverse)));
  *scale = largest / most + spoilt;
}

// Rows for four-bit weights.
struct Rows4 {
  int64_t k;
  Buffer<int8_t> q;  // [rows, k]
  Buffer<float> scale, sum;  // [rows, k / kGroup]

  Rows4(int64_t rows, int64_t columns)
      : k(columns), q(rows * columns), scale(rows * columns / kGroup), sum(rows * columns / kGroup) {}

  void set(int64_t row, const float* x) {
    const int64_t groups = k / kGroup;
    quantize_groups(x, k, q.data() + row * k, scale.data() + row * groups, sum.data() + row * groups);
  }
};

// Rows for eight-bit weights whose scales belong to `group` columns.
struct Rows8 {
  int64_t k;
  float most;
  Buffer<int16_t> q;    // [rows, k]
  Buffer<float> scale;  // [rows]

  Rows8(int64_t rows, int64_t columns, int64_t group)
      : k(columns),
        most(std::floor(std::min(double(kMost8), 2147483647.0 / (127.0 * double(group))))),
        q(rows * columns),
        scale(rows) {}

  void set(int64_t row, const float* x) { quantize_row(x, k, most, q.data() + row * k, scale.data() + row); }
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
  for (int line = 0; line < 5; ++line) __builtin_prefetch(bytes + 64 * line);
}

#if defined(SERVEKIT_VNNI)

// `Rows` rows times one tile, which is one 512-bit register wide; one instruction multiplies and adds four columns.
template <int Rows>
inline void product4(const Rows4& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  const int64_t groups = x.k / kGroup;
  __m512 sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    prefetch(weights + groups + g);
    __m512i exact[Rows];
    for (int r = 0; r < Rows; ++r) exact[r] = _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      const __m512i both = _mm512_loadu_si512(weights[g].integers[s]);
      const __m512i low = _mm512_and_si512(both, low_half);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
      for (int r = 0; r < Rows; ++r) {
        const int8_t* q = x.q.data() + (row + r) * x.k + g * kGroup + 8 * s;
        exact[r] = _mm512_dpbusd_epi32(exact[r], low, _mm512_set1_epi32(word(q)));
        exact[r] = _mm512_dpbusd_epi32(exact[r], high, _mm512_set1_epi32(word(q + 4)));
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights[g].scale)));
    const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights[g].minimum)));
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * groups + g;
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale.data()[at]));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), both, sums[r]);
      sums[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sum.data()[at]), sums[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(y + (row + r) * stride, sums[r]);
}

#elif defined(SERVEKIT_AVX2)

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256 half8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// `Rows` rows times one tile, whose halves are a 256-bit register each. The integers of a group add up in 16 bits
// without overflow: 8 steps x 2 products of at most 15 x 127.
template <int Rows>
inline void product4(const Rows4& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const __m256i low_half = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1);
  const int64_t groups = x.k / kGroup;
  __m256 sums[Rows][2];
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    prefetch(weights + groups + g);
    __m256i exact[Rows][2];
    for (int r = 0; r < Rows; ++r) exact[r][0] = exact[r][1] = _mm256_setzero_si256();
    for (int s = 0; s < 4; ++s) {
      __m256i low[2], high[2];
      for (int h = 0; h < 2; ++h) {
        const __m256i both = load256(weights[g].integers[s] + 32 * h);
        low[h] = _mm256_and_si256(both, low_half);
        high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
      }
      for (int r = 0; r < Rows; ++r) {
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
      for (int r = 0; r < Rows; ++r) {
        const int64_t at = (row + r) * groups + g;
        const __m256 integer = _mm256_cvtepi32_ps(_mm256_madd_epi16(exact[r][h], ones));
        const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale.data() + at));
        sums[r][h] = _mm256_fmadd_ps(integer, both, sums[r][h]);
        sums[r][h] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(x.sum.data() + at), sums[r][h]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(y + (row + r) * stride + 8 * h, sums[r][h]);
}

#else

inline float half(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(fraction + 1024), int(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

template <int Rows>
inline void product4(const Rows4& x, int64_t row, const Group4* weights, float* y, int64_t stride) {
  const int64_t groups = x.k / kGroup;
  for (int r = 0; r < Rows; ++r) {
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
// A tile of 16 channels: for each pair of columns 32 bytes, channel by channel, two columns each.

#if defined(SERVEKIT_VNNI)

template <int Rows>
inline void product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group, float* y,
                     int64_t stride) {
  __m512 sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t first = 0; first < x.k; first += group) {
    __m512i exact[Rows];
    for (int r = 0; r < Rows; ++r) exact[r] = _mm512_setzero_si512();
    for (int64_t column = first; column < first + group; column += 2) {
      const int8_t* both = weights + column * kChannels;
      __builtin_prefetch(both + x.k * kChannels);
      const __m512i pair = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(both)));
      for (int r = 0; r < Rows; ++r)
        exact[r] = _mm512_dpwssd_epi32(exact[r], pair, _mm512_set1_epi32(word(x.q.data() + (row + r) * x.k + column)));
    }
    const __m512 scale = _mm512_loadu_ps(scales + first / group * kChannels);
    for (int r = 0; r < Rows; ++r) sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), scale, sums[r]);
  }
  for (int r = 0; r < Rows; ++r)
    _mm512_storeu_ps(y + (row + r) * stride, _mm512_mul_ps(sums[r], _mm512_set1_ps(x.scale.data()[row + r])));
}

#elif defined(SERVEKIT_AVX2)

template <int Rows>
inline void product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group, float* y,
                     int64_t stride) {
  __m256 sums[Rows][2];
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (int64_t first = 0; first < x.k; first += group) {
    __m256i exact[Rows][2];
    for (int r = 0; r < Rows; ++r) exact[r][0] = exact[r][1] = _mm256_setzero_si256();
    for (int64_t column = first; column < first + group; column += 2) {
      const __m256i bytes = load256(weights + column * kChannels);
      __builtin_prefetch(weights + (x.k + column) * kChannels);
      const __m256i pair[2] = {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
                               _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))};
      for (int r = 0; r < Rows; ++r) {
        const __m256i activation = _mm256_set1_epi32(word(x.q.data() + (row + r) * x.k + column));
        for (int h = 0; h < 2; ++h)
          exact[r][h] = _mm256_add_epi32(exact[r][h], _mm256_madd_epi16(pair[h], activation));
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = _mm256_loadu_ps(scales + first / group * kChannels + 8 * h);
      for (int r = 0; r < Rows; ++r)
        sums[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r][h]), scale, sums[r][h]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int h = 0; h < 2; ++h)
      _mm256_storeu_ps(y + (row + r) * stride + 8 * h,
                       _mm256_mul_ps(sums[r][h], _mm256_broadcast_ss(x.scale.data() + row + r)));
}

#else

template <int Rows>
inline void product8(const Rows8& x, int64_t row, const int8_t* weights, const float* scales, int64_t group, float* y,
                     int64_t stride) {
  for (int r = 0; r < Rows; ++r) {
    float sums[kChannels] = {};
    for (int64_t first = 0; first < x.k; first += group) {
      int32_t exact[kChannels] = {};
      for (int64_t column = first; column < first + group; column += 2)
        for (int c = 0; c < kChannels; ++c) {
          const int8_t* pair = weights + column * kChannels + 2 * c;
          const int16_t* q = x.q.data() + (row + r) * x.k + column;
          exact[c] += pair[0] * q[0] + pair[1] * q[1];
        }
      for (int c = 0; c < kChannels; ++c) sums[c] += float(exact[c]) * scales[first / group * kChannels + c];
    }
    for (int c = 0; c < kChannels; ++c) y[(row + r) * stride + c] = sums[c] * x.scale.data()[row + r];
  }
}

#endif

// --- Matrices -------------------------------------------------------------------------------------------------------

#if defined(SERVEKIT_VNNI)
constexpr int kRowsAtOnce = 8;  // What the registers hold.
#else
constexpr int kRowsAtOnce = 4;
#endif

// Calls f<Rows>(first row) for the rows [row, end), at most kRowsAtOnce at a time.
template <typename F>
inline void by_rows_at_once(int64_t row, int64_t end, F f) {
  for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) f(std::integral_constant<int, kRowsAtOnce>{}, row);
  for (; row + 4 <= end; row += 4) f(std::integral_constant<int, 4>{}, row);
  for (; row + 2 <= end; row += 2) f(std::integral_constant<int, 2>{}, row);
  for (; row < end; ++row) f(std::integral_constant<int, 1>{}, row);
}

struct Matrix4 {
  const Group4* weights;
  int64_t tiles, k;

  Rows4 rows(int64_t count) const { return {count, k}; }

  // Rows [row, end) times one tile, to y + row * stride.
  void multiply(const Rows4& x, int64_t row, int64_t end, int64_t tile, float* y, int64_t stride) const {
    const Group4* own = weights + tile * (k / kGroup);
    by_rows_at_once(row, end, [&](auto n, int64_t first) { product4<n>(x, first, own, y, stride); });
  }
};

struct Matrix8 {
  const int8_t* weights;
  const float* scales;  // [tiles, k / group, kChannels]
  int64_t tiles, k, group;

  Rows8 rows(int64_t count) const { return {count, k, group}; }

  void multiply(const Rows8& x, int64_t row, int64_t end, int64_t tile, float* y, int64_t stride) const {
    const int8_t* own = weights + tile * k * kChannels;
    const float* own_scales = scales + tile * (k / group) * kChannels;
    by_rows_at_once(row, end, [&](auto n, int64_t first) { product8<n>(x, first, own, own_scales, group, y, stride); });
  }
};

using Matrix = std::variant<Matrix4, Matrix8>;

inline int64_t num_tiles(const Matrix& matrix) {
  return std::visit([](const auto& m) { return m.tiles; }, matrix);
}

}  // namespace servekit
