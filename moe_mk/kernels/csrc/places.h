// From logical experts to physical ones, and to the slots of this rank: the step between the router and everything after it.
#pragma once
#include "abi.h"

namespace moe_mk {
namespace {

// Replaces every logical expert by its physical one, or by this rank's slot if `to_slots`, -1 for none and for experts of other
// ranks; then counts the choices. load null: nothing is counted. false: an id or a placement out of range, unless such ids are
// skipped as -1 is; nothing is counted then.
template <class Id>
bool place_and_count(const MoeMkLayer& layer, const Id* ids, int64_t choices, bool to_slots, bool skip, int64_t* load,
                     int32_t* places) {
  for (int64_t i = 0; i < choices; ++i) {
    const bool exists = ids[i] >= 0 && ids[i] < layer.route.num_experts;
    if (!exists && ids[i] != -1 && !skip) return false;
    const int32_t physical = exists ? layer.physical_of[ids[i]] : -1;
    if (physical >= layer.num_physical) return false;
    const bool is_here = physical >= 0 && layer.rank_of[physical] == layer.rank;
    places[i] = !to_slots ? physical : is_here ? layer.slot_of[physical] : -1;
  }
  for (int64_t i = 0; load != nullptr && i < choices; ++i)  // concurrent calls may count into the same tensor
    if (ids[i] >= 0 && ids[i] < layer.route.num_experts) __atomic_fetch_add(load + ids[i], 1, __ATOMIC_RELAXED);
  return true;
}

}  // namespace
}  // namespace moe_mk
