// The fused experts of one layer: out[row] = sum over k of weight * w2(act(w13(x[row]))) for its local experts.
//
// Phase 1  tasks (expert, block of w13 pairs): product, bias, activation -> h, bf16, one row an assignment.
// Phase 2  tasks (block of w2 pairs): all experts in slot order, product, bias, weight, f32 sums -> out.
// Each output element is made by one thread, its terms in slot order: the same bits for any number of threads.
// Reads every touched expert once a 256-row block (weights), x about num_w13_pairs / 16 times from cache. Writes h
// (assignments * I * 2 B) and out. Scratch: h, f32 sums (R * 2 KiB a thread at most), 1.1 MiB a thread.
// Rows without a local expert are never read and come out zero.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "team.h"

namespace moe_mk {
namespace {

constexpr size_t kPanelBytes = 64u << 10, kTilesBytes = 8u << 10;
constexpr size_t kTotalsBytes = size_t(kMaxPairs) * kMaxRows * kPairColumns * sizeof(float);

int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Matrix {
  const MoeMkMatrix* packed;
  bool gated;
  int pairs, steps, steps_per_block, blocks;
  size_t pair_bytes;

  Matrix(const MoeMkMatrix& m, bool two_sources) : packed(&m), gated(two_sources) {
    pairs = int(up(m.num_outputs, two_sources ? kTileColumns : kPairColumns) / (two_sources ? kTileColumns : kPairColumns));
    steps = int(up(m.num_inputs, kStep) / kStep);
    steps_per_block = m.block / kStep;
    blocks = (steps + steps_per_block - 1) / steps_per_block;
    pair_bytes = size_t(steps) * kPanelTile * (m.format == kFp8 ? 1 : 2);
  }
  Columns columns(int slot, int first, int count) const {
    const float* scales = packed->scales == nullptr
                              ? nullptr
                              : packed->scales + slot * packed->slot_scales + size_t(first) * 2 * blocks;
    return {packed->data + slot * packed->slot_bytes + size_t(first) * pair_bytes, scales, pair_bytes, count, steps,
            steps_per_block, blocks, packed->format == kFp8};
  }
  // The 32 biases of one pair, zero beyond the matrix. null: no bias.
  const float* bias(int slot, int pair, float* into) const {
    if (packed->bias == nullptr) return nullptr;
    const float* all = packed->bias + slot * packed->slot_bias;
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
  std::vector<uint8_t> used;    // [R]: the row has a local expert

  int count(int slot) const { return int(offset[slot + 1] - offset[slot]); }

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

struct Layer {
  const MoeMkExperts& call;
  const Kernels& kernels;
  const Plan& plan;
  Lease& team;
  int threads;
  Matrix w13, w2;
  int64_t hidden_padded, inter_padded;
  const uint16_t* x = nullptr;    // [R][x_stride] bf16, readable up to hidden_padded
  int64_t x_stride = 0;
  float* x_scales = nullptr;      // [R][ceil(H / 128)]
  uint16_t* h = nullptr;          // [assignments][inter_padded]
  float* h_scales = nullptr;

  int few() const {
    const bool usable = !call.batch_invariant || kernels.few_is_equal;
    return kernels.multiply_few != nullptr && usable ? kernels.few_rows : 0;
  }
};

// A member's own memory for one product.
struct Desk {
  Scratch scratch;
  float* totals;

  // One block of 2 MiB or so, hence on huge pages: the rows of a chunk are met in an order that misses small ones.
  bool open(Lease& team, int member) {
    uint8_t* at = team->arena(member, kDesk, kGatherBytes + kPanelBytes + kTilesBytes + kTotalsBytes);
    if (at == nullptr) return false;
    scratch.gathered = at;
    scratch.panel = at + kGatherBytes;
    scratch.tiles = reinterpret_cast<float*>(scratch.panel + kPanelBytes);
    totals = scratch.tiles + kTilesBytes / sizeof(float);
    return true;
  }
};

void multiply(const Layer& layer, const Columns& w, const Rows& rows, const Desk& desk) {
  if (rows.num_rows <= layer.few()) layer.kernels.multiply_few(w, rows, desk.totals);
  else layer.kernels.multiply_many(w, rows, desk.scratch, desk.totals);
}

// Pairs a task: 16, fewer while the threads would not have enough tasks to share them evenly.
int pairs_per_task(int pairs, int64_t groups, int tasks_wanted) {
  int size = kMaxPairs;
  while (size > 2 && groups * ((pairs + size - 1) / size) < tasks_wanted) size /= 2;
  return size;
}

template <typename Body>
bool each_task(const Layer& layer, int64_t tasks, Body body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> memory{true};
  layer.team->run(int(std::min<int64_t>(layer.threads, std::max<int64_t>(1, tasks))), [&](int member) {
    Desk desk;
    if (!desk.open(layer.team, member)) {
      memory = false;
      return;
    }
    layer.kernels.enter();
    for (int64_t task; memory && (task = next.fetch_add(1)) < tasks;) memory = body(task, member, desk) && memory;
    layer.kernels.leave();
  });
  return memory;
}

// x as the kernels want it: bf16, padded to 32, quantised or decoded with scales where asked.
bool prepare_inputs(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  const int64_t hidden = c.w13.num_inputs, blocks = up(hidden, kActivationBlock) / kActivationBlock;
  const bool fp8 = c.x_scales != nullptr;
  if (!fp8 && !c.quantize && hidden % kStep == 0) {
    layer.x = static_cast<const uint16_t*>(c.x);
    layer.x_stride = c.x_stride;
    return true;
  }
  auto* x = reinterpret_cast<uint16_t*>(layer.team->arena(0, kInputs, size_t(c.num_rows) * layer.hidden_padded * 2));
  auto* scales = reinterpret_cast<float*>(layer.team->arena(0, kScales, size_t(c.num_rows + layer.plan.row.size()) *
                                                                            size_t(std::max(blocks, layer.inter_padded / kActivationBlock + 1)) * 4));
  if (x == nullptr || scales == nullptr) return false;
  layer.x = x;
  layer.x_stride = layer.hidden_padded;
  if (fp8 || c.quantize) layer.x_scales = scales;
  return each_task(layer, c.num_rows, [&](int64_t row, int, Desk&) {
    if (!layer.plan.used[row]) return true;
    uint16_t* to = x + row * layer.hidden_padded;
    std::memset(to + hidden, 0, size_t(layer.hidden_padded - hidden) * 2);
    if (fp8) {
      layer.kernels.decode(static_cast<const uint8_t*>(c.x) + row * c.x_stride, to, hidden);
      std::memcpy(scales + row * blocks, c.x_scales + row * c.x_scale_stride, size_t(blocks) * 4);
      return true;
    }
    const uint16_t* from = static_cast<const uint16_t*>(c.x) + row * c.x_stride;
    if (!c.quantize) {
      std::memcpy(to, from, size_t(hidden) * 2);
      return true;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int n = int(std::min<int64_t>(kActivationBlock, hidden - b * kActivationBlock));
      float wide[kActivationBlock];
      uint8_t codes[kActivationBlock];
      for (int i = 0; i < n; ++i) {
        const uint32_t u = uint32_t(from[b * kActivationBlock + i]) << 16;
        std::memcpy(&wide[i], &u, 4);
      }
      scales[row * blocks + b] = layer.kernels.quantize(wide, n, codes);
      layer.kernels.decode(codes, to + b * kActivationBlock, n);
    }
    return true;
  });
}

// h through 1x128 e4m3, in place: the codes' values stay bf16, the scales go beside them.
bool quantize_hidden(Layer& layer, float* scales) {
  const int64_t inter = layer.call.w2.num_inputs, blocks = up(inter, kActivationBlock) / kActivationBlock;
  layer.h_scales = scales;
  return each_task(layer, int64_t(layer.plan.row.size()), [&](int64_t row, int, Desk&) {
    uint16_t* h = layer.h + row * layer.inter_padded;
    for (int64_t b = 0; b < blocks; ++b) {
      const int n = int(std::min<int64_t>(kActivationBlock, inter - b * kActivationBlock));
      float wide[kActivationBlock];
      uint8_t codes[kActivationBlock];
      for (int i = 0; i < n; ++i) {
        const uint32_t u = uint32_t(h[b * kActivationBlock + i]) << 16;
        std::memcpy(&wide[i], &u, 4);
      }
      scales[row * blocks + b] = layer.kernels.quantize(wide, n, codes);
      layer.kernels.decode(codes, h + b * kActivationBlock, n);
    }
    return true;
  });
}

// Phase 1 of one task.
void up_projection(const Layer& layer, int slot, int first, int count, const Desk& desk) {
  const MoeMkExperts& c = layer.call;
  const ActivationSpec spec = {c.activation, c.gated != 0, c.alpha, c.limit};
  const int64_t x_blocks = up(c.w13.num_inputs, kActivationBlock) / kActivationBlock, begin = layer.plan.offset[slot];
  const Columns w = layer.w13.columns(slot, first, count);
  const int wide = c.gated ? kTileColumns : kPairColumns;
  for (int done = 0, all = layer.plan.count(slot); done < all; done += kMaxRows) {
    const int n = std::min(kMaxRows, all - done);
    const uint16_t* values[kMaxRows];
    const float* scales[kMaxRows];
    for (int r = 0; r < n; ++r) {
      const int64_t row = layer.plan.row[begin + done + r];
      values[r] = layer.x + row * layer.x_stride;
      scales[r] = layer.x_scales == nullptr ? nullptr : layer.x_scales + row * x_blocks;
    }
    multiply(layer, w, {values, layer.x_scales == nullptr ? nullptr : scales, n}, desk);
    // Padding of h up to a whole step meets zero weights, but must not be a NaN.
    const int64_t end = int64_t(first + count) * wide;
    if (first + count == layer.w13.pairs)
      for (int r = 0; r < n; ++r)
        std::memset(layer.h + (begin + done + r) * layer.inter_padded + end, 0, size_t(layer.inter_padded - end) * 2);
    for (int p = 0; p < count; ++p) {
      float biases[kPairColumns];
      const float* bias = layer.w13.bias(slot, first + p, biases);
      for (int r = 0; r < n; ++r) {
        const float* totals = desk.totals + (size_t(p) * n + r) * kPairColumns;
        layer.kernels.activate(spec, totals, bias, layer.h + (begin + done + r) * layer.inter_padded + int64_t(first + p) * wide);
      }
    }
  }
}

// Sums of one block of output columns: [R][count * 32] f32; with top_k = 1 a row is finished as soon as it is made.
struct OutputBlock {
  const Layer& layer;
  int first, count;
  float* sums;

  int columns() const {
    return std::min(count * kPairColumns, layer.call.w2.num_outputs - first * kPairColumns);
  }
  void write(int64_t row, const float* values) const {
    const MoeMkExperts& c = layer.call;
    const int64_t at = row * c.out_stride + int64_t(first) * kPairColumns;
    if (c.out_f32) std::memcpy(static_cast<float*>(c.out) + at, values, size_t(columns()) * 4);
    else layer.kernels.to_bf16(values, static_cast<uint16_t*>(c.out) + at, columns());
  }
  void add(int slot, int64_t place, int rows, const float* totals) const {
    const size_t width = size_t(count) * kPairColumns;
    float biases[kMaxPairs][kPairColumns];
    const float* bias[kMaxPairs];
    for (int p = 0; p < count; ++p) bias[p] = layer.w2.bias(slot, first + p, biases[p]);
    for (int r = 0; r < rows; ++r) {
      const int64_t row = layer.plan.row[place + r];
      float only[kMaxPairs * kPairColumns];
      float* sum = layer.call.top_k == 1 ? only : sums + row * width;
      if (layer.call.top_k == 1) std::memset(only, 0, sizeof only);
      for (int p = 0; p < count; ++p)
        layer.kernels.accumulate(totals + (size_t(p) * rows + r) * kPairColumns, bias[p], layer.plan.weight[place + r],
                                 sum + p * kPairColumns);
      if (layer.call.top_k == 1) write(row, only);
    }
  }
  void finish() const {
    const float zeros[kMaxPairs * kPairColumns] = {};
    for (int64_t row = 0; row < layer.call.num_rows; ++row) {
      if (layer.call.top_k > 1) write(row, sums + size_t(row) * count * kPairColumns);
      else if (!layer.plan.used[row]) write(row, zeros);
    }
  }
};

// Phase 2 of one task.
void down_projection(const Layer& layer, const OutputBlock& block, const Desk& desk) {
  const MoeMkExperts& c = layer.call;
  const int64_t h_blocks = up(c.w2.num_inputs, kActivationBlock) / kActivationBlock;
  if (c.top_k > 1) std::memset(block.sums, 0, size_t(c.num_rows) * block.count * kPairColumns * 4);
  for (int slot : layer.plan.active) {
    const Columns w = layer.w2.columns(slot, block.first, block.count);
    for (int done = 0, all = layer.plan.count(slot); done < all; done += kMaxRows) {
      const int n = std::min(kMaxRows, all - done);
      const int64_t place = layer.plan.offset[slot] + done;
      const uint16_t* values[kMaxRows];
      const float* scales[kMaxRows];
      for (int r = 0; r < n; ++r) {
        values[r] = layer.h + (place + r) * layer.inter_padded;
        scales[r] = layer.h_scales == nullptr ? nullptr : layer.h_scales + (place + r) * h_blocks;
      }
      multiply(layer, w, {values, layer.h_scales == nullptr ? nullptr : scales, n}, desk);
      block.add(slot, place, n, desk.totals);
    }
  }
  block.finish();
}

bool run_layer(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  const Plan& plan = layer.plan;
  if (!prepare_inputs(layer)) return false;
  layer.h = reinterpret_cast<uint16_t*>(layer.team->arena(0, kHidden, plan.row.size() * layer.inter_padded * 2 + 64));
  if (layer.h == nullptr) return false;

  // The busiest experts first, so that the last tasks are short ones.
  std::vector<int> order(plan.active);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return plan.count(a) > plan.count(b); });
  const int size1 = pairs_per_task(layer.w13.pairs, int64_t(order.size()), 8 * layer.threads);
  const int blocks1 = (layer.w13.pairs + size1 - 1) / size1;
  const bool first_half = each_task(layer, int64_t(order.size()) * blocks1, [&](int64_t task, int, Desk& desk) {
    const int first = int(task % blocks1) * size1;
    up_projection(layer, order[task / blocks1], first, std::min(size1, layer.w13.pairs - first), desk);
    return true;
  });
  if (!first_half) return false;
  if (c.quantize) {
    const size_t x_scales = size_t(c.num_rows) * (up(c.w13.num_inputs, kActivationBlock) / kActivationBlock);
    if (!quantize_hidden(layer, layer.x_scales + x_scales)) return false;
  }

  const int size2 = pairs_per_task(layer.w2.pairs, 1, 16 * layer.threads);
  const int blocks2 = (layer.w2.pairs + size2 - 1) / size2;
  const size_t sum_bytes = c.top_k > 1 ? size_t(c.num_rows) * size2 * kPairColumns * 4 : 64;
  return each_task(layer, blocks2, [&](int64_t task, int member, Desk& desk) {
    auto* sums = reinterpret_cast<float*>(layer.team->arena(member, kSums, sum_bytes));
    if (sums == nullptr) return false;
    const int first = int(task) * size2;
    down_projection(layer, {layer, first, std::min(size2, layer.w2.pairs - first), sums}, desk);
    return true;
  });
}

bool well_formed(const MoeMkExperts& c) {
  const bool blocks = c.w13.block > 0 && c.w13.block % kStep == 0 && c.w2.block > 0 && c.w2.block % kStep == 0;
  const bool sizes = c.num_rows >= 0 && c.top_k > 0 && c.num_slots >= 0 && c.w13.num_inputs > 0 && c.w13.num_outputs > 0;
  return blocks && sizes && c.w2.num_inputs == c.w13.num_outputs && c.w2.num_outputs > 0 && c.threads > 0 &&
         c.w13.block <= kActivationBlock && c.w2.block <= kActivationBlock;
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_experts(const MoeMkExperts* call) try {
  const MoeMkExperts& c = *call;
  if (!well_formed(c)) return kBadShape;
  const bool scaled_rows = c.quantize != 0 || c.x_scales != nullptr;
  const Kernels* kernels = kernels_of(c.isa);
  // Scaled rows need exact f32 sums a scale block, which the folded AMX path does not have.
  if (kernels != nullptr && scaled_rows && !kernels->row_scales)
    kernels = kernels_of(isa_supported(kAvx512Bf16) ? kAvx512Bf16 : (isa_supported(kAvx2) ? kAvx2 : kScalar));
  if (kernels == nullptr) return kNoIsa;
  Plan plan;
  if (!plan.fill(c)) return kBadId;
  Lease team;
  Layer layer = {c, *kernels, plan, team, c.threads, Matrix(c.w13, c.gated != 0), Matrix(c.w2, false),
                 up(c.w13.num_inputs, kStep), 0};
  layer.inter_padded = int64_t(layer.w13.pairs) * (c.gated ? kTileColumns : kPairColumns);
  // One step more: a row of h whose length is a power of two would put all rows into the same cache sets.
  layer.inter_padded = up(layer.inter_padded, kStep) + kStep;
  return run_layer(layer) ? kOk : kNoMemory;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
