// bf16 rows times packed weights for AVX2 + FMA + F16C.
//
// Rows are widened to f32 once a task. A vector holds both parities of four columns, as the packed bytes have them, so that a
// broadcast of two neighbouring x serves it without a shuffle: the sums of even and of odd k are separate chains, added
// when a part of k ends.
//   total = fma(sum of the part, scale of the part * scale of the row, total), then - minimum * sum of x (part_scales.h)
// A part is a scale block, at most 128 k, or a group of k of the formats with scales of groups: no weight is rounded.
// Up to kDirectRows rows, weights are decoded in registers; more rows are multiplied with an f32 panel of 128 k of one pair
// (16 KiB, in the L1), three at a time. Each total is one chain over k in the same order in both: the same bits for any
// number of rows, pairs and threads.
// Reads packed weights once, rows once a task. Writes totals [pair][row][32]. Any alignment.
#pragma once
#include <immintrin.h>

#include "int8_parts.h"

namespace moe_mk {
namespace {

constexpr int kDirectRows = 4;
constexpr int kPanelGroup = 3;               // rows times a panel: 12 chains, which hide the latency of multiply-adds
constexpr int kGroups = 8;                   // vectors of a k pair: four columns and both parities each
constexpr int kPairLanes = 2 * kPairColumns; // floats of a k pair in a panel
constexpr int kMostScaledParts = 2 * kUnitSteps;  // of a unit of kUnitSteps steps, the k of a panel

// Decoding policies for two neighbouring groups of columns, 16 bytes each, which hold kRows k pairs: get<r>(group) returns k pair r.
// kUnscaled: the factor that sums are multiplied by afterwards.

// Codes become f16 with an exponent that is 8 too small; subnormal codes become subnormal f16.
struct DirectFp8 {
  static constexpr int kRows = 2;
  static constexpr float kUnscaled = 256.0f;
  __m256i halves[2];

  inline __attribute__((always_inline)) explicit DirectFp8(const uint8_t* from) {
    const __m256i all_but_bit_6 = _mm256_set1_epi16(short(0xbf80));
    for (int i = 0; i < 2; ++i)
      halves[i] = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from + 16 * i)), 7), all_but_bit_6);
  }
  template <int R>
  inline __attribute__((always_inline)) __m256 get(int group) const {
    return _mm256_cvtph_ps(R == 0 ? _mm256_castsi256_si128(halves[group]) : _mm256_extracti128_si256(halves[group], 1));
  }
};

struct DirectBf16 {
  static constexpr int kRows = 1;
  static constexpr float kUnscaled = 1.0f;
  __m128i halves[2];

  inline __attribute__((always_inline)) explicit DirectBf16(const uint8_t* from) : halves{load<__m128i>(from), load<__m128i>(from + 16)} {}
  template <int R>
  inline __attribute__((always_inline)) __m256 get(int group) const {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[group]), 16));
  }
};

// A word holds four k of a column.
struct DirectInt8 {
  static constexpr int kRows = 2;
  static constexpr float kUnscaled = 1.0f;
  __m128i codes[2];

  inline __attribute__((always_inline)) explicit DirectInt8(const uint8_t* from) {
    const __m128i halves = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    for (int i = 0; i < 2; ++i) codes[i] = _mm_shuffle_epi8(load<__m128i>(from + 16 * i), halves);
  }
  template <int R>
  inline __attribute__((always_inline)) __m256 get(int group) const {
    const __m128i eight = R == 0 ? codes[group] : _mm_unpackhi_epi64(codes[group], codes[group]);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
  }
};

// Sixteen bits hold the codes of one column and parity of four k pairs. The low byte of e2m1 values as halves is 0.
struct DirectE2m1 {
  static constexpr int kRows = 4;
  static constexpr float kUnscaled = 1.0f;
  __m256i codes;

  inline __attribute__((always_inline)) explicit DirectE2m1(const uint8_t* from) : codes(load<__m256i>(from)) {}
  template <int R>
  inline __attribute__((always_inline)) __m256i halves() const {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, char(0x80), char(0xb8),
                                                                    char(0xbc), char(0xbe), char(0xc0), char(0xc2), char(0xc4), char(0xc6)));
    const __m256i index = R < 2 ? _mm256_slli_epi16(codes, 8 - 4 * R) : R == 2 ? codes : _mm256_srli_epi16(codes, 4);
    return _mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi16(0x0f00)));
  }
  template <int R>
  inline __attribute__((always_inline)) __m256 get(int group) const {
    return _mm256_cvtph_ps(group == 0 ? _mm256_castsi256_si128(halves<R>()) : _mm256_extracti128_si256(halves<R>(), 1));
  }
};

