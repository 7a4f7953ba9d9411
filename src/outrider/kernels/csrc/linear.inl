// Linears for few rows. A panel is 32 outputs (two vectors of 16 lanes); within a panel, by format:
//   BF16:    [cols / 2][32][2] bfloat16
//   INT8:    [cols / 4][32][4] uint8, the integer + 128; groups of 64 inputs
//   INT8_32: the same with groups of 32
//   INT4:    [cols / 8][32][4] uint8, inputs 0..3 in the low halves, 4..7 in the high ones; groups
//            of 32, always with offsets
//   INT6:    [cols / 8] times the low four bits as INT4 and 64 bytes with the high two: of byte i,
//            bits 0-1 belong to lane i / 4 of inputs 0..3, 2-3 to lane 16 + i / 4 of them, 4-7
//            likewise of inputs 4..7; the integer + 32; groups of 16
#pragma once

template <int F>
struct Stored;  // inputs of a group, bytes of 8 inputs of a panel
template <> struct Stored<INT8> { static constexpr int kGroup = 64, kBytes = 256; };
template <> struct Stored<INT8_32> { static constexpr int kGroup = 32, kBytes = 256; };
template <> struct Stored<INT4> { static constexpr int kGroup = 32, kBytes = 128; };
template <> struct Stored<INT6> { static constexpr int kGroup = 16, kBytes = 192; };

static constexpr int kOuter = 256;  // inputs of an outer scale

// What an integer sum of group g of a block starts from.
template <int F>
static inline int32_t start_of(const Block& block, int g) {
  return F == INT8 ? block.off8_64 : F == INT8_32 ? block.off8_32[g] : F == INT6 ? block.off6_16[g] : 0;
}

#if defined(__AVX512VNNI__)

static inline __m512 load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Scales or offsets of a group, for both vectors of lanes; outer, if any, is that of the inputs.
static inline void load_scales(const void* scales, const __m512* outer, size_t group, __m512* out) {
  for (int half = 0; half < 2; ++half) {
    const size_t at = group * kLanes + 16 * half;
    if (outer) {
      const auto* bytes = reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(scales) + at);
      out[half] = _mm512_mul_ps(
          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes))), outer[half]);
    } else {
      out[half] = load_half(static_cast<const uint16_t*>(scales) + at);
    }
  }
}

// The integers of 8 inputs: of inputs 0..3 for both vectors of lanes, then of inputs 4..7.
template <int F>
static inline void load_integers(const uint8_t* w, __m512i* out) {
  out[0] = _mm512_loadu_si512(w);
  out[1] = _mm512_loadu_si512(w + 64);
  if (F == INT8 || F == INT8_32) {
    out[2] = _mm512_loadu_si512(w + 128);
    out[3] = _mm512_loadu_si512(w + 192);
    return;
  }
  const __m512i low = _mm512_set1_epi8(0x0f);
  out[2] = _mm512_and_si512(_mm512_srli_epi16(out[0], 4), low);
  out[3] = _mm512_and_si512(_mm512_srli_epi16(out[1], 4), low);
  out[0] = _mm512_and_si512(out[0], low);
  out[1] = _mm512_and_si512(out[1], low);
  if (F == INT6) {
    const __m512i high = _mm512_loadu_si512(w + 128), two = _mm512_set1_epi8(0x30);
    // Where `two` has a bit take that of `high`, elsewhere that of `out`.
    out[0] = _mm512_ternarylogic_epi32(two, _mm512_slli_epi16(high, 4), out[0], 0xca);
    out[1] = _mm512_ternarylogic_epi32(two, _mm512_slli_epi16(high, 2), out[1], 0xca);
    out[2] = _mm512_ternarylogic_epi32(two, high, out[2], 0xca);
    out[3] = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(high, 2), out[3], 0xca);
  }
}

static constexpr int kPage = 4096;
static constexpr int kNear = 2048;  // bytes ahead of what is read, for the first-level cache

// Fetch weights while the kBytes at w, one step of a kernel, are read. A core keeps more requests
// of several pages on their way than of one, so the lines of the next window, as many pages as a
// step has lines, come from each of them in turn. Windows lie where the address says: no state.
template <int kBytes>
static inline void fetch_ahead(const uint8_t* w) {
  constexpr int kLines = kBytes / 64;
  constexpr uintptr_t kWindow = kLines * kPage;
  const uintptr_t address = reinterpret_cast<uintptr_t>(w), in = address % kWindow;
  const auto* line = reinterpret_cast<const char*>(address - in + kWindow + in / kBytes * 64);
  for (int i = 0; i < kLines; ++i) {
    _mm_prefetch(line + i * kPage, _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(w + kNear + i * 64), _MM_HINT_T0);
  }
}

