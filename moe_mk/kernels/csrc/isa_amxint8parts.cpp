// Rows rounded to INT8 in parts of k times integers in groups, as AMX-int8 tiles: 32 or 64 k of 16 rows x 32 columns at a time.
// Four-bit codes are unpacked to s8 a unit of 128 k at a time, for all rows; INT8 codes are loaded from the packed bytes. The
// sums of parts are scaled by part_pipeline.h. int8_parts.h has the arithmetic; sums are exact, so bits are those of VPDPBUSD.
// Reads weights once a chunk of k of which all rows stay in L2, two pairs half of the task apart in turn: two memory streams.
#include "int8_parts.h"
#include "part_pipeline.h"

#if defined(__AVX512VNNI__)
#include "avx512.h"
#endif

namespace moe_mk {
namespace {

#if defined(__AVX512VNNI__)
constexpr auto kFewRows8 = multiply_int8_parts_avx512;
#else
constexpr auto kFewRows8 = multiply_int8_parts;
#endif

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

// Rows of a block: sums * (scale * the row's scale), less minima * (the row's scale * the sum of its codes).
struct Int8PartRows {
  const float* const* rows = nullptr;  // RowParts
  int first_part = 0, num_parts = 0;

  inline __attribute__((always_inline)) f32x16 add(const float* sum, f32x16 scale, int row, int part, f32x16 total) const {
    return add_part(load<i32x16>(sum), scale, rows[row][first_part + part], total);
  }
  inline __attribute__((always_inline)) f32x16 take(f32x16 minimum, int row, int part, f32x16 total) const {
    return take_minimum(minimum, rows[row][num_parts + first_part + part], total);
  }
};

template <int Width>
struct Int8Part {
  using Of = Int8PartRows;
  static constexpr int kTile = 2 * Width / kStep;
  static constexpr size_t kRowStride = Width;
  static size_t x_offset(int h) { return size_t(h) * (kStep / 2) * kTileRows; }
  static size_t code_offset(int h) { return size_t(h) * (kStep / 8) * kCodeRow; }
  template <int C>
  static inline __attribute__((always_inline)) void dot() {
    tile_dot_s8<C, 4, 6>();
    tile_dot_s8<C + 1, 4, 7>();
  }
};

struct NoDecoder {
  void some() {}
};

// The units of a chunk of k.
template <int Width>
struct Chunk {
  const Columns& w;
  const Rows& rows;
  const Scratch& scratch;
  float* totals;
  const int part = w.part_pairs / (kStep / 4), num_parts = row_parts(w);  // part: half-steps
  int blocks = 0;
  UnitScales scales = {};
  PartPipeline<Int8Part<Width>> pipeline = {};

  void multiply(int pair, int step0, int step, int steps, int chunk_steps) {
    const int which = scales.next(w, pair, step0 + step, steps);
    const uint8_t* codes = codes_of(pair, step0 + step, steps, scratch.panel + which % 2 * kUnitPanel);
    const size_t tile_bytes = size_t(chunk_steps + Width / kStep - 1) / (Width / kStep) * Width * kTileRows;
    const uint8_t* x = scratch.gathered + size_t(step) * kStep * kTileRows;
    NoDecoder decoder;
    memory_barrier();
    const float* minima = w.minima ? scales.minima[which] : nullptr;
    for (int row = 0; row < rows.num_rows; row += kTileRows, x += tile_bytes) {
      float *sums = scratch.tiles + (blocks++ & 1) * kBlockSums, *to = totals + (size_t(pair) * rows.num_rows + row) * kPairColumns;
      const Int8PartRows of = {rows.scales + row, (step0 + step) * 2 / part, num_parts};
      const int n = rows.num_rows - row < kTileRows ? rows.num_rows - row : kTileRows, parts = (2 * steps + part - 1) / part;
      pipeline.block({sums, to, scales.scales[which], minima, of, n, parts, 0}, x, codes, 2 * steps, part, sums, decoder);
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
  need_tiles(rows.num_rows, narrow ? kStep : 2 * kStep);
  narrow ? multiply_tiles<kStep>(w, rows, scratch, totals) : multiply_tiles<2 * kStep>(w, rows, scratch, totals);
}

}  // namespace moe_mk
