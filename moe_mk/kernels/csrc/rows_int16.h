// bf16 rows times integer codes for AVX2 and for AVX-512 without BF16: products of 16-bit integers, twice as many an instruction as
// of f32, and no code is converted.
//
// The inputs of a part become integers, in one term or in several (integers_of_rows.h).
//   total = fma(sum of code * x, exact in 32 bits and rounded to f32, scale of the part * scale of the row, total),
//   then - minimum * sum of x; for such rows the same with each term
// Group scales of MXFP4 and Q4_K are integers times one f32 scale of 128 k. They are applied to int32 sums of a part (few rows) or to the codes
// of a panel, and the sum over 128 k is exact as well; activations have one scale for these 128 k.
// Rows rounded to INT8 (int8.h, int8_parts.h) times eight-bit weights have the same products, as AVX2 multiplies eight bits by eight, exactly,
// no faster than sixteen: VPMADDUBSW takes one unsigned operand, whose sign another instruction moves, and two of its sums fill 16 bits.
// Up to kPackedRows rows are multiplied with the packed bytes, more with panels of 128 k of kPanels pairs in 16 bits (8 KiB each, in the L1),
// kIntegerGroup at a time: 24 sums of 512 bits, as a processor may begin two products a cycle and end them after five. The same bits for
// any number of rows, pairs and threads.
// Reads packed weights once a term, rows once a task. Writes totals [pair][row][32]. Any alignment.
#pragma once
#include <algorithm>
#include <type_traits>

#include "integers_of_rows.h"
#include "rows_f32.h"

namespace moe_mk {
namespace {

constexpr int kUnitInputs = kUnitSteps * kStep;
constexpr int kVectors = kPairColumns / kLanes;   // of kLanes columns and both parities, in a k pair
constexpr int kVectorBytes = sizeof(Integers);
constexpr int kGroupPairs = kStep / 2;           // k pairs of a group
constexpr int kPackedRows = kIsWide ? 8 : 4;      // rows multiplied with packed bytes, at a time
constexpr int kPanels = kIsWide ? 2 : 1;          // column pairs per register tile
constexpr int kIntegerGroup = kIsWide ? 6 : 3;    // rows times panels at most

// What a unit of some rows is multiplied by.
struct IntegerRows {
  int16_t* x;       // [row][128]
  float* scales;    // [part][row]
  float* sums;      // of x, the same
  int32_t* starts;  // of sums of products: codes of weights without minima are greater than their values
  int32_t* loses;   // [row] whether the inputs lose much
  int num_rows;

  IntegerRows from(int row) const { return {x + row * kUnitInputs, scales + row, sums + row, starts + row, loses + row, num_rows}; }
};

// Decoding policies for the packed codes of kLanes columns and kPairs k pairs, kVectorBytes in each of some lines: get<r>(line)
// returns those of k pair r in lanes of 16 bits, of one column and parity each. kSumScale: sums are multiplied by it. kTopBit: of x, so
// that products of 32 k fit 32 bits. kIntScales: whether group scales are integers times one f32 scale of a unit; scale_sums
// and scale_codes apply them.

// Scales of one unit of k of a pair, with integer group scales [part][32] if the policy has them.
struct IntegerParts : UnitParts {
  int num_minima = 0;  // with integer group scales: minima of the unit
  alignas(64) int32_t int_scales[kMostUnitParts * kPairColumns];

  template <typename Policy>
  void load_as(const Columns& w, int pair, int step, int steps) {
    if constexpr (Policy::kIntScales) Policy::read(w, pair, step, steps, *this);
    else load_of(w, pair, step, steps);
  }
};

// Right by `bit`, without the bits above `width`: no instruction more than that takes, as both are known when it is inlined.
inline __attribute__((always_inline)) Integers cut(Integers lanes, int bit, int width) {
  const Integers shifted = bit == 0 ? lanes : right16(lanes, bit);
  return bit + width == 16 ? shifted : shifted & all16((1 << width) - 1);
}

// Codes in one piece or in several, of four to six bits.
template <int Format, int Pairs>
struct Pieces {
  static constexpr int kPairs = Pairs, kTopBit = 14;
  static constexpr float kSumScale = 1.0f;
  static constexpr bool kIntScales = false;

  template <int R>
  static inline __attribute__((always_inline)) Integers get(const uint8_t* line) {
    Integers codes = Integers{};
    each_piece(Format, R, [&](const Piece& piece) __attribute__((always_inline)) {
      const Integers bits = cut(load<Integers>(line + piece.line * kPanelRow), piece.lane_bit, piece.width);
      codes |= piece.code_bit == 0 ? bits : left16(bits, piece.code_bit);
    });
    return codes;
  }
};
using FourBits = Pieces<kInt4, 4>;
using FiveBits = Pieces<kQ5K, kStep / 2>;
using SixBits = Pieces<kQ6K, kStep / 4>;

// 15 * 63 * 128 k * 2^14 < 2^31.
struct Q4K : FourBits {
  static constexpr int kTopBit = 13;
  static constexpr bool kIntScales = true;

