// One product of a mixture of experts for prompts: the pairs of token and expert, sorted by expert, in blocks
// of one expert.
//
// Weights are the wide side (M) of the tensor-core instruction and the pairs of a block the narrow one (N),
// in steps of 16 or 32 up to 256, so no product is wasted on a whole tile of rows that are not there. A block
// of threads stays and takes every so manieth tile. One group of warps loads, the others multiply 64 weight
// rows each with all pairs. GATED: rows of x are gathered by token; the tensor map interleaves 8 gate rows
// with the 8 up rows that belong to them, so a thread has both; the result is in the pairs' order. Otherwise
// x is in that order and comes through the copy engine, and the result goes to the pair's own row.
//
// BITS: weights are integers in groups with a scale and a zero (``quant/integers.py``), of which every other
// step has 128 channels. Who multiplies makes them bfloat16 in registers, in which the instruction takes its
// wide side, too: less their zero, which is exact if it is a whole number, and times their scale, rounded,
// while the products of the step before are under way.
#include "wgmma.cuh"

#ifndef GATED
#define GATED 1
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef ROWS  // pairs of a block, at most
#define ROWS 256
#endif
#ifndef BITS  // of a weight: 4, or 0 for bfloat16
#define BITS 0
#endif
#ifndef GROUP  // channels with one scale: 32, 64 or 128
#define GROUP 128
#endif
#ifndef WHOLE  // 1: zeros are whole numbers, in bfloat16 as the products need them; 0: any, in float16
#define WHOLE 1
#endif
#ifndef WIDTH
#define WIDTH 4
#endif
#include "integers.cuh"

constexpr int BM = 128, BK = 64, BN = ROWS, STEP = 16, BOX = 32;  // BOX: rows of x in one copy
constexpr int EVERY = BITS ? 2 : 1, BLOCK = EVERY * BK;           // steps, and channels, of a load of weights
constexpr int W_ROW = BITS ? BLOCK / 8 * BITS : BK * 2, W_BYTES = BM * W_ROW;
constexpr int STAGE_BYTES = W_BYTES + BN * BK * 2;
constexpr int PER = BLOCK / GROUP;  // constants of a row of weights, of a load
constexpr int GROUPS = BM / 64, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
// Pairs that leave together; 16-byte pieces of the columns of a group of warps.
constexpr int PIECE = 64, CHUNKS = GATED ? 4 : 8;
// LINES: rows that a group of warps writes at a time.
constexpr int OUT_BYTES = PIECE * CHUNKS * 16, LINES = 128 / CHUNKS;
template <int N>
constexpr int TARGETS = GATED ? 1 : (N + LINES - 1) / LINES;

struct Params {
  TensorMap w, x;     // x: not GATED
  const bf16* rows;   // GATED: x [tokens, k]
  const int* order;   // [pairs]
  const int* blocks;  // [count, 3]: expert or -1, first and last + 1 place in the order
  bf16* out;          // [pairs, n]
  const u32* constants;
  int count, tiles, n, k, top_k;
};

__device__ __forceinline__ void copy_weights(u32 to, const TensorMap& map, u32 bar, int k, int row,
                                             int expert) {
  if (GATED)  // dims: k, row in 8, gate or up, group of 8 rows, expert
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%3, %4, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(row / 16), "r"(expert) : "memory");
  else
    copy_2d(to, map, bar, k, row);
}
// When what this thread has asked for is there, it has come to the barrier.
__device__ __forceinline__ void arrive_with_copies(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 to, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b)
               : "memory");
}

// The tiles of this block of threads. Those of a block of pairs follow each other, so its rows of x and its
// expert stay in the L2 cache.
struct Tile {
  int at, expert, first, rows, w;
  __device__ __forceinline__ Tile(const Params& p, int i) : at(i) {
    const bool here = i < p.count * p.tiles;
    const int* block = p.blocks + (here ? i / p.tiles * 3 : 0);
    expert = here ? block[0] : -1, first = block[1], rows = block[2] - first, w = i % p.tiles;
  }
  __device__ __forceinline__ Tile next(const Params& p) const { return Tile(p, at + gridDim.x); }
};

