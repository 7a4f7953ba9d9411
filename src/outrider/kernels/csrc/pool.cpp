// Persistent threads. They spin for a moment after their work, since the next layer stack usually
// follows at once, then sleep.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

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

// A pool thread. It looks at its own ticket alone, so that a run touches the threads it needs and
// no others: who takes no part in a run never reads what is written for it.
struct Worker {
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> ticket{0};
};

struct Pool {
  std::vector<Worker*> workers;  // worker i is thread i + 1 of a run
  std::atomic<int> pending{0};   // workers of this run that are not done
  std::atomic<int> arrived{0};
  std::atomic<uint64_t> phase{0};
  // Of this run: written while its workers are idle, read by them after their tickets.
  Work work = nullptr;
  void* context = nullptr;
  int num_threads = 1;

  void serve(Worker& self, int id) {
    for (uint64_t seen = 0;; ++seen) {
      int spins = 0;
      while (self.ticket.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          relax();
          continue;
        }
        std::unique_lock<std::mutex> lock(self.mutex);
        self.wake.wait(lock, [&] { return self.ticket.load(std::memory_order_acquire) != seen; });
      }
      work(context, id, num_threads);
      pending.fetch_sub(1, std::memory_order_release);
    }
  }

  // Throws std::system_error or std::bad_alloc; the threads there are stay usable.
  void grow(int wanted) {
    while (static_cast<int>(workers.size()) + 1 < wanted) {
      workers.reserve(workers.size() + 1);
      auto worker = std::make_unique<Worker>();
      std::thread(&Pool::serve, this, std::ref(*worker), static_cast<int>(workers.size()) + 1)
          .detach();
      workers.push_back(worker.release());
    }
  }

  void start(Worker& worker) {
    {
      std::lock_guard<std::mutex> lock(worker.mutex);
      worker.ticket.fetch_add(1, std::memory_order_release);
    }
    worker.wake.notify_one();
  }

  void wait(std::atomic<int>& counter) {
    for (int spins = 0; counter.load(std::memory_order_acquire) != 0; ++spins)
      spins < kBarrierSpins ? relax() : std::this_thread::yield();
  }
};

// Never destroyed: detached threads outlive static destructors.
Pool* pool = nullptr;
std::mutex run_mutex;

// A fork waits for the run of another thread. Pool threads do not survive it: the child makes new
// ones.
void before_fork() { run_mutex.lock(); }
void after_fork() { run_mutex.unlock(); }
void after_fork_in_child() {
  pool = nullptr;
  run_mutex.unlock();
}
const int registered = pthread_atfork(before_fork, after_fork, after_fork_in_child);

}  // namespace

PoolTurn::PoolTurn() { run_mutex.lock(); }
PoolTurn::~PoolTurn() { run_mutex.unlock(); }

void pool_run(const PoolTurn&, int num_threads, Work work, void* context) {
  if (pool == nullptr) pool = new Pool();
  Pool& p = *pool;
  p.grow(num_threads);
  p.num_threads = num_threads;
  p.work = work;
  p.context = context;
  p.arrived.store(0);
  p.pending.store(num_threads - 1);
  for (int i = 0; i + 1 < num_threads; ++i) p.start(*p.workers[i]);
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
