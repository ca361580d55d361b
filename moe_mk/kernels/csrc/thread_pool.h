// A team of threads and their scratch memory, lent to one call at a time.
// Two calls at once get two teams (re-entrant); after fork() the child starts with none (its threads are gone).
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "kernels.h"

namespace moe_mk {

class ThreadPool {
 public:
  // Runs body(member) for members in [0, threads); the caller is member 0. Returns when all who began are done: body
  // takes work off a common list, since a member who comes too late for any of it never begins.
  virtual void run(int threads, const std::function<void(int)>& body) = 0;
  // Memory of one member, at least `bytes`, 64-byte aligned, contents undefined. null: no memory.
  virtual uint8_t* arena(int member, int which, size_t bytes) = 0;

 protected:
  ~ThreadPool() = default;
};

// Borrows a team for one call and gives it back.
class ThreadPoolLease {
 public:
  ThreadPoolLease();
  ~ThreadPoolLease();
  ThreadPoolLease(const ThreadPoolLease&) = delete;
  ThreadPoolLease& operator=(const ThreadPoolLease&) = delete;
  ThreadPool* operator->() const { return pool_; }

 private:
  ThreadPool* pool_;
};

size_t scratch_bytes();
void release_scratch();

// Which arena serves what.
enum Arena { kThreadScratch, kSums, kHidden, kInputs, kScales, kNumArenas };

}  // namespace moe_mk
