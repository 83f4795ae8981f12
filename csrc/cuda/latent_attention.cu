// Latent attention of decode rows in the absorbed form (DeepSeek-V2, arXiv 2405.04434, 2.1): all heads of a
// row read one key of CONTENT + ROTATED values a token, whose content is the value, too.
//
// A block takes HEADS heads of a row and a share of its history. One warp brings 64 tokens at a time to
// shared memory, where they lie for both products; a group of four warps has tokens as the wide side of the
// scores, and channels as that of the outputs, so that only heads are padded.
#include "wgmma.cuh"

#ifndef HEADS
#define HEADS 32
#endif
#ifndef CONTENT
#define CONTENT 512
#endif
#ifndef ROTATED
#define ROTATED 64
#endif
#ifndef EARLY  // the last token alone is new, and latents of the others are asked for before the wait
#define EARLY 0
#endif

constexpr int TOKENS = 64, PIECE = 16;  // of a stage, and of a copy
constexpr int TILES = (CONTENT + ROTATED) / 64, VALUES = CONTENT / 64, STAGES = 2;
constexpr int TILE = TOKENS * 128, KEYS = TILES * TILE, Q_TILE = HEADS * 128;  // bytes
constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 32, COLUMNS = HEADS / 4;  // heads of a lane
constexpr float NEVER = -1e30f;

struct Params {
  TensorMap q, k;  // [rows, heads, width], [pages, page_size, width]
  const int *page_table, *slots, *kv_len;
  bf16* out;             // [rows, heads, CONTENT]
  float *part, *part_ml; // [rows, heads, splits, CONTENT or 2]
  bf16* told;            // [rows, heads, 2], where ranks share tokens out (ops.Part); else null
  int table_stride, page_size, heads, splits, ranks, rank;
  float scale;           // times log2(e)
};

// d += a b^T, where the rows of a lie as columns in shared memory.
#define ACROSS(N, EIGHTS, A, B)                                                                              \
  __device__ __forceinline__ void wgmma_across(float (&d)[N / 2], u64 a, u64 b) {                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##EIGHTS "}, " A ", " B       \
                                                                                        ", 1, 1, 1, 1, 0;"   \
                 : D_##EIGHTS("+f")                                                                          \
                 : "l"(a), "l"(b));                                                                          \
  }
ACROSS(16, 1, "%8", "%9")
ACROSS(32, 2, "%16", "%17")

