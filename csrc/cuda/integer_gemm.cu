// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for few rows m and weights of 4 or 8 bits in groups with a scale
// and a zero (``quant/integers.py``): reads the weights once, at the speed of the memory.
//
// A cluster of SLICES blocks takes a share of the output tiles and cuts their k; each block keeps its slice
// of x in shared memory. A warp has 16 MT weight rows of a tile, and WK warps cut the k of a slice. Each warp
// streams its weights through a cp.async ring of its own, which runs on across tiles and begins before the
// wait for the previous kernel. A lane loads the very words that it multiplies, so warps wait for each other
// at the end of a tile alone, where sums are added up in order, and where a warp has a tile to itself not
// even there. A cluster adds up a tile while it multiplies the next.
//
// A multiprocessor has few warps, so what counts is how long one takes for a block of channels: all that it
// reads of shared memory is asked for at once, and sums are cut into chains that do not wait for each other.
//
// Integers are exact in bfloat16: q + 128 of 4 bits, q - 128 of 8. They are multiplied so; what is too much,
// and the zero, comes off with the sum of a group of x. The sum of a group is float32 when it meets the
// scale, so nothing is rounded but x and the result.
//
// Other codes of 4 bits than integers: see codes.cuh.
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
#define NT 1
#endif
#ifndef MT  // 16 weight rows of a warp that share a load of x: 1 or 2
#define MT 1
#endif
#ifndef WK  // warps that share the k of a slice
#define WK 1
#endif
#ifndef SLICES  // blocks of a cluster that share the k of a tile
#define SLICES 1
#endif
#ifndef UNIT  // blocks of channels that a warp loads at a time: 2 or 4
#define UNIT 2
#endif
#ifndef WIDTH  // bytes of constants that a lane loads at a time
#define WIDTH 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef AFTER  // 1: a stage is asked for again when it has been multiplied; 0: when the next one has come
#define AFTER 0
#endif
#ifndef EARLY  // stages asked for before the wait for the previous kernel; x does not wait for the others
#define EARLY (STAGES - !AFTER)
#endif
#ifndef RESIDENT  // blocks for which a multiprocessor has room, those of the next kernel among them
#define RESIDENT 2
#endif
#ifndef AT_ONCE  // loads of x that a lane has on their way
#define AT_ONCE (NT == 1 || NORM ? 4 : 8)
#endif
#ifndef KEEPS_NORM  // a warp has so many pieces of all rows, whose factors it has before x is there; 0: any
#define KEEPS_NORM 0
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

#include "codes.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4, DIRECT = WK == 1 && SLICES == 1;
constexpr int OWN = MT * 16, W_ROWS = WARPS / WK * OWN;  // weight rows of a warp, and of a tile
constexpr int COLS = GATED ? W_ROWS / 2 : W_ROWS;        // output columns of a tile
constexpr int ROW_BYTES = BLOCK / 8 * BITS;  // of the channels of a row that lie together
constexpr int PIECES = BITS / 4;  // of 16 bytes, for a lane, of a row's block
constexpr int STEPS = GROUP / 16;
constexpr int WANTED = 4 / (MT * NT), CHAINS = WANTED < STEPS ? WANTED : STEPS;  // of sums
constexpr int AHEAD = STAGES - !AFTER;  // stages on their way
constexpr int WORD_BYTES = OWN * UNIT * ROW_BYTES, OF_ROW = UNIT * HELD * 4;
constexpr int STAGE_BYTES = WORD_BYTES + OWN * OF_ROW;
constexpr int BITES = OF_ROW / WIDTH, LOADS = (OWN * BITES + 31) / 32;  // of the constants
constexpr int SHARE = (COLS + SLICES - 1) / SLICES;                     // columns that a block finishes
constexpr int PER_THREAD = (NT * 8 * SHARE + THREADS - 1) / THREADS;
constexpr int RED_ROW = W_ROWS + 4;  // floats that a warp leaves of a tile, for a row of x
constexpr int CHUNK = 256;                                   // channels of x that a warp loads at a time

