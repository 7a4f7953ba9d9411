// Inputs of a linear, prepared once per row: bfloat16, or int8 with one scale for every 64 inputs.
// Each integer sum is exact; what is added in float32 is added in an order that depends on neither
// the number of rows nor of threads. That makes speculative and plain decoding bit-equal.
#pragma once

static constexpr int kLanes = 32;   // outputs of a panel
static constexpr int kInputs = 64;  // inputs that share a scale

// Of 64 inputs: their scale, and their sums as the formats need them. An integer format stores a
// weight plus its zero (8 bits: 128, 6 bits: 32), so zero times the sum of the inputs is taken off.
struct Block {
  float scale;
  int32_t off8_64;      // -128 * sum of 64 inputs
  int32_t off8_32[2];   // -128 * sums of 32
  int32_t off6_16[4];   // -32 * sums of 16
  float sum_32[2];      // sums of 32
};

struct Input {
  std::vector<uint16_t> bf16;  // [M][cols]
  std::vector<int8_t> q;       // [M][cols]
  std::vector<Block> blocks;   // [M][cols / 64]
  int cols = 0, num_blocks = 0;
  void size(const Linear& l, size_t rows) {
    cols = l.cols;
    num_blocks = l.cols / kInputs;
    if (l.integer) {
      if (q.size() < rows * cols) q.resize(rows * cols);
      if (blocks.size() < rows * num_blocks) blocks.resize(rows * num_blocks);
    } else if (bf16.size() < rows * cols) {
      bf16.resize(rows * cols);
    }
  }
};

// Round 64 inputs to int8.
static void prepare_block(const float* x, int8_t* q, Block& block) {
  int32_t sums[4];
#if defined(__AVX512F__)
  __m512 v[4];
  __m512i top = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_loadu_ps(x + 16 * i);
    // Without the sign, floats are ordered as their bits; infinities and NaN come last.
    top = _mm512_max_epi32(top, _mm512_castps_si512(_mm512_abs_ps(v[i])));
  }
  const int32_t bits = _mm512_reduce_max_epi32(top);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float poison = largest - largest;  // NaN if any input is NaN or infinite
  const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
  __m128i fours[4];  // sums of every fourth
  for (int i = 0; i < 4; ++i) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
    const __m256i eights = _mm256_add_epi32(_mm512_castsi512_si256(rounded),
                                            _mm512_extracti64x4_epi64(rounded, 1));
    fours[i] =
        _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm512_cvtsepi32_epi8(rounded));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums),
                   _mm_hadd_epi32(_mm_hadd_epi32(fours[0], fours[1]),
                                  _mm_hadd_epi32(fours[2], fours[3])));
#else
  float largest = 0.0f, poison = 0.0f;
  for (int k = 0; k < kInputs; ++k) {
    const float size = std::fabs(x[k]);
    largest = size > largest ? size : largest;
    poison += x[k] * 0.0f;
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < 4; ++i) {
    sums[i] = 0;
    for (int k = 16 * i; k < 16 * i + 16; ++k) {
      const int32_t rounded = static_cast<int32_t>(std::nearbyint(x[k] * inverse));
      q[k] = static_cast<int8_t>(rounded);
      sums[i] += rounded;
    }
  }
#endif
  block.scale = largest / 127.0f + poison;
  block.off8_64 = -128 * (sums[0] + sums[1] + sums[2] + sums[3]);
  for (int i = 0; i < 2; ++i) {
    block.off8_32[i] = -128 * (sums[2 * i] + sums[2 * i + 1]);
    block.sum_32[i] = static_cast<float>(sums[2 * i] + sums[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) block.off6_16[i] = -32 * sums[i];
}

// Prepare blocks [b0, b1) of row m. x holds the columns from first on; columns from num on are
// padding.
static void prepare(const Linear& l, Input& in, int m, const float* x, int first, int b0, int b1,
                    int num) {
  const int stop = std::min(num, b1 * kInputs);
  if (!l.integer) {
    uint16_t* out = in.bf16.data() + static_cast<size_t>(m) * in.cols;
    for (int k = b0 * kInputs; k < stop; ++k) out[k] = float_to_bf16(x[k - first]);
    for (int k = std::max(stop, b0 * kInputs); k < b1 * kInputs; ++k) out[k] = 0;
    return;
  }
  for (int b = b0; b < b1; ++b) {
    const int k = b * kInputs;
    int8_t* q = in.q.data() + static_cast<size_t>(m) * in.cols + k;
    Block& block = in.blocks[static_cast<size_t>(m) * in.num_blocks + b];
    if (k + kInputs <= stop) {
      prepare_block(x + (k - first), q, block);
      continue;
    }
    float padded[kInputs] = {};
    for (int i = k; i < stop; ++i) padded[i - k] = x[i - first];
    prepare_block(padded, q, block);
  }
}