// Of the step i, which has none if another has brought them.
__device__ __forceinline__ int w_bytes(int i) { return i % EVERY ? 0 : W_BYTES; }
__device__ __forceinline__ void load_w(const Params& p, u32 stage, u32 bar, int i, const Tile& tile) {
  if (i % EVERY) return;
  const int row = (GATED ? 0 : tile.expert * p.n) + tile.w * BM;
  copy_weights(stage, p.w, bar, i / EVERY * (W_ROW / 2), row, tile.expert);
}

// By one thread. Weights are asked for while the kernel before runs: the blocks were there before that one.
__device__ __forceinline__ void load(const Params& p, u32 ring, u32 full, u32 empty) {
  const int steps = p.k / BK;
  auto boxes = [](const Tile& tile) { return (tile.rows + BOX - 1) / BOX; };
  auto bytes = [&](const Tile& tile, int i) { return w_bytes(i) + boxes(tile) * (BOX * BK * 2); };
  const Tile one(p, blockIdx.x);
  int ahead = one.expert < 0 ? 0 : min(STAGES, steps);
  for (int i = 0; i < ahead; ++i) {
    barrier_expect(full + i * 8, bytes(one, i));
    load_w(p, ring + i * STAGE_BYTES, full + i * 8, i, one);
  }
  pdl_wait();
  Slot<STAGES> slot;
  for (Tile tile = one; tile.expert >= 0; tile = tile.next(p))
    for (int i = 0; i < steps; ++i, slot.next()) {
      const u32 stage = ring + slot.stage * STAGE_BYTES, bar = full + slot.stage * 8;
      if (ahead > 0) {
        --ahead;
      } else {
        barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
        barrier_expect(bar, bytes(tile, i));
        load_w(p, stage, bar, i, tile);
      }
      for (int b = 0; b < boxes(tile); ++b)
        copy_2d(stage + W_BYTES + b * (BOX * BK * 2), p.x, bar, i * BK, tile.first + b * BOX);
    }
}

// By all loading threads: 8 take the 128 bytes of a row, swizzled, of each 16 rows.
__device__ __forceinline__ void load_gathered(const Params& p, u32 ring, u32 full, u32 empty, int thread) {
  const int row = thread / 8, chunk = thread % 8, steps = p.k / BK;
  const u32 to = ring + W_BYTES + row * (BK * 2) + ((chunk ^ (row & 7)) << 4);
  const bf16* from = p.rows + chunk * 8;
  Slot<STAGES> slot;
  for (Tile tile(p, blockIdx.x); tile.expert >= 0; tile = tile.next(p)) {
    const int parts = (tile.rows + STEP - 1) / STEP;
    u32 source[BN / STEP];
#pragma unroll
    for (int r = 0; r < BN / STEP; ++r)
      source[r] = p.order[tile.first + min(r * STEP + row, tile.rows - 1)] / p.top_k * p.k;
    for (int i = 0; i < steps; ++i, slot.next()) {
      barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
      if (thread == 0) {
        barrier_expect(full + slot.stage * 8, w_bytes(i));
        load_w(p, ring + slot.stage * STAGE_BYTES, full + slot.stage * 8, i, tile);
      }
      __syncwarp();
      const u32 stage = to + slot.stage * STAGE_BYTES;
#pragma unroll
      for (int r = 0; r < BN / STEP; ++r)
        if (r < parts) cp_async16(stage + r * (STEP * BK * 2), from + source[r] + i * BK, 16);
      arrive_with_copies(full + slot.stage * 8);
    }
  }
}

