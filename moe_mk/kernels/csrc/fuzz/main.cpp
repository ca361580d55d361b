// Random layers and exchanges through every kernel of the ABI, for the sanitizers: tools/sanitize_kernels.py builds and runs it.
// Every buffer is a heap block of exactly the size the ABI requires, so that an access one byte beyond is caught.
// Also checks properties that need no reference: unpack(pack(w)) = w, bits independent of threads, instruction sets agree.
// Prints a digest of what the portable kernels computed, weights of the router apart: the same rounds give the same one on
// every processor.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../exchange.h"
#include "../formats.h"

using namespace moe_mk;

namespace moe_mk::fuzz {
void exchange(int seed);  // peers.cpp
}

namespace {

std::mt19937 random_engine;

// Not of <random>, whose distributions differ between standard libraries. About normal: a sum of uniform numbers, exact in f32.
int pick(int low, int high) { return low + int(random_engine() % unsigned(high - low + 1)); }
float normal() {
  int sum = 0;
  for (int i = 0; i < 12; ++i) sum += pick(0, 65535);
  return float(sum) / 65536 - 6;
}

uint64_t digest = 0xcbf29ce484222325;  // FNV-1a
template <typename T>
void fold(const std::vector<T>& values) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) digest = (digest ^ bytes[i]) * 0x100000001b3;
}
uint16_t to_bf16(float value) {
  uint32_t u;
  std::memcpy(&u, &value, 4);
  return uint16_t(u >> 16);
}
float to_f32(uint16_t bf16) {
  const uint32_t u = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}

[[noreturn]] void fail(const char* what, int seed) {
  std::printf("FAILED %s, seed %d\n", what, seed);
  std::exit(1);
}

// 64-byte aligned, exactly as long as asked.
struct Bytes {
  uint8_t* data;
  size_t size;
  explicit Bytes(size_t n) : data(static_cast<uint8_t*>(::operator new(n == 0 ? 1 : n, std::align_val_t(64)))), size(n) {}
  Bytes(const Bytes&) = delete;
  ~Bytes() { ::operator delete(data, std::align_val_t(64)); }
};

struct Shape {
  int slots, hidden, inter, rows, top_k, format, block, gated, biases, by_output;
  int scale_type = 0, group = 0, zeros = 0, biased = 0, block_type = 0;  // of formats with parts; block_type 0: not from ggml blocks
};

int pairs_of(int outputs, bool two) { return (outputs + (two ? 15 : 31)) / (two ? 16 : 32); }
int steps_of(int inputs) { return (inputs + 31) / 32; }

struct Packed {
  Bytes values;
  std::vector<float> scales, output_scales, bias;
  std::vector<uint8_t> groups, zeros;
  MoeMkMatrix matrix;
  int num_slots;

