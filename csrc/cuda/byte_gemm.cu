// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for some rows m and weights of 4 bits in groups of 128 with a
// scale and a zero (``quant/integers.py``), by products of bytes. Each group of x becomes integers of 15 bits
// times a power of two, two of 8 bits each, which lie in shared memory; so 4-bit weights are only masked, and
// one `wgmma` of 64 weight rows takes 32 channels of both parts of all rows.
//
// The SLICES blocks of a cluster have all of k between them, so a multiprocessor reads and norms a slice of x
// alone; WK groups of warps share the slice, WN warps have weight rows of their own.
//
// A warp reads its rows of each tile by a cp.async ring of its own, which begins before the wait for the
// previous kernel; a lane loads the very words that it multiplies. What a warp has of a tile it sends to the
// block that finishes those columns (st.async), as it lies in registers. That block adds up what all slices
// and warps have sent, LAG tiles later.
#include "wgmma.cuh"

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
#ifndef KU  // of them, a stage
#define KU 4
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
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

constexpr int BITS = 4, UNITS = KB / KU;
constexpr int WARPS = WK * WN, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int OWN = MT * 16, W_ROWS = WN * OWN;      // weight rows of a warp, and of a tile
constexpr int COLS = GATED ? W_ROWS / 2 : W_ROWS;    // output columns of a tile
constexpr int BLOCK = 128, ROW_BYTES = BLOCK / 8 * BITS;  // channels that lie together, of a row
constexpr int WORD_BYTES = 16 * KU * ROW_BYTES, OF_ROW = KU * 4;
constexpr int STAGE_BYTES = WORD_BYTES + 16 * OF_ROW;  // of 16 rows
constexpr int BITES = OF_ROW / WIDTH, LOADS = (16 * BITES + 31) / 32;  // of the constants
constexpr int X_BLOCK = NT * 16 * BLOCK, X_BYTES = WK * KB * X_BLOCK;  // bytes of both parts of x, by blocks
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
constexpr int STAGE = WARPS * STAGE_BYTES;

static_assert(SLICES > 1 && (WN % SLICES == 0 || SLICES % WN == 0), "columns go to blocks evenly");
static_assert(WN % 4 == 0 && KB % KU == 0, "groups of four warps, whole stages");
static_assert(8 % BY_LANES == 0 && PARTS == BY_ROWS * BY_LANES, "lanes go to blocks evenly");

struct Params {
  const bf16* x;         // [m, x_stride]
  const u32* w;          // [n, blocks * ROW_BYTES / 4]; gated: gate rows, then up rows
  const u32* constants;  // [n, blocks]
  const float* norm;     // [k]
  const float* bias;     // [n] or null
  void* out;             // [m, out_stride]
  int m, n, k, x_stride, out_stride, blocks;  // n: output columns; blocks of k
  float eps;
};

#include "integers.cuh"

