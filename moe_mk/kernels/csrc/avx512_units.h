// Rows times FP8, INT8 and four-bit integers with one layout for all cache lines, for AVX512-BF16 + VBMI: a unit of k is decoded into a bf16 panel
// while the unit before is multiplied, in execution ports that the products do not use; panels alternate in two halves of the memory.
//
// For each chunk of k whose rows fit in half of the L2 cache: gather the rows unless they may be read in place, split them evenly into
// groups of at most eight, then pair by pair, unit by unit: multiply every group with the panel, add scale * sum of a block or part
// into the totals. Each total is one chain over k in order: the same bits as multiply_blocked, which has the other formats.
// Reads: packed weights once, rows once a task. Writes: totals [pair][row][32].
#pragma once
#include <type_traits>

#include "avx512_panel.h"

namespace moe_mk {
namespace {

constexpr int kUnitRows = 8;  // rows of a group

inline bool decodes_between(int format) {
  return format == kFp8 || format == kInt8 || format == kInt8Groups || format == kInt4 || format == kQ4K;
}

// What a group of rows prefetches of some bytes: its share, so that requests to memory are spread over all groups.
inline Ahead share_of_unit(const uint8_t* data, size_t bytes, int steps, int group, int groups) {
  const int fours = steps * (kStep / 8), all = int(bytes / 64), each = (all + fours * groups - 1) / (fours * groups);
  return {data + size_t(group) * fours * each * 64, group * fours * each < all ? each : 0};
}

// Most steps of a unit, but for a single group of rows: its panel is in the L2, and the totals of a group in the L1 while it is
// multiplied. The first unit of a chunk, which is decoded before any product, is one block; each has twice as many as the one before.
// NOTE Zen 4: 0.97 of the time of units of one block at 32 rows, 0.93 to 0.97 at 512.
constexpr int kLongSteps = 32;
static_assert(2 * kLongSteps * 2 * kPanelTile <= kPanelBytesOfBlock, "two panels fit the memory");

// Lines of the next unit, both tiles of some k pairs each, to decode while a group is multiplied: `each` every eight k pairs.
struct LinesAhead {
  const Columns& w;
  const uint8_t* packed;
  uint8_t* panel;
  int left = 0, each = 0;
};

// What the products have left.
inline void decode_units(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
  has_parts(w.format) ? expand_codes(w, pair, step, steps, panel) : expand_panel(w, pair, step, steps, panel);
}

// The units of a chunk of k, pair by pair, as panels.
class Panels {
  const Columns& w;
  const int first, end;

 public:
  LinesAhead lines;  // of the panel after the one that next() has returned

  // unit: steps of the first one, at most; what follows a chunk is prefetched from `after` on.
  Panels(const Columns& columns, int first_step, int num_steps, int unit, const uint8_t* after, uint8_t* memory)
      : w(columns), first(first_step), end(first_step + num_steps), lines({columns, nullptr, nullptr}), following(after), panels(memory) {
    begin(0, first, unit, 1);
  }
  // The next panel, to be multiplied with `groups` groups of rows. unit: as above, of the panel after that.
  const uint8_t* next(int groups, int unit) {
    const int done = steps - (lines.left + lines_of_step() - 1) / lines_of_step();
    uint8_t* const panel = panels + size_t(turn) * kLongSteps * 2 * kPanelTile;
    if (done < steps) decode_units(w, pair, step + done, steps - done, panel + size_t(done) * 2 * kPanelTile);
    turn ^= 1;
    const int fours = steps * (kStep / 8) * groups;
    if (step + steps < end) begin(pair, step + steps, unit, fours);
    else begin(pair + 1, first, unit, fours);
    return panel;
  }
  // What a group prefetches: its share of as much as the next unit has, so far ahead of it that lines are there when they are decoded.
  Ahead ahead(int current_steps, int group, int groups) const {
    const size_t far = 4 * size_t(w.prefetch);
    if (steps == 0) return share_of_unit(following, current_steps * w.step_bytes, current_steps, group, groups);
    return share_of_unit(w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes + far, steps * w.step_bytes, current_steps, group, groups);
  }

