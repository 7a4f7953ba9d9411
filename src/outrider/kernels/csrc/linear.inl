// Linears for few rows. A panel is 32 outputs (two vectors of 16 lanes); within a panel:
//   BF16: [cols / 2][32][2] bfloat16
//   INT8: [cols / 4][32][4] uint8, the weight + 128
//   INT4: [cols / 8][32][4] uint8, inputs 0..3 in the low halves, 4..7 in the high ones, weight + 8
// Integer kinds: inputs are int8 with one scale per row and group; each group's integer sum is
// exact, then scaled and added in float32. A row's sums do not depend on how many rows there are,
// nor on the number of threads: that is what makes speculative and plain decoding bit-equal.
#pragma once

static constexpr int kLanes = 32;

// Inputs of a linear, prepared once per row: bfloat16, or int8 with scales and integer sums.
struct Input {
  std::vector<uint16_t> bf16;    // [M][cols]
  std::vector<int8_t> q;         // [M][cols]
  std::vector<float> scale;      // [M][groups]
  std::vector<int32_t> sum;      // [M][groups]
  int cols = 0, groups = 0;
  void size(const Linear& l, int rows) {
    cols = l.cols;
    groups = l.cols / l.group;
    if (l.format == BF16) {
      bf16.resize(static_cast<size_t>(rows) * cols);
    } else {
      q.resize(static_cast<size_t>(rows) * cols);
      scale.resize(static_cast<size_t>(rows) * groups);
      sum.resize(static_cast<size_t>(rows) * groups);
    }
  }
};

// Prepare groups [g0, g1) of row m. x holds the columns from first on; columns from num on are
// padding.
static void prepare(const Linear& l, Input& in, int m, const float* x, int first, int g0, int g1,
                    int num) {
  if (l.format == BF16) {
    uint16_t* out = in.bf16.data() + static_cast<size_t>(m) * in.cols;
    const int stop = std::min(num, g1 * l.group);
    for (int k = g0 * l.group; k < stop; ++k) out[k] = float_to_bf16(x[k - first]);
    for (int k = std::max(stop, g0 * l.group); k < g1 * l.group; ++k) out[k] = 0;
    return;
  }
  for (int g = g0; g < g1; ++g) {
    const int k0 = g * l.group, k1 = std::min(num, k0 + l.group);
    int8_t* q = in.q.data() + static_cast<size_t>(m) * in.cols + k0;
    float largest = 0.0f, poison = 0.0f;
    int32_t sum = 0;
    int k = k0;
#if defined(__AVX512F__)
    if (k1 - k0 == l.group) {  // group is a multiple of 16
      __m512 top = _mm512_setzero_ps(), bad = _mm512_setzero_ps();
      for (; k < k1; k += 16) {
        const __m512 v = _mm512_loadu_ps(x + k - first);
        top = _mm512_max_ps(top, _mm512_abs_ps(v));
        bad = _mm512_add_ps(bad, _mm512_mul_ps(v, _mm512_setzero_ps()));
      }
      largest = _mm512_reduce_max_ps(top);
      poison = _mm512_reduce_add_ps(bad);  // NaN if any input is NaN or infinite
      const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
      __m512i total = _mm512_setzero_si512();
      for (k = k0; k < k1; k += 16) {
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k - first), inverse));
        total = _mm512_add_epi32(total, v);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + (k - k0)), _mm512_cvtsepi32_epi8(v));
      }
      sum = _mm512_reduce_add_epi32(total);
    }
#endif
    if (k < k1 || k0 >= k1) {
      for (k = k0; k < k1; ++k) {
        const float size = std::fabs(x[k - first]);
        largest = size > largest ? size : largest;
        poison += x[k - first] * 0.0f;
      }
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      for (k = k0; k < k1; ++k) {
        const int32_t v = static_cast<int32_t>(std::nearbyint(x[k - first] * inverse));
        q[k - k0] = static_cast<int8_t>(v);
        sum += v;
      }
      for (k = std::max(k0, k1); k < k0 + l.group; ++k) q[k - k0] = 0;
    }
    in.scale[static_cast<size_t>(m) * in.groups + g] = largest / 127.0f + poison;
    in.sum[static_cast<size_t>(m) * in.groups + g] = sum;
  }
}

#if defined(__AVX512VNNI__)

static inline __m512 load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Far enough ahead that memory answers in time, counted in bytes of the weights.
static constexpr int kAhead = 4096;

