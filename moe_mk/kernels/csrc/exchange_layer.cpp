// A whole layer with token exchange: routing, dispatch, experts and combine, in one call where peers are in time and all memory
// is there (exchange.h). The stages are the functions of exchange.cpp, route.cpp and experts.cpp, so results are theirs, bit
// for bit. In Python the steps between them took several times as long as the experts of a small layer.
#include <algorithm>
#include <numeric>

#include "exchange.h"
#include "places.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kBytesForThreads = 1 << 20;  // calls that move fewer bytes use one thread: waking a second one takes longer

int32_t route_tokens(MoeMkExchangeLayer& call) {
  MoeMkRoute route = call.layer->route;
  route.x = call.send->x;
  route.x_stride = route.hidden;
  route.num_tokens = call.send->num_tokens;
  route.ids = call.ids;
  route.weights = call.weights;
  route.logits = call.logits;
  route.threads = call.threads;
  if (const int32_t routed = moe_mk_route(&route); routed != kOk) return routed;
  const int64_t choices = route.num_tokens * route.top_k;
  if (!moe_mk::place_and_count(*call.layer, call.ids, choices, false, false, call.load, call.physical)) return kBadId;
  call.send->ids = call.physical;
  call.send->weights = call.weights;
  return kOk;
}

void count(MoeMkExchangeLayer& call, const int64_t* rows, int half) {
  const int ranks = call.windows->num_ranks;
  for (int rank = 0; rank < ranks; ++rank) call.moved[half * ranks + rank] += rows[rank];
  call.moved[2 * ranks + half] += 1;
}

int32_t dispatch_rows(MoeMkExchangeLayer& call) {
  const int32_t status = moe_mk_exchange_dispatch(call.windows, call.send);
  if (status == kOk && call.send->sent) count(call, call.send->counts, 0);
  return status;
}

int32_t await_rows(MoeMkExchangeLayer& call) {
  call.received[call.windows->rank] = call.send->counts[call.windows->rank];
  return moe_mk_exchange_await(call.windows, 0, call.send->epoch, call.microseconds, call.received);
}

int64_t first_received(const MoeMkExchangeLayer& call) {
  return call.seam_row - std::accumulate(call.received, call.received + call.left + 1, int64_t(0));
}

bool has_room(MoeMkExchangeLayer& call) {
  call.total = std::accumulate(call.received, call.received + call.windows->num_ranks, int64_t(0));
  if (call.total > call.row_room || call.total > call.sums_room) return false;
  const int64_t first = first_received(call);
  return call.windows->num_ranks == 2 || (call.first_row <= first && first + call.total <= call.end_row);
}

int32_t receive_rows(MoeMkExchangeLayer& call) {
  MoeMkReceive* receive = call.receive;
  receive->values = call.values + first_received(call) * receive->value_bytes;
  return moe_mk_exchange_receive(call.windows, receive);
}

int32_t run_experts(MoeMkExchangeLayer& call) {
  MoeMkExperts experts = call.layer->experts;
  const MoeMkReceive& rows = *call.receive;
  experts.x = rows.values;
  experts.x_stride = experts.w13.num_inputs;
  experts.x_scales = rows.scale_bytes == 0 ? nullptr : reinterpret_cast<const float*>(rows.scales);
  experts.x_scale_stride = rows.scale_bytes / 4;
  experts.ids = reinterpret_cast<const int32_t*>(rows.ids);
  experts.weights = reinterpret_cast<const float*>(rows.weights);
  experts.out = call.sums;
  experts.out_stride = experts.w2.num_outputs;
  experts.num_rows = call.total;
  experts.top_k = rows.top_k;
  experts.threads = call.threads;
  return moe_mk_experts(&experts);
}

int32_t add_sums(MoeMkExchangeLayer& call) {
  MoeMkAddUp* add_up = call.add_up;
  const int64_t row_bytes = add_up->columns * (add_up->row_type == kRowsF32 ? 4 : 2);
  add_up->own = call.sums + std::accumulate(call.received, call.received + call.windows->rank, int64_t(0)) * row_bytes;
  return moe_mk_exchange_add_up(call.windows, add_up);
}

int32_t run_stage(MoeMkExchangeLayer& call) {
  switch (call.stage) {
    case kRouteTokens: return route_tokens(call);
    case kDispatchRows: return dispatch_rows(call);
    case kAwaitRows: return await_rows(call);
    case kReceiveRows: return receive_rows(call);
    case kRunExperts: return run_experts(call);
    case kShowSums:
      moe_mk_exchange_show(call.windows, call.send->epoch, call.received);
      count(call, call.received, 1);
      return kOk;
    case kAwaitSums:
      return moe_mk_exchange_await(call.windows, 1, call.send->epoch, call.microseconds, call.add_up->firsts);
    case kAddSums: return add_sums(call);
    default: return kBadShape;
  }
}

}  // namespace

int32_t moe_mk_exchange_layer(MoeMkExchangeLayer* call, const void* x, int64_t num_tokens, int64_t* load, int32_t* ids,
                              float* weights, void* out, int32_t threads, uint32_t epoch, int32_t first, int32_t stop) {
  MoeMkSend& send = *call->send;
  if (num_tokens < 0 || (first != kRouteTokens && first != kDispatchRows)) return kBadShape;
  if (first == kRouteTokens && (call->layer->route.top_k != send.top_k || call->layer->route.num_experts <= 0)) return kBadShape;
  send.x = static_cast<const uint8_t*>(x);
  send.num_tokens = num_tokens;
  send.threads = num_tokens * send.value_bytes < kBytesForThreads ? 1 : threads;
  send.epoch = epoch;
  call->threads = threads;
  call->load = load;
  int32_t* const own_ids = call->ids;
  float* const own_weights = call->weights;
  if (first == kDispatchRows) {
    send.ids = ids;
    send.weights = weights;
  } else if (ids != nullptr) {
    call->ids = ids;
    call->weights = weights;
  }
  call->add_up->out = static_cast<uint8_t*>(out);
  call->add_up->num_tokens = num_tokens;
  call->add_up->threads = send.threads;
  const int32_t status = moe_mk_exchange_layer_resume(call, first, stop);
  call->ids = own_ids;
  call->weights = own_weights;
  return status;
}

// One lease for all stages: its threads sleep while this rank waits for peers, those of OpenMP would spin between regions.
int32_t moe_mk_exchange_layer_resume(MoeMkExchangeLayer* call, int32_t first, int32_t stop) {
  moe_mk::ThreadPoolLease pool(call->threads);
  for (call->stage = first; call->stage < stop; ++call->stage) {
    if (call->stage == kReceiveRows && !has_room(*call)) return kOk;
    if (const int32_t status = run_stage(*call); status != kOk) return status;
    if (call->stage == kDispatchRows && !call->send->sent) return kOk;
  }
  return kOk;
}
