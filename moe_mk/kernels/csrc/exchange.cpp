// Writes rows to the windows of peers, reads rows from a window, sums rows, and waits briefly (exchange.h: the layout).
// One forward of a Python layer makes five of these calls, so the fixed cost of each call is kept small.
// A row is read once and written once per destination rank; it is quantised while it is copied, once per token.
#include "exchange.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "exchange_ops.h"
#include "thread_pool.h"

namespace moe_mk {

const RowOps* baseline_row_ops() {
  static const RowOps table = {add_up, quantize_row};
  return &table;
}

namespace {

constexpr int64_t kTokensAPiece = 16;

const RowOps* row_ops_of(int isa) {
  if (!isa_supported(isa)) return nullptr;
#if defined(__x86_64__)
  // AMX may be emulated on machines without AVX-512.
  if (isa >= kAvx512Bf16 && isa_supported(kAvx512Bf16)) return avx512_row_ops();
  if (isa >= kAvx2 && isa_supported(kAvx2)) return avx2_row_ops();
#endif
  return baseline_row_ops();
}

// Tokens [begin, end) a piece, to as many members as there are pieces; a single piece runs on the calling thread.
template <typename Body>
void each_piece(int64_t tokens, int threads, Body body) {
  const int64_t pieces = (tokens + kTokensAPiece - 1) / kTokensAPiece;
  const int members = int(std::max<int64_t>(1, std::min<int64_t>(std::abs(threads), pieces)));
  if (members == 1) return body(0, tokens);
  ThreadPoolLease pool(threads);
  std::atomic<int64_t> next{0};
  pool->run(members, [&](int) {
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces;)
      body(piece * kTokensAPiece, std::min(tokens, (piece + 1) * kTokensAPiece));
  });
}

// Iterates over the tokens of each rank while all tokens are visited in order.
class Visits {
 public:
  Visits(const int32_t* token_of, const int64_t* counts, int ranks, int64_t tokens, int64_t first) : next_(size_t(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int32_t* mine = token_of + rank * tokens;
      rows_.push_back({mine, counts[rank]});
      next_[size_t(rank)] = std::lower_bound(mine, mine + counts[rank], int32_t(first)) - mine;
    }
  }
  // The row index of the token at a rank, -1 if it is not sent there. Must be called for every token in order.
  int64_t row(int rank, int64_t token) {
    const Tokens& there = rows_[size_t(rank)];
    int64_t& next = next_[size_t(rank)];
    return next < there.count && there.tokens[next] == token ? next++ : -1;
  }

