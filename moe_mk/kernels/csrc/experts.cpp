// The fused experts of one layer: out[row] = sum over k of weight * w2(act(w13(x[row]))) for its local experts.
//
// Phase 1  tasks (expert, block of w13 pairs): product, bias, activation -> h, bf16, one row an assignment.
// Phase 2  tasks (block of w2 pairs): all experts in slot order, then the shared ones, product, bias, weight, f32 sums -> out.
// Each output element is computed by one thread in slot order: the same bits for any number of threads.
// Reads every touched expert once a 256-row block (weights; 1024 on AMX), x about num_w13_pairs / 16 times from cache (/ 8 on
// AMX). Writes h (assignments * I * 2 B) and out. Scratch: h and its integers (as much and a half; up to 512 MiB), f32 sums (R * 2 KiB a
// thread at most), 1.7 MiB a thread.
// Rows without a local expert are not read; their output is zero.
#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <vector>

#include "activations.h"
#include "projections.h"

namespace moe_mk {
namespace {

constexpr int kRowsOfLongTasks = 64;  // NOTE Zen 4, bf16: at 32 and 64 rows of 128 experts 0.95 and 0.97 of the time of 16, of 8 experts as long

// Pairs per task: as many as allowed, fewer if the threads would have too few tasks for an even split.
int pairs_per_task(int most, int pairs, int64_t groups, int tasks_wanted) {
  int size = most;
  while (size > 2 && groups * ((pairs + size - 1) / size) < tasks_wanted) size /= 2;
  return size;
}

struct Task {
  const Set* set;
  int slot, first, count;
};

// Each task is some pairs of one expert's w13; the experts with most rows first, so that the last tasks are short.
std::vector<Task> up_tasks(const Layer& layer) {
  std::vector<Task> experts, tasks;
  for (const Set& set : layer.sets)
    for (int slot : set.plan.active) experts.push_back({&set, slot, 0, set.plan.count(slot)});
  std::stable_sort(experts.begin(), experts.end(), [](const Task& a, const Task& b) { return a.count > b.count; });
  for (const Task& expert : experts) {
    const int pairs = expert.set->w13.pairs;
    const int size = pairs_per_task(layer.most_pairs(expert.count), pairs, int64_t(experts.size()), 8 * layer.call.threads);
    for (int first = 0; first < pairs; first += size)
      tasks.push_back({expert.set, expert.slot, first, std::min(size, pairs - first)});
  }
  return tasks;
}

// Phase 2. With few rows long memory streams are faster; with more rows the sums of a task should stay in cache.
bool run_down(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  const int pairs = layer.sets.front().w2.pairs, tasks_each = c.num_rows <= kRowsOfLongTasks ? 8 : 16;
  int most_rows = 0;
  for (const Set& set : layer.sets)
    for (int slot : set.plan.active) most_rows = std::max(most_rows, set.plan.count(slot));
  const int size = pairs_per_task(layer.most_pairs(most_rows), pairs, 1, tasks_each * c.threads);
  const size_t sum_bytes = layer.one_term() ? 64 : size_t(c.num_rows) * size * kPairColumns * 4;
  return each_task(layer, (pairs + size - 1) / size, [&](int64_t task, int member, ThreadScratch& buffers) {
    auto* sums = reinterpret_cast<float*>(layer.pool->arena(member, kSums, sum_bytes));
    if (sums == nullptr) return false;
    const int first = int(task) * size, next = first + c.threads * size;
    down_projection(layer, {layer, first, std::min(size, pairs - first), next < pairs ? next : -1, sums}, buffers);
    return true;
  });
}

bool run_layer(Layer& layer) {
  const MoeMkExperts& c = layer.call;
  if (!prepare_inputs(layer) || !tile_inputs(layer) || !place_hidden(layer)) return false;
  const std::vector<Task> tasks = up_tasks(layer);
  const bool first_half = each_task(layer, int64_t(tasks.size()), [&](int64_t task, int, ThreadScratch& buffers) {
    const Task &t = tasks[task], *next = size_t(task + c.threads) < tasks.size() ? &tasks[task + c.threads] : nullptr;
    const uint8_t* after = next == nullptr ? nullptr : layer.start(next->set->w13, next->slot, next->first);
    up_projection(layer, *t.set, t.slot, t.first, t.count, after, buffers);
    return true;
  });
  return first_half && (!c.quantize || quantize_all_hidden(layer)) && hidden_to_integers(layer) && run_down(layer);
}

// Scales of parts: of whole super-blocks, or of groups that a part of at most 128 k divides.
bool has_scales(const MoeMkMatrix& m) {
  if (!has_parts(m.format)) return true;
  if (m.scales == nullptr || m.block != kActivationBlock) return false;
  if (has_super_blocks(m.format)) return m.num_inputs % (kSuperSteps * kStep) == 0;
  const bool group = m.group == 0 || m.group == kStep || m.group == 2 * kStep || (m.group > 0 && m.group % kActivationBlock == 0);
  const bool offsets = m.biased ? m.zeros == nullptr : m.format != kInt5;
  return group && offsets && m.scale_type >= 0 && m.scale_type < kNumScaleTypes;
}

bool fits(const MoeMkMatrix& m) {
  const bool block = m.block > 0 && m.block % kStep == 0 && kActivationBlock % m.block == 0;
  return is_format(m.format) && block && m.num_inputs > 0 && m.num_outputs > 0 && has_scales(m);
}

bool fits(const MoeMkMatrix& w13, const MoeMkMatrix& w2) {
  return fits(w13) && fits(w2) && w2.num_inputs == w13.num_outputs;
}

// Integer token codes need integer weights, and 32 bits hold the sums of at most this many inputs.
bool may_be_int8(const MoeMkMatrix& w13, const MoeMkMatrix& w2) {
  constexpr int kMostInputs = 65000;
  return w13.format == kInt8 && w2.format == kInt8 && w13.num_inputs <= kMostInputs && w2.num_inputs <= kMostInputs;
}

// The same for codes in parts of k; h stays in bf16 for other formats of w2. Routed and shared experts read the same rows.
bool may_be_int8_parts(const MoeMkExperts& c) {
  if (!multiplies_int8_parts(c.w13.format)) return false;
  if (c.shared_w13.data == nullptr) return true;
  if (!multiplies_int8_parts(c.shared_w13.format)) return false;
  const RowLayout rows = Matrix(c.w13, false).row_layout(), shared = Matrix(c.shared_w13, false).row_layout();
  return rows.part == shared.part && rows.four_bits == shared.four_bits;
}

// A scale block, and 128 k, of kMaxRows rows fits the smallest gather memory of every instruction set.
bool may_be_tuned(const MoeMkExperts& c) {
  const auto within = [](int32_t value, int32_t least, int32_t most) { return value == 0 || (value >= least && value <= most); };
  return within(c.panel_rows, 1, 5) && within(c.task_pairs, 1, kMaxPairs) && within(c.prefetch_bytes, 64, 16384) &&
         within(c.gather_kib, 128, 4096) && within(c.streamed_rows, kTileRows, kMaxRows) && within(c.tile_rows, 1, kMaxRows);
}

bool well_formed(const MoeMkExperts& c) {
  const bool shared = c.shared_w13.data == nullptr ||
                      (fits(c.shared_w13, c.shared_w2) && c.shared_w13.num_inputs == c.w13.num_inputs &&
                       c.shared_w2.num_outputs == c.w2.num_outputs);
  const bool int8 = c.quantize != kInt8Rows || (may_be_int8(c.w13, c.w2) && (c.shared_w13.data == nullptr ||
                                                                            may_be_int8(c.shared_w13, c.shared_w2)));
  const bool rounding = c.quantize >= kAsIs && c.quantize <= kInt8PartRows && (c.quantize != kInt8PartRows || may_be_int8_parts(c));
  const bool sizes = c.num_rows >= 0 && c.top_k > 0 && c.num_slots >= 0 && c.threads != 0;
  return fits(c.w13, c.w2) && shared && int8 && may_be_tuned(c) && rounding && sizes;
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_experts(const MoeMkExperts* call) try {
  if (!well_formed(*call)) return kBadShape;
  MoeMkExperts c = *call;
  c.threads = std::abs(c.threads);
  const Kernels* kernels = kernels_of(c.isa);
  if (kernels == nullptr) return kNoIsa;
  std::vector<Set> sets;
  sets.emplace_back(c.w13, c.w2, c.gated != 0);
  if (!sets.front().plan.fill(c)) return kBadId;
  if (c.shared_w13.data != nullptr) {
    sets.emplace_back(c.shared_w13, c.shared_w2, c.gated != 0);
    sets.back().plan.fill_with_all(c.num_rows);
  }
  ThreadPoolLease pool(call->threads);
  Layer layer = {c, *kernels, pool, sets, up(c.w13.num_inputs, kStep)};
  return run_layer(layer) ? kOk : kNoMemory;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

int32_t moe_mk_product(const MoeMkExperts* call, const void* x, int64_t num_rows, void* out, int32_t threads) try {
  MoeMkExperts c = *call;
  c.num_rows = num_rows;
  c.out = out;
  c.threads = std::abs(threads);
  const bool whole = c.w2.num_inputs % kStep == 0 && c.x_stride >= c.w2.num_inputs;
  const bool rounding = c.quantize == kAsIs || (c.quantize == kInt8Rows && may_be_int8(c.w2, c.w2)) ||
                        (c.quantize == kInt8PartRows && multiplies_int8_parts(c.w2.format));
  if (!fits(c.w2) || !whole || c.top_k != 1 || !rounding || !may_be_tuned(c) || num_rows < 0 || threads == 0) return kBadShape;
  const Kernels* kernels = kernels_of(c.isa);
  if (kernels == nullptr) return kNoIsa;
  std::vector<Set> sets;
  sets.emplace_back(c.w2, c.w2, false);
  sets.front().plan.fill_with_all(num_rows);
  ThreadPoolLease pool(threads);
  Layer layer = {c, *kernels, pool, sets, c.x_stride};
  return prepare_rows(layer, static_cast<const uint16_t*>(x)) && hidden_to_integers(layer) && run_down(layer) ? kOk : kNoMemory;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

int32_t moe_mk_sum_terms(const float* terms, const int32_t* ids, const float* weights, int64_t num_rows, int32_t top_k,
                         int64_t num_columns, int64_t stride, void* out, int32_t out_f32, int32_t threads, int32_t isa) try {
  const Kernels* kernels = kernels_of(isa);
  if (kernels == nullptr) return kNoIsa;
  if (num_rows < 0 || top_k < 1 || num_columns < 1 || stride < up(num_columns, kPairColumns) || threads == 0) return kBadShape;
  ThreadPoolLease pool(threads);
  const int members = std::abs(threads);
  std::vector<std::vector<int>> orders(members, std::vector<int>(top_k));
  std::atomic<int64_t> next{0};
  pool->run(members, [&](int member) {
    std::vector<int>& order = orders[member];
    for (int64_t row = next++; row < num_rows; row = next++) {
      const int32_t* of_row = ids + row * top_k;
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of_row[a] < of_row[b]; });
      for (int64_t column = 0; column < num_columns; column += kPairColumns) {
        float sums[kPairColumns] = {};
        for (int k : order) {
          if (of_row[k] < 0) continue;
          const int64_t at = row * top_k + k;
          kernels->accumulate(terms + at * stride + column, nullptr, nullptr, weights == nullptr ? 1.0f : weights[at], sums);
        }
        const int64_t count = std::min<int64_t>(kPairColumns, num_columns - column), to = row * num_columns + column;
        if (out_f32) std::memcpy(static_cast<float*>(out) + to, sums, size_t(count) * 4);
        else kernels->to_bf16(sums, static_cast<uint16_t*>(out) + to, count);
      }
    }
    kernels->leave();
  });
  return kOk;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
