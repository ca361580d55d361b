// The vector registers of a unit: 512 bits where it is compiled for AVX-512, else 256 (AVX2 + FMA + F16C). rows_f32.h and
// rows_int16.h are written for either.
//
// A group is the columns and parities of a k pair that a vector of f32 holds: four columns of 256 bits, eight of 512.
// Everything is in an unnamed namespace: see kernels.h.
#pragma once
#include <immintrin.h>

#include "vectors.h"

namespace moe_mk {
namespace {

#if defined(__AVX512F__)
using Floats = __m512;
using Integers = __m512i;
using HalfIntegers = __m256i;
#else
using Floats = __m256;
using Integers = __m256i;
using HalfIntegers = __m128i;
#endif

// In the compiler's vector language, for either; operators serve f32, and bits.
typedef uint16_t Words __attribute__((vector_size(sizeof(Integers))));
typedef int16_t SignedWords __attribute__((vector_size(sizeof(Integers))));
typedef int32_t Sums __attribute__((vector_size(sizeof(Integers))));

inline __attribute__((always_inline)) Integers all16(int value) { return bits<Integers>(Words{} + uint16_t(value)); }
inline __attribute__((always_inline)) Integers all32(int value) { return bits<Integers>(Sums{} + value); }
inline __attribute__((always_inline)) Integers plus32(Integers a, Integers b) { return bits<Integers>(bits<Sums>(a) + bits<Sums>(b)); }
inline __attribute__((always_inline)) Integers minus32(Integers a, Integers b) { return bits<Integers>(bits<Sums>(a) - bits<Sums>(b)); }
inline __attribute__((always_inline)) Integers left16(Integers lanes, int by) { return bits<Integers>(bits<Words>(lanes) << by); }
inline __attribute__((always_inline)) Integers right16(Integers lanes, int by) { return bits<Integers>(bits<Words>(lanes) >> by); }
inline __attribute__((always_inline)) Integers right16_signed(Integers lanes, int by) { return bits<Integers>(bits<SignedWords>(lanes) >> by); }
inline __attribute__((always_inline)) Integers left32(Integers lanes, int by) { return bits<Integers>(bits<Sums>(lanes) << by); }
inline __attribute__((always_inline)) Floats to_floats(Integers lanes) { return __builtin_convertvector(bits<Sums>(lanes), Floats); }
inline __attribute__((always_inline)) Floats magnitude(Floats value) { return bits<Floats>(bits<Integers>(value) & all32(0x7fffffff)); }

inline __attribute__((always_inline)) int32_t two_sums_of(__m256i a, __m256i b, int32_t* of_b) {
  const __m256i both = _mm256_hadd_epi32(a, b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_hadd_epi32(four, four);
  *of_b = _mm_extract_epi32(four, 1);
  return _mm_cvtsi128_si32(four);
}

#if defined(__AVX512F__)

inline __attribute__((always_inline)) Floats all(float value) { return _mm512_set1_ps(value); }
inline __attribute__((always_inline)) Integers repeated(__m128i value) { return _mm512_broadcast_i32x4(value); }

inline __attribute__((always_inline)) Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) Floats minus_times(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline __attribute__((always_inline)) Floats where_less(Floats value, Floats limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(value, limit, _CMP_LT_OQ), value);
}
inline __attribute__((always_inline)) Integers shuffled(Integers table, Integers at) { return _mm512_shuffle_epi8(table, at); }

inline __attribute__((always_inline)) Integers rounded(Floats lanes) { return _mm512_cvtps_epi32(lanes); }
inline __attribute__((always_inline)) __m256i narrow16(const Integers (&lanes)[1]) { return _mm512_cvtepi32_epi16(lanes[0]); }
inline __attribute__((always_inline)) float sum_of(Floats lanes) { return _mm512_reduce_add_ps(lanes); }
inline __attribute__((always_inline)) int32_t sum_of(Integers lanes) { return _mm512_reduce_add_epi32(lanes); }
inline __attribute__((always_inline)) Floats halves_to_floats(HalfIntegers halves) { return _mm512_cvtph_ps(halves); }
inline __attribute__((always_inline)) Floats bf16_to_floats(HalfIntegers halves) { return bits<Floats>(left32(_mm512_cvtepu16_epi32(halves), 16)); }
inline __attribute__((always_inline)) Integers widen_bytes(HalfIntegers bytes) { return _mm512_cvtepi8_epi16(bytes); }
inline __attribute__((always_inline)) Integers widen_to_32(const uint8_t* bytes) { return _mm512_cvtepu8_epi32(load<__m128i>(bytes)); }
// Of products of signed lanes of 16 bits the upper 16.
inline __attribute__((always_inline)) Integers upper_products(Integers a, Integers b) { return _mm512_mulhi_epi16(a, b); }
inline __attribute__((always_inline)) HalfIntegers lower(Integers lanes) { return _mm512_castsi512_si256(lanes); }
inline __attribute__((always_inline)) HalfIntegers upper(Integers lanes) { return _mm512_extracti64x4_epi64(lanes, 1); }
inline __attribute__((always_inline)) Floats both_parities(const float* x) {
  double two;
  std::memcpy(&two, x, sizeof two);
  return _mm512_castpd_ps(_mm512_set1_pd(two));
}
// The lower or the upper eight bytes of each 16, each in the upper half of a lane.
inline __attribute__((always_inline)) Integers lower_bytes_up(Integers bytes) { return _mm512_unpacklo_epi8(Integers{}, bytes); }
inline __attribute__((always_inline)) Integers upper_bytes_up(Integers bytes) { return _mm512_unpackhi_epi8(Integers{}, bytes); }
// The lower eight bytes of each 16, then the upper ones.
inline __attribute__((always_inline)) Integers by_half(Integers lanes) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), lanes);
}
// Even and odd parities of two groups, added: 16 columns in order.
inline __attribute__((always_inline)) Floats sums_of_columns(Floats first, Floats second) {
  const Integers even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_add_ps(_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, even | all32(1), second));
}
// The sum of the lanes of a; those of b to `of_b`.
inline __attribute__((always_inline)) int32_t two_sums_of(Integers a, Integers b, int32_t* of_b) {
  const auto half = [](Integers all) { return _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1)); };
  return two_sums_of(half(a), half(b), of_b);
}
// Half a vector of 16-bit lanes, and zeros.
inline __attribute__((always_inline)) Integers lower_half(const void* from) { return _mm512_zextsi256_si512(load<__m256i>(from)); }
// The words of even index of one vector, those of odd index of another one.
inline __attribute__((always_inline)) Integers odd_words(Integers even, Integers odd) { return _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd); }
// |lane|, 0 where it is `largest`; 16 bits.
inline __attribute__((always_inline)) Integers magnitudes_but(Integers lanes, Integers largest) {
  const Integers all_of_them = _mm512_abs_epi16(lanes);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(all_of_them, largest), all_of_them);
}
// sum += the products of neighbouring lanes of 16 bits.
// NOTE gcc 12 copies the sums around the intrinsic in every step, and spills them.
inline __attribute__((always_inline)) void add_products(Integers codes, Integers x, Integers& sum) {
  asm volatile("vpdpwssd %1, %2, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

#else

inline __attribute__((always_inline)) Floats all(float value) { return _mm256_set1_ps(value); }
inline __attribute__((always_inline)) Integers repeated(__m128i value) { return _mm256_broadcastsi128_si256(value); }

inline __attribute__((always_inline)) Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) Floats minus_times(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline __attribute__((always_inline)) Floats where_less(Floats value, Floats limit) {
  return _mm256_and_ps(value, _mm256_cmp_ps(value, limit, _CMP_LT_OQ));
}
inline __attribute__((always_inline)) Integers shuffled(Integers table, Integers at) { return _mm256_shuffle_epi8(table, at); }

inline __attribute__((always_inline)) Integers rounded(Floats lanes) { return _mm256_cvtps_epi32(lanes); }
inline __attribute__((always_inline)) __m256i narrow16(const Integers (&lanes)[2]) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(lanes[0], lanes[1]), 0xd8);
}
inline __attribute__((always_inline)) float sum_of(Floats lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline __attribute__((always_inline)) int32_t sum_of(Integers lanes) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline __attribute__((always_inline)) Floats halves_to_floats(HalfIntegers halves) { return _mm256_cvtph_ps(halves); }
inline __attribute__((always_inline)) Floats bf16_to_floats(HalfIntegers halves) { return bits<Floats>(left32(_mm256_cvtepu16_epi32(halves), 16)); }
inline __attribute__((always_inline)) Integers widen_bytes(HalfIntegers bytes) { return _mm256_cvtepi8_epi16(bytes); }
inline __attribute__((always_inline)) Integers widen_to_32(const uint8_t* bytes) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(bytes))); }
inline __attribute__((always_inline)) Integers upper_products(Integers a, Integers b) { return _mm256_mulhi_epi16(a, b); }
inline __attribute__((always_inline)) HalfIntegers lower(Integers lanes) { return _mm256_castsi256_si128(lanes); }
inline __attribute__((always_inline)) HalfIntegers upper(Integers lanes) { return _mm256_extracti128_si256(lanes, 1); }
inline __attribute__((always_inline)) Floats both_parities(const float* x) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(x)));
}
inline __attribute__((always_inline)) Integers by_half(Integers lanes) { return _mm256_permute4x64_epi64(lanes, 0xd8); }
// bf16 of both parities of two columns of each 16 bytes.
inline __attribute__((always_inline)) Floats lower_bf16_to_floats(Integers halves) { return bits<Floats>(_mm256_unpacklo_epi16(Integers{}, halves)); }
inline __attribute__((always_inline)) Floats upper_bf16_to_floats(Integers halves) { return bits<Floats>(_mm256_unpackhi_epi16(Integers{}, halves)); }
// Even and odd parities of the first and of the second halves of two groups, added: 8 columns in order.
inline __attribute__((always_inline)) Floats sums_of_columns(Floats first, Floats second) { return _mm256_hadd_ps(first, second); }
inline __attribute__((always_inline)) Integers lower_half(const void* from) { return _mm256_zextsi128_si256(load<__m128i>(from)); }
inline __attribute__((always_inline)) Integers odd_words(Integers even, Integers odd) { return _mm256_blend_epi16(even, odd, 0xaa); }
inline __attribute__((always_inline)) Integers magnitudes_but(Integers lanes, Integers largest) {
  const Integers all_of_them = _mm256_abs_epi16(lanes);
  return _mm256_andnot_si256(_mm256_cmpeq_epi16(all_of_them, largest), all_of_them);
}
// NOTE gcc 12 moves additions away from their products, and spills the sums: the order is kept by the assembly.
inline __attribute__((always_inline)) void add_products(Integers codes, Integers x, Integers& sum) {
  const Integers products = _mm256_madd_epi16(codes, x);
  asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
}

#endif

constexpr bool kIsWide = sizeof(Floats) == 64;
constexpr int kLanes = sizeof(Floats) / sizeof(float);
constexpr int kGroupBytes = 2 * kLanes;             // packed bytes of a group: one k pair of bf16, two of FP8
constexpr int kGroups = 2 * kPairColumns / kLanes;  // of a k pair

// 32 bits of memory in all lanes. NOTE as f32: gcc 12 takes integers through general registers.
inline __attribute__((always_inline)) Integers broadcast32(const void* from) {
  float lane;
  std::memcpy(&lane, from, sizeof lane);
  return bits<Integers>(all(lane));
}

// Distance of prefetches that are spread over a whole unit of packed weights: at least to the next one.
inline size_t prefetch_bytes(int ahead, size_t unit_bytes) { return size_t(ahead) > unit_bytes ? size_t(ahead) : unit_bytes; }
inline __attribute__((always_inline)) void prefetch_line(const uint8_t* line, int ahead) {
  if (ahead != 0) _mm_prefetch(reinterpret_cast<const char*>(line + ahead), _MM_HINT_T0);
}

}  // namespace
}  // namespace moe_mk
