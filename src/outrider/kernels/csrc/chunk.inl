// The arithmetic of attention: up to kGroup queries and one chunk of keys and values, in AVX-512 or
// in the compiler's own vectors. The sums of a query are taken in the same order whatever other
// queries there are; the two implementations round differently.
#pragma once

static constexpr int kTile = 48;    // queries that share the reading of a chunk
static constexpr int kGroup = 12;   // queries whose sums are held in registers together
static constexpr int kBlock = 16;   // keys that are multiplied together: one a lane
static constexpr int kChunk = 128;  // keys of a state

static inline void fetch(const void* memory) { __builtin_prefetch(memory); }

#if defined(__AVX512DQ__)

static inline __m512 even_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

static inline __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// 16 rows of d bfloat16 -> turned [d / 2][16] pairs of them, so that a lane stands for a row.
static void turn(const uint16_t* const* rows, int d, float* turned) {
  for (int i = 0; i < d; i += 32) {
    __m512 a[16], b[16];
    for (int j = 0; j < 16; ++j) a[j] = _mm512_loadu_ps(rows[j] + i);
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
    // a[4 g + c] holds, in its 128-bit lane l, pair 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
      const __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
      const __m512 q = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
      const __m512 r = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
      const __m512 t = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
      float* out = turned + static_cast<size_t>(i / 2 + c) * 16;
      _mm512_store_ps(out, _mm512_shuffle_f32x4(p, r, 0x88));
      _mm512_store_ps(out + 4 * 16, _mm512_shuffle_f32x4(q, t, 0x88));
      _mm512_store_ps(out + 8 * 16, _mm512_shuffle_f32x4(p, r, 0xdd));
      _mm512_store_ps(out + 12 * 16, _mm512_shuffle_f32x4(q, t, 0xdd));
    }
  }
}

// scores[i][16] = products of N queries with the 16 keys of turned. Two sums for each query, of
// the even and of the odd dimensions, whatever N is: the order of the additions does not depend
// on it. Meanwhile the next 16 keys and the values of these are fetched.
template <int N>
static void products(const float* queries, const float* turned, int d, float* scores,
                     const uint16_t* const* keys, const uint16_t* const* next, size_t values) {
  __m512 even[N], odd[N];
#pragma GCC unroll 12
  for (int i = 0; i < N; ++i) even[i] = odd[i] = _mm512_setzero_ps();
  for (int c = 0; c < d; c += 16, queries += kTile * 16)
    for (int k = 0; k < 16; k += 2, turned += 16) {
      fetch(next[(c % 32 + k) / 2] + c / 32 * 32);
      fetch(keys[(c % 32 + k) / 2] + values + c / 32 * 32);
      const __m512i pairs = _mm512_load_si512(turned);
      const __m512 first = even_of(pairs), second = odd_of(pairs);
#pragma GCC unroll 12
      for (int i = 0; i < N; ++i) {
        even[i] = _mm512_fmadd_ps(first, _mm512_set1_ps(queries[i * 16 + k]), even[i]);
        odd[i] = _mm512_fmadd_ps(second, _mm512_set1_ps(queries[i * 16 + k + 1]), odd[i]);
      }
    }
#pragma GCC unroll 12
  for (int i = 0; i < N; ++i)
    _mm512_store_ps(scores + i * kChunk, _mm512_add_ps(even[i], odd[i]));
}

