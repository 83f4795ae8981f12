// Register-blocked products of activation rows with one weight panel: tile[m][32] (+)= x[m][k] *
// panel[k][32].
//
// A panel holds 32 output channels as rows of 32 dwords; a dword is 1 float32, 2 bfloat16, 4 int8 or 8 int4
// values that follow each other along k, zero-padded at the end. int8, int5 and int4 are counts from 0 on:
// their panels have, before each 32 k (8, 5 or 4 rows), 32 scales and 32 minima in float16. Q8_0, Q5_0 and
// Q4_0 have scales alone, for their minimum is half of the range below 0. Nibbles of IQ4_NL and E2M1, with
// scales alone, are places in a table. Of 5 bits (int5, Q5_0) each half of a dword has three values, and the
// bits left of the five rows of a group one more. Fixed ones (fixed.h; 2 int16 in a dword), before each 64 k
// (32 rows), 32 scales in bfloat16. Wide ones have 32 scales in float32 before as many k as ``span`` says:
// E4M3 bytes (exponent, sign, mantissa; of four channels first the former two k of each, then the latter),
// NF4, FP4 and NVFP4 places in a table of int16; NVFP4 has before each 64 k a row of dwords with four scales,
// for 16 k each, in 8 bits. INT16 is what the others become for many rows (fixed.h: widen). Every output
// element is one chain of fused multiply-adds in the order of k, whatever the number of rows: so results do
// not depend on the batch.
#pragma once

#include "program.h"
#include "simd.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_MR = LANES == 16 ? 12 : 2;
#else
constexpr int MAX_MR = LANES == 8 ? 3 : 1;
#endif

// Whether quantized weights are multiplied in integers: of 16 bits (fixed.h), or of 8 (bytes.h).
#if defined(__AVX2__)
#define INTEGER_PRODUCTS 1
#define BYTE_PRODUCTS 0
#elif defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_PRODUCTS 1
#define BYTE_PRODUCTS 1
#else
#define INTEGER_PRODUCTS 0
#define BYTE_PRODUCTS 0
#endif

// Whether a few rows are, too, where most numbers are of 16 bits (fixed.h: halved).
#if defined(__AVX512VNNI__)
#define HALF_PRODUCTS 1
#else
#define HALF_PRODUCTS 0
#endif

// Whether bfloat16 is multiplied by bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIR_PRODUCTS 1
#else
#define PAIR_PRODUCTS 0
#endif

constexpr int64_t ROW_BYTES = PANEL * 4;
constexpr int64_t GROUP = 32;              // channels of k with one scale and minimum
constexpr int64_t FIXED_GROUP = 64;        // channels of k with one scale
constexpr int64_t FIXED_HEAD = PANEL * 2;  // scales of a group
constexpr int64_t PREFETCH = 4096;  // bytes ahead of a single reader: best of 1 to 8 KiB on Cascade Lake and
                                    // Sapphire Rapids

constexpr bool affine(Kind kind) { return kind == INT8 || kind == INT5 || kind == INT4; }
constexpr bool coded(Kind kind) { return kind == IQ4_NL || kind == E2M1; }
constexpr bool symmetric(Kind kind) { return kind == Q8_0 || kind == Q5_0 || kind == Q4_0 || coded(kind); }
constexpr bool tabled(Kind kind) { return kind == NF4 || kind == FP4 || kind == NVFP4; }
constexpr bool deep(Kind kind) { return kind == NVFP4; }  // with scales for 16 k
constexpr bool wide(Kind kind) { return kind == E4M3 || kind == INT16 || tabled(kind); }
constexpr bool grouped(Kind kind) { return affine(kind) || symmetric(kind) || wide(kind); }
constexpr bool five_bits(Kind kind) { return kind == Q5_0 || kind == INT5; }
constexpr bool bytes(Kind kind) { return kind == INT8 || kind == Q8_0 || kind == E4M3; }
constexpr bool nibbles(Kind kind) { return grouped(kind) && !bytes(kind) && kind != INT16; }

// k values in a dword
constexpr int64_t per_dword(Kind kind) { return kind == F32 ? 1 : bytes(kind) ? 4 : nibbles(kind) ? 8 : 2; }

