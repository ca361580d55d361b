// Rows rounded to INT8 with a scale for each part of k, and their products with integer weights in groups and in ggml blocks.
//
// A part of a row (32, 64 or 128 inputs: the parts of the weights, part_scales.h) has the scale amax / 127 and codes as in
// int8.h. Of each part in order
//   sum   = sum of code of the weight * code of the row, exact in 32 bits and as f32
//   total = fma(sum, scale of the weight * scale of the row, total)
//   total = fma(-minimum of the weight, scale of the row * sum of codes of the row, total), of weights with minima
// so every instruction set gives the same bits for any number of rows. Four-bit codes without minima are -8 to 7.
//
// Order of codes in a row: as the packed bytes of weights give up four k at a time. Of each eight k, four-bit formats have
// those of the low halves of bytes first, 0 4 1 5, then those of the high halves, 2 6 3 7; INT8 groups have them in order.
// Rows::scales of a row: [3][parts]: its scales, scale * sum of codes, and 32-bit sums of codes.
#pragma once
#include "int8.h"
#include "part_scales.h"

namespace moe_mk {
namespace {

constexpr int kUnitSteps = kActivationBlock / kStep;  // whole parts, and a whole group of more than 128
constexpr int kMostUnitParts = kUnitSteps;
constexpr size_t kUnitPanel = size_t(kUnitSteps) * kStep * kPairColumns;  // bytes
constexpr size_t kCodeRow = 2 * kTileColumns * 4;                        // four k of both tiles of a pair, side by side
constexpr int kCodeOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};

typedef uint8_t u8x64 __attribute__((vector_size(64)));

inline __attribute__((always_inline)) f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#else
  f32x16 out;
  for (int lane = 0; lane < 16; ++lane) out[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return out;
#endif
}

inline __attribute__((always_inline)) f32x16 to_f32(i32x16 sums) {
#if defined(__AVX512F__)
  return bits<f32x16>(_mm512_cvtepi32_ps(bits<__m512i>(sums)));
#else
  return __builtin_convertvector(sums, f32x16);
#endif
}

// What a row of num_parts parts has next to its codes.
struct RowParts {
  const float* scales;
  int num_parts;