__device__ __forceinline__ void copy_3d(u32 to, const TensorMap& map, u32 bar, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
               "{%3, %4, %5}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Where things are in shared memory.
struct Shared {
  u32 keys, q, weights, tops, q_full, full, empty;
  __device__ __forceinline__ explicit Shared(u32 base) {
    keys = (base + 1023) & ~1023u;
    q = keys + STAGES * KEYS;
    weights = q + TILES * Q_TILE;
    tops = weights + HEADS * 128;
    q_full = tops + 2 * 4 * HEADS * 4;
    full = q_full + 8;
    empty = full + STAGES * 8;
  }
};

struct Share {
  int row, head, split, begin, end, length;
  __device__ __forceinline__ explicit Share(const Params& p) {
    const int blocks = (p.heads + HEADS - 1) / HEADS;
    split = blockIdx.x % p.splits;
    head = blockIdx.x / p.splits % blocks * HEADS;
    row = blockIdx.x / p.splits / blocks;
    length = (p.kv_len[row] + p.ranks - 1 - p.rank) / p.ranks;  // of this rank
    const int share = ((length + p.splits - 1) / p.splits + PIECE - 1) / PIECE * PIECE;
    begin = min(split * share, length);
    end = min(begin + share, length);
  }
};

__device__ __forceinline__ void load(const Params& p, const Shared& shared, const Share& share) {
  const int lane = threadIdx.x % 32;
  const int* pages = p.page_table + (long long)p.slots[share.row] * p.table_stride;
  const auto page_of = [&](int from) {  // of this lane's piece
    const int token = from + lane * PIECE;
    return lane < TOKENS / PIECE && token < share.end ? pages[token / p.page_size] : 0;
  };
  const auto pieces_of = [&](int from) {
    return min(TOKENS / PIECE, (share.end - from + PIECE - 1) / PIECE);
  };
  const auto expect = [&](int from, int stage) {
    if (lane == 0) barrier_expect(shared.full + stage * 8, pieces_of(from) * TILES * (PIECE * 128));
  };
  const auto copy = [&](int from, int stage, int page, int first, int last) {
    for (int piece = first; piece < last; ++piece) {
      const int at = __shfl_sync(~0u, page, piece), token = (from + piece * PIECE) % p.page_size;
      if (lane == 0)  // one lane copies: each of several would do so in its turn
        for (int i = 0; i < TILES; ++i)
          copy_3d(shared.keys + stage * KEYS + i * TILE + piece * (PIECE * 128), p.k, shared.full + stage * 8,
                  i * 64, token, at);
    }
  };
  if (share.begin >= share.end) return;
  const int fresh = EARLY ? share.length - 1 : 0, ready = share.begin + STAGES * TOKENS;
  const auto stored_of = [&](int from) { return min(max((fresh - from) / PIECE, 0), pieces_of(from)); };
  int page = page_of(share.begin);
  for (int from = share.begin, stage = 0; from < min(share.end, ready); from += TOKENS, ++stage) {
    expect(from, stage);
    copy(from, stage, stage ? page_of(from) : page, 0, stored_of(from));
  }
  pdl_wait();
  if (lane == 0) {
    barrier_expect(shared.q_full, TILES * Q_TILE);
    for (int i = 0; i < TILES; ++i)
      copy_3d(shared.q + i * Q_TILE, p.q, shared.q_full, i * 64, share.head, share.row);
  }
  __syncwarp();
  Slot<STAGES> slot;
  for (int from = share.begin; from < share.end; from += TOKENS, slot.next()) {
    const int next = page_of(from + TOKENS);
    if (from >= ready) {
      barrier_wait(shared.empty + slot.stage * 8, slot.parity ^ 1);
      expect(from, slot.stage);
    }
    copy(from, slot.stage, page, from < ready ? stored_of(from) : 0, pieces_of(from));
    page = next;
  }
}

// A lane's heads: their maxima so far, the sums of its own tokens' weights, and what earlier sums are to be
// multiplied by.
struct Softmax {
  float top[COLUMNS], sum[COLUMNS], fade[COLUMNS];
};

// s becomes the weights of a stage's tokens. Returns whether earlier sums fade.
__device__ __forceinline__ bool weigh(float (&s)[HEADS / 2], Softmax& softmax, u32 tops, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  float most[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) most[c] = fmaxf(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + 2 + c % 2]);
#pragma unroll
  for (int o = 4; o < 32; o *= 2)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) most[c] = fmaxf(most[c], __shfl_xor_sync(~0u, most[c], o));
  if (lane < 4)
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 2)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(tops + (warp * HEADS + c * 4 + t * 2) * 4),
                   "f"(most[c]), "f"(most[c + 1]) : "memory");
  consumers_sync();
  bool fades = false;
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 2) {
    float a = NEVER, b = NEVER;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float x, y;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y)
                   : "r"(tops + (w * HEADS + c * 4 + t * 2) * 4) : "memory");
      a = fmaxf(a, x), b = fmaxf(b, y);
    }
    most[c] = a, most[c + 1] = b;
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const float now = most[c] * scale;
    const bool grown = now - softmax.top[c] > 8.f;  // less fits into float32 as well
    softmax.fade[c] = grown ? exp2_fast(softmax.top[c] - now) : 1.f;
    if (grown) softmax.top[c] = now;
    fades |= grown;
    float& first = s[c / 2 * 4 + c % 2];
    float& second = s[c / 2 * 4 + 2 + c % 2];
    first = exp2_fast(fmaf(first, scale, -softmax.top[c]));
    second = exp2_fast(fmaf(second, scale, -softmax.top[c]));
    softmax.sum[c] = softmax.sum[c] * softmax.fade[c] + first + second;
  }
  return __any_sync(~0u, fades);
}

__device__ __forceinline__ void attend(const Params& p, const Shared& shared, const Share& share,
                                       float (&o)[VALUES][HEADS / 2], Softmax& softmax) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Slot<STAGES> slot;
  if (share.begin < share.end) barrier_wait(shared.q_full, 0);
  for (int from = share.begin; from < share.end; from += TOKENS, slot.next()) {
    const u32 keys = shared.keys + slot.stage * KEYS;
    const int count = min(TOKENS, share.end - from);
    float s[HEADS / 2];
    barrier_wait(shared.full + slot.stage * 8, slot.parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
      const u64 a = tile_at(keys + i / 4 * TILE + i % 4 * 32);
      const u64 b = tile_at(shared.q + i / 4 * Q_TILE + i % 4 * 32);
      if (i) wgmma(s, a, b);
      else wgmma_first(s, a, b);
    }
    wgmma_commit();
    wgmma_wait<0>(s);
#pragma unroll
    for (int j = 0; j < HEADS / 2; ++j)
      if (warp * 16 + g + j / 2 % 2 * 8 >= count) s[j] = NEVER;
    const bool fades = weigh(s, softmax, shared.tops + slot.stage * (4 * HEADS * 4), p.scale);
#pragma unroll
    for (int i = 0; i < HEADS / 8; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 both = movmatrix(pack2(s[i * 4 + r * 2], s[i * 4 + r * 2 + 1]));
        const u32 to = shared.weights + (i * 8 + g) * 128 + (((warp * 2 + r) ^ g) << 4) + t * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(both) : "memory");
      }
    // What lies behind the last token may be anything.
    for (int i = threadIdx.x; i < (TOKENS - count) * 8 * VALUES; i += CONSUMERS)
      sts128(keys + i / ((TOKENS - count) * 8) * TILE + count * 128 + i % ((TOKENS - count) * 8) * 16,
             {0u, 0u, 0u, 0u});
    if (fades)
