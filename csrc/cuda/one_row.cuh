// What the kernels that do the whole step of one row have in common: words that blocks tell each other, sums
// of weight rows with an activation, attention. Who includes this defines HIDDEN, HEADS, KV_HEADS, QK_NORM
// and PAGE_TILES before; what is called Layer and Shared is the kernel's own and has the members named here.
//
// A dot product of 1024 weights with x runs on tensor cores: lane l of a warp takes pieces of 8 at 8 l, 8 l +
// 256, ... of both. Lanes 4 i to 4 i + 3 are row i of one operand and column i of the other, and the sum of
// the diagonal is the result. Two weight rows fill the 16 rows of an instruction.
//
// Attention: blocks of a KV head share its tiles of 16 tokens, one for each warp first, whose k and v are
// fetched into registers before q is there. A block merges its warps. A few blocks' results everyone merges
// by himself; if there are more, each block merges an equal slice of the head's outputs first.
//
// With COPIED the residual stream in front of layers and the state behind the last norm are also stored, for
// whoever guesses what comes next.
//
// With RANKS (mixture_step.cu) each GPU has its heads and its columns of o and down, and runs the same
// kernel. What these add to the residual stream all store into each other's `inbox`, in such words too:
// whoever tells the next part has heard from all ranks, each of which has read the part before, so no word
// is overwritten too early.
#pragma once
#include "common.cuh"

#ifndef RANKS
#define RANKS 1
#endif
#ifndef COPIED  // 1: hidden states go where layers and parameters say
#define COPIED 0
#endif
// Looks at a word before the kernel fails: some seconds, and some minutes for ranks, which may begin late.
#define PATIENCE (1u << (RANKS > 1 ? 29 : 22))

constexpr int BLOCKS = 128, WARPS = 8, THREADS = WARPS * 32;
constexpr int ALL_WARPS = BLOCKS * WARPS;
constexpr int HD = 128, TILE = 16;
constexpr int GROUP = HEADS / KV_HEADS, SPLITS = BLOCKS / KV_HEADS;
constexpr int ATTENDED = HEADS * HD, QKV = ATTENDED + 2 * KV_HEADS * HD;
constexpr int SLICE = GROUP * HD / SPLITS;  // outputs that a block merges
constexpr int FEW = 5;  // blocks of a head whose results everyone merges for himself
constexpr float NEG = -1e30f;

constexpr int MERGERS = SPLITS < 32 ? SPLITS : 32;  // lanes that merge a piece of a slice

static_assert(BLOCKS % KV_HEADS == 0 && SPLITS % MERGERS == 0 && GROUP <= 8 &&
              SLICE / 4 * MERGERS <= THREADS && SLICE / 4 * MERGERS % 32 == 0);

// Where the vectors lie in `Params::words`; from INNER on the kernel's own.
struct Exchange {
  static constexpr int QKV_AT = 0, PART = QKV_AT + QKV, PART_ML = PART + BLOCKS * GROUP * HD,
                       ATTENDED_AT = PART_ML + BLOCKS * GROUP * 2, MIDDLE = ATTENDED_AT + ATTENDED,
                       INNER = MIDDLE + HIDDEN;
};

struct Layer;  // the kernel's own
struct Params {
  const Layer* layers;
  const bf16* embedding;   // [vocab, HIDDEN]
  const bf16* head;        // [vocab, HIDDEN]
  const float* norm;       // [HIDDEN]
  const float* cos_sin;    // [positions, HD], cosines then sines
  const int* ids;          // [1]
  const int* positions;    // [1], of the rotation
  const int* slots;        // [1]
  const int* kv_len;       // [1], with the new token; 0 for padding
  const int* page_table;   // [slots, table_stride]
  float* logits;           // [vocab]
  u32* words;              // exchange, see Exchange
  u32* steps;              // [1], layers so far; in decode_step.cu with the embedding as one
  long long page_stride, head_stride;  // elements of k and v
  int count, vocab, table_stride;      // layers; output columns, a multiple of 4 (decode_step.cu) or 2
  float eps, scale;                    // scale times log2(e)
  bf16* last;                          // [HIDDEN], behind the last norm, with COPIED; or none
#if RANKS > 1
  u32* inbox[8];                       // of every rank, as this one sees it
  u32* own;                            // this rank's
  int rank;
#endif
};

// --- words that say which layer they belong to

