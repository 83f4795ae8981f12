// Linear layers of prompts: out[m, n] = epilogue(x[m, k] w[n, k]^T).
//
// Tokens are the wide side (M) of the tensor-core instruction, so a thread holds columns of two tokens: what an epilogue sums over
// a row lies in four lanes side by side, and what it pairs (gate and up, the halves of a rotation) in one. The tensor map orders
// every 32 rows of the weights such that eight columns side by side come to one thread, which writes them as 16 bytes.
//
// A block stays and takes every so manieth tile. One thread feeds the ring; two groups of warps multiply 64 tokens each with 256
// rows of the weights. Two blocks, a cluster, work on the same weights; each fetches a half for both.
//
// ADD and PARTS: an add into the residual and an RMSNorm between two linear layers, as in batch_gemm.cu.
// HEADS: the layer is q, k and v. The RMSNorm of each head, the rotation, and the way of k and v to their pages are done here too.
#include "wgmma.cuh"

#ifndef EPILOGUE  // 0: as it is; 1: add to the residual, times a norm's weight; 2: silu(gate) * up; 4: gelu_tanh(gate) * up; 5: heads
#define EPILOGUE 0
#endif
#ifndef PARTS  // of the sums of a row's squares that the kernel before left, by whose rms rows are divided; 0: by nothing
#define PARTS 0
#endif
#ifndef HD  // HEADS: of q, k and v, 64 or 128
#define HD 128
#endif
#ifndef CLUSTER  // 1 or 2 blocks
#define CLUSTER 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BAND  // tiles of tokens that are worked on together
#define BAND 8
#endif

constexpr bool ADD = EPILOGUE == 1, GELU = EPILOGUE == 4, GATED = EPILOGUE == 2 || GELU, HEADS = EPILOGUE == 5;
constexpr int BM = 128, BN = 256, BK = 64, BOX = 128;  // tokens and weight rows of a tile; columns of a stage; weight rows of a copy
constexpr int X_BYTES = BM * BK * 2, BOX_BYTES = BOX * BK * 2, STAGE_BYTES = X_BYTES + 2 * BOX_BYTES;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;  // the last group loads, and gives up its registers
constexpr int COLS = GATED ? BN / 2 : BN;  // of the result, in a tile
constexpr int BLOCKS = BN / 32;            // of a thread's columns: eight of each 32
constexpr int MINE = (PARTS + 3) / 4;      // parts that a lane adds up

struct Params {
  TensorMap w, x;
  const float* bias;         // [n] or null
  bf16* out;                 // [m, out_stride]
  bf16* residual;            // ADD: [m, n]
  const float* norm;         // ADD: [n]
  float* squares;            // ADD: [tiles][row_stride], what the columns of a tile add to a row's sum
  const float* row_squares;  // [PARTS][row_stride]
  const int* positions;      // HEADS: [m], as out_loc
  const int* out_loc;
  const float* cos_sin;      // [positions, HD]
  const float *q_norm, *k_norm;  // [HD] or null
  bf16 *k_pages, *v_pages;
  long long page_stride;
  int token_stride, head_stride, page_size, q_heads, kv_heads, beside;  // beside: k and v are wanted in `out` too
  int m, n, k, out_stride, row_stride, tiles, row_tiles;  // row_tiles: of a cluster
  float eps, head_eps;
};

__device__ __forceinline__ void copy_w(u32 to, const TensorMap& map, u32 bar, int k, int row) {
  if (CLUSTER == 1)  // dims: k, then of a row's number: bit 0, bits 3 and 4, bits 1 and 2, the rest
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(row / 32) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(row / 32), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
}
__device__ __forceinline__ void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// A stage is free, as the first threads of a group tell every block that writes there.
__device__ __forceinline__ void release(u32 bar) {
  const u32 block = threadIdx.x % 128;
  if (block < CLUSTER)
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(block) : "memory");
}