  Packed(int slots, int outputs, int inputs, const Shape& s, bool two, int seed)
      : values(size_t(slots) * slot_bytes(outputs, inputs, s, two)), num_slots(slots) {
    const int pairs = pairs_of(outputs, two), blocks = (steps_of(inputs) + s.block / 32 - 1) / (s.block / 32);
    const bool blocked = (s.format == kFp8 || s.format == kInt8) && !s.by_output;
    scales.resize(blocked ? size_t(slots) * pairs * 2 * blocks : 0);
    const float size = s.format == kInt8 ? 0.0005f : 0.02f;
    for (float& value : scales) value = size * (1 + 0.05f * float(pick(0, 9)));
    groups.resize(size_t(slots) * pairs * steps_of(inputs) * groups_of_step(s.format) * 32);
    if (has_parts(s.format)) make_parts(slots, pairs, inputs, s);
    else for (uint8_t& code : groups) code = uint8_t(s.format == kNvFp4 ? pick(0, 40) : pick(0, 99) == 0 ? 0 : pick(117, 121));
    output_scales.resize(s.by_output || s.format == kNvFp4 ? size_t(slots) * pairs * 32 : 0);
    for (float& value : output_scales) value = (s.format == kNvFp4 ? 0.5f : size) * (1 + 0.05f * float(pick(0, 9)));
    bias.resize(s.biases ? size_t(slots) * outputs * (two ? 2 : 1) : 0);
    for (float& value : bias) value = normal();
    for (int slot = 0; slot < slots; ++slot) fill(slot, outputs, inputs, s, two, seed);
    const void* scale_data = scales.empty() ? static_cast<const void*>(groups.empty() ? nullptr : groups.data()) : scales.data();
    matrix = {nullptr, values.data, scale_data, output_scales.empty() ? nullptr : output_scales.data(), bias.empty() ? nullptr : bias.data(),
              int64_t(values.size / size_t(slots)), int64_t((scales.size() + groups.size()) / size_t(slots)),
              int64_t(output_scales.size() / size_t(slots)), int64_t(bias.size() / size_t(slots)), s.format, outputs, inputs,
              s.block, zeros.empty() ? nullptr : zeros.data(), int64_t(zeros.size() / size_t(slots)), s.scale_type, s.group,
              s.biased};
  }
  // Scales and zero points of groups, or room for those of super-blocks.
  void make_parts(int slots, int pairs, int inputs, const Shape& s) {
    if (has_super_blocks(s.format)) {
      groups.resize(size_t(slots) * pairs * (inputs / 256) * super_bytes(s.format));
      return;
    }
    const size_t count = size_t(slots) * pairs * (s.group == 0 ? 1 : (inputs + s.group - 1) / s.group) * 32 * (1 + s.biased);
    groups.resize(count * bytes_of_scale(s.scale_type));
    for (size_t i = 0; i < count; ++i) {
      const float value = (s.format == kInt4 ? 0.01f : 0.0006f) * (1 + 0.05f * float(pick(0, 9)));
      const uint16_t bf16 = to_bf16(value), f16 = uint16_t(s.format == kInt4 ? pick(0x2000, 0x2400) : pick(0x1000, 0x1400));
      if (s.scale_type == kScaleF32) std::memcpy(&groups[i * 4], &value, 4);
      else std::memcpy(&groups[i * 2], s.scale_type == kScaleBf16 ? &bf16 : &f16, 2);
    }
    zeros.resize(s.zeros ? count : 0);
    for (uint8_t& zero : zeros) zero = uint8_t(s.format == kInt4 ? pick(0, 15) : pick(100, 150));
  }
  // Random blocks of ggml, packed and unpacked; their scales are small and finite.
  void fill_blocks(int slot, int outputs, int inputs, const Shape& s, bool two, int seed) {
    const bool simple = !has_super_blocks(s.format);
    const int steps = simple ? 1 : kSuperSteps, halves = s.biased ? 4 : 2;
    const int size = steps * bits_of(s.format) * 4 + (simple ? halves : int(super_bytes(s.format) / 32));
    const size_t row = size_t(inputs) / (32 * steps) * size, stride = row + size_t(pick(0, 5));
    const size_t bytes = size_t(outputs - 1) * stride + row;
    const Bytes sources[2] = {Bytes(bytes), Bytes(bytes)}, back[2] = {Bytes(bytes), Bytes(bytes)};
    for (const Bytes& source : sources) {
      std::memset(source.data, 0, bytes);
      for (int r = 0; r < outputs; ++r)
        for (size_t i = 0; i < row; ++i) source.data[r * stride + i] = uint8_t(pick(0, 255));
      for (int r = 0; r < outputs; ++r)
        for (size_t b = 0; b < row; b += size_t(size)) {
          uint8_t* block = source.data + r * stride + b;
          const int first = s.block_type == kBlockQ6K ? 208 : 0, last = simple ? halves : s.block_type == kBlockQ6K ? 210 : 4;
          for (int at = first; at < last; at += 2) block[at + 1] = uint8_t(s.format == kInt4 ? 0x20 : 0x08);
        }
    }
    for (const Bytes& target : back) std::memset(target.data, 0, bytes);
    uint8_t* to = values.data + size_t(slot) * slot_bytes(outputs, inputs, s, two);
    const size_t each = groups.size() / size_t(num_slots);
    int64_t nans = 0;
    int status = moe_mk_pack_blocks(sources[0].data, two ? sources[1].data : nullptr, int64_t(stride), outputs, inputs, s.block_type, to,
                                    groups.data() + each * size_t(slot), pick(1, 3), &nans);
    status |= moe_mk_unpack_blocks(to, groups.data() + each * size_t(slot), back[0].data, two ? back[1].data : nullptr, int64_t(stride),
                                   outputs, inputs, s.block_type, pick(1, 3));
    if (status != kOk || nans != 0) fail("pack blocks", seed);
    for (int half = 0; half < (two ? 2 : 1); ++half)
      if (std::memcmp(sources[half].data, back[half].data, bytes) != 0) fail("unpack(pack(blocks)) = blocks", seed);
  }
  static size_t slot_bytes(int outputs, int inputs, const Shape& s, bool two) {
    return size_t(pairs_of(outputs, two)) * steps_of(inputs) * bytes_of_step(s.format);
  }
  // One source: rows of random codes, no NaN among them, a gap after each but the last, which is only as long as its
  // inputs: reading a full stride would be out of bounds.
  static void draw(const Bytes& source, int outputs, size_t row, size_t stride, int format) {
    std::memset(source.data, 0, source.size);
    for (int r = 0; r < outputs; ++r)
      for (size_t i = 0; i < row; ++i) {
        uint8_t* at = source.data + r * stride + i;
        const uint16_t bf16 = to_bf16(normal() * 0.1f);
        if (format != kBf16) *at = uint8_t(pick(0, 255) & (format == kFp8 || format == kMxFp8 ? 0xbf : 0xff));
        else if (i % 2 == 0) std::memcpy(at, &bf16, 2);
      }
  }
  void fill(int slot, int outputs, int inputs, const Shape& s, bool two, int seed) {
    if (s.block_type != 0) return fill_blocks(slot, outputs, inputs, s, two, seed);
    const size_t row = size_t(inputs) * bits_of(s.format) / 8, stride = row + size_t(pick(0, 5)) * (s.format == kBf16 ? 2 : 1);
    const size_t size = size_t(outputs - 1) * stride + row;
    const Bytes sources[2] = {Bytes(size), Bytes(size)}, back[2] = {Bytes(size), Bytes(size)};
    for (const Bytes& source : sources) draw(source, outputs, row, stride, s.format);
    for (const Bytes& target : back) std::memset(target.data, 0, size);
    uint8_t* to = values.data + size_t(slot) * slot_bytes(outputs, inputs, s, two);
    int64_t nans = 0;
    int status = moe_mk_pack(sources[0].data, two ? sources[1].data : nullptr, int64_t(stride), outputs, inputs, s.format, to,
                             pick(1, 3), &nans);
    status |= moe_mk_unpack(to, back[0].data, two ? back[1].data : nullptr, int64_t(stride), outputs, inputs, s.format, pick(1, 3));
    if (status != kOk || nans != 0) fail("pack", seed);
    for (int half = 0; half < (two ? 2 : 1); ++half)
      if (std::memcmp(sources[half].data, back[half].data, size) != 0) fail("unpack(pack(w)) = w", seed);
  }
};

