// Dispatch of rows to other ranks, combine of their sums, and a whole layer: the C ABI, mirrored in native/exchange_abi.py, and
// the table of functions of each instruction set. Windows of peers are plain addresses. Only moe_mk_exchange_await waits, for a limited
// time. Synchronisation:
//
//   rows, then a release-store of their flag ... an acquire-load of the flag, then the rows
//
// A rank that reads a flag therefore sees everything written before it, also on processors that reorder stores.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"

#pragma GCC visibility push(default)
extern "C" {

enum RowType : int32_t { kRowsBf16 = 0, kRowsF16 = 1, kRowsF32 = 2 };
enum FaultKind : int32_t { kTooManyRows = 1, kSumsBeyond = 2, kNoSuchSlot = 3, kOtherLayer = 4, kPeerFailed = 5 };

// Peers may store to shared memory at any time. Every word of a peer that is used as a size, an offset or an index is
// loaded once into private memory, checked there, and used from there. A word out of range ends the call with kPeerFault
// and is described here. Scales, weights and values are data: any bits are accepted.
struct MoeMkFault {
  int32_t kind;              // FaultKind
  int32_t peer;              // the rank that stored the word
  int64_t value, limit;      // kTooManyRows: 0 <= value <= limit. kSumsBeyond: the same. kNoSuchSlot: -1 <= value < limit.
                             // kOtherLayer: value == limit
  int64_t row;               // kNoSuchSlot: the number of the row among those of the peer
};

// The windows of all ranks as mapped by one rank, indexed by rank. Built once, valid while they are mapped. A flag is
// epoch << 32 | layer << 24 | count with layer < 255; all ones below the epoch: the peer has failed, whatever the layer.
struct MoeMkWindows {
  uint8_t* const* values_to;         // [W] where this rank's values go ...
  const int64_t* back_to;            // [W] ... minus this many bytes per row
  uint8_t* const* tails_to;          // [W]
  const int64_t* room_to;            // [W] rows of this rank that the mapped pages hold
  uint64_t* const* flags_to;         // [2 W] flags this rank stores: for rows, then for sums. Own entry: null
  const uint8_t* const* values_from; // [W] where a source writes values in this rank's window ...
  const int64_t* back_from;          // [W] ... minus this many bytes per row
  const uint8_t* const* tails_from;  // [W]
  const uint64_t* const* flags_from; // [2 W] flags peers store in this rank's window. Own entry: null
  const uint8_t* const* sums;        // [W] start of the sums of each rank
  MoeMkFault* fault;                 // out: filled in by a call that returns kPeerFault
  int64_t most_rows;                 // the most rows a rank may send to another in one call
  int32_t rank, num_ranks;
  uint32_t layer;                    // the current layer: its number modulo 255
  const uint64_t* const* failed_from; // [W] flags in which peers report a failure, stored after those of all calls that they
                                     // completed. Own entry: null. null: failures are stored in flags_from alone
};

// The rows of one call for every rank. A row at its destination: values [value_bytes] in one place, its tail
// [scale_bytes | K slots, int32 | K weights, f32] in another; the i-th row for a rank is token_of[rank][i].
struct MoeMkSend {
  const uint8_t* x;          // [T][x_stride bytes]
  const uint8_t* scales;     // [T][scale_bytes] of x; null: none, or computed here
  const int32_t* ids;        // [T][K] physical experts; below 0: dropped
  const float* weights;      // [T][K]
  const int32_t* rank_of;    // [P]
  const int32_t* slot_of;    // [P]
  int32_t* token_of;         // out [W][T]: the tokens of each rank, ascending, each once
  int64_t* counts;           // out [W]
  int64_t num_tokens, x_stride, value_bytes, scale_bytes;
  int32_t top_k, num_experts, columns, row_type, quantize, threads, isa;
  uint32_t epoch;
  int32_t sent;              // out: 0 if some rank would get more rows than its mapped pages hold
};

// Received rows: tails are split, and rows stored apart are copied into order. [R] in the order of sources.
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

// out[t] = the sum of the rows of token t over all ranks, in rank order from zero in f32, rounded once.
struct MoeMkAddUp {
  const int32_t* token_of;   // [W][T], as they were sent
  const int64_t* counts;     // [W]
  int64_t* firsts;           // [W] index of this rank's first sum at each rank; not checked by moe_mk_exchange_add_up
  const uint8_t* own;        // this rank's own sums, from the first on
  uint8_t* out;              // [T][row_bytes]
  int64_t num_tokens, columns;
  int32_t row_type, threads, isa;
  uint32_t epoch;            // this and the following fields: used only by moe_mk_exchange_collect
  int64_t microseconds;
};

// The stages of a layer in the order in which they run; on one rank there are no peers, and those that move rows do nothing.
// A call over windows returns kOk between two of them where its caller has something to do; `stage` is then the next one:
//   kDispatchRows    some rank would get more rows than its mapped pages hold (send->sent is 0): reserve pages
//   kReceiveRows     more rows or sums have arrived than there is room for: reserve pages and memory
//   stop             the caller asked for it
enum LayerStage : int32_t {
  kRouteTokens = 0, kPlaceTokens = 1, kDispatchRows = 2, kRunShared = 3, kAwaitRows = 4, kReceiveRows = 5, kRunExperts = 6,
  kShowSums = 7, kAwaitSums = 8, kAddSums = 9, kAddShared = 10, kLayerDone = 11
};
enum LayerWork : int32_t { kDispatches = 0, kSharedRuns = 1, kExpertRuns = 2, kCombines = 3 };
enum IdForm : int32_t { kWideIds = 1, kSkipOthers = 2 };  // bits, see moe_mk_layer

// Records the logical experts that a layer selects; concurrent calls may append to it.
struct MoeMkCapture {
  void* ids;                 // row t at ids + t * stride: [top_k] uint8 or uint16; none is the greatest value
  int64_t stride, room;      // ids from one row to the next; rows
  int64_t num_tokens;        // rows that are filled
  int32_t id_bytes, top_k;
};

// A layer on one rank, or over one set of windows, then one call at a time. The structures that it points to belong to the
// caller; of experts, rows, ids, weights, outputs and threads are set by the stages.
struct MoeMkLayer {
  const MoeMkRoute* route;   // null: every call is given a routing
  const MoeMkExperts* experts;
  const MoeMkExperts* shared;  // one slot for every token; its output is added to that of the others. null: none
  const int32_t* physical_of;  // [E] the one physical expert of each; -1: on no rank
  const int32_t* rank_of;    // [P]
  const int32_t* slot_of;    // [P]
  int64_t* ran;              // [4][2] added to: how often each LayerWork was done, and on how many rows; null: not counted
  int32_t num_experts, num_physical, rank;
  // Of a layer over windows:
  const MoeMkWindows* windows;  // null: one rank, whose calls may run concurrently and provide their own memory
  MoeMkSend* send;           // ids, once placed: physical experts
  MoeMkReceive* receive;     // ids, weights and scales have room for row_room rows
  MoeMkAddUp* add_up;
  int32_t* own_ids;          // [T][K] routing where the caller gives no memory for it: logical experts
  float* own_weights;        // [T][K]
  int32_t* places;           // [T][K] physical experts; on one rank slots
  float* logits;             // [T][E]
  uint16_t* shared_out;      // [T][H]
  uint8_t* values;           // row 0 of this rank's window
  uint8_t* sums;             // the first sum of this rank's window
  int64_t* received;         // [W] rows received from each rank
  int64_t* moved;            // [2 W + 2] added to: rows sent to each rank, received from each, dispatches, combines
  int64_t seam_row;          // rows of ranks up to `left` end there
  int64_t first_row, end_row;  // rows of the window with pages; of two ranks they always have them
  int64_t sums_room, row_room, microseconds;
  int64_t total;             // out: rows received
  int32_t left, stage;
  // Of the present call, set by moe_mk_layer:
  const void* x;
  void* ids;
  float* weights;
  const float* shared_weights;
  int64_t* load;
  MoeMkCapture* captured;
  void* out;
  int64_t num_tokens;
  int32_t top_k, form, threads;
};

// Sorts tokens by destination rank, writes all rows, then one flag per peer. Writes nothing if a window has no room, an id
// is out of range (kBadId), or an expert is on a rank out of range (kBadShape).
int32_t moe_mk_exchange_dispatch(const MoeMkWindows* windows, MoeMkSend* call);
// Copies the received rows. counts: as checked by moe_mk_exchange_await. kPeerFault: a slot is out of range.
int32_t moe_mk_exchange_receive(const MoeMkWindows* windows, const MoeMkReceive* call);
// Sends each peer the index of its first sum at this rank; counts [W]: rows received from each rank.
void moe_mk_exchange_show(const MoeMkWindows* windows, uint32_t epoch, const int64_t* counts);
int32_t moe_mk_exchange_add_up(const MoeMkWindows* windows, const MoeMkAddUp* call);
// moe_mk_exchange_await for sums into firsts, then moe_mk_exchange_add_up; adds nothing unless all sums have arrived.
int32_t moe_mk_exchange_collect(const MoeMkWindows* windows, MoeMkAddUp* call);
// Polls the flags of all peers, for rows or for sums, until each has reached `epoch` (modulo 2^32; half of all values count
// as earlier) or the given microseconds have passed; yields the core in between. counts [W]: set for peers whose flags have
// arrived, unchanged for others. kLate: some have not arrived. kPeerFault: a count above most_rows, a first sum above
// most_rows times the number of ranks before this one, a flag of another layer, or a peer that failed before it reached
// `epoch`; a peer that failed later counts as arrived.
int32_t moe_mk_exchange_await(const MoeMkWindows* windows, int32_t for_sums, uint32_t epoch, int64_t microseconds,
                              int64_t* counts);
// Runs the stages `first` to `stop` (excluded) of a layer; num_tokens -1 continues a call over windows with any stage. A new
// call begins with
//   kRouteTokens     ids (int32) and weights [T][K] of logical experts are written, if not null
//   kPlaceTokens     they are given, -1: none; form: int64 with kWideIds; with kSkipOthers ids that do not exist are skipped as
//                    -1 is, otherwise they are kBadId, with nothing counted
//   kDispatchRows    physical experts are given, in int32
// x [T][H] and out [T][H]: bf16, contiguous. load [E]: the number of times each expert was chosen is added to it in
// kPlaceTokens; null: nothing is counted. captured: the choices are added to it there, kBadShape: it has no room for them, and
// nothing is counted; null: they are not kept. shared_weights [T]: of the shared experts; null: ones. epoch: of the windows' flags.
// kLate: peers are late in kAwaitRows or kAwaitSums, which is `stage`; the caller waits, stores the words in `received` or in
// add_up->firsts, and continues with the stage after it.
int32_t moe_mk_layer(MoeMkLayer* layer, int32_t first, int32_t stop, const void* x, int64_t num_tokens, void* ids,
                     float* weights, int32_t top_k, int32_t form, const float* shared_weights, int64_t* load,
                     MoeMkCapture* captured, void* out, int32_t threads, uint32_t epoch);
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
