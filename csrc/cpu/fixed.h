// Products in integers, for CPUs with AVX512_VNNI: twice the multiplications of float32 in an instruction.
//
// x becomes 14-bit integers with a float32 scale for each row and 64 channels (bfloat16 has 8 bits). FIXED weights are
// bfloat16 ones as 13-bit integers with a power of two as scale for each output channel and 64 channels of k: exact but for
// values below 1/16 of the largest of their 64. 64 products of such integers cannot overflow int32; then they are added up
// in float32. Every output element is computed alike for any number of rows.
//
// A packed row of x is, for up to BLOCK_K channels: BLOCK_K / 2 pairs of int16, BLOCK_K / 64 scales, BLOCK_K / 32 sums of
// 32 channels. Pairs stand in the order in which shifts take them out of a dword of weights.
#pragma once

#include "gemm.h"

constexpr int64_t BLOCK_K = 512;

#if defined(__AVX512VNNI__)
constexpr int64_t FIXED_X_STRIDE = BLOCK_K / 2 + 48;  // an odd number of cache lines spreads rows over the sets
constexpr float X_MAX = 8191;

// Row x[k], k at most BLOCK_K, as a packed row.
template <Kind K>
inline void quantize_row(const float* x, int64_t k, float* out) {
  const __m512i order = K == INT4 ? _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                                  : _mm512_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  float *scales = out + BLOCK_K / 2, *sums = scales + BLOCK_K / FIXED_GROUP;
  for (int64_t at = 0; at < k; at += FIXED_GROUP, out += FIXED_GROUP / 2, scales++, sums += 2) {
    vf v[4], top{}, odd{};
    UNROLL for (int j = 0; j < 4; j++) {
      int64_t left = k - at - 16 * j;
      __mmask16 some = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
      v[j] = (vf)_mm512_maskz_loadu_ps(some, x + at + 16 * j);
      top = vmax(top, as_float((vi)v[j] & 0x7fffffff));
      odd += v[j] - v[j];  // not 0 if v is not finite
    }
    float most = max_of(top);
    float up = most > 0 ? X_MAX / most : 0, scale = most * (1 / X_MAX) + sum(odd);
    *scales = scale;
    __m512i q[4];
    UNROLL for (int j = 0; j < 4; j++) {
      q[j] = _mm512_cvtps_epi32((__m512)(v[j] * up));
      __m512i placed = K == FIXED ? q[j] : _mm512_permutexvar_epi32(order, q[j]);
      _mm256_storeu_si256((__m256i*)out + j, _mm512_cvtepi32_epi16(placed));
    }
    if (grouped(K))
      UNROLL for (int h = 0; h < 2; h++)
        sums[h] = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(q[2 * h], q[2 * h + 1]));
  }
}

// Pair i of int16 out of each dword.
template <Kind K>
INLINE __m512i take_pair(__m512i raw, int i) {
  if (K == INT8) return i ? _mm512_srli_epi16(raw, 8) : _mm512_and_si512(raw, _mm512_set1_epi16(255));
  if (K == INT4) return _mm512_and_si512(_mm512_srli_epi16(raw, 4 * i), _mm512_set1_epi16(15));
  return raw;
}

// a * b + c, spelled out, for the compiler fuses in some instances of the kernel and not in others.
INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// In assembly, for GCC 12 spills the sums around the intrinsic.
INLINE void multiply_add(__m512i& sum, __m512i a, __m512i b) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

// Integer sums of x times ``rows`` rows of dwords to sums[MR][32]. x, w and ahead are moved on.
template <Kind K, int MR>
INLINE void sum_products(const int32_t*& x, const uint8_t*& w, int64_t rows, int32_t* sums, Ahead& ahead) {
  constexpr int PAIRS = per_dword(K) / 2;
  __m512i acc[MR][NV];
  UNROLL for (int m = 0; m < MR; m++)
    UNROLL for (int j = 0; j < NV; j++) acc[m][j] = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (int64_t r = 0; r < rows; r++, x += PAIRS, w += ROW_BYTES) {
    fetch(ahead);
    __m512i raw[NV];
    UNROLL for (int j = 0; j < NV; j++) raw[j] = _mm512_loadu_si512(w + j * 64);
    UNROLL for (int s = 0; s < PAIRS; s++) {
      __m512i b[NV];
      UNROLL for (int j = 0; j < NV; j++) b[j] = take_pair<K>(raw[j], s);
      UNROLL for (int m = 0; m < MR; m++) {
        __m512i a = _mm512_set1_epi32(x[m * FIXED_X_STRIDE + s]);
        UNROLL for (int j = 0; j < NV; j++) multiply_add(acc[m][j], a, b[j]);
      }
    }
  }
  UNROLL for (int m = 0; m < MR; m++)
    UNROLL for (int j = 0; j < NV; j++) _mm512_store_si512(sums + m * PANEL + j * LANES, acc[m][j]);
  asm volatile("" : : "r"(sums) : "memory");  // or registers for what follows are taken from the loop
}

template <Kind K, int MR>
__attribute__((noinline)) Ahead fixed_kernel(const float* x_, int64_t, const uint8_t* w, int64_t k, float* tile, bool first, Ahead ahead) {
  constexpr int64_t COUNT = grouped(K) ? GROUP : FIXED_GROUP;
  const int32_t* x = (const int32_t*)x_;
  const float *scales = x_ + BLOCK_K / 2, *x_sums = scales + BLOCK_K / FIXED_GROUP;
  alignas(64) int32_t sums[MR * PANEL];
  for (int64_t at = 0; at < k; at += COUNT) {
    const uint8_t* head = w;
    w += grouped(K) ? GROUP_HEAD : FIXED_HEAD;
    sum_products<K, MR>(x, w, COUNT / per_dword(K), sums, ahead);
    vf scale[NV] = {}, low[NV] = {};
    UNROLL for (int j = 0; j < NV; j++) {
      if (grouped(K)) scale[j] = load_f16((const uint16_t*)head + j * LANES);
      if (grouped(K)) low[j] = load_f16((const uint16_t*)head + PANEL + j * LANES);
      if (K == FIXED) scale[j] = load_bf16((const uint16_t*)head + j * LANES);
    }
    for (int m = 0; m < MR; m++) {
      vf step = splat(scales[m * FIXED_X_STRIDE + at / FIXED_GROUP]);
      UNROLL for (int j = 0; j < NV; j++) {
        float* t = tile + m * PANEL + j * LANES;
        vf total = first && at == 0 ? vf{} : load(t);
        if (grouped(K)) total = fused(low[j], splat(x_sums[m * FIXED_X_STRIDE + at / GROUP]), total);
        store(t, fused(to_float(load_int(sums + m * PANEL + j * LANES)), step * scale[j], total));
      }
    }
  }
  return ahead;
}

template <Kind K, int MR>
struct FixedKernels {
  static RowsKernel pick(int mr) { return mr == MR ? fixed_kernel<K, MR> : FixedKernels<K, MR - 1>::pick(mr); }
};
template <Kind K>
struct FixedKernels<K, 0> {
  static RowsKernel pick(int) { return nullptr; }
};
#endif
