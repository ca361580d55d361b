// The row operations of exchange.cpp for AVX-512. Rounding bf16 rows to e4m3 has a way of its own, a group of 128 at a
// time, because division and 32-bit lanes would take longer than moving the bytes:
//   f32 scales   x * fl(448 / amax) is within 4 units in the last place of fl(x / fl(amax / 448)), so both round to the
//                same code unless the product lies that close to the middle of two codes
//   UE8M0        dividing by a power of two subtracts from the exponent, on 16-bit integers
// A group with such a product, with a NaN, or with a number below the smallest normal code is divided as elsewhere.
#include <immintrin.h>

#include <type_traits>

#include "exchange_ops.h"

namespace moe_mk {
namespace {

constexpr int kLoads = kActivationBlock / 32;
constexpr int kRebase = 120 << 7;  // bf16 bits of 2^-7: exponents of e4m3 begin there

inline __m512i all16(int value) { return _mm512_set1_epi16(short(value)); }

// A group in registers: its bits, and the largest magnitude.
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

// Rounds 32 numbers divided by the scale; leaves 16-bit lanes [sign | exponent | 3 bits of mantissa | anything: 4].
// A lane of *from_middle becomes zero where a product was too close to the middle of two codes.
struct ByInverse {
  __m512 inverse;
  ByInverse(float, float amax) : inverse(_mm512_set1_ps(448.0f / amax)) {}

  // NOTE: middles count as doubtful, so that adding half a unit rounds all others right.
  __m512i operator()(__m512i bits, __m512i, __m512i* from_middle) const {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u)), half = _mm512_set1_epi32(0x80000);
    const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), inverse);
    const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(bits, high)), inverse);
    const __m512i low = _mm512_add_epi32(_mm512_castps_si512(even), half);
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    const __m512i near = _mm512_set1_epi32(8), beyond = _mm512_set1_epi32(0xffff0);
    *from_middle = _mm512_min_epu32(*from_middle, _mm512_and_si512(_mm512_add_epi32(low, near), beyond));
    *from_middle = _mm512_min_epu32(*from_middle, _mm512_and_si512(_mm512_add_epi32(up, near), beyond));
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), _mm512_and_si512(up, high));
  }
};
struct ByExponent {
  __m512i less;
  ByExponent(float scale, float) : less(all16(int((bits<uint32_t>(scale) >> 23) - 127) << 7)) {}

  __m512i operator()(__m512i bits, __m512i magnitude, __m512i*) const {
    const __m512i quotient = _mm512_sub_epi16(magnitude, less);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(quotient, 4), all16(1));
    const __m512i rounded = _mm512_add_epi16(_mm512_add_epi16(quotient, all16(7)), odd);
    return _mm512_or_si512(rounded, _mm512_andnot_si512(all16(0x7fff), bits));
  }
};

// 16-bit lanes as above to codes in 16-bit lanes; zeros of `magnitude` become zeros.
inline __m512i code_of(__m512i rounded, __m512i bits, __m512i magnitude) {
  const __m512i rebased = _mm512_sub_epi16(_mm512_and_si512(rounded, all16(0x7fff)), all16(kRebase));
  const __m512i code = _mm512_maskz_srli_epi16(_mm512_test_epi16_mask(magnitude, magnitude), rebased, 4);
  return _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi16(bits, 8), all16(0x80)));
}

template <typename Divide>
inline bool encode_group(const Group& group, float scale, float amax, uint8_t* codes) {
  const Divide divide(scale, amax);
  // The first bf16 whose quotient is a normal code for certain; magnitudes from 1 to below it are not.
  const int normal = int(bits<uint32_t>(scale * (0x1p-6f * 1.000001f)) >> 16) + 1;
  __m512i from_middle = all16(-1), least = all16(-1), made[kLoads];
  for (int i = 0; i < kLoads; ++i) {
    least = _mm512_min_epu16(least, _mm512_sub_epi16(group.magnitude[i], all16(1)));  // zeros are the largest
    made[i] = code_of(divide(group.bits[i], group.magnitude[i], &from_middle), group.bits[i], group.magnitude[i]);
  }
  for (int i = 0; i < kLoads; i += 2) {
    const __m512i both = _mm512_packus_epi16(made[i], made[i + 1]);  // by 128-bit lanes
    _mm512_storeu_si512(codes + i * 32, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both));
  }
  const uint32_t small = _mm512_cmplt_epu16_mask(least, all16(normal - 1));
  return (small | _mm512_testn_epi32_mask(from_middle, from_middle)) == 0;
}

template <bool kUe8m0>
inline float quantize_128(const uint8_t* x, uint8_t* codes) {
  const Group group(x);
  const float amax = bits<float>(group.most << 16);
  if (group.most < 0x7f80u && amax >= 1e-10f) {
    const float scale = kUe8m0 ? power_of_two_above(amax / 448.0f) : amax / 448.0f;
    using Divide = std::conditional_t<kUe8m0, ByExponent, ByInverse>;
    if (__builtin_expect(encode_group<Divide>(group, scale, amax, codes), 1)) return scale;
  }
  return quantize_group_of<kRowsBf16>(x, kActivationBlock, kUe8m0, codes);
}

template <bool kUe8m0>
void quantize_bf16(const uint8_t* x, int64_t columns, uint8_t* values, uint8_t* scales) {
  for (int64_t first = 0; first < columns; first += kActivationBlock) {
    const bool whole = first + kActivationBlock <= columns;
    const float scale =
        whole ? quantize_128<kUe8m0>(x + first * 2, values + first)
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
