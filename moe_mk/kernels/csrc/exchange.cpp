// Rows to the windows of peers, rows out of a window, sums of rows, and a short wait (exchange.h says how they lie).
// A row is read once and written once for each rank it visits; rounding is done on the way, once a token.
#include "exchange.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "exchange_ops.h"
#include "team.h"

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
  // AMX may be imitated where AVX-512 is not.
  if (isa >= kAvx512Bf16 && isa_supported(kAvx512Bf16)) return avx512_row_ops();
  if (isa >= kAvx2 && isa_supported(kAvx2)) return avx2_row_ops();
#endif
  return baseline_row_ops();
}

// Tokens [begin, end) a piece, to as many members as there are pieces; one alone needs no team.
template <typename Body>
void each_piece(int64_t tokens, int threads, Body body) {
  const int64_t pieces = (tokens + kTokensAPiece - 1) / kTokensAPiece;
  const int members = int(std::max<int64_t>(1, std::min<int64_t>(threads, pieces)));
  if (members == 1) return body(0, tokens);
  Lease team;
  std::atomic<int64_t> next{0};
  team->run(members, [&](int) {
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces;)
      body(piece * kTokensAPiece, std::min(tokens, (piece + 1) * kTokensAPiece));
  });
}

// The tokens of each rank in step with a walk over all tokens.
class Visits {
 public:
  Visits(const int32_t* token_of, const int64_t* counts, int ranks, int64_t tokens, int64_t first) : next_(size_t(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int32_t* mine = token_of + rank * tokens;
      rows_.push_back({mine, counts[rank]});
      next_[size_t(rank)] = std::lower_bound(mine, mine + counts[rank], int32_t(first)) - mine;
    }
  }
  // The number of the token's row at a rank, -1 if it does not go there. Asked for every token in turn.
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

// Local slots and weights of one token at one rank; assignments that go elsewhere are -1 and weigh nothing.
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

void send_tokens(const MoeMkSend& c, const RowOps& ops, int64_t begin, int64_t end) {
  Visits visits(c.token_of, c.counts, c.num_ranks, c.num_tokens, begin);
  const int64_t tail_bytes = c.scale_bytes + 8 * c.top_k;
  for (int64_t token = begin; token < end; ++token) {
    const uint8_t* values = c.quantize == kAsTheyAre ? c.x + token * c.x_stride : nullptr;
    const uint8_t* scales = c.scales == nullptr ? nullptr : c.scales + token * c.scale_bytes;
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      const int64_t row = visits.row(rank, token);
      if (row < 0 || c.values_to[rank] == nullptr) continue;
      uint8_t* to = c.values_to[rank] + row * c.value_bytes;
      uint8_t* tail = c.tails_to[rank] + row * tail_bytes;
      if (values == nullptr) {
        ops.quantize(c.x + token * c.x_stride, c.columns, c.row_type, c.quantize == kToUe8m0, to, tail);
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

void receive_from(const MoeMkReceive& c, int source, int64_t first) {
  const int64_t count = c.counts[source], ids_bytes = 4 * c.top_k, tail_bytes = c.scale_bytes + 2 * ids_bytes;
  if (c.values_from[source] != nullptr)
    std::memcpy(c.values + first * c.value_bytes, c.values_from[source], size_t(count * c.value_bytes));
  for (int64_t row = 0; row < count; ++row) {
    const uint8_t* tail = c.tails_from[source] + row * tail_bytes;
    std::memcpy(c.scales + (first + row) * c.scale_bytes, tail, size_t(c.scale_bytes));
    std::memcpy(c.ids + (first + row) * ids_bytes, tail + c.scale_bytes, size_t(ids_bytes));
    std::memcpy(c.weights + (first + row) * ids_bytes, tail + c.scale_bytes + ids_bytes, size_t(ids_bytes));
  }
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

int32_t moe_mk_exchange_sort(const int32_t* ids, int64_t num_tokens, int32_t top_k, const int32_t* rank_of,
                             int32_t num_experts, int32_t num_ranks, int32_t* token_of, int64_t* counts) {
  std::vector<int64_t> seen(size_t(num_ranks), -1);
  std::fill(counts, counts + num_ranks, 0);
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int k = 0; k < top_k; ++k) {
      const int32_t id = ids[token * top_k + k];
      if (id < 0) continue;
      if (id >= num_experts) return kBadId;
      const int32_t rank = rank_of[id];
      if (seen[size_t(rank)] == token) continue;
      seen[size_t(rank)] = token;
      token_of[rank * num_tokens + counts[rank]++] = int32_t(token);
    }
  return kOk;
}

int32_t moe_mk_exchange_send(const MoeMkSend* call) {
  const RowOps* ops = row_ops_of(call->isa);
  if (ops == nullptr) return kNoIsa;
  each_piece(call->num_tokens, call->threads,
             [&](int64_t begin, int64_t end) { send_tokens(*call, *ops, begin, end); });
  return kOk;
}

int32_t moe_mk_exchange_receive(const MoeMkReceive* call) {
  int64_t first = 0;
  for (int source = 0; source < call->num_ranks; first += call->counts[source++]) receive_from(*call, source, first);
  return kOk;
}

int32_t moe_mk_exchange_add_up(const MoeMkAddUp* call) {
  const RowOps* ops = row_ops_of(call->isa);
  if (ops == nullptr) return kNoIsa;
  const int64_t row_bytes = call->columns * (call->row_type == kRowsF32 ? 4 : 2);
  each_piece(call->num_tokens, call->threads, [&](int64_t begin, int64_t end) {
    Visits visits(call->token_of, call->counts, call->num_ranks, call->num_tokens, begin);
    std::vector<const uint8_t*> rows(size_t(call->num_ranks));
    for (int64_t token = begin; token < end; ++token) {
      int found = 0;
      for (int rank = 0; rank < call->num_ranks; ++rank)
        if (const int64_t row = visits.row(rank, token); row >= 0)
          rows[size_t(found++)] = call->rows_of[rank] + row * row_bytes;
      ops->add_up(rows.data(), found, call->columns, call->row_type, call->out + token * row_bytes);
    }
  });
  return kOk;
}

int32_t moe_mk_exchange_wait(const uint64_t* const* words, int32_t num_words, uint32_t epoch, int64_t microseconds,
                             int32_t* behind) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  for (int64_t turn = 0;; ++turn) {
    *behind = 0;
    for (int32_t i = 0; i < num_words; ++i) *behind += is_behind(__atomic_load_n(words[i], __ATOMIC_ACQUIRE), epoch);
    if (*behind == 0 || (turn % 64 == 63 && std::chrono::steady_clock::now() >= until)) return kOk;
    relax(turn);
  }
}
