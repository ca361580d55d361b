// Rows of bf16, f16 or f32 as f32: added in order, or rounded to e4m3 by groups of 128. Vectors are as wide as those of
// the instruction set the unit is built for. Included by one unit an instruction set; everything is in an unnamed
// namespace, see kernels.h.
#pragma once
#include "exchange.h"
#include "quantize.h"

namespace moe_mk {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Selects by a mask instead of a branch: compilers do not vectorise floating-point operations that a branch may skip.
// `first` is a truth value, or a vector of them.
inline __attribute__((always_inline)) uint32_t pick(bool first, uint32_t one, uint32_t other) {
  const uint32_t mask = 0u - uint32_t(first);
  return (one & mask) | (other & ~mask);
}
template <typename Mask>
inline __attribute__((always_inline)) Words pick(Mask first, Words one, Words other) {
  const Words mask = bits<Words>(first);
  return (one & mask) | (other & ~mask);
}

// f16 <-> f32 in integers, exact and nearest even, subnormals included; NaNs stay NaNs.
template <typename U, typename F>
inline __attribute__((always_inline)) F wide_f16(U half) {
  const U magnitude = half & 0x7fffu;
  const U scaled = bits<U>(bits<F>(magnitude << 13) * 0x1p112f);
  return bits<F>(pick(magnitude >= 0x7c00u, scaled | 0x7f800000u, scaled) | (half & 0x8000u) << 16);
}
inline __attribute__((always_inline)) Words narrow_f16(Floats value) {
  const Words u = bits<Words>(value), magnitude = u & 0x7fffffffu, none{};
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 half a unit of f32 at 0.5 is one of f16 at zero: adding 0.5 rounds there.
  const Words small = bits<Words>(bits<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  const Words large = pick(magnitude > 0x7f800000u, none + 0x7e00u, none + 0x7c00u);
  const Words finite = pick(magnitude < 0x38800000u, small, normal);
  return pick(magnitude >= 0x477ff000u, large, finite) | (u >> 16 & 0x8000u);
}
inline __attribute__((always_inline)) Words narrow_bf16(Floats value) {
  const Words u = bits<Words>(value), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return pick((u & 0x7fffffffu) > 0x7f800000u, (u >> 16) | 0x40u, rounded);
}

// Elements of a row as f32, one or a vector of them, and back. Rows are bytes of any alignment.
template <int Type>
struct Row;
template <>
struct Row<kRowsBf16> {
  static constexpr int kBytes = 2;
  static float one(const uint8_t* from) { return widen_one(load<uint16_t>(from)); }
  static Floats wide(const uint8_t* from) { return bits<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16); }
  static void put(uint8_t* to, Floats sum) { store(to, __builtin_convertvector(narrow_bf16(sum), Halves)); }
};
template <>
struct Row<kRowsF16> {
  static constexpr int kBytes = 2;
  static float one(const uint8_t* from) { return wide_f16<uint32_t, float>(load<uint16_t>(from)); }
  static Floats wide(const uint8_t* from) {
    return wide_f16<Words, Floats>(__builtin_convertvector(load<Halves>(from), Words));
  }
  static void put(uint8_t* to, Floats sum) { store(to, __builtin_convertvector(narrow_f16(sum), Halves)); }
};
template <>
struct Row<kRowsF32> {
  static constexpr int kBytes = 4;
  static float one(const uint8_t* from) { return load<float>(from); }
  static Floats wide(const uint8_t* from) { return load<Floats>(from); }
  static void put(uint8_t* to, Floats sum) { store(to, sum); }
};

// Trailing columns that do not fill a vector go through a copy, so that no byte beyond a row is accessed.
template <int Type>
inline void add_up_tail(const uint8_t* const* rows, int n, int64_t first, int64_t columns, uint8_t* out) {
  constexpr int kBytes = Row<Type>::kBytes;
  const size_t bytes = size_t(columns - first) * kBytes;
  uint8_t tail[kLanes * kBytes] = {};
  Floats sum{};
  for (int row = 0; row < n; ++row) {
    std::memcpy(tail, rows[row] + first * kBytes, bytes);
    sum += Row<Type>::wide(tail);
  }
  Row<Type>::put(tail, sum);
  std::memcpy(out + first * kBytes, tail, bytes);
}

// N: the number of rows if known at compile time, else 0.
template <int Type, int N>
inline void add_up_n(const uint8_t* const* rows, int n, int64_t columns, uint8_t* out) {
  constexpr int kBytes = Row<Type>::kBytes;
  const int count = N > 0 ? N : n;
  int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    Floats sum{};
    for (int row = 0; row < count; ++row) sum += Row<Type>::wide(rows[row] + column * kBytes);
    Row<Type>::put(out + column * kBytes, sum);
  }
  if (column < columns) add_up_tail<Type>(rows, n, column, columns, out);
}

