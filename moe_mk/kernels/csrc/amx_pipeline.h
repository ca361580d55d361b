// FP8 times bf16 rows on AMX with exact block scales: one panel of weights is decoded while another is multiplied.
//
// A unit is one scale block (at most 128 k) of one pair of columns, decoded a panel of at most 8 KiB. Some lines of the next
// unit are decoded after each step of tile products, and each line prefetches one further ahead, so that requests to memory
// are spread evenly: decoding a panel at a time asks for 128 lines in a burst and for none while tiles multiply.
// The sums of a unit leave the tiles unscaled. They are multiplied by the scales of the block and added to the f32 totals one
// row block later, when the tile stores have completed. No weight is rounded.
// Each total is one chain over the blocks of k in order: the same bits for any number of rows, pairs and threads.
// Two pairs, half of the task apart, alternate: two memory streams, and rows are in L1 for the second pair.
// Reads packed weights once, rows once a pair from L2. Writes totals [pair][row][32].
#pragma once
#include "amx_panel.h"
#include "amx_totals.h"
#include "lines.h"

namespace moe_mk {
namespace {

constexpr size_t kLinePair = 128;         // one line of codes of both tiles: four k of 32 columns
constexpr int kLinesPerStep = kStep / 4;  // line pairs of one step
constexpr int kRowBlock = 2 * kTileRows;  // rows multiplied at a time
constexpr size_t kStepTile = kTileRows * kRowBytes;  // one step of one tile of rows: 1 KiB

// e4m3 -> bf16 by VGF2P8AFFINEQB, which unlike VPERMI2B does not depend on a single port. Except for exponent 0 (zeros and
// subnormals) both bytes are affine over GF(2) in the code s eeee mmm:
//   low byte   mmm. ....   = code << 4
//   high byte  s... ..ee   = sign | (0x3c + (code >> 4 & 7)), the bias 7 -> 127; the carry only means bits 2..5 = not bit 6
constexpr uint64_t kLowByte = 0x0000000001020408, kHighByte = 0x1020404040404080;
constexpr uint8_t kHighConstant = 0x3c, kExponent = 0x78;

__attribute__((noinline)) void decode_subnormals(const uint8_t* codes, uint8_t* panel) {
  for (int tile = 0; tile < 2; ++tile) {
#if defined(MOE_MK_AMX_AVX512)
    expand_lines(Fp8(), codes + tile * 64, 1, Unscaled(), panel + tile * 64);
#else
    PortableFp8::rows(codes + tile * 64, panel + tile * 64);
#endif
  }
}

// One line of both tiles: 128 codes -> four rows of 64 B of the panel. Lines with an exponent of 0 (about 1 in 100 of Gaussian
// weights) are decoded again by tables.
inline __attribute__((always_inline)) void decode_lines(const uint8_t* codes, uint8_t* panel, int ahead) {
  const Line first = load_line(codes), second = load_line(codes + 64);
  __builtin_prefetch(codes + ahead);
  __builtin_prefetch(codes + ahead + 64);
  const Line low0 = gf2_affine<kLowByte, 0>(first), high0 = gf2_affine<kHighByte, kHighConstant>(first);
  const Line low1 = gf2_affine<kLowByte, 0>(second), high1 = gf2_affine<kHighByte, kHighConstant>(second);
  store_line(panel, interleave_low(low0, high0));
  store_line(panel + 64, interleave_low(low1, high1));
  store_line(panel + kPanelRow, interleave_high(low0, high0));
  store_line(panel + kPanelRow + 64, interleave_high(low1, high1));
  if (__builtin_expect(any_without(first, second, kExponent), 0)) decode_subnormals(codes, panel);
}

// Decodes one unit into a panel, a few lines at a time.
struct UnitDecoder {
  const uint8_t* codes = nullptr;
  uint8_t* panel = nullptr;
  int left = 0;   // line pairs
  int ahead = 0;  // prefetch distance in bytes

