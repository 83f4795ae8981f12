// What ranks store into each other's inboxes (see all_reduce.cu): words that tell by themselves whether they
// have come. Stands behind common.cuh.
#pragma once

#define EMPTY 0x80008000u  // two negative zeros, which are sent as positive ones
#define PATIENCE 300000000000ull  // nanoseconds to wait for a peer before the kernel fails

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Called now and then while waiting. A peer that is gone ends this process too, so this is for one that is
// stuck.
struct Patience {
  u32 tries = 0;
  u64 begun = 0;
  __device__ __forceinline__ void check() {
    if (++tries & 0xffff) return;
    if (begun == 0) begun = nanoseconds();
    if (nanoseconds() - begun > PATIENCE) __trap();
  }
};

__device__ __forceinline__ void send(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ bool empty(uint4 v) {
  return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}
__device__ __forceinline__ u32 tidy(u32 x) { return x == EMPTY ? 0u : x; }
__device__ __forceinline__ uint4 tidy(uint4 v) {
  return make_uint4(tidy(v.x), tidy(v.y), tidy(v.z), tidy(v.w));
}
__device__ __forceinline__ uint4 nothing() { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

__device__ __forceinline__ void add(float* sum, uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    sum[2 * j] += lo2f(words[j]);
    sum[2 * j + 1] += hi2f(words[j]);
  }
}
__device__ __forceinline__ uint4 round8(const float* v) {
  return make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}
