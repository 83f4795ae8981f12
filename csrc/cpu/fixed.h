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
// Packed x has for each 64 channels, and there for each row, FIXED_X dwords: 32 pairs of int16, the scale,
// the sums of the integers of both halves, and these as float32. Pairs stand in the order in which shifts
// take them out of a dword of weights.
#pragma once

#include "gemm.h"

constexpr int64_t BLOCK_K = 512;

#if INTEGER_PRODUCTS
constexpr int FIXED_MR = LANES == 16 ? 12 : LANES == 8 ? 5 : 4;  // rows of a register block
constexpr int64_t FIXED_X = 40, X_SCALE = FIXED_GROUP / 2, X_SUMS = X_SCALE + 1, X_FLOAT_SUMS = X_SUMS + 2;
constexpr float X_MAX = 8191;

#if BYTE_PRODUCTS
template <Kind K>
void split(int16_t* x);
#endif

// Up to four rows of x are multiplied as bytes where an instruction multiplies four of them: an integer is
// 128 times its upper half and its lower one. Instructions are as many, and sums the same; but weights are
// taken out of dwords with less than half of the work. More rows share that work anyway, and one has the
// time while it waits for memory, but for nibbles that are looked up. A dword of int8 has a dword of upper
// halves and one of lower ones; of nibbles one has the upper halves of the even channels, of the odd ones,
// and so the lower ones.
#if HALF_PRODUCTS
constexpr bool halved(Kind kind, int64_t rows) {
  return grouped(kind) && !wide(kind) && !five_bits(kind) && rows >= (coded(kind) ? 1 : 2) && rows <= 4;
}

template <Kind K>
INLINE void store_halves(void* out, vi q) {
  __m128i upper = _mm512_cvtepi32_epi8((__m512i)(q >> 7)), lower = _mm512_cvtepi32_epi8((__m512i)(q & 127));
  if (nibbles(K)) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    upper = _mm_shuffle_epi8(upper, order), lower = _mm_shuffle_epi8(lower, order);
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi64(upper, lower));
    _mm_storeu_si128((__m128i*)out + 1, _mm_unpackhi_epi64(upper, lower));
  } else {
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi32(upper, lower));
    _mm_storeu_si128((__m128i*)out + 1, _mm_unpackhi_epi32(upper, lower));
  }
}
#endif

// Row x[k] as a packed row, whose next 64 channels are ``step`` dwords behind.
template <Kind K, bool HALVED = false>
inline void quantize_row(const float* x, int64_t k, float* out, int64_t step) {
  constexpr int PARTS = FIXED_GROUP / LANES;
  vi order;
  UNROLL for (int j = 0; j < LANES; j++) order[j] =
      nibbles(K) ? j / 8 * 8 + j % 2 * 4 + j % 8 / 2 : j / 4 * 4 + j % 2 * 2 + j % 4 / 2;
  float padded[FIXED_GROUP] = {};
  for (int64_t at = 0; at < k; at += FIXED_GROUP, out += step) {
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
    out[X_SCALE] = most * (1 / X_MAX) + sum(odd);
    vi half[2] = {};
    UNROLL for (int j = 0; j < PARTS; j++) {
      vi q = round_to_int(v[j] * up);
      half[j / (PARTS / 2)] += q;
#if HALF_PRODUCTS
      if (HALVED) {
        store_halves<K>((int16_t*)out + j * LANES, q);
        continue;
      }
#endif
      bool plain = K == FIXED || K == E4M3 || BYTE_PRODUCTS;
      store_int16((int16_t*)out + j * LANES, plain ? q : __builtin_shuffle(q, order));
    }
#if BYTE_PRODUCTS
    split<K>((int16_t*)out);
#endif
    if (grouped(K)) UNROLL for (int h = 0; h < 2; h++) {
      out[X_FLOAT_SUMS + h] = sum(to_float(half[h]));
      ((int32_t*)out)[X_SUMS + h] = out[X_FLOAT_SUMS + h];
    }
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

// The pairs of a vector of places in a table of int16.
INLINE void take_tabled(const int16_t* table, vi raw, vi (&out)[4]) {
#if defined(__AVX512F__)
  __m512i entries = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)table));
  UNROLL for (int i = 0; i < 4; i++)
    out[i] = (vi)_mm512_permutexvar_epi16((__m512i)((pairs)raw >> (4 * i)), entries);  // of the lowest bits
