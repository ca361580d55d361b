// The register kernel in the compiler's vector language: isa_scalar.cpp builds it for the baseline, isa_avx2.cpp for
// AVX2 + FMA. bf16 is widened to f32 (a shift, or a mask), so any machine runs it.
#pragma once
#include "blocked.h"
#include "epilogue.h"
#include "gate.h"
#include "int8_parts.h"
#include "quantize.h"

namespace moe_mk {
namespace {

typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

// A decoding policy: the k pairs of one tile that 64 packed bytes hold -> as many panel rows, kPanelRow apart, exact.
// pack.cpp documents the bytes. The same policies for AVX-512 are in avx512.h.
struct PortableFp8 {
  static constexpr int kRows = 2;

  // 16 packed bytes hold 8 columns of two k pairs each: [h: 2][b: 8].
  static void rows(const uint8_t* from, uint8_t* to) {
    for (int l = 0; l < 4; ++l) {
      const u16x16 both = decode16(load<u8x16>(from + l * 16));
      std::memcpy(to + l * 16, &both, 16);
      std::memcpy(to + kPanelRow + l * 16, reinterpret_cast<const uint8_t*>(&both) + 16, 16);
    }
  }
};

struct PortableInt8 {
  static constexpr int kRows = 2;

  // A word holds four k of a column; every eight-bit integer is exact in bf16.
  static void rows(const uint8_t* from, uint8_t* to) {
    const i32x16 words = load<i32x16>(from);
    for (int h = 0; h < 2; ++h) {
      const u32x16 even = bits<u32x16>(__builtin_convertvector((words << (24 - 16 * h)) >> 24, f32x16));
      const u32x16 odd = bits<u32x16>(__builtin_convertvector((words << (16 - 16 * h)) >> 24, f32x16));
      store(to + h * kPanelRow, (even >> 16) | odd);
    }
  }
};

struct PortableFp4 {
  static constexpr int kRows = 4;

  // Sixteen bits hold the codes of one column and parity of four k pairs, the first in the lowest.
  static void rows(const uint8_t* from, uint8_t* to) {
    for (int half = 0; half < 2; ++half) {
      const u16x16 codes = load<u16x16>(from + half * 32);
      for (int q = 0; q < kRows; ++q) store(to + q * kPanelRow + half * 32, decode_e2m1(codes >> (4 * q)));
    }
  }
};

// Integers of a format with parts: one step of one tile -> 16 panel rows.
inline void portable_codes(const Columns& w, const uint8_t* step, uint8_t* panel) {
  if (w.format == kInt8Groups) {
    for (int line = 0; line < 8; ++line) PortableInt8::rows(step + line * 128, panel + line * 2 * kPanelRow);
    return;
  }
  const int base = w.minima ? 0 : w.format == kQ6K ? 32 : 8;
  for (int r = 0; r < kStep / 2; ++r)
    for (int half = 0; half < 2; ++half) {
      u16x16 codes{};
      each_piece(w.format, r, [&](const Piece& piece) {
        const uint16_t mask = uint16_t((1 << piece.width) - 1), from = uint16_t(piece.lane_bit), to = uint16_t(piece.code_bit);
        codes |= (load<u16x16>(step + piece.line * 128 + half * 32) >> from & mask) << to;
      });
      const i32x16 values = __builtin_convertvector(codes, i32x16) - base;
      store(panel + r * kPanelRow + half * 32,
            __builtin_convertvector(bits<u32x16>(__builtin_convertvector(values, f32x16)) >> 16, u16x16));
    }
}

struct PortableOps {
  static constexpr int kGroup = 4, kPartRows = 4;

  static void codes(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
    const uint8_t* packed = w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes;
    for (int s = 0; s < steps; ++s, packed += w.step_bytes, panel += 2 * kPanelTile)
      for (int tile = 0; tile < 2; ++tile) portable_codes(w, packed + tile * 64, panel + tile * 64);
  }

  static void expand(const Columns& w, int pair, int step, int steps, uint8_t* panel) {
    decode_panel(w.format, w.data + pair * w.pair_bytes + size_t(step) * w.step_bytes, steps, panel);
    if (w.groups != nullptr) apply_group_scales(w, pair, step, steps, panel);
  }

  static void decode_panel(int format, const uint8_t* packed, int steps, uint8_t* panel) {
    switch (format) {
      case kInt8: return expand_as<PortableInt8>(packed, steps, panel);
      case kMxFp4:
      case kNvFp4: return expand_as<PortableFp4>(packed, steps, panel);
      default: return expand_as<PortableFp8>(packed, steps, panel);
    }
  }

  template <typename Decode>
  static void expand_as(const uint8_t* packed, int steps, uint8_t* panel) {
    for (int line = 0; line < steps * kStep / 2 / Decode::kRows; ++line)
      for (int tile = 0; tile < 2; ++tile)
        Decode::rows(packed + line * 128 + tile * 64, panel + size_t(line) * Decode::kRows * kPanelRow + tile * 64);
  }

