// The data of one call of the fused experts: packed matrices, assignments sorted by slot, and sets of experts.
//
// A set is a w13 and a w2 over some slots with the plan of their rows. Every call has the routed set; the shared experts, if
// given, are a second set of one slot that every row visits with weight 1; its intermediate size may differ.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "thread_pool.h"

namespace moe_mk {
namespace {

constexpr int kMostFewSteps = 512;  // Scratch::sums of four rows, with the smallest gather memory

inline int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t activation_blocks(int64_t columns) { return up(columns, kActivationBlock) / kActivationBlock; }

struct Matrix {
  const MoeMkMatrix* packed;
  bool gated;
  int pairs, steps, steps_per_block, blocks;
  size_t pair_bytes, pair_groups, pair_scales = 0, pair_zeros = 0;
  int group_steps = 0;

  Matrix(const MoeMkMatrix& m, bool two_sources) : packed(&m), gated(two_sources) {
    pairs = int(up(m.num_outputs, two_sources ? kTileColumns : kPairColumns) / (two_sources ? kTileColumns : kPairColumns));
    steps = int(up(m.num_inputs, kStep) / kStep);
    steps_per_block = m.block / kStep;
    blocks = (steps + steps_per_block - 1) / steps_per_block;
    pair_bytes = size_t(steps) * bytes_of_step(m.format);
    pair_groups = size_t(steps) * groups_of_step(m.format) * kPairColumns;
    if (has_super_blocks(m.format)) {
      pair_scales = size_t(steps) / kSuperSteps * super_bytes(m.format);
      group_steps = 1;
    } else if (has_parts(m.format)) {
      group_steps = m.group == 0 ? steps : m.group / kStep;
      pair_zeros = size_t(up(steps, group_steps) / group_steps) * kPairColumns;
      pair_scales = pair_zeros * bytes_of_scale(m.scale_type) * (m.biased ? 2 : 1);
    }
  }
  int64_t row(int slot) const { return packed->row_of == nullptr ? slot : packed->row_of[slot]; }
  Columns columns(int slot, int first, int count, int prefetch, size_t gather_bytes) const {
    const int64_t at = row(slot);
    Columns w = {packed->data + at * packed->slot_bytes + size_t(first) * pair_bytes, nullptr, nullptr, pair_bytes,
                 pair_groups, count, steps, steps_per_block, blocks, packed->format, bytes_of_step(packed->format),
                 prefetch, gather_bytes, nullptr, nullptr, pair_scales, pair_zeros, packed->scale_type, group_steps,
                 part_pairs(), has_minima()};
    if (packed->scales == nullptr) return w;
    if (has_parts(packed->format)) {
      w.part_scales = static_cast<const uint8_t*>(packed->scales) + at * packed->slot_scales + size_t(first) * pair_scales;
      if (packed->zeros != nullptr) w.zeros = packed->zeros + at * packed->slot_zeros + size_t(first) * pair_zeros;
      return w;
    }
    if (groups_of_step(packed->format) != 0)
      w.groups = static_cast<const uint8_t*>(packed->scales) + at * packed->slot_scales + size_t(first) * pair_groups;
    else
      w.scales = static_cast<const float*>(packed->scales) + at * packed->slot_scales + size_t(first) * 2 * blocks;
    return w;
  }
  // A part is a group of k, of larger groups a scale block of x. Its number of k pairs.
  int part_pairs() const {
    return packed->format == kQ6K ? kStep / 4 : std::min(group_steps * kStep, kActivationBlock) / 2;
  }
  // The order and the parts of rows that are rounded to INT8 for this matrix.
  RowLayout row_layout() const { return {2 * part_pairs(), packed->format != kInt8Groups}; }
  bool has_minima() const { return packed->format == kQ4K || packed->format == kQ5K || packed->zeros != nullptr || packed->biased; }
  // The 32 factors of one pair's finished totals. null: 1.
  const float* output_scales(int slot, int pair) const {
    if (packed->output_scales == nullptr) return nullptr;
    return packed->output_scales + row(slot) * packed->slot_output_scales + size_t(pair) * kPairColumns;
  }
  // The 32 biases of one pair, zero beyond the matrix. null: no bias.
  const float* bias(int slot, int pair, float* into) const {
    if (packed->bias == nullptr) return nullptr;
    const float* all = packed->bias + row(slot) * packed->slot_bias;
    const int n = packed->num_outputs;
    for (int c = 0; c < kPairColumns; ++c) {
      const int column = gated ? pair * kTileColumns + c % kTileColumns : pair * kPairColumns + c;
      into[c] = column < n ? all[(gated && c >= kTileColumns ? n : 0) + column] : 0.0f;
    }
    return into;
  }
};

// Assignments sorted by slot, in row order within a slot.
struct Plan {
  std::vector<int64_t> offset;  // [L + 1]
  std::vector<int64_t> row;
  std::vector<float> weight;
  std::vector<int> active;      // slots with rows, ascending
  std::vector<uint8_t> used;    // [R]: the row has an expert here

