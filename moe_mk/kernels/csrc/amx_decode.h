// Decoding policies of the AMX pipeline: packed lines of a pair of columns -> bf16 rows of a panel, group scales included.
//
// A line pair is 64 packed bytes of each of the two tiles, side by side. A policy has
//   kLines   line pairs of one step of k        kLineBytes  distance from one line pair to the next
//   kInPlace the packed bytes are the panel     kRows       k pairs (rows of the panel) that a line pair holds
//   kParts   integers, whose scales multiply the sums of parts (part_scales.h)
//   decode<Lines>(source, panel, ahead)         some line pairs; each prefetches two further on
// Weights are exact: scales of groups are powers of two, or e4m3 times e2m1, which has six significant bits (apply_scales.h);
// f32 scales of blocks, rows and outputs multiply sums (amx_pipeline.h, projections.h).
#pragma once
#include "lines.h"
#include "portable.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__) && defined(__GFNI__)
#define MOE_MK_AMX_AVX512 1
#include "avx512_panel.h"
#endif

namespace moe_mk {
namespace {

constexpr size_t kLinePair = 128;

// Where the next line pairs are.
struct Source {
  const uint8_t* codes;
  const uint8_t* scales;  // group scales of their step: [group][32]; null: none
  int line;               // of their step
  const Columns* w;
  int pair, step;
};

// Distances in bytes of the prefetches of one stream of weights, into the L1 and into the L2.
// NOTE into the L1 alone, a distance that covers the latency of memory displaces rows and sums: 1.05 to 1.17 of the time.
struct Distances {
  int near, far;
};

inline __attribute__((always_inline)) void prefetch_lines(const uint8_t* line_pair, Distances ahead) {
  __builtin_prefetch(line_pair + ahead.near);
  __builtin_prefetch(line_pair + ahead.near + 64);
  __builtin_prefetch(line_pair + ahead.far, 0, 2);
  __builtin_prefetch(line_pair + ahead.far + 64, 0, 2);
}

// bf16: tiles are loaded from the packed bytes; the line pairs themselves are prefetched.
struct Bf16Lines {
  static constexpr int kLines = 16, kRows = 1;
  static constexpr bool kInPlace = true, kParts = false;

  template <int Lines>
  inline __attribute__((always_inline)) void decode(const Source& source, uint8_t*, Distances ahead) const {
#pragma GCC unroll 16
    for (int i = 0; i < Lines; ++i) prefetch_lines(source.codes + i * kLinePair, {0, ahead.far});
  }
};

// e4m3 -> bf16 by VGF2P8AFFINEQB, which unlike VPERMI2B does not depend on a single port. Except for exponent 0 (zeros and
// subnormals) both bytes are affine over GF(2) in the code s eeee mmm:
//   low byte   mmm. ....   = code << 4
//   high byte  s... ..ee   = sign | (0x3c + (code >> 4 & 7)), the bias 7 -> 127; the carry only means bits 2..5 = not bit 6
constexpr uint64_t kLowByte = 0x0000000001020408, kHighByte = 0x1020404040404080;
constexpr uint8_t kHighConstant = 0x3c, kExponent = 0x78;

__attribute__((noinline)) void decode_subnormals(const uint8_t* codes, uint8_t* panel) {
  for (int tile = 0; tile < 2; ++tile) {
#if defined(MOE_MK_AMX_AVX512)
    expand_lines(Fp8(), codes + tile * 64, 1, Unscaled(), panel + tile * 64);
#else
    PortableFp8::rows(codes + tile * 64, panel + tile * 64);
#endif
  }
}

// FP8 without group scales. Line pairs with an exponent of 0 (about 1 in 100 of Gaussian weights) are decoded again by tables.
struct Fp8Lines {
  static constexpr int kLines = 8, kRows = 2;
  static constexpr bool kInPlace = false, kParts = false;

  template <int Lines>
  inline __attribute__((always_inline)) void decode(const Source& source, uint8_t* panel, Distances ahead) const {
    const uint8_t* codes = source.codes;
#pragma GCC unroll 8
    for (int i = 0; i < Lines; ++i, codes += kLinePair, panel += kRows * kPanelRow) {
      const Line first = load_line(codes), second = load_line(codes + 64);
      prefetch_lines(codes, ahead);
      const Line low0 = gf2_affine<kLowByte, 0>(first), high0 = gf2_affine<kHighByte, kHighConstant>(first);
      const Line low1 = gf2_affine<kLowByte, 0>(second), high1 = gf2_affine<kHighByte, kHighConstant>(second);
      store_line(panel, interleave_low(low0, high0));
      store_line(panel + 64, interleave_low(low1, high1));
      store_line(panel + kPanelRow, interleave_high(low0, high0));
      store_line(panel + kPanelRow + 64, interleave_high(low1, high1));
      if (__builtin_expect(any_without(first, second, kExponent), 0)) decode_subnormals(codes, panel);
    }
  }
};

#if defined(MOE_MK_AMX_AVX512)

// e4m3 as above, for one tile. Zeros and subnormals, m * 2^-9, by tables of their low three bits, in registers: a call here would
// put the rows of every line in memory.
struct Fp8Affine {
  static constexpr int kRows = 2;

