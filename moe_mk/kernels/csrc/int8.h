// Tokens rounded to INT8, one scale each, and their exact integer products with INT8 weights.
//   amax = max |x|, scale = amax / 127 (1 for zeros), code = x / scale, nearest even; stored as code + 128, a u8
// Integer sums are 32 bits of at most 65 000 inputs (moe_mk_experts refuses more), whole outputs are scaled once, blocks
// in f32; so the result depends neither on the order of the sum nor on the other rows of a batch. Ops multiplies some
// rows with some pairs.
// Reads weights once a chunk of k whose codes stay in L2, codes from there. Writes totals [pair][row][32].
#pragma once
#include "blocked.h"
#include "vectors.h"

namespace moe_mk {
namespace {

constexpr int kInt8Offset = 128;
constexpr int kWholeSteps = 16;  // k steps at a time where no block ends: 16 KiB of weights stay in L1
constexpr int kInt8Group = 8;    // rows at a time
constexpr int kInt8Few = 4;      // up to here two pairs at a time: two streams of memory

inline float quantize_int8(const uint16_t* x, int64_t count, uint8_t* codes) {
  f32x16 most{};
  i32x16 any_nan{};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const f32x16 v = widen(x + i);
    most = max16(most, max16(v, -v));
    any_nan |= nan16(v - v);  // an infinity as well
  }
  float amax = largest(most);
  bool nan = any16(any_nan);
  for (; i < count; ++i) {
    const float v = widen_one(x[i]);
    amax = __builtin_fabsf(v) > amax ? __builtin_fabsf(v) : amax;
    nan = nan || v - v != 0.0f;
  }
  const float scale = amax > 0 ? (amax / 127.0f < 1.17549435e-38f ? 1.17549435e-38f : amax / 127.0f) : 1.0f;
  const f32x16 magic = splat(12582912.0f + kInt8Offset);  // 1.5 * 2^23: adding it rounds to an integer
  for (i = 0; i < count; i += 16) {
    const int n = count - i < 16 ? int(count - i) : 16;
    uint16_t some[16] = {};
    std::memcpy(some, x + i, size_t(n) * 2);
    const f32x16 v = min16(max16(widen(some) / scale, splat(-127.0f)), splat(127.0f));
    const u8x16 rounded = lower_bytes(bits<u32x16>(v + magic));
    std::memcpy(codes + i, &rounded, size_t(n));
  }
  return nan ? __builtin_nanf("") : scale;
}

// Shared by all kernels: whether the compiler contracts the product and the sum to an FMA must not differ between them.
inline __attribute__((always_inline)) void add_scaled(i32x16 sum, float scale, float* to) {
  store(to, load<f32x16>(to) + __builtin_convertvector(sum, f32x16) * scale);
}

// Adds the integer sums [n][2 * pairs] of one unit of k to the totals: as integers, or times the scales of their block.
inline void add_unit(const Columns& w, int pair, int pairs, int block, int num_rows, int first, int n, const i32x16* sums,
                     float* totals) {
  for (int m = 0; m < n; ++m)
    for (int t = 0; t < 2 * pairs; ++t) {
      float* to = totals + (size_t(pair + t / 2) * num_rows + first + m) * kPairColumns + t % 2 * kTileColumns;
      const i32x16 sum = sums[m * 2 * pairs + t];
      if (w.scales == nullptr) store(to, load<i32x16>(to) + sum);
      else add_scaled(sum, tile_scales(w, pair + t / 2, t % 2)[block], to);
    }
}

// Integers to f32 where they still are, times the scale of each token.
inline void finish_totals(const Columns& w, const Rows& rows, float* totals) {
  for (int pair = 0; pair < w.num_pairs; ++pair)
    for (int r = 0; r < rows.num_rows; ++r, totals += kPairColumns)
      for (int half = 0; half < kPairColumns; half += 16) {
        const f32x16 value = w.scales == nullptr ? __builtin_convertvector(load<i32x16>(totals + half), f32x16)
                                                 : load<f32x16>(totals + half);
        store(totals + half, value * rows.scales[r][0]);
      }
}

// Ops: dots(n, pairs, w, pair, step, steps, rows, first row, offsets [2 * pairs] kept from the first row on,
//           sums [n][2 * pairs])
template <typename Ops>
void multiply_int8(const Columns& w, const Rows& rows, const Scratch&, float* totals) {
  const int unit = w.scales == nullptr ? kWholeSteps : w.steps_per_block;
  const int fitting = int(w.gather_bytes / (size_t(rows.num_rows) * kStep)) / unit * unit, chunk = fitting < unit ? unit : fitting;
  const int together = rows.num_rows <= kInt8Few ? 2 : 1;
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int step0 = 0; step0 < w.num_steps; step0 += chunk) {
    const int end = w.num_steps - step0 < chunk ? w.num_steps : step0 + chunk;
    for (int pair = 0; pair < w.num_pairs; pair += together) {
      const int pairs = w.num_pairs - pair < together ? w.num_pairs - pair : together;
      for (int step = step0; step < end; step += unit) {
        i32x16 offsets[4];
        for (int first = 0; first < rows.num_rows; first += kInt8Group) {
          const int n = rows.num_rows - first < kInt8Group ? rows.num_rows - first : kInt8Group;
          i32x16 sums[2 * kInt8Group];
          Ops::dots(n, pairs, w, pair, step, end - step < unit ? end - step : unit, rows, first, offsets, sums);
          add_unit(w, pair, pairs, step / w.steps_per_block, rows.num_rows, first, n, sums, totals);
        }
      }
    }
  }
  finish_totals(w, rows, totals);
}

struct PortableInt8Ops {
  static void dots(int n, int pairs, const Columns& w, int pair, int step, int steps, const Rows& rows, int first, i32x16*,
                   i32x16* sums) {
    for (int i = 0; i < 2 * pairs * n; ++i) sums[i] = i32x16{};
    for (int line = 0; line < steps * kStep / 4; ++line)
      for (int t = 0; t < 2 * pairs; ++t) {
        const i32x16 words = load<i32x16>(w.data + size_t(pair + t / 2) * w.pair_bytes + step * w.step_bytes + line * 128 + t % 2 * 64);
        const i32x16 k0 = (words << 24) >> 24, k1 = (words << 16) >> 24, k2 = (words << 8) >> 24, k3 = words >> 24;
        for (int m = 0; m < n; ++m) {
          const uint8_t* x = rows.codes(first + m) + size_t(step) * kStep + 4 * line;
          sums[m * 2 * pairs + t] += k0 * (x[0] - kInt8Offset) + k1 * (x[1] - kInt8Offset) + k2 * (x[2] - kInt8Offset) +
                                     k3 * (x[3] - kInt8Offset);
        }
      }
  }
};

}  // namespace
}  // namespace moe_mk
