// The kernels for AMX-bf16 (Sapphire Rapids on): 32 rows x 32 columns at a time in four accumulator tiles.
// FP8 is multiplied by the pipeline of amx_pipeline.h, from one row on, with exact scales (relative L2 error 2.3e-3).
// Other formats: the code below. Scales of INT8 blocks are multiplied into the decoded weights (amx_panel.h), which rounds
// each weight to bf16 (3.7e-3). One or two rows use VDPBF16PS straight from memory: multiply_few of the AVX-512 unit.
// Reads: packed weights once a 256-row block, gathered rows from L2. Panel of 8 steps (16 KiB) stays in L1.
#include "amx_pipeline.h"

#if defined(__linux__) && !defined(MOE_MK_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe_mk {
namespace {

constexpr int kPanelSteps = 8;

// Tiles 0..3 are totals (row tile, column tile), 4 and 5 rows, 6 and 7 weights.
template <int RowTiles>
inline void dot_steps(const uint8_t* a, size_t row_tile_bytes, const uint8_t* panel, int steps) {
  for (int s = 0; s < steps; ++s) {
    const uint8_t *rows = a + s * kTileRows * kRowBytes, *weights = panel + s * 2 * kPanelTile;
    tile_load<6>(weights, kPanelRow);
    tile_load<4>(rows, kRowBytes);
    tile_dot<0, 4, 6>();
    tile_load<7>(weights + 64, kPanelRow);
    tile_dot<1, 4, 7>();
    if (RowTiles == 2) {
      tile_load<5>(rows + row_tile_bytes, kRowBytes);
      tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
    }
  }
}

// One pair of columns, one chunk of k, all rows. With one or two row tiles the totals stay in tiles throughout.
struct Chunk {
  int step0, steps;
  const uint8_t* gathered;
};

template <int RowTiles>
void one_block(const Columns& w, int pair, const Chunk& chunk, const Scratch& scratch, float* totals, int rows) {
  const TotalsTile first = borrow(totals, rows, scratch.tiles);
  const TotalsTile second = RowTiles == 2 ? borrow(totals + kTileRows * kPairColumns, rows - kTileRows, scratch.tiles + 512) : first;
  const size_t tile_bytes = size_t(chunk.steps) * kTileRows * kRowBytes;
  memory_barrier();
  load_totals<RowTiles>(first, second);
  for (int s = 0; s < chunk.steps; s += kPanelSteps) {
    const int steps = chunk.steps - s < kPanelSteps ? chunk.steps - s : kPanelSteps;
    const uint8_t* panel = w.data + pair * w.pair_bytes + size_t(chunk.step0 + s) * w.step_bytes;
    if (w.must_be_decoded()) {
      // Two alternating panels: the stores of the next do not wait for the loads of the last.
      uint8_t* own = scratch.panel + (s / kPanelSteps % 2) * kPanelSteps * 2 * kPanelTile;
      expand_scaled(w, pair, chunk.step0 + s, steps, own);
      panel = own;
    }
    memory_barrier();
    dot_steps<RowTiles>(chunk.gathered + size_t(s) * kTileRows * kRowBytes, tile_bytes, panel, steps);
  }
  store_totals<RowTiles>(first, second);
  memory_barrier();
}

void many_blocks(const Columns& w, int pair, const Chunk& chunk, const Scratch& scratch, float* totals, int rows) {
  const size_t tile_bytes = size_t(chunk.steps) * kTileRows * kRowBytes;
  for (int s = 0; s < chunk.steps; s += kPanelSteps) {
    const int steps = chunk.steps - s < kPanelSteps ? chunk.steps - s : kPanelSteps;
    const uint8_t* panel = w.data + pair * w.pair_bytes + size_t(chunk.step0 + s) * w.step_bytes;
    if (w.must_be_decoded()) {
      expand_scaled(w, pair, chunk.step0 + s, steps, scratch.panel);
      panel = scratch.panel;
    }
    for (int row = 0; row < rows; row += 2 * kTileRows) {
      const uint8_t* a = chunk.gathered + row / kTileRows * tile_bytes + size_t(s) * kTileRows * kRowBytes;
      const bool two = row + kTileRows < rows;
      const TotalsTile first = borrow(totals + row * kPairColumns, rows - row, scratch.tiles);
      const TotalsTile second = two ? borrow(totals + (row + kTileRows) * kPairColumns, rows - row - kTileRows, scratch.tiles + 512) : first;
      memory_barrier();
      if (two) {
        load_totals<2>(first, second);
        dot_steps<2>(a, tile_bytes, panel, steps);
        store_totals<2>(first, second);
      } else {
        load_totals<1>(first, second);
        dot_steps<1>(a, tile_bytes, panel, steps);
        store_totals<1>(first, second);
      }
    }
    memory_barrier();
  }
}

void multiply_many_amx(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (w.format == kFp8) return multiply_pipelined(w, rows, scratch, totals);
  const int n = rows.num_rows, chunk_steps = steps_that_fit(w.gather_bytes, n, kTileRows, kPanelSteps);
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk_steps) {
    const Chunk chunk = {step0, w.num_steps - step0 < chunk_steps ? w.num_steps - step0 : chunk_steps, scratch.gathered};
    gather_rows(rows, kTileRows, step0, chunk.steps, scratch.gathered, true);
    for (int pair = 0; pair < w.num_pairs; ++pair) {
      float* sums = totals + size_t(pair) * n * kPairColumns;
      if (n <= kTileRows) one_block<1>(w, pair, chunk, scratch, sums, n);
      else if (n <= 2 * kTileRows) one_block<2>(w, pair, chunk, scratch, sums, n);
      else many_blocks(w, pair, chunk, scratch, sums, n);
    }
  }
}

double peak_amx(int64_t iterations) {
  alignas(64) static const uint8_t zeros[1024] = {};
  tile_load<0>(zeros, 64);
  tile_load<1>(zeros, 64);
  tile_load<2>(zeros, 64);
  tile_load<3>(zeros, 64);
  tile_load<4>(zeros, 64);
  tile_load<5>(zeros, 64);
  tile_load<6>(zeros, 64);
  tile_load<7>(zeros, 64);
  for (int64_t i = 0; i < iterations; ++i) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  return double(iterations) * 4 * 16384;
}

#if defined(MOE_MK_AMX_AVX512)
constexpr int kFew = 2;
constexpr auto kMultiplyFew = multiply_few_avx512bf16;
constexpr auto kMultiplyInt8 = multiply_int8_avx512;
#else
constexpr int kFew = 0;
constexpr void (*kMultiplyFew)(const Columns&, const Rows&, float*) = nullptr;
constexpr auto kMultiplyInt8 = multiply_int8<PortableInt8Ops>;
#endif

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels table = {
      "amx", kFew, false, false, true, configure_tiles, release_tiles, kMultiplyFew, multiply_many_amx,
      has_amx_int8() ? multiply_int8_amx : kMultiplyInt8, quantize_int8, activate, accumulate, to_bf16, quantize, decode, count_nans,
      gate_dots, read, peak_amx,
  };
  return &table;
}

}  // namespace moe_mk
