// Rows rounded to INT8 in parts of k times integers in groups, as AMX-int8 tiles: 32 or 64 k of 16 rows x 32 columns at a time.
// Four-bit codes are unpacked to s8 a unit of 128 k at a time, for all rows; INT8 codes are loaded from the packed bytes. The
// integer sums of the parts of a unit go through scratch and are scaled together, while the next rows are multiplied: an f32
// total is read and written once in 128 k. int8_parts.h has the arithmetic; sums are exact, so bits are those of VPDPBUSD.
// Reads weights once a chunk of k of which all rows stay in L2, two pairs half of the task apart in turn: two memory streams.
#include "int8_parts.h"
#include "tiles.h"

#if defined(__AVX512VNNI__)
#include "avx512.h"
#endif

namespace moe_mk {
namespace {

#if defined(__AVX512VNNI__)
constexpr auto kFewRows8 = multiply_int8_parts_avx512;
#else
constexpr auto kFewRows8 = multiply_int8_parts<PortableInt8PartOps>;
#endif

constexpr size_t kSumsStride = kPairColumns * sizeof(float);
constexpr size_t kSumsTile = kTileRows * kPairColumns;  // floats: 16 rows of one part

// Rows [row tile][k tile][16][Width] s8; what is missing of a k tile or a row tile is zeros.
template <int Width>
void gather_parts(const Rows& rows, int step0, int steps, uint8_t* to) {
  const int bytes = steps * kStep, tiles = (bytes + Width - 1) / Width, whole = bytes / Width;
  for (int row = 0; row < (rows.num_rows + kTileRows - 1) / kTileRows * kTileRows; ++row) {
    uint8_t* at = to + (size_t(row / kTileRows) * tiles * kTileRows + row % kTileRows) * Width;
    const uint8_t* from = row < rows.num_rows ? rows.codes(row) + size_t(step0) * kStep : nullptr;
    for (int tile = 0; tile < tiles; ++tile, at += kTileRows * Width) {
      if (from != nullptr && tile < whole) std::memcpy(at, from + tile * Width, Width);
      else std::memset(at, 0, Width);
    }
    if (from != nullptr && whole < tiles) std::memcpy(at - kTileRows * Width, from + whole * Width, kStep);  // half of a tile
  }
}

// The sums of a unit of at most 16 rows, and what they are scaled by.
struct BlockSums {
  const float* sums = nullptr;  // [part][16][32] s32
  float* totals = nullptr;
  const float *scales = nullptr, *minima = nullptr;  // [part][32]
  const float* const* rows = nullptr;                // RowParts of each
  int num_rows = 0, first_part = 0, num_parts = 0, parts = 0;
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
    const float* const* each = rows + added;
    const int first = first_part, sums_of_codes = first_part + num_parts;
    for (int n = end - added; n > 0; --n, ++each, from += kPairColumns, to += kPairColumns)
      for (int t = 0; t < 2; ++t) {
        f32x16 total = load<f32x16>(to + t * kTileColumns);
#pragma GCC unroll 4
        for (int p = 0; p < Parts; ++p) {
          total = add_part(load<i32x16>(from + p * kSumsTile + t * kTileColumns), scale[p][t], (*each)[first + p], total);
          if (Minima) total = take_minimum(minimum[p][t], (*each)[sums_of_codes + p], total);
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
      default: return add_as<4, Minima>(end);
    }
  }
  // The next rows, at most `count`.
  __attribute__((noinline)) void add(int count) {
    const int end = added + count < num_rows ? added + count : num_rows;
    if (added == end) return;
    minima == nullptr ? add_parts<false>(end) : add_parts<true>(end);
  }
};

// The products of a part in turn in two pairs of tiles: while one is multiplied the sums of the part before are stored, and rows of
// the block before that are added, so that none waits for the latency of a product.
// NOTE where another thread shares the core, half of the reorder buffer holds about one part.
template <int Width>
struct Pipeline {
  BlockSums open = {}, adding = {};  // whose parts are stored, whose rows are added
  float* to = nullptr;               // the sums that have not been stored
  int turn = 0;

