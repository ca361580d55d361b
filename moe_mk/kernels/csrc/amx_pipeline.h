// Packed weights times bf16 rows on AMX: one panel of weights is decoded while another is multiplied.
//
// A unit is one scale block (at most 128 k) of one pair of columns, decoded a panel of at most 8 KiB. Some line pairs of the
// next weights are decoded after each step of tile products, and each prefetches one further ahead, so that requests to memory
// are spread evenly: decoding a panel at a time asks for 128 lines in a burst and for none while tiles multiply.
// The sums of a unit leave the tiles unscaled. They are multiplied by the scales of the block and of the row, and added to the
// f32 totals during the next unit, some rows after each step of its products. No weight is rounded.
// Each total is one chain over the blocks of k in order: the same bits for any number of rows, pairs and threads.
//
// Up to kStreamedRows rows (a tuning parameter), units in turn: two panels (16 KiB) alternate in L1, and two pairs, half of the
// task apart, alternate: two memory streams, and rows are in L1 for the second pair.
// More rows: the panels of eight pairs and 128 k (64 KiB, two of them alternate in L2) are multiplied by all rows, of which
// 64 (16 KiB) stay in L1 for the eight pairs: 8 KiB of a panel serve 64 rows. An f32 total is read and written once in 128 k.
// Reads packed weights once, rows once (up to 64: once a pair, from L2). Writes totals [pair][row][32].
#pragma once
#include "amx_decode.h"
#include "tiles.h"

namespace moe_mk {
namespace {

constexpr int kRowBlock = 2 * kTileRows;  // rows multiplied at a time
constexpr int kUnscaledSteps = 4;         // steps of a unit where weights have no block scales
constexpr int kAddedRows = 8;             // rows of sums added to the totals after each step
constexpr int kScalesAhead = 4;           // units of which the scales of parts are prefetched
constexpr size_t kTotalsStride = kPairColumns * sizeof(float);

// Decodes some steps of one pair into a panel, a few line pairs at a time.
template <typename Policy>
struct UnitDecoder {
  const Columns& w;
  const Distances ahead;
  const Policy policy = {};
  Source source = {};
  uint8_t* panel = nullptr;
  int left = 0;     // line pairs

  explicit UnitDecoder(const Columns& columns) : w(columns), ahead{columns.prefetch * 3 / 8, 3 * columns.prefetch} {}

  void start(int pair, int step, int steps, uint8_t* to) {
    const uint8_t* codes = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
    source = {codes, w.groups == nullptr ? nullptr : group_scales(w, pair, step), 0, &w, pair, step};
    panel = to;
    left = steps * Policy::kLines;
  }
  template <int Lines>
  inline __attribute__((always_inline)) void some() {
    if (left < Lines) return;    // finish() decodes the rest
    const Source from = source;  // local: stores to the panel may alias members
    uint8_t* to = panel;
    policy.template decode<Lines>(from, to, ahead);
    count_decoded(Policy::kInPlace ? 0 : Lines * Policy::kRows * 2 * kPairColumns);
    source.codes = from.codes + (Policy::kLines == 1 ? w.step_bytes : Lines * kLinePair);
    source.line = from.line + Lines;
    if (source.line == Policy::kLines) {  // Lines divides it
      source.line = 0;
      ++source.step;
      if (from.scales != nullptr) source.scales = from.scales + groups_of_step(w.format) * kPairColumns;
    }
    panel = to + Lines * Policy::kRows * kPanelRow;
    left -= Lines;
  }
  void finish() {
    while (left > 0) some<1>();
  }
};

// Decodes the same steps of several pairs, their panels one after the other.
template <typename Policy>
struct BlockDecoder {
  UnitDecoder<Policy> unit;
  int pair = 0, last = 0, step = 0, steps = 0;  // pairs pair..last - 1 have not been started
  uint8_t* panel = nullptr;

  void start(int first, int pairs, int from, int count, uint8_t* to) {
    pair = first;
    last = first + pairs;
    step = from;
    steps = count;
    panel = to;
    next();
  }
  bool next() {
    if (pair == last) return false;
    unit.start(pair++, step, steps, panel);
    panel += size_t(steps) * 2 * kPanelTile;
    return true;
  }
  template <int Lines>
  inline __attribute__((always_inline)) void some() {
    if (unit.left == 0 && !next()) return;
    unit.template some<Lines>();
  }
  void finish() {
    do unit.finish();
    while (next());
  }
};

// Unscaled sums of one row block and unit, to be added to the totals.
struct PendingSums {
  const float* sums = nullptr;
  float* totals = nullptr;
  int rows = 0;
  bool first = false;                        // of their totals, which are written
  const float* scales = nullptr;             // [32]
  const float* const* row_scales = nullptr;  // of these rows, null: 1
  int row_block = 0;                         // of row_scales
  int added = 0;                             // rows

