// The loop around a register kernel: rows of one expert times some column pairs, scales applied once a scale block.
//
// For each chunk of k whose rows fit in half of the L2 cache: gather the rows (64 B a row and step) unless they may be read in place,
// split them evenly into groups of at most Ops::kGroup, so that no group has too few sums to hide the latency of a product,
// then pair by pair, scale block by scale block: decode the weights once into a bf16 panel that stays in L1, multiply
// every group with it, add scale * block sum into the totals.
// Each total is one chain over k in order, independent of the number of rows and pairs: batch-invariant.
// Reads: packed weights once, rows once a task. Writes: totals [pair][row][32], num_pairs * rows * 128 B.
#pragma once
#include <cstring>

#include "kernels.h"

namespace moe_mk {
namespace {

// dst [group][step][kGroup][32] bf16
inline void gather_rows(const Rows& rows, int group_rows, int first_step, int steps, uint8_t* dst, bool zero_rest) {
  const int groups = (rows.num_rows + group_rows - 1) / group_rows;
  for (int group = 0; group < groups; ++group) {
    uint8_t* block = dst + size_t(group) * steps * group_rows * kRowBytes;
    for (int r = 0; r < group_rows; ++r) {
      const int row = group * group_rows + r;
      uint8_t* to = block + r * kRowBytes;
      if (row < rows.num_rows) {
        const uint16_t* from = rows.bf16(row) + size_t(first_step) * kStep;
        if (row + 4 < rows.num_rows) {
          const uint16_t* soon = rows.bf16(row + 4) + size_t(first_step) * kStep;
          for (int s = 0; s < steps; ++s) __builtin_prefetch(soon + s * kStep);
        }
        for (int s = 0; s < steps; ++s) std::memcpy(to + size_t(s) * group_rows * kRowBytes, from + s * kStep, kRowBytes);
      } else if (zero_rest) {
        for (int s = 0; s < steps; ++s) std::memset(to + size_t(s) * group_rows * kRowBytes, 0, kRowBytes);
      }
    }
  }
}

inline int steps_that_fit(size_t gather_bytes, int num_rows, int group_rows, int unit) {
  const size_t padded = size_t(num_rows + group_rows - 1) / group_rows * group_rows;
  const int steps = int(gather_bytes / (padded * kRowBytes));
  return steps < unit ? unit : steps / unit * unit;
}

inline const float* tile_scales(const Columns& w, int pair, int tile) {
  return w.scales == nullptr ? nullptr : w.scales + (size_t(pair) * 2 + tile) * w.num_blocks;
}

// How far ahead a stream of weights prefetches: at the end of its last pair the beginning of what is multiplied next, so that a
// stream does not begin with the latency of memory. Streams of one task end, and begin, equally far apart.
struct StreamAhead {
  ptrdiff_t near, far;
  int turn;  // the first step that prefetches far

  StreamAhead(const Columns& w, int pair, int pairs)
      : near(w.prefetch), far(w.after == nullptr ? near : near + (w.after - (w.data + pairs * w.pair_bytes))),
        turn(pair + 1 < pairs ? w.num_steps : w.num_steps - int(w.prefetch / w.step_bytes)) {}
  inline __attribute__((always_inline)) ptrdiff_t at(int step) const { return step < turn ? near : far; }
};

// Memory to prefetch while a group is multiplied: `lines` cache lines every four k pairs, 0: none.
struct Ahead {
  const uint8_t* data;
  int lines;

  // Those of `fours` times four k pairs.
  inline __attribute__((always_inline)) void some(int fours = 1) {
    for (int line = 0; line < fours * lines; ++line, data += 64) __builtin_prefetch(data);
  }
};

// Rows that are multiplied together: x is [row][step][32] bf16, with any distances.
struct RowGroup {
  const uint8_t* x;
  size_t row_bytes, step_bytes;  // from one row, and from one step to the next
  int num_rows;
  const float* scales;  // of each row; null: 1
};

// What a group of rows prefetches of a panel: its share, so that requests to memory are spread over all groups. A single group
// reads two panels ahead, since it has less time for each.
inline Ahead share_of_panel(const uint8_t* panel, size_t bytes, int steps, int group, int groups) {
  const int fours = steps * (kStep / 8), all = int(bytes / 64), each = (all + fours * groups - 1) / (fours * groups);
  return {panel + (groups == 1 ? 2 : 1) * bytes + size_t(group) * fours * each * 64, group * fours * each < all ? each : 0};
}

// Ops: kGroup; expand(w, pair, step, steps, panel), group scales included;
// group(RowGroup, panel, steps, scale0, scale1, ahead, totals)
// Formats with parts: codes(w, pair, step, steps, panel); parts(RowGroup, panel, steps, Parts, ahead, totals) of
// at most kPartRows rows, see part_scales.h.
template <typename Ops>
void multiply_parts(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals);

template <typename Ops>
void multiply_blocked(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  if (has_parts(w.format)) return multiply_parts<Ops>(w, rows, scratch, totals);
  const size_t step_bytes = w.step_bytes;
  const bool in_place = rows.apart != 0;
  const int groups = (rows.num_rows + Ops::kGroup - 1) / Ops::kGroup, together = (rows.num_rows + groups - 1) / groups;
  const int chunk = steps_that_fit(w.gather_bytes, rows.num_rows, together, w.steps_per_block);
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int chunk_steps = w.num_steps - step0 < chunk ? w.num_steps - step0 : chunk;
    if (!in_place) gather_rows(rows, together, step0, chunk_steps, scratch.gathered, false);
    for (int pair = 0; pair < w.num_pairs; ++pair) {
      const float *s0 = tile_scales(w, pair, 0), *s1 = tile_scales(w, pair, 1);
      float* sums = totals + size_t(pair) * rows.num_rows * kPairColumns;
      for (int s = 0; s < chunk_steps; s += w.steps_per_block) {
        const int steps = chunk_steps - s < w.steps_per_block ? chunk_steps - s : w.steps_per_block;
        const int block = (step0 + s) / w.steps_per_block, x_block = (step0 + s) * kStep / kActivationBlock;
        const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step0 + s) * step_bytes;
        const uint8_t* panel = packed;
        if (w.must_be_decoded()) {
          Ops::expand(w, pair, step0 + s, steps, scratch.panel);
          panel = scratch.panel;
        }
        const float scale0 = s0 == nullptr ? 1.0f : s0[block], scale1 = s1 == nullptr ? 1.0f : s1[block];
        for (int first = 0, g = 0; first < rows.num_rows; first += together, ++g) {
          const int n = rows.num_rows - first < together ? rows.num_rows - first : together;
          float row_scale[Ops::kGroup];
          for (int r = 0; r < n && rows.scales != nullptr; ++r) row_scale[r] = rows.scales[first + r][x_block];
          const float* row_scales = rows.scales == nullptr ? nullptr : row_scale;
          const uint8_t* gathered = scratch.gathered + (size_t(first) * chunk_steps + size_t(s) * together) * kRowBytes;
          const uint8_t* place = reinterpret_cast<const uint8_t*>(rows.bf16(first)) + size_t(step0 + s) * kRowBytes;
          const RowGroup group = in_place ? RowGroup{place, rows.apart, kRowBytes, n, row_scales}
                                          : RowGroup{gathered, kRowBytes, together * kRowBytes, n, row_scales};
          const Ahead ahead = share_of_panel(packed, steps * step_bytes, steps, g, groups);
          Ops::group(group, panel, steps, scale0, scale1, ahead, sums + size_t(first) * kPairColumns);
        }
      }
    }
  }
}

}  // namespace
}  // namespace moe_mk
