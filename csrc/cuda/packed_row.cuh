// Products of one row with weights that are kept in e4m3 or in integers of 4 bits, for decode_step.cu, which
// defines BITS and GROUPED.
//
// As in one_row.cuh a weight row lies on the eight rows of an instruction's left side, and its sum is the sum
// of a diagonal: lane (g, t) multiplies the weights that it has loaded by x at the same channels, and which
// channels those are is free. So weights are read as they lie in memory, 16 bytes a lane.
//
// Integers: 128 + q is exact in bfloat16. Lanes 4 g ... 4 g + 3 have a block of 128 channels; its zero comes
// off with the sum of x, which is one more row of the product, of ones. The sum of a group is float32 when it
// meets its scale.
//
// e4m3 becomes bfloat16 by its bits, which makes it smaller by 2^-120 (numbers without an exponent, too); x
// is 2^80 times as large, and the row's scale 2^40 times.
#pragma once

constexpr int CHUNK = 4096 / BITS;  // channels of which a lane reads 16 bytes: 1024, or 512

// Where the channels c to c + 3 of x lie, c a multiple of 4. ``ldmatrix`` reads a block's 16 bytes and the
// next one's in other banks; of e4m3 a lane has 16 channels, and a half of all lanes' lies together.
__device__ __forceinline__ u32 place_of(int c) {
  if (BITS == 16) return c * 2;
  if (BITS == 4) return c * 2 + c / 128 * 16;
  return c / 512 * 1024 + c % 16 / 8 * 512 + c % 512 / 16 * 16 + c % 8 * 2;
}
constexpr int X_PAD = BITS == 4 ? 16 : 0;  // bytes behind 128 channels

// Puts four channels of x, as ``Plain``.
struct Put {
  __device__ __forceinline__ static void put(u32 to, int c, float x0, float x1, float x2, float x3) {
    constexpr float LARGER = 1.2089258196146292e24f;  // 2^80
    if (BITS == 8)  // in the order in which a word's bytes come out of it
      sts64(to + place_of(c), pack2(x0 * LARGER, x2 * LARGER), pack2(x1 * LARGER, x3 * LARGER));
    else
      sts64(to + place_of(c), pack2(x0, x1), pack2(x2, x3));
  }
};