template <int Type>
inline void add_up_as(const uint8_t* const* rows, int n, int64_t columns, uint8_t* out) {
  switch (n) {
    case 1: return add_up_n<Type, 1>(rows, n, columns, out);
    case 2: return add_up_n<Type, 2>(rows, n, columns, out);
    case 3: return add_up_n<Type, 3>(rows, n, columns, out);
    case 4: return add_up_n<Type, 4>(rows, n, columns, out);
    default: return add_up_n<Type, 0>(rows, n, columns, out);
  }
}

inline void add_up(const uint8_t* const* rows, int n, int64_t columns, int row_type, uint8_t* out) {
  switch (row_type) {
    case kRowsBf16: return add_up_as<kRowsBf16>(rows, n, columns, out);
    case kRowsF16: return add_up_as<kRowsF16>(rows, n, columns, out);
    default: return add_up_as<kRowsF32>(rows, n, columns, out);
  }
}

inline void put_scale(float scale, bool ue8m0, uint8_t* to) {
  if (ue8m0) {
    *to = uint8_t(bits<uint32_t>(scale) >> 23);
  } else {
    std::memcpy(to, &scale, 4);
  }
}

// e4m3 of a number other than NaN; see encode16 of quantize.h.
inline uint8_t code_of_number(float value) {
  const uint32_t u = bits<uint32_t>(value), magnitude = u & 0x7fffffffu;
  const uint32_t c = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;
  const uint32_t normal = (c - (120u << 23) + 0x7ffffu + ((c >> 20) & 1u)) >> 20;
  const uint32_t subnormal = bits<uint32_t>(bits<float>(c) + 16384.0f) - 0x46800000u;
  return uint8_t(pick(c < 0x3c800000u, subnormal, normal) | (u >> 24 & 0x80u));
}

// One group of `count` f32 numbers, padded with zeros to 128. Returns the scale.
inline __attribute__((always_inline)) float quantize_group(const float* x, int count, bool ue8m0, uint8_t* codes) {
  int32_t most = 0;
  for (int i = 0; i < kActivationBlock; ++i) {
    const int32_t magnitude = bits<int32_t>(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  if (most >= 0x7f800000) return quantize(x, count, ue8m0, codes);  // handles infinities and NaNs
  const float amax = bits<float>(most), exact = (amax > 1e-10f ? amax : 1e-10f) / 448.0f;
  const float scale = ue8m0 ? power_of_two_above(exact) : exact;
  for (int i = 0; i < count; ++i) codes[i] = code_of_number(x[i] / scale);
  return scale;
}

template <int Type>
inline __attribute__((always_inline)) float quantize_group_of(const uint8_t* x, int count, bool ue8m0, uint8_t* codes) {
  float wide[kActivationBlock] = {};
  for (int i = 0; i < count; ++i) wide[i] = Row<Type>::one(x + i * Row<Type>::kBytes);
  return quantize_group(wide, count, ue8m0, codes);
}

template <int Type>
inline void quantize_as(const uint8_t* x, int64_t columns, bool ue8m0, uint8_t* values, uint8_t* scales) {
  for (int64_t first = 0; first < columns; first += kActivationBlock) {
    const uint8_t* group = x + first * Row<Type>::kBytes;
    const int64_t left = columns - first;
    const float scale = left >= kActivationBlock
                            ? quantize_group_of<Type>(group, kActivationBlock, ue8m0, values + first)
                            : quantize_group_of<Type>(group, int(left), ue8m0, values + first);
    put_scale(scale, ue8m0, scales + first / kActivationBlock * (ue8m0 ? 1 : 4));
  }
}

inline void quantize_row(const uint8_t* x, int64_t columns, int row_type, bool ue8m0, uint8_t* values, uint8_t* scales) {
  switch (row_type) {
    case kRowsBf16: return quantize_as<kRowsBf16>(x, columns, ue8m0, values, scales);
    case kRowsF16: return quantize_as<kRowsF16>(x, columns, ue8m0, values, scales);
    default: return quantize_as<kRowsF32>(x, columns, ue8m0, values, scales);
  }
}

}  // namespace
}  // namespace moe_mk