  static void read(const Columns& w, int pair, int step, int steps, IntegerParts& to) {
    const uint8_t* from = w.part_scales + size_t(pair) * w.pair_scales + size_t(step / kSuperSteps) * super_bytes(w.format);
    super_scales_with_minima(from, step % kSuperSteps, steps, to.scale_of, to.minimum_of, to.int_scales);
    to.scales = to.scale_of;
    to.minima = nullptr;
    to.num_parts = 1;
    to.num_minima = steps;
    to.pairs = steps * kGroupPairs;
  }
  static inline __attribute__((always_inline)) Integers scale_sums(Integers sums, Integers by) { return bits<Integers>(bits<Sums>(sums) * bits<Sums>(by)); }
  static inline __attribute__((always_inline)) Integers scale_codes(Integers codes, Integers by) {
    return bits<Integers>(bits<Words>(codes) * bits<Words>(by | left32(by, 16)));
  }
};

// Twice the value of an e2m1 code, in the upper byte.
struct TwiceE2m1 {
  static constexpr int kPairs = 4, kTopBit = 13;
  static constexpr float kSumScale = 1.0f / 512;
  static constexpr bool kIntScales = false;

  template <int R>
  static inline __attribute__((always_inline)) Integers get(const uint8_t* line) {
    const Integers table = repeated(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const Integers all_four = load<Integers>(line), halves = R % 2 == 0 ? all_four : right16(all_four, 4);
    const Integers values = shuffled(table, halves & all16(0x0f0f));  // of k pairs R % 2, + 2
    return R < 2 ? left16(values, 8) : values & all16(0xff00);
  }
};

// With scales from 2^-6 to 1 of the greatest of the unit, as shifts to the right: 12 * 2^6 * 128 k * 2^14 < 2^31. A unit with others has a
// scale for each part, and shifts that do not differ.
struct Mxfp4 : TwiceE2m1 {
  static constexpr float kSumScale = 1.0f / 128;
  static constexpr bool kIntScales = true;
  static constexpr int kBits = 6, kShift = 8 - kBits;  // what remains of the upper byte

  static void read(const Columns& w, int pair, int step, int steps, IntegerParts& to) {
    const uint8_t* from = group_scales(w, pair, step);
    const auto exponents = [from](int part) { return load<__m256i>(from + part * kPairColumns); };
    __m256i most = exponents(0), least = most;
    for (int part = 1; part < steps; ++part) {
      most = _mm256_max_epu8(most, exponents(part));
      least = _mm256_min_epu8(least, exponents(part));
    }
    const __m256i range = _mm256_subs_epu8(_mm256_sub_epi8(most, least), _mm256_set1_epi8(kBits));
    const bool one_scale = _mm256_testz_si256(range, range);
    to.scales = to.scale_of;
    to.minima = nullptr;
    to.num_parts = one_scale ? 1 : steps;
    to.pairs = one_scale ? steps * kGroupPairs : kGroupPairs;
    alignas(32) uint8_t of_unit[kPairColumns];
    store(of_unit, most);
    const uint8_t* scales = one_scale ? of_unit : from;
    for (int at = 0; at < to.num_parts * kPairColumns; at += kLanes) store(to.scale_of + at, group_scales_of(w.format, scales + at));
    for (int at = 0; at < steps * kPairColumns; at += kLanes)
      store(to.int_scales + at, all32(kShift) + (one_scale ? minus32(widen_to_32(of_unit + at % kPairColumns), widen_to_32(from + at)) : Integers{}));
  }
  static inline __attribute__((always_inline)) Integers scale_sums(Integers sums, Integers by) { return bits<Integers>(bits<Sums>(sums) >> bits<Sums>(by)); }
  static inline __attribute__((always_inline)) Integers scale_codes(Integers codes, Integers by) {
    const Integers factor = bits<Integers>(bits<Sums>(all32(1 << 16)) >> bits<Sums>(by));
    return upper_products(codes, factor | left32(factor, 16));
  }
};

// Four k of a column are a word.
struct Bytes {
  static constexpr int kPairs = 2, kTopBit = 14;
  static constexpr float kSumScale = 1.0f;
  static constexpr bool kIntScales = false;