// Called while waiting: a kernel that waits for ever would take the machine with it.
__device__ __forceinline__ void patience(u32& tries) {
  if (++tries > PATIENCE) __trap();
}

// The minimum keeps what arithmetic gives for NaN (0x7fffffff) from becoming a zero; negative numbers are
// negative integers.
__device__ __forceinline__ u32 rounded(float x) {
  return u32(min(__float_as_int(x), 0x7fffff7f) + 0x80) & 0xffffff00u;
}
__device__ __forceinline__ float value(u32 word) { return __uint_as_float(word & 0xffffff00u); }
__device__ __forceinline__ bool fresh(const uint4& v, u32 tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 0xffu) == 0;
}
__device__ __forceinline__ uint4 look(const u32* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 look2(const u32* from) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void put(u32* to, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void put4(u32* to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void put_far(u32* to, u32 word) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void tell(u32* to, float x, u32 tag) { put(to, rounded(x) | tag); }
__device__ __forceinline__ void tell4(u32* to, const float4& x, u32 tag) {
  put4(to, rounded(x.x) | tag, rounded(x.y) | tag, rounded(x.z) | tag, rounded(x.w) | tag);
}

#if RANKS > 1
// To place `at` of all ranks' inboxes.
template <class Params>
__device__ __forceinline__ void tell_ranks(const Params& p, int at, float x, u32 tag) {
  const u32 word = rounded(x) | tag;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) put_far(p.inbox[r] + at, word);
}
#endif
// Words that may come from another rank.
__device__ __forceinline__ uint4 look_far(const u32* from) {
  if (RANKS == 1) return look(from);
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Which thread and block this is. Volatile: or it is asked for again and again.
__device__ __forceinline__ int thread_number() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ int block_number() {
  int i;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i));
  return i;
}

// --- shared memory

__device__ __forceinline__ int lds_volatile(u32 addr) {
  int x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}
__device__ __forceinline__ void sts_volatile(u32 addr, int x) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}
__device__ __forceinline__ void sts64(u32 addr, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint4 ldg128(const bf16* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
__device__ __forceinline__ void piece_init(u32 barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void piece_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
// The threads of all warps that attend and multiply.
__device__ __forceinline__ void meet() { meet_at<THREADS>(1); }

__device__ __forceinline__ bool piece_there(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// --- products

// Products of ROWS rows with x, in pieces of 1024. `load` fetches a piece of each row from shared memory in
// the order in which an instruction takes it: two rows fill its 16 rows (GATED: one of the first half and one
// of the second), or two parts of the last one, which then need one instruction each.
template <int ROWS, bool GATED>
struct Dots {
  static constexpr int PAIRS = ROWS / 2, CHAINS = 2;
  float sum[PAIRS > 0 ? PAIRS : 1][CHAINS][4], alone[2][CHAINS][4];

  __device__ __forceinline__ Dots() {
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) sum[i][c][e] = 0.f;
        alone[0][c][e] = alone[1][c][e] = 0.f;
      }
  }
  __device__ __forceinline__ static constexpr int low(int pair) { return GATED ? pair : pair * 2; }
  __device__ __forceinline__ static constexpr int high(int pair) {
    return GATED ? PAIRS + pair : pair * 2 + 1;
  }

  // Into `a` from `first` on; `at(i)`: where piece i is.
  template <int COUNT, class At>
  __device__ __forceinline__ static void load(u32 (&a)[COUNT][4][4], int first, int lane, At&& at) {
    const int part = lane / 8;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int low_at = first + low(pair), high_at = first + high(pair);
      const u32 from = at(part & 1 ? high_at : low_at) + (part >> 1) * 128 + lane % 8 * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) ldmatrix(i < 4 ? a[low_at][i] : a[high_at][i - 4], from + i * 256);
    }
    if (ROWS % 2) {
      const u32 from = at(first + ROWS - 1) + (part % 2 * 2 + part / 2) * 128 + lane % 8 * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) ldmatrix(a[first + ROWS - 1][i], from + i * 512);
    }
  }
  // `x`: in shared memory, 16 bytes further for each lane.
  template <int COUNT>
  __device__ __forceinline__ void add(const u32 (&a)[COUNT][4][4], int first, u32 x) {
    u32 b[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix(b[i], x + i * 512);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const u32(&w)[4] = i < 4 ? a[first + low(pair)][i] : a[first + high(pair)][i - 4];
        mma(sum[pair][i % CHAINS], w[0], w[1], w[2], w[3], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
      }
    if (ROWS % 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32(&w)[4] = a[first + ROWS - 1][i];
        mma(alone[0][i % CHAINS], w[0], w[1], w[2], w[3], b[i][0], b[i][1]);
        mma(alone[1][i % CHAINS], w[0], w[1], w[2], w[3], b[i][2], b[i][3]);
      }
    }
  }
  // An even or odd column of a row's diagonal.
  __device__ __forceinline__ float diagonal(int row, int odd) const {
    if (ROWS % 2 && row == ROWS - 1)
      return (alone[0][0][odd] + alone[0][1][odd]) + (alone[1][0][2 + odd] + alone[1][1][2 + odd]);
    return sum[row / 2][0][row % 2 * 2 + odd] + sum[row / 2][1][row % 2 * 2 + odd];
  }
  // y[i]: the dot product of row 4 i + lane / 8.
  __device__ __forceinline__ void total(int lane, float (&y)[(ROWS + 3) / 4]) {
    const int from = lane % 8 * 4 + lane % 8 / 2;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float z = __shfl_sync(~0u, lane & 4 ? diagonal(row, 1) : diagonal(row, 0), from);
      if (row % 4 == 0 || lane / 8 == row % 4) y[row / 4] = z;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int i = 0; i < (ROWS + 3) / 4; ++i) y[i] += __shfl_xor_sync(~0u, y[i], d);
  }
};