  template <int Lines>
  inline __attribute__((always_inline)) void some() {
    if (left < Lines) return;  // finish() decodes the rest
    const uint8_t* from = codes;  // local: stores to the panel may alias members
    uint8_t* to = panel;
    const int distance = ahead;
#pragma GCC unroll 8
    for (int i = 0; i < Lines; ++i) decode_lines(from + i * kLinePair, to + i * 2 * kPanelRow, distance);
    codes = from + Lines * kLinePair;
    panel = to + Lines * 2 * kPanelRow;
    left -= Lines;
  }
  void finish() {
    while (left > 0) some<1>();
  }
};

// Unscaled sums of one row block and unit, to be added to the totals.
struct PendingSums {
  const float* sums = nullptr;
  float* totals = nullptr;
  int rows = 0;
  float scale0 = 0, scale1 = 0;

  inline __attribute__((always_inline)) void add() {
    const f32x16 factor0 = splat(scale0), factor1 = splat(scale1);
    for (int r = 0; r < rows; ++r) {
      const float* from = sums + r * kPairColumns;
      float* to = totals + r * kPairColumns;
      store(to, load<f32x16>(to) + load<f32x16>(from) * factor0);
      store(to + kTileColumns, load<f32x16>(to + kTileColumns) + load<f32x16>(from + kTileColumns) * factor1);
    }
    rows = 0;
  }
};

// The units of one chunk of k in the order of their computation: for each two pairs that alternate, block by block.
struct UnitOrder {
  int num_pairs, num_blocks;
  int first = 0, block = 0, which = 0;  // pairs first and first + num_pairs / 2

