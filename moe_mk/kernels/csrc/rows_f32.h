// bf16 rows times packed FP8, MXFP8 and bf16 as f32, for AVX2 + FMA + F16C and for AVX-512 without BF16; rows_int16.h has the
// formats of integers.
//
// Rows are widened to f32 once a task. A vector holds both parities of four or eight columns, as the packed bytes have them, so
// that a broadcast of two neighbouring x serves it without a shuffle: the sums of even and of odd k are separate chains, added
// when a part of k ends.
//   total = fma(sum of the part, scale of the part * scale of the row, total)
// A part is a scale block, at most 128 k, or a group of 32 k of MXFP8: no weight is rounded.
// Up to kDirectRows rows, weights are decoded in registers; more rows are multiplied with an f32 panel of 128 k of one pair
// (16 KiB, in the L1), kPanelGroup at a time. Each total is one chain over k in the same order in both: the same bits for any
// number of rows, pairs and threads.
// Reads packed weights once, rows once a task. Writes totals [pair][row][32]. Any alignment.
#pragma once
#include "int8_parts.h"
#include "lanes.h"

namespace moe_mk {
namespace {

constexpr int kDirectRows = 4;
constexpr int kPanelGroup = kIsWide ? 6 : 3;  // rows times a panel: with four groups 24 or 12 chains, which hide the latency of multiply-adds
constexpr int kLastGroup = kIsWide ? 6 : 4;   // up to this many remaining rows are multiplied together
constexpr int kPrefetchGroups = kIsWide ? 1 : 4;  // groups of rows that each prefetch a share of the next unit
constexpr int kPairLanes = 2 * kPairColumns;      // floats of a k pair in a panel
constexpr int kMostScaledParts = 2 * kUnitSteps;  // of a unit of kUnitSteps steps, the k of a panel

// Groups of columns that so many rows are multiplied with at a time, so that all sums stay in registers.
constexpr int groups_of_rows(int rows) { return kIsWide ? kGroups : rows == 1 ? 8 : rows == 2 ? 4 : 2; }

// Decoding policies for two neighbouring groups, kGroupBytes each, which hold kRows k pairs: get<r>(at) returns one of the two vectors
// of k pair r: of a group each with 512 bits, of the first and of the second halves of both groups with 256.
// kSumScale: sums are multiplied by it.

constexpr float kF16BiasScale = 256.0f;  // 2^(15 - 7): the bits of e4m3, shifted into an f16, are read with the exponent bias of f16

#if defined(__AVX512F__)

struct Fp8Codes {
  static constexpr int kRows = 2;
  static constexpr float kSumScale = kF16BiasScale;
  Integers halves[2];  // of a k pair; subnormal codes are subnormal f16

  inline __attribute__((always_inline)) explicit Fp8Codes(const uint8_t* from) {
    const Integers line = load<Integers>(from), codes[2] = {lower_bytes_up(line), upper_bytes_up(line)};
    for (int r = 0; r < 2; ++r) halves[r] = right16_signed(codes[r], 1) & all16(0xbf80);  // all bits but 14
  }
  template <int R>
  inline __attribute__((always_inline)) Floats get(int at) const {
    return halves_to_floats(at == 0 ? lower(halves[R]) : upper(halves[R]));
  }
};

struct Bf16Codes {
  static constexpr int kRows = 1;
  static constexpr float kSumScale = 1.0f;
  HalfIntegers groups[2];

  inline __attribute__((always_inline)) explicit Bf16Codes(const uint8_t* from)
      : groups{load<HalfIntegers>(from), load<HalfIntegers>(from + kGroupBytes)} {}
  template <int R>
  inline __attribute__((always_inline)) Floats get(int at) const {
    return bf16_to_floats(groups[at]);
  }
};

#else

// The two bytes of the bf16 of a code: the upper one is a table of the code's upper four bits, the lower one holds its lower four. This
// is right for zeros, and from 2^-5 on; lines with other codes look them up in two tables of their lower four bits.
struct Fp8Codes {
  static constexpr int kRows = 2;
  static constexpr float kSumScale = 1.0f;
  Integers halves[2];  // of a k pair