  int count(int slot) const { return int(offset[slot + 1] - offset[slot]); }

  // Every row visits the single slot.
  void fill_with_all(int64_t num_rows) {
    offset = {0, num_rows};
    row.resize(num_rows);
    std::iota(row.begin(), row.end(), int64_t(0));
    weight.assign(num_rows, 1.0f);
    if (num_rows > 0) active = {0};
    used.assign(num_rows, 1);
  }

  // Reads the ids of the call. false: an id is neither -1 nor a valid slot.
  bool fill(const MoeMkExperts& c) {
    offset.assign(size_t(c.num_slots) + 1, 0);
    const int64_t n = c.num_rows * c.top_k;
    for (int64_t i = 0; i < n; ++i) {
      if (c.ids[i] < -1 || c.ids[i] >= c.num_slots) return false;
      if (c.ids[i] >= 0) ++offset[c.ids[i] + 1];
    }
    for (int slot = 0; slot < c.num_slots; ++slot) {
      if (offset[slot + 1] != 0) active.push_back(slot);
      offset[slot + 1] += offset[slot];
    }
    row.resize(offset.back());
    weight.resize(offset.back());
    used.assign(c.num_rows, 0);
    std::vector<int64_t> next(offset.begin(), offset.end() - 1);
    for (int64_t i = 0; i < n; ++i) {
      if (c.ids[i] < 0) continue;
      const int64_t place = next[c.ids[i]]++;
      row[place] = i / c.top_k;
      weight[place] = c.weights == nullptr ? 1.0f : c.weights[i];
      used[i / c.top_k] = 1;
    }
    return true;
  }
};

inline int row_tiles(int num_rows) { return int(up(num_rows, kTileRows)) / kTileRows; }

// Experts with the same shapes and formats. h has a row for each assignment, in the plan's order: rows of inter_padded
// elements, or in tile order where w2 reads tiles of a slot.
struct Set {
  Matrix w13, w2;
  Plan plan;
  int64_t inter_padded;
  uint16_t* h = nullptr;         // of all slots
  std::vector<uint16_t*> h_of;   // [L]
  std::vector<uint8_t*> x_tiles; // [L] rows of x in tile order (TiledRows); null: w13 gathers them, as it does where this is empty
  bool h_in_tiles = false;       // of slots that is_tiled()
  std::vector<uint8_t*> h_integers;  // [L] rows of h as integers, kMaxRows at a time; null: w2 makes them, as it does where this is empty
  int h_units = 0;               // of each row of h_integers
  float* h_scales = nullptr;

  Set(const MoeMkMatrix& up_projection, const MoeMkMatrix& down_projection, bool gated)
      : w13(up_projection, gated), w2(down_projection, false) {
    inter_padded = int64_t(w13.pairs) * (gated ? kTileColumns : kPairColumns);
    // One step more: with a row length that is a power of two all rows would map to the same cache sets.
    inter_padded = up(inter_padded, kStep) + kStep;
  }
  int64_t assignments() const { return int64_t(plan.row.size()); }

  // Fewer rows are gathered by each task: it is little work, and saves a pass of all threads.
  bool is_tiled(int slot) const { return plan.count(slot) > kTileRows / 2; }
  int64_t hidden_elements(int slot) const {
    if (h_in_tiles && is_tiled(slot)) return int64_t(row_tiles(plan.count(slot))) * w2.steps * kTileRows * kStep;
    return plan.count(slot) * inter_padded;
  }
  // The place in h of one column of the row-th row of a slot; the rest of its step follows.
  uint16_t* hidden(int slot, int row, int64_t column) const {
    if (!h_in_tiles || !is_tiled(slot)) return h_of[slot] + row * inter_padded + column;
    const TiledRows tiles = {nullptr, w2.steps, row_tiles(plan.count(slot))};
    return h_of[slot] + tiles.offset(row / kTileRows, int(column / kStep)) / 2 + row % kTileRows * kStep + column % kStep;
  }
  // Rows in tile order from `row`, a multiple of kTileRows, on; without data: there are none.
  TiledRows tiles_of_x(int slot, int row) const {
    if (x_tiles.empty() || x_tiles[slot] == nullptr) return {};
    return {x_tiles[slot], w13.steps, row_tiles(plan.count(slot)), row / kTileRows};
  }
  // Rows of h as integers from `row`, a multiple of kMaxRows, on.
  uint8_t* integers_of_h(int slot, int row) const {
    if (h_integers.empty() || h_integers[slot] == nullptr) return nullptr;
    return h_integers[slot] + size_t(row) * h_units * kIntegerRowBytes;
  }
  TiledRows tiles_of_h(int slot, int row) const {
    if (!h_in_tiles || !is_tiled(slot)) return {};
    return {reinterpret_cast<const uint8_t*>(h_of[slot]), w2.steps, row_tiles(plan.count(slot)), row / kTileRows};
  }
};

struct Layer {
  const MoeMkExperts& call;
  const Kernels& kernels;
  ThreadPoolLease& pool;
  std::vector<Set>& sets;
  int64_t hidden_padded;
  const uint16_t* x = nullptr;    // [R][x_stride] bf16, readable up to hidden_padded; or one-byte codes
  int64_t x_stride = 0;
  float* x_scales = nullptr;      // [R][row_scales(H)]

