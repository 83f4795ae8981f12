// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for some rows m and weights of 4 or 8 bits in groups with a scale
// and a zero (``quant/integers.py``): x is stationary. The SLICES blocks of a cluster, and in each WK warps,
// have all of k between them; each warp keeps KB blocks of k of all rows in registers, in the order in which
// ``mma`` takes them, and weights stream past it. WN warps have the same channels and load x for each other,
// so a multiprocessor reads and norms a slice of x alone.
//
// A warp reads its rows of each tile by a cp.async ring of its own, which begins before the wait for the
// previous kernel; a lane loads the very words that it multiplies. What a warp has of a tile it sends to the
// block that finishes those columns (st.async), as it lies in registers. That block adds up what all slices
// and warps have sent, LAG tiles later, so no warp waits for another of its block.
//
// Integers are exact in bfloat16: q + 128 of 4 bits, q - 128 of 8. They are multiplied so; what is too much,
// and the zero, comes off with the sum of a group of x. The sum of a group is float32 when it meets the
// scale, so nothing is rounded but x and the result.
#include "common.cuh"

#ifndef BITS
#define BITS 4
#endif
#ifndef GROUP  // channels with one scale: 32, 64 or 128
#define GROUP 128
#endif
#ifndef WHOLE  // 1: zeros are whole numbers, in bfloat16 as the products need them; 0: any, in float16
#define WHOLE 1
#endif
#ifndef NT  // groups of 8 rows of x: 1 or 2
#define NT 2
#endif
#ifndef MT  // 16 weight rows of a warp in a tile
#define MT 1
#endif
#ifndef KB  // blocks of channels of a warp
#define KB 4
#endif
#ifndef WK  // warps that share the k of a slice
#define WK 1
#endif
#ifndef WN  // warps beside each other, with weight rows of their own
#define WN 8
#endif
#ifndef SLICES  // blocks of a cluster that share the k of a tile: 2, 4 or 8
#define SLICES 8
#endif
#ifndef WIDTH  // bytes of constants that a lane loads at a time
#define WIDTH 16
#endif
#ifndef STAGES
#define STAGES 5
#endif
#ifndef LAG  // tiles until one is finished
#define LAG 1
#endif
#ifndef EARLY  // stages asked for before the wait for the previous kernel; x does not wait for the others
#define EARLY (STAGES - 1)
#endif
#ifndef RESIDENT  // blocks for which a multiprocessor has room, those of the next kernel among them
#define RESIDENT 1
#endif
#ifndef HALF  // 1: products of float16, of 4 bits only: see below
#define HALF 0
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

constexpr int WARPS = WK * WN, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int OWN = MT * 16, W_ROWS = WN * OWN;      // weight rows of a warp, and of a tile
constexpr int COLS = GATED ? W_ROWS / 2 : W_ROWS;    // output columns of a tile
constexpr int BLOCK = 128, ROW_BYTES = BLOCK / 8 * BITS;  // channels that lie together, of a row
constexpr int PIECES = BITS / 4;                     // of 16 bytes, for a lane, of a row's block
constexpr int PER = BLOCK / GROUP, STEPS = GROUP / 16;
constexpr int CHAINS = NT == 1 ? 2 : 1;  // of sums
constexpr int WORD_BYTES = 16 * KB * ROW_BYTES, OF_ROW = KB * PER * 4;
constexpr int STAGE_BYTES = WORD_BYTES + 16 * OF_ROW;  // of 16 rows
constexpr int BITES = OF_ROW / WIDTH, LOADS = (16 * BITES + 31) / 32;  // of the constants
constexpr int X_ROW = KB * BLOCK * 2 + 16;  // bytes of a row of x on its way to registers
constexpr int PAIRS = NT * 4;               // of rows, which a warp loads at a time
constexpr int LOADED = (PAIRS + WN - 1) / WN;
// Who finishes what of a warp's 16 rows: one of its columns' blocks, or PARTS of them, which have groups of
// rows of x (BY_ROWS) and lanes (BY_LANES) each.
constexpr int TURNS = WN > SLICES ? WN / SLICES : 1, PARTS = SLICES > WN ? SLICES / WN : 1;
constexpr int BY_ROWS = PARTS > 1 ? NT : 1, BY_LANES = PARTS / BY_ROWS;
constexpr int LANES = 32 / BY_LANES, COLUMNS = 8 / BY_LANES, ROWS = NT * 8 / BY_ROWS;
constexpr int SENT = TURNS * MT * (NT / BY_ROWS) * LANES * 16;  // bytes that a block gets of a warp
constexpr int SOURCES = SLICES * WK, GOT_TILE = SOURCES * SENT;
constexpr int HALVES = GATED ? 1 : 2, SHARE = TURNS * MT * HALVES * COLUMNS;  // columns that a block finishes
constexpr int PER_THREAD = (ROWS * SHARE + THREADS - 1) / THREADS;
constexpr int KEPT = 2 * LAG + 2;  // tiles whose sums are on their way, at most
constexpr int STAGE = WARPS * STAGE_BYTES, X_BYTES = WK * NT * 8 * X_ROW;
// x goes through the last stage, which is asked for behind it.
constexpr int RING_BYTES = (STAGES - 1) * STAGE + (X_BYTES > STAGE ? X_BYTES : STAGE);

