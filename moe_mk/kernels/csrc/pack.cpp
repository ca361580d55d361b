// Packs one projection of one expert, and unpacks it again: a permutation of the bytes, nothing is computed.
//
// Reads    rows [num_outputs, num_inputs] at any row stride, once; writes the packed slot, once (1.0x the bytes, plus
//          zero padding to 16 (two sources) or 32 (one source) outputs and to 32 inputs).
// Packed   [pair][step], a pair is 2 tiles of 16 output columns, a step 32 inputs. With two sources (gate, up)
//          tile 0 holds 16 gate columns and tile 1 the SAME 16 up columns, so that silu(gate) * up needs no exchange;
//          with one source the tiles are neighbours. The tiles alternate every 64 B: one stream of memory a pair.
// bf16  2 KiB a step in "VNNI" order, what TDPBF16PS and VDPBF16PS eat: [k pair r: 16][tile: 2][column n: 16][parity j: 2]
// fp8   1 KiB a step: [group g: 8][tile: 2][l: 4][h: 2][b: 8]; group g holds the k pairs 2 g + h, column n = 4 l + b / 2,
//       parity j = b % 2. Then unpacklo/unpackhi of (low byte, high byte) give two VNNI rows.
// Alignment: none assumed of the source; the packed slot is 64-byte aligned by its caller.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "team.h"

