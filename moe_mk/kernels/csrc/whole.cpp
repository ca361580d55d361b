// A whole layer in one call: gate and routing, expert load, logical experts to slots, experts; or all but the first two.
// The steps between the parts touch a few hundred bytes. In Python, whose memory the experts' weights have just evicted from
// all caches, they took longer than the router. The threads stay awake from the first part on.
#include <new>
#include <vector>

#include "places.h"
#include "thread_pool.h"

int32_t moe_mk_layer(const MoeMkLayer* layer, const void* x, int64_t num_tokens, int32_t given, void* ids, float* weights,
                     int32_t top_k, int64_t* load, void* out, int32_t threads) try {
  MoeMkRoute route = layer->route;
  const bool is_routed = (given & kGivenIds) != 0;
  if (!is_routed) top_k = route.top_k;
  if (num_tokens < 0 || top_k <= 0 || route.num_experts <= 0) return kBadShape;
  if (!is_routed && route.hidden != layer->experts.w13.num_inputs) return kBadShape;
  const int64_t choices = num_tokens * top_k;
  const size_t room = is_routed || (ids != nullptr && weights != nullptr) ? 0 : size_t(choices);
  std::vector<int32_t> slots(static_cast<size_t>(choices)), own_ids(room);
  std::vector<float> own_weights(room), logits(is_routed ? 0 : size_t(num_tokens * route.num_experts));
  if (room != 0) ids = own_ids.data(), weights = own_weights.data();
  moe_mk::ThreadPoolLease pool(threads);
  if (!is_routed) {
    route.x = x;
    route.ids = static_cast<int32_t*>(ids);
    route.weights = weights;
    route.logits = logits.data();
    route.num_tokens = num_tokens;
    route.x_stride = route.hidden;
    route.threads = threads;
    if (const int32_t routed = moe_mk_route(&route); routed != kOk) return routed;
  }
  const bool skip = (given & kSkipOthers) != 0;
  const bool placed =
      (given & kWideIds) != 0
          ? moe_mk::place_and_count(*layer, static_cast<const int64_t*>(ids), choices, true, skip, load, slots.data())
          : moe_mk::place_and_count(*layer, static_cast<const int32_t*>(ids), choices, true, skip, load, slots.data());
  if (!placed) return kBadId;
  MoeMkExperts experts = layer->experts;
  experts.x = x;
  experts.x_scales = nullptr;
  experts.ids = slots.data();
  experts.weights = weights;
  experts.out = out;
  experts.num_rows = num_tokens;
  experts.x_stride = experts.w13.num_inputs;
  experts.out_stride = experts.w2.num_outputs;
  experts.top_k = top_k;
  experts.threads = threads;
  return moe_mk_experts(&experts);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