// 128 tokens, from `row` on, and 256 weight rows. Tiles that are worked on at the same time share rows in the L2 cache.
struct Tile {
  int w, row;
  __device__ __forceinline__ Tile(const Params& p, int i) {
    const int band = i / (BAND * p.tiles), rows = min(BAND, p.row_tiles - band * BAND), j = i - band * BAND * p.tiles;
    w = j / rows, row = ((band * BAND + j % rows) * CLUSTER + blockIdx.x % CLUSTER) * BM;
  }
};

__device__ __forceinline__ void load_w(const Params& p, u32 stage, u32 bar, int k, const Tile& tile) {
#pragma unroll
  for (int box = 0; box < 2; ++box)
    if (CLUSTER == 1 || box == blockIdx.x % CLUSTER)
      copy_w(stage + X_BYTES + box * BOX_BYTES, p.w, bar, k, GATED ? box * p.n + tile.w * BOX : tile.w * BN + box * BOX);
}

__device__ __forceinline__ void load(const Params& p, u32 ring, u32 full, u32 empty) {
  const int steps = p.k / BK, total = p.tiles * p.row_tiles;
  const Tile one(p, blockIdx.x / CLUSTER);
  for (int i = 0; i < STAGES; ++i) {
    barrier_expect(full + i * 8, STAGE_BYTES);
    load_w(p, ring + i * STAGE_BYTES, full + i * 8, i * BK, one);
  }
  pdl_wait();
  pdl_launch();
  for (int i = 0; i < STAGES; ++i) copy_2d(ring + i * STAGE_BYTES, p.x, full + i * 8, i * BK, one.row);
  Slot<STAGES> slot;
  slot.parity = 1;
  for (int at = blockIdx.x / CLUSTER, i = STAGES; at < total; at += gridDim.x / CLUSTER, i = 0) {
    const Tile tile(p, at);
    for (; i < steps; ++i, slot.next()) {
      const u32 stage = ring + slot.stage * STAGE_BYTES, bar = full + slot.stage * 8;
      barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
      barrier_expect(bar, STAGE_BYTES);
      load_w(p, stage, bar, i * BK, tile);
      copy_2d(stage, p.x, bar, i * BK, tile.row);
    }
  }
}

// Of the sums of a thread: number i of the eight columns side by side in block j of 32, of its token r.
__device__ constexpr int place(int j, int i, int r) { return (4 * j + i / 2) * 4 + 2 * r + (i & 1); }
__device__ __forceinline__ void read8(float (&v)[8], const float* from) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void write8(bf16* to, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}
__device__ __forceinline__ float sum4(float x) {  // of the lanes that share a token
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The two tokens of a thread, and what they are multiplied by.
struct Rows {
  int at[2];
  bool here[2];
  float parts[2][MINE ? MINE : 1], scale[2];
  __device__ __forceinline__ Rows(const Params& p, const Tile& tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      at[r] = tile.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r * 8, here[r] = at[r] < p.m;
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        const int part = i * 4 + threadIdx.x % 4;
        parts[r][i] = here[r] && part < PARTS ? __ldcg(p.row_squares + (long long)part * p.row_stride + at[r]) : 0.f;
      }
    }
  }
  __device__ __forceinline__ void find_scale(const Params& p) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < MINE; ++i) sum += parts[r][i];
      scale[r] = PARTS ? rsqrtf(sum4(sum) / p.k + p.eps) : 1.f;
    }
  }
};

__device__ __forceinline__ void store(const Params& p, const float (&acc)[BN / 2], const Tile& tile, const Rows& rows) {
  const int n = tile.w * COLS + threadIdx.x % 4 * 8;
#pragma unroll
  for (int j = 0; j < COLS / 32; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        y[i] = acc[place(j, i, r)] * rows.scale[r];
        if (GATED) y[i] = gate<GELU>(y[i], acc[place(j + BLOCKS / 2, i, r)] * rows.scale[r]);
      }
      if (rows.here[r] && n + j * 32 < p.n) write8(p.out + (long long)rows.at[r] * p.out_stride + n + j * 32, y);
    }
}

