// Properties of the stored formats: width of a code, and number of k per byte of scale. To add a format, add a line here
// and a decoding policy in portable.h and avx512.h; pack.cpp needs a policy if codes are not permuted as words. The
// tile loops are the same for all formats.
#pragma once
#include <cstddef>

#include "abi.h"

namespace moe_mk {

constexpr bool is_format(int format) { return format >= 0 && format < kNumFormats; }
constexpr int bits_of(int format) { return format == kBf16 ? 16 : (format == kMxFp4 || format == kNvFp4 ? 4 : 8); }
// Scales of one output column in one step of 32 k stored as bytes; 0: none.
constexpr int groups_of_step(int format) {
  return format == kNvFp4 ? 2 : (format == kMxFp8 || format == kMxFp4 ? 1 : 0);
}
// One packed step of a pair: 2 x 16 columns of 32 codes.
constexpr size_t bytes_of_step(int format) { return size_t(128) * bits_of(format); }

}  // namespace moe_mk
