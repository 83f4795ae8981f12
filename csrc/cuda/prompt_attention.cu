// Causal attention of prompt rows over the pages, on `wgmma`.
//
// A block takes a tile: some tokens of one row with all query heads of one KV head, 128 (token, head) rows, against every key up to
// them. One warp feeds the rings of keys and values with the copy engine, 16 tokens of a page at a time; two groups of warps
// multiply 64 rows each, the scores of the next keys behind the softmax of these (as FlashAttention 3, Shah et al., 2024).
#include "wgmma.cuh"

#ifndef HD  // 64 or 128
#define HD 128
#endif
#ifndef GROUP  // query heads of a KV head
#define GROUP 4
#endif
#ifndef STAGES
#define STAGES 3
#endif

constexpr int ROWS = 128, QUERIES = ROWS / GROUP, BN = 128;  // of a tile; its tokens; keys of a stage
constexpr int HALVES = HD / 64;                             // a row of shared memory has 64 columns
constexpr int Q_HALF = ROWS * 128, KV_HALF = BN * 128, KV_BYTES = HALVES * KV_HALF;
constexpr float NEVER = -1e30f;  // the score of a key that is not seen
constexpr int PIECE = 16, PIECES = BN / PIECE;  // tokens of a copy
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;  // the last group loads, and gives up its registers

struct Params {
  TensorMap q, k, v;     // dims of q: column, head, token; of k and v: column, token of a head of a page
  bf16* out;             // [T, Hq * HD]
  const int* page_table;
  const int4* tiles;     // slot, first token in q, its position, tokens; the longest first
  int table_stride, kv_heads, page_size;
  float scale;           // with log2(e)
};

__device__ __forceinline__ void copy_q(u32 to, const TensorMap& map, u32 bar, int column, int head, int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(column), "r"(head), "r"(token) : "memory");
}

// Shared memory: q, a ring of stages of keys and values, barriers.
struct Shared {
  u32 q, ring, q_full, k_full, v_full, empty;
  __device__ __forceinline__ Shared(u32 base) {
    q = (base + 1023) & ~1023u, ring = q + HALVES * Q_HALF, q_full = ring + STAGES * 2 * KV_BYTES;
    k_full = q_full + 8, v_full = k_full + STAGES * 8, empty = v_full + STAGES * 8;
  }
  __device__ __forceinline__ u32 k(int stage) const { return ring + stage * (2 * KV_BYTES); }
  __device__ __forceinline__ u32 v(int stage) const { return k(stage) + KV_BYTES; }
};

// Lanes copy side by side: each has its 16 tokens, its half of the columns, and keys or values. What lies behind `end` stays as it is.
__device__ __forceinline__ void load(const Params& p, const Shared& shared, const int4& tile, int head) {
  const int lane = threadIdx.x % 32, end = tile.z + tile.w, count = (end + BN - 1) / BN;
  const int piece = lane % PIECES, half = lane / PIECES % HALVES, which = lane / (PIECES * HALVES);
  const int* pages = p.page_table + (long long)tile.x * p.table_stride;
  const TensorMap& map = which ? p.v : p.k;
  const u32 to = shared.ring + which * KV_BYTES + half * KV_HALF + piece * (PIECE * 128);
  const u32 full = which ? shared.v_full : shared.k_full;
  const auto page_of = [&](int token) { return which < 2 && token < end ? pages[token / p.page_size] : 0; };
  int page = page_of(piece * PIECE);
  pdl_wait();  // the tiles and the table are older than the kernel before
  pdl_launch();
  if (lane == 0) {
    barrier_expect(shared.q_full, HALVES * GROUP * QUERIES * 128);
    for (int h = 0; h < HALVES; ++h) copy_q(shared.q + h * Q_HALF, p.q, shared.q_full, h * 64, head * GROUP, tile.y);
  }
  Slot<STAGES> slot;
  for (int i = 0; i < count; ++i, slot.next()) {
    const int token = i * BN + piece * PIECE, next = page_of(token + BN);
    barrier_wait(shared.empty + slot.stage * 8, slot.parity ^ 1);
    if (lane == 0) {
      const int bytes = min(PIECES, (end - i * BN + PIECE - 1) / PIECE) * (HALVES * PIECE * 128);
      barrier_expect(shared.k_full + slot.stage * 8, bytes);
      barrier_expect(shared.v_full + slot.stage * 8, bytes);
    }
    __syncwarp();
    if (which < 2 && token < end)
      copy_2d(to + slot.stage * (2 * KV_BYTES), map, full + slot.stage * 8, half * 64, (page * p.kv_heads + head) * p.page_size + token % p.page_size);
    page = next;
  }
}

// s = q k^T of 64 rows.
__device__ __forceinline__ void multiply(float (&s)[BN / 2], u32 q, u32 k) {
  wgmma_fence();
  wgmma_first(s, tile_at(q), tile_at(k));
#pragma unroll
  for (int i = 1; i < HD / 16; ++i) wgmma(s, tile_at(q + i / 4 * Q_HALF + i % 4 * 32), tile_at(k + i / 4 * KV_HALF + i % 4 * 32));
  wgmma_commit();
}

