// Scales and minima of formats with parts: integers with groups, and the super-blocks of ggml.
//
// A weight is scale * code - minimum, where the minimum is scale * zero point, less a bias, or, of kQ4K and kQ5K, a number of its own. The
// f32 sum of a part of k is multiplied by the scale, and the minimum by the sum of x over the part:
//   total = fma(scale, sum of code * x, total);  total = fma(-minimum, sum of x, total)
// No weight is rounded, except by fold_parts. Against f64 the error of a total is at most
//   (parts + 40) * 2^-24 * sum |x| (scale * |code| + |minimum|):
// one rounding per addition, of which a chain in a part has at most 2 * 16 + 8.
// A super-block's scales are products of f16 (11 bits) and an integer of at most 8 bits, exact in f32.
//
// kQ4K, kQ5K  512 B per 256 k of a pair: d [32] f16, dmin [32] f16, then of each tile the 12 B of the outputs, [12][16]
// kQ6K        576 B: d [32] f16, then [16 groups][32] s8
#pragma once
#include "apply_scales.h"
#include "blocked.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace moe_mk {
namespace {

constexpr int kMostParts = 2 * kSuperSteps;  // of the steps that are expanded at a time

inline __attribute__((always_inline)) f32x16 widen_half(const uint8_t* from) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  struct Halves {
    __m256 of[2];
  } both;
  for (int i = 0; i < 2; ++i) both.of[i] = _mm256_cvtph_ps(load<__m128i>(from + 16 * i));
  return bits<f32x16>(both);
#else
  const u32x16 half = __builtin_convertvector(load<u16x16>(from), u32x16), magnitude = half & 0x7fffu;
  // Subnormals by an integer conversion: a caller may have set denormal f32 inputs to count as zero.
  const u32x16 subnormal = bits<u32x16>(__builtin_convertvector(bits<i32x16>(magnitude), f32x16) * 0x1p-24f);
  const u32x16 normal = (magnitude << 13) + (112u << 23), special = magnitude << 13 | 0x7f800000u;
  const u32x16 value = magnitude < 0x400u ? subnormal : magnitude < 0x7c00u ? normal : special;
  return bits<f32x16>(value | (half & 0x8000u) << 16);
#endif
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

// NOTE gcc 12: __builtin_convertvector from bytes and halfwords goes through narrower vectors.
inline __attribute__((always_inline)) f32x16 widen_codes(u8x16 codes) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bits<__m128i>(codes))));
#else
  return __builtin_convertvector(__builtin_convertvector(codes, i32x16), f32x16);
#endif
}
inline __attribute__((always_inline)) f32x16 widen_signed(i8x16 codes) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits<__m128i>(codes))));
#else
  return __builtin_convertvector(__builtin_convertvector(codes, i32x16), f32x16);
#endif
}
inline __attribute__((always_inline)) f32x16 widen_bf16(const uint8_t* from) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
#else
  return bits<f32x16>(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
#endif
}

inline __attribute__((always_inline)) f32x16 scale16(int scale_type, const uint8_t* from) {
  if (scale_type == kScaleF32) return load<f32x16>(from);
  return scale_type == kScaleF16 ? widen_half(from) : widen_bf16(from);
}

// The 6-bit scale (First 0) or minimum (First 4) of group j of 8, from the [12][16] bytes of a tile: the first four have
// six bits in a byte each; of the others four bits are in bytes 8 to 11 and two at the top of the bytes before.
template <int First>
inline __attribute__((always_inline)) f32x16 six_bits(const uint8_t* tile, int j) {
  if (j < 4) return widen_codes(load<u8x16>(tile + (First + j) * 16) & 63);
  const u8x16 low = load<u8x16>(tile + (4 + j) * 16), top = load<u8x16>(tile + (First + j - 4) * 16);
  return widen_codes((First == 0 ? low & 15 : low >> 4) | ((top >> 2) & 48));
}