  template <int R>
  static inline __attribute__((always_inline)) Integers get(const uint8_t* line) {
    const Integers by_pair = repeated(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const Integers halves = by_half(shuffled(load<Integers>(line), by_pair));
    return widen_bytes(R == 0 ? lower(halves) : upper(halves));
  }
};

// The unsigned codes of formats without minima are greater by this than their values.
inline int excess(const Columns& w) { return w.minima ? 0 : w.format == kInt4 ? 8 : w.format == kQ6K ? 32 : 0; }

inline __attribute__((always_inline)) Integers two_inputs(const int16_t* x) { return broadcast32(x); }

// N neighbouring rows of a unit and where their totals are.
template <int N>
struct SomeRows {
  static constexpr int kRows = N;
  IntegerRows of;
  float* totals;
  size_t next_pair;  // floats from the totals of a row to those of the next pair

  const int16_t* x(int m) const { return of.x + m * kUnitInputs; }
  Integers start(int m, int part) const { return all32(of.starts[part * of.num_rows + m]); }
  float* at(int m, int vector) const { return totals + vector / kVectors * next_pair + m * kPairColumns + vector % kVectors * kLanes; }
};

// Totals of N rows and V vectors of columns from `first` on: in registers for a unit if Held, else in memory, so that registers hold more sums.
// parts: of each pair.
// NOTE copies of pointers: stores of totals might alias what holds them.
template <int N, int V, bool Held>
struct Totals {
  static constexpr int kOfPairs = (V + kVectors - 1) / kVectors;
  const SomeRows<N> rows;
  const int first;
  const float *scales[kOfPairs], *minima[kOfPairs], *unit_minima[kOfPairs];  // of the vectors from `first` on
  const int num_minima;
  Floats held[Held ? N : 1][Held ? V : 1];

