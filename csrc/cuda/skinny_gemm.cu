// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for few rows m: reads the weights once, at the speed of the
// memory.
//
// One block a multiprocessor takes an equal share of the output tiles; its warps split k. Each warp streams
// its chunks of the weights (2 KB: 16 rows x 64 k) through its own cp.async ring that runs on across tiles,
// so loads never pause for a reduction. The first loads are issued before the wait for the previous kernel,
// and two kernels' blocks fit on a multiprocessor, so the memory stays busy across kernel boundaries too.
// Weights are the wide side of the tensor-core instruction, the few rows of x the narrow one; the order of k
// inside a fragment is free as long as both agree, so a lane reads 16 contiguous bytes of each. RMSNorm is
// fused: x is multiplied by the norm weight on the fly (or once, into shared memory: STAGED) and the row's
// scale, summed along the way, is applied to the result. Or x is what a gate lets through (GATE), made once
// in shared memory too; one row as it is may be kept there as well. Else it comes a chunk ahead.
//
// Weights may be e4m3 (E4M3), with a scale for each column of the result; x is not rounded. Where x is STAGED
// its rows become float16, times a power of two that puts the largest number near the end of the range, and
// the weights become float16 in registers by one instruction for two. Elsewhere they become bfloat16.
// GROUPED: the sums of a chunk meet its scales, which come with its weights. Those of MX are four powers of
// two, of 32 channels each, of which a lane takes 8.
//
// SEND: the result goes to the inboxes of ranks, for the sum that follows (see all_reduce.cu).
#include "common.cuh"
#include "inbox.cuh"

#ifndef NT  // groups of 8 rows of x
#define NT 1
#endif
#ifndef MT  // weight tiles that share a load of x
#define MT 1
#endif
#ifndef HALF  // 1: tiles have 8 rows (narrow outputs) and chunks 128 k
#define HALF 0
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef STAGED  // x (times the norm weight) is kept in shared memory; E4M3: so many rows at most
#define STAGED 0
#endif
#ifndef GATE  // 1: x * sigmoid(by) first; 2 and 3: the RMSNorm of each head of x * silu(by) or sigmoid(by)
#define GATE 0
#endif
#ifndef HEAD  // elements of such a head
#define HEAD 128
#endif
#ifndef E4M3  // 1: weights are e4m3 with a scale for each row
#define E4M3 0
#endif
// 1, 2 or 4: with a scale for each row and 128 k, which is a chunk (E4M3, not HALF); a warp takes so many
// chunks that follow each other, whose scales come together.
#ifndef GROUPED
#define GROUPED 0
#endif
#ifndef MX  // 1: scales of chunks are four exponents, a byte each, 127 more than they mean (GROUPED)
#define MX 0
#endif
#ifndef SEND  // ranks; 0: none
#define SEND 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up;
                  // 5: bf16, and the first columns go through a convolution over TAPS tokens of their
                  // row, and silu
#define EPILOGUE 0
#endif

constexpr int TAPS = 4;
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int TILE_ROWS = HALF || GATED ? 8 : 16;  // output columns of a tile
constexpr int COLS = MT * TILE_ROWS;               // and of a block at a time
constexpr int SIZE = E4M3 ? 1 : 2;  // bytes of a weight
constexpr int ROW_BYTES = HALF ? 256 : 128, CHUNK_K = ROW_BYTES / SIZE;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;  // pieces of a row
constexpr int XV = 2 / SIZE;                // 16-byte pieces of x that meet a piece of the weights
constexpr int WEIGHT_BYTES = 2048 * MT, CHUNK_BYTES = WEIGHT_BYTES + GROUPED * 64 * MT;
constexpr int RUN = GROUPED ? GROUPED : 1;  // chunks of a warp that follow each other
constexpr bool HALVES = E4M3 && STAGED;
constexpr int CHAINS = HALVES ? 2 : 1;  // of sums
constexpr int KEPT = HALVES ? STAGED : NT * 8;  // rows of x whose sums are worth keeping
constexpr int PAD = HALVES ? 16 : 0;            // bytes between rows of x in shared memory
constexpr int OUTPUTS = NT * 8 * COLS, PER_THREAD = (OUTPUTS + THREADS - 1) / THREADS;

#if E4M3
typedef unsigned char weight;
#else
typedef bf16 weight;
#endif