// int_scales: if not null, the 6-bit scales are written there, and `scales` receives only d of the super-block, [32].
#if defined(__AVX512BW__)
inline void super_scales_with_minima(const uint8_t* from, int first, int parts, float* scales, float* minima, int32_t* int_scales = nullptr) {
  for (int tile = 0; tile < 2; ++tile) {
    const uint8_t* codes = from + 128 + tile * 12 * kTileColumns;
    const __m512i z0 = _mm512_loadu_si512(codes), z1 = _mm512_loadu_si512(codes + 64), z2 = _mm512_loadu_si512(codes + 128);
    const __m512i six = _mm512_set1_epi8(63), four = _mm512_set1_epi8(15);
    alignas(64) uint8_t unpacked[2][8][kTileColumns];
    _mm512_store_si512(unpacked[0][0], _mm512_and_si512(z0, six));
    _mm512_store_si512(unpacked[1][0], _mm512_and_si512(z1, six));
    // four ? low bits : high bits; of which two are wanted
    const __m512i high0 = _mm512_ternarylogic_epi32(four, z2, _mm512_srli_epi16(z0, 2), 0xca);
    const __m512i high1 = _mm512_ternarylogic_epi32(four, _mm512_srli_epi16(z2, 4), _mm512_srli_epi16(z1, 2), 0xca);
    _mm512_store_si512(unpacked[0][4], _mm512_and_si512(high0, six));
    _mm512_store_si512(unpacked[1][4], _mm512_and_si512(high1, six));
    const __m512 d = bits<__m512>(widen_half(from + tile * 32)), dmin = bits<__m512>(widen_half(from + 64 + tile * 32));
    for (int j = 0; j < parts; ++j) {
      const int at = j * kPairColumns + tile * kTileColumns;
      const auto wide = [&](int which) { return _mm512_cvtepu8_epi32(load<__m128i>(unpacked[which][first + j])); };
      if (int_scales != nullptr) _mm512_store_si512(int_scales + at, wide(0));
      else _mm512_store_ps(scales + at, _mm512_mul_ps(d, _mm512_cvtepi32_ps(wide(0))));
      _mm512_store_ps(minima + at, _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(wide(1))));
    }
    if (int_scales != nullptr) _mm512_store_ps(scales + tile * kTileColumns, d);
  }
}
#elif defined(__AVX2__)
// 16 codes times 16 halves.
inline __attribute__((always_inline)) void store_scaled(__m128i codes, const __m256 (&d)[2], float* to) {
  _mm256_storeu_ps(to, _mm256_mul_ps(d[0], _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes))));
  _mm256_storeu_ps(to + 8, _mm256_mul_ps(d[1], _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))));
}
inline void super_scales_with_minima(const uint8_t* from, int first, int parts, float* scales, float* minima, int32_t* int_scales = nullptr) {
  const __m128i six = _mm_set1_epi8(63), low_bits = _mm_set1_epi8(15), high_bits = _mm_set1_epi8(48);
  for (int tile = 0; tile < 2; ++tile, scales += kTileColumns, minima += kTileColumns) {
    __m256 d[2], dmin[2];
    for (int half = 0; half < 2; ++half) {
      d[half] = _mm256_cvtph_ps(load<__m128i>(from + tile * 32 + half * 16));
      dmin[half] = _mm256_cvtph_ps(load<__m128i>(from + 64 + tile * 32 + half * 16));
    }
    const uint8_t* codes = from + 128 + tile * 12 * kTileColumns;
    const auto bytes = [&](int i) { return load<__m128i>(codes + i * 16); };
    for (int part = 0; part < parts; ++part) {
      const int j = first + part;
      __m128i scale, minimum;
      if (j < 4) {
        scale = _mm_and_si128(bytes(j), six);
        minimum = _mm_and_si128(bytes(j + 4), six);
      } else {
        const __m128i low = bytes(j + 4);
        const auto high = [&](int i) { return _mm_and_si128(_mm_srli_epi16(bytes(i), 2), high_bits); };
        scale = _mm_or_si128(_mm_and_si128(low, low_bits), high(j - 4));
        minimum = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(low, 4), low_bits), high(j));
      }
      if (int_scales == nullptr) store_scaled(scale, d, scales + part * kPairColumns);
      for (int half = 0; half < 2 && int_scales != nullptr; ++half)
        store(int_scales + part * kPairColumns + tile * kTileColumns + 8 * half, _mm256_cvtepu8_epi32(half == 0 ? scale : _mm_srli_si128(scale, 8)));
      store_scaled(minimum, dmin, minima + part * kPairColumns);
    }
    for (int half = 0; half < 2 && int_scales != nullptr; ++half) _mm256_storeu_ps(scales + 8 * half, d[half]);
  }
}
#else
inline void super_scales_with_minima(const uint8_t* from, int first, int parts, float* scales, float* minima) {
  for (int tile = 0; tile < 2; ++tile) {
    const f32x16 d = widen_half(from + tile * 32), dmin = widen_half(from + 64 + tile * 32);
    const uint8_t* codes = from + 128 + tile * 12 * kTileColumns;
    for (int j = 0; j < parts; ++j) {
      store(scales + j * kPairColumns + tile * kTileColumns, d * six_bits<0>(codes, first + j));
      store(minima + j * kPairColumns + tile * kTileColumns, dmin * six_bits<4>(codes, first + j));
    }
  }
}

