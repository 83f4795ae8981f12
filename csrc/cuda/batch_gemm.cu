// out[m, n] = act(x[m, k] w[n, k]^T) for the rows of a decode batch.
//
// Weights are the wide side (M) of the tensor-core instruction and the batch the narrow one (N), so a small
// batch wastes little. One thread feeds the ring with the copy engine; the first stages of weights are
// requested before the wait for the kernel before. Blocks that split k give each other their sums, as a
// cluster into each other's shared memory or, GLOBAL, through the L2 cache (then all blocks must fit on the
// GPU at once), and each finishes a share of the rows. GATED: the tensor map interleaves 8 gate rows with the
// 8 up rows that belong to them, so a thread has both. PAIRED: tiles of weight rows that groups of warps,
// each with 64, cannot share evenly. Of each two tiles both load the 64 rows between them, and multiply them
// by a half of x (where halves overlap, both write the same bits).
//
// An add into the residual and an RMSNorm between two such kernels need none of their own. The first (ADD)
// adds to the residual, leaves the sum times the norm's weight, and for its columns the sums of the squares
// of each row. The second (SCALED) adds these up while its weights come, in a fixed order, and divides its
// results by the rms.
//
// BM 32: the narrowest tile, for weights with few rows whose k may not be split. Its instructions multiply
// 64 rows all the same, and what they make of the others is left. PANELS: so many times 64 of k in a stage,
// since a thread can ask for so many stages a microsecond only. ROUNDED: gate and up are rounded to bf16
// before the activation, as in prompt_gemm.cu. A result that is not split is the same bits as there,
// whatever the tile.
//
// E4M3: both factors are rounded to 8 bits, x with a scale for each row and w with one for each of its own.
// The results are multiplied by them. GROUPED: a row of w has a scale for each 128 k, which is a stage; the
// sums of a stage, in registers of their own, meet it there.
//
// SEND: ranks whose inboxes get the results, for the sum that follows (see all_reduce.cu).
#include "wgmma.cuh"
#include "gumbel.cuh"
#include "inbox.cuh"

#ifndef BM  // weight rows of a tile: a multiple of 32 up to 256
#define BM 128
#endif
// Over x, each with some of a tile's weight rows: more than one if the sums of all would not fit into
// registers.
#ifndef PASSES
#define PASSES 1
#endif
#ifndef BN  // rows of x in a tile: 32, 64, 96, or a multiple of 16 from 128 to 256; of 8 SPLIT, too
#define BN 64
#endif
#ifndef SPLIT  // blocks that share a sum over k; at most BN / 8
#define SPLIT 1
#endif
#ifndef GLOBAL
#define GLOBAL 0
#endif
#ifndef PER_SM  // blocks on a multiprocessor
#define PER_SM 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
// 1: rows of the result are divided by the rms of rows of which the kernel before left the squares' sums.
#ifndef SCALED
#define SCALED 0
#endif
#ifndef E4M3
#define E4M3 0
#endif
#ifndef PANELS
#define PANELS 1
#endif
#ifndef ROUNDED
#define ROUNDED 0
#endif
#ifndef GROUPED
#define GROUPED 0
#endif
// 0: bf16; 1: add to the residual, times a norm's weight; 2: silu(gate) * up; 3: float32; 4: gelu_tanh(gate)
// * up; 6: float32, or tokens drawn from it.
#ifndef EPILOGUE
#define EPILOGUE 0
#endif

#ifndef SEND  // 0: none
#define SEND 0
#endif