namespace moe_mk {
namespace {

struct Layout {
  int64_t num_outputs, num_inputs, pairs, steps;
  size_t element, tile_bytes;
  bool two_sources;
};

Layout layout_of(int64_t num_outputs, int64_t num_inputs, int32_t format, bool two_sources) {
  const int64_t outputs_per_pair = two_sources ? kTileColumns : kPairColumns;
  const size_t element = format == kFp8 ? 1 : 2;
  return {num_outputs, num_inputs, (num_outputs + outputs_per_pair - 1) / outputs_per_pair,
          (num_inputs + kStep - 1) / kStep, element, kTileColumns * kStep * element, two_sources};
}

// One tile-step as plain rows: 16 outputs x 32 inputs, zero beyond the matrix.
using PlainTile = uint8_t[kTileColumns][kStep * 2];

template <typename Visit>
void each_row(const Layout& lay, int64_t pair, int tile, Visit visit) {
  const int64_t first = lay.two_sources ? pair * kTileColumns : pair * kPairColumns + tile * kTileColumns;
  const int64_t rows = std::max<int64_t>(0, std::min<int64_t>(kTileColumns, lay.num_outputs - first));
  for (int64_t row = 0; row < rows; ++row) visit(row, first + row);
}

// Pairs of inputs (two codes, or two bf16) are what moves: `T` is uint16_t for fp8, uint32_t for bf16.
// The T of (column n, k pair r) of tile 0 in its step; tile 1 lies 64 B on.
template <typename T>
constexpr size_t packed_place(int n, int r) {
  if (sizeof(T) == 4) return size_t(r) * 2 * kTileColumns + n;
  return size_t(r / 2) * 64 + (n / 4) * 8 + (r % 2) * 4 + n % 4;
}

template <typename T>
void pack_tile(const PlainTile& plain, uint8_t* packed) {
  for (int n = 0; n < kTileColumns; ++n)
    for (int r = 0; r < kStep / 2; ++r)
      std::memcpy(packed + packed_place<T>(n, r) * sizeof(T), plain[n] + r * sizeof(T), sizeof(T));
}

template <typename T>
void unpack_tile(const uint8_t* packed, PlainTile& plain) {
  for (int n = 0; n < kTileColumns; ++n)
    for (int r = 0; r < kStep / 2; ++r)
      std::memcpy(plain[n] + r * sizeof(T), packed + packed_place<T>(n, r) * sizeof(T), sizeof(T));
}

// The same for a tile that lies wholly inside the matrix, straight from the source: `rows[n]` is column n's 32 inputs.
// fp8: four columns give one 16 B piece a group, the low code pairs of all four, then the high ones.
// Returns whether any code is a NaN (all seven low bits set), found eight bytes at a time.
bool pack_whole_fp8(const uint8_t* const rows[kTileColumns], uint8_t* packed) {
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

void pack_whole_bf16(const uint8_t* const rows[kTileColumns], uint8_t* packed) {
  for (int r = 0; r < kStep / 2; ++r)
    for (int n = 0; n < kTileColumns; ++n) std::memcpy(packed + r * 128 + n * 4, rows[n] + r * 4, sizeof(uint32_t));
}

int64_t nans_in(const PlainTile& plain) {
  int nans = 0;
  for (int n = 0; n < kTileColumns; ++n)
    for (int k = 0; k < kStep; ++k) nans += (plain[n][k] & 0x7f) == 0x7f;
  return nans;
}

int64_t nans_of(const uint8_t* const rows[kTileColumns]) {
  int64_t nans = 0;
  for (int n = 0; n < kTileColumns; ++n)
    for (int k = 0; k < kStep; ++k) nans += (rows[n][k] & 0x7f) == 0x7f;
  return nans;
}

// Where the 16 rows of a tile start; false if some of them lie beyond the matrix.
bool rows_of(const Layout& lay, int64_t pair, int tile, const uint8_t* source, int64_t row_stride,
             const uint8_t* rows[kTileColumns]) {
  int64_t inside = 0;
  each_row(lay, pair, tile, [&](int64_t row, int64_t output) {
    rows[row] = source + output * row_stride * int64_t(lay.element);
    ++inside;
  });
  return inside == kTileColumns;
}

template <typename Body>
void each_pair(int64_t pairs, int threads, Body body) {
  Lease team;
  std::atomic<int64_t> next{0};
  team->run(int(std::max<int64_t>(1, std::min<int64_t>(threads, pairs))), [&](int) {
    for (int64_t pair; (pair = next.fetch_add(1)) < pairs;) body(pair);
  });
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_pack(const void* first, const void* second, int64_t row_stride, int64_t num_outputs, int64_t num_inputs,
                    int32_t format, void* packed, int32_t threads, int64_t* num_nans) {
  if (num_outputs <= 0 || num_inputs <= 0 || (format != kFp8 && format != kBf16)) return kBadShape;
  const Layout lay = layout_of(num_outputs, num_inputs, format, second != nullptr);
  std::atomic<int64_t> nans{0};
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    int64_t found = 0;
    PlainTile plain;
    for (int tile = 0; tile < 2; ++tile) {
      const auto* source = static_cast<const uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      const uint8_t* rows[kTileColumns];
      const int64_t whole_steps = rows_of(lay, pair, tile, source, row_stride, rows) ? lay.num_inputs / kStep : 0;
      for (int64_t step = 0; step < lay.steps; ++step) {
        if (step < whole_steps) {
          uint8_t* to = static_cast<uint8_t*>(packed) + (pair * lay.steps + step) * 2 * lay.tile_bytes + tile * 64;
          bool wild = false;
          if (format == kFp8) wild = pack_whole_fp8(rows, to);
          else pack_whole_bf16(rows, to);
          if (wild) found += nans_of(rows);
          for (auto& row : rows) row += kStep * lay.element;
          continue;
        }
        std::memset(plain, 0, sizeof plain);
        const int64_t inputs = std::min<int64_t>(kStep, lay.num_inputs - step * kStep);
        each_row(lay, pair, tile, [&](int64_t row, int64_t output) {
          std::memcpy(plain[row], source + (output * row_stride + step * kStep) * lay.element, inputs * lay.element);
        });
        uint8_t* to = static_cast<uint8_t*>(packed) + (pair * lay.steps + step) * 2 * lay.tile_bytes + tile * 64;
        if (format == kFp8) {
          pack_tile<uint16_t>(plain, to);
          found += nans_in(plain);
        } else {
          pack_tile<uint32_t>(plain, to);
        }
      }
    }
    nans += found;
  });
  if (num_nans != nullptr) *num_nans = nans;
  return kOk;
}

int32_t moe_mk_unpack(const void* packed, void* first, void* second, int64_t row_stride, int64_t num_outputs,
                      int64_t num_inputs, int32_t format, int32_t threads) {
  if (num_outputs <= 0 || num_inputs <= 0 || (format != kFp8 && format != kBf16)) return kBadShape;
  const Layout lay = layout_of(num_outputs, num_inputs, format, second != nullptr);
  each_pair(lay.pairs, threads, [&](int64_t pair) {
    PlainTile plain;
    for (int tile = 0; tile < 2; ++tile) {
      auto* target = static_cast<uint8_t*>(lay.two_sources && tile == 1 ? second : first);
      for (int64_t step = 0; step < lay.steps; ++step) {
        const uint8_t* from =
            static_cast<const uint8_t*>(packed) + (pair * lay.steps + step) * 2 * lay.tile_bytes + tile * 64;
        if (format == kFp8) unpack_tile<uint16_t>(from, plain);
        else unpack_tile<uint32_t>(from, plain);
        const int64_t inputs = std::min<int64_t>(kStep, lay.num_inputs - step * kStep);
        each_row(lay, pair, tile, [&](int64_t row, int64_t output) {
          std::memcpy(target + (output * row_stride + step * kStep) * lay.element, plain[row], inputs * lay.element);
        });
      }
    }
  });
  return kOk;
}
