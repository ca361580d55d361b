// A whole layer in one call: routing, expert load, logical experts to slots or physical ones, dispatch, experts, combine and
// shared experts (exchange.h). On one rank nothing is exchanged. The stages are the functions of route.cpp, exchange.cpp and
// experts.cpp, so results are theirs, bit for bit. In Python, the steps between
// them took several times as long as the experts of a small layer: reading the weights evicts the interpreter from the caches.
#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "exchange.h"
#include "kernels.h"
#include "thread_pool.h"

namespace moe_mk {
namespace {

constexpr int64_t kBytesForThreads = 1 << 20;  // calls that move fewer bytes use one thread: waking a second one takes longer

bool is_alone(const MoeMkLayer& call) { return call.windows == nullptr; }

float widen(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void add(int64_t* counter, int64_t value) { __atomic_fetch_add(counter, value, __ATOMIC_RELAXED); }

void ran(const MoeMkLayer& call, LayerWork work, int64_t rows) {
  if (call.ran == nullptr) return;
  add(call.ran + 2 * work, 1);
  add(call.ran + 2 * work + 1, rows);
}

int32_t route_tokens(MoeMkLayer& call) {
  MoeMkRoute route = *call.route;
  route.x = call.x;
  route.x_stride = route.hidden;
  route.num_tokens = call.num_tokens;
  route.ids = static_cast<int32_t*>(call.ids);
  route.weights = call.weights;
  route.logits = call.logits;
  route.threads = call.threads;
  return moe_mk_route(&route);
}

template <class Kept, class Id>
void write_choices(const MoeMkLayer& call, int64_t row) {
  for (int64_t t = 0; t < call.num_tokens; ++t) {
    Kept* kept = static_cast<Kept*>(call.captured->ids) + (row + t) * call.captured->stride;
    for (int k = 0; k < call.top_k; ++k) kept[k] = Kept(static_cast<const Id*>(call.ids)[t * call.top_k + k]);
  }
}

template <class Id>
bool capture(const MoeMkLayer& call) {
  MoeMkCapture& kept = *call.captured;
  const int64_t row = __atomic_fetch_add(&kept.num_tokens, call.num_tokens, __ATOMIC_RELAXED);
  if (row + call.num_tokens > kept.room || kept.top_k != call.top_k) {
    add(&kept.num_tokens, -call.num_tokens);
    return false;
  }
  kept.id_bytes == 1 ? write_choices<uint8_t, Id>(call, row) : write_choices<uint16_t, Id>(call, row);
  return true;
}

// Replaces every logical expert by its physical one, on one rank by its slot; -1 for none, and for experts of other ranks of
// which this rank holds a part only. Then keeps and counts the choices.
template <class Id>
int32_t place_tokens(MoeMkLayer& call) {
  const Id* ids = static_cast<const Id*>(call.ids);
  const int64_t choices = call.num_tokens * call.top_k;
  const bool skip = (call.form & kSkipOthers) != 0;
  for (int64_t i = 0; i < choices; ++i) {
    const bool exists = ids[i] >= 0 && ids[i] < call.num_experts;
    if (!exists && ids[i] != -1 && !skip) return kBadId;
    const int32_t physical = exists ? call.physical_of[ids[i]] : -1;
    if (physical >= call.num_physical) return kBadId;
    const bool is_here = physical >= 0 && call.rank_of[physical] == call.rank;
    call.places[i] = !is_alone(call) ? physical : is_here ? call.slot_of[physical] : -1;
  }
  if (call.captured != nullptr && !capture<Id>(call)) return kBadShape;
  for (int64_t i = 0; call.load != nullptr && i < choices; ++i)  // concurrent calls may count into the same tensor
    if (ids[i] >= 0 && ids[i] < call.num_experts) add(call.load + ids[i], 1);
  if (!is_alone(call)) call.send->ids = call.places;
  return kOk;
}

void count(MoeMkLayer& call, const int64_t* rows, int half) {
  const int ranks = call.windows->num_ranks;
  for (int rank = 0; rank < ranks; ++rank) call.moved[half * ranks + rank] += rows[rank];
  call.moved[2 * ranks + half] += 1;
}

int32_t dispatch_rows(MoeMkLayer& call) {
  if (!is_alone(call)) {
    if (const int32_t status = moe_mk_exchange_dispatch(call.windows, call.send); status != kOk) return status;
    if (!call.send->sent) return kOk;
    count(call, call.send->counts, 0);
  }
  ran(call, kDispatches, call.num_tokens);
  return kOk;
}

int32_t run_on(MoeMkLayer& call, MoeMkExperts& experts, LayerWork work) {
  experts.x_stride = experts.w13.num_inputs;
  experts.out_stride = experts.w2.num_outputs;
  experts.threads = call.threads;
  const int32_t status = moe_mk_experts(&experts);
  if (status == kOk) ran(call, work, experts.num_rows);
  return status;
}

int32_t run_shared(MoeMkLayer& call) {
  MoeMkExperts experts = *call.shared;
  const std::vector<int32_t> slots(size_t(call.num_tokens));
  experts.x = call.x;
  experts.ids = slots.data();
  experts.weights = call.shared_weights;
  experts.out = call.shared_out;
  experts.num_rows = call.num_tokens;
  experts.top_k = 1;
  return run_on(call, experts, kSharedRuns);
}

int32_t await_rows(MoeMkLayer& call) {
  call.received[call.windows->rank] = call.send->counts[call.windows->rank];
  return moe_mk_exchange_await(call.windows, 0, call.send->epoch, call.microseconds, call.received);
}

int64_t first_received(const MoeMkLayer& call) {
  return call.seam_row - std::accumulate(call.received, call.received + call.left + 1, int64_t(0));
}

bool has_room(MoeMkLayer& call) {
  call.total = std::accumulate(call.received, call.received + call.windows->num_ranks, int64_t(0));
  if (call.total > call.row_room || call.total > call.sums_room) return false;
  const int64_t first = first_received(call);
  return call.windows->num_ranks == 2 || (call.first_row <= first && first + call.total <= call.end_row);
}

int32_t receive_rows(MoeMkLayer& call) {
  MoeMkReceive* receive = call.receive;
  receive->values = call.values + first_received(call) * receive->value_bytes;
  return moe_mk_exchange_receive(call.windows, receive);
}

int32_t run_experts(MoeMkLayer& call) {
  MoeMkExperts experts = *call.experts;
  experts.top_k = call.top_k;
  if (is_alone(call)) {
    experts.x = call.x;
    experts.ids = call.places;
    experts.weights = call.weights;
    experts.out = call.out;
    experts.num_rows = call.num_tokens;
  } else {
    const MoeMkReceive& rows = *call.receive;
    experts.x = rows.values;
    experts.x_scales = rows.scale_bytes == 0 ? nullptr : reinterpret_cast<const float*>(rows.scales);
    experts.x_scale_stride = rows.scale_bytes / 4;
    experts.ids = reinterpret_cast<const int32_t*>(rows.ids);
    experts.weights = reinterpret_cast<const float*>(rows.weights);
    experts.out = call.sums;
    experts.num_rows = call.total;
  }
  return run_on(call, experts, kExpertRuns);
}

int32_t add_sums(MoeMkLayer& call) {
  if (!is_alone(call)) {
    MoeMkAddUp* add_up = call.add_up;
    const int64_t row_bytes = add_up->columns * (add_up->row_type == kRowsF32 ? 4 : 2);
    add_up->own = call.sums + std::accumulate(call.received, call.received + call.windows->rank, int64_t(0)) * row_bytes;
    if (const int32_t status = moe_mk_exchange_add_up(call.windows, add_up); status != kOk) return status;
  }
  ran(call, kCombines, call.num_tokens);
  return kOk;
}

// out = out + the output of the shared experts, in f32, rounded once.
int32_t add_shared(MoeMkLayer& call) {
  constexpr int64_t kColumns = 512;
  const Kernels* kernels = kernels_of(call.shared->isa);
  if (kernels == nullptr) return kNoIsa;
  auto* out = static_cast<uint16_t*>(call.out);
  const int64_t size = call.num_tokens * call.shared->w2.num_outputs;
  for (int64_t at = 0; at < size; at += kColumns) {
    const int64_t columns = std::min(kColumns, size - at);
    float sums[kColumns];
    for (int64_t i = 0; i < columns; ++i) sums[i] = widen(out[at + i]) + widen(call.shared_out[at + i]);
    kernels->to_bf16(sums, out + at, columns);
  }
  kernels->leave();
  return kOk;
}

int32_t run_stage(MoeMkLayer& call) {
  switch (call.stage) {
    case kRouteTokens: return route_tokens(call);
    case kPlaceTokens: return (call.form & kWideIds) != 0 ? place_tokens<int64_t>(call) : place_tokens<int32_t>(call);
    case kDispatchRows: return dispatch_rows(call);
    case kRunShared: return call.shared == nullptr ? kOk : run_shared(call);
    case kAwaitRows: return is_alone(call) ? kOk : await_rows(call);
    case kReceiveRows: return is_alone(call) ? kOk : receive_rows(call);
    case kRunExperts: return run_experts(call);
    case kShowSums:
      if (is_alone(call)) return kOk;
      moe_mk_exchange_show(call.windows, call.send->epoch, call.received);
      count(call, call.received, 1);
      return kOk;
    case kAwaitSums:
      if (is_alone(call)) return kOk;
      return moe_mk_exchange_await(call.windows, 1, call.send->epoch, call.microseconds, call.add_up->firsts);
    case kAddSums: return add_sums(call);
    case kAddShared: return call.shared == nullptr ? kOk : add_shared(call);
    default: return kBadShape;
  }
}

// One lease for all stages: its threads stay awake between them, and sleep while this rank waits for peers; those of OpenMP
// would spin between regions.
int32_t run(MoeMkLayer& call, int32_t first, int32_t stop) {
  ThreadPoolLease pool(call.threads);
  for (call.stage = first; call.stage < stop; ++call.stage) {
    if (call.stage == kReceiveRows && !is_alone(call) && !has_room(call)) return kOk;
    if (const int32_t status = run_stage(call); status != kOk) return status;
    if (call.stage == kDispatchRows && !is_alone(call) && !call.send->sent) return kOk;
  }
  return kOk;
}

// The memory of a call on one rank, of which several may run at once.
struct Memory {
  std::vector<int32_t> ids, places;
  std::vector<float> weights, logits;
  std::vector<uint16_t> shared;

  Memory(MoeMkLayer& call, int32_t first) : places(size_t(call.num_tokens * call.top_k)) {
    call.places = places.data();
    if (first == kRouteTokens) {
      logits.resize(size_t(call.num_tokens * call.num_experts));
      call.logits = logits.data();
      if (call.ids == nullptr || call.weights == nullptr) {
        ids.resize(places.size());
        weights.resize(places.size());
        call.ids = ids.data();
        call.weights = weights.data();
      }
    }
    if (call.shared != nullptr) {
      shared.resize(size_t(call.num_tokens * call.shared->w2.num_outputs));
      call.shared_out = shared.data();
    }
  }
};

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_layer(MoeMkLayer* layer, int32_t first, int32_t stop, const void* x, int64_t num_tokens, void* ids,
                     float* weights, int32_t top_k, int32_t form, const float* shared_weights, int64_t* load,
                     MoeMkCapture* captured, void* out, int32_t threads, uint32_t epoch) try {
  const bool alone = is_alone(*layer);
  if (num_tokens < 0) return alone ? kBadShape : run(*layer, first, stop);
  MoeMkLayer own = *layer;
  MoeMkLayer& call = alone ? own : *layer;
  if (first == kRouteTokens && call.route != nullptr) top_k = call.route->top_k;
  const bool routes = first != kRouteTokens || (call.route != nullptr && call.route->hidden == call.experts->w13.num_inputs);
  const bool starts = first >= kRouteTokens && first <= (alone ? kPlaceTokens : kDispatchRows);
  if (!starts || !routes || top_k <= 0 || call.num_experts <= 0 || (!alone && top_k != call.send->top_k)) return kBadShape;
  call.x = x;
  call.num_tokens = num_tokens;
  call.ids = ids;
  call.weights = weights;
  call.top_k = top_k;
  call.form = form;
  call.shared_weights = shared_weights;
  call.load = load;
  call.captured = captured;
  call.out = out;
  call.threads = threads;
  if (alone) {
    const Memory memory(call, first);
    return run(call, first, stop);
  }
  if (first == kRouteTokens && ids == nullptr) {
    call.ids = call.own_ids;
    call.weights = call.own_weights;
  }
  MoeMkSend& send = *call.send;
  send.x = static_cast<const uint8_t*>(x);
  send.num_tokens = num_tokens;
  send.ids = static_cast<const int32_t*>(ids);
  send.weights = call.weights;
  send.threads = num_tokens * send.value_bytes < kBytesForThreads ? 1 : threads;
  send.epoch = epoch;
  call.add_up->out = static_cast<uint8_t*>(out);
  call.add_up->num_tokens = num_tokens;
  call.add_up->threads = send.threads;
  return run(call, first, stop);
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