template <int M, int F>
static void panel_int(const Panel& p, const float* bias, const Input& in, int m0, float* y,
                      int stride) {
  constexpr int kGroup = Stored<F>::kGroup, kBytes = Stored<F>::kBytes;
  const uint8_t* w = p.weights;
  __m512 total[M][2];
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half)
      total[m][half] = bias ? _mm512_loadu_ps(bias + 16 * half) : _mm512_setzero_ps();
  const int8_t* x[M];
  const Block* blocks[M];
  for (int m = 0; m < M; ++m) {
    x[m] = in.q.data() + static_cast<size_t>(m0 + m) * in.cols;
    blocks[m] = in.blocks.data() + static_cast<size_t>(m0 + m) * in.num_blocks;
  }
  __m512 outer_scales[2], outer_offsets[2];
  for (int b = 0; b < in.num_blocks; ++b) {
    if (p.outer_scales && b % (kOuter / kInputs) == 0)
      for (int half = 0; half < 2; ++half) {
        const size_t at = static_cast<size_t>(b / (kOuter / kInputs)) * kLanes + 16 * half;
        outer_scales[half] = load_half(p.outer_scales + at);
        if (F == INT4) outer_offsets[half] = load_half(p.outer_offsets + at);
      }
    __m512 part[M][2];
#pragma GCC unroll 4
    for (int g = 0; g < kInputs / kGroup; ++g) {
      __m512i acc[M][2];
      for (int m = 0; m < M; ++m)
        acc[m][0] = acc[m][1] = _mm512_set1_epi32(start_of<F>(blocks[m][b], g));
      for (int k = b * kInputs + g * kGroup; k < b * kInputs + (g + 1) * kGroup; k += 8) {
        fetch_ahead<kBytes>(w);
        __m512i weights[4];
        load_integers<F>(w, weights);
        w += kBytes;
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          int32_t first, second;
          std::memcpy(&first, x[m] + k, 4);
          std::memcpy(&second, x[m] + k + 4, 4);
          const __m512i x0 = _mm512_set1_epi32(first), x1 = _mm512_set1_epi32(second);
          acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], weights[0], x0);
          acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], weights[1], x0);
          acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], weights[2], x1);
          acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], weights[3], x1);
        }
      }
      const size_t group = static_cast<size_t>(b) * (kInputs / kGroup) + g;
      __m512 scale[2], offset[2];
      load_scales(p.scales, p.outer_scales ? outer_scales : nullptr, group, scale);
      if (F == INT4) load_scales(p.offsets, p.outer_scales ? outer_offsets : nullptr, group, offset);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        for (int half = 0; half < 2; ++half) {
          const __m512 sum = _mm512_cvtepi32_ps(acc[m][half]);
          part[m][half] = g == 0 ? _mm512_mul_ps(sum, scale[half])
                                 : _mm512_fmadd_ps(sum, scale[half], part[m][half]);
          if (F == INT4)
            part[m][half] = _mm512_fmadd_ps(offset[half], _mm512_set1_ps(blocks[m][b].sum_32[g]),
                                            part[m][half]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
      for (int half = 0; half < 2; ++half)
        total[m][half] =
            _mm512_fmadd_ps(part[m][half], _mm512_set1_ps(blocks[m][b].scale), total[m][half]);
  }
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2; ++half)
      _mm512_storeu_ps(y + static_cast<size_t>(m) * stride + 16 * half, total[m][half]);
}

