// Decoding for the AMX kernels of all formats but FP8: a panel of scaled bf16 weights, since tiles accumulate over blocks of k.
//
// Group scales are exact (apply_scales.h). Scales of INT8 blocks are multiplied into the panel, which rounds to bf16.
#pragma once
#include "portable.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define MOE_MK_AMX_AVX512 1
#include "avx512_panel.h"
#endif

namespace moe_mk {
namespace {

#if defined(MOE_MK_AMX_AVX512)
constexpr auto kExpandPanel = expand_panel;
#else
constexpr auto kExpandPanel = PortableOps::expand;
#endif

// `steps` steps of one pair that share their block scales.
void expand_block(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  kExpandPanel(w, pair, step, steps, panel);
  if (w.scales == nullptr) return;
  for (int tile = 0; tile < 2; ++tile)
    apply_scale<false>(panel + tile * 64, steps * kStep / 2, splat(tile_scales(w, pair, tile)[step / w.steps_per_block]));
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
