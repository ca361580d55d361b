// The small change of the ABI: version, what the machine has, huge pages for packed weights, scratch memory.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "thread_pool.h"

using namespace moe_mk;

int32_t moe_mk_abi_version(void) { return 7; }

int32_t moe_mk_isa_supported(int32_t isa) { return isa_supported(isa) ? 1 : 0; }

#if defined(MADV_HUGEPAGE) && defined(MADV_POPULATE_WRITE)
namespace {

// Gives [begin, end) 2 MiB pages and touches them; false if the system refuses, or has to tidy up for too long to get
// them. NOTE: reads gain about 8 % from large pages; on a fragmented machine they cost seconds a GB, small ones 0.7.
bool populate_huge(uintptr_t begin, uintptr_t end) {
  constexpr double kBytesPerSecond = 1e9;
  const auto start = std::chrono::steady_clock::now();
  void* where = reinterpret_cast<void*>(begin);
  if (madvise(where, end - begin, MADV_HUGEPAGE) != 0) return false;
  if (madvise(where, end - begin, MADV_POPULATE_WRITE) != 0) return true;  // an older kernel: large pages when touched
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return took.count() < double(end - begin) / kBytesPerSecond;
}

}  // namespace
#endif

// Asks for 2 MiB pages in [address, address + num_bytes), 64 MiB at a time, as long as they come quickly; the rest gets
// ordinary pages when it is written. Best before the first write. 0: all of it has them; 1: the rest was given up;
// -1: the system has no such thing.
int32_t moe_mk_advise_huge(void* address, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE) && defined(MADV_POPULATE_WRITE)
  constexpr uintptr_t page = 4096, piece = uintptr_t(64) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + uintptr_t(num_bytes)) / page * page;
  for (uintptr_t at = begin; at < end; at += piece)
    if (!populate_huge(at, std::min(at + piece, end))) return 1;
  return 0;
#else
  (void)address;
  (void)num_bytes;
  return -1;
#endif
}

int64_t moe_mk_scratch_bytes(void) { return int64_t(scratch_bytes()); }

void moe_mk_release_scratch(void) { release_scratch(); }
