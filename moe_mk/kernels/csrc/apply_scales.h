// Multiplies scales into a decoded bf16 panel, in place, while it is in L1.
//
// Group scales are exact: a power of two (E8M0) changes an exponent, and an e4m3 scale times an e2m1 code has at most
// six significant bits. Only results below the normal range of bf16 (2^-126) may be inexact.
// Reads and writes 32 B * steps * 16 per tile. Any alignment.
#pragma once
#include "vectors.h"

namespace moe_mk {
namespace {

// E8M0: the exponent of an f32; code 0 is 2^-127, a subnormal one.
inline f32x16 power_of_two16(u8x16 codes) {
  const u32x16 c = __builtin_convertvector(codes, u32x16);
  return bits<f32x16>(c == 0 ? u32x16{} + 0x00400000u : c << 23);
}

inline f32x16 group_scales16(int format, const uint8_t* from) {
  const u8x16 codes = load<u8x16>(from);
  if (format != kNvFp4) return power_of_two16(codes);
  const u16x16 exact = decode16(codes);
  return bits<f32x16>(__builtin_convertvector(exact, u32x16) << 16);
}

inline const uint8_t* group_scales(const Columns& w, int pair, int step) {
  return w.groups + size_t(pair) * w.pair_groups + size_t(step) * groups_of_step(w.format) * kPairColumns;
}

inline u32x16 rounded_to_bf16(u32x16 f32) { return f32 + 0x7fffu + ((f32 >> 16) & 1u); }

// One tile of `rows` k pairs: both parities of 16 columns times 16 scales. Exact products are truncated, others rounded.
template <bool Exact>
inline void apply_scale(uint8_t* row, int rows, f32x16 scale) {
  for (int r = 0; r < rows; ++r, row += kPanelRow) {
    const u32x16 both = load<u32x16>(row);
    u32x16 even = bits<u32x16>(bits<f32x16>(both << 16) * scale);
    u32x16 odd = bits<u32x16>(bits<f32x16>(both & 0xffff0000u) * scale);
    if (!Exact) {
      even = rounded_to_bf16(even);
      odd = rounded_to_bf16(odd);
    }
    store(row, (even >> 16) | (odd & 0xffff0000u));
  }
}

// The group scales of `steps` steps of one pair from `step` on.
inline void apply_group_scales(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  const int groups = groups_of_step(w.format), rows = kStep / 2 / groups;
  const uint8_t* scales = group_scales(w, pair, step);
  for (int group = 0; group < steps * groups; ++group)
    for (int tile = 0; tile < 2; ++tile)
      apply_scale<true>(panel + size_t(group) * rows * kPanelRow + tile * 64, rows,
                      group_scales16(w.format, scales + group * kPairColumns + tile * kTileColumns));
}

}  // namespace
}  // namespace moe_mk