  const float* sums() const { return scales + num_parts; }  // times the scale
  int32_t codes(int part) const { return bits<int32_t>(scales[2 * num_parts + part]); }
};

inline int row_parts(const Columns& w) { return (w.num_steps * (kStep / 2) + w.part_pairs - 1) / w.part_pairs; }

// What unsigned codes of weights have to be reduced by: 8 of INT4 and 128 of INT8, unless minima take account of it.
inline int code_base(const Columns& w) { return w.format == kInt8Groups ? 128 : w.minima ? 0 : 8; }

// Codes of one unit of k of a pair, [k / 4][tile][16][4], `row` bytes from four k to the next: unsigned, or s8 less code_base().
template <bool Unsigned>
inline void unpack_unit(const Columns& w, int pair, int step, int steps, uint8_t* panel, size_t row = kCodeRow) {
  const uint8_t* from = w.data + size_t(pair) * w.pair_bytes + size_t(step) * w.step_bytes;
  if (w.format == kInt8Groups) {
    const u8x64 sign = u8x64{} + uint8_t(Unsigned ? 0x80 : 0);
    for (size_t at = 0; at < steps * w.step_bytes; at += kCodeRow, panel += row)
      for (int tile = 0; tile < 2; ++tile) store(panel + tile * 64, load<u8x64>(from + at + tile * 64) ^ sign);
    return;
  }
  const u8x64 base = u8x64{} + uint8_t(Unsigned ? 0 : code_base(w)), low = u8x64{} + 15;
  typedef uint16_t u16x32 __attribute__((vector_size(64)));
  for (int line = 0; line < steps * 4; ++line, from += 2 * 64, panel += 2 * row)
    for (int tile = 0; tile < 2; ++tile) {
      const u8x64 codes = load<u8x64>(from + tile * 64), high = bits<u8x64>(bits<u16x32>(codes) >> 4);
      store(panel + tile * 64, (codes & low) - base);
      store(panel + row + tile * 64, (high & low) - base);
    }
}

// The part's rows of one total, in the order above. sum: exact integers.
inline __attribute__((always_inline)) f32x16 add_part(i32x16 sum, f32x16 scale, float row_scale, f32x16 total) {
  return fma16(to_f32(sum), scale * row_scale, total);
}
inline __attribute__((always_inline)) f32x16 take_minimum(f32x16 minimum, float row_sum, f32x16 total) {
  return fma16(-minimum, splat(row_sum), total);
}

// A unit of k of one pair: the panel of its codes, and the scales and minima of its parts.
struct CodeUnit {
  const Columns& w;
  const uint8_t* panel;
  const float *scales, *minima;  // [part][32]
  int step, steps, part_steps, num_parts;  // num_parts: of a whole row
};

// Adds the products of `quads` times four k to sums [n][2], the codes of rows from `offset` on.
inline void add_dots(const uint8_t* panel, int quads, const Rows& rows, int first, int n, size_t offset, i32x16* sums) {
  for (int quad = 0; quad < quads; ++quad)
    for (int tile = 0; tile < 2; ++tile) {
      const i32x16 words = load<i32x16>(panel + quad * kCodeRow + tile * 64);
      const i32x16 k0 = (words << 24) >> 24, k1 = (words << 16) >> 24, k2 = (words << 8) >> 24, k3 = words >> 24;
      for (int m = 0; m < n; ++m) {
        int8_t x[4];
        std::memcpy(x, rows.codes(first + m) + offset + 4 * quad, 4);
        sums[2 * m + tile] += k0 * x[0] + k1 * x[1] + k2 * x[2] + k3 * x[3];
      }
    }
}

// A unit times n rows, at most kPortableCodeRows.
constexpr int kPortableCodeRows = 8;
inline void add_code_unit(const CodeUnit& unit, const Rows& rows, int first, int n, float* totals) {
  for (int done = 0, column = 0, at = unit.step / unit.part_steps; done < unit.steps; done += unit.part_steps, column += kPairColumns, ++at) {
    const int some = unit.steps - done < unit.part_steps ? unit.steps - done : unit.part_steps;
    i32x16 sums[2 * kPortableCodeRows] = {};
    const uint8_t* codes = unit.panel + size_t(done) * (kStep / 4) * kCodeRow;
    add_dots(codes, some * (kStep / 4), rows, first, n, size_t(unit.step + done) * kStep, sums);
    for (int m = 0; m < n; ++m) {
      const RowParts row = {rows.scales[first + m], unit.num_parts};
      for (int tile = 0; tile < kPairColumns; tile += kTileColumns) {
        float* to = totals + size_t(m) * kPairColumns + tile;
        f32x16 total = add_part(sums[2 * m + tile / kTileColumns], load<f32x16>(unit.scales + column + tile), row.scales[at], load<f32x16>(to));
        if (unit.w.minima) total = take_minimum(load<f32x16>(unit.minima + column + tile), row.sums()[at], total);
        store(to, total);
      }
    }
  }
}

// Multiplies any number of rows by one unpacked panel at a time; k is split into chunks so that their rows fit in the L2 cache.
inline void multiply_int8_parts(const Columns& w, const Rows& rows, const Scratch& scratch, float* totals) {
  alignas(64) float scales[kMostUnitParts * kPairColumns], minima[kMostUnitParts * kPairColumns];
  const int chunk = steps_that_fit(2 * w.gather_bytes, rows.num_rows, 1, kUnitSteps);  // a byte a code
  std::memset(totals, 0, size_t(w.num_pairs) * rows.num_rows * kPairColumns * sizeof(float));
  for (int first_step = 0; first_step < w.num_steps; first_step += chunk) {
    const int last_step = w.num_steps - first_step < chunk ? w.num_steps : first_step + chunk;
    for (int pair = 0; pair < w.num_pairs; ++pair)
      for (int step = first_step; step < last_step; step += kUnitSteps) {
        const int steps = last_step - step < kUnitSteps ? last_step - step : kUnitSteps;
        part_scales(w, pair, step, steps, scales, minima);
        unpack_unit<false>(w, pair, step, steps, scratch.panel);
        const CodeUnit unit = {w, scratch.panel, scales, minima, step, steps, w.part_pairs / (kStep / 2), row_parts(w)};
        for (int first = 0; first < rows.num_rows; first += kPortableCodeRows) {
          const int n = rows.num_rows - first < kPortableCodeRows ? rows.num_rows - first : kPortableCodeRows;
          add_code_unit(unit, rows, first, n, totals + (size_t(pair) * rows.num_rows + first) * kPairColumns);
        }
      }
  }
}

// Rounds a part of at most 128 inputs to s8 codes. Returns the scale, or NaN where an input is none or infinite.
inline float round_part(const uint16_t* x, int count, int8_t* codes, int32_t* sum_of_codes) {
  alignas(64) uint16_t inputs[kActivationBlock] = {};
  std::memcpy(inputs, x, size_t(count) * 2);
  const int vectors = (count + 15) / 16;
  f32x16 most{};
  i32x16 any_nan{};
  for (int i = 0; i < vectors; ++i) {
    const f32x16 v = widen(inputs + 16 * i);
    most = max16(most, max16(v, -v));
    any_nan |= nan16(v - v);
  }
  const float amax = largest(most);
  const bool nan = any16(any_nan);
  const float scale = amax > 0 ? (amax / 127.0f < 1.17549435e-38f ? 1.17549435e-38f : amax / 127.0f) : 1.0f;
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  i32x16 total{};
  for (int i = 0; i < vectors; ++i) {
    const f32x16 v = min16(max16(widen(inputs + 16 * i) / scale, splat(-127.0f)), splat(127.0f));
    const i32x16 rounded = bits<i32x16>(v + magic) - 0x4b400000;
    total += rounded;
    store(codes + 16 * i, lower_bytes(bits<u32x16>(rounded)));
  }
  *sum_of_codes = sum_of_lanes(total);
  return nan ? __builtin_nanf("") : scale;
}

// The codes of a part in the order of the weights, padded to whole steps by zeros; of each eight, four-bit formats permute them.
inline void store_codes(const int8_t* codes, int padded, bool four_bits, uint8_t* to) {
  if (!four_bits) {
    std::memcpy(to, codes, size_t(padded));
    return;
  }
  for (int i = 0; i < padded; i += 8)
    for (int j = 0; j < 8; ++j) to[i + j] = uint8_t(codes[i + kCodeOrder[j]]);
}

// One row of `count` inputs -> codes, padded to whole steps, and [3][parts] of each `part` inputs. bf16 x; codes may begin where x
// does. Without x: codes that were rounded before, with their scales in `to`.
inline void round_row(const uint16_t* x, const int8_t* rounded, int64_t count, const RowLayout& layout, uint8_t* codes, float* to) {
  const int64_t parts = (count + layout.part - 1) / layout.part;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = i * layout.part;
    const int n = int(count - first < layout.part ? count - first : layout.part), padded = (n + kStep - 1) / kStep * kStep;
    alignas(64) int8_t some[kActivationBlock] = {};
    int32_t sum = 0;
    if (x != nullptr) {
      to[i] = round_part(x + first, n, some, &sum);
    } else {
      std::memcpy(some, rounded + first, size_t(n));
      for (int j = 0; j < n; ++j) sum += some[j];
    }
    store_codes(some, padded, layout.four_bits, codes + first);
    to[parts + i] = to[i] * float(sum);
    to[2 * parts + i] = bits<float>(sum);
  }
}

}  // namespace
}  // namespace moe_mk
