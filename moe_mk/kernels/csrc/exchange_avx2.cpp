// The row operations of exchange.cpp for AVX2 (2013 on).
#include "exchange_ops.h"

namespace moe_mk {

const RowOps* avx2_row_ops() {
  static const RowOps table = {add_up, quantize_row};
  return &table;
}

}  // namespace moe_mk
