// The arithmetic rate of one instruction: sixteen chains of it on registers.
#pragma once
#include <cstdint>

#define MOE_MK_CHAIN(name, n) name " %%zmm30, %%zmm31, %%zmm" #n "\n"
#define MOE_MK_PEAK(name, iterations)                                                                                        \
  for (int64_t i = 0; i < iterations; ++i)                                                                                   \
  asm volatile(MOE_MK_CHAIN(name, 0) MOE_MK_CHAIN(name, 1) MOE_MK_CHAIN(name, 2) MOE_MK_CHAIN(name, 3) MOE_MK_CHAIN(name, 4) \
               MOE_MK_CHAIN(name, 5) MOE_MK_CHAIN(name, 6) MOE_MK_CHAIN(name, 7) MOE_MK_CHAIN(name, 8) MOE_MK_CHAIN(name, 9) \
               MOE_MK_CHAIN(name, 10) MOE_MK_CHAIN(name, 11) MOE_MK_CHAIN(name, 12) MOE_MK_CHAIN(name, 13)                   \
               MOE_MK_CHAIN(name, 14) MOE_MK_CHAIN(name, 15)::                                                               \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",      \
                     "xmm12", "xmm13", "xmm14", "xmm15")

constexpr double kPeakOperations = 16 * 64;  // of an iteration: 32 products and as many additions an instruction