  inline __attribute__((always_inline)) Totals(const IntegerParts* parts, const SomeRows<N>& some, int from)
      : rows(some), first(from), num_minima(parts->num_minima) {
    for (int p = 0; p < kOfPairs; ++p) {
      unit_minima[p] = parts[p].minimum_of + first * kLanes;
      scales[p] = parts[p].scales == nullptr ? nullptr : parts[p].scales + first * kLanes;
      minima[p] = parts[p].minima == nullptr ? nullptr : parts[p].minima + first * kLanes;
    }
    if constexpr (Held) {
#pragma GCC unroll 8
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < V; ++v) held[m][v] = load<Floats>(rows.at(m, first + v));
    }
  }
  // Adds the sums of a part, scaled.
  // NOTE the totals of a row are stored at its end: a store might alias the pointers that are read here.
  template <bool Minima>
  inline __attribute__((always_inline)) void add_as(const Integers (&sums)[N][V], int part) {
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      const Floats row = all(rows.of.scales[part * rows.of.num_rows + m]);
      const Floats x = Minima ? all(rows.of.sums[part * rows.of.num_rows + m]) : row;
      Floats after[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int at = part * kPairColumns + kLanes * (v % kVectors);
        const Floats before = Held ? held[Held ? m : 0][Held ? v : 0] : load<Floats>(rows.at(m, first + v));
        after[v] = times_plus(to_floats(sums[m][v]), row * load<Floats>(scales[v / kVectors] + at), before);
        if (Minima) after[v] = minus_times(x, load<Floats>(minima[v / kVectors] + at), after[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (Held) held[m][v] = after[v];
        else store(rows.at(m, first + v), after[v]);
      }
    }
  }
  inline __attribute__((always_inline)) void take_minima() {
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) {
      Floats after[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) after[v] = Held ? held[Held ? m : 0][Held ? v : 0] : load<Floats>(rows.at(m, first + v));
      for (int part = 0; part < num_minima; ++part) {
        const Floats x = all(rows.of.sums[part * rows.of.num_rows + m]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          after[v] = minus_times(x, load<Floats>(unit_minima[v / kVectors] + part * kPairColumns + kLanes * (v % kVectors)), after[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (Held) held[m][v] = after[v];
        else store(rows.at(m, first + v), after[v]);
      }
    }
  }
  // Totals that are integers until the end.
  inline __attribute__((always_inline)) void add_whole(const Integers (&sums)[N][V]) {
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(rows.at(m, first + v), plus32(load<Integers>(rows.at(m, first + v)), sums[m][v]));
  }
  inline __attribute__((always_inline)) void add(const Integers (&sums)[N][V], int part) {
    if (!kIsWide && scales[0] == nullptr) add_whole(sums);
    else if (minima[0] != nullptr) add_as<true>(sums, part);
    else add_as<false>(sums, part);
    if (num_minima != 0) take_minima();
  }
  inline __attribute__((always_inline)) void put() const {
    if constexpr (Held) {
#pragma GCC unroll 8
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < V; ++v) store(rows.at(m, first + v), held[m][v]);
    }
  }
};

// Weights of a unit: of a pair as they are packed, or panels of several.
struct PackedUnit {
  const uint8_t* packed;
  size_t step_bytes;
  int num_pairs;
  const IntegerParts* parts;  // of each pair

  int end(int part) const { return (part + 1) * parts->pairs < num_pairs ? (part + 1) * parts->pairs : num_pairs; }
};

// Sums of each row and column besides the first, which are added at the end of a part: VPDPWSSD takes five cycles, longer than four-bit codes
// of one or two rows need otherwise.
template <typename Policy>
constexpr int further_sums(int rows) { return kIsWide && std::is_base_of_v<FourBits, Policy> && rows <= 2 ? 4 / rows - 1 : 0; }

// Up to this many rows, integer scales are applied to the sums of parts; for more, to the codes.
constexpr int kScaledSums = 4;

// The products of k pairs R and above that a line holds.
template <typename Policy, int R, int N, int V>
inline __attribute__((always_inline)) void add_line(const uint8_t* line, const int16_t* x, const Integers (&int_scales)[V], Integers (&sums)[N][V],
                                                    Integers (*further)[N][V]) {
  constexpr int kSum = R % (further_sums<Policy>(N) + 1);
  Integers (&to)[N][V] = kSum == 0 ? sums : further[kSum == 0 ? 0 : kSum - 1];
  Integers two[N];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) two[m] = two_inputs(x + m * kUnitInputs + 2 * R);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Integers codes = Policy::template get<R>(line + kVectorBytes * v);
    if constexpr (Policy::kIntScales && N > kScaledSums) codes = Policy::scale_codes(codes, int_scales[v]);
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) add_products(codes, two[m], to[m][v]);
  }
  if constexpr (R + 1 < Policy::kPairs) add_line<Policy, R + 1>(line, x, int_scales, sums, further);
}

// A unit of some pairs, in all `vectors` of columns, times N rows, V vectors at a time: add(sums, first, from, end) adds the products of
// k pairs from .. end.
template <int N, int V, bool Held, typename Add>
inline __attribute__((always_inline)) void multiply_parts_of(const PackedUnit& unit, int vectors, const SomeRows<N>& rows, Add add) {
  for (int first = 0; first < vectors; first += V) {
    Totals<N, V, Held> totals(unit.parts, rows, first);
    for (int part = 0; part < unit.parts->num_parts; ++part) {
      Integers sums[N][V];
#pragma GCC unroll 8
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < V; ++v) sums[m][v] = rows.start(m, part);
      add(sums, first, part * unit.parts->pairs, unit.end(part));
      totals.add(sums, part);
    }
    totals.put();
  }
}

// Of packed codes. ahead: prefetch distance, 0: none.
template <typename Policy, int N, int V>
__attribute__((noinline)) void multiply_packed(const PackedUnit& unit, int ahead, const SomeRows<N>& rows) {
  const size_t line_bytes = unit.step_bytes * Policy::kPairs / (kStep / 2);
  multiply_parts_of<N, V, kIsWide && N <= (Policy::kIntScales ? 2 : 4)>(unit, kVectors, rows, [&](Integers (&sums)[N][V], int first, int from, int end) __attribute__((always_inline)) {
    const auto add_pairs = [&](Integers (&to)[N][V], const Integers (&int_scales)[V], int part_from, int part_end) __attribute__((always_inline)) {
      constexpr int kFurther = further_sums<Policy>(N);
      Integers further[kFurther + 1][N][V] = {};
      for (int at = part_from; at < part_end; at += Policy::kPairs) {
        const uint8_t* line = unit.packed + size_t(at / Policy::kPairs) * line_bytes;
        for (size_t byte = 0; first == 0 && byte < line_bytes; byte += 64) prefetch_line(line + byte, ahead);
        add_line<Policy, 0>(line + kVectorBytes * first, rows.of.x + 2 * at, int_scales, to, further);
      }
#pragma GCC unroll 4
      for (int each = 0; each < kFurther; ++each)
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m)
          for (int v = 0; v < V; ++v) to[m][v] = plus32(to[m][v], further[each][m][v]);
    };
    Integers int_scales[V] = {};
    if constexpr (Policy::kIntScales) {
      for (int at = from; at < end; at += kGroupPairs) {
        for (int v = 0; v < V; ++v) int_scales[v] = load<Integers>(unit.parts->int_scales + at / kGroupPairs * kPairColumns + kLanes * (first + v));
        if constexpr (N > kScaledSums) {
          add_pairs(sums, int_scales, at, at + kGroupPairs);
          continue;
        }
        Integers part[N][V] = {};
        add_pairs(part, int_scales, at, at + kGroupPairs);
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[m][v] = plus32(sums[m][v], Policy::scale_sums(part[m][v], int_scales[v]));
      }
    } else {
      add_pairs(sums, int_scales, from, end);
    }
  });
}

