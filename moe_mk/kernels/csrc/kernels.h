// The functions of one instruction set: a table of functions over raw memory, one table per translation unit.
// Everything the per-ISA units include is in an unnamed namespace: two units compiled with different flags must not share
// an inline function, or the linker may select the AVX-512 copy on a machine without AVX-512.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "formats.h"

namespace moe_mk {

constexpr int kTileRows = 16;                   // rows of x or of sums in one AMX tile
constexpr int kTileColumns = 16;                // columns of one tile
constexpr int kPairColumns = 2 * kTileColumns;  // a pair of tiles is the unit of packing and of work
constexpr int kStep = 32;                       // k of one packing step
constexpr int kActivationBlock = 128;           // k per activation scale
constexpr int kMaxPairs = 16;                   // pairs in one task, which share one gathering of rows
constexpr int kMaxRows = 256;                   // rows multiplied at once; more are split into blocks
constexpr int kMaxTiledRows = 1024;             // the same for rows in tile order, of at most kPanelPairs pairs
constexpr int kStreamedRows = 64;               // up to these unless tuned, panels of weights stay in the L1, above in the L2
constexpr int kFewPartRows = 1;                // of weights in parts on AMX: see few_part_rows
constexpr int kExactRows = 32;                  // AMX scales sums of parts up to these (Q6_K: half), above weights
constexpr int kIntegerTileRows = 9;             // from these on unless tuned, AMX-int8 multiplies integers
constexpr int kIntegerPartRows = 5;             // the same for rows that are rounded in parts
constexpr int kPanelPairs = 8;                  // pairs whose panels are in the L2 at a time, for rows in tile order
constexpr int kBlockSteps = 4;                  // steps of k of these panels, and of rows in tile order: 128 k
constexpr size_t kRowBytes = kStep * 2;         // one row of one step, bf16
constexpr size_t kPanelTile = kTileColumns * kStep * 2;  // one decoded tile of one step: 1 KiB
constexpr size_t kPanelRow = kPairColumns * 4;  // one k pair of both decoded tiles, side by side
constexpr size_t kStepTile = kTileRows * kRowBytes;  // one step of one tile of rows: 1 KiB
constexpr size_t kPanelBytesOfBlock = 2 * size_t(kPanelPairs) * kBlockSteps * 2 * kPanelTile;  // two panels of a block: 128 KiB
constexpr size_t kGatherBytes = 448u << 10;     // rows gathered at a time unless tuned, with an L2 of 1 MiB or more
constexpr size_t kLeastGatherBytes = 128u << 10;
constexpr size_t kIntegerRowBytes = 356;        // a row of a unit of k as integers (rows_int16.h)

// Some column pairs of one packed matrix.
struct Columns {
  const uint8_t* data;   // first pair, first step
  const float* scales;   // first pair: [pair][2][num_blocks]; null: 1
  const uint8_t* groups; // first pair: [pair][group of k][32], byte scales of the format; null: it has none
  size_t pair_bytes;     // from one pair to the next
  size_t pair_groups;    // bytes of group scales from one pair to the next
  int num_pairs, num_steps, steps_per_block, num_blocks;
  int format;            // Format: which decoding policy reads them
  size_t step_bytes;     // one step of one pair, both tiles
  int prefetch;          // prefetch distance of this stream in bytes
  size_t gather_bytes;   // bytes of rows kept in the L2 at a time
  // Formats with parts (part_scales.h):
  const uint8_t* part_scales;  // first pair; null: another format
  const uint8_t* zeros;        // first pair: [pair][group][32]; null: symmetric
  size_t pair_scales, pair_zeros;  // bytes from one pair to the next
  int scale_type, group_steps;     // ScaleType; steps per scale
  int part_pairs;                  // k pairs of a part: 8 to 64
  bool minima;                     // whether a part has a minimum
  int streamed_rows = kStreamedRows, tile_rows = kIntegerTileRows;
  int few_part_rows = 0;       // up to this many rows AMX multiplies weights in parts by VDPBF16PS
  int exact_rows = 0;          // up to this many rows AMX multiplies the scales of parts into sums, above into weights
  const uint8_t* after = nullptr;  // what this thread probably multiplies next; null: unknown

  bool must_be_decoded() const { return format != kBf16; }
};

// Rows in tile order: [k / 128][row tile][step][16][32] bf16, so that the 128 k of neighbouring row tiles are contiguous.
struct TiledRows {
  const uint8_t* data;  // null: there are none
  int num_steps, num_tiles;
  int first = 0;        // the row tile at() counts from
  int block_steps = kBlockSteps;

  size_t stride(int step) const { return size_t(width(step)) * kStepTile; }
  size_t offset(int tile, int step) const {
    return (size_t(step / block_steps * block_steps) * num_tiles + size_t(first + tile) * width(step) + step % block_steps) * kStepTile;
  }
  const uint8_t* at(int tile, int step) const { return data + offset(tile, step); }

 private:
  int width(int step) const {
    const int rest = num_steps - step / block_steps * block_steps;
    return rest < block_steps ? rest : block_steps;
  }
};

// Rows to multiply, readable up to num_steps * 32 elements: bf16, or s8 codes + 128 (int8.h).
struct Rows {
  const void* const* values;
  const float* const* scales;  // per row, one per 128 k, of codes one in all; null: 1
  int num_rows;
  TiledRows tiles = {};        // the same rows in tile order
  size_t apart = 0;            // bytes from one row to the next if they are neighbours in different cache sets, else 0
  const uint8_t* integers = nullptr;  // the same rows as Kernels::to_integers makes them, one unit after the other; null: there are none