static_assert(SLICES > 1 && (WN % SLICES == 0 || SLICES % WN == 0), "columns go to blocks evenly");
static_assert(8 % BY_LANES == 0 && PARTS == BY_ROWS * BY_LANES, "lanes go to blocks evenly");

struct Params {
  const bf16* x;         // [m, x_stride]
  const u32* w;          // [n, blocks * ROW_BYTES / 4]; gated: gate rows, then up rows
  const u32* constants;  // [n, blocks * PER]
  const float* norm;     // [k]
  const float* bias;     // [n] or null
  void* out;             // [m, out_stride]
  int m, n, k, x_stride, out_stride, blocks;  // n: output columns; blocks of k
  float eps;
};

#include "integers.cuh"

// The larger of two of bfloat16, without signs.
__device__ __forceinline__ u32 larger(u32 v) { return max(v & 0x7fffu, v >> 16 & 0x7fffu); }
// Two weights of a word, those at place p, as float16 of the smallest kind: 2^-24 of those at even places,
// 2^-20 at odd ones.
__device__ __forceinline__ u32 small(u32 word, int p, u32 mask) {
  return (p < 2 ? word : word >> 8) & (p % 2 ? mask << 4 : mask);
}
__device__ __forceinline__ u32 pack_halves(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 times(u32 v, float f) { return pack_halves(lo2f(v) * f, hi2f(v) * f); }
// As ``mma``, of float16.
__device__ __forceinline__ void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Floats for a block of the cluster, whose barrier counts them.
__device__ __forceinline__ void tell(u32 addr, u32 barrier, int rank, float v) {
  asm volatile("{\n.reg .u32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 bar, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [bar];\n}"
               ::"r"(addr), "r"(barrier), "r"(rank), "f"(v) : "memory");
}
__device__ __forceinline__ void tell4(u32 addr, u32 barrier, int rank, const float* v) {
  asm volatile("{\n.reg .u32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 bar, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3,%4,%5,%6}, "
               "[bar];\n}"
               ::"r"(addr), "r"(barrier), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) spread_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float squares_of[SOURCES][NT * 8];       // of the rows of x
  __shared__ __align__(16) float sums_of[WK][KB * PER][NT * 8];  // of groups of x
  __shared__ __align__(8) float scales_of[WK][NT * 8];  // of rows of x
  __shared__ __align__(8) u64 delivered[KEPT];        // tiles' sums
  __shared__ __align__(8) u64 squared[1];
  __shared__ __align__(8) u64 paced[2];           // warps of the block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wk = warp / WN, wn = warp % WN;
  const int tiles = (p.n + COLS - 1) / COLS, slice = blockIdx.x % SLICES, parts = gridDim.x / SLICES,
            part = blockIdx.x / SLICES;
  const int first = int((long long)tiles * part / parts), last = int((long long)tiles * (part + 1) / parts);
  const int source = slice * WK + wk;
  const int own_block = source * KB, left = p.blocks - own_block;  // behind `left` there are none
  const u32 ring = smem_addr(smem) + warp * STAGE_BYTES, got = smem_addr(smem) + RING_BYTES,
            passing = smem_addr(smem) + (STAGES - 1) * STAGE + wk * (NT * 8 * X_ROW),
            all = smem_addr(delivered);
  if (threadIdx.x == 0) {
    barrier_init(smem_addr(squared), 1);
    barrier_init(smem_addr(paced), WARPS);
    barrier_init(smem_addr(paced) + 8, WARPS);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) barrier_init(all + i * 8, 1);
    barriers_visible();
    barrier_expect(smem_addr(squared), sizeof(squares_of));
#pragma unroll
    for (int i = 0; i < KEPT; ++i) barrier_expect(all + i * 8, GOT_TILE);
  }
  cluster_arrive();

  // The last tile is moved back so that all its rows exist.
  auto first_column = [&](int tile) { return min(tile * COLS, p.n - COLS); };
  // Rows of a tile in the weight, from its first column on.
  auto row_of = [&](int row) { return GATED ? row / 16 * 8 + row % 8 + (row % 16 >= 8 ? p.n : 0) : row; };
  const u32 row_bytes = p.blocks * ROW_BYTES, constants_bytes = p.blocks * (PER * 4);
  const u64 to_half = u64(row_bytes) * (GATED ? p.n : 8);
  const char* words = reinterpret_cast<const char*>(p.w) + u64(row_bytes) * row_of(wn * OWN + g) +
                      own_block * ROW_BYTES + t * 16;
  const char* constants[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; ++j)
    constants[j] = reinterpret_cast<const char*>(p.constants) +
                   u64(constants_bytes) * row_of(wn * OWN + (j * 32 + lane) / BITES) + own_block * (PER * 4) +
                   (j * 32 + lane) % BITES * WIDTH;
  // 16 rows of a tile, from row 16 i of the warp's on.
  auto load = [&](int tile, int i, int stage) {
    if (tile < last) {
      const u32 to = ring + stage * STAGE;
      const u32 row = first_column(tile) + i * (GATED ? 8 : 16);
      const char* in = words + u64(row_bytes) * row;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int b = 0; b < KB; ++b)
#pragma unroll
          for (int c = 0; c < PIECES; ++c)
            cp_async16(to + ((b * 2 + h) * PIECES + c) * 512 + lane * 16,
                       in + h * to_half + b * ROW_BYTES + c * 64, b < left ? 16 : 0);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane;
        if (e < 16 * BITES)
          cp_async_constants(to + WORD_BYTES + e * WIDTH, constants[j] + u64(constants_bytes) * row,
                             e % BITES * (WIDTH / 4) < left * PER ? WIDTH : 0);
      }
    }
    cp_async_commit();
  };
  // Lane % 16 takes 8 channels of each block of k, of row lane / 16 of two.
  const int channel = own_block * BLOCK + lane % 16 * 8;
  float4 norm[NORM ? KB : 1][2];
