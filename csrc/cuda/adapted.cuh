// What rows with adapters add to the sums of a tile: a part of batch_gemm.cu.
#pragma once
// 16 ranks from `rank` on of the columns of a tile.
__device__ __forceinline__ void copy_b(u32 to, const TensorMap& map, u32 bar, int rank, int tile) {
  if (GATED)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%3, %4, %5, %3}], [%2];"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(0), "r"(rank), "r"(tile * GROUPS) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(0), "r"(rank), "r"(tile * GROUPS) : "memory");
}
// The adapters of the rows that a block finishes, each once, with the eights of these rows that have it; and
// what rows are shrunk to.
struct Adapters {
  u64 listed, shrunk;  // barriers
  int count, before[2], place[DONE_ROWS], adapters[DONE_ROWS], eights[DONE_ROWS];
  u32 inner[SETS][DONE_ROWS][RANKS / 2];
};

// Lists the adapters, waits until all rows are shrunk, and adds up the parts of that.
__device__ __forceinline__ void gather(const Params& p, Adapters& found, int tile, int begin) {
  const int i = threadIdx.x - (THREADS - GATHERERS), lane = i % 32;
  pdl_wait();
  const int own = i < DONE_ROWS && begin + i < p.m ? __ldcg(p.places + begin + i) : 0;
  if (i < DONE_ROWS) found.place[i] = own;
  meet_at<GATHERERS>(2);
  bool first = own > 0;
  int eights = 0;
  if (own > 0)
    for (int j = 0; j < DONE_ROWS; ++j)
      if (found.place[j] == own) eights |= 1 << j / 8, first = first && j >= i;
  const u32 all = __ballot_sync(~0u, first);
  if (i < 64 && lane == 0) found.before[i / 32] = __popc(all);
  meet_at<GATHERERS>(2);
  if (first) {
    const int at = __popc(all & ((1u << lane) - 1)) + (i < 32 ? 0 : found.before[0]);
    found.adapters[at] = own, found.eights[at] = eights;
  }
  if (i == 0) found.count = found.before[0] + found.before[1];
  meet_at<GATHERERS>(2);
  if (i == 0) barrier_arrive(smem_addr(&found.listed));
  const u32 runs = __ballot_sync(~0u, i < p.m && __ldcg(p.runs + 3 * i + 1) > 0);
  if (i < 64 && lane == 0) found.before[i / 32] = __popc(runs);
  meet_at<GATHERERS>(2);
  if (i == 0) {  // one thread asks, and rarely: all blocks wait for the same word
    const int wanted = (found.before[0] + found.before[1]) * p.wanted;
    for (Patience patience; int(arrived(p.shrunk)) < wanted; patience.check()) __nanosleep(400);
  }
  meet_at<GATHERERS>(2);
  for (int e = i; e < SETS * DONE_ROWS * (RANKS / 4); e += GATHERERS) {
    const int rank = e % (RANKS / 4) * 4, row = e / (RANKS / 4) % DONE_ROWS, set = e / (RANKS / 4) / DONE_ROWS;
    int layer = set;
    if (!GATED) {
      const int n = tile * BM + set * 64;
      layer = 0;
      for (int l = 0; l + 1 < p.layers; ++l) layer += n >= p.ends[l];
    }
    float4 v[8] = {};
    if (found.place[row] > 0 && rank < p.ranks) {
      const float* from = p.inner + ((long long)(begin + row) * p.layers + layer) * p.ranks + rank;
#pragma unroll
      for (int s = 0; s < 8; ++s)
        if (s < p.splits)
          v[s] = __ldcg(reinterpret_cast<const float4*>(from + (long long)s * p.m * p.layers * p.ranks));
    }
#pragma unroll
    for (int s = 1; s < 8; ++s) v[0].x += v[s].x, v[0].y += v[s].y, v[0].z += v[s].z, v[0].w += v[s].w;
    found.inner[set][row][rank / 2] = pack2(v[0].x, v[0].y);
    found.inner[set][row][rank / 2 + 1] = pack2(v[0].z, v[0].w);
  }
  meet_at<GATHERERS>(2);
  if (i == 0) barrier_arrive(smem_addr(&found.shrunk));
}

// What the tile has of b.
__device__ __forceinline__ void load_adapters(const Params& p, const Adapters& found, u32 ring, u32 full,
                                              u32 empty, Slot<STAGES>& slot, int tile) {
  barrier_wait(smem_addr(&found.listed), 0);
  const int count = found.count * ADAPTED;
  for (int begin = 0; begin < count; begin += PIECES, slot.next()) {
    const u32 stage = ring + slot.stage * STAGE_BYTES, bar = full + slot.stage * 8;
    const int pieces = min(PIECES, count - begin);
    barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
    barrier_expect(bar, pieces * PIECE);
    for (int i = 0; i < pieces; ++i) {
      const int adapter = (begin + i) / ADAPTED, ranks = (begin + i) % ADAPTED * 16;
      copy_b(stage + i * PIECE, p.b, bar, (found.adapters[adapter] - 1) * p.ranks + ranks, tile);
    }
  }
}

// The sums of a group of warps, of the `unit`th 64 rows of w, take in what the adapters add.
template <int N>
__device__ __forceinline__ void add_adapters(float (&sum)[N], const Adapters& found, u32 ring, u32 full,
                                             u32 empty, Slot<STAGES>& slot, int unit) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
  // Of the four matrices: the second and fourth have the next 8 rows of w, the last two the next 8 ranks.
  const int rank = lane / 16 * 8 + lane % 8, second = lane / 8 % 2;
  const u32 at = GATED ? (second * GROUPS + unit) * 1024 + rank * 64 + ((warp ^ (rank >> 1 & 3)) << 4)
                       : unit * 2048 + rank * 128 + ((warp * 2 + second ^ (rank & 7)) << 4);
  barrier_wait(smem_addr(&found.listed), 0);
  barrier_wait(smem_addr(&found.shrunk), 0);
  const int count = found.count * ADAPTED;
  for (int begin = 0; begin < count; begin += PIECES, slot.next()) {
    const u32 stage = ring + slot.stage * STAGE_BYTES + at;
    const int pieces = min(PIECES, count - begin);
    barrier_wait(full + slot.stage * 8, slot.parity);
    for (int i = 0; i < pieces; ++i) {
      const int adapter = (begin + i) / ADAPTED, ranks = (begin + i) % ADAPTED * 8;
      const int place = found.adapters[adapter], eights = found.eights[adapter];
      u32 a[4];
      ldmatrix_trans(a, stage + i * PIECE);
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        if (!(eights >> j / 4 & 1)) continue;
        const int row = j * 2 + g;
        const bool own = found.place[row] == place;
        float(&d)[4] = *reinterpret_cast<float(*)[4]>(sum + j);
        const u32* u = found.inner[GATED ? 0 : unit][row] + ranks + t;
        if (GATED) {
          const u32* up = found.inner[SETS - 1][row] + ranks + t;
          mma(d, a[0], 0, a[2], 0, own ? u[0] : 0, own ? u[4] : 0);
          mma(d, 0, a[1], 0, a[3], own ? up[0] : 0, own ? up[4] : 0);
        } else {
          mma(d, a[0], a[1], a[2], a[3], own ? u[0] : 0, own ? u[4] : 0);
        }
      }
    }
    meet_at<128>(3 + threadIdx.x / 128);
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + slot.stage * 8);
  }
}
