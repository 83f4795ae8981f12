// Of the rows of a decode batch: add into the residual, RMSNorm, the router's logits, and the choice of
// experts.
//
// A cluster of 8 blocks takes 16 rows; each block has an eighth of the width, whose router weights wait in
// registers before the kernel before is done. Sums of squares and logits meet in shared memory across the
// cluster; each block then chooses for 2 rows, a warp each.
#include "common.cuh"

#ifndef WARPS  // a sixteenth of the experts
#define WARPS 8
#endif
#ifndef PIECES  // of 32 columns in an eighth of the width
#define PIECES 8
#endif
#ifndef ADD  // 1: x is added into the residual first
#define ADD 1
#endif
#ifndef NORM  // 1: RMSNorm first
#define NORM 1
#endif

constexpr int CLUSTER = 8, ROWS = 16, COLS = PIECES * 32, EXPERTS = WARPS * 16, THREADS = WARPS * 32;
constexpr int PER_ROW = THREADS / ROWS, VECTORS = COLS / 8 / PER_ROW, EACH = EXPERTS / 32;
constexpr int PITCH = COLS + (PIECES % 2 ? 0 : 32);  // an odd number of 64 bytes: no bank conflicts

struct Params {
  const bf16* x;        // [m, d]
  bf16* residual;       // [m, d]
  const float* norm;    // [d]
  const bf16* router;   // [experts, d]
  const int* live;      // [m], 0: a row that chooses no expert; or null
  bf16* normed;         // [m, d]
  float* probabilities; // [m, top_k]
  int* ids;             // [m, top_k]
  int* done;            // [places], to be zeroed
  int m, top_k, normalize, places;
  float eps;
};

__device__ __forceinline__ void store_to(const void* place, int rank, float v) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 "
               "[there], %2;\n}"
               ::"r"(smem_addr(place)), "r"(rank), "f"(v) : "memory");
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) { return pack2(lo2f(a) + lo2f(b), hi2f(a) + hi2f(b)); }
__device__ __forceinline__ u32 ordered(float v) {  // larger for larger v
  const u32 bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u32 most(u32 v) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * 1.442695041f); }

// The largest top_k of EACH logits a lane; equal ones go to the lower number.
__device__ __forceinline__ void choose(const Params& p, int row, float (&v)[EACH]) {
  const int lane = threadIdx.x % 32;
  float top = 0.f, total = 0.f, own = 0.f;
  int expert = 0;
  for (int j = 0; j < p.top_k; ++j) {
    float best = v[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < EACH; ++i)
      if (v[i] > best) best = v[i], at = i;
    const u32 key = ordered(best);
    const int winner = __ffs(__ballot_sync(~0u, key == most(key))) - 1;
    const float value = __shfl_sync(~0u, best, winner);
    if (j == 0) {
      top = value;
      if (!p.normalize) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) total += exponential(v[i] - top);
#pragma unroll
        for (int o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
      }
    }
    const float e = exponential(value - top);
    if (p.normalize) total += e;
    const int found = __shfl_sync(~0u, lane * EACH + at, winner);
    if (lane == j) own = e, expert = found;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (lane == winner && i == at) v[i] = __uint_as_float(0xff800000u);
  }
  if (lane < p.top_k) {
    const bool chooses = p.live == nullptr || p.live[row] != 0;
    p.ids[row * p.top_k + lane] = chooses ? expert : -1;
    p.probabilities[row * p.top_k + lane] = chooses ? own / total : 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) router(const Params p) {
  __shared__ __align__(16) bf16 y[ROWS][PITCH];
  __shared__ float squares[CLUSTER][ROWS];
  __shared__ __align__(16) float partial[CLUSTER][2][EXPERTS];
  pdl_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER, row0 = blockIdx.x / CLUSTER * ROWS;
  constexpr int D = COLS * CLUSTER;
  cluster_arrive_aligned();
  uint4 w[PIECES][2];
  const bf16* mine = p.router + (warp * 16 + g) * D + rank * COLS + t * 8;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    w[i][0] = *reinterpret_cast<const uint4*>(mine + i * 32);
    w[i][1] = *reinterpret_cast<const uint4*>(mine + 8 * D + i * 32);
  }
  const int r = threadIdx.x / PER_ROW, part = threadIdx.x % PER_ROW, row = row0 + r;
  const bool live = row < p.m;
  float4 scales[VECTORS][2];
#pragma unroll
  for (int i = 0; i < VECTORS && NORM; ++i) {
    const float4* from = reinterpret_cast<const float4*>(p.norm + rank * COLS + (i * PER_ROW + part) * 8);
    scales[i][0] = from[0];
    scales[i][1] = from[1];
  }
  cluster_wait_aligned();  // all blocks run
  pdl_wait();
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < p.places; i += THREADS) p.done[i] = 0;

  uint4 h[VECTORS];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const long long at = (long long)row * D + rank * COLS + (i * PER_ROW + part) * 8;
    h[i] = {};
    if (live) {
      h[i] = *reinterpret_cast<const uint4*>(p.x + at);
      if (ADD) {
        const uint4 b = *reinterpret_cast<const uint4*>(p.residual + at);
        h[i] = {add2(h[i].x, b.x), add2(h[i].y, b.y), add2(h[i].z, b.z), add2(h[i].w, b.w)};
        *reinterpret_cast<uint4*>(p.residual + at) = h[i];
      }
    }
    square += square2(h[i].x) + square2(h[i].y) + square2(h[i].z) + square2(h[i].w);
  }
  if (NORM) {
#pragma unroll
    for (int o = PER_ROW / 2; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
    for (int to = part; to < CLUSTER; to += PER_ROW) store_to(&squares[rank][r], to, square);
    cluster_arrive_aligned();
    cluster_wait_aligned();
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) total += squares[i][r];
    const float s = rsqrtf(total / D + p.eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = rank * COLS + (i * PER_ROW + part) * 8;
      const float4 a = scales[i][0], b = scales[i][1];
      h[i] = {mul2(h[i].x, s * a.x, s * a.y), mul2(h[i].y, s * a.z, s * a.w), mul2(h[i].z, s * b.x, s * b.y),
              mul2(h[i].w, s * b.z, s * b.w)};
      if (live) *reinterpret_cast<uint4*>(p.normed + (long long)row * D + column) = h[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) *reinterpret_cast<uint4*>(&y[r][(i * PER_ROW + part) * 8]) = h[i];
  __syncthreads();

  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 v = *reinterpret_cast<const uint4*>(&y[j * 8 + g][i * 32 + t * 8]);
      mma(acc[j], w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, v.x, v.y);
      mma(acc[j], w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, v.z, v.w);
    }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      store_to(&partial[rank][e & 1][warp * 16 + g + (e >= 2 ? 8 : 0)], j * 4 + t, acc[j][e]);
  cluster_arrive_aligned();
  cluster_wait_aligned();
  const int chosen = row0 + rank * 2 + warp;
  if (warp < 2 && chosen < p.m) {
    float v[EACH] = {};
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i)
#pragma unroll
      for (int k = 0; k < EACH; ++k) v[k] += partial[i][warp][lane * EACH + k];
    choose(p, chosen, v);
  }
}
