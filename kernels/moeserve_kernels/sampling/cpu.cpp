// Sampling by the Gumbel-max trick, a row at a time; the loops over tokens are plain, for the compiler to vectorise.
//
// The noise of most tokens decides nothing: all of it is computed in float32, to about 1e-6, and only the tokens within
// kMargin of the best score are judged again by the definition of the noise (float64 up to the first logarithm).

#include "sampling/cpu.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "native/parallel.h"
#include "native/simd.h"

namespace moeserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 64;

// ---- noise: splitmix64 of (seed, position, token id), then -log(-log(u)) ----

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int kDroppedBits = 12;  // 52 bits stay: (k + 1/2) / 2^52 is exact in float64 and never 0 or 1
constexpr double kUniformStep = 0x1p-52;
constexpr float kNoiseRange = 41.0f;  // the largest noise is 36.7, the smallest -3.6

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t noise_key(int64_t seed, int64_t position) {
  return mix(mix(static_cast<uint64_t>(seed) + kGolden) + static_cast<uint64_t>(position) * kGolden);
}

inline uint64_t noise_bits(uint64_t key, int64_t token_id) {
  return mix(key + static_cast<uint64_t>(token_id + 1) * kGolden) >> kDroppedBits;
}

float exact_noise(uint64_t key, int64_t token_id) {
  const double uniform = (static_cast<double>(noise_bits(key, token_id)) + 0.5) * kUniformStep;
  return -std::log(static_cast<float>(-std::log(uniform)));
}

// log(x) of a normal x > 0; minus_one is x - 1, which counts where x is near 1. Polynomial: Cephes' logf.
inline float approximate_log(float x, float minus_one) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // the mantissa is in [sqrt(1/2), sqrt(2))
  const float mantissa = std::bit_cast<float>(bits - (exponent << 23));
  const float r = exponent == 0 ? minus_one : mantissa - 1.0f;
  const float square = r * r;
  float y = 7.0376836292e-2f;
  y = y * r - 1.1514610310e-1f;
  y = y * r + 1.1676998740e-1f;
  y = y * r - 1.2420140846e-1f;
  y = y * r + 1.4249322787e-1f;
  y = y * r - 1.6668057665e-1f;
  y = y * r + 2.0000714765e-1f;
  y = y * r - 2.4999993993e-1f;
  y = y * r + 3.3333331174e-1f;
  return (y * r * square - 0.5f * square) + r + static_cast<float>(exponent) * 0.69314718056f;
}

// scores += noise, for kBlock tokens.
void add_approximate_noise(uint64_t key, const int32_t* token_ids, float* scores) {
  float uniform[kBlock], below_one[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint64_t bits = noise_bits(key, token_ids[i]);
    // 2^52 with these bits as its mantissa, minus 2^52: a conversion that every instruction set vectorises.
    const double number = std::bit_cast<double>(bits | 0x4330000000000000u) - 0x1p52;
    const double u = (number + 0.5) * kUniformStep;
    uniform[i] = static_cast<float>(u);
    below_one[i] = static_cast<float>(u - 1.0);
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    const float exponential = -approximate_log(uniform[i], below_one[i]);
    scores[i] -= approximate_log(exponential, exponential - 1.0f);
  }
}

// ---- rows ----

struct Scratch {
  std::vector<float> scaled, powers, scores;
  std::vector<int32_t> token_ids;
  std::vector<std::pair<float, int32_t>> bin;

  explicit Scratch(int64_t vocab_size) {
    const int64_t size = (vocab_size + kBlock - 1) / kBlock * kBlock;
    scaled.resize(size);
    powers.resize(size);
    scores.resize(size);
    token_ids.resize(size);
  }
};

float largest(const float* values, int64_t size) {
  constexpr int kLanes = 16;
  float best[kLanes];
  std::fill(best, best + kLanes, -kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) best[lane] = values[i + lane] > best[lane] ? values[i + lane] : best[lane];
  }
  for (; i < size; ++i) best[0] = values[i] > best[0] ? values[i] : best[0];
  return *std::max_element(best, best + kLanes);
}

// The lowest of the best tokens; 0 where no logit is a number.
int64_t argmax(const float* logits, int64_t vocab_size) {
  const float best = largest(logits, vocab_size);
  const float* found = std::find(logits, logits + vocab_size, best);
  return found == logits + vocab_size ? 0 : found - logits;
}

