// Attention of a batch's queries to the slots they see.
//
// Keys are taken in the order of their positions, in blocks of 16 whose bounds are multiples of 16,
// whatever slots they lie in and whatever other queries there are: the result of a query depends
// on the tokens it sees alone. Queries of one key-value head go through the blocks together, so
// that each block is widened to float32 once.
#pragma once

static constexpr int kTile = 16;   // queries that share a pass over the keys
static constexpr int kGroup = 4;   // queries whose sums are held in registers together
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

// block [16][d] -> turned [d][16], so that a lane stands for a key.
static void turn(const float* block, int d, float* turned) {
  for (int i = 0; i < d; i += 16) {
    __m512 a[16], b[16];
    for (int j = 0; j < 16; ++j) a[j] = _mm512_loadu_ps(block + static_cast<size_t>(j) * d + i);
    for (int j = 0; j < 16; j += 2) {
      b[j] = _mm512_unpacklo_ps(a[j], a[j + 1]);
      b[j + 1] = _mm512_unpackhi_ps(a[j], a[j + 1]);
    }
    for (int j = 0; j < 16; j += 4)
      for (int k = 0; k < 2; ++k) {
        const __m512d x = _mm512_castps_pd(b[j + k]), y = _mm512_castps_pd(b[j + 2 + k]);
        a[j + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
        a[j + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
      }
    // a[4 g + c] holds, in its 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
      const __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
      const __m512 q = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
      const __m512 r = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
      const __m512 t = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
      float* out = turned + static_cast<size_t>(i + c) * 16;
      _mm512_storeu_ps(out, _mm512_shuffle_f32x4(p, r, 0x88));
      _mm512_storeu_ps(out + 4 * 16, _mm512_shuffle_f32x4(q, t, 0x88));
      _mm512_storeu_ps(out + 8 * 16, _mm512_shuffle_f32x4(p, r, 0xdd));
      _mm512_storeu_ps(out + 12 * 16, _mm512_shuffle_f32x4(q, t, 0xdd));
    }
  }
}

// scores[i][16] = products of N queries with the 16 keys of turned [d][16]. Four sums for each
// query, whatever N is: the order of the additions does not depend on it.
template <int N>
static inline void products(const float* const* queries, const float* turned, int d, float scale,
                            float* const* scores) {
  __m512 acc[N][4];
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < 4; ++k) acc[i][k] = _mm512_setzero_ps();
  for (int c = 0; c < d; c += 4)
    for (int k = 0; k < 4; ++k) {
      const __m512 key = _mm512_loadu_ps(turned + static_cast<size_t>(c + k) * 16);
      for (int i = 0; i < N; ++i)
        acc[i][k] = _mm512_fmadd_ps(_mm512_set1_ps(queries[i][c + k]), key, acc[i][k]);
    }
  for (int i = 0; i < N; ++i) {
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(acc[i][0], acc[i][1]),
                                     _mm512_add_ps(acc[i][2], acc[i][3]));
    _mm512_storeu_ps(scores[i], _mm512_mul_ps(sum, _mm512_set1_ps(scale)));
  }
}