// A group of warps brings its columns of the tile to memory, PIECE pairs at a time, transposed through shared
// memory. `odd`: which of two buffers at `out` is next.
template <int N>
__device__ __forceinline__ void store(const Params& p, const Tile& tile, const float (&acc)[N / 2],
                                      const int (&target)[TARGETS<N>], u32 out, u32& odd) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4,
            thread = threadIdx.x % 128;
  const int chunk = thread % CHUNKS;
  bf16* to = p.out + (tile.w * GROUPS + group) * (CHUNKS * 8) + chunk * 8;
  auto at = [&](int row, int chunk) {
    return row * (CHUNKS * 16) + ((chunk ^ (GATED ? row >> 1 & 3 : row & 7)) << 4);
  };
#pragma unroll
  for (int first = 0; first < N; first += PIECE, odd ^= 1) {
    if (first >= tile.rows) break;
    const u32 buffer = out + odd * OUT_BYTES;
#pragma unroll
    for (int j = first / 8; j < min(first + PIECE, N) / 8; j += GATED ? 2 : 1) {
      const float* d = acc + j * 4;
      const int row = j * 8 - first + lane % 8;
      if (GATED)
        stmatrix_trans(buffer + at(row + (lane & 8), warp),
                       pack2(gate<GELU>(d[0], d[2]), gate<GELU>(d[1], d[3])),
                       pack2(gate<GELU>(d[4], d[6]), gate<GELU>(d[5], d[7])));
      else
        stmatrix_trans(buffer + at(row, warp * 2 + (lane >> 3 & 1)), pack2(d[0], d[1]), pack2(d[2], d[3]));
    }
    meet_at<128>(group + 1);
#pragma unroll
    for (int i = 0; i < PIECE / LINES; ++i) {
      const uint4 v = lds128(buffer + at(thread / CHUNKS + i * LINES, chunk));
      const int row = first + thread / CHUNKS + i * LINES;
      if (row < tile.rows)
        *reinterpret_cast<uint4*>(to + (long long)(GATED ? tile.first + row : target[first / LINES + i]) *
                                           p.n) = v;
    }
  }
}

#if BITS
// Two of bfloat16 times two.
__device__ __forceinline__ u32 times2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// The weights of a thread, those of the rows g and g + 8 of its warp.
struct Weights {
  u32 made[EVERY][BK / 16][4];  // as the instruction takes them
  u32 zeros[2][PER], scales[2][PER], coming[2][PER];
  uint4 words[2];
  const u32* constants;
  u32 from;
  int rows, blocks;

  __device__ __forceinline__ Weights(const Params& p, const Tile& tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = warp * 16 + g;
    blocks = (p.k + BLOCK - 1) / BLOCK;
    from = row * W_ROW + ((t ^ (row >> 1 & 3)) << 4);
    rows = (GATED ? p.n : 8) * blocks * PER;  // to the other one's constants
    constants = p.constants + ((long long)tile.expert * (GATED ? 2 * p.n : p.n) +
                               (GATED ? tile.w * (BM / 2) + warp * 8 + g : tile.w * BM + row)) *
                                  (blocks * PER);
    fetch(0);
  }
  __device__ __forceinline__ void fetch(int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PER; ++j) coming[h][j] = constants[h * rows + min(block, blocks - 1) * PER + j];
  }
  // Words and constants of a block, which are there, and those of the next on their way.
  __device__ __forceinline__ void take(u32 stage, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      words[h] = lds128(stage + from + h * 8 * W_ROW);
#pragma unroll
      for (int j = 0; j < PER; ++j) {
        const u32 c = coming[h][j];
        const float scale = half2f(c), zero = half2f(c >> 16);
        zeros[h][j] = WHOLE ? __byte_perm(c, 0, 0x3232) : pack2(zero, zero);
        scales[h][j] = pack2(scale, scale);
      }
    }
    fetch(block + 1);
  }
  __device__ __forceinline__ void unpack(int part) {
#pragma unroll
    for (int k = 0; k < BK / 16; ++k) {
      const int word = part * 2 + k / 2, place = k % 2 * 2, j = (part * BK + k * 16) / GROUP;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 w = reinterpret_cast<const u32*>(&words[h])[word];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 number = two(w, place + i, MASK);
          made[part][k][h + 2 * i] =
              times2(sub2(WHOLE ? number : sub2(number, 0x43004300u), zeros[h][j]), scales[h][j]);
        }
      }
    }
  }
};
#endif

