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
// int5  640 B a step, q5 too: [line: 5][tile: 2][column n: 16][parity j: 2] of 16 bits, three codes and a bit of a fourth (each_piece).
// q6    768 B a step: the same in six lines, two codes and four bits of others.
// Blocks of ggml are taken apart into codes, in order of k, and scales (part_scales.h); all their bits are kept.
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

struct Offset : Words {  // unsigned bytes: four, less 128
  static Word packed(Word word) { return word ^ 0x80808080u; }
  static Word plain(Word word) { return word ^ 0x80808080u; }
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
    case kInt4:
    case kMxFp4:
    case kNvFp4: pack_tile<Nibbles>(rows, step_bytes, packed); return 0;
    case kInt8Groups: pack_tile<Offset>(rows, step_bytes, packed); return 0;
    default: pack_tile<Words>(rows, step_bytes, packed); return 0;
  }
}

void unpack_step(int32_t format, const uint8_t* packed, size_t step_bytes, PlainTile& plain) {
  switch (format) {
    case kFp8:
    case kMxFp8: return unpack_tile<Halfwords>(packed, step_bytes, plain);
    case kInt4:
    case kMxFp4:
    case kNvFp4: return unpack_tile<Nibbles>(packed, step_bytes, plain);
    case kInt8Groups: return unpack_tile<Offset>(packed, step_bytes, plain);
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
  const bool sizes = num_outputs > 0 && num_inputs > 0;
  return sizes && is_format(format) && !has_super_blocks(format) && format != kInt5 && (bits_of(format) != 4 || num_inputs % 2 == 0);
}

// Blocks of ggml: `steps` of 32 k in `bytes`.
struct BlockShape {
  int steps, bytes, format;
};

BlockShape shape_of_block(int32_t type) {
  switch (type) {
    case kBlockQ4_0: return {1, 18, kInt4};
    case kBlockQ4_1: return {1, 20, kInt4};
    case kBlockQ5_1: return {1, 24, kInt5};
    case kBlockQ8_0: return {1, 34, kInt8Groups};
    case kBlockQ4K: return {kSuperSteps, 144, kQ4K};
    case kBlockQ5K: return {kSuperSteps, 176, kQ5K};
    case kBlockQ6K: return {kSuperSteps, 210, kQ6K};
    default: return {0, 0, 0};
  }
}

// Bits `shift` to `shift + width - 1` of a byte of a block.
struct Bits {
  int byte, shift, width;
};

// Where a block holds code k of 32 of a step: its low bits, and the bits above four (width 0: none).
struct CodePlace {
  Bits low, high;
};

CodePlace place_of_code(int32_t type, int step, int k) {
  switch (type) {
    case kBlockQ4_0: return {{2 + k % 16, k / 16 * 4, 4}, {0, 0, 0}};
    case kBlockQ4_1: return {{4 + k % 16, k / 16 * 4, 4}, {0, 0, 0}};
    case kBlockQ5_1: return {{8 + k % 16, k / 16 * 4, 4}, {4 + k / 8, k % 8, 1}};
    case kBlockQ8_0: return {{2 + k, 0, 8}, {0, 0, 0}};
    case kBlockQ4K: return {{16 + step / 2 * 32 + k, step % 2 * 4, 4}, {0, 0, 0}};
    case kBlockQ5K: return {{48 + step / 2 * 32 + k, step % 2 * 4, 4}, {16 + k, step, 1}};
    default: return {{step / 4 * 64 + step % 2 * 32 + k, step % 4 / 2 * 4, 4}, {128 + step / 4 * 32 + k, step % 4 * 2, 2}};
  }
}

uint8_t get(const uint8_t* block, Bits at) { return uint8_t(block[at.byte] >> at.shift & ((1 << at.width) - 1)); }
void put(uint8_t* block, Bits at, int value) { block[at.byte] = uint8_t(block[at.byte] | value << at.shift); }

// The places of the codes of a block, computed once a call.
struct BlockMap {
  BlockShape shape;
  CodePlace block[kSuperSteps][kStep];

  explicit BlockMap(int32_t type) : shape(shape_of_block(type)) {
    for (int step = 0; step < shape.steps; ++step)
      for (int k = 0; k < kStep; ++k) block[step][k] = place_of_code(type, step, k);
  }
  int code(const uint8_t* from, int step, int k) const {
    const CodePlace& place = block[step][k];
    return place.high.width == 0 ? get(from, place.low) : get(from, place.low) | get(from, place.high) << 4;
  }
  void set_code(uint8_t* to, int step, int k, int code) const {
    const CodePlace& place = block[step][k];
    put(to, place.low, place.high.width == 0 ? code : code & 15);
    if (place.high.width != 0) put(to, place.high, code >> 4);
  }
};

// Code k of column n of a packed tile of a step.
int packed_code(int format, const uint8_t* tile, int n, int k) {
  if (format == kInt8Groups) return tile[k / 4 * 128 + n * 4 + k % 4];
  int code = 0;
  each_piece(format, k / 2, [&](const Piece& piece) {
    uint16_t lane;
    std::memcpy(&lane, tile + piece.line * 128 + n * 4 + k % 2 * 2, sizeof lane);
    code |= (lane >> piece.lane_bit & ((1 << piece.width) - 1)) << piece.code_bit;
  });
  return code;
}

// The same, into zeros.
void set_packed_code(int format, uint8_t* tile, int n, int k, int code) {
  if (format == kInt8Groups) {
    tile[k / 4 * 128 + n * 4 + k % 4] = uint8_t(code);
    return;
  }
  each_piece(format, k / 2, [&](const Piece& piece) {
    uint8_t* at = tile + piece.line * 128 + n * 4 + k % 2 * 2;
    uint16_t lane;
    std::memcpy(&lane, at, sizeof lane);
    lane = uint16_t(lane | (code >> piece.code_bit & ((1 << piece.width) - 1)) << piece.lane_bit);
    std::memcpy(at, &lane, sizeof lane);
  });
}

// The bytes of a block that are no codes, and where a pair holds them for column c of 32: `use(byte, place)`.
template <typename Use>
void each_scale_byte(int32_t type, int c, Use use) {
  const int tile = c / kTileColumns, n = c % kTileColumns;
  switch (type) {
    case kBlockQ4_0:
    case kBlockQ8_0:
      for (int i = 0; i < 2; ++i) use(i, c * 2 + i);
      return;
    case kBlockQ6K:
      for (int i = 0; i < 2; ++i) use(208 + i, c * 2 + i);
      for (int i = 0; i < 16; ++i) use(192 + i, 64 + i * kPairColumns + c);
      return;
    default:
      for (int i = 0; i < 4; ++i) use(i, i / 2 * 64 + c * 2 + i % 2);
      if (shape_of_block(type).steps == 1) return;
      for (int i = 0; i < 12; ++i) use(4 + i, 128 + (tile * 12 + i) * kTileColumns + n);
  }
}

// Bytes of the scales of one block of all outputs of a pair.
size_t scale_bytes_of_pair(const BlockMap& map) {
  return map.shape.steps == 1 ? kPairColumns * (map.shape.bytes - bits_of(map.shape.format) * kStep / 8) : super_bytes(map.shape.format);
}

// f16 scales of a block that are not finite.
int nans_of_block(int32_t type, const uint8_t* block) {
  const auto bad = [&](int at) { return (block[at + 1] & 0x7c) == 0x7c; };
  if (type == kBlockQ6K) return bad(208);
  return bad(0) + (type == kBlockQ4_0 || type == kBlockQ8_0 ? 0 : bad(2));
}

bool blocks_fit(int64_t num_outputs, int64_t num_inputs, int32_t type) {
  const BlockShape shape = shape_of_block(type);
  return shape.steps != 0 && num_outputs > 0 && num_inputs > 0 && num_inputs % (shape.steps * kStep) == 0;
}

template <typename Body>
void each_pair(int64_t pairs, int threads, Body body) {
  ThreadPoolLease pool(threads);
  std::atomic<int64_t> next{0};
  pool->run(int(std::max<int64_t>(1, std::min<int64_t>(std::abs(threads), pairs))), [&](int) {
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

int32_t moe_mk_pack_blocks(const void* first, const void* second, int64_t row_stride, int64_t num_outputs, int64_t num_inputs,
                           int32_t block_type, void* packed, void* scales, int32_t threads, int64_t* num_nans) {
  if (!blocks_fit(num_outputs, num_inputs, block_type)) return kBadShape;
  const BlockMap map(block_type);
  const Layout lay = layout_of(num_outputs, num_inputs, map.shape.format, second != nullptr);
  const size_t step_bytes = bytes_of_step(map.shape.format), scale_bytes = scale_bytes_of_pair(map);
  const int64_t blocks = lay.steps / map.shape.steps;
  std::atomic<int64_t> nans{0};
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    uint8_t* codes = static_cast<uint8_t*>(packed) + pair * lay.steps * step_bytes;
    uint8_t* own_scales = static_cast<uint8_t*>(scales) + pair * blocks * scale_bytes;
    std::memset(codes, 0, lay.steps * step_bytes);
    std::memset(own_scales, 0, blocks * scale_bytes);
    for (int tile = 0; tile < 2; ++tile) {
      const auto* source = static_cast<const uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      each_row(lay, pair, tile, [&](int64_t n, int64_t output) {
        const uint8_t* block = source + output * row_stride;
        for (int64_t b = 0; b < blocks; ++b, block += map.shape.bytes) {
          for (int step = 0; step < map.shape.steps; ++step)
            for (int k = 0; k < kStep; ++k)
              set_packed_code(map.shape.format, codes + (b * map.shape.steps + step) * step_bytes + tile * 64, int(n), k,
                              map.code(block, step, k));
          each_scale_byte(block_type, int(tile * kTileColumns + n),
                          [&](int at, int place) { own_scales[b * scale_bytes + place] = block[at]; });
          nans += nans_of_block(block_type, block);
        }
      });
    }
  });
  if (num_nans != nullptr) *num_nans = nans;
  return kOk;
}

int32_t moe_mk_unpack_blocks(const void* packed, const void* scales, void* first, void* second, int64_t row_stride,
                             int64_t num_outputs, int64_t num_inputs, int32_t block_type, int32_t threads) {
  if (!blocks_fit(num_outputs, num_inputs, block_type)) return kBadShape;
  const BlockMap map(block_type);
  const Layout lay = layout_of(num_outputs, num_inputs, map.shape.format, second != nullptr);
  const size_t step_bytes = bytes_of_step(map.shape.format), scale_bytes = scale_bytes_of_pair(map);
  const int64_t blocks = lay.steps / map.shape.steps;
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    const uint8_t* codes = static_cast<const uint8_t*>(packed) + pair * lay.steps * step_bytes;
    const uint8_t* own_scales = static_cast<const uint8_t*>(scales) + pair * blocks * scale_bytes;
    for (int tile = 0; tile < 2; ++tile) {
      auto* target = static_cast<uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      each_row(lay, pair, tile, [&](int64_t n, int64_t output) {
        uint8_t* block = target + output * row_stride;
        for (int64_t b = 0; b < blocks; ++b, block += map.shape.bytes) {
          std::memset(block, 0, map.shape.bytes);
          for (int step = 0; step < map.shape.steps; ++step)
            for (int k = 0; k < kStep; ++k)
              map.set_code(block, step, k,
                           packed_code(map.shape.format, codes + (b * map.shape.steps + step) * step_bytes + tile * 64, int(n), k));
          each_scale_byte(block_type, int(tile * kTileColumns + n),
                          [&](int at, int place) { block[at] = own_scales[b * scale_bytes + place]; });
        }
      });
    }
  });
  return kOk;
}
