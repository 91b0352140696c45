// Of equal scores the lower id is the better one, everywhere.

#include "topk_routing/cpu.h"

#include <cmath>
#include <limits>
#include <vector>

#include "native/parallel.h"
#include "native/rows.h"

namespace moeserve {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Scratch {
  std::vector<float> scores, choice, group_scores, best;
  std::vector<int64_t> best_ids;

  // Padded, so that vectors may run over the end.
  explicit Scratch(const TopkRouting& p)
      : scores(p.num_experts + Vec::kWidth),
        choice(p.num_experts + Vec::kWidth),
        group_scores(p.num_groups),
        best(std::max(p.top_k, p.num_groups)),
        best_ids(std::max(p.top_k, p.num_groups)) {}
};

// The `count` best of values[0..size), in order, by insertion; count <= size.
void find_best(const float* values, int64_t size, int64_t count, float* best, int64_t* ids) {
  int64_t filled = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float value = values[i];
    if (filled == count && !(value > best[count - 1])) continue;
    int64_t place = filled < count ? filled++ : count - 1;
    for (; place > 0 && value > best[place - 1]; --place) {
      best[place] = best[place - 1];
      ids[place] = ids[place - 1];
    }
    best[place] = value;
    ids[place] = i;
  }
}

float find_largest(const float* values, int64_t size) {
  float largest = values[0];
  for (int64_t i = 1; i < size; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

void softmax(float* values, int64_t size) {
  const Vec largest(find_largest(values, size));
  Vec sum(0.0f);
  int64_t i = 0;
  for (; i + Vec::kWidth <= size; i += Vec::kWidth) {
    const Vec power = exp(Vec::load(values + i) - largest);
    power.store(values + i);
    sum = sum + power;
  }
  if (i < size) {
    const int count = static_cast<int>(size - i);
    const Vec power = exp(load_part(values + i, count, -kInfinity) - largest);
    store_part(power, values + i, count);
    sum = sum + power;
  }
  const float total = reduce_add(sum);
  for (int64_t j = 0; j < size; ++j) values[j] /= total;
}

void sigmoids(float* values, int64_t padded_size) {
  for (int64_t i = 0; i < padded_size; i += Vec::kWidth) sigmoid(Vec::load(values + i)).store(values + i);
}

// -infinity for the choice of every expert outside the best groups.
void mask_groups(const TopkRouting& p, Scratch& s) {
  const int64_t group_size = p.num_experts / p.num_groups;
  for (int64_t group = 0; group < p.num_groups; ++group) {
    float best = -kInfinity, second = -kInfinity;
    for (int64_t i = group * group_size; i < (group + 1) * group_size; ++i) {
      const float value = s.choice[i];
      second = value > best ? best : value > second ? value : second;
      best = value > best ? value : best;
    }
    s.group_scores[group] = p.num_scores_of_group == 1 ? best : best + second;
  }
  find_best(s.group_scores.data(), p.num_groups, p.num_selected_groups, s.best.data(), s.best_ids.data());
  std::fill(s.group_scores.begin(), s.group_scores.end(), 0.0f);
  for (int64_t i = 0; i < p.num_selected_groups; ++i) s.group_scores[s.best_ids[i]] = 1.0f;
  for (int64_t i = 0; i < p.num_experts; ++i) {
    if (s.group_scores[i / group_size] == 0.0f) s.choice[i] = -kInfinity;
  }
}

template <class T>
void route_token(const TopkRouting& p, int64_t token, Scratch& s) {
  widen_row(static_cast<const T*>(p.logits) + token * p.row_stride, p.num_experts, s.scores.data());
  if (p.scoring == Scoring::kSoftmax) softmax(s.scores.data(), p.num_experts);
  if (p.scoring == Scoring::kSigmoid) sigmoids(s.scores.data(), p.num_experts);
  for (int64_t i = 0; i < p.num_experts; ++i) {
    s.choice[i] = p.correction_bias == nullptr ? s.scores[i] : s.scores[i] + p.correction_bias[i];
  }
  if (p.num_groups > 1) mask_groups(p, s);

  int64_t* ids = p.expert_ids + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  find_best(s.choice.data(), p.num_experts, p.top_k, s.best.data(), ids);
  for (int64_t k = 0; k < p.top_k; ++k) weights[k] = s.scores[ids[k]];
  if (p.scoring == Scoring::kTopkSoftmax) softmax(weights, p.top_k);
  float sum = 0.0f;
  for (int64_t k = 0; k < p.top_k; ++k) sum += weights[k];
  // Sigmoids may all be 0.
  const float factor = p.renormalize ? p.scaling_factor / (sum + 1e-20f) : p.scaling_factor;
  for (int64_t k = 0; k < p.top_k; ++k) weights[k] *= factor;
}

}  // namespace

void topk_routing(const TopkRouting& p) {
  const int64_t grain = 1 + 8192 / p.num_experts;
  parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch(p);
    with_float_type(p.dtype, [&](auto type) {
      for (int64_t token = begin; token < end; ++token) route_token<decltype(type)>(p, token, scratch);
    });
  });
  if (p.load == nullptr) return;
  for (int64_t i = 0; i < p.num_counted_tokens * p.top_k; ++i) ++p.load[p.expert_ids[i]];
}

}  // namespace moeserve