struct Params {
  const bf16* x;      // [m, x_stride]
  const weight* w;    // [n, k]; gated: gate rows, then up rows
  const float* scale; // of the rows of w, if they are e4m3; GROUPED: [rows / shared ones, chunks]
  const float* norm;  // [k]; [HEAD] of heads
  const bf16* by;     // [m, by_stride], or null
  const float* bias;  // [n] or null
  void* out;          // [m, out_stride]
  int m, n, k, x_stride, by_stride, out_stride;  // n: output columns
  float eps, factor;  // of what is stored or added
  int shared;         // GROUPED: 2 to the power of it rows of w share their scales
#if SEND
  u32* inbox[8];     // of every rank
  const u32* state;  // sums so far
  long long half;    // words of one of the two inboxes
  int rank;
#endif
#if EPILOGUE == 5
  const float* taps;                    // [channels, TAPS]
  bf16* state;                          // [units, channels, TAPS - 1], the last inputs
  const int *reads, *writes, *marks;    // units of each row: what it begins with, or 0, and leaves; [m, 3]
  int channels, s_channel, s_place;
  long long s_unit;
#endif
};

#if SEND
static_assert(EPILOGUE == 0);
// 8 columns of a row, of which a lane each has one; `to`: where those of the first lane belong.
__device__ __forceinline__ void send(const Params& p, long long to, bool here, float y) {
  uint4 v;
  v.x = pack2(y, __shfl_down_sync(~0u, y, 1));
  v.y = __shfl_down_sync(~0u, v.x, 2), v.z = __shfl_down_sync(~0u, v.x, 4);
  v.w = __shfl_down_sync(~0u, v.x, 6);
  if (!here) return;
#pragma unroll
  for (int r = 0; r < SEND; ++r) send(reinterpret_cast<uint4*>(p.inbox[r] + to), tidy(v));
}
#endif

#if EPILOGUE == 5
// Of a row the units that it begins with (0: none) and leaves; of one of its channels weights and last
// inputs.
struct Window {
  int read = 0, write, mark;
  __align__(16) float taps[TAPS];
  bf16 before[TAPS - 1];

  __device__ __forceinline__ void find(const Params& p, int row) {
    read = p.reads[row], write = p.writes[row], mark = p.marks[3 * row + 2];
  }
  __device__ __forceinline__ bf16* place(const Params& p, int unit, int n) const {
    return p.state + unit * p.s_unit + (long long)n * p.s_channel;
  }
  __device__ __forceinline__ void load(const Params& p, int n) {
    *reinterpret_cast<float4*>(taps) = *reinterpret_cast<const float4*>(p.taps + n * TAPS);
    const bf16* from = place(p, read, n);
#pragma unroll
    for (int i = 0; i < TAPS - 1; ++i) before[i] = read > 0 ? from[i * p.s_place] : f2bf(0.f);
  }
  __device__ __forceinline__ void leave(const Params& p, int unit, int n, bf16 x) const {
    bf16* to = place(p, unit, n);
#pragma unroll
    for (int i = 0; i < TAPS - 1; ++i) to[i * p.s_place] = i + 1 < TAPS - 1 ? before[i + 1] : x;
  }
  // What the convolution makes of x, the newest input.
  __device__ __forceinline__ float take(const Params& p, int n, bf16 x) const {
    float y = 0.f;
#pragma unroll
    for (int i = 0; i < TAPS; ++i) y = fmaf(taps[i], bf2f(i < TAPS - 1 ? before[i] : x), y);
    leave(p, write, n, x);
    if (mark > 0) leave(p, mark, n, x);
    return gate<false>(y, 1.f);
  }
};
#endif

