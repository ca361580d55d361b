// Per-token 1x128 quantisation to e4m3, its inverse, and the search for NaN codes.
//   amax = max |x| (at least 1e-10), scale = amax / 448, code = e4m3(x / scale), nearest even, saturating
// UE8M0: the scale is rounded up to a power of two, so that nothing saturates; a group with an
// infinity has an infinite scale.
// Reads x once (256 B a group), writes 128 B of codes and 4 B of scale; no alignment assumed.
#pragma once
#include "vectors.h"

namespace moe_mk {
namespace {

inline u8x16 encode16(f32x16 value) {
  const u32x16 u = bits<u32x16>(value);
  const u32x16 sign = (u >> 24) & 0x80u;
  const f32x16 magnitude = bits<f32x16>(u & 0x7fffffffu);
  const f32x16 clamped = choose16(greater16(magnitude, splat(448.0f)), splat(448.0f), magnitude);
  const u32x16 c = bits<u32x16>(clamped);
  // Rebias 127 -> 7 and keep 3 mantissa bits, nearest even.
  const u32x16 normal = (c - (120u << 23) + 0x7ffffu + ((c >> 20) & 1u)) >> 20;
  // Below 2^-6 the codes are 2^-9 apart: adding 2^14 leaves round-to-even of value / 2^-9 in the low mantissa bits.
  const u32x16 subnormal = bits<u32x16>(clamped + 16384.0f) - 0x46800000u;
  u32x16 code = choose16(greater16(splat(0.015625f), clamped), subnormal, normal);
  code = choose16(nan16(value), u32x16{} + 0x7fu, code);
  return lower_bytes(code | sign);
}

// The smallest power of two that is not below a positive normal f32.
inline float power_of_two_above(float scale) {
  const uint32_t u = bits<uint32_t>(scale);
  return bits<float>((u + 0x7fffffu) & 0xff800000u);
}

// count <= 128; x has `count` elements.
inline float quantize(const float* x, int count, bool ue8m0, uint8_t* codes) {
  float padded[kActivationBlock] = {};
  std::memcpy(padded, x, size_t(count) * 4);
  f32x16 most = splat(1e-10f);
  i32x16 any_nan{};
  for (int i = 0; i < kActivationBlock; i += 16) {
    const f32x16 v = load<f32x16>(padded + i);
    most = max16(most, max16(v, -v));
    any_nan |= nan16(v);
  }
  const float exact = largest(most) / 448.0f, scale = any16(any_nan) ? __builtin_nanf("") : ue8m0 ? power_of_two_above(exact) : exact;
  uint8_t out[kActivationBlock];
  for (int i = 0; i < kActivationBlock; i += 16) store(out + i, encode16(load<f32x16>(padded + i) / scale));
  std::memcpy(codes, out, size_t(count));
  return scale;
}

inline void decode(const uint8_t* codes, uint16_t* bf16, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(bf16 + i, decode16(load<u8x16>(codes + i)));
  if (i < count) {
    u8x16 tail{};
    std::memcpy(&tail, codes + i, count - i);
    const u16x16 decoded = decode16(tail);
    std::memcpy(bf16 + i, &decoded, (count - i) * 2);
  }
}

}  // namespace
}  // namespace moe_mk