#endif

inline void super_scales(const uint8_t* from, int first, int parts, float* scales) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int column = 0; column < kPairColumns; column += 8) {
    const __m256 d = _mm256_cvtph_ps(load<__m128i>(from + 2 * column));
    for (int j = 0; j < parts; ++j) {
      const __m256i codes = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(from + 64 + (first + j) * kPairColumns + column)));
      _mm256_storeu_ps(scales + j * kPairColumns + column, _mm256_mul_ps(d, _mm256_cvtepi32_ps(codes)));
    }
  }
  return;
#endif
  for (int tile = 0; tile < 2; ++tile) {
    const f32x16 d = widen_half(from + tile * 32);
    for (int j = 0; j < parts; ++j) {
      const i8x16 codes = load<i8x16>(from + 64 + (first + j) * kPairColumns + tile * kTileColumns);
      store(scales + j * kPairColumns + tile * kTileColumns, d * widen_signed(codes));
    }
  }
}

// The scales of a group of a pair, and minima of its zero points less `base`, or of the biases that follow the scales, for codes
// that are less by `base`.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline __attribute__((always_inline)) void group_scales32(int scale_type, const uint8_t* from, const uint8_t* zeros, bool biased, float base,
                                                          float* scales, float* minima) {
  const auto wide = [&](int column) __attribute__((always_inline)) {
    if (scale_type == kScaleF32) return load<__m256>(from + 4 * column);
    if (scale_type == kScaleF16) return _mm256_cvtph_ps(load<__m128i>(from + 2 * column));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from + 2 * column)), 16));
  };
  for (int column = 0; column < kPairColumns; column += 8) {
    const __m256 scale = wide(column);
    _mm256_storeu_ps(scales + column, scale);
    if (biased) _mm256_storeu_ps(minima + column, _mm256_fnmsub_ps(scale, _mm256_set1_ps(base), wide(kPairColumns + column)));
    if (zeros == nullptr) continue;
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(zeros + column)));
    _mm256_storeu_ps(minima + column, _mm256_mul_ps(scale, _mm256_sub_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(base))));
  }
}
#else
inline __attribute__((always_inline)) void group_scales32(int scale_type, const uint8_t* from, const uint8_t* zeros, bool biased, float base,
                                                          float* scales, float* minima) {
  const size_t bytes = bytes_of_scale(scale_type);
  for (int column = 0; column < kPairColumns; column += kTileColumns) {
    const f32x16 scale = scale16(scale_type, from + column * bytes);
    store(scales + column, scale);
    if (biased) store(minima + column, -(scale * base) - scale16(scale_type, from + (kPairColumns + column) * bytes));
    if (zeros != nullptr) store(minima + column, scale * (widen_codes(load<u8x16>(zeros + column)) - base));
  }
}
#endif