// Sums of ROWS rows with x. Chains of instructions that wait for each other are short.
template <int ROWS>
struct Sums {
  static constexpr int PAIRS = (ROWS + 1) / 2, CHAINS = PAIRS >= 4 ? 1 : PAIRS >= 2 ? 2 : 4;
  float sum[PAIRS][CHAINS][4] = {};

  // `a`: a piece of each row, GATED: of the even rows first; x in shared memory.
  template <bool GATED, int COUNT>
  __device__ __forceinline__ void add(const uint4 (&a)[COUNT][4], int from, u32 x) {
    uint4 b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = lds128(x + i * 512);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        float(&d)[4] = sum[pair][i % CHAINS];
        const uint4 lo = a[from + (GATED ? pair : pair * 2)][i];
        const uint4 hi =
            pair * 2 + 1 < ROWS ? a[from + (GATED ? PAIRS + pair : pair * 2 + 1)][i] : uint4{0, 0, 0, 0};
        mma(d, lo.x, hi.x, lo.y, hi.y, b[i].x, b[i].y);
        mma(d, lo.z, hi.z, lo.w, hi.w, b[i].z, b[i].w);
      }
  }
  // y[i]: the dot product of row 4 i + lane / 8, from the diagonals.
  __device__ __forceinline__ void total(int lane, float (&y)[(ROWS + 3) / 4]) {
    const int diagonal = (lane & 7) * 4 + (lane & 7) / 2;
#pragma unroll
    for (int i = 0; i < (ROWS + 3) / 4; ++i) y[i] = 0.f;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float d0 = 0.f, d1 = 0.f;
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) {
        d0 += sum[row / 2][c][row % 2 * 2];
        d1 += sum[row / 2][c][row % 2 * 2 + 1];
      }
      const float z = __shfl_sync(~0u, lane & 4 ? d1 : d0, diagonal);
      if (lane / 8 == row % 4) y[row / 4] = z;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int i = 0; i < (ROWS + 3) / 4; ++i) y[i] += __shfl_xor_sync(~0u, y[i], d);
  }
};

// Waits for a vector of N words; into shared memory as bf16. NORM: times the norm's weight, with the sum of
// squares beside.
template <int N, bool NORM>
__device__ __forceinline__ void receive(const u32* words, u32 tag, u32 to, const float* weight, float* square,
                                        int tid) {
  constexpr int EACH = N / 4 / THREADS, SIDE = EACH % 4 == 0 ? 4 : EACH % 3 == 0 ? 3 : EACH % 2 == 0 ? 2 : 1;
  float sum = 0.f;
  u32 tries = 0;
  words += tid * 4;
#pragma unroll 1
  for (int base = 0; base < EACH; base += SIDE) {
    float4 scale[NORM ? SIDE : 1];
    if (NORM) {
#pragma unroll
      for (int i = 0; i < SIDE; ++i)
        scale[i] = __ldg(reinterpret_cast<const float4*>(weight) + (base + i) * THREADS + tid);
    }
    uint4 got[SIDE];
    bool all;
    do {
      patience(tries);
#pragma unroll
      for (int i = 0; i < SIDE; ++i) got[i] = look(words + (base + i) * THREADS * 4);
      all = true;
#pragma unroll
      for (int i = 0; i < SIDE; ++i) all &= fresh(got[i], tag);
    } while (!all);
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      float a = value(got[i].x), b = value(got[i].y), c = value(got[i].z), d = value(got[i].w);
      if (NORM) {
        sum += a * a + b * b + c * c + d * d;
        a *= scale[i].x; b *= scale[i].y; c *= scale[i].z; d *= scale[i].w;
      }
      sts64(to + ((base + i) * THREADS + tid) * 8, pack2(a, b), pack2(c, d));
    }
  }
  if (NORM) square[tid] = sum;
}