template <int M, bool kInt4>
static void panel_int(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  const int groups = in.groups, group = l.group;
  const size_t panel_bytes = static_cast<size_t>(l.cols) * kLanes / (kInt4 ? 2 : 1);
  const uint8_t* w = l.weights + panel * panel_bytes;
  const uint16_t* scales = l.scales + static_cast<size_t>(panel) * groups * kLanes;
  const uint16_t* offsets =
      l.offsets ? l.offsets + static_cast<size_t>(panel) * groups * kLanes : nullptr;
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  __m512 total[M][2];
  for (int m = 0; m < M; ++m) {
    total[m][0] = l.bias ? _mm512_loadu_ps(l.bias + panel * kLanes) : _mm512_setzero_ps();
    total[m][1] = l.bias ? _mm512_loadu_ps(l.bias + panel * kLanes + 16) : _mm512_setzero_ps();
  }
  const int8_t* x[M];
  for (int m = 0; m < M; ++m) x[m] = in.q.data() + static_cast<size_t>(m0 + m) * in.cols;
  for (int g = 0; g < groups; ++g) {
    __m512i acc[M][2];
    for (int m = 0; m < M; ++m) {
      const int32_t sum = in.sum[static_cast<size_t>(m0 + m) * groups + g];
      acc[m][0] = acc[m][1] = _mm512_set1_epi32(-(kInt4 ? 8 : 128) * sum);
    }
    const int k0 = g * group, k1 = k0 + group;
    if (kInt4) {
      for (int k = k0; k < k1; k += 8, w += 128) {
        _mm_prefetch(reinterpret_cast<const char*>(w + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + 64), _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
        const __m512i a0 = _mm512_and_si512(a, low_half), b0 = _mm512_and_si512(b, low_half);
        const __m512i a1 = _mm512_and_si512(_mm512_srli_epi16(a, 4), low_half);
        const __m512i b1 = _mm512_and_si512(_mm512_srli_epi16(b, 4), low_half);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          int32_t first, second;
          std::memcpy(&first, x[m] + k, 4);
          std::memcpy(&second, x[m] + k + 4, 4);
          const __m512i x0 = _mm512_set1_epi32(first), x1 = _mm512_set1_epi32(second);
          acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], a0, x0);
          acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b0, x0);
          acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], a1, x1);
          acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b1, x1);
        }
      }
    } else {
      for (int k = k0; k < k1; k += 4, w += 128) {
        _mm_prefetch(reinterpret_cast<const char*>(w + kAhead), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + 64), _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          int32_t four;
          std::memcpy(&four, x[m] + k, 4);
          const __m512i x0 = _mm512_set1_epi32(four);
          acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], a, x0);
          acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b, x0);
        }
      }
    }
    const __m512 s0 = load_half(scales + g * kLanes), s1 = load_half(scales + g * kLanes + 16);
    __m512 o0 = _mm512_setzero_ps(), o1 = _mm512_setzero_ps();
    if (offsets) {
      o0 = load_half(offsets + g * kLanes);
      o1 = load_half(offsets + g * kLanes + 16);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const float xs = in.scale[static_cast<size_t>(m0 + m) * groups + g];
      const __m512 scale = _mm512_set1_ps(xs);
      total[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][0]), _mm512_mul_ps(s0, scale),
                                    total[m][0]);
      total[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][1]), _mm512_mul_ps(s1, scale),
                                    total[m][1]);
      if (offsets) {
        const float sum = static_cast<float>(in.sum[static_cast<size_t>(m0 + m) * groups + g]);
        const __m512 weight = _mm512_set1_ps(xs * sum);
        total[m][0] = _mm512_fmadd_ps(o0, weight, total[m][0]);
        total[m][1] = _mm512_fmadd_ps(o1, weight, total[m][1]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    _mm512_storeu_ps(y + static_cast<size_t>(m) * stride, total[m][0]);
    _mm512_storeu_ps(y + static_cast<size_t>(m) * stride + 16, total[m][1]);
  }
}

template <int M>
static void panel_bf16(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  const uint8_t* w = l.weights + static_cast<size_t>(panel) * l.cols * kLanes * 2;
  __m512 acc[M][2];
  for (int m = 0; m < M; ++m) {
    acc[m][0] = l.bias ? _mm512_loadu_ps(l.bias + panel * kLanes) : _mm512_setzero_ps();
    acc[m][1] = l.bias ? _mm512_loadu_ps(l.bias + panel * kLanes + 16) : _mm512_setzero_ps();
  }
  const uint16_t* x[M];
  for (int m = 0; m < M; ++m) x[m] = in.bf16.data() + static_cast<size_t>(m0 + m) * in.cols;
  for (int k = 0; k < l.cols; k += 2, w += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(w + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + 64), _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
#if defined(__AVX512BF16__)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      int32_t two;
      std::memcpy(&two, x[m] + k, 4);
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
      acc[m][0] = _mm512_dpbf16_ps(acc[m][0], (__m512bh)a, pair);
      acc[m][1] = _mm512_dpbf16_ps(acc[m][1], (__m512bh)b, pair);
    }
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
    const __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
    const __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a, high));
    const __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b, high));
    for (int m = 0; m < M; ++m) {
      const __m512 x0 = _mm512_set1_ps(bf16_to_float(x[m][k]));
      const __m512 x1 = _mm512_set1_ps(bf16_to_float(x[m][k + 1]));
      acc[m][0] = _mm512_fmadd_ps(a1, x1, _mm512_fmadd_ps(a0, x0, acc[m][0]));
      acc[m][1] = _mm512_fmadd_ps(b1, x1, _mm512_fmadd_ps(b0, x0, acc[m][1]));
    }
