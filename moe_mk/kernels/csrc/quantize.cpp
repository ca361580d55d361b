// Per-token 1x128 quantisation of a batch (defined in quantize.h) and loops that measure the machine.
// Reads x [rows][columns] bf16 or f32 once; writes codes [rows][columns] and scales [rows][ceil(columns / 128)].
#include <algorithm>
#include <atomic>
#include <cstring>

#include "thread_pool.h"

namespace moe_mk {
namespace {

template <typename Body>
void each_piece(int64_t pieces, int threads, Body body) {
  ThreadPoolLease pool(threads);
  std::atomic<int64_t> next{0};
  pool->run(int(std::max<int64_t>(1, std::min<int64_t>(std::abs(threads), pieces))), [&](int) {
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces;) body(piece);
  });
}

constexpr int64_t kRowsAPiece = 8, kBytesAPiece = int64_t(1) << 20;

void quantize_row(const Kernels& kernels, const uint8_t* x, int64_t columns, bool f32, bool ue8m0, uint8_t* values,
                  float* scales) {
  for (int64_t first = 0; first < columns; first += kActivationBlock) {
    const int n = int(std::min<int64_t>(kActivationBlock, columns - first));
    float wide[kActivationBlock];
    if (f32) {
      std::memcpy(wide, x + first * 4, size_t(n) * 4);
    } else {
      for (int i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, x + (first + i) * 2, 2);
        const uint32_t u = uint32_t(half) << 16;
        std::memcpy(&wide[i], &u, 4);
      }
    }
    scales[first / kActivationBlock] = kernels.quantize(wide, n, ue8m0, values + first);
  }
}

}  // namespace
}  // namespace moe_mk

using namespace moe_mk;

int32_t moe_mk_quantize(const void* x, int64_t num_rows, int64_t num_columns, int64_t x_stride, int32_t x_is_f32,
                        int32_t ue8m0, uint8_t* values, float* scales, int32_t threads, int32_t isa) {
  const Kernels* kernels = kernels_of(isa);
  if (kernels == nullptr) return kNoIsa;
  const int64_t blocks = (num_columns + kActivationBlock - 1) / kActivationBlock, element = x_is_f32 ? 4 : 2;
  each_piece((num_rows + kRowsAPiece - 1) / kRowsAPiece, threads, [&](int64_t piece) {
    for (int64_t row = piece * kRowsAPiece; row < std::min(num_rows, (piece + 1) * kRowsAPiece); ++row)
      quantize_row(*kernels, static_cast<const uint8_t*>(x) + row * x_stride * element, num_columns, x_is_f32 != 0,
                   ue8m0 != 0, values + row * num_columns, scales + row * blocks);
  });
  return kOk;
}

int32_t moe_mk_read_rate(const void* data, int64_t num_bytes, int32_t way, int32_t threads, int32_t isa, uint64_t* checksum) {
  const Kernels* kernels = kernels_of(isa);
  if (kernels == nullptr) return kNoIsa;
  if (way < 0 || way >= kNumReadWays) return kBadShape;
  std::atomic<uint64_t> folded{0};
  each_piece((num_bytes + kBytesAPiece - 1) / kBytesAPiece, threads, [&](int64_t piece) {
    const int64_t first = piece * kBytesAPiece;
    folded ^= kernels->read(static_cast<const uint8_t*>(data) + first, std::min(kBytesAPiece, num_bytes - first), way);
  });
  *checksum = folded;
  return kOk;
}

int32_t moe_mk_peak_rate(int64_t iterations, int32_t threads, int32_t isa, int32_t floats, double* flops) {
  const Kernels* kernels = kernels_of(isa);
  if (kernels == nullptr) return kNoIsa;
  ThreadPoolLease pool(threads);
  std::atomic<int64_t> total{0};
  pool->run(std::abs(threads), [&](int) {
    total += int64_t(kernels->peak(iterations, floats != 0));
    kernels->leave();
  });
  *flops = double(total);
  return kOk;
}