 private:
  int lines_of_step() const { return int(w.step_bytes / 128); }
  void begin(int new_pair, int new_step, int unit, int fours) {
    pair = new_pair;
    step = new_step;
    steps = pair == w.num_pairs ? 0 : end - step < unit ? end - step : unit;
    lines.packed = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
    lines.panel = panels + size_t(turn) * kLongSteps * 2 * kPanelTile;
    lines.left = steps * lines_of_step();
    lines.each = (2 * lines.left + fours - 1) / fours;
  }

  const uint8_t* const following;
  uint8_t* const panels;
  int pair, step, steps, turn = 0;
};

// Two bf16 of a row, `Apart` rows and At bytes after x. NOTE gcc 12: else it makes a pointer for each row, and moves them to vector
// registers and back.
template <int Apart, int At>
inline __attribute__((always_inline)) __m512bh two_of_row(const uint8_t* x, size_t row_bytes) {
  using Read = const uint8_t (*)[1 << 24];
  __m512i two;
  if constexpr (Apart == 0) asm("vpbroadcastd %c2(%1), %0" : "=v"(two) : "r"(x), "i"(At), "m"(*Read(x)));
  else asm("vpbroadcastd %c3(%1,%2,%c4), %0" : "=v"(two) : "r"(x), "r"(row_bytes), "i"(At), "i"(Apart), "m"(*Read(x)));
  return reinterpret_cast<__m512bh>(two);
}

template <int R, int M, int N>
inline __attribute__((always_inline)) void add_row(__m512bh b0, __m512bh b1, const uint8_t* const (&third)[3], size_t row_bytes, __m512 (&sums)[N][2]) {
  const __m512bh two = two_of_row<M % 3, 4 * R>(third[M / 3], row_bytes);
  sums[M][0] = _mm512_dpbf16_ps(sums[M][0], b0, two);
  sums[M][1] = _mm512_dpbf16_ps(sums[M][1], b1, two);
  if constexpr (M + 1 < N) add_row<R, M + 1>(b0, b1, third, row_bytes, sums);
}

// sums += N rows, row_bytes apart, times k pairs R to 8 of a panel; third: rows 0, 3 and 6.
template <int R, int N>
inline __attribute__((always_inline)) void add_pairs(const uint8_t* panel, const uint8_t* const (&third)[3], size_t row_bytes, __m512 (&sums)[N][2]) {
  const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + R * kPanelRow));
  const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + R * kPanelRow + 64));
  add_row<R, 0>(b0, b1, third, row_bytes, sums);
  if constexpr (R + 1 < 8) add_pairs<R + 1>(panel, third, row_bytes, sums);
}

struct NoDecoder {
  explicit NoDecoder(const Columns&) {}
  void some(LinesAhead&) const {}
};

// Decodes lines of the next unit between products, for formats with one layout for all cache lines.
template <typename Decode>
struct LineDecoder {
  Decode decode;

  explicit LineDecoder(const Columns& w) {
    if constexpr (std::is_same_v<Decode, Fp4>) decode.table = Codes4(w.minima).table;
  }
  inline __attribute__((always_inline)) void some(LinesAhead& lines) const {
    int count = lines.left < lines.each ? lines.left : lines.each;
    lines.left -= count;
    for (; count > 0; --count, lines.packed += 128, lines.panel += Decode::kRows * kPanelRow)
      for (int tile = 0; tile < 2; ++tile) {
        __m512i rows[Decode::kRows];
        decode.rows(lines.packed + tile * 64, rows);
        for (int r = 0; r < Decode::kRows; ++r) _mm512_store_si512(lines.panel + r * kPanelRow + tile * 64, rows[r]);
      }
  }
};