  int few(const Columns& w) const {
    if (w.minima && w.num_steps > kMostFewSteps) return 0;
    const bool equal = w.groups == nullptr ? kernels.few_is_equal : kernels.few_of_groups_is_equal;
    if (kernels.multiply_few == nullptr || (call.batch_invariant && !equal)) return 0;
    if (call.panel_rows != 0 && equal) return std::min(call.panel_rows - 1, kernels.few_rows);
    return equal && !kernels.few_of_bf16 && !w.must_be_decoded() ? 0 : kernels.few_rows;
  }
  // Whether products read rows in tile order.
  bool reads_tiles() const { return kernels.reads_tiles && !int8(); }
  int streamed_rows() const { return call.streamed_rows != 0 ? call.streamed_rows : kStreamedRows; }
  // Most pairs of a task with this number of rows of an expert: rows in tile order are multiplied kMaxTiledRows at a time.
  int most_pairs(int rows) const {
    const int most = call.task_pairs != 0 ? call.task_pairs : kMaxPairs;
    return reads_tiles() && rows > streamed_rows() ? std::min(most, kPanelPairs) : most;
  }
  // Where the weights of some columns begin.
  const uint8_t* start(const Matrix& matrix, int slot, int first) const { return matrix.columns(slot, first, 1, 0, 0).data; }
  size_t gather_bytes() const { return call.gather_kib != 0 ? size_t(call.gather_kib) << 10 : built_in_gather_bytes(); }
  Columns columns(const Matrix& matrix, int slot, int first, int count) const {
    Columns w = matrix.columns(slot, first, count, call.prefetch_bytes != 0 ? call.prefetch_bytes : prefetch_distance(), gather_bytes());
    w.streamed_rows = streamed_rows();
    // The bits of a row must not depend on how many there are: one way for all numbers of them.
    w.exact_rows = call.batch_invariant ? kMaxTiledRows : w.format == kQ6K ? kExactRows / 2 : kExactRows;
    w.few_part_rows = call.batch_invariant || (w.minima && w.num_steps > kMostFewSteps) ? 0 : kFewPartRows;
    w.tile_rows = call.tile_rows != 0 ? call.tile_rows : int8_parts() ? kIntegerPartRows : kIntegerTileRows;
    return w;
  }
  bool visits(int64_t row) const {
    return std::any_of(sets.begin(), sets.end(), [&](const Set& set) { return set.plan.used[row] != 0; });
  }
  // Whether an output row has a single term, which is then written directly.
  bool one_term() const { return sets.size() == 1 && call.top_k == 1; }
  bool int8() const { return call.quantize == kInt8Rows || int8_parts(); }
  bool int8_parts() const { return call.quantize == kInt8PartRows; }
  // Whether h is rounded: in parts only where w2 has products with such rows.
  bool rounds(const Set& set) const {
    return call.quantize != kAsIs && (!int8_parts() || multiplies_int8_parts(set.w2.packed->format));
  }
  // Number of scales of a row that is quantised for a matrix, as the caller has them, and with what else its products need.
  int64_t given_scales(const Matrix& m) const {
    const int64_t columns = m.packed->num_inputs;
    if (int8_parts() && !multiplies_int8_parts(m.packed->format)) return 0;
    if (int8_parts()) return up(columns, m.row_layout().part) / m.row_layout().part;
    return int8() ? 1 : activation_blocks(columns);
  }
  int64_t row_scales(const Matrix& m) const { return (int8_parts() ? 3 : 1) * given_scales(m); }
  int64_t assignments() const {
    int64_t sum = 0;
    for (const Set& set : sets) sum += set.assignments();
    return sum;
  }
};

}  // namespace
}  // namespace moe_mk
