// Both products of a mixture of experts for a decode batch: bound by reading once the weights of all experts
// that are wanted.
//
// One block a multiprocessor. Each sorts the pairs of token and expert by expert for itself, in the
// same way, into places of one expert and at most BN pairs; then all take tiles from a counter, so that they
// end together: first those of all gate and up products, then those of all down products, so that the stream
// of weights does not pause between the two: a place's down tiles wait for its gate and up tiles, which were
// done long ago. One warp feeds the weights, one the activations; each of the others multiplies 16 rows of
// the weights, the wide side, with all pairs of the place. While the kernel before runs, the first weights
// are fetched on the guess that all experts are wanted. The tensor map interleaves 8 gate rows with the 8 up
// rows that belong to them.
#include "common.cuh"

#ifndef EXPERTS
#define EXPERTS 128
#endif
#ifndef GELU
#define GELU 0
#endif

typedef unsigned short u16;
constexpr int PAIRS = 2304;  // at most: 256 tokens of 8 experts and a shared one
constexpr int BM = 128, BN = 32, BK = 64, W_BYTES = BM * BK * 2, STAGES = 8;  // a chunk of a tile, and how
                                                                              // many fit
// Chunks that are asked for together, since they lie side by side; those beyond the ring that are fetched to
// the L2 cache on a guess.
constexpr int BURST = 2, FORESIGHT = 24;
// Rows of x come in longer pieces: the copy engine takes its time for each. The pitch avoids bank conflicts.
constexpr int PIECE = 4, PITCH = PIECE * BK * 2 + 16, X_BYTES = BN * PITCH, X_STAGES = 3;
constexpr int WARPS = BM / 16, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 64;
constexpr int PLACES = EXPERTS + PAIRS / BN, EACH = (EXPERTS + 31) / 32;
// Tiles that are remembered: as many as may be under way, since each has a chunk at least.
constexpr int TAKEN = 2 * STAGES;

struct Params {
  TensorMap gate_up, down;
  const bf16* x;   // [tokens, d]
  const int* ids;  // [pairs]
  bf16* inner;     // [pairs, f]
  bf16* y;         // [pairs, d]
  int* done;  // [PLACES + 1], zeros: warps that have finished their part of a place's gate and up tiles;
              // tiles taken
  int pairs, top_k, f, d, guess;
};

__device__ __forceinline__ void copy_gate_up(u32 to, const TensorMap& map, u32 bar, int k, int tile,
                                             int expert, u64 policy) {
  // dims: k, row in 8, gate or up, group of 8 rows, expert
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
               ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(tile * (BM / 16)), "r"(expert), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void foresee(const TensorMap& map, int k, int tile, int expert) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %2, %3, %4}];"
               ::"l"(&map), "r"(k), "r"(0), "r"(tile * (BM / 16)), "r"(expert) : "memory");
}

// What the sort leaves behind.
struct Sorted {
  int count;               // of places
  u32 place[PLACES];       // expert, first in the order << 10, pairs << 22
  u16 order[PAIRS];        // pairs by expert
};

__device__ __forceinline__ int expert_of(u32 place) { return place & 0x3ff; }
__device__ __forceinline__ int first_of(u32 place) { return place >> 10 & 0xfff; }
__device__ __forceinline__ int pairs_of(u32 place) { return place >> 22; }