// Adds the finished sums of a part.
template <bool Minima, bool Scaled, int N>
inline __attribute__((always_inline)) void close(const RowGroup& group, const Parts& parts, int part, __m512 (&sums)[N][2], float* totals) {
  const float* scales = parts.scales + part * kPairColumns;
  asm volatile("" : "+r"(totals));  // NOTE gcc 12: else totals are in registers over all parts, and sums in memory
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) {
    const __m512 row = _mm512_set1_ps(Scaled ? group.scales[m] : 1.0f);
    const __m512 x_sum = _mm512_set1_ps(Minima ? parts.sums[m * parts.sums_stride + part] : 0.0f);
    for (int t = 0; t < 2; ++t) {
      float* to = totals + m * kPairColumns + 16 * t;
      const __m512 scale = _mm512_load_ps(scales + 16 * t);
      __m512 total = _mm512_fmadd_ps(sums[m][t], Scaled ? _mm512_mul_ps(scale, row) : scale, _mm512_loadu_ps(to));
      if (Minima)
        total = _mm512_fnmadd_ps(_mm512_load_ps(parts.minima + part * kPairColumns + 16 * t), Scaled ? _mm512_mul_ps(x_sum, row) : x_sum, total);
      _mm512_storeu_ps(to, total);
      sums[m][t] = _mm512_setzero_ps();
    }
  }
}

// Eight k pairs at a time, the shortest part. Fewer than five rows leave too few units free to decode.
template <int N, typename Decoder>
inline __attribute__((always_inline)) void rows_by_parts(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts,
                                                                Ahead ahead, LinesAhead& lines, float* totals) {
  __m512 sums[N][2];
#pragma GCC unroll 8
  for (int m = 0; m < N; ++m) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  const Decoder decoder(lines.w);
  LinesAhead next = lines;
  const int each = parts.pairs / 8;
  const uint8_t* x = group.x;
  const size_t row_bytes = group.row_bytes;
  size_t apart = kRowBytes / 2;  // from these eight to the next: half a row, and what is left of a step
  for (int part = 0, eights = 2 * steps; eights > 0; ++part) {
    const int some = eights < each ? eights : each;
    eights -= some;
#pragma GCC unroll 1
    for (int i = 0; i < some; ++i, x += apart, apart = group.step_bytes - apart, panel += 8 * kPanelRow) {
      ahead.some(2);
      decoder.some(next);
      const uint8_t* const third[3] = {x, x + 3 * row_bytes, x + 6 * row_bytes};
      add_pairs<0>(panel, third, row_bytes, sums);
    }
    if (parts.minima == nullptr && group.scales == nullptr) close<false, false>(group, parts, part, sums, totals);
    else if (parts.minima == nullptr) close<false, true>(group, parts, part, sums, totals);
    else if (group.scales == nullptr) close<true, false>(group, parts, part, sums, totals);
    else close<true, true>(group, parts, part, sums, totals);
  }
  lines.packed = next.packed;
  lines.panel = next.panel;
  lines.left = next.left;
}

template <typename Decoder, typename... Arguments>
void group_with(const RowGroup& group, Arguments&&... given) {
  switch (group.num_rows) {
    case 1: return rows_by_parts<1, NoDecoder>(group, given...);
    case 2: return rows_by_parts<2, NoDecoder>(group, given...);
    case 3: return rows_by_parts<3, NoDecoder>(group, given...);
    case 4: return rows_by_parts<4, NoDecoder>(group, given...);
    case 5: return rows_by_parts<5, Decoder>(group, given...);
    case 6: return rows_by_parts<6, Decoder>(group, given...);
    case 7: return rows_by_parts<7, Decoder>(group, given...);
    default: return rows_by_parts<8, Decoder>(group, given...);
  }
}
inline void add_group(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts, const Ahead& ahead, LinesAhead& lines,
                  float* totals) {
  switch (lines.left == 0 ? int(kBf16) : lines.w.format) {
    case kFp8: return group_with<LineDecoder<Fp8>>(group, panel, steps, parts, ahead, lines, totals);
    case kInt8:
    case kInt8Groups: return group_with<LineDecoder<Int8>>(group, panel, steps, parts, ahead, lines, totals);
    case kInt4:
    case kQ4K: return group_with<LineDecoder<Fp4>>(group, panel, steps, parts, ahead, lines, totals);
    default: return group_with<NoDecoder>(group, panel, steps, parts, ahead, lines, totals);
  }
}

