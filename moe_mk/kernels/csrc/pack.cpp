// Packs and unpacks one projection of one expert: a permutation of bytes without arithmetic.
//
// Reads    rows [num_outputs, num_inputs] at any row stride, once; writes the packed slot, once (1.0x the bytes, plus
//          zero padding to 16 (two sources) or 32 (one source) outputs and to 32 inputs).
// Packed   [pair][step], a pair is 2 tiles of 16 output columns, a step 32 inputs. With two sources (gate, up)
//          tile 0 holds 16 gate columns and tile 1 the SAME 16 up columns, so that silu(gate) * up needs no exchange;
//          with one source the tiles are neighbours. The tiles alternate every 64 B: one stream of memory a pair.
// bf16  2 KiB a step in "VNNI" order, the operand layout of TDPBF16PS and VDPBF16PS: [k pair r: 16][tile: 2][column n: 16][parity j: 2]
// fp8   1 KiB a step: [group g: 8][tile: 2][l: 4][h: 2][b: 8]; group g holds the k pairs 2 g + h, column n = 4 l + b / 2,
//       parity j = b % 2. Then unpacklo/unpackhi of (low byte, high byte) give two VNNI rows. MXFP8 likewise.
// int8  1 KiB a step: [group g: 8][tile: 2][column n: 16][k % 4: 4], the operand layout of VPDPBUSD and TDPBUSD.
// fp4   512 B a step: [line l: 4][tile: 2][column n: 16][parity j: 2] of 16 bits, the codes of the k pairs 4 l (lowest four
//       bits) to 4 l + 3: one shift and one table each give four VNNI rows. The source holds the even k in the low bits.
// Alignment: any for the source; the caller aligns the packed slot to 64 bytes.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "thread_pool.h"

namespace moe_mk {
namespace {

struct Layout {
  int64_t num_outputs, pairs, steps, whole_steps;
  size_t row_bytes, step_bytes;  // of a source row: in all, and of one step; a packed tile of a step is 16 of these
  bool two_sources;
};

Layout layout_of(int64_t num_outputs, int64_t num_inputs, int32_t format, bool two_sources) {
  const int64_t outputs_per_pair = two_sources ? kTileColumns : kPairColumns;
  const int bits = bits_of(format);
  return {num_outputs,       (num_outputs + outputs_per_pair - 1) / outputs_per_pair,
          (num_inputs + kStep - 1) / kStep, num_inputs / kStep,
          size_t(num_inputs) * bits / 8,    size_t(kStep) * bits / 8, two_sources};
}

// One tile-step as plain rows: 16 outputs x 32 inputs, zero beyond the matrix.
using PlainTile = uint8_t[kTileColumns][kStep * 2];

template <typename Visit>
void each_row(const Layout& lay, int64_t pair, int tile, Visit visit) {
  const int64_t first = lay.two_sources ? pair * kTileColumns : pair * kPairColumns + tile * kTileColumns;
  const int64_t rows = std::max<int64_t>(0, std::min<int64_t>(kTileColumns, lay.num_outputs - first));
  for (int64_t row = 0; row < rows; ++row) visit(row, first + row);
}

// Permutation of the words of a row of one step: the offset of word w of column n (tile 1 is 64 B on), its conversion.
struct Halfwords {  // fp8: two codes
  using Word = uint16_t;
  static size_t place(int n, int w) { return size_t(w / 2) * 128 + (n / 4) * 16 + (w % 2) * 8 + (n % 4) * 2; }
  static Word packed(Word word) { return word; }
  static Word plain(Word word) { return word; }
};

struct Words {  // bf16: two numbers; int8: four
  using Word = uint32_t;
  static size_t place(int n, int w) { return size_t(w) * 128 + n * 4; }
  static Word packed(Word word) { return word; }
  static Word plain(Word word) { return word; }
};

struct Nibbles : Words {  // e2m1: eight, whose even k go to the low half
  static Word packed(Word word) { return gathered(word) | gathered(word >> 4) << 16; }
  static Word plain(Word word) { return spread(word & 0xffff) | spread(word >> 16) << 4; }