#if !defined(__AVX512F__)
// The same of eight-bit weights, four k of four columns a vector as they are packed: they are widened without a shuffle, and sums of k 0 and 1
// and of k 2 and 3 are added when a part ends.
template <int N>
__attribute__((noinline)) void multiply_bytes(const PackedUnit& unit, int ahead, const SomeRows<N>& rows) {
  constexpr int kColumns = N == 1 ? kPairColumns : kTileColumns, kFours = kColumns / 4;
  for (int column = 0; column < kPairColumns; column += kColumns) {
    for (int part = 0; part < unit.parts->num_parts; ++part) {
      Integers fours[N][kFours];
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m)
        for (int v = 0; v < kFours; ++v) fours[m][v] = Integers{};
      for (int at = part * unit.parts->pairs, end = unit.end(part); at < end; at += Bytes::kPairs) {
        const uint8_t* line = unit.packed + size_t(at / Bytes::kPairs) * kPanelRow + 4 * column;
        for (int byte = 0; byte < 4 * kColumns; byte += 64) prefetch_line(line + byte, ahead);
        Integers x[N];
#pragma GCC unroll 4
        for (int m = 0; m < N; ++m) x[m] = bits<Integers>(_mm256_broadcast_sd(reinterpret_cast<const double*>(rows.x(m) + 2 * at)));
#pragma GCC unroll 8
        for (int v = 0; v < kFours; ++v) {
          const Integers codes = widen_bytes(load<HalfIntegers>(line + 16 * v));
#pragma GCC unroll 4
          for (int m = 0; m < N; ++m) add_products(codes, x[m], fours[m][v]);
        }
      }
      Integers sums[N][kFours / 2];
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kFours / 2; ++v) sums[m][v] = by_half(_mm256_hadd_epi32(fours[m][2 * v], fours[m][2 * v + 1]));
      Totals<N, kFours / 2, false>(unit.parts, rows, column / kLanes).add(sums, part);
    }
  }
}
#endif

// Packed weights to prefetch meanwhile: `bytes` a k pair of each of some pairs, which are `apart` bytes apart. Null: none.
struct NextUnit {
  const uint8_t* data;
  size_t bytes, apart;
};

// Of panels of P pairs, side by side.
template <int N, int V, int P>
__attribute__((noinline)) void multiply_panels(const PackedUnit& unit, const NextUnit& next, const SomeRows<N>& rows) {
  constexpr int kAll = P * kVectors;
  multiply_parts_of<N, V, false>(unit, kAll, rows, [&](Integers (&sums)[N][V], int first, int from, int end) __attribute__((always_inline)) {
    for (int at = from; at < end; ++at) {
      const uint8_t* line = unit.packed + (size_t(at) * kAll + first) * kVectorBytes;
      for (int p = 0; next.data != nullptr && p < P; ++p)
        _mm_prefetch(reinterpret_cast<const char*>(next.data + p * next.apart + at * next.bytes), _MM_HINT_T0);
      Integers two[N];
#pragma GCC unroll 8
      for (int m = 0; m < N; ++m) two[m] = two_inputs(rows.x(m) + 2 * at);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const Integers codes = load<Integers>(line + kVectorBytes * v);
#pragma GCC unroll 8
        for (int m = 0; m < N; ++m) add_products(codes, two[m], sums[m][v]);
      }
    }
  });
}

template <typename Policy, int R = 0>
inline __attribute__((always_inline)) void expand_line(const uint8_t* line, Integers int_scales, uint8_t* panel, size_t row) {
  const Integers codes = Policy::template get<R>(line);
  if constexpr (Policy::kIntScales) store(panel + R * row, Policy::scale_codes(codes, int_scales));
  else store(panel + R * row, codes);
  if constexpr (R + 1 < Policy::kPairs) expand_line<Policy, R + 1>(line, int_scales, panel, row);
}

// Some steps of a pair -> panel [k pair][32 columns][2], `row` bytes from one k pair to the next.
template <typename Policy>
void expand_integers(const PackedUnit& unit, uint8_t* panel, size_t row) {
  const size_t line_bytes = unit.step_bytes * Policy::kPairs / (kStep / 2);
  for (int at = 0; at < unit.num_pairs; at += Policy::kPairs)
    for (int v = 0; v < kVectors; ++v) {
      const int32_t* int_scales = unit.parts->int_scales + at / kGroupPairs * kPairColumns + kLanes * v;
      expand_line<Policy>(unit.packed + size_t(at / Policy::kPairs) * line_bytes + kVectorBytes * v,
                          Policy::kIntScales ? load<Integers>(int_scales) : Integers{}, panel + size_t(at) * row + kVectorBytes * v, row);
    }
}

