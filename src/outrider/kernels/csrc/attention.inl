// Attention of a batch's queries to the slots they see.
//
// Keys are taken in the order of their positions, in chunks whose bounds are multiples of kChunk,
// whatever slots they lie in and whatever other queries there are. A chunk gives each query a
// state: the largest score, the sum of the weights relative to it, and the sum of the weighted
// values. The states of a query are folded in the order of its chunks, whoever computed them. So
// the result of a query depends on the tokens it sees alone.
#pragma once

#include "chunk.inl"

// Floats of a state: [d] values, the largest score, the sum of the weights, padding.
static inline size_t state_size(int d) { return d + 16; }

static inline int num_chunks(int keys) { return (keys + kChunk - 1) / kChunk; }

struct Query {
  const Row* row;
  int m, head;               // token of the batch, query head
  int prefix, total, begin;  // keys from row->prefix, all keys, first key inside the window
  const int64_t* extra;

  bool sees(int chunk) const { return total > chunk * kChunk && begin < (chunk + 1) * kChunk; }
};

static inline int window_begin(const Layer& layer, int total) {
  return layer.window > 0 ? std::max(0, total - layer.window) : 0;
}

// Add a later chunk's state to the state of the chunks before it. Never inlined, so that it is the
// same instructions wherever it is called.
__attribute__((noinline)) static void fold(float* state, const float* later, int d) {
  const bool grows = later[d] > state[d];
  const float gap = std::min(std::fabs(later[d] - state[d]), 126.0f);  // one may be -inf
  const float factor = later[d] == state[d] ? 1.0f : power(-gap);
  const float a = grows ? factor : 1.0f, b = grows ? 1.0f : factor;
  combine(state, a, later, b, d);
  state[d] = grows ? later[d] : state[d];
  state[d + 1] = state[d + 1] * a + later[d + 1] * b;
}

// Queries of one row and key-value head, and a thread's room to work on them.
struct Tile {
  Query queries[kTile];
  int count = 0, begin = INT32_MAX, total = 0;  // of the keys that any of them sees
  const uint16_t* pool;                         // of the key-value head
  size_t slot_size, values;                     // from slot to slot, from a key to its value
  int d;
  float *vectors, *scores, *turned, *spare;     // [d / 16][kTile][16], [kTile][kChunk], ...
  const uint16_t *shared[kChunk], *own[kChunk], *next[kChunk];  // keys; next: of the next chunk

  static size_t room(int d) {
    return 16 + kTile * d + kTile * kChunk + kBlock * d + kTile * state_size(d);
  }

