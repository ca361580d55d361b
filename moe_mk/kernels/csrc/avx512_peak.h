// The arithmetic rate of one instruction: sixteen chains of it on registers. They are cleared first: some processors take a hundred
// times as long for the denormal numbers that earlier code may have left there.
#pragma once
#include <cstdint>

#define MOE_MK_CHAIN(name, from, n) name " %%zmm" #from ", %%zmm" #from ", %%zmm" #n "\n"
#define MOE_MK_CHAINS(name, from)                                                                                           \
  MOE_MK_CHAIN(name, from, 0) MOE_MK_CHAIN(name, from, 1) MOE_MK_CHAIN(name, from, 2) MOE_MK_CHAIN(name, from, 3)           \
  MOE_MK_CHAIN(name, from, 4) MOE_MK_CHAIN(name, from, 5) MOE_MK_CHAIN(name, from, 6) MOE_MK_CHAIN(name, from, 7)           \
  MOE_MK_CHAIN(name, from, 8) MOE_MK_CHAIN(name, from, 9) MOE_MK_CHAIN(name, from, 10) MOE_MK_CHAIN(name, from, 11)         \
  MOE_MK_CHAIN(name, from, 12) MOE_MK_CHAIN(name, from, 13) MOE_MK_CHAIN(name, from, 14) MOE_MK_CHAIN(name, from, 15)
#define MOE_MK_RUN(instructions)                                                                                            \
  asm volatile(instructions ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
               "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm31")
#define MOE_MK_PEAK(name, iterations)                                                                                       \
  MOE_MK_RUN("vpxord %%zmm31, %%zmm31, %%zmm31\n" MOE_MK_CHAINS("vpandd", 31));                                             \
  for (int64_t i = 0; i < iterations; ++i) MOE_MK_RUN(MOE_MK_CHAINS(name, 31))

constexpr double kPeakOperations = 16 * 32;  // of an iteration: sixteen lanes, each a product and an addition, of each chain
