// Threads: created on demand, kept by their pool; between runs they spin briefly, then sleep on a condition variable.
// A run ends when its work is done: threads that have not woken up by then are not waited for and stay awake for the
// next run (on a busy or virtual machine a thread may wake up late).
// A thread that is woken on the caller's processor is moved to another one: Linux moves it only after milliseconds, in which
// one of the two waits. Virtual machines have this often, since their idle processors look as if the host had taken them.
// Memory: each arena only grows; arenas of 1 MiB and more request 2 MiB pages.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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

constexpr int kSpins = 2000;  // 30 to 110 us: longer than the gap between two phases, shorter than a time slice
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

struct Member {
  Block blocks[kNumArenas];
  std::atomic<int> thread{0};    // of the system; 0: not known
  std::atomic<uint64_t> run{0};  // the last one it has joined
};

#if defined(__linux__)
// Names it as well.
int this_thread() {
  pthread_setname_np(pthread_self(), "moe_mk");  // what `top -H` and `perf` show
  return int(syscall(SYS_gettid));
}
int this_processor() { return sched_getcpu(); }

// Moves a thread to another of the processors that it may use, and lets it use the same ones afterwards. It stays where it is
// if there is no other one, or if the system refuses.
void move_off(int thread, int processor) {
  cpu_set_t allowed;
  if (processor < 0 || processor >= CPU_SETSIZE || sched_getaffinity(thread, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) == 0 || CPU_EQUAL(&others, &allowed)) return;
  if (sched_setaffinity(thread, sizeof others, &others) == 0) sched_setaffinity(thread, sizeof allowed, &allowed);
}
#else
int this_thread() { return 0; }
int this_processor() { return -1; }
void move_off(int, int) {}
#endif

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
      moved_ = false;
      processor_.store(this_processor(), std::memory_order_relaxed);
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

  void after_task(int member) override {
    if (member != 0 || moved_) return;
    moved_ = true;
    const uint64_t run = run_of(state_.load(std::memory_order_relaxed));
    for (int late = 1; late < threads_; ++late)
      if (members_[late]->run.load(std::memory_order_relaxed) != run && members_[late]->thread != 0)
        move_off(members_[late]->thread, this_processor());
  }

  uint8_t* arena(int member, int which, size_t bytes) override { return members_[member]->blocks[which].at_least(bytes); }

  // Called only by the owner, before run(): the arenas of a member must exist before its thread uses them.
  // Returns the number of members, which is less than `threads` if the system cannot create another thread.
  int grow(int threads) {
    while (members_.size() < size_t(threads)) members_.push_back(new Member);
    try {
      while (workers_ + 1 < threads) {
        const int member = workers_ + 1;
        const uint64_t seen = run_of(state_.load());
        Member* self = members_[member];
        std::thread([this, member, self, seen] { work(member, self, seen); }).detach();
        workers_ = member;
      }
    } catch (const std::system_error&) {
      return workers_ + 1;
    }
    return threads;
  }
  void release() {
    for (Member* member : members_)
      for (Block& block : member->blocks) block.release();
  }

 private:
  // One word holds the number of the run, whether a worker may still join it, and how many workers are inside.
  static constexpr int kRunBit = 32;
  static constexpr uint64_t kOpen = uint64_t(1) << 31, kInside = kOpen - 1;

  static uint64_t run_of(uint64_t state) { return state >> kRunBit; }
  bool any_inside() const { return (state_.load(std::memory_order_acquire) & kInside) != 0; }

  [[noreturn]] void work(int member, Member* self, uint64_t seen) {
    const int thread = this_thread();
    self->thread = thread;
    for (;;) {
      wait_for_another(seen);
      if (!join(&seen)) continue;
      self->run.store(seen, std::memory_order_relaxed);
      const int processor = this_processor();
      if (processor == processor_.load(std::memory_order_relaxed)) move_off(thread, processor);
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

  std::vector<Member*> members_{new Member};
  int workers_ = 0, threads_ = 0;
  bool moved_ = false;              // whether late threads of this run have been
  std::atomic<int> processor_{-1};  // of the caller, when it started this run
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
