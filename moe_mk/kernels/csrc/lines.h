// Lines of 64 bytes in registers, with the byte operations that decode FP8 codes: AVX-512 and GFNI instructions, or without
// them an emulation in C++, so that the same kernel source can be tested on any machine.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__GFNI__)
#include <immintrin.h>
#endif

namespace moe_mk {
namespace {

#if !defined(__GFNI__)

struct Line {
  uint8_t bytes[64];
};

inline Line load_line(const uint8_t* from) {
  Line line;
  std::memcpy(line.bytes, from, 64);
  return line;
}
inline void store_line(uint8_t* to, const Line& line) { std::memcpy(to, line.bytes, 64); }

// Bit i of a result is the parity of byte 7 - i of the matrix AND the code, XOR bit i of the constant.
template <uint64_t Matrix, uint8_t Constant>
struct AffineTable {
  uint8_t of[256];

  constexpr AffineTable() : of() {
    for (int code = 0; code < 256; ++code)
      for (int i = 0; i < 8; ++i)
        of[code] = uint8_t(of[code] | (__builtin_parity(unsigned(Matrix >> (8 * (7 - i))) & 0xffu & unsigned(code)) ^ (Constant >> i & 1)) << i);
  }
};
template <uint64_t Matrix, uint8_t Constant>
inline Line gf2_affine(const Line& codes) {
  static constexpr AffineTable<Matrix, Constant> table;
  Line out;
  for (int n = 0; n < 64; ++n) out.bytes[n] = table.of[codes.bytes[n]];
  return out;
}
// Of each 16 bytes the low or the high eight of both lines, alternating.
template <int First>
inline Line interleave(const Line& even, const Line& odd) {
  Line out;
  for (int n = 0; n < 64; ++n) out.bytes[n] = (n % 2 == 0 ? even : odd).bytes[n / 16 * 16 + First + n % 16 / 2];
  return out;
}
inline Line interleave_low(const Line& even, const Line& odd) { return interleave<0>(even, odd); }
inline Line interleave_high(const Line& even, const Line& odd) { return interleave<8>(even, odd); }

// Whether any code of two lines has none of the bits.
inline bool any_without(const Line& one, const Line& other, uint8_t bits) {
  for (int n = 0; n < 64; ++n)
    if ((one.bytes[n] & bits) == 0 || (other.bytes[n] & bits) == 0) return true;
  return false;
}

#else

using Line = __m512i;

inline __attribute__((always_inline)) Line load_line(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline __attribute__((always_inline)) void store_line(uint8_t* to, Line line) { _mm512_store_si512(to, line); }

// Bit i of a result is the parity of byte 7 - i of the matrix AND the code, XOR bit i of the constant.
template <uint64_t Matrix, uint8_t Constant>
inline __attribute__((always_inline)) Line gf2_affine(Line codes) {
  return _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(int64_t(Matrix)), Constant);
}
// Of each 16 bytes the low or the high eight of both lines, alternating.
inline __attribute__((always_inline)) Line interleave_low(Line even, Line odd) { return _mm512_unpacklo_epi8(even, odd); }
inline __attribute__((always_inline)) Line interleave_high(Line even, Line odd) { return _mm512_unpackhi_epi8(even, odd); }

// Whether any code of two lines has none of the bits.
inline __attribute__((always_inline)) bool any_without(Line one, Line other, uint8_t bits) {
  const __m512i wanted = _mm512_set1_epi8(char(bits));
  return !_kortestz_mask64_u8(_mm512_testn_epi8_mask(one, wanted), _mm512_testn_epi8_mask(other, wanted));
}

#endif

}  // namespace
}  // namespace moe_mk
