// A whole layer in one call: gate and routing, expert load, logical experts to slots, experts.
// The steps between the parts touch a few hundred bytes. In Python, whose memory the experts' weights have just evicted from
// all caches, they took longer than the router. The threads stay awake from the first part on.
#include <algorithm>
#include <new>
#include <vector>

#include "abi.h"

namespace {

// Counts every choice and replaces it by this rank's slot, -1 for experts of other ranks. false: an id out of range.
bool count_and_place(const MoeMkLayer& layer, int64_t choices, int64_t* load, int32_t* ids) {
  for (int64_t i = 0; i < choices; ++i) {
    if (ids[i] < 0) continue;
    // Concurrent calls may count into the same tensor.
    __atomic_fetch_add(load + ids[i], 1, __ATOMIC_RELAXED);
    const int32_t physical = layer.physical_of[ids[i]];
    if (physical >= layer.num_physical) return false;
    ids[i] = physical >= 0 && layer.rank_of[physical] == layer.rank ? layer.slot_of[physical] : -1;
  }
  return true;
}

}  // namespace

int32_t moe_mk_layer(const MoeMkLayer* layer, const void* x, int64_t num_tokens, int64_t* load, void* out,
                     int32_t threads) try {
  MoeMkRoute route = layer->route;
  MoeMkExperts experts = layer->experts;
  if (num_tokens < 0 || route.top_k <= 0 || route.num_experts <= 0 || route.hidden != experts.w13.num_inputs) return kBadShape;
  const int64_t choices = num_tokens * route.top_k;
  std::vector<int32_t> ids(static_cast<size_t>(choices));
  std::vector<float> weights(static_cast<size_t>(choices)), logits(static_cast<size_t>(num_tokens * route.num_experts));
  route.x = x;
  route.ids = ids.data();
  route.weights = weights.data();
  route.logits = logits.data();
  route.num_tokens = num_tokens;
  route.x_stride = route.hidden;
  route.threads = threads;
  const int32_t routed = moe_mk_route(&route);
  if (routed != kOk) return routed;
  if (!count_and_place(*layer, choices, load, ids.data())) return kBadId;
  experts.x = x;
  experts.x_scales = nullptr;
  experts.ids = ids.data();
  experts.weights = weights.data();
  experts.out = out;
  experts.num_rows = num_tokens;
  experts.x_stride = route.hidden;
  experts.out_stride = experts.w2.num_outputs;
  experts.top_k = route.top_k;
  experts.threads = threads;
  return moe_mk_experts(&experts);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
