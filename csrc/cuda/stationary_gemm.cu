// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for some rows m and weights of 4 or 8 bits in groups with a scale
// and a zero (``quant/integers.py``): x is stationary. Each warp keeps KB blocks of k of all rows in
// registers, in the order in which ``mma`` takes them, and weights stream past it.
//
// The WK warps of a block that share a tile of weight rows, and the SLICES blocks of a cluster, have all of k
// between them, so a warp never needs other channels; WN warps with the same ones load x for each other. A
// warp reads its part of each of the block's tiles by a cp.async ring of its own, which begins before the
// wait for the previous kernel; a lane loads the very words that it multiplies. Nothing of x is read from
// shared memory again; what goes through it are weights and, of each tile, the sums of the warps, in two
// buffers: one is added up while warps fill the other. The blocks of a cluster then send each other the sums
// of their slices (st.async), and each finishes some columns a tile later.
//
// Integers are exact in bfloat16: q + 128 of 4 bits, q - 128 of 8. They are multiplied so; what is too much,
// and the zero, comes off with the sum of a group of x, which is a product of x with ones. The sum of a group
// is float32 when it meets the scale, so nothing is rounded but x and the result. Other codes of 4 bits than
// integers: see codes.cuh.
#include "common.cuh"

#ifndef BITS
#define BITS 4
#endif
#ifndef CODES  // what 4 bits are, 0: an integer, 1: a place in a table, 2: e2m1
#define CODES 0
#endif
#ifndef GROUP  // channels with one scale: 32, 64 or 128; of e2m1 16 (NVFP4) or 32 (MXFP4)
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
#define KB 2
#endif
#ifndef WK  // warps that share the k of a slice
#define WK 16
#endif
#ifndef WN  // warps beside each other, with weight rows of their own
#define WN 1
#endif
#ifndef SLICES  // blocks of a cluster that share the k of a tile
#define SLICES 1
#endif
#ifndef WIDTH  // bytes of constants that a lane loads at a time
#define WIDTH 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BEHIND  // 1: sums of a tile are added up when the next one has been multiplied; 0: at once
#define BEHIND 0
#endif
#ifndef EARLY  // stages asked for before the wait for the previous kernel; x does not wait for the others
#define EARLY (STAGES - 1)
#endif
#ifndef RESIDENT  // blocks for which a multiprocessor has room, those of the next kernel among them
#define RESIDENT 1
#endif
#ifndef LATE  // 1: the next kernel's blocks may come when this one has asked for its last weights
#define LATE 0
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

#include "codes.cuh"

constexpr int WARPS = WK * WN, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int OWN = MT * 16, W_ROWS = WN * OWN;      // weight rows of a warp, and of a tile
constexpr int COLS = GATED ? W_ROWS / 2 : W_ROWS;    // output columns of a tile
constexpr int ROW_BYTES = BLOCK / 8 * BITS;          // of the channels of a row that lie together
constexpr int PIECES = BITS / 4;                     // of 16 bytes, for a lane, of a row's block
constexpr int STEPS = GROUP / 16;
constexpr int CHAINS = NT == 1 && STEPS > 1 ? 2 : 1;  // of sums
constexpr int WORD_BYTES = OWN * KB * ROW_BYTES, OF_ROW = KB * HELD * 4;
constexpr int STAGE_BYTES = WORD_BYTES + OWN * OF_ROW;
constexpr int BITES = OF_ROW / WIDTH, LOADS = (OWN * BITES + 31) / 32;  // of the constants
constexpr int SHARE = (COLS + SLICES - 1) / SLICES;  // columns that a block finishes
static_assert(SHARE * (SLICES - 1) < COLS, "each block of a cluster finishes columns");
constexpr int OWNED = GATED ? 2 * SHARE : SHARE;     // and their weight rows
constexpr int SUMS = (NT * 8 * W_ROWS + THREADS - 1) / THREADS;  // of a slice, that a thread adds up
constexpr int PER_THREAD = (NT * 8 * SHARE + THREADS - 1) / THREADS;
constexpr int RED_ROW = W_ROWS + 4;        // floats that a warp leaves of a tile, for a row of x
constexpr int RED_WARP = NT * 8 * RED_ROW * 4, RED_TILE = WK * RED_WARP;  // bytes
#ifndef RED_BYTES  // of shared memory, for x on its way and for sums of warps
#define RED_BYTES (2 * RED_TILE)
#endif
constexpr int KEPT = 4;                    // tiles whose sums a cluster exchanges at a time, at most
constexpr int GOT_SLICE = NT * 8 * OWNED * 4, GOT_TILE = SLICES * GOT_SLICE;  // bytes
constexpr int X_ROW = BLOCK * 2 + 16;     // bytes of a row of x on its way to registers
constexpr int PIECES_OF_X = 4 / WN;        // of 8 rows and 128 channels, that a lane loads
constexpr int SQUARES = NT * PIECES_OF_X;  // rows of x of which a lane loads a part
constexpr int X_BYTES = 8 * X_ROW;         // of 8 rows and 128 channels on their way

