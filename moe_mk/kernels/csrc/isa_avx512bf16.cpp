// The kernels for AVX512-BF16 + VBMI (Zen 4, Cooper Lake, Sapphire Rapids on).
// An fp8 code is decoded by two 128-entry byte tables (VPERMI2B: low and high byte of its bf16), the sign is put in by
// one VPTERNLOG, two unpacks give two VNNI rows: 5 instructions for 64 weights, exact, subnormals included. Four-bit
// codes need one table of 16 and no unpacking: 7 instructions for 128.
// Products are VDPBF16PS with f32 sums; the scale of a block or group multiplies its f32 sum: exact scales.
#include "avx512_panel.h"
#include "avx512_peak.h"
#include "avx512_units.h"

#include "portable.h"

namespace moe_mk {
namespace {

// sums += N rows times four k pairs of a panel; `at`: of the rows, in bytes.
template <int N>
inline __attribute__((always_inline)) void add_four_pairs(const uint8_t* panel, const uint8_t* const (&x)[N], size_t at, __m512 (&sums)[N][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + r * kPanelRow));
    const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + r * kPanelRow + 64));
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      const __m512bh two = reinterpret_cast<__m512bh>(_mm512_set1_epi32(load<int32_t>(x[m] + at + r * 4)));
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], b0, two);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], b1, two);
    }
  }
}

struct Avx512Ops {
  static constexpr int kGroup = 8, kPartRows = 6;

  static void expand(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
    expand_panel(w, pair, step, steps, panel);
  }

  template <int N>
  static void rows_by_pair(const RowGroup& group, const uint8_t* panel, int steps, float scale0, float scale1, Ahead ahead, float* totals) {
    __m512 sums[N][2];
    const uint8_t* x[N];
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      x[m] = group.x + m * group.row_bytes;
      sums[m][0] = sums[m][1] = _mm512_setzero_ps();
    }
    size_t at = 0;
    for (int s = 0; s < steps; ++s, at += group.step_bytes - kRowBytes)
#pragma GCC unroll 1
      for (int four = 0; four < kStep / 8; ++four, at += 16, panel += 4 * kPanelRow) {
        ahead.some();
        add_four_pairs(panel, x, at, sums);
      }
#pragma GCC unroll 8  // else the sums of all steps are in memory
    for (int m = 0; m < N; ++m) {
      float* to = totals + m * kPairColumns;
      const float row = group.scales == nullptr ? 1.0f : group.scales[m];
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sums[m][0], _mm512_set1_ps(scale0 * row), _mm512_loadu_ps(to)));
      _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(sums[m][1], _mm512_set1_ps(scale1 * row), _mm512_loadu_ps(to + 16)));
    }
  }

  template <typename... Arguments>
  static void group(const RowGroup& group, Arguments&&... given) {
    switch (group.num_rows) {
      case 1: return rows_by_pair<1>(group, given...);
      case 2: return rows_by_pair<2>(group, given...);
      case 3: return rows_by_pair<3>(group, given...);
      case 4: return rows_by_pair<4>(group, given...);
      case 5: return rows_by_pair<5>(group, given...);
      case 6: return rows_by_pair<6>(group, given...);
      case 7: return rows_by_pair<7>(group, given...);
      default: return rows_by_pair<8>(group, given...);
    }
  }

  static void codes(const Columns& w, int pair, int step, int steps, uint8_t* panel) { expand_codes(w, pair, step, steps, panel); }

  // Eight k pairs at a time, the shortest part. Sums of a part and totals: 24 registers.
  template <int N, bool Minima, bool Scaled>
  static void rows_by_parts(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts, Ahead ahead, float* totals) {
    const int each = parts.pairs / 8;
    const float *scales = parts.scales, *minima = parts.minima, *x_sums = parts.sums;
    __m512 all[N][2], sums[N][2];
#pragma GCC unroll 6
    for (int m = 0; m < N; ++m)
      for (int t = 0; t < 2; ++t) {
        all[m][t] = _mm512_loadu_ps(totals + m * kPairColumns + 16 * t);
        sums[m][t] = _mm512_setzero_ps();
      }
    const uint8_t* x = group.x;
    size_t apart = kRowBytes / 2;  // from these eight to the next: half a row, and what is left of a step
    for (int left = each, eights = 2 * steps; eights > 0; x += apart, apart = group.step_bytes - apart, panel += 8 * kPanelRow) {
      ahead.some(2);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + r * kPanelRow));
        const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + r * kPanelRow + 64));