struct Params {
  const bf16* x;         // [m, x_stride]
  const u32* w;          // [n, blocks * ROW_BYTES / 4]; gated: gate rows, then up rows
  const u32* constants;  // [n, blocks * HELD]
  const float* norm;     // [k]
  const float* bias;     // [n] or null
  void* out;             // [m, out_stride]
  const float* factors;  // of NVFP4's rows, [n]; a table's numbers, [16]
  int m, n, k, x_stride, out_stride;  // n: output columns
  int blocks, x_row;                  // of k; bytes of a row of x in shared memory
  float eps;
};

__device__ __forceinline__ float2 lds64(u32 addr) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(addr) : "memory");
  return r;
}
// A float of a block of the cluster.
__device__ __forceinline__ float lds_of(u32 addr, int rank) {
  float r;
  if (SLICES == 1)
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(addr) : "memory");
  else
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, "
                 "[there];\n}" : "=f"(r) : "r"(addr), "r"(rank) : "memory");
  return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) integer_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float row_square[NT * 8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wk = warp / (WARPS / WK), wn = warp % (WARPS / WK);
  const int tiles = (p.n + COLS - 1) / COLS, slice = blockIdx.x % SLICES, parts = gridDim.x / SLICES,
            part = blockIdx.x / SLICES;
  const int first = int((long long)tiles * part / parts), last = int((long long)tiles * (part + 1) / parts);
  const int units = (p.blocks + UNIT - 1) / UNIT;
  const int begin = units * slice / SLICES, count = units * (slice + 1) / SLICES - begin;
  const int chunks = count * (UNIT * BLOCK / CHUNK);
  const u32 rings = smem_addr(smem) + TABLE_BYTES, ring = rings + warp * (STAGES * STAGE_BYTES),
            kept_x = rings + WARPS * STAGES * STAGE_BYTES, red = kept_x + p.m * p.x_row,
            sums_of = red + (DIRECT ? 0 : 2 * WK * p.m * (RED_ROW * 4)),  // of groups of x, [groups][NT * 8]
      squares = sums_of + (ZEROS ? count * (UNIT * PER * NT * 32) : 0);   // of the chunks of x, [m][chunks]

  // The last tile is moved back so that all its rows exist.
  auto first_column = [&](int tile) { return min(tile * COLS, p.n - COLS); };
  // Rows of a tile in the weight, from its first column on.
  auto row_of = [&](int row) { return GATED ? row / 16 * 8 + row % 8 + (row % 16 >= 8 ? p.n : 0) : row; };
  const int row_bytes = p.blocks * ROW_BYTES;
  const long long to_half = (long long)row_bytes * (GATED ? p.n : 8), to_next = row_bytes * (GATED ? 8 : 16);
  int in_tile = wk < count ? first : last, in_unit = wk;
  const char* in;          // this lane's first piece of the weights
  const u32* own[LOADS];  // its rows' constants
  auto settle = [&]() {
    const int column = first_column(in_tile), block = (begin + in_unit) * UNIT;
    in = reinterpret_cast<const char*>(p.w) + (long long)(column + row_of(wn * OWN + g)) * row_bytes +
         block * ROW_BYTES + t * 16;
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      const int e = j * 32 + lane, row = e / BITES, bite = e % BITES;
      own[j] = p.constants + ((long long)(column + row_of(wn * OWN + row)) * p.blocks + block) * HELD +
               bite * (WIDTH / 4);
    }
  };
  settle();
  float4 factors[KEEPS_NORM ? KEEPS_NORM : 1][2];