struct Params {
  const bf16* x;         // [m, x_stride]
  const u32* w;          // [n, blocks * ROW_BYTES / 4]; gated: gate rows, then up rows
  const u32* constants;  // [n, blocks * HELD]
  const float* norm;     // [k]
  const float* bias;     // [n] or null
  void* out;             // [m, out_stride]
  const float* factors;  // of NVFP4's rows, [n]; a table's numbers, [16]
  int m, n, k, x_stride, out_stride, blocks;  // n: output columns; blocks of k
  float eps;
};

// A float for a block of the cluster, whose barrier counts it.
__device__ __forceinline__ void tell(u32 addr, u32 barrier, int rank, float v) {
  asm volatile("{\n.reg .u32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 bar, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [bar];\n}"
               ::"r"(addr), "r"(barrier), "r"(rank), "f"(v) : "memory");
}
// Sums over 16 lanes of as many numbers: in each step a lane keeps half of them and gives the others away.
// ``at``: the first that it has at the end.
template <int HALF, int DISTANCE, int COUNT>
__device__ __forceinline__ void fold(float (&v)[COUNT], int lane, int& at) {
  const bool upper = lane & DISTANCE;
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float mine = upper ? v[i + HALF] : v[i], other = upper ? v[i] : v[i + HALF];
    v[i] = mine + __shfl_xor_sync(~0u, other, DISTANCE);
  }
  if (HALF == 0) v[0] += __shfl_xor_sync(~0u, v[0], DISTANCE);
  at += upper ? HALF : 0;
  if constexpr (DISTANCE < 8) fold<HALF / 2, DISTANCE * 2>(v, lane, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) stationary_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float row_square[SLICES][NT * 8];  // of each slice
  __shared__ float of_warps[WK][NT * 8];         // its parts
  __shared__ __align__(8) u64 summed[2];         // of the two buffers of sums
  __shared__ __align__(8) u64 delivered[KEPT];   // tiles' sums
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wk = warp / WN, wn = warp % WN;
  const int tiles = (p.n + COLS - 1) / COLS, slice = blockIdx.x % SLICES, parts = gridDim.x / SLICES,
            part = blockIdx.x / SLICES;
  const int first = u32(tiles) * part / parts, last = u32(tiles) * (part + 1) / parts;
  const int own_block = (slice * WK + wk) * KB, left = p.blocks - own_block;  // behind `left` there are none
  const u32 rings = smem_addr(smem) + TABLE_BYTES, ring = rings + warp * (STAGES * STAGE_BYTES),
            red = rings + WARPS * STAGES * STAGE_BYTES,
            // x on its way, before there are sums: one block of channels of a warp, or all of WN warps
            passing = red + (WN == 1 ? warp : wk * NT * KB) * X_BYTES,
      got = red + RED_BYTES, squares = smem_addr(row_square), all = smem_addr(delivered);
  const int from_column = min(COLS, SHARE * slice), to_column = min(COLS, SHARE * (slice + 1));
  const int told = SLICES * p.m * (to_column - from_column) * (GATED ? 8 : 4);  // bytes of a tile
  if (threadIdx.x == 0) {
    barrier_init(smem_addr(summed), WARPS);
    barrier_init(smem_addr(summed) + 8, WARPS);
#pragma unroll
    for (int i = 0; i < (SLICES > 1 ? KEPT : 0); ++i) {
      barrier_init(all + i * 8, 1);
      barriers_visible();
      barrier_expect(all + i * 8, told + (NORM && i == 0 ? SLICES * p.m * 4 : 0));
    }
  }
  if (SLICES > 1) cluster_arrive();

  // The last tile is moved back so that all its rows exist.
  auto first_column = [&](int tile) { return min(tile * COLS, p.n - COLS); };
  // Rows of a tile in the weight, from its first column on.
  auto row_of = [&](int row) { return GATED ? row / 16 * 8 + row % 8 + (row % 16 >= 8 ? p.n : 0) : row; };
  const u32 row_bytes = p.blocks * ROW_BYTES, constants_bytes = p.blocks * (HELD * 4);
  const u64 to_half = u64(row_bytes) * (GATED ? p.n : 8);
  const char* words = reinterpret_cast<const char*>(p.w) + u64(row_bytes) * row_of(wn * OWN + g) +
                      own_block * ROW_BYTES + t * 16;
  const char* constants[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; ++j)
    constants[j] = reinterpret_cast<const char*>(p.constants) +
                   u64(constants_bytes) * row_of(wn * OWN + (j * 32 + lane) / BITES) +
                   own_block * (HELD * 4) + (j * 32 + lane) % BITES * WIDTH;
  const u64 policy = policy_once();
  auto load = [&](int tile, int stage) {
    if (tile < last) {
      const u32 to = ring + stage * STAGE_BYTES;
      const u32 column = first_column(tile);
      const char* in = words + u64(row_bytes) * column;
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int b = 0; b < KB; ++b)
#pragma unroll
            for (int c = 0; c < PIECES; ++c)
              cp_async_once(to + (((i * KB + b) * 2 + h) * PIECES + c) * 512 + place_of(lane) * 16,
                            in + i * (GATED ? 8 : 16) * row_bytes + h * to_half + b * ROW_BYTES + c * 64,
                            b < left ? 16 : 0, policy);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane;
        if (e < OWN * BITES)
          cp_async_constants(to + WORD_BYTES + e * WIDTH, constants[j] + u64(constants_bytes) * column,
                             e % BITES * (WIDTH / 4) < left * HELD ? WIDTH : 0, policy);
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
  for (int s = 0; s < EARLY; ++s) load(first + s, s);
  if (TABLE_BYTES) lay_out(p.factors, smem_addr(smem), THREADS);

  pdl_wait();
  if (!LATE) pdl_launch();

  u32 x[NT][KB][4][4];  // of 32 channels each
  float2 sums[KB * PER][NT];
  {
    uint4 in[NT][KB][PIECES_OF_X];
    float square[SQUARES] = {};
    auto row_of_x = [&](int i) { return (i * WN + wn) * 2 + lane / 16; };  // of 8
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int b = 0; b < KB; ++b)
#pragma unroll
        for (int i = 0; i < PIECES_OF_X; ++i) {
          const int row = j * 8 + row_of_x(i), k = channel + b * BLOCK;
          in[j][b][i] = {};
          if (row < p.m && k < p.k)
            in[j][b][i] = *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
        }
#pragma unroll
    for (int s = EARLY; s < STAGES - 1; ++s) load(first + s, s);
    auto pass = [&](int j, int b) {
#pragma unroll
      for (int i = 0; i < PIECES_OF_X; ++i) {
        uint4 v = in[j][b][i];
        if (NORM) {
          const float4 lo = norm[b][0], hi = norm[b][1];
          square[j * PIECES_OF_X + i] += square2(v.x) + square2(v.y) + square2(v.z) + square2(v.w);
          v = {mul2(v.x, lo.x, lo.y), mul2(v.y, lo.z, lo.w), mul2(v.z, hi.x, hi.y), mul2(v.w, hi.z, hi.w)};
        }
        keep_x(passing + (WN == 1 ? 0 : j * KB + b) * X_BYTES + row_of_x(i) * X_ROW, lane % 16 * 8, v);
      }
    };
    auto take = [&](int j, int b) {
#pragma unroll
      for (int q = 0; q < 4; ++q)
        ldmatrix(x[j][b][q], passing + (WN == 1 ? 0 : j * KB + b) * X_BYTES + lane % 8 * X_ROW +
                                 lane / 8 * 16 + q * 64);
    };
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        if (WN == 1) __syncwarp();
        pass(j, b);
        if (WN == 1) __syncwarp();
        if (WN == 1) take(j, b);
      }
    if (WN > 1) {
      meet_at<WN * 32>(1 + wk);
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int b = 0; b < KB; ++b) take(j, b);
    }
