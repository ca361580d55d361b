// INT8 products by VPDPBUSD (AVX512-VNNI): u8 codes of tokens, offset by 128, times s8 weights straight from memory, four
// k of 16 columns an instruction. 128 * the sum of the weights is computed with the first rows and subtracted: exact.
#include <immintrin.h>

#include "int8_parts.h"

namespace moe_mk {
namespace {

// First: these rows load the weights from memory and compute `offsets`; the others find the weights in L1.
template <int N, int P, bool First>
void dots_of(const Columns& w, int pair, int step, int steps, const Rows& rows, int first, i32x16* offsets, i32x16* sums) {
  __m512i all[N][2 * P], offset[2 * P];
#pragma GCC unroll 4
  for (int t = 0; t < 2 * P; ++t) {
    offset[t] = First ? _mm512_setzero_si512() : load<__m512i>(&offsets[t]);
#pragma GCC unroll 8
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
#pragma GCC unroll 4
  for (int t = 0; t < (First ? 2 * P : 0); ++t) store(&offsets[t], offset[t]);
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
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

// sum += unsigned codes of weights, four k of 16 columns, times four signed codes of a row.
// NOTE gcc 12 copies the sums at both ends of a loop over intrinsics. Codes of a row are broadcast into a register: Ice Lake takes 1.6 times
// as long with an operand in memory for each product.
inline __attribute__((always_inline)) void add_quad(__m512i& sum, __m512i weights, __m512i codes) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(codes));
}

// Rows rounded in parts. The sums of N rows times both tiles of P pairs in registers, weights straight from memory: codes are
// unsigned, and sums of a part begin at -code_base() * the sum of the codes of x.
constexpr int kFewInt8Rows = 4;

// Four k of each column of one tile a vector, from a line of the packed bytes.
template <bool FourBits>
inline __attribute__((always_inline)) void unsigned_codes(const uint8_t* from, __m512i* to) {
  const __m512i codes = _mm512_loadu_si512(from);
  if (FourBits) {
    to[0] = _mm512_and_si512(codes, _mm512_set1_epi8(15));
    to[1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
  } else {
    to[0] = _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80)));
  }
}