__device__ __forceinline__ u32 lds32(u32 addr) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ float half2f(u32 x) {  // the float16 in the lower half
  float r;
  asm("{\n.reg .b16 h, u;\nmov.b32 {h, u}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(r) : "r"(x));
  return r;
}

// Sums of ROWS rows. GATED: the first half are gates; a pair is one of them with one of the others.
template <int ROWS, bool GATED>
struct PackedDots {
  static constexpr int PAIRS = (ROWS + 1) / 2, PER = BITS == 4 ? 128 / GROUPED : 1, STEPS = 8 / PER;
  static constexpr bool ODD = ROWS % 2;  // the last pair has a row alone
  float y[ROWS];        // pair by pair; of the lanes of the diagonal
  float sum[PAIRS][2][4];  // e4m3, in two chains

  __device__ __forceinline__ PackedDots() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) y[i] = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.f;
  }
  __device__ __forceinline__ static constexpr int low(int pair) { return GATED ? pair : pair * 2; }
  __device__ __forceinline__ static constexpr int high(int pair) {
    return GATED ? PAIRS + pair : pair * 2 + 1;
  }

  // Adds a chunk. ``at(i)``: where row i's is; ``constants(i)``: and its constants; x: the chunk's.
  template <class At, class Constants>
  __device__ __forceinline__ void add(u32 x, int lane, At&& at, Constants&& constants) {
    if (BITS == 4) add_integers(x, lane, at, constants);
    else add_e4m3(x, lane, at);
  }

  // Two integers of a word, 128 more than they are.
  __device__ __forceinline__ static u32 two(u32 word, int p) {
    return (word >> (4 * p) & 0x000f000fu) | 0x43004300u;
  }

  template <class At, class Constants>
  __device__ __forceinline__ void add_integers(u32 x, int lane, At&& at, Constants&& constants) {
    constexpr u32 ONES = 0x3f803f80u;
    u32 b[4][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) ldmatrix(b[w], x + lane % 8 * (256 + X_PAD) + w * 64 + lane / 8 * 16);
    uint4 w[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) w[i] = lds128(at(i) + lane * 16);
    const bool odd = lane & 4;
#pragma unroll
    for (int group = 0; group < PER; ++group) {
      // Products that wait for each other lie far apart: steps go to two chains in turn, pair by pair.
      float d[PAIRS][2][4] = {}, all[2][4] = {};  // all: the sums of x
#pragma unroll
      for (int step = group * STEPS; step < (group + 1) * STEPS; ++step) {
        const int p = step % 2 * 2;
        const u32 b0 = b[step / 2][p], b1 = b[step / 2][p + 1];
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
          const bool alone = ODD && pair == PAIRS - 1;  // it has the sums of x beside it
          const u32 lower = word_of(w[alone ? ROWS - 1 : low(pair)], step / 2),
                    upper = alone ? 0 : word_of(w[high(pair)], step / 2);
          mma(d[pair][step % 2], two(lower, p), alone ? ONES : two(upper, p), two(lower, p + 1),
              alone ? ONES : two(upper, p + 1), b0, b1);
        }
        if (!ODD) mma(all[step % 2], 0, ONES, 0, ONES, b0, b1);
      }
      auto both = [&](const float(&x)[2][4], int half) {
        return odd ? x[0][half * 2 + 1] + x[1][half * 2 + 1] : x[0][half * 2] + x[1][half * 2];
      };
      const float of_x = both(ODD ? d[PAIRS - 1] : all, 1);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {  // pair by pair
        const int from = ODD && row == ROWS - 1 ? row : row % 2 ? high(row / 2) : low(row / 2);
        const u32 c = lds32(constants(from) + (lane / 4 * PER + group) * 4);
        y[row] += (both(d[row / 2], row % 2) - hi2f(c) * of_x) * half2f(c);
      }
    }
  }

  // Four e4m3 numbers as bfloat16: bytes 0 and 2, 1 and 3.
  __device__ __forceinline__ static uint2 four(u32 word) {
    return {(word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u),
            (word >> 4 & 0x07f007f0u) | (word & 0x80008000u)};
  }

  template <class At>
  __device__ __forceinline__ void add_e4m3(u32 x, int lane, At&& at) {
    const uint4 b[2] = {lds128(x + lane * 16), lds128(x + 512 + lane * 16)};
    uint4 w[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) w[i] = lds128(at(i) + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const bool alone = ODD && pair == PAIRS - 1;
        const uint2 lower = four(word_of(w[alone ? ROWS - 1 : low(pair)], i)),
                    upper = alone ? uint2{0, 0} : four(word_of(w[high(pair)], i));
        mma(sum[pair][i % 2], lower.x, upper.x, lower.y, upper.y, word_of(b[i / 2], i % 2 * 2),
            word_of(b[i / 2], i % 2 * 2 + 1));
      }
  }

  // of[i]: the dot product of row 4 i + lane / 8, pair by pair.
  __device__ __forceinline__ void total(int lane, float (&of)[(ROWS + 3) / 4]) {
    const int from = lane % 8 * 4 + lane % 8 / 2;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float mine = y[row];
      if (BITS == 8) {
        const int e = row % 2 * 2;
        const float(&of_pair)[2][4] = sum[row / 2];
        mine = lane & 4 ? of_pair[0][e + 1] + of_pair[1][e + 1] : of_pair[0][e] + of_pair[1][e];
      }
      const float z = __shfl_sync(~0u, mine, from);
      if (row % 4 == 0 || lane / 8 == row % 4) of[row / 4] = z;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int i = 0; i < (ROWS + 3) / 4; ++i) of[i] += __shfl_xor_sync(~0u, of[i], d);
  }
};