  inline __attribute__((always_inline)) void rows(const uint8_t* from, __m512i* to) const {
    const Line codes = load_line(from);
    Line low = gf2_affine<kLowByte, 0>(codes), high = gf2_affine<kHighByte, kHighConstant>(codes);
    const __mmask64 small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(char(kExponent)));
    if (__builtin_expect(small != 0, 0)) {
      const __m128i low_bytes = _mm_setr_epi8(0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
      const __m128i high_bytes = _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
      const __m512i index = _mm512_and_si512(codes, _mm512_set1_epi8(7)), sign = _mm512_and_si512(codes, _mm512_set1_epi8(char(0x80)));
      low = _mm512_mask_shuffle_epi8(low, small, _mm512_broadcast_i32x4(low_bytes), index);
      const __m512i of_small = _mm512_or_si512(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(high_bytes), index), sign);
      high = _mm512_mask_mov_epi8(high, small, of_small);
    }
    to[0] = interleave_low(low, high);
    to[1] = interleave_high(low, high);
  }
};

// The policies of avx512.h, with the group scales of one format.
template <typename Decode, typename Scales = BlockScales>
struct TableLines {
  static constexpr int kRows = Decode::kRows, kLines = kStep / 2 / kRows;
  static constexpr bool kInPlace = false, kParts = false;
  Decode tables;

  template <int Lines>
  inline __attribute__((always_inline)) void decode(const Source& source, uint8_t* panel, Distances ahead) const {
    for (int i = 0; i < Lines; ++i) prefetch_lines(source.codes + i * kLinePair, ahead);
    if constexpr (Scales::kGrouped) {
      constexpr int kOfGroup = kLines / Scales::kPerStep, kRun = Lines < kOfGroup ? Lines : kOfGroup;
      for (int done = 0; done < Lines; done += kRun)
        for (int tile = 0; tile < 2; ++tile) {
          const uint8_t *codes = source.codes + done * kLinePair + tile * 64,
                        *scales = source.scales + (source.line + done) / kOfGroup * kPairColumns + tile * kTileColumns;
          uint8_t* to = panel + done * kRows * kPanelRow + tile * 64;
          const __m128i exponents = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
          if (Scales::kPowers && __builtin_expect(ByExponent::serves(exponents), 1))
            expand_lines(tables, codes, kRun, ByExponent(exponents), to);
          else
            expand_lines(tables, codes, kRun, ByProduct{Scales::of(scales)}, to);
        }
    } else {
      for (int tile = 0; tile < 2; ++tile) expand_lines(tables, source.codes + tile * 64, Lines, Unscaled(), panel + tile * 64);
    }
  }
};

using Int8Lines = TableLines<Int8>;
using MxFp8Lines = TableLines<Fp8Affine, PowersOfTwo>;
using MxFp4Lines = TableLines<Fp4, PowersOfTwo>;
using NvFp4Lines = TableLines<Fp4, SmallFloats>;

// The integers of a format with parts, a step at a time.
template <typename Decode>
struct CodeLines {
  static constexpr int kLines = 1, kRows = kStep / 2;
  static constexpr bool kInPlace = false, kParts = true;

  template <int Lines>
  inline __attribute__((always_inline)) void decode(const Source& source, uint8_t* panel, Distances ahead) const {
    const Decode decode(source.w->minima);
    for (int line = 0; line < Decode::kLines; ++line) prefetch_lines(source.codes + line * kLinePair, ahead);
    for (int tile = 0; tile < 2; ++tile) expand_line(decode, source.codes + tile * 64, panel + tile * 64);
  }
};

// The same times the scales of their parts, less their minima, rounded to bf16: a relative error of at most 2^-9 (2^-8 where the
// minimum cancels half of a weight). Decodes the steps of a unit of kBlockSteps in order.
template <typename Decode>
struct FoldedLines {
  static constexpr int kLines = 1, kRows = kStep / 2;
  static constexpr bool kInPlace = false, kParts = false;
  alignas(64) mutable float scales[kBlockSteps * 2 * kPairColumns], minima[kBlockSteps * 2 * kPairColumns];

  // kMinima: whether there are any.
  template <bool kMinima>
  struct Rounded {
    __m512 scale, minimum;

    inline __attribute__((always_inline)) __m512i of(__m512i value) const {
      const __m512 wide = _mm512_castsi512_ps(value);
      const __m512 product = kMinima ? _mm512_fmsub_ps(wide, scale, minimum) : _mm512_mul_ps(wide, scale);
      return _mm512_add_epi32(_mm512_castps_si512(product), _mm512_set1_epi32(0x8000));  // to nearest, ties away from 0
    }
    inline __attribute__((always_inline)) __m512i operator()(__m512i row) const {
      const __m512i top = _mm512_set1_epi32(int(0xffff0000));
      const __m512i even = of(_mm512_slli_epi32(row, 16)), odd = of(_mm512_and_si512(row, top));
      return _mm512_ternarylogic_epi32(top, odd, _mm512_srli_epi32(even, 16), 0xca);  // top ? odd : even
    }
  };

