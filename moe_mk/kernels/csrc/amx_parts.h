// Weights in parts of k times bf16 rows on AMX: INT4 and INT8 groups and ggml blocks.
//
// Up to few_part_rows rows by VDPBF16PS (isa_avx512parts.cpp). Up to exact_rows rows no weight is rounded: codes are decoded into
// bf16 panels as those of other formats (amx_pipeline.h), a step after each step of products, and the sums of parts are scaled by
// part_pipeline.h. For more rows scales and minima are multiplied into the weights (FoldedLines), which takes less time then; so
// they are for rows rounded to FP8, which have scales of their own.
// Batch-invariant calls have one way for any number of rows, which rounds no weight.
// Exact: up to streamed_rows rows the panels of two pairs, half of the task apart, alternate in L1; more rows are multiplied 64 at
// a time by the panels of eight pairs in L2. Parts of 16 k (Q6_K) are half of a tile.
#pragma once
#include "amx_pipeline.h"
#include "part_pipeline.h"

namespace moe_mk {
namespace {

#if defined(MOE_MK_AMX_AVX512)
constexpr auto kMultiplyFewParts = multiply_few_parts;
#else
constexpr auto kMultiplyFewParts = multiply_blocked<PortableOps>;
#endif

// Rows of a block: sums * scale, less minima * the sum of x.
struct Bf16PartRows {
  const float* sums = nullptr;  // [part][stride], from the first row on
  size_t stride = 0;

  inline __attribute__((always_inline)) f32x16 add(const float* sum, f32x16 scale, int, int, f32x16 total) const {
    return total + load<f32x16>(sum) * scale;
  }
  inline __attribute__((always_inline)) f32x16 take(f32x16 minimum, int row, int part, f32x16 total) const {
    return total - minimum * sums[size_t(part) * stride + row];
  }
};

template <int Width>
struct Bf16Part {
  using Of = Bf16PartRows;
  static constexpr int kTile = Width;
  static constexpr size_t kRowStride = kRowBytes;
  static size_t x_offset(int h) { return size_t(h / 2) * kStepTile + size_t(h % 2) * (kRowBytes / 2); }
  static size_t code_offset(int h) { return size_t(h) * kPanelTile; }
  template <int C>
  static inline __attribute__((always_inline)) void dot() {
    tile_dot<C, 4, 6>();
    tile_dot<C + 1, 4, 7>();
  }
};

// Decodes a step of the next weights after each step of products.
template <typename Decoder, int Width>
struct StepDecoder {
  Decoder decoder;
  int turn = 0;

  inline __attribute__((always_inline)) void some() {
    if (Width == 2 || (turn ^= 1) == 0) decoder.template some<1>();
  }
};

// Width: half-steps of k in a tile, 2, or 1 for parts of half a step.
template <typename Policy, int Width>
struct PartProduct {
  static constexpr int kUnit = kUnitParts * Width / 2;  // steps
  const Columns& w;
  const Rows& rows;
  const Scratch& scratch;
  float* totals;
  const int part = w.part_pairs / (kStep / 4);  // half-steps
  UnitScales scales = {};
  PartPipeline<Bf16Part<Width>> pipeline = {};
  int blocks = 0, sums_from = 0;  // scratch.sums begins with step sums_from of the tiles

  // A unit of a pair times rows [row, end). step: of the matrix; at: the same of the tiles; panel: of the unit.
  template <typename Decoder>
  __attribute__((noinline)) void unit(int pair, int step, int steps, int row, int end, const TiledRows& tiles, int at,
                                      const uint8_t* panel, Decoder& decoder) {
    const int which = scales.next(w, pair, step, steps), parts = (2 * steps + part - 1) / part;
    const float* minima = w.minima ? scales.minima[which] : nullptr;
    const float* x_sums = scratch.sums + size_t((at - sums_from) * 2 / part) * rows.num_rows;
    memory_barrier();
    for (; row < end; row += kTileRows) {
      float *sums = scratch.tiles + (blocks++ & 1) * kBlockSums, *to = totals + (size_t(pair) * rows.num_rows + row) * kPairColumns;
      const Bf16PartRows of = {x_sums + row, size_t(rows.num_rows)};
      const int n = rows.num_rows - row < kTileRows ? rows.num_rows - row : kTileRows;
      const uint8_t* x = tiles.at(row / kTileRows, at);
      pipeline.block({sums, to, scales.scales[which], minima, of, n, parts, 0}, x, panel, 2 * steps, part, sums, decoder);
    }
  }

