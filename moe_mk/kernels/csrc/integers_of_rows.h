// Parts of bf16 rows as integers, for rows_int16.h.
//
// The inputs of a part (of k with one scale, at most 128) become integers times a power of two: the largest has 15 bits (e2m1: 14).
// bf16 has eight significant bits, so inputs of at least 2^-7 of the largest power of two in their part are exact; what others lose
// is at most 2^-15 of it. If the inputs of a part lose more than 2^-8 of their sum without the largest, |x| each, as next to an outlier,
// the row has another term, which is multiplied after the first: what all its inputs have lost, as integers; and further ones.
// With integer group scales, a unit of 128 inputs has a single activation scale, from its absolute maximum; the error bound above still holds
// per part.
#pragma once
#include "lanes.h"

namespace moe_mk {
namespace {

constexpr float kMostLost = 0x1p-8f;
constexpr int kMostTerms = 8;  // 120 bits

// What a code of a term is worth in the first: 2^-15 for each before it.
inline float of_term(int term) { return bits<float>((127 - 15 * term) << 23); }

// Largest magnitudes, as bf16 bits: of one part, and of all parts with the same activation scale.
struct Largest {
  int own, all;
};

// Inputs of a part, a multiple of 16 of them -> integers times a power of two: the inverse of its scale.
struct PartScale {
  int exponent;
  Floats inverse;
  float largest;  // of the part, in units of the scale

  PartScale(Largest bf16, int top_bit) {
    exponent = (bf16.all >> 7) - top_bit > 1 ? (bf16.all >> 7) - top_bit : 1;
    const float scale = bits<float>((254 - exponent) << 23);
    inverse = all(scale);
    largest = widen_one(uint16_t(bf16.own)) * scale;
  }
  float scale_of(int term) const { return bits<float>(exponent << 23) * of_term(term); }
};

// A part of a row as integers.
struct IntegerPart {
  float scale;
  int32_t sum;
  bool loses;  // whether much is lost after this term
};

// The integers of a further term: what the terms before have lost, times 2^15 each; of term 0 the inputs.
__attribute__((noinline)) IntegerPart to_integers_of_term(const uint16_t* x, int count, Largest bf16, int top_bit, int term, int16_t* to) {
  const PartScale part(bf16, top_bit);
  const Floats limit = all(of_term(-term) * kMostLost), largest = all(part.largest);
  Integers sums = Integers{};
  constexpr int kParts = 16 / kLanes;
  Floats excess[kParts];  // of what is lost over its limit
  for (Floats& each : excess) each = Floats{};
  for (int i = 0; i < count; i += 16) {
    Integers codes[kParts];
    for (int p = 0; p < kParts; ++p) {
      Floats scaled = bf16_to_floats(load<HalfIntegers>(x + i + kLanes * p)) * part.inverse;
      excess[p] = minus_times(where_less(magnitude(scaled), largest), limit, excess[p]);
      for (int before = 0; before < term; ++before) scaled = (scaled - to_floats(rounded(scaled))) * all(of_term(-1));
      codes[p] = rounded(scaled);
      excess[p] = excess[p] + magnitude(scaled - to_floats(codes[p]));
      sums = plus32(sums, codes[p]);
    }
    store(to + i, narrow16(codes));
  }
  const bool loses = term + 1 < kMostTerms && sum_of(kParts == 2 ? excess[0] + excess[kParts - 1] : excess[0]) > 0.0f;
  return {part.scale_of(term), sum_of(sums), loses};
}

// Count inputs if it is not 0, a multiple of 16 of them.
template <int Count>
inline __attribute__((always_inline)) int largest_of(const uint16_t* x, int given) {
  const int count = Count != 0 ? Count : given;
  __m256i most = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < count; i += 16) most = _mm256_max_epu16(most, _mm256_and_si256(load<__m256i>(x + i), _mm256_set1_epi16(0x7fff)));
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  return 0xffff ^ (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)))) & 0xffff);
}

// Inputs of a part -> integers of at most top_bit + 1 bits. An input that is NaN or infinite: the scale is NaN.
template <int Count>
inline __attribute__((always_inline)) IntegerPart to_integers(const uint16_t* x, int given, Largest largest, int top_bit, int term, int16_t* to) {
  const int count = Count != 0 ? Count : given;
  if (__builtin_expect(largest.all >= 0x7f80, 0)) {
    std::memset(to, 0, size_t(count) * sizeof *to);
    return {__builtin_nanf(""), 0, false};
  }
  const PartScale part(largest, top_bit);
  if (term > 0) return to_integers_of_term(x, count, largest, top_bit, term, to);
  const Integers ones = all16(1), code_of_largest = all16(int(part.largest + 0.5f));
  Integers sums = Integers{}, others = Integers{};
#pragma GCC unroll 8
  for (int i = 0; i < count; i += 2 * kLanes) {
    const bool whole = count - i >= 2 * kLanes;
    const Integers both = whole ? load<Integers>(x + i) : lower_half(x + i);
    const Integers even = rounded(bits<Floats>(left32(both, 16)) * part.inverse);
    const Integers odd = rounded(bits<Floats>(both & all32(0xffff0000)) * part.inverse);
    const Integers codes = odd_words(even, left32(odd, 16));
    if (whole) store(to + i, codes);
    else store(to + i, lower(codes));
    add_products(codes, ones, sums);
    add_products(magnitudes_but(codes, code_of_largest), ones, others);
  }
  // A code differs from its input by a half at most: little is lost if the others are 128.5 on average.
  int32_t sum_of_others;
  const int32_t sum = two_sums_of(sums, others, &sum_of_others);
  if (__builtin_expect(sum_of_others < 129 * count, 0)) return to_integers_of_term(x, count, largest, top_bit, 0, to);
  return {part.scale_of(0), sum, false};
}

}  // namespace
}  // namespace moe_mk
