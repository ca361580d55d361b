// The two phases of one task: w13, bias and activation into h; then w2 of all experts into the sums of some columns.
#pragma once
#include "thread_scratch.h"

namespace moe_mk {
namespace {

void multiply(const Layer& layer, const Columns& w, const Rows& rows, const ThreadScratch& buffers) {
  if (layer.int8_parts() && rows.scales != nullptr) layer.kernels.multiply_int8_parts(w, rows, buffers.scratch, buffers.totals);
  else if (layer.call.quantize == kInt8Rows) layer.kernels.multiply_int8(w, rows, buffers.scratch, buffers.totals);
  else if (rows.num_rows <= layer.few(w)) layer.kernels.multiply_few(w, rows, buffers.scratch, buffers.totals);
  else layer.kernels.multiply_many(w, rows, buffers.scratch, buffers.totals);
}

int rows_at_a_time(const TiledRows& tiles) { return tiles.data != nullptr ? kMaxTiledRows : kMaxRows; }

// Phase 1 of one task.
void up_projection(const Layer& layer, const Set& set, int slot, int first, int count, const uint8_t* after,
                   const ThreadScratch& buffers) {
  const MoeMkExperts& c = layer.call;
  const ActivationSpec spec = {c.activation, c.gated != 0, c.alpha, c.limit};
  const int64_t x_blocks = layer.row_scales(set.w13), begin = set.plan.offset[slot];
  Columns w = layer.columns(set.w13, slot, first, count);
  w.after = after;
  const int wide = c.gated ? kTileColumns : kPairColumns;
  for (int done = 0, n = 0, all = set.plan.count(slot); done < all; done += n) {
    const TiledRows tiles = set.tiles_of_x(slot, done);
    n = std::min(rows_at_a_time(tiles), all - done);
    const void* values[kMaxTiledRows];
    const float* scales[kMaxTiledRows];
    for (int r = 0; r < n; ++r) {
      const int64_t row = set.plan.row[begin + done + r];
      values[r] = layer.x + row * layer.x_stride;
      scales[r] = layer.x_scales == nullptr ? nullptr : layer.x_scales + row * x_blocks;
    }
    multiply(layer, w, {values, layer.x_scales == nullptr ? nullptr : scales, n, tiles}, buffers);
    // The padding of h up to a whole step is multiplied by zero weights, but must not be NaN.
    const int64_t end = int64_t(first + count) * wide, whole_steps = up(end, kStep);
    if (first + count == set.w13.pairs && end < whole_steps)
      for (int r = 0; r < n; ++r) std::memset(set.hidden(slot, done + r, end), 0, size_t(whole_steps - end) * 2);
    for (int p = 0; p < count; ++p) {
      float biases[kPairColumns];
      const float *bias = set.w13.bias(slot, first + p, biases), *scale = set.w13.output_scales(slot, first + p);
      const int together = set.h_in_tiles && set.is_tiled(slot) ? 1 : n;  // rows that are equally far apart
      for (int r = 0; r < n; r += together) {
        const float* totals = buffers.totals + (size_t(p) * n + r) * kPairColumns;
        uint16_t* h = set.hidden(slot, done + r, int64_t(first + p) * wide);
        layer.kernels.activate(spec, totals, scale, bias, together, h, set.inter_padded);
      }
    }
  }
}

// Sums of one block of output columns: [R][count * 32] f32; a row with a single term is written directly.
struct OutputBlock {
  const Layer& layer;
  int first, count, next;  // next: the first pair of the block that this thread probably computes next; -1: none
  float* sums;

  void write(int64_t row, int pair, int pairs, const float* values) const {
    const MoeMkExperts& c = layer.call;
    const int64_t column = int64_t(first + pair) * kPairColumns, at = row * c.out_stride + column;
    const int64_t columns = std::min<int64_t>(pairs * kPairColumns, c.w2.num_outputs - column);
    if (c.out_f32) std::memcpy(static_cast<float*>(c.out) + at, values, size_t(columns) * 4);
    else layer.kernels.to_bf16(values, static_cast<uint16_t*>(c.out) + at, columns);
  }
  void add(const Set& set, int slot, int64_t place, int rows, const float* totals) const {
    const size_t width = size_t(count) * kPairColumns;
    // In the order of the totals: those of one row may all map to the same cache sets.
    for (int p = 0; p < count; ++p) {
      float biases[kPairColumns];
      const float *bias = set.w2.bias(slot, first + p, biases), *scale = set.w2.output_scales(slot, first + p);
      const bool at_once = layer.one_term() && !layer.call.out_f32;
      if (at_once) {
        const int64_t column = int64_t(first + p) * kPairColumns;
        layer.kernels.write_terms(totals, scale, bias, &set.plan.weight[place], &set.plan.row[place], rows,
                                  std::min<int64_t>(kPairColumns, layer.call.w2.num_outputs - column),
                                  static_cast<uint16_t*>(layer.call.out) + column, layer.call.out_stride);
        totals += rows * kPairColumns;
        continue;
      }
      for (int r = 0; r < rows; ++r, totals += kPairColumns) {
        const int64_t row = set.plan.row[place + r];
        float only[kPairColumns] = {}, *sum = layer.one_term() ? only : sums + row * width + p * kPairColumns;
        layer.kernels.accumulate(totals, scale, bias, set.plan.weight[place + r], sum);
        if (sum == only) write(row, p, 1, only);
      }
    }
  }
  void finish() const {
    const float zeros[kMaxPairs * kPairColumns] = {};
    for (int64_t row = 0; row < layer.call.num_rows; ++row) {
      if (!layer.one_term()) write(row, 0, count, sums + size_t(row) * count * kPairColumns);
      else if (!layer.visits(row)) write(row, 0, count, zeros);
    }
  }
};

// Phase 2 of one task: one set after the other, each in slot order.
void down_projection(const Layer& layer, const OutputBlock& block, const ThreadScratch& buffers) {
  if (!layer.one_term()) std::memset(block.sums, 0, size_t(layer.call.num_rows) * block.count * kPairColumns * 4);
  for (const Set& set : layer.sets) {
    const int64_t h_blocks = layer.row_scales(set.w2);
    for (size_t i = 0; i < set.plan.active.size(); ++i) {
      const int slot = set.plan.active[i];
      Columns w = layer.columns(set.w2, slot, block.first, block.count);
      if (i + 1 < set.plan.active.size()) w.after = layer.start(set.w2, set.plan.active[i + 1], block.first);
      else if (block.next >= 0) w.after = layer.start(set.w2, set.plan.active[0], block.next);
      for (int done = 0, n = 0, all = set.plan.count(slot); done < all; done += n) {
        const TiledRows tiles = set.tiles_of_h(slot, done);
        n = std::min(rows_at_a_time(tiles), all - done);
        const int64_t place = set.plan.offset[slot] + done;
        const void* values[kMaxTiledRows];
        const float* scales[kMaxTiledRows];
        for (int r = 0; r < n; ++r) {
          values[r] = set.hidden(slot, done + r, 0);
          scales[r] = set.h_scales == nullptr ? nullptr : set.h_scales + (place + r) * h_blocks;
        }
        const size_t apart = set.h_in_tiles ? 0 : size_t(set.inter_padded) * 2;
        multiply(layer, w, {values, set.h_scales == nullptr ? nullptr : scales, n, tiles, apart, set.integers_of_h(slot, done)}, buffers);
        block.add(set, slot, place, n, buffers.totals);
      }
    }
  }
  block.finish();
}

}  // namespace
}  // namespace moe_mk
