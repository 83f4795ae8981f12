// Reads `count` pieces of 16 bytes and nothing else: how fast a kernel of a chain could be. EARLY: the first
// ones before the wait for the kernel before. LATE: the next one may begin when this one has asked for its last;
// 2: and nobody waits.
#include "common.cuh"
#ifndef EARLY
#define EARLY 1
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef AT_ONCE
#define AT_ONCE 8
#endif

struct Params {
  const uint4* from;
  u32* out;
  int count;
};

extern "C" __global__ void __launch_bounds__(512, 2) reads(const Params p) {
  const int begin = (long long)p.count * blockIdx.x / gridDim.x, end = (long long)p.count * (blockIdx.x + 1) / gridDim.x;
  u32 seen = 0;
  uint4 v[AT_ONCE];
  auto ask = [&](int at) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) v[i] = at + i * 512 < end ? __ldcs(p.from + at + i * 512) : uint4{};
  };
  if (EARLY) ask(begin + threadIdx.x);
  if (LATE < 2) pdl_wait();
  if (!LATE) pdl_launch();
  if (!EARLY) ask(begin + threadIdx.x);
  for (int at = begin + threadIdx.x; at < end; at += AT_ONCE * 512) {
    u32 now = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) now ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    ask(at + AT_ONCE * 512);
    if (LATE && at + 2 * AT_ONCE * 512 >= end) pdl_launch();
    seen ^= now;
  }
  if (seen == 0x12345678u) p.out[threadIdx.x] = seen;
}
