// A few rows times weights of the formats with parts straight from memory, for AVX512-BF16 + VBMI: codes are decoded into
// integers in registers (one shift and one table for 32 weights of four bits), multiplied by VDPBF16PS, and the f32 sum of a
// part is scaled. Minima are multiplied by sums of x, which are computed once a task. part_scales.h has the arithmetic.
// Reads packed weights and scales once, two pairs of columns at a time, half of the task apart: see isa_avx512few.cpp.
// Writes totals [pair][row][32]. Same bits as multiply_parts.
#include "avx512.h"

#include "part_scales.h"

namespace moe_mk {
namespace {

constexpr int kRowsOfTwoPairs = 2;  // the sums and totals of more rows times two pairs do not fit the registers

// Sums of one part of k and their totals: N rows times both tiles of P pairs in registers.
template <int N, int P>
struct PartSums {
  static constexpr int kTiles = 2 * P;
  __m512 open[N][kTiles], all[N][kTiles];
};

// Decodes lines First to Last of one step of each tile and multiplies every row of x with them.
template <int First, int Last, int N, int P, typename Decode>
inline __attribute__((always_inline)) void dot_lines(const Decode& decode, const uint8_t* at, size_t apart, const uint8_t* const* x,
                                                      ptrdiff_t ahead, PartSums<N, P>& sums) {
  constexpr int kRows = Decode::count(First), kRow = Decode::first(First);
  // Tile by tile: rows of one are four registers.
#pragma GCC unroll 4
  for (int t = 0; t < 2 * P; ++t) {
    const uint8_t* from = at + (t >> 1) * apart + (t & 1) * 64;
    _mm_prefetch(reinterpret_cast<const char*>(from + ahead + First * 128), _MM_HINT_T0);
    __m512i weights[kRows];
    decode.template rows<First>(from, weights);
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int h = 0; h < kRows; ++h) add_two(sums.open[m][t], weights[h], x[m] + (kRow + h) * 4);
  }
  if constexpr (First + 1 < Last) dot_lines<First + 1, Last>(decode, at, apart, x, ahead, sums);
}

template <int N, int P, typename Decode, bool Minima>
void few(const Columns& w, int pair, int apart, const Rows& rows, const float* sums_of_x, float* totals) {
  const Decode decode(Minima);
  const int part_steps = w.part_pairs * 2 / kStep, num_sums = w.num_steps;
  const size_t pair_apart = apart * w.pair_bytes;
  const ScalesAhead scales_ahead(w);
  const StreamAhead ahead(w, pair, P == 2 ? apart : w.num_pairs);
  alignas(64) float scales[P][kSuperSteps * Decode::kPerStep * kPairColumns], minima[P][Minima ? kSuperSteps * kPairColumns : 16];
  PartSums<N, P> sums;
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t) sums.open[m][t] = sums.all[m][t] = _mm512_setzero_ps();
  const uint8_t* data = w.data + pair * w.pair_bytes;
  for (int step0 = 0, first_part = 0; step0 < w.num_steps; step0 += kSuperSteps) {
    const int steps = w.num_steps - step0 < kSuperSteps ? w.num_steps - step0 : kSuperSteps;
    int parts = 0, part = 0;
    for (int p = 0; p < P; ++p) scales_ahead(w, pair + p * apart, step0);
    for (int p = 0; p < P; ++p) parts = part_scales(w, pair + p * apart, step0, steps, scales[p], minima[p]);
    const auto close = [&](int step) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) {
        const __m512 row = _mm512_set1_ps(rows.scales == nullptr ? 1.0f : rows.scales[m][step * kStep / kActivationBlock]);
#pragma GCC unroll 4
        for (int t = 0; t < 2 * P; ++t) {
          const size_t at = size_t(part) * kPairColumns + (t & 1) * kTileColumns;
          const __m512 scale = _mm512_load_ps(scales[t >> 1] + at);
          sums.all[m][t] = _mm512_fmadd_ps(sums.open[m][t], rows.scales == nullptr ? scale : _mm512_mul_ps(scale, row), sums.all[m][t]);
          sums.open[m][t] = _mm512_setzero_ps();
          if (!Minima) continue;
          const __m512 x_sum = _mm512_set1_ps(sums_of_x[m * num_sums + first_part + part]);
          sums.all[m][t] = _mm512_fnmadd_ps(_mm512_load_ps(minima[t >> 1] + at), rows.scales == nullptr ? x_sum : _mm512_mul_ps(x_sum, row),
                                            sums.all[m][t]);
        }
      }
      ++part;
    };
    for (int s = step0, left = part_steps; s < step0 + steps; ++s) {
      const uint8_t *at = data + s * w.step_bytes, *x[N];
      for (int m = 0; m < N; ++m) x[m] = reinterpret_cast<const uint8_t*>(rows.bf16(m)) + size_t(s) * kRowBytes;
      constexpr int kHalf = Decode::kLines / Decode::kPerStep;
      dot_lines<0, kHalf>(decode, at, pair_apart, x, ahead.at(s), sums);
      if constexpr (Decode::kPerStep == 2) {
        close(s);
        dot_lines<kHalf, Decode::kLines>(decode, at, pair_apart, x, ahead.at(s), sums);
        close(s);
      } else if (--left == 0 || s + 1 == step0 + steps) {
        close(s);
        left = part_steps;
      }
    }
    first_part += parts;
  }
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t)
      _mm512_storeu_ps(totals + (size_t(pair + (t >> 1) * apart) * rows.num_rows + m) * kPairColumns + (t & 1) * 16, sums.all[m][t]);
}

template <int N, typename Decode, bool Minima>
void few_rows(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  for (int m = 0; Minima && m < N; ++m)
    part_sums(w, reinterpret_cast<const uint8_t*>(rows.bf16(m)), kRowBytes, w.num_steps, scratch.sums + size_t(m) * w.num_steps);
  constexpr int kPairs = N <= kRowsOfTwoPairs ? 2 : 1;
  const int half = kPairs == 2 ? w.num_pairs / 2 : 0;
  for (int pair = 0; pair < half; ++pair) few<N, kPairs, Decode, Minima>(w, pair, half, rows, scratch.sums, totals);
  for (int pair = 2 * half; pair < w.num_pairs; ++pair) few<N, 1, Decode, Minima>(w, pair, 0, rows, scratch.sums, totals);
}

template <typename Decode, bool Minima>
void few_of(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  switch (rows.num_rows) {
    case 1: return few_rows<1, Decode, Minima>(w, rows, scratch, totals);
    case 2: return few_rows<2, Decode, Minima>(w, rows, scratch, totals);
    case 3: return few_rows<3, Decode, Minima>(w, rows, scratch, totals);
    default: return few_rows<kFewRows, Decode, Minima>(w, rows, scratch, totals);
  }
}

}  // namespace

void multiply_few_parts(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  switch (w.format) {
    case kInt8Groups: return w.minima ? few_of<Codes8, true>(w, rows, scratch, totals) : few_of<Codes8, false>(w, rows, scratch, totals);
    case kInt5:
    case kQ5K: return few_of<Codes5, true>(w, rows, scratch, totals);
    case kQ6K: return few_of<Codes6, false>(w, rows, scratch, totals);
    default: return w.minima ? few_of<Codes4, true>(w, rows, scratch, totals) : few_of<Codes4, false>(w, rows, scratch, totals);
  }
}

}  // namespace moe_mk