// Codes of 16 bits, two groups of columns, less Base -> f32. In the mantissa of 2^23 an integer is exact without a conversion.
template <int Base>
inline __attribute__((always_inline)) __m256 from_codes(__m256i codes, int group) {
  const __m128i eight = group == 0 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
  const __m256i bits = _mm256_or_si256(_mm256_cvtepu16_epi32(eight), _mm256_set1_epi32(0x4b000000));
  return _mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(8388608.0f + Base));
}

// Integers of the same layout, less Base.
template <int Base>
struct DirectInt4 {
  static constexpr int kRows = 4;
  static constexpr float kUnscaled = 1.0f;
  __m256i codes;

  inline __attribute__((always_inline)) explicit DirectInt4(const uint8_t* from) : codes(load<__m256i>(from)) {}
  template <int R>
  inline __attribute__((always_inline)) __m256 get(int group) const {
    return from_codes<Base>(_mm256_and_si256(_mm256_srli_epi16(codes, 4 * R), _mm256_set1_epi16(15)), group);
  }
};

// Scales of the parts of one unit of k of a pair.
struct UnitParts {
  int num_parts, pairs;         // k pairs of a part; the last may have fewer
  const float *scales, *minima; // [part][32]; minima null: none
  alignas(64) float scale_of[kMostScaledParts * kPairColumns], minimum_of[kMostScaledParts * kPairColumns];

  void load_of(const Columns& w, int pair, int step, int steps) {
    scales = scale_of;
    minima = w.minima ? minimum_of : nullptr;
    if (has_parts(w.format)) {
      pairs = w.part_pairs;
      num_parts = part_scales(w, pair, step, steps, scale_of, minimum_of);
    } else if (w.groups != nullptr) {
      const int groups = groups_of_step(w.format);
      const uint8_t* from = group_scales(w, pair, step);
      pairs = kStep / 2 / groups;
      num_parts = steps * groups;
      for (int at = 0; at < num_parts * kPairColumns; at += kTileColumns) store(scale_of + at, group_scales16(w.format, from + at));
    } else {
      pairs = steps * (kStep / 2);
      num_parts = 1;
      for (int tile = 0; tile < 2; ++tile) {
        const float* of_blocks = tile_scales(w, pair, tile);
        store(scale_of + tile * kTileColumns, splat(of_blocks == nullptr ? 1.0f : of_blocks[step / w.steps_per_block]));
      }
    }
  }
};

// Some rows, and what a unit needs of them.
struct UnitRows {
  const float* x;             // of the unit, f32
  size_t stride;              // floats from one row to the next
  const float* const* scales; // of rows; null: 1
  int block;                  // of the scales
  const float* sums;          // of x over the parts of the unit, [row][sums_stride]; of formats with minima
  size_t sums_stride;
  float* totals;              // [row][32]
};

// Sums of a part: N rows times G groups of columns from `first` on. Adds them to the totals.
template <int N, int G>
inline __attribute__((always_inline)) void close_part(const __m256 (&sums)[N][G], int first, int part, float unscaled, const UnitParts& parts,
                                                      const UnitRows& rows) {
  const float *scales = parts.scales + part * kPairColumns + 4 * first, *minima = parts.minima;
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m) {
    const float row = rows.scales == nullptr ? 1.0f : rows.scales[m][rows.block];
    float* to = rows.totals + m * kPairColumns + 4 * first;
#pragma GCC unroll 4
    for (int g = 0; g < G; g += 2) {
      // c0 c1 c4 c5 c2 c3 c6 c7 -> in order
      const __m256d both = _mm256_castps_pd(_mm256_hadd_ps(sums[m][g], sums[m][g + 1]));
      __m256 sum = _mm256_castpd_ps(_mm256_permute4x64_pd(both, 0xd8));
      if (unscaled != 1.0f) sum = _mm256_mul_ps(sum, _mm256_set1_ps(unscaled));
      const __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(scales + 4 * g), _mm256_set1_ps(row));
      __m256 total = _mm256_fmadd_ps(sum, factor, _mm256_loadu_ps(to + 4 * g));
      if (minima != nullptr) {
        const __m256 x_sum = _mm256_set1_ps(rows.sums[m * rows.sums_stride + part] * row);
        total = _mm256_fnmadd_ps(_mm256_loadu_ps(minima + part * kPairColumns + 4 * (first + g)), x_sum, total);
      }
      _mm256_storeu_ps(to + 4 * g, total);
    }
  }
}