// Which piece of a row another one stands in the place of, so that lanes read different banks.
__device__ __forceinline__ int turned(int piece, int row) {
  return piece ^ (MX ? (row & 3) << 1 : (row & 1) << 2);
}
// The first of a lane's 8 channels in piece v of a part of a chunk.
__device__ __forceinline__ int channel_of(int t, int v) {
  return MX ? v * 32 + t * 8 : t * (16 / SIZE) + v * 8;
}
// Of four exponents, one's power of two.
__device__ __forceinline__ float power_of(float exponents, int group) {
  return __uint_as_float(max((__float_as_uint(exponents) >> (8 * group) & 255) << 23, 1u << 22));
}
// RUN floats that other lanes read too.
__device__ __forceinline__ void cp_async_run(u32 dst, const float* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(4 * RUN) : "memory");
}
__device__ __forceinline__ float lds_float(u32 addr) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(addr) : "memory");
  return r;
}
// Four e4m3 weights, two of them as bfloat16: the bits fit into place and are 2^120 too small.
__device__ __forceinline__ u32 widen(u32 bits, u32 shifted) {
  u32 r = (bits & 0x80008000u) | (shifted & 0x07f007f0u);
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(r) : "r"(0x7b807b80u));
  return r;
}
__device__ __forceinline__ u32 even(u32 w) { return widen(w << 8, w << 4); }
__device__ __forceinline__ u32 odd(u32 w) { return widen(w, w >> 4); }
__device__ __forceinline__ void mma_halves(float (&d)[4], u32 lo, u32 hi, u32 x0, u32 x1) {
  u32 a[4] = {};
  halves(lo, a[0], a[2]);
  if (!HALF) halves(hi, a[1], a[3]);
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x0), "r"(x1));
}
// The largest of a pair of bfloat16 and those before, without signs.
__device__ __forceinline__ u32 most2(u32 most, u32 x) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(x & 0x7fff7fffu));
  return most;
}
__device__ __forceinline__ u32 most8(u32 most, const uint4& v) {
  return most2(most2(most2(most2(most, v.x), v.y), v.z), v.w);
}
// Two of bfloat16 times a power of two as float16.
__device__ __forceinline__ u32 halved(u32 x, float by) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi2f(x) * by), "f"(lo2f(x) * by));
  return r;
}
// k = 4 of the weights lo, hi with 4 of x, paired as ``even`` and ``odd`` leave them.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], u32 lo, u32 hi, u32 x0, u32 x1) {
  const u32 b0 = __byte_perm(x0, x1, 0x5410), b1 = __byte_perm(x0, x1, 0x7632);
  if (HALF)
    mma(d, even(lo), 0, odd(lo), 0, b0, b1);
  else
    mma(d, even(lo), even(hi), odd(lo), odd(hi), b0, b1);
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 lo, u32 hi, u32 x0, u32 x1) {
  if (HALVES)
    mma_halves(d, lo, hi, x0, x1);
  else
    mma_e4m3(d, lo, hi, x0, x1);
}

// Two of x times their factors, and what the gate makes of z.
__device__ __forceinline__ u32 let_through(u32 x, u32 z, float lo, float hi) {
  const float a = __fdividef(GATE == 2 ? lo2f(z) : 1.f, 1.f + exp2_fast(-1.442695041f * lo2f(z)));
  const float b = __fdividef(GATE == 2 ? hi2f(z) : 1.f, 1.f + exp2_fast(-1.442695041f * hi2f(z)));
  return pack2(lo2f(x) * lo * a, hi2f(x) * hi * b);
}
// A row of at most 4 * THREADS * 8 elements, gated, into shared memory. A head is of neighbouring lanes.
__device__ __forceinline__ void stage_gated(const Params& p, int row, u32 to) {
  constexpr int MOST = 4;
  const bf16 *x = p.x + (long long)row * p.x_stride, *by = p.by + (long long)row * p.by_stride;
  uint4 v[MOST], z[MOST];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int k = (i * THREADS + threadIdx.x) * 8;
    v[i] = k < p.k ? *reinterpret_cast<const uint4*>(x + k) : uint4{};
    z[i] = k < p.k ? *reinterpret_cast<const uint4*>(by + k) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int k = (i * THREADS + threadIdx.x) * 8;
    float4 f0 = {1.f, 1.f, 1.f, 1.f}, f1 = f0;
    if (GATE > 1) {
      float sum = square2(v[i].x) + square2(v[i].y) + square2(v[i].z) + square2(v[i].w);
#pragma unroll
      for (int d = 1; d < HEAD / 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      const float s = rsqrtf(sum / HEAD + p.eps);
      const float4* norm = reinterpret_cast<const float4*>(p.norm + k % HEAD);
      f0 = norm[0], f1 = norm[1];
      f0 = {f0.x * s, f0.y * s, f0.z * s, f0.w * s};
      f1 = {f1.x * s, f1.y * s, f1.z * s, f1.w * s};
    }
    if (k < p.k)
      sts128(to + k * 2, {let_through(v[i].x, z[i].x, f0.x, f0.y), let_through(v[i].y, z[i].y, f0.z, f0.w),
                          let_through(v[i].z, z[i].z, f1.x, f1.y), let_through(v[i].w, z[i].w, f1.z, f1.w)});
  }
}