// The larger of two of bfloat16, without signs.
__device__ __forceinline__ u32 larger(u32 v) { return max(v & 0x7fffu, v >> 16 & 0x7fffu); }
// d = a b^T or d += a b^T, of bytes: a, without signs, 16 rows of a warp; b's rows are columns of d.
__device__ __forceinline__ void wgmma_bytes_first(int (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {" S1 "}, {%8,%9,%10,%11}, %12, 0;"
               : D_1("=r") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes(int (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {" S1 "}, {%8,%9,%10,%11}, %12, 1;"
               : D_1("+r") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes_first(int (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {" S2 "}, {%16,%17,%18,%19}, %20, 0;"
               : D_2("=r") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_bytes(int (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {" S2 "}, {%16,%17,%18,%19}, %20, 1;"
               : D_2("+r") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int PENDING, int SIZE>
__device__ __forceinline__ void wgmma_wait_bytes(int (&d)[SIZE]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < SIZE; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
  return r;
}
__device__ __forceinline__ void sts_pair(u32 addr, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) byte_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float squares_of[SOURCES][NT * 8];       // of the rows of x
  __shared__ __align__(16) float2 sums_of[WK * KB][NT * 8];  // of groups of x, and their powers of two
  __shared__ __align__(8) u64 delivered[KEPT];        // tiles' sums
  __shared__ __align__(8) u64 squared[1];
  __shared__ __align__(8) u64 paced[2];           // warps of the block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wk = WK == 1 ? 0 : warp / WN, wn = warp % WN;
  const int tiles = (p.n + COLS - 1) / COLS, slice = blockIdx.x % SLICES, parts = gridDim.x / SLICES,
            part = blockIdx.x / SLICES;
  const int first = int((long long)tiles * part / parts), last = int((long long)tiles * (part + 1) / parts);
  const int source = slice * WK + wk;
  const int own_block = source * KB, left = p.blocks - own_block;  // behind `left` there are none
  const u32 x_at = (smem_addr(smem) + 1023) / 1024 * 1024, rings = x_at + X_BYTES,
            ring = rings + warp * STAGE_BYTES, got = rings + STAGES * STAGE, all = smem_addr(delivered);
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
  const u32 row_bytes = p.blocks * ROW_BYTES, constants_bytes = p.blocks * 4;
  const u64 to_half = u64(row_bytes) * (GATED ? p.n : 8);
  const char* words = reinterpret_cast<const char*>(p.w) + u64(row_bytes) * row_of(wn * OWN + g) +
                      own_block * ROW_BYTES + t * 16;
  const char* constants[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; ++j)
    constants[j] = reinterpret_cast<const char*>(p.constants) +
                   u64(constants_bytes) * row_of(wn * OWN + (j * 32 + lane) / BITES) + own_block * 4 +
                   (j * 32 + lane) % BITES * WIDTH;
  int to_load = first, part_to_load = 0, unit_to_load = 0;  // tile, 16 rows of it, and blocks of channels
  auto load = [&](int stage) {
    if (to_load < last) {
      const u32 to = ring + stage * STAGE;
      const u32 row = first_column(to_load) + part_to_load * (GATED ? 8 : 16);
      const char* in = words + u64(row_bytes) * row + unit_to_load * (KU * ROW_BYTES);
      const int left_here = left - unit_to_load * KU;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int b = 0; b < KU; ++b)
          cp_async16(to + (b * 2 + h) * 512 + lane * 16, in + h * to_half + b * ROW_BYTES,
                     b < left_here ? 16 : 0);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane;
        if (e < 16 * BITES)
          cp_async_constants(to + WORD_BYTES + e * WIDTH,
                             constants[j] + u64(constants_bytes) * row + unit_to_load * (KU * 4),
                             e % BITES * (WIDTH / 4) < left_here ? WIDTH : 0);
      }
      if (++unit_to_load == UNITS) {
        unit_to_load = 0;
        if (++part_to_load == MT) part_to_load = 0, ++to_load;
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
  for (int s = 0; s < EARLY; ++s) load(s);

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
    for (int s = EARLY; s < STAGES - 1; ++s) load(s);
    if (NORM) cluster_wait();  // the others' barriers are there
#pragma unroll
    for (int i = 0; i < LOADED; ++i) {
      const int row = (i * WN + wn) * 2 + lane / 16;
      if (PAIRS % WN && i * WN + wn >= PAIRS) break;
      float square = 0.f;
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        uint4 v = in[i][b];
        if (NORM) {
          const float4 lo = norm[b][0], hi = norm[b][1];
          square += square2(v.x) + square2(v.y) + square2(v.z) + square2(v.w);
          v = {mul2(v.x, lo.x, lo.y), mul2(v.y, lo.z, lo.w), mul2(v.z, hi.x, hi.y), mul2(v.w, hi.z, hi.w)};
        }
        u32 most = max(max(larger(v.x), larger(v.y)), max(larger(v.z), larger(v.w)));
#pragma unroll
        for (int d = 1; d < 16; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
        // Its exponent, with 127 added; the largest number becomes one of 14 bits.
        const int exponent = min(max(int(most >> 7), 15), 253);
        const float up = __uint_as_float(u32(267 - exponent) << 23);
        constexpr float MAGIC = 12582912.f;  // 1.5 * 2^23, behind which integers lie in the lower bits
        const u32 words_of_x[4] = {v.x, v.y, v.z, v.w};
        float sum = 0.f;
        u32 upper[4], lower[4];  // pairs
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a = lo2f(words_of_x[e]) * up + MAGIC, c = hi2f(words_of_x[e]) * up + MAGIC;
          sum += (a - MAGIC) + (c - MAGIC);
          const u32 lo = __float_as_uint(a), hi = __float_as_uint(c);
          lower[e] = bytes_of(lo, hi, 0x0040) & 0x7f7fu;
          upper[e] = bytes_of(lo << 1, hi << 1, 0x0051) & 0xffffu;
        }
#pragma unroll
        for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane % 16 == 0)
          sums_of[wk * KB + b][row] = {sum, __uint_as_float(u32(exponent - 13) << 23)};
        // Channels 2t and 2t + 1 of 8 lie beside those of 16 channels further on.
        const int behind = lane / 2 % 2;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const u32(&of)[4] = part ? lower : upper;
          const u32 first_four = bytes_of(of[0], of[1], 0x5410), last_four = bytes_of(of[2], of[3], 0x5410);
          const u32 other = __shfl_xor_sync(~0u, behind ? first_four : last_four, 2);
          const u32 a = behind ? other : first_four, c = behind ? last_four : other;
          const int n = part * (NT * 8) + row, chunk = lane % 16 / 4 * 2 + lane % 2;
          sts_pair(x_at + (wk * KB + b) * X_BLOCK + n * 128 + (chunk ^ n % 8) * 16 + behind * 8,
                   bytes_of(a, c, 0x5140), bytes_of(a, c, 0x7362));
        }
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
  fence_shared();  // what was written is read by the tensor cores
  __syncthreads();

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

  const u32 mask = 0x0f0f0f0fu ^ u32(p.m) >> 31;  // a register for all, which a constant would not get
  const u64 x_tile = tile_at(x_at + wk * KB * X_BLOCK);
  int stage = 0;
  for (int tile = first; tile < last; ++tile) {
    if (tile - LAG >= first) await(tile - LAG);
    gather(tile - LAG);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      float acc[NT][4] = {};
#pragma unroll 1
      for (int unit = 0; unit < UNITS; ++unit) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        load(stage == 0 ? STAGES - 1 : stage - 1);
        const u32 from = ring + stage * STAGE;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        int sum[2][NT * 8];
        u32 a[2][4][4];
        // Sums of a group meet its scales.
        auto apply = [&](int b) {
          const int(&of)[NT * 8] = sum[b % 2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 own = lds32(from + WORD_BYTES + (h * 8 + g) * OF_ROW + b * 4);
            const float scale = half2f(own), zero = zero_of(own) - 128.f;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              const float4 of_x =
                  *reinterpret_cast<const float4*>(&sums_of[wk * KB + unit * KU + b][j * 8 + t * 2]);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const int at = j * 4 + h * 2 + e;
                const float total = float(of[at] * 128 + of[NT * 4 + at]);
                acc[j][h * 2 + e] += (total - zero * (e ? of_x.z : of_x.x)) * (scale * (e ? of_x.w : of_x.y));
              }
            }
          }
        };
#pragma unroll
        for (int b = 0; b < KU; ++b) {
          const u32 here = from + b * 1024 + lane * 16;
          const uint4 lo = lds128(here), hi = lds128(here + 512);
          const u32 u[4] = {lo.x, lo.y, lo.z, lo.w}, v[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            a[b % 2][q][0] = u[q] & mask, a[b % 2][q][1] = v[q] & mask;
            a[b % 2][q][2] = u[q] >> 4 & mask, a[b % 2][q][3] = v[q] >> 4 & mask;
          }
          wgmma_fence();
          const u64 x = x_tile + (unit * KU + b) * (X_BLOCK / 16);
          wgmma_bytes_first(sum[b % 2], a[b % 2][0], x);
#pragma unroll
          for (int q = 1; q < 4; ++q) wgmma_bytes(sum[b % 2], a[b % 2][q], x + q * 2);
          wgmma_commit();
          if (b > 0) {
            wgmma_wait_bytes<1>(sum[(b - 1) % 2]);
            apply(b - 1);
          }
        }
        wgmma_wait_bytes<0>(sum[(KU - 1) % 2]);
        apply(KU - 1);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int behind = BY_ROWS > 1 ? 0 : j;
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