// Any format, with the scales, zero points and blocks that it may have.
Shape draw_shape() {
  Shape s = {pick(1, 4), pick(1, 300), pick(1, 200), pick(0, 40), 1, pick(0, kNumFormats - 1), 32 << pick(0, 2), pick(0, 1),
             pick(0, 1), 0};
  s.by_output = (s.format == kFp8 || s.format == kInt8) && pick(0, 1);
  if (has_parts(s.format)) {
    s.block = 128;
    s.scale_type = pick(0, kNumScaleTypes - 1);
    constexpr int groups[] = {0, 32, 64, 128, 256};
    s.group = groups[pick(0, 4)];
    s.zeros = pick(0, 1);
    s.biased = s.format == kInt5 || (!has_super_blocks(s.format) && !s.zeros && pick(0, 1));
    if (has_super_blocks(s.format)) s.block_type = s.format == kQ4K ? kBlockQ4K : s.format == kQ5K ? kBlockQ5K : kBlockQ6K;
    else if (s.format == kInt5) s.block_type = kBlockQ5_1;
    else if (pick(0, 2) == 0 && (s.format == kInt4 || !s.biased)) s.block_type = s.format == kInt8Groups ? kBlockQ8_0 : s.biased ? kBlockQ4_1 : kBlockQ4_0;
    if (s.block_type != 0) s.scale_type = kScaleF16, s.group = 32, s.zeros = 0;
  }
  return s;
}