#pragma unroll
  for (int b = 0; b < (NORM ? KB : 0); ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      norm[b][h] = channel + b * BLOCK < p.k
                       ? *reinterpret_cast<const float4*>(p.norm + channel + b * BLOCK + h * 4)
                       : float4{};
#pragma unroll
  for (int s = 0; s < EARLY; ++s) load(first + s / MT, s % MT, s);

  pdl_wait();
  pdl_launch();

  {
    uint4 in[LOADED][KB];
#pragma unroll
    for (int i = 0; i < LOADED; ++i)
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        const int row = (i * WN + wn) * 2 + lane / 16, k = channel + b * BLOCK;
        in[i][b] = {};
        if (row < p.m && k < p.k)
          in[i][b] = *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
      }
#pragma unroll
    for (int s = EARLY; s < STAGES - 1; ++s) load(first + s / MT, s % MT, s);
    if (NORM) cluster_wait();  // the others' barriers are there
#pragma unroll
    for (int i = 0; i < LOADED; ++i) {
      const int row = (i * WN + wn) * 2 + lane / 16;
      if (PAIRS % WN && i * WN + wn >= PAIRS) break;
      float square = 0.f, sum[KB];
      u32 most = 0;
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        uint4& v = in[i][b];
        if (NORM) {
          const float4 lo = norm[b][0], hi = norm[b][1];
          square += square2(v.x) + square2(v.y) + square2(v.z) + square2(v.w);
          v = {mul2(v.x, lo.x, lo.y), mul2(v.y, lo.z, lo.w), mul2(v.z, hi.x, hi.y), mul2(v.w, hi.z, hi.w)};
        }
        sum[b] = add2(v.x) + add2(v.y) + add2(v.z) + add2(v.w);
#pragma unroll
        for (int d = 1; d < GROUP / 8; d *= 2) sum[b] += __shfl_xor_sync(~0u, sum[b], d);
        most = max(most, max(max(larger(v.x), larger(v.y)), max(larger(v.z), larger(v.w))));
      }
      float up = 1.f;  // what a row is multiplied by
      if (HALF) {
#pragma unroll
        for (int d = 1; d < 16; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
        const int exponent = min(max(int(most >> 7), 15), 225);  // with 127 added: of the largest, 2^14
        up = __uint_as_float((268 - exponent) << 23);
        if (lane % 16 == 0) scales_of[wk][row] = __uint_as_float((exponent + 10) << 23);
      }
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        uint4 v = in[i][b];
        if (HALF) {
          const float f = lane % 2 ? up * (1.f / 16.f) : up;
          v = {times(v.x, f), times(v.y, f), times(v.z, f), times(v.w, f)};
        }
        sts128(passing + row * X_ROW + b * (BLOCK * 2) + lane % 16 * 16, v);
        if (lane % (GROUP / 8) == 0)
          sums_of[wk][b * PER + lane % 16 / (GROUP / 8)][row] = HALF ? sum[b] * up * 0x1p-24f : sum[b];
      }
      if (NORM) {
#pragma unroll
        for (int d = 1; d < 16; d *= 2) square += __shfl_xor_sync(~0u, square, d);
        if (lane % 16 < SLICES)
          tell(smem_addr(&squares_of[source][row]), smem_addr(squared), lane % 16, square);
      }
    }
    if (!NORM) cluster_wait();
  }
  __syncthreads();
  u32 x[NT][KB][4][4];  // of 32 channels each
  float2 sums[KB * PER][NT];
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int b = 0; b < KB; ++b)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        ldmatrix(x[j][b][q],
                 passing + (j * 8 + lane % 8) * X_ROW + b * (BLOCK * 2) + lane / 8 * 16 + q * 64);
  __syncthreads();
