// Gumbel-max sampling as in sgla/sampling/draw.py and kernels/triton/sampling.py, by the kernel that computes
// the logits, while they are in registers.
//
// A logit costs an upper bound of its score. Only where one of a warp's is not below the best score known of
// its row are exact scores computed; the best of each row goes to global memory after each tile, and comes
// back from there with the next one.
//
// A NaN has the score +inf, as there.
#pragma once

struct Draw {
  const int *slots, *positions;  // [m]
  const u64* seeds;              // by slot, as the temperatures
  const float* temperatures;
  long long* keys;   // [m]: the best so far, score and token; the larger the better
  const int* plain;  // not 0: tokens are drawn; else the logits are wanted
};

constexpr float COLD = 1e-5f, LOG2_E = 1.442695041f;
#define NOTHING __int_as_float(0xff800000)  // -inf
#define INF __int_as_float(0x7f800000)
constexpr long long WORST = -0x7fffffffffffffff - 1;

// What makes a row's noise: see _hash. Greedy rows have 0 and `one` = 2.f, which makes no noise.
struct RowNoise {
  u32 low, high, add;
  float inverse;  // log2(e) / temperature
};

template <int ROWS>
struct DrawRows {
  RowNoise row[ROWS];
  float one[ROWS], least[ROWS];  // least: a score that may be best
  long long best[ROWS];
};

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u64 mix64(u64 z) {  // the finaliser of splitmix64
  z += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}
constexpr u32 STRIDE = 0x9E3779B1;  // between the starts of tokens
__device__ __forceinline__ u32 noise_bits(const RowNoise& r, u32 start) {
  u32 t = start + r.high;
  t ^= t >> 16;
  return __umulhi(t, r.low) + (t * r.high + r.add);
}
__device__ __forceinline__ float bound(float x, const RowNoise& r, float one, u32 start) {
  const u32 bits = (noise_bits(r, start) & 0x7fffff) | __float_as_uint(one);
  return fmaf(x, r.inverse, -log2_fast(__uint_as_float(bits) - 1.f));
}
__device__ __forceinline__ float score(float x, const RowNoise& r, float one, u32 start) {
  const u32 h = noise_bits(r, start);
  const float v = fminf((float(h << 9 | h >> 23) + 0.5f) * (1.f / 4294967296.f), 0.99999994f);
  const float e = v < 0.015625f ? v * (1.f + v * (0.5f + v * 0.33333334f)) : -0.6931472f * log2_fast(1.f - v);
  const float s = fmaf(x, r.inverse, one == 1.f ? -log2_fast(e) : 0.f);
  return s == s ? s : INF;
}
__device__ __forceinline__ float larger(float a, float b) {  // NaN if one is
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// Bounds are exact but for rounding.
__device__ __forceinline__ float least_of(float score, float one) {
  return one == 1.f ? score - (1e-5f + 1e-6f * fabsf(score)) : score;
}
__device__ __forceinline__ long long key_of(float score, int token) {
  const int bits = __float_as_int(score);
  return (long long)(bits ^ (bits >> 31 & 0x7fffffff)) << 32 | u32(~token);
}
__device__ __forceinline__ float score_of(long long key) {
  const int order = int(key >> 32);
  return __int_as_float(order ^ (order >> 31 & 0x7fffffff));
}

template <int ROWS>
__device__ __forceinline__ void begin_draw(const Draw& draw, DrawRows<ROWS>& rows, int m) {
  const int i = threadIdx.x;
  if (i >= ROWS) return;
  RowNoise r = {0, 0, 0, 1.f};
  float one = 2.f;
  if (i < m) {
    const int slot = draw.slots[i];
    const float temperature = draw.temperatures[slot];
    if (temperature >= COLD) {
      const u64 row = mix64(mix64(draw.seeds[slot]) ^ u64(draw.positions[i]));
      r = {u32(row), u32(row >> 32), u32(row) * 0x85EBCA6B, LOG2_E / temperature};
      one = 1.f;
    }
  }
  rows.row[i] = r, rows.one[i] = one, rows.best[i] = WORST;
  rows.least[i] = i < m ? NOTHING : INF;
}

// The exact scores of tokens `token` and `token` + 8 (of this lane) in rows `row` and `row` + 1.
template <int ROWS>
__device__ __noinline__ void score_close(float a0, float b0, float a1, float b1, int row, int token,
                                         DrawRows<ROWS>& rows) {
  const u32 start = token * STRIDE;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RowNoise r = rows.row[row + i];
    const float one = rows.one[row + i];
    float best = score(i ? b0 : a0, r, one, start);
    const float other = score(i ? b1 : a1, r, one, start + 8 * STRIDE);
    int winner = token;
    if (other > best) best = other, winner = token + 8;
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      const float theirs = __shfl_xor_sync(~0u, best, d);
      const int their = __shfl_xor_sync(~0u, winner, d);
      if (theirs > best || (theirs == best && their < winner)) best = theirs, winner = their;
    }
    if (threadIdx.x % 32 < 4) {
      atomicMax(&rows.best[row + i], key_of(best, winner));
      const float least = least_of(best, one);
      if (rows.least[row + i] < least) rows.least[row + i] = least;
    }
  }
}

// A warp's 16 tokens from `token` on, of which `count` exist (none or fewer behind the vocabulary's end), in
// N * 2 rows: lane (g, t) has tokens g and g + 8 of rows 2t and 2t + 1 of every 8.
template <int N, int ROWS>
__device__ __forceinline__ void draw_tile(float (&x)[N], DrawRows<ROWS>& rows, int token, int count) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 start = (token + g) * STRIDE;
  if (count <= 0) return;
  if (count < 16) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      if (g >= count) x[j] = x[j + 1] = NOTHING;
      if (g + 8 >= count) x[j + 2] = x[j + 3] = NOTHING;
    }
  }
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    const int row = j * 2 + t * 2;
    const RowNoise a = rows.row[row], b = rows.row[row + 1];
    const float2 one = *reinterpret_cast<const float2*>(rows.one + row);
    const volatile float* least = rows.least + row;
    const float most_a = larger(bound(x[j], a, one.x, start), bound(x[j + 2], a, one.x, start + 8 * STRIDE));
    const float most_b =
        larger(bound(x[j + 1], b, one.y, start), bound(x[j + 3], b, one.y, start + 8 * STRIDE));
    if (__any_sync(~0u, !(most_a < least[0] && most_b < least[1])))
      score_close(x[j], x[j + 1], x[j + 2], x[j + 3], row, token + g, rows);
  }
}
