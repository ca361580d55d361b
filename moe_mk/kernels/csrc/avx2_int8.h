// Four-bit weights times rows rounded to INT8 in parts of k (int8_parts.h) for AVX2, straight from the packed bytes; rows_int16.h has
// eight-bit weights.
//
// Weights are multiplied, four rows at a time, as unsigned codes by VPMADDUBSW, which adds two products in 16 bits: eight sums of at most
// 2 * 15 * 128 = 3,840, those of 32 k, fit 16 bits. Sums of 32 bits are exact, so the bits are those of the portable kernels.
#pragma once
#include "rows_int16.h"

namespace moe_mk {
namespace {

constexpr int kFourBitRows = 4;  // of four-bit weights: of two vectors, eight sums
constexpr int kQuadsOf32 = kStep / 4;

// sum += the products of neighbouring bytes, unsigned and signed. NOTE the assembly keeps gcc 12 from moving additions and spilling sums.
inline __attribute__((always_inline)) void add_byte_products(__m256i codes, __m256i x, __m256i& sum) {
  const __m256i products = _mm256_maddubs_epi16(codes, x);
  asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));
}

// The sums of one part: N rows times both tiles of 16 columns, as two vectors each.
template <int N>
struct PartOfRows {
  static constexpr int Tiles = 2;
  __m256i of[N][2 * Tiles];

  inline __attribute__((always_inline)) PartOfRows(int base, const RowParts* rows, int part) {
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m)
      for (int v = 0; v < 2 * Tiles; ++v) of[m][v] = _mm256_set1_epi32(base == 0 ? 0 : -base * rows[m].codes(part));
  }
  // Unsigned four-bit codes, 32 k at a time: a line of packed bytes holds four k in its low halves and four in its high ones.
  inline __attribute__((always_inline)) void add_four_bits(const uint8_t* packed, int steps, const uint8_t* const* x, int ahead) {
    constexpr int V = N > 2 ? 2 : 2 * Tiles;  // vectors at a time
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    for (int first = 0; first < 2 * Tiles; first += V)
      for (int s = 0; s < steps; ++s) {
        const uint8_t* line = packed + size_t(s) * (kQuadsOf32 / 2) * kCodeRow + 32 * first;
        __m256i sums[N][V];
#pragma GCC unroll 4
        for (int m = 0; m < N; ++m)
          for (int v = 0; v < V; ++v) sums[m][v] = _mm256_setzero_si256();

#pragma GCC unroll 4
        for (int eight = 0; eight < kStep; eight += 8, line += kCodeRow) {
          for (int byte = 0; byte < 32 * V; byte += 64) prefetch_line(line + byte, ahead);
          __m256i codes[V][2];
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const __m256i both = load<__m256i>(line + 32 * v);
            codes[v][0] = _mm256_and_si256(both, low);
            codes[v][1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
          }
#pragma GCC unroll 4
          for (int m = 0; m < N; ++m)
#pragma GCC unroll 2
            for (int quad = 0; quad < 2; ++quad) {
              const __m256i four = broadcast32(x[m] + s * kStep + eight + 4 * quad);
#pragma GCC unroll 4
              for (int v = 0; v < V; ++v) add_byte_products(codes[v][quad], four, sums[m][v]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < N; ++m)
          for (int v = 0; v < V; ++v) of[m][first + v] = _mm256_add_epi32(of[m][first + v], _mm256_madd_epi16(sums[m][v], ones));
      }
  }
  // scales, minima: of the part and the tile; minima may be null. Totals are stored at the end: a store might alias what is read here.
  inline __attribute__((always_inline)) void close(const float* scales, const float* minima, const RowParts* rows, int part, float* totals) const {
    __m256 after[N][2 * Tiles];
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m) {
      const __m256 row = _mm256_set1_ps(rows[m].scales[part]);
#pragma GCC unroll 4
      for (int v = 0; v < 2 * Tiles; ++v) {
        const __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(scales + 8 * v), row);
        after[m][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(of[m][v]), factor, _mm256_loadu_ps(totals + m * kPairColumns + 8 * v));
      }
    }
    if (minima != nullptr) {
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) {
        const __m256 row = _mm256_set1_ps(rows[m].sums()[part]);
#pragma GCC unroll 4
        for (int v = 0; v < 2 * Tiles; ++v) after[m][v] = _mm256_fnmadd_ps(_mm256_loadu_ps(minima + 8 * v), row, after[m][v]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < 2 * Tiles; ++v) _mm256_storeu_ps(totals + m * kPairColumns + 8 * v, after[m][v]);
  }
};

// One unit of k of a pair and its scales.
struct IntegerUnit {
  const Columns& w;
  int step, steps;
  const uint8_t* packed;
  const float *scales, *minima;
};

template <int N>
__attribute__((noinline)) void multiply_unit(const IntegerUnit& unit, const Rows& rows, int first, int ahead, float* totals) {
  const int num_parts = row_parts(unit.w), part_steps = unit.w.part_pairs / (kStep / 2), base = code_base(unit.w);
  const uint8_t* x[N];
  RowParts parts[N];
  for (int m = 0; m < N; ++m) {
    x[m] = rows.codes(first + m) + size_t(unit.step) * kStep;
    parts[m] = {rows.scales[first + m], num_parts};
  }
  const uint8_t* packed = unit.packed;
  for (int part = 0, done = 0; done < unit.steps; ++part, done += part_steps) {
    const int some = unit.steps - done < part_steps ? unit.steps - done : part_steps, at = unit.step / part_steps + part;
    const int column = part * kPairColumns;
    PartOfRows<N> sums(base, parts, at);
    sums.add_four_bits(packed, some, x, ahead);
    sums.close(unit.scales + column, unit.minima == nullptr ? nullptr : unit.minima + column, parts, at, totals);
    packed += size_t(some) * unit.w.step_bytes;
    for (int m = 0; m < N; ++m) x[m] += size_t(some) * kStep;
  }
}

void multiply_four_bits(const Columns& w, const Rows& rows, float* totals) {
  alignas(64) float scales[kMostUnitParts * kPairColumns], minima[kMostUnitParts * kPairColumns];
  const ScalesAhead scales_ahead(w);
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int pair = 0; pair < w.num_pairs; ++pair, totals += size_t(rows.num_rows) * kPairColumns)
    for (int step = 0; step < w.num_steps; step += kUnitSteps) {
      const int steps = w.num_steps - step < kUnitSteps ? w.num_steps - step : kUnitSteps;
      if (step % kSuperSteps == 0) scales_ahead(w, pair, step);
      part_scales(w, pair, step, steps, scales, minima);
      const uint8_t* packed = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
      const IntegerUnit unit = {w, step, steps, packed, scales, w.minima ? minima : nullptr};
      for (int first = 0; first < rows.num_rows; first += kFourBitRows) {
        float* to = totals + size_t(first) * kPairColumns;
        const int ahead = first == 0 ? w.prefetch : 0;
        switch (rows.num_rows - first) {
          case 1: multiply_unit<1>(unit, rows, first, ahead, to); break;
          case 2: multiply_unit<2>(unit, rows, first, ahead, to); break;
          case 3: multiply_unit<3>(unit, rows, first, ahead, to); break;
          default: multiply_unit<kFourBitRows>(unit, rows, first, ahead, to);
        }
      }
    }
}

void multiply_int8_parts_avx2(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (w.format == kInt8Groups) multiply_codes(w, rows, scratch, totals);
  else multiply_four_bits(w, rows, totals);
}

}  // namespace
}  // namespace moe_mk
