// out[m, n] = act(norm(x)[m, k] w[n, k]^T) for few rows m: reads the weights once, at the speed of the memory.
//
// Each block owns ROWS rows of w and its warps split k; weights go straight from memory to registers in the layout of the
// tensor-core instruction (the order of k inside a fragment is free as long as x uses the same one). The first loads are
// issued before the wait for the previous kernel, so the pipe stays full across kernel boundaries. RMSNorm is fused: x is
// multiplied by the norm weight on the fly and the row's scale, summed along the way, is applied to the result.
#include "common.cuh"

#ifndef NT  // groups of 8 rows of x
#define NT 1
#endif
#ifndef MT  // 16-row tiles of w in a block
#define MT 1
#endif
#ifndef HALF  // 1: tiles have 8 rows (narrow outputs)
#define HALF 0
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef UNROLL  // blocks of 64 k in flight in a warp
#define UNROLL 2
#endif
#ifndef NORM  // 1: RMSNorm of x first
#define NORM 0
#endif
#ifndef EPILOGUE  // 0: bf16; 1: += into out; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate) * up
#define EPILOGUE 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif

constexpr bool GATED = EPILOGUE == 2 || EPILOGUE == 4;
constexpr int TILE_ROWS = HALF || GATED ? 8 : 16;  // output columns of a tile
constexpr int LOADS = HALF ? 2 : 4;                // 16-byte loads of a lane for one tile and 64 k

struct Params {
  const bf16* x;     // [m, x_stride]
  const bf16* w;     // [n, k]; gated: gate rows, then up rows
  const float* norm;  // [k]
  const float* bias;  // [n] or null
  void* out;         // [m, out_stride]
  int m, n, k, x_stride, out_stride;  // n: output columns
  float eps;
};

__device__ __forceinline__ uint4 load_weight(const bf16* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
__device__ __forceinline__ u32 mul2(u32 a, float lo, float hi) { return pack2(lo2f(a) * lo, hi2f(a) * hi); }
__device__ __forceinline__ float square2(u32 a) { return lo2f(a) * lo2f(a) + hi2f(a) * hi2f(a); }
__device__ __forceinline__ float activate(float x) {
  if (EPILOGUE == 4) {
    const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.f + exp2_fast(-2.885390082f * u));
  }
  return x / (1.f + exp2_fast(-1.442695041f * x));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) skinny_gemm(const Params p) {
  __shared__ float red[WARPS][NT * 8][MT * 16 + 1];
  __shared__ float red_square[WARPS][NT * 8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int col0 = blockIdx.x * (MT * TILE_ROWS);
  const int blocks = p.k / 64;

  const bf16* w0[MT];
  const bf16* w1[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int row = min(col0 + i * TILE_ROWS + g, p.n - 1);
    const int row1 = GATED ? row + p.n : min(col0 + i * TILE_ROWS + g + 8, p.n - 1);
    w0[i] = p.w + (long long)row * p.k + t * 8;
    w1[i] = p.w + (long long)row1 * p.k + t * 8;
  }
  uint4 a[UNROLL][MT][LOADS];
  auto fetch = [&](int u, int kb) {
    if (kb >= blocks) return;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      a[u][i][0] = load_weight(w0[i] + kb * 64);
      a[u][i][1] = load_weight(w0[i] + kb * 64 + 32);
      if (!HALF) {
        a[u][i][LOADS - 2] = load_weight(w1[i] + kb * 64);
        a[u][i][LOADS - 1] = load_weight(w1[i] + kb * 64 + 32);
      }
    }
  };
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) fetch(u, u * WARPS + warp);
  pdl_wait();
  pdl_launch();

  float acc[MT][NT][4] = {};
  float square[NT] = {};
  for (int kb0 = warp; kb0 < blocks; kb0 += UNROLL * WARPS) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int kb = kb0 + u * WARPS;
      if (kb < blocks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int k = kb * 64 + h * 32 + t * 8;
          float4 n0 = {}, n1 = {};
          if (NORM) {
            n0 = *reinterpret_cast<const float4*>(p.norm + k);
            n1 = *reinterpret_cast<const float4*>(p.norm + k + 4);
          }
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const int row = j * 8 + g;
            uint4 b = {};
            if (row < p.m) b = *reinterpret_cast<const uint4*>(p.x + (long long)row * p.x_stride + k);
            if (NORM) {
              square[j] += square2(b.x) + square2(b.y) + square2(b.z) + square2(b.w);
              b = {mul2(b.x, n0.x, n0.y), mul2(b.y, n0.z, n0.w), mul2(b.z, n1.x, n1.y), mul2(b.w, n1.z, n1.w)};
            }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
              const uint4 lo = a[u][i][h];
              const uint4 hi = HALF ? uint4{} : a[u][i][LOADS - 2 + h];
              mma(acc[i][j], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
              mma(acc[i][j], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
            }
          }
        }
        fetch(u, kb + UNROLL * WARPS);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) red[warp][j * 8 + t * 2 + (e & 1)][i * 16 + g + (e >= 2 ? 8 : 0)] = acc[i][j][e];
    if (NORM) {
      square[j] += __shfl_xor_sync(~0u, square[j], 1);
      square[j] += __shfl_xor_sync(~0u, square[j], 2);
      if (t == 0) red_square[warp][j * 8 + g] = square[j];
    }
  }
  __syncthreads();
  constexpr int COLS = MT * TILE_ROWS;
  for (int e = threadIdx.x; e < NT * 8 * COLS; e += WARPS * 32) {
    const int row = e / COLS, col = e % COLS, n = col0 + col;
    if (row >= p.m || n >= p.n) continue;
    const int at = HALF || GATED ? col / 8 * 16 + col % 8 : col;
    float y = 0.f, up = 0.f, s = 0.f;
#pragma unroll
    for (int v = 0; v < WARPS; ++v) {
      y += red[v][row][at];
      if (GATED) up += red[v][row][at + 8];
      if (NORM) s += red_square[v][row];
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
      bf16* out = static_cast<bf16*>(p.out);
      if (GATED) y = activate(y) * up;
      if (EPILOGUE == 1) y += bf2f(out[o]);
      out[o] = f2bf(y);
    }
  }
}