#else
  alignas(16) uint8_t lows[16], highs[16];
  UNROLL for (int i = 0; i < 16; i++) lows[i] = table[i] & 255, highs[i] = (uint16_t)table[i] >> 8;
  UNROLL for (int i = 0; i < 2; i++) {
    vi q = (vi)((vu)raw >> (4 * i)) & 0x0f0f0f0f, low = look_up(lows, q), high = look_up(highs, q);
    out[i] = (low & 0x00ff00ff) | (vi)((pairs)high << 8);
    out[i + 2] = (vi)((pairs)low >> 8) | (high & (int32_t)0xff00ff00);
  }
#endif
}

// The pairs of a vector of e4m3 as 16 times what they are, rounded: 8 times the mantissa with its first bit,
// times a power of two of 14 bits.
INLINE void take_e4m3(vi raw, vi (&out)[2]) {
  constexpr int8_t MANTISSAS[16] = {64,  72,  80,  88,  96,  104,  112,  120,
                                    -64, -72, -80, -88, -96, -104, -112, -120};
  constexpr uint8_t LOW[16] = {0, 0, 1, 2, 4, 8, 16, 32, 64, 128};
  constexpr uint8_t HIGH[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32};
  vi exponents = (vi)((vu)raw >> 4) & 0x0f0f0f0f;
  vi mantissas = look_up((const uint8_t*)MANTISSAS, raw & 0x0f0f0f0f);
  vi low = look_up(LOW, exponents), high = look_up(HIGH, exponents);
#if defined(__AVX512F__)
  __m512i m = (__m512i)mantissas, l = (__m512i)low, h = (__m512i)high, zero = _mm512_setzero_si512();
  out[0] = (vi)_mm512_mulhrs_epi16(_mm512_unpacklo_epi8(zero, m), _mm512_unpacklo_epi8(l, h));
  out[1] = (vi)_mm512_mulhrs_epi16(_mm512_unpackhi_epi8(zero, m), _mm512_unpackhi_epi8(l, h));
#else
  __m256i m = (__m256i)mantissas, l = (__m256i)low, h = (__m256i)high, zero = _mm256_setzero_si256();
  out[0] = (vi)_mm256_mulhrs_epi16(_mm256_unpacklo_epi8(zero, m), _mm256_unpacklo_epi8(l, h));
  out[1] = (vi)_mm256_mulhrs_epi16(_mm256_unpackhi_epi8(zero, m), _mm256_unpackhi_epi8(l, h));
#endif
}

