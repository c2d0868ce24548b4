// Which tokens of a row top-k, top-p and min-p leave; kernels/truncate.py says what they mean.
//
// Tokens are counted and weighed in buckets, by how far they lie below the most likely one. Only those of a bucket in
// which a limit lies are sorted and looked at one by one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace servekit {

struct SamplingLimits {
  int64_t top_k;
  double top_p, min_p;
};

class Truncation {
 public:
  explicit Truncation(int64_t vocab) : vocab_(vocab), bucket_of_(vocab) {}

  // Writes one row to `left`: its logits, and -infinity for the tokens that are not left.
  void row(const float* logits, double temperature, const SamplingLimits& limits, float* left) {
    logits_ = logits;
    temperature_ = temperature;
    if (limits.top_k >= vocab_ && limits.top_p >= 1.0 && limits.min_p <= 0.0)
      std::copy(logits, logits + vocab_, left);
    else {
      fill_buckets();
      keep(limits, left);
    }
  }

 private:
  static constexpr int kBuckets = 1024;
  static constexpr float kDepth = 24.0f;  // In a weight's logarithm. What lies deeper shares the last bucket.
  static constexpr double kRounding = 1e-6;

  void fill_buckets() {
    std::fill(counts_, counts_ + kBuckets, 0);
    std::fill(weights_, weights_ + kBuckets, 0.0);
    peak_ = *std::max_element(logits_, logits_ + vocab_);
    const float inverse = float(std::clamp(1.0 / temperature_, 1e-30, 1e30));  // Not 0: -infinity times it has a sign.
    const floats last = splat(float(kBuckets - 1));
    for (int64_t first = 0; first < vocab_; first += kLanes) {
      const int lanes = int(std::min<int64_t>(kLanes, vocab_ - first));
      floats x = splat(-std::numeric_limits<float>::infinity());
      std::memcpy(&x, logits_ + first, lanes * sizeof(float));
      const floats scaled = (x - peak_) * inverse;
      const floats depth = scaled * -(kBuckets / kDepth);
      const ints bucket = __builtin_convertvector(depth < last ? depth : last, ints);  // NaN: the last one.
      const floats weight = exponential(scaled);
      for (int lane = 0; lane < lanes; ++lane) {
        bucket_of_.data()[first + lane] = uint16_t(bucket[lane]);
        ++counts_[bucket[lane]];
        weights_[bucket[lane]] += weight[lane];
      }
    }
  }

  void keep(const SamplingLimits& limits, float* left) {
    const double wanted =
        limits.top_p < 1.0 ? limits.top_p * weight_of_largest(limits.top_k) : std::numeric_limits<double>::infinity();
    int64_t num_kept = 0;
    double weight = 0.0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      if (counts_[bucket] == 0) continue;
      const double own = weights_[bucket];
      if (num_kept + counts_[bucket] <= limits.top_k && (weight + own) * (1.0 + kRounding) < wanted &&
          least_weight(bucket) >= limits.min_p) {
        num_kept += counts_[bucket];
        weight += own;
        continue;
      }
      const std::vector<int32_t> tokens = sorted(bucket, limits.top_k - num_kept);
      size_t count = 0;
      for (; count < tokens.size(); ++count, ++num_kept) {
        const double next = weight_of(tokens[count]);
        if (num_kept > 0 && (num_kept == limits.top_k || weight >= wanted || next < limits.min_p)) break;
        weight += next;
      }
      if (count < tokens.size()) return write(bucket, tokens, count, left);
    }
    std::copy(logits_, logits_ + vocab_, left);
  }

  // The sum of the `count` largest weights.
  double weight_of_largest(int64_t count) const {
    double weight = 0.0;
    for (int bucket = 0; bucket < kBuckets && count > 0; count -= counts_[bucket++]) {
      if (counts_[bucket] <= count) {
        weight += weights_[bucket];
        continue;
      }
      const std::vector<int32_t> tokens = sorted(bucket, count);
      for (int64_t i = 0; i < count; ++i) weight += weight_of(tokens[i]);
    }
    return weight;
  }

  // No token of the bucket weighs less; 0 for the last one, which has no end.
  static double least_weight(int bucket) {
    return bucket == kBuckets - 1 ? 0.0 : std::exp(-double(kDepth) / kBuckets * (bucket + 1)) * (1.0 - kRounding);
  }

  double weight_of(int32_t token) const { return std::exp((double(logits_[token]) - double(peak_)) / temperature_); }

  // The tokens of a bucket: first its `most` most likely ones, the likeliest first, equal ones by their ids.
  std::vector<int32_t> sorted(int bucket, int64_t most) const {
    std::vector<int32_t> tokens;
    tokens.reserve(counts_[bucket]);
    for (int64_t i = 0; i < vocab_; ++i)
      if (bucket_of_.data()[i] == bucket) tokens.push_back(int32_t(i));
    std::partial_sort(tokens.begin(), tokens.begin() + std::min<int64_t>(most, tokens.size()), tokens.end(),
                      [this](int32_t a, int32_t b) {
                        return logits_[a] > logits_[b] || (logits_[a] == logits_[b] && a < b);
                      });
    return tokens;
  }

  // Leaves the buckets before this one, and the first `count` of its tokens.
  void write(int bucket, const std::vector<int32_t>& tokens, size_t count, float* left) const {
    const uint16_t* own = bucket_of_.data();
    for (int64_t i = 0; i < vocab_; ++i)
      left[i] = own[i] < bucket ? logits_[i] : -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < count; ++i) left[tokens[i]] = logits_[tokens[i]];
  }

  int64_t vocab_;
  Buffer<uint16_t> bucket_of_;
  int32_t counts_[kBuckets];
  double weights_[kBuckets];
  const float* logits_ = nullptr;
  double temperature_ = 1.0;
  float peak_ = 0.0f;
};

}  // namespace servekit