  inline __attribute__((always_inline)) explicit Fp8Codes(const uint8_t* from) {
    const Integers upper = repeated(_mm_setr_epi8(0, 61, 62, 63, 64, 65, 66, 67, -128, -67, -66, -65, -64, -63, -62, -61));
    const Integers line = load<Integers>(from), nibbles = line & all16(0x0f0f);
    Integers high = shuffled(upper, right16(line, 4) & all16(0x0f0f)), low = left16(nibbles, 4);
    const Integers tiny = _mm256_cmpeq_epi8(_mm256_add_epi8(high, high), Integers{});
    if (__builtin_expect(!_mm256_testz_si256(tiny, low), 0)) {
      const Integers tiny_high = repeated(_mm_setr_epi8(0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60));
      const Integers tiny_low = repeated(_mm_setr_epi8(0, 0, -128, -64, 0, 32, 64, 96, -128, -112, -96, -80, -64, -48, -32, -16));
      high |= shuffled(tiny_high, nibbles) & tiny;
      low = _mm256_blendv_epi8(low, shuffled(tiny_low, nibbles), tiny);
    }
    halves[0] = _mm256_unpacklo_epi8(low, high);
    halves[1] = _mm256_unpackhi_epi8(low, high);
  }
  template <int R>
  inline __attribute__((always_inline)) Floats get(int at) const {
    return at == 0 ? lower_bf16_to_floats(halves[R]) : upper_bf16_to_floats(halves[R]);
  }
};

struct Bf16Codes {
  static constexpr int kRows = 1;
  static constexpr float kSumScale = 1.0f;
  Integers line;

  inline __attribute__((always_inline)) explicit Bf16Codes(const uint8_t* from) : line(load<Integers>(from)) {}
  template <int R>
  inline __attribute__((always_inline)) Floats get(int at) const {
    return at == 0 ? lower_bf16_to_floats(line) : upper_bf16_to_floats(line);
  }
};

#endif

// kLanes byte scales of groups (apply_scales.h), as f32: e4m3 of kNvFp4, powers of two of the others.
inline __attribute__((always_inline)) Floats group_scales_of(int format, const uint8_t* from) {
  Integers exponents;
  HalfIntegers halves;
#if defined(__AVX512F__)
  const __m128i codes = load<__m128i>(from);
  exponents = _mm512_max_epu32(left32(_mm512_cvtepu8_epi32(codes), 23), all32(0x00400000));  // code 0: 2^-127
  halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(short(0xbf80)));
#else
  const __m128i codes = _mm_cvtsi64_si128(load<int64_t>(from));
  exponents = _mm256_max_epu32(left32(_mm256_cvtepu8_epi32(codes), 23), all32(0x00400000));
  halves = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(short(0xbf80)));
#endif
  return format == kNvFp4 ? halves_to_floats(halves) * all(kF16BiasScale) : bits<Floats>(exponents);
}

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
      for (int at = 0; at < num_parts * kPairColumns; at += kLanes) store(scale_of + at, group_scales_of(w.format, from + at));
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
  float* totals;              // [row][32]
};

// Sums of a part: N rows times G groups of columns from `first` on. Adds them to the totals, which are stored at the end: a store might
// alias what is read here.
template <int N, int G>
inline __attribute__((always_inline)) void close_part(const Floats (&sums)[N][G], int first, int part, float sum_scale, const UnitParts& parts,
                                                      const UnitRows& rows) {
  constexpr int kColumns = kLanes / 2;  // of a group
  const float* scales = parts.scales + part * kPairColumns + kColumns * first;
  float* totals = rows.totals + kColumns * first;
  float of_row[N];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) of_row[m] = rows.scales == nullptr ? sum_scale : sum_scale * rows.scales[m][rows.block];
  Floats after[N][G / 2];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int g = 0; g < G; g += 2) {
      const Floats factor = load<Floats>(scales + kColumns * g) * all(of_row[m]);
      after[m][g / 2] = times_plus(sums_of_columns(sums[m][g], sums[m][g + 1]), factor, load<Floats>(totals + m * kPairColumns + kColumns * g));
    }
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
    for (int g = 0; g < G; g += 2) store(totals + m * kPairColumns + kColumns * g, after[m][g / 2]);
}

