// What kernels for weights of 4 and 8 bits in groups share, whose includers define BITS, WHOLE and WIDTH: see
// integer_gemm.cu.
#pragma once

__device__ __forceinline__ u32 lds32(u32 addr) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ float lds32f(u32 addr) { return __uint_as_float(lds32(addr)); }
// The sum of two of bfloat16.
__device__ __forceinline__ float add2(u32 a) { return lo2f(a) + hi2f(a); }
// Data that other lanes and warps read too; `bytes` = 0 writes zeros instead.
__device__ __forceinline__ void cp_async_constants(u32 dst, const void* src, int bytes, u64 policy) {
  asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(dst), "l"(src),
               "n"(WIDTH), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void sts32(u32 addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}
// a - b, two of bfloat16.
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The float16 in the lower half.
__device__ __forceinline__ float half2f(u32 x) {
  float r;
  asm("{\n.reg .b16 h, u;\nmov.b32 {h, u}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(r) : "r"(x));
  return r;
}
// What a group's sum of x is multiplied by, to be taken off the products.
__device__ __forceinline__ float zero_of(u32 constants) {
  return WHOLE ? hi2f(constants) : half2f(constants >> 16) + (BITS == 4 ? 128.f : 0.f);
}

// Two weights of a word as bfloat16, those at place p. ``mask``: of the bits of two numbers.
constexpr u32 MASK = BITS == 4 ? 0x000f000fu : 0x007f007fu;
__device__ __forceinline__ u32 two(u32 word, int p, u32 mask) {
  if (BITS == 4) return (word >> (4 * p) & mask) | 0x43004300u;
  const u32 bytes = word >> (8 * p);  // of two's complement: the lower seven bits, less the eighth
  return sub2((bytes & mask) | 0x43004300u, (bytes & (mask + 0x00010001u)) | 0x43004300u);
}
