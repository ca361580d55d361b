// Gate, score, bias, grouped top-k and weights of a batch of tokens in one call.
//   logits = x . gate (f32); scores = sigmoid or softmax of them; the CHOICE uses scores + bias, the WEIGHTS scores
//   groups: the best `top_groups` by the sum of their two best choices (their best one when there is no bias)
//   weights: over their sum when renormalised, times scale
// Ties go to the lowest index. A token with a NaN among its choices is dropped (ids -1, weights 0), and a choice of
// -inf drops that choice. Tokens are independent: the same bits in any batch and for any number of threads.
// Reads gate once a block of 16 tokens, writes T * (K * 8 + E * 4) bytes. Source: DeepSeek-V3 gate (arXiv 2412.19437, 2.1.2).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "thread_pool.h"

namespace moe_mk {
namespace {

constexpr int kTokens = 16, kExperts = 32;  // the largest task of dot products
constexpr int kFewest = 16;                 // with fewer, waking another thread takes longer than the work
constexpr int kTasksEach = 4;
constexpr int64_t kScoresEach = 2048;       // likewise, scores per thread

// Experts per task: fewer if the threads would have too few tasks for an even split.
int experts_per_task(const MoeMkRoute& c, int64_t token_blocks) {
  int size = kExperts;
  while (size > kFewest && token_blocks * ((c.num_experts + size - 1) / size) < int64_t(kTasksEach) * c.threads) size /= 2;
  return size;
}

void gate_logits(const MoeMkRoute& c, const Kernels& kernels, ThreadPoolLease& pool) {
  const int64_t token_blocks = (c.num_tokens + kTokens - 1) / kTokens;
  const int size = experts_per_task(c, token_blocks);
  const int64_t expert_blocks = (c.num_experts + size - 1) / size;
  const size_t element = c.gate_f32 ? 4 : 2;
  std::atomic<int64_t> next{0};
  pool->run(int(std::min<int64_t>(c.threads, token_blocks * expert_blocks)), [&](int) {
    for (int64_t task; (task = next.fetch_add(1)) < token_blocks * expert_blocks;) {
      const int64_t t0 = task / expert_blocks * kTokens, e0 = task % expert_blocks * size;
      const int tokens = int(std::min<int64_t>(kTokens, c.num_tokens - t0));
      const int experts = int(std::min<int64_t>(size, c.num_experts - e0));
      const uint16_t* x[kTokens];
      const void* gate[kExperts];
      for (int t = 0; t < tokens; ++t) x[t] = static_cast<const uint16_t*>(c.x) + (t0 + t) * c.x_stride;
      for (int e = 0; e < experts; ++e) gate[e] = static_cast<const uint8_t*>(c.gate) + (e0 + e) * c.gate_stride * element;
      kernels.gate_dots(x, tokens, gate, experts, c.gate_f32 != 0, c.hidden, c.logits + t0 * c.num_experts + e0, c.num_experts);
    }
  });
}

// Scores in f32, for the choice; returns the sum of the exponentials of a softmax.
float score(const MoeMkRoute& c, const float* logits, float* scores) {
  if (c.scoring == kSigmoid) {
    for (int e = 0; e < c.num_experts; ++e) scores[e] = logits[e] < -88.0f ? 0.0f : 1.0f / (1.0f + std::exp(-logits[e]));
    return 1;
  }
  const float most = *std::max_element(logits, logits + c.num_experts);
  float sum = 0;
  for (int e = 0; e < c.num_experts; ++e) sum += scores[e] = std::exp(logits[e] - most);
  for (int e = 0; e < c.num_experts; ++e) scores[e] /= sum;
  return sum;
}

// Scores in f64, from which weights are rounded once: within one ulp of f32, where an f32 softmax is up to 24 ulps off.
class ExactScores {
 public:
  ExactScores(const MoeMkRoute& c, const float* logits, float sum) : sigmoid_(c.scoring == kSigmoid), logits_(logits) {
    if (sigmoid_) return;
    most_ = *std::max_element(logits, logits + c.num_experts);
    // Renormalised weights do not depend on the sum, except through the epsilon, where f32 is exact enough.
    if (c.renormalize) sum_ = sum;
    else for (int e = 0; e < c.num_experts; ++e) sum_ += std::exp(double(logits[e]) - most_);
  }
  double operator()(int e) const {
    const double logit = logits_[e];
    if (sigmoid_) return logit < -88.0 ? 0.0 : 1.0 / (1.0 + std::exp(-logit));
    return std::exp(logit - most_) / sum_;
  }

