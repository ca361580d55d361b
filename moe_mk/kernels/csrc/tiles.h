// The tile instructions the AMX units use: the real ones, or with MOE_MK_EMULATE_AMX an emulation in C++, so that
// the same kernel source can be tested on machines without AMX.
// NOTE gcc 12: _tile_loadconfig claims to read 8 bytes of the config (stores to the rest may be deleted) and
// _tile_loadd has no memory clobber; both need the explicit barriers below.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(MOE_MK_EMULATE_AMX)
#include <atomic>
#include <cstdio>
#include <cstdlib>
#else
#include <immintrin.h>
#endif

#include "kernels.h"

namespace moe_mk {

#if defined(MOE_MK_EMULATE_AMX)

struct Tile {
  float words[16][16];
  int rows;  // 0: not configured
  int row_bytes;
};
inline thread_local Tile tiles[8];  // of a thread, whichever unit uses them, as the registers are

// What all threads have executed, for tests of the cost of a kernel. kDecoded: weights decoded into panels.
struct TileCounts {
  enum { kLoads, kStores, kZeros, kProducts, kIntegerProducts, kDecoded, kNumCounts };
  std::atomic<int64_t> of[kNumCounts];
};
inline TileCounts tile_counts;

#endif

struct TileShape {
  int rows, row_bytes;
};
inline thread_local TileShape tile_shape = {};  // of a thread, as the registers are; 0 rows: not configured

namespace {

constexpr int kFirstWeightTile = 6;  // tiles 0..5 hold rows of x or of sums, 6 and 7 weights

inline void memory_barrier() { asm volatile("" ::: "memory"); }

#if defined(MOE_MK_EMULATE_AMX)
inline void count(int which, int64_t by) { tile_counts.of[which].fetch_add(by, std::memory_order_relaxed); }
inline void count_decoded(int weights) { count(TileCounts::kDecoded, weights); }
#else
inline void count_decoded(int) {}
#endif

#if defined(MOE_MK_EMULATE_AMX)

// The processor raises an exception where this fails.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX emulation: %s\n", what);
  std::abort();
}

inline void set_tile_rows(int rows, int weight_rows, int row_bytes) {
  std::memset(tiles, 0, sizeof tiles);
  for (int i = 0; i < 8; ++i) {
    tiles[i].rows = i < kFirstWeightTile ? rows : weight_rows;
    tiles[i].row_bytes = i == 4 || i == 5 ? row_bytes : 64;
  }
}
inline void configure_tiles(int rows, int row_bytes) {
  require(rows > 0 && rows <= kTileRows, "a tile has 1 to 16 rows");
  require(row_bytes > 0 && row_bytes <= 64 && row_bytes % 4 == 0, "a row has 4 to 64 bytes");
  set_tile_rows(rows, row_bytes / 4, row_bytes);
}
inline void release_tiles() { set_tile_rows(0, 0, 0); }
template <int N>
inline void tile_load(const void* from, size_t stride) {
  require(tiles[N].rows != 0, "load into a tile that is not configured");
  count(TileCounts::kLoads, 1);
  std::memset(tiles[N].words, 0, sizeof tiles[N].words);
  for (int r = 0; r < tiles[N].rows; ++r)
    std::memcpy(tiles[N].words[r], static_cast<const uint8_t*>(from) + r * stride, size_t(tiles[N].row_bytes));
}
template <int N>
inline void tile_store(void* to, size_t stride) {
  require(tiles[N].rows != 0, "store of a tile that is not configured");
  count(TileCounts::kStores, 1);
  for (int r = 0; r < tiles[N].rows; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles[N].words[r], size_t(tiles[N].row_bytes));
}
template <int C, int A, int B>
inline void require_shapes() {
  const bool alike = tiles[C].rows == tiles[A].rows && tiles[B].rows * 4 == tiles[A].row_bytes;
  require(tiles[C].rows != 0 && alike, "shapes of a product differ");
}
inline float bf16_at(const float* row, int i) {
  uint32_t u;
  std::memcpy(&u, reinterpret_cast<const uint8_t*>(row) + i / 2 * 4, 4);
  u = i % 2 == 0 ? u << 16 : u & 0xffff0000u;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}
// Even and odd products are summed separately and added at the end, as specified for the instruction.
template <int C, int A, int B>
inline void tile_dot() {
  require_shapes<C, A, B>();
  count(TileCounts::kProducts, 1);
  for (int m = 0; m < tiles[C].rows; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < tiles[B].rows; ++k)
      for (int n = 0; n < 16; ++n) {
        even[n] += bf16_at(tiles[A].words[m], 2 * k) * bf16_at(tiles[B].words[k], 2 * n);
        odd[n] += bf16_at(tiles[A].words[m], 2 * k + 1) * bf16_at(tiles[B].words[k], 2 * n + 1);
      }
    for (int n = 0; n < 16; ++n) tiles[C].words[m][n] += even[n] + odd[n];
  }
}

// Four s8 of a row times four of a column, added as integers.
template <int C, int A, int B>
inline void tile_dot_s8() {
  require_shapes<C, A, B>();
  count(TileCounts::kIntegerProducts, 1);
  for (int m = 0; m < tiles[C].rows; ++m) {
    int8_t a[64];
    int32_t sums[16];
    std::memcpy(a, tiles[A].words[m], 64);
    std::memcpy(sums, tiles[C].words[m], 64);
    for (int k = 0; k < tiles[B].rows; ++k) {
      int8_t b[64];
      std::memcpy(b, tiles[B].words[k], 64);
      for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i) sums[n] += a[4 * k + i] * b[4 * n + i];
    }
    std::memcpy(tiles[C].words[m], sums, 64);
  }
}
template <int N>
inline void tile_zero() {
  require(tiles[N].rows != 0, "zeroing of a tile that is not configured");
  count(TileCounts::kZeros, 1);
  std::memset(tiles[N].words, 0, sizeof tiles[N].words);
}

#else

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};

inline void configure_tiles(int rows, int row_bytes) {
  TileConfig config;
  std::memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = uint8_t(i < kFirstWeightTile ? rows : row_bytes / 4);
    config.column_bytes[i] = uint16_t(i == 4 || i == 5 ? row_bytes : 64);
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void release_tiles() { _tile_release(); }
// The tile number of the intrinsics must be a literal after preprocessing, hence the assembly spelled out.
template <int N>
inline __attribute__((always_inline)) void tile_load(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
inline __attribute__((always_inline)) void tile_store(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_dot_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int N>
inline __attribute__((always_inline)) void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

#endif

// Before tile instructions: configures the tiles unless they are as wanted, which takes as long as twenty products.
// Fewer rows than kTileRows in the tiles of x and sums are multiplied and stored in less time. Tiles 4 and 5 are those of x;
// their rows may have fewer bytes, of which a tile of weights has a row for each four.
inline void need_tiles(int num_rows, int row_bytes = 64) {
  const TileShape wanted = {num_rows < kTileRows ? num_rows : kTileRows, row_bytes};
  if (tile_shape.rows == wanted.rows && tile_shape.row_bytes == wanted.row_bytes) return;
  configure_tiles(wanted.rows, wanted.row_bytes);
  tile_shape = wanted;
}
inline void leave_tiles() {
  if (tile_shape.rows != 0) release_tiles();
  tile_shape = {};
}

}  // namespace
}  // namespace moe_mk
