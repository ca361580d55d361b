// Detects the instruction sets of this machine and returns their kernel tables. Compiled with baseline flags.
// A process must request AMX state from the kernel once (arch_prctl 0x1023, feature 18); without it AMX is not used.
#include <algorithm>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe_mk {
namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf(unsigned number, unsigned sub) {
  Leaf out;
  __get_cpuid_count(number, sub, &out.eax, &out.ebx, &out.ecx, &out.edx);
  return out;
}

uint64_t enabled_state() {
  if ((leaf(1, 0).ecx >> 27 & 1) == 0) return 0;  // OSXSAVE
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool has_avx2() {
  const unsigned features = leaf(1, 0).ecx;
  const bool fma = features >> 12 & 1, f16c = features >> 29 & 1;
  return (enabled_state() & 0x6) == 0x6 && fma && f16c && (leaf(7, 0).ebx >> 5 & 1);
}

bool has_avx512vnni() {
  const Leaf seven = leaf(7, 0);
  const bool base = (seven.ebx >> 16 & 1) && (seven.ebx >> 17 & 1) && (seven.ebx >> 30 & 1) && (seven.ebx >> 31 & 1);
  return has_avx2() && (enabled_state() & 0xe6) == 0xe6 && base && (seven.ecx >> 11 & 1);
}

bool has_avx512bf16() { return has_avx512vnni() && (leaf(7, 0).ecx >> 1 & 1) && (leaf(7, 1).eax >> 5 & 1); }  // and VBMI

// NOTE one core alone, reading and decoding fp8: on Zen 5 3 KiB ahead reaches 91 % of pure reading at one row and 84 %
// at four, 1 KiB 85 % and 65 %, and 4 KiB needs 0.99 of the time of 3 KiB at one and two rows, 0.96 at four; on
// Zen 4, both cores, 2 KiB needs 0.88 to 0.94 of the time of 4 KiB at one to four rows, and 1 KiB as long as 2; on
// Sapphire Rapids 0.5 to 2 KiB are best, 4 KiB and more are worse; on Ice Lake, both cores, 4 KiB needs 0.90 to 0.97 of
// the time of 1 KiB at one and four rows.
int best_prefetch() {
  const Leaf vendor = leaf(0, 0);
  const bool amd = vendor.ebx == signature_AMD_ebx && vendor.ecx == signature_AMD_ecx && vendor.edx == signature_AMD_edx;
  if (!amd) return has_avx512vnni() && !has_avx512bf16() ? 4096 : 1024;
  const unsigned version = leaf(1, 0).eax, family = (version >> 8 & 15) + (version >> 20 & 255);
  const bool zen4 = family == 0x19 && (leaf(7, 0).ebx >> 16 & 1);  // Zen 3 has no AVX-512
  return zen4 ? 2048 : 4096;
}

// AMX-bf16, and GFNI to decode FP8 codes: every processor with AMX has it, but a virtual machine may hide it.
bool has_amx() {
#if defined(MOE_MK_EMULATE_AMX)
  return true;
#else
  const Leaf seven = leaf(7, 0);
  const bool tiles = (seven.edx >> 22 & 1) && (seven.edx >> 24 & 1), gfni = seven.ecx >> 8 & 1;
  if (!has_avx512bf16() || !tiles || !gfni) return false;
  return (enabled_state() & 0x60000) == 0x60000 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}

#endif

bool probe(int isa) {
  switch (isa) {
    case kScalar: return true;
#if defined(__x86_64__)
    case kAvx2: return has_avx2();
    case kAvx512Vnni: return has_avx512vnni();
    case kAvx512Bf16: return has_avx512bf16();
    case kAmxBf16: return has_amx();
#endif
    default: return false;
  }
}

}  // namespace

bool has_amx_int8() {
#if defined(MOE_MK_EMULATE_AMX)
  return true;
#elif defined(__x86_64__)
  static const bool found = leaf(7, 0).edx >> 25 & 1;
  return found;
#else
  return false;
#endif
}

bool isa_supported(int isa) {
  static const bool found[kNumIsas] = {probe(kScalar), probe(kAvx2), probe(kAvx512Vnni), probe(kAvx512Bf16), probe(kAmxBf16)};
  return isa >= 0 && isa < kNumIsas && found[isa];
}

int prefetch_distance() {
#if defined(__x86_64__)
  static const int distance = best_prefetch();
  return distance;
#else
  return 1024;
#endif
}

size_t built_in_gather_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2 > 0) return std::clamp(size_t(l2) / 16 * 7, kLeastGatherBytes, kGatherBytes);  // else unknown
#endif
  return kGatherBytes;
}

const Kernels* kernels_of(int isa) {
  if (!isa_supported(isa)) return nullptr;
#if defined(__x86_64__)
  if (isa == kAvx2) return avx2_kernels();
  if (isa == kAvx512Vnni) return avx512vnni_kernels();
  if (isa == kAvx512Bf16) return avx512bf16_kernels();
  if (isa == kAmxBf16) return amx_kernels();
#endif
  return scalar_kernels();
}

}  // namespace moe_mk