// Channels of k with constants before them, and bytes of these.
constexpr int64_t span(Kind kind) {
  if (kind == FIXED || kind == NF4 || kind == FP4) return FIXED_GROUP;
  return kind == E4M3 ? 128 : deep(kind) ? 256 : GROUP;
}
constexpr int64_t head_bytes(Kind kind) {
  return symmetric(kind) || kind == FIXED ? PANEL * 2 : PANEL * 4;
}
// What 0 is, of symmetric kinds.
constexpr float zero_of(Kind kind) {
  return kind == Q8_0 || kind == IQ4_NL ? 128 : kind == Q5_0 || kind == E2M1 ? 16 : 8;
}

// What nibbles of IQ4_NL mean (ggml's table), and of E2M1 (twice the numbers), ``zero_of`` more.
constexpr uint8_t IQ4_NL_CODES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                      129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t E2M1_CODES[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr const uint8_t* codes_of(Kind kind) { return kind == E2M1 ? E2M1_CODES : IQ4_NL_CODES; }
// Of NF4 (8191 times the numbers, rounded), FP4 (6144 times) and NVFP4 (twice).
constexpr int16_t NF4_TABLE[16] = {-8191, -5703, -4301, -3235, -2330, -1513, -746, 0,
                                   652,   1318,  2016,  2768,  3610,  4608,  5922, 8191};
constexpr int16_t FP4_TABLE[16] = {0, 32,  4096,  6144,  2048,  3072,  1024,  1536,
                                   0, -32, -4096, -6144, -2048, -3072, -1024, -1536};
constexpr int16_t NVFP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr const int16_t* table_of(Kind kind) {
  return kind == NF4 ? NF4_TABLE : kind == FP4 ? FP4_TABLE : NVFP4_TABLE;
}

// Channels of k whose products are added up before they are scaled, and their rows of dwords.
constexpr int64_t summed(Kind kind) { return deep(kind) ? 16 : kind == FIXED ? FIXED_GROUP : GROUP; }
constexpr int64_t group_rows(Kind kind) {
  return five_bits(kind) ? 5 : summed(kind) / per_dword(kind);
}
// Rows of dwords of k channels.
constexpr int64_t dword_rows(Kind kind, int64_t k) {
  if (deep(kind)) return (k + 63) / 64 * (4 * group_rows(kind) + 1);
  return (k + summed(kind) - 1) / summed(kind) * group_rows(kind);
}

// Bytes of the first k channels of a panel (k a multiple of 256, or the panel's whole k).
constexpr int64_t panel_bytes(Kind kind, int64_t k) {
  if (!grouped(kind) && kind != FIXED) return (k + per_dword(kind) - 1) / per_dword(kind) * ROW_BYTES;
  return (k + span(kind) - 1) / span(kind) * head_bytes(kind) + dword_rows(kind, k) * ROW_BYTES;
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Memory that is needed soon and is fetched while a product is computed, so that memory and arithmetic units
// work at the same time: ``pace`` bytes for each row of dwords that is read once by all rows of x, two cache
// lines at most.
struct Ahead {
  const uint8_t* at = nullptr;
  int32_t pace = 0;
};

constexpr int32_t pace_of(Kind kind) {
  return panel_bytes(kind, 256) / (grouped(kind) ? dword_rows(kind, 256) : 256 / per_dword(kind));
}

template <int LINES = 2>
INLINE void fetch(Ahead& ahead) {
  prefetch(ahead.at);
  if (LINES == 2) prefetch(ahead.at + 64);
  ahead.at += ahead.pace * LINES / 2;
}

// A weight reader turns one row of dwords into float vectors, one k after the other.
template <Kind K>
struct Reader;

template <>
struct Reader<F32> {
  static constexpr int PER = 1;
  INLINE void group(const uint8_t*) {}
  INLINE vf get(vi raw, int, int) const { return as_float(raw); }
};

template <>
struct Reader<BF16> {
  static constexpr int PER = 2;
  INLINE void group(const uint8_t*) {}
  INLINE vf get(vi raw, int i, int) const { return as_float(i ? raw & (int32_t)0xffff0000 : raw << 16); }
};

struct GroupReader {
  vf scale[NV], low[NV];
  INLINE void group(const uint8_t* head) {
    UNROLL for (int v = 0; v < NV; v++) {
      scale[v] = load_f16((const uint16_t*)head + v * LANES);
      low[v] = load_f16((const uint16_t*)head + PANEL + v * LANES);
    }
  }
};

template <>
struct Reader<INT8> : GroupReader {
  static constexpr int PER = 4;
  INLINE vf get(vi raw, int i, int v) const { return to_float(take_byte(raw, i)) * scale[v] + low[v]; }
};

template <>
struct Reader<INT4> : GroupReader {
  static constexpr int PER = 8;
  INLINE vf get(vi raw, int i, int v) const {
#if defined(__AVX512F__)
    const __m512 digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    vf q = (vf)_mm512_permutexvar_ps((__m512i)((vu)raw >> (4 * i)), digits);
#else
    vf q = to_float((vi)((vu)raw >> (4 * i)) & 15);
#endif
    return q * scale[v] + low[v];
  }
};

// Scales of a wide kind for a vector of channels: those of the head, and the ``i``-th in a row of dwords of
// scales for 16 k, which have no sign, five bits of exponent and three of mantissa.
INLINE vf head_scale(const uint8_t* head, int v) { return load((const float*)head + v * LANES); }
INLINE vf deep_scale(const uint8_t* scales, int i, int v) {
  return as_float(take_byte(load_int(scales + v * LANES * 4), i) << 20);
}

// What the integers that a wide kind is multiplied as are multiplied by, beside scales.
constexpr float unit_of(Kind kind) {
  return kind == E4M3 ? 1.0f / 16 : kind == NF4 ? 1.0f / 8191 : kind == FP4 ? 1.0f / 6144
         : kind == NVFP4 ? 0x1p103f : 1.0f;
}

// Value ``i`` of rows of dwords of a wide kind, of a vector of channels, before scales.
template <Kind K>
INLINE vf value_of(const uint8_t* rows, int i, int v) {
  if (K == E4M3) {
    vu b;
    for (int j = 0; j < LANES; j++)
      b[j] = rows[i / 4 * ROW_BYTES + (v * LANES + j) / 4 * 16 + i % 4 / 2 * 8 + j % 4 * 2 + i % 2];
    return as_float((vi)((b & 0xf0) << 19 | (b & 7) << 20 | (b & 8) << 28)) * 0x1p120f;
  }
  vi q = load_int(rows + i / 8 * ROW_BYTES + v * LANES * 4) >> (i % 8 * 4) & 15;
  for (int j = 0; j < LANES; j++) q[j] = table_of(K)[q[j]];
  return to_float(q) * unit_of(K);
}

template <int MR>
struct Tile {
  vf v[MR][NV];

  INLINE void load_from(const float* tile, bool first) {
    UNROLL for (int m = 0; m < MR; m++)
      UNROLL for (int j = 0; j < NV; j++) v[m][j] = first ? vf{} : load(tile + m * PANEL + j * LANES);
  }
  INLINE void store_to(float* tile) const {
    UNROLL for (int m = 0; m < MR; m++)
      UNROLL for (int j = 0; j < NV; j++) store(tile + m * PANEL + j * LANES, v[m][j]);
  }
};

// One row of dwords: PER steps of k. x points at the first k; rows are ldx apart.
template <Kind K, int MR>
INLINE void dword_row(Tile<MR>& acc, const Reader<K>& reader, const uint8_t* w, const float* x, int64_t ldx) {
  constexpr int PER = Reader<K>::PER;
  vi raw[NV];
  UNROLL for (int j = 0; j < NV; j++) raw[j] = load_int(w + j * LANES * 4);
  UNROLL for (int i = 0; i < PER; i++) {
    vf b[NV];
    UNROLL for (int j = 0; j < NV; j++) b[j] = reader.get(raw[j], i, j);
    UNROLL for (int m = 0; m < MR; m++) {
      // Three rows share a base pointer: [p], [p + ldx * 4], [p + ldx * 8] are addressing modes.
      const float* p = x + m / 3 * 3 * ldx;
      vf a = splat(p[m % 3 * ldx + i]);
      UNROLL for (int j = 0; j < NV; j++) acc.v[m][j] += a * b[j];
    }
  }
}

template <Kind K, int MR>
INLINE void dword_row_tail(Tile<MR>& acc, const Reader<K>& reader, const uint8_t* w, const float* x,
                           int64_t ldx, int64_t k) {
  constexpr int PER = Reader<K>::PER;
  float part[MR][PER] = {};
  for (int m = 0; m < MR; m++)
    for (int64_t i = 0; i < k; i++) part[m][i] = x[m * ldx + i];
  dword_row<K, MR>(acc, reader, w, &part[0][0], PER);
}

template <Kind K, int MR>
__attribute__((noinline)) Ahead rows_kernel(const float* x, int64_t ldx, const uint8_t* w, int64_t k,
                                            float* tile, bool first, Ahead ahead) {
  constexpr int PER = Reader<K>::PER;
  Tile<MR> acc;
  Reader<K> reader;
  acc.load_from(tile, first);
  if constexpr (grouped(K)) {
    for (; k >= GROUP; k -= GROUP, x += GROUP) {
      reader.group(w);
      w += head_bytes(K);
      for (int r = 0; r < GROUP / PER; r++, w += ROW_BYTES) {
        fetch(ahead);
        dword_row<K, MR>(acc, reader, w, x + r * PER, ldx);
      }
    }
    if (k > 0) {
      reader.group(w);
      w += head_bytes(K);
    }
  }
  for (; k >= PER; k -= PER, x += PER, w += ROW_BYTES) {
    fetch(ahead);
    dword_row<K, MR>(acc, reader, w, x, ldx);
  }
  if (k > 0) dword_row_tail<K, MR>(acc, reader, w, x, ldx, k);
  acc.store_to(tile);
  return ahead;
}

#if PAIR_PRODUCTS
// To each sum the products of a pair of bfloat16.
INLINE vf add_pairs(vf sum, vi a, vi b) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  return (vf)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)a),
                         vreinterpretq_bf16_s32((int32x4_t)b));
