// The smallest logit that top-k, top-p and min-p leave in each row, without sorting: two levels of a
// histogram over the distance to the largest logit. A bin holds the number of its tokens and their weight
// exp(-distance / T) in one 64-bit word (18 bits of count, the rest fixed point), so a token costs one
// atomic. A level resolves 1/100, two resolve 5e-6 of T, below which tokens count as equal. Tokens lighter
// than 2e-9 of the top cannot be drawn where there is a threshold.
#include "common.cuh"

constexpr int BINS = 2048, THREADS = 1024, EACH = BINS / THREADS;
constexpr float RANGE = 20.f, WIDTH = RANGE / BINS;  // in units of T
constexpr int COUNT_BITS = 18;
constexpr float ONE = 268435456.f;  // 2^28

struct Params {
  const float* logits;  // [rows, vocab]
  const int* slots;
  const float* temperature;  // these four by slot
  const int* top_k;
  const float* top_p;
  const float* min_p;
  float* thresholds;  // [rows]
  int vocab;
};

template <typename F>
__device__ __forceinline__ void for_each(const float* row, int vocab, F f) {
  if (vocab % 4 == 0) {
    const float4* wide = reinterpret_cast<const float4*>(row);
#pragma unroll 4
    for (int i = threadIdx.x; i < vocab / 4; i += THREADS) {
      const float4 v = __ldcg(wide + i);
      f(v.x), f(v.y), f(v.z), f(v.w);
    }
  } else {
    for (int i = threadIdx.x; i < vocab; i += THREADS) f(__ldcg(row + i));
  }
}

struct Found {
  int bin;
  u64 before, upto;  // sums of the bins before it, and with it
};

// The first bin at which `reached(sum so far)`; the last one if none. All threads take part and get the
// answer.
template <typename F>
__device__ Found search(const u64* bins, F reached) {
  __shared__ u64 warp_sums[THREADS / 32];
  __shared__ Found found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 own[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += own[i] = bins[threadIdx.x * EACH + i];
  u64 scan = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u64 other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  __syncthreads();  // the previous search has been read
  if (lane == 31) warp_sums[warp] = scan;
  __syncthreads();
  u64 at = scan - sum;
  for (int w = 0; w < warp; ++w) at += warp_sums[w];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const bool last = threadIdx.x == THREADS - 1 && i == EACH - 1;
    if (!reached(at) && (reached(at + own[i]) || last))
      found = {int(threadIdx.x) * EACH + i, at, at + own[i]};
    at += own[i];
  }
  __syncthreads();
  return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) find_thresholds(const Params p) {
  __shared__ u64 coarse[BINS], fine[BINS];
  __shared__ float warp_top[THREADS / 32];
  const int slot = p.slots[blockIdx.x], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float temperature = p.temperature[slot], top_p = p.top_p[slot], min_p = p.min_p[slot];
  const int top_k = p.top_k[slot] < p.vocab ? p.top_k[slot] : 0;
  const float none = __uint_as_float(0xff800000u);
  if (temperature < 1e-5f || (top_k <= 0 && top_p >= 1.f && min_p <= 0.f)) {
    if (threadIdx.x == 0) p.thresholds[blockIdx.x] = none;
    return;
  }
  const float* row = p.logits + (long long)blockIdx.x * p.vocab;
  float top = none;
  for_each(row, p.vocab, [&](float x) { top = fmaxf(top, x); });
#pragma unroll
  for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) warp_top[warp] = top;
  for (int i = threadIdx.x; i < BINS; i += THREADS) coarse[i] = fine[i] = 0;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) top = fmaxf(top, warp_top[w]);

  float threshold = min_p > 0.f ? top + temperature * logf(min_p) : none;
  if (top_k > 0 || top_p < 1.f) {
    const float to_bins = 1.f / (temperature * WIDTH);
    auto weigh = [&](float distance) {  // in bins
      return (u64(exp2_fast(distance * (-WIDTH * 1.442695041f)) * ONE + 0.5f) << COUNT_BITS) | 1;
    };
    for_each(row, p.vocab, [&](float x) {
      const float distance = (top - x) * to_bins;
      if (distance < BINS) atomicAdd(&coarse[int(distance)], weigh(distance));
    });
    __syncthreads();
    int in_fine = -1;
    auto refine = [&](int bin) {  // spread one coarse bin over the fine ones
      if (bin == in_fine) return;
      if (in_fine >= 0) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) fine[i] = 0;
        __syncthreads();
      }
      in_fine = bin;
      for_each(row, p.vocab, [&](float x) {
        const float distance = (top - x) * to_bins;
        if (distance < BINS && int(distance) == bin)
          atomicAdd(&fine[min(BINS - 1, int((distance - bin) * BINS))], weigh(distance));
      });
      __syncthreads();
    };
    auto edge = [&](int bin, int sub) { return top - (bin + (sub + 1) * (1.f / BINS)) / to_bins; };
    constexpr u64 COUNT = (1ull << COUNT_BITS) - 1;
    u64 mass = 0;
    if (top_k > 0) {
      const Found c = search(coarse, [&](u64 s) { return (s & COUNT) >= u64(top_k); });
      if ((c.upto & COUNT) >= u64(top_k)) {
        refine(c.bin);
        const Found f = search(fine, [&](u64 s) { return ((c.before + s) & COUNT) >= u64(top_k); });
        threshold = fmaxf(threshold, edge(c.bin, f.bin));
        mass = (c.before + f.upto) >> COUNT_BITS;
      } else {  // the rest of the k are out of range
        threshold = fmaxf(threshold, top - RANGE * temperature);
        mass = c.upto >> COUNT_BITS;
      }
    }
    if (top_p < 1.f) {
      if (mass == 0) mass = search(coarse, [](u64) { return false; }).upto >> COUNT_BITS;
      const u64 target = max(1ull, u64(double(mass) * top_p));
      const Found c = search(coarse, [&](u64 s) { return (s >> COUNT_BITS) >= target; });
      refine(c.bin);
      const Found f = search(fine, [&](u64 s) { return ((c.before + s) >> COUNT_BITS) >= target; });
      threshold = fmaxf(threshold, edge(c.bin, f.bin));
    }
  }
  if (threadIdx.x == 0) p.thresholds[blockIdx.x] = fminf(threshold, top);
}