#pragma unroll
    for (int b = 0; b < (ZEROS ? KB : 0); ++b)
#pragma unroll
      for (int group = 0; group < PER; ++group)
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          constexpr u32 ONES = 0x3f803f80u;
          float sum[4] = {};
#pragma unroll
          for (int s = 0; s < STEPS; ++s) {
            const int step = group * STEPS + s;
            mma(sum, ONES, ONES, ONES, ONES, x[j][b][step / 2][step % 2 * 2],
                x[j][b][step / 2][step % 2 * 2 + 1]);
          }
          sums[b * PER + group][j] = {sum[0], sum[1]};
        }
    if (SLICES > 1) cluster_wait();  // the others' barriers are there
    if (NORM) {
      int row = 0;
      fold<SQUARES / 2, 1>(square, lane, row);
      of_warps[wk][row / PIECES_OF_X * 8 + row_of_x(row % PIECES_OF_X)] = square[0];
    }
    __syncthreads();  // what is behind `passing` has been read, too
    if (NORM && threadIdx.x < NT * 8) {
      float sum = 0.f;
#pragma unroll
      for (int v = 0; v < WK; ++v) sum += of_warps[v][threadIdx.x];
      if (SLICES == 1) sts32(squares + threadIdx.x * 4, sum);
#pragma unroll
      for (int v = 0; v < (SLICES > 1 ? SLICES : 0); ++v)
        if (threadIdx.x < p.m) tell(squares + (slice * (NT * 8) + threadIdx.x) * 4, all, v, sum);
    }
  }

  // What becomes of a sum: of output column n of row m; ``before``: what is in ``out`` already.
  auto finish = [&](int m, int n, float y, float up, float before) {
    if (NORM) {
      float s = 0.f;
#pragma unroll
      for (int v = 0; v < SLICES; ++v) s += lds32f(squares + (v * (NT * 8) + m) * 4);
      const float f = rsqrtf(s / p.k + p.eps);
      y *= f;
      up *= f;
    }
    if (!GATED && p.bias) y += p.bias[n];
    const long long o = (long long)m * p.out_stride + n;
    if (EPILOGUE == 3) {
      static_cast<float*>(p.out)[o] = y;
    } else {
      if (GATED) y = gate<EPILOGUE == 4>(y, up);
      static_cast<bf16*>(p.out)[o] = f2bf(y + before);
    }
  };
  float kept[PER_THREAD];  // what ADD adds to
  auto keep = [&](int tile) {
#pragma unroll
    for (int i = 0; i < (EPILOGUE == 1 ? PER_THREAD : 0); ++i) {
      const int e = i * THREADS + threadIdx.x, m = e / SHARE, column = from_column + e % SHARE;
      kept[i] = m < p.m && column < to_column
                    ? bf2f(static_cast<const bf16*>(
                          p.out)[(long long)m * p.out_stride + first_column(tile) + column])
                    : 0.f;
    }
  };
  // Sums of this slice, to the blocks that finish them.
  auto send = [&](int place, int buffer) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int e = i * THREADS + threadIdx.x, m = e / W_ROWS, row = e % W_ROWS;
      if (m >= p.m) break;
      const int col = GATED ? row / 16 * 8 + row % 8 : row, half = GATED ? row / 8 % 2 : 0;
      float y = 0.f;
