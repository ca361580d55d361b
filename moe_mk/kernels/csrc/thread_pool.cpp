// Threads: created on demand, kept by their pool; between runs they spin briefly, then sleep on a condition variable.
// A run ends when its work is done: threads that have not woken up by then are not waited for and stay awake for the
// next run (on a busy or virtual machine a thread may wake up late).
// A thread that is woken on the caller's processor is moved to another one: Linux moves it only after milliseconds, in which
// one of the two waits. Virtual machines have this often, since their idle processors look as if the host had taken them.
// OpenMP: one parallel region lends its threads to all runs of a lease. At its end every thread is waited for, at the end of a
// run only those that have joined it. It is as large as the regions of other operators of this process: libgomp ends threads
// that a smaller one does not use, and starts them again for the next one.
// Memory: each arena only grows; arenas of 1 MiB and more request 2 MiB pages.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

// Functions of the OpenMP runtime.
struct OpenMp {
  void (*start)(void (*)(void*), void*, unsigned);
  void (*end)();
  int (*thread_num)();
  int (*in_parallel)();
  int (*max_threads)();
};
OpenMp openmp{};
std::atomic<bool> has_openmp{false}, openmp_busy{false};
std::atomic<int64_t> calls_on[2];  // threads of pools, threads of OpenMP

// A region of a second thread would create a second team of workers, in addition to that of the thread that runs the operators. So
// OpenMP serves one thread; another one takes its place after this many calls in which that thread made none.
constexpr int kCallsOfOthers = 64;
std::atomic<pthread_t> openmp_caller{};
std::atomic<int> calls_of_others{kCallsOfOthers};

bool take_openmp() {
  if (!has_openmp.load(std::memory_order_acquire) || openmp.in_parallel() != 0) return false;
  const bool same = pthread_equal(openmp_caller.load(std::memory_order_relaxed), pthread_self()) != 0;
  if (!same && calls_of_others.load(std::memory_order_relaxed) < kCallsOfOthers) {
    calls_of_others.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  if (openmp_busy.exchange(true, std::memory_order_acquire)) return false;
  openmp_caller.store(pthread_self(), std::memory_order_relaxed);
  calls_of_others.store(0, std::memory_order_relaxed);
  return true;
}

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
    if (region_threads_ > 0) {
      if (!in_region_) open_region();
      return std::min(threads, region_threads_);
    }
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
  // Between these two the threads are those of an OpenMP region, which begins with the first run that needs them.
  void begin_openmp(int threads) { region_threads_ = threads; }
  void end_openmp() {
    if (in_region_) {
      {
        std::lock_guard<std::mutex> hold(mutex_);
        closing_.store(true, std::memory_order_relaxed);
        state_.store((run_of(state_.load(std::memory_order_relaxed)) + 1) << kRunBit, std::memory_order_release);
      }
      wake_.notify_all();
      openmp.end();
    }
    in_region_ = false;
    region_threads_ = 0;
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

  void open_region() {
    closing_.store(false, std::memory_order_relaxed);
    region_began_ = run_of(state_.load(std::memory_order_relaxed));
    in_region_ = true;
    const auto enter = [](void* pool) { static_cast<StdThreadPool*>(pool)->work_in_region(openmp.thread_num()); };
    openmp.start(enter, this, unsigned(std::max(region_threads_, openmp.max_threads())));
  }
  void work_in_region(int member) {
    if (member >= region_threads_) return;
    for (uint64_t seen = region_began_; !closing_.load(std::memory_order_acquire);) {
      wait_for_another(seen);
      if (!join(&seen)) continue;
      if (member < threads_) (*body_)(member);
      leave();
    }
  }
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
  int region_threads_ = 0;          // above 0: workers are those of an OpenMP region, at most so many with the caller
  bool in_region_ = false;
  uint64_t region_began_ = 0;       // the run before the first one of the region
  std::atomic<bool> closing_{false};
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
  StdThreadPool* const of_openmp = new StdThreadPool;  // leased by whoever has set openmp_busy
};
IdlePools* idle_pools = nullptr;
pthread_once_t created = PTHREAD_ONCE_INIT;

void before_fork() { idle_pools->mutex.lock(); }
void after_fork_in_parent() { idle_pools->mutex.unlock(); }
void after_fork_in_child() {
  // The child has no copies of the threads: the old pools are abandoned, and the new list has an unlocked mutex.
  idle_pools = new IdlePools;
  has_openmp = false;  // its workers are gone as well
}
void create_idle_pools() {
  idle_pools = new IdlePools;
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

}  // namespace

thread_local StdThreadPool* leased_here = nullptr;

ThreadPoolLease::ThreadPoolLease(int threads) : inner_(leased_here != nullptr) {
  pthread_once(&created, create_idle_pools);
  if (!inner_) {
    const bool on_openmp = threads > 1 && take_openmp();
    calls_on[on_openmp].fetch_add(1, std::memory_order_relaxed);
    std::unique_lock<std::mutex> hold(idle_pools->mutex);
    if (on_openmp) {
      leased_here = idle_pools->of_openmp;
      leased_here->begin_openmp(threads);
    } else if (!idle_pools->pools.empty()) {
      leased_here = idle_pools->pools.back();
      idle_pools->pools.pop_back();
    } else {
      leased_here = new StdThreadPool;
    }
  }
  pool_ = leased_here;
}

ThreadPoolLease::~ThreadPoolLease() {
  if (inner_) return;
  StdThreadPool* pool = leased_here;
  leased_here = nullptr;
  if (pool == idle_pools->of_openmp) {
    pool->end_openmp();
    openmp_busy.store(false, std::memory_order_release);
    return;
  }
  std::lock_guard<std::mutex> hold(idle_pools->mutex);
  idle_pools->pools.push_back(pool);
}

void use_openmp(void* start, void* end, void* thread_num, void* in_parallel, void* max_threads) {
  pthread_once(&created, create_idle_pools);
  if (has_openmp) return;
  openmp = {reinterpret_cast<void (*)(void (*)(void*), void*, unsigned)>(start), reinterpret_cast<void (*)()>(end),
            reinterpret_cast<int (*)()>(thread_num), reinterpret_cast<int (*)()>(in_parallel),
            reinterpret_cast<int (*)()>(max_threads)};
  has_openmp.store(true, std::memory_order_release);
}

int64_t pool_calls(bool on_openmp) { return calls_on[on_openmp].load(); }

size_t scratch_bytes() { return total_scratch.load(); }

void release_scratch() {
  pthread_once(&created, create_idle_pools);
  std::lock_guard<std::mutex> hold(idle_pools->mutex);
  for (StdThreadPool* pool : idle_pools->pools) pool->release();
  if (openmp_busy.exchange(true)) return;
  idle_pools->of_openmp->release();
  openmp_busy = false;
}

}  // namespace moe_mk