// Vectors that so many rows are multiplied with at a time, so that all sums stay in registers. most: rows times all four of AVX2.
constexpr int vectors_of_rows(int rows, int most) { return kIsWide || rows <= most ? kVectors : 2; }

inline int steps_of_unit(const Columns& w) { return has_parts(w.format) || w.groups != nullptr ? kUnitSteps : w.steps_per_block; }

// Some rows of a product.
struct IntegerProduct {
  const Columns& w;
  const Rows& rows;
  const Scratch& scratch;
  float* totals;
  const bool of_codes = false;  // whether rows are rounded to INT8
  const int unit = steps_of_unit(w);
  int some[kMaxRows] = {};  // the rows
  int num_some = 0;
  bool loses[kMaxRows] = {};  // of all rows

  // Rows of one chunk of k: of each unit the arrays of IntegerRows.
  static_assert(kIntegerRowBytes == kUnitInputs * sizeof(int16_t) + kMostScaledParts * 3 * sizeof(float) + sizeof(int32_t), "of a unit");
  static_assert(kMaxRows * kIntegerRowBytes <= kLeastGatherBytes, "a unit of any rows fits");

  IntegerRows of_unit(uint8_t* chunk, int unit_of_chunk) const {
    uint8_t* at = chunk + size_t(unit_of_chunk) * num_some * kIntegerRowBytes;
    float* scales = reinterpret_cast<float*>(at + size_t(num_some) * kUnitInputs * sizeof(int16_t));
    float* sums = scales + num_some * kMostScaledParts;
    int32_t* starts = reinterpret_cast<int32_t*>(sums + num_some * kMostScaledParts);
    return {reinterpret_cast<int16_t*>(at), scales, sums, starts, starts + num_some * kMostScaledParts, num_some};
  }

  // Inputs of one unit of row i; Part: inputs of a part. OneScale: all parts have the same scale.
  template <int Part, bool OneScale = false>
  void gather_unit(const uint16_t* x, int inputs, float factor, int top_bit, int term, const IntegerRows& to) const {
    const int base = excess(w);
    bool loses_much = false;
    int largest[kMostScaledParts], of_all = 0;
    for (int k = 0; k < inputs && OneScale; k += Part) of_all = std::max(of_all, largest[k / Part] = largest_of<Part>(x + k, Part));
    for (int k = 0, at = 0; k < inputs; k += Part, at += num_some) {
      const bool whole = inputs - k >= Part;
      if (!OneScale) of_all = largest[k / Part] = whole ? largest_of<Part>(x + k, Part) : largest_of<0>(x + k, inputs - k);
      const Largest bf16 = {largest[k / Part], of_all};
      const IntegerPart of = whole ? to_integers<Part>(x + k, Part, bf16, top_bit, term, to.x + k)
                                   : to_integers<0>(x + k, inputs - k, bf16, top_bit, term, to.x + k);
      const float scale = of.scale * factor;
      to.scales[at] = scale;
      to.sums[at] = scale * float(of.sum);
      to.starts[at] = -base * of.sum;
      loses_much |= of.loses;
    }
    *to.loses = loses_much;
  }

  template <typename Policy>
  void gather(int step0, int steps, int term, uint8_t* chunk) const {
    const int part = w.groups != nullptr ? kStep / groups_of_step(w.format) : has_parts(w.format) ? 2 * w.part_pairs : unit * kStep;
    const auto of_parts = Policy::kIntScales ? &IntegerProduct::gather_unit<kStep, true> :
                          part == 16 ? &IntegerProduct::gather_unit<16> : part == 32 ? &IntegerProduct::gather_unit<32> :
                          part == 64 ? &IntegerProduct::gather_unit<64> : &IntegerProduct::gather_unit<kUnitInputs>;
    for (int i = 0; i < num_some; ++i) {
      const uint16_t* x = rows.bf16(some[i]) + size_t(step0) * kStep;
      if (i + 4 < num_some)
        for (int s = 0; s < steps; ++s) __builtin_prefetch(rows.bf16(some[i + 4]) + size_t(step0 + s) * kStep);
      for (int s = 0; s < steps; s += unit, x += unit * kStep) {
        const int inputs = (steps - s < unit ? steps - s : unit) * kStep;
        const float of_row = rows.scales == nullptr ? 1.0f : rows.scales[some[i]][(step0 + s) * kStep / kActivationBlock];
        (this->*of_parts)(x, inputs, Policy::kSumScale * of_row, Policy::kTopBit, term, of_unit(chunk, s / unit).from(i));
      }
    }
  }