  // Sums of x over the parts of steps [first, last) of the tiles, [part][row], by products with ones. Parts of half a step have no
  // minima.
  void sum_rows(const TiledRows& tiles, int first, int last) {
    alignas(64) uint16_t ones[kTileRows * kStep];
    for (uint16_t& one : ones) one = 0x3f80;
    sums_from = first;
    memory_barrier();
    tile_load<6>(ones, kRowBytes);
    constexpr int kTogether = 8;  // parts, so that no store is read at once
    for (int row = 0; row < rows.num_rows; row += kTileRows) {
      const int n = rows.num_rows - row < kTileRows ? rows.num_rows - row : kTileRows;
      float* to = scratch.sums + row;
      for (int step = first; step < last;) {
        float* at = scratch.tiles;
        int parts = 0;
        for (; parts < kTogether && step < last; ++parts, step += part / 2, at += kTileRows * kTileColumns) {
          tile_zero<0>();
          for (int s = step; s < step + part / 2 && s < last; ++s) {
            tile_load<4>(tiles.at(row / kTileRows, s), kRowBytes);
            tile_dot<0, 4, 6>();
          }
          tile_store<0>(at, kRowBytes);
        }
        memory_barrier();
        for (int p = 0; p < parts; ++p, to += rows.num_rows)
          for (int r = 0; r < n; ++r) to[r] = scratch.tiles[(p * kTileRows + r) * kTileColumns];
        memory_barrier();
      }
    }
  }

  // Steps [first, last) of the tiles, whose first step is step0 of the matrix; two pairs in turn.
  void stream(int step0, const TiledRows& tiles, int first, int last) {
    if (w.minima) sum_rows(tiles, first, last);
    StepDecoder<UnitDecoder<Policy>, Width> decoder = {UnitDecoder<Policy>(w)};
    UnitOrder order = {w.num_pairs, (last - first + kUnit - 1) / kUnit};
    int panels = 0;  // started: two panels alternate
    const auto steps_of = [&](int block) { return last - first - block * kUnit < kUnit ? last - first - block * kUnit : kUnit; };
    const auto start = [&] {
      uint8_t* to = scratch.panel + (panels++ & 1) * kUnit * 2 * kPanelTile;
      decoder.decoder.start(order.pair(), step0 + first + order.block * kUnit, steps_of(order.block), to);
    };
    start();
    for (bool more = true; more;) {
      decoder.decoder.finish();
      const UnitOrder one = order;
      const uint8_t* panel = scratch.panel + ((panels - 1) & 1) * kUnit * 2 * kPanelTile;
      more = order.next();
      if (more) start();
      const int at = first + one.block * kUnit;
      unit(one.pair(), step0 + at, steps_of(one.block), 0, rows.num_rows, tiles, at, panel, decoder);
    }
    pipeline.finish();
  }

  void few() {
    const int n = rows.num_rows, row_tiles = (n + kTileRows - 1) / kTileRows;
    // Sums of x of all parts fit as well: gather_bytes / 64 of them.
    const int chunk = steps_that_fit(w.gather_bytes, n, kTileRows, kBlockSteps);
    for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
      const int steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
      if (rows.tiles.data != nullptr) {
        stream(0, rows.tiles, step0, step0 + steps);
      } else {
        gather_rows(rows, kTileRows, step0, steps, scratch.gathered, n >= kTileRows);
        stream(step0, {scratch.gathered, steps, row_tiles, 0, steps}, 0, steps);
      }
    }
  }