  template <int C>
  inline __attribute__((always_inline)) void dot(const uint8_t* x, const uint8_t* codes, int steps) {
    constexpr int kTileSteps = Width / kStep;
    tile_zero<C>();
    tile_zero<C + 1>();
    for (int s = 0; s < steps; s += kTileSteps, x += Width * kTileRows, codes += Width / 4 * kCodeRow) {
      tile_load<6>(codes, kCodeRow);
      tile_load<4>(x, Width);
      tile_load<7>(codes + 64, kCodeRow);
      tile_dot_s8<C, 4, 6>();
      tile_dot_s8<C + 1, 4, 7>();
    }
  }
  template <int C>
  inline __attribute__((always_inline)) void store_sums() {
    if (to == nullptr) return;
    tile_store<C>(to, kSumsStride);
    tile_store<C + 1>(to + kTileColumns, kSumsStride);
  }
  inline __attribute__((always_inline)) void part(const uint8_t* x, const uint8_t* codes, int steps, float* sums, int rows_to_add) {
    if (turn ^= 1) {
      dot<0>(x, codes, steps);
      store_sums<2>();
    } else {
      dot<2>(x, codes, steps);
      store_sums<0>();
    }
    to = sums;
    adding.add(rows_to_add);
  }
  // All parts of a unit of some rows. codes: [k / 4][tile][64].
  inline void block(const BlockSums& next, const uint8_t* x, const uint8_t* codes, int steps, int part_steps, float* sums) {
    const int rows_each = (kTileRows + next.parts - 1) / next.parts;
    for (int p = 0, done = 0; p < next.parts; ++p, done += part_steps) {
      const int some = steps - done < part_steps ? steps - done : part_steps;
      part(x + size_t(done) * kStep * kTileRows, codes + size_t(done) * (kStep / 4) * kCodeRow, some, sums + p * kSumsTile, rows_each);
      if (p > 0) continue;  // the last part of the block before has been stored
      adding.add(kTileRows);
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

// The units of a chunk of k of two pairs, in turn.
template <int Width>
struct Chunk {
  static constexpr int kScales = 4;  // units whose scales are needed at a time: of two blocks before the one that is multiplied
  const Columns& w;
  const Rows& rows;
  const Scratch& scratch;
  float* totals;
  const int part_steps = w.part_pairs / (kStep / 2), num_parts = row_parts(w);
  int units = 0, blocks = 0;  // multiplied
  alignas(64) float scales[kScales][kMostUnitParts * kPairColumns] = {}, minima[kScales][kMostUnitParts * kPairColumns] = {};
  Pipeline<Width> pipeline = {};

  void multiply(int pair, int step0, int step, int steps, int chunk_steps) {
    const int which = units++ % kScales;
    part_scales(w, pair, step0 + step, steps, scales[which], minima[which]);
    const uint8_t* codes = codes_of(pair, step0 + step, steps, scratch.panel + which % 2 * kUnitPanel);
    const size_t tile_bytes = size_t(chunk_steps + Width / kStep - 1) / (Width / kStep) * Width * kTileRows;
    const uint8_t* x = scratch.gathered + size_t(step) * kStep * kTileRows;
    memory_barrier();
    for (int row = 0; row < rows.num_rows; row += kTileRows, x += tile_bytes) {
      float* sums = scratch.tiles + (blocks++ & 1) * kMostUnitParts * kSumsTile;
      const int left = rows.num_rows - row;
      pipeline.block({sums, totals + (size_t(pair) * rows.num_rows + row) * kPairColumns, scales[which], w.minima ? minima[which] : nullptr,
                      rows.scales + row, left < kTileRows ? left : kTileRows, (step0 + step) / part_steps, num_parts,
                      (steps + part_steps - 1) / part_steps, 0},
                     x, codes, steps, part_steps, sums);
    }
  }
  // s8 codes, in place where the packed bytes are such; half a k tile more is zeros.
  const uint8_t* codes_of(int pair, int step, int steps, uint8_t* panel) const {
    const uint8_t* from = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
    const int near = w.prefetch * 3 / 8, far = 3 * w.prefetch;
    for (size_t at = 0; at < steps * w.step_bytes; at += 64) {
      __builtin_prefetch(from + at + near);
      __builtin_prefetch(from + at + far, 0, 2);
    }
    const bool half = steps % (Width / kStep) != 0;
    if (w.format == kInt8Groups && !half) return from;
    unpack_unit<false>(w, pair, step, steps, panel);
    if (half) std::memset(panel + size_t(steps) * (kStep / 4) * kCodeRow, 0, (kStep / 4) * kCodeRow);
    return panel;
  }
};

template <int Width>
void multiply_tiles(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int n = rows.num_rows, chunk = steps_that_fit(2 * w.gather_bytes, n, kTileRows, kUnitSteps);  // a byte a code
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  Chunk<Width> part = {w, rows, scratch, totals};
  const int half = w.num_pairs / 2;
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
    gather_parts<Width>(rows, step0, steps, scratch.gathered);
    for (int first = 0; first < half + w.num_pairs % 2; ++first)
      for (int step = 0; step < steps; step += kUnitSteps) {
        const int some = steps - step < kUnitSteps ? steps - step : kUnitSteps;
        part.multiply(first < half ? first : w.num_pairs - 1, step0, step, some, steps);
        if (first < half) part.multiply(first + half, step0, step, some, steps);
      }
    part.pipeline.finish();
  }
}

}  // namespace

void multiply_int8_parts_amx(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (rows.num_rows < w.tile_rows) return kFewRows8(w, rows, scratch, totals);
  const bool narrow = w.part_pairs == kStep / 2;  // parts of 32 k: half of a tile
  configure_tiles(rows.num_rows < kTileRows ? rows.num_rows : kTileRows, narrow ? kStep : 2 * kStep);
  narrow ? multiply_tiles<kStep>(w, rows, scratch, totals) : multiply_tiles<2 * kStep>(w, rows, scratch, totals);
  configure_tiles();
}

}  // namespace moe_mk