  int apart() const { return num_pairs / 2; }
  bool alone() const { return first == apart(); }  // the last pair of an odd number
  int pair() const { return alone() ? num_pairs - 1 : first + which * apart(); }
  // false: there is no further unit.
  bool next() {
    if (!alone() && which == 0) {
      which = 1;
      return true;
    }
    which = 0;
    if (++block < num_blocks) return true;
    block = 0;
    ++first;
    return first < apart() || (first == apart() && num_pairs % 2 != 0);
  }
};

// One step of k. Tiles 0..3 are sums (row tile, column tile), 4 and 5 rows, 6 and 7 weights.
// NOTE loads come before products: where another thread shares the core they do not overlap, and this order costs 69 cycles
// a product, loading each operand just before its use 78; on a core of its own both cost 16.
template <bool Two>
inline __attribute__((always_inline)) void multiply_step(const uint8_t* rows, size_t row_tile_bytes, const uint8_t* panel) {
  tile_load<6>(panel, kPanelRow);
  tile_load<4>(rows, kRowBytes);
  tile_load<7>(panel + 64, kPanelRow);
  if (Two) tile_load<5>(rows + row_tile_bytes, kRowBytes);
  tile_dot<0, 4, 6>();
  tile_dot<1, 4, 7>();
  if (Two) {
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
}

// One row block of one unit: sums [32][32], while `Lines` line pairs of the next unit are decoded after each step.
template <bool Two, int Lines>
inline __attribute__((always_inline)) void multiply_row_block(const uint8_t* rows, size_t row_tile_bytes, const uint8_t* panel,
                                                              int steps, float* sums, UnitDecoder& decoder, PendingSums& pending) {
  tile_zero<0>();
  tile_zero<1>();
  if (Two) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int s = 0; s < steps; ++s) {
    multiply_step<Two>(rows + s * kStepTile, row_tile_bytes, panel + s * 2 * kPanelTile);
    decoder.some<Lines>();
    if (s == 0) pending.add();
  }
  tile_store<0>(sums, kTotalsStride);
  tile_store<1>(sums + kTileColumns, kTotalsStride);
  if (Two) {
    tile_store<2>(sums + kTileRows * kPairColumns, kTotalsStride);
    tile_store<3>(sums + kTileRows * kPairColumns + kTileColumns, kTotalsStride);
  }
}

// Some steps of k and the rows of these steps: [row tile][step][16][32] bf16, row tiles `row_tile_bytes` apart.
struct TiledChunk {
  int step0, steps;
  const uint8_t* rows;
  size_t row_tile_bytes;
};

template <int Lines>
void multiply_chunk(const Columns& w, int num_rows, const TiledChunk& chunk, const Scratch& scratch, float* totals) {
  const int unit_steps = w.steps_per_block;
  const auto steps_of = [&](int block) {
    const int rest = chunk.steps - block * unit_steps;
    return rest < unit_steps ? rest : unit_steps;
  };
  UnitOrder order = {w.num_pairs, (chunk.steps + unit_steps - 1) / unit_steps};
  UnitDecoder decoder;
  decoder.ahead = 2 * w.prefetch;  // each of the two streams is read at half of the rate
  int panels = 0;                  // started: two panels alternate
  const auto start = [&](const UnitOrder& unit) {
    const int step = chunk.step0 + unit.block * unit_steps;
    decoder.codes = w.data + unit.pair() * w.pair_bytes + size_t(step) * w.step_bytes;
    decoder.panel = scratch.panel + (panels++ & 1) * unit_steps * 2 * kPanelTile;
    decoder.left = steps_of(unit.block) * kLinesPerStep;
  };
  PendingSums pending;
  int row_blocks = 0;  // finished: two blocks of sums alternate
  start(order);
  for (bool more = true; more;) {
    decoder.finish();
    const UnitOrder unit = order;
    const uint8_t* panel = scratch.panel + ((panels - 1) & 1) * unit_steps * 2 * kPanelTile;
    more = order.next();
    if (more) start(order);
    const int pair = unit.pair(), step = unit.block * unit_steps, block = chunk.step0 / unit_steps + unit.block;
    const float *scales0 = tile_scales(w, pair, 0), *scales1 = tile_scales(w, pair, 1);
    for (int row = 0; row < num_rows; row += kRowBlock) {
      const uint8_t* rows = chunk.rows + row / kTileRows * chunk.row_tile_bytes + step * kStepTile;
      float* sums = scratch.tiles + (row_blocks++ & 1) * kRowBlock * kPairColumns;
      const int left = num_rows - row;
      memory_barrier();
      if (left > kTileRows) multiply_row_block<true, Lines>(rows, chunk.row_tile_bytes, panel, steps_of(unit.block), sums, decoder, pending);
      else multiply_row_block<false, Lines>(rows, chunk.row_tile_bytes, panel, steps_of(unit.block), sums, decoder, pending);
      memory_barrier();
      pending = {sums, totals + (size_t(pair) * num_rows + row) * kPairColumns, left < kRowBlock ? left : kRowBlock,
                 scales0 == nullptr ? 1.0f : scales0[block], scales1 == nullptr ? 1.0f : scales1[block]};
    }
  }
  pending.add();
}

void multiply_pipelined(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int n = rows.num_rows, chunk_steps = steps_that_fit(w.gather_bytes, n, kTileRows, w.steps_per_block);
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  if (n < kTileRows) configure_tiles(n);
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk_steps) {
    const int steps = w.num_steps - step0 < chunk_steps ? w.num_steps - step0 : chunk_steps;
    TiledChunk chunk = {step0, steps, scratch.gathered, steps * kStepTile};
    if (rows.tiles != nullptr) chunk = {step0, steps, rows.tiles + step0 * kStepTile, w.num_steps * kStepTile};
    else gather_rows(rows, kTileRows, step0, steps, scratch.gathered, n >= kTileRows);
    // Line pairs after each step, so that the next unit is decoded when the products of all row blocks are done.
    switch ((n + kRowBlock - 1) / kRowBlock) {
      case 1: multiply_chunk<kLinesPerStep>(w, n, chunk, scratch, totals); break;
      case 2: multiply_chunk<kLinesPerStep / 2>(w, n, chunk, scratch, totals); break;
      case 3:
      case 4:
      case 5:
      case 6:
      case 7: multiply_chunk<kLinesPerStep / 4>(w, n, chunk, scratch, totals); break;
      default: multiply_chunk<1>(w, n, chunk, scratch, totals);
    }
  }
  if (n < kTileRows) configure_tiles();
}

}  // namespace
}  // namespace moe_mk
