// Properties of the stored formats: width of a code, and number of k per scale. To add a format, add a line here and a
// decoding policy in portable.h, avx512.h, and rows_int16.h (integers) or rows_f32.h; pack.cpp needs a policy if codes are not
// permuted as words. The loops over rows and tiles are the same for all formats.
#pragma once
#include <cstddef>

#include "abi.h"

namespace moe_mk {

constexpr bool is_format(int format) { return format >= 0 && format < kNumFormats; }
constexpr int bits_of(int format) {
  switch (format) {
    case kBf16: return 16;
    case kMxFp4:
    case kNvFp4:
    case kInt4:
    case kQ4K: return 4;
    case kQ5K:
    case kInt5: return 5;
    case kQ6K: return 6;
    default: return 8;
  }
}
// Scales of one output column in one step of 32 k stored as bytes; 0: none.
constexpr int groups_of_step(int format) {
  return format == kNvFp4 ? 2 : (format == kMxFp8 || format == kMxFp4 ? 1 : 0);
}
// One packed step of a pair: 2 x 16 columns of 32 codes.
constexpr size_t bytes_of_step(int format) { return size_t(128) * bits_of(format); }

// Formats whose f32 sum of a part of k is multiplied by a scale of its output, less a minimum times the sum of x.
constexpr bool has_parts(int format) { return format >= kInt4; }
constexpr bool has_super_blocks(int format) { return format >= kQ4K && format <= kQ6K; }
// Formats with parts that rows rounded to INT8 in parts are multiplied with as integers.
constexpr bool multiplies_int8_parts(int format) { return format == kInt4 || format == kInt8Groups || format == kQ4K; }
constexpr int kSuperSteps = 8;  // steps of a super-block of 256 k
constexpr size_t bytes_of_scale(int scale_type) { return scale_type == kScaleF32 ? 4 : 2; }
// Bytes of the scales of one super-block of a pair, as in a file: 16 and 18 B an output.
constexpr size_t super_bytes(int format) { return 32 * (format == kQ6K ? 18 : 16); }

// A lane of 16 bits of a packed step, of one column and parity, holds codes of several k pairs; a code is in one piece, or
// in several where 16 is no multiple of its bits. Bits code_bit to code_bit + width of a code are in line `line` from lane_bit on.
struct Piece {
  int line, lane_bit, code_bit, width;
};

// Calls use(Piece) for each piece of the code of k pair `pair` of a step, in formats of 4 to 6 bits.
template <typename Use>
inline __attribute__((always_inline)) void each_piece(int format, int pair, Use use) {
  if (format == kQ5K || format == kInt5) {
    if (pair < 15) return use(Piece{pair / 3, pair % 3 * 5, 0, 5});
    for (int line = 0; line < 5; ++line) use(Piece{line, 15, line, 1});
  } else if (format == kQ6K) {
    const int line = pair / 8 * 3, at = pair % 8;
    if (at < 6) return use(Piece{line + at / 2, at % 2 * 6, 0, 6});
    use(Piece{line + at - 6, 12, 0, 4});
    use(Piece{line + 2, at == 6 ? 12 : 14, 4, 2});
  } else {
    use(Piece{pair / 4, pair % 4 * 4, 0, 4});
  }
}

}  // namespace moe_mk
