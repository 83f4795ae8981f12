// out[m, n] = act(x[m, k] w[n, k]^T) for the rows of a decode batch: bound by reading the weights once.
//
// Weights are the wide side (M) of the tensor-core instruction and the batch the narrow one (N), so a batch of 16 wastes
// nothing. The blocks of a cluster share one output tile and split k; they add up their sums through each other's shared
// memory. One thread feeds the ring with the copy engine; the first stages of weights are requested before the wait for
// the previous kernel, and two blocks fit on a multiprocessor, so the memory stays busy across kernel boundaries.
// GATED: the tensor map interleaves 8 gate rows with the 8 up rows that belong to them.
#include "common.cuh"

#ifndef BM  // weight rows of a tile: 64 or 128
#define BM 128
#endif
#ifndef BN  // rows of x in a tile: 16, 32, 64 or 128
#define BN 64
#endif
#ifndef SPLIT  // blocks of a cluster
#define SPLIT 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef EPILOGUE  // 0: bf16; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

typedef unsigned long long u64;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int BK = 64;  // 128 bytes: one row of a swizzled tile
constexpr int W_BYTES = BM * BK * 2, X_BYTES = BN * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int GROUPS = BM / 64, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 32;
constexpr int WIDTH = BN < 64 ? 16 : 64, PARTS = BN / WIDTH, ACC = WIDTH / 2;  // instructions side by side
constexpr int PITCH = BM + 4;  // floats of a row of sums in shared memory
constexpr int COLS = GATED ? BM / 2 : BM, SHARE = BN / SPLIT;  // output columns of a tile; rows a block finishes

struct alignas(64) TensorMap { u64 opaque[16]; };
struct Params {
  TensorMap w, x;
  const float* bias;  // [n] or null
  void* out;          // [m, n]
  int m, n, k, row_tiles;
};

__device__ __forceinline__ void barrier_init(u32 bar, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred done;\nwaiting:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra passed;\nbra waiting;\npassed:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ u64 policy_once() {  // weights are read once
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_x(u32 to, const TensorMap& map, u32 bar, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(row) : "memory");
}
__device__ __forceinline__ void copy_w(u32 to, const TensorMap& map, u32 bar, int k, int tile, u64 policy) {
  if (GATED)  // dims: k, row in 8, gate or up, group of 8 rows
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(tile * (BM / 16)), "l"(policy) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(tile * BM), "l"(policy) : "memory");
}
// A tile with rows of 128 bytes, swizzled, k innermost; 8 rows are 1024 bytes.
__device__ __forceinline__ u64 tile_at(u32 addr) {
  return u64((addr & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ __forceinline__ void wgmma(float (&d)[8], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
               : D4(0), D4(4) : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[32], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
               : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28) : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait(float (&acc)[PARTS][ACC]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
#pragma unroll
    for (int j = 0; j < ACC; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");
}

__device__ __forceinline__ void cluster_sync() {
  if (SPLIT == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}
__device__ __forceinline__ float4 load_from(u32 addr, int rank) {
  float4 v;
  if (SPLIT == 1) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr) : "memory");
  } else {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  }
  return v;
}
__device__ __forceinline__ float4 sum_of_cluster(u32 addr) {
  float4 sum = load_from(addr, 0);
#pragma unroll
  for (int i = 1; i < SPLIT; ++i) {
    const float4 v = load_from(addr, i);
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
  }
  return sum;
}
__device__ __forceinline__ float gate(float x, float up) {
  const float u = EPILOGUE == 4 ? 1.595769122f * (x + 0.044715f * x * x * x) : x;
  return x / (1.f + exp2_fast(-1.442695041f * u)) * up;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) batch_gemm(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 ring = (smem_addr(smem) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
  const int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT / p.row_tiles, row0 = blockIdx.x / SPLIT % p.row_tiles * BN;
  const int chunks = p.k / BK, first = chunks * rank / SPLIT, count = chunks * (rank + 1) / SPLIT - first;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float acc[PARTS][ACC] = {};
  const int group = threadIdx.x / 128;  // of consumers; the last warp loads
  if (group == GROUPS) {
    if (threadIdx.x == CONSUMERS) {
      const u64 policy = policy_once();
      auto expect_w = [&](int i) {
        const int s = i % STAGES;
        barrier_expect(full + s * 8, STAGE_BYTES);
        copy_w(ring + s * STAGE_BYTES, p.w, full + s * 8, (first + i) * BK, tile, policy);
      };
      auto load_x = [&](int i) {
        const int s = i % STAGES;
        copy_x(ring + s * STAGE_BYTES + W_BYTES, p.x, full + s * 8, (first + i) * BK, row0);
      };
      const int ahead = min(STAGES, count);
      for (int i = 0; i < ahead; ++i) expect_w(i);
      pdl_wait();
      pdl_launch();
      for (int i = 0; i < ahead; ++i) load_x(i);
      for (int i = ahead; i < count; ++i) {
        barrier_wait(empty + i % STAGES * 8, (i / STAGES - 1) & 1);
        expect_w(i);
        load_x(i);
      }
    }
    __syncwarp();
  } else {
    for (int i = 0; i < count; ++i) {
      const int s = i % STAGES;
      barrier_wait(full + s * 8, (i / STAGES) & 1);
      const u64 w = tile_at(ring + s * STAGE_BYTES + group * (64 * BK * 2)), x = tile_at(ring + s * STAGE_BYTES + W_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < BK / 16; ++k)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) wgmma(acc[part], w + k * 2, x + part * (WIDTH * BK * 2 / 16) + k * 2);
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>(acc);
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + (i - 1) % STAGES * 8);
      }
    }
    wgmma_wait<0>(acc);
    pdl_wait();
  }
  __syncthreads();  // the ring is free

  if (group < GROUPS) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = group * 64 + threadIdx.x % 128 / 32 * 16 + g;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int j = 0; j < ACC; ++j) {
        const int col = part * WIDTH + j / 4 * 8 + t * 2 + (j & 1), at = col * PITCH + row + (j & 2 ? 8 : 0);
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(ring + at * 4), "f"(acc[part][j]) : "memory");
      }
  }
  cluster_sync();
  for (int e = threadIdx.x; e < SHARE * (COLS / 4); e += THREADS) {
    const int col = e % (COLS / 4) * 4, r = rank * SHARE + e / (COLS / 4), row = row0 + r, n = tile * COLS + col;
    if (row >= p.m || n >= p.n) continue;
    const u32 from = ring + (r * PITCH + (GATED ? col / 8 * 16 + col % 8 : col)) * 4;
    float4 y = sum_of_cluster(from);
    if (GATED) {
      const float4 up = sum_of_cluster(from + 32);
      y = {gate(y.x, up.x), gate(y.y, up.y), gate(y.z, up.z), gate(y.w, up.w)};
    } else if (p.bias) {
      const float4 b = *reinterpret_cast<const float4*>(p.bias + n);
      y.x += b.x; y.y += b.y; y.z += b.z; y.w += b.w;
    }
    const long long at = (long long)row * p.n + n;
    if (EPILOGUE == 3) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = y;
    } else {
      *reinterpret_cast<uint2*>(static_cast<bf16*>(p.out) + at) = {pack2(y.x, y.y), pack2(y.z, y.w)};
    }
  }
  if (SPLIT > 1) cluster_sync();  // others still read from this block
}