// 1 / the root of the mean square, from the threads' shares.
__device__ __forceinline__ float norm_factor(const float* square, float eps, int lane) {
  const float4* from = reinterpret_cast<const float4*>(square) + lane * 2;
  const float4 a = from[0], b = from[1];
  float sum = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return rsqrt_fast(sum / HIDDEN + eps);
}
// --- attention

// What stays the same in all layers.
struct Place {
  int head, split;     // KV head of this block, and its part
  int len, tiles;      // tokens with the new one
  int blocks;          // of a head that have tiles
  bool few;            // a block has tiles that follow each other
  const int* pages;
  float4 cosine, sine; // of this lane's dims 4 lane ... of a half of the head
};

// The first tile of a warp of this block; the next ones are WARPS * SPLITS further.
__device__ __forceinline__ int first_tile(const Place& at, int warp) {
  return at.few ? at.split * WARPS + warp : warp * SPLITS + at.split;
}
__device__ __forceinline__ int newest_block(const Place& at) {
  return at.few ? (at.tiles - 1) / WARPS : (at.tiles - 1) % SPLITS;
}

template <class Params>
__device__ __forceinline__ long long tile_at(const Params& p, const Place& at, int tile) {
  return at.pages[tile / PAGE_TILES] * p.page_stride + at.head * p.head_stride +
         (tile % PAGE_TILES) * (TILE * HD);
}
// Where the first tile of a warp and the new token are in the pages of any layer.
struct Spots {
  long long first, newest;
};
template <class Params>
__device__ __forceinline__ Spots find_spots(const Params& p, const Place& at, int warp) {
  return {tile_at(p, at, min(first_tile(at, warp), at.tiles - 1)),
          tile_at(p, at, at.tiles - 1) + (at.len - 1) % TILE * HD};
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A head of q or k, four dims a lane: normalised and rotated as bf16.
__device__ __forceinline__ uint2 prepare(uint4 words, float4 w, const Place& at, int lane, float eps) {
  float4 x = {value(words.x), value(words.y), value(words.z), value(words.w)};
  if (QK_NORM) {
    float sum = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float f = rsqrt_fast(sum / HD + eps);
    x = {x.x * f * w.x, x.y * f * w.y, x.z * f * w.z, x.w * f * w.w};
  }
  const float sign = lane < 16 ? -1.f : 1.f;
  auto turn = [&](float x, float c, float s) { return x * c + sign * __shfl_xor_sync(~0u, x, 16) * s; };
  return {pack2(turn(x.x, at.cosine.x, at.sine.x), turn(x.y, at.cosine.y, at.sine.y)),
          pack2(turn(x.z, at.cosine.z, at.sine.z), turn(x.w, at.cosine.w, at.sine.w))};
}

// Waits for the projection; q, k and v into shared memory, k and v of the new token to its page too.
template <class Params, class Layer, class Shared>
__device__ __forceinline__ void receive_heads(const Params& p, const Layer& layer, const Place& at,
                                              const Spots& spots, Shared& s, u32 tag, int warp, int lane) {
  constexpr int EACH = (GROUP + 2 + WARPS - 1) / WARPS;
  const int heads = GROUP + (newest_block(at) == at.split ? 2 : 0);  // q, then k and v
  if (warp >= heads) return;
  uint4 got[EACH];
  float4 weight[EACH];
  auto from = [&](int i) {
    const int head = i < GROUP ? at.head * GROUP + i : HEADS + at.head + (i > GROUP ? KV_HEADS : 0);
    return p.words + Exchange::QKV_AT + head * HD + lane * 4;
  };
#pragma unroll
  for (int j = 0; j < EACH; ++j)
    if (const int i = warp + j * WARPS; i < heads) {
      weight[j] = {};
      if (QK_NORM && i <= GROUP)
        weight[j] = __ldg(reinterpret_cast<const float4*>(i < GROUP ? layer.q_norm : layer.k_norm) + lane);
      got[j] = look(from(i));
    }
  u32 tries = 0;
#pragma unroll
  for (int j = 0; j < EACH; ++j)
    if (const int i = warp + j * WARPS; i < heads) {
      while (!fresh(got[j], tag)) {
        patience(tries);
        got[j] = look(from(i));
      }
      uint2 y = {pack2(value(got[j].x), value(got[j].y)), pack2(value(got[j].z), value(got[j].w))};
      if (i <= GROUP) y = prepare(got[j], weight[j], at, lane, p.eps);
      bf16* to = i < GROUP ? s.q[i] : i == GROUP ? s.k : s.v;
      sts64(smem_addr(to) + lane * 8, y.x, y.y);
      if (i >= GROUP)
        *reinterpret_cast<uint2*>((i == GROUP ? layer.k : layer.v) + spots.newest + lane * 4) = y;
    }
}

// This warp's tiles of the history. The first one is fetched before the projection is there.
template <class Params, class Layer, class Shared>
__device__ __forceinline__ void attend(const Params& p, const Layer& layer, const Place& at,
                                       const Spots& spots, Shared& s, u32 tag, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint4 q[4];
  float o[8][4] = {};  // dims g * 8 + i and 64 further of heads 2 t and 2 t + 1
  float m0 = NEG, m1 = NEG, l0 = 0.f, l1 = 0.f;  // heads 2 t and 2 t + 1; l is this lane's share
  const int first = first_tile(at, warp);
#pragma unroll 1
  for (int tile = first; tile == first || tile < at.tiles; tile += WARPS * SPLITS) {
    uint4 k[8], v[4][2];
    // Of another warp's tile where this one has none: k and v are defined, or they would stay alive through
    // all layers.
    {
      const long long from = tile == first ? spots.first : tile_at(p, at, tile);
      const bf16 *k_from = layer.k + from + g * HD + t * 8, *v_from = layer.v + from + t * 2 * HD + g * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) k[i] = ldg128(k_from + i / 4 * 8 * HD + i % 4 * 32);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i / 2][i % 2] = ldg128(v_from + (i / 2 % 2 + i / 4 * 8) * HD + i % 2 * 64);
    }
    if (tile == first) {
      receive_heads(p, layer, at, spots, s, tag, warp, lane);
      meet();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] = {};
        if (g < GROUP) q[i] = lds128(smem_addr(s.q[0]) + g * (HD * 2) + i * 64 + t * 16);
      }
      if (first >= at.tiles) return;
    }
    if (tile == at.tiles - 1) {  // the new token is not in its page yet
      const int row = (at.len - 1) % TILE, in_v = row % 2 + row / 8 * 2;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (g + i / 4 * 8 == row) k[i] = lds128(smem_addr(s.k) + i % 4 * 64 + t * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (t == row % 8 / 2 && i == in_v) {
          v[i][0] = lds128(smem_addr(s.v) + g * 16);
          v[i][1] = lds128(smem_addr(s.v) + HD + g * 16);
        }
    }
    float x[4] = {}, x1[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma(x, k[i].x, k[i + 4].x, k[i].y, k[i + 4].y, q[i].x, q[i].y);
      mma(x1, k[i].z, k[i + 4].z, k[i].w, k[i + 4].w, q[i].z, q[i].w);
    }
    const int token = tile * TILE + g;
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = token + (j >= 2 ? 8 : 0) < at.len ? (x[j] + x1[j]) * p.scale : NEG;
    float n0 = fmaxf(m0, fmaxf(x[0], x[2])), n1 = fmaxf(m1, fmaxf(x[1], x[3]));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, d));
      n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, d));
    }
    const float c0 = exp2_fast(m0 - n0), c1 = exp2_fast(m1 - n1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      o[i][0] *= c0;
      o[i][1] *= c1;
      o[i][2] *= c0;
      o[i][3] *= c1;
    }
    m0 = n0;
    m1 = n1;
    const float p0 = exp2_fast(x[0] - m0), p1 = exp2_fast(x[1] - m1), p2 = exp2_fast(x[2] - m0),
                p3 = exp2_fast(x[3] - m1);
    l0 = l0 * c0 + p0 + p2;
    l1 = l1 * c1 + p1 + p3;
    const u32 w0 = movmatrix(pack2(p0, p1)), w1 = movmatrix(pack2(p2, p3));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      auto pair = [&](int j, int half) {
        return __byte_perm(word_of(v[j][half], i / 2), word_of(v[j + 1][half], i / 2),
                           i & 1 ? 0x7632 : 0x5410);
      };
      mma(o[i], pair(0, 0), pair(0, 1), pair(2, 0), pair(2, 1), w0, w1);
    }
  }
