// The gate's dot products: dots[t][e] = x[t] . gate[e] in f32, x bf16, gate bf16 or f32.
// Up to 4 experts share one reading of x; each dot product is its own chain over k, independent of other tokens.
// Reads gate once a token block (E * H * 2 or 4 bytes), x from L1; no alignment assumed.
#pragma once
#include "vectors.h"

namespace moe_mk {
namespace {

template <bool F32>
inline f32x16 gate16(const void* row, int k) {
  if (F32) return load<f32x16>(static_cast<const float*>(row) + k);
  return widen(static_cast<const uint16_t*>(row) + k);
}

template <bool F32>
inline float gate_one(const void* row, int k) {
  return F32 ? static_cast<const float*>(row)[k] : widen_one(static_cast<const uint16_t*>(row)[k]);
}

template <bool F32, int E>
void dots_of(const uint16_t* x, const void* const* gate, int hidden, float* dots) {
  f32x16 sums[E][2] = {};
  int k = 0;
  for (; k + 32 <= hidden; k += 32) {
    const f32x16 x0 = widen(x + k), x1 = widen(x + k + 16);
    for (int e = 0; e < E; ++e) {
      sums[e][0] += x0 * gate16<F32>(gate[e], k);
      sums[e][1] += x1 * gate16<F32>(gate[e], k + 16);
    }
  }
  for (int e = 0; e < E; ++e) {
    const f32x16 both = sums[e][0] + sums[e][1];
    float sum = 0;
    for (int lane = 0; lane < 16; ++lane) sum += both[lane];
    for (int rest = k; rest < hidden; ++rest) sum += widen_one(x[rest]) * gate_one<F32>(gate[e], rest);
    dots[e] = sum;
  }
}

template <bool F32>
void gate_dots_as(const uint16_t* const* x, int num_tokens, const void* const* gate, int num_experts, int hidden,
                  float* dots, int64_t stride) {
  for (int e = 0; e < num_experts; e += 4)
    for (int t = 0; t < num_tokens; ++t) {
      float* to = dots + t * stride + e;
      switch (num_experts - e) {
        case 1: dots_of<F32, 1>(x[t], gate + e, hidden, to); break;
        case 2: dots_of<F32, 2>(x[t], gate + e, hidden, to); break;
        case 3: dots_of<F32, 3>(x[t], gate + e, hidden, to); break;
        default: dots_of<F32, 4>(x[t], gate + e, hidden, to);
      }
    }
}

void gate_dots(const uint16_t* const* x, int num_tokens, const void* const* gate, int num_experts, bool gate_f32,
               int hidden, float* dots, int64_t stride) {
  if (gate_f32) gate_dots_as<true>(x, num_tokens, gate, num_experts, hidden, dots, stride);
  else gate_dots_as<false>(x, num_tokens, gate, num_experts, hidden, dots, stride);
}

}  // namespace
}  // namespace moe_mk