#pragma GCC unroll 6
        for (int m = 0; m < N; ++m) {
          const __m512bh two = reinterpret_cast<__m512bh>(_mm512_set1_epi32(load<int32_t>(x + m * kRowBytes + r * 4)));
          sums[m][0] = _mm512_dpbf16_ps(sums[m][0], b0, two);
          sums[m][1] = _mm512_dpbf16_ps(sums[m][1], b1, two);
        }
      }
      --eights;
      if (--left != 0 && eights != 0) continue;
      left = each;
#pragma GCC unroll 6
      for (int m = 0; m < N; ++m) {
        const __m512 row = _mm512_set1_ps(Scaled ? group.scales[m] : 1.0f);
        for (int t = 0; t < 2; ++t) {
          const __m512 scale = _mm512_load_ps(scales + 16 * t);
          all[m][t] = _mm512_fmadd_ps(sums[m][t], Scaled ? _mm512_mul_ps(scale, row) : scale, all[m][t]);
          sums[m][t] = _mm512_setzero_ps();
          if (!Minima) continue;
          const __m512 x_sum = _mm512_set1_ps(x_sums[m * parts.sums_stride]);
          all[m][t] = _mm512_fnmadd_ps(_mm512_load_ps(minima + 16 * t), Scaled ? _mm512_mul_ps(x_sum, row) : x_sum, all[m][t]);
        }
      }
      ++x_sums;
      scales += kPairColumns;
      minima += Minima ? kPairColumns : 0;
    }
#pragma GCC unroll 6
    for (int m = 0; m < N; ++m)
      for (int t = 0; t < 2; ++t) _mm512_storeu_ps(totals + m * kPairColumns + 16 * t, all[m][t]);
  }

  template <bool Minima, bool Scaled, typename... Arguments>
  static void parts_of(const RowGroup& group, Arguments&&... given) {
    switch (group.num_rows) {
      case 1: return rows_by_parts<1, Minima, Scaled>(group, given...);
      case 2: return rows_by_parts<2, Minima, Scaled>(group, given...);
      case 3: return rows_by_parts<3, Minima, Scaled>(group, given...);
      case 4: return rows_by_parts<4, Minima, Scaled>(group, given...);
      case 5: return rows_by_parts<5, Minima, Scaled>(group, given...);
      default: return rows_by_parts<kPartRows, Minima, Scaled>(group, given...);
    }
  }

  static void parts(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts, const Ahead& ahead, float* totals) {
    if (group.scales != nullptr && parts.minima != nullptr) return parts_of<true, true>(group, panel, steps, parts, ahead, totals);
    if (group.scales != nullptr) return parts_of<false, true>(group, panel, steps, parts, ahead, totals);
    if (parts.minima != nullptr) return parts_of<true, false>(group, panel, steps, parts, ahead, totals);
    return parts_of<false, false>(group, panel, steps, parts, ahead, totals);
  }
};

// bf16 without scales is multiplied from the packed bytes, rows in place. Sums are added to totals, in units that are free during products;
// multiplying them by a scale of 1 would not. NOTE Zen 4, from the L2: 0.97 of the peak of the product instruction alone.
constexpr int kStreamSteps = 32;

// What is prefetched: the lines that follow, or those of an Ahead, the next pair. NOTE Zen 4: into the L2, two groups take 0.8 to 0.9 of
// the time, ten 1.02.
enum Soon { kFollowing, kNextIntoL2, kNextIntoL1 };

// N rows times some steps of one pair of columns.
template <int N, Soon soon>
__attribute__((noinline)) void multiply_stream(const uint8_t* const* rows, const uint8_t* w, ptrdiff_t bytes, ptrdiff_t block, bool begins,
                                               Ahead ahead, float* totals) {
  __m512 sums[N][2];
  const uint8_t* x[N];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) x[m] = rows[m];
  const ptrdiff_t near = ahead.data - w;
  const uint8_t* const end = w + bytes;
  for (size_t at = 0; w < end; begins = false) {
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (const uint8_t* const close = end - w < block ? end : w + block; w < close; at += 16, w += 4 * kPanelRow) {
#pragma GCC unroll 8
      for (int line = 0; soon == kFollowing && line < 8; ++line) __builtin_prefetch(w + near + 64 * line);
      for (int line = 0; soon != kFollowing && line < ahead.lines; ++line, ahead.data += 64)
        __builtin_prefetch(ahead.data, 0, soon == kNextIntoL2 ? 2 : 3);
      add_four_pairs(w, x, at, sums);
    }
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
      for (int t = 0; t < 2; ++t) {
        float* to = totals + m * kPairColumns + 16 * t;
        _mm512_storeu_ps(to, begins ? _mm512_add_ps(sums[m][t], _mm512_setzero_ps()) : _mm512_add_ps(sums[m][t], _mm512_loadu_ps(to)));
      }
  }
}