#pragma unroll
  for (int d = 4; d < 32; d *= 2) {
    l0 += __shfl_xor_sync(~0u, l0, d);
    l1 += __shfl_xor_sync(~0u, l1, d);
  }
  if (g == 0) *reinterpret_cast<float4*>(s.part_ml[warp][2 * t]) = {m0, l0, m1, l1};
#pragma unroll
  for (int j = 0; j < 4; ++j)  // heads 2 t + j % 2, dims g * 8 ... of half j / 2
    if (2 * t + j % 2 < GROUP) {
      float4* to = reinterpret_cast<float4*>(&s.part[warp][2 * t + j % 2][j / 2 * 64 + g * 8]);
      to[0] = {o[0][j], o[1][j], o[2][j], o[3][j]};
      to[1] = {o[4][j], o[5][j], o[6][j], o[7][j]};
    }
}

// Words that not every step writes: what a step long ago left there could have a number that comes again.
template <class Params>
__device__ __forceinline__ void forget_parts(const Params& p, const Place& at, u32 tag, int tid) {
  const int part = (at.head * SPLITS + at.split) * GROUP;
  for (int e = tid; e < GROUP * HD; e += THREADS) tell(p.words + Exchange::PART + part * HD + e, 0.f, tag);
  if (tid < GROUP * 2) tell(p.words + Exchange::PART_ML + part * 2 + tid, 0.f, tag);
  if (tid < SLICE)
    tell(p.words + Exchange::ATTENDED_AT + at.head * GROUP * HD + at.split * SLICE + tid, 0.f, tag);
}