// What a thread needs of the norm's weight for its first pieces of a row, which nothing has to be waited for.
// No kernel has read it since the step before, so it comes from memory.
constexpr int FIRST = NORM ? 2 : 1;
struct Factors {
  float4 of[FIRST][2];
  __device__ __forceinline__ void load(const Params& p) {
#pragma unroll
    for (int i = 0; i < FIRST; ++i) {
      const int k = (i * THREADS + threadIdx.x) * 8;
      if (k >= p.k) break;
      of[i][0] = *reinterpret_cast<const float4*>(p.norm + k);
      of[i][1] = *reinterpret_cast<const float4*>(p.norm + k + 4);
    }
  }
};
// A row of x, times the norm's weight if there is one, into shared memory. Returns what the thread has seen:
// the sum of the squares, and the largest numbers, without signs.
struct Seen {
  float squares = 0.f;
  u32 most = 0;
};
__device__ __forceinline__ Seen stage_row(const Params& p, int row, u32 to, const Factors& first) {
  constexpr int AT_ONCE = NORM ? FIRST : 6;  // loads under way
  Seen seen;
  for (int begin = threadIdx.x * 8; begin < p.k; begin += AT_ONCE * THREADS * 8) {
    uint4 v[AT_ONCE];
    float4 norm[AT_ONCE][2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int k = begin + i * THREADS * 8;
      if (k >= p.k) break;
      v[i] = *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
#pragma unroll
      for (int h = 0; h < (NORM ? 2 : 0); ++h)
        norm[i][h] = begin < THREADS * 8 ? first.of[i % FIRST][h]
                                         : *reinterpret_cast<const float4*>(p.norm + k + h * 4);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int k = begin + i * THREADS * 8;
      if (k >= p.k) break;
      uint4& x = v[i];
      if (NORM) {
        const float4 &n0 = norm[i][0], &n1 = norm[i][1];
        seen.squares += square2(x.x) + square2(x.y) + square2(x.z) + square2(x.w);
        x = {mul2(x.x, n0.x, n0.y), mul2(x.y, n0.z, n0.w), mul2(x.z, n1.x, n1.y), mul2(x.w, n1.z, n1.w)};
      }
      seen.most = most8(seen.most, x);
      sts128(to + k * 2, x);
    }
  }
  return seen;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) skinny_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float red[2][WARPS][KEPT][MT * 16 + 1];
  __shared__ float red_square[WARPS][NT * 8];
  __shared__ u32 red_most[HALVES ? WARPS : 1][HALVES ? STAGED : 1];
  __shared__ float back[HALVES ? STAGED : 1];  // what x was divided by
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + COLS - 1) / COLS, chunks = p.k / CHUNK_K;
  const int first = int((long long)tiles * blockIdx.x / gridDim.x),
            last = int((long long)tiles * (blockIdx.x + 1) / gridDim.x);
  const u32 ring = smem_addr(smem) + warp * (STAGES * CHUNK_BYTES),
            staged = smem_addr(smem) + WARPS * STAGES * CHUNK_BYTES;

  // Row `lane / ROW_CHUNKS` of a tile, and how far the rows of this lane's other loads are. The last tile is
  // moved back so that all its rows exist.
  const int my_row = lane / ROW_CHUNKS, piece = lane % ROW_CHUNKS;
  auto first_column = [&](int tile) { return min(tile * COLS, p.n - COLS); };
  auto next_chunk = [](int chunk) { return chunk + 1 + (chunk % RUN < RUN - 1 ? 0 : (WARPS - 1) * RUN); };
  int in_tile = first, in_chunk = warp * RUN;
  if (in_chunk >= chunks) in_tile = last;  // this warp has nothing to add
  auto source = [&]() {
    return p.w + (long long)(first_column(in_tile) + my_row) * p.k + in_chunk * CHUNK_K + piece * (16 / SIZE);
  };
  const weight* in = source();
  const u64 policy = policy_once();
  auto load = [&](int stage) {
    if (in_tile < last) {
      const u32 to = ring + stage * CHUNK_BYTES;
#pragma unroll
      for (int j = 0; j < 4 * MT; ++j) {
        constexpr int STEP = 32 / ROW_CHUNKS;  // rows between two loads
        const int row = j * STEP;
        const long long off =
            GATED ? (long long)(row / 16 * 8 + row % 8) * p.k + (row % 16 >= 8 ? (long long)p.n * p.k : 0)
                  : (long long)row * p.k;
        cp_async_once(to + (row + my_row) * ROW_BYTES + turned(piece, row + my_row) * 16, in + off, 16,
                      policy);
      }
      if (GROUPED && lane < MT * 16 && in_chunk % RUN == 0) {
        const int row = lane / 16 * TILE_ROWS + lane % 8 + (lane % 16 >= 8 ? (GATED ? p.n : 8) : 0);
        cp_async_run(to + WEIGHT_BYTES + lane * (4 * RUN),
                     p.scale + (long long)(first_column(in_tile) + row >> p.shared) * chunks + in_chunk);
      }
      const int step = next_chunk(in_chunk) - in_chunk;
      in_chunk += step;
      in += step * CHUNK_K;
      if (in_chunk >= chunks) {
        in_chunk = warp * RUN;
        ++in_tile;
        in = source();
      }
    }
    cp_async_commit();
  };
  Factors factors;
  if (STAGED && NORM && !GATE) factors.load(p);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) load(s);