#pragma unroll
  for (int i = 0; i < KEEPS_NORM; ++i) {
    const int k = begin * (UNIT * BLOCK) + (warp + i * WARPS) % chunks * CHUNK + lane * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      factors[i][h] = k < p.k ? *reinterpret_cast<const float4*>(p.norm + k + h * 4) : float4{};
  }
  const u64 policy = policy_once();
  auto load = [&](int stage) {
    if (in_tile < last) {
      const u32 to = ring + stage * STAGE_BYTES;
      const int left = p.blocks - (begin + in_unit) * UNIT;  // blocks behind it there are none of
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int b = 0; b < UNIT; ++b)
#pragma unroll
            for (int c = 0; c < PIECES; ++c)
              cp_async_once(to + (((b * MT + i) * 2 + h) * PIECES + c) * 512 + place_of(lane) * 16,
                            in + i * to_next + h * to_half + b * ROW_BYTES + c * 64, b < left ? 16 : 0,
                            policy);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane;
        if (e < OWN * BITES)
          cp_async_constants(to + WORD_BYTES + e * WIDTH, own[j],
                             e % BITES * (WIDTH / 4) < left * HELD ? WIDTH : 0, policy);
      }
      in_unit += WK;
      in += WK * UNIT * ROW_BYTES;