constexpr bool GELU = EPILOGUE == 4, GATED = EPILOGUE == 2 || GELU;
constexpr int ROW_BYTES = 128, BK = ROW_BYTES / (E4M3 ? 1 : 2);  // one row of a swizzled tile
constexpr bool FACTORS = SCALED || (E4M3 && !GROUPED);  // of rows of x, in shared memory
constexpr bool NARROW = BM < 64, PAIRED = BM % 64 != 0 && !NARROW;
constexpr int GROUPS = (BM + 63) / 64 / PASSES, CONSUMERS = GROUPS * 128;
constexpr int HALF = PAIRED ? (BN / 2 + 15) & ~15 : BN;  // rows of x for the last group in the last pass
constexpr int W_PANEL = (NARROW ? BM : GROUPS * 64) * ROW_BYTES;
constexpr int W_BYTES = PANELS * W_PANEL, STAGE_BYTES = W_BYTES + PANELS * BN * ROW_BYTES;
// 160 registers a consumer, for which the loading group gives up its own.
constexpr bool TIGHT = GROUPS == 3 && BN > (GROUPED ? 64 : 192);
// Those that load give registers to those that multiply, where these would not have enough.
// GROUPED: a thread has registers for sums of two groups besides those of all.
constexpr bool IN_TURN = GROUPED && BN <= 128 && (GROUPS < 3 || (GROUPS == 3 && BN <= 64));
// Three groups of warps whose threads have registers for one group's sums ask for products in turn, so that
// not all of them meet scales at the same time; by barriers of the hardware's from TURN on.
constexpr bool TURNS = GROUPED && GROUPS == 3 && !IN_TURN && !PAIRED;
constexpr int TURN = 2;
constexpr bool LENDS = TIGHT || (GROUPED && BN > (GROUPS == 2 ? 64 : 128));
constexpr int THREADS = CONSUMERS + (LENDS ? 128 : 32 + FACTORS * 32);
constexpr int ACC = BN / 2, SHARE = ACC / SPLIT;  // sums of a thread
constexpr int BAND = 16;  // tiles of x that are worked on together
constexpr bool ADD = EPILOGUE == 1, DRAW = EPILOGUE == 6;
constexpr int DONE_ROWS = BN / SPLIT;  // rows of x that a block finishes
constexpr bool CLUSTER = SPLIT > 1 && !GLOBAL;
static_assert((BM + 63) / 64 % PASSES == 0 && !(PAIRED && (SPLIT > 1 || ADD || DRAW)));
static_assert(!(E4M3 && (SCALED || ADD || DRAW)));
static_assert(!(GROUPED && (!E4M3 || (TIGHT && BN > 128) || (LENDS && GROUPS > 3))));
static_assert(!(SEND && (EPILOGUE || PAIRED || NARROW)));  // what is sent is sent once
static_assert(!(NARROW && (SPLIT > 1 || ADD || DRAW || E4M3)) && !(PANELS > 1 && (GATED || E4M3)));
// Sums that a block gets from its cluster.
constexpr int INBOX_BYTES = CLUSTER ? (SPLIT - 1) * SHARE * 4 * CONSUMERS : 0;

struct Params {
  TensorMap w, x;
  const float* bias;  // [n] or null
  void* out;          // [m, n]
  bf16* residual;     // ADD: [m, n]
  const float* norm;  // ADD: [n]
  float* squares;     // ADD: [tiles][row_stride], what the columns of a tile add to a row's sum
  const float* row_squares;  // SCALED: [parts][row_stride]
  float4* sums;       // GLOBAL: [tile][to][from][SHARE / 4][CONSUMERS]
  u32* counts;        // GLOBAL: [tile], arrivals since ever
  Draw draw;
  int m, n, k, tiles, row_tiles, x_rows;  // tiles: of weight rows; x_rows: of one load
  int parts, row_stride, first;  // first: token of a vocabulary's part
  float eps;
  const float* row_scale;  // E4M3: [m], of x
  // E4M3: [n], of w; gated: [2 n], gate rows, then up rows; GROUPED: [rows / shared ones][k / 128].
  const float* scale;
#if SEND
  u32* inbox[8];     // of every rank
  const u32* state;  // sums so far
  long long half;    // words of one of the two inboxes
  int rank;
#endif
  int shared;  // GROUPED: 2 to the power of it rows of w share their scales
};

#if SEND
constexpr int ROW_PIECES = GROUPS * 8, SENT_BYTES = DONE_ROWS * ROW_PIECES * 16;  // of what a block finishes
// Where 16 bytes of a finished row wait in shared memory: neither rows nor pieces meet in a bank.
__device__ __forceinline__ int waiting(int row, int piece) {
  return row * (ROW_PIECES * 16) + (piece ^ row & 7) * 16;
}
// Where this rank's rows begin in the inboxes, in words.
__device__ __forceinline__ long long sent_to(const Params& p) {
  return (__ldcg(p.state) & 1) * p.half + (long long)p.rank * p.m * (p.n / 2);
}
// Sends what a block has finished of the rows from `row` on and of the columns from n on, by whole rows: a
// link takes long for many small pieces.
__device__ __forceinline__ void send_rows(const Params& p, const unsigned char* waits, long long to, int n,
                                          int row) {
  meet_at<CONSUMERS>(1);
  for (int i = threadIdx.x; i < DONE_ROWS * ROW_PIECES; i += CONSUMERS) {
    const int at = row + i / ROW_PIECES, column = n + i % ROW_PIECES * 8;
    if (at >= p.m || column >= p.n) continue;
    const uint4 v =
        tidy(*reinterpret_cast<const uint4*>(waits + waiting(i / ROW_PIECES, i % ROW_PIECES)));
#pragma unroll
    for (int r = 0; r < SEND; ++r)
      send(reinterpret_cast<uint4*>(p.inbox[r] + to + ((long long)at * p.n + column) / 2), v);
  }
  meet_at<CONSUMERS>(1);  // all have been read
}
#endif