// One matrix times rows, in bf16 or rounded to INT8, which end with their last input.
void products(int seed) {
  const Shape s = draw_shape();
  const int rounding = !pick(0, 1) ? kAsIs : s.format == kInt8 ? kInt8Rows : multiplies_int8_parts(s.format) ? kInt8PartRows : kAsIs;
  const int inputs = has_super_blocks(s.format) ? 256 * pick(1, 2) : 32 * pick(1, 9), outputs = pick(1, 100), rows = pick(0, 40);
  const int stride = inputs + pick(0, 3);
  const Packed w(1, outputs, inputs, s, false, seed);
  const Bytes x(rows == 0 ? 0 : (size_t(rows - 1) * stride + inputs) * 2);
  for (size_t i = 0; i < x.size; i += 2) {
    const uint16_t bf16 = to_bf16(normal());
    std::memcpy(x.data + i, &bf16, 2);
  }
  std::vector<uint16_t> out(size_t(rows) * outputs), other(out.size()), scalar;
  MoeMkExperts call = {};
  call.w2 = w.matrix;
  call.x_stride = stride, call.out_stride = outputs, call.top_k = 1, call.num_slots = 1, call.quantize = rounding;
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!moe_mk_isa_supported(isa)) continue;
    call.isa = isa;
    if (moe_mk_product(&call, x.data, rows, out.data(), 1) != kOk) fail("product", seed);
    if (moe_mk_product(&call, x.data, rows, other.data(), 3) != kOk || other != out) fail("same product for any number of threads", seed);
    if (isa == kScalar) fold(scalar = out);
    double apart = 0, wanted = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      apart += std::pow(double(to_f32(out[i])) - to_f32(scalar[i]), 2);
      wanted += std::pow(double(to_f32(scalar[i])), 2);
    }
    if (apart > 1e-3 * wanted + 1e-12) fail("instruction sets agree on a product", seed);
  }
}

