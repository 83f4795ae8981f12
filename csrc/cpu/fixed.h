// Products in integers: an instruction multiplies twice as many of them as of float32. Two additions of
// vpmaddwd's are one instruction with AVX512_VNNI, and on AVX2 run beside the products in ports that float32
// has no use for.
//
// x becomes 14-bit integers with a float32 scale for each row and 64 channels (bfloat16 has 8 bits). FIXED
// weights are bfloat16 ones as 13-bit integers with a power of two as scale for each output channel and 64
// channels of k: exact but for values below 1/16 of the largest of their 64. 64 products of such integers
// cannot overflow int32; then they are added up in float32. Every output element is computed alike for any
// number of rows.
//
// A packed row of x is, for up to BLOCK_K channels: BLOCK_K / 2 pairs of int16, BLOCK_K / 64 scales, BLOCK_K
// / 32 sums of 32 channels. Pairs stand in the order in which shifts take them out of a dword of weights.
#pragma once

#include "gemm.h"

constexpr int64_t BLOCK_K = 512;

#if INTEGER_PRODUCTS
constexpr int FIXED_MR = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows of a register block
constexpr int64_t FIXED_X_STRIDE = BLOCK_K / 2 + 48;  // an odd number of cache lines spreads rows over the
                                                      // sets
constexpr float X_MAX = 8191;

#if BYTE_PRODUCTS
template <Kind K>
void split(int16_t* x);
#endif

// Row x[k], k at most BLOCK_K, as a packed row.
template <Kind K>
inline void quantize_row(const float* x, int64_t k, float* out) {
  constexpr int PARTS = FIXED_GROUP / LANES;
  vi order;
  UNROLL for (int j = 0; j < LANES; j++) order[j] =
      nibbles(K) ? j / 8 * 8 + j % 2 * 4 + j % 8 / 2 : j / 4 * 4 + j % 2 * 2 + j % 4 / 2;
  float *scales = out + BLOCK_K / 2, *sums = scales + BLOCK_K / FIXED_GROUP, padded[FIXED_GROUP] = {};
  for (int64_t at = 0; at < k; at += FIXED_GROUP, out += FIXED_GROUP / 2, scales++, sums += 2) {
    const float* from = x + at;
    if (k - at < FIXED_GROUP) from = (const float*)std::memcpy(padded, from, (k - at) * sizeof(float));
    vf v[PARTS], top{}, odd{};
    UNROLL for (int j = 0; j < PARTS; j++) {
      v[j] = load(from + j * LANES);
      top = vmax(top, as_float((vi)v[j] & 0x7fffffff));
      odd += v[j] - v[j];  // not 0 if v is not finite
    }
    float most = max_of(top);
    float up = most > 0 ? X_MAX / most : 0;
    *scales = most * (1 / X_MAX) + sum(odd);
    vi half[2] = {};
    UNROLL for (int j = 0; j < PARTS; j++) {
      vi q = round_to_int(v[j] * up);
      half[j / (PARTS / 2)] += q;
      store_int16((int16_t*)out + j * LANES, K == FIXED || BYTE_PRODUCTS ? q : __builtin_shuffle(q, order));
    }
#if BYTE_PRODUCTS
    split<K>((int16_t*)out);
#endif
    if (grouped(K)) UNROLL for (int h = 0; h < 2; h++) sums[h] = *scales * sum(to_float(half[h]));
  }
}

// a * b + c, spelled out, for the compiler fuses in some instances of the kernel and not in others.
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

#if BYTE_PRODUCTS
#include "bytes.h"
#else
// A block of rows' sums, ``COLUMNS`` vectors of them at a time, so that all are in registers.
constexpr int columns(int rows) { return LANES == 16 || rows <= 2 ? NV : NV / 2; }
// What is taken from weights, so that they are signed.
template <Kind K>
constexpr float SHIFT = 0;

typedef uint16_t pairs __attribute__((vector_size(LANES * 4)));

// For each byte, 0 to 15, that of a table of 16.
INLINE vi look_up(const uint8_t* table, vi v) {
  __m128i entries = _mm_loadu_si128((const __m128i*)table);
#if defined(__AVX512F__)
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)v);
#else
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)v);
#endif
}

// Pairs of int16 in a dword, and the i-th of them.
constexpr int pairs_of(Kind kind) { return five_bits(kind) ? 3 : per_dword(kind) / 2; }
template <Kind K>
INLINE vi take_pair(vi raw, int i) {
  if (bytes(K)) return i ? (vi)((pairs)raw >> 8) : raw & 0x00ff00ff;
  if (coded(K)) {
    vi found = look_up(codes_of(K), (i & 1 ? (vi)((vu)raw >> 4) : raw) & 0x0f0f0f0f);
    return i & 2 ? (vi)((pairs)found >> 8) : found & 0x00ff00ff;
  }
  if (five_bits(K)) return (vi)((pairs)raw >> (5 * i)) & 0x001f001f;
  if (nibbles(K)) return (vi)((pairs)raw >> (4 * i)) & 0x000f000f;
  return raw;
}

