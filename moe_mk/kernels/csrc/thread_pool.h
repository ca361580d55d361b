// A pool of threads with scratch memory, used by one call at a time.
// Concurrent calls get different pools (re-entrant); after fork() the child starts without pools, as it has no threads.
// The threads of one call at a time are those of the process's OpenMP runtime, if it was named (moe_mk_use_openmp).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>

#include "kernels.h"

namespace moe_mk {

class ThreadPool {
 public:
  // Runs body(member) for members in [0, threads); the caller is member 0. Returns when every member that started has
  // finished. body must take its work from a shared counter: a member that wakes up after the work is done never starts.
  virtual void run(int threads, const std::function<void(int)>& body) = 0;
  // For bodies of tasks that take long, after each of them: threads that wait for the caller's processor are moved to others.
  virtual void after_task(int member) = 0;
  // Memory of one member, at least `bytes`, 64-byte aligned, contents undefined. null: no memory.
  virtual uint8_t* arena(int member, int which, size_t bytes) = 0;

 protected:
  ~ThreadPool() = default;
};

// Takes an idle thread pool, or creates one, and returns it in the destructor.
// threads: of the call, as in abi.h; a negative number asks for threads of the pool itself. A lease inside a lease of the same
// thread is the same pool.
class ThreadPoolLease {
 public:
  explicit ThreadPoolLease(int threads);
  ~ThreadPoolLease();
  ThreadPoolLease(const ThreadPoolLease&) = delete;
  ThreadPoolLease& operator=(const ThreadPoolLease&) = delete;
  ThreadPool* operator->() const { return pool_; }

 private:
  ThreadPool* pool_;
  const bool inner_;
};

// The functions of abi.h.
void use_openmp(void* start, void* end, void* thread_num, void* in_parallel, void* max_threads);
int64_t pool_calls(bool on_openmp);

size_t scratch_bytes();
void release_scratch();

// The arenas of one member.
enum Arena { kThreadScratch, kSums, kHidden, kInputs, kInputTiles, kIntegers, kScales, kNumArenas };

}  // namespace moe_mk
