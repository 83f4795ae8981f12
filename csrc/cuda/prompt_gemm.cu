// Linear layers of prompts: out[m, n] = epilogue(x[m, k] w[n, k]^T).
//
// Tokens are the wide side (M) of the tensor-core instruction, so a thread holds columns of two tokens: what
// an epilogue sums over a row lies in four lanes side by side, and what it pairs (gate and up, the halves of
// a rotation) in one. The tensor map orders every 32 rows of the weights such that eight columns side by side
// come to one thread, which writes them as 16 bytes.
//
// A block stays and takes every so manieth tile. One thread feeds the ring; two groups of warps multiply 64
// tokens each with 256 rows of the weights. Two blocks, a cluster, work on the same weights; each fetches a
// half for both.
//
// HEADS: the layer is q, k and v. The RMSNorm of each head, the rotation, and the way of k and v to their
// pages are done here too.
//
// TURN: the first columns are pairs, each of which is turned by an angle of its token.
//
// SEND: ranks whose inboxes get the results, too, for the sum that follows (see all_reduce.cu). Products of
// other tiles run meanwhile.
#include "wgmma.cuh"
#include "inbox.cuh"

#ifndef EPILOGUE  // 0: as it is; 2: silu(gate) * up; 4: gelu_tanh(gate) * up; 5: heads; 6: turn
#define EPILOGUE 0
#endif
#ifndef HD  // HEADS: of q, k and v, 64 or 128
#define HD 128
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef SEND  // 0: none
#define SEND 0
#endif

constexpr bool GELU = EPILOGUE == 4, GATED = EPILOGUE == 2 || GELU, HEADS = EPILOGUE == 5,
               TURN = EPILOGUE == 6;
// Tokens and weight rows of a tile; columns of a stage; weight rows of a copy.
constexpr int BM = 128, BN = 256, BK = 64, BOX = 128;
constexpr int X_BYTES = BM * BK * 2, BOX_BYTES = BOX * BK * 2, STAGE_BYTES = X_BYTES + 2 * BOX_BYTES;
constexpr int CLUSTER = 2;  // blocks
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;  // the last group loads, and gives up its registers
constexpr int COLS = GATED ? BN / 2 : BN;  // of the result, in a tile
constexpr int BLOCKS = BN / 32;            // of a thread's columns: eight of each 32
static_assert(!SEND || EPILOGUE == 0);

struct Params {
  TensorMap w, x;
  const float* bias;         // [n], gated [2 n], or null
  bf16* out;                 // [m, out_stride]
  const int* positions;      // HEADS: [m], as out_loc
  const int* out_loc;
  const float* cos_sin;      // [positions, HD]; TURN: [m, every], of each pair the cosine and the sine
  const float *q_norm, *k_norm;  // [HD] or null
  bf16 *k_pages, *v_pages;
  long long page_stride;
  // Beside: k and v are wanted in `out` too.
  int token_stride, head_stride, page_size, q_heads, kv_heads, beside;
  int m, n, k, out_stride, tiles, row_tiles;  // row_tiles: of a cluster
  int band;           // of a cluster's tiles of tokens: so many are worked on together
  int turned, every;  // TURN: columns, and how many of them have the angles of a token, a multiple of 8
  float eps;
#if SEND
  u32* inbox[8];     // of every rank
  const u32* state;  // sums so far
  long long half;    // words of one of the two inboxes
  int rank;
#endif
};