  template <bool First, bool Scaled>
  inline __attribute__((always_inline)) void add_as(int end) {
    const f32x16 scale0 = load<f32x16>(scales), scale1 = load<f32x16>(scales + kTileColumns);
    const float* from = sums + added * kPairColumns;
    float* to = totals + added * kPairColumns;
    for (; added < end; ++added, from += kPairColumns, to += kPairColumns) {
      const float row = Scaled ? row_scales[added][row_block] : 1.0f;
      const f32x16 factor0 = Scaled ? scale0 * row : scale0, factor1 = Scaled ? scale1 * row : scale1;
      f32x16 add0 = load<f32x16>(from) * factor0, add1 = load<f32x16>(from + kTileColumns) * factor1;
      if (!First) {
        add0 = load<f32x16>(to) + load<f32x16>(from) * factor0;
        add1 = load<f32x16>(to + kTileColumns) + load<f32x16>(from + kTileColumns) * factor1;
      }
      store(to, add0);
      store(to + kTileColumns, add1);
    }
  }
  // The next rows, at most `count`.
  __attribute__((noinline)) void add(int count) {
    const int end = added + count < rows ? added + count : rows;
    if (row_scales == nullptr) first ? add_as<true, false>(end) : add_as<false, false>(end);
    else first ? add_as<true, true>(end) : add_as<false, true>(end);
  }
  // The same between two products of many rows, whose blocks are nearly all alike.
  inline __attribute__((always_inline)) void add_between() {
    if (added == rows) return;
    if (rows == kRowBlock && row_scales == nullptr && !first) add_as<false, false>(added + kAddedRows);
    else add(kAddedRows);
  }
  void finish() {
    if (added < rows) add(rows);
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

constexpr int kPrefetchedRows = 256;  // bytes

inline __attribute__((always_inline)) void prefetch_rows(const uint8_t* from) {
  for (int i = 0; i < kPrefetchedRows; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// One row block of one unit: sums [32][32], while `Lines` line pairs of the next weights are decoded after each step, and the
// sums of the unit before it are added. With next_rows, some of the rows that will be multiplied later are prefetched.
template <bool Two, int Lines, typename Decoder>
inline __attribute__((always_inline)) void multiply_row_block(const uint8_t* rows, size_t row_tile_bytes, const uint8_t* panel,
                                                              int steps, float* sums, Decoder& decoder, PendingSums& pending,
                                                              const uint8_t* next_rows) {
  tile_zero<0>();
  tile_zero<1>();
  if (Two) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int s = 0; s < steps; ++s) {
    multiply_step<Two>(rows + s * kStepTile, row_tile_bytes, panel + s * 2 * kPanelTile);
    decoder.template some<Lines>();
    if (next_rows != nullptr) {
      prefetch_rows(next_rows + s * kPrefetchedRows);
      pending.add_between();
    } else if (pending.added < pending.rows && (Two || s > 0)) {
      pending.add(Two ? kAddedRows : kTileRows);  // of one tile, when the tile stores have completed
    }
  }
  pending.finish();
  tile_store<0>(sums, kTotalsStride);
  tile_store<1>(sums + kTileColumns, kTotalsStride);
  if (Two) {
    tile_store<2>(sums + kTileRows * kPairColumns, kTotalsStride);
    tile_store<3>(sums + kTileRows * kPairColumns + kTileColumns, kTotalsStride);
  }
}

// One product: columns times rows into totals.
struct Product {
  const Columns& w;
  const Rows& rows;
  const Scratch& scratch;
  float* totals;
  const int unit_steps;
  int num_units = 0;  // multiplied: the scales of two of them alternate
  alignas(64) float scales[2][kPairColumns];
  PendingSums pending = {};

  Product(const Columns& columns, const Rows& all, const Scratch& memory, float* to)
      : w(columns), rows(all), scratch(memory), totals(to),
        unit_steps(columns.scales == nullptr ? kUnscaledSteps : columns.steps_per_block) {}

  // The scales of the next unit of formats with parts, where a part is a unit.
  void load_part_scales(int pair, int step, int steps) {
    part_scales(w, pair, step, steps, scales[++num_units & 1], nullptr);
    const size_t bytes = w.pair_scales * unit_steps / w.num_steps;
    for (size_t at = 0; at < bytes; at += 64)
      __builtin_prefetch(w.part_scales + pair * w.pair_scales + size_t(step / unit_steps + kScalesAhead) * bytes + at);
  }
  void load_block_scales(int pair, int block) {
    float* to = scales[++num_units & 1];
    const float *scales0 = tile_scales(w, pair, 0), *scales1 = tile_scales(w, pair, 1);
    store(to, splat(scales0 == nullptr ? 1.0f : scales0[block]));
    store(to + kTileColumns, splat(scales1 == nullptr ? 1.0f : scales1[block]));
  }

  // One row block times a unit, with the scales that were loaded last. at: the rows of step `step`, a row tile each `stride`
  // bytes. next_rows: to prefetch; may be null.
  template <int Lines, typename Decoder>
  inline __attribute__((always_inline)) void multiply(int pair, int step, int steps, int row, const uint8_t* at, size_t stride,
                                                      const uint8_t* panel, Decoder& decoder, const uint8_t* next_rows) {
    const int left = rows.num_rows - row;
    memory_barrier();
    if (left > kTileRows) multiply_row_block<true, Lines>(at, stride, panel, steps, scratch.tiles, decoder, pending, next_rows);
    else multiply_row_block<false, Lines>(at, stride, panel, steps, scratch.tiles, decoder, pending, next_rows);
    memory_barrier();
    float* to = totals + (size_t(pair) * rows.num_rows + row) * kPairColumns;
    const float* const* row_scales = rows.scales == nullptr ? nullptr : rows.scales + row;
    pending = {scratch.tiles, to, left < kRowBlock ? left : kRowBlock, step == 0, scales[num_units & 1], row_scales,
               step * kStep / kActivationBlock, 0};
  }
};

// The steps [step0, step0 + tiles.num_steps) of rows that are few enough.
template <typename Policy, int Lines>
void multiply_chunk(Product& product, int step0, const TiledRows& tiles) {
  const Columns& w = product.w;
  const int unit_steps = product.unit_steps;
  const auto steps_of = [&](int block) {
    const int rest = tiles.num_steps - block * unit_steps;
    return rest < unit_steps ? rest : unit_steps;
  };
  UnitOrder order = {w.num_pairs, (tiles.num_steps + unit_steps - 1) / unit_steps};
  UnitDecoder<Policy> decoder(w);
  int panels = 0;  // started: two panels alternate
  const auto start = [&](const UnitOrder& unit) {
    uint8_t* to = product.scratch.panel + (panels++ & 1) * unit_steps * 2 * kPanelTile;
    decoder.start(unit.pair(), step0 + unit.block * unit_steps, steps_of(unit.block), to);
  };
  start(order);
  for (bool more = true; more;) {
    decoder.finish();
    const UnitOrder unit = order;
    const int first = unit.block * unit_steps, steps = steps_of(unit.block), pair = unit.pair();
    const uint8_t* panel = product.scratch.panel + ((panels - 1) & 1) * unit_steps * 2 * kPanelTile;
    if (Policy::kInPlace) panel = w.data + pair * w.pair_bytes + size_t(step0 + first) * w.step_bytes;
    more = order.next();
    if (more) start(order);
    if (Policy::kParts) product.load_part_scales(pair, step0 + first, steps);
    else product.load_block_scales(pair, (step0 + first) / unit_steps);
    for (int row = 0; row < product.rows.num_rows; row += kRowBlock)
      product.multiply<Lines>(pair, step0 + first, steps, row, tiles.at(row / kTileRows, first), tiles.stride(first), panel,
                              decoder, nullptr);
  }
}

template <typename Policy>
void multiply_streamed(Product& product) {
  const Columns& w = product.w;
  const Rows& rows = product.rows;
  const int n = rows.num_rows;
  const auto multiply = [&](int step0, const TiledRows& tiles) {
    // Line pairs after each step, so that the next unit is decoded when the products of all row blocks are done.
    if (n <= kRowBlock) multiply_chunk<Policy, Policy::kLines>(product, step0, tiles);
    else multiply_chunk<Policy, (Policy::kLines + 1) / 2>(product, step0, tiles);
  };
  if (rows.tiles.data != nullptr) {
    multiply(0, rows.tiles);
  } else {
    const int chunk = steps_that_fit(w.gather_bytes, n, kTileRows, product.unit_steps);
    for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
      const int steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
      gather_rows(rows, kTileRows, step0, steps, product.scratch.gathered, n >= kTileRows);
      multiply(step0, {product.scratch.gathered, steps, (n + kTileRows - 1) / kTileRows, 0, steps});
    }
  }
  product.pending.finish();
}

// All rows of some pairs: the panels of 128 k at a time.
template <typename Policy, int Lines>
void multiply_many(Product& product, int first, int pairs) {
  const Columns& w = product.w;
  const Rows& rows = product.rows;
  const Scratch& scratch = product.scratch;
  const int row_tiles = (rows.num_rows + kTileRows - 1) / kTileRows;
  BlockDecoder<Policy> decoder = {UnitDecoder<Policy>(w)};
  const auto steps_from = [&](int step) { return w.num_steps - step < kBlockSteps ? w.num_steps - step : kBlockSteps; };
  const auto panels_of = [&](int step) { return scratch.panel + step / kBlockSteps % 2 * (kPanelBytesOfBlock / 2); };
  decoder.start(first, pairs, 0, steps_from(0), panels_of(0));
  for (int step0 = 0; step0 < w.num_steps; step0 += kBlockSteps) {
    const int steps = steps_from(step0);
    decoder.finish();
    const int next = step0 + steps;
    if (next < w.num_steps) decoder.start(first, pairs, next, steps_from(next), panels_of(next));
    TiledRows tiles = {scratch.gathered, steps, row_tiles, 0, steps};
    int at = 0;
    if (rows.tiles.data != nullptr) {
      tiles = rows.tiles;
      at = step0;
    } else {
      gather_rows(rows, kTileRows, step0, steps, scratch.gathered, true);
    }
    for (int row = 0; row < rows.num_rows; row += 2 * kRowBlock) {
      const uint8_t* from = tiles.at(row / kTileRows, at);
      const size_t stride = tiles.stride(at), block_bytes = kRowBlock / kTileRows * stride;
      const int blocks = rows.num_rows - row > kRowBlock ? 2 : 1;
      for (int p = 0; p < pairs; ++p)
        for (int s = 0; s < steps; s += product.unit_steps) {
          const uint8_t* panel = panels_of(step0) + size_t(p * steps + s) * 2 * kPanelTile;
          if (Policy::kInPlace) panel = w.data + (first + p) * w.pair_bytes + size_t(step0 + s) * w.step_bytes;
          const int some = steps - s < product.unit_steps ? steps - s : product.unit_steps;
          if (Policy::kParts) product.load_part_scales(first + p, step0 + s, some);
          else product.load_block_scales(first + p, (step0 + s) / product.unit_steps);
          // Of the row blocks after the next ones, as much as the share of these products.
          const uint8_t* next_rows = from + 4 * block_bytes + size_t(p * steps + s) * blocks * kPrefetchedRows;
          for (int block = 0; block < blocks; ++block, next_rows += some * kPrefetchedRows)
            product.multiply<Lines>(first + p, step0 + s, some, row + block * kRowBlock,
                                    from + block * block_bytes + s * kStepTile, stride, panel, decoder, next_rows);
        }
    }
  }
  product.pending.finish();
}

template <typename Policy>
void multiply_with(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  Product product(w, rows, scratch, totals);
  need_tiles(rows.num_rows);
  if (rows.num_rows <= w.streamed_rows) return multiply_streamed<Policy>(product);
  for (int first = 0; first < w.num_pairs; first += kPanelPairs) {
    const int pairs = w.num_pairs - first < kPanelPairs ? w.num_pairs - first : kPanelPairs;
    // The next panels are decoded in equal shares after the steps of up to 8 row blocks. NOTE decoded after those of the first two,
    // FP8 lines would be requested at 8 bytes a cycle (512 bytes in 4 products) and then none; not timed yet.
    const int row_blocks = (rows.num_rows + kRowBlock - 1) / kRowBlock;
    if (row_blocks < 4) multiply_many<Policy, (Policy::kLines + 1) / 2>(product, first, pairs);
    else if (row_blocks < 8) multiply_many<Policy, (Policy::kLines + 3) / 4>(product, first, pairs);
    else multiply_many<Policy, (Policy::kLines + 7) / 8>(product, first, pairs);
  }
}

}  // namespace
}  // namespace moe_mk
