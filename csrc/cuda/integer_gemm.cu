// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for few rows m and weights of 4 or 8 bits in groups with a scale
// and a zero (``quant/integers.py``): reads the weights once, at the speed of the memory.
//
// As in skinny_gemm.cu one block takes a share of the output tiles, its warps share the k of a tile, each by
// a cp.async ring of its own that runs on across tiles, and the first loads are issued before the wait for
// the previous kernel. x is kept in shared memory; where it has too many rows for that, k is cut in slices:
// blocks leave their sums of a tile, and the one that comes last adds them up in order (SPLIT).
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
#ifndef NT  // groups of 8 rows of x
#define NT 1
#endif
#ifndef MT  // tiles of 16 weight rows that share a load of x
#define MT 1
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef SPLIT  // 1: several blocks share the k of a tile
#define SPLIT 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int COLS = MT * (GATED ? 8 : 16);           // output columns of a tile
constexpr int W_ROWS = MT * 16;                       // and its weight rows; gated: 8 of gate, 8 of up, ...
constexpr int BLOCK = 128, ROW_BYTES = BLOCK / 8 * BITS;  // channels that lie together, of a row
constexpr int PIECES = ROW_BYTES / 16, PER = BLOCK / GROUP;
constexpr int STAGE_BYTES = W_ROWS * (ROW_BYTES + PER * 4);
constexpr int OUTPUTS = NT * 8 * COLS, PER_THREAD = (OUTPUTS + THREADS - 1) / THREADS;
constexpr int BUFFERS = NT == 1 ? 2 : 1;  // of a tile's sums
constexpr int LEFT = NT * 8 * (W_ROWS + 1);  // floats that a block leaves of a tile: sums, and squares of x

struct Params {
  const bf16* x;         // [m, x_stride]
  const u32* w;          // [n, blocks * ROW_BYTES / 4]; gated: gate rows, then up rows
  const u32* constants;  // [n, blocks * PER]
  const float* norm;     // [k]
  const float* bias;     // [n] or null
  void* out;             // [m, out_stride]
  float* sums;           // SPLIT: [tiles][slices][LEFT]
  u32* counts;           // SPLIT: [tiles], 0 before and after
  int m, n, k, x_stride, out_stride;  // n: output columns
  int blocks, slices, x_row;          // of k; that share it; bytes of a row of x in shared memory
  float eps;
};