  // The panels of 128 k of at most kPanelPairs pairs at a time.
  void many(int first, int pairs) {
    const int row_tiles = (rows.num_rows + kTileRows - 1) / kTileRows;
    StepDecoder<BlockDecoder<Policy>, Width> decoder = {{UnitDecoder<Policy>(w)}};
    const auto steps_from = [&](int step) { return w.num_steps - step < kBlockSteps ? w.num_steps - step : kBlockSteps; };
    const auto panels_of = [&](int step) { return scratch.panel + step / kBlockSteps % 2 * (kPanelBytesOfBlock / 2); };
    decoder.decoder.start(first, pairs, 0, steps_from(0), panels_of(0));
    for (int step0 = 0; step0 < w.num_steps; step0 += kBlockSteps) {
      const int steps = steps_from(step0), next = step0 + steps;
      decoder.decoder.finish();
      if (next < w.num_steps) decoder.decoder.start(first, pairs, next, steps_from(next), panels_of(next));
      TiledRows tiles = {scratch.gathered, steps, row_tiles, 0, steps};
      int at = 0;
      if (rows.tiles.data != nullptr) {
        tiles = rows.tiles;
        at = step0;
      } else {
        gather_rows(rows, kTileRows, step0, steps, scratch.gathered, true);
      }
      if (w.minima) {
        pipeline.finish();  // its sums of x are replaced
        sum_rows(tiles, at, at + steps);
      }
      for (int row = 0; row < rows.num_rows; row += 2 * kRowBlock) {
        const int end = rows.num_rows - row < 2 * kRowBlock ? rows.num_rows : row + 2 * kRowBlock;
        for (int p = 0; p < pairs; ++p)
          for (int s = 0; s < steps; s += kUnit)
            unit(first + p, step0 + s, steps - s < kUnit ? steps - s : kUnit, row, end, tiles, at + s,
                 panels_of(step0) + size_t(p * steps + s) * 2 * kPanelTile, decoder);
      }
    }
    pipeline.finish();
  }
};

template <typename Policy, int Width>
void multiply_exactly(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int n = rows.num_rows;
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  PartProduct<Policy, Width> product = {w, rows, scratch, totals};
  need_tiles(n, Width == 2 ? 64 : 32);
  if (n <= w.streamed_rows) product.few();
  for (int first = 0; n > w.streamed_rows && first < w.num_pairs; first += kPanelPairs)
    product.many(first, w.num_pairs - first < kPanelPairs ? w.num_pairs - first : kPanelPairs);
}

template <typename Policy, typename Folded, int Width = 2>
void multiply_parts_with(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  // Where a part is a unit of 128 k without minima, the pipeline of blocks multiplies its sums by their scales as well.
  if constexpr (Width == 2)
    if (!w.minima && w.part_pairs == kUnscaledSteps * kStep / 2) return multiply_with<Policy>(w, rows, scratch, totals);
  if (rows.num_rows <= w.few_part_rows && rows.tiles.data == nullptr && rows.scales == nullptr)
    return kMultiplyFewParts(w, rows, scratch, totals);
  if (rows.num_rows > w.exact_rows || rows.scales != nullptr) return multiply_with<Folded>(w, rows, scratch, totals);
  multiply_exactly<Policy, Width>(w, rows, scratch, totals);
}

void multiply_pipelined(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  switch (w.format) {
    case kFp8: return multiply_with<Fp8Lines>(w, rows, scratch, totals);
    case kBf16: return multiply_with<Bf16Lines>(w, rows, scratch, totals);
    case kInt8: return multiply_with<Int8Lines>(w, rows, scratch, totals);
    case kMxFp8: return multiply_with<MxFp8Lines>(w, rows, scratch, totals);
    case kMxFp4: return multiply_with<MxFp4Lines>(w, rows, scratch, totals);
    case kNvFp4: return multiply_with<NvFp4Lines>(w, rows, scratch, totals);
    case kInt8Groups: return multiply_parts_with<Codes8Lines, Folded8Lines>(w, rows, scratch, totals);
    case kInt5:
    case kQ5K: return multiply_parts_with<Codes5Lines, Folded5Lines>(w, rows, scratch, totals);
    case kQ6K: return multiply_parts_with<Codes6Lines, Folded6Lines, 1>(w, rows, scratch, totals);
    default: return multiply_parts_with<Codes4Lines, Folded4Lines>(w, rows, scratch, totals);
  }
}

}  // namespace
}  // namespace moe_mk
