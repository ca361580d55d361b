// The row operations of exchange.cpp for AVX-512. bf16 rows are rounded to e4m3 by a table, a group of 128 at a time,
// because division in 32-bit lanes would take longer than moving the bytes. A bf16 has seven bits of mantissa, and scaling by
// powers of two is exact: the code of a quotient depends on the two mantissas through a table and on the exponents only by
// their difference,
//   code(x, amax) = 8 (exponent of x - exponent of amax) + table[mantissa of amax][mantissa of x]
// where the table is computed with the same division and rounding as elsewhere. For power-of-two scales the mantissa of the
// divisor is zero. Groups with a NaN, an infinity or a number below the smallest normal code are divided.
#include <immintrin.h>

#include <array>

#include "exchange_ops.h"

namespace moe_mk {
namespace {

constexpr int kLoads = kActivationBlock / 32;
constexpr int kMantissas = 128;

inline __m512i all16(int value) { return _mm512_set1_epi16(short(value)); }

// A group in registers: its bits and its largest magnitude.
struct Group {
  __m512i bits[kLoads], magnitude[kLoads];
  uint32_t most;

  explicit Group(const uint8_t* x) {
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < kLoads; ++i) {
      bits[i] = _mm512_loadu_si512(x + i * 64);
      magnitude[i] = _mm512_and_si512(bits[i], all16(0x7fff));
      largest = _mm512_max_epu16(largest, magnitude[i]);
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    const __m128i eighth = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eighth, _mm_set1_epi16(-1)));
    most = 0xffffu - uint32_t(uint16_t(_mm_cvtsi128_si32(least)));
  }
};

// The number to add to [low 5 bits of the exponent | high 3 bits of the mantissa] of a bf16 to get the code of its quotient,
// modulo 256 and except for 8 times the exponent of the divisor; indexed by the seven bits of the mantissa.
struct alignas(64) Codes {
  uint8_t add[kMantissas];

  __m512i of(__m512i mantissa) const {
    return _mm512_permutex2var_epi8(_mm512_load_si512(add), mantissa, _mm512_load_si512(add + 64));
  }
};

// Quotients by `divisor` must be normal codes; `exponent` is added to theirs.
inline Codes codes_for(float divisor, int exponent) {
  Codes codes;
  for (int x = 0; x < kMantissas; ++x) {
    const float quotient = bits<float>(0x3f800000u | uint32_t(x) << 16) / divisor;
    codes.add[x] = uint8_t(code_of_number(quotient) + 8 * exponent - (x >> 4));
  }
  return codes;
}

const Codes* codes_by_amax() {
  static const std::array<Codes, kMantissas> table = [] {
    std::array<Codes, kMantissas> made;
    for (int a = 0; a < kMantissas; ++a)  // 16 times the scale of an amax from 1 to 2: exact
      made[size_t(a)] = codes_for(16.0f * (bits<float>(0x3f800000u | uint32_t(a) << 16) / 448.0f), 4);
    return made;
  }();
  return table.data();
}

const Codes& codes_of_powers() {
  static const Codes table = codes_for(1.0f, 0);
  return table;
}

// 64 codes; zeros keep their sign. `base` is 8 times the exponent of the divisor in every byte.
inline __m512i encode_64(const Group& group, int first, const Codes& codes, __m512i base) {
  const __m512i shifts = _mm512_set1_epi64(0x3020100034241404);  // of 4 words: bits 4 to 11 of each, then bits 0 to 7
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i low = _mm512_multishift_epi64_epi8(shifts, group.bits[first]);
  const __m512i high = _mm512_multishift_epi64_epi8(shifts, group.bits[first + 1]);
  const __m512i upper = _mm512_permutex2var_epi32(low, evens, high);
  const __m512i mantissa = _mm512_permutex2var_epi32(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
  const __mmask64 numbers = _mm512_kunpackd(_mm512_test_epi16_mask(group.magnitude[first + 1], group.magnitude[first + 1]),
                                            _mm512_test_epi16_mask(group.magnitude[first], group.magnitude[first]));
  const __mmask64 negative =
      _mm512_kunpackd(_mm512_movepi16_mask(group.bits[first + 1]), _mm512_movepi16_mask(group.bits[first]));
  const __m512i code = _mm512_maskz_add_epi8(numbers, _mm512_sub_epi8(upper, base), codes.of(mantissa));
  return _mm512_mask_add_epi8(code, negative, code, _mm512_set1_epi8(char(0x80)));
}

// Whether all non-zero numbers are certain to have normal codes.
inline bool all_normal(const Group& group, float scale) {
  const int normal = int(bits<uint32_t>(scale * (0x1p-6f * 1.000001f)) >> 16) + 1;  // the first bf16 with a normal code
  __m512i least = all16(-1);
  for (int i = 0; i < kLoads; ++i)
    least = _mm512_min_epu16(least, _mm512_sub_epi16(group.magnitude[i], all16(1)));  // zeros are the largest
  return _mm512_cmplt_epu16_mask(least, all16(normal - 1)) == 0;
}

template <bool kUe8m0>
inline float quantize_128(const uint8_t* x, uint8_t* values, const Codes* by_amax, const Codes& of_powers) {
  const Group group(x);
  const float amax = bits<float>(group.most << 16);
  if (group.most < 0x7f80u && amax >= 1e-10f) {
    const float scale = kUe8m0 ? power_of_two_above(amax / 448.0f) : amax / 448.0f;
    const Codes& codes = kUe8m0 ? of_powers : by_amax[group.most % kMantissas];
    const uint32_t exponent = kUe8m0 ? bits<uint32_t>(scale) >> 23 : group.most / kMantissas;
    const __m512i base = _mm512_set1_epi8(char(8 * exponent));
    if (__builtin_expect(all_normal(group, scale), 1)) {
      _mm512_storeu_si512(values, encode_64(group, 0, codes, base));
      _mm512_storeu_si512(values + 64, encode_64(group, 2, codes, base));
      return scale;
    }
  }
  return quantize_group_of<kRowsBf16>(x, kActivationBlock, kUe8m0, values);
}

template <bool kUe8m0>
void quantize_bf16(const uint8_t* x, int64_t columns, uint8_t* values, uint8_t* scales) {
  const Codes *by_amax = codes_by_amax(), &of_powers = codes_of_powers();
  for (int64_t first = 0; first < columns; first += kActivationBlock) {
    const bool whole = first + kActivationBlock <= columns;
    const float scale =
        whole ? quantize_128<kUe8m0>(x + first * 2, values + first, by_amax, of_powers)
              : quantize_group_of<kRowsBf16>(x + first * 2, int(columns - first), kUe8m0, values + first);
    put_scale(scale, kUe8m0, scales + first / kActivationBlock * (kUe8m0 ? 1 : 4));
  }
}

void quantize_fast(const uint8_t* x, int64_t columns, int row_type, bool ue8m0, uint8_t* values, uint8_t* scales) {
  if (row_type != kRowsBf16) return quantize_row(x, columns, row_type, ue8m0, values, scales);
  ue8m0 ? quantize_bf16<true>(x, columns, values, scales) : quantize_bf16<false>(x, columns, values, scales);
}

}  // namespace

const RowOps* avx512_row_ops() {
  static const RowOps table = {add_up, quantize_fast};
  return &table;
}

}  // namespace moe_mk
