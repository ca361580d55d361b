// The kernels for AMX-bf16 (Sapphire Rapids on): 32 rows x 32 columns at a time in four accumulator tiles.
// The block scale is folded into the decoded weights (bf16 of code * scale, one table a tile and scale block): free of
// cost, at the price of one bf16 rounding a weight (L2 3.7e-3 against 2.3e-3 with exact scales).
// Reads: packed weights once a 256-row block, gathered rows from L2. Panel of 8 steps (16 KiB) stays in L1.
// One or two rows are faster on VDPBF16PS straight from memory: multiply_few comes from the AVX-512 unit.
// NOTE totals are tile-loaded and tile-stored in place; the last, partial tile of rows goes through scratch.
#include "tiles.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define MOE_MK_AMX_AVX512 1
#include "avx512.h"
#endif

#include "portable.h"

#if defined(__linux__) && !defined(MOE_MK_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe_mk {
namespace {

constexpr int kPanelSteps = 8;
constexpr int kTileRows = 16;
constexpr size_t kTotalsStride = kPairColumns * sizeof(float);

#if defined(MOE_MK_AMX_AVX512)

Tables scaled_tables(float scale) {
  const __m512 s = _mm512_set1_ps(scale);
  __m512i parts[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i exact = exact_magnitudes(32 * i);
    const __m512 low = reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(exact)), 16));
    const __m512 high = reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(exact, 1)), 16));
    parts[i] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, s), _mm512_mul_ps(low, s)));
  }
  return tables_of(parts[0], parts[1], parts[2], parts[3]);
}

// One tile of `steps` steps that share a scale.
void expand_tile(const uint8_t* packed, int steps, float scale, uint8_t* panel) {
  const Tables tables = scaled_tables(scale);
  for (int s = 0; s < steps; ++s)
    for (int g = 0; g < 8; ++g) {
      const uint8_t* from = packed + s * kPanelTile + g * 128;
      uint8_t* to = panel + (s * 8 + g) * 2 * kPanelRow;
      _mm_prefetch(reinterpret_cast<const char*>(from + 4096), _MM_HINT_T0);
      __m512i first, second;
      decode64(tables, _mm512_loadu_si512(from), &first, &second);
      _mm512_store_si512(to, first);
      _mm512_store_si512(to + kPanelRow, second);
    }
}

#else

void expand_tile(const uint8_t* packed, int steps, float scale, uint8_t* panel) {
  for (int s = 0; s < steps; ++s)
    for (int g = 0; g < 8; ++g)
      for (int l = 0; l < 4; ++l) {
        const u16x16 exact = decode16(load<u8x16>(packed + s * kPanelTile + g * 128 + l * 16));
        const u16x16 both = narrow(widen(reinterpret_cast<const uint16_t*>(&exact)) * scale);
        uint8_t* row = panel + (size_t(s) * 8 + g) * 2 * kPanelRow + l * 16;
        std::memcpy(row, &both, 16);
        std::memcpy(row + kPanelRow, reinterpret_cast<const uint8_t*>(&both) + 16, 16);
      }
}

#endif

// `steps` steps of one pair from step0 on, both tiles, scales folded in.
void expand_folded(const Columns& w, int pair, int step0, int steps, uint8_t* panel) {
  for (int s = 0; s < steps;) {
    const int block = (step0 + s) / w.steps_per_block;
    const int until = (block + 1) * w.steps_per_block - step0;
    const int n = (until < steps ? until : steps) - s;
    const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step0 + s) * kPanelTile;
    for (int tile = 0; tile < 2; ++tile) {
      const float* scales = tile_scales(w, pair, tile);
      expand_tile(packed + tile * 64, n, scales == nullptr ? 1.0f : scales[block],
                  panel + size_t(s) * 2 * kPanelTile + tile * 64);
    }
    s += n;
  }
}

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

// Where the totals of one row tile are while it is worked on.
struct TotalsTile {
  float* at;
  float* home;
  int rows;
};

TotalsTile borrow(float* totals, int rows, float* spare) {
  if (rows >= kTileRows) return {totals, totals, kTileRows};
  std::memset(spare, 0, kTileRows * kTotalsStride);
  std::memcpy(spare, totals, rows * kTotalsStride);
  return {spare, totals, rows};
}
void give_back(const TotalsTile& tile) {
  if (tile.at != tile.home) std::memcpy(tile.home, tile.at, tile.rows * kTotalsStride);
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

// One pair of columns, one chunk of k, all rows. With one or two row tiles the totals stay in tiles all along.
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
      // Two panels in turn: the stores of the next do not wait for the loads of the last.
      uint8_t* own = scratch.panel + (s / kPanelSteps % 2) * kPanelSteps * 2 * kPanelTile;
      expand_folded(w, pair, chunk.step0 + s, steps, own);
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
      expand_folded(w, pair, chunk.step0 + s, steps, scratch.panel);
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
  const int n = rows.num_rows, chunk_steps = steps_that_fit(n, kTileRows, kPanelSteps);
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
#else
constexpr int kFew = 0;
constexpr void (*kMultiplyFew)(const Columns&, const Rows&, float*) = nullptr;
#endif

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels table = {
      "amx", kFew, false, false, configure_tiles, release_tiles, kMultiplyFew, multiply_many_amx, activate, accumulate,
      to_bf16, quantize, decode, count_nans, gate_dots, read, peak_amx,
  };
  return &table;
}

}  // namespace moe_mk
