// INT8 products by VPDPBUSD (AVX512-VNNI): u8 codes of tokens, offset by 128, times s8 weights straight from memory, four
// k of 16 columns an instruction. 128 * the sum of the weights is computed with the first rows and subtracted: exact.
#include "avx512.h"

#include "int8.h"

namespace moe_mk {
namespace {

// First: these rows load the weights from memory and compute `offsets`; the others find the weights in L1.
template <int N, int P, bool First>
void dots_of(const Columns& w, int pair, int step, int steps, const Rows& rows, int first, i32x16* offsets, i32x16* sums) {
  __m512i all[N][2 * P], offset[2 * P];
  for (int t = 0; t < 2 * P; ++t) {
    offset[t] = First ? _mm512_setzero_si512() : load<__m512i>(&offsets[t]);
    for (int m = 0; m < N; ++m) all[m][t] = _mm512_setzero_si512();
  }
  const uint8_t* data = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
  const int ahead = w.prefetch;
  for (int line = 0; line < steps * kStep / 4; line += 4) {
#pragma GCC unroll 4
    for (int l = 0; l < 4; ++l) {
      __m512i weights[2 * P];
#pragma GCC unroll 4
      for (int t = 0; t < 2 * P; ++t) {
        const uint8_t* from = data + (t >> 1) * w.pair_bytes + (line + l) * 128 + (t & 1) * 64;
        weights[t] = _mm512_loadu_si512(from);
        if (!First) continue;
        _mm_prefetch(reinterpret_cast<const char*>(from + ahead), _MM_HINT_T0);
        offset[t] = _mm512_dpbusd_epi32(offset[t], _mm512_set1_epi8(char(kInt8Offset)), weights[t]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < N; ++m) {
        const __m512i x = _mm512_set1_epi32(load<int32_t>(rows.codes(first + m) + size_t(step) * kStep + 4 * (line + l)));
#pragma GCC unroll 4
        for (int t = 0; t < 2 * P; ++t) all[m][t] = _mm512_dpbusd_epi32(all[m][t], x, weights[t]);
      }
    }
  }
  for (int t = 0; First && t < 2 * P; ++t) store(&offsets[t], offset[t]);
  for (int m = 0; m < N; ++m)
    for (int t = 0; t < 2 * P; ++t) store(&sums[m * 2 * P + t], _mm512_sub_epi32(all[m][t], offset[t]));
}

// Any number of rows, one pair.
template <bool First, typename... Arguments>
void dots_of_pair(int n, Arguments&&... given) {
  switch (n) {
    case 1: return dots_of<1, 1, First>(given...);
    case 2: return dots_of<2, 1, First>(given...);
    case 3: return dots_of<3, 1, First>(given...);
    case 4: return dots_of<4, 1, First>(given...);
    case 5: return dots_of<5, 1, First>(given...);
    case 6: return dots_of<6, 1, First>(given...);
    case 7: return dots_of<7, 1, First>(given...);
    default: return dots_of<8, 1, First>(given...);
  }
}

// At most kInt8Few rows, two pairs.
template <typename... Arguments>
void dots_of_two(int n, Arguments&&... given) {
  switch (n) {
    case 1: return dots_of<1, 2, true>(given...);
    case 2: return dots_of<2, 2, true>(given...);
    case 3: return dots_of<3, 2, true>(given...);
    default: return dots_of<4, 2, true>(given...);
  }
}

struct Avx512Int8Ops {
  static void dots(int n, int pairs, const Columns& w, int pair, int step, int steps, const Rows& rows, int first,
                   i32x16* offsets, i32x16* sums) {
    if (pairs == 2) return dots_of_two(n, w, pair, step, steps, rows, first, offsets, sums);
    if (first == 0) return dots_of_pair<true>(n, w, pair, step, steps, rows, first, offsets, sums);
    dots_of_pair<false>(n, w, pair, step, steps, rows, first, offsets, sums);
  }
};

}  // namespace

void multiply_int8_avx512(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  multiply_int8<Avx512Int8Ops>(w, rows, scratch, totals);
}

}  // namespace moe_mk