  const uint16_t* bf16(int row) const { return static_cast<const uint16_t*>(values[row]); }
  const uint8_t* codes(int row) const { return static_cast<const uint8_t*>(values[row]); }
};

// Thread-private memory, 64-byte aligned: gathered (Columns::gather_bytes), panel (128 KiB), tiles (16 KiB), sums
// (gathered / 16: one a row and step).
struct Scratch {
  uint8_t* gathered;
  uint8_t* panel;
  float* tiles;
  float* sums;
};

// Rows rounded to INT8 in parts of k.
struct RowLayout {
  int part;        // inputs of a part: 32, 64 or 128
  bool four_bits;  // whether codes are in the order of four-bit weights
};

struct ActivationSpec {
  int kind;
  bool gated;
  float alpha, limit;
};

struct Kernels {
  const char* name;
  int few_rows;        // up to this many rows multiply_few is faster; 0: not available
  bool few_is_equal;   // multiply_few and multiply_many agree bit for bit if there are no scales of k groups,
  bool few_of_groups_is_equal;  // and if there are
  bool few_of_bf16;    // multiply_few is faster for bf16 weights, which need no decoding, too
  bool reads_tiles;    // multiply_many reads Rows::tiles
  void (*leave)();     // called once per thread after the other functions
  // totals: [pair][num_rows][32] f32, overwritten.
  void (*multiply_few)(const Columns&, const Rows&, const Scratch&, float* totals);
  void (*multiply_many)(const Columns&, const Rows&, const Scratch&, float* totals);
  // The same for s8 rows and kInt8 weights, exact but for the scales.
  void (*multiply_int8)(const Columns&, const Rows&, const Scratch&, float* totals);
  // One row of bf16 -> codes + 128 and their scale; codes may begin where x does.
  float (*quantize_int8)(const uint16_t* x, int64_t count, uint8_t* codes);
  // multiply_int8 for rows rounded in parts and weights of formats with parts; round_row makes such rows (int8_parts.h).
  void (*multiply_int8_parts)(const Columns&, const Rows&, const Scratch&, float* totals);
  void (*round_row)(const uint16_t* x, const int8_t* rounded, int64_t count, const RowLayout&, uint8_t* codes, float* scales);
  // One pair of some rows: 32 totals (* scale) (+ bias) -> 16 (gated) or 32 bf16 of h; rows of h are `stride` elements apart.
  void (*activate)(const ActivationSpec&, const float* totals, const float* scale, const float* bias, int num_rows, uint16_t* h,
                   int64_t stride);
  // sum[32] += weight * (totals[32] (* scale[32]) + bias[32])
  void (*accumulate)(const float* totals, const float* scale, const float* bias, float weight, float* sum);
  void (*to_bf16)(const float* from, uint16_t* to, int64_t count);
  // Of rows with a single term: out[rows[r] * stride] = bf16(weights[r] * (totals[r][32] (* scale) (+ bias))), `columns` of 32.
  void (*write_terms)(const float* totals, const float* scale, const float* bias, const float* weights, const int64_t* rows,
                      int num_rows, int64_t columns, uint16_t* out, int64_t stride);
  // 128 bf16 or fewer -> e4m3 codes and their scale, with ue8m0 a power of two.
  float (*quantize)(const float* x, int count, bool ue8m0, uint8_t* codes);
  void (*decode)(const uint8_t* codes, uint16_t* bf16, int64_t count);
  // dots[t * stride + e] = x[t] . gate[e], f32
  void (*gate_dots)(const uint16_t* const* x, int num_tokens, const void* const* gate, int num_experts, bool gate_f32,
                    int hidden, float* dots, int64_t stride);
  // XORs all bytes into one at memory speed; way: a ReadWay, the faster of which depends on the processor.
  uint64_t (*read)(const uint8_t* data, int64_t bytes, int way);
  // Operations of the loop it ran, of the instruction that multiplies rows with weights of integers or, with `floats`, of bf16 and FP8.
  double (*peak)(int64_t iterations, bool floats);
  // Number of units of k that multiply_many converts from bf16 to integers; null or 0: it multiplies bf16. to_integers converts one unit of
  // some rows, kIntegerRowBytes each.
  int (*integer_units)(const Columns&) = nullptr;
  void (*to_integers)(const Columns&, const Rows&, int unit, uint8_t* to) = nullptr;
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512vnni_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();
bool isa_supported(int isa);
// With kAvx512Vnni:
void multiply_int8_avx512(const Columns&, const Rows&, const Scratch&, float* totals);
void multiply_int8_parts_avx512(const Columns&, const Rows&, const Scratch&, float* totals);
uint64_t read_avx512(const uint8_t* data, int64_t bytes, int way);
bool has_amx_int8();                 // on a machine with AMX
void multiply_int8_parts_amx(const Columns&, const Rows&, const Scratch&, float* totals);  // if it has
void multiply_int8_amx(const Columns&, const Rows&, const Scratch&, float* totals);  // if it has
const Kernels* kernels_of(int isa);  // null: not available on this machine
size_t built_in_gather_bytes();      // rows gathered at a time unless tuned: 7/16 of the L2, up to kGatherBytes
int prefetch_distance();             // the best prefetch distance in bytes on this processor, for a stream that is read once

}  // namespace moe_mk