#if EPILOGUE == 5
  Window windows[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int e = i * THREADS + threadIdx.x;
    if (e < OUTPUTS && e / COLS < p.m) windows[i].find(p, e / COLS);
  }
#endif
  pdl_wait();
  pdl_launch();
#if SEND
  const long long to_inboxes = (__ldcg(p.state) & 1) * p.half + (long long)p.rank * p.m * (p.n / 2);
#endif

  int stage = 0;
  float square[NT] = {};
  if (STAGED) {
    for (int row = 0; row < p.m; ++row) {
      const u32 to = staged + row * p.k * 2 + row * PAD;
      if (GATE) stage_gated(p, row, to);
      Seen seen;
      if (!GATE) seen = stage_row(p, row, to, factors);
      float sum = seen.squares;
      if (HALVES) {
        for (int k = threadIdx.x * 8; GATE && k < p.k; k += THREADS * 8)
          seen.most = most8(seen.most, lds128(to + k * 2));
        const u32 most = __reduce_max_sync(~0u, max(seen.most >> 16, seen.most & 0xffff));
        if (lane == 0) red_most[warp][row] = most;
      }
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (NORM && lane == 0) red_square[warp][row] = sum;
    }
    __syncthreads();
    if (HALVES) {
      for (int row = 0; row < p.m; ++row) {
        u32 most = 0;
#pragma unroll
        for (int v = 0; v < WARPS; ++v) most = max(most, red_most[v][row]);
        const u32 exponent = max(most >> 7, 27u);  // biased; the largest becomes 2^14 to 2^15
        const float by = __uint_as_float((127 + 14 + 127 - exponent) << 23);
        if (threadIdx.x == 0) back[row] = __uint_as_float((exponent - 14) << 23);
        for (int k = threadIdx.x * 8; k < p.k; k += THREADS * 8) {
          const u32 at = staged + (row * p.k + k) * 2 + row * PAD;
          const uint4 v = lds128(at);
          sts128(at, {halved(v.x, by), halved(v.y, by), halved(v.z, by), halved(v.w, by)});
        }
      }
      __syncthreads();
    }
  }
  for (int tile = first; tile < last; ++tile) {
    float kept[PER_THREAD];  // what ADD adds to
    if (EPILOGUE == 1) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        const int e = i * THREADS + threadIdx.x, row = e / COLS, n = first_column(tile) + e % COLS;
        kept[i] = e < OUTPUTS && row < p.m
                      ? bf2f(static_cast<const bf16*>(p.out)[(long long)row * p.out_stride + n])
                      : 0.f;
      }
    }
#if EPILOGUE == 5
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int e = i * THREADS + threadIdx.x, n = first_column(tile) + e % COLS;
      if (e < OUTPUTS && e / COLS < p.m && n < p.channels) windows[i].load(p, n);
    }