#pragma unroll
  for (int b = 0; b < KB * PER; ++b)
#pragma unroll
    for (int j = 0; j < NT; ++j)
      sums[b][j] = *reinterpret_cast<const float2*>(&sums_of[wk][b][j * 8 + t * 2]);
  float2 scales[NT];
#pragma unroll
  for (int j = 0; j < (HALF ? NT : 0); ++j)
    scales[j] = *reinterpret_cast<const float2*>(&scales_of[wk][j * 8 + t * 2]);

  const u32 left_at = got + source * SENT + wn / SLICES * (SENT / TURNS) + lane % LANES * 16;
  const int rank = PARTS > 1 ? wn * PARTS + lane / LANES : wn % SLICES;  // of the first rows of x

  // What a thread finishes of each tile: rows of x, columns of the tile, and where their sums lie.
  int rows[PER_THREAD], columns[PER_THREAD], ats[PER_THREAD];
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int e = i * THREADS + threadIdx.x, m = e / SHARE, c = e % SHARE, column = c % COLUMNS,
              half = GATED ? 0 : c / COLUMNS % 2, ui = c / (COLUMNS * HALVES), part = slice % PARTS;
    const int of_warp = PARTS > 1 ? slice / PARTS : ui / MT * SLICES + slice;
    const int quad = (ui * (NT / BY_ROWS) + m / 8) * LANES + column * 4 + m % 8 / 2;
    rows[i] = m < ROWS ? m + part / BY_LANES * 8 : p.m;
    columns[i] = (of_warp * MT + ui % MT) * (8 * HALVES) + half * 8 + part % BY_LANES * COLUMNS + column;
    ats[i] = m < ROWS ? quad * 16 + half * 8 + m % 2 * 4 : 0;
  }
  float factor[PER_THREAD], kept[PER_THREAD], y[PER_THREAD], up[PER_THREAD];
  int place = 0, ended = 0, parity = 0;  // of the tile that is multiplied, and of that which is finished
  // Until all sums of a tile have come.
  auto await = [&](int tile) {
    barrier_wait(all + ended * 8, parity);
    if (threadIdx.x == 0) barrier_expect(all + ended * 8, GOT_TILE);
    if (NORM && tile == first) {
      barrier_wait(smem_addr(squared), 0);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        float s = 0.f;
#pragma unroll
        for (int v = 0; v < SOURCES; ++v) s += squares_of[v][rows[i] % (NT * 8)];
        factor[i] = rsqrtf(__fdividef(s, float(p.k)) + p.eps);
      }
    }
  };
  auto gather = [&](int tile) {
    const u32 from = got + ended * GOT_TILE;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      y[i] = up[i] = kept[i] = 0.f;
      if (EPILOGUE == 1 && tile >= first && rows[i] < p.m)
        kept[i] = bf2f(static_cast<const bf16*>(
            p.out)[(long long)rows[i] * p.out_stride + first_column(tile) + columns[i]]);
#pragma unroll
      for (int v = 0; v < SOURCES; ++v) {
        y[i] += lds32f(from + ats[i] + v * SENT);
        if (GATED) up[i] += lds32f(from + ats[i] + v * SENT + 8);
      }
    }
  };
  auto finish = [&](int tile) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int n = first_column(tile) + columns[i];
      float v = NORM ? y[i] * factor[i] : y[i];
      if (GATED) v = gate<EPILOGUE == 4>(v, NORM ? up[i] * factor[i] : up[i]);
      if (rows[i] >= p.m || n < tile * COLS) continue;  // n below: the tile before has it
      if (!GATED && p.bias) v += p.bias[n];
      const long long o = (long long)rows[i] * p.out_stride + n;
      if (EPILOGUE == 3)
        static_cast<float*>(p.out)[o] = v;
      else
        static_cast<bf16*>(p.out)[o] = f2bf(v + kept[i]);
    }
    if (++ended == KEPT) ended = 0, parity ^= 1;
  };

  const u32 mask = MASK ^ u32(p.m) >> 31;  // a register for all, which a constant would not get
  int stage = 0;
  for (int tile = first; tile < last; ++tile) {
    if (tile - LAG >= first) await(tile - LAG);
    gather(tile - LAG);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();
      constexpr int NEXT = STAGES - 1;
      load(tile + (i + NEXT) / MT, (i + NEXT) % MT, stage == 0 ? NEXT : stage - 1);
      const u32 from = ring + stage * STAGE;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      float acc[NT][4] = {};
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        uint4 w[2][PIECES];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < PIECES; ++c)
            w[h][c] = lds128(from + ((b * 2 + h) * PIECES + c) * 512 + lane * 16);
        u32 own[PER][2];