// Sort the pairs by expert, in the order of their numbers; by the consumer warps. `counts`: of each warp and
// expert.
__device__ __forceinline__ void sort(const Params& p, Sorted& sorted, u16* counts) {
  constexpr int BATCHES = PAIRS / CONSUMERS;
  __shared__ u16 start[EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int batches = (p.pairs + CONSUMERS - 1) / CONSUMERS, first = warp * batches * 32 + lane;
  int expert[BATCHES], number[BATCHES];  // of this lane's pairs; among the warp's pairs of that expert
#pragma unroll
  for (int b = 0; b < BATCHES; ++b)
    expert[b] = b < batches && first + b * 32 < p.pairs ? p.ids[first + b * 32] : -1;
  for (int i = threadIdx.x; i < WARPS * EXPERTS; i += CONSUMERS) counts[i] = 0;
  meet_at<CONSUMERS>(1);
  counts += warp * EXPERTS;
#pragma unroll
  for (int b = 0; b < BATCHES; ++b) {
    if (b >= batches) break;
    const u32 same = __match_any_sync(~0u, expert[b]);
    const int before = __popc(same & ((1u << lane) - 1)), n = __popc(same);
    const int base = expert[b] >= 0 ? counts[expert[b]] : 0;
    number[b] = base + before;
    __syncwarp();
    if (expert[b] >= 0 && before == n - 1) counts[expert[b]] = base + n;
    __syncwarp();
  }
  counts -= warp * EXPERTS;
  meet_at<CONSUMERS>(1);
  for (int e = threadIdx.x; e < EXPERTS; e += CONSUMERS) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int n = counts[w * EXPERTS + e];
      counts[w * EXPERTS + e] = sum;
      sum += n;
    }
    start[e] = sum;
  }
  meet_at<CONSUMERS>(1);
  if (warp == 0) {
    int n[EACH];
    u32 sum = 0;  // pairs, places << 16
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      n[i] = lane * EACH + i < EXPERTS ? start[lane * EACH + i] : 0;
      sum += n[i] | (n[i] + BN - 1) / BN << 16;
    }
    u32 until = sum;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const u32 other = __shfl_up_sync(~0u, until, o);
      if (lane >= o) until += other;
    }
    if (lane == 31) sorted.count = until >> 16;
    int pair = (until - sum) & 0xffff, at = (until - sum) >> 16;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int e = lane * EACH + i;
      if (e < EXPERTS) start[e] = pair;
      for (int from = 0; from < n[i]; from += BN)
        sorted.place[at++] = e | (pair + from) << 10 | min(BN, n[i] - from) << 22;
      pair += n[i];
    }
  }
  meet_at<CONSUMERS>(1);
#pragma unroll
  for (int b = 0; b < BATCHES; ++b)
    if (expert[b] >= 0)
      sorted.order[start[expert[b]] + counts[warp * EXPERTS + expert[b]] + number[b]] = first + b * 32;
}

// What the consumers read: the rings of weights and of x, and where in a stage this lane's parts are.
struct Rings {
  u32 full, empty, x_full, x_empty, a, b;
  int n, m;  // chunks of weights and pieces of x so far
};

// acc += 16 rows of the weights times NT groups of 8 pairs. Without branches inside: loads of a chunk overlap
// with products.
template <int NT>
__device__ __forceinline__ void multiply(Rings& r, int chunks, float (&acc)[BN / 8][4]) {
  const int lane = threadIdx.x % 32;
  const u32 swizzle = lane & 7, piece = lane / 16;
  for (int c = 0; c < chunks; ++c, ++r.n) {
    const int s = r.n % STAGES, x = r.m % X_STAGES, sub = c % PIECE;
    if (sub == 0) barrier_wait(r.x_full + x * 8, (r.m / X_STAGES) & 1);
    barrier_wait(r.full + s * 8, (r.n / STAGES) & 1);
    const u32 at = r.a + s * W_BYTES, b_at = r.b + x * X_BYTES + sub * (BK * 2);
    u32 a[BK / 16][4], b[NT][BK / 32][4];
#pragma unroll
    for (int h = 0; h < BK / 32; ++h) {
#pragma unroll
      for (int k = 2 * h; k < 2 * h + 2; ++k) ldmatrix(a[k], at + (((k * 2 + piece) ^ swizzle) << 4));
#pragma unroll
      for (int j = 0; j < NT; ++j) ldmatrix(b[j][h], b_at + j * 8 * PITCH + h * 64);
    }
#pragma unroll
    for (int k = 0; k < BK / 16; ++k)
#pragma unroll
      for (int j = 0; j < NT; ++j)
        mma(acc[j], a[k][0], a[k][1], a[k][2], a[k][3], b[j][k / 2][k % 2 * 2], b[j][k / 2][k % 2 * 2 + 1]);
    __syncwarp();
    if (lane == 0) barrier_arrive(r.empty + s * 8);
    if (sub == PIECE - 1 || c == chunks - 1) {
      if (lane == 0) barrier_arrive(r.x_empty + x * 8);
      ++r.m;
    }
  }
}

