// Threads: created on demand, kept by their pool; between runs they spin briefly, then sleep on a condition variable.
// A run ends when its work is done: threads that have not woken up by then are not waited for and stay awake for the
// next run (on a busy or virtual machine a thread may wake up late).
// Memory: each arena only grows; arenas of 1 MiB and more request 2 MiB pages.
#include "thread_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define MOE_MK_PAUSE() __builtin_ia32_pause()
#else
#define MOE_MK_PAUSE() ((void)0)
#endif

namespace moe_mk {
namespace {

constexpr int kSpins = 2000;  // about 30 us: longer than the gap between two phases, shorter than a time slice
constexpr size_t kHugePage = size_t(2) << 20;
std::atomic<size_t> total_scratch{0};

struct Block {
  uint8_t* data = nullptr;
  size_t bytes = 0;

  uint8_t* at_least(size_t wanted) {
    if (data != nullptr && wanted <= bytes) return data;
    release();
    if (wanted == 0) wanted = 1;  // zero rows are valid
    const size_t unit = wanted >= (size_t(1) << 20) ? kHugePage : 4096;
    const size_t rounded = (wanted + unit - 1) / unit * unit;
    data = static_cast<uint8_t*>(std::aligned_alloc(unit, rounded));
    if (data == nullptr) return nullptr;
#if defined(MADV_HUGEPAGE)
    if (unit == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
#endif
    bytes = rounded;
    total_scratch += rounded;
    return data;
  }
  void release() {
    std::free(data);
    total_scratch -= bytes;
    data = nullptr;
    bytes = 0;
  }
};

struct Arenas {
  Block blocks[kNumArenas];
};

class StdThreadPool final : public ThreadPool {
 public:
  void run(int threads, const std::function<void(int)>& body) override {
    if (threads <= 1) {
      body(0);
      return;
    }
    threads = grow(threads);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      body_ = &body;
      threads_ = threads;
      state_.store((run_of(state_.load(std::memory_order_relaxed)) + 1) << kRunBit | kOpen, std::memory_order_release);
    }
    wake_.notify_all();
    body(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spin = 0; any_inside(); ++spin) {
      if (spin < kSpins) {
        MOE_MK_PAUSE();
        continue;
      }
      std::unique_lock<std::mutex> hold(mutex_);
      done_.wait(hold, [this] { return !any_inside(); });
    }
  }

  uint8_t* arena(int member, int which, size_t bytes) override { return arenas_[member]->blocks[which].at_least(bytes); }

  // Called only by the owner, before run(): the arenas of a member must exist before its thread uses them.
  // Returns the number of members, which is less than `threads` if the system cannot create another thread.
  int grow(int threads) {
    while (arenas_.size() < size_t(threads)) arenas_.push_back(new Arenas);
    try {
      while (workers_ + 1 < threads) {
        const int member = workers_ + 1;
        const uint64_t seen = run_of(state_.load());
        std::thread([this, member, seen] { work(member, seen); }).detach();
        workers_ = member;
      }
    } catch (const std::system_error&) {
      return workers_ + 1;
    }
    return threads;
  }
  void release() {
    for (Arenas* arenas : arenas_)
      for (Block& block : arenas->blocks) block.release();
  }

 private:
  // One word holds the number of the run, whether a worker may still join it, and how many workers are inside.
  static constexpr int kRunBit = 32;
  static constexpr uint64_t kOpen = uint64_t(1) << 31, kInside = kOpen - 1;

  static uint64_t run_of(uint64_t state) { return state >> kRunBit; }
  bool any_inside() const { return (state_.load(std::memory_order_acquire) & kInside) != 0; }

  [[noreturn]] void work(int member, uint64_t seen) {
    for (;;) {
      wait_for_another(seen);
      if (!join(&seen)) continue;
      if (member < threads_) (*body_)(member);
      leave();
    }
  }
  void wait_for_another(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (run_of(state_.load(std::memory_order_acquire)) != seen) return;
      MOE_MK_PAUSE();
    }
    std::unique_lock<std::mutex> hold(mutex_);
    wake_.wait(hold, [this, seen] { return run_of(state_.load(std::memory_order_relaxed)) != seen; });
  }
  // false: the run is over. body_ and threads_ do not change while a worker is inside.
  bool join(uint64_t* seen) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) != 0 && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
    }
    *seen = run_of(state);
    return (state & kOpen) != 0;
  }
  void leave() {
    if (((state_.fetch_sub(1, std::memory_order_acq_rel) - 1) & (kOpen | kInside)) != 0) return;
    std::lock_guard<std::mutex> hold(mutex_);
    done_.notify_one();
  }

  std::vector<Arenas*> arenas_{new Arenas};
  int workers_ = 0, threads_ = 0;
  const std::function<void(int)>* body_ = nullptr;
  std::atomic<uint64_t> state_{0};
  std::mutex mutex_;
  std::condition_variable wake_, done_;
};

// Never destroyed: sleeping threads outlive static destruction.
struct IdlePools {
  std::mutex mutex;
  std::vector<StdThreadPool*> pools;
};
IdlePools* idle_pools = nullptr;
pthread_once_t created = PTHREAD_ONCE_INIT;

void before_fork() { idle_pools->mutex.lock(); }
void after_fork_in_parent() { idle_pools->mutex.unlock(); }
void after_fork_in_child() {
  // The child has no copies of the threads: the old pools are abandoned, and the new list has an unlocked mutex.
  idle_pools = new IdlePools;
}
void create_idle_pools() {
  idle_pools = new IdlePools;
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

}  // namespace

ThreadPoolLease::ThreadPoolLease() {
  pthread_once(&created, create_idle_pools);
  std::lock_guard<std::mutex> hold(idle_pools->mutex);
  if (idle_pools->pools.empty()) {
    pool_ = new StdThreadPool;
    return;
  }
  pool_ = idle_pools->pools.back();
  idle_pools->pools.pop_back();
}

ThreadPoolLease::~ThreadPoolLease() {
  std::lock_guard<std::mutex> hold(idle_pools->mutex);
  idle_pools->pools.push_back(static_cast<StdThreadPool*>(pool_));
}

size_t scratch_bytes() { return total_scratch.load(); }

void release_scratch() {
  pthread_once(&created, create_idle_pools);
  std::lock_guard<std::mutex> hold(idle_pools->mutex);
  for (StdThreadPool* pool : idle_pools->pools) pool->release();
}

}  // namespace moe_mk
