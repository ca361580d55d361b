// Vectors of 16 in the compiler's own vector language: the same source becomes AVX-512, AVX2, SSE2 or NEON.
// Everything is in an unnamed namespace: see kernels.h.
#pragma once
#include <cstring>

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
// Of a NaN and a number the second argument, as of vmaxps: max16(limit, x) keeps a NaN of x, max16(x, limit) loses it.
inline __attribute__((always_inline)) f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline __attribute__((always_inline)) f32x16 min16(f32x16 a, f32x16 b) { return a < b ? a : b; }

inline __attribute__((always_inline)) f32x16 widen(const uint16_t* bf16) {
  return bits<f32x16>(__builtin_convertvector(load<u16x16>(bf16), u32x16) << 16);
}

// Rounds to nearest even; NaNs stay NaNs (the low bits of a payload may be lost, so one bit is set).
inline __attribute__((always_inline)) u16x16 narrow(f32x16 value) {
  const u32x16 u = bits<u32x16>(value);
  const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const u32x16 quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, u16x16);
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
