// The experts of one token, or of very few: both products read the weights of each pair of token and expert
// once, at the speed of the memory. Pairs are as in `kernels/triton/moe.py`; their number is at most 32.
//
//   DOWN 0: out[pair, n] = p[pair] act(x[token] gate[n]^T) (x[token] up[n]^T)
//   DOWN 1: out[token, n] (+)= sum over the token's experts of x[pair] w[n]^T
//
// One block a multiprocessor has an equal share of the outputs. A warp sums up an output by itself: weights
// come through its own ring in shared memory, which the copy engine fills, so that it waits for nobody else,
// and loads run on from one output to the next. What needs no earlier result is asked for before the wait:
// gate and up of experts that all tokens have, and all of down, whose experts are chosen by then. Blocks of
// both products, or of one and of the next layer, fit on a multiprocessor together. Rows that are too long
// for two stages of each warp come in PARTS.
//
// Where other ranks have some of the experts (HELD), the outputs of those that are here are shared out alone,
// and those of several tokens by turns, since one may have more experts here than another.
//
// Weights may be e4m3 (E4M3) with a scale for each row; x is not rounded. A lane takes 16 of a row, so of x
// two pieces of 8, which lie apart in shared memory: all first ones, then all second ones.
#include "common.cuh"

#ifndef DOWN
#define DOWN 0
#endif
#ifndef WIDTH  // elements of a row of weights, and of x
#define WIDTH 2048
#endif
#ifndef OUTPUTS  // outputs of an expert: its inner activations, or the width of the residual stream
#define OUTPUTS 512
#endif
#ifndef ROWS  // of weights in a stage: neighbouring outputs of down
#define ROWS 1
#endif
#ifndef PARTS  // in which a row comes, if a stage has one
#define PARTS 1
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef E4M3
#define E4M3 0
#endif
#ifndef TOP_K  // experts of a token
#define TOP_K 8
#endif
#ifndef COMMON  // of them, the last ones, which every token has; they are the last of all
#define COMMON 0
#endif
#ifndef HELD  // pairs whose ids are negative are of experts that other ranks have, and left out
#define HELD 0
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef ADD  // DOWN: into out
#define ADD 0
#endif

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int SIZE = E4M3 ? 1 : 2;  // bytes of a weight
constexpr int PART = WIDTH / PARTS, PART_BYTES = PART * SIZE, STAGE_BYTES = ROWS * PART_BYTES;
constexpr int CHOSEN = TOP_K - COMMON;
constexpr int PIECES = (DOWN ? TOP_K : 2) * PARTS;  // of an output (or of ROWS), each of which fills a stage
constexpr int EACH = 16 / SIZE;                     // weights that a lane loads at a time
static_assert(PART % EACH == 0 && WIDTH % EACH == 0 && (ROWS == 1 || PARTS == 1) && !(HELD && COMMON));

#if E4M3
typedef unsigned char weight;
#else
typedef bf16 weight;
#endif

struct Params {
  const bf16* x;            // [tokens, WIDTH]; DOWN: [pairs, WIDTH]
  const float* p;           // [pairs], of the chosen experts
  const volatile int* ids;  // [pairs]; down reads them before its wait, when the L1 cache may have older ones
  const weight* w;          // [experts * 2 OUTPUTS, WIDTH], gate then up; DOWN: [experts * OUTPUTS, WIDTH]
  const float* scale;       // E4M3: of the rows of w
  bf16* out;
  int tokens, experts;
};

// Two of float16.
__device__ __forceinline__ void floats(u32 x, float& lo, float& hi) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(lo), "=f"(hi)
      : "r"(x));
}
// Adds the products of four weights with four of x to as many sums.
__device__ __forceinline__ void add4(float (&sums)[4], u32 w, u32 x, u32 y) {
  u32 a, b;
  float w0, w1, w2, w3;
  halves(w, a, b);
  floats(a, w0, w1), floats(b, w2, w3);
  sums[0] = fmaf(w0, lo2f(x), sums[0]), sums[1] = fmaf(w1, hi2f(x), sums[1]);
  sums[2] = fmaf(w2, lo2f(y), sums[2]), sums[3] = fmaf(w3, hi2f(y), sums[3]);
}
// Where in a row of x in shared memory, of any place that is a multiple of 8, it lies.
__device__ __forceinline__ int place_of(int k) { return E4M3 ? k / 8 % 2 * WIDTH + k / 16 * 16 : k * 2; }