// The partial result of this block.
template <class Params, class Shared>
__device__ __forceinline__ void tell_part(const Params& p, const Place& at, const Shared& s, u32 tag,
                                          int tid) {
  const int part = (at.head * SPLITS + at.split) * GROUP;
#pragma unroll 1
  for (int e = tid * 4; e < GROUP * HD; e += THREADS * 4) {
    const int head = e / HD, d = e % HD;
    float2 ml[WARPS];
    float4 each[WARPS], x = {};
    float m = NEG, l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      ml[w] = {NEG, 0.f};
      each[w] = {};
      if (first_tile(at, w) < at.tiles) {
        ml[w] = *reinterpret_cast<const float2*>(s.part_ml[w][head]);
        each[w] = *reinterpret_cast<const float4*>(&s.part[w][head][d]);
      }
      m = fmaxf(m, ml[w].x);
    }
    m = value(rounded(m));
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = exp2_fast(ml[w].x - m);
      l += f * ml[w].y;
      x.x += f * each[w].x;
      x.y += f * each[w].y;
      x.z += f * each[w].z;
      x.w += f * each[w].w;
    }
    tell4(p.words + Exchange::PART + part * HD + e, x, tag);
    if (d == 0) {
      tell(p.words + Exchange::PART_ML + (part + head) * 2, m, tag);
      tell(p.words + Exchange::PART_ML + (part + head) * 2 + 1, l, tag);
    }
  }
}