// out[i][d] += sum of weights[i][j] * block[j], in the order of j, for N queries.
template <int N>
static inline void mix(const float* const* weights, const float* block, int count, int d,
                       float* const* out) {
  int c = 0;
  for (; c + 64 <= d; c += 64) {
    __m512 acc[N][4];
    for (int i = 0; i < N; ++i)
      for (int k = 0; k < 4; ++k) acc[i][k] = _mm512_loadu_ps(out[i] + c + k * 16);
    for (int j = 0; j < count; ++j) {
      const float* v = block + static_cast<size_t>(j) * d + c;
      __m512 value[4];
      for (int k = 0; k < 4; ++k) value[k] = _mm512_loadu_ps(v + k * 16);
      for (int i = 0; i < N; ++i) {
        const __m512 w = _mm512_set1_ps(weights[i][j]);
        for (int k = 0; k < 4; ++k) acc[i][k] = _mm512_fmadd_ps(value[k], w, acc[i][k]);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int k = 0; k < 4; ++k) _mm512_storeu_ps(out[i] + c + k * 16, acc[i][k]);
  }
  for (; c < d; c += 16)
    for (int i = 0; i < N; ++i) {
      __m512 acc = _mm512_loadu_ps(out[i] + c);
      for (int j = 0; j < count; ++j)
        acc = _mm512_fmadd_ps(_mm512_loadu_ps(block + static_cast<size_t>(j) * d + c),
                              _mm512_set1_ps(weights[i][j]), acc);
      _mm512_storeu_ps(out[i] + c, acc);
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

static void turn(const float* block, int d, float* turned) {
  for (int j = 0; j < 16; ++j)
    for (int c = 0; c < d; ++c)
      turned[static_cast<size_t>(c) * 16 + j] = block[static_cast<size_t>(j) * d + c];
}

template <int N>
static inline void products(const float* const* queries, const float* turned, int d, float scale,
                            float* const* scores) {
  for (int i = 0; i < N; ++i) {
    float acc[4][16] = {};
    for (int c = 0; c < d; c += 4)
      for (int k = 0; k < 4; ++k)
        for (int j = 0; j < 16; ++j)
          acc[k][j] += queries[i][c + k] * turned[static_cast<size_t>(c + k) * 16 + j];
    for (int j = 0; j < 16; ++j)
      scores[i][j] = ((acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j])) * scale;
  }
}

template <int N>
static inline void mix(const float* const* weights, const float* block, int count, int d,
                       float* const* out) {
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < count; ++j)
      for (int c = 0; c < d; ++c) out[i][c] += weights[i][j] * block[static_cast<size_t>(j) * d + c];
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

// The queries of a tile that see keys of the block at `from`, in groups that go together: all of
// them where the block's slots are the same for all, else each alone. Each group is of at most
// kGroup queries; widen_now says when the block has to be read (again), for `widest`, up to stop.
struct Sharing {
  Query* tile;
  int count, from, at = 0;
  bool shared = true, fresh = true, widen_now = false;
  Query* widest = nullptr;
  int stop = 0;
  Query* members[kGroup];

  Sharing(Query* tile, int count, int from) : tile(tile), count(count), from(from) {
    for (int i = 0; i < count; ++i) {
      const Query& q = tile[i];
      if (q.total > q.prefix && from + kBlock > q.prefix) shared = false;
      if (sees(q) && (widest == nullptr || q.total > widest->total)) widest = &tile[i];
    }
    if (widest != nullptr) stop = std::min(from + kBlock, widest->total);
  }

  bool sees(const Query& q) const { return q.total > from && from + kBlock > q.begin; }

  int next() {
    int num = 0;
    for (; at < count && num < (shared ? kGroup : 1); ++at)
      if (sees(tile[at])) members[num++] = &tile[at];
    if (num == 0) return 0;
    widen_now = fresh || !shared;
    fresh = false;
    if (!shared) {
      widest = members[0];
      stop = std::min(from + kBlock, widest->total);
    }
    return num;
  }
};

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
  float* scores = job.s.scores[t].data();
  float* block = job.s.blocks[t].data();
  float* turned = block + static_cast<size_t>(kBlock) * d;
  for (int i = 0; i < count; ++i) tile[i].scores = scores + static_cast<size_t>(i) * width;

  for (int from = first; from < last; from += kBlock) {
    Sharing sharing(tile, count, from);
    while (const int num = sharing.next()) {
      const float* vectors[kGroup];
      float* targets[kGroup];
      for (int i = 0; i < num; ++i) {
        vectors[i] = sharing.members[i]->vector;
        targets[i] = sharing.members[i]->scores + (from - first);
      }
      if (sharing.widen_now) {
        widen(layer, *sharing.widest, from, sharing.stop, slot_size, keys, d, block);
        turn(block, d, turned);
      }
      switch (num) {
        case 1: products<1>(vectors, turned, d, model.attention_scale, targets); break;
        case 2: products<2>(vectors, turned, d, model.attention_scale, targets); break;
        case 3: products<3>(vectors, turned, d, model.attention_scale, targets); break;
        default: products<4>(vectors, turned, d, model.attention_scale, targets); break;
      }
    }
    for (int i = 0; i < count; ++i) {
      float* p = tile[i].scores + (from - first);
      for (int k = 0; k < kBlock; ++k)
        if (from + k < tile[i].begin || from + k >= tile[i].total) p[k] = -INFINITY;
    }
  }
  float inverse[kTile];
  for (int i = 0; i < count; ++i) {
    inverse[i] = 1.0f / soften(tile[i].scores, width);
    for (int k = 0; k < d; ++k) out[static_cast<size_t>(i) * d + k] = 0.0f;
  }
  for (int from = first; from < last; from += kBlock) {
    Sharing sharing(tile, count, from);
    while (const int num = sharing.next()) {
      const float* weights[kGroup];
      float* targets[kGroup];
      for (int i = 0; i < num; ++i) {
        weights[i] = sharing.members[i]->scores + (from - first);
        targets[i] = out + static_cast<size_t>(sharing.members[i] - tile) * d;
      }
      if (sharing.widen_now)
        widen(layer, *sharing.widest, from, sharing.stop, slot_size, values, d, block);
      // Keys that a query does not see have weight 0; adding 0 changes no sum.
      const int seen = sharing.stop - from;
      switch (num) {
        case 1: mix<1>(weights, block, seen, d, targets); break;
        case 2: mix<2>(weights, block, seen, d, targets); break;
        case 3: mix<3>(weights, block, seen, d, targets); break;
        default: mix<4>(weights, block, seen, d, targets); break;
      }
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
  float* buffer = job.s.tiles[t].data();  // [kTile][d]
  Query tile[kTile];
  const auto flush = [&] {
    if (count == 0) return;
    attend_tile(job, layer, tile, count, t, buffer);
    for (int i = 0; i < count; ++i) {
      const int at = tile[i].head * d;
      prepare(l, job.s.mid, tile[i].m, buffer + static_cast<size_t>(i) * d, at,
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