// 128 rows of weights, from the `w`th 32 on, to both blocks.
__device__ __forceinline__ void copy_w(u32 to, const TensorMap& map, u32 bar, int k, int w) {
  // dims: k, then of a row's number: bit 0, bits 3 and 4, bits 1 and 2, the rest
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster "
               "[%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;"
               ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(w),
               "h"((unsigned short)((1 << CLUSTER) - 1))
               : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// A stage is free, as the first threads of a group tell every block that writes there.
__device__ __forceinline__ void release(u32 bar) {
  const u32 block = threadIdx.x % 128;
  if (block < CLUSTER)
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, "
                 "%1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(block) : "memory");
}

// 128 tokens, from `row` on, and 256 weight rows. Tiles that are worked on at the same time share rows in the
// L2 cache.
struct Tile {
  int w, row;
  __device__ __forceinline__ Tile(const Params& p, int i) {
    const int band = i / (p.band * p.tiles), rows = min(p.band, p.row_tiles - band * p.band),
              j = i - band * p.band * p.tiles;
    w = j / rows, row = ((band * p.band + j % rows) * CLUSTER + blockIdx.x % CLUSTER) * BM;
  }
};

// Of the weights of a tile this block fetches a half, for both.
__device__ __forceinline__ void load(const Params& p, u32 ring, u32 full, u32 empty) {
  const int steps = p.k / BK, total = p.tiles * p.row_tiles, half = blockIdx.x % CLUSTER;
  const auto weights = [&](const Tile& tile) {
    return (GATED ? half * p.n + tile.w * BOX : tile.w * BN + half * BOX) / 32;
  };
  const u32 to = ring + X_BYTES + half * BOX_BYTES;
  const Tile one(p, blockIdx.x / CLUSTER);
  for (int i = 0; i < STAGES; ++i) {
    barrier_expect(full + i * 8, STAGE_BYTES);
    copy_w(to + i * STAGE_BYTES, p.w, full + i * 8, i * BK, weights(one));
  }
  pdl_wait();
  pdl_launch();
  for (int i = 0; i < STAGES; ++i) copy_2d(ring + i * STAGE_BYTES, p.x, full + i * 8, i * BK, one.row);
  Slot<STAGES> slot;
  slot.parity = 1;
  for (int at = blockIdx.x / CLUSTER, i = STAGES; at < total; at += gridDim.x / CLUSTER, i = 0) {
    const Tile tile(p, at);
    const int w = weights(tile);
    for (; i < steps; ++i, slot.next()) {
      const u32 bar = full + slot.stage * 8;
      barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
      barrier_expect(bar, STAGE_BYTES);
      copy_w(to + slot.stage * STAGE_BYTES, p.w, bar, i * BK, w);
      copy_2d(ring + slot.stage * STAGE_BYTES, p.x, bar, i * BK, tile.row);
    }
  }
}

// Of the sums of a thread: number i of the eight columns side by side in block j of 32, of its token r.
__device__ constexpr int place(int j, int i, int r) { return (4 * j + i / 2) * 4 + 2 * r + (i & 1); }
__device__ __forceinline__ void read8(float (&v)[8], const float* from) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)),
               b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ float sum4(float x) {  // of the lanes that share a token
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Finished sums of a tile, as bf16: of a thread's tokens `row` and `row` + 8 eight columns of every 32. What
// becomes of them is done in slices while the products of the next tile run.
constexpr int SLICES = 8;
struct Sums {
  u32 pair[2][BLOCKS][4];
  int row, w;
  __device__ __forceinline__ int token(int r) const { return row + r * 8; }
  // Two columns side by side.
  __device__ __forceinline__ float2 at(int r, int j, int i) const {
    return {lo2f(pair[r][j][i]), hi2f(pair[r][j][i])};
  }
};

struct Store {
  long long sent = 0;  // SEND: where this rank's rows begin in the inboxes, in words
  __device__ __forceinline__ void begin(const Params& p) {
#if SEND
    sent = (__ldcg(p.state) & 1) * p.half + (long long)p.rank * p.m * (p.n / 2);
#endif
  }
  template <int S>
  __device__ __forceinline__ void slice(const Params& p, const Sums& sums) {
    constexpr int J = GATED ? S / 2 : S;
    const int n = sums.w * COLS + J * 32 + threadIdx.x % 4 * 8;
    if (n >= p.n) return;
#pragma unroll
    for (int r = GATED ? S % 2 : 0; r < (GATED ? S % 2 + 1 : 2); ++r) {
      u32 y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = sums.pair[r][J][i];
        if (GATED) {
          const float2 x = sums.at(r, J, i), up = sums.at(r, (J + BLOCKS / 2) % BLOCKS, i);
          y[i] = pack2(gate<GELU>(x.x, up.x), gate<GELU>(x.y, up.y));
        }
      }
      if (TURN && n < p.turned) {
        float by[8];
        read8(by, p.cos_sin + (long long)min(sums.token(r), p.m - 1) * p.every + n % p.every);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = sums.at(r, J, i);
          y[i] = pack2(x.x * by[2 * i] - x.y * by[2 * i + 1], x.y * by[2 * i] + x.x * by[2 * i + 1]);
        }
      }
      if (sums.token(r) < p.m)
        *reinterpret_cast<uint4*>(p.out + (long long)sums.token(r) * p.out_stride + n) =
            make_uint4(y[0], y[1], y[2], y[3]);
#if SEND
      if (sums.token(r) >= p.m) continue;
      const long long to = sent + ((long long)sums.token(r) * p.n + n) / 2;
#pragma unroll
      for (int rank = 0; rank < SEND; ++rank)
        if (rank != p.rank)
          send(reinterpret_cast<uint4*>(p.inbox[rank] + to), tidy(make_uint4(y[0], y[1], y[2], y[3])));
#endif
    }
  }
};