// Waits for the partial results of a few blocks for N heads, `head` and every WARPS-th behind it, and merges
// them into shared memory as bf16, heads side by side at `to`. Only sums are looked at until all are there:
// many words would keep others waiting.
template <int N, class Params>
__device__ __forceinline__ void receive_merged(const Params& p, const Place& at, u32 tag, int head, u32 to,
                                               int lane) {
  const u32 *from[N], *from_ml[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const u32 part = u32(head + j * WARPS) / GROUP * (SPLITS * GROUP) + u32(head + j * WARPS) % GROUP;
    from[j] = p.words + Exchange::PART + part * HD + lane * 4;
    from_ml[j] = p.words + Exchange::PART_ML + part * 2;
  }
  u32 tries = 0;
  if (lane < at.blocks) {
    uint2 ml[N];
    bool all;
    do {
      patience(tries);
#pragma unroll
      for (int j = 0; j < N; ++j) ml[j] = look2(from_ml[j] + lane * GROUP * 2);
      all = true;
#pragma unroll
      for (int j = 0; j < N; ++j) all &= (((ml[j].x ^ tag) | (ml[j].y ^ tag)) & 0xffu) == 0;
    } while (!all);
  }
  __syncwarp();
  uint4 got[N][FEW] = {};
  uint2 ml[N][FEW] = {};
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        got[j][i] = look(from[j] + i * GROUP * HD);
        ml[j][i] = look2(from_ml[j] + i * GROUP * 2);
      }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float m = NEG;
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        while (!fresh(got[j][i], tag)) {
          patience(tries);
          got[j][i] = look(from[j] + i * GROUP * HD);
        }
        m = fmaxf(m, value(ml[j][i].x));
      }
    float l = 0.f;
    float4 x = {};
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        const float f = exp2_fast(value(ml[j][i].x) - m);
        l += f * value(ml[j][i].y);
        x.x += f * value(got[j][i].x);
        x.y += f * value(got[j][i].y);
        x.z += f * value(got[j][i].z);
        x.w += f * value(got[j][i].w);
      }
    const float r = __fdividef(1.f, l);
    sts64(to + j * WARPS * HD * 2 + lane * 8, pack2(x.x * r, x.y * r), pack2(x.z * r, x.w * r));
  }
}
template <class Params>
__device__ __forceinline__ void receive_head(const Params& p, const Place& at, u32 tag, int head, u32 to,
                                             int lane) {
  receive_merged<1>(p, at, tag, head, to, lane);
}

// All heads: a warp some of them.
template <class Params>
__device__ __forceinline__ void receive_parts(const Params& p, const Place& at, u32 tag, u32 to, int warp,
                                              int lane) {
  constexpr int TOGETHER = HEADS / WARPS % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int head = warp; head < HEADS; head += WARPS * TOGETHER)
    receive_merged<TOGETHER>(p, at, tag, head, to + head * HD * 2, lane);
}

// This block's slice of its KV head's outputs, merged over the blocks.
template <class Params>
__device__ __forceinline__ void merge_slice(const Params& p, const Place& at, u32 tag, int tid) {
  constexpr int EACH = SPLITS / MERGERS;  // blocks of a lane
  const int quad = tid / MERGERS, lane = tid % MERGERS;
  if (quad >= SLICE / 4) return;
  const int e = at.split * SLICE + quad * 4;
  float m[EACH], top = NEG, l = 0.f;
  uint2 ml[EACH];
  uint4 got[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int other = lane + i * MERGERS, part = (at.head * SPLITS + other) * GROUP;
    m[i] = NEG;
    ml[i] = {};
    got[i] = {};
    if (other < at.tiles) {
      const u32 *from = p.words + Exchange::PART + part * HD + e,
                *from_ml = p.words + Exchange::PART_ML + (part + e / HD) * 2;
      u32 tries = 0;
      do {
        patience(tries);
        got[i] = look(from);
        ml[i] = look2(from_ml);
      } while (!fresh(got[i], tag) || (((ml[i].x ^ tag) | (ml[i].y ^ tag)) & 0xffu));
      m[i] = value(ml[i].x);
    }
    top = fmaxf(top, m[i]);
  }
#pragma unroll
  for (int d = 1; d < MERGERS; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  float4 x = {};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float f = exp2_fast(m[i] - top);
    l += f * value(ml[i].y);
    x.x += f * value(got[i].x);
    x.y += f * value(got[i].y);
    x.z += f * value(got[i].z);
    x.w += f * value(got[i].w);
  }
#pragma unroll
  for (int d = 1; d < MERGERS; d *= 2) {
    l += __shfl_xor_sync(~0u, l, d);
    x.x += __shfl_xor_sync(~0u, x.x, d);
    x.y += __shfl_xor_sync(~0u, x.y, d);
    x.z += __shfl_xor_sync(~0u, x.z, d);
    x.w += __shfl_xor_sync(~0u, x.w, d);
  }
  if (lane == 0) {
    u32* to = p.words + Exchange::ATTENDED_AT + at.head * GROUP * HD + e;
    const float r = __fdividef(1.f, l);
    tell4(to, {x.x * r, x.y * r, x.z * r, x.w * r}, tag);
  }
}
