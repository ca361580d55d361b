// Decoding 64 packed fp8 codes into two bf16 VNNI rows with VBMI byte tables.
#pragma once
#include <immintrin.h>

#include "kernels.h"

namespace moe_mk {

void multiply_few_avx512bf16(const Columns&, const Rows&, float* totals);

namespace {

// Low and high byte of the bf16 of each of the 128 magnitudes.
struct Tables {
  __m512i low0, low1, high0, high1;
};

// bf16 of the magnitudes 0..31, 32..63, 64..95, 96..127, already in order -> the byte tables.
inline __attribute__((always_inline)) Tables tables_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  alignas(64) static const uint8_t even[64] = {
      0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34,  36,  38,  40,  42,
      44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 64, 66, 68, 70, 72, 74, 76, 78,  80,  82,  84,  86,
      88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};
  const __m512i e = _mm512_load_si512(even), o = _mm512_add_epi8(e, _mm512_set1_epi8(1));
  return {_mm512_permutex2var_epi8(a, e, b), _mm512_permutex2var_epi8(c, e, d), _mm512_permutex2var_epi8(a, o, b),
          _mm512_permutex2var_epi8(c, o, d)};
}

// 32 magnitudes from `first` on as exact bf16: rebias 7 -> 127; the subnormals m * 2^-9 come from an int conversion.
inline __attribute__((always_inline)) __m512i exact_magnitudes(int first) {
  alignas(64) static const uint16_t ramp[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  alignas(64) static const uint16_t subnormals[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i code = _mm512_add_epi16(_mm512_load_si512(ramp), _mm512_set1_epi16(short(first)));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(120 << 7));
  return first == 0 ? _mm512_mask_mov_epi16(normal, 0xff, _mm512_load_si512(subnormals)) : normal;
}

inline __attribute__((always_inline)) Tables exact_tables() {
  return tables_of(exact_magnitudes(0), exact_magnitudes(32), exact_magnitudes(64), exact_magnitudes(96));
}

inline __attribute__((always_inline)) void decode64(const Tables& tables, __m512i codes, __m512i* first, __m512i* second) {
  const __m512i low = _mm512_permutex2var_epi8(tables.low0, codes, tables.low1);
  __m512i high = _mm512_permutex2var_epi8(tables.high0, codes, tables.high1);
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & 0x80)
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

// Decoding policies: bytes of one tile and step, and the two VNNI rows of the two k pairs at `from`.
struct Fp8 {
  static constexpr size_t kTileBytes = kPanelTile / 2;
  Tables tables = exact_tables();

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* first, __m512i* second) const {
    decode64(tables, _mm512_loadu_si512(from), first, second);
  }
};

struct Bf16 {
  static constexpr size_t kTileBytes = kPanelTile;

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* first, __m512i* second) const {
    *first = _mm512_loadu_si512(from);
    *second = _mm512_loadu_si512(from + kPanelRow);
  }
};

}  // namespace
}  // namespace moe_mk