// A count in global memory: adds one, and returns what it was before; and what it is by now.
__device__ __forceinline__ u32 arrive(u32* count) {
  u32 old;
  asm volatile("fence.acq_rel.gpu;\natom.add.relaxed.gpu.global.u32 %0, [%1], 1;"
               : "=r"(old)
               : "l"(count)
               : "memory");
  return old;
}
__device__ __forceinline__ u32 arrived(const u32* count) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(count) : "memory");
  return v;
}
// Four sums for a block of the cluster, whose barrier hears of it.
__device__ __forceinline__ void tell4(u32 to, u32 bar, int rank, const float* d) {
  asm volatile("{\n.reg .u32 there, bar;\nmapa.shared::cluster.u32 there, %0, "
               "%2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, "
               "%6}, [bar];\n}" ::"r"(to), "r"(bar), "r"(rank), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
}
__device__ __forceinline__ float4 lds_float4(u32 from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void discard(const float4* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

// Panels of 64 of k: dims k in a panel, row, panel.
__device__ __forceinline__ void copy_panels(u32 to, const TensorMap& map, u32 bar, int panel, int row,
                                            u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %5}], [%2], %6;"
               ::"r"(to), "l"(&map), "r"(bar), "r"(0), "r"(row), "r"(panel), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_panels(u32 to, const TensorMap& map, u32 bar, int panel, int row) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
               "{%3, %4, %5}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(0), "r"(row), "r"(panel) : "memory");
}
// Of step `step` of k.
__device__ __forceinline__ void copy_x(u32 to, const TensorMap& map, u32 bar, int step, int row) {
  if (PANELS > 1) copy_panels(to, map, bar, step * PANELS, row);
  else copy_2d(to, map, bar, step * BK, row);
}
__device__ __forceinline__ void copy_w(u32 to, const TensorMap& map, u32 bar, int step, int row, u64 policy) {
  const int k = step * BK;
  if (PANELS > 1)
    copy_panels(to, map, bar, step * PANELS, row, policy);
  else if (GATED)  // dims: k, row in 8, gate or up, group of 8 rows
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(&map), "r"(bar), "r"(k), "r"(0), "r"(row / 16), "l"(policy) : "memory");
  else
    copy_2d(to, map, bar, k, row, policy);
}

// A tile of x, of BN rows from `row` on, and of w, and a pass over them. Those that are worked on at the same
// time share rows in the L2 cache.
struct Tile {
  int w, row, pass;
  __device__ __forceinline__ Tile(const Params& p, int i) {
    const int tiles = p.tiles * p.row_tiles;
    pass = PASSES == 1 ? 0 : i / tiles, i -= pass * tiles;
    const int band = i / (BAND * p.tiles), rows = min(BAND, p.row_tiles - band * BAND),
              j = i - band * BAND * p.tiles;
    w = j / rows, row = (band * BAND + j % rows) * BN;
  }
  __device__ __forceinline__ bool odd() const { return PAIRED && w % 2; }
  // Of the pass. In the last one the last 64 rows of an even tile are the first ones of an odd tile.
  __device__ __forceinline__ int w_row() const {
    return odd() ? (w + 1) * BM - (pass + 1) * GROUPS * 64 : w * BM + pass * GROUPS * 64;
  }
  __device__ __forceinline__ bool halved() const { return PAIRED && pass == PASSES - 1; }
};

// What a block works on: tiles begin, begin + step, ... and `count` steps of k, from `first` on.
struct Work {
  int rank, first, count, begin, step, total;
  __device__ __forceinline__ Work(const Params& p) {
    const int steps = p.k / (BK * PANELS);
    rank = blockIdx.x % SPLIT, first = steps * rank / SPLIT, count = steps * (rank + 1) / SPLIT - first;
    begin = blockIdx.x / SPLIT, step = gridDim.x / SPLIT, total = p.tiles * p.row_tiles * PASSES;
  }
};

// Asks for the first stages of weights.
__device__ __forceinline__ void load_first(const Params& p, u32 ring, u32 full, const Work& work) {
  const u64 policy = policy_once();
  const int ahead = min(STAGES, work.count), bytes = W_BYTES + PANELS * p.x_rows * ROW_BYTES;
  const Tile one(p, work.begin);
  for (int i = 0; i < ahead; ++i) {
    barrier_expect(full + i * 8, bytes);
    copy_w(ring + i * STAGE_BYTES, p.w, full + i * 8, work.first + i, one.w_row(), policy);
  }
}

// And for all else.
__device__ __forceinline__ void load(const Params& p, u32 ring, u32 full, u32 empty, const Work& work) {
  const u64 policy = policy_once();
  const int ahead = min(STAGES, work.count), bytes = W_BYTES + PANELS * p.x_rows * ROW_BYTES;
  const Tile one(p, work.begin);
  pdl_wait();
  pdl_launch();
  for (int i = 0; i < ahead; ++i)
    copy_x(ring + i * STAGE_BYTES + W_BYTES, p.x, full + i * 8, work.first + i, one.row);
  Slot<STAGES> slot;
  if (ahead == STAGES) slot.parity = 1; else slot.stage = ahead;
  for (int at = work.begin, i = ahead; at < work.total; at += work.step, i = 0) {
    const Tile tile(p, at);
    for (; i < work.count; ++i, slot.next()) {
      const u32 stage = ring + slot.stage * STAGE_BYTES, bar = full + slot.stage * 8;
      barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
      barrier_expect(bar, bytes);
      copy_w(stage, p.w, bar, work.first + i, tile.w_row(), policy);
      copy_x(stage + W_BYTES, p.x, bar, work.first + i, tile.row);
    }
  }
}

