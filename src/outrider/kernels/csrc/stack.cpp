// The layer stack, compiled once for each instruction set; ISA names it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "outrider.h"

namespace {
#include "vec.inl"
#include "input.inl"
#include "linear.inl"
#include "stack.inl"
}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" {

void* JOIN(outrider_scratch_, ISA)() { return new (std::nothrow) Scratch(); }
void JOIN(outrider_scratch_free_, ISA)(void* scratch) { delete static_cast<Scratch*>(scratch); }

// Returns 0, or 1 if memory or threads ran out.
int JOIN(outrider_forward_, ISA)(const Model* model, const Batch* batch, void* scratch,
                                 int threads) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  try {
    const PoolTurn turn;
    size_scratch(*model, *batch, s, threads);
    Job job{*model, *batch, s, num_panels(model->layers[0].qkv) * kLanes};
    pool_run(turn, threads, run_stack, &job);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// y[rows][num_panels * 32] = x[rows][num] W^T + bias, alone: for tests and measurements.
struct LinearJob {
  const Linear* l;
  const float* x;
  float* y;
  int rows, num;
  Input in;
};

static void run_linear(void* context, int t, int n) {
  LinearJob& job = *static_cast<LinearJob*>(context);
  const Linear& l = *job.l;
  int from, to;
  for (int m = t; m < job.rows; m += n)
    prepare(l, job.in, m, job.x + static_cast<size_t>(m) * job.num, 0, 0, l.cols / kInputs, job.num);
  pool_barrier();
  span(num_panels(l), 1, t, n, from, to);
  for (int p = from; p < to; ++p)
    panel_all(l, job.in, job.rows, p, job.y + p * kLanes, num_panels(l) * kLanes);
}

int JOIN(outrider_linear_, ISA)(const Linear* l, const float* x, int rows, int num, float* y,
                                int threads) {
  try {
    const PoolTurn turn;
    LinearJob job{l, x, y, rows, num, {}};
    job.in.size(*l, rows);
    pool_run(turn, threads, run_linear, &job);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// Reads num bytes (a multiple of 8) on all threads: the bandwidth that a plain read reaches.
struct ReadJob {
  const uint64_t* data;
  size_t num;
  std::vector<uint64_t> sums;  // of each thread
};

static void run_read(void* context, int t, int n) {
  ReadJob& job = *static_cast<ReadJob*>(context);
  // Lines of several pages in turn: a core has more of them on their way than of one page.
  constexpr size_t kPages = 8, kWords = 512;
  const size_t windows = job.num / (kPages * kWords * 8);
  const size_t from = windows * t / n, to = windows * (t + 1) / n;
  uint64_t lanes[8] = {};
  for (size_t w = from; w < to; ++w)
    for (size_t i = 0; i < kWords; i += 8)
      for (size_t page = 0; page < kPages; ++page) {
        const uint64_t* line = job.data + (w * kPages + page) * kWords + i;
        for (int k = 0; k < 8; ++k) lanes[k] += line[k];
      }
  for (size_t i = t == 0 ? windows * kPages * kWords : job.num; i < job.num / 8; ++i)
    lanes[0] += job.data[i];
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  job.sums[t] = sum;
}

uint64_t JOIN(outrider_read_, ISA)(const void* data, size_t num, int threads) {
  ReadJob job{static_cast<const uint64_t*>(data), num, std::vector<uint64_t>(threads)};
  const PoolTurn turn;
  pool_run(turn, threads, run_read, &job);
  uint64_t sum = 0;
  for (uint64_t one : job.sums) sum += one;
  return sum;
}
}