// The tiles of this block, in the order in which it takes them; -1 after the last one.
struct Tiles {
  u32 known;  // barriers: a tile has been taken
  volatile int* taken;
  int count1, count2, tiles1, tiles2;
  __device__ __forceinline__ void tell(int i, int tile) const {
    taken[i % TAKEN] = tile < count1 + count2 ? tile : -1;
    barrier_arrive(known + i % TAKEN * 8);
  }
  template <class Item>
  __device__ __forceinline__ void each(Item item) const {
    for (int i = 0;; ++i) {
      barrier_wait(known + i % TAKEN * 8, i / TAKEN & 1);
      const int tile = taken[i % TAKEN];
      if (tile < 0) break;
      if (tile < count1)
        item(false, tile / tiles1, tile % tiles1);
      else
        item(true, (tile - count1) / tiles2, (tile - count1) % tiles2);
    }
  }
};

// Registers for two blocks, so that those of the router can be there when these come.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  __shared__ Sorted sorted;
  __shared__ int taken[TAKEN];
  const u32 base = smem_addr(smem), ring = (base + 1023) & ~1023u, xs = ring + STAGES * W_BYTES;
  const u32 full = xs + X_STAGES * X_BYTES, empty = full + STAGES * 8, x_full = empty + STAGES * 8,
            x_empty = x_full + X_STAGES * 8;
  const u32 known = x_empty + X_STAGES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, WARPS);
    }
    for (int s = 0; s < X_STAGES; ++s) {
      barrier_init(x_full + s * 8, 1);
      barrier_init(x_empty + s * 8, WARPS);
    }
    for (int i = 0; i < TAKEN; ++i) barrier_init(known + i * 8, 1);
    barriers_visible();
  }
  __syncthreads();
  pdl_launch();

  const int tiles1 = p.f / (BM / 2), tiles2 = p.d / BM, chunks1 = p.d / BK, chunks2 = p.f / BK;
  const int block = blockIdx.x, guessed = block / tiles1,
            ahead = p.guess && guessed < EXPERTS ? min(STAGES / BURST * BURST, chunks1) : 0;
  int n = 0;  // chunks so far
  const u64 policy = policy_once();
  auto load_w = [&](bool down, int expert, int tile, int chunk) {
    const int s = n % STAGES;
    if (chunk % BURST == 0) {  // stages become free in their order
      const int last = n + min(BURST, (down ? chunks2 : chunks1) - chunk) - 1;
      if (last >= STAGES) barrier_wait(empty + last % STAGES * 8, (last / STAGES - 1) & 1);
    }
    barrier_expect(full + s * 8, W_BYTES);
    if (down)
      copy_2d(ring + s * W_BYTES, p.down, full + s * 8, chunk * BK, expert * p.d + tile * BM, policy);
    else
      copy_gate_up(ring + s * W_BYTES, p.gate_up, full + s * 8, chunk * BK, tile, expert, policy);
    ++n;
  };
  if (warp == WARPS) {
    if (lane == 0) {
      for (int c = 0; c < ahead; ++c) load_w(false, guessed, block % tiles1, c);
      if (ahead > 0)
        for (int c = ahead; c < min(ahead + FORESIGHT, chunks1); ++c)
          foresee(p.gate_up, c * BK, block % tiles1, guessed);
    }
    __syncwarp();
  } else {
    pdl_wait();
    if (warp < WARPS) {
      sort(p, sorted, reinterpret_cast<u16*>(smem + (xs - base)));
      fence_copies();
    }
  }
  __syncthreads();

  const int count1 = sorted.count * tiles1, count2 = sorted.count * tiles2;
  // What was fetched on a wrong guess is thrown away.
  const bool right = ahead > 0 && block < count1 && expert_of(sorted.place[guessed]) == guessed;
  const Tiles tiles = {known, taken, count1, count2, tiles1, tiles2};

  if (warp == WARPS) {
    if (lane == 0) {
      int from = right ? ahead : 0;
      // Each is told a tile early, for the sake of the activations.
      int tile = block, next = block + gridDim.x;
      tiles.tell(0, tile);
      for (int i = 1; tile < count1 + count2; ++i) {
        tiles.tell(i, next);
        const int later = 2 * gridDim.x + atomicAdd(p.done + PLACES, 1);
        const bool down = tile >= count1;
        const int at = down ? tile - count1 : tile, each = down ? tiles2 : tiles1,
                  chunks = down ? chunks2 : chunks1;
        const int expert = expert_of(sorted.place[at / each]);
        for (int c = from; c < chunks; ++c) load_w(down, expert, at % each, c);
        from = 0, tile = next, next = later;
      }
    }
  } else if (warp == WARPS + 1) {
    int m = 0;  // pieces so far
    tiles.each([&](bool down, int place, int tile) {
      const u32 found = sorted.place[place];
      const int rows = pairs_of(found), first = first_of(found), k = down ? p.f : p.d;
      const int pair = lane < rows ? sorted.order[first + lane] : 0;
      const bf16* from = down ? p.inner + (long long)pair * k : p.x + (long long)(pair / p.top_k) * k;
      if (down) {
        int done;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(p.done + place) : "memory");
        while (done < WARPS * tiles1);
        fence_copies();
      }
      for (int at = 0; at < k; at += PIECE * BK, ++m) {
        const int s = m % X_STAGES, bytes = min(PIECE * BK, k - at) * 2;
        if (m >= X_STAGES) barrier_wait(x_empty + s * 8, (m / X_STAGES - 1) & 1);
        if (lane == 0) barrier_expect(x_full + s * 8, rows * bytes);
        __syncwarp();
        if (lane < rows) copy_bytes(xs + s * X_BYTES + lane * PITCH, from + at, bytes, x_full + s * 8);
      }
    });
  } else {
    if (!right)
      for (; n < ahead; ++n) {
        barrier_wait(full + n * 8, 0);
        if (lane == 0) barrier_arrive(empty + n * 8);
      }
    const int g = lane / 4, t = lane % 4;
    Rings rings = {full,
                   empty,
                   x_full,
                   x_empty,
                   ring + (warp * 16 + lane % 16) * 128,
                   xs + lane % 8 * PITCH + lane / 8 * 16,
                   n,
                   0};
    tiles.each([&](bool down, int place, int tile) {
      const u32 found = sorted.place[place];
      const int rows = pairs_of(found), first = first_of(found), chunks = down ? chunks2 : chunks1;
      float acc[BN / 8][4] = {};
      if (rows <= 8)
        multiply<1>(rings, chunks, acc);
      else if (rows <= 16)
        multiply<2>(rings, chunks, acc);
      else if (rows <= 24)
        multiply<3>(rings, chunks, acc);
      else
        multiply<4>(rings, chunks, acc);
      // Transposed, a lane has two outputs of one pair.
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {
        if (j * 8 >= rows) break;
        const int r = j * 8 + g;
        const long long pair = r < rows ? sorted.order[first + r] : 0;
        const float* v = acc[j];
        if (down) {
          const u32 lo = movmatrix(pack2(v[0], v[1])), hi = movmatrix(pack2(v[2], v[3]));
          u32* to = reinterpret_cast<u32*>(p.y + pair * p.d + tile * BM + warp * 16) + t;
          if (r < rows) to[0] = lo, to[4] = hi;
        } else {
          const u32 both = movmatrix(pack2(gate<GELU>(v[0], v[2]), gate<GELU>(v[1], v[3])));
          if (r < rows) reinterpret_cast<u32*>(p.inner + pair * p.f + tile * (BM / 2) + warp * 8)[t] = both;
        }
      }
      if (!down) {
        fence_copies();
        __syncwarp();
        if (lane == 0) {
          __threadfence();
          asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.done + place) : "memory");
        }
      }
    });
  }
}