void layer(int seed) {
  Shape s = draw_shape();
  // Four-bit inputs share bytes; blocks are whole.
  const int even = has_super_blocks(s.format) ? 256 : s.block_type != 0 ? 32 : bits_of(s.format) == 4 ? 2 : 1;
  s.hidden = even * ((s.hidden + even - 1) / even);
  s.inter = even * ((s.inter + even - 1) / even);
  if (pick(0, 9) == 0) s.rows = pick(250, 600);
  s.top_k = pick(1, s.slots);
  const Packed w13(s.slots, s.inter, s.hidden, s, s.gated != 0, seed), w2(s.slots, s.hidden, s.inter, s, false, seed);
  const bool shared = pick(0, 2) == 0;
  const int shared_inter = even * pick(1, even > 2 ? 2 : 50);
  const Packed shared13(1, shared_inter, s.hidden, s, s.gated != 0, seed), shared2(1, s.hidden, shared_inter, s, false, seed);
  const bool coded = pick(0, 3) == 0, int8 = s.format == kInt8 && pick(0, 1);
  const bool int8_parts = multiplies_int8_parts(s.format) && pick(0, 1);
  const int part = has_super_blocks(s.format) ? 32 : std::min(s.group == 0 ? (s.hidden + 31) / 32 * 32 : s.group, 128);
  const int x_blocks = int8 ? 1 : int8_parts ? (s.hidden + part - 1) / part : (s.hidden + 127) / 128, stride = s.hidden + pick(0, 3);
  const int element = coded ? 1 : 2;
  const Bytes x(s.rows == 0 ? 0 : (size_t(s.rows - 1) * stride + s.hidden) * element);
  for (size_t i = 0; i < x.size; i += element) {
    const uint16_t bf16 = to_bf16(pick(0, 63) == 0 ? normal() * 1e6f : normal());  // outliers too
    if (coded) x.data[i] = uint8_t(pick(0, 255) & 0xbf);
    else std::memcpy(x.data + i, &bf16, 2);
  }
  std::vector<float> x_scales(size_t(s.rows) * x_blocks, 0.5f), weights(size_t(s.rows) * s.top_k, 0.5f);
  std::vector<int32_t> ids(size_t(s.rows) * s.top_k);
  for (int32_t& id : ids) id = pick(0, 4) == 0 ? -1 : pick(0, s.slots - 1);
  std::vector<uint16_t> out(size_t(s.rows) * s.hidden), other(out.size());
  const int to_fp8 = pick(0, 7), rounding = int8 ? kInt8Rows : int8_parts ? kInt8PartRows : to_fp8 == 0 ? kFp8Rows : to_fp8 == 1 ? kUe8m0Rows : kAsIs;
  MoeMkExperts call = {x.data, coded ? x_scales.data() : nullptr, ids.data(), weights.data(), out.data(), s.rows, stride,
                       x_blocks, s.hidden, s.top_k, s.slots, w13.matrix, w2.matrix, s.gated, pick(0, 4), 1.702f,
                       pick(0, 1) ? 0.8f : 0.0f, rounding, pick(0, 1), 0, 1, kScalar, {}, {}, 0, 0, 0, 0, 0, 0};
  if (shared) {
    call.shared_w13 = shared13.matrix;
    call.shared_w2 = shared2.matrix;
  }
  if (moe_mk_experts(&call) != kOk) fail("experts", seed);
  const std::vector<uint16_t> scalar(out);
  fold(scalar);
  double wanted = 0;
  for (uint16_t value : scalar) wanted += double(to_f32(value)) * to_f32(value);
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!moe_mk_isa_supported(isa)) continue;
    call.isa = isa;
    call.threads = 1;
    if (moe_mk_experts(&call) != kOk) fail("experts", seed);
    other = out;
    call.threads = 3;
    if (moe_mk_experts(&call) != kOk || other != out) fail("same bits for any number of threads", seed);
    MoeMkExperts tuned = call;
    tuned.panel_rows = pick(0, 5);
    tuned.task_pairs = pick(0, 16);
    tuned.prefetch_bytes = pick(0, 1) * pick(64, 16384);
    tuned.gather_kib = pick(0, 1) * pick(128, 1024);
    tuned.streamed_rows = pick(0, 1) * pick(16, 256);
    tuned.tile_rows = pick(0, 1) * pick(1, 256);
    if (moe_mk_experts(&tuned) != kOk || other != out) fail("same bits for any tuning", seed);
    double apart = 0;
    for (size_t i = 0; i < out.size(); ++i) apart += std::pow(double(to_f32(out[i])) - to_f32(scalar[i]), 2);
    // Quantised h may take the neighbouring code; everything else agrees to bf16 rounding.
    if (apart > (call.quantize ? 0.01 : 1e-3) * wanted + 1e-12) fail("instruction sets agree", seed);
    const bool exact = rounding == kInt8PartRows && !s.gated && call.activation == kRelu2;
    if (exact && out != scalar) fail("integer sums have the same bits", seed);
  }
}