#endif
    float scales[PER_THREAD][2] = {};
    if (E4M3 && !GROUPED) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        const int n = first_column(tile) + (i * THREADS + threadIdx.x) % COLS;
        scales[i][0] = p.scale[n];
        if (GATED) scales[i][1] = p.scale[n + p.n];
      }
    }
    float acc[MT][NT][4] = {}, more[CHAINS > 1 ? MT : 1][CHAINS > 1 ? NT : 1][4] = {};
    float total[MT][NT][4] = {};  // GROUPED: sums times their scales
    float by_run[MT][2][RUN];
    constexpr int PARTS = ROW_BYTES / 64, PART_K = 64 / SIZE;
    typedef uint4 Pieces[PARTS][NT][XV];  // of x, that meet a chunk
    auto fetch = [&](Pieces& to, int chunk) {
#pragma unroll
      for (int h = 0; h < PARTS; ++h)
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const int row = j * 8 + g;
#pragma unroll
          for (int v = 0; v < XV; ++v) {
            to[h][j][v] = {};
            const int k = chunk * CHUNK_K + h * PART_K + channel_of(t, v);
            if (row >= p.m || chunk >= chunks) continue;
            to[h][j][v] = STAGED ? lds128(staged + (row * p.k + k) * 2 + row * PAD)
                                 : *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
          }
        }
    };
    constexpr bool EARLY = !STAGED && NT == 1;  // x comes a chunk ahead; more of it has no registers
    Pieces ahead;
    if (EARLY) fetch(ahead, warp * RUN);
    for (int chunk = warp * RUN; chunk < chunks; chunk = next_chunk(chunk)) {
      Pieces b;
      if (EARLY) {
#pragma unroll
        for (int h = 0; h < PARTS; ++h)
#pragma unroll
          for (int v = 0; v < XV; ++v) b[h][0][v] = ahead[h][0][v];
        fetch(ahead, next_chunk(chunk));
      } else {
        fetch(b, chunk);
      }
      cp_async_wait<STAGES - 2>();
      __syncwarp();
      load(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 from = ring + stage * CHUNK_BYTES;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
      for (int i = 0; i < (GROUPED ? MT : 0); ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float(&by)[RUN] = by_run[i][h];
          const u32 at = from + WEIGHT_BYTES + (i * 16 + h * 8 + g) * (4 * RUN);
          if (chunk % RUN) {
#pragma unroll
            for (int r = 0; r + 1 < RUN; ++r) by[r] = by[r + 1];
          } else if (RUN == 4) {
            const uint4 v = lds128(at);
            by[0] = __uint_as_float(v.x), by[1 % RUN] = __uint_as_float(v.y);
            by[2 % RUN] = __uint_as_float(v.z), by[3 % RUN] = __uint_as_float(v.w);
          } else {
#pragma unroll
            for (int r = 0; r < RUN; ++r) by[r] = lds_float(at + r * 4);
          }
        }
      // The sums of a group have met its scales.
      auto meet = [&](int i, int j, float lo, float hi) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float sum = CHAINS > 1 ? acc[i][j][e] + more[i][j][e] : acc[i][j][e];
          total[i][j][e] += sum * (e < 2 ? lo : hi);
          acc[i][j][e] = 0.f;
          if (CHAINS > 1) more[i][j][e] = 0.f;
        }
      };