struct Heads {
  static constexpr int COUNT = BN / HD, HALF = HD / 64;  // in a tile; blocks of 32 columns in half a head
  float factor[COUNT][2];
  int position[2], loc[2];
  __device__ __forceinline__ void begin(const Params& p) {}
  __device__ __forceinline__ static int kind(const Params& p, int head) {
    return head < p.q_heads ? 0 : head < p.q_heads + p.kv_heads ? 1 : 2;
  }
  __device__ __forceinline__ static const float* norm(const Params& p, int head) {
    const int which = kind(p, head);
    return which == 0 ? p.q_norm : which == 1 ? p.k_norm : nullptr;
  }
  template <int S>
  __device__ __forceinline__ void slice(const Params& p, const Sums& sums) {
    if (S == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = min(sums.token(r), p.m - 1);
        position[r] = __ldg(p.positions + token), loc[r] = __ldg(p.out_loc + token);
      }
    }
    if constexpr (S < COUNT) scale<S>(p, sums);
    else if constexpr (S < COUNT + 2 * HALF) rotate<(S - COUNT) / 2, (S - COUNT) % 2>(p, sums);
  }
  // What a head is multiplied by.
  template <int H>
  __device__ __forceinline__ void scale(const Params& p, const Sums& sums) {
    factor[H][0] = factor[H][1] = 1.f;
    if (!norm(p, sums.w * COUNT + H)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < HD / 32; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = sums.at(r, H * (HD / 32) + j, i);
          squares += v.x * v.x + v.y * v.y;
        }
      factor[H][r] = rsqrtf(sum4(squares) / HD + p.eps);
    }
  }
  // Block J of both halves of the heads of token R.
  template <int J, int R>
  __device__ __forceinline__ void rotate(const Params& p, const Sums& sums) {
    const int first = sums.w * COUNT, column = J * 32 + threadIdx.x % 4 * 8;
    const bool here = sums.token(R) < p.m;
    float cos[8], sin[8];
    if (kind(p, first) < 2) {
      const float* from = p.cos_sin + (long long)position[R] * HD + column;
      read8(cos, from), read8(sin, from + HD / 2);
    }
    const long long page = loc[R] / p.page_size * p.page_stride + loc[R] % p.page_size * p.token_stride;
#pragma unroll
    for (int h = 0; h < COUNT; ++h) {
      const int head = first + h, which = kind(p, head);
      if (head >= p.q_heads + 2 * p.kv_heads) break;
      const float* weight = norm(p, head);
      u32 y[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 a = sums.at(R, h * (HD / 32) + J, i), b = sums.at(R, h * (HD / 32) + J + HALF, i);
        if (weight) {
          const float2 wa = __ldg(reinterpret_cast<const float2*>(weight + column) + i),
                       wb = __ldg(reinterpret_cast<const float2*>(weight + HD / 2 + column) + i);
          a.x *= factor[h][R] * wa.x, a.y *= factor[h][R] * wa.y, b.x *= factor[h][R] * wb.x,
              b.y *= factor[h][R] * wb.y;
        }
        if (which < 2) {
          const float x = a.x * cos[2 * i] - b.x * sin[2 * i],
                      z = a.y * cos[2 * i + 1] - b.y * sin[2 * i + 1];
          b.x = b.x * cos[2 * i] + a.x * sin[2 * i], b.y = b.y * cos[2 * i + 1] + a.y * sin[2 * i + 1],
          a.x = x, a.y = z;
        }
        y[0][i] = pack2(a.x, a.y), y[1][i] = pack2(b.x, b.y);
      }
      if (!here) continue;
      const auto write = [&](bf16* to) {
        *reinterpret_cast<uint4*>(to) = make_uint4(y[0][0], y[0][1], y[0][2], y[0][3]);
        *reinterpret_cast<uint4*>(to + HD / 2) = make_uint4(y[1][0], y[1][1], y[1][2], y[1][3]);
      };
      if (which == 0 || p.beside) write(p.out + (long long)sums.token(R) * p.out_stride + head * HD + column);
      if (which == 1) write(p.k_pages + page + (head - p.q_heads) * p.head_stride + column);
      if (which == 2) write(p.v_pages + page + (head - p.q_heads - p.kv_heads) * p.head_stride + column);
    }
  }
};

