// The kernels for AVX2 + FMA + F16C (2013 on).
#include "portable.h"

#include "avx2_int8.h"

namespace moe_mk {

const Kernels* avx2_kernels() {
  static const Kernels table = {
      "avx2", kDirectRows, true, true, true, false, nothing, multiply_rows<true>, multiply_rows<false>, multiply_codes,
      quantize_int8, multiply_int8_parts_avx2, round_row,
      activate, accumulate, to_bf16, write_terms, quantize, decode, gate_dots, read, portable_peak, integer_units, rows_to_integers,
  };
  return &table;
}

}  // namespace moe_mk
