// Vectors of 16 in the compiler's own vector language: the same source becomes AVX-512, AVX2, SSE2 or NEON.
// Everything is in an unnamed namespace: see kernels.h.
#pragma once
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace moe_mk {
namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

template <typename V>
inline __attribute__((always_inline)) V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename V>
inline __attribute__((always_inline)) void store(void* to, V value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename To, typename From>
inline __attribute__((always_inline)) To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To to;
  std::memcpy(&to, &value, sizeof to);
  return to;
}

inline __attribute__((always_inline)) f32x16 splat(float value) { return value - f32x16{}; }

// Lanes of comparisons and choices, of narrower integers, and over all lanes.
// NOTE gcc 12: where a vector takes two registers, it compares, chooses and narrows one lane at a time.
#if defined(__AVX2__) && !defined(__AVX512F__)
struct FloatHalves {
  __m256 of[2];
};
struct IntegerHalves {
  __m256i of[2];
};
inline __attribute__((always_inline)) i32x16 greater16(f32x16 a, f32x16 b) {
  const auto x = bits<FloatHalves>(a), y = bits<FloatHalves>(b);
  return bits<i32x16>(FloatHalves{{_mm256_cmp_ps(x.of[0], y.of[0], _CMP_GT_OQ), _mm256_cmp_ps(x.of[1], y.of[1], _CMP_GT_OQ)}});
}
inline __attribute__((always_inline)) i32x16 nan16(f32x16 a) {
  const auto x = bits<FloatHalves>(a);
  return bits<i32x16>(FloatHalves{{_mm256_cmp_ps(x.of[0], x.of[0], _CMP_UNORD_Q), _mm256_cmp_ps(x.of[1], x.of[1], _CMP_UNORD_Q)}});
}
template <typename V>
inline __attribute__((always_inline)) V choose16(i32x16 mask, V yes, V no) {
  const auto m = bits<FloatHalves>(mask), y = bits<FloatHalves>(yes), n = bits<FloatHalves>(no);
  return bits<V>(FloatHalves{{_mm256_blendv_ps(n.of[0], y.of[0], m.of[0]), _mm256_blendv_ps(n.of[1], y.of[1], m.of[1])}});
}
// Of lanes of at most 16 bits.
inline __attribute__((always_inline)) u16x16 to_u16(u32x16 lanes) {
  const auto x = bits<IntegerHalves>(lanes);
  return bits<u16x16>(_mm256_permute4x64_epi64(_mm256_packus_epi32(x.of[0], x.of[1]), 0xd8));
}
inline __attribute__((always_inline)) u8x16 lower_bytes(u32x16 lanes) {
  const __m256i halves = bits<__m256i>(to_u16(lanes & 0xffu));
  return bits<u8x16>(_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
inline __attribute__((always_inline)) float largest(f32x16 lanes) {
  const auto x = bits<FloatHalves>(lanes);
  const __m256 eight = _mm256_max_ps(x.of[0], x.of[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __attribute__((always_inline)) int32_t sum_of_lanes(i32x16 lanes) {
  const auto x = bits<IntegerHalves>(lanes);
  const __m256i eight = _mm256_add_epi32(x.of[0], x.of[1]);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline __attribute__((always_inline)) bool any16(i32x16 lanes) {
  const auto x = bits<IntegerHalves>(lanes);
  const __m256i both = _mm256_or_si256(x.of[0], x.of[1]);
  return !_mm256_testz_si256(both, both);
}
#else
inline __attribute__((always_inline)) i32x16 greater16(f32x16 a, f32x16 b) { return a > b; }
inline __attribute__((always_inline)) i32x16 nan16(f32x16 a) { return a != a; }
template <typename V>
inline __attribute__((always_inline)) V choose16(i32x16 mask, V yes, V no) { return mask ? yes : no; }
inline __attribute__((always_inline)) u16x16 to_u16(u32x16 lanes) { return __builtin_convertvector(lanes, u16x16); }
#if defined(__AVX512F__)
inline __attribute__((always_inline)) u8x16 lower_bytes(u32x16 lanes) { return bits<u8x16>(_mm512_cvtepi32_epi8(bits<__m512i>(lanes))); }
inline __attribute__((always_inline)) float largest(f32x16 lanes) { return _mm512_reduce_max_ps(bits<__m512>(lanes)); }
inline __attribute__((always_inline)) int32_t sum_of_lanes(i32x16 lanes) { return _mm512_reduce_add_epi32(bits<__m512i>(lanes)); }
inline __attribute__((always_inline)) bool any16(i32x16 lanes) {
  return _mm512_test_epi32_mask(bits<__m512i>(lanes), bits<__m512i>(lanes)) != 0;
}
#else
inline u8x16 lower_bytes(u32x16 lanes) { return __builtin_convertvector(lanes, u8x16); }
inline float largest(f32x16 lanes) {
  float most = lanes[0];
  for (int lane = 1; lane < 16; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
  return most;
}
inline int32_t sum_of_lanes(i32x16 lanes) {
  int32_t sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
  return sum;
}
inline bool any16(i32x16 lanes) {
  int32_t all = 0;
  for (int lane = 0; lane < 16; ++lane) all |= lanes[lane];
  return all != 0;
}
#endif
#endif

// Of a NaN and a number the second argument, as of vmaxps: max16(limit, x) keeps a NaN of x, max16(x, limit) loses it.
inline __attribute__((always_inline)) f32x16 max16(f32x16 a, f32x16 b) { return choose16(greater16(a, b), a, b); }
inline __attribute__((always_inline)) f32x16 min16(f32x16 a, f32x16 b) { return choose16(greater16(b, a), a, b); }

inline __attribute__((always_inline)) f32x16 widen(const uint16_t* bf16) {
  return bits<f32x16>(__builtin_convertvector(load<u16x16>(bf16), u32x16) << 16);
}

// Rounds to nearest even; NaNs stay NaNs (the low bits of a payload may be lost, so one bit is set).
inline __attribute__((always_inline)) u16x16 narrow(f32x16 value) {
  const u32x16 u = bits<u32x16>(value);
  const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const u32x16 quiet = (u >> 16) | 0x40u;
  return to_u16(choose16(nan16(value), quiet, rounded));
}

inline float widen_one(uint16_t bf16) {
  const uint32_t u = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

// e4m3 codes -> bf16, exact. bias 7 -> 127; the seven subnormals m * 2^-9 have their own exponents.
inline __attribute__((always_inline)) u16x16 decode16(u8x16 codes) {
  typedef int16_t i16x16 __attribute__((vector_size(32)));
  const u16x16 c = __builtin_convertvector(codes, u16x16);
  const u16x16 magnitude = c & 0x7f;
  const u16x16 normal = (magnitude << 4) + (120 << 7);
  const u16x16 four_up = (magnitude << 5) + (0x3c00 - 4 * 0x20);
  const u16x16 two_up = (magnitude << 6) + (0x3b80 - 2 * 0x40);
  const u16x16 one = u16x16{} + 0x3b00;
  const i16x16 m = bits<i16x16>(magnitude);
  u16x16 value = m > 7 ? normal : (m > 3 ? four_up : (m > 1 ? two_up : (m > 0 ? one : u16x16{})));
  return value | ((c & 0x80) << 8);
}

// The low four bits of each lane, an e2m1 code -> bf16, exact. Of 0, 0.5, 1, 1.5, 2, 3, 4, 6 only 0 and 0.5 are not normal.
inline __attribute__((always_inline)) u16x16 decode_e2m1(u16x16 codes) {
  const u16x16 magnitude = codes & 7;
  const u16x16 normal = (magnitude << 6) + (126 << 7);
  const u16x16 value = magnitude > 1 ? normal : (magnitude == 1 ? u16x16{} + 0x3f00 : u16x16{});
  return value | ((codes & 8) << 12);
}

// exp, 1 ulp or so, for |x| < 87; clamped beyond. Of a NaN it is one.
inline __attribute__((always_inline)) f32x16 exp16(f32x16 x) {
  x = min16(splat(88.0f), max16(splat(-87.0f), x));
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = x * 1.44269504f + magic;
  const f32x16 n = shifted - magic;
  f32x16 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return bits<f32x16>(bits<i32x16>(p) + (__builtin_convertvector(n, i32x16) << 23));
}

inline __attribute__((always_inline)) f32x16 sigmoid16(f32x16 x) { return 1.0f / (1.0f + exp16(-x)); }

}  // namespace
}  // namespace moe_mk
