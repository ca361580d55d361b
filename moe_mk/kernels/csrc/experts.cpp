// The fused experts of one layer: out[row] = sum over k of weight * w2(act(w13(x[row]))) for its local experts.
//
// Phase 1  tasks (expert, block of w13 pairs): product, bias, activation -> h, bf16, one row an assignment.
// Phase 2  tasks (block of w2 pairs): all experts in slot order, then the shared ones, product, bias, weight, f32 sums -> out.
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

#include "layer.h"

namespace moe_mk {
namespace {

constexpr size_t kPanelBytes = 64u << 10, kTilesBytes = 8u << 10;
constexpr size_t kTotalsBytes = size_t(kMaxPairs) * kMaxRows * kPairColumns * sizeof(float);

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
  layer.team->run(int(std::min<int64_t>(layer.call.threads, std::max<int64_t>(1, tasks))), [&](int member) {
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
  const int64_t hidden = c.w13.num_inputs, blocks = activation_blocks(hidden);
  const bool fp8 = c.x_scales != nullptr;
  if (!fp8 && !c.quantize && hidden % kStep == 0) {
    layer.x = static_cast<const uint16_t*>(c.x);
    layer.x_stride = c.x_stride;
    return true;
  }
  auto* x = reinterpret_cast<uint16_t*>(layer.team->arena(0, kInputs, size_t(c.num_rows) * layer.hidden_padded * 2));
  int64_t h_scales = 0;
  for (const Set& set : layer.sets) h_scales += set.assignments() * set.h_blocks();
  auto* scales = reinterpret_cast<float*>(layer.team->arena(0, kScales, size_t(c.num_rows * blocks + h_scales) * 4));
  if (x == nullptr || scales == nullptr) return false;
  layer.x = x;
  layer.x_stride = layer.hidden_padded;
  if (fp8 || c.quantize) layer.x_scales = scales;
  return each_task(layer, c.num_rows, [&](int64_t row, int, Desk&) {
    if (!layer.visits(row)) return true;
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

// h of a set through 1x128 e4m3, in place: the codes' values stay bf16, the scales go beside them.
bool quantize_hidden(Layer& layer, Set& set, float* scales) {
  const int64_t inter = set.w2.packed->num_inputs, blocks = set.h_blocks();
  set.h_scales = scales;
  return each_task(layer, set.assignments(), [&](int64_t row, int, Desk&) {
    uint16_t* h = set.h + row * set.inter_padded;
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
void up_projection(const Layer& layer, const Set& set, int slot, int first, int count, const Desk& desk) {
  const MoeMkExperts& c = layer.call;
  const ActivationSpec spec = {c.activation, c.gated != 0, c.alpha, c.limit};
  const int64_t x_blocks = activation_blocks(c.w13.num_inputs), begin = set.plan.offset[slot];
  const Columns w = set.w13.columns(slot, first, count);
  const int wide = c.gated ? kTileColumns : kPairColumns;
  for (int done = 0, all = set.plan.count(slot); done < all; done += kMaxRows) {
    const int n = std::min(kMaxRows, all - done);
    const uint16_t* values[kMaxRows];
    const float* scales[kMaxRows];
    for (int r = 0; r < n; ++r) {
      const int64_t row = set.plan.row[begin + done + r];
      values[r] = layer.x + row * layer.x_stride;
      scales[r] = layer.x_scales == nullptr ? nullptr : layer.x_scales + row * x_blocks;
    }
    multiply(layer, w, {values, layer.x_scales == nullptr ? nullptr : scales, n}, desk);
    // Padding of h up to a whole step meets zero weights, but must not be a NaN.
    const int64_t end = int64_t(first + count) * wide;
    if (first + count == set.w13.pairs)
      for (int r = 0; r < n; ++r)
        std::memset(set.h + (begin + done + r) * set.inter_padded + end, 0, size_t(set.inter_padded - end) * 2);
    for (int p = 0; p < count; ++p) {
      float biases[kPairColumns];
      const float* bias = set.w13.bias(slot, first + p, biases);
      for (int r = 0; r < n; ++r) {
        const float* totals = desk.totals + (size_t(p) * n + r) * kPairColumns;
        layer.kernels.activate(spec, totals, bias, set.h + (begin + done + r) * set.inter_padded + int64_t(first + p) * wide);
      }
    }
  }
}

// Sums of one block of output columns: [R][count * 32] f32; a row of one term is written as soon as that is made.
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
  void add(const Set& set, int slot, int64_t place, int rows, const float* totals) const {
    const size_t width = size_t(count) * kPairColumns;
    float biases[kMaxPairs][kPairColumns];
    const float* bias[kMaxPairs];
    for (int p = 0; p < count; ++p) bias[p] = set.w2.bias(slot, first + p, biases[p]);
    for (int r = 0; r < rows; ++r) {
      const int64_t row = set.plan.row[place + r];
      float only[kMaxPairs * kPairColumns];
      float* sum = layer.one_term() ? only : sums + row * width;
      if (layer.one_term()) std::memset(only, 0, sizeof only);
      for (int p = 0; p < count; ++p)
        layer.kernels.accumulate(totals + (size_t(p) * rows + r) * kPairColumns, bias[p], set.plan.weight[place + r],
                                 sum + p * kPairColumns);
      if (layer.one_term()) write(row, only);
    }
  }
  void finish() const {
    const float zeros[kMaxPairs * kPairColumns] = {};
    for (int64_t row = 0; row < layer.call.num_rows; ++row) {
      if (!layer.one_term()) write(row, sums + size_t(row) * count * kPairColumns);
      else if (!layer.visits(row)) write(row, zeros);
    }
  }
};

// Phase 2 of one task: one set after the other, each in slot order.
void down_projection(const Layer& layer, const OutputBlock& block, const Desk& desk) {
  if (!layer.one_term()) std::memset(block.sums, 0, size_t(layer.call.num_rows) * block.count * kPairColumns * 4);
  for (const Set& set : layer.sets) {
    const int64_t h_blocks = set.h_blocks();
    for (int slot : set.plan.active) {
      const Columns w = set.w2.columns(slot, block.first, block.count);
      for (int done = 0, all = set.plan.count(slot); done < all; done += kMaxRows) {
        const int n = std::min(kMaxRows, all - done);
        const int64_t place = set.plan.offset[slot] + done;
        const uint16_t* values[kMaxRows];
        const float* scales[kMaxRows];
        for (int r = 0; r < n; ++r) {
          values[r] = set.h + (place + r) * set.inter_padded;
          scales[r] = set.h_scales == nullptr ? nullptr : set.h_scales + (place + r) * h_blocks;
        }
        multiply(layer, w, {values, set.h_scales == nullptr ? nullptr : scales, n}, desk);
        block.add(set, slot, place, n, desk.totals);
      }
    }
  }
  block.finish();
}

struct Task {
  const Set* set;
  int slot, first, count;
};

// Some pairs of one expert's w13 each; the busiest experts first, so that the last tasks are short ones.
std::vector<Task> up_tasks(const Layer& layer) {
  std::vector<Task> experts, tasks;
  for (const Set& set : layer.sets)
    for (int slot : set.plan.active) experts.push_back({&set, slot, 0, set.plan.count(slot)});
  std::stable_sort(experts.begin(), experts.end(), [](const Task& a, const Task& b) { return a.count > b.count; });
  for (const Task& expert : experts) {
    const int pairs = expert.set->w13.pairs;
    const int size = pairs_per_task(pairs, int64_t(experts.size()), 8 * layer.call.threads);
    for (int first = 0; first < pairs; first += size)
      tasks.push_back({expert.set, expert.slot, first, std::min(size, pairs - first)});
  }
  return tasks;
}

// h of all sets, one after the other in one piece of memory.
bool place_hidden(Layer& layer) {
  size_t elements = 32;
  for (const Set& set : layer.sets) elements += size_t(set.assignments()) * set.inter_padded;
  auto* h = reinterpret_cast<uint16_t*>(layer.team->arena(0, kHidden, elements * 2));
  if (h == nullptr) return false;
  for (Set& set : layer.sets) {
    set.h = h;
    h += set.assignments() * set.inter_padded;
  }
  return true;
}

bool quantize_all_hidden(Layer& layer) {
  float* scales = layer.x_scales + layer.call.num_rows * activation_blocks(layer.call.w13.num_inputs);
  for (Set& set : layer.sets) {
    if (!quantize_hidden(layer, set, scales)) return false;
    scales += set.assignments() * set.h_blocks();
  }
  return true;
}

bool run_layer(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  if (!prepare_inputs(layer) || !place_hidden(layer)) return false;
  const std::vector<Task> tasks = up_tasks(layer);
  const bool first_half = each_task(layer, int64_t(tasks.size()), [&](int64_t task, int, Desk& desk) {
    const Task& t = tasks[task];
    up_projection(layer, *t.set, t.slot, t.first, t.count, desk);
    return true;
  });
  if (!first_half || (c.quantize && !quantize_all_hidden(layer))) return false;

  const int pairs = layer.sets.front().w2.pairs, size = pairs_per_task(pairs, 1, 16 * c.threads);
  const size_t sum_bytes = layer.one_term() ? 64 : size_t(c.num_rows) * size * kPairColumns * 4;
  return each_task(layer, (pairs + size - 1) / size, [&](int64_t task, int member, Desk& desk) {
    auto* sums = reinterpret_cast<float*>(layer.team->arena(member, kSums, sum_bytes));
    if (sums == nullptr) return false;
    const int first = int(task) * size;
    down_projection(layer, {layer, first, std::min(size, pairs - first), sums}, desk);
    return true;
  });
}

bool fits(const MoeMkMatrix& w13, const MoeMkMatrix& w2) {
  const bool blocks = w13.block > 0 && w13.block % kStep == 0 && w2.block > 0 && w2.block % kStep == 0 &&
                      w13.block <= kActivationBlock && w2.block <= kActivationBlock;
  return blocks && w13.num_inputs > 0 && w13.num_outputs > 0 && w2.num_inputs == w13.num_outputs && w2.num_outputs > 0;
}

bool well_formed(const MoeMkExperts& c) {
  const bool shared = c.shared_w13.data == nullptr ||
                      (fits(c.shared_w13, c.shared_w2) && c.shared_w13.num_inputs == c.w13.num_inputs &&
                       c.shared_w2.num_outputs == c.w2.num_outputs);
  return fits(c.w13, c.w2) && shared && c.num_rows >= 0 && c.top_k > 0 && c.num_slots >= 0 && c.threads > 0;
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
  std::vector<Set> sets;
  sets.emplace_back(c.w13, c.w2, c.gated != 0);
  if (!sets.front().plan.fill(c)) return kBadId;
  if (c.shared_w13.data != nullptr) {
    sets.emplace_back(c.shared_w13, c.shared_w2, c.gated != 0);
    sets.back().plan.fill_with_all(c.num_rows);
  }
  Lease team;
  Layer layer = {c, *kernels, team, sets, up(c.w13.num_inputs, kStep)};
  return run_layer(layer) ? kOk : kNoMemory;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
