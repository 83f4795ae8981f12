// The experts of one token, or of very few, with weights of 4 or 8 bits in groups with a scale and a zero
// (``quant/integers.py``): both products read the weights of each pair of token and expert once.
//
//   DOWN 0: out[pair, n] = p[pair] act(x[token] gate[n]^T) (x[token] up[n]^T)
//   DOWN 1: out[token, n] (+)= sum over the token's experts of x[pair] w[n]^T
//
// A warp multiplies 16 weight rows by a row of x, which stands in all columns of the instruction: 8 rows of
// gate and 8 of up, or 16 of down, by one expert after another. What the tiles of a block have of k is cut
// evenly among its warps: a tile in which others go on is finished by the warp that begins it. Weights come
// through a cp.async ring of its own, which runs on from one tile to the next. A lane loads the very words
// that it multiplies. What needs no earlier result is asked for before the wait: all of down, whose experts
// are chosen by then.
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
#ifndef WARPS
#define WARPS 16
#endif
#ifndef STAGES
#define STAGES 4
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

constexpr int THREADS = WARPS * 32;
constexpr int BLOCK = 128, ROW_BYTES = BLOCK / 8 * BITS;  // channels that lie together, of a row
constexpr int PIECES = BITS / 4;  // of 16 bytes, for a lane, of a row's block
constexpr int PER = BLOCK / GROUP, STEPS = GROUP / 16, CHAINS = STEPS < 4 ? STEPS : 4;
constexpr int BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK, UNIT = 2, UNITS = (BLOCKS + UNIT - 1) / UNIT;
constexpr int WORD_BYTES = 16 * UNIT * ROW_BYTES, OF_ROW = UNIT * PER * 4;
constexpr int STAGE_BYTES = WORD_BYTES + 16 * OF_ROW;
constexpr int BITES = OF_ROW / WIDTH, LOADS = (16 * BITES + 31) / 32;  // of the constants
constexpr int ROWS = DOWN ? 16 : 8;              // outputs of a tile
constexpr int TILES = OUTPUTS / ROWS;
constexpr int LENGTH = DOWN ? TOP_K * UNITS : UNITS;  // units of a tile
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

