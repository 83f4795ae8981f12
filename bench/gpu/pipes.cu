// Cycles that a multiprocessor takes for instructions of some kinds, alone and beside others: so many of each
// in a round, by all warps, or, if APART, products by half of the warps and logic by the others.
typedef unsigned u32;
#ifndef HMMA
#define HMMA 0
#endif
#ifndef HALVES  // 1: products of float16
#define HALVES 0
#endif
#ifndef LOP
#define LOP 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#ifndef HIGH  // upper halves of products
#define HIGH 0
#endif
#ifndef FFMA
#define FFMA 0
#endif
#ifndef LOAD
#define LOAD 0
#endif
#ifndef APART
#define APART 0
#endif
#ifndef CHAINS  // of sums of products
#define CHAINS 4
#endif

struct Params {
  u32* out;
  u32 given;
};

#define PRODUCT(KIND)                                                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, "  \
               "{%4,%5}, {%0,%1,%2,%3};"                                                                     \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
               : "r"(a), "r"(b))
__device__ __forceinline__ void product(float (&d)[4], u32 a, u32 b) {
  if (HALVES)
    PRODUCT("f16");
  else
    PRODUCT("bf16");
}
__device__ __forceinline__ void logic(u32& x, u32 a, u32 b) {
  asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x) : "r"(a), "r"(b));
}
__device__ __forceinline__ void shift(u32& x, u32 a) {
  asm volatile("shf.r.wrap.b32 %0, %0, %0, %1;" : "+r"(x) : "r"(a));
}
__device__ __forceinline__ void high(u32& x, u32 a) {
  asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(x) : "r"(a));
}
__device__ __forceinline__ void sum(float& f, float a) {
  asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f) : "f"(a));
}
__device__ __forceinline__ void load(u32* x, u32 at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
}

extern "C" __global__ void __launch_bounds__(512, 1) pipes(const Params p) {
  __shared__ __align__(16) u32 words[512 * 4];
  for (int i = 0; i < 4; ++i) words[threadIdx.x * 4 + i] = i;
  float d[8][4] = {}, f[8];
  u32 x[8], w = p.given + threadIdx.x;
  for (int i = 0; i < 8; ++i) x[i] = w * i, f[i] = i;
  const u32 at = u32(__cvta_generic_to_shared(words)) + threadIdx.x * 16;
  const bool multiplies = !APART || threadIdx.x / 128 % 2 == 0;
  constexpr int SLOTS = HMMA ? HMMA : 8;
  u32 begin, end;
  __syncthreads();
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begin)::"memory");
#pragma unroll 1
  for (int round = 0; round < 200; ++round) {
#pragma unroll
    for (int s = 0; s < (multiplies ? SLOTS : 0); ++s) {
      if (HMMA) product(d[s % CHAINS], w, p.given);
#pragma unroll
      for (int i = s; i < (APART ? 0 : LOP); i += SLOTS) logic(x[i % 8], w, p.given);
#pragma unroll
      for (int i = s; i < SHIFT; i += SLOTS) shift(x[i % 8], w);
#pragma unroll
      for (int i = s; i < HIGH; i += SLOTS) high(x[i % 8], w);
#pragma unroll
      for (int i = s; i < FFMA; i += SLOTS) sum(f[i % 8], d[7][0]);
#pragma unroll
      for (int i = s; i < LOAD; i += SLOTS) load(x + i % 2 * 4, at);
    }
#pragma unroll
    for (int i = 0; i < (multiplies ? 0 : LOP); ++i) logic(x[i % 8], w, p.given);
  }
  asm volatile("mov.u32 %0, %%clock;" : "=r"(end)::"memory");
  u32 all = 0;
  for (int i = 0; i < 8; ++i)
    all ^= x[i] ^ __float_as_uint(f[i]) ^ __float_as_uint(d[i][0] + d[i][1] + d[i][2] + d[i][3]);
  if (all == 12345u) p.out[1] = all;
  if (threadIdx.x % 32 == 0) p.out[16 + threadIdx.x / 32] = end - begin;
}