// The factors of the rows from `row` on, by a warp of its own while weights come.
__device__ __forceinline__ void find_scales(const Params& p, float* scales, int row) {
  if (E4M3) {
    pdl_wait();
    for (int i = threadIdx.x % 32; i < BN; i += 32)
      scales[i] = row + i < p.m ? __ldcg(p.row_scale + row + i) : 0.f;
    return;
  }
  // Lanes that share four rows' parts.
  constexpr int QUADS = BN / 4, LANES = QUADS < 24 ? QUADS : 32, SHARERS = 32 / LANES;
  const int lane = threadIdx.x % 32;
  pdl_wait();
  for (int quad = lane % LANES; quad < QUADS; quad += LANES) {
    const int parts = row + quad * 4 < p.m ? p.parts : 0;
    float4 sum = {};
#pragma unroll TIGHT ? 2 : 16  // by the registers that are left
    for (int part = lane / LANES; part < parts; part += SHARERS) {
      const float4 v =
          __ldcg(reinterpret_cast<const float4*>(p.row_squares + part * p.row_stride + row) + quad);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    float* s = reinterpret_cast<float*>(&sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int d = LANES; d < 32; d *= 2) s[i] += __shfl_xor_sync(~0u, s[i], d);
      s[i] = rsqrtf(s[i] / p.k + p.eps);
    }
    reinterpret_cast<float4*>(scales)[quad] = sum;
  }
}

// GROUPED: the factors of ROWS rows of x. Each lane has every 32nd; fetched where they are needed, they would
// be waited for at every eighth row.
template <int ROWS>
struct RowFactors {
  float each[GROUPED ? (ROWS + 31) / 32 : 1];
  __device__ __forceinline__ RowFactors(const Params& p, int row) {
    row += threadIdx.x % 32;
    if (GROUPED)
#pragma unroll
      for (int i = 0; i < (ROWS + 31) / 32; ++i)
        each[i] = row + i * 32 < p.m ? __ldcg(p.row_scale + row + i * 32) : 0.f;
  }
  // Of row `first` + `more`, both of the same 32; `first` is a constant.
  __device__ __forceinline__ float of(int first, int more) const {
    return __shfl_sync(~0u, each[first / 32], first % 32 + more);
  }
};

// A warp writes the columns from n on, those of its 16 rows of w, of rows of x from `row` on: lane (g, t) has
// rows g and g + 8 of w, and rows 2t and 2t + 1 of every 8 of x. Transposed, four lanes write 16 bytes.
template <int N>
__device__ __forceinline__ void store(const Params& p, const float (&sum)[N], int n, int row,
                                      const float* scales, const RowFactors<N * 2>& factors,
                                      unsigned char* waits) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float bias[2] = {};
  if (!GATED && p.bias) {
    if (n + g < p.n) bias[0] = p.bias[n + g];
    if (n + g + 8 < p.n) bias[1] = p.bias[n + g + 8];
  }
#pragma unroll
  for (int j = 0; j < N; j += 4, row += 8) {
    float d[4] = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
    if (FACTORS) {
      const float2 s = *reinterpret_cast<const float2*>(scales + j * 2 + t * 2);
      d[0] *= s.x, d[1] *= s.y, d[2] *= s.x, d[3] *= s.y;
    }
    if (GROUPED) {
      const float x = factors.of(j * 2, t * 2), y = factors.of(j * 2, t * 2 + 1);
      d[0] *= x, d[1] *= y, d[2] *= x, d[3] *= y;
    }
    if (EPILOGUE == 3 || DRAW) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = row + t * 2 + (i & 1), col = n + g + (i & 2) * 4;
        if (at < p.m && col < p.n) static_cast<float*>(p.out)[(long long)at * p.n + col] = d[i] + bias[i / 2];
      }
      continue;
    }
    u32* to = reinterpret_cast<u32*>(static_cast<bf16*>(p.out) + (long long)(row + g) * p.n + n) + t;
    const bool here = row + g < p.m;
    if (GATED) {
      if (ROUNDED) {
        const u32 a = pack2(d[0], d[1]), b = pack2(d[2], d[3]);
        d[0] = lo2f(a), d[1] = hi2f(a), d[2] = lo2f(b), d[3] = hi2f(b);
      }
      const u32 y = movmatrix(pack2(gate<GELU>(d[0], d[2]), gate<GELU>(d[1], d[3])));
      if (here && n < p.n) *to = y;
    } else {
      const u32 y0 = movmatrix(pack2(d[0] + bias[0], d[1] + bias[0])),
                y1 = movmatrix(pack2(d[2] + bias[1], d[3] + bias[1]));
#if SEND
      const int piece = threadIdx.x / 32 * 2, at = j * 2 + g;
      reinterpret_cast<u32*>(waits + waiting(at, piece))[t] = y0;
      reinterpret_cast<u32*>(waits + waiting(at, piece + 1))[t] = y1;
#else
      if (here && n < p.n) *to = y0;
      if (here && n + 8 < p.n) to[4] = y1;
#endif
    }
  }
}