template <int M>
static void panel_bf16(const Panel& p, const float* bias, const Input& in, int m0, float* y,
                       int stride) {
  const uint8_t* w = p.weights;
  __m512 acc[M][2];
  for (int m = 0; m < M; ++m) {
    acc[m][0] = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    acc[m][1] = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
  }
  const uint16_t* x[M];
  for (int m = 0; m < M; ++m) x[m] = in.bf16.data() + static_cast<size_t>(m0 + m) * in.cols;
  for (int k = 0; k < in.cols; k += 2, w += 128) {
    fetch_ahead<128>(w);
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

static inline float scale_at(const void* scales, const uint16_t* outer, int group, int k, int n) {
  const size_t at = static_cast<size_t>(group) * kLanes + n;
  if (!outer) return half_to_float(static_cast<const uint16_t*>(scales)[at]);
  return static_cast<float>(static_cast<const int8_t*>(scales)[at]) *
         half_to_float(outer[static_cast<size_t>(k / kOuter) * kLanes + n]);
}

// sums[n] += products of 8 inputs.
template <int F>
static inline void add_products(const uint8_t* w, const int8_t* x, int32_t* sums) {
  for (int n = 0; n < kLanes; ++n)
    for (int j = 0; j < 4; ++j) {
      const int at = n * 4 + j;
      int first, second;
      if (F == INT8 || F == INT8_32) {
        first = w[at];
        second = w[128 + at];
      } else {
        first = w[at] & 15;
        second = w[at] >> 4;
      }
      if (F == INT6) {
        const int high = w[128 + at % 64] >> (at / 64 * 2);
        first |= (high & 3) << 4;
        second |= (high >> 4 & 3) << 4;
      }
      sums[n] += first * x[j] + second * x[4 + j];
    }
}

template <int M, int F>
static void panel_int(const Panel& p, const float* bias, const Input& in, int m0, float* y,
                      int stride) {
  constexpr int kGroup = Stored<F>::kGroup;
  for (int m = 0; m < M; ++m) {
    const uint8_t* w = p.weights;
    const int8_t* x = in.q.data() + static_cast<size_t>(m0 + m) * in.cols;
    const Block* blocks = in.blocks.data() + static_cast<size_t>(m0 + m) * in.num_blocks;
    float* out = y + static_cast<size_t>(m) * stride;
    for (int n = 0; n < kLanes; ++n) out[n] = bias ? bias[n] : 0.0f;
    for (int b = 0; b < in.num_blocks; ++b) {
      float part[kLanes] = {};
      for (int g = 0; g < kInputs / kGroup; ++g) {
        int32_t sums[kLanes];
        for (int n = 0; n < kLanes; ++n) sums[n] = start_of<F>(blocks[b], g);
        const int from = b * kInputs + g * kGroup;
        for (int k = from; k < from + kGroup; k += 8, w += Stored<F>::kBytes)
          add_products<F>(w, x + k, sums);
        for (int n = 0; n < kLanes; ++n) {
          const float scale = scale_at(p.scales, p.outer_scales, from / kGroup, from, n);
          part[n] = std::fma(static_cast<float>(sums[n]), scale, part[n]);
          if (F == INT4)
            part[n] = std::fma(scale_at(p.offsets, p.outer_offsets, from / kGroup, from, n),
                               blocks[b].sum_32[g], part[n]);
        }
      }
      for (int n = 0; n < kLanes; ++n) out[n] = std::fma(part[n], blocks[b].scale, out[n]);
    }
  }
}

template <int M>
static void panel_bf16(const Panel& p, const float* bias, const Input& in, int m0, float* y,
                       int stride) {
  for (int m = 0; m < M; ++m) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(p.weights);
    const uint16_t* x = in.bf16.data() + static_cast<size_t>(m0 + m) * in.cols;
    float* out = y + static_cast<size_t>(m) * stride;
    for (int n = 0; n < kLanes; ++n) out[n] = bias ? bias[n] : 0.0f;
    for (int k = 0; k < in.cols; k += 2, w += 64) {
      const float x0 = bf16_to_float(x[k]), x1 = bf16_to_float(x[k + 1]);
      for (int n = 0; n < kLanes; ++n)
        out[n] += bf16_to_float(w[n * 2]) * x0 + bf16_to_float(w[n * 2 + 1]) * x1;
    }
  }
}

#endif

template <int M>
static void panel_rows(const Linear& l, const Input& in, int m0, int panel, float* y, int stride) {
  const Panel& p = l.panels[panel];
  const float* bias = l.bias ? l.bias + panel * kLanes : nullptr;
  switch (p.format) {
    case BF16: panel_bf16<M>(p, bias, in, m0, y, stride); break;
    case INT8: panel_int<M, INT8>(p, bias, in, m0, y, stride); break;
    case INT8_32: panel_int<M, INT8_32>(p, bias, in, m0, y, stride); break;
    case INT4: panel_int<M, INT4>(p, bias, in, m0, y, stride); break;
    default: panel_int<M, INT6>(p, bias, in, m0, y, stride); break;
  }
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