INLINE void multiply_add(vi& sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  // In assembly, for GCC 12 spills the sums around the intrinsic.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
#if defined(__AVX512F__)
  sum += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  asm volatile("" : "+v"(sum));  // in this order, or GCC multiplies first and spills products
#endif
}

// Integer sums of x times the rows of dwords of a group to sums[MR][32], ``COLUMNS`` vectors of them. ahead
// is moved on.
template <Kind K, int MR, int COLUMNS>
INLINE void sum_products(const int32_t* x, const uint8_t* w, int32_t* sums, Ahead& ahead) {
  constexpr int ROWS = grouped(K) ? group_rows(K) : FIXED_GROUP / 2;
  constexpr int PAIRS = pairs_of(K);
  vi acc[MR][COLUMNS] = {}, left[COLUMNS] = {};
  auto multiply = [&](const vi (&b)[COLUMNS], int s) INLINED {
    each<MR>([&](auto m) INLINED {
      vi a = x[m * FIXED_X_STRIDE + s] - vi{};
      each<COLUMNS>([&](auto j) INLINED { multiply_add(acc[m][j], a, b[j]); });
    });
  };
#pragma GCC unroll 1
  for (int64_t r = 0; r < ROWS; r++, x += PAIRS, w += ROW_BYTES) {
    fetch<COLUMNS * LANES * 4 / 64>(ahead);
    vi raw[COLUMNS];
    each<COLUMNS>([&](auto j) INLINED { raw[j] = load_int(w + j * LANES * 4); });
    each<PAIRS>([&](auto s) INLINED {
      vi b[COLUMNS];
      each<COLUMNS>([&](auto j) INLINED { b[j] = take_pair<K>(raw[j], s); });
      multiply(b, s);
      // One pair after the other, or GCC takes out all of them first and spills the sums.
      each<COLUMNS>([&](auto j) INLINED { asm volatile("" : "+v"(raw[j])); });
    });
    if constexpr (five_bits(K)) each<COLUMNS>([&](auto j) INLINED {
      left[j] = (vi)((pairs)left[j] >> 1) | (raw[j] & (int32_t)0x80008000);
    });
  }
  if constexpr (five_bits(K)) {
    each<COLUMNS>([&](auto j) INLINED { left[j] = (vi)((pairs)left[j] >> 11); });
    multiply(left, 0);
  }
  each<MR>([&](auto m) INLINED {
    each<COLUMNS>([&](auto j) INLINED { *(vi_mem*)(sums + m * PANEL + j * LANES) = acc[m][j]; });
  });
  asm volatile("" : : "r"(sums) : "memory");  // or registers for what follows are taken from the loop
}
#endif

template <Kind K, int MR>
__attribute__((noinline)) Ahead fixed_kernel(const float* x_, int64_t, const uint8_t* w, int64_t k,
                                             float* tile, bool first, Ahead ahead) {
  constexpr int64_t COUNT = grouped(K) ? GROUP : FIXED_GROUP, ROWS = grouped(K) ? group_rows(K) : COUNT / 2;
  constexpr int COLUMNS = columns(MR);
  const int32_t* x = (const int32_t*)x_;
  const float *scales = x_ + BLOCK_K / 2, *x_sums = scales + BLOCK_K / FIXED_GROUP;
  alignas(64) int32_t sums[MR * PANEL];
  for (int64_t at = 0; at < k; at += COUNT) {
    const uint8_t* head = w;
    w += grouped(K) ? head_bytes(K) : FIXED_HEAD;
    UNROLL for (int j = 0; j < NV; j += COLUMNS)
      sum_products<K, MR, COLUMNS>(x, w + j * LANES * 4, sums + j * LANES, ahead);
    x += COUNT / 2, w += ROWS * ROW_BYTES;
    vf scale[NV] = {}, low[NV] = {};
    UNROLL for (int j = 0; j < NV; j++) {
      if (grouped(K)) scale[j] = load_f16((const uint16_t*)head + j * LANES);
      if (symmetric(K)) low[j] = scale[j] * -zero_of(K);
      if (affine(K)) low[j] = load_f16((const uint16_t*)head + PANEL + j * LANES);
      if (SHIFT<K> != 0) low[j] = fused(scale[j], splat(SHIFT<K>), low[j]);
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
  static RowsKernel pick(int mr) {
    return mr == MR ? fixed_kernel<K, MR> : FixedKernels<K, MR - 1>::pick(mr);
  }
};
template <Kind K>
struct FixedKernels<K, 0> {
  static RowsKernel pick(int) { return nullptr; }
};
#endif