template <int R, typename Policy, int N, int G>
inline __attribute__((always_inline)) void add_row(const Policy& weights, int g, const float* x, size_t stride, Floats (&sums)[N][G]) {
  const Floats w0 = weights.template get<R>(0), w1 = weights.template get<R>(1);
#pragma GCC unroll 4
  for (int m = 0; m < N; ++m) {
    const Floats two = both_parities(x + m * stride + 2 * R);
    sums[m][g] = times_plus(w0, two, sums[m][g]);
    sums[m][g + 1] = times_plus(w1, two, sums[m][g + 1]);
  }
}

// One unit of N rows straight from the packed bytes, G groups of columns at a time. What is prefetched is spread over all of them, so that
// requests to memory never pause.
template <typename Policy, int N, int G>
__attribute__((noinline)) void multiply_direct(const uint8_t* packed, int ahead, int num_pairs, const UnitParts& parts, const UnitRows& rows) {
  constexpr int kRows = Policy::kRows, kPasses = kGroups / G;
  const size_t unit_bytes = size_t(num_pairs / kRows) * kPanelRow;
  const uint8_t* next = packed + (kPasses == 1 ? size_t(ahead) : prefetch_bytes(ahead, unit_bytes));
  for (int first = 0; first < kGroups; first += G)
    for (int part = 0; part < parts.num_parts; ++part) {
      const int from = part * parts.pairs, end = from + parts.pairs < num_pairs ? from + parts.pairs : num_pairs;
      const uint8_t* line = packed + size_t(from / kRows) * kPanelRow + kGroupBytes * first;
      const float* x = rows.x + 2 * from;
      Floats sums[N][G];
      for (int m = 0; m < N; ++m)
        for (int g = 0; g < G; ++g) sums[m][g] = Floats{};
      for (int at = from; at < end; at += kRows, line += kPanelRow, x += 2 * kRows) {
        _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
        if constexpr (kPasses == 1) _mm_prefetch(reinterpret_cast<const char*>(next + 64), _MM_HINT_T0);
        next += kPanelRow / kPasses;
#pragma GCC unroll 4
        for (int g = 0; g < G; g += 2) {
          const Policy weights(line + kGroupBytes * g);
          add_row<0>(weights, g, x, rows.stride, sums);
          if constexpr (kRows > 1) add_row<1>(weights, g, x, rows.stride, sums);
        }
      }
      close_part(sums, first, part, Policy::kSumScale, parts, rows);
    }
}

// The same from a panel. next: packed weights to prefetch meanwhile, `pair_bytes` for each k pair, at most Lines cache lines; 0: none.
template <int N, int G, int Lines>
__attribute__((noinline)) void multiply_panel(const float* panel, int num_pairs, float sum_scale, const UnitParts& parts, const UnitRows& rows,
                                              const uint8_t* next, size_t pair_bytes) {
  for (int first = 0; first < kGroups; first += G)
    for (int part = 0; part < parts.num_parts; ++part) {
      const int from = part * parts.pairs, end = from + parts.pairs < num_pairs ? from + parts.pairs : num_pairs;
      const float *w = panel + from * kPairLanes + kLanes * first, *x = rows.x + 2 * from;
      Floats sums[N][G];
      for (int m = 0; m < N; ++m)
        for (int g = 0; g < G; ++g) sums[m][g] = Floats{};
#pragma GCC unroll 2
      for (int at = from; at < end; ++at, w += kPairLanes, x += 2) {
        if constexpr (Lines > 0) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
        if constexpr (Lines > 1 && G == kGroups) _mm_prefetch(reinterpret_cast<const char*>(next + 64), _MM_HINT_T0);
        next += pair_bytes / (kGroups / G);
        Floats two[N];
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m) two[m] = both_parities(x + m * rows.stride);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
          const Floats weights = load<Floats>(w + kLanes * g);
#pragma GCC unroll 8
          for (int m = 0; m < N; ++m) sums[m][g] = times_plus(weights, two[m], sums[m][g]);
        }
      }
      close_part(sums, first, part, sum_scale, parts, rows);
    }
}

template <int R, typename Policy>
inline __attribute__((always_inline)) void store_row(const Policy& weights, float* to) {
  store(to + R * kPairLanes, weights.template get<R>(0));
  store(to + R * kPairLanes + kLanes, weights.template get<R>(1));
}

