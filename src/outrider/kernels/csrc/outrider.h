// What Python and C++ agree on. Plain C structures, filled through ctypes.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// How the weights of a panel are stored. See linear.inl for the layouts.
enum Format : int32_t { BF16 = 0, INT8 = 1, INT8_32 = 2, INT4 = 3, INT6 = 4 };

// 32 outputs of a linear. A weight is scale * (stored integer - zero) + offset, with a scale and an
// offset for each output and group of inputs. Scales and offsets are float16 [groups][32], or, where
// there are outer ones, int8 [groups][32] to be multiplied by the outer float16 [cols / 256][32].
struct Panel {
  const uint8_t* weights;
  const void* scales;             // null for BF16
  const void* offsets;            // null for none
  const uint16_t* outer_scales;   // null for none
  const uint16_t* outer_offsets;  // null for none
  int32_t format;
  int32_t padding;
};

// y[T, rows] = x[T, cols] W^T + bias. The panels are either all BF16 or all of integers.
struct Linear {
  const Panel* panels;
  const float* bias;  // [panels * 32] or null
  int32_t rows;       // outputs, without the padding of the last panel
  int32_t cols;       // inputs, padded to a multiple of 64
  int32_t integer;
  int32_t padding;
};

struct Layer {
  Linear qkv, out, gate_up, down;
  const float* attention_norm;       // [D]
  const float* mlp_norm;             // [D]
  const float* attention_post_norm;  // [D] or null
  const float* mlp_post_norm;        // [D] or null
  const float* qk_norm;              // [H + Hkv][d] or null
  uint16_t* pool;                    // bfloat16 [slots][2 * Hkv][d]: keys, then values
  int32_t window;                    // tokens a query sees, itself included; 0 for all
  int32_t rope;                      // which table; -1 for none
};

struct Model {
  const Layer* layers;
  int32_t num_layers;
  int32_t hidden;        // D
  int32_t intermediate;  // I
  int32_t num_heads;     // H
  int32_t num_kv_heads;  // Hkv
  int32_t head_dim;      // d, a multiple of 32
  int32_t gelu;          // 1: tanh GELU, 0: SiLU
  float eps;
  float attention_scale;
  const float* final_norm;  // [D]
  Linear head;
};

// One sequence's queries. Query q sees the first prefix_count[q] slots of prefix, then the
// extra_count[q] slots of extra[q]: all in the order of their positions, itself last.
struct Row {
  int32_t start, stop;  // tokens of the batch
  int32_t extra_stride;
  int32_t padding;
  const int64_t* prefix;
  const int64_t* extra;  // [stop - start][extra_stride]
  const int32_t* prefix_count;
  const int32_t* extra_count;
};

struct Batch {
  int32_t num_tokens;  // T
  int32_t num_rows;
  int32_t num_logits;  // R
  int32_t first_layer, last_layer;
  const Row* rows;
  const int64_t* write_slots;  // [T]
  const int64_t* logit_index;  // [R]
  const float* const* cos;     // per rope table [T][d]
  const float* const* sin;
  float* x;       // [T][D] in: embeddings, out: the state after the last layer
  float* logits;  // [R][V]
  // Where to copy the state entering a layer: hidden[i] is [T][D] or null, num_layers + 1 entries.
  float* const* hidden;
};
}

// One caller at a time has the pool, and may change the buffers that its work uses.
class PoolTurn {
 public:
  PoolTurn();  // waits
  ~PoolTurn();
  PoolTurn(const PoolTurn&) = delete;
};

// The pool of threads. run() calls work(context, thread, num_threads) on every thread and returns
// when all are done; the caller is thread 0. Throws, before any work, if a thread cannot be had.
// Work must not throw.
using Work = void (*)(void* context, int thread, int num_threads);
void pool_run(const PoolTurn& turn, int num_threads, Work work, void* context);
// Inside work: wait until all threads of the run arrived here.
void pool_barrier();