#endif
  }
  for (int m = 0; m < M; ++m) {
    _mm512_storeu_ps(y + static_cast<size_t>(m) * stride, acc[m][0]);
    _mm512_storeu_ps(y + static_cast<size_t>(m) * stride + 16, acc[m][1]);
  }
}

#else  // plain C++; the order of the additions is the same

template <int M, bool kInt4>
static void panel_int(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  const int groups = in.groups;
  const size_t panel_bytes = static_cast<size_t>(l.cols) * kLanes / (kInt4 ? 2 : 1);
  for (int m = 0; m < M; ++m) {
    const uint8_t* w = l.weights + panel * panel_bytes;
    const int8_t* x = in.q.data() + static_cast<size_t>(m0 + m) * in.cols;
    float* out = y + static_cast<size_t>(m) * stride;
    for (int n = 0; n < kLanes; ++n) out[n] = l.bias ? l.bias[panel * kLanes + n] : 0.0f;
    for (int g = 0; g < groups; ++g) {
      const int32_t sum = in.sum[static_cast<size_t>(m0 + m) * groups + g];
      const float scale = in.scale[static_cast<size_t>(m0 + m) * groups + g];
      int32_t acc[kLanes];
      for (int n = 0; n < kLanes; ++n) acc[n] = -(kInt4 ? 8 : 128) * sum;
      for (int k = g * l.group; k < (g + 1) * l.group; k += kInt4 ? 8 : 4, w += 128)
        for (int n = 0; n < kLanes; ++n)
          for (int j = 0; j < 4; ++j) {
            const int byte = w[n * 4 + j];
            if (kInt4)
              acc[n] += (byte & 15) * x[k + j] + (byte >> 4) * x[k + 4 + j];
            else
              acc[n] += byte * x[k + j];
          }
      const size_t at = (static_cast<size_t>(panel) * groups + g) * kLanes;
      for (int n = 0; n < kLanes; ++n) {
        out[n] = std::fma(static_cast<float>(acc[n]), half_to_float(l.scales[at + n]) * scale, out[n]);
        if (l.offsets)
          out[n] = std::fma(half_to_float(l.offsets[at + n]), scale * static_cast<float>(sum), out[n]);
      }
    }
  }
}

template <int M>
static void panel_bf16(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  for (int m = 0; m < M; ++m) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(l.weights) +
                        static_cast<size_t>(panel) * l.cols * kLanes;
    const uint16_t* x = in.bf16.data() + static_cast<size_t>(m0 + m) * in.cols;
    float* out = y + static_cast<size_t>(m) * stride;
    for (int n = 0; n < kLanes; ++n) out[n] = l.bias ? l.bias[panel * kLanes + n] : 0.0f;
    for (int k = 0; k < l.cols; k += 2, w += 64) {
      const float x0 = bf16_to_float(x[k]), x1 = bf16_to_float(x[k + 1]);
      for (int n = 0; n < kLanes; ++n)
        out[n] += bf16_to_float(w[n * 2]) * x0 + bf16_to_float(w[n * 2 + 1]) * x1;
    }
  }
}

#endif

template <int M>
static void panel_rows(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  if (l.format == BF16)
    panel_bf16<M>(l, in, m0, panel, y, stride);
  else if (l.format == INT8)
    panel_int<M, false>(l, in, m0, panel, y, stride);
  else
    panel_int<M, true>(l, in, m0, panel, y, stride);
}

// y[m][panel * 32 ...] for rows [0, rows): y has a row stride and room for whole panels.
static void panel_all(const Linear& l, const Input& in, int rows, int panel, float* y, int stride) {
  int m = 0;
  for (; m + 8 <= rows; m += 8)
    panel_rows<8>(l, in, m, panel, y + static_cast<size_t>(m) * stride, stride);
  float* rest = y + static_cast<size_t>(m) * stride;
  switch (rows - m) {
    case 1: panel_rows<1>(l, in, m, panel, rest, stride); break;
    case 2: panel_rows<2>(l, in, m, panel, rest, stride); break;
    case 3: panel_rows<3>(l, in, m, panel, rest, stride); break;
    case 4: panel_rows<4>(l, in, m, panel, rest, stride); break;
    case 5: panel_rows<5>(l, in, m, panel, rest, stride); break;
    case 6: panel_rows<6>(l, in, m, panel, rest, stride); break;
    case 7: panel_rows<7>(l, in, m, panel, rest, stride); break;
    default: break;
  }
}

static inline int num_panels(const Linear& l) { return (l.rows + kLanes - 1) / kLanes; }