  Tile(const Model& model, const Layer& layer, int kv, float* memory) : d(model.head_dim) {
    slot_size = static_cast<size_t>(2) * model.num_kv_heads * d;
    values = static_cast<size_t>(model.num_kv_heads) * d;
    pool = layer.pool + static_cast<size_t>(kv) * d;
    vectors = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t{63});
    scores = vectors + kTile * d;
    turned = scores + kTile * kChunk;
    spare = turned + kBlock * d;
  }

  void add(const Query& query, const float* vector, float scale) {
    float* __restrict out = vectors + count * 16;
    for (int c = 0; c < d; c += 16, out += kTile * 16)
      for (int k = 0; k < 16; ++k) out[k] = vector[c + k] * scale;
    begin = std::min(begin, query.begin);
    total = std::max(total, query.total);
    queries[count++] = query;
  }

  // The keys that a query sees at positions [from, to); blocks are filled up with the last.
  void locate(const Query& query, int from, int to, const uint16_t** keys) const {
    for (int j = from; j < to; ++j) {
      const int64_t slot =
          j < query.prefix ? query.row->prefix[j] : query.extra[j - query.prefix];
      keys[j - from] = pool + slot * slot_size;
    }
    for (int j = to - from; j % kBlock != 0; ++j) keys[j] = keys[j - 1];
  }

  // Scores of queries [first, stop) with keys at positions [from, to) of a chunk.
  void score(const uint16_t* const* keys, int from, int to, int first, int stop) {
    for (int b = from; b < to; b += kBlock, keys += kBlock) {
      turn(keys, d, turned);
      const uint16_t* const* then = b + kBlock < to ? keys + kBlock : keys;
      for (int i = first; i < stop; i += kGroup)
        kProducts[std::min(kGroup, stop - i) - 1](vectors + i * 16, turned, d,
                                                  scores + i * kChunk + b % kChunk, keys, then,
                                                  values);
    }
  }

  void weigh(const uint16_t* const* keys, int from, int to, int first, int stop,
             float* const* out) const {
    for (int i = first; i < stop; i += kGroup)
      kMix[std::min(kGroup, stop - i) - 1](scores + i * kChunk + from % kChunk, keys, values,
                                           to - from, d, out + i, next);
  }

  // Note the keys of a chunk, to fetch them: exactness does not matter.
  void expect(int chunk) {
    const Query& last = queries[count - 1];
    for (int j = 0; j < kChunk; ++j) {
      const int position = std::min(chunk * kChunk + j, last.prefix - 1);
      next[j] = pool + (position < 0 ? 0 : last.row->prefix[position]) * slot_size;
    }
  }

  // The end of the queries that belong to the token of query i.
  int token_end(int i) const {
    int stop = i + 1;
    while (stop < count && queries[stop].m == queries[i].m) ++stop;
    return stop;
  }

  // The states of a chunk: out[i] for the queries that see it.
  void attend(int chunk, float* const* out) {
    const int base = chunk * kChunk;
    const int low = std::max(base, begin & ~(kBlock - 1)), high = std::min(base + kChunk, total);
    int split = high;  // the keys before it lie in the same slots for all
    const Query* widest = queries;
    for (int i = 0; i < count; ++i) {
      const Query& q = queries[i];
      if (q.total > widest->total) widest = &q;
      if (q.total > q.prefix && split > q.prefix) split = std::max(low, q.prefix & ~(kBlock - 1));
    }
    if (low < split) {
      locate(*widest, low, split, shared);
      score(shared, low, split, 0, count);
    }
    for (int i = 0, stop; i < count; i = stop) {
      stop = token_end(i);
      const int to = std::min(high, queries[i].total);
      if (split >= to) continue;
      locate(queries[i], split, to, own);
      score(own, split, to, i, stop);
    }
    for (int i = 0; i < count; ++i) soften_one(queries[i], base, low, high, i, out[i]);
    if (low < split) weigh(shared, low, split, 0, count, out);
    for (int i = 0, stop; i < count; i = stop) {
      stop = token_end(i);
      const int to = std::min(high, queries[i].total);
      if (split >= to) continue;
      locate(queries[i], split, to, own);
      weigh(own, split, to, i, stop, out);
    }
  }

  void soften_one(const Query& q, int base, int low, int high, int i, float* out) {
    float* p = scores + i * kChunk;
    const int from = low - base, to = (high - base + kBlock - 1) & ~(kBlock - 1);
    // A weight of 0 changes no sum.
    const int first = std::min(to, std::max(from, q.begin - base));
    const int last = std::max(first, std::min(to, q.total - base));
    for (int j = from; j < first; ++j) p[j] = -INFINITY;
    for (int j = last; j < to; ++j) p[j] = -INFINITY;
    soften(p + from, to - from, out[d], out[d + 1]);
    std::memset(out, 0, d * sizeof(float));
  }
};

// Work of one thread: queries [first, first + count) of those of a row that share a key-value head,
// and chunks [chunk, stop).
struct Unit {
  const Row* row;
  int kv, first, count, chunk, stop;
};

// A row with many queries is not split by chunks: that would take much memory, and there is enough
// to split without.
static bool splits_chunks(const Model& model, const Row& row, int n) {
  const int queries = (row.stop - row.start) * (model.num_heads / model.num_kv_heads);
  return (queries + kTile - 1) / kTile * model.num_kv_heads < 4 * n;
}

// All work; chunks of the same queries and head follow each other. n: threads.
template <typename Visit>
static void each_unit(const Job& job, const Layer& layer, int n, Visit visit) {
  const Model& model = job.model;
  const int group = model.num_heads / model.num_kv_heads;
  for (int r = 0; r < job.batch.num_rows; ++r) {
    const Row& row = job.batch.rows[r];
    const int queries = (row.stop - row.start) * group;
    const bool split = splits_chunks(model, row, n);
    for (int first = 0; first < queries; first += kTile) {
      const int count = std::min(kTile, queries - first);
      int begin = INT32_MAX, total = 0;
      for (int q = first / group; q <= (first + count - 1) / group; ++q) {
        const int keys = row.prefix_count[q] + row.extra_count[q];
        begin = std::min(begin, window_begin(layer, keys));
        total = std::max(total, keys);
      }
      const int last = num_chunks(total), step = split ? 1 : last;
      for (int kv = 0; kv < model.num_kv_heads; ++kv)
        for (int chunk = begin / kChunk; chunk < last; chunk += step) {
          const int stop = std::min(chunk + step, last);
          const int64_t keys = std::min(total, stop * kChunk) - chunk * kChunk;
          // The cost, in units of a key and query; the constants stand for what is done once.
          visit(Unit{&row, kv, first, count, chunk, stop}, (keys + 8) * (count + 6));
        }
    }
  }
}