extern "C" __global__ void __launch_bounds__(THREADS) integer_experts(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float parts[WARPS][16];  // what a warp has of a tile that it does not begin
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 ring = smem_addr(smem) + warp * (STAGES * STAGE_BYTES),
            kept_x = smem_addr(smem) + WARPS * STAGES * STAGE_BYTES;
  const int rows = DOWN ? p.tokens * TOP_K : p.tokens;
  const u32 sums = kept_x + rows * X_ROW;

  const int all = (DOWN ? p.tokens : p.tokens * TOP_K) * TILES;
  const int grid = gridDim.x, block = blockIdx.x;
  const int here = (all - block + grid - 1) / grid * LENGTH;                             // units of the block
  const int begin = here * warp / WARPS, end = here * (warp + 1) / WARPS;  // of them, the warp's
  auto tile_of = [&](int at) { return block + at / LENGTH * grid; };
  auto pair_of = [&](int at) {
    return tile_of(at) / TILES * (DOWN ? TOP_K : 1) + (DOWN ? at % LENGTH / UNITS : 0);
  };

  int id = 0;  // of the pair ``lane``
  auto find_experts = [&]() { id = lane < p.tokens * TOP_K ? p.ids[lane] : 0; };
  int next = begin, to = 0;
  const char* words;     // of the lane, of the unit ``next``
  const u32* constants;  // the same
  const int own = lane / BITES, apart = DOWN ? 8 : OUTPUTS;  // rows between the halves of a tile
  auto find_weights = [&]() {
    const int expert = __shfl_sync(~0u, id, pair_of(next)), of_k = next % UNITS * UNIT;
    const long long first =
        (long long)expert * (DOWN ? OUTPUTS : 2 * OUTPUTS) + tile_of(next) % TILES * ROWS;
    words = reinterpret_cast<const char*>(p.w) + ((first + g) * BLOCKS + of_k) * ROW_BYTES + t * 16;
    constants = p.constants + (first + own % 8 + (own >= 8 ? apart : 0)) * (BLOCKS * PER) + of_k * PER;
  };
  const u64 policy = policy_once();
  auto load = [&]() {
    if (next < end) {
      const u32 at = ring + to * STAGE_BYTES;
      const int left = BLOCKS % UNIT && next % UNITS == UNITS - 1 ? BLOCKS % UNIT : UNIT;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int b = 0; b < UNIT; ++b)
#pragma unroll
          for (int c = 0; c < PIECES; ++c)
            cp_async_once(at + ((b * 2 + h) * PIECES + c) * 512 + lane * 16,
                          words + (long long)h * apart * (BLOCKS * ROW_BYTES) + b * ROW_BYTES + c * 64,
                          b < left ? 16 : 0, policy);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int e = j * 32 + lane, part = e % BITES * (WIDTH / 4), rows = j * (32 / BITES);
        if (e < 16 * BITES)
          cp_async_constants(at + WORD_BYTES + e * WIDTH,
                             constants + (rows < 8 ? rows : rows - 8 + apart) * (BLOCKS * PER) + part,
                             part < left * PER ? WIDTH : 0, policy);
      }
      to = to + 1 == STAGES ? 0 : to + 1;
      words += UNIT * ROW_BYTES, constants += UNIT * PER;
      if (++next < end && next % UNITS == 0) find_weights();
    }
    cp_async_commit();
  };
  if (DOWN) {
    find_experts(), find_weights();
    for (int s = 0; s < STAGES; ++s) load();
  }
  pdl_wait();
  pdl_launch();
  if (!DOWN) find_experts(), find_weights();
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
  auto finish = [&](int at, float low, float high) {  // sums of rows g and g + 8
    const int tile = tile_of(at), column = tile % TILES * ROWS + g;
    const float y = DOWN ? 0.f : gate<GELU>(low, high) * __shfl_sync(~0u, factor, tile / TILES);
    if (t) return;
    bf16* out = p.out + (long long)(tile / TILES) * OUTPUTS + column;
    out[0] = f2bf(DOWN ? low + (ADD ? bf2f(out[0]) : 0.f) : y);
    if (DOWN) out[8] = f2bf(high + (ADD ? bf2f(out[8]) : 0.f));
  };
  if (t == 0) parts[warp][g] = parts[warp][g + 8] = 0.f;
  int stage = 0, first = begin;  // of the tile at hand, the warp's first unit
  float low = 0.f, high = 0.f;
  for (int at = begin; at < end; ++at) {
    const int pair = pair_of(at), row = DOWN ? pair : pair / TOP_K, unit = at % UNITS;
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
          const int i = group * STEPS + s, q = i / 2, word = BITS == 4 ? q : i,
                    place = BITS == 4 ? i % 2 * 2 : 0;
          const u32* u = reinterpret_cast<const u32*>(w[0]);
          const u32* v = reinterpret_cast<const u32*>(w[1]);
          mma(sum[s % CHAINS], two(u[word], place, mask), two(v[word], place, mask),
              two(u[word], place + 1, mask), two(v[word], place + 1, mask), x[q][i % 2 * 2],
              x[q][i % 2 * 2 + 1]);
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
    if (at % LENGTH < LENGTH - 1 && at + 1 < end) continue;
    if (first % LENGTH) {  // another warp began it
      if (t == 0) parts[warp][g] = low, parts[warp][g + 8] = high;
    } else if (at % LENGTH == LENGTH - 1) {
      finish(at, low, high);
    } else {
      break;
    }
    low = high = 0.f, first = at + 1;
  }
  __syncthreads();
  if (first == end) return;
  const int behind = first + LENGTH;
  for (int v = warp + 1; v < WARPS && here * v / WARPS < behind; ++v)
    low += parts[v][g], high += parts[v][g + 8];
  finish(first, low, high);
}