inline __attribute__((always_inline)) __m256 both_parities(const float* x) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(x)));
}

template <int R, typename Policy, int N, int G>
inline __attribute__((always_inline)) void add_row(const Policy& weights, int g, const float* x, size_t stride, __m256 (&sums)[N][G]) {
  const __m256 w0 = weights.template get<R>(0), w1 = weights.template get<R>(1);
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m) {
    const __m256 two = both_parities(x + m * stride + 2 * R);
    sums[m][g] = _mm256_fmadd_ps(w0, two, sums[m][g]);
    sums[m][g + 1] = _mm256_fmadd_ps(w1, two, sums[m][g + 1]);
  }
}

// One unit of N rows straight from the packed bytes, G groups of columns at a time.
template <typename Policy, int N, int G>
__attribute__((noinline)) void multiply_direct(const uint8_t* packed, int ahead, int num_pairs, const UnitParts& parts, const UnitRows& rows) {
  constexpr int kRows = Policy::kRows;
  for (int first = 0; first < kGroups; first += G)
    for (int part = 0; part < parts.num_parts; ++part) {
      const int from = part * parts.pairs, end = from + parts.pairs < num_pairs ? from + parts.pairs : num_pairs;
      const uint8_t* line = packed + size_t(from / kRows) * kPanelRow + 16 * first;
      const float* x = rows.x + 2 * from;
      __m256 sums[N][G];
      for (int m = 0; m < N; ++m)
        for (int g = 0; g < G; ++g) sums[m][g] = _mm256_setzero_ps();
      for (int at = from; at < end; at += kRows, line += kPanelRow, x += 2 * kRows) {
        if (first == 0) {
          _mm_prefetch(reinterpret_cast<const char*>(line + ahead), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(line + ahead + 64), _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g += 2) {
          const Policy weights(line + 16 * g);
          add_row<0>(weights, g, x, rows.stride, sums);
          if constexpr (kRows > 1) add_row<1>(weights, g, x, rows.stride, sums);
          if constexpr (kRows > 2) {
            add_row<2>(weights, g, x, rows.stride, sums);
            add_row<3>(weights, g, x, rows.stride, sums);
          }
        }
      }
      close_part(sums, first, part, Policy::kUnscaled, parts, rows);
    }
}

// The same from a panel. next: packed weights to prefetch meanwhile, `pair_bytes` (Lines cache lines) a k pair: their requests to
// memory are spread over the products, and decoding does not wait for them.
template <int N, int G, int Lines>
__attribute__((noinline)) void multiply_panel(const float* panel, int num_pairs, float unscaled, const UnitParts& parts, const UnitRows& rows,
                                              const uint8_t* next, size_t pair_bytes) {
  for (int first = 0; first < kGroups; first += G)
    for (int part = 0; part < parts.num_parts; ++part) {
      const int from = part * parts.pairs, end = from + parts.pairs < num_pairs ? from + parts.pairs : num_pairs;
      const float *w = panel + from * kPairLanes + 8 * first, *x = rows.x + 2 * from;
      __m256 sums[N][G];
      for (int m = 0; m < N; ++m)
        for (int g = 0; g < G; ++g) sums[m][g] = _mm256_setzero_ps();
#pragma GCC unroll 2
      for (int at = from; at < end; ++at, w += kPairLanes, x += 2) {
        for (int line = 0; line < Lines; ++line) _mm_prefetch(reinterpret_cast<const char*>(next + at * pair_bytes + line * 64), _MM_HINT_T0);
        __m256 two[N];
        for (int m = 0; m < N; ++m) two[m] = both_parities(x + m * rows.stride);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
          const __m256 weights = _mm256_loadu_ps(w + 8 * g);
          for (int m = 0; m < N; ++m) sums[m][g] = _mm256_fmadd_ps(weights, two[m], sums[m][g]);
        }
      }
      close_part(sums, first, part, unscaled, parts, rows);
    }
}

