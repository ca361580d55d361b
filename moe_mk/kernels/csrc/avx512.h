// Decoding packed codes into bf16 VNNI rows in registers: byte tables (VPERMI2B) for eight bits, one table of bf16
// (VPERMW) for four. All exact.
#pragma once
#include <immintrin.h>

#include "kernels.h"

namespace moe_mk {

constexpr int kFewRows = 4;  // more are faster through a panel
void multiply_few_avx512bf16(const Columns&, const Rows&, const Scratch&, float* totals);
void multiply_few_parts(const Columns&, const Rows&, const Scratch&, float* totals);

namespace {

// Low and high byte of the bf16 of each of the 128 magnitudes.
struct Tables {
  __m512i low0, low1, high0, high1;
};

inline __attribute__((always_inline)) void decode64(const Tables& tables, __m512i codes, __m512i* first, __m512i* second) {
  const __m512i low = _mm512_permutex2var_epi8(tables.low0, codes, tables.low1);
  __m512i high = _mm512_permutex2var_epi8(tables.high0, codes, tables.high1);
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & 0x80)
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

// The bf16 of an integer below 128.
constexpr uint16_t bf16_of(int value) {
  const int size = value < 0 ? -value : value;
  int top = 6;
  while (top >= 0 && (size >> top) == 0) --top;
  return top < 0 ? 0 : uint16_t((value < 0 ? 0x8000 : 0) | ((127 + top) << 7) | ((size << (7 - top)) & 0x7f));
}

// The bf16 of an e4m3 code without sign: the exponent's bias is 127 instead of 7.
constexpr uint16_t bf16_of_e4m3(int code) {
  constexpr uint16_t subnormals[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  return code < 8 ? subnormals[code] : uint16_t((code << 4) + (120 << 7));
}

// Low bytes, then high bytes, of the bf16 of 128 magnitudes; bf16 of 0..127; of the 16 e2m1 codes and of -8..7 twice over
// (VPERMW looks at five bits); of -32..31.
struct Constants {
  alignas(64) uint8_t e4m3_bytes[256], integer_bytes[256];
  alignas(64) uint16_t integers[128], e2m1[32], around_8[32], around_32[64];

  constexpr Constants() : e4m3_bytes(), integer_bytes(), integers(), e2m1(), around_8(), around_32() {
    for (int value = 0; value < 128; ++value) {
      integers[value] = bf16_of(value);
      integer_bytes[value] = uint8_t(bf16_of(value));
      integer_bytes[128 + value] = uint8_t(bf16_of(value) >> 8);
      e4m3_bytes[value] = uint8_t(bf16_of_e4m3(value));
      e4m3_bytes[128 + value] = uint8_t(bf16_of_e4m3(value) >> 8);
    }
    for (int code = 0; code < 32; ++code) around_8[code] = bf16_of(code % 16 - 8);
    for (int code = 0; code < 64; ++code) around_32[code] = bf16_of(code - 32);
    constexpr uint16_t grid[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int code = 0; code < 32; ++code) e2m1[code] = uint16_t(grid[code & 7] | ((code & 8) << 12));
  }
};
constexpr Constants kConstants;

inline __attribute__((always_inline)) Tables tables_of(const uint8_t* bytes) {
  return {_mm512_load_si512(bytes), _mm512_load_si512(bytes + 64), _mm512_load_si512(bytes + 128), _mm512_load_si512(bytes + 192)};
}

// Decoding policies: the kRows k pairs of one tile at `from` as VNNI rows. kLines: the number of their 64 B lines, kPanelRow apart.
struct Fp8 {
  static constexpr int kRows = 2, kLines = 1;
  Tables tables = tables_of(kConstants.e4m3_bytes);

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* to) const {
    decode64(tables, _mm512_loadu_si512(from), to, to + 1);
  }
};

struct Int8 {
  static constexpr int kRows = 2, kLines = 1;
  Tables tables = tables_of(kConstants.integer_bytes);

  // A word holds four k of a column: its halves are joined first, because the unpacks separate them.
  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* to) const {
    const __m512i halves = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i codes = _mm512_shuffle_epi8(_mm512_loadu_si512(from), halves), size = _mm512_abs_epi8(codes);
    const __m512i low = _mm512_permutex2var_epi8(tables.low0, size, tables.low1);
    __m512i high = _mm512_permutex2var_epi8(tables.high0, size, tables.high1);
    // -128 has no positive counterpart: its index is 0, its bf16 0xc300.
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(size), _mm512_set1_epi8(0x43));
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
    to[0] = _mm512_unpacklo_epi8(low, high);
    to[1] = _mm512_unpackhi_epi8(low, high);
  }
};

struct Fp4 {
  static constexpr int kRows = 4, kLines = 1;
  __m512i table = _mm512_load_si512(kConstants.e2m1);

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    to[0] = _mm512_permutexvar_epi16(codes, table);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

struct Bf16 {
  static constexpr int kRows = 2, kLines = 2;

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* to) const {
    to[0] = _mm512_loadu_si512(from);
    to[1] = _mm512_loadu_si512(from + kPanelRow);
  }
};