// A part of a row of weights, from ``first`` on, times a row of x.
__device__ __forceinline__ float dot(u32 w, u32 x, int first, int lane) {
  float sum = 0.f, sums[4] = {};
#pragma unroll
  for (int i = 0; i < (PART + 32 * EACH - 1) / (32 * EACH); ++i) {
    const int k = (i * 32 + lane) * EACH;
    if (PART % (32 * EACH) && k >= PART) break;
    const uint4 a = lds128(w + k * SIZE), b = lds128(x + place_of(first + k));
#if E4M3
    const uint4 c = lds128(x + place_of(first + k + 8));
    add4(sums, a.x, b.x, b.y), add4(sums, a.y, b.z, b.w);
    add4(sums, a.z, c.x, c.y), add4(sums, a.w, c.z, c.w);
#else
    sum += lo2f(a.x) * lo2f(b.x) + hi2f(a.x) * hi2f(b.x) + lo2f(a.y) * lo2f(b.y) + hi2f(a.y) * hi2f(b.y) +
           lo2f(a.z) * lo2f(b.z) + hi2f(a.z) * hi2f(b.z) + lo2f(a.w) * lo2f(b.w) + hi2f(a.w) * hi2f(b.w);
#endif
  }
  return E4M3 ? (sums[0] + sums[1]) + (sums[2] + sums[3]) : sum;
}
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
// How many of ``all`` the blocks before this one have.
__device__ __forceinline__ int before(int all, int block) { return int(u32(all) * u32(block) / gridDim.x); }