template <int R, typename Policy>
inline __attribute__((always_inline)) void store_row(const Policy& weights, float* to) {
  _mm256_storeu_ps(to + R * kPairLanes, weights.template get<R>(0));
  _mm256_storeu_ps(to + R * kPairLanes + 8, weights.template get<R>(1));
}

// Some steps of a pair -> panel [k pair][tile][16 columns][2].
template <typename Policy>
void expand_f32(const uint8_t* packed, int num_pairs, float* panel) {
  constexpr int kRows = Policy::kRows;
  for (int at = 0; at < num_pairs; at += kRows, packed += kPanelRow, panel += kRows * kPairLanes) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g += 2) {
      const Policy weights(packed + 16 * g);
      store_row<0>(weights, panel + 8 * g);
      if constexpr (kRows > 1) store_row<1>(weights, panel + 8 * g);
      if constexpr (kRows > 2) {
        store_row<2>(weights, panel + 8 * g);
        store_row<3>(weights, panel + 8 * g);
      }
    }
  }
}

// The same for codes in pieces, of five and six bits.
template <int Format>
void expand_pieces(const Columns& w, const uint8_t* packed, int steps, float* panel) {
  for (int s = 0; s < steps; ++s, packed += w.step_bytes, panel += kStep / 2 * kPairLanes) {
    for (int v = 0; v < kGroups / 2; ++v)
#pragma GCC unroll 16
      for (int r = 0; r < kStep / 2; ++r) {
        __m256i codes = _mm256_setzero_si256();
        each_piece(Format, r, [&](const Piece& piece) __attribute__((always_inline)) {
          const __m256i lane = _mm256_srli_epi16(load<__m256i>(packed + piece.line * kPanelRow + 32 * v), piece.lane_bit);
          const __m256i bits = _mm256_and_si256(lane, _mm256_set1_epi16(short((1 << piece.width) - 1)));
          codes = _mm256_or_si256(codes, _mm256_slli_epi16(bits, piece.code_bit));
        });
        for (int group = 0; group < 2; ++group)
          _mm256_storeu_ps(panel + r * kPairLanes + 16 * v + 8 * group, from_codes<Format == kQ6K ? 32 : 0>(codes, group));
      }
  }
}

template <typename Policy>
struct Chosen {
  using type = Policy;
};

// Calls use(Chosen<policy>) with the decoding policy of a format; false: it has none.
template <typename Use>
bool with_policy(const Columns& w, Use use) {
  switch (w.format) {
    case kFp8:
    case kMxFp8: use(Chosen<DirectFp8>{}); return true;
    case kBf16: use(Chosen<DirectBf16>{}); return true;
    case kInt8:
    case kInt8Groups: use(Chosen<DirectInt8>{}); return true;
    case kMxFp4:
    case kNvFp4: use(Chosen<DirectE2m1>{}); return true;
    case kInt4:
    case kQ4K:
      if (w.minima) use(Chosen<DirectInt4<0>>{});
      else use(Chosen<DirectInt4<8>>{});
      return true;
    default: return false;
  }
}

