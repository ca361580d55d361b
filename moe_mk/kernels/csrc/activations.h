// The operands of the products: x and h in bf16, padded to whole steps, quantised if the call requires it.
#pragma once
#include "thread_scratch.h"

namespace moe_mk {
namespace {

// Quantises to 1x128 e4m3: writes the values of the codes as bf16, and the scales. from, to: the place of a column, a multiple
// of kStep, and of the kStep - 1 that follow it; they may be the same.
template <typename From, typename To>
void through_fp8(const Layer& layer, From from, int64_t columns, To to, float* scales) {
  for (int64_t first = 0; first < columns; first += kActivationBlock) {
    const int n = int(std::min<int64_t>(kActivationBlock, columns - first));
    float wide[kActivationBlock];
    uint8_t codes[kActivationBlock];
    for (int i = 0; i < n; ++i) {
      const uint32_t u = uint32_t(from(first + i / kStep * kStep)[i % kStep]) << 16;
      std::memcpy(&wide[i], &u, 4);
    }
    scales[first / kActivationBlock] = layer.kernels.quantize(wide, n, layer.call.quantize == kUe8m0Rows, codes);
    for (int i = 0; i < n; i += kStep) layer.kernels.decode(codes + i, to(first + i), std::min(kStep, n - i));
  }
}

// One row of x in the format the kernels read, padded to whole steps.
void prepare_row(const Layer& layer, int64_t row, uint16_t* to, float* scales) {
  const MoeMkExperts& c = layer.call;
  const int64_t hidden = c.w13.num_inputs, padding = layer.hidden_padded - hidden;
  const auto* bf16 = static_cast<const uint16_t*>(c.x) + row * c.x_stride;
  const auto* codes = static_cast<const uint8_t*>(c.x) + row * c.x_stride;
  auto* out = reinterpret_cast<uint8_t*>(to);
  if (layer.int8()) std::memset(out + hidden, 0, size_t(padding));
  else std::memset(to + hidden, 0, size_t(padding) * 2);
  if (c.x_scales != nullptr) {
    const Matrix& w13 = layer.sets.front().w13;
    std::memcpy(scales, c.x_scales + row * c.x_scale_stride, size_t(layer.given_scales(w13)) * 4);
    const auto* rounded = reinterpret_cast<const int8_t*>(codes);
    if (layer.int8_parts()) layer.kernels.round_row(nullptr, rounded, hidden, w13.row_layout(), out, scales);
    else if (!layer.int8()) layer.kernels.decode(codes, to, hidden);
    else for (int64_t i = 0; i < hidden; ++i) out[i] = codes[i] ^ 0x80;
  } else if (c.quantize == kAsIs) {
    std::memcpy(to, bf16, size_t(hidden) * 2);
  } else if (layer.int8_parts()) {
    layer.kernels.round_row(bf16, nullptr, hidden, layer.sets.front().w13.row_layout(), out, scales);
  } else if (layer.int8()) {
    *scales = layer.kernels.quantize_int8(bf16, hidden, out);
  } else {
    through_fp8(layer, [&](int64_t column) { return bf16 + column; }, hidden, [&](int64_t column) { return to + column; }, scales);
  }
}

// x in the format the kernels read: in place, or quantised, decoded or padded into scratch memory.
bool prepare_inputs(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  const int64_t hidden = c.w13.num_inputs, each = layer.row_scales(layer.sets.front().w13);
  const bool rounded = c.x_scales != nullptr || c.quantize != kAsIs;
  if (!rounded && hidden % kStep == 0) {
    layer.x = static_cast<const uint16_t*>(c.x);
    layer.x_stride = c.x_stride;
    return true;
  }
  // An extra cache line a row, so that rows of codes do not map to the same cache sets.
  layer.x_stride = layer.int8() ? (layer.hidden_padded + 64) / 2 : layer.hidden_padded;
  auto* x = reinterpret_cast<uint16_t*>(layer.pool->arena(0, kInputs, size_t(c.num_rows) * layer.x_stride * 2));
  int64_t h_scales = 0;
  for (const Set& set : layer.sets) h_scales += set.assignments() * layer.row_scales(set.w2);
  auto* scales = reinterpret_cast<float*>(layer.pool->arena(0, kScales, size_t(c.num_rows * each + h_scales) * 4));
  if (x == nullptr || scales == nullptr) return false;
  layer.x = x;
  if (rounded) layer.x_scales = scales;
  return each_task(layer, c.num_rows, [&](int64_t row, int, ThreadScratch&) {
    if (layer.visits(row)) prepare_row(layer, row, x + row * layer.x_stride, scales + row * each);
    return true;
  });
}

// Quantises h of a set in place: bf16 values of e4m3 codes, or one-byte codes; scales are stored separately.
bool quantize_hidden(Layer& layer, Set& set, float* scales) {
  const int64_t inter = set.w2.packed->num_inputs, each = layer.row_scales(set.w2);
  set.h_scales = scales;
  return each_task(layer, set.assignments(), [&](int64_t place, int, ThreadScratch&) {
    const int slot = int(std::upper_bound(set.plan.offset.begin(), set.plan.offset.end(), place) - set.plan.offset.begin()) - 1;
    const int row = int(place - set.plan.offset[slot]);
    uint16_t* h = set.hidden(slot, row, 0);
    const auto at = [&](int64_t column) { return set.hidden(slot, row, column); };
    auto* codes = reinterpret_cast<uint8_t*>(h);
    if (layer.int8_parts()) layer.kernels.round_row(h, nullptr, inter, set.w2.row_layout(), codes, scales + place * each);
    else if (layer.int8()) scales[place] = layer.kernels.quantize_int8(h, inter, codes);
    else through_fp8(layer, at, inter, at, scales + place * each);
    return true;
  });
}

// h of all sets, consecutive in one allocation.
bool place_hidden(Layer& layer) {
  size_t elements = 32;
  for (Set& set : layer.sets) {
    set.h_in_tiles = layer.reads_tiles();
    for (int slot : set.plan.active) elements += size_t(set.hidden_elements(slot));
  }
  auto* h = reinterpret_cast<uint16_t*>(layer.pool->arena(0, kHidden, elements * 2));
  if (h == nullptr) return false;
  for (Set& set : layer.sets) {
    set.h = h;
    set.h_of.assign(set.plan.offset.size() - 1, nullptr);
    for (int slot : set.plan.active) {
      set.h_of[slot] = h;
      h += set.hidden_elements(slot);
    }
  }
  return true;
}

// Larger x is gathered into tiles by each task again: about 4,600 tokens of 7168 inputs with eight experts each. Of h as integers the same
// number of bytes.
#if defined(MOE_MK_EMULATE_AMX)
constexpr int64_t kMostTileBytes = int64_t(1) << 20;  // so that tests reach it
#else
constexpr int64_t kMostTileBytes = int64_t(512) << 20;
#endif

struct RowTile {
  const Set* set;
  int slot, first;  // row of the slot
};

// The rows of one tile; those beyond the last row are left as they are: they contribute to no other row.
void fill_tile(const Layer& layer, const RowTile& tile) {
  const int steps = tile.set->w13.steps, count = std::min(kTileRows, tile.set->plan.count(tile.slot) - tile.first);
  const TiledRows tiles = tile.set->tiles_of_x(tile.slot, tile.first);
  for (int s = 0; s < steps; s += kBlockSteps) {
    uint8_t* block = tile.set->x_tiles[tile.slot] + tiles.offset(0, s);
    const int width = std::min(kBlockSteps, steps - s);
    for (int r = 0; r < count; ++r) {
      const uint16_t* from = layer.x + tile.set->plan.row[tile.set->plan.offset[tile.slot] + tile.first + r] * layer.x_stride;
      for (int i = 0; i < width; ++i) std::memcpy(block + i * kStepTile + r * kRowBytes, from + (s + i) * kStep, kRowBytes);
    }
  }
}

// Copies x into tile order, once a call instead of once a task, for slots of more rows than a tile.
bool tile_inputs(Layer& layer) {
  std::vector<RowTile> tiles;
  int64_t bytes = 0;
  for (const Set& set : layer.sets)
    for (int slot : set.plan.active)
      if (layer.reads_tiles() && set.is_tiled(slot)) bytes += int64_t(row_tiles(set.plan.count(slot))) * set.w13.steps * kStepTile;
  if (bytes == 0 || bytes > kMostTileBytes) return true;
  uint8_t* at = layer.pool->arena(0, kInputTiles, size_t(bytes));
  if (at == nullptr) return false;
  for (Set& set : layer.sets) {
    set.x_tiles.assign(set.plan.offset.size() - 1, nullptr);
    for (int slot : set.plan.active) {
      if (!set.is_tiled(slot)) continue;
      set.x_tiles[slot] = at;
      for (int first = 0; first < set.plan.count(slot); first += kTileRows) tiles.push_back({&set, slot, first});
      at += size_t(row_tiles(set.plan.count(slot))) * set.w13.steps * kStepTile;
    }
  }
  return each_task(layer, int64_t(tiles.size()), [&](int64_t tile, int, ThreadScratch&) {
    fill_tile(layer, tiles[size_t(tile)]);
    return true;
  });
}

// One unit of some rows of h, as integers.
struct HiddenUnit {
  Set* set;
  int slot, first, unit;  // first row of the slot
};

void fill_unit(const Layer& layer, const HiddenUnit& each) {
  const Set& set = *each.set;
  const Columns w = layer.columns(set.w2, each.slot, 0, 1);
  const int count = std::min(kMaxRows, set.plan.count(each.slot) - each.first);
  const void* values[kMaxRows];
  const float* scales[kMaxRows];
  for (int r = 0; r < count; ++r) {
    values[r] = set.hidden(each.slot, each.first + r, 0);
    if (set.h_scales != nullptr) scales[r] = set.h_scales + (set.plan.offset[each.slot] + each.first + r) * layer.row_scales(set.w2);
  }
  uint8_t* to = set.integers_of_h(each.slot, each.first) + size_t(each.unit) * count * kIntegerRowBytes;
  layer.kernels.to_integers(w, {values, set.h_scales == nullptr ? nullptr : scales, count}, each.unit, to);
}

// Makes integers of h once a call instead of once a task of w2, for slots of more rows than few.
bool hidden_to_integers(Layer& layer) {
  std::vector<HiddenUnit> units;
  size_t bytes = 0;
  for (Set& set : layer.sets) {
    if (layer.kernels.integer_units == nullptr || layer.int8() || set.plan.active.empty()) continue;
    set.h_units = layer.kernels.integer_units(layer.columns(set.w2, set.plan.active.front(), 0, 1));
    for (int slot : set.plan.active)
      if (set.is_tiled(slot)) bytes += size_t(set.plan.count(slot)) * set.h_units * kIntegerRowBytes;
  }
  if (bytes == 0 || bytes > size_t(kMostTileBytes)) return true;
  uint8_t* at = layer.pool->arena(0, kIntegers, bytes);
  if (at == nullptr) return false;
  for (Set& set : layer.sets) {
    set.h_integers.assign(set.plan.offset.size() - 1, nullptr);
    for (int slot : set.plan.active) {
      const int count = set.plan.count(slot);
      if (set.h_units == 0 || !set.is_tiled(slot)) continue;
      set.h_integers[slot] = at;
      at += size_t(count) * set.h_units * kIntegerRowBytes;
      for (int first = 0; first < count; first += kMaxRows)
        for (int unit = 0; unit < set.h_units; ++unit) units.push_back({&set, slot, first, unit});
    }
  }
  return each_task(layer, int64_t(units.size()), [&](int64_t unit, int, ThreadScratch&) {
    fill_unit(layer, units[size_t(unit)]);
    return true;
  });
}

// The rows of a single product as its h: in place, or rounded to INT8 into scratch memory.
bool prepare_rows(Layer& layer, const uint16_t* x) {
  Set& set = layer.sets.front();
  const MoeMkExperts& c = layer.call;
  set.h_of = {const_cast<uint16_t*>(x)};  // read only
  set.inter_padded = c.x_stride;
  if (c.quantize == kAsIs) return true;
  const int64_t inputs = c.w2.num_inputs, each = layer.row_scales(set.w2), apart = (inputs + 64) / 2;  // a cache line more, as for x
  auto* rows = reinterpret_cast<uint8_t*>(layer.pool->arena(0, kInputs, size_t(c.num_rows) * apart * 2));
  auto* scales = reinterpret_cast<float*>(layer.pool->arena(0, kScales, size_t(c.num_rows * each) * 4));
  if (rows == nullptr || scales == nullptr) return false;
  set.h_of = {reinterpret_cast<uint16_t*>(rows)};
  set.inter_padded = apart;
  set.h_scales = scales;
  return each_task(layer, c.num_rows, [&](int64_t row, int, ThreadScratch&) {
    uint8_t* codes = rows + row * apart * 2;
    const uint16_t* from = x + row * c.x_stride;
    if (layer.int8_parts()) layer.kernels.round_row(from, nullptr, inputs, set.w2.row_layout(), codes, scales + row * each);
    else scales[row] = layer.kernels.quantize_int8(from, inputs, codes);
    return true;
  });
}

bool quantize_all_hidden(Layer& layer) {
  float* scales = layer.x_scales + layer.call.num_rows * layer.row_scales(layer.sets.front().w13);
  for (Set& set : layer.sets) {
    if (layer.rounds(set) && !quantize_hidden(layer, set, scales)) return false;
    scales += set.assignments() * layer.row_scales(set.w2);
  }
  return true;
}

}  // namespace
}  // namespace moe_mk