__device__ __forceinline__ u32 lds32(u32 addr) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(addr) : "memory");
  return r;
}
template <int BYTES>  // 4, 8 or 16, of data that other warps read too
__device__ __forceinline__ void cp_async_small(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(BYTES) : "memory");
}
__device__ __forceinline__ float2 lds64(u32 addr) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ void sts32(u32 addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}
// a - b, two of bfloat16.
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The float16 in the lower half.
__device__ __forceinline__ float half2f(u32 x) {
  float r;
  asm("{\n.reg .b16 h, u;\nmov.b32 {h, u}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ float add2(u32 a) { return lo2f(a) + hi2f(a); }

// Two weights of a word as bfloat16, those at place p. ``mask``: of the bits of two numbers.
constexpr u32 MASK = BITS == 4 ? 0x000f000fu : 0x007f007fu;
__device__ __forceinline__ u32 two(u32 word, int p, u32 mask) {
  if (BITS == 4) return (word >> (4 * p) & mask) | 0x43004300u;
  const u32 bytes = word >> (8 * p);  // of two's complement: the lower seven bits, less the eighth
  return sub2((bytes & mask) | 0x43004300u, (bytes & (mask + 0x00010001u)) | 0x43004300u);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) integer_gemm(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float red[BUFFERS][WARPS][NT * 8][W_ROWS + 1];
  __shared__ float red_square[WARPS][NT * 8];
  __shared__ int is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (p.n + COLS - 1) / COLS, slice = blockIdx.x % p.slices, parts = gridDim.x / p.slices,
            part = blockIdx.x / p.slices;
  const int first = int((long long)tiles * part / parts), last = int((long long)tiles * (part + 1) / parts);
  const int begin = p.blocks * slice / p.slices, count = p.blocks * (slice + 1) / p.slices - begin;
  const u32 ring = smem_addr(smem) + warp * (STAGES * STAGE_BYTES),
            kept_x = smem_addr(smem) + WARPS * STAGES * STAGE_BYTES,
            kept_sums = kept_x + p.m * p.x_row;  // of the groups of x, [groups][NT * 8]

  // The last tile is moved back so that all its rows exist.
  auto first_column = [&](int tile) { return min(tile * COLS, p.n - COLS); };
  // Rows of a tile in the weight, from its first column on.
  auto row_of = [&](int row) { return GATED ? row / 16 * 8 + row % 8 + (row % 16 >= 8 ? p.n : 0) : row; };
  // Block j of tile i is number i * count + j of this block's work, and warp w has every eighth from w on.
  int in_tile = first, in_block = warp;
  const int my_row = lane / PIECES, piece = lane % PIECES, row_bytes = p.blocks * ROW_BYTES;
  const char* in;                      // this lane's first piece of the weights
  const u32* own[(W_ROWS + 31) / 32];  // its rows' constants
  auto settle = [&]() {
    while (in_block >= count) in_block -= count, ++in_tile;
    const int column = first_column(in_tile), block = begin + in_block;
    in = reinterpret_cast<const char*>(p.w) + (long long)(column + my_row) * row_bytes + block * ROW_BYTES +
         piece * 16;
#pragma unroll
    for (int j = 0; j < W_ROWS; j += 32)
      own[j / 32] = p.constants + ((long long)(column + row_of(j + lane)) * p.blocks + block) * PER;
  };
  settle();
  auto load = [&](int stage) {
    if (in_tile < last) {
      const u32 to = ring + stage * STAGE_BYTES;
#pragma unroll
      for (int j = 0; j < W_ROWS * PIECES / 32; ++j) {
        const int row = j * (32 / PIECES), place = BITS == 8 ? piece ^ (((row + my_row) & 1) << 2) : piece;
        cp_async16(to + (row + my_row) * ROW_BYTES + place * 16, in + (long long)row_of(row) * row_bytes, 16);
      }
#pragma unroll
      for (int j = 0; j < W_ROWS; j += 32)
        if (j + lane < W_ROWS)
          cp_async_small<PER * 4>(to + W_ROWS * ROW_BYTES + (j + lane) * (PER * 4), own[j / 32]);
      in_block += WARPS;
      in += WARPS * ROW_BYTES;
#pragma unroll
      for (int j = 0; j < W_ROWS; j += 32) own[j / 32] += WARPS * PER;
      if (in_block >= count) settle();
    }
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  pdl_wait();
  pdl_launch();

  // x, times the norm's weight, and the sums of its groups; zeros behind its end.
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    float square[8] = {};
    for (int step = 0; step < count * BLOCK; step += THREADS * 8) {
      const int at = step + threadIdx.x * 8, k = begin * BLOCK + at;
      const bool inside = at < count * BLOCK, here = inside && k < p.k;
      uint4 v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = {};
        if (here && j * 8 + i < p.m)
          v[i] = *reinterpret_cast<const uint4*>(p.x + (long long)(j * 8 + i) * p.x_stride + k);
      }
      float4 n0 = {}, n1 = {};
      if (NORM && here) {
        n0 = *reinterpret_cast<const float4*>(p.norm + k);
        n1 = *reinterpret_cast<const float4*>(p.norm + k + 4);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (j * 8 + i >= p.m) continue;
        if (NORM) {
          square[i] += square2(v[i].x) + square2(v[i].y) + square2(v[i].z) + square2(v[i].w);
          v[i] = {mul2(v[i].x, n0.x, n0.y), mul2(v[i].y, n0.z, n0.w), mul2(v[i].z, n1.x, n1.y),
                  mul2(v[i].w, n1.z, n1.w)};
        }
        float sum = add2(v[i].x) + add2(v[i].y) + add2(v[i].z) + add2(v[i].w);
#pragma unroll
        for (int d = 1; d < GROUP / 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (inside) {
          sts128(kept_x + (j * 8 + i) * p.x_row + at * 2, v[i]);
          if (at % GROUP == 0) sts32(kept_sums + (at / GROUP * (NT * 8) + j * 8 + i) * 4, sum);
        }
      }
    }
    if (NORM) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) square[i] += __shfl_xor_sync(~0u, square[i], d);
        if (lane == 0) red_square[warp][j * 8 + i] = square[i];
      }
    }
  }
  __syncthreads();

  // Where ``ldmatrix`` takes a lane's 8 channels of 32: rows that are not there read the last one.
  u32 x_at[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j)
    x_at[j] = kept_x + min(j * 8 + lane % 8, p.m - 1) * p.x_row + lane / 8 * 16;

  const u32 mask = MASK ^ u32(p.m) >> 31;  // a register for all, which a constant would not get
  int stage = 0;
  for (int tile = first; tile < last; ++tile) {
    float kept[PER_THREAD];  // what ADD adds to
    if (EPILOGUE == 1 && !SPLIT) {
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i) {
        const int e = i * THREADS + threadIdx.x, row = e / COLS, n = first_column(tile) + e % COLS;
        kept[i] = e < OUTPUTS && row < p.m
                      ? bf2f(static_cast<const bf16*>(p.out)[(long long)row * p.out_stride + n])
                      : 0.f;
      }
    }
    float acc[MT][NT][4] = {};
    for (int block = (warp - (tile - first) * count) & (WARPS - 1); block < count; block += WARPS) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();
      load(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 from = ring + stage * STAGE_BYTES;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      float sum[MT][NT][4];
      uint4 w[MT][2];
#pragma unroll
      for (int q = 0; q < 4; ++q) {  // 32 channels
        if (q == 0 || (BITS == 8 && q == 2)) {
#pragma unroll
          for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = i * 16 + h * 8 + g, piece = BITS == 8 ? (q * 2 + t) ^ ((row & 1) << 2) : t;
              w[i][h] = lds128(from + row * ROW_BYTES + piece * 16);
            }
        }
        u32 x[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j) ldmatrix(x[j], x_at[j] + block * (BLOCK * 2) + q * 64);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          if (q * 32 % GROUP == 0) {
#pragma unroll
            for (int j = 0; j < NT; ++j) sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0.f;
          }
          const u32 *u = reinterpret_cast<const u32*>(&w[i][0]), *v = reinterpret_cast<const u32*>(&w[i][1]);
#pragma unroll
          for (int s = 0; s < 2; ++s) {  // 16 channels
            const int word = BITS == 4 ? q : q % 2 * 2 + s, place = BITS == 4 ? s * 2 : 0;
            const u32 a0 = two(u[word], place, mask), a1 = two(v[word], place, mask),
                      a2 = two(u[word], place + 1, mask), a3 = two(v[word], place + 1, mask);
#pragma unroll
            for (int j = 0; j < NT; ++j) mma(sum[i][j], a0, a1, a2, a3, x[j][s * 2], x[j][s * 2 + 1]);
          }
        }
        if ((q + 1) * 32 % GROUP) continue;
        float2 sums[NT];