#pragma unroll
      for (int v = 0; v < WK; ++v)
        y += lds32f(red + buffer * RED_TILE + v * RED_WARP + (m * RED_ROW + row) * 4);
      tell(got + place * GOT_TILE + slice * GOT_SLICE + (m * OWNED + half * SHARE + col % SHARE) * 4,
           all + place * 8, col / SHARE, y);
    }
  };
  auto add_up = [&](int tile, int buffer) {
    const int column = first_column(tile), place = (tile - first) % KEPT;
    if (SLICES > 1) {
      barrier_wait(all + place * 8, (tile - first) / KEPT % 2);
      if (threadIdx.x == 0) barrier_expect(all + place * 8, told);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int e = i * THREADS + threadIdx.x, m = e / SHARE, col = from_column + e % SHARE, n = column + col;
      if (m >= p.m || col >= to_column || n < tile * COLS) continue;  // n below: the tile before has it
      const u32 at = SLICES > 1 ? got + place * GOT_TILE + (m * OWNED + e % SHARE) * 4
                                : red + buffer * RED_TILE +
                                      (m * RED_ROW + (GATED ? col / 8 * 16 + col % 8 : col)) * 4;
      float y = 0.f, up = 0.f;
#pragma unroll
      for (int v = 0; v < (SLICES > 1 ? SLICES : WK); ++v) {
        y += lds32f(at + v * (SLICES > 1 ? GOT_SLICE : RED_WARP));
        if (GATED) up += lds32f(at + v * (SLICES > 1 ? GOT_SLICE : RED_WARP) + (SLICES > 1 ? SHARE * 4 : 32));
      }
      finish(m, n, y, up, EPILOGUE == 1 ? kept[i] : 0.f);
    }
  };

  // What is done when all warps have left their sums of a tile.
  auto follow = [&](int tile) {
    const int place = tile - first;
    if (BEHIND)
      barrier_wait(smem_addr(summed) + place % 2 * 8, place / 2 % 2);
    else
      __syncthreads();  // of two buffers the other one's readers passed the one before
    if (SLICES == 1) {
      add_up(tile, place % 2);
    } else {
      send(place % KEPT, place % 2);
      if (tile > first) add_up(tile - 1, 0);  // whose sums have come meanwhile
    }
  };

  const u32 mask = MASK ^ u32(p.m) >> 31;  // a register for all, which a constant would not get
  constexpr int LAG = BEHIND + (SLICES > 1 ? 1 : 0);  // tiles until one is finished
  const u32 table = smem_addr(smem) + lane * 4;
  int stage = 0;
  for (int tile = first; tile < last; ++tile) {
    if (tile - LAG >= first) keep(tile - LAG);
    cp_async_wait<STAGES - 2>();
    __syncwarp();
    load(tile + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    if (LATE && tile + STAGES >= last) pdl_launch();
    float of_rows[MT][2];
#pragma unroll
    for (int i = 0; i < (OF_ROWS ? MT : 0); ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        of_rows[i][h] = p.factors[first_column(tile) + row_of(wn * OWN + i * 16 + h * 8 + g)] * LIFT;
    const u32 from = ring + stage * STAGE_BYTES;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    const u32 to = red + (tile - first) % 2 * RED_TILE + wk * RED_WARP + (t * 2 * RED_ROW + wn * OWN + g) * 4;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      float acc[NT][4] = {};
#pragma unroll
      for (int b = 0; b < KB; ++b) {
        uint4 w[2][PIECES];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < PIECES; ++c)
            w[h][c] = words_of(from + (((i * KB + b) * 2 + h) * PIECES + c) * 512, lane);
        u32 own[2][HELD];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < HELD; ++c)
            own[h][c] = lds32(from + WORD_BYTES + (i * 16 + h * 8 + g) * OF_ROW + (b * HELD + c) * 4);
#pragma unroll
        for (int group = 0; group < PER; ++group) {
          float sum[NT][CHAINS][4];
#pragma unroll
          for (int s = 0; s < STEPS; ++s) {  // 16 channels
            const int step = group * STEPS + s, q = step / 2;
            const u32* u = reinterpret_cast<const u32*>(w[0]);
            const u32* v = reinterpret_cast<const u32*>(w[1]);
            const u32 a0 = pair(u, 2 * step, mask, table), a1 = pair(v, 2 * step, mask, table),
                      a2 = pair(u, 2 * step + 1, mask, table), a3 = pair(v, 2 * step + 1, mask, table);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              const u32 x0 = x[j][b][q][step % 2 * 2], x1 = x[j][b][q][step % 2 * 2 + 1];
              if (s < CHAINS)
                mma_first(sum[j][s], a0, a1, a2, a3, x0, x1);
              else
                mma(sum[j][s % CHAINS], a0, a1, a2, a3, x0, x1);
            }
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float scale = scale_of(own[h], group), zero = ZEROS ? zero_of(own[h][group % HELD]) : 0.f;
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float total = sum[j][0][h * 2 + e];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) total += sum[j][c][h * 2 + e];
                if (ZEROS) total -= zero * (e ? sums[b * PER + group][j].y : sums[b * PER + group][j].x);
                acc[j][h * 2 + e] += total * scale;
              }
          }
        }
      }
      if (BEHIND && i == 0 && tile > first) follow(tile - 1);
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sts32(to + ((j * 8 + (e & 1)) * RED_ROW + i * 16 + (e >= 2 ? 8 : 0)) * 4,
                OF_ROWS ? acc[j][e] * of_rows[i][e / 2] : acc[j][e]);
    }
    if (BEHIND) {
      __syncwarp();
      if (lane == 0) barrier_arrive(smem_addr(summed) + (tile - first) % 2 * 8);
    } else {
      follow(tile);
    }
  }
  if (BEHIND) {
    if (last - LAG >= first) keep(last - LAG);
    follow(last - 1);
  }
  if (SLICES > 1) {
    keep(last - 1);
    add_up(last - 1, 0);
  }
}
