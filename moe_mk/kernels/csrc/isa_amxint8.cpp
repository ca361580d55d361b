// INT8 products by TDPBSSD (AMX-int8): s8 codes of tokens times s8 weights, 32 rows x 32 columns in four tiles of i32.
// A tile of weights is 64 k of 16 columns: 16 lines of the packed bytes in place, 128 bytes apart. Rows are gathered
// into tiles of 16 x 64 codes, without their offset. Integer sums are exact, so the bits equal those of VPDPBUSD, which is
// still used for few rows: up to one pass of it both are bound by memory.
// Reads weights once a chunk of k whose rows stay in L2; totals of whole outputs stay in tiles for a chunk or 16 steps,
// those of a scale block go through scratch (4 KiB) and are added in f32.
#include "int8.h"
#include "tiles.h"

#if defined(__AVX512VNNI__)
#include "avx512.h"
#endif

namespace moe_mk {
namespace {

constexpr int kTileSteps = 2;  // steps of k in a tile
constexpr size_t kTileBytes = 1024, kLineBytes = 128;

#if defined(__AVX512VNNI__)
constexpr auto kFewRowsInt8 = multiply_int8_avx512;
#else
constexpr auto kFewRowsInt8 = multiply_int8<PortableInt8Ops>;
#endif

// Totals of 32 rows x 32 columns in tiles 0..3 (row tile, column tile): loaded and stored in place; the last, partial tile of
// rows goes through scratch.
constexpr size_t kTotalsStride = kPairColumns * sizeof(float);

// The location of the totals of one row tile during its computation.
struct TotalsTile {
  float* at;
  float* target;
  int rows;
};

TotalsTile borrow(float* totals, int rows, float* spare) {
  if (rows >= kTileRows) return {totals, totals, kTileRows};
  std::memset(spare, 0, kTileRows * kTotalsStride);
  std::memcpy(spare, totals, rows * kTotalsStride);
  return {spare, totals, rows};
}
void give_back(const TotalsTile& tile) {
  if (tile.at != tile.target) std::memcpy(tile.target, tile.at, tile.rows * kTotalsStride);
}

template <int RowTiles>
void load_totals(const TotalsTile& first, const TotalsTile& second) {
  tile_load<0>(first.at, kTotalsStride);
  tile_load<1>(first.at + kTileColumns, kTotalsStride);
  if (RowTiles == 2) {
    tile_load<2>(second.at, kTotalsStride);
    tile_load<3>(second.at + kTileColumns, kTotalsStride);
  }
}
template <int RowTiles>
void store_totals(const TotalsTile& first, const TotalsTile& second) {
  tile_store<0>(first.at, kTotalsStride);
  tile_store<1>(first.at + kTileColumns, kTotalsStride);
  if (RowTiles == 2) {
    tile_store<2>(second.at, kTotalsStride);
    tile_store<3>(second.at + kTileColumns, kTotalsStride);
    give_back(second);
  }
  give_back(first);
}

constexpr int tiles_of(int steps) { return (steps + kTileSteps - 1) / kTileSteps; }

// dst [row tile][k tile][16][64] s8; missing rows are zeros.
void gather_codes(const Rows& rows, int step0, int steps, uint8_t* dst) {
  typedef uint8_t u8x32 __attribute__((vector_size(32)));
  const size_t row_tile_bytes = tiles_of(steps) * kTileBytes;
  for (int row = 0; row < (rows.num_rows + kTileRows - 1) / kTileRows * kTileRows; ++row) {
    uint8_t* to = dst + row / kTileRows * row_tile_bytes + row % kTileRows * 64;
    for (int s = 0; s < steps; ++s, to += s % kTileSteps == 0 ? kTileBytes - kStep : kStep) {
      if (row >= rows.num_rows) std::memset(to, 0, kStep);
      else store(to, load<u8x32>(rows.codes(row) + size_t(step0 + s) * kStep) ^ kInt8Offset);
    }
  }
}

// One k tile of one pair: rows at a, weights at b. Loads come before products: see multiply_step in amx_pipeline.h.
template <int RowTiles>
inline void dot_tile(const uint8_t* a, size_t row_tile_bytes, const uint8_t* b) {
  tile_load<6>(b, kLineBytes);
  tile_load<4>(a, 64);
  tile_load<7>(b + 64, kLineBytes);
  if (RowTiles == 2) tile_load<5>(a + row_tile_bytes, 64);
  tile_dot_s8<0, 4, 6>();
  tile_dot_s8<1, 4, 7>();
  if (RowTiles == 2) {
    tile_dot_s8<2, 5, 6>();
    tile_dot_s8<3, 5, 7>();
  }
}

// `steps` steps. An odd last step is half a tile: the weights of the other half are zeros, so the bytes of the rows there
// do not contribute. ahead: bytes of weights to prefetch meanwhile, 0: none.
template <int RowTiles>
inline void dot_unit(const uint8_t* a, size_t row_tile_bytes, const uint8_t* b, int steps, int ahead, uint8_t* spare) {
  for (; steps >= kTileSteps; steps -= kTileSteps, a += kTileBytes, b += kTileSteps * kStep / 4 * kLineBytes) {
    for (int line = 0; ahead != 0 && line < kTileSteps * 16; ++line) __builtin_prefetch(b + ahead + line * 64);
    dot_tile<RowTiles>(a, row_tile_bytes, b);
  }
  if (steps == 0) return;
  std::memcpy(spare, b, kStep / 4 * kLineBytes);
  std::memset(spare + kStep / 4 * kLineBytes, 0, kStep / 4 * kLineBytes);
  memory_barrier();
  dot_tile<RowTiles>(a, row_tile_bytes, spare);
}

// Some steps of k of one pair, and where their rows and totals are.
struct Unit {
  const Columns& w;
  int pair, first, steps;  // first: of the matrix
  const uint8_t* a;        // the first row tile's
  size_t row_tile_bytes;
  const Scratch& scratch;

