// out[m, f] = act(gate) * up of x[m, 2 f], gate then up in each row: the activation that kernels of products
// do behind gate and up that they have rounded, in the same bits.
#include "common.cuh"

#ifndef GELU
#define GELU 0
#endif

struct Params {
  const uint4* x;
  uint4* out;
  long long eights;  // of the result
  int each;          // of a row
};

__device__ __forceinline__ u32 both(u32 x, u32 up) {
  return pack2(gate<GELU>(lo2f(x), lo2f(up)), gate<GELU>(hi2f(x), hi2f(up)));
}

extern "C" __global__ void __launch_bounds__(256) act_mul(const __grid_constant__ Params p) {
  pdl_wait();
  pdl_launch();
  const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  if (i >= p.eights) return;
  const long long row = i / p.each, at = row * 2 * p.each + i % p.each;
  const uint4 x = p.x[at], up = p.x[at + p.each];
  p.out[i] = make_uint4(both(x.x, up.x), both(x.y, up.y), both(x.z, up.z), both(x.w, up.w));
}