// Writes scales, and minima where the format has them, of the parts of `steps` steps: [part][32]. The steps begin at a
// multiple of a part and of four, and are in one super-block. Returns the number of parts.
inline __attribute__((noinline)) int part_scales(const Columns& w, int pair, int step, int steps, float* scales, float* minima) {
  const uint8_t* from = w.part_scales + size_t(pair) * w.pair_scales;
  const int parts = (steps * (kStep / 2) + w.part_pairs - 1) / w.part_pairs;
  if (has_super_blocks(w.format)) {
    from += size_t(step / kSuperSteps) * super_bytes(w.format);
    const int first = step % kSuperSteps * (kStep / 2) / w.part_pairs;
    if (w.format == kQ6K) super_scales(from, first, parts, scales);
    else super_scales_with_minima(from, first, parts, scales, minima);
    return parts;
  }
  const bool biased = w.minima && w.zeros == nullptr;
  const size_t bytes = bytes_of_scale(w.scale_type) * kPairColumns * (biased ? 2 : 1);
  const uint8_t* zeros = w.zeros == nullptr ? nullptr : w.zeros + size_t(pair) * w.pair_zeros;
  const float base = w.format == kInt8Groups ? 128.0f : 0.0f;  // subtracted from the codes already
  const int part_steps = w.part_pairs / (kStep / 2);
  int group = w.group_steps == 1 ? step : step / w.group_steps, end = (group + 1) * w.group_steps;
  for (int part = 0, at = step; part < parts; ++part, at += part_steps) {
    if (at >= end) {
      ++group;
      end += w.group_steps;
    }
    group_scales32(w.scale_type, from + size_t(group) * bytes, zeros == nullptr ? nullptr : zeros + size_t(group) * kPairColumns, biased, base,
                   scales + part * kPairColumns, minima + part * kPairColumns);
  }
  return parts;
}

// Prefetches the scales and zero points of kSuperSteps steps after `ahead` steps.
struct ScalesAhead {
  size_t step_bytes, zero_bytes, ahead;  // of kSuperSteps steps; in steps, over kSuperSteps

  explicit ScalesAhead(const Columns& w)
      : step_bytes(w.pair_scales * kSuperSteps / w.num_steps),
        zero_bytes(w.zeros == nullptr ? 0 : w.pair_zeros * kSuperSteps / w.num_steps),
        ahead(w.prefetch < int(w.step_bytes * kSuperSteps) ? 1 : w.prefetch / (w.step_bytes * kSuperSteps)) {}

  inline __attribute__((always_inline)) void operator()(const Columns& w, int pair, int step) const {
    const size_t at = size_t(step) / kSuperSteps + ahead;
    for (size_t i = 0; i < step_bytes; i += 64)
      __builtin_prefetch(w.part_scales + pair * w.pair_scales + at * step_bytes + i);
    for (size_t i = 0; i < zero_bytes; i += 64)
      __builtin_prefetch(w.zeros + pair * w.pair_zeros + at * zero_bytes + i);
  }
};

// The sum of x over some steps, `stride` bytes apart.
inline float sum_of_steps(const uint8_t* x, size_t stride, int steps) {
  f32x16 sums{};
  for (int s = 0; s < steps; ++s) {
    const u32x16 both = load<u32x16>(x + s * stride);
    sums += bits<f32x16>(both << 16) + bits<f32x16>(both & 0xffff0000u);
  }
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bits<__m512>(sums));
#endif
  float tree[16];
  std::memcpy(tree, &sums, sizeof tree);
  for (int half = 8; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) tree[lane] += tree[lane + half];
  return tree[0];
}

// Sums of x over each part of `steps` steps.
inline void part_sums(const Columns& w, const uint8_t* x, size_t stride, int steps, float* sums) {
  const int each = w.part_pairs / (kStep / 2);  // formats with parts of half a step have no minima
  for (int s = 0; s < steps; s += each) *sums++ = sum_of_steps(x + s * stride, stride, steps - s < each ? steps - s : each);
}

// The parts of one block of k, for a register kernel.
struct Parts {
  const float* scales;  // [part][32]
  const float* minima;  // [part][32]; null: none
  const float* sums;    // of the first row of a group, [row][sums_stride]; null without minima
  size_t sums_stride;
  int pairs;            // k pairs of a part
};

