// Rows on their way to other ranks and sums on their way home: the C ABI, mirrored in native/exchange.py, and the table
// of functions that each instruction set has of its own. Windows of peers are plain addresses here: nothing waits for
// anybody except moe_mk_exchange_wait, and that not for long.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

#pragma GCC visibility push(default)
extern "C" {

enum RowType : int32_t { kRowsBf16 = 0, kRowsF16 = 1, kRowsF32 = 2 };
enum Quantize : int32_t { kAsTheyAre = 0, kToFp8 = 1, kToUe8m0 = 2 };  // per token and 128 columns

// One call's rows to every rank. A row at its destination: values [value_bytes] in one place, its tail
// [scale_bytes | K slots, int32 | K weights, f32] in another; the i-th row for a rank is token_of[rank][i].
struct MoeMkSend {
  const uint8_t* x;          // [T][x_stride bytes]
  const uint8_t* scales;     // [T][scale_bytes] that go with x; null: none, or found here
  const int32_t* ids;        // [T][K] physical experts; below 0: goes nowhere
  const float* weights;      // [T][K]
  const int32_t* rank_of;    // [P]
  const int32_t* slot_of;    // [P]
  const int32_t* token_of;   // [W][T], as moe_mk_exchange_sort left it
  const int64_t* counts;     // [W]
  uint8_t* const* values_to; // [W]; null: nothing is written for this rank
  uint8_t* const* tails_to;  // [W]
  int64_t num_tokens, x_stride, value_bytes, scale_bytes;
  int32_t top_k, num_ranks, columns, row_type, quantize, threads, isa;
};

// What has arrived: tails are taken apart, rows that lie elsewhere are put in order. [R] in the order of sources.
struct MoeMkReceive {
  const uint8_t* const* values_from;  // [W]; null: they lie where they belong
  const uint8_t* const* tails_from;   // [W]
  const int64_t* counts;              // [W]
  uint8_t* values;                    // [R][value_bytes]
  uint8_t* scales;                    // [R][scale_bytes]
  uint8_t* ids;                       // [R][K] int32
  uint8_t* weights;                   // [R][K] f32
  int64_t value_bytes, scale_bytes;
  int32_t top_k, num_ranks, threads;
};

// out[t] = the rows of token t of all ranks, added in rank order from zero in f32, rounded once.
struct MoeMkAddUp {
  const uint8_t* const* rows_of;  // [W], each [counts][row_bytes]
  const int32_t* token_of;        // [W][T]
  const int64_t* counts;          // [W]
  uint8_t* out;                   // [T][row_bytes]
  int64_t num_tokens, columns;
  int32_t num_ranks, row_type, threads, isa;
};

// Fills token_of [W][T] and counts [W]: the tokens of each rank, ascending, each once. kBadId: an id of no expert.
int32_t moe_mk_exchange_sort(const int32_t* ids, int64_t num_tokens, int32_t top_k, const int32_t* rank_of,
                             int32_t num_experts, int32_t num_ranks, int32_t* token_of, int64_t* counts);
int32_t moe_mk_exchange_send(const MoeMkSend* call);
int32_t moe_mk_exchange_receive(const MoeMkReceive* call);
int32_t moe_mk_exchange_add_up(const MoeMkAddUp* call);
// Looks at words until the high half of each has come to `epoch` (modulo 2^32, half of all count as earlier) or so many
// microseconds are over, offering the core to others meanwhile. *behind: how many have not come.
int32_t moe_mk_exchange_wait(const uint64_t* const* words, int32_t num_words, uint32_t epoch, int64_t microseconds,
                             int32_t* behind);
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