#endif
}

// bfloat16 times bfloat16: x has rows of k / 2 dwords (pairs along k), zero-padded.
template <int MR>
__attribute__((noinline)) Ahead pairs_kernel(const float* x_, int64_t ldx, const uint8_t* w, int64_t k,
                                             float* tile, bool first, Ahead ahead) {
  const int32_t* x = (const int32_t*)x_;
  Tile<MR> acc;
  acc.load_from(tile, first);
  for (int64_t i = 0; i < (k + 1) / 2; i++, x++, w += ROW_BYTES) {
    fetch(ahead);
    vi b[NV];
    UNROLL for (int j = 0; j < NV; j++) b[j] = load_int(w + j * LANES * 4);
    UNROLL for (int m = 0; m < MR; m++) {
      const int32_t* p = x + m / 3 * 3 * ldx;
      vi a = p[m % 3 * ldx] - vi{};
      UNROLL for (int j = 0; j < NV; j++) acc.v[m][j] = add_pairs(acc.v[m][j], a, b[j]);
    }
  }
  acc.store_to(tile);
  return ahead;
}
#endif

// Returns ``ahead``, moved on.
using RowsKernel = Ahead (*)(const float*, int64_t, const uint8_t*, int64_t, float*, bool, Ahead);

template <Kind K, int MR>
struct Kernels {
  static RowsKernel pick(int mr) { return mr == MR ? rows_kernel<K, MR> : Kernels<K, MR - 1>::pick(mr); }
};
template <Kind K>
struct Kernels<K, 0> {
  static RowsKernel pick(int) { return nullptr; }
};