#pragma unroll
      for (int j = 0; j < LOADS; ++j) own[j] += WK * UNIT * HELD;
      if (in_unit >= count) {
        in_unit = wk;
        if (++in_tile < last) settle();
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < EARLY; ++s) load(s);
  if (TABLE_BYTES) lay_out(p.factors, smem_addr(smem), THREADS);
  pdl_wait();
  pdl_launch();

  // x, times the norm's weight, and the sums of its groups; zeros behind its end.
  int row = 0, chunk = warp;
  auto find = [&]() {
    while (chunk >= chunks) chunk -= chunks, ++row;
  };
  find();
  bool asked = EARLY == AHEAD;
  auto ask = [&]() {
    if (!asked) {
#pragma unroll
      for (int s = EARLY; s < AHEAD; ++s) load(s);
    }
    asked = true;
  };
  while (row < p.m) {
    uint4 v[AT_ONCE];
    constexpr int FACTORS = NORM && !KEEPS_NORM ? AT_ONCE : 1;
    float4 n0[FACTORS], n1[FACTORS];
    int rows[AT_ONCE], ats[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      rows[i] = row, ats[i] = chunk * CHUNK + lane * 8;
      const int k = begin * (UNIT * BLOCK) + ats[i];
      v[i] = {};
      if (NORM && !KEEPS_NORM) n0[i] = n1[i] = {};
      if (row < p.m && k < p.k) {
        v[i] = *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
        if (NORM && !KEEPS_NORM) {
          n0[i] = *reinterpret_cast<const float4*>(p.norm + k);
          n1[i] = *reinterpret_cast<const float4*>(p.norm + k + 4);
        }
      }
      chunk += WARPS;
      find();
    }
    ask();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (rows[i] >= p.m) break;
      if (NORM) {
        float square = square2(v[i].x) + square2(v[i].y) + square2(v[i].z) + square2(v[i].w);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(~0u, square, d);
        if (lane == 0) sts32(squares + (rows[i] * chunks + ats[i] / CHUNK) * 4, square);
        constexpr int OWN_PIECES = KEEPS_NORM ? KEEPS_NORM : 1;
        const float4 lo = KEEPS_NORM ? factors[i % OWN_PIECES][0] : n0[i % FACTORS],
                     hi = KEEPS_NORM ? factors[i % OWN_PIECES][1] : n1[i % FACTORS];
        v[i] = {mul2(v[i].x, lo.x, lo.y), mul2(v[i].y, lo.z, lo.w), mul2(v[i].z, hi.x, hi.y),
                mul2(v[i].w, hi.z, hi.w)};
      }
      keep_x(kept_x + rows[i] * p.x_row, ats[i], v[i]);
      if (ZEROS) {
        float sum = add2(v[i].x) + add2(v[i].y) + add2(v[i].z) + add2(v[i].w);
#pragma unroll
        for (int d = 1; d < GROUP / 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (ats[i] % GROUP == 0) sts32(sums_of + (ats[i] / GROUP * (NT * 8) + rows[i]) * 4, sum);
      }
    }
  }
  ask();
  __syncthreads();
  if (NORM) {
    for (int m = warp; m < p.m; m += WARPS) {
      float sum = 0.f;
      for (int c = lane; c < chunks; c += 32) sum += __uint_as_float(lds32(squares + (m * chunks + c) * 4));
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) row_square[m] = sum;
    }
    if (DIRECT) __syncthreads();
  }

  // Where ``ldmatrix`` takes a lane's 8 channels of 32: rows that are not there read the last one.
  u32 x_at[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j)
    x_at[j] = kept_x + min(j * 8 + lane % 8, p.m - 1) * p.x_row + lane / 8 * 16;

  // What becomes of a sum: of output column n of row m; ``at``: what is in ``out`` already.
  auto finish = [&](int m, int n, float y, float up, float before) {
    if (NORM) {
      float s = 0.f;
#pragma unroll
      for (int v = 0; v < SLICES; ++v) s += lds_of(smem_addr(row_square + m), v);
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
  auto there = [&](int m, int n) {
    return bf2f(static_cast<const bf16*>(p.out)[(long long)m * p.out_stride + n]);
  };
  const int from_column = COLS * slice / SLICES, to_column = COLS * (slice + 1) / SLICES;

  // Of two buffers for the sums of tiles.
  auto red_of = [&](int tile) { return red + (tile - first) % 2 * (WK * p.m * (RED_ROW * 4)); };
  float kept[PER_THREAD];  // what ADD adds to
  auto keep = [&](int tile) {
#pragma unroll
    for (int i = 0; i < (EPILOGUE == 1 ? PER_THREAD : 0); ++i) {
      const int e = i * THREADS + threadIdx.x, m = e / SHARE, column = from_column + e % SHARE;
      kept[i] = m < p.m && column < to_column ? there(m, first_column(tile) + column) : 0.f;
    }
  };
  auto add_up = [&](int tile) {
    const int column = first_column(tile);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int e = i * THREADS + threadIdx.x, m = e / SHARE, col = from_column + e % SHARE, n = column + col;
      if (m >= p.m || col >= to_column || n < tile * COLS) continue;  // n below: the tile before has it
      const u32 at = red_of(tile) + (m * RED_ROW + (GATED ? col / 8 * 16 + col % 8 : col)) * 4;
      float y = 0.f, up = 0.f;
#pragma unroll
      for (int s = 0; s < SLICES; ++s)
#pragma unroll
        for (int v = 0; v < WK; ++v) {
          y += lds_of(at + v * p.m * (RED_ROW * 4), s);
          if (GATED) up += lds_of(at + v * p.m * (RED_ROW * 4) + 32, s);
        }
      finish(m, n, y, up, EPILOGUE == 1 ? kept[i] : 0.f);
    }
  };

  const u32 mask = MASK ^ u32(p.m) >> 31;  // a register for all, which a constant would not get
  const u32 table = smem_addr(smem) + lane * 4;
  int stage = 0;
  for (int tile = first; tile < last; ++tile) {
    if (SLICES == 1 && !DIRECT) keep(tile);
    float acc[MT][NT][4] = {}, of_rows[MT][2];
#pragma unroll
    for (int i = 0; i < (OF_ROWS ? MT : 0); ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        of_rows[i][h] = p.factors[first_column(tile) + row_of(wn * OWN + i * 16 + h * 8 + g)] * LIFT;
    for (int unit = wk; unit < count; unit += WK) {
      cp_async_wait<AHEAD - 1>();
      __syncwarp();
      if (!AFTER) load(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 from = ring + stage * STAGE_BYTES;
      const int used = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
      for (int b = 0; b < UNIT; ++b) {
        const int block = unit * UNIT + b;
        uint4 w[MT][2][PIECES];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < PIECES; ++c) {
              const u32 piece = from + (((b * MT + i) * 2 + h) * PIECES + c) * 512;
              w[i][h][c] = words_of(piece, lane);
            }
        u32 x[4][NT][4];  // of 32 channels each
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int j = 0; j < NT; ++j) ldmatrix(x[q][j], x_at[j] + block * (BLOCK * 2) + q * 64);
        u32 constants[MT][2][HELD];
        float2 sums[PER][NT];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < HELD; ++c)
              constants[i][h][c] =
                  lds32(from + WORD_BYTES + (i * 16 + h * 8 + g) * OF_ROW + (b * HELD + c) * 4);
#pragma unroll
        for (int group = 0; group < (ZEROS ? PER : 0); ++group)
#pragma unroll
          for (int j = 0; j < NT; ++j)
            sums[group][j] = lds64(sums_of + ((block * PER + group) * (NT * 8) + j * 8 + t * 2) * 4);
#pragma unroll
        for (int group = 0; group < PER; ++group) {
          float sum[CHAINS][MT][NT][4];
#pragma unroll
          for (int s = 0; s < STEPS; ++s) {  // 16 channels
            const int step = group * STEPS + s;
#pragma unroll
            for (int i = 0; i < MT; ++i) {
              const u32* u = reinterpret_cast<const u32*>(w[i][0]);
              const u32* v = reinterpret_cast<const u32*>(w[i][1]);
              const u32 a0 = pair(u, 2 * step, mask, table), a1 = pair(v, 2 * step, mask, table),
                        a2 = pair(u, 2 * step + 1, mask, table), a3 = pair(v, 2 * step + 1, mask, table);
#pragma unroll
              for (int j = 0; j < NT; ++j) {
                const u32(&of_x)[4] = x[step / 2][j];
                float(&chain)[4] = sum[s % CHAINS][i][j];
                if (s < CHAINS)
                  mma_first(chain, a0, a1, a2, a3, of_x[step % 2 * 2], of_x[step % 2 * 2 + 1]);
                else
                  mma(chain, a0, a1, a2, a3, of_x[step % 2 * 2], of_x[step % 2 * 2 + 1]);
              }
            }
          }
#pragma unroll
          for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const u32(&own)[HELD] = constants[i][e / 2];
                float total = sum[0][i][j][e];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) total += sum[c][i][j][e];
                const float2 of_x = sums[ZEROS ? group : 0][j];
                if (ZEROS) total -= zero_of(own[group % HELD]) * (e & 1 ? of_x.y : of_x.x);
                acc[i][j][e] += total * scale_of(own, group);
              }
        }
      }
      if (AFTER) {
        __syncwarp();  // constants are read by others, too
        load(used);
      }
    }