template <int N, typename... Arguments>
void multiply_group(Soon soon, Arguments... given) {
  if (soon == kFollowing) return multiply_stream<N, kFollowing>(given...);
  return soon == kNextIntoL2 ? multiply_stream<N, kNextIntoL2>(given...) : multiply_stream<N, kNextIntoL1>(given...);
}

void multiply_many(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (decodes_between(w.format)) return multiply_between(w, rows, scratch, totals);
  if (w.must_be_decoded() || w.scales != nullptr || rows.scales != nullptr) return multiply_blocked<Avx512Ops>(w, rows, scratch, totals);
  using Multiply = void (*)(Soon, const uint8_t* const*, const uint8_t*, ptrdiff_t, ptrdiff_t, bool, Ahead, float*);
  static constexpr Multiply kByRows[] = {multiply_group<1>, multiply_group<2>, multiply_group<3>, multiply_group<4>,
                                         multiply_group<5>, multiply_group<6>, multiply_group<7>, multiply_group<8>};
  const int n = rows.num_rows, groups = (n + 7) / 8, together = (n + groups - 1) / groups;
  const int chunk = groups == 1 ? w.num_steps : kStreamSteps;  // a multiple of any block
  const Soon soon = groups == 1 ? kFollowing : groups <= 4 ? kNextIntoL2 : kNextIntoL1;
  const uint8_t* x[kMaxRows];
  for (int step = 0; step < w.num_steps; step += chunk) {
    const int steps = w.num_steps - step < chunk ? w.num_steps - step : chunk, fours = steps * (kStep / 8);
    const ptrdiff_t bytes = steps * w.step_bytes;
    const int lines = (int(bytes / 64) + fours * groups - 1) / (fours * groups);  // to prefetch every four k pairs
    for (int r = 0; r < n; ++r) x[r] = reinterpret_cast<const uint8_t*>(rows.bf16(r) + size_t(step) * kStep);
    for (int pair = 0; pair < w.num_pairs; ++pair) {
      const uint8_t *at = w.data + pair * w.pair_bytes + step * w.step_bytes, *next = at + w.pair_bytes;
      if (pair + 1 == w.num_pairs) next = step + chunk < w.num_steps ? w.data + (step + chunk) * w.step_bytes : w.after != nullptr ? w.after : at;
      Ahead ahead = {groups == 1 ? at + 4 * w.prefetch : next, lines};  // NOTE Zen 4: 8 KiB ahead need 0.9 of the time of 2, as 16 do
      for (int first = 0; first < n; first += together, ahead.data += size_t(fours) * lines * 64) {
        if (ahead.data >= next + bytes) ahead.lines = 0;
        const int some = n - first < together ? n - first : together;
        kByRows[some - 1](soon, x + first, at, bytes, w.steps_per_block * w.step_bytes, step == 0, ahead,
                          totals + (size_t(pair) * n + first) * kPairColumns);
      }
    }
  }
}

double peak_avx512bf16(int64_t iterations, bool) {
  MOE_MK_PEAK("vdpbf16ps", iterations);
  return double(iterations) * 2 * kPeakOperations;
}

}  // namespace

const Kernels* avx512bf16_kernels() {
  // NOTE bf16: on Zen 5, both cores, multiply_few needs 0.92 of the time at one to four rows, 0.98 at one.
  static const Kernels table = {
      "avx512bf16", kFewRows, true, false, true, false, nothing, multiply_few_avx512bf16, multiply_many,
      multiply_int8_avx512, quantize_int8, multiply_int8_parts_avx512, round_row,
      activate, accumulate, to_bf16, write_terms, quantize, decode, gate_dots,
      read_avx512, peak_avx512bf16,
  };
  return &table;
}

}  // namespace moe_mk
