// The kernels for any machine: built with the compiler's baseline flags.
#include "portable.h"

namespace moe_mk {

const Kernels* scalar_kernels() {
  static const Kernels table = {
      "scalar", 0, true, false, false, false, nothing, nullptr, multiply_blocked<PortableOps>,
      multiply_int8<PortableInt8Ops>, quantize_int8, multiply_int8_parts, round_row,
      activate, accumulate, to_bf16, write_terms, quantize, decode,
      gate_dots, read, portable_peak,
  };
  return &table;
}

}  // namespace moe_mk
