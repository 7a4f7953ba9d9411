// The whole layer stack in one call. Threads share every phase and meet at barriers between them;
// what one thread computes never depends on how the work was split.
#pragma once

// Where the states of a token's attention are: [heads][stride] of them from first on.
struct TokenStates {
  size_t first;
  int stride, total;  // total: keys without a window
};

// Buffers of one model, kept between calls. size_scratch makes them large enough before the threads
// start: a thread that ran out of memory would leave the others at a barrier.
struct Scratch {
  Input input, mid, down_input, head_input;
  std::vector<Input> own;  // of each thread, for forwards of few rows
  std::vector<float> qkv, tile_out;
  std::vector<std::vector<float>> tiles, scores;  // of each thread
  std::vector<std::vector<float>> blocks;         // of each thread: the room of a Tile
  std::vector<float> states;                      // of attention, and where those of a token are
  std::vector<TokenStates> tokens;
};

static constexpr int kOwnRows = 8;

struct Job {
  const Model& model;
  const Batch& batch;
  Scratch& s;
  int qkv_stride;
};

static inline void span(int total, int step, int t, int n, int& from, int& to) {
  const int units = (total + step - 1) / step;
  from = std::min(total, units * t / n * step);
  to = std::min(total, units * (t + 1) / n * step);
}

