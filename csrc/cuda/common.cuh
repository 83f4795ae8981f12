// Helpers shared by the CUDA kernels. Compiled by NVRTC without any header, so bf16 is handled as raw 16-bit
// words.
#pragma once
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float bf2f(bf16 x) { return __uint_as_float(u32(x) << 16); }
__device__ __forceinline__ float lo2f(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float hi2f(u32 x) { return __uint_as_float(x & 0xffff0000u); }
// Two floats rounded to nearest even; lo goes to the low half.
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ bf16 f2bf(float x) { return bf16(pack2(x, 0.f)); }
// Of two of bf16: times two factors, and the sum of their squares.
__device__ __forceinline__ u32 mul2(u32 a, float lo, float hi) { return pack2(lo2f(a) * lo, hi2f(a) * hi); }
__device__ __forceinline__ float square2(u32 a) { return lo2f(a) * lo2f(a) + hi2f(a) * hi2f(a); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Four e4m3 numbers as float16, in order.
__device__ __forceinline__ void halves(u32 w, u32& lo, u32& hi) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(lo), "=r"(hi)
      : "r"(w));
}
// silu(x) * up, or gelu_tanh(x) * up: the gated activation of every kernel.
template <bool TANH>
__device__ __forceinline__ float gate(float x, float up) {
  const float u = TANH ? 1.595769122f * (x + 0.044715f * x * x * x) : x;
  return __fdividef(x, 1.f + exp2_fast(-1.442695041f * u)) * up;
}
__device__ __forceinline__ u32 smem_addr(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ uint4 lds128(u32 addr) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(addr)
               : "memory");
  return r;
}
__device__ __forceinline__ uint2 lds_two(u32 addr) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ void sts128(u32 addr, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Programmatic dependent launch: `pdl_wait` blocks until every earlier kernel of the stream has finished and
// its writes are visible; `pdl_launch` lets the next kernel's blocks start (they may do only work that needs
// no earlier result).
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// Have so many bytes brought to the L2 cache.
__device__ __forceinline__ void fetch_bytes(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// 16 bytes from global to shared memory; `bytes` = 0 writes zeros instead.
__device__ __forceinline__ void cp_async16(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ u64 policy_once() {  // weights are read once
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The same of weights, which leave the L2 cache before all else, so that norms, code and what kernels leave
// each other stay there.
__device__ __forceinline__ void cp_async_once(u32 dst, const void* src, u32 bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ u32 movmatrix(u32 x) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
// d[16x8] += a[16x16] * b[16x8]; lane (g = lane / 4, t = lane % 4) holds d rows g, g + 8, columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The copy engine, and barriers in shared memory that count arrivals and bytes (Hopper).
struct alignas(64) TensorMap { u64 opaque[16]; };
__device__ __forceinline__ void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared.b64 "
               "[%0], %1;" ::"r"(bar),
               "r"(count));
}
// What has been set up is seen by the copy engine and by other blocks of the cluster.
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred done;\nwaiting:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done "
               "bra passed;\nbra waiting;\npassed:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// Until COUNT threads of the block have come to this barrier of the hardware's; 0 is that of __syncthreads.
template <int COUNT>
__device__ __forceinline__ void meet_at(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
// This thread is there, and does not wait.
template <int COUNT>
__device__ __forceinline__ void arrive_at(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
// Until all threads of a cluster have arrived: what they wrote before is seen behind the wait. `aligned`: a
// warp's threads do so together.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Nothing that was written before is seen behind the wait.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_aligned() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait_aligned() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Between plain accesses and those of the copy engine: of all memory, and of the block's shared memory.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, int bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
               "%2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_2d(u32 to, const TensorMap& map, u32 bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
               "{%3, %4}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void copy_2d(u32 to, const TensorMap& map, u32 bar, int x, int y, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(&map), "r"(bar), "r"(x), "r"(y), "l"(policy) : "memory");
}
