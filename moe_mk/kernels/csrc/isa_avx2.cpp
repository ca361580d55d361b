// The kernels for AVX2 + FMA (2013 on): built with -mavx2 -mfma.
#include "portable.h"

namespace moe_mk {

const Kernels* avx2_kernels() {
  static const Kernels table = {
      "avx2", 0, true, false, nothing, nullptr, multiply_blocked<PortableOps>, multiply_int8<PortableInt8Ops>,
      quantize_int8, multiply_int8_parts<PortableInt8PartOps>, round_row,
      activate, accumulate, to_bf16, quantize, decode, count_nans, gate_dots, read, portable_peak,
  };
  return &table;
}

}  // namespace moe_mk