struct Residual {
  uint4 old[2][BLOCKS];
  __device__ __forceinline__ Residual(const Params& p, const Tile& tile, const Rows& rows) {
    const int n = tile.w * BN + threadIdx.x % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j)
        old[r][j] = rows.here[r] && n + j * 32 < p.n ? __ldcg(reinterpret_cast<const uint4*>(p.residual + (long long)rows.at[r] * p.n + n + j * 32)) : uint4{};
  }
  // Adds to the residual, and leaves it times the norm's weight, and its squares' sums.
  __device__ __forceinline__ void add(const Params& p, const float (&acc)[BN / 2], const Tile& tile, const Rows& rows) const {
    const int n = tile.w * BN + threadIdx.x % 4 * 8;
    float squares[2] = {};
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      if (tile.w * BN + j * 32 >= p.n) break;
      float norm[8];
      read8(norm, p.norm + n + j * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 kept[4] = {old[r][j].x, old[r][j].y, old[r][j].z, old[r][j].w};
        u32 h[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          h[i] = pack2(acc[place(j, 2 * i, r)] * rows.scale[r] + lo2f(kept[i]), acc[place(j, 2 * i + 1, r)] * rows.scale[r] + hi2f(kept[i]));
          const float a = lo2f(h[i]), b = hi2f(h[i]);
          squares[r] += a * a + b * b;
          y[i] = pack2(a * norm[2 * i], b * norm[2 * i + 1]);
        }
        if (!rows.here[r]) continue;
        const long long to = (long long)rows.at[r] * p.n + n + j * 32;
        *reinterpret_cast<uint4*>(p.residual + to) = make_uint4(h[0], h[1], h[2], h[3]);
        *reinterpret_cast<uint4*>(p.out + to) = make_uint4(y[0], y[1], y[2], y[3]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] = sum4(squares[r]);
      if (threadIdx.x % 4 == 0 && rows.here[r]) p.squares[(long long)tile.w * p.row_stride + rows.at[r]] = squares[r];
    }
  }
};

struct Heads {
  static constexpr int COUNT = BN / HD, HALF = HD / 64;  // in a tile; blocks of 32 columns in half a head
  int position[2], loc[2];
  float cos[2][8], sin[2][8];
  __device__ __forceinline__ Heads(const Params& p, const Rows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(rows.at[r], p.m - 1);
      position[r] = __ldg(p.positions + row), loc[r] = __ldg(p.out_loc + row);
    }
  }
  // The angles of block j of each half.
  __device__ __forceinline__ void ask(const Params& p, const Tile& tile, int j) {
    if (tile.w * COUNT >= p.q_heads + p.kv_heads) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* from = p.cos_sin + (long long)position[r] * HD + j * 32 + threadIdx.x % 4 * 8;
      read8(cos[r], from);
      read8(sin[r], from + HD / 2);
    }
  }
  __device__ __forceinline__ void store(const Params& p, const float (&acc)[BN / 2], const Tile& tile, const Rows& rows) {
    const int first = tile.w * COUNT, t = threadIdx.x % 4;
    float factor[COUNT][2];
#pragma unroll
    for (int h = 0; h < COUNT; ++h) {
      const float* norm = first + h < p.q_heads ? p.q_norm : first + h < p.q_heads + p.kv_heads ? p.k_norm : nullptr;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[h][r] = rows.scale[r];
        if (!norm) continue;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < HD / 32; ++j)
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += acc[place(h * (HD / 32) + j, i, r)] * acc[place(h * (HD / 32) + j, i, r)];
        factor[h][r] *= rsqrtf(sum4(sum) * (rows.scale[r] * rows.scale[r] / HD) + p.head_eps);
      }
    }
    long long page[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) page[r] = loc[r] / p.page_size * p.page_stride + loc[r] % p.page_size * p.token_stride;
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
      if (j > 0) ask(p, tile, j);
      const int column = j * 32 + t * 8;