// What top_k and top_p leave: tokens above `value`, and of those equal to it the ids up to `last_id`.
struct Cut {
  float value = -kInfinity;
  int64_t last_id = std::numeric_limits<int64_t>::max();
};

// Tokens by their distance from the best one, so that only the bin where the cut lies has to be sorted.
class Histogram {
 public:
  static constexpr int kNumBins = 1024;

  Histogram(const float* scaled, const float* powers, int64_t vocab_size, float best) : scaled_(scaled), best_(best) {
    for (int64_t i = 0; i < vocab_size; ++i) {
      const int bin = bin_of(scaled[i]);
      ++counts_[bin];
      masses_[bin] += powers[i];
    }
  }

  int64_t count(int bin) const { return counts_[bin]; }
  double mass(int bin) const { return masses_[bin]; }

  // (logit, id) of the tokens in the bin, best first.
  void sort_bin(int bin, int64_t vocab_size, std::vector<std::pair<float, int32_t>>& out) const {
    out.clear();
    for (int64_t i = 0; i < vocab_size; ++i) {
      if (bin_of(scaled_[i]) == bin) out.emplace_back(scaled_[i], static_cast<int32_t>(i));
    }
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    });
  }

 private:
  static constexpr float kBinsPerUnit = 32.0f;

  int bin_of(float value) const {
    const float place = (best_ - value) * kBinsPerUnit;
    return place < static_cast<float>(kNumBins - 1) ? static_cast<int>(place) : kNumBins - 1;
  }

  const float* scaled_;
  float best_;
  int64_t counts_[kNumBins] = {};
  double masses_[kNumBins] = {};
};

void compute_powers(const float* scaled, int64_t vocab_size, float best, float* powers) {
  const Vec shift(best);
  int64_t i = 0;
  for (; i + Vec::kWidth <= vocab_size; i += Vec::kWidth) exp(Vec::load(scaled + i) - shift).store(powers + i);
  for (; i < vocab_size; ++i) powers[i] = std::exp(scaled[i] - best);
}

Cut find_cut(int64_t vocab_size, float best, int64_t top_k, float top_p, Scratch& scratch) {
  const float* scaled = scratch.scaled.data();
  compute_powers(scaled, vocab_size, best, scratch.powers.data());
  const Histogram histogram(scaled, scratch.powers.data(), vocab_size, best);
  const int64_t limit = top_k > 0 ? std::min(top_k, vocab_size) : vocab_size;

  // The bin of the last token of top_k, how many of its tokens are in, and the mass of all tokens that are.
  int last_bin = 0;
  int64_t num_left = limit;
  double total = 0.0;
  while (last_bin < Histogram::kNumBins - 1 && num_left > histogram.count(last_bin)) {
    num_left -= histogram.count(last_bin);
    total += histogram.mass(last_bin);
    ++last_bin;
  }
  if (limit < vocab_size) {
    histogram.sort_bin(last_bin, vocab_size, scratch.bin);
    for (int64_t i = 0; i < num_left; ++i) total += scratch.powers[scratch.bin[i].second];
  } else {
    total += histogram.mass(last_bin);
  }

  // The bin where the mass of top_p is reached.
  int bin = 0;
  double mass = 0.0;
  if (top_p < 1.0f) {
    while (bin < last_bin && (mass + histogram.mass(bin)) / total < top_p) mass += histogram.mass(bin++);
  } else {
    bin = last_bin;
  }
  if (top_p >= 1.0f && limit == vocab_size) return Cut{};
  if (bin < last_bin || limit == vocab_size) histogram.sort_bin(bin, vocab_size, scratch.bin);
  const int64_t most = bin == last_bin ? num_left : histogram.count(bin);
  int64_t num_kept = 0;
  while (num_kept < most && (top_p >= 1.0f || mass / total < top_p)) {
    mass += scratch.powers[scratch.bin[num_kept++].second];
  }
  const auto& last = scratch.bin[std::max<int64_t>(num_kept, 1) - 1];
  return Cut{last.first, last.second};
}

