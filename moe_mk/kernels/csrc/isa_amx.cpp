// The kernels for AMX-bf16 (Sapphire Rapids on): every format and any number of rows by the pipeline of amx_pipeline.h, with
// exact weights and scales (relative L2 error 2.3e-3), except for many rows of short groups (multiply_parts_with).
#include "amx_parts.h"

namespace moe_mk {
namespace {

// Values of the size of weights. NOTE tiles of zeros are multiplied faster: 0.92 to 0.96 of the time.
struct PeakTile {
  alignas(64) uint16_t values[kTileRows * kStep];

  PeakTile() {
    uint32_t state = 1;
    for (uint16_t& value : values) {
      state = state * 1664525u + 1013904223u;
      value = uint16_t(0x3c00 | (state >> 16 & 0x83ff));
    }
  }
};

double peak_amx(int64_t iterations, bool) {
  static const PeakTile tile;
  need_tiles(kTileRows);
  tile_load<0>(tile.values, 64);
  tile_load<1>(tile.values, 64);
  tile_load<2>(tile.values, 64);
  tile_load<3>(tile.values, 64);
  tile_load<4>(tile.values, 64);
  tile_load<5>(tile.values, 64);
  tile_load<6>(tile.values, 64);
  tile_load<7>(tile.values, 64);
  for (int64_t i = 0; i < iterations; ++i) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  return double(iterations) * 4 * 16384;
}

#if defined(MOE_MK_AMX_AVX512)
constexpr auto kMultiplyInt8 = multiply_int8_avx512;
constexpr auto kMultiplyInt8Parts = multiply_int8_parts_avx512;
#else
constexpr auto kMultiplyInt8 = multiply_int8<PortableInt8Ops>;
constexpr auto kMultiplyInt8Parts = multiply_int8_parts;
#endif

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels table = {
      "amx", 0, true, false, false, true, leave_tiles, nullptr, multiply_pipelined,
      has_amx_int8() ? multiply_int8_amx : kMultiplyInt8, quantize_int8,
      has_amx_int8() ? multiply_int8_parts_amx : kMultiplyInt8Parts, round_row, activate, accumulate, to_bf16, write_terms, quantize, decode,
      gate_dots, read, peak_amx,
  };
  return &table;
}

}  // namespace moe_mk

#if defined(MOE_MK_EMULATE_AMX)
// The counts of the emulation since the last call, in the order of TileCounts.
extern "C" __attribute__((visibility("default"))) void moe_mk_emulated_counts(int64_t* into) {
  for (int i = 0; i < moe_mk::TileCounts::kNumCounts; ++i) into[i] = moe_mk::tile_counts.of[i].exchange(0);
}
#endif