template <int N, int P, bool FourBits, bool Minima>
void few_parts(const Columns& w, int pair, int apart, const Rows& rows, float* totals) {
  constexpr int kQuads = FourBits ? 2 : 1, kLines = kStep / 4 / kQuads;  // of a step
  const int part_steps = w.part_pairs / (kStep / 2), num_parts = row_parts(w), base = FourBits && Minima ? 0 : code_base(w);
  const size_t pair_apart = apart * w.pair_bytes;
  const ScalesAhead scales_ahead(w);
  const StreamAhead ahead(w, pair, P == 2 ? apart : w.num_pairs);
  alignas(64) float scales[P][kSuperSteps * kPairColumns], minima[P][kSuperSteps * kPairColumns];
  __m512i open[N][2 * P];
  __m512 all[N][2 * P];
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t) all[m][t] = _mm512_setzero_ps();
  const uint8_t* data = w.data + pair * w.pair_bytes;
  for (int step0 = 0, at = 0; step0 < w.num_steps; step0 += kSuperSteps) {
    const int steps = w.num_steps - step0 < kSuperSteps ? w.num_steps - step0 : kSuperSteps;
    for (int p = 0; p < P; ++p) scales_ahead(w, pair + p * apart, step0);
    for (int p = 0; p < P; ++p) part_scales(w, pair + p * apart, step0, steps, scales[p], minima[p]);
    for (int part = 0, done = 0; done < steps; ++part, ++at, done += part_steps) {
      const int last = done + part_steps < steps ? done + part_steps : steps;
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) {
        const __m512i start = _mm512_set1_epi32(-base * RowParts{rows.scales[m], num_parts}.codes(at));
#pragma GCC unroll 4
        for (int t = 0; t < 2 * P; ++t) open[m][t] = start;
      }
      for (int s = step0 + done; s < step0 + last; ++s) {
        const uint8_t* from = data + s * w.step_bytes;
        const ptrdiff_t far = ahead.at(s);
#pragma GCC unroll 8
        for (int line = 0; line < kLines; ++line) {
          __m512i weights[2 * P][kQuads];
#pragma GCC unroll 4
          for (int t = 0; t < 2 * P; ++t) {
            const uint8_t* tile = from + (t >> 1) * pair_apart + line * 128 + (t & 1) * 64;
            _mm_prefetch(reinterpret_cast<const char*>(tile + far), _MM_HINT_T0);
            unsigned_codes<FourBits>(tile, weights[t]);
          }
#pragma GCC unroll 4
          for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
            for (int q = 0; q < kQuads; ++q) {
              const __m512i x = _mm512_set1_epi32(load<int32_t>(rows.codes(m) + size_t(s) * kStep + 4 * (kQuads * line + q)));
#pragma GCC unroll 4
              for (int t = 0; t < 2 * P; ++t) open[m][t] = _mm512_dpbusd_epi32(open[m][t], weights[t][q], x);
            }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) {
        const RowParts row = {rows.scales[m], num_parts};
#pragma GCC unroll 4
        for (int t = 0; t < 2 * P; ++t) {
          const size_t column = size_t(part) * kPairColumns + (t & 1) * kTileColumns;
          const f32x16 scale = load<f32x16>(scales[t >> 1] + column);
          f32x16 total = add_part(bits<i32x16>(open[m][t]), scale, row.scales[at], bits<f32x16>(all[m][t]));
          if (Minima) total = take_minimum(load<f32x16>(minima[t >> 1] + column), row.sums()[at], total);
          all[m][t] = bits<__m512>(total);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int t = 0; t < 2 * P; ++t)
      _mm512_storeu_ps(totals + (size_t(pair + (t >> 1) * apart) * rows.num_rows + m) * kPairColumns + (t & 1) * 16, all[m][t]);
}

// Two pairs at a time, half of the task apart, are two streams of memory; of more rows the sums of one pair fill the registers.
template <int N, bool FourBits, bool Minima>
void few_part_rows(const Columns& w, const Rows& rows, float* totals) {
  constexpr int kPairs = N <= 2 ? 2 : 1;
  const int half = kPairs == 2 ? w.num_pairs / 2 : 0;
  for (int pair = 0; pair < half; ++pair) few_parts<N, kPairs, FourBits, Minima>(w, pair, half, rows, totals);
  for (int pair = 2 * half; pair < w.num_pairs; ++pair) few_parts<N, 1, FourBits, Minima>(w, pair, 0, rows, totals);
}

template <bool FourBits, bool Minima>
void few_parts_of(const Columns& w, const Rows& rows, float* totals) {
  switch (rows.num_rows) {
    case 1: return few_part_rows<1, FourBits, Minima>(w, rows, totals);
    case 2: return few_part_rows<2, FourBits, Minima>(w, rows, totals);
    case 3: return few_part_rows<3, FourBits, Minima>(w, rows, totals);
    default: return few_part_rows<kFewInt8Rows, FourBits, Minima>(w, rows, totals);
  }
}

// More rows are multiplied with panels of two pairs, six at a time: their sums are 24 registers, and their totals stay in memory.
constexpr int kCodePairs = 2, kCodeGroup = 6;

// Rows of a unit of k.
struct CodeRows {
  uint8_t* codes;   // [row][128]
  float* scales;    // [part][row]
  float* sums;      // scale * sum of codes, the same
  int32_t* starts;  // of the sums of products, which have unsigned codes of weights
  int num_rows;

  static constexpr size_t kBytes = kActivationBlock + kMostUnitParts * (2 * sizeof(float) + sizeof(int32_t));  // of a row

  CodeRows(uint8_t* at, int rows) : codes(at), num_rows(rows) {
    scales = reinterpret_cast<float*>(at + size_t(rows) * kActivationBlock);
    sums = scales + rows * kMostUnitParts;
    starts = reinterpret_cast<int32_t*>(sums + rows * kMostUnitParts);
  }
  // The inputs of `steps` steps: rows of a power of two of inputs would share few cache sets.
  void gather(const Columns& w, const Rows& rows, int step, int steps) const {
    const int part_steps = w.part_pairs / (kStep / 2), num_parts = row_parts(w), base = code_base(w);
    for (int r = 0; r < num_rows; ++r) {
      const RowParts row = {rows.scales[r], num_parts};
      std::memcpy(codes + size_t(r) * kActivationBlock, rows.codes(r) + size_t(step) * kStep, size_t(steps) * kStep);
      for (int done = 0, at = step / part_steps, to = r; done < steps; done += part_steps, ++at, to += num_rows) {
        scales[to] = row.scales[at];
        sums[to] = row.sums()[at];
        starts[to] = -base * row.codes(at);
      }
    }
  }
};

// Panels and scales of a unit of P pairs.
struct CodePanels {
  const uint8_t* panel;          // [k / 4][pair][tile][16][4]
  const float *scales, *minima;  // [pair][kMostUnitParts][32]
  int steps, part_steps;
};

// Multiplies rows [first, first + N) by P column pairs; next_pair: stride of totals between column pairs, in floats.
template <int N, int P, bool Minima>
void multiply_code_panels(const CodePanels& unit, const CodeRows& rows, int first, Ahead ahead, float* totals, size_t next_pair) {
  constexpr int kTiles = 2 * P;
  const uint8_t *panel = unit.panel, *x = rows.codes + size_t(first) * kActivationBlock;
  for (int done = 0, column = 0, at = first; done < unit.steps; done += unit.part_steps, column += kPairColumns, at += rows.num_rows) {
    const int some = unit.steps - done < unit.part_steps ? unit.steps - done : unit.part_steps;
    __m512i sums[N][kTiles];
#pragma GCC unroll 6
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) sums[m][t] = _mm512_set1_epi32(rows.starts[at + m]);
#pragma GCC unroll 1
    for (int four = 0; four < some * 2; ++four, panel += 4 * P * kCodeRow, x += 16) {
      ahead.some(2);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        __m512i codes[N];
#pragma GCC unroll 6
        for (int m = 0; m < N; ++m) codes[m] = _mm512_set1_epi32(load<int32_t>(x + m * kActivationBlock + 4 * q));
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) {
          const __m512i weights = _mm512_load_si512(panel + q * P * kCodeRow + t * 64);
#pragma GCC unroll 6
          for (int m = 0; m < N; ++m) add_quad(sums[m][t], weights, codes[m]);
        }
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < N; ++m) {
      f32x16 after[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        const int of_tile = t / 2 * kMostUnitParts * kPairColumns + column + t % 2 * kTileColumns;
        after[t] = add_part(bits<i32x16>(sums[m][t]), load<f32x16>(unit.scales + of_tile), rows.scales[at + m],
                            load<f32x16>(totals + t / 2 * next_pair + m * kPairColumns + t % 2 * kTileColumns));
        if (Minima) after[t] = take_minimum(load<f32x16>(unit.minima + of_tile), rows.sums[at + m], after[t]);
      }
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) store(totals + t / 2 * next_pair + m * kPairColumns + t % 2 * kTileColumns, after[t]);
    }
  }
}

