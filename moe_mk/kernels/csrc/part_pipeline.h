// The tile products of weights in parts of k (part_scales.h), for bf16 rows (amx_parts.h) and INT8 rows (isa_amxint8parts.cpp).
//
// A block is a unit of at most 128 k of 16 rows x 32 columns. The products of its parts take turns in two pairs of tiles: while
// one is multiplied, the sums of the part before are stored, and rows of the block before are scaled and added, four parts
// at a time: an f32 total is read and written once in a unit. Nothing waits for the latency of a product.
// NOTE where another thread shares the core, half of the reorder buffer holds about one part; with stores next to their
// products nothing overlaps: 1.25 to 1.4 of the time.
// Each total is one chain over the parts of k in order: the same bits for any number of rows, pairs and threads.
#pragma once
#include "part_scales.h"
#include "tiles.h"

namespace moe_mk {
namespace {

constexpr int kUnitParts = 4;   // at most, of a unit: their scales fill half of the registers
constexpr int kUnitScales = 4;  // units of which scales are needed at a time: of two blocks before the one that is multiplied
constexpr size_t kSumsStride = kPairColumns * sizeof(float);
constexpr size_t kSumsTile = kTileRows * kPairColumns;  // floats: 16 rows of one part
constexpr size_t kBlockSums = kUnitParts * kSumsTile;

// Scales and minima of some units, [unit][part][32].
struct UnitScales {
  alignas(64) float scales[kUnitScales][kUnitParts * kPairColumns], minima[kUnitScales][kUnitParts * kPairColumns];
  int units = 0;

  int next(const Columns& w, int pair, int step, int steps) {
    const int which = units++ % kUnitScales;
    part_scales(w, pair, step, steps, scales[which], minima[which]);
    return which;
  }
};

// The sums of a block. Of: how a part of a row is added, with the rows' factors.
template <typename Of>
struct BlockSums {
  const float* sums = nullptr;  // [part][16][32] f32 or s32
  float* totals = nullptr;
  const float *scales = nullptr, *minima = nullptr;  // [part][32]; null: no minima
  Of rows = {};
  int num_rows = 0, parts = 0;
  int added = 0;  // rows

  template <int Parts, bool Minima>
  inline __attribute__((always_inline)) void add_as(int end) {
    f32x16 scale[Parts][2], minimum[Parts][2];
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p)
      for (int t = 0; t < 2; ++t) {
        scale[p][t] = load<f32x16>(scales + p * kPairColumns + t * kTileColumns);
        if (Minima) minimum[p][t] = load<f32x16>(minima + p * kPairColumns + t * kTileColumns);
      }
    const float* from = sums + added * kPairColumns;
    float* to = totals + added * kPairColumns;
    const Of of = rows;
    for (int row = added; row < end; ++row, from += kPairColumns, to += kPairColumns)
      for (int t = 0; t < 2; ++t) {
        f32x16 total = load<f32x16>(to + t * kTileColumns);
#pragma GCC unroll 4
        for (int p = 0; p < Parts; ++p) {
          total = of.add(from + p * kSumsTile + t * kTileColumns, scale[p][t], row, p, total);
          if (Minima) total = of.take(minimum[p][t], row, p, total);
        }
        store(to + t * kTileColumns, total);
      }
    added = end;
  }
  template <bool Minima>
  void add_parts(int end) {
    switch (parts) {
      case 1: return add_as<1, Minima>(end);
      case 2: return add_as<2, Minima>(end);
      case 3: return add_as<3, Minima>(end);
      default: return add_as<kUnitParts, Minima>(end);
    }
  }
  // The next rows, at most `count`.
  __attribute__((noinline)) void add(int count) {
    const int end = added + count < num_rows ? added + count : num_rows;
    if (added == end) return;
    minima == nullptr ? add_parts<false>(end) : add_parts<true>(end);
  }
};

// Kind: Of; kTile, half-steps of k in a tile (1, 2 or 4); kRowStride, from one row of a tile of x to the next; x_offset(h) and
// code_offset(h), in bytes, of half-step h of a unit; dot<C>(): tiles 4 and 6, 7 into C, C + 1.
template <typename Kind>
struct PartPipeline {
  using Sums = BlockSums<typename Kind::Of>;
  Sums open = {}, adding = {};  // whose parts are stored, whose rows are added
  float* to = nullptr;          // where the sums are stored that are in tiles
  int turn = 0;

  template <int C, typename Decoder>
  inline __attribute__((always_inline)) void dot(const uint8_t* x, const uint8_t* codes, int first, int last, Decoder& decoder) {
    tile_zero<C>();
    tile_zero<C + 1>();
    for (int h = first; h < last; h += Kind::kTile) {
      tile_load<6>(codes + Kind::code_offset(h), kPanelRow);
      tile_load<4>(x + Kind::x_offset(h), Kind::kRowStride);
      tile_load<7>(codes + Kind::code_offset(h) + 64, kPanelRow);
      Kind::template dot<C>();
      decoder.some();
    }
  }
  template <int C>
  inline __attribute__((always_inline)) void store_sums() {
    if (to == nullptr) return;
    tile_store<C>(to, kSumsStride);
    tile_store<C + 1>(to + kTileColumns, kSumsStride);
  }
  // One block; `decoder` decodes some of the next weights after each tile of k. part: half-steps of k.
  template <typename Decoder>
  inline void block(const Sums& next, const uint8_t* x, const uint8_t* codes, int half_steps, int part, float* sums,
                    Decoder& decoder) {
    const int rows_each = (kTileRows + next.parts - 1) / next.parts;
    for (int p = 0, done = 0; p < next.parts; ++p, done += part) {
      const int end = done + part < half_steps ? done + part : half_steps;
      if (turn ^= 1) {
        dot<0>(x, codes, done, end, decoder);
        store_sums<2>();
      } else {
        dot<2>(x, codes, done, end, decoder);
        store_sums<0>();
      }
      to = sums + p * kSumsTile;
      adding.add(p == 0 ? kTileRows : rows_each);
      if (p > 0) continue;  // the last part of the block before has been stored
      adding = open;
      open = next;
    }
  }
  void finish() {
    memory_barrier();
    turn != 0 ? store_sums<0>() : store_sums<2>();
    to = nullptr;
    memory_barrier();
    adding.add(kTileRows);
    open.add(kTileRows);
    adding = open = {};
  }
};

}  // namespace
}  // namespace moe_mk