// The factors and the bias of a thread's two columns; GATED, of its gate and its up. GROUPED: where their
// scales begin.
struct Columns {
  float norm[2] = {}, bias[2] = {}, scale[2] = {};
  const float* groups[2];
  __device__ __forceinline__ Columns(const Params& p, int n) {
    const int g = threadIdx.x % 32 / 4;
    if (GROUPED) {  // rows behind the last have any
      const long long stride = p.k / BK;
      const int second = GATED ? p.n + min(n + g, p.n - 1) : min(n + g + 8, p.n - 1);
      groups[0] = p.scale + (min(n + g, p.n - 1) >> p.shared) * stride;
      groups[1] = p.scale + (second >> p.shared) * stride;
    } else if (E4M3) {
      if (n + g < p.n) scale[0] = p.scale[n + g];
      if (GATED && n + g < p.n) scale[1] = p.scale[p.n + n + g];
      if (!GATED && n + g + 8 < p.n) scale[1] = p.scale[n + g + 8];
    }
#pragma unroll
    for (int i = 0; ADD && i < 2; ++i)
      if (n + i * 8 < p.n) {
        norm[i] = p.norm[n + i * 8 + g];
        if (p.bias) bias[i] = p.bias[n + i * 8 + g];
      }
  }
};

// The residual where ``store_add`` wants it: in its order of lanes.
template <int N>
__device__ __forceinline__ void load_residual(const Params& p, u32 (&kept)[N / 2], int n, int row) {
  const int lane = threadIdx.x % 32;
  row += lane / 4;
#pragma unroll
  for (int j = 0; j < N / 2; j += 2, row += 8) {
    const u32* from = reinterpret_cast<const u32*>(p.residual + (long long)row * p.n + n) + lane % 4;
    kept[j] = row < p.m && n < p.n ? __ldcg(from) : 0;
    kept[j + 1] = row < p.m && n + 8 < p.n ? __ldcg(from + 4) : 0;
  }
}

// Adds to the residual, and leaves it times the norm's weight, and its squares' sums.
template <int N>
__device__ __forceinline__ void store_add(const Params& p, const float (&sum)[N], const u32 (&kept)[N / 2],
                                          const Columns& columns, int tile, int n, int row,
                                          float* warp_squares) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  meet_at<CONSUMERS>(1);  // those before have been read
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    const int at = row + j * 2 + g;
    const long long to = ((long long)at * p.n + n) / 2 + t;
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 old = movmatrix(kept[j / 2 + i]);
      const u32 total = pack2(sum[j + i * 2] + columns.bias[i] + lo2f(old),
                              sum[j + i * 2 + 1] + columns.bias[i] + hi2f(old));
      const float y0 = lo2f(total), y1 = hi2f(total);
      squares[0] += y0 * y0, squares[1] += y1 * y1;
      const u32 h = movmatrix(total), x = movmatrix(pack2(y0 * columns.norm[i], y1 * columns.norm[i]));
      if (at < p.m && n + i * 8 < p.n) {
        reinterpret_cast<u32*>(p.residual)[to + i * 4] = h;
        static_cast<u32*>(p.out)[to + i * 4] = x;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) squares[i] += __shfl_xor_sync(~0u, squares[i], d);
      if (g == 0) warp_squares[warp * DONE_ROWS + j * 2 + t * 2 + i] = squares[i];
    }
  }
  meet_at<CONSUMERS>(1);
  for (int i = threadIdx.x; i < DONE_ROWS && row + i < p.m; i += CONSUMERS) {
    float total = 0.f;
    for (int w = 0; w < CONSUMERS / 32; ++w) total += warp_squares[w * DONE_ROWS + i];
    p.squares[tile * p.row_stride + row + i] = total;
  }
}

// Where blocks that split k leave what is another's, and how they know that it is there.
struct Exchange {
  u32 inbox, delivered;  // CLUSTER: of this block, [from][SHARE / 4][CONSUMERS] float4; and a barrier
  int index;             // GLOBAL: of the tile
};