 private:
  struct Tokens {
    const int32_t* tokens;
    int64_t count;
  };
  std::vector<Tokens> rows_;
  std::vector<int64_t> next_;
};

// Local slots and weights of one token at one rank; assignments of other ranks get slot -1 and weight 0.
void write_tail(const MoeMkSend& c, int64_t token, int rank, uint8_t* to) {
  uint8_t* weights = to + 4 * c.top_k;
  for (int k = 0; k < c.top_k; ++k) {
    const int64_t at = token * c.top_k + k;
    const bool here = c.ids[at] >= 0 && c.rank_of[c.ids[at]] == rank;
    const int32_t slot = here ? c.slot_of[c.ids[at]] : -1;
    const float weight = here ? c.weights[at] : 0.0f;
    std::memcpy(to + 4 * k, &slot, 4);
    std::memcpy(weights + 4 * k, &weight, 4);
  }
}

// Fills token_of and counts. kBadId: an id out of range. kBadShape: rank_of holds a rank out of range.
Status sort_tokens(const MoeMkSend& c, int num_ranks) {
  std::vector<int64_t> seen(size_t(num_ranks), -1);
  std::fill(c.counts, c.counts + num_ranks, 0);
  for (int64_t token = 0; token < c.num_tokens; ++token)
    for (int k = 0; k < c.top_k; ++k) {
      const int32_t id = c.ids[token * c.top_k + k];
      if (id < 0) continue;
      if (id >= c.num_experts) return kBadId;
      const int32_t rank = c.rank_of[id];
      if (rank < 0 || rank >= num_ranks) return kBadShape;
      if (seen[size_t(rank)] == token) continue;
      seen[size_t(rank)] = token;
      c.token_of[rank * c.num_tokens + c.counts[rank]++] = int32_t(token);
    }
  return kOk;
}

// NOTE: the token is quantised into the window of its first destination rank; the other ranks get copies of that.
void send_tokens(const MoeMkWindows& w, const MoeMkSend& c, const RowOps& ops, int64_t begin, int64_t end) {
  Visits visits(c.token_of, c.counts, w.num_ranks, c.num_tokens, begin);
  const int64_t tail_bytes = c.scale_bytes + 8 * c.top_k;
  for (int64_t token = begin; token < end; ++token) {
    const uint8_t* values = c.quantize == kAsIs ? c.x + token * c.x_stride : nullptr;
    const uint8_t* scales = c.scales == nullptr ? nullptr : c.scales + token * c.scale_bytes;
    for (int rank = 0; rank < w.num_ranks; ++rank) {
      const int64_t row = visits.row(rank, token);
      if (row < 0) continue;
      uint8_t* to = w.values_to[rank] - c.counts[rank] * w.back_to[rank] + row * c.value_bytes;
      uint8_t* tail = w.tails_to[rank] + row * tail_bytes;
      if (values == nullptr) {
        ops.quantize(c.x + token * c.x_stride, c.columns, c.row_type, c.quantize == kUe8m0Rows, to, tail);
        values = to;
        scales = tail;
      } else {
        std::memcpy(to, values, size_t(c.value_bytes));
        if (scales != nullptr) std::memcpy(tail, scales, size_t(c.scale_bytes));
      }
      write_tail(c, token, rank, tail + c.scale_bytes);
    }
  }
}

constexpr int kLayerAt = 24;
constexpr uint32_t kCountMask = (uint32_t(1) << kLayerAt) - 1, kFailed = 0xffffffffu;

// Release store: a peer that reads the flag also sees all earlier writes.
void raise_flag(const MoeMkWindows& w, uint64_t* flag, uint32_t epoch, int64_t count) {
  const uint64_t word = uint64_t(epoch) << 32 | uint64_t(w.layer) << kLayerAt | uint64_t(count);
  if (flag != nullptr) __atomic_store_n(flag, word, __ATOMIC_RELEASE);
}

Status peer_fault(const MoeMkWindows& w, FaultKind kind, int peer, int64_t value, int64_t limit, int64_t row = 0) {
  *w.fault = {kind, peer, value, limit, row};
  return kPeerFault;
}

// Checks the private copy: later stores of a peer to its window have no effect.
Status check_slots(const MoeMkWindows& w, const MoeMkReceive& c, int source, int64_t row, const uint8_t* ids) {
  asm volatile("" ::: "memory");
  for (int k = 0; k < c.top_k; ++k) {
    int32_t slot;
    std::memcpy(&slot, ids + 4 * k, 4);
    if (slot < -1 || slot >= c.num_slots) return peer_fault(w, kNoSuchSlot, source, slot, c.num_slots, row);
  }
  return kOk;
}

Status receive_from(const MoeMkWindows& w, const MoeMkReceive& c, int source, int64_t first) {
  const int64_t count = c.counts[source], ids_bytes = 4 * c.top_k, tail_bytes = c.scale_bytes + 2 * ids_bytes;
  const uint8_t* from = w.values_from[source] - count * w.back_from[source];
  uint8_t* to = c.values + first * c.value_bytes;
  if (from != to) std::memcpy(to, from, size_t(count * c.value_bytes));
  for (int64_t row = 0; row < count; ++row) {
    const uint8_t* tail = w.tails_from[source] + row * tail_bytes;
    if (c.scale_bytes != 0) std::memcpy(c.scales + (first + row) * c.scale_bytes, tail, size_t(c.scale_bytes));
    std::memcpy(c.ids + (first + row) * ids_bytes, tail + c.scale_bytes, size_t(ids_bytes));
    std::memcpy(c.weights + (first + row) * ids_bytes, tail + c.scale_bytes + ids_bytes, size_t(ids_bytes));
    if (Status status = check_slots(w, c, source, row, c.ids + (first + row) * ids_bytes); status != kOk) return status;
  }
  return kOk;
}

bool has_failed(const MoeMkWindows& w, int rank) {
  if (w.failed_from == nullptr || w.failed_from[rank] == nullptr) return false;
  return uint32_t(__atomic_load_n(w.failed_from[rank], __ATOMIC_ACQUIRE)) == kFailed;
}

bool is_behind(uint64_t word, uint32_t epoch) { return uint32_t(word >> 32) - epoch >= uint32_t(1) << 31; }

void relax(int64_t turn) {
  constexpr int64_t kSpins = 256;
  if (turn > kSpins) {
    sched_yield();
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_exchange_dispatch(const MoeMkWindows* windows, MoeMkSend* call) {
  const RowOps* ops = row_ops_of(call->isa);
  if (ops == nullptr) return kNoIsa;
  if (const Status sorted = sort_tokens(*call, windows->num_ranks); sorted != kOk) return sorted;
  call->sent = 1;
  for (int rank = 0; rank < windows->num_ranks; ++rank) call->sent &= call->counts[rank] <= windows->room_to[rank];
  if (!call->sent) return kOk;
  each_piece(call->num_tokens, call->threads,
             [&](int64_t begin, int64_t end) { send_tokens(*windows, *call, *ops, begin, end); });
  for (int rank = 0; rank < windows->num_ranks; ++rank)
    raise_flag(*windows, windows->flags_to[rank], call->epoch, call->counts[rank]);
  return kOk;
}

int32_t moe_mk_exchange_receive(const MoeMkWindows* windows, const MoeMkReceive* call) {
  int64_t first = 0;
  for (int source = 0; source < windows->num_ranks; first += call->counts[source++])
    if (const Status status = receive_from(*windows, *call, source, first); status != kOk) return status;
  return kOk;
}

void moe_mk_exchange_show(const MoeMkWindows* windows, uint32_t epoch, const int64_t* counts) {
  int64_t first = 0;
  for (int rank = 0; rank < windows->num_ranks; first += counts[rank++])
    raise_flag(*windows, windows->flags_to[windows->num_ranks + rank], epoch, first);
}

int32_t moe_mk_exchange_add_up(const MoeMkWindows* windows, const MoeMkAddUp* call) {
  const RowOps* ops = row_ops_of(call->isa);
  if (ops == nullptr) return kNoIsa;
  const int64_t row_bytes = call->columns * (call->row_type == kRowsF32 ? 4 : 2);
  const int num_ranks = windows->num_ranks;
  each_piece(call->num_tokens, call->threads, [&](int64_t begin, int64_t end) {
    Visits visits(call->token_of, call->counts, num_ranks, call->num_tokens, begin);
    std::vector<const uint8_t*> rows(static_cast<size_t>(num_ranks));
    for (int64_t token = begin; token < end; ++token) {
      int found = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const int64_t row = visits.row(rank, token);
        if (row < 0) continue;
        const uint8_t* mine = windows->sums[rank] + call->firsts[rank] * row_bytes;
        rows[size_t(found++)] = (rank == windows->rank ? call->own : mine) + row * row_bytes;
      }
      ops->add_up(rows.data(), found, call->columns, call->row_type, call->out + token * row_bytes);
    }
  });
  return kOk;
}

int32_t moe_mk_exchange_await(const MoeMkWindows* windows, int32_t for_sums, uint32_t epoch, int64_t microseconds,
                              int64_t* counts) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  const uint64_t* const* flags = windows->flags_from + (for_sums ? windows->num_ranks : 0);
  const int64_t limit = windows->most_rows * (for_sums ? windows->rank : 1);  // sums of the ranks before this one
  for (int64_t turn = 0;; ++turn) {
    bool late = false;
    for (int rank = 0; rank < windows->num_ranks; ++rank) {
      if (flags[rank] == nullptr) continue;
      const uint64_t word = __atomic_load_n(flags[rank], __ATOMIC_ACQUIRE);
      if (uint32_t(word) == kFailed) return peer_fault(*windows, kPeerFailed, rank, 0, 0);
      if (is_behind(word, epoch)) {
        // Looked at once more: the flag of this call may have been stored right before the peer failed in the next one.
        if (has_failed(*windows, rank) && is_behind(__atomic_load_n(flags[rank], __ATOMIC_ACQUIRE), epoch))
          return peer_fault(*windows, kPeerFailed, rank, 0, 0);
        late = true;
        continue;
      }
      const uint32_t layer = uint32_t(word) >> kLayerAt;
      if (layer != windows->layer) return peer_fault(*windows, kOtherLayer, rank, layer, windows->layer);
      const int64_t value = int64_t(uint32_t(word) & kCountMask);
      if (value > limit) return peer_fault(*windows, for_sums ? kSumsBeyond : kTooManyRows, rank, value, limit);
      counts[rank] = value;
    }
    if (!late) return kOk;
    if (turn % 64 == 63 && std::chrono::steady_clock::now() >= until) return kLate;
    relax(turn);
  }
}

int32_t moe_mk_exchange_collect(const MoeMkWindows* windows, MoeMkAddUp* call) {
  const int32_t awaited = moe_mk_exchange_await(windows, 1, call->epoch, call->microseconds, call->firsts);
  return awaited == kOk ? moe_mk_exchange_add_up(windows, call) : awaited;
}