template <int P, bool Minima, int N = kCodeGroup, typename... Arguments>
void multiply_code_rows(int n, Arguments&&... given) {
  if constexpr (N > 1) {
    if (n < N) return multiply_code_rows<P, Minima, N - 1>(n, given...);
  }
  multiply_code_panels<N, P, Minima>(given...);
}

// One unit of P pairs times all rows.
template <int P>
void multiply_code_unit(const Columns& w, int pair, int step, int steps, const CodeRows& rows, uint8_t* panel, float* totals) {
  alignas(64) float scales[P * kMostUnitParts * kPairColumns], minima[P * kMostUnitParts * kPairColumns];
  for (int p = 0; p < P; ++p) {
    const int at = p * kMostUnitParts * kPairColumns;
    part_scales(w, pair + p, step, steps, scales + at, minima + at);
    unpack_unit<true>(w, pair + p, step, steps, panel + p * kCodeRow, P * kCodeRow);
  }
  const CodePanels unit = {panel, scales, minima, steps, w.part_pairs / (kStep / 2)};
  const int groups = (rows.num_rows + kCodeGroup - 1) / kCodeGroup, together = (rows.num_rows + groups - 1) / groups;
  const uint8_t* packed = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
  const size_t next_pair = size_t(rows.num_rows) * kPairColumns;
  for (int first = 0, group = 0; first < rows.num_rows; first += together, ++group, totals += size_t(together) * kPairColumns) {
    const int n = rows.num_rows - first < together ? rows.num_rows - first : together, of_pair = group % P;
    const Ahead ahead = share_of_panel(packed + of_pair * w.pair_bytes, steps * w.step_bytes, steps, group / P, (groups + P - 1 - of_pair) / P);
    if (w.minima) multiply_code_rows<P, true>(n, unit, rows, first, ahead, totals, next_pair);
    else multiply_code_rows<P, false>(n, unit, rows, first, ahead, totals, next_pair);
  }
}

void multiply_codes_by_panels(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const int n = rows.num_rows, fitting = int(w.gather_bytes / (n * CodeRows::kBytes)), chunk = (fitting < 1 ? 1 : fitting) * kUnitSteps;
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  for (int first_step = 0; first_step < w.num_steps; first_step += chunk) {
    const int last_step = w.num_steps - first_step < chunk ? w.num_steps : first_step + chunk;
    for (int pair = 0, pairs = 0; pair < w.num_pairs; pair += pairs) {
      const bool gathers = pair == 0;
      pairs = pair + kCodePairs > w.num_pairs ? 1 : kCodePairs;
      for (int step = first_step; step < last_step; step += kUnitSteps) {
        const int steps = last_step - step < kUnitSteps ? last_step - step : kUnitSteps;
        const CodeRows of_unit(scratch.gathered + size_t((step - first_step) / kUnitSteps) * n * CodeRows::kBytes, n);
        if (gathers) of_unit.gather(w, rows, step, steps);
        float* to = totals + size_t(pair) * n * kPairColumns;
        if (pairs == 1) multiply_code_unit<1>(w, pair, step, steps, of_unit, scratch.panel, to);
        else multiply_code_unit<kCodePairs>(w, pair, step, steps, of_unit, scratch.panel, to);
      }
    }
  }
}

}  // namespace

void multiply_int8_parts_avx512(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (rows.num_rows > kFewInt8Rows) return multiply_codes_by_panels(w, rows, scratch, totals);
  if (w.format != kInt8Groups && w.minima) return few_parts_of<true, true>(w, rows, totals);
  if (w.format != kInt8Groups) return few_parts_of<true, false>(w, rows, totals);
  w.minima ? few_parts_of<false, true>(w, rows, totals) : few_parts_of<false, false>(w, rows, totals);
}

void multiply_int8_avx512(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  multiply_int8<Avx512Int8Ops>(w, rows, scratch, totals);
}

}  // namespace moe_mk