void routing(int seed) {
  const int groups = pick(1, 4), size = pick(1, 6), experts = groups * size, hidden = pick(1, 100), tokens = pick(0, 40);
  const int top_groups = pick(1, groups), top_k = pick(1, top_groups * size);
  const bool f32 = pick(0, 1) != 0;
  std::vector<uint16_t> x(size_t(tokens) * hidden), gate16(size_t(experts) * hidden);
  std::vector<float> gate(size_t(experts) * hidden), bias(experts, 0.1f), weights(size_t(tokens) * top_k), logits(size_t(tokens) * experts);
  for (uint16_t& value : x) value = to_bf16(normal());
  for (size_t i = 0; i < gate.size(); ++i) gate16[i] = to_bf16(gate[i] = normal());
  std::vector<int32_t> ids(size_t(tokens) * top_k);
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!moe_mk_isa_supported(isa)) continue;
    const void* rows = f32 ? static_cast<const void*>(gate.data()) : gate16.data();
    MoeMkRoute call = {x.data(), rows, pick(0, 1) ? bias.data() : nullptr, ids.data(), weights.data(), logits.data(), tokens,
                       hidden, hidden, hidden, experts, top_k, groups, top_groups, pick(0, 1), pick(0, 1), f32, 1.0f, pick(1, 3), isa};
    if (moe_mk_route(&call) != kOk) fail("route", seed);
    for (int32_t id : ids)
      if (id < 0 || id >= experts) fail("an id is an expert", seed);
    if (isa == kScalar) fold(ids), fold(logits);  // weights have the bits of the exp of the C library
  }
}

// A layer in one call: its router, then experts of which some are on other ranks or on none.
void whole(int seed) {
  const Shape s = {pick(1, 4), pick(1, 100), pick(1, 100), pick(0, 20), 1, kBf16, 32, pick(0, 1), 0, 0};
  const Packed w13(s.slots, s.inter, s.hidden, s, s.gated != 0, seed), w2(s.slots, s.hidden, s.inter, s, false, seed);
  const int experts = s.slots + pick(0, 3), top_k = pick(1, experts);
  std::vector<uint16_t> x(size_t(s.rows) * s.hidden), out(x.size()), first;
  std::vector<float> gate(size_t(experts) * s.hidden);
  for (uint16_t& value : x) value = to_bf16(normal());
  for (float& value : gate) value = normal();
  std::vector<int32_t> physical(experts), rank(experts), slot(experts);
  for (int e = 0; e < experts; ++e) {
    physical[e] = pick(0, 9) ? experts - 1 - e : -1;
    rank[e] = e / s.slots;
    slot[e] = e % s.slots;
  }
  MoeMkLayer layer = {};
  const MoeMkRoute route = {nullptr, gate.data(), nullptr, nullptr, nullptr, nullptr, 0, 0, s.hidden, s.hidden, experts, top_k, 1, 1,
                            pick(0, 1), 1, 1, 1.0f, 1, kScalar};
  MoeMkExperts routed = {};
  routed.w13 = w13.matrix;
  routed.w2 = w2.matrix;
  routed.gated = s.gated;
  routed.num_slots = s.slots;
  MoeMkExperts shared = routed;  // its slot 0, for every token
  int64_t ran[8] = {};
  layer.route = &route;
  layer.experts = &routed;
  layer.shared = pick(0, 1) ? &shared : nullptr;
  layer.ran = ran;
  layer.num_experts = experts;
  layer.physical_of = physical.data();
  layer.rank_of = rank.data();
  layer.slot_of = slot.data();
  layer.num_physical = experts;
  for (int threads = 1; threads <= 3; ++threads) {
    std::vector<int64_t> load(experts);
    std::vector<int32_t> ids(size_t(s.rows) * top_k);
    std::vector<float> weights(ids.size());
    const bool listens = pick(0, 1) != 0;
    std::vector<uint16_t> kept(ids.size());
    MoeMkCapture captured = {kept.data(), top_k, s.rows, 0, 2, top_k};
    if (moe_mk_layer(&layer, kRouteTokens, kLayerDone, x.data(), s.rows, listens ? ids.data() : nullptr,
                     listens ? weights.data() : nullptr, 0, 0, nullptr, load.data(), &captured, out.data(), threads,
                     0) != kOk)
      fail("layer", seed);
    if (ran[2 * kExpertRuns] != ran[2 * kDispatches] || ran[2 * kSharedRuns + 1] != (layer.shared ? ran[2 * kCombines + 1] : 0))
      fail("what ran is counted", seed);
    if (std::accumulate(load.begin(), load.end(), int64_t(0)) != int64_t(s.rows) * top_k) fail("choices are counted", seed);
    std::vector<int64_t> counted(experts);
    for (uint16_t id : kept) ++counted[id];
    if (captured.num_tokens != s.rows || counted != load) fail("choices are kept", seed);
    if (threads == 1) first = out;
    if (out != first) fail("a layer has the same bits for any number of threads", seed);
    if (!listens) continue;
    if (!std::equal(kept.begin(), kept.end(), ids.begin())) fail("choices are kept as they are written", seed);
    std::vector<int64_t> wide(ids.begin(), ids.end());
    const bool is_wide = pick(0, 1) != 0;
    const int32_t form = (is_wide ? kWideIds : 0) | (pick(0, 1) != 0 ? kSkipOthers : 0);
    std::vector<int64_t> again(experts);
    if (moe_mk_layer(&layer, kPlaceTokens, kLayerDone, x.data(), s.rows, is_wide ? static_cast<void*>(wide.data()) : ids.data(),
                     weights.data(), top_k, form, nullptr, again.data(), nullptr, out.data(), threads, 0) != kOk)
      fail("routed layer", seed);
    if (out != first || again != load) fail("a routed layer has the bits and the load of the whole one", seed);
  }
}

