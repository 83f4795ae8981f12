// Cycles that a multiprocessor takes for instructions of some kinds, alone and beside others: `counts` of each kind in
// a round, by all warps, or, if APART, by half of the warps each.
typedef unsigned u32;
#ifndef HMMA
#define HMMA 0
#endif
#ifndef HALVES
#define HALVES 0
#endif
#ifndef LOP
#define LOP 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#ifndef HIGH
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
#ifndef CHAINS
#define CHAINS 4
#endif
struct Params { u32* out; u32 given; };
__device__ __forceinline__ void hmma(float (&d)[4], u32 a, u32 b) {
  if (HALVES)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%4,%5}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%4,%5}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
}
extern "C" __global__ void __launch_bounds__(512, 1) pipes(const Params p) {
  __shared__ __align__(16) u32 words[512 * 4];
  for (int i = 0; i < 4; ++i) words[threadIdx.x * 4 + i] = i;
  __syncthreads();
  float d[8][4] = {}, f[8];
  u32 x[8], w = p.given + threadIdx.x;
  for (int i = 0; i < 8; ++i) x[i] = w * i, f[i] = i;
  u32 at = u32(__cvta_generic_to_shared(words)) + threadIdx.x * 16;
  const bool first = !APART || threadIdx.x / 32 / 4 % 2 == 0, second = !APART || !first;
  constexpr int SLOTS = HMMA ? HMMA : 8;
  u32 begin, end;
  __syncthreads();
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begin)::"memory");
#pragma unroll 1
  for (int round = 0; round < 200; ++round) {
    if (first) {
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        if (HMMA) hmma(d[s % CHAINS], w, p.given);
        if (!APART) {
#pragma unroll
          for (int i = 0; i < LOP; ++i) if (i % SLOTS == s) asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x[i % 8]) : "r"(w), "r"(p.given));
#pragma unroll
          for (int i = 0; i < SHIFT; ++i) if (i % SLOTS == s) asm volatile("shf.r.wrap.b32 %0, %0, %0, %1;" : "+r"(x[i % 8]) : "r"(w));
#pragma unroll
          for (int i = 0; i < HIGH; ++i) if (i % SLOTS == s) asm volatile("mul.hi.u32 %0, %0, %1;" : "+r"(x[i % 8]) : "r"(w));
#pragma unroll
          for (int i = 0; i < FFMA; ++i) if (i % SLOTS == s) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f[i % 8]) : "f"(d[7][0]));
#pragma unroll
          for (int i = 0; i < LOAD; ++i) if (i % SLOTS == s) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[i % 2 * 4]), "=r"(x[i % 2 * 4 + 1]), "=r"(x[i % 2 * 4 + 2]), "=r"(x[i % 2 * 4 + 3]) : "r"(at));
        }
      }
    }
    if (APART && second) {
#pragma unroll
      for (int i = 0; i < LOP; ++i) asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x[i % 8]) : "r"(w), "r"(p.given));
    }
  }
  asm volatile("mov.u32 %0, %%clock;" : "=r"(end)::"memory");
  u32 sum = 0;
  for (int i = 0; i < 8; ++i) sum ^= x[i] ^ __float_as_uint(f[i]) ^ __float_as_uint(d[i][0] + d[i][1] + d[i][2] + d[i][3]);
  if (sum == 12345u) p.out[1] = sum;
  __syncthreads();
  if (threadIdx.x % 32 == 0) p.out[16 + threadIdx.x / 32] = end - begin;
}