// The lane's two rows of scores: their maxima so far, and their sums by this lane.
struct Softmax {
  float top[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f}, fade[2];
  // s becomes 2^(scale (s - top)); `fade`: what earlier sums are to be multiplied by.
  __device__ __forceinline__ void apply(float (&s)[BN / 2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s[2 * r];
#pragma unroll
      for (int i = 0; i < BN / 2; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      most = fmaxf(most, top[r]);
      fade[r] = exp2_fast((top[r] - most) * scale), top[r] = most;
      const float base = most * scale;
      float part = 0.f;
#pragma unroll
      for (int i = 2 * r; i < BN / 2; i += 4) {
        s[i] = exp2_fast(fmaf(s[i], scale, -base)), s[i + 1] = exp2_fast(fmaf(s[i + 1], scale, -base));
        part += s[i] + s[i + 1];
      }
      sum[r] = sum[r] * fade[r] + part;
    }
  }
};

// Values behind the last token may be anything; by each group for itself.
__device__ __forceinline__ void clear(u32 v, int from, int group) {
  for (int i = threadIdx.x % 128; i < (BN - from) * 8 * HALVES; i += 128) {
    const int half = i / ((BN - from) * 8), at = i % ((BN - from) * 8);
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + half * KV_HALF + from * 128 + at * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  else asm volatile("bar.sync 2, 128;" ::: "memory");
}

__device__ __forceinline__ void attend(const Params& p, const Shared& shared, const int4& tile, int head) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, t = lane % 4;
  const int row = threadIdx.x / 32 * 16 + lane / 4, query[2] = {row / GROUP, (row + 8) / GROUP};
  const int end = tile.z + tile.w, count = (end + BN - 1) / BN;
  const u32 q = shared.q + group * (64 * 128);
  float s[BN / 2], o[HD / 2] = {};
  u32 weights[BN / 16][4];
  Softmax softmax;
  Slot<STAGES> slot;
  const auto soften = [&](int i) {  // the scores of stage i
    const int first = i * BN + t * 2 - tile.z;
    if (i * BN + BN - 1 > tile.z) {
#pragma unroll
      for (int j = 0; j < BN / 2; ++j)
        if (first + j / 4 * 8 + (j & 1) > query[j / 2 & 1]) s[j] = NEVER;
    }
    softmax.apply(s, p.scale);
  };
  const auto pack = [&] {
#pragma unroll
    for (int j = 0; j < BN / 4; ++j) weights[j / 4][j % 4] = pack2(s[j * 2], s[j * 2 + 1]);
  };
  const auto weigh_all = [&](u32 v) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) wgmma_registers(o, weights[j], tile_at(v + j * (16 * 128), KV_HALF));
    wgmma_commit();
  };
  barrier_wait(shared.q_full, 0);
  barrier_wait(shared.k_full, 0);
  multiply(s, q, shared.k(0));
  wgmma_wait<0>(s);
  soften(0);
  pack();
  for (int i = 1; i < count; ++i) {
    const auto before = slot;
    slot.next();
    barrier_wait(shared.k_full + slot.stage * 8, slot.parity);
    multiply(s, q, shared.k(slot.stage));
    barrier_wait(shared.v_full + before.stage * 8, before.parity);
    weigh_all(shared.v(before.stage));
    wgmma_wait<1>(s);
    soften(i);
    wgmma_wait<0>(o);
    if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty + before.stage * 8);
#pragma unroll
    for (int j = 0; j < HD / 2; ++j) o[j] *= softmax.fade[j / 2 & 1];
    pack();
  }
  barrier_wait(shared.v_full + slot.stage * 8, slot.parity);
  if (end % BN) clear(shared.v(slot.stage), end % BN, group);
  weigh_all(shared.v(slot.stage));
  wgmma_wait<0>(o);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (query[r] >= tile.w) continue;
    const long long at = (long long)(tile.y + query[r]) * p.kv_heads * GROUP + head * GROUP + (row + 8 * r) % GROUP;
    u32* to = reinterpret_cast<u32*>(p.out + at * HD) + t;
#pragma unroll
    for (int j = 0; j < HD / 8; ++j) to[j * 4] = pack2(o[j * 4 + 2 * r] / sum, o[j * 4 + 2 * r + 1] / sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_attention(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const Shared shared(smem_addr(smem));
  if (threadIdx.x == 0) {
    barrier_init(shared.q_full, 1);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared.k_full + s * 8, 1);
      barrier_init(shared.v_full + s * 8, 1);
      barrier_init(shared.empty + s * 8, CONSUMERS / 128);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int4 tile = p.tiles[blockIdx.x / p.kv_heads];
  const int head = blockIdx.x % p.kv_heads;
  if (tile.w == 0) {
    pdl_wait();
    return;
  }
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < CONSUMERS + 32) load(p, shared, tile, head);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    attend(p, shared, tile, head);
  }
}
