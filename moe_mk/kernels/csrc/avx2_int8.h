// Integer products for AVX2: rows rounded to INT8 (int8.h) and to INT8 in parts of k (int8_parts.h).
//
// Signed weights are widened to 16 bits, once for three rows, and multiplied by VPMADDWD. Four-bit weights are multiplied as
// unsigned codes by VPMADDUBSW, which adds two products in 16 bits: eight sums of at most 2 * 15 * 128 = 3,840, those of
// 32 k, fit 16 bits. Sums of 32 bits are exact, so the bits are those of the portable kernels.
#pragma once
#include <immintrin.h>

#include "int8_parts.h"

namespace moe_mk {
namespace {

constexpr int kIntegerRows = 3;  // rows at a time: of four vectors of columns, twelve sums
constexpr int kQuadsOf32 = kStep / 4;

// N rows of s8 codes, XOR `flip`, times 16 columns of signed weights, four k a line. sums: [row][sums_stride].
template <int N>
inline __attribute__((always_inline)) void add_signed(const uint8_t* weights, int quads, const uint8_t* const* x, int32_t flip, i32x16* sums,
                                                      int sums_stride) {
  const __m128i flips = _mm_set1_epi32(flip);
  __m256i of[N][4];  // of four columns: k 0 and 1, k 2 and 3
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m)
    for (int v = 0; v < 4; ++v) of[m][v] = _mm256_setzero_si256();
  for (int quad = 0; quad < quads; ++quad, weights += kCodeRow) {
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
    for (int half = 0; half < 2; ++half) {
      // c0 c1 c4 c5 c2 c3 c6 c7 -> in order
      const __m256i both = _mm256_hadd_epi32(of[m][2 * half], of[m][2 * half + 1]);
      auto* to = reinterpret_cast<uint8_t*>(sums + m * sums_stride) + 32 * half;
      store(to, _mm256_add_epi32(load<__m256i>(to), _mm256_permute4x64_epi64(both, 0xd8)));
    }
}

__attribute__((noinline)) void add_signed_rows(int n, const uint8_t* weights, int quads, const uint8_t* const* x, int32_t flip, i32x16* sums,
                                               int sums_stride) {
  for (int m = 0; m < n; m += kIntegerRows)
    switch (n - m) {
      case 1: add_signed<1>(weights, quads, x + m, flip, sums + m * sums_stride, sums_stride); break;
      case 2: add_signed<2>(weights, quads, x + m, flip, sums + m * sums_stride, sums_stride); break;
      default: add_signed<kIntegerRows>(weights, quads, x + m, flip, sums + m * sums_stride, sums_stride);
    }
}

struct Avx2Int8Ops {
  static void dots(int n, int pairs, const Columns& w, int pair, int step, int steps, const Rows& rows, int first, i32x16*,
                   i32x16* sums) {
    const uint8_t* x[kInt8Group];
    for (int m = 0; m < n; ++m) x[m] = rows.codes(first + m) + size_t(step) * kStep;
    std::memset(sums, 0, size_t(2 * pairs * n) * sizeof(i32x16));
    for (int t = 0; t < 2 * pairs; ++t) {
      const uint8_t* weights = w.data + size_t(pair + t / 2) * w.pair_bytes + step * w.step_bytes + t % 2 * 64;
      if (t % 2 == 0)
        for (size_t at = 0; first == 0 && at < steps * w.step_bytes; at += 64) __builtin_prefetch(weights + w.prefetch + at);
      add_signed_rows(n, weights, steps * kQuadsOf32, x, int32_t(0x80808080u), sums + t, 2 * pairs);
    }
  }
};

struct Avx2Int8PartOps {
  static constexpr int kGroup = 8;
  static constexpr bool kUnsigned = false;

  static void dots(const uint8_t* panel, int quads, const Rows& rows, int first, int n, size_t offset, i32x16* sums) {
    const uint8_t* x[kGroup];
    for (int m = 0; m < n; ++m) x[m] = rows.codes(first + m) + offset;
    for (int tile = 0; tile < 2; ++tile) add_signed_rows(n, panel + tile * 64, quads, x, 0, sums + tile, 2);
  }
};

struct Avx2Int4PartOps {
  static constexpr int kGroup = 9;
  static constexpr bool kUnsigned = true;

  // 32 k at a time.
  template <int N>
  static inline __attribute__((always_inline)) void add(const uint8_t* panel, int quads, const uint8_t* const* x, i32x16* sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    auto* to = reinterpret_cast<uint8_t*>(sums);
    for (int quad = 0; quad < quads; quad += kQuadsOf32) {
      __m256i of[N][4];
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < 4; ++v) of[m][v] = _mm256_setzero_si256();
      for (int q = quad; q < quad + kQuadsOf32; ++q, panel += kCodeRow) {
        __m256i codes[N];
        for (int m = 0; m < N; ++m) codes[m] = _mm256_set1_epi32(load<int32_t>(x[m] + 4 * q));
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const __m256i weights = load<__m256i>(panel + 32 * v);
          for (int m = 0; m < N; ++m) of[m][v] = _mm256_add_epi16(of[m][v], _mm256_maddubs_epi16(weights, codes[m]));
        }
      }
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < 4; ++v) {
          uint8_t* at = to + m * 2 * sizeof(i32x16) + 32 * v;
          store(at, _mm256_add_epi32(load<__m256i>(at), _mm256_madd_epi16(of[m][v], ones)));
        }
    }
  }

  __attribute__((noinline)) static void dots(const uint8_t* panel, int quads, const Rows& rows, int first, int n, size_t offset, i32x16* sums) {
    const uint8_t* x[kGroup];
    for (int m = 0; m < n; ++m) x[m] = rows.codes(first + m) + offset;
    for (int m = 0; m < n; m += kIntegerRows)
      switch (n - m) {
        case 1: add<1>(panel, quads, x + m, sums + 2 * m); break;
        case 2: add<2>(panel, quads, x + m, sums + 2 * m); break;
        default: add<kIntegerRows>(panel, quads, x + m, sums + 2 * m);
      }
  }
};

void multiply_int8_parts_avx2(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (w.format == kInt8Groups) multiply_int8_parts<Avx2Int8PartOps>(w, rows, scratch, totals);
  else multiply_int8_parts<Avx2Int4PartOps>(w, rows, scratch, totals);
}

}  // namespace
}  // namespace moe_mk
