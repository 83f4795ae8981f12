// Products in integers on ARM, of 8 bits: the rest is as in fixed.h, and so is what comes out.
//
// A 14-bit integer of x is 128 times its upper half and its lower one, a byte each, and both are multiplied
// by the bytes of a dword of weights. With i8mm an instruction multiplies two channels by both halves of a
// row of x, 8 channels of k long; with dotprod alone it multiplies four channels by one half, 4 long. Weights
// of more than 7 bits are unsigned, which dotprod has no products for: there ``SHIFT`` is taken from them,
// and added again as a multiple of the row's sum.
//
// A packed row of x has for each 32 channels: 4 times 8 upper halves and 8 lower ones (i8mm), or 32 upper
// halves and 32 lower ones; of nibbles each 8 channels in the order in which masks take them out of a dword.
#pragma once

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool MATRICES = true;
#else
constexpr bool MATRICES = false;
#endif

constexpr int BYTE_ROWS = GROUP / 4;  // of a group: rows of dwords that hold bytes

// A block of rows' sums, ``COLUMNS`` vectors of channels at a time, so that both of each are in registers.
constexpr int columns(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

template <Kind K>
constexpr int SHIFT = !MATRICES && (bytes(K) || K == IQ4_NL) ? 128 : 0;

// 64 integers of x as halves, in place.
template <Kind K>
inline void split(int16_t* x) {
  const uint8x8_t order = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int group = 0; group < 2; group++, x += GROUP) {
    int8x8_t upper[4], lower[4];
    UNROLL for (int i = 0; i < 4; i++) {
      int16x8_t q = vld1q_s16(x + 8 * i);
      upper[i] = vshrn_n_s16(q, 7);
      lower[i] = vand_s8(vmovn_s16(q), vdup_n_s8(127));
      if (nibbles(K)) upper[i] = vtbl1_s8(upper[i], vreinterpret_s8_u8(order));
      if (nibbles(K)) lower[i] = vtbl1_s8(lower[i], vreinterpret_s8_u8(order));
    }
    int8_t* out = (int8_t*)x;
    UNROLL for (int i = 0; i < 4; i++) {
      vst1_s8(out + (MATRICES ? 16 : 8) * i, upper[i]);
      vst1_s8(out + (MATRICES ? 16 * i + 8 : GROUP + 8 * i), lower[i]);
    }
  }
}

// 4 values of k of 4 channels: of a row of dwords, which has them twice if it has nibbles.
template <Kind K>
INLINE uint8x16_t take_bytes(const uint8_t* w, int half) {
  uint8x16_t raw = vld1q_u8(w);
  if (bytes(K)) return raw;
  uint8x16_t q = half ? vshrq_n_u8(raw, 4) : vandq_u8(raw, vdupq_n_u8(15));
  return coded(K) ? vqtbl1q_u8(vld1q_u8(codes_of(K)), q) : q;
}

// Keeps the compiler from moving work of one step into another, for which it would spill sums.
template <int N>
INLINE void settle(int32x4_t (&sums)[N]) {
  UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+w"(sums[i]));
}