// Scales and minima of the parts of one block: [part][32]. Returns the number of parts.
inline int block_scales(const Columns& w, int pair, int step, int steps, float* scales, float* minima) {
  if (has_parts(w.format)) return part_scales(w, pair, step, steps, scales, minima);
  for (int tile = 0; tile < 2; ++tile) {
    const float* of_tile = tile_scales(w, pair, tile);
    store(scales + tile * kTileColumns, f32x16{} + (of_tile == nullptr ? 1.0f : of_tile[step / w.steps_per_block]));
  }
  return 1;
}

// Any number of rows times a format with one layout for all cache lines.
inline void multiply_between(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  const bool in_place = rows.apart != 0;
  const int part_pairs = has_parts(w.format) ? w.part_pairs : w.steps_per_block * (kStep / 2);
  const int groups = (rows.num_rows + kUnitRows - 1) / kUnitRows, together = (rows.num_rows + groups - 1) / groups;
  const int chunk = steps_that_fit(w.gather_bytes, rows.num_rows, together, w.steps_per_block);
  const int most = groups > 1 && rows.scales == nullptr ? kLongSteps : w.steps_per_block;
  alignas(64) float scales[2 * kLongSteps * kPairColumns], minima[2 * kLongSteps * kPairColumns];
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int chunk_steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
    // Where a row begins, and the bytes from one row and from one step to the next.
    const size_t row_bytes = in_place ? rows.apart : kRowBytes, step_bytes = in_place ? kRowBytes : together * kRowBytes;
    const auto start = [&](int row) {
      if (in_place) return reinterpret_cast<const uint8_t*>(rows.bf16(row)) + size_t(step0) * kRowBytes;
      return static_cast<const uint8_t*>(scratch.gathered) + (size_t(row / together) * chunk_steps * together + row % together) * kRowBytes;
    };
    if (!in_place) gather_rows(rows, together, step0, chunk_steps, scratch.gathered, false);
    for (int r = 0; w.minima && r < rows.num_rows; ++r)
      part_sums(w, start(r), step_bytes, chunk_steps, scratch.sums + size_t(r) * chunk_steps);
    const bool is_last = step0 + chunk >= w.num_steps;
    const uint8_t* const after = !is_last ? w.data + size_t(step0 + chunk) * w.step_bytes : w.after != nullptr ? w.after : w.data;
    int unit = w.steps_per_block, steps = 0;
    Panels panels(w, step0, chunk_steps, unit, after, scratch.panel);
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int s = 0; s < chunk_steps; s += steps) {
        steps = chunk_steps - s < unit ? chunk_steps - s : unit;
        unit = 2 * unit < most ? 2 * unit : most;
        const uint8_t* panel = panels.next(groups, unit);
        const Parts parts = {scales, w.minima ? minima : nullptr, scratch.sums + s * (kStep / 2) / part_pairs, size_t(chunk_steps), part_pairs};
        for (int done = 0, part = 0; done < steps; done += w.steps_per_block) {
          const int step = step0 + s + done, some = steps - done < w.steps_per_block ? steps - done : w.steps_per_block;
          part += block_scales(w, pair, step, some, scales + part * kPairColumns, minima + part * kPairColumns);
        }
        for (int first = 0, g = 0; first < rows.num_rows; first += together, ++g) {
          const int n = rows.num_rows - first < together ? rows.num_rows - first : together;
          float row_scales[kUnitRows];
          for (int r = 0; r < n && rows.scales != nullptr; ++r) row_scales[r] = rows.scales[first + r][(step0 + s) * kStep / kActivationBlock];
          const RowGroup group = {start(first) + s * step_bytes, row_bytes, step_bytes, n, rows.scales == nullptr ? nullptr : row_scales};
          Parts of_group = parts;
          of_group.sums += size_t(first) * chunk_steps;
          add_group(group, panel, steps, of_group, panels.ahead(steps, g, groups), panels.lines, totals + (size_t(pair) * rows.num_rows + first) * kPairColumns);
        }
      }
  }
}

}  // namespace
}  // namespace moe_mk