// Each gives the others the sums of their rows and finishes its own, adding in a fixed order.
__device__ __forceinline__ void exchange(const Params& p, const float (&acc)[ACC], float (&sum)[SHARE],
                                         const Work& work, const Exchange& e) {
  float4* sums = p.sums + (long long)e.index * (ACC / 4 * SPLIT * CONSUMERS) + threadIdx.x;
  const u32 inbox = e.inbox + threadIdx.x * 16;
  auto place = [&](int to, int from, int j) {
    return sums + ((to * SPLIT + from) * (SHARE / 4) + j / 4) * CONSUMERS;
  };
  auto from = [&](int i, int j) { return inbox + ((i - 1) * (SHARE / 4) + j / 4) * (CONSUMERS * 16); };
  // All have set up their barriers.
  if (CLUSTER) cluster_wait_aligned();
#pragma unroll
  for (int to = 0; to < SPLIT; ++to)
#pragma unroll
    for (int j = 0; j < SHARE; j += 4) {
      const float* d = acc + to * SHARE + j;
      if (to == work.rank) {
        sum[j] = d[0], sum[j + 1] = d[1], sum[j + 2] = d[2], sum[j + 3] = d[3];
      } else if (GLOBAL) {
        __stcg(place(to, work.rank, j), make_float4(d[0], d[1], d[2], d[3]));
      } else {
        tell4(from((work.rank - to + SPLIT) % SPLIT, j), e.delivered, to, d);
      }
    }
  if (GLOBAL) {
    meet_at<CONSUMERS>(1);
    if (threadIdx.x == 0) {
      const u32 goal = (arrive(p.counts + e.index) / SPLIT + 1) * SPLIT;
      while (int(arrived(p.counts + e.index) - goal) < 0) {}
    }
    meet_at<CONSUMERS>(1);
  } else {
    barrier_wait(e.delivered, 0);
  }
#pragma unroll
  for (int i = 1; i < SPLIT; ++i)
#pragma unroll
    for (int j = 0; j < SHARE; j += 4) {
      float4 v;
      if (GLOBAL)
        v = __ldcg(place(work.rank, (work.rank + i) % SPLIT, j));
      else
        v = lds_float4(from(i, j));
      sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
    }
  // 10 MB that nobody reads again: written back they would slow down the attention behind.
  if constexpr (GLOBAL && BN > 192) {
    __syncwarp();
    if (threadIdx.x % 8 == 0)  // a line of the cache
#pragma unroll
      for (int i = 1; i < SPLIT; ++i)
#pragma unroll
        for (int j = 0; j < SHARE; j += 4)
          discard(place(work.rank, (work.rank + i) % SPLIT, j));
  }
}

typedef DrawRows<DRAW ? BN : 1> Draws;
// What consumers find in shared memory: stages and their barriers, and what else there is.
struct Shared {
  u32 ring, full, empty, inbox, delivered, scaled;
  int x_panel;  // bytes
  float *scales, *warp_squares;
  Draws* draws;
  unsigned char* waits;  // SEND: rows that are finished
};

template <int SIZE>
__device__ __forceinline__ void product(float (&acc)[SIZE], u64 w, u64 x) {
  if constexpr (E4M3)
    wgmma_e4m3(acc, w, x);
  else
    wgmma(acc, w, x);
}

// The sums of a group of warps over `count` steps of k: of the 64 weight rows at `w_at` of a stage and the
// rows of x at `x_at`.
template <int SIZE>
__device__ __forceinline__ void multiply(float (&acc)[SIZE], const Shared& shared, Slot<STAGES>& slot,
                                         int count, int w_at, int x_at) {
  constexpr bool TWICE = TIGHT && SIZE > 64;
  // Columns of an instruction; TWICE: of two.
  constexpr int FIRST = TWICE ? (SIZE + 15) & ~15 : SIZE * 2, REST = TWICE ? SIZE * 2 - FIRST : FIRST;
  u32 used = 0;  // the barrier of the stage before
  for (int i = 0; i < count; ++i, slot.next()) {
    const u32 stage = shared.ring + slot.stage * STAGE_BYTES;
    barrier_wait(shared.full + slot.stage * 8, slot.parity);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const u64 w = tile_at(stage + w_at + panel * W_PANEL),
                x = tile_at(stage + x_at + panel * shared.x_panel);
#pragma unroll
      for (int k = 0; k < ROW_BYTES / 32; ++k) {
        product(*reinterpret_cast<float(*)[FIRST / 2]>(acc), w + k * 2, x + k * 2);
        if (TWICE)
          product(*reinterpret_cast<float (*)[REST / 2]>(acc + FIRST / 2), w + k * 2,
                  x + FIRST * (ROW_BYTES / 16) + k * 2);
      }
    }
    wgmma_commit();
    if (i > 0) {
      wgmma_wait<1>(acc);
      if (threadIdx.x % 128 == 0) barrier_arrive(used);
    }
    used = shared.empty + slot.stage * 8;
  }
  wgmma_wait<0>(acc);
  if (threadIdx.x % 128 == 0) barrier_arrive(used);
}