// Unit by unit of each pair: each(pair, packed, steps, parts, rows of the unit).
template <typename Each>
void each_unit(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals, Each each) {
  const int unit = has_parts(w.format) ? kUnitSteps : w.steps_per_block, n = rows.num_rows;
  const int chunk = steps_that_fit(w.gather_bytes / 2, n, 1, unit);
  float* x = reinterpret_cast<float*>(scratch.gathered);
  UnitParts parts;
  std::memset(totals, 0, size_t(w.num_pairs) * n * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int chunk_steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
    // [unit][row][k of a unit]: the rows of a unit are one stream.
    const size_t width = size_t(unit) * kStep;
    for (int r = 0; r < n; ++r) {
      const uint16_t* from = rows.bf16(r) + size_t(step0) * kStep;
      float* to = x + r * width;
      for (int s = 0; r + 4 < n && s < chunk_steps; ++s) __builtin_prefetch(rows.bf16(r + 4) + size_t(step0 + s) * kStep);
      for (size_t k = 0; k < size_t(chunk_steps) * kStep; k += kStep) {
        float* of_step = to + k / width * n * width + k % width;
        store(of_step, widen(from + k));
        store(of_step + kTileColumns, widen(from + k + kTileColumns));
      }
      if (w.minima)
        part_sums(w, reinterpret_cast<const uint8_t*>(from), kRowBytes, chunk_steps, scratch.sums + size_t(r) * chunk_steps);
    }
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int s = 0; s < chunk_steps; s += unit) {
        const int steps = chunk_steps - s < unit ? chunk_steps - s : unit, step = step0 + s;
        parts.load_of(w, pair, step, steps);
        const float* sums = w.minima ? scratch.sums + s * (kStep / 2) / w.part_pairs : nullptr;
        const UnitRows of_unit = {x + size_t(s) * kStep * n, width, rows.scales, step * kStep / kActivationBlock, sums,
                                  size_t(chunk_steps), totals + size_t(pair) * n * kPairColumns};
        each(pair, w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes, steps, parts, of_unit);
      }
  }
}

// At most kPanelGroup of `left` rows.
template <int Lines, typename... Arguments>
void multiply_group(int left, Arguments&&... given) {
  switch (left) {
    case 1: return multiply_panel<1, 8, Lines>(given...);
    case 2: return multiply_panel<2, 4, Lines>(given...);
    default: return multiply_panel<kPanelGroup, 4, Lines>(given...);
  }
}

void multiply_many_avx2(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  float* panel = reinterpret_cast<float*>(scratch.panel);
  each_unit(w, rows, scratch, totals, [&](int, const uint8_t* packed, int steps, const UnitParts& parts, UnitRows some) {
    const int num_pairs = steps * (kStep / 2);
    const size_t unit_bytes = steps * w.step_bytes, pair_bytes = w.step_bytes / (kStep / 2);
    const uint8_t* next = packed + (size_t(w.prefetch) > unit_bytes ? size_t(w.prefetch) : unit_bytes);
    float unscaled = 1.0f;
    const bool decoded = with_policy(w, [&](auto chosen) {
      using Policy = typename decltype(chosen)::type;
      unscaled = Policy::kUnscaled;
      expand_f32<Policy>(packed, num_pairs, panel);
    });
    if (!decoded) w.format == kQ6K ? expand_pieces<kQ6K>(w, packed, steps, panel) : expand_pieces<kQ5K>(w, packed, steps, panel);
    for (int row = 0; row < rows.num_rows; row += kPanelGroup) {
      UnitRows group = some;
      group.x += row * some.stride;
      group.totals += row * kPairColumns;
      if (group.scales != nullptr) group.scales += row;
      if (group.sums != nullptr) group.sums += row * some.sums_stride;
      if (row != 0) multiply_group<0>(rows.num_rows - row, panel, num_pairs, unscaled, parts, group, next, pair_bytes);
      else if (pair_bytes <= 64) multiply_group<1>(rows.num_rows, panel, num_pairs, unscaled, parts, group, next, pair_bytes);
      else multiply_group<2>(rows.num_rows, panel, num_pairs, unscaled, parts, group, next, pair_bytes);
    }
  });
}

void multiply_few_avx2(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const bool direct = with_policy(w, [&](auto chosen) {
    using Policy = typename decltype(chosen)::type;
    each_unit(w, rows, scratch, totals, [&](int, const uint8_t* packed, int steps, const UnitParts& parts, const UnitRows& some) {
      const int num_pairs = steps * (kStep / 2);
      switch (rows.num_rows) {
        case 1: multiply_direct<Policy, 1, 8>(packed, w.prefetch, num_pairs, parts, some); break;
        case 2: multiply_direct<Policy, 2, 4>(packed, w.prefetch, num_pairs, parts, some); break;
        case 3: multiply_direct<Policy, 3, 2>(packed, w.prefetch, num_pairs, parts, some); break;
        default: multiply_direct<Policy, kDirectRows, 2>(packed, w.prefetch, num_pairs, parts, some);
      }
    });
  });
  if (!direct) multiply_many_avx2(w, rows, scratch, totals);
}

}  // namespace
}  // namespace moe_mk