// Some steps of a pair -> panel [k pair][tile][16 columns][2].
template <typename Policy>
void expand_f32(const uint8_t* packed, int num_pairs, float* panel) {
  constexpr int kRows = Policy::kRows;
  for (int at = 0; at < num_pairs; at += kRows, packed += kPanelRow, panel += kRows * kPairLanes) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g += 2) {
      const Policy weights(packed + kGroupBytes * g);
      store_row<0>(weights, panel + kLanes * g);
      if constexpr (kRows > 1) store_row<1>(weights, panel + kLanes * g);
    }
  }
}

// Unit by unit of each pair: each(packed, steps, parts, rows of the unit).
template <typename Each>
void each_unit(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals, Each each) {
  const int unit = w.steps_per_block, n = rows.num_rows, chunk = steps_that_fit(w.gather_bytes / 2, n, 1, unit);
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
    }
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int s = 0; s < chunk_steps; s += unit) {
        const int steps = chunk_steps - s < unit ? chunk_steps - s : unit, step = step0 + s;
        parts.load_of(w, pair, step, steps);
        const UnitRows of_unit = {x + size_t(s) * kStep * n, width, rows.scales, step * kStep / kActivationBlock,
                                  totals + size_t(pair) * n * kPairColumns};
        each(w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes, steps, parts, of_unit);
      }
  }
}

template <int Lines, int N = kLastGroup, typename... Arguments>
void multiply_group(int rows, Arguments&&... given) {
  if constexpr (N > 1) {
    if (rows < N) return multiply_group<Lines, N - 1>(rows, given...);
  }
  constexpr int kTogether = N == 1 ? kGroups : N > kPanelGroup ? 2 : 4;  // groups of columns
  multiply_panel<N, kTogether, Lines>(given...);
}

template <typename Policy>
void multiply_many_as(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  float* panel = reinterpret_cast<float*>(scratch.panel);
  constexpr int kLines = kPanelRow / 64 / Policy::kRows;  // of a k pair
  const int row_groups = (rows.num_rows + kPanelGroup - 1) / kPanelGroup, shares = row_groups < kPrefetchGroups ? row_groups : kPrefetchGroups;
  const size_t pair_bytes = w.step_bytes / (kStep / 2) / size_t(shares);
  each_unit(w, rows, scratch, totals, [&](const uint8_t* packed, int steps, const UnitParts& parts, UnitRows group) {
    const int num_pairs = steps * (kStep / 2);
    const size_t unit_bytes = steps * w.step_bytes;
    const uint8_t* next = packed + prefetch_bytes(w.prefetch, unit_bytes);
    expand_f32<Policy>(packed, num_pairs, panel);
    for (int row = 0, share = 0, some; row < rows.num_rows; row += some, ++share, next += unit_bytes / size_t(shares)) {
      const int left = rows.num_rows - row;
      some = left <= kLastGroup ? left : kPanelGroup;
      if (share < shares) multiply_group<kLines>(some, panel, num_pairs, Policy::kSumScale, parts, group, next, pair_bytes);
      else multiply_group<0>(some, panel, num_pairs, Policy::kSumScale, parts, group, next, pair_bytes);
      group.x += some * group.stride;
      group.totals += some * kPairColumns;
      if (group.scales != nullptr) group.scales += some;
    }
  });
}

template <typename Policy>
void multiply_few_as(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  each_unit(w, rows, scratch, totals, [&](const uint8_t* packed, int steps, const UnitParts& parts, const UnitRows& some) {
    const int num_pairs = steps * (kStep / 2);
    switch (rows.num_rows) {
      case 1: multiply_direct<Policy, 1, groups_of_rows(1)>(packed, w.prefetch, num_pairs, parts, some); break;
      case 2: multiply_direct<Policy, 2, groups_of_rows(2)>(packed, w.prefetch, num_pairs, parts, some); break;
      case 3: multiply_direct<Policy, 3, groups_of_rows(3)>(packed, w.prefetch, num_pairs, parts, some); break;
      default: multiply_direct<Policy, kDirectRows, groups_of_rows(kDirectRows)>(packed, w.prefetch, num_pairs, parts, some);
    }
  });
}

template <typename Policy, bool Direct>
void multiply_f32(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if constexpr (Direct) multiply_few_as<Policy>(w, rows, scratch, totals);
  else multiply_many_as<Policy>(w, rows, scratch, totals);
}

}  // namespace
}  // namespace moe_mk
