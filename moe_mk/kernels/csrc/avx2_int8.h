// Integer products for AVX2: rows rounded to INT8 (int8.h) and to INT8 in parts of k (int8_parts.h), straight from the packed bytes.
//
// Signed weights are widened to 16 bits, once for three rows, and multiplied by VPMADDWD. Four-bit weights are multiplied, four rows at a
// time, as unsigned codes by VPMADDUBSW, which adds two products in 16 bits: eight sums of at most 2 * 15 * 128 = 3,840, those of 32 k,
// fit 16 bits. Sums of 32 bits are exact, so the bits are those of the portable kernels.
#pragma once
#include "int8_parts.h"
#include "lanes.h"

namespace moe_mk {
namespace {

constexpr int kIntegerRows = 3;  // rows at a time: of four vectors of columns, twelve sums
constexpr int kFourBitRows = 4;  // of four-bit weights: of two vectors, eight sums
constexpr int kQuadsOf32 = kStep / 4;

// c0 c1 c4 c5 c2 c3 c6 c7 -> in order
inline __attribute__((always_inline)) __m256i sums_of_columns(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0xd8);
}

// N rows of s8 codes, XOR `flip`, times 16 columns of signed weights, four k a line. to: [row][2 vectors of 8 columns], added to.
template <int N>
inline __attribute__((always_inline)) void add_signed(const uint8_t* weights, int quads, const uint8_t* const* x, int32_t flip, int ahead,
                                                      __m256i (&to)[N][2]) {
  const __m128i flips = _mm_set1_epi32(flip);
  __m256i of[N][4];  // of four columns: k 0 and 1, k 2 and 3
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
    for (int v = 0; v < 4; ++v) of[m][v] = _mm256_setzero_si256();
  for (int quad = 0; quad < quads; ++quad, weights += kCodeRow) {
    prefetch_line(weights, ahead);
    __m256i codes[N];
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m) codes[m] = _mm256_cvtepi8_epi16(_mm_xor_si128(_mm_set1_epi32(load<int32_t>(x[m] + 4 * quad)), flips));
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(weights + 16 * v));
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) of[m][v] = _mm256_add_epi32(of[m][v], _mm256_madd_epi16(wide, codes[m]));
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
    for (int half = 0; half < 2; ++half) to[m][half] = _mm256_add_epi32(to[m][half], sums_of_columns(of[m][2 * half], of[m][2 * half + 1]));
}

// Rows with one scale each.
struct Avx2Int8Ops {
  template <int N>
  __attribute__((noinline)) static void dots_of(const uint8_t* weights, int quads, const uint8_t* const* x, int ahead, i32x16* sums,
                                                int stride) {
    __m256i of[N][2];
    for (int m = 0; m < N; ++m) of[m][0] = of[m][1] = _mm256_setzero_si256();
    add_signed<N>(weights, quads, x, int32_t(0x80808080u), ahead, of);
    for (int m = 0; m < N; ++m)
      for (int half = 0; half < 2; ++half) store(reinterpret_cast<uint8_t*>(sums + m * stride) + 32 * half, of[m][half]);
  }

  static void dots(int n, int pairs, const Columns& w, int pair, int step, int steps, const Rows& rows, int first, i32x16*,
                   i32x16* sums) {
    const uint8_t* x[kInt8Group];
    const int quads = steps * kQuadsOf32, stride = 2 * pairs, ahead = first == 0 ? w.prefetch : 0;
    for (int m = 0; m < n; ++m) x[m] = rows.codes(first + m) + size_t(step) * kStep;
    for (int t = 0; t < 2 * pairs; ++t) {
      const uint8_t* weights = w.data + size_t(pair + t / 2) * w.pair_bytes + step * w.step_bytes + t % 2 * 64;
      for (int m = 0; m < n; m += kIntegerRows) {
        i32x16* to = sums + m * stride + t;
        switch (n - m) {
          case 1: dots_of<1>(weights, quads, x + m, m == 0 ? ahead : 0, to, stride); break;
          case 2: dots_of<2>(weights, quads, x + m, m == 0 ? ahead : 0, to, stride); break;
          default: dots_of<kIntegerRows>(weights, quads, x + m, m == 0 ? ahead : 0, to, stride);
        }
      }
    }
  }
};

// sum += the products of neighbouring bytes, unsigned and signed. NOTE the assembly keeps gcc 12 from moving additions and spilling sums.
inline __attribute__((always_inline)) void add_byte_products(__m256i codes, __m256i x, __m256i& sum) {
  const __m256i products = _mm256_maddubs_epi16(codes, x);
  asm volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products));
}

// The sums of one part: N rows times Tiles of 16 columns, as two vectors each.
template <int N, int Tiles>
struct PartOfRows {
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

template <int N, bool FourBits>
__attribute__((noinline)) void multiply_unit(const IntegerUnit& unit, const Rows& rows, int first, int ahead, float* totals) {
  const int num_parts = row_parts(unit.w), part_steps = unit.w.part_pairs / (kStep / 2), base = FourBits ? code_base(unit.w) : 0;
  const uint8_t* x[N];
  RowParts parts[N];
  for (int m = 0; m < N; ++m) {
    x[m] = rows.codes(first + m) + size_t(unit.step) * kStep;
    parts[m] = {rows.scales[first + m], num_parts};
  }
  const uint8_t* packed = unit.packed;
  for (int part = 0, done = 0; done < unit.steps; ++part, done += part_steps) {
    const int some = unit.steps - done < part_steps ? unit.steps - done : part_steps, at = unit.step / part_steps + part;
    constexpr int kTiles = FourBits ? 2 : 1;  // at a time
    for (int tile = 0; tile < 2; tile += kTiles) {
      const int column = part * kPairColumns + tile * kTileColumns;
      PartOfRows<N, kTiles> sums(base, parts, at);
      if constexpr (FourBits) sums.add_four_bits(packed, some, x, ahead);
      else add_signed<N>(packed + 64 * tile, some * kQuadsOf32, x, 0, ahead, sums.of);
      sums.close(unit.scales + column, unit.minima == nullptr ? nullptr : unit.minima + column, parts, at, totals + tile * kTileColumns);
    }
    packed += size_t(some) * unit.w.step_bytes;
    for (int m = 0; m < N; ++m) x[m] += size_t(some) * kStep;
  }
}

template <bool FourBits>
void multiply_parts_of(const Columns& w, const Rows& rows, float* totals) {
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
      constexpr int kTogether = FourBits ? kFourBitRows : kIntegerRows;
      for (int first = 0; first < rows.num_rows; first += kTogether) {
        float* to = totals + size_t(first) * kPairColumns;
        const int ahead = first == 0 ? w.prefetch : 0;
        switch (rows.num_rows - first) {
          case 1: multiply_unit<1, FourBits>(unit, rows, first, ahead, to); break;
          case 2: multiply_unit<2, FourBits>(unit, rows, first, ahead, to); break;
          case 3: multiply_unit<3, FourBits>(unit, rows, first, ahead, to); break;
          default: multiply_unit<kTogether, FourBits>(unit, rows, first, ahead, to);
        }
      }
    }
}

void multiply_int8_parts_avx2(const Columns& w, const Rows& rows, const Scratch&, float* totals) {
  if (w.format == kInt8Groups) multiply_parts_of<false>(w, rows, totals);
  else multiply_parts_of<true>(w, rows, totals);
}

}  // namespace
}  // namespace moe_mk