#pragma unroll
      for (int h = 0; h < PARTS; ++h) {
        if (NORM && !STAGED) {
#pragma unroll
          for (int piece = 0; piece < XV; ++piece) {
            const float* norm = p.norm + chunk * CHUNK_K + h * PART_K + channel_of(t, piece);
            const float4 n0 = *reinterpret_cast<const float4*>(norm),
                         n1 = *reinterpret_cast<const float4*>(norm + 4);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              uint4& v = b[h][j][piece];
              if (tile == first) square[j] += square2(v.x) + square2(v.y) + square2(v.z) + square2(v.w);
              v = {mul2(v.x, n0.x, n0.y), mul2(v.y, n0.z, n0.w), mul2(v.z, n1.x, n1.y),
                   mul2(v.w, n1.z, n1.w)};
            }
          }
        }
        const u32 at_piece = turned(h * 4 + (MX ? t / 2 : t), g) * 16 + (MX ? t % 2 * 8 : 0);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          const u32 at = from + (i * (HALF ? 8 : 16) + g) * ROW_BYTES + at_piece;
          uint4 lo, hi = {};
          if (MX) {  // of two groups
            const u32 next = at + 8 * ROW_BYTES;
            const uint2 a = lds_two(at), b = lds_two(at ^ 32), c = lds_two(next), d = lds_two(next ^ 32);
            lo = {a.x, a.y, b.x, b.y}, hi = {c.x, c.y, d.x, d.y};
          } else {
            lo = lds128(at);
            if (!HALF) hi = lds128(at + 8 * ROW_BYTES);
          }
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const uint4 &x = b[h][j][0], &y = b[h][j][XV - 1];
            if (E4M3) {
              float(&other)[4] = CHAINS > 1 ? more[i][j] : acc[i][j];
              multiply(acc[i][j], lo.x, hi.x, x.x, x.y);
              multiply(other, lo.y, hi.y, x.z, x.w);
              if (MX) meet(i, j, power_of(by_run[i][0][0], 2 * h), power_of(by_run[i][1][0], 2 * h));
              multiply(acc[i][j], lo.z, hi.z, y.x, y.y);
              multiply(other, lo.w, hi.w, y.z, y.w);
              if (MX) meet(i, j, power_of(by_run[i][0][0], 2 * h + 1), power_of(by_run[i][1][0], 2 * h + 1));
            } else {
              mma(acc[i][j], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
              mma(acc[i][j], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
            }
          }
        }
      }
      __syncwarp();
      if (GROUPED && !MX) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int j = 0; j < NT; ++j) meet(i, j, by_run[i][0][0], by_run[i][1][0]);
      }
    }

    const int buffer = (tile - first) & 1;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = j * 8 + t * 2 + (e & 1);
          float y = CHAINS > 1 ? acc[i][j][e] + more[i][j][e] : acc[i][j][e];
          if (GROUPED) y = total[i][j][e];
          if (KEPT == NT * 8 || row < KEPT) red[buffer][warp][row][i * 16 + g + (e >= 2 ? 8 : 0)] = y;
        }
      if (NORM && !STAGED && tile == first) {
        square[j] += __shfl_xor_sync(~0u, square[j], 1);
        square[j] += __shfl_xor_sync(~0u, square[j], 2);
        if (t == 0) red_square[warp][j * 8 + g] = square[j];
      }
    }
    __syncthreads();  // one a tile: the other buffer's readers passed the one before
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int e = i * THREADS + threadIdx.x, place = e / COLS, col = e % COLS, n = first_column(tile) + col;
      const bool live = e < OUTPUTS && place < p.m && n >= tile * COLS;  // n below: the tile before has it
      if (!SEND && !live) continue;
      const int row = live ? place : 0;  // lanes beside those that send go with them
      const int at = HALF || GATED ? col / 8 * 16 + col % 8 : col;
      float y = 0.f, up = 0.f, s = 0.f;
#pragma unroll
      for (int v = 0; v < WARPS; ++v) {
        y += red[buffer][v][row][at];
        if (GATED) up += red[buffer][v][row][at + 8];
        if (NORM) s += red_square[v][row];
      }
      if (E4M3) {
        const float by = HALVES ? back[row] : 1.f;
        y *= GROUPED ? by : scales[i][0] * by;
        up *= GROUPED ? by : scales[i][1] * by;
      }
      if (NORM) {
        const float f = rsqrtf(s / p.k + p.eps);
        y *= f;
        up *= f;
      }
      if (!GATED && p.bias) y += p.bias[n];
      if (EPILOGUE < 2) y *= p.factor;
#if SEND
      send(p, to_inboxes + ((long long)row * p.n + n) / 2, live && col % 8 == 0, y);
      continue;
#endif
      const long long o = (long long)row * p.out_stride + n;
      if (EPILOGUE == 3) {
        static_cast<float*>(p.out)[o] = y;
      } else {
        if (GATED) y = gate<EPILOGUE == 4>(y, up);
        if (EPILOGUE == 1) y += kept[i];
#if EPILOGUE == 5
        if (n < p.channels) y = windows[i].take(p, n, f2bf(y));
#endif
        static_cast<bf16*>(p.out)[o] = f2bf(y);
      }
    }
  }
}
