// The kernels for AVX-512 with VNNI and without BF16 (Cascade Lake, Ice Lake, and their clients).
#include "portable.h"

#include "rows_int16.h"

namespace moe_mk {
namespace {

template <int Streams, bool Ask>
uint64_t read_streams(const uint8_t* data, int64_t bytes) {
  __m512i folded[4] = {};
  const int ahead = prefetch_distance();
  const int64_t each = bytes / (Streams * 256) * 256;
  for (int64_t i = 0; i < each; i += 256)
    for (int stream = 0; stream < Streams; ++stream)
      for (int lane = 0; lane < 4; ++lane) {
        const uint8_t* from = data + stream * each + i + lane * 64;
        if (Ask) _mm_prefetch(reinterpret_cast<const char*>(from + ahead), _MM_HINT_T0);
        folded[lane] = _mm512_xor_si512(folded[lane], _mm512_loadu_si512(from));
      }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(folded[0], folded[1]), _mm512_xor_si512(folded[2], folded[3]));
  return uint64_t(_mm512_reduce_add_epi64(all));
}

double peak_avx512vnni(int64_t iterations) {
  for (int64_t i = 0; i < iterations; ++i) {
#define MOE_MK_DOT(n) "vpdpwssd %%zmm30, %%zmm31, %%zmm" #n "\n"
    asm volatile(MOE_MK_DOT(0) MOE_MK_DOT(1) MOE_MK_DOT(2) MOE_MK_DOT(3) MOE_MK_DOT(4) MOE_MK_DOT(5) MOE_MK_DOT(6)
                     MOE_MK_DOT(7) MOE_MK_DOT(8) MOE_MK_DOT(9) MOE_MK_DOT(10) MOE_MK_DOT(11) MOE_MK_DOT(12)
                         MOE_MK_DOT(13) MOE_MK_DOT(14) MOE_MK_DOT(15)::
                             : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                               "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
#undef MOE_MK_DOT
  }
  return double(iterations) * 16 * 64;
}

}  // namespace

uint64_t read_avx512(const uint8_t* data, int64_t bytes, int way) {
  return way == kAskAhead ? read_streams<2, true>(data, bytes) : read_streams<4, false>(data, bytes);
}

const Kernels* avx512vnni_kernels() {
  static const Kernels table = {
      "avx512vnni", kDirectRows, true, true, true, false, nothing, multiply_rows<true>, multiply_rows<false>, multiply_int8_avx512,
      quantize_int8, multiply_int8_parts_avx512, round_row,
      activate, accumulate, to_bf16, quantize, decode, count_nans, gate_dots, read_avx512, peak_avx512vnni,
  };
  return &table;
}

}  // namespace moe_mk