  template <bool kMinima, int Line = 0>
  inline __attribute__((always_inline)) void expand(const Decode& decode, const uint8_t* packed, const float* scale,
                                                    const float* minimum, uint8_t* panel) const {
    constexpr int kPart = Decode::kPerStep == 2 ? Decode::first(Line) / 8 : 0;
    const Rounded<kMinima> rounded = {_mm512_load_ps(scale + kPart * kPairColumns), _mm512_load_ps(minimum + kPart * kPairColumns)};
    __m512i rows[4];
    decode.template rows<Line>(packed, rows);
    uint8_t* to = panel + Decode::first(Line) * kPanelRow;
    for (int r = 0; r < Decode::count(Line); ++r) _mm512_store_si512(to + r * kPanelRow, rounded(rows[r]));
    if constexpr (Line + 1 < Decode::kLines) expand<kMinima, Line + 1>(decode, packed, scale, minimum, panel);
  }

  template <int Lines>
  inline __attribute__((always_inline)) void decode(const Source& source, uint8_t* panel, Distances ahead) const {
    const Columns& w = *source.w;
    const Decode decode(w.minima);
    const int first = source.step % kBlockSteps, rest = w.num_steps - source.step, part_steps = w.part_pairs / (kStep / 2);
    if (first == 0) part_scales(w, source.pair, source.step, rest < kBlockSteps ? rest : kBlockSteps, scales, minima);
    const size_t part = Decode::kPerStep == 2 ? size_t(first) * 2 : size_t(first / part_steps);
    for (int line = 0; line < Decode::kLines; ++line) prefetch_lines(source.codes + line * kLinePair, ahead);
    for (int tile = 0; tile < 2; ++tile) {
      const size_t column = part * kPairColumns + tile * kTileColumns;
      const float *scale = scales + column, *minimum = minima + column;
      if (w.minima) expand<true>(decode, source.codes + tile * 64, scale, minimum, panel + tile * 64);
      else expand<false>(decode, source.codes + tile * 64, scale, scale, panel + tile * 64);
    }
  }
};

using Folded4Lines = FoldedLines<Codes4>;
using Folded5Lines = FoldedLines<Codes5>;
using Folded6Lines = FoldedLines<Codes6>;
using Folded8Lines = FoldedLines<Codes8>;
using Codes4Lines = CodeLines<Codes4>;
using Codes5Lines = CodeLines<Codes5>;
using Codes6Lines = CodeLines<Codes6>;
using Codes8Lines = CodeLines<Codes8>;

#else

// The policies of portable.h, with the group scales of one format.
template <typename Decode, int Format>
struct PortableLines {
  static constexpr int kRows = Decode::kRows, kLines = kStep / 2 / kRows;
  static constexpr bool kInPlace = false, kParts = false;

  template <int Lines>
  void decode(const Source& source, uint8_t* panel, Distances) const {
    for (int i = 0; i < Lines; ++i)
      for (int tile = 0; tile < 2; ++tile) {
        uint8_t* to = panel + i * kRows * kPanelRow + tile * 64;
        Decode::rows(source.codes + i * kLinePair + tile * 64, to);
        constexpr int kGroups = groups_of_step(Format);
        if (kGroups == 0) continue;
        const int group = (source.line + i) * kGroups / kLines;
        apply_scale<true>(to, kRows, group_scales16(Format, source.scales + group * kPairColumns + tile * kTileColumns));
      }
  }
};

using Int8Lines = PortableLines<PortableInt8, kInt8>;
using MxFp8Lines = PortableLines<PortableFp8, kMxFp8>;
using MxFp4Lines = PortableLines<PortableFp4, kMxFp4>;
using NvFp4Lines = PortableLines<PortableFp4, kNvFp4>;

// The integers of a format with parts, a step at a time.
struct CodeLines {
  static constexpr int kLines = 1, kRows = kStep / 2;
  static constexpr bool kInPlace = false, kParts = true;

  template <int Lines>
  void decode(const Source& source, uint8_t* panel, Distances) const {
    PortableOps::codes(*source.w, source.pair, source.step, 1, panel);
  }
};

// The same times the scales of their parts, less their minima, rounded to bf16.
struct FoldedLines {
  static constexpr int kLines = 1, kRows = kStep / 2;
  static constexpr bool kInPlace = false, kParts = false;

  template <int Lines>
  void decode(const Source& source, uint8_t* panel, Distances) const {
    PortableOps::codes(*source.w, source.pair, source.step, 1, panel);
    fold_parts(*source.w, source.pair, source.step, 1, panel);
  }
};

using Folded4Lines = FoldedLines;
using Folded5Lines = FoldedLines;
using Folded6Lines = FoldedLines;
using Folded8Lines = FoldedLines;
using Codes4Lines = CodeLines;
using Codes5Lines = CodeLines;
using Codes6Lines = CodeLines;
using Codes8Lines = CodeLines;

#endif

}  // namespace
}  // namespace moe_mk