// out[i] += sum of weights[i][j] * values[j], in the order of j, for N queries. 32 dimensions lie
// in out as the even ones, then the odd ones. Meanwhile the keys of the next chunk are fetched.
template <int N>
static void mix(const float* weights, const uint16_t* const* rows, size_t offset, int count, int d,
                float* const* out, const uint16_t* const* next) {
  for (int c = 0; c < d; c += 32) {
    __m512 even[N], odd[N];
#pragma GCC unroll 12
    for (int i = 0; i < N; ++i) {
      even[i] = _mm512_loadu_ps(out[i] + c);
      odd[i] = _mm512_loadu_ps(out[i] + c + 16);
    }
    for (int j = 0; j < count; ++j) {
      fetch(next[j] + c);
      const __m512i pairs = _mm512_loadu_si512(rows[j] + offset + c);
      const __m512 first = even_of(pairs), second = odd_of(pairs);
#pragma GCC unroll 12
      for (int i = 0; i < N; ++i) {
        const __m512 weight = _mm512_set1_ps(weights[i * kChunk + j]);
        even[i] = _mm512_fmadd_ps(first, weight, even[i]);
        odd[i] = _mm512_fmadd_ps(second, weight, odd[i]);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < N; ++i) {
      _mm512_storeu_ps(out[i] + c, even[i]);
      _mm512_storeu_ps(out[i] + c + 16, odd[i]);
    }
  }
}

// 2^x, exact at 0, else to about 2 units in the last place: 2^n times a polynomial (a minimax fit)
// of what is left. -inf gives 0, NaN stays.
static inline __m512 power16(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0);  // x - round(x); 0 for infinities
  __m512 p = _mm512_set1_ps(1.326472731e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.671512991e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550733581e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402224243e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931470037e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, r));
}

static inline float power(float x) { return _mm512_cvtss_f32(power16(_mm512_set1_ps(x))); }

// scores -> 2^(scores - largest), in place; -inf gives 0. num is a multiple of 16.
static void soften(float* scores, int num, float& largest, float& sum) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int j = 0; j < num; j += 16) top = _mm512_max_ps(top, _mm512_load_ps(scores + j));
  largest = _mm512_reduce_max_ps(top);
  // Scores that are all -inf are weighted 0, not NaN.
  top = _mm512_set1_ps(largest == -INFINITY ? 0.0f : largest);
  __m512 total = _mm512_setzero_ps();
  for (int j = 0; j < num; j += 16) {
    const __m512 e = power16(_mm512_sub_ps(_mm512_load_ps(scores + j), top));
    _mm512_store_ps(scores + j, e);
    total = _mm512_add_ps(total, e);
  }
  sum = _mm512_reduce_add_ps(total);
}

// The weighted mean of a folded state, its dimensions in order.
static void finish(const float* state, int d, float* out) {
  const __m512 inverse = _mm512_set1_ps(1.0f / state[d + 1]);
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int c = 0; c < d; c += 32) {
    const __m512 even = _mm512_mul_ps(_mm512_loadu_ps(state + c), inverse);
    const __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(state + c + 16), inverse);
    _mm512_storeu_ps(out + c, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(out + c + 16, _mm512_permutex2var_ps(even, high, odd));
  }
}

// x = x * a + y * b
static inline void combine(float* x, float a, const float* y, float b, int d) {
  for (int c = 0; c < d; c += 16) {
    const __m512 rest = _mm512_mul_ps(_mm512_loadu_ps(y + c), _mm512_set1_ps(b));
    _mm512_storeu_ps(x + c, _mm512_fmadd_ps(_mm512_loadu_ps(x + c), _mm512_set1_ps(a), rest));
  }
}

#else  // the compiler's own vectors: turned is [d][16], and dimensions stay in order

#if defined(__AVX__)
static constexpr int kWide = 8;
#else
static constexpr int kWide = 4;
#endif
static constexpr int kParts = 16 / kWide;
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef uint32_t Bits __attribute__((vector_size(4 * kWide)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWide)));

