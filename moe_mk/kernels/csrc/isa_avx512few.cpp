// A few rows times weights straight from memory, for AVX512-BF16 + VBMI: codes are decoded into registers, multiplied by
// VDPBF16PS, and the scale of a block or group multiplies its f32 sum: exact scales. avx512.h has the decoding policies.
// Reads packed weights once, two pairs of columns at a time, half of the task apart: two contiguous memory streams, so
// that the lines prefetched at the end of one pair are used by the next. Writes totals
// [pair][row][32].
#include <type_traits>

#include "avx512.h"

#include "blocked.h"
#include "apply_scales.h"

namespace moe_mk {
namespace {

// Sums of one block or group of k, and their totals: N rows times both tiles of P pairs in registers.
template <int N, int P>
struct Sums {
  static constexpr int kTiles = 2 * P;
  __m512 open[N][kTiles], all[N][kTiles];

  inline __attribute__((always_inline)) void clear(__m512 (&which)[N][kTiles]) {
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) which[m][t] = _mm512_setzero_ps();
  }
  // all += open * scale (* the row's scale)
  inline __attribute__((always_inline)) void close(int t, __m512 scale, const Rows& rows, int x_block) {
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m) {
      const __m512 factor =
          rows.scales == nullptr ? scale : _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[m][x_block]));
      all[m][t] = _mm512_fmadd_ps(open[m][t], factor, all[m][t]);
      open[m][t] = _mm512_setzero_ps();
    }
  }
};

// One step of k from `first` to `last` of its lines: decode each tile's rows, multiply every row of x with them.
template <int N, int P, typename Decode>
inline __attribute__((always_inline)) void dot_lines(const Decode& decode, size_t apart, const uint8_t* at, int first, int last,
                                                      const Rows& rows, int step, ptrdiff_t ahead, Sums<N, P>& sums) {
  constexpr int kRows = Decode::kRows;
  constexpr bool kBroadcast = std::is_same_v<Decode, Bf16> && N > 2;
#pragma GCC unroll 8
  for (int line = first; line < last; ++line) {
    __m512i weights[2 * P][kRows];
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t) {
      const uint8_t* from = at + (t >> 1) * apart + line * Decode::kLines * kPanelRow + (t & 1) * 64;
      for (int l = 0; l < Decode::kLines; ++l)
        _mm_prefetch(reinterpret_cast<const char*>(from + ahead + l * kPanelRow), _MM_HINT_T0);
      decode.rows(from, weights[t]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      const uint16_t* x = rows.bf16(m) + step * kStep + 2 * kRows * line;
#pragma GCC unroll 4
      for (int h = 0; h < kRows; ++h) {
        __m512i two;  // NOTE Zen 4, from the L2: 0.75 of the time in bf16, 1.05 where weights are decoded
        if constexpr (kBroadcast) asm volatile("vpbroadcastd %1, %0" : "=v"(two) : "m"(*reinterpret_cast<const uint32_t*>(x + 2 * h)));
#pragma GCC unroll 4
        for (int t = 0; t < 2 * P; ++t) {
          if constexpr (kBroadcast) sums.open[m][t] = _mm512_dpbf16_ps(sums.open[m][t], reinterpret_cast<__m512bh>(weights[t][h]), reinterpret_cast<__m512bh>(two));
          else add_two(sums.open[m][t], weights[t][h], x + 2 * h);
        }
      }
    }
  }
}

// N rows times P pairs, `apart` from each other, straight from the packed bytes; N * P * 2 open sums live in registers.
template <int N, int P, typename Decode, typename Scales>
void few(const Columns& w, int pair, int apart, const Rows& rows, float* totals) {
  constexpr int kLines = kStep / 2 / Decode::kRows, kPart = kLines / Scales::kPerStep;
  const Decode decode;
  const StreamAhead ahead(w, pair, P == 2 ? apart : w.num_pairs);
  Sums<N, P> sums;
  sums.clear(sums.open);
  sums.clear(sums.all);
  const uint8_t* data = w.data + pair * w.pair_bytes;
  for (int block = 0; block < w.num_blocks; ++block) {
    const int step0 = block * w.steps_per_block, x_block = step0 * kStep / kActivationBlock;
    const int steps = w.num_steps - step0 < w.steps_per_block ? w.num_steps - step0 : w.steps_per_block;
    for (int s = step0; s < step0 + steps; ++s)
      for (int part = 0; part < Scales::kPerStep; ++part) {
        dot_lines<N, P>(decode, apart * w.pair_bytes, data + s * w.step_bytes, part * kPart, (part + 1) * kPart, rows, s,
                        ahead.at(s), sums);
#pragma GCC unroll 4
        for (int t = 0; t < (Scales::kGrouped ? 2 * P : 0); ++t) {
          const uint8_t* from = group_scales(w, pair + (t >> 1) * apart, s) + part * kPairColumns + (t & 1) * kTileColumns;
          sums.close(t, Scales::of(from), rows, x_block);
        }
      }
#pragma GCC unroll 4
    for (int t = 0; t < (Scales::kGrouped ? 0 : 2 * P); ++t) {
      const float* scales = tile_scales(w, pair + (t >> 1) * apart, t & 1);
      sums.close(t, _mm512_set1_ps(scales == nullptr ? 1.0f : scales[block]), rows, x_block);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t)
      _mm512_storeu_ps(totals + (size_t(pair + (t >> 1) * apart) * rows.num_rows + m) * kPairColumns + (t & 1) * 16, sums.all[m][t]);
}

template <int N, typename Decode, typename Scales>
void few_rows(const Columns& w, const Rows& rows, float* totals) {
  // Two pairs double the number of independent chains. Sums and totals of three rows and more do not both fit the registers
  // then; totals of blocks are needed rarely, those of groups in every step.
  constexpr int kPairs = N <= 2 || !Scales::kGrouped ? 2 : 1;
  const int half = kPairs == 2 ? w.num_pairs / 2 : 0;
  for (int pair = 0; pair < half; ++pair) few<N, kPairs, Decode, Scales>(w, pair, half, rows, totals);
  for (int pair = 2 * half; pair < w.num_pairs; ++pair) few<N, 1, Decode, Scales>(w, pair, 0, rows, totals);
}

template <typename Decode, typename Scales = BlockScales>
void few_of(const Columns& w, const Rows& rows, float* totals) {
  switch (rows.num_rows) {
    case 1: return few_rows<1, Decode, Scales>(w, rows, totals);
    case 2: return few_rows<2, Decode, Scales>(w, rows, totals);
    case 3: return few_rows<3, Decode, Scales>(w, rows, totals);
    default: return few_rows<kFewRows, Decode, Scales>(w, rows, totals);
  }
}

}  // namespace

void multiply_few_avx512bf16(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (has_parts(w.format)) return multiply_few_parts(w, rows, scratch, totals);
  switch (w.format) {
    case kFp8: return few_of<Fp8>(w, rows, totals);
    case kInt8: return few_of<Int8>(w, rows, totals);
    case kMxFp8: return few_of<Fp8, PowersOfTwo>(w, rows, totals);
    case kMxFp4: return few_of<Fp4, PowersOfTwo>(w, rows, totals);
    case kNvFp4: return few_of<Fp4, SmallFloats>(w, rows, totals);
    default: return few_of<Bf16>(w, rows, totals);
  }
}

}  // namespace moe_mk
