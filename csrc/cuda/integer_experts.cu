// The experts of one token, or of very few, with weights of 4 or 8 bits in groups with a scale and a zero
// (``quant/integers.py``): both products read the weights of each pair of token and expert once.
//
//   DOWN 0: out[pair, n] = p[pair] act(x[token] gate[n]^T) (x[token] up[n]^T)
//   DOWN 1: out[token, n] (+)= sum over the token's experts of x[pair] w[n]^T
//
// A warp multiplies 16 weight rows by a row of x, which stands in all columns of the instruction: 8 rows of
// gate and 8 of up, by all of k, or 16 of down, by what one expert has of k; the warps of a block add up the
// experts of a token. Weights come through a cp.async ring of its own, which runs on from one to the next. A
// lane loads the very words that it multiplies. What needs no earlier result is asked for before the wait:
// all of down, whose experts are chosen by then.
//
// Integers are exact in bfloat16, what is too much of them and the zero comes off with the sum of a group of
// x: see integer_gemm.cu.
#include "common.cuh"

#ifndef DOWN
#define DOWN 0
#endif
#ifndef BITS
#define BITS 4
#endif
#ifndef GROUP  // channels with one scale: 32, 64 or 128
#define GROUP 128
#endif
#ifndef WHOLE  // 1: zeros are whole numbers, in bfloat16 as the products need them; 0: any, in float16
#define WHOLE 1
#endif
#ifndef CHANNELS  // of x
#define CHANNELS 2048
#endif
#ifndef OUTPUTS  // of an expert: its inner activations, or the width of the residual stream
#define OUTPUTS 768
#endif
#ifndef TOP_K  // experts of a token
#define TOP_K 8
#endif
#ifndef STAGES
#define STAGES 8
#endif
#ifndef WIDTH  // bytes of constants that a lane loads at a time
#define WIDTH 8
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef ADD  // DOWN: into out
#define ADD 0
#endif

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int BLOCK = 128, ROW_BYTES = BLOCK / 8 * BITS;  // channels that lie together, of a row
constexpr int PIECES = BITS / 4;  // of 16 bytes, for a lane, of a row's block
constexpr int PER = BLOCK / GROUP, STEPS = GROUP / 16, CHAINS = STEPS < 4 ? STEPS : 4;
constexpr int BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK, UNIT = 2, UNITS = (BLOCKS + UNIT - 1) / UNIT;
constexpr int WORD_BYTES = 16 * UNIT * ROW_BYTES, OF_ROW = UNIT * PER * 4;
constexpr int STAGE_BYTES = WORD_BYTES + 16 * OF_ROW;
constexpr int BITES = OF_ROW / WIDTH, LOADS = (16 * BITES + 31) / 32;  // of the constants
constexpr int ROWS = DOWN ? 16 : 8;              // outputs of a tile
constexpr int TILES = OUTPUTS / ROWS;
constexpr int X_ROW = UNITS * UNIT * BLOCK * 2;  // bytes of a row of x in shared memory
constexpr int GROUPS = UNITS * UNIT * PER;       // of a row of x
static_assert(OUTPUTS % ROWS == 0 && CHANNELS % 8 == 0);

struct Params {
  const bf16* x;            // [tokens, CHANNELS]; DOWN: [pairs, CHANNELS]
  const float* p;           // [pairs]
  const volatile int* ids;  // [pairs]; down reads them before its wait, when the L1 cache may have older ones
  const u32* w;             // [experts * 2 OUTPUTS, ...], gate then up; DOWN: [experts * OUTPUTS, ...]
  const u32* constants;
  bf16* out;
  int tokens;
};

#include "integers.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) integer_experts(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float parts[2][WARPS][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 ring = smem_addr(smem) + warp * (STAGES * STAGE_BYTES),
            kept_x = smem_addr(smem) + WARPS * STAGES * STAGE_BYTES;
  const int rows = DOWN ? p.tokens * TOP_K : p.tokens;
  const u32 sums = kept_x + rows * X_ROW;

  // A tile: of a warp, or DOWN of a block, whose warps have some of the token's experts each.
  const int all = DOWN ? p.tokens * TILES : p.tokens * TOP_K * TILES;
  const int step = DOWN ? gridDim.x : gridDim.x * WARPS;
  const int begin = DOWN ? blockIdx.x : blockIdx.x + warp * gridDim.x;
  const int own = DOWN ? (TOP_K - warp + WARPS - 1) / WARPS : 1;  // experts of a tile
  auto pair_of = [&](int tile, int i) {
    return DOWN ? tile / TILES * TOP_K + warp + i * WARPS : tile / TILES;
  };

  int id = 0;  // of the pair ``lane``
  auto find_experts = [&]() { id = lane < p.tokens * TOP_K ? p.ids[lane] : 0; };
  int in_tile = own > 0 ? begin : all, in_expert = 0, in_unit = 0, to = 0;
  auto load = [&]() {
    if (in_tile < all) {
      const u32 at = ring + to * STAGE_BYTES;
      const int block = in_unit * UNIT, left = BLOCKS - block,
                expert = __shfl_sync(~0u, id, pair_of(in_tile, in_expert));
      const long long first = (long long)expert * (DOWN ? OUTPUTS : 2 * OUTPUTS) + in_tile % TILES * ROWS;
      auto row_of = [&](int row) { return first + (DOWN ? row : row % 8 + (row >= 8 ? OUTPUTS : 0)); };
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int b = 0; b < UNIT; ++b)
#pragma unroll
          for (int c = 0; c < PIECES; ++c)
            cp_async16(at + ((b * 2 + h) * PIECES + c) * 512 + lane * 16,
                       reinterpret_cast<const char*>(p.w) + row_of(h * 8 + g) * (BLOCKS * ROW_BYTES) +
                           (block + b) * ROW_BYTES + c * 64 + t * 16,
                       b < left ? 16 : 0);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane;
        if (e < 16 * BITES)
          cp_async_constants(at + WORD_BYTES + e * WIDTH,
                             p.constants + row_of(e / BITES) * (BLOCKS * PER) + block * PER +
                                 e % BITES * (WIDTH / 4),
                             e % BITES * (WIDTH / 4) < left * PER ? WIDTH : 0);
      }
      to = to + 1 == STAGES ? 0 : to + 1;
      if (++in_unit == UNITS) {
        in_unit = 0;
        if (++in_expert == own) in_expert = 0, in_tile += step;
      }
    }
    cp_async_commit();
  };
  if (DOWN) {
    find_experts();
    for (int s = 0; s < STAGES; ++s) load();
  }
  pdl_wait();
  pdl_launch();
  if (!DOWN) find_experts();
  const float factor = !DOWN && lane < p.tokens * TOP_K ? p.p[lane] : 0.f;  // of the pair ``lane``

  // x and the sums of its groups; zeros behind its end.
  constexpr int CHUNKS = UNITS, AT_ONCE = 4;  // of 256 channels, as a warp loads
  for (int from = warp; from < rows * CHUNKS; from += AT_ONCE * WARPS) {
    uint4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int chunk = from + i * WARPS, row = chunk / CHUNKS, k = chunk % CHUNKS * 256 + lane * 8;
      v[i] = {};
      if (row < rows && k < CHANNELS) v[i] = *reinterpret_cast<const uint4*>(p.x + row * CHANNELS + k);
    }
    if (!DOWN && from == warp)
      for (int s = 0; s < STAGES; ++s) load();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int chunk = from + i * WARPS, row = chunk / CHUNKS, k = chunk % CHUNKS * 256 + lane * 8;
      float sum = add2(v[i].x) + add2(v[i].y) + add2(v[i].z) + add2(v[i].w);
