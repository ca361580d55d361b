// Small functions of the ABI: version, instruction sets of the machine, huge pages for packed weights, scratch memory.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <ctime>

#include "thread_pool.h"

using namespace moe_mk;

int32_t moe_mk_abi_version(void) { return 20; }

int32_t moe_mk_isa_supported(int32_t isa) { return isa_supported(isa) ? 1 : 0; }

#if defined(MADV_HUGEPAGE) && defined(MADV_POPULATE_WRITE)
namespace {

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

// Requests 2 MiB pages for [begin, end) and touches them; false if the system refuses or compacts memory for too long.
// In processor time of this thread, which does not count the time that other programs have the processor.
// NOTE: with large pages AMX products of 1 to 64 rows take 0.92 to 0.95 of the time, products of 1 to 16 tokens on Zen 5 0.93. Memory
// that a virtual machine touches for the first time comes at 0.5 GB/s on large pages, later at 9 GB/s; small pages at 1.4 to 4 GB/s.
// A fragmented machine is slower.
bool populate_huge(uintptr_t begin, uintptr_t end) {
  constexpr double kBytesPerSecond = 2.5e8;
  const double start = thread_seconds();
  void* where = reinterpret_cast<void*>(begin);
  if (madvise(where, end - begin, MADV_HUGEPAGE) != 0) return false;
  if (madvise(where, end - begin, MADV_POPULATE_WRITE) != 0) return true;  // an older kernel: large pages when touched
  return thread_seconds() - start < double(end - begin) / kBytesPerSecond;
}

}  // namespace
#endif

// Requests 2 MiB pages for [address, address + num_bytes), 64 MiB at a time, while the system provides them quickly; the
// rest gets ordinary pages when it is written. Call before the first write. Returns 0: all on large pages; 1: only a part;
// -1: not supported by the system.
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

void moe_mk_use_openmp(void* start, void* end, void* thread_num, void* in_parallel, void* max_threads) {
  use_openmp(start, end, thread_num, in_parallel, max_threads);
}

int64_t moe_mk_pool_calls(int32_t on_openmp) { return pool_calls(on_openmp != 0); }

int64_t moe_mk_scratch_bytes(void) { return int64_t(scratch_bytes()); }

void moe_mk_release_scratch(void) { release_scratch(); }