#if PAIR_PRODUCTS
template <int MR>
struct PairKernels {
  static RowsKernel pick(int mr) { return mr == MR ? pairs_kernel<MR> : PairKernels<MR - 1>::pick(mr); }
};
template <>
struct PairKernels<0> {
  static RowsKernel pick(int) { return nullptr; }
};
#endif

// All rows, in register blocks as even as possible. ldx counts floats (dwords for bfloat16 pairs), and so
// does ROW, the way from a row to the next, if it is not ldx. What is ``ahead`` is shared out among the
// blocks.
template <RowsKernel (*PICK)(int), int MOST = MAX_MR, int64_t ROW = 0>
inline void rows_times_panel(const float* x, int64_t ldx, const uint8_t* w, int64_t k, int32_t rows,
                             float* tile, bool first, Ahead ahead = {}) {
  if (!ahead.at) ahead.at = w;
  if (rows <= MOST) return (void)PICK(rows)(x, ldx, w, k, tile, first, ahead);
  int32_t pace = ahead.pace, left = rows;  // 32 bits, for these divisions are quick
  for (int32_t m = 0; m < rows;) {
    int32_t parts = (left + MOST - 1) / MOST, mr = (left + parts - 1) / parts;
    ahead.pace = pace * mr / rows;
    ahead = PICK(mr)(x + m * (ROW ? ROW : ldx), ldx, w, k, tile + m * PANEL, first, ahead);
    m += mr, left -= mr;
  }
}
