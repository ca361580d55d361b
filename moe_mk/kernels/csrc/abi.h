// The C ABI: plain pointers and sizes, mirrored field by field in native/library.py. No torch header, no C++ type.
// Every function returns 0 or one of the Status codes; none throws, none reads the environment.
// threads: how many a call may use, not 0; a negative number: that many, of the kernels' own threads.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum Status : int32_t { kOk = 0, kBadId = 1, kBadShape = 2, kNoMemory = 3, kNoIsa = 4, kLate = 5, kPeerFault = 6 };
enum Isa : int32_t { kScalar = 0, kAvx2 = 1, kAvx512Vnni = 2, kAvx512Bf16 = 3, kAmxBf16 = 4, kNumIsas = 5 };
// kInt4, kInt5, kInt8Groups: unsigned codes with one scale, and optionally one zero point or bias, per group of k.
// kQ4K, kQ5K, kQ6K: the super-blocks of 256 weights of ggml.
enum Format : int32_t {
  kFp8 = 0, kBf16 = 1, kInt8 = 2, kMxFp8 = 3, kMxFp4 = 4, kNvFp4 = 5, kInt4 = 6, kInt8Groups = 7, kQ4K = 8, kQ5K = 9, kQ6K = 10,
  kInt5 = 11, kNumFormats = 12
};
enum ScaleType : int32_t { kScaleF32 = 0, kScaleBf16 = 1, kScaleF16 = 2, kNumScaleTypes = 3 };
// Blocks of ggml as they are in a file, by the numbers of ggml_type. kBlockQ4_0 and kBlockQ4_1 become kInt4, kBlockQ5_1 kInt5,
// kBlockQ8_0 kInt8Groups.
enum BlockType : int32_t {
  kBlockQ4_0 = 2, kBlockQ4_1 = 3, kBlockQ5_1 = 7, kBlockQ8_0 = 8, kBlockQ4K = 12, kBlockQ5K = 13, kBlockQ6K = 14
};
enum Rounding : int32_t { kAsIs = 0, kFp8Rows = 1, kInt8Rows = 2, kUe8m0Rows = 3, kInt8PartRows = 4 };
enum Activation : int32_t { kSilu = 0, kGeluErf = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluOai = 4, kSiluLimit = 5, kSitu = 6 };
enum ReadWay : int32_t { kAskAhead = 0, kManyStreams = 1, kNumReadWays = 2 };
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

// One projection of all local experts in packed form (layout: pack.cpp).
struct MoeMkMatrix {
  const int32_t* row_of;  // [L] the row of data and of what follows that holds each slot; null: rows are slots
  const uint8_t* data;    // [L][slot_bytes]
  const void* scales;     // [L][slot_scales]; null: none. kFp8, kInt8: f32, each [pair][2 tiles][blocks].
                          // kMxFp8, kMxFp4 (E8M0 for 32 k), kNvFp4 (e4m3 for 16 k): bytes, each [pair][k group][32 outputs]
                          // kInt4, kInt5, kInt8Groups: bytes of [pair][group][1 + biased][32 outputs] of scale_type; kQ4K, kQ5K,
                          // kQ6K: bytes of [pair][256 k], see part_scales.h
  const float* output_scales;  // [L][slot_output_scales], each [pair][32 outputs]; null: 1
  const float* bias;      // [L][slot_bias]: f32 per output column, gate's then up's; null: none
  int64_t slot_bytes, slot_scales, slot_output_scales, slot_bias;
  int32_t format;         // Format
  int32_t num_outputs;    // logical output columns; for a gated w13 of ONE half (I)
  int32_t num_inputs;     // logical k
  int32_t block;          // k covered by one f32 scale: 32, 64 or 128
  const uint8_t* zeros;   // kInt4, kInt8Groups: [L][slot_zeros], each [pair][group][32 outputs]; null: 8 or 128
  int64_t slot_zeros;
  int32_t scale_type;     // ScaleType of kInt4, kInt5 and kInt8Groups
  int32_t group;          // their k per scale: 32, 64 or a multiple of 128; 0: all
  int32_t biased;         // whether biases follow the scales of each group: weights are scale * code + bias; kInt5: always
};

struct MoeMkExperts {
  const void* x;          // [R][x_stride] bf16, or codes when x_scales is given: s8 with kInt8Rows and kInt8PartRows, else e4m3
  const float* x_scales;  // [R][x_scale_stride], one per 128 k, or one a row with kInt8Rows, or one a part of w13 with
                          // kInt8PartRows; null: x is bf16
  const int32_t* ids;     // [R][K] local slots; -1: dropped
  const float* weights;   // [R][K]; null: all ones
  void* out;              // [R][out_stride] bf16, or f32 when out_f32
  int64_t num_rows, x_stride, x_scale_stride, out_stride;
  int32_t top_k, num_slots;
  MoeMkMatrix w13, w2;
  int32_t gated, activation;
  float alpha, limit;     // limit <= 0: no clamp
  int32_t quantize;       // Rounding of x and h: 1x128 e4m3 (kUe8m0Rows: scales are powers of two), or s8 with one scale a
                          // row (kInt8 weights only), or a part of k (kInt8PartRows: kInt4, kInt8Groups, kQ4K; of w2 any,
                          // h is rounded for these only)
  int32_t batch_invariant, out_f32, threads, isa;
  MoeMkMatrix shared_w13, shared_w2;  // one slot that every row visits with weight 1; data null: none
  // Tuning parameters; 0: built-in value. None of them changes a bit of the result (layer.h checks the limits).
  int32_t panel_rows;     // rows of an expert from which weights are decoded into a panel first, where bits agree: 1 to 5
  int32_t task_pairs;     // most pairs of columns in a task: 1 to 16
  int32_t prefetch_bytes; // prefetch distance of a stream of weights: 64 to 16 384
  int32_t gather_kib;     // memory for rows gathered at a time, part of the L2: 128 to 4096
  int32_t streamed_rows;  // AMX: rows of an expert up to which panels stay in the L1, above in the L2: 16 to 256
  int32_t tile_rows;      // AMX-int8: rows of an expert from which tiles multiply kInt8Rows: 1 to 256
};

