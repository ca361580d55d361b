// Totals of 32 rows x 32 columns in tiles 0..3 (row tile, column tile): tile-loaded and tile-stored in place, four bytes
// each, f32 or i32; the last, partial tile of rows goes through scratch.
#pragma once
#include "kernels.h"
#include "tiles.h"

namespace moe_mk {

void multiply_int8_amx(const Columns&, const Rows&, const Scratch&, float* totals);

namespace {

constexpr size_t kTotalsStride = kPairColumns * sizeof(float);

// The location of the totals of one row tile during its computation.
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

}  // namespace
}  // namespace moe_mk