void quantising(int seed) {
  const int rows = pick(0, 20), columns = pick(1, 400), stride = columns + pick(0, 3);
  const bool f32 = pick(0, 1) != 0, ue8m0 = pick(0, 1) != 0;
  const Bytes x(rows == 0 ? 0 : (size_t(rows - 1) * stride + columns) * (f32 ? 4 : 2));
  for (size_t i = 0; i < x.size; i += 4) {
    const float value = normal();
    std::memcpy(x.data + i, &value, std::min<size_t>(4, x.size - i));
  }
  std::vector<uint8_t> codes(size_t(rows) * columns), first;
  std::vector<float> scales(size_t(rows) * ((columns + 127) / 128));
  for (int isa = 0; isa < kNumIsas; ++isa) {
    if (!moe_mk_isa_supported(isa)) continue;
    if (moe_mk_quantize(x.data, rows, columns, stride, f32, ue8m0, codes.data(), scales.data(), pick(1, 3), isa) != kOk)
      fail("quantize", seed);
    if (isa == kScalar) {
      first = codes;
      for (uint8_t& code : codes) code = (code & 0x7f) == 0x7f ? 0x7f : code;  // processors give infinity / infinity another sign
      fold(codes), fold(scales), codes = first;
    }
    if (codes != first) fail("instruction sets quantise to the same bits", seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100, start = argc > 2 ? std::atoi(argv[2]) : 0;
  for (int seed = start; seed < start + rounds; ++seed) {
    // Each begins a sequence of its own: how many numbers one draws depends on the instruction sets of the processor.
    unsigned sequence = unsigned(seed) * 5;
    for (const auto check : {layer, products, routing, whole, quantising}) random_engine.seed(sequence++), check(seed);
    fuzz::exchange(seed);
  }
  // Four concurrent calls, each with its own threads, then all scratch memory is released.
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([] {
      const std::vector<uint8_t> bytes(3 << 20, 0x7f);
      uint64_t folded = 1;
      if (moe_mk_read_rate(bytes.data(), int64_t(bytes.size()), 0, 2, kScalar, &folded) != kOk || folded != 0) std::abort();
    });
  for (std::thread& caller : callers) caller.join();
  moe_mk_release_scratch();
  if (moe_mk_scratch_bytes() != 0) fail("scratch is given back", -1);
  std::printf("%d rounds from seed %d: clean, digest %016llx\n", rounds, start, static_cast<unsigned long long>(digest));
  return 0;
}
