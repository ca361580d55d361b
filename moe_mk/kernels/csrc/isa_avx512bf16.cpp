// The kernels for AVX512-BF16 + VBMI (Zen 4, Cooper Lake, Sapphire Rapids on).
// An fp8 code is decoded by two 128-entry byte tables (VPERMI2B: low and high byte of its bf16), the sign is put in by
// one VPTERNLOG, two unpacks give two VNNI rows: 5 instructions for 64 weights, exact, subnormals included. Four-bit
// codes need one table of 16 and no unpacking: 7 instructions for 128.
// Products are VDPBF16PS with f32 sums; the scale of a block or group multiplies its f32 sum: exact scales.
#include "avx512_panel.h"
#include "avx512_peak.h"

#include "portable.h"

namespace moe_mk {
namespace {

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

double peak_avx512bf16(int64_t iterations) {
  MOE_MK_PEAK("vdpbf16ps", iterations);
  return double(iterations) * kPeakOperations;
}

}  // namespace

const Kernels* avx512bf16_kernels() {
  // NOTE bf16: on Zen 5, both cores, multiply_few needs 0.92 of the time at one to four rows, 0.98 at one.
  static const Kernels table = {
      "avx512bf16", kFewRows, true, false, true, false, nothing, multiply_few_avx512bf16, multiply_blocked<Avx512Ops>,
      multiply_int8_avx512, quantize_int8, multiply_int8_parts_avx512, round_row,
      activate, accumulate, to_bf16, quantize, decode, count_nans, gate_dots,
      read_avx512, peak_avx512bf16,
  };
  return &table;
}

}  // namespace moe_mk