// GROUPED: the same, with the scales of these steps. Many rows of x are multiplied one half after the other,
// so that sums of a group take half the registers.
template <int SIZE>
__device__ __forceinline__ void multiply_grouped(float (&acc)[SIZE], const Shared& shared,
                                                 Slot<STAGES>& slot, int count, int w_at, int x_at,
                                                 const float* first, const float* second) {
  constexpr int HALVES = SIZE > 64 ? 2 : 1, PART = SIZE / HALVES;
  const int turn = threadIdx.x / 128;
  float next[2] = {__ldg(first), __ldg(second)};
  for (int i = 0; i < count; ++i, slot.next()) {
    const u32 stage = shared.ring + slot.stage * STAGE_BYTES;
    const float scale[2] = {next[0], next[1]};
    barrier_wait(shared.full + slot.stage * 8, slot.parity);
    if (i + 1 < count) next[0] = __ldg(first + i + 1), next[1] = __ldg(second + i + 1);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float part[PART];
      const u64 w = tile_at(stage + w_at), x = tile_at(stage + x_at + half * (PART * 2 * ROW_BYTES));
      if (TURNS) meet_at<256>(TURN + turn);
      wgmma_fence();
      wgmma_e4m3_first(part, w, x);
#pragma unroll
      for (int k = 1; k < ROW_BYTES / 32; ++k) wgmma_e4m3(part, w + k * 2, x + k * 2);
      wgmma_commit();
      if (TURNS) arrive_at<256>(TURN + (turn + 1) % GROUPS);
      wgmma_wait<0>(part);
      if (half == HALVES - 1 && threadIdx.x % 128 == 0) barrier_arrive(shared.empty + slot.stage * 8);
#pragma unroll
      for (int j = 0; j < PART; ++j)
        acc[half * PART + j] = fmaf(part[j], scale[j / 2 % 2], acc[half * PART + j]);
    }
  }
}

// The same with sums of two groups: one meets its scales while the other is multiplied.
template <int SIZE>
__device__ __forceinline__ void multiply_in_turn(float (&acc)[SIZE], const Shared& shared,
                                                 Slot<STAGES>& slot, int count, int w_at, int x_at,
                                                 const float* first, const float* second) {
  float even[SIZE], odd[SIZE], next[2] = {__ldg(first), __ldg(second)}, scale[2];
  u32 used = 0;  // the barrier of the stage before
  const auto begin = [&](float (&sums)[SIZE]) {
    const u32 stage = shared.ring + slot.stage * STAGE_BYTES;
    barrier_wait(shared.full + slot.stage * 8, slot.parity);
    const u64 w = tile_at(stage + w_at), x = tile_at(stage + x_at);
    wgmma_fence();
    wgmma_e4m3_first(sums, w, x);
#pragma unroll
    for (int k = 1; k < ROW_BYTES / 32; ++k) wgmma_e4m3(sums, w + k * 2, x + k * 2);
    wgmma_commit();
  };
  const auto meet = [&](float (&sums)[SIZE], int i) {  // group i
    if (threadIdx.x % 128 == 0) barrier_arrive(used);
    scale[0] = next[0], scale[1] = next[1];
    if (i + 1 < count) next[0] = __ldg(first + i + 1), next[1] = __ldg(second + i + 1);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) acc[j] = fmaf(sums[j], scale[j / 2 % 2], acc[j]);
  };
  const auto step = [&](float (&sums)[SIZE], float (&before)[SIZE], int i) {
    used = shared.empty + slot.stage * 8;
    slot.next();
    begin(sums);
    wgmma_wait<1>(before);
    meet(before, i - 1);
  };
  begin(even);
  int i = 1;
  for (; i + 1 < count; i += 2) {
    step(odd, even, i);
    step(even, odd, i + 1);
  }
  if (i < count) {
    step(odd, even, i);
    wgmma_wait<0>(odd);
    used = shared.empty + slot.stage * 8;
    meet(odd, i);
  } else {
    wgmma_wait<0>(even);
    used = shared.empty + slot.stage * 8;
    meet(even, i - 1);
  }
  slot.next();
}

// DRAW: of the row that a thread gives to the other blocks, and has of them.
struct Known {
  bool draws = false;
  long long given = WORST, known = WORST;
};

// A group of warps multiplies 64 weight rows of a tile by N rows of x.
template <int N>
__device__ __forceinline__ void work_on(const Params& p, const Tile& tile, const Work& work,
                                        const Shared& shared, Slot<STAGES>& slot, Known& told) {
  const int group = threadIdx.x / 128;
  // 64 weight rows, rows of x.
  const int unit = tile.odd() ? (group + 1) % GROUPS : group, begin = tile.odd() ? BN - N : 0;
  const int row = tile.row + work.rank * DONE_ROWS + begin;
  // The warp's columns.
  const int n = (tile.w_row() + unit * 64 + threadIdx.x % 128 / 32 * 16) / (GATED ? 2 : 1);
  const Columns columns(p, n);
  if constexpr (GROUPED)  // 8 scales are 32 bytes; the four lanes that multiply a row share them
    for (int i = threadIdx.x % 4 * 8; i < work.count; i += 32)
      prefetch_to_l2(columns.groups[0] + work.first + i), prefetch_to_l2(columns.groups[1] + work.first + i);
  pdl_wait();
#if SEND
  const long long to_inboxes = sent_to(p);
#endif
  u32 kept[SHARE / 2];
  if constexpr (ADD) load_residual<SHARE>(p, kept, n, row);
  if (DRAW && told.draws && threadIdx.x < p.m) told.known = __ldcg(p.draw.keys + threadIdx.x);
  const RowFactors<N / SPLIT> factors(p, row);
  float acc[N / 2] = {};
  const int w_at = unit * (64 * ROW_BYTES), x_at = W_BYTES + begin * ROW_BYTES;
  const float *one = columns.groups[0] + work.first, *two = columns.groups[1] + work.first;
  if constexpr (IN_TURN)
    multiply_in_turn(acc, shared, slot, work.count, w_at, x_at, one, two);
  else if constexpr (GROUPED)
    multiply_grouped(acc, shared, slot, work.count, w_at, x_at, one, two);
  else
    multiply(acc, shared, slot, work.count, w_at, x_at);
  float sum[N / 2 / SPLIT];
  if constexpr (SPLIT == 1) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) sum[j] = acc[j];
  } else {
    exchange(p, acc, sum, work,
             Exchange{shared.inbox, shared.delivered, tile.w * p.row_tiles + tile.row / BN});
  }
  if (FACTORS) barrier_wait(shared.scaled, 0);
  if (E4M3 && !GROUPED)