// 1 / sqrt(mean(x^2) + eps)
static float inverse_rms(const float* x, int num, float eps) {
  float lanes[16] = {};
  int i = 0;
  for (; i + 16 <= num; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += x[i + j] * x[i + j];
  for (int j = 0; i + j < num; ++j) lanes[j] += x[i + j] * x[i + j];
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return 1.0f / std::sqrt(sum / static_cast<float>(num) + eps);
}

// Normalise the rows of x and prepare them for l. Rows are split among threads, or the blocks of
// the rows where there are fewer rows than threads. buffer is [D], the thread's own.
static void norm_prepare(const Job& job, const Linear& l, Input& in, const float* x,
                         const int64_t* index, int rows, const float* weight, int t, int n,
                         float* buffer) {
  const int hidden = job.model.hidden, blocks = l.cols / kInputs;
  for (int m = 0; m < rows; ++m) {
    int b0 = 0, b1 = blocks;
    if (rows < n)
      span(blocks, 1, t, n, b0, b1);
    else if (m % n != t)
      continue;
    const float* row = x + static_cast<size_t>(index ? index[m] : m) * hidden;
    const float r = inverse_rms(row, hidden, job.model.eps);
    const int k0 = std::min(hidden, b0 * kInputs), k1 = std::min(hidden, b1 * kInputs);
    for (int k = k0; k < k1; ++k) buffer[k] = row[k] * r * weight[k];
    prepare(l, in, m, buffer, 0, b0, b1, hidden);
  }
}

// The inputs of l from all rows of the batch, normalised. Of few rows each thread prepares its own
// copy, which costs less than waiting for the others.
static const Input& norm_all(const Job& job, const Linear& l, const float* weight, int t, int n) {
  const int rows = job.batch.num_tokens;
  const bool own = rows <= kOwnRows;
  Input& in = own ? job.s.own[t] : job.s.input;
  norm_prepare(job, l, in, job.batch.x, nullptr, rows, weight, own ? 0 : t, own ? 1 : n,
               job.s.scores[t].data());
  if (!own) pool_barrier();
  return in;
}

// x[m] += the linear's output, normalised first where the model has a norm there.
static void add_linear(const Job& job, const Linear& l, const Input& in, const float* post_norm,
                       int t, int n) {
  const int rows = job.batch.num_tokens, hidden = job.model.hidden;
  float* out = post_norm ? job.s.tile_out.data() : nullptr;
  const int stride = num_panels(l) * kLanes;
  int from, to;
  span(num_panels(l), 1, t, n, from, to);
  float* tile = job.s.tiles[t].data();
  for (int p = from; p < to; ++p) {
    if (out) {
      panel_all(l, in, rows, p, out + p * kLanes, stride);
      continue;
    }
    panel_all(l, in, rows, p, tile, kLanes);
    const int width = std::min(kLanes, l.rows - p * kLanes);
    for (int m = 0; m < rows; ++m) {
      float* x = job.batch.x + static_cast<size_t>(m) * hidden + p * kLanes;
      for (int i = 0; i < width; ++i) x[i] += tile[m * kLanes + i];
    }
  }
  if (!out) return;
  pool_barrier();
  for (int m = t; m < rows; m += n) {
    const float* y = out + static_cast<size_t>(m) * stride;
    const float r = inverse_rms(y, hidden, job.model.eps);
    float* x = job.batch.x + static_cast<size_t>(m) * hidden;
    for (int i = 0; i < hidden; ++i) x[i] += y[i] * r * post_norm[i];
  }
}

// Rotate queries and keys, write keys and values to their slots.
static void rotate_and_store(const Job& job, const Layer& layer, int t, int n) {
  const Model& model = job.model;
  const int d = model.head_dim, heads = model.num_heads, kv = model.num_kv_heads, half = d / 2;
  const int units = heads + 2 * kv;
  for (int unit = t; unit < job.batch.num_tokens * units; unit += n) {
    const int m = unit / units, head = unit % units;
    float* v = job.s.qkv.data() + static_cast<size_t>(m) * job.qkv_stride + head * d;
    if (head < heads + kv) {
      if (layer.qk_norm) {
        const float r = inverse_rms(v, d, model.eps);
        for (int i = 0; i < d; ++i) v[i] = v[i] * r * layer.qk_norm[head * d + i];
      }
      if (layer.rope >= 0) {
        const float* c = job.batch.cos[layer.rope] + static_cast<size_t>(m) * d;
        const float* s = job.batch.sin[layer.rope] + static_cast<size_t>(m) * d;
        for (int i = 0; i < half; ++i) {
          const float a = v[i], b = v[i + half];
          v[i] = a * c[i] + b * s[i];  // the first half of the sines is negated
          v[i + half] = b * c[i + half] + a * s[i + half];
        }
      }
    }
    if (head < heads) continue;
    uint16_t* slot = layer.pool + (job.batch.write_slots[m] * 2 * kv + (head - heads)) * d;
    for (int i = 0; i < d; ++i) slot[i] = float_to_bf16(v[i]);
  }
}

#include "attention.inl"

// Panels of gate and up between two preparations of the inputs of down.
static constexpr int kGateUpStep = kInputs / kLanes;

static void gate_up(const Job& job, const Layer& layer, const Input& in, int t, int n) {
  const Linear &l = layer.gate_up, &down = layer.down;
  const int rows = job.batch.num_tokens, inter = job.model.intermediate;
  const int pairs = num_panels(l) / 2, step = kGateUpStep;
  int from, to;
  span(pairs, step, t, n, from, to);
  const int width = step * kLanes;  // columns between two calls of prepare
  float* both = job.s.tiles[t].data();
  float* held = both + static_cast<size_t>(rows) * kLanes * 2;
  for (int p = from; p < to; ++p) {
    panel_all(l, in, rows, 2 * p, both, 2 * kLanes);
    panel_all(l, in, rows, 2 * p + 1, both + kLanes, 2 * kLanes);
    const int at = p % step * kLanes;
    for (int m = 0; m < rows; ++m) {
      const float* gate = both + static_cast<size_t>(m) * 2 * kLanes;
      float* h = held + static_cast<size_t>(m) * width + at;
      if (job.model.gelu) {
        for (int i = 0; i < kLanes; ++i) {
          const float g = gate[i], z = 0.7978845608028654f * (g + 0.044715f * g * g * g);
          const float e = fast_exp(-2.0f * std::fabs(z));
          const float tanh = std::copysign((1.0f - e) / (1.0f + e), z);
          h[i] = 0.5f * g * (1.0f + tanh) * gate[i + kLanes];
        }
      } else {
        for (int i = 0; i < kLanes; ++i)
          h[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * gate[i + kLanes];
      }
    }
    if (p + 1 != to && (p + 1) % step != 0) continue;
    const int b = p * kLanes / kInputs;
    for (int m = 0; m < rows; ++m)
      prepare(down, job.s.down_input, m, held + static_cast<size_t>(m) * width, b * kInputs, b,
              b + 1, inter);
  }
}

static void head(const Job& job, int t, int n) {
  const Model& model = job.model;
  const Linear& l = model.head;
  const int rows = job.batch.num_logits;
  float* tile = job.s.tiles[t].data();
  norm_prepare(job, l, job.s.head_input, job.batch.x, job.batch.logit_index, rows,
               model.final_norm, t, n, job.s.scores[t].data());
  pool_barrier();
  int from, to;
  span(num_panels(l), 1, t, n, from, to);
  for (int p = from; p < to; ++p) {
    const int width = std::min(kLanes, l.rows - p * kLanes);
    if (width == kLanes) {
      panel_all(l, job.s.head_input, rows, p, job.batch.logits + p * kLanes, l.rows);
      continue;
    }
    panel_all(l, job.s.head_input, rows, p, tile, kLanes);
    for (int m = 0; m < rows; ++m)
      std::memcpy(job.batch.logits + static_cast<size_t>(m) * l.rows + p * kLanes,
                  tile + m * kLanes, width * sizeof(float));
  }
}

static void keep_hidden(const Job& job, int layer, int t) {
  if (t != 0 || job.batch.hidden == nullptr || job.batch.hidden[layer] == nullptr) return;
  std::memcpy(job.batch.hidden[layer], job.batch.x,
              static_cast<size_t>(job.batch.num_tokens) * job.model.hidden * sizeof(float));
}

static void run_stack(void* context, int t, int n) {
  const Job& job = *static_cast<Job*>(context);
  const Model& model = job.model;
  const Batch& batch = job.batch;
  Scratch& s = job.s;
  const int rows = batch.num_tokens;
  for (int i = batch.first_layer; i < batch.last_layer; ++i) {
    const Layer& layer = model.layers[i];
    keep_hidden(job, i, t);
    const Input& attention_in = norm_all(job, layer.qkv, layer.attention_norm, t, n);
    int from, to;
    span(num_panels(layer.qkv), 1, t, n, from, to);
    for (int p = from; p < to; ++p)
      panel_all(layer.qkv, attention_in, rows, p, s.qkv.data() + p * kLanes, job.qkv_stride);
    pool_barrier();
    rotate_and_store(job, layer, t, n);
    pool_barrier();
    attention(job, layer, t, n);
    pool_barrier();
    add_linear(job, layer.out, s.mid, layer.attention_post_norm, t, n);
    pool_barrier();
    gate_up(job, layer, norm_all(job, layer.gate_up, layer.mlp_norm, t, n), t, n);
    pool_barrier();
    add_linear(job, layer.down, s.down_input, layer.mlp_post_norm, t, n);
    pool_barrier();
  }
  keep_hidden(job, batch.last_layer, t);
  if (batch.num_logits > 0) head(job, t, n);
}

static void enlarge(std::vector<float>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// Make every buffer that run_stack uses large enough. Throws std::bad_alloc.
static void size_scratch(const Model& model, const Batch& batch, Scratch& s, int threads) {
  const size_t rows = batch.num_tokens, d = model.head_dim;
  if (s.own.size() < static_cast<size_t>(threads)) s.own.resize(threads);
  size_t qkv = 0, out = 0, tile = kLanes * size_t(batch.num_logits);
  for (int i = 0; i < model.num_layers; ++i) {
    const Layer& l = model.layers[i];
    s.input.size(l.qkv, rows);
    s.input.size(l.gate_up, rows);
    for (int t = 0; t < threads && rows <= kOwnRows; ++t) {
      s.own[t].size(l.qkv, rows);
      s.own[t].size(l.gate_up, rows);
    }
    s.mid.size(l.out, rows);
    s.down_input.size(l.down, rows);
    qkv = std::max(qkv, num_panels(l.qkv) * kLanes * rows);
    out = std::max(out, num_panels(l.out) * kLanes * rows);
    out = std::max(out, num_panels(l.down) * kLanes * rows);
    tile = std::max(tile, (2 + kGateUpStep) * kLanes * rows);
    tile = std::max(tile, size_t(finish_step(model.head_dim)));
  }
  s.head_input.size(model.head, batch.num_logits);
  enlarge(s.qkv, qkv);
  enlarge(s.tile_out, out);
  if (s.tokens.size() < rows) s.tokens.resize(rows);
  enlarge(s.states, place_states(model, batch, threads, s.tokens.data()) * state_size(d));
  for (auto* buffers : {&s.tiles, &s.scores, &s.blocks})
    if (buffers->size() < static_cast<size_t>(threads)) buffers->resize(threads);
  for (int t = 0; t < threads; ++t) {
    enlarge(s.tiles[t], tile);
    enlarge(s.scores[t], model.hidden);
    enlarge(s.blocks[t], Tile::room(d));
  }
}