static void attend(const Job& job, const Layer& layer, const Unit& unit, int t) {
  const Model& model = job.model;
  const int d = model.head_dim, heads = model.num_heads, group = heads / model.num_kv_heads;
  const Row& row = *unit.row;
  Tile tile(model, layer, unit.kv, job.s.blocks[t].data());
  for (int i = unit.first; i < unit.first + unit.count; ++i) {
    const int q = i / group, m = row.start + q, head = unit.kv * group + i % group;
    const int prefix = row.prefix_count[q], total = prefix + row.extra_count[q];
    tile.add(Query{&row, m, head, prefix, total, window_begin(layer, total),
                   row.extra + static_cast<size_t>(q) * row.extra_stride},
             job.s.qkv.data() + static_cast<size_t>(m) * job.qkv_stride + head * d,
             model.attention_scale * 1.44269504f);  // the weights are powers of 2
  }
  for (int chunk = unit.chunk; chunk < unit.stop; ++chunk) {
    float *out[kTile], *state[kTile];
    for (int i = 0; i < tile.count; ++i) {
      const Query& q = tile.queries[i];
      const TokenStates& token = job.s.tokens[q.m];
      out[i] = tile.spare + i * state_size(d);
      state[i] = nullptr;
      if (!q.sees(chunk)) continue;
      const int place = chunk - q.begin / kChunk;  // among the chunks that the query sees
      state[i] = job.s.states.data() + (token.first + static_cast<size_t>(q.head) * token.stride +
                                        std::min(place, token.stride - 1)) * state_size(d);
      if (place < token.stride) out[i] = state[i];
    }
    tile.expect(std::min(chunk + 1, unit.stop - 1));
    tile.attend(chunk, out);
    for (int i = 0; i < tile.count; ++i)
      if (state[i] != nullptr && out[i] != state[i]) fold(state[i], out[i], d);
  }
}

// Columns that are finished together: whole heads and whole blocks of the linear behind them.
static inline int finish_step(int d) {
  int step = d;
  while (step % kInputs != 0) step += d;
  return step;
}

// All queries of the batch. Fills the inputs of layer.out. Has a barrier in the middle.
static void attention(const Job& job, const Layer& layer, int t, int n) {
  const Model& model = job.model;
  const int d = model.head_dim, num = model.num_heads * d;
  int64_t all = 0, before = 0;
  each_unit(job, layer, n, [&](const Unit&, int64_t cost) { all += cost; });
  Unit mine{};
  each_unit(job, layer, n, [&](const Unit& unit, int64_t cost) {
    const bool wanted = (before + cost / 2) * n / all == t;
    before += cost;
    if (!wanted) return;
    if (mine.row == unit.row && mine.kv == unit.kv && mine.first == unit.first) {
      mine.stop = unit.stop;
      return;
    }
    if (mine.row != nullptr) attend(job, layer, mine, t);
    mine = unit;
  });
  if (mine.row != nullptr) attend(job, layer, mine, t);
  pool_barrier();
  const Linear& l = layer.out;
  const int step = finish_step(d), parts = (num + step - 1) / step;
  float* buffer = job.s.tiles[t].data();  // [step]
  int from, to;
  span(job.batch.num_tokens * parts, 1, t, n, from, to);
  for (int unit = from; unit < to; ++unit) {
    const int m = unit / parts, at = unit % parts * step, stop = std::min(num, at + step);
    const TokenStates& token = job.s.tokens[m];
    const int chunks = num_chunks(token.total) - window_begin(layer, token.total) / kChunk;
    for (int c = at; c < stop; c += d) {
      float* state = job.s.states.data() +
                     (token.first + static_cast<size_t>(c / d) * token.stride) * state_size(d);
      for (int i = 1; i < std::min(chunks, token.stride); ++i)
        fold(state, state + i * state_size(d), d);
      finish(state, d, buffer + (c - at));
    }
    const int blocks = stop == num ? l.cols / kInputs : stop / kInputs;  // the last with padding
    prepare(l, job.s.mid, m, buffer, at, at / kInputs, blocks, num);
  }
}

// Say where the states of each token are. Returns how many there are. n: threads.
static size_t place_states(const Model& model, const Batch& batch, int n, TokenStates* tokens) {
  size_t first = 0;
  for (int r = 0; r < batch.num_rows; ++r) {
    const Row& row = batch.rows[r];
    const bool split = splits_chunks(model, row, n);
    for (int q = 0; q < row.stop - row.start; ++q) {
      const int total = row.prefix_count[q] + row.extra_count[q];
      TokenStates& token = tokens[row.start + q];
      token = TokenStates{first, split ? num_chunks(total) : 1, total};
      first += static_cast<size_t>(token.stride) * model.num_heads;
    }
  }
  return first;
}