// The product of 64 weight rows and N pairs.
template <int N>
__device__ __forceinline__ void multiply(const Params& p, const Tile& tile, u32 ring, u32 full, u32 empty,
                                         Slot<STAGES>& slot, u32 out, u32& odd) {
  const int group = threadIdx.x / 128, steps = p.k / BK;
  const bool leads = threadIdx.x % 128 == 0;
  int target[TARGETS<N>];  // rows of the result that this thread writes to; asked for early
  if (!GATED) {
#pragma unroll
    for (int i = 0; i < TARGETS<N>; ++i)
      target[i] = p.order[tile.first + min(i * LINES + int(threadIdx.x) % 128 / CHUNKS, tile.rows - 1)];
  }
  float acc[N / 2] = {};
  u32 used = 0;  // the barrier of the stage before
#if BITS
  Weights weights(p, tile);
#endif
  for (int first = 0; first < steps; first += EVERY) {
#pragma unroll
    for (int part = 0; part < EVERY; ++part) {
      const int i = first + part;
      if (i == steps) break;
      const u32 stage = ring + slot.stage * STAGE_BYTES;
      barrier_wait(full + slot.stage * 8, slot.parity);
      // X was not brought by the copy engine.
      if (GATED) fence_shared();
      const u64 x = tile_at(stage + W_BYTES);
#if BITS
      if (part == 0) weights.take(stage, first / EVERY);
      weights.unpack(part);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 16; ++k) wgmma_left(acc, weights.made[part][k], x + k * 2);
#else
      const u64 w = tile_at(stage + group * (64 * BK * 2));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BK / 16; ++k) wgmma(acc, w + k * 2, x + k * 2);
#endif
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>(acc);
        if (leads) barrier_arrive(used);
      }
      used = empty + slot.stage * 8;
      slot.next();
    }
  }
  wgmma_wait<0>(acc);
  if (leads) barrier_arrive(used);
  store<N>(p, tile, acc, target, out, odd);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_gemm(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 ring = (smem_addr(smem) + 1023) & ~1023u, out = ring + STAGES * STAGE_BYTES,
            full = out + GROUPS * 2 * OUT_BYTES, empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, GATED ? 129 : 1);
      barrier_init(empty + s * 8, GROUPS);
    }
    barriers_visible();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;  // of consumers; the last one loads
  if (group == GROUPS) {
    fewer_registers<56>();
    const int thread = threadIdx.x - CONSUMERS;
    if (GATED) {
      pdl_wait();
      pdl_launch();
      load_gathered(p, ring, full, empty, thread);
    } else if (thread == 0) {
      load(p, ring, full, empty);
      pdl_launch();
    }
    return;
  }
  more_registers<224>();
  pdl_wait();
  Slot<STAGES> slot;
  u32 odd = 0;
  Tile tile(p, blockIdx.x);
  while (tile.expert >= 0) {
    const Tile next = tile.next(p);  // asked for early
#define CASE(I)                                                                                              \
  case I: multiply<I * STEP>(p, tile, ring, full, empty, slot, out + group * 2 * OUT_BYTES, odd); break;
    switch ((tile.rows + STEP - 1) / STEP) {  // few sizes of small products, which are rare
      case 1: CASE(2) case 3: CASE(4)
#if ROWS > 64
      case 5: CASE(6) case 7: CASE(8)
#endif
#if ROWS > 128
      case 9: CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#endif
    }
    tile = next;
  }
}