// multiply_blocked for formats with parts: decodes integers, and scales the sum of every part. Rows are split evenly into
// groups of at most Ops::kPartRows, whose totals stay in registers over a block.
template <typename Ops>
void multiply_parts(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int groups = (rows.num_rows + Ops::kPartRows - 1) / Ops::kPartRows, together = (rows.num_rows + groups - 1) / groups;
  const int chunk = steps_that_fit(w.gather_bytes, rows.num_rows, together, w.steps_per_block);
  alignas(64) float scales[kMostParts * kPairColumns], minima[kMostParts * kPairColumns];
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int chunk_steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
    gather_rows(rows, together, step0, chunk_steps, scratch.gathered, false);
    for (int r = 0; w.minima && r < rows.num_rows; ++r) {
      const size_t first = size_t(r / together) * chunk_steps * together + r % together;
      part_sums(w, scratch.gathered + first * kRowBytes, together * kRowBytes, chunk_steps, scratch.sums + size_t(r) * chunk_steps);
    }
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int s = 0; s < chunk_steps; s += w.steps_per_block) {
        const int steps = chunk_steps - s < w.steps_per_block ? chunk_steps - s : w.steps_per_block;
        const int x_block = (step0 + s) * kStep / kActivationBlock;
        part_scales(w, pair, step0 + s, steps, scales, minima);
        Ops::codes(w, pair, step0 + s, steps, scratch.panel);
        const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step0 + s) * w.step_bytes;
        for (int first = 0; first < rows.num_rows; first += together) {
          const int n = rows.num_rows - first < together ? rows.num_rows - first : together;
          float row_scale[Ops::kPartRows];
          for (int r = 0; r < n && rows.scales != nullptr; ++r) row_scale[r] = rows.scales[first + r][x_block];
          const RowGroup group = {scratch.gathered + (size_t(first) * chunk_steps + size_t(s) * together) * kRowBytes,
                                  kRowBytes, size_t(together) * kRowBytes, n, rows.scales == nullptr ? nullptr : row_scale};
          const float* sums = scratch.sums + size_t(first) * chunk_steps + s * (kStep / 2) / w.part_pairs;
          const Parts parts = {scales, w.minima ? minima : nullptr, sums, size_t(chunk_steps), w.part_pairs};
          const Ahead ahead = {packed + 2 * steps * w.step_bytes, first != 0 ? 0 : 4};
          Ops::parts(group, scratch.panel, steps, parts, ahead, totals + (size_t(pair) * rows.num_rows + first) * kPairColumns);
        }
      }
  }
}

// Multiplies scales into a decoded panel of at most kBlockSteps steps and subtracts minima. Rounds each weight to bf16.
inline void fold_parts(const Columns& w, int pair, int step, int steps, uint8_t* row) {
  alignas(64) float scales[kMostParts * kPairColumns], minima[kMostParts * kPairColumns];
  const int parts = part_scales(w, pair, step, steps, scales, minima);
  for (int part = 0, left = steps * (kStep / 2); part < parts; ++part, left -= w.part_pairs)
    for (int r = 0; r < (left < w.part_pairs ? left : w.part_pairs); ++r, row += kPanelRow)
      for (int tile = 0; tile < 2; ++tile) {
        const size_t at = size_t(part) * kPairColumns + tile * kTileColumns;
        const f32x16 scale = load<f32x16>(scales + at), minimum = w.minima ? load<f32x16>(minima + at) : f32x16{};
        const u32x16 both = load<u32x16>(row + tile * 64);
        const u32x16 even = rounded_to_bf16(bits<u32x16>(bits<f32x16>(both << 16) * scale - minimum));
        const u32x16 odd = rounded_to_bf16(bits<u32x16>(bits<f32x16>(both & 0xffff0000u) * scale - minimum));
        store(row + tile * 64, (even >> 16) | (odd & 0xffff0000u));
      }
}

}  // namespace
}  // namespace moe_mk