// Decoding policies of the formats with parts: line `Line` of a tile of the step at `step` -> VNNI rows first(Line) to
// first(Line) + count(Line), at most four, as exact integers. kPerStep: parts of half a step, or of whole ones.
struct Codes4 {
  static constexpr int kLines = 4, kPerStep = 1;
  static constexpr int first(int line) { return 4 * line; }
  static constexpr int count(int) { return 4; }
  __m512i table;  // twice 16 entries: only the low four bits of an index count
  // Codes with minima are unsigned, others -8 to 7.
  explicit Codes4(bool minima) {
    const __m512i integers = _mm512_load_si512(kConstants.integers);
    table = minima ? _mm512_inserti64x4(integers, _mm512_castsi512_si256(integers), 1) : _mm512_load_si512(kConstants.around_8);
  }
  template <int Line>
  inline __attribute__((always_inline)) void rows(const uint8_t* step, __m512i* to) const {
    const __m512i codes = _mm512_loadu_si512(step + Line * 128);
    to[0] = _mm512_permutexvar_epi16(codes, table);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

// Of each bit of `mask` 1: a, 0: b.
inline __attribute__((always_inline)) __m512i chosen(int16_t mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(mask), a, b, 0xca);
}

struct Codes5 {  // three codes in 15 bits of a lane; the sixteenth of a step is in the highest bits of its five lines
  static constexpr int kLines = 5, kPerStep = 1;
  static constexpr int first(int line) { return 3 * line; }
  static constexpr int count(int line) { return line == 4 ? 4 : 3; }
  __m512i table = _mm512_load_si512(kConstants.integers);
  explicit Codes5(bool) {}

  template <int Line>
  inline __attribute__((always_inline)) void rows(const uint8_t* step, __m512i* to) const {
    const __m512i codes = _mm512_loadu_si512(step + Line * 128);
    to[0] = _mm512_permutexvar_epi16(codes, table);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 5), table);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 10), table);
    if constexpr (Line == 4) {
      const __m512i low = chosen(1, _mm512_srli_epi16(_mm512_loadu_si512(step), 15), _mm512_srli_epi16(_mm512_loadu_si512(step + 128), 14));
      const __m512i high = chosen(4, _mm512_srli_epi16(_mm512_loadu_si512(step + 256), 13),
                                  _mm512_srli_epi16(_mm512_loadu_si512(step + 384), 12));
      const __m512i four = chosen(3, low, high);
      to[3] = _mm512_permutexvar_epi16(chosen(15, four, _mm512_srli_epi16(codes, 11)), table);
    }
  }
};

struct Codes6 {  // two codes in 12 bits of a lane; the last two of half a step are in the highest bits of its three lines
  static constexpr int kLines = 6, kPerStep = 2;
  static constexpr int first(int line) { return line / 3 * 8 + line % 3 * 2; }
  static constexpr int count(int line) { return line % 3 == 2 ? 4 : 2; }
  __m512i low = _mm512_load_si512(kConstants.around_32), high = _mm512_load_si512(kConstants.around_32 + 32);
  explicit Codes6(bool) {}

  inline __attribute__((always_inline)) __m512i value(__m512i codes) const { return _mm512_permutex2var_epi16(low, codes, high); }
  template <int Line>
  inline __attribute__((always_inline)) void rows(const uint8_t* step, __m512i* to) const {
    const __m512i codes = _mm512_loadu_si512(step + Line * 128);
    to[0] = value(codes);
    to[1] = value(_mm512_srli_epi16(codes, 6));
    if constexpr (Line % 3 == 2) {
      const __m512i w0 = _mm512_loadu_si512(step + (Line - 2) * 128), w1 = _mm512_loadu_si512(step + (Line - 1) * 128);
      to[2] = value(chosen(15, _mm512_srli_epi16(w0, 12), _mm512_srli_epi16(codes, 8)));
      to[3] = value(chosen(15, _mm512_srli_epi16(w1, 12), _mm512_srli_epi16(codes, 10)));
    }
  }
};

struct Codes8 {
  static constexpr int kLines = 8, kPerStep = 1;
  static constexpr int first(int line) { return 2 * line; }
  static constexpr int count(int) { return 2; }
  Int8 signs;
  explicit Codes8(bool) {}

  template <int Line>
  inline __attribute__((always_inline)) void rows(const uint8_t* step, __m512i* to) const {
    signs.rows(step + Line * 128, to);
  }
};

// sum += weights of two k of 16 columns times two bf16.
// NOTE gcc 12 keeps broadcasts of x that serve several tiles in registers, and spills them and the sums.
inline __attribute__((always_inline)) void add_two(__m512& sum, __m512i weights, const void* x) {
  struct Two {
    uint8_t bytes[4];
  };
  asm volatile("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*static_cast<const Two*>(x)));
}

// Scale policies: the number of scales in a step of k, and the scale of 16 columns as f32.
struct BlockScales {  // one scalar a tile and block of k
  static constexpr bool kGrouped = false;
  static constexpr int kPerStep = 1;
  static __m512 of(const uint8_t*) { return _mm512_set1_ps(1.0f); }
};

struct PowersOfTwo {  // E8M0, one a column and step; code 0 is the subnormal 2^-127
  static constexpr bool kGrouped = true, kPowers = true;
  static constexpr int kPerStep = 1;

  static inline __attribute__((always_inline)) __m512 of(const uint8_t* from) {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(0x00400000)));
  }
};

struct SmallFloats {  // e4m3, two a column and step
  static constexpr bool kGrouped = true, kPowers = false;
  static constexpr int kPerStep = 2;

  // As a half float it is 2^8 too small, its seven subnormals included; the repeated sign is dropped.
  static inline __attribute__((always_inline)) __m512 of(const uint8_t* from) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(short(0xbfff)));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
};

}  // namespace
}  // namespace moe_mk
