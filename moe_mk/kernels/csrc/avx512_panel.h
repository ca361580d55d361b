// Packed steps of one pair -> a bf16 panel [k pair][tile][column][parity], for AVX512-BF16 + VBMI.
// Scales of k groups go in while the weights are in registers, exactly (see apply_scales.h).
// Reads the packed bytes once, writes 2 KiB a step, aligned.
#pragma once
#include "avx512.h"

#include "part_scales.h"

namespace moe_mk {
namespace {

// How the scales of 16 columns are multiplied into VNNI rows of theirs.
struct Unscaled {
  inline __attribute__((always_inline)) __m512i operator()(__m512i row) const { return row; }
};

struct ByExponent {  // of every weight that is not 0
  __m512i exponents;
  explicit ByExponent(__m128i codes) {
    const __m512i powers = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(127));
    const __m512i even = _mm512_and_si512(_mm512_slli_epi32(powers, 7), _mm512_set1_epi32(0xffff));
    exponents = _mm512_or_si512(even, _mm512_slli_epi32(powers, 23));
  }
  // Whether no exponent of a small code can leave the range of a bf16.
  static bool serves(__m128i codes) {
    const __m128i from_16 = _mm_sub_epi8(codes, _mm_set1_epi8(16));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(from_16, _mm_set1_epi8(char(224))), from_16)) == 0xffff;
  }
  inline __attribute__((always_inline)) __m512i operator()(__m512i row) const {
    return _mm512_mask_add_epi16(row, _mm512_test_epi16_mask(row, _mm512_set1_epi16(0x7fff)), row, exponents);
  }
};

struct ByProduct {
  __m512 scale;
  inline __attribute__((always_inline)) __m512i operator()(__m512i row) const {
    const __m512i top = _mm512_set1_epi32(int(0xffff0000));
    const __m512i even = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(row, 16)), scale));
    const __m512i odd = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(row, top)), scale));
    return _mm512_ternarylogic_epi32(top, odd, _mm512_srli_epi32(even, 16), 0xca);  // top ? odd : even
  }
};

// `lines` lines of one tile.
template <typename Decode, typename Scale>
inline __attribute__((always_inline)) void expand_lines(const Decode& decode, const uint8_t* packed, int lines,
                                                        const Scale& scale, uint8_t* panel) {
  for (int line = 0; line < lines; ++line, packed += 128, panel += Decode::kRows * kPanelRow) {
    __m512i rows[Decode::kRows];
    decode.rows(packed, rows);
    for (int r = 0; r < Decode::kRows; ++r) _mm512_store_si512(panel + r * kPanelRow, scale(rows[r]));
  }
}

template <typename Decode>
inline void expand_plain(const uint8_t* packed, int steps, uint8_t* panel) {
  const Decode decode;
  for (int tile = 0; tile < 2; ++tile)
    expand_lines(decode, packed + tile * 64, steps * kStep / 2 / Decode::kRows, Unscaled(), panel + tile * 64);
}

template <typename Decode, typename Scales>
inline void expand_scaled(const uint8_t* packed, const uint8_t* scales, int groups, uint8_t* panel) {
  constexpr int kLines = kStep / 2 / Decode::kRows / Scales::kPerStep;  // of one group
  const Decode decode;
  for (int group = 0; group < groups; ++group, packed += kLines * 128, panel += kLines * Decode::kRows * kPanelRow)
    for (int tile = 0; tile < 2; ++tile, scales += kTileColumns) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
      if (Scales::kPowers && ByExponent::serves(codes))
        expand_lines(decode, packed + tile * 64, kLines, ByExponent(codes), panel + tile * 64);
      else
        expand_lines(decode, packed + tile * 64, kLines, ByProduct{Scales::of(scales)}, panel + tile * 64);
    }
}

template <typename Decode, int Line = 0>
inline __attribute__((always_inline)) void expand_line(const Decode& decode, const uint8_t* packed, uint8_t* panel) {
  __m512i rows[4];
  decode.template rows<Line>(packed, rows);
  for (int r = 0; r < Decode::count(Line); ++r) _mm512_store_si512(panel + (Decode::first(Line) + r) * kPanelRow, rows[r]);
  if constexpr (Line + 1 < Decode::kLines) expand_line<Decode, Line + 1>(decode, packed, panel);
}

template <typename Decode>
inline void expand_integers(const Columns& w, const uint8_t* packed, int steps, uint8_t* panel) {
  const Decode decode(w.minima);
  for (int s = 0; s < steps; ++s, packed += w.step_bytes, panel += 2 * kPanelTile)
    for (int tile = 0; tile < 2; ++tile) expand_line(decode, packed + tile * 64, panel + tile * 64);
}

// The integers of a format with parts.
inline void expand_codes(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
  switch (w.format) {
    case kInt8Groups: return expand_integers<Codes8>(w, packed, steps, panel);
    case kInt5:
    case kQ5K: return expand_integers<Codes5>(w, packed, steps, panel);
    case kQ6K: return expand_integers<Codes6>(w, packed, steps, panel);
    default: return expand_integers<Codes4>(w, packed, steps, panel);
  }
}

// `steps` steps of one pair from `step` on, of formats without parts; scales of groups are multiplied in, others are not.
inline void expand_panel(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
  const uint8_t* scales = w.groups == nullptr ? nullptr : group_scales(w, pair, step);
  switch (w.format) {
    case kInt8: return expand_plain<Int8>(packed, steps, panel);
    case kMxFp8: return expand_scaled<Fp8, PowersOfTwo>(packed, scales, steps, panel);
    case kMxFp4: return expand_scaled<Fp4, PowersOfTwo>(packed, scales, steps, panel);
    case kNvFp4: return expand_scaled<Fp4, SmallFloats>(packed, scales, 2 * steps, panel);
    default: return expand_plain<Fp8>(packed, steps, panel);
  }
}

}  // namespace
}  // namespace moe_mk
