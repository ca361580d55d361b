// Decoding for the AMX kernels: a panel of scaled bf16 weights, since tiles accumulate over blocks of k.
//
// fp8 blocks: the scale goes into the decoding tables (one bf16 rounding per weight, no extra time). Group scales are exact
// (apply_scales.h). int8 blocks: multiplied into the panel, rounded.
#pragma once
#include "portable.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define MOE_MK_AMX_AVX512 1
#include "avx512_panel.h"
#endif

namespace moe_mk {
namespace {

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

// One tile of `steps` steps with one scale.
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

constexpr auto kExpandPanel = expand_panel;

#else

constexpr auto kExpandPanel = PortableOps::expand;

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

// `steps` steps of one pair that share their block scales.
void expand_block(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
  if (w.format != kFp8) kExpandPanel(w, pair, step, steps, panel);
  if (w.groups != nullptr) return;
  for (int tile = 0; tile < 2; ++tile) {
    const float* scales = tile_scales(w, pair, tile);
    const float scale = scales == nullptr ? 1.0f : scales[step / w.steps_per_block];
    if (w.format == kFp8) expand_tile(packed + tile * 64, steps, scale, panel + tile * 64);
    else if (scales != nullptr) apply_scale<false>(panel + tile * 64, steps * kStep / 2, splat(scale));
  }
}

// `steps` steps of one pair from step0 on, both tiles, scales applied.
void expand_scaled(const Columns& w, int pair, int step0, int steps, uint8_t* panel) {
  for (int s = 0; s < steps;) {
    const int until = ((step0 + s) / w.steps_per_block + 1) * w.steps_per_block - step0;
    const int n = (until < steps ? until : steps) - s;
    expand_block(w, pair, step0 + s, n, panel + size_t(s) * 2 * kPanelTile);
    s += n;
  }
}

}  // namespace
}  // namespace moe_mk