struct MoeMkRoute {
  const void* x;          // [T][H] bf16
  const void* gate;       // [E][H] bf16, or f32 when gate_f32
  const float* bias;      // [E] added for the choice only; null: none
  int32_t* ids;           // out [T][K]
  float* weights;         // out [T][K]
  float* logits;          // out [T][E]
  int64_t num_tokens, x_stride, gate_stride;
  int32_t hidden, num_experts, top_k, num_groups, top_groups, scoring, renormalize, gate_f32;
  float scale;
  int32_t threads, isa;
};

int32_t moe_mk_abi_version(void);
int32_t moe_mk_isa_supported(int32_t isa);
// row_stride in bytes; of four-bit formats num_inputs is even.
int32_t moe_mk_pack(const void* first, const void* second, int64_t row_stride, int64_t num_outputs, int64_t num_inputs,
                    int32_t format, void* packed, int32_t threads, int64_t* num_nans);
int32_t moe_mk_unpack(const void* packed, void* first, void* second, int64_t row_stride, int64_t num_outputs,
                      int64_t num_inputs, int32_t format, int32_t threads);
// The same for rows of ggml blocks, row_stride bytes apart. num_inputs: a multiple of 32 (kBlockQ4_0 to kBlockQ8_0) or 256.
// scales: of the slot, f16 or super-blocks. num_nans: scales that are not finite.
int32_t moe_mk_pack_blocks(const void* first, const void* second, int64_t row_stride, int64_t num_outputs, int64_t num_inputs,
                           int32_t block_type, void* packed, void* scales, int32_t threads, int64_t* num_nans);
int32_t moe_mk_unpack_blocks(const void* packed, const void* scales, void* first, void* second, int64_t row_stride,
                             int64_t num_outputs, int64_t num_inputs, int32_t block_type, int32_t threads);
int32_t moe_mk_experts(const MoeMkExperts* call);
// w2 of slot 0 alone: out [R][out_stride] = w2(x [R][x_stride]), with its bias. x is bf16, its columns a multiple of 32, not
// rounded or to INT8. Of call: w2, x_stride, out_stride, top_k (1), num_slots, quantize, out_f32, batch_invariant, isa and the
// tuning parameters.
int32_t moe_mk_product(const MoeMkExperts* call, const void* x, int64_t num_rows, void* out, int32_t threads);
// The sums of moe_mk_experts over terms that calls with top_k 1, without weights, wrote in f32: the same bits. out
// [R][num_columns], dense. terms [R][K][stride], readable up to a multiple of 32 columns; ids [R][K], -1: no term. The terms of
// a row are added in ascending order of ids. weights [R][K]; null: all ones.
int32_t moe_mk_sum_terms(const float* terms, const int32_t* ids, const float* weights, int64_t num_rows, int32_t top_k,
                         int64_t num_columns, int64_t stride, void* out, int32_t out_f32, int32_t threads, int32_t isa);
int32_t moe_mk_route(const MoeMkRoute* call);
// ue8m0: scales are powers of two, stored as f32.
int32_t moe_mk_quantize(const void* x, int64_t num_rows, int64_t num_columns, int64_t x_stride, int32_t x_is_f32,
                        int32_t ue8m0, uint8_t* values, float* scales, int32_t threads, int32_t isa);
int32_t moe_mk_advise_huge(void* address, int64_t num_bytes);
int32_t moe_mk_read_rate(const void* data, int64_t num_bytes, int32_t way, int32_t threads, int32_t isa, uint64_t* checksum);
// floats: of the products with bf16 and FP8 weights instead of those with integers.
int32_t moe_mk_peak_rate(int64_t iterations, int32_t threads, int32_t isa, int32_t floats, double* flops);
// Names the OpenMP runtime of this process's other operators by its functions GOMP_parallel_start,
// GOMP_parallel_end, omp_get_thread_num, omp_in_parallel and omp_get_max_threads. Calls then run on its threads, except calls with a negative number of threads,
// calls inside a parallel region, during another call or from another thread than the last ones, and calls after a fork.
void moe_mk_use_openmp(void* start, void* end, void* thread_num, void* in_parallel, void* max_threads);
// How many calls have run on the threads of OpenMP, or on other ones.
int64_t moe_mk_pool_calls(int32_t on_openmp);
int64_t moe_mk_scratch_bytes(void);
void moe_mk_release_scratch(void);
}
#pragma GCC visibility pop