#pragma unroll
    for (int j = 0; j < N / 2 / SPLIT; ++j) sum[j] *= columns.scale[j / 2 % 2];
  if constexpr (ADD) {
    store_add(p, sum, kept, columns, tile.w, n, row, shared.warp_squares);
  } else if (DRAW && told.draws) {
    Draws& draws = *shared.draws;
    if (threadIdx.x < p.m && told.known > draws.best[threadIdx.x]) {
      const float least = least_of(score_of(told.known), draws.one[threadIdx.x]);
      if (draws.least[threadIdx.x] < least) draws.least[threadIdx.x] = least;
    }
    draw_tile(sum, draws, p.first + n, p.n - n);
    meet_at<CONSUMERS>(1);
    if (threadIdx.x < p.m) {
      const long long best = *const_cast<volatile long long*>(&draws.best[threadIdx.x]);
      if (best > told.given) atomicMax(p.draw.keys + threadIdx.x, told.given = best);
    }
  } else if (!NARROW || threadIdx.x / 32 < BM / 16) {
    store(p, sum, n, row, shared.scales + row - tile.row, factors, shared.waits);
#if SEND
    send_rows(p, shared.waits, to_inboxes, tile.w_row(), row);
#endif
  }
}

// What a group of warps does, the LAST one or another.
template <bool LAST>
__device__ __forceinline__ void consume(const Params& p, const Work& work, const Shared& shared) {
  Known told;
  if constexpr (DRAW) {
    pdl_wait();
    told.draws = *p.draw.plain;
    begin_draw(p.draw, *shared.draws, p.m);
    meet_at<CONSUMERS>(1);
  }
  Slot<STAGES> slot;
  if (TURNS && threadIdx.x / 128 == GROUPS - 1) arrive_at<256>(TURN);  // the first group begins
  for (int at = work.begin; at < work.total; at += work.step) {
    const Tile tile(p, at);
    if (LAST && tile.halved())
      work_on<HALF>(p, tile, work, shared, slot, told);
    else
      work_on<BN>(p, tile, work, shared, slot, told);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) batch_gemm(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  __shared__ __align__(16) float scales[FACTORS ? BN : 1];
  __shared__ __align__(16) float warp_squares[ADD ? CONSUMERS / 32 * DONE_ROWS : 1];
  __shared__ u64 scaled;  // the barrier of the scales
  __shared__ __align__(16) Draws draws;
  const u32 ring = (smem_addr(smem) + 1023) & ~1023u, inbox = ring + STAGES * STAGE_BYTES;
  const u32 full = inbox + INBOX_BYTES, empty = full + STAGES * 8, delivered = empty + STAGES * 8;
  const Work work(p);
  if (threadIdx.x == CONSUMERS) {
    for (int s = 0; s < STAGES; ++s) barrier_init(full + s * 8, 1);
    barriers_visible();
    load_first(p, ring, full, work);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) barrier_init(empty + s * 8, GROUPS);
    if (FACTORS) barrier_init(smem_addr(&scaled), 32);
    if (CLUSTER) barrier_init(delivered, 1), barrier_expect(delivered, INBOX_BYTES);
    barriers_visible();
  }
  __syncthreads();
  if (CLUSTER) cluster_arrive_relaxed();
  if (threadIdx.x >= CONSUMERS) {
    if (LENDS) fewer_registers<TIGHT ? 32 : 40>();
    if (threadIdx.x == CONSUMERS) load(p, ring, full, empty, work);
    if (FACTORS && (threadIdx.x - CONSUMERS) / 32 == 1) {
      find_scales(p, scales, Tile(p, work.begin).row);
      barrier_arrive(smem_addr(&scaled));
    }
    return;
  }
  const Shared shared{ring, full, empty, inbox, delivered, smem_addr(&scaled), p.x_rows * ROW_BYTES,
                      scales, warp_squares, &draws, smem + (delivered + 23 & ~15u) - smem_addr(smem)};
  if (LENDS) more_registers<TIGHT ? 160 : 232>();
  if (PAIRED && threadIdx.x >= CONSUMERS - 128)
    consume<true>(p, work, shared);
  else
    consume<false>(p, work, shared);
}
