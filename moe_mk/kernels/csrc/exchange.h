// Rows on their way to other ranks and sums on their way home: the C ABI, mirrored in native/exchange_abi.py, and the table
// of functions that each instruction set has of its own. Windows of peers are plain addresses here: nothing waits for
// anybody except moe_mk_exchange_await, and that not for long.
//
//   rows, then a release-store of their flag ... an acquire-load of the flag, then the rows
//
// so that whoever sees a flag sees what was written before it, on processors that reorder stores too.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

#pragma GCC visibility push(default)
extern "C" {

enum RowType : int32_t { kRowsBf16 = 0, kRowsF16 = 1, kRowsF32 = 2 };
enum Quantize : int32_t { kAsTheyAre = 0, kToFp8 = 1, kToUe8m0 = 2 };  // per token and 128 columns
enum FaultKind : int32_t { kTooManyRows = 1, kSumsBeyond = 2, kNoSuchSlot = 3, kOtherLayer = 4, kPeerFailed = 5 };

// Peers may store to shared memory at any time. Every word of theirs that becomes a size, an offset or an index is
// loaded once into private memory, checked there, and used from there. A word outside of its limits ends the call with
// kPeerFault and is described here. Scales, weights and values are data: any bits are accepted.
struct MoeMkFault {
  int32_t kind;              // FaultKind
  int32_t peer;              // the rank that stored the word
  int64_t value, limit;      // kTooManyRows: 0 <= value <= limit. kSumsBeyond: the same. kNoSuchSlot: -1 <= value < limit.
                             // kOtherLayer: value == limit
  int64_t row;               // kNoSuchSlot: the number of the row among those of the peer
};

// The windows of all ranks as one of them sees them, by rank. Made once, kept as long as they are mapped. A flag is
// epoch << 32 | layer << 24 | count, with a layer below 255; all ones below the epoch: the peer has failed, in whichever
// call.
struct MoeMkWindows {
  uint8_t* const* values_to;         // [W] where values of mine go ...
  const int64_t* back_to;            // [W] ... less this for every row of mine
  uint8_t* const* tails_to;          // [W]
  const int64_t* room_to;            // [W] rows of mine that there are pages for
  uint64_t* const* flags_to;         // [2 W] that I store: for rows, then for sums. Mine: null
  const uint8_t* const* values_from; // [W] where a source writes values in my window ...
  const int64_t* back_from;          // [W] ... less this for every row of it
  const uint8_t* const* tails_from;  // [W]
  const uint64_t* const* flags_from; // [2 W] that peers store in my window. Mine: null
  const uint8_t* const* sums;        // [W] where the sums of each rank begin
  MoeMkFault* fault;                 // out: filled in by a call that returns kPeerFault
  int64_t most_rows;                 // that a rank may send to another in one call
  int32_t rank, num_ranks;
  uint32_t layer;                    // that is served now: its number, modulo 255
};

// One call's rows to every rank. A row at its destination: values [value_bytes] in one place, its tail
// [scale_bytes | K slots, int32 | K weights, f32] in another; the i-th row for a rank is token_of[rank][i].
struct MoeMkSend {
  const uint8_t* x;          // [T][x_stride bytes]
  const uint8_t* scales;     // [T][scale_bytes] that go with x; null: none, or found here
  const int32_t* ids;        // [T][K] physical experts; below 0: goes nowhere
  const float* weights;      // [T][K]
  const int32_t* rank_of;    // [P]
  const int32_t* slot_of;    // [P]
  int32_t* token_of;         // out [W][T]: the tokens of each rank, ascending, each once
  int64_t* counts;           // out [W]
  int64_t num_tokens, x_stride, value_bytes, scale_bytes;
  int32_t top_k, num_experts, columns, row_type, quantize, threads, isa;
  uint32_t epoch;
  int32_t sent;              // out: 0 where some rank would get more rows than there are pages for
};

// What has arrived: tails are taken apart, rows that lie elsewhere are put in order. [R] in the order of sources.
struct MoeMkReceive {
  const int64_t* counts;     // [W]
  uint8_t* values;           // [R][value_bytes]
  uint8_t* scales;           // [R][scale_bytes]
  uint8_t* ids;              // [R][K] int32
  uint8_t* weights;          // [R][K] f32
  int64_t value_bytes, scale_bytes;
  int32_t top_k;
  int32_t num_slots;         // of this rank: received slots are -1 or below this
};

// out[t] = the rows of token t of all ranks, added in rank order from zero in f32, rounded once.
struct MoeMkAddUp {
  const int32_t* token_of;   // [W][T], as they were sent
  const int64_t* counts;     // [W]
  int64_t* firsts;           // [W] which sum of each rank is the first of mine; not checked by moe_mk_exchange_add_up
  const uint8_t* own;        // mine from the first on
  uint8_t* out;              // [T][row_bytes]
  int64_t num_tokens, columns;
  int32_t row_type, threads, isa;
  uint32_t epoch;            // for moe_mk_exchange_collect alone, as what follows
  int64_t microseconds;
};

// Sorts tokens by the ranks they visit, writes all rows, then a flag a peer. Nothing is written where there is no room,
// with an id of no expert (kBadId), and with an expert on a rank that is not there (kBadShape).
int32_t moe_mk_exchange_dispatch(const MoeMkWindows* windows, MoeMkSend* call);
// Copies what has arrived. counts are those that moe_mk_exchange_await has checked. kPeerFault: a slot is out of range.
int32_t moe_mk_exchange_receive(const MoeMkWindows* windows, const MoeMkReceive* call);
// Tells each peer which sum of mine is the first of its own; counts [W]: rows received from each rank.
void moe_mk_exchange_show(const MoeMkWindows* windows, uint32_t epoch, const int64_t* counts);
int32_t moe_mk_exchange_add_up(const MoeMkWindows* windows, const MoeMkAddUp* call);
// moe_mk_exchange_await for sums into firsts, then moe_mk_exchange_add_up; nothing is added unless all have come.
int32_t moe_mk_exchange_collect(const MoeMkWindows* windows, MoeMkAddUp* call);
// Looks at the flags of all peers, for rows or for sums, until each has come to `epoch` (modulo 2^32, half of all count as
// earlier) or so many microseconds are over, offering the core to others meanwhile. counts [W]: those of peers whose
// flags have come, others are left. kLate: some have not. kPeerFault: a count is above most_rows, or the first sum for
// this rank above the most_rows of each rank before it, or a flag is of another layer, or a peer has failed.
int32_t moe_mk_exchange_await(const MoeMkWindows* windows, int32_t for_sums, uint32_t epoch, int64_t microseconds,
                              int64_t* counts);
}
#pragma GCC visibility pop

namespace moe_mk {

struct RowOps {
  void (*add_up)(const uint8_t* const* rows, int num_rows, int64_t columns, int row_type, uint8_t* out);
  // Values [columns] and scales [columns / 128] of one row; ue8m0: scales are exponents of powers of two, a byte each.
  void (*quantize)(const uint8_t* x, int64_t columns, int row_type, bool ue8m0, uint8_t* values, uint8_t* scales);
};

const RowOps* baseline_row_ops();
const RowOps* avx2_row_ops();
const RowOps* avx512_row_ops();

}  // namespace moe_mk