// Those of a wide kind.
template <Kind K, int PAIRS>
INLINE void take_pairs(vi raw, vi (&out)[PAIRS]) {
  if constexpr (K == E4M3) take_e4m3(raw, out);
  if constexpr (tabled(K)) take_tabled(table_of(K), raw, out);
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

// ``MANY``: so many sums that registers are left for one product alone.
template <bool MANY>
INLINE void multiply_add(vi& sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  // In assembly, for GCC 12 spills the sums around the intrinsic.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX512F__)
  sum += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  asm volatile("" : "+v"(sum));  // in this order, or GCC multiplies first and spills products
#else
  vi product = {};
  if (MANY) {
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  } else {
    sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    asm volatile("" : "+v"(sum));
  }
#endif
}

// Integer sums of x times the rows of dwords of a group to sums[MR][32], ``COLUMNS`` vectors of them.
// ``x_sums``: of this group, of the first row. ahead is moved on.
template <Kind K, int MR, int COLUMNS>
INLINE void sum_products(const int32_t* x, const int32_t* x_sums, const uint8_t* w, int32_t* sums,
                         Ahead& ahead) {
  constexpr int ROWS = group_rows(K);
  constexpr int PAIRS = pairs_of(K);
  // Sums of one row are two, for a product waits for the one before.
  constexpr int CHAINS = MR * COLUMNS <= 2 ? 2 : 1;
  vi acc[CHAINS][MR][COLUMNS] = {}, left[COLUMNS] = {};
  if constexpr (symmetric(K)) each<MR>([&](auto m) INLINED {
    vi zero = (x_sums[m * FIXED_X] - vi{}) * -(int32_t)zero_of(K);
    each<COLUMNS>([&](auto j) INLINED { acc[0][m][j] = zero; });
  });
  auto multiply = [&](const vi (&b)[COLUMNS], auto s) INLINED {
    each<MR>([&](auto m) INLINED {
      vi a = x[m * FIXED_X + s] - vi{};
      each<COLUMNS>([&](auto j) INLINED { multiply_add<(MR > 3)>(acc[s % CHAINS][m][j], a, b[j]); });
    });
  };
#pragma GCC unroll 1
  for (int64_t r = 0; r < ROWS; r++, x += PAIRS, w += ROW_BYTES) {
    fetch<COLUMNS * LANES * 4 / 64>(ahead);
    vi raw[COLUMNS];
    each<COLUMNS>([&](auto j) INLINED { raw[j] = load_int(w + j * LANES * 4); });
    if constexpr (wide(K) && K != INT16) {  // whose pairs are taken out together
      each<COLUMNS>([&](auto j) INLINED {
        vi b[PAIRS];
        take_pairs<K>(raw[j], b);
        each<MR>([&](auto m) INLINED {
          each<PAIRS>([&](auto s) INLINED {
            multiply_add<(MR > 3)>(acc[s % CHAINS][m][j], x[m * FIXED_X + s] - vi{}, b[s]);
          });
        });
      });
      continue;
    }
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
    multiply(left, std::integral_constant<int, 0>{});
  }
  each<MR>([&](auto m) INLINED {
    each<COLUMNS>([&](auto j) INLINED {
      *(vi_mem*)(sums + m * PANEL + j * LANES) = acc[0][m][j] + (CHAINS > 1 ? acc[CHAINS - 1][m][j] : vi{});
    });
  });
  asm volatile("" : : "r"(sums) : "memory");  // or registers for what follows are taken from the loop
}
#endif

#if !BYTE_PRODUCTS
// k channels of a wide kind as INT16, which many rows of x read without taking numbers out again.
template <Kind K>
inline void widen(const uint8_t* w, int64_t k, uint8_t* out) {
  constexpr int PAIRS = pairs_of(K);
  const uint8_t* head = w;
  for (int64_t at = 0; at < k; at += GROUP) {
    if (at % span(K) == 0) {
      head = w;
      w += head_bytes(K);
    }
    for (int j = 0; j < NV; j++) store((float*)out + j * LANES, head_scale(head, j) * unit_of(K));
    out += head_bytes(INT16);
    for (int r = 0; r < group_rows(K); r++, w += ROW_BYTES, out += PAIRS * ROW_BYTES)
      for (int j = 0; j < NV; j++) {
        vi b[PAIRS];
        take_pairs<K>(load_int(w + j * LANES * 4), b);
        for (int s = 0; s < PAIRS; s++) *(vi_mem*)(out + s * ROW_BYTES + j * LANES * 4) = b[s];
      }
  }
}
#endif

// ldx: dwords from 64 channels of x to the next.
template <Kind K, int MR>
__attribute__((noinline)) Ahead fixed_kernel(const float* x, int64_t ldx, const uint8_t* w, int64_t k,
                                             float* tile, bool first, Ahead ahead) {
  constexpr int GROUPS = FIXED_GROUP / summed(K);  // of weights, for 64 channels
  constexpr int64_t HEAD = head_bytes(K);
  constexpr int COLUMNS = columns(MR);
  static const uint8_t NONE[HEAD] = {};
  alignas(64) int32_t sums[GROUPS][MR * PANEL];
  const uint8_t *head = w, *scales = w;
  for (int64_t at = 0; at < k; at += FIXED_GROUP, x += ldx, first = false) {
    const uint8_t* heads[GROUPS];
    if (span(K) >= FIXED_GROUP && at % span(K) == 0) {
      head = w;
      w += HEAD;
    }
    if (deep(K)) {
      scales = w;
      w += ROW_BYTES;
    }
    for (int g = 0; g < GROUPS; g++) {
      heads[g] = NONE;
      if (!deep(K) && at + g * summed(K) >= k) continue;  // the last 64 channels have one group
      if (span(K) < FIXED_GROUP) {
        head = w;
        w += HEAD;
      }
      heads[g] = head;
      UNROLL for (int j = 0; j < NV; j += COLUMNS)
        sum_products<K, MR, COLUMNS>((const int32_t*)x + g * summed(K) / 2, (const int32_t*)x + X_SUMS + g,
                                     w + j * LANES * 4, sums[g] + j * LANES, ahead);
      w += group_rows(K) * ROW_BYTES;
    }
    for (int j = 0; j < NV; j++) {
      vf scale[GROUPS], low[GROUPS];
      UNROLL for (int g = 0; g < GROUPS; g++) {
        if (wide(K)) {
          scale[g] = head_scale(heads[g], j) * unit_of(K);
          if (deep(K)) scale[g] *= deep_scale(scales, g, j);
          continue;
        }
        auto constants = (const uint16_t*)heads[g] + j * LANES;
        scale[g] = grouped(K) ? load_f16(constants) : load_bf16(constants);
        if (affine(K)) low[g] = load_f16(constants + PANEL);
      }
      for (int m = 0; m < MR; m++) {
        const float* row = x + m * FIXED_X;
        float* t = tile + m * PANEL + j * LANES;
        vf total{};
        UNROLL for (int g = 0; g < GROUPS; g++) {
          vf sum = to_float(load_int(sums[g] + m * PANEL + j * LANES));
          total = g ? fused(sum, scale[g], total) : sum * scale[g];
          if (affine(K)) total = fused(low[g], splat(row[X_FLOAT_SUMS + g]), total);
        }
        store(t, fused(total, splat(row[X_SCALE]), first ? vf{} : load(t)));
      }
    }
  }
  return ahead;
}

#if HALF_PRODUCTS
// The same with x in halves, for all of k, and all sums in registers.
template <Kind K, int MR>
__attribute__((noinline)) void halved_kernel(const float* x, int64_t ldx, const uint8_t* w, int64_t k,
                                             float* tile, Ahead ahead) {
  constexpr int PER = bytes(K) ? 1 : 2;  // vectors of bytes in one of dwords
  Tile<MR> acc{};
  for (int64_t at = 0; at < k; at += FIXED_GROUP, x += ldx) {
    vf total[MR][NV] = {};
    for (int g = 0; g < FIXED_GROUP / GROUP && at + g * GROUP < k; g++) {
      auto head = (const uint16_t*)w;
      auto from = (const int32_t*)x + g * GROUP / 2;
      vi upper[MR][NV] = {}, lower[MR][NV] = {};
      if constexpr (symmetric(K)) each<MR>([&](auto m) INLINED {
        vi zero = (((const int32_t*)x)[m * FIXED_X + X_SUMS + g] - vi{}) * -(int32_t)zero_of(K);
        each<NV>([&](auto j) INLINED { lower[m][j] = zero; });
      });
      w += head_bytes(K);
#pragma GCC unroll 1
      for (int64_t r = 0; r < group_rows(K); r++, from += 2 * PER, w += ROW_BYTES) {
        fetch(ahead);
        vi raw[NV];
        each<NV>([&](auto j) INLINED { raw[j] = load_int(w + j * LANES * 4); });
        each<PER>([&](auto s) INLINED {
          vi b[NV];
          each<NV>([&](auto j) INLINED {
            b[j] = bytes(K) ? raw[j] : (s ? (vi)((vu)raw[j] >> 4) : raw[j]) & 0x0f0f0f0f;
            if (coded(K)) b[j] = look_up(codes_of(K), b[j]);
          });
          each<MR>([&](auto m) INLINED {
            vi high = from[m * FIXED_X + s] - vi{}, low = from[m * FIXED_X + PER + s] - vi{};
            each<NV>([&](auto j) INLINED {
              asm("vpdpbusd %2, %1, %0" : "+v"(upper[m][j]) : "v"(b[j]), "v"(high));
              asm("vpdpbusd %2, %1, %0" : "+v"(lower[m][j]) : "v"(b[j]), "v"(low));
            });
          });
        });
      }
      each<NV>([&](auto j) INLINED {
        vf scale = load_f16(head + j * LANES), least = affine(K) ? load_f16(head + PANEL + j * LANES) : vf{};
        each<MR>([&](auto m) INLINED {
          vf sum = to_float((upper[m][j] << 7) + lower[m][j]);
          total[m][j] = g ? fused(sum, scale, total[m][j]) : sum * scale;
          if (affine(K)) total[m][j] = fused(least, splat(x[m * FIXED_X + X_FLOAT_SUMS + g]), total[m][j]);
        });
      });
    }
    each<MR>([&](auto m) INLINED {
      vf scale = splat(x[m * FIXED_X + X_SCALE]);
      each<NV>([&](auto j) INLINED { acc.v[m][j] = fused(total[m][j], scale, acc.v[m][j]); });
    });
  }
  acc.store_to(tile);
}

template <Kind K>
void halved_panel(const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows, float* tile,
                  Ahead ahead) {
  if (rows == 1) return halved_kernel<K, 1>(x, ldx, w, k, tile, ahead);
  if (rows == 2) return halved_kernel<K, 2>(x, ldx, w, k, tile, ahead);
  if (rows == 3) return halved_kernel<K, 3>(x, ldx, w, k, tile, ahead);
  halved_kernel<K, 4>(x, ldx, w, k, tile, ahead);
}
#endif

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
