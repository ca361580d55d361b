// Distributes the tasks of one layer over the threads of a pool; each thread has private memory for one product.
#pragma once
#include <algorithm>
#include <atomic>

#include "layer.h"

namespace moe_mk {
namespace {

constexpr size_t kPanelBytes = kPanelBytesOfBlock, kTilesBytes = 16u << 10;
// Of most pairs and of most rows.
constexpr size_t kTotalsBytes = size_t(kPanelPairs) * kMaxTiledRows * kPairColumns * sizeof(float);
static_assert(kTotalsBytes >= size_t(kMaxPairs) * kMaxRows * kPairColumns * sizeof(float), "either fits");

// Private memory of one thread for one product.
struct ThreadScratch {
  Scratch scratch;
  float* totals;

  // One block of about 2 MiB, so that it is on huge pages: on small pages the access order of the gathered
  // rows misses the TLB.
  bool open(ThreadPoolLease& pool, int member, size_t gather_bytes) {
    const size_t sums_bytes = std::max(gather_bytes / 16, kMaxTiledRows * kBlockSteps * sizeof(float));
    uint8_t* at = pool->arena(member, kThreadScratch, gather_bytes + kPanelBytes + kTilesBytes + kTotalsBytes + sums_bytes);
    if (at == nullptr) return false;
    scratch.gathered = at;
    scratch.panel = at + gather_bytes;
    scratch.tiles = reinterpret_cast<float*>(scratch.panel + kPanelBytes);
    totals = scratch.tiles + kTilesBytes / sizeof(float);
    scratch.sums = totals + kTotalsBytes / sizeof(float);
    return true;
  }
};

template <typename Body>
bool each_task(const Layer& layer, int64_t tasks, Body body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> memory{true};
  layer.pool->run(int(std::min<int64_t>(layer.call.threads, std::max<int64_t>(1, tasks))), [&](int member) {
    ThreadScratch buffers;
    if (!buffers.open(layer.pool, member, layer.gather_bytes())) {
      memory = false;
      return;
    }
    for (int64_t task; memory && (task = next.fetch_add(1)) < tasks; layer.pool->after_task(member))
      memory = body(task, member, buffers) && memory;
    layer.kernels.leave();
  });
  return memory;
}

}  // namespace
}  // namespace moe_mk
