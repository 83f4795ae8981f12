// What kernels for few rows by weights of 4 and 8 bits share, whose includers define BITS, GROUP, WHOLE,
// WIDTH and CODES: what the bits of a weight are. See integer_gemm.cu.
//
// Codes that are no integers have no zero. Places in a table (``quant/coded.py``) are looked up two at a time
// in shared memory. Bits of e2m1 (``quant/e2m1.py``) are masked where bfloat16 has them, 2^126 too small, for
// which x is kept 2^64 times too large; MXFP4's exponents are meant so, and NVFP4's rows have factors. Words
// of both have channels in other orders, and x is kept in these.
#pragma once
#include "integers.cuh"

constexpr int BLOCK = 128, PER = BLOCK / GROUP;  // channels that lie together; groups of these
constexpr bool ZEROS = CODES == 0, OF_ROWS = CODES == 2 && GROUP == 16;
constexpr int HELD = CODES == 2 ? PER / 4 : PER;         // words of constants of a row's block
constexpr int TABLE_BYTES = CODES == 1 ? 256 * 128 : 0;  // of pairs, each for every bank
constexpr float X_FACTOR = CODES == 2 ? 0x1p64f : 1.f, LIFT = 0x1p62f;

// The table of 16 numbers, by all threads of a block.
__device__ __forceinline__ void lay_out(const float* numbers, u32 table, int threads) {
  for (int e = threadIdx.x; e < 256; e += threads) {
    const u32 both = pack2(numbers[e % 16], numbers[e / 16]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sts128(table + e * 128 + (i + e) % 8 * 16, {both, both, both, both});
  }
}
// A word of a table that stays as it is.
__device__ __forceinline__ u32 look_up(u32 addr) {
  u32 r;
  asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(addr));
  return r;
}
__device__ __forceinline__ void sts64(u32 addr, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}
// A row's words of a block are four pieces, a lane's each, or a lane reads 8 bytes of each half of them.
// Where its piece stands, so that lanes read different banks, and its words:
__device__ __forceinline__ int place_of(int lane) { return ZEROS ? lane : lane ^ (lane / 4 & 2); }
__device__ __forceinline__ uint4 words_of(u32 block, int lane) {
  if (ZEROS) return lds128(block + lane * 16);
  const u32 at = block + lane / 4 * 64 + (lane % 4 * 8 ^ (lane / 4 & 2) * 16);
  const uint2 first = lds_two(at), last = lds_two(at ^ 32);
  return {first.x, first.y, last.x, last.y};
}
// 8 channels of x from channel ``at`` on, into a row whose pairs of channels stand in each block as a step
// takes them: lane t's pair of half step s at word 4 s + t.
__device__ __forceinline__ void keep_x(u32 row, int at, uint4 v) {
  constexpr float F = X_FACTOR;
  if (F != 1.f) v = {mul2(v.x, F, F), mul2(v.y, F, F), mul2(v.z, F, F), mul2(v.w, F, F)};
  const int j = at / 8 % 16;  // of a block
  if (CODES == 0) {
    sts128(row + at * 2, v);
  } else if (CODES == 1) {  // words 2 t and 2 t + 1 of 64 channels are lane t's
    const u32 to = row + at / BLOCK * (BLOCK * 2) + (j / 8 * 32 + j % 2 * 16 + j / 2 % 4) * 4;
    const int turn = threadIdx.x % 32 / 8;  // so that lanes store to different banks
    if (turn & 1) v = {v.y, v.x, v.w, v.z};
    if (turn & 2) v = {v.z, v.w, v.x, v.y};
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sts32(to + (i ^ turn) * 16, __uint_as_float(pairs[i]));
  } else {  // words 2 t and 2 t + 1 of eight have lane t's channels of 16
    const u32 to = row + at / BLOCK * (BLOCK * 2) + (j / 2 * 8 + j % 2 * 2) * 4;
    sts64(to, v.x, v.z);
    sts64(to + 16, v.y, v.w);
  }
}
// Two weights of half step s, of a row's words. ``table``: this lane's bank.
__device__ __forceinline__ u32 pair(const u32* words, int s, u32 mask, u32 table) {
  if (CODES == 0) return two(words[s * BITS / 16], s % (16 / BITS), mask);
  const u32 w = words[CODES == 1 ? s / 4 : s % 4];
  const int place = CODES == 1 ? s % 4 : s / 4;
  if (CODES == 1) return look_up(table + ((place ? w >> (8 * place - 7) : w << 7) & 0x7f80));
  constexpr u32 SIGNS = 0x80008000u, LOWER = 0x01c001c0u;
  if (place == 0) return w & (SIGNS | LOWER);
  if (place == 1) return (w << 3) & (SIGNS | LOWER);
  if (place == 2) return ((w << 2) & SIGNS) | ((w << 6) & LOWER);
  return ((w << 1) & SIGNS) | ((w >> 3) & LOWER);
}
// What the sum of a group is multiplied by.
__device__ __forceinline__ float scale_of(const u32 (&constants)[HELD], int group) {
  if (CODES == 0) return half2f(constants[group % HELD]);
  if (CODES == 1) return __uint_as_float(constants[group % HELD]);
  const u32 word = constants[group / 4];
  if (GROUP == 32) return __uint_as_float((word >> (8 * group) & 255) << 23);
  u32 lo, hi;
  halves(word, lo, hi);
  return half2f((group % 4 < 2 ? lo : hi) >> (group % 2 * 16));
}
// d = a b, as ``mma``.
__device__ __forceinline__ void mma_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