#pragma unroll
        for (int group = 0; group < PER; ++group)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            own[group][h] = lds32(from + WORD_BYTES + (h * 8 + g) * OF_ROW + (b * PER + group) * 4);
#pragma unroll
        for (int group = 0; group < PER; ++group) {
          float sum[NT][CHAINS][4] = {};
#pragma unroll
          for (int s = 0; s < STEPS; ++s) {  // 16 channels
            const int step = group * STEPS + s, q = step / 2, word = BITS == 4 ? q : step,
                      at = BITS == 4 ? step % 2 * 2 : 0;
            const u32* u = reinterpret_cast<const u32*>(w[0]);
            const u32* v = reinterpret_cast<const u32*>(w[1]);
            u32 a[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const u32 of = e % 2 ? v[word] : u[word];
              a[e] = HALF ? small(of, at + e / 2, mask) : two(of, at + e / 2, mask);
            }
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              const u32(&of_x)[4] = x[j][b][q];
              float(&chain)[4] = sum[j][s % CHAINS];
              if (HALF)
                mma_f16(chain, a[0], a[1], a[2], a[3], of_x[step % 2 * 2], of_x[step % 2 * 2 + 1]);
              else
                mma(chain, a[0], a[1], a[2], a[3], of_x[step % 2 * 2], of_x[step % 2 * 2 + 1]);
            }
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float scale = half2f(own[group][h]), zero = zero_of(own[group][h]) - (HALF ? 128.f : 0.f);
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float2 of_x = sums[b * PER + group][j];
                float total = sum[j][0][h * 2 + e];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) total += sum[j][c][h * 2 + e];
                acc[j][h * 2 + e] += (total - zero * (e ? of_x.y : of_x.x)) * scale;
              }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int behind = BY_ROWS > 1 ? 0 : j;
#pragma unroll
        for (int e = 0; e < (HALF ? 4 : 0); ++e) acc[j][e] *= e % 2 ? scales[j].y : scales[j].x;
        tell4(left_at + place * GOT_TILE + (i * (NT / BY_ROWS) + behind) * (LANES * 16), all + place * 8,
              rank + (BY_ROWS > 1 ? j * BY_LANES : 0), acc[j]);
      }
    }
    if (tile - LAG >= first) finish(tile - LAG);
    if (++place == KEPT) place = 0;
    // A warp is at most two tiles ahead of another of its block, so no place is filled again before all have
    // read it.
    const int paces = tile - first;
    __syncwarp();
    if (lane == 0) barrier_arrive(smem_addr(paced) + paces % 2 * 8);
    if (paces > 0) barrier_wait(smem_addr(paced) + (paces - 1) % 2 * 8, (paces - 1) / 2 % 2);
  }
  for (int tile = max(first, last - LAG); tile < last; ++tile) {
    await(tile);
    gather(tile);
    finish(tile);
  }
}
