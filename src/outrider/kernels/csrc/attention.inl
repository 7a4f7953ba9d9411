// Attention of a batch's queries to the slots they see.
//
// Keys are taken in the order of their positions, in blocks of 16 whose bounds are multiples of 16,
// whatever slots they lie in and whatever other queries there are: the result of a query depends
// on the tokens it sees alone. Queries of one key-value head go through the blocks together, so
// that each block is widened to float32 once.
#pragma once

static constexpr int kTile = 8;    // queries that share a pass over the keys
static constexpr int kBlock = 16;  // keys at a time

struct Query {
  const Row* row;
  int m, head;                // token of the batch, query head
  int prefix, total, begin;   // keys from row->prefix, all keys, first key inside the window
  const int64_t* extra;
  const float* vector;        // [d]
  float* scores;              // by position, from the block of the tile's first key on
};

static inline int64_t slot_of(const Query& query, int position) {
  return position < query.prefix ? query.row->prefix[position]
                                 : query.extra[position - query.prefix];
}

// Widen up to 16 heads, of the keys at positions [from, to), into block [16][d].
static void widen(const Layer& layer, const Query& query, int from, int to, size_t slot_size,
                  size_t offset, int d, float* block) {
  for (int j = from; j < to; ++j) {
    const uint16_t* head = layer.pool + slot_of(query, j) * slot_size + offset;
    float* out = block + static_cast<size_t>(j - from) * d;
#if defined(__AVX512F__)
    for (int i = 0; i < d; i += 16) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(head + i));
      _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
#else
    for (int i = 0; i < d; ++i) out[i] = bf16_to_float(head[i]);
#endif
  }
}

#if defined(__AVX512F__)

// Lane i of the result is the sum of a[i].
static inline __m512 add_across(const __m512* a) {
  __m512 t[8], u[4];
  for (int i = 0; i < 8; ++i)
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                         _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const __m512 v0 = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88),
                                  _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const __m512 v1 = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88),
                                  _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(v0, v1, 0x88), _mm512_shuffle_f32x4(v0, v1, 0xdd));
}

// scores[16] = products of the query with the 16 vectors of block.
static inline void products(const float* query, const float* block, int d, float scale,
                            float* scores) {
  __m512 acc[16];
  const __m512 first = _mm512_loadu_ps(query);
  for (int j = 0; j < 16; ++j)
    acc[j] = _mm512_mul_ps(first, _mm512_loadu_ps(block + static_cast<size_t>(j) * d));
  for (int i = 16; i < d; i += 16) {
    const __m512 q = _mm512_loadu_ps(query + i);
    for (int j = 0; j < 16; ++j)
      acc[j] = _mm512_fmadd_ps(q, _mm512_loadu_ps(block + static_cast<size_t>(j) * d + i), acc[j]);
  }
  _mm512_storeu_ps(scores, _mm512_mul_ps(add_across(acc), _mm512_set1_ps(scale)));
}

// out[d] += sum of weights[j] * block[j], in the order of j.
static inline void mix(const float* weights, const float* block, int count, int d, float* out) {
  for (int i = 0; i < d; i += 64) {
    const int lanes = d - i < 64 ? (d - i) / 16 : 4;
    __m512 acc[4];
    for (int k = 0; k < lanes; ++k) acc[k] = _mm512_loadu_ps(out + i + k * 16);
    for (int j = 0; j < count; ++j) {
      const __m512 w = _mm512_set1_ps(weights[j]);
      const float* v = block + static_cast<size_t>(j) * d + i;
      for (int k = 0; k < lanes; ++k)
        acc[k] = _mm512_fmadd_ps(_mm512_loadu_ps(v + k * 16), w, acc[k]);
    }
    for (int k = 0; k < lanes; ++k) _mm512_storeu_ps(out + i + k * 16, acc[k]);
  }
}

static inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.33654f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// scores -> exp(scores - largest), in place; returns their sum. -inf gives 0. num is a multiple
// of 16.
static float soften(float* scores, int num) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int j = 0; j < num; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  __m512 sum = _mm512_setzero_ps();
  const __m512 none = _mm512_set1_ps(-INFINITY);
  for (int j = 0; j < num; j += 16) {
    const __m512 s = _mm512_loadu_ps(scores + j);
    const __mmask16 seen = _mm512_cmp_ps_mask(s, none, _CMP_NEQ_UQ);
    const __m512 e = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(s, largest)));
    // NaN does not survive the maximum and the clamp: add it back.
    const __m512 kept = _mm512_maskz_add_ps(seen, e, _mm512_mul_ps(_mm512_sub_ps(s, s),
                                                                 _mm512_setzero_ps()));
    _mm512_storeu_ps(scores + j, kept);
    sum = _mm512_add_ps(sum, kept);
  }
  return _mm512_reduce_add_ps(sum);
}

#else

static inline void products(const float* query, const float* block, int d, float scale,
                            float* scores) {
  for (int j = 0; j < 16; ++j) {
    float lanes[16] = {};
    for (int i = 0; i < d; i += 16)
      for (int k = 0; k < 16; ++k) lanes[k] += query[i + k] * block[static_cast<size_t>(j) * d + i + k];
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    scores[j] = sum * scale;
  }
}

static inline void mix(const float* weights, const float* block, int count, int d, float* out) {
  for (int j = 0; j < count; ++j)
    for (int i = 0; i < d; ++i) out[i] += weights[j] * block[static_cast<size_t>(j) * d + i];
}

