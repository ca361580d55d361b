// The kernels for AVX-512 with VNNI and without BF16 (Cascade Lake, Ice Lake, and their clients).
#include "portable.h"

#include "avx512_peak.h"
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

double peak_avx512vnni(int64_t iterations, bool floats) {
  if (floats) {
    MOE_MK_PEAK("vfmadd231ps", iterations);
    return double(iterations) * kPeakOperations;
  }
  MOE_MK_PEAK("vpdpwssd", iterations);
  return double(iterations) * 2 * kPeakOperations;
}

}  // namespace

uint64_t read_avx512(const uint8_t* data, int64_t bytes, int way) {
  return way == kAskAhead ? read_streams<2, true>(data, bytes) : read_streams<4, false>(data, bytes);
}

const Kernels* avx512vnni_kernels() {
  static const Kernels table = {
      "avx512vnni", kDirectRows, true, true, true, false, nothing, multiply_rows<true>, multiply_rows<false>, multiply_int8_avx512,
      quantize_int8, multiply_int8_parts_avx512, round_row,
      activate, accumulate, to_bf16, write_terms, quantize, decode, gate_dots, read_avx512, peak_avx512vnni,
      integer_units, rows_to_integers,
  };
  return &table;
}

}  // namespace moe_mk