#pragma unroll
      for (int d = 1; d < GROUP / 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (row >= rows) continue;
      sts128(kept_x + row * X_ROW + k * 2, v[i]);
      if (k % GROUP == 0) sts32(sums + (row * GROUPS + k / GROUP) * 4, sum);
    }
  }
  if (!DOWN && warp >= rows * CHUNKS)
    for (int s = 0; s < STAGES; ++s) load();
  __syncthreads();

  const u32 mask = MASK ^ u32(p.tokens) >> 31;  // a register for all, which a constant would not get
  int stage = 0, turn = 0;
  for (int tile = begin; tile < all; tile += step, turn ^= 1) {
    float low = 0.f, high = 0.f;  // of rows g and g + 8
    for (int i = 0; i < own; ++i) {
      const int pair = pair_of(tile, i), row = DOWN ? pair : pair / TOP_K;
      for (int unit = 0; unit < UNITS; ++unit) {
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        const u32 from = ring + stage * STAGE_BYTES;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int b = 0; b < UNIT; ++b) {
          uint4 w[2][PIECES];
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < PIECES; ++c)
              w[h][c] = lds128(from + ((b * 2 + h) * PIECES + c) * 512 + lane * 16);
          u32 x[4][4];  // of 32 channels each
#pragma unroll
          for (int q = 0; q < 4; ++q)
            ldmatrix(x[q], kept_x + row * X_ROW + (unit * UNIT + b) * (BLOCK * 2) + q * 64 + lane / 8 * 16);
#pragma unroll
          for (int group = 0; group < PER; ++group) {
            float sum[CHAINS][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {  // 16 channels
              const int at = group * STEPS + s, q = at / 2, word = BITS == 4 ? q : at,
                        place = BITS == 4 ? at % 2 * 2 : 0;
              const u32* u = reinterpret_cast<const u32*>(w[0]);
              const u32* v = reinterpret_cast<const u32*>(w[1]);
              mma(sum[s % CHAINS], two(u[word], place, mask), two(v[word], place, mask),
                  two(u[word], place + 1, mask), two(v[word], place + 1, mask), x[q][at % 2 * 2],
                  x[q][at % 2 * 2 + 1]);
            }
            float of_low = sum[0][0], of_high = sum[0][2];
#pragma unroll
            for (int c = 1; c < CHAINS; ++c) of_low += sum[c][0], of_high += sum[c][2];
            const float of_x = lds32f(sums + (row * GROUPS + (unit * UNIT + b) * PER + group) * 4);
            const u32 constants = from + WORD_BYTES + (b * PER + group) * 4;
            const u32 a = lds32(constants + g * OF_ROW), c = lds32(constants + (g + 8) * OF_ROW);
            low += (of_low - zero_of(a) * of_x) * half2f(a);
            high += (of_high - zero_of(c) * of_x) * half2f(c);
          }
        }
        __syncwarp();  // constants are read by others, too
        load();
      }
    }
    const int column = tile % TILES * ROWS;
    if (!DOWN) {
      const int pair = tile / TILES;
      const float y = gate<GELU>(low, high) * __shfl_sync(~0u, factor, pair);
      if (t == 0) p.out[(long long)pair * OUTPUTS + column + g] = f2bf(y);
      continue;
    }
    if (t == 0) parts[turn][warp][g] = low, parts[turn][warp][g + 8] = high;
    __syncthreads();  // of two buffers the other one's readers passed the one before
    if (threadIdx.x < 16) {
      float y = 0.f;
#pragma unroll
      for (int v = 0; v < WARPS; ++v) y += parts[turn][v][threadIdx.x];
      bf16* out = p.out + (long long)(tile / TILES) * OUTPUTS + column + threadIdx.x;
      *out = f2bf(y + (ADD ? bf2f(*out) : 0.f));
    }
  }
}