static inline Floats load(const float* x) {
  Floats v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

static inline void store(float* x, const Floats& v) { std::memcpy(x, &v, sizeof v); }

static inline Floats widen(const uint16_t* x) {
  Halves v;
  std::memcpy(&v, x, sizeof v);
  return (Floats)(__builtin_convertvector(v, Bits) << 16);
}

static void turn(const uint16_t* const* rows, int d, float* turned) {
  for (int j = 0; j < 16; ++j)
    for (int c = 0; c < d; ++c) turned[static_cast<size_t>(c) * 16 + j] = bf16_to_float(rows[j][c]);
}

template <int N>
static void products(const float* queries, const float* turned, int d, float* scores,
                     const uint16_t* const*, const uint16_t* const*, size_t) {
  for (int i = 0; i < N; ++i) {
    Floats even[kParts] = {}, odd[kParts] = {};
    for (int c = 0; c < d; c += 2) {
      const float* query = queries + (c / 16 * kTile + i) * 16 + c % 16;
      const float* key = turned + static_cast<size_t>(c) * 16;
      for (int k = 0; k < kParts; ++k) {
        even[k] += query[0] * load(key + k * kWide);
        odd[k] += query[1] * load(key + 16 + k * kWide);
      }
    }
    for (int k = 0; k < kParts; ++k) store(scores + i * kChunk + k * kWide, even[k] + odd[k]);
  }
}

template <int N>
static void mix(const float* weights, const uint16_t* const* rows, size_t offset, int count, int d,
                float* const* out, const uint16_t* const*) {
  for (int i = 0; i < N; ++i)
    for (int c = 0; c < d; c += 16) {
      Floats sum[kParts];
      for (int k = 0; k < kParts; ++k) sum[k] = load(out[i] + c + k * kWide);
      for (int j = 0; j < count; ++j) {
        const float weight = weights[i * kChunk + j];
        for (int k = 0; k < kParts; ++k)
          sum[k] += weight * widen(rows[j] + offset + c + k * kWide);
      }
      for (int k = 0; k < kParts; ++k) store(out[i] + c + k * kWide, sum[k]);
    }
}

// 2^x for x <= 0, not below 2^-126: 2^n times the polynomial above. NaN and infinities give NaN.
static inline float power(float x) {
  const float clamped = x > -126.0f ? x : -126.0f;
  const float n = (clamped + 12582912.0f) - 12582912.0f, r = clamped - n;  // 1.5 * 2^23 rounds
  float p = 1.326472731e-3f;
  p = p * r + 9.671512991e-3f;
  p = p * r + 5.550733581e-2f;
  p = p * r + 2.402224243e-1f;
  p = p * r + 6.931470037e-1f;
  p = p * r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale + (x - x);
}

static void soften(float* scores, int num, float& largest, float& sum) {
  largest = -INFINITY;
  for (int j = 0; j < num; ++j) largest = scores[j] > largest ? scores[j] : largest;
  float lanes[16] = {};
  for (int j = 0; j < num; ++j) {
    const float e = power(scores[j] - largest);
    scores[j] = scores[j] == -INFINITY ? 0.0f : e;
  }
  for (int j = 0; j < num; j += 16)
    for (int k = 0; k < 16; ++k) lanes[k] += scores[j + k];
  sum = 0.0f;
  for (float lane : lanes) sum += lane;
}

static inline void combine(float* __restrict x, float a, const float* __restrict y, float b,
                           int d) {
  for (int c = 0; c < d; ++c) x[c] = x[c] * a + y[c] * b;
}

static void finish(const float* state, int d, float* out) {
  const float inverse = 1.0f / state[d + 1];
  for (int c = 0; c < d; ++c) out[c] = state[c] * inverse;
}

#endif

using Products = void (*)(const float*, const float*, int, float*, const uint16_t* const*,
                          const uint16_t* const*, size_t);
using Mix = void (*)(const float*, const uint16_t* const*, size_t, int, int, float* const*,
                     const uint16_t* const*);

static constexpr Products kProducts[kGroup] = {
    products<1>, products<2>, products<3>, products<4>,  products<5>,  products<6>,
    products<7>, products<8>, products<9>, products<10>, products<11>, products<12>};
static constexpr Mix kMix[kGroup] = {mix<1>, mix<2>, mix<3>, mix<4>,  mix<5>,  mix<6>,
                                     mix<7>, mix<8>, mix<9>, mix<10>, mix<11>, mix<12>};
