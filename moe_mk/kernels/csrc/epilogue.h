// The epilogues of a product: activation into h, weighted accumulation into the sums, rounding to bf16.
// Reads and writes a few cache lines that are still in L1; any alignment.
#pragma once
#include "vectors.h"

namespace moe_mk {
namespace {

// erf by Abramowitz & Stegun 7.1.26: absolute error 1.5e-7, far below one bf16 ulp of the product.
inline f32x16 erf16(f32x16 x) {
  const f32x16 a = max16(x, -x);
  const f32x16 t = 1.0f / (1.0f + 0.3275911f * a);
  f32x16 p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32x16 value = 1.0f - p * t * exp16(-a * a);
  return choose16(greater16(f32x16{}, x), -value, value);
}

// limit * tanh(x / limit) = x for small x, by a series where 2 sigmoid(2 z) - 1 would cancel.
inline f32x16 soft_limit16(f32x16 x, float limit) {
  const f32x16 z = x / limit, square = z * z;
  const f32x16 series = z * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
  return limit * choose16(greater16(splat(0.04f), square), series, 2.0f * sigmoid16(2.0f * z) - 1.0f);
}

inline f32x16 apply(const ActivationSpec& spec, f32x16 x) {
  switch (spec.kind) {
    case kGeluErf: return 0.5f * x * (1.0f + erf16(x * 0.70710678f));
    case kGeluTanh: return x * sigmoid16(2.0f * 0.7978845608f * (x + 0.044715f * x * x * x));  // 0.5 (1 + tanh z) = sigmoid(2 z)
    case kRelu2: {
      const f32x16 positive = max16(f32x16{}, x);
      return positive * positive;
    }
    case kSwigluOai: return x * sigmoid16(spec.alpha * x);
    case kSitu: return soft_limit16(x, spec.alpha) * sigmoid16(x);
    default: return x * sigmoid16(x);
  }
}

// A NaN total must reach h as a NaN: the clamps below keep their argument when the comparison fails.
inline f32x16 at_most(f32x16 x, float limit) { return choose16(greater16(x, splat(limit)), splat(limit), x); }
inline f32x16 at_least(f32x16 x, float limit) { return choose16(greater16(splat(limit), x), splat(limit), x); }

inline void activate_row(const ActivationSpec& spec, const float* totals, const float* scale, const float* bias, uint16_t* h) {
  f32x16 first = load<f32x16>(totals), second = load<f32x16>(totals + 16);
  if (scale != nullptr) {
    first *= load<f32x16>(scale);
    second *= load<f32x16>(scale + 16);
  }
  if (bias != nullptr) {
    first += load<f32x16>(bias);
    second += load<f32x16>(bias + 16);
  }
  const bool clamp = spec.limit > 0;
  if (!spec.gated) {
    if (clamp) {
      first = at_most(first, spec.limit);
      second = at_most(second, spec.limit);
    }
    store(h, narrow(apply(spec, first)));
    store(h + 16, narrow(apply(spec, second)));
    return;
  }
  if (clamp && spec.kind == kSitu) {
    second = soft_limit16(second, spec.limit);
  } else if (clamp) {
    if (spec.kind != kSiluLimit) first = at_most(first, spec.limit);
    second = at_least(at_most(second, spec.limit), -spec.limit);
  }
  if (spec.kind == kSwigluOai) second += 1.0f;
  first = apply(spec, first);
  if (clamp && spec.kind == kSiluLimit) first = at_most(first, spec.limit);
  store(h, narrow(first * second));
}

// The most frequent case first, so that its constants stay in registers over rows.
inline void activate(const ActivationSpec& spec, const float* totals, const float* scale, const float* bias, int num_rows, uint16_t* h,
                     int64_t stride) {
  const ActivationSpec silu = {kSilu, true, 0, 0};
  if (spec.kind == kSilu && spec.gated && spec.limit <= 0 && scale == nullptr && bias == nullptr)
    for (int r = 0; r < num_rows; ++r) activate_row(silu, totals + 32 * r, nullptr, nullptr, h + r * stride);
  else
    for (int r = 0; r < num_rows; ++r) activate_row(spec, totals + 32 * r, scale, bias, h + r * stride);
}

inline void accumulate(const float* totals, const float* scale, const float* bias, float weight, float* sum) {
  for (int half = 0; half < 32; half += 16) {
    f32x16 value = load<f32x16>(totals + half);
    if (scale != nullptr) value *= load<f32x16>(scale + half);
    if (bias != nullptr) value += load<f32x16>(bias + half);
    store(sum + half, load<f32x16>(sum + half) + weight * value);
  }
}

inline void to_bf16(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, narrow(load<f32x16>(from + i)));
  if (i < count) {
    f32x16 tail{};
    std::memcpy(&tail, from + i, (count - i) * 4);
    const u16x16 rounded = narrow(tail);
    std::memcpy(to + i, &rounded, (count - i) * 2);
  }
}

// NOTE Zen 4: with two calls by pointer for each row, products of 512 rows of 2,048 inputs take 1.04 of the time.
inline void write_terms(const float* totals, const float* scale, const float* bias, const float* weights, const int64_t* rows,
                        int num_rows, int64_t columns, uint16_t* out, int64_t stride) {
  for (int r = 0; r < num_rows; ++r, totals += 32) {
    float sum[32] = {};
    accumulate(totals, scale, bias, weights[r], sum);
    if (columns == 32) to_bf16(sum, out + rows[r] * stride, 32);  // a constant, so without a loop
    else to_bf16(sum, out + rows[r] * stride, columns);
  }
}

}  // namespace
}  // namespace moe_mk