#pragma unroll
      for (int h = 0; h < COUNT; ++h) {
        const int head = first + h, kind = head < p.q_heads ? 0 : head < p.q_heads + p.kv_heads ? 1 : 2;
        if (head >= p.q_heads + 2 * p.kv_heads) break;
        const float* norm = kind == 0 ? p.q_norm : kind == 1 ? p.k_norm : nullptr;
        float na[8], nb[8];
        if (norm) read8(na, norm + column), read8(nb, norm + HD / 2 + column);
        bf16* pages = (kind == 1 ? p.k_pages : p.v_pages) + (head - p.q_heads - (kind == 2 ? p.kv_heads : 0)) * p.head_stride + column;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float a[8], b[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            a[i] = acc[place(h * (HD / 32) + j, i, r)] * factor[h][r], b[i] = acc[place(h * (HD / 32) + j + HALF, i, r)] * factor[h][r];
            if (norm) a[i] *= na[i], b[i] *= nb[i];
            if (kind < 2) {
              const float x = a[i] * cos[r][i] - b[i] * sin[r][i];
              b[i] = b[i] * cos[r][i] + a[i] * sin[r][i], a[i] = x;
            }
          }
          if (!rows.here[r]) continue;
          if (kind == 0 || p.beside) {
            bf16* to = p.out + (long long)rows.at[r] * p.out_stride + head * HD + column;
            write8(to, a), write8(to + HD / 2, b);
          }
          if (kind > 0) write8(pages + page[r], a), write8(pages + page[r] + HD / 2, b);
        }
      }
    }
  }
};

__device__ __forceinline__ void add_bias(const Params& p, float (&acc)[BN / 2], const Tile& tile, Rows& rows) {
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    if (tile.w * BN + j * 32 >= p.n) break;
    float bias[8];
    read8(bias, p.bias + tile.w * BN + j * 32 + threadIdx.x % 4 * 8);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[place(j, i, r)] = acc[place(j, i, r)] * rows.scale[r] + bias[i];
  }
  rows.scale[0] = rows.scale[1] = 1.f;
}

// acc = x w^T of 64 tokens. `late` runs while the last products do.
template <typename Late>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], int steps, u32 ring, u32 full, u32 empty, Slot<STAGES>& slot, const Late& late) {
  const int group = threadIdx.x / 128;
  u32 used = 0;  // the barrier of the stage before
  for (int i = 0; i < steps; ++i, slot.next()) {
    const u32 stage = ring + slot.stage * STAGE_BYTES;
    barrier_wait(full + slot.stage * 8, slot.parity);
    const u64 x = tile_at(stage + group * (64 * BK * 2)), w = tile_at(stage + X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 16; ++k) wgmma(acc, x + k * 2, w + k * 2);
    wgmma_commit();
    if (i > 0) {
      wgmma_wait<1>(acc);
      release(used);
    }
    used = empty + slot.stage * 8;
  }
  late();
  wgmma_wait<0>(acc);
  release(used);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_gemm(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 ring = (smem_addr(smem) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, CONSUMERS / 128 * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS) load(p, ring, full, empty);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    pdl_wait();
    Slot<STAGES> slot;
    for (int at = blockIdx.x / CLUSTER; at < p.tiles * p.row_tiles; at += gridDim.x / CLUSTER) {
      const Tile tile(p, at);
      Rows rows(p, tile);
      float acc[BN / 2] = {};
      if constexpr (ADD) {
        const Residual residual(p, tile, rows);
        multiply(acc, p.k / BK, ring, full, empty, slot, [] {});
        rows.find_scale(p);
        if (p.bias) add_bias(p, acc, tile, rows);
        residual.add(p, acc, tile, rows);
      } else if constexpr (HEADS) {
        Heads heads(p, rows);
        multiply(acc, p.k / BK, ring, full, empty, slot, [&] { heads.ask(p, tile, 0); });
        rows.find_scale(p);
        if (p.bias) add_bias(p, acc, tile, rows);
        heads.store(p, acc, tile, rows);
      } else {
        multiply(acc, p.k / BK, ring, full, empty, slot, [] {});
        rows.find_scale(p);
        if constexpr (!GATED)
          if (p.bias) add_bias(p, acc, tile, rows);
        store(p, acc, tile, rows);
      }
    }
  }
  if (CLUSTER > 1) {  // the other block may still write here, and tell that it is done
    __syncwarp();
    cluster_sync();
  }
}