#pragma unroll
        for (int j = 0; j < NT; ++j)
          sums[j] = lds64(kept_sums + ((block * PER + q * 32 / GROUP) * (NT * 8) + j * 8 + t * 2) * 4);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          const u32 at = from + W_ROWS * ROW_BYTES + (i * 16 + g) * (PER * 4) + q * 32 / GROUP * 4;
          const u32 lo = lds32(at), hi = lds32(at + PER * 32);
#pragma unroll
          for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const u32 constants = e < 2 ? lo : hi;
              const float of_zero = hi2f(constants) * (e & 1 ? sums[j].y : sums[j].x);
              acc[i][j][e] += (sum[i][j][e] - of_zero) * half2f(constants);
            }
        }
      }
      __syncwarp();
    }

    const int buffer = (tile - first) % BUFFERS;
    if (BUFFERS == 1) __syncthreads();
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          red[buffer][warp][j * 8 + t * 2 + (e & 1)][i * 16 + g + (e >= 2 ? 8 : 0)] = acc[i][j][e];
    __syncthreads();  // of two buffers the other one's readers passed the one before
    float* left = p.sums + ((long long)tile * p.slices + slice) * LEFT;
    if (SPLIT) {
      for (int e = threadIdx.x; e < LEFT; e += THREADS) {
        const int row = e / (W_ROWS + 1), col = e % (W_ROWS + 1);
        float sum = 0.f;
#pragma unroll
        for (int v = 0; v < WARPS; ++v)
          sum += col < W_ROWS ? red[buffer][v][row][col] : NORM ? red_square[v][row] : 0.f;
        __stcg(left + e, sum);
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        is_last = atomicAdd(p.counts + tile, 1) == u32(p.slices - 1);
        if (is_last) p.counts[tile] = 0;
      }
      __syncthreads();
      if (!is_last) continue;
      __threadfence();
      left -= (long long)slice * LEFT;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int e = i * THREADS + threadIdx.x, row = e / COLS, col = e % COLS, n = first_column(tile) + col;
      if (e >= OUTPUTS || row >= p.m || n < tile * COLS) continue;  // n below: the tile before has it
      const int at = GATED ? col / 8 * 16 + col % 8 : col;
      float y = 0.f, up = 0.f, s = 0.f;
      if (SPLIT) {
        for (int v = 0; v < p.slices; ++v) {
          const float* from = left + (long long)v * LEFT + row * (W_ROWS + 1);
          y += __ldcg(from + at);
          if (GATED) up += __ldcg(from + at + 8);
          if (NORM) s += __ldcg(from + W_ROWS);
        }
      } else {
#pragma unroll
        for (int v = 0; v < WARPS; ++v) {
          y += red[buffer][v][row][at];
          if (GATED) up += red[buffer][v][row][at + 8];
          if (NORM) s += red_square[v][row];
        }
      }
      if (NORM) {
        const float f = rsqrtf(s / p.k + p.eps);
        y *= f;
        up *= f;
      }
      if (!GATED && p.bias) y += p.bias[n];
      const long long o = (long long)row * p.out_stride + n;
      if (EPILOGUE == 3) {
        static_cast<float*>(p.out)[o] = y;
      } else {
        bf16* to = static_cast<bf16*>(p.out) + o;
        if (GATED) y = gate<EPILOGUE == 4>(y, up);
        if (EPILOGUE == 1) y += SPLIT ? bf2f(*to) : kept[i];
        *to = f2bf(y);
      }
    }
  }
}