static float soften(float* scores, int num) {
  float largest = -INFINITY, lanes[16] = {};
  for (int j = 0; j < num; ++j) largest = scores[j] > largest ? scores[j] : largest;
  for (int j = 0; j < num; j += 16)
    for (int k = 0; k < 16; ++k) {
      const float e = scores[j + k] == -INFINITY ? 0.0f : fast_exp(scores[j + k] - largest);
      scores[j + k] = e;
      lanes[k] += e;
    }
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

#endif

// Whether the keys [from, to) are the same slots for every query of the tile that sees them.
static inline bool shared_block(const Query* tile, int count, int to) {
  for (int i = 0; i < count; ++i)
    if (tile[i].total > tile[i].prefix && to > tile[i].prefix) return false;
  return true;
}

// Queries of one row and key-value head; outputs [count][d].
static void attend_tile(const Job& job, const Layer& layer, Query* tile, int count, int t,
                        float* out) {
  const Model& model = job.model;
  const int d = model.head_dim, kv = model.num_kv_heads;
  const size_t slot_size = static_cast<size_t>(2) * kv * d;
  const size_t keys = static_cast<size_t>(tile[0].head / (model.num_heads / kv)) * d;
  const size_t values = keys + static_cast<size_t>(kv) * d;
  int first = tile[0].begin, last = tile[0].total;
  for (int i = 1; i < count; ++i) {
    first = std::min(first, tile[i].begin);
    last = std::max(last, tile[i].total);
  }
  first &= ~(kBlock - 1);
  const int width = (last - first + kBlock - 1) & ~(kBlock - 1);
  std::vector<float>& scores = job.s.scores[t];
  scores.resize(std::max(scores.size(), static_cast<size_t>(count) * width));
  std::vector<float>& block = job.s.blocks[t];
  block.resize(std::max(block.size(), static_cast<size_t>(kBlock) * d));
  for (int i = 0; i < count; ++i) tile[i].scores = scores.data() + static_cast<size_t>(i) * width;

  for (int from = first; from < last; from += kBlock) {
    const int to = from + kBlock;
    const bool shared = shared_block(tile, count, to);
    int widened = -1;  // how many keys of the block lie in the buffer
    for (int i = 0; i < count; ++i) {
      Query& q = tile[i];
      float* p = q.scores + (from - first);
      const int stop = std::min(to, q.total);
      if (stop <= from || to <= q.begin) {
        for (int k = 0; k < kBlock; ++k) p[k] = -INFINITY;
        continue;
      }
      if (!shared || widened < stop - from) {
        widen(layer, q, from, stop, slot_size, keys, d, block.data());
        for (size_t k = static_cast<size_t>(stop - from) * d; k < static_cast<size_t>(kBlock) * d; ++k)
          block[k] = 0.0f;
        widened = stop - from;
      }
      products(q.vector, block.data(), d, model.attention_scale, p);
      for (int k = 0; k < kBlock; ++k)
        if (from + k < q.begin || from + k >= q.total) p[k] = -INFINITY;
    }
  }
  float inverse[kTile];
  for (int i = 0; i < count; ++i) {
    inverse[i] = 1.0f / soften(tile[i].scores, width);
    for (int k = 0; k < d; ++k) out[static_cast<size_t>(i) * d + k] = 0.0f;
  }
  for (int from = first; from < last; from += kBlock) {
    const int to = from + kBlock;
    const bool shared = shared_block(tile, count, to);
    int widened = -1;
    for (int i = 0; i < count; ++i) {
      Query& q = tile[i];
      const int stop = std::min(to, q.total);
      if (stop <= from || to <= q.begin) continue;
      if (!shared || widened < stop - from) {
        widen(layer, q, from, stop, slot_size, values, d, block.data());
        widened = stop - from;
      }
      mix(q.scores + (from - first), block.data(), stop - from, d, out + static_cast<size_t>(i) * d);
    }
  }
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < d; ++k) out[static_cast<size_t>(i) * d + k] *= inverse[i];
}

// All queries of the batch, split evenly among the threads, by row, key-value head and token.
static void attention(const Job& job, const Layer& layer, int t, int n) {
  const Model& model = job.model;
  const int d = model.head_dim, group = model.num_heads / model.num_kv_heads;
  const Linear& l = layer.out;
  int from, to, unit = 0, count = 0;
  span(job.batch.num_tokens * model.num_heads, 1, t, n, from, to);
  std::vector<float>& buffer = job.s.tiles[t];
  buffer.resize(std::max(buffer.size(), static_cast<size_t>(kTile) * d));
  Query tile[kTile];
  const auto flush = [&] {
    if (count == 0) return;
    attend_tile(job, layer, tile, count, t, buffer.data());
    for (int i = 0; i < count; ++i) {
      const int at = tile[i].head * d;
      prepare(l, job.s.mid, tile[i].m, buffer.data() + static_cast<size_t>(i) * d, at,
              at / l.group, (at + d) / l.group, at + d);
    }
    count = 0;
  };
  for (int r = 0; r < job.batch.num_rows; ++r) {
    const Row& row = job.batch.rows[r];
    const int queries = (row.stop - row.start) * group;
    for (int kv = 0; kv < model.num_kv_heads; ++kv) {
      for (int i = std::max(0, from - unit); i < std::min(queries, to - unit); ++i) {
        const int m = row.start + i / group, head = kv * group + i % group, q = m - row.start;
        const int prefix = row.prefix_count[q], total = prefix + row.extra_count[q];
        tile[count++] = Query{&row, m, head, prefix, total,
                              layer.window > 0 ? std::max(0, total - layer.window) : 0,
                              row.extra + static_cast<size_t>(q) * row.extra_stride,
                              job.s.qkv.data() + static_cast<size_t>(m) * job.qkv_stride + head * d,
                              nullptr};
        if (count == kTile) flush();
      }
      flush();
      unit += queries;
    }
  }
}