extern "C" __global__ void __launch_bounds__(THREADS, 2) token_experts(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 ring = smem_addr(smem) + warp * (STAGES * STAGE_BYTES),
            bars = smem_addr(smem) + WARPS * STAGES * STAGE_BYTES + warp * (STAGES * 8),
            staged = smem_addr(smem) + WARPS * STAGES * (STAGE_BYTES + 8);
  if (lane == 0)
    for (int s = 0; s < STAGES; ++s) barrier_init(bars + s * 8, 1);
  barriers_visible();
  __syncwarp();

  // This block's outputs: those of common experts come first.
  const int block = blockIdx.x, common = p.tokens * COMMON * OUTPUTS;
  const int first_common = DOWN ? 0 : before(common, block),
            commons = DOWN ? 0 : before(common, block + 1) - first_common;
  u32 here = 0;  // HELD: the pairs whose experts are
  int nth = 0;   // of these the one with the number ``lane``
  int first = 0, own = 0, pieces = 0;
  // The pair and the row of the own output i (DOWN: the token's first pair, and the first of ROWS).
  auto find = [&](int i, int& pair, int& row) {
    const int j = warp + i * WARPS;
    if (DOWN && HELD) {
      const u32 at = first + j, which = at / u32(p.tokens);
      pair = (at - which * p.tokens) * TOP_K, row = which * ROWS;
    } else if (DOWN) {
      const u32 at = first + j, token = at / (OUTPUTS / ROWS);
      pair = token * TOP_K, row = (at - token * (OUTPUTS / ROWS)) * ROWS;
    } else if (HELD) {
      const u32 at = first + j, which = at / OUTPUTS;
      pair = __shfl_sync(~0u, nth, which), row = at - which * OUTPUTS;
    } else if (COMMON && j < commons) {
      const u32 at = first_common + j, which = at / OUTPUTS, token = which / max(COMMON, 1);
      pair = which + (token + 1) * CHOSEN, row = at - which * OUTPUTS;
    } else {
      const u32 at = first + j - commons, which = at / OUTPUTS, token = which / max(CHOSEN, 1);
      pair = which + token * COMMON, row = at - which * OUTPUTS;
    }
  };
  // Of the token whose first pair it is: the places of its experts that are here.
  auto held = [&](int pair) { return here >> pair & (~0u >> (32 - TOP_K)); };
  // What this block and this warp have.
  auto share = [&]() {
    const int chosen = HELD ? __popc(here) : p.tokens * CHOSEN;
    const int all = DOWN ? p.tokens * (OUTPUTS / ROWS) : chosen * OUTPUTS;
    first = before(all, block);
    const int outputs = before(all, block + 1) - first + commons;
    own = outputs > warp ? (outputs - warp + WARPS - 1) / WARPS : 0, pieces = own * PIECES;
    if (!DOWN || !HELD) return;
    pieces = 0;
    for (int i = 0, pair, row; i < own; ++i) find(i, pair, row), pieces += __popc(held(pair)) * PARTS;
  };
  int id = 0;  // of the pair ``lane``
  const u64 policy = policy_once();
  int asked = 0, to = 0;            // pieces, and the next one's stage
  int next = 0, pair = 0, row = 0;  // DOWN, HELD: the output behind that with this first pair and row,
  u32 left = 0;                     // of which these experts are still to be asked for
  auto load = [&]() {
    int which = asked % PIECES / PARTS;
    const int part = asked % PARTS;
    if (DOWN && HELD) {
      for (; !left; left = held(pair)) find(next++, pair, row);
      which = __ffs(left) - 1;
      if (part == PARTS - 1) left &= left - 1;
    } else {
      find(asked / PIECES, pair, row);
    }
    const int expert = __shfl_sync(~0u, id, DOWN ? pair + which : pair);
    const long long at = (long long)(DOWN ? expert : 2 * expert + which) * OUTPUTS + row;
    if (lane == 0) {
      barrier_expect(bars + to * 8, STAGE_BYTES);
      copy_bytes(ring + to * STAGE_BYTES, p.w + at * WIDTH + part * PART, STAGE_BYTES, bars + to * 8, policy);
    }
    ++asked;
    to = to + 1 == STAGES ? 0 : to + 1;
  };

  auto find_experts = [&]() {
    const int place = lane % TOP_K;
    if (lane < p.tokens * TOP_K) id = place < CHOSEN ? p.ids[lane] : p.experts - TOP_K + place;
    if (HELD) {
      here = __ballot_sync(~0u, lane < p.tokens * TOP_K && id >= 0);
      u32 rest = here;
      for (int i = 0; i < lane; ++i) rest &= rest - 1;
      nth = max(__ffs(rest) - 1, 0), id = max(id, 0);
    }
    if (DOWN || HELD) share();
  };
  if (!(DOWN || HELD)) share();
  if (DOWN) {
    find_experts();
    while (asked < min(STAGES, pieces)) load();
  } else if (COMMON) {
    id = p.experts - TOP_K + lane % TOP_K;
    const int early = commons > warp ? (commons - warp + WARPS - 1) / WARPS * PIECES : 0;
    while (asked < min(STAGES, early)) load();
  }
  pdl_wait();
  pdl_launch();
  if (!DOWN) find_experts();
  const float factor = !DOWN && lane < p.tokens * TOP_K ? p.p[lane] : 0.f;  // of the pair ``lane``
  const int all_x = (DOWN ? p.tokens * TOP_K : p.tokens) * WIDTH;
  constexpr int AT_ONCE = 4;
  for (int begin = 0; begin < all_x; begin += AT_ONCE * THREADS * 8) {
    uint4 v[AT_ONCE];
    auto place = [&](int i) { return begin + (i * THREADS + int(threadIdx.x)) * 8; };
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (place(i) < all_x) v[i] = *reinterpret_cast<const uint4*>(p.x + place(i));
    if (begin == 0)
      while (asked < min(STAGES, pieces)) load();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (place(i) < all_x)
        sts128(staged + place(i) / WIDTH * (WIDTH * 2) + place_of(place(i) % WIDTH), v[i]);
  }
  __syncthreads();

  int from = 0;
  u32 parity = 0;
  // What the rows of some stages make of x, in ``sums``; then the stages are asked for again.
  auto take = [&](int row_of_x, float (&sums)[ROWS]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      barrier_wait(bars + from * 8, parity);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        sums[r] += dot(ring + from * STAGE_BYTES + r * PART_BYTES, staged + row_of_x * (WIDTH * 2),
                       part * PART, lane);
      __syncwarp();
      if (asked < pieces) load();
      if (++from == STAGES) from = 0, parity ^= 1;
    }
  };
  for (int i = 0; i < own; ++i) {
    int pair, row;
    find(i, pair, row);
    if (DOWN) {
      bf16* to_out = p.out + (long long)(pair / TOP_K) * OUTPUTS + row + lane;
      const float kept = ADD && lane < ROWS ? bf2f(*to_out) : 0.f;
      const int expert = __shfl_sync(~0u, id, pair + lane);  // of the pair ``pair + lane``
      float sums[ROWS] = {}, by[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        by[r] = E4M3 && lane < TOP_K ? p.scale[(long long)expert * OUTPUTS + row + r] : 1.f;
      for (int j = 0; j < TOP_K; ++j) {
        if (HELD && !(here >> pair >> j & 1)) continue;
        float of_expert[ROWS] = {};
        take(pair + j, of_expert);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          sums[r] += E4M3 ? of_expert[r] * __shfl_sync(~0u, by[r], j) : of_expert[r];
      }
      float y = 0.f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float sum = sum_of_warp(sums[r]);
        if (lane == r) y = sum;
      }
      if (lane < ROWS) *to_out = f2bf(y + kept);
    } else {
      const int expert = __shfl_sync(~0u, id, pair);
      const float by = E4M3 && lane < 2 ? p.scale[(2ll * expert + lane) * OUTPUTS + row] : 1.f;
      float sums[2][ROWS] = {};
      take(pair / TOP_K, sums[0]);
      take(pair / TOP_K, sums[1]);
      float g = sum_of_warp(sums[0][0]), up = sum_of_warp(sums[1][0]);
      if (E4M3) g *= __shfl_sync(~0u, by, 0), up *= __shfl_sync(~0u, by, 1);
      const float y = gate<GELU>(g, up) * __shfl_sync(~0u, factor, pair);
      if (lane == 0) p.out[(long long)pair * OUTPUTS + row] = f2bf(y);
    }
  }
}