#pragma unroll
    for (int i = 0; i < (OF_ROWS ? MT : 0); ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] *= of_rows[i][e / 2];
    const int column = first_column(tile);
    if (DIRECT) {
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int e = 0; e < (GATED ? 2 : 4); ++e) {
            const int m = j * 8 + t * 2 + (e & 1),
                      n = column + (wn * MT + i) * (GATED ? 8 : 16) + g + (e >= 2 ? 8 : 0);
            if (m >= p.m || n < tile * COLS) continue;  // n below: the tile before has it
            finish(m, n, acc[i][j][e], GATED ? acc[i][j][e + 2 & 3] : 0.f, EPILOGUE == 1 ? there(m, n) : 0.f);
          }
      continue;
    }
    if (SLICES > 1 && tile > first) {  // the sums of the tile before have come meanwhile
      cluster_wait();
      add_up(tile - 1);
    }
    const u32 left = red_of(tile) + (wk * p.m * RED_ROW + wn * OWN + g) * 4;
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = j * 8 + t * 2 + (e & 1);
#pragma unroll
        for (int i = 0; i < MT; ++i)
          if (m < p.m) sts32(left + (m * RED_ROW + i * 16 + (e >= 2 ? 8 : 0)) * 4, acc[i][j][e]);
      }
    if (SLICES > 1) {
      cluster_arrive();
      keep(tile);
    } else {
      __syncthreads();  // of two buffers the other one's readers passed the one before
      add_up(tile);
    }
  }
  if (SLICES > 1) {
    cluster_wait();
    add_up(last - 1);
    cluster_arrive();
    cluster_wait();  // the others have read what is here
  }
}