 private:
  // The low four bits of each byte, together in sixteen; and back.
  static Word gathered(Word word) {
    word = (word & 0x0f0f0f0f) | (word & 0x0f0f0f0f) >> 4;
    return (word & 0xff) | (word >> 8 & 0xff00);
  }
  static Word spread(Word word) {
    word = (word & 0xff) | (word & 0xff00) << 8;
    return (word | word << 4) & 0x0f0f0f0f;
  }
};

template <typename Move>
void pack_tile(const uint8_t* const rows[kTileColumns], size_t step_bytes, uint8_t* packed) {
  using Word = typename Move::Word;
  for (int w = 0; w < int(step_bytes / sizeof(Word)); ++w)
    for (int n = 0; n < kTileColumns; ++n) {
      Word word;
      std::memcpy(&word, rows[n] + w * sizeof(Word), sizeof(Word));
      word = Move::packed(word);
      std::memcpy(packed + Move::place(n, w), &word, sizeof(Word));
    }
}

template <typename Move>
void unpack_tile(const uint8_t* packed, size_t step_bytes, PlainTile& plain) {
  using Word = typename Move::Word;
  for (int n = 0; n < kTileColumns; ++n)
    for (int w = 0; w < int(step_bytes / sizeof(Word)); ++w) {
      Word word;
      std::memcpy(&word, packed + Move::place(n, w), sizeof(Word));
      word = Move::plain(word);
      std::memcpy(plain[n] + w * sizeof(Word), &word, sizeof(Word));
    }
}

// The fast path of fp8: four columns give one 16 B piece per group, the low code pairs of all four, then the high ones.
// Returns whether any code is a NaN (all seven low bits set), found eight bytes at a time.
bool pack_fp8(const uint8_t* const rows[kTileColumns], uint8_t* packed) {
  uint64_t suspicious = 0;
  for (int l = 0; l < kTileColumns / 4; ++l) {
    for (int g = 0; g < kStep / 4; ++g) {
      uint32_t word[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&word[i], rows[4 * l + i] + 4 * g, sizeof(uint32_t));
      uint64_t piece[2] = {0, 0};
      for (int i = 0; i < 4; ++i) {
        piece[0] |= uint64_t(word[i] & 0xffff) << (16 * i);
        piece[1] |= uint64_t(word[i] >> 16) << (16 * i);
      }
      std::memcpy(packed + g * 128 + l * 16, piece, sizeof piece);
      for (const uint64_t codes : piece) {
        const uint64_t rest = (codes & 0x7f7f7f7f7f7f7f7f) ^ 0x7f7f7f7f7f7f7f7f;  // a zero byte where all bits were set
        suspicious |= (rest - 0x0101010101010101) & ~rest & 0x8080808080808080;
      }
    }
  }
  return suspicious != 0;
}

int64_t nans_of(const uint8_t* const rows[kTileColumns]) {
  int64_t nans = 0;
  for (int n = 0; n < kTileColumns; ++n)
    for (int k = 0; k < kStep; ++k) nans += (rows[n][k] & 0x7f) == 0x7f;
  return nans;
}

// One tile of one step; returns how many of its codes are NaN.
int64_t pack_step(int32_t format, const uint8_t* const rows[kTileColumns], size_t step_bytes, uint8_t* packed) {
  switch (format) {
    case kFp8:
    case kMxFp8: return pack_fp8(rows, packed) ? nans_of(rows) : 0;
    case kMxFp4:
    case kNvFp4: pack_tile<Nibbles>(rows, step_bytes, packed); return 0;
    default: pack_tile<Words>(rows, step_bytes, packed); return 0;
  }
}

void unpack_step(int32_t format, const uint8_t* packed, size_t step_bytes, PlainTile& plain) {
  switch (format) {
    case kFp8:
    case kMxFp8: return unpack_tile<Halfwords>(packed, step_bytes, plain);
    case kMxFp4:
    case kNvFp4: return unpack_tile<Nibbles>(packed, step_bytes, plain);
    default: return unpack_tile<Words>(packed, step_bytes, plain);
  }
}

// One tile of a pair, all steps. Whole steps of a tile inside the matrix are read in place, the rest
// through a zero-padded copy.
int64_t pack_column(const Layout& lay, int32_t format, const uint8_t* source, int64_t row_stride, int64_t pair, int tile,
                    uint8_t* to) {
  PlainTile plain = {};
  const uint8_t *direct[kTileColumns], *padded[kTileColumns];
  for (int n = 0; n < kTileColumns; ++n) padded[n] = plain[n];
  int inside = 0;
  each_row(lay, pair, tile, [&](int64_t row, int64_t output) {
    direct[row] = source + output * row_stride;
    ++inside;
  });
  const int64_t whole_steps = inside == kTileColumns ? lay.whole_steps : 0;
  int64_t nans = 0;
  for (int64_t step = 0; step < lay.steps; ++step, to += 2 * kTileColumns * lay.step_bytes) {
    if (step < whole_steps) {
      nans += pack_step(format, direct, lay.step_bytes, to);
    } else {
      std::memset(plain, 0, sizeof plain);
      const size_t bytes = std::min(lay.step_bytes, lay.row_bytes - size_t(step) * lay.step_bytes);
      for (int n = 0; n < inside; ++n) std::memcpy(plain[n], direct[n], bytes);
      nans += pack_step(format, padded, lay.step_bytes, to);
    }
    if (step + 1 < lay.steps)
      for (int n = 0; n < inside; ++n) direct[n] += lay.step_bytes;
  }
  return nans;
}

bool packable(int64_t num_outputs, int64_t num_inputs, int32_t format) {
  return num_outputs > 0 && num_inputs > 0 && is_format(format) && (bits_of(format) != 4 || num_inputs % 2 == 0);
}

template <typename Body>
void each_pair(int64_t pairs, int threads, Body body) {
  ThreadPoolLease pool;
  std::atomic<int64_t> next{0};
  pool->run(int(std::max<int64_t>(1, std::min<int64_t>(threads, pairs))), [&](int) {
    for (int64_t pair; (pair = next.fetch_add(1)) < pairs;) body(pair);
  });
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_pack(const void* first, const void* second, int64_t row_stride, int64_t num_outputs, int64_t num_inputs,
                    int32_t format, void* packed, int32_t threads, int64_t* num_nans) {
  if (!packable(num_outputs, num_inputs, format)) return kBadShape;
  const Layout lay = layout_of(num_outputs, num_inputs, format, second != nullptr);
  std::atomic<int64_t> nans{0};
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    for (int tile = 0; tile < 2; ++tile) {
      const auto* source = static_cast<const uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      uint8_t* to = static_cast<uint8_t*>(packed) + pair * lay.steps * 2 * kTileColumns * lay.step_bytes + tile * 64;
      nans += pack_column(lay, format, source, row_stride, pair, tile, to);
    }
  });
  if (num_nans != nullptr) *num_nans = nans;
  return kOk;
}

int32_t moe_mk_unpack(const void* packed, void* first, void* second, int64_t row_stride, int64_t num_outputs,
                      int64_t num_inputs, int32_t format, int32_t threads) {
  if (!packable(num_outputs, num_inputs, format)) return kBadShape;
  const Layout lay = layout_of(num_outputs, num_inputs, format, second != nullptr);
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    PlainTile plain;
    for (int tile = 0; tile < 2; ++tile) {
      auto* target = static_cast<uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      for (int64_t step = 0; step < lay.steps; ++step) {
        const size_t done = size_t(step) * lay.step_bytes, bytes = std::min(lay.step_bytes, lay.row_bytes - done);
        unpack_step(format,
                    static_cast<const uint8_t*>(packed) + (pair * lay.steps + step) * 2 * kTileColumns * lay.step_bytes + tile * 64,
                    lay.step_bytes, plain);
        each_row(lay, pair, tile, [&](int64_t row, int64_t output) {
          std::memcpy(target + output * row_stride + done, plain[row], bytes);
        });
      }
    }
  });
  return kOk;
}