template <bool>
struct Choice { using Epilogue = Store; };
template <>
struct Choice<true> { using Epilogue = Heads; };
using Epilogue = Choice<HEADS>::Epilogue;

__device__ __forceinline__ void add_bias(const Params& p, float (&acc)[BN / 2], const Sums& sums) {
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const bool up = GATED && j >= BLOCKS / 2;
    const int n = sums.w * COLS + (up ? j - BLOCKS / 2 : j) * 32;
    if (n >= p.n) continue;
    float bias[8];
    read8(bias, p.bias + (up ? p.n : 0) + n + threadIdx.x % 4 * 8);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[place(j, i, r)] += bias[i];
  }
}

// A group of warps multiplies its 64 tokens of tile after tile.
struct Group {
  u32 ring, full, empty, used = 0;  // used: the barrier of the stage before
  Slot<STAGES> slot;
  Sums sums;
  Epilogue epilogue;

  // The products of a stage; those of the stage before are done then. `between` runs beside them.
  template <bool FIRST, typename Between>
  __device__ __forceinline__ void step(float (&acc)[BN / 2], const Between& between) {
    const u32 stage = ring + slot.stage * STAGE_BYTES;
    barrier_wait(full + slot.stage * 8, slot.parity);
    const u64 x = tile_at(stage + threadIdx.x / 128 * (64 * BK * 2)), w = tile_at(stage + X_BYTES);
    wgmma_fence();
    if constexpr (FIRST) wgmma_first(acc, x, w);
    else wgmma(acc, x, w);
#pragma unroll
    for (int k = 1; k < BK / 16; ++k) wgmma(acc, x + k * 2, w + k * 2);
    wgmma_commit();
    if constexpr (!FIRST) {
      wgmma_wait<1>(acc);
      release(used);
    }
    between();
    used = empty + slot.stage * 8;
    slot.next();
  }
  template <int S = 0>
  __device__ __forceinline__ void first_steps(const Params& p, float (&acc)[BN / 2], bool behind) {
    step<S == 0>(acc, [&] { if (behind) epilogue.template slice<S>(p, sums); });
    if constexpr (S + 1 < SLICES) first_steps<S + 1>(p, acc, behind);
  }
  // `behind`: a tile was finished before, whose epilogue is still to be done.
  __device__ __forceinline__ void multiply(const Params& p, const Tile& tile, bool behind) {
    float acc[BN / 2];
    first_steps(p, acc, behind);
    for (int i = SLICES; i < p.k / BK; ++i) step<false>(acc, [] {});
    sums.w = tile.w, sums.row = tile.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    wgmma_wait<0>(acc);
    release(used);
    if (p.bias) add_bias(p, acc, sums);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums.pair[r][j][i] = pack2(acc[place(j, 2 * i, r)], acc[place(j, 2 * i + 1, r)]);
  }
  // What is left of the last tile.
  template <int S = 0>
  __device__ __forceinline__ void finish(const Params& p) {
    epilogue.template slice<S>(p, sums);
    if constexpr (S + 1 < SLICES) finish<S + 1>(p);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_gemm(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 ring = (smem_addr(smem) + 1023) & ~1023u, full = ring + STAGES * STAGE_BYTES,
            empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, CONSUMERS / 128 * CLUSTER);
    }
    barriers_visible();
  }
  cluster_sync();
  if (threadIdx.x >= CONSUMERS) {
    fewer_registers<HEADS ? 24 : 40>();
    if (threadIdx.x == CONSUMERS) load(p, ring, full, empty);
  } else {
    more_registers<HEADS ? 240 : 232>();
    pdl_wait();
    Group group{ring, full, empty};
    group.epilogue.begin(p);
    const int first = blockIdx.x / CLUSTER;
    for (int at = first; at < p.tiles * p.row_tiles; at += gridDim.x / CLUSTER)
      group.multiply(p, Tile(p, at), at != first);
    group.finish(p);
  }
  __syncwarp();
  cluster_sync();  // the other block may still write here, and tell that a stage is free
}
