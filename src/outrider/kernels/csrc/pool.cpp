// Persistent threads. They spin for a moment after their work, since the next layer stack usually
// follows at once, then sleep.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "outrider.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace {

constexpr int kSpins = 20000;        // about half a millisecond before a worker goes to sleep
constexpr int kBarrierSpins = 2000;  // then give the core away: somebody else may hold it

struct Pool {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> ticket{0};
  std::atomic<int> pending{0};
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> phase{0};
  Work work = nullptr;
  void* context = nullptr;
  int num_threads = 1;
  pid_t owner = 0;

  void worker(int id, uint64_t seen) {
    for (;;) {
      int spins = 0;
      while (ticket.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          relax();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait(lock, [&] { return ticket.load(std::memory_order_acquire) != seen; });
      }
      ++seen;
      if (id < num_threads) {
        work(context, id, num_threads);
        pending.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  void grow(int wanted) {
    while (static_cast<int>(threads.size()) + 1 < wanted) {
      const int id = static_cast<int>(threads.size()) + 1;
      threads.emplace_back(&Pool::worker, this, id, ticket.load());
      threads.back().detach();
    }
  }

  void wait(std::atomic<int>& counter) {
    for (int spins = 0; counter.load(std::memory_order_acquire) != 0; ++spins)
      spins < kBarrierSpins ? relax() : std::this_thread::yield();
  }
};

// Never destroyed: detached threads outlive static destructors.
Pool* pool = nullptr;
std::mutex run_mutex;

}  // namespace

void pool_run(int num_threads, Work work, void* context) {
  std::lock_guard<std::mutex> only(run_mutex);
  if (pool == nullptr || pool->owner != getpid()) {  // threads do not survive a fork
    pool = new Pool();
    pool->owner = getpid();
  }
  Pool& p = *pool;
  // Workers that wake late from an earlier run read num_threads, so all of them must be idle: they
  // are, since every run waits for its own.
  p.grow(num_threads);
  p.num_threads = num_threads;
  p.work = work;
  p.context = context;
  p.arrived.store(0);
  if (num_threads > 1) {
    p.pending.store(num_threads - 1);
    {
      std::lock_guard<std::mutex> lock(p.mutex);
      p.ticket.fetch_add(1, std::memory_order_release);
    }
    p.wake.notify_all();
  }
  work(context, 0, num_threads);
  p.wait(p.pending);
}

void pool_barrier() {
  Pool& p = *pool;
  if (p.num_threads == 1) return;
  const uint64_t phase = p.phase.load(std::memory_order_acquire);
  if (p.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == p.num_threads) {
    p.arrived.store(0, std::memory_order_relaxed);
    p.phase.fetch_add(1, std::memory_order_release);
    return;
  }
  for (int spins = 0; p.phase.load(std::memory_order_acquire) == phase; ++spins)
    spins < kBarrierSpins ? relax() : std::this_thread::yield();
}