  // Of rows of INT8 codes, which the weights multiply in order.
  void gather_codes(int step0, int steps) const {
    const bool parts = has_parts(w.format);
    const __m128i offset = _mm_set1_epi8(char(parts ? 0 : kInt8Offset));
    const int part = parts ? 2 * w.part_pairs : unit * kStep;
    for (int i = 0; i < num_some; ++i) {
      const uint8_t* x = rows.codes(i) + size_t(step0) * kStep;
      const RowParts of_row = {rows.scales[i], parts ? row_parts(w) : 1};
      for (int s = 0; s < steps; s += unit, x += unit * kStep) {
        const IntegerRows to = of_unit(scratch.gathered, s / unit).from(i);
        const int inputs = (steps - s < unit ? steps - s : unit) * kStep;
        for (int k = 0; k < inputs; k += 16) store(to.x + k, _mm256_cvtepi8_epi16(_mm_xor_si128(load<__m128i>(x + k), offset)));
        for (int k = 0, at = 0; k < inputs; k += part, at += num_some) {
          const int of_k = ((step0 + s) * kStep + k) / part;
          to.scales[at] = parts ? of_row.scales[of_k] : 1.0f;
          to.sums[at] = parts ? of_row.sums()[of_k] : 0.0f;
          to.starts[at] = 0;
        }
        *to.loses = 0;
      }
    }
  }

  // A unit of a pair times the rows, at most Together at a time; AVX-512 has even shares of them.
  template <int Together, typename Multiply>
  void each_rows(const IntegerRows& of, int pair, Multiply multiply) const {
    float* to = totals + size_t(pair) * rows.num_rows * kPairColumns;
    const int shares = (num_some + Together - 1) / Together, share = kIsWide ? (num_some + shares - 1) / shares : Together;
    for (int i = 0, n; i < num_some; i += n) {
      for (n = 1; n < share && i + n < num_some && some[i + n] == some[i] + n;) ++n;
      with_rows<Together>(n, of.from(i), i, to, multiply);
    }
  }
  template <int N, typename Multiply>
  void with_rows(int n, const IntegerRows& from, int first, float* to, Multiply multiply) const {
    if constexpr (N > 1) {
      if (n < N) return with_rows<N - 1>(n, from, first, to, multiply);
    }
    multiply(SomeRows<N>{from, to + some[first] * kPairColumns, size_t(rows.num_rows) * kPairColumns}, first == 0);
  }

  // One unit of a pair, straight from the packed bytes.
  template <typename Policy>
  void multiply_direct_unit(const PackedUnit& unit, const IntegerRows& of, int pair) const {
#if !defined(__AVX512F__)
    if constexpr (std::is_same_v<Policy, Bytes>) {
      const auto by_bytes = [&](const auto& some_rows, bool first) {
        multiply_bytes<std::decay_t<decltype(some_rows)>::kRows>(unit, first ? w.prefetch : 0, some_rows);
      };
      return num_some == kDirectRows ? each_rows<2>(of, pair, by_bytes) : each_rows<kIntegerGroup>(of, pair, by_bytes);
    }
#endif
    each_rows<kPackedRows>(of, pair, [&](const auto& some_rows, bool first) {
      constexpr int kRows = std::decay_t<decltype(some_rows)>::kRows;
      multiply_packed<Policy, kRows, vectors_of_rows(kRows, 2)>(unit, first ? w.prefetch : 0, some_rows);
    });
  }

  // One unit of P pairs by panels.
  template <typename Policy, int P>
  void multiply_unit(PackedUnit unit, const IntegerRows& of, int pair) const {
    const size_t k_pair = w.step_bytes / (kStep / 2);
    const NextUnit next = {unit.packed + prefetch_bytes(w.prefetch, unit.num_pairs * k_pair), k_pair, w.pair_bytes};
    const IntegerParts* const parts = unit.parts;
    for (int p = 0; p < P; ++p, unit.packed += w.pair_bytes, ++unit.parts) expand_integers<Policy>(unit, scratch.panel + p * kPanelRow, P * kPanelRow);
    unit.packed = scratch.panel;
    unit.parts = parts;
    const auto multiply = [&](const auto& some_rows, bool first) {
      constexpr int kRows = std::decay_t<decltype(some_rows)>::kRows;  // some_rows.kRows would be no constant for clang
      multiply_panels<kRows, kIsWide ? P * kVectors : vectors_of_rows(kRows, 3), P>(unit, first ? next : NextUnit{}, some_rows);
    };
    if (num_some == kDirectRows) each_rows<kDirectRows>(of, pair, multiply);  // in one go
    else each_rows<kIntegerGroup>(of, pair, multiply);
  }