// The sums of one group: of the upper halves of x to the first COLUMNS of each row, of the lower to the rest.
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <Kind K, int MR, int COLUMNS>
INLINE void sum_halves(const int8_t* x, const uint8_t* w, int32x4_t (&sums)[MR][2 * COLUMNS]) {
  constexpr int64_t NEXT = bytes(K) ? ROW_BYTES : 0;  // from 4 values of k to those behind them
  int32x4_t acc[MR][2 * COLUMNS] = {};                // each: [2 channels][upper, lower]
#pragma GCC unroll 1
  for (int step = 0; step < BYTE_ROWS / 2; step++, x += 16, w += NEXT + ROW_BYTES) {
    UNROLL for (int j = 0; j < COLUMNS; j++) {
      uint32x4_t first = vreinterpretq_u32_u8(take_bytes<K>(w + 16 * j, 0));
      uint32x4_t next = vreinterpretq_u32_u8(take_bytes<K>(w + 16 * j + NEXT, 1));
      uint8x16_t low = vreinterpretq_u8_u32(vzip1q_u32(first, next));
      uint8x16_t high = vreinterpretq_u8_u32(vzip2q_u32(first, next));
      UNROLL for (int m = 0; m < MR; m++) {
        int8x16_t a = vld1q_s8(x + m * FIXED_X * 4);
        acc[m][2 * j] = vusmmlaq_s32(acc[m][2 * j], low, a);
        acc[m][2 * j + 1] = vusmmlaq_s32(acc[m][2 * j + 1], high, a);
      }
    }
    UNROLL for (int m = 0; m < MR; m++) settle(acc[m]);
  }
  UNROLL for (int m = 0; m < MR; m++)
    UNROLL for (int j = 0; j < COLUMNS; j++) {
      sums[m][j] = vuzp1q_s32(acc[m][2 * j], acc[m][2 * j + 1]);
      sums[m][COLUMNS + j] = vuzp2q_s32(acc[m][2 * j], acc[m][2 * j + 1]);
    }
}
#else
template <Kind K, int MR, int COLUMNS>
INLINE void sum_halves(const int8_t* x, const uint8_t* w, int32x4_t (&sums)[MR][2 * COLUMNS]) {
  UNROLL for (int m = 0; m < MR; m++)
    UNROLL for (int j = 0; j < 2 * COLUMNS; j++) sums[m][j] = vdupq_n_s32(0);
  constexpr int HALVES = bytes(K) ? 1 : 2, ROWS = group_rows(K);
#pragma GCC unroll 1
  for (int64_t row = 0; row < ROWS; row++, x += 4 * HALVES, w += ROW_BYTES) {
    UNROLL for (int half = 0; half < HALVES; half++) {
      int8x16_t b[COLUMNS];
      UNROLL for (int j = 0; j < COLUMNS; j++) {
        uint8x16_t q = take_bytes<K>(w + 16 * j, half);
        b[j] = vreinterpretq_s8_u8(SHIFT<K> != 0 ? veorq_u8(q, vdupq_n_u8(128)) : q);
      }
      UNROLL for (int m = 0; m < MR; m++) {
        const int8_t* at = x + m * FIXED_X * 4 + 4 * half;
        int8x16_t high = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)at));
        int8x16_t low = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t*)(at + GROUP)));
        UNROLL for (int j = 0; j < COLUMNS; j++) {
          sums[m][j] = vdotq_s32(sums[m][j], b[j], high);
          sums[m][COLUMNS + j] = vdotq_s32(sums[m][COLUMNS + j], b[j], low);
        }
      }
      UNROLL for (int m = 0; m < MR; m++) settle(sums[m]);
    }
  }
}
#endif

// As in fixed.h.
template <Kind K, int MR, int COLUMNS>
INLINE void sum_products(const int32_t* x, const int32_t* x_sums, const uint8_t* w, int32_t* sums,
                         Ahead& ahead) {
  constexpr int ZERO = SHIFT<K> - (symmetric(K) ? (int)zero_of(K) : 0);
  for (int row = 0; row < group_rows(K) * COLUMNS / NV; row++) fetch(ahead);
  int32x4_t halves[MR][2 * COLUMNS];
  sum_halves<K, MR, COLUMNS>((const int8_t*)x, w, halves);
  UNROLL for (int m = 0; m < MR; m++) {
    int32x4_t zero = vdupq_n_s32(ZERO * x_sums[m * FIXED_X]);
    UNROLL for (int j = 0; j < COLUMNS; j++) {
      int32x4_t sum = vaddq_s32(vshlq_n_s32(halves[m][j], 7), halves[m][COLUMNS + j]);
      vst1q_s32(sums + m * PANEL + j * LANES, vaddq_s32(sum, zero));
    }
  }
  asm volatile("" : : "r"(sums) : "memory");
}