// Packs the tokens that can be drawn to the front of token_ids and scores, padded to whole blocks; returns their number.
int64_t gather_candidates(int64_t vocab_size, const Cut& cut, float floor, Scratch& scratch) {
  int32_t* token_ids = scratch.token_ids.data();
  float* scores = scratch.scores.data();
  int64_t count = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    const float value = scratch.scaled[i];
    token_ids[count] = static_cast<int32_t>(i);
    scores[count] = value;
    // Without branches: which tokens stay cannot be predicted.
    count += ((value > cut.value) | ((value == cut.value) & (i <= cut.last_id))) & (value >= floor);
  }
  for (int64_t i = count; i % kBlock != 0; ++i) {
    token_ids[i] = 0;
    scores[i] = -kInfinity;
  }
  return count;
}

int64_t draw(uint64_t key, int64_t num_candidates, Scratch& scratch) {
  const int32_t* token_ids = scratch.token_ids.data();
  float* scores = scratch.scores.data();
  for (int64_t i = 0; i < num_candidates; i += kBlock) add_approximate_noise(key, token_ids + i, scores + i);
  const float best = largest(scores, num_candidates);
  const float margin = 1e-4f + 1e-6f * std::abs(best);
  int64_t winner = 0, num_near = 0;
  float winning = -kInfinity;
  for (int64_t i = 0; i < num_candidates; ++i) {
    if (!(scores[i] >= best - margin)) continue;
    const float score = scratch.scaled[token_ids[i]] + exact_noise(key, token_ids[i]);
    if (num_near++ == 0 || score > winning) {
      winning = score;
      winner = token_ids[i];
    }
  }
  return winner;
}

int64_t sample_row(const float* logits, int64_t vocab_size, const SamplingSettings& settings, int64_t row,
                   Scratch& scratch) {
  const float temperature = settings.temperature[row];
  if (!(temperature > 0.0f)) return argmax(logits, vocab_size);
  for (int64_t i = 0; i < vocab_size; ++i) scratch.scaled[i] = logits[i] / temperature;
  const float best = largest(scratch.scaled.data(), vocab_size);
  const int64_t top_k = settings.top_k[row];
  const float top_p = settings.top_p[row], min_p = settings.min_p[row];
  Cut cut;
  if ((top_k > 0 && top_k < vocab_size) || top_p < 1.0f) cut = find_cut(vocab_size, best, top_k, top_p, scratch);
  float floor = best - kNoiseRange;
  if (min_p > 0.0f) floor = std::max(floor, best + std::log(min_p));
  const int64_t num_candidates = gather_candidates(vocab_size, cut, floor, scratch);
  return draw(noise_key(settings.seed[row], settings.position[row]), num_candidates, scratch);
}

}  // namespace

void sample(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
            const SamplingSettings& settings, int64_t* token_ids) {
  parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(vocab_size);
    for (int64_t row = begin; row < end; ++row) {
      token_ids[row] = sample_row(logits + row * row_stride, vocab_size, settings, row, scratch);
    }
  });
}

void apply_penalties(float* logits, int64_t vocab_size, int64_t row_stride, const Penalties& penalties) {
  parallel_for(0, penalties.num_penalised, 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> output_counts(vocab_size, -1);  // -1: not seen
    for (int64_t i = begin; i < end; ++i) {
      float* row = logits + penalties.rows[i] * row_stride;
      const int64_t* first = penalties.token_ids + penalties.start_loc[i];
      const int64_t* last = penalties.token_ids + penalties.start_loc[i + 1];
      const int64_t* output = first + penalties.num_prompt_tokens[i];
      for (const int64_t* token = first; token < last; ++token) {
        if (*token < 0 || *token >= vocab_size) continue;
        int32_t& count = output_counts[*token];
        count = std::max(count, 0) + (token >= output);
      }
      for (const int64_t* token = first; token < last; ++token) {
        if (*token < 0 || *token >= vocab_size || output_counts[*token] < 0) continue;
        const int32_t count = std::exchange(output_counts[*token], -1);
        float& logit = row[*token];
        logit = logit > 0.0f ? logit / penalties.repetition[i] : logit * penalties.repetition[i];
        logit = logit - penalties.frequency[i] * static_cast<float>(count);
        logit = logit - penalties.presence[i] * static_cast<float>(count > 0);
      }
    }
  });
}

}  // namespace moeserve