  // sums += x of k pairs `first` to `last` times the panel.
  template <int N>
  static inline __attribute__((always_inline)) void add_products(const RowGroup& group, const uint8_t* panel, int first,
                                                                 int last, f32x8 (&sums)[N][2]) {
    for (int at = first; at < last; ++at) {
      const uint8_t* b = panel + size_t(at) * kPanelRow;
      const u32x8 left = load<u32x8>(b), right = load<u32x8>(b + 32);
      const f32x8 even0 = bits<f32x8>(left << 16), odd0 = bits<f32x8>(left & 0xffff0000u);
      const f32x8 even1 = bits<f32x8>(right << 16), odd1 = bits<f32x8>(right & 0xffff0000u);
      for (int m = 0; m < N; ++m) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(group.x + at / 16 * group.step_bytes + m * group.row_bytes) + 2 * (at % 16);
        const float x0 = widen_one(x[0]), x1 = widen_one(x[1]);
        sums[m][0] += even0 * x0;
        sums[m][1] += even1 * x0;
        sums[m][0] += odd0 * x1;
        sums[m][1] += odd1 * x1;
      }
    }
  }

  template <int N>
  static void parts_by_tile(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts, int tile, float* totals) {
    const int pairs = steps * (kStep / 2);
    for (int first = 0, part = 0; first < pairs; first += parts.pairs, ++part) {
      f32x8 sums[N][2] = {};
      add_products<N>(group, panel, first, first + parts.pairs < pairs ? first + parts.pairs : pairs, sums);
      const size_t at = size_t(part) * kPairColumns + tile * kTileColumns;
      for (int half = 0; half < 2; ++half) {
        const f32x8 scale = load<f32x8>(parts.scales + at + 8 * half);
        for (int m = 0; m < N; ++m) {
          float* to = totals + m * kPairColumns + 8 * half;
          const float row = group.scales == nullptr ? 1.0f : group.scales[m];
          f32x8 total = load<f32x8>(to) + sums[m][half] * (scale * row);
          if (parts.minima != nullptr)
            total -= load<f32x8>(parts.minima + at + 8 * half) * (parts.sums[m * parts.sums_stride + part] * row);
          store(to, total);
        }
      }
    }
  }

  static void parts(const RowGroup& group, const uint8_t* panel, int steps, const Parts& parts, const Ahead&, float* totals) {
    for (int tile = 0; tile < 2; ++tile) {
      const uint8_t* b = panel + tile * 64;
      float* to = totals + tile * kTileColumns;
      switch (group.num_rows) {
        case 1: parts_by_tile<1>(group, b, steps, parts, tile, to); break;
        case 2: parts_by_tile<2>(group, b, steps, parts, tile, to); break;
        case 3: parts_by_tile<3>(group, b, steps, parts, tile, to); break;
        default: parts_by_tile<kPartRows>(group, b, steps, parts, tile, to);
      }
    }
  }

  template <int N>
  static void rows_by_tile(const RowGroup& group, const uint8_t* panel, int steps, float scale, float* totals) {
    f32x8 sums[N][2] = {};
    add_products<N>(group, panel, 0, steps * (kStep / 2), sums);
    for (int m = 0; m < N; ++m) {
      const float factor = group.scales == nullptr ? scale : scale * group.scales[m];
      float* to = totals + m * kPairColumns;
      store(to, load<f32x8>(to) + sums[m][0] * factor);
      store(to + 8, load<f32x8>(to + 8) + sums[m][1] * factor);
    }
  }

  static void group(const RowGroup& group, const uint8_t* panel, int steps, float scale0, float scale1, const Ahead&, float* totals) {
    for (int tile = 0; tile < 2; ++tile) {
      const uint8_t* b = panel + tile * 64;
      const float scale = tile == 0 ? scale0 : scale1;
      float* to = totals + tile * kTileColumns;
      switch (group.num_rows) {
        case 1: rows_by_tile<1>(group, b, steps, scale, to); break;
        case 2: rows_by_tile<2>(group, b, steps, scale, to); break;
        case 3: rows_by_tile<3>(group, b, steps, scale, to); break;
        default: rows_by_tile<4>(group, b, steps, scale, to);
      }
    }
  }
};

void nothing() {}

uint64_t read(const uint8_t* data, int64_t bytes, int) {
  typedef uint64_t u64x8 __attribute__((vector_size(64)));
  u64x8 folded[4] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256)
    for (int lane = 0; lane < 4; ++lane) folded[lane] ^= load<u64x8>(data + i + lane * 64);
  uint64_t all = 0;
  for (int lane = 0; lane < 8; ++lane) all ^= folded[0][lane] ^ folded[1][lane] ^ folded[2][lane] ^ folded[3][lane];
  return all;
}

// Multiply-add on registers only; the loop's own results keep the compiler from dropping it.
double portable_peak(int64_t iterations, bool) {
  f32x8 sums[8] = {};
  f32x8 x = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int64_t i = 0; i < iterations; ++i) {
    asm volatile("" ::: "memory");
    for (int j = 0; j < 8; ++j) sums[j] += x * float(j);
  }
  volatile float sink = sums[0][0] + sums[1][1] + sums[2][2] + sums[3][3] + sums[4][4] + sums[5][5] + sums[6][6] + sums[7][7];
  (void)sink;
  return double(iterations) * 8 * 8 * 2;
}

}  // namespace
}  // namespace moe_mk