  const uint8_t* weights() const { return w.data + pair * w.pair_bytes + size_t(first) * w.step_bytes; }

  template <int RowTiles>
  void dot(int row) const {
    const uint8_t* rows = a + row / kTileRows * row_tile_bytes;
    dot_unit<RowTiles>(rows, row_tile_bytes, weights(), steps, row == 0 ? w.prefetch : 0, scratch.panel);
  }

  // Adds integer sums to the totals.
  template <int RowTiles>
  void add_whole(int row, int n, float* totals) const {
    const TotalsTile one = borrow(totals, n, scratch.tiles);
    const TotalsTile two = RowTiles == 2 ? borrow(totals + kTileRows * kPairColumns, n - kTileRows, scratch.tiles + 512) : one;
    memory_barrier();
    load_totals<RowTiles>(one, two);
    dot<RowTiles>(row);
    store_totals<RowTiles>(one, two);
    memory_barrier();
  }

  // Times the scales of their block, added in f32.
  template <int RowTiles>
  void add_block(int row, int n, float* totals) const {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    dot<RowTiles>(row);
    float* sums = scratch.tiles;
    store_totals<RowTiles>({sums, sums, kTileRows}, {sums + 512, sums + 512, kTileRows});
    memory_barrier();
    const int block = first / w.steps_per_block;
    const float scale[2] = {tile_scales(w, pair, 0)[block], tile_scales(w, pair, 1)[block]};
    for (int m = 0; m < n; ++m)
      for (int t = 0; t < 2; ++t) {
        const int at = m * kPairColumns + t * kTileColumns;
        add_scaled(load<i32x16>(sums + at), scale[t], totals + at);
      }
  }

  void add(int num_rows, float* totals) const {
    for (int row = 0; row < num_rows; row += 2 * kTileRows, totals += 2 * kTileRows * kPairColumns) {
      const int left = num_rows - row, n = left < 2 * kTileRows ? left : 2 * kTileRows;
      if (w.scales != nullptr) n > kTileRows ? add_block<2>(row, n, totals) : add_block<1>(row, n, totals);
      else n > kTileRows ? add_whole<2>(row, n, totals) : add_whole<1>(row, n, totals);
    }
  }
};

// NOTE: half a tile reads 32 bytes behind its row; behind the last row these belong to the panel.
void multiply_tiles(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int n = rows.num_rows, least = w.scales == nullptr ? kWholeSteps : w.steps_per_block;
  const int chunk_steps = steps_that_fit(2 * w.gather_bytes, n, kTileRows, least < kTileSteps ? kTileSteps : least);  // a byte a code
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk_steps) {
    const int steps = w.num_steps - step0 < chunk_steps ? w.num_steps - step0 : chunk_steps;
    gather_codes(rows, step0, steps, scratch.gathered);
    const int unit = w.scales == nullptr && n <= 2 * kTileRows ? steps : least;
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int s = 0; s < steps; s += unit) {
        const uint8_t* a = scratch.gathered + s / kTileSteps * kTileBytes + s % kTileSteps * kStep;
        const Unit part = {w, pair, step0 + s, steps - s < unit ? steps - s : unit, a, tiles_of(steps) * kTileBytes, scratch};
        part.add(n, totals + size_t(pair) * n * kPairColumns);
      }
  }
  finish_totals(w, rows, totals);
}

}  // namespace

void multiply_int8_amx(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const bool cut = w.scales != nullptr && w.steps_per_block != 1 && w.steps_per_block % kTileSteps != 0;
  if (rows.num_rows < w.tile_rows || cut) return kFewRowsInt8(w, rows, scratch, totals);
  need_tiles(rows.num_rows);
  multiply_tiles(w, rows, scratch, totals);
}

}  // namespace moe_mk