  template <typename Policy>
  void multiply(bool direct, int term) {
    IntegerParts parts[kPanels];
    const ScalesAhead scales_ahead(w);
    const size_t fitting = w.gather_bytes / (size_t(num_some) * kIntegerRowBytes);
    const int chunk = (fitting < 1 ? 1 : int(fitting)) * unit;
    for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
      const int chunk_steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
      uint8_t* x = scratch.gathered;
      if (!kIsWide && of_codes) gather_codes(step0, chunk_steps);
      else if (term == 0 && rows.integers != nullptr) x = const_cast<uint8_t*>(rows.integers) + size_t(step0 / unit) * num_some * kIntegerRowBytes;
      else gather<Policy>(step0, chunk_steps, term, x);
      for (int s = 0; s < chunk_steps; s += unit)
        for (int i = 0; i < num_some; ++i) loses[some[i]] |= of_unit(x, s / unit).loses[i] != 0;
      for (int pair = 0, pairs; pair < w.num_pairs; pair += pairs) {
        pairs = direct || pair + kPanels > w.num_pairs ? 1 : kPanels;
        for (int s = 0; s < chunk_steps; s += unit) {
          const int steps = chunk_steps - s < unit ? chunk_steps - s : unit, step = step0 + s;
          for (int p = 0; p < pairs; ++p) {
            if (w.part_scales != nullptr && step % kSuperSteps == 0) scales_ahead(w, pair + p, step);
            parts[p].load_as<Policy>(w, pair + p, step, steps);
          }
          if (of_codes && !has_parts(w.format) && w.scales == nullptr) parts->scales = nullptr;
          const uint8_t* packed = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
          const PackedUnit of_pairs = {packed, w.step_bytes, steps * (kStep / 2), parts};
          const IntegerRows of = of_unit(x, s / unit);
          if (direct) multiply_direct_unit<Policy>(of_pairs, of, pair);
          else if (pairs == 1) multiply_unit<Policy, 1>(of_pairs, of, pair);
          else multiply_unit<Policy, kPanels>(of_pairs, of, pair);
        }
      }
    }
  }
};

template <typename Policy>
void multiply_integers_as(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals, bool direct) {
  IntegerProduct product = {w, rows, scratch, totals};
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int r = 0; r < rows.num_rows; ++r) product.some[product.num_some++] = r;
  for (int term = 0; product.num_some > 0; ++term) {
    product.multiply<Policy>(direct, term);
    product.num_some = 0;
    for (int r = 0; r < rows.num_rows; ++r) {
      if (product.loses[r]) product.some[product.num_some++] = r;
      product.loses[r] = false;
    }
  }
}

// Rows rounded to INT8 times eight-bit weights: the bits of int8.h and int8_parts.h.
inline void multiply_codes(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  IntegerProduct product = {w, rows, scratch, totals, true};
  for (int r = 0; r < rows.num_rows; ++r) product.some[product.num_some++] = r;
  product.multiply<Bytes>(rows.num_rows <= kDirectRows, 0);
  if (!has_parts(w.format)) finish_totals(w, rows, totals);
}

// use(policy of a format of integers).
template <typename Use>
inline void with_policy(int format, Use use) {
  switch (format) {
    case kInt8:
    case kInt8Groups: return use(Bytes{});
    case kMxFp4: return use(Mxfp4{});
    case kNvFp4: return use(TwiceE2m1{});
    case kQ4K: return use(Q4K{});
    case kInt5:
    case kQ5K: return use(FiveBits{});
    case kQ6K: return use(SixBits{});
    default: return use(FourBits{});
  }
}

void multiply_integers(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  with_policy(w.format, [&](auto policy) {
    multiply_integers_as<decltype(policy)>(w, rows, scratch, totals, rows.num_rows <= kPackedRows);
  });
}

int integer_units(const Columns& w) {
  const int unit = steps_of_unit(w);
  return w.format == kFp8 || w.format == kMxFp8 || w.format == kBf16 ? 0 : (w.num_steps + unit - 1) / unit;
}

void rows_to_integers(const Columns& w, const Rows& rows, int unit, uint8_t* to) {
  IntegerProduct product = {w, rows, {}, nullptr};
  for (int r = 0; r < rows.num_rows; ++r) product.some[product.num_some++] = r;
  const int first = unit * product.unit, steps = w.num_steps - first < product.unit ? w.num_steps - first : product.unit;
  with_policy(w.format, [&](auto policy) { product.gather<decltype(policy)>(first, steps, 0, to); });
}

// direct: from the packed bytes, for at most kDirectRows rows.
template <bool Direct>
void multiply_rows(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  switch (w.format) {
    case kFp8:
    case kMxFp8: return multiply_f32<Fp8Codes, Direct>(w, rows, scratch, totals);
    case kBf16: return multiply_f32<Bf16Codes, Direct>(w, rows, scratch, totals);
    default: multiply_integers(w, rows, scratch, totals);
  }
}

}  // namespace
}  // namespace moe_mk