 private:
  const bool sigmoid_;
  const float* logits_;
  double most_ = 0, sum_ = 0;
};

// The lowest index of the largest remaining value; -1: none remains.
int best_of(const float* values, const uint8_t* left, int count) {
  int best = -1;
  for (int i = 0; i < count; ++i)
    if (left[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

bool any_nan(const float* values, int count) {
  bool found = false;
  for (int i = 0; i < count; ++i) found |= values[i] != values[i];
  return found;
}

float group_value(const float* choice, int size, bool best_two) {
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int i = 0; i < size; ++i) {
    if (choice[i] > first) {
      second = first;
      first = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return best_two && size > 1 ? first + second : first;
}

struct ChoiceScratch {
  std::vector<float> scores, choice, groups;
  std::vector<double> chosen;
  std::vector<uint8_t> left, group_left;

  explicit ChoiceScratch(const MoeMkRoute& c)
      : scores(c.num_experts), choice(c.num_experts), groups(c.num_groups), chosen(c.top_k), left(c.num_experts),
        group_left(c.num_groups) {}
};

void choose(const MoeMkRoute& c, int64_t token, ChoiceScratch& d) {
  const float total = score(c, c.logits + token * c.num_experts, d.scores.data());
  for (int e = 0; e < c.num_experts; ++e) d.choice[e] = d.scores[e] + (c.bias == nullptr ? 0.0f : c.bias[e]);
  int32_t* ids = c.ids + token * c.top_k;
  float* weights = c.weights + token * c.top_k;
  if (any_nan(d.choice.data(), c.num_experts)) {
    std::fill(ids, ids + c.top_k, -1);
    std::fill(weights, weights + c.top_k, 0.0f);
    return;
  }
  const int size = c.num_experts / c.num_groups;
  std::fill(d.left.begin(), d.left.end(), uint8_t(c.top_groups >= c.num_groups));
  if (c.top_groups < c.num_groups) {
    for (int g = 0; g < c.num_groups; ++g) d.groups[g] = group_value(d.choice.data() + g * size, size, c.bias != nullptr);
    std::fill(d.group_left.begin(), d.group_left.end(), uint8_t(1));
    for (int i = 0; i < c.top_groups; ++i) {
      const int g = best_of(d.groups.data(), d.group_left.data(), c.num_groups);
      if (g < 0) break;
      d.group_left[g] = 0;
      std::fill(d.left.begin() + g * size, d.left.begin() + (g + 1) * size, uint8_t(1));
    }
  }
  const ExactScores exact(c, c.logits + token * c.num_experts, total);
  double sum = 0;
  for (int k = 0; k < c.top_k; ++k) {
    const int best = best_of(d.choice.data(), d.left.data(), c.num_experts);
    if (best >= 0) d.left[best] = 0;
    ids[k] = best >= 0 && d.choice[best] > -std::numeric_limits<float>::infinity() ? best : -1;
    d.chosen[k] = ids[k] < 0 ? 0.0 : exact(best);
    sum += d.chosen[k];
  }
  const double factor = c.renormalize ? c.scale / (sum + 1e-20) : c.scale;
  for (int k = 0; k < c.top_k; ++k) weights[k] = float(d.chosen[k] * factor);
}

// Chooses the experts of every token; tokens are distributed over the threads.
void choose_all(const MoeMkRoute& c, ThreadPoolLease& pool) {
  const int64_t worth = std::max<int64_t>(1, c.num_tokens * c.num_experts / kScoresEach);
  const int members = int(std::min<int64_t>({c.threads, c.num_tokens, worth}));
  std::vector<ChoiceScratch> scratch(static_cast<size_t>(members), ChoiceScratch(c));
  std::atomic<int64_t> next{0};
  pool->run(members, [&](int member) {
    for (int64_t token; (token = next.fetch_add(1)) < c.num_tokens;) choose(c, token, scratch[static_cast<size_t>(member)]);
  });
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_route(const MoeMkRoute* call) try {
  MoeMkRoute c = *call;
  c.threads = std::abs(c.threads);
  const Kernels* kernels = kernels_of(c.isa);
  if (kernels == nullptr) return kNoIsa;
  if (c.num_experts <= 0 || c.hidden <= 0 || c.num_groups <= 0 || c.num_experts % c.num_groups != 0 || c.top_k <= 0 ||
      c.top_k > c.num_experts || c.top_groups <= 0 || c.top_groups > c.num_groups || c.threads == 0)
    return kBadShape;
  if (c.num_tokens <= 0) return kOk;
  ThreadPoolLease pool(call->threads);
  gate_logits(c, *kernels, pool);
  choose_all(c, pool);
  return kOk;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