#pragma unroll
      for (int m = 0; m < VALUES; ++m)
#pragma unroll
        for (int j = 0; j < HEADS / 2; ++j) o[m][j] *= softmax.fade[j / 4 * 2 + j % 2];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    consumers_sync();
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < VALUES; ++m)
#pragma unroll
      for (int j = 0; j < TOKENS / 16; ++j)
        wgmma_across(o[m], tile_at(keys + m * TILE + j * (16 * 128)), tile_at(shared.weights + j * 32));
    wgmma_commit();
#pragma unroll
    for (int m = 0; m < VALUES; ++m) wgmma_wait<0>(o[m]);
    if (lane == 0) barrier_arrive(shared.empty + slot.stage * 8);
  }
}

__device__ __forceinline__ void store(const Params& p, const Shared& shared, const Share& share,
                                      float (&o)[VALUES][HEADS / 2], Softmax& softmax) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 sums = shared.tops + t * 8;
#pragma unroll
  for (int d = 4; d < 32; d *= 2)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) softmax.sum[c] += __shfl_xor_sync(~0u, softmax.sum[c], d);
  consumers_sync();  // maxima have been read
  if (lane < 4)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums + (warp * HEADS + c / 2 * 8 + c % 2) * 4),
                   "f"(softmax.sum[c]) : "memory");
  consumers_sync();
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const int column = c / 2 * 8 + c % 2, head = share.head + column + t * 2;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float x;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(sums + (w * HEADS + column) * 4) : "memory");
      sum += x;
    }
    if (head >= p.heads) continue;
    const long long at = (long long)share.row * p.heads + head;
    if (p.splits > 1) {
      float* to = p.part + (at * p.splits + share.split) * CONTENT + warp * 16 + g;
#pragma unroll
      for (int m = 0; m < VALUES; ++m) {
        to[m * 64] = o[m][c / 2 * 4 + c % 2];
        to[m * 64 + 8] = o[m][c / 2 * 4 + 2 + c % 2];
      }
      if (warp == 0 && g == 0) {
        float* ml = p.part_ml + (at * p.splits + share.split) * 2;
        ml[0] = softmax.top[c], ml[1] = sum;
      }
    } else {
      const float scale = __fdividef(1.f, fmaxf(sum, 1e-30f));
      bf16* to = p.out + at * CONTENT + warp * 16 + g;
#pragma unroll
      for (int m = 0; m < VALUES; ++m) {
        to[m * 64] = f2bf(o[m][c / 2 * 4 + c % 2] * scale);
        to[m * 64 + 8] = f2bf(o[m][c / 2 * 4 + 2 + c % 2] * scale);
      }
      if (p.told && warp == 0 && g == 0) {
        const float whole = softmax.top[c] + __log2f(fmaxf(sum, 1e-30f));
        const bf16 most = f2bf(whole);
        p.told[at * 2] = most, p.told[at * 2 + 1] = f2bf(whole - bf2f(most));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) latent_attention(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const Shared shared(smem_addr(smem));
  if (threadIdx.x == 0) {
    barrier_init(shared.q_full, 1);
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared.full + s * 8, 1);
      barrier_init(shared.empty + s * 8, CONSUMERS / 32);
    }
    barriers_visible();
  }
  __syncthreads();
  pdl_launch();
  const Share share(p);
  if (threadIdx.x >= CONSUMERS) {
    load(p, shared, share);
  } else {
    float o[VALUES][HEADS / 2] = {};
    Softmax softmax;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) softmax.top[c] = NEVER, softmax.sum[c] = 0.f;
    attend(p, shared, share, o, softmax);
    pdl_wait();
    store(p, shared, share, o, softmax);
  }
}
