// A whole layer in one call: gate and routing, expert load, logical experts to slots, experts; or all but the first two.
// The steps between the parts touch a few hundred bytes. In Python, whose memory the experts' weights have just evicted from
// all caches, they took longer than the router. The threads stay awake from the first part on.
#include <algorithm>
#include <new>
#include <vector>

#include "thread_pool.h"

namespace {

// Replaces every logical expert by this rank's slot, -1 for none and for experts of other ranks; then counts the choices.
// false: an id out of range, unless those are skipped as -1 is; nothing is counted then.
template <class Id>
bool place_and_count(const MoeMkLayer& layer, const Id* ids, int64_t choices, bool skip, int64_t* load, int32_t* slots) {
  for (int64_t i = 0; i < choices; ++i) {
    const bool exists = ids[i] >= 0 && ids[i] < layer.route.num_experts;
    if (!exists && ids[i] != -1 && !skip) return false;
    const int32_t physical = exists ? layer.physical_of[ids[i]] : -1;
    if (physical >= layer.num_physical) return false;
    slots[i] = physical >= 0 && layer.rank_of[physical] == layer.rank ? layer.slot_of[physical] : -1;
  }
  for (int64_t i = 0; load != nullptr && i < choices; ++i)  // concurrent calls may count into the same tensor
    if (ids[i] >= 0 && ids[i] < layer.route.num_experts) __atomic_fetch_add(load + ids[i], 1, __ATOMIC_RELAXED);
  return true;
}

int32_t run_experts(const MoeMkLayer& layer, const void* x, int64_t num_tokens, int32_t top_k, const int32_t* slots,
                    const float* weights, void* out, int32_t threads) {
  MoeMkExperts experts = layer.experts;
  experts.x = x;
  experts.x_scales = nullptr;
  experts.ids = slots;
  experts.weights = weights;
  experts.out = out;
  experts.num_rows = num_tokens;
  experts.x_stride = experts.w13.num_inputs;
  experts.out_stride = experts.w2.num_outputs;
  experts.top_k = top_k;
  experts.threads = threads;
  return moe_mk_experts(&experts);
}

}  // namespace

int32_t moe_mk_layer(const MoeMkLayer* layer, const void* x, int64_t num_tokens, int64_t* load, int32_t* ids,
                     float* weights, void* out, int32_t threads) try {
  MoeMkRoute route = layer->route;
  if (num_tokens < 0 || route.top_k <= 0 || route.num_experts <= 0 || route.hidden != layer->experts.w13.num_inputs)
    return kBadShape;
  const int64_t choices = num_tokens * route.top_k;
  std::vector<int32_t> slots(static_cast<size_t>(choices)), own_ids(static_cast<size_t>(ids == nullptr ? choices : 0));
  std::vector<float> own_weights(static_cast<size_t>(weights == nullptr ? choices : 0));
  std::vector<float> logits(static_cast<size_t>(num_tokens * route.num_experts));
  route.x = x;
  route.ids = ids == nullptr ? own_ids.data() : ids;
  route.weights = weights == nullptr ? own_weights.data() : weights;
  route.logits = logits.data();
  route.num_tokens = num_tokens;
  route.x_stride = route.hidden;
  route.threads = threads;
  moe_mk::ThreadPoolLease pool(threads);
  const int32_t routed = moe_mk_route(&route);
  if (routed != kOk) return routed;
  if (!place_and_count(*layer, route.ids, choices, false, load, slots.data())) return kBadId;
  return run_experts(*layer, x, num_tokens, route.top_k, slots.data(), route.weights, out, threads);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

int32_t moe_mk_routed_layer(const MoeMkLayer* layer, const void* x, int64_t num_tokens, const void* ids,
                            const float* weights, int32_t top_k, int32_t wide_ids, int32_t skip, int64_t* load, void* out,
                            int32_t threads) try {
  if (num_tokens < 0 || top_k <= 0 || layer->route.num_experts <= 0) return kBadShape;
  const int64_t choices = num_tokens * top_k;
  std::vector<int32_t> slots(static_cast<size_t>(choices));
  const bool placed =
      wide_ids ? place_and_count(*layer, static_cast<const int64_t*>(ids), choices, skip != 0, load, slots.data())
               : place_and_count(*layer, static_cast<const int32_t*>(ids), choices, skip != 0, load, slots.data());
  if (!placed) return kBadId;
  return run_experts(*layer, x, num_tokens, top_k, slots.data(), weights, out, threads);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
