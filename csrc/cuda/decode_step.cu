// One token of one row through all layers of a decoder, from the embedding to the logits, in a single kernel.
//
// With one row a layer is bound by the memory that holds its weights, and the rest is waiting. So one block stays on a
// multiprocessor for the whole step, and the weights never pause: each warp owns equal parts of the rows of every matrix
// and has them copied, layer after layer, into its ring in shared memory, as far ahead as the ring reaches. What the blocks
// tell each other is small (a vector of activations) and goes through the L2 cache without barriers: every word carries the
// number of the layer in its low 8 bits, so who reads a word knows whether it is the one it waits for; 16 bits of mantissa
// remain. A word is written again one layer later, when every block must have read it, because each layer's vectors depend
// on all words of the ones before. All blocks must be on the GPU at once, which holds as long as whatever else runs there
// ends by itself.
//
// A dot product of 1024 weights with x runs on tensor cores: lane l of a warp takes pieces of 8 at 8 l, 8 l + 256, ... of both.
// Lanes 4 i to 4 i + 3 are row i of one operand and column i of the other, and the sum of the diagonal is the result. Two
// weight rows fill the 16 rows of an instruction.
//
// Attention: blocks of a KV head share its tiles of 16 tokens, one for each warp first, whose k and v are fetched into registers
// before q is there. A block merges its warps. A few blocks' results everyone merges by himself; if there are more, each block
// merges an equal slice of the head's outputs first.
#include "common.cuh"

#ifndef HIDDEN
#define HIDDEN 1024
#endif
#ifndef HEADS
#define HEADS 16
#endif
#ifndef KV_HEADS
#define KV_HEADS 8
#endif
#ifndef INTER
#define INTER 3072
#endif
#ifndef QK_NORM  // 1: RMSNorm of each head of q and k
#define QK_NORM 1
#endif
#ifndef PAGE_TILES  // page size / 16
#define PAGE_TILES 1
#endif
#ifndef MAX_LAYERS
#define MAX_LAYERS 64
#endif
#ifndef DEPTH  // places of a warp's ring
#define DEPTH 12
#endif


#define PATIENCE (1u << 22)  // looks at a word before the kernel fails, some seconds

constexpr int BLOCKS = 128, WARPS = 8, THREADS = WARPS * 32;
constexpr int ALL_WARPS = BLOCKS * WARPS;
constexpr int PIECE = 1024, PIECE_BYTES = PIECE * 2;  // of a weight row: a place of the ring
constexpr int HD = 128, TILE = 16;
constexpr int GROUP = HEADS / KV_HEADS, SPLITS = BLOCKS / KV_HEADS;
constexpr int ATTENDED = HEADS * HD, QKV = ATTENDED + 2 * KV_HEADS * HD;
constexpr int OWN = HIDDEN / ALL_WARPS;  // places of the residual stream that a warp owns
constexpr int WIDE = ATTENDED > INTER ? ATTENDED : INTER;
constexpr int SLICE = GROUP * HD / SPLITS;  // outputs that a block merges
constexpr int FEW = 5;  // blocks of a head whose results everyone merges for himself
constexpr float NEG = -1e30f;

static_assert(OWN <= 8 && HIDDEN % ALL_WARPS == 0 && QKV % ALL_WARPS == 0 && INTER % ALL_WARPS == 0 && ATTENDED % PIECE == 0);
static_assert(BLOCKS % KV_HEADS == 0 && SPLITS <= 32 && GROUP + 2 <= WARPS && SLICE / 4 * SPLITS <= THREADS && SLICE / 4 * SPLITS % 32 == 0);

struct Layer {
  const bf16* matrix[4];                 // qkv [QKV, HIDDEN], o [HIDDEN, ATTENDED], gate and up [2 INTER, HIDDEN], down [HIDDEN, INTER]
  const float *input_norm, *mlp_norm;    // [HIDDEN]
  const float *q_norm, *k_norm;          // [HD]
  bf16 *k, *v;                           // pages
};

struct Params {
  const Layer* layers;
  const bf16* embedding;   // [vocab, HIDDEN]
  const bf16* head;        // [vocab, HIDDEN]
  const float* norm;       // [HIDDEN]
  const float* cos_sin;    // [positions, HD], cosines then sines
  const int* ids;          // [1]
  const int* slots;        // [1]
  const int* kv_len;       // [1], with the new token; 0 for padding
  const int* page_table;   // [slots, table_stride]
  float* logits;           // [vocab]
  u32* words;              // exchange, see Exchange
  u32* steps;              // [1], layers so far, with the embedding as one
  long long page_stride, head_stride;  // elements of k and v
  int count, vocab, table_stride;      // layers; output columns, a multiple of 4
  float eps, scale;                    // scale times log2(e)
};

// Where the vectors lie in `words`.
struct Exchange {
  static constexpr int QKV_AT = 0, PART = QKV_AT + QKV, PART_ML = PART + BLOCKS * GROUP * HD, ATTENDED_AT = PART_ML + BLOCKS * GROUP * 2,
                       MIDDLE = ATTENDED_AT + ATTENDED, INNER = MIDDLE + HIDDEN, END = INNER + INTER;
};

// --- words that say which layer they belong to

// Called while waiting: a kernel that waits for ever would take the machine with it.
__device__ __forceinline__ void patience(u32& tries) {
  if (++tries > PATIENCE) __trap();
}

__device__ __forceinline__ u32 rounded(float x) { return (__float_as_uint(x) + 0x80u) & 0xffffff00u; }
__device__ __forceinline__ float value(u32 word) { return __uint_as_float(word & 0xffffff00u); }
__device__ __forceinline__ bool fresh(const uint4& v, u32 tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 0xffu) == 0;
}
__device__ __forceinline__ uint4 look(const u32* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint2 look2(const u32* from) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void tell(u32* to, float x, u32 tag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(rounded(x) | tag) : "memory");
}

__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- shared memory

__device__ __forceinline__ uint4 lds128(u32 addr) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(addr) : "memory");
  return r;
}
__device__ __forceinline__ void sts64(u32 addr, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint4 ldg128(const bf16* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ void piece_init(u32 barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void piece_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// --- the matrices: which rows are whose, and in which order they are read

constexpr u32 TOGETHER = 1 << 28;

// Matrix 0 to 3 of a layer as a warp sees it: ROWS rows of PIECES pieces, of which PASS are summed side by side, DEEP pieces at
// a time. Gate and up have equal parts of a pass, gate the first. Piece FIRST of the layer's is the first.
template <int M>
struct Matrix {
  static constexpr int ROWS = M == 0 ? QKV / ALL_WARPS : M == 2 ? 2 * INTER / ALL_WARPS : OWN;
  static constexpr int PIECES = M == 1 ? ATTENDED / PIECE : M == 3 ? INTER / PIECE : HIDDEN / PIECE;
  __device__ static constexpr int pass() {
    int most = 1;
    for (int n = 1; n <= 8; ++n)
      if (ROWS % n == 0 && (M != 2 || n % 2 == 0)) most = n;
    return most;
  }
  static constexpr int PASS = pass();
  __device__ static constexpr int deep() {
    int most = 1;
    for (int n = 1; n <= PIECES; ++n)
      if (PIECES % n == 0 && PASS * n <= 6) most = n;
    return most;
  }
  static constexpr int DEEP = deep(), COUNT = PASS * DEEP, RESULTS = (PASS + 3) / 4;
  static constexpr int FIRST = (M > 0 ? QKV / ALL_WARPS * (HIDDEN / PIECE) : 0) + (M > 1 ? OWN * (ATTENDED / PIECE) : 0) +
                               (M > 2 ? 2 * INTER / ALL_WARPS * (HIDDEN / PIECE) : 0);
  // Piece `i` of the layer: M, whether it is the first of those taken together, and where it is, in pieces of the matrix.
  __device__ __forceinline__ static u32 entry(int i, int me) {
    i -= FIRST;
    const int first = i / (PASS * PIECES) * PASS, k = i / PASS % PIECES, j = i % PASS;
    const int up = M == 2 && j >= PASS / 2, row = M == 2 ? me * (ROWS / 2) + first / 2 + j - up * (PASS / 2) + up * INTER : me * ROWS + first + j;
    const int at = row * PIECES + k;
    return u32(M) << 29 | (i % COUNT == 0 ? TOGETHER : 0) | u32(at);
  }
};
constexpr int LAYER_PIECES = Matrix<3>::FIRST + OWN * (INTER / PIECE), HEAD_PIECES = HIDDEN / PIECE;
static_assert(DEPTH >= 8 && DEPTH <= LAYER_PIECES && Matrix<1>::PASS == OWN && Matrix<3>::PASS == OWN);

// Shared memory behind the rings.
struct Shared {
  bf16 narrow[HIDDEN], wide[WIDE];  // inputs of matrices
  float square[THREADS];            // the threads' shares of the sum of squares
  float part[WARPS][GROUP][HD];     // unnormalised outputs of the warps' tiles
  float part_ml[WARPS][8][2];       // their maxima and sums
  bf16 q[GROUP][HD], k[HD], v[HD];  // as attention takes them
  Layer layers[MAX_LAYERS];
  u64 full[WARPS][DEPTH];
  u32 table[WARPS][LAYER_PIECES];   // of the pieces of a layer, see Matrix::entry
};

// What a thread knows of itself. The output layer's rows come in fours.
struct Self {
  int tid, warp, lane, me;        // me: the warp's number among all
  int head_first, head_rows;
  u32 ring, full;                 // the warp's places and their barriers
  int place = 0;                  // of the ring, the next to read
  u32 round = 0;
};

// Which matrix, and where in it, the pieces of a layer are that this warp reads.
__device__ __forceinline__ void list_pieces(Shared& s, const Self& self) {
  for (int i = self.lane; i < LAYER_PIECES; i += 32) {
    const u32 m = (i >= Matrix<1>::FIRST) + (i >= Matrix<2>::FIRST) + (i >= Matrix<3>::FIRST);
    u32 entry;
    if (m == 0) entry = Matrix<0>::entry(i, self.me);
    else if (m == 1) entry = Matrix<1>::entry(i, self.me);
    else if (m == 2) entry = Matrix<2>::entry(i, self.me);
    else entry = Matrix<3>::entry(i, self.me);
    s.table[self.warp][i] = entry;
  }
  __syncwarp();
}

// Copies `count` pieces of a layer (the last of which is the output layer), from `first` on, to places from `place` on. What
// lies together in both memories, and is taken together, is one copy, which completes the barrier of its first place.
__device__ __forceinline__ void refill(const Params& p, const Shared& s, const Self& self, int layer, int first, int place, int count) {
  int i = first + self.lane;
  if (i >= LAYER_PIECES && layer < p.count) {
    i -= LAYER_PIECES;
    ++layer;
  }
  bool live = self.lane < count, begins;
  const bf16* from = p.head;
  if (layer < p.count) {
    const u32 entry = live ? s.table[self.warp][i] : 0;
    from = s.layers[layer].matrix[entry >> 29] + (long long)(entry & (TOGETHER - 1)) * PIECE;
    begins = entry & TOGETHER;
  } else {
    const int row = i / (4 * HEAD_PIECES) * 4 + i % 4;
    live = live && row < self.head_rows;
    from += ((long long)(self.head_first + row) * HEAD_PIECES + i / 4 % HEAD_PIECES) * PIECE;
    begins = i % 4 == 0;
  }
  place += self.lane;
  if (place >= DEPTH) place -= DEPTH;
  const u64 address = reinterpret_cast<u64>(from), before = __shfl_up_sync(~0u, address, 1);
  begins = live && (begins || self.lane == 0 || place == 0 || address != before + PIECE_BYTES);
  const u32 further = __ballot_sync(~0u, begins) >> self.lane >> 1, all = __popc(__ballot_sync(~0u, live));
  const u32 bytes = begins ? (further ? __ffs(further) : all - self.lane) * PIECE_BYTES : 0;
  const u32 full = self.full + place * 8;
  if (live) asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}" ::"r"(full), "r"(bytes) : "memory");
  if (begins)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(self.ring + place * PIECE_BYTES),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
}

// The ring's next COUNT pieces, `first` of the layer's and following, into registers; their places are filled again.
template <int COUNT>
__device__ __forceinline__ void take(const Params& p, const Shared& s, Self& self, int layer, int first, uint4 (&a)[COUNT][4]) {
  const int mine = self.place + self.lane;  // a lane waits for one of the places
  if (self.lane < COUNT) piece_wait(self.full + (mine >= DEPTH ? mine - DEPTH : mine) * 8, self.round ^ (mine >= DEPTH));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int place = self.place + i;
    const u32 from = self.ring + (place >= DEPTH ? place - DEPTH : place) * PIECE_BYTES + self.lane * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) a[i][j] = lds128(from + j * 512);
  }
  __syncwarp();
  refill(p, s, self, layer, first + DEPTH, self.place, COUNT);
  self.place += COUNT;
  if (self.place >= DEPTH) {
    self.place -= DEPTH;
    self.round ^= 1;
  }
}

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
        const uint4 hi = pair * 2 + 1 < ROWS ? a[from + (GATED ? PAIRS + pair : pair * 2 + 1)][i] : uint4{0, 0, 0, 0};
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

// Waits for a vector of N words; into shared memory as bf16. NORM: times the norm's weight, with the sum of squares beside.
template <int N, bool NORM>
__device__ __forceinline__ void receive(const u32* words, u32 tag, u32 to, const float* weight, float* square, int tid) {
  constexpr int EACH = N / 4 / THREADS, SIDE = EACH % 4 == 0 ? 4 : EACH % 3 == 0 ? 3 : EACH % 2 == 0 ? 2 : 1;
  float sum = 0.f;
  u32 tries = 0;
  words += tid * 4;
#pragma unroll 1
  for (int base = 0; base < EACH; base += SIDE) {
    float4 scale[NORM ? SIDE : 1];
    if (NORM) {
#pragma unroll
      for (int i = 0; i < SIDE; ++i) scale[i] = __ldg(reinterpret_cast<const float4*>(weight) + (base + i) * THREADS + tid);
    }
    uint4 got[SIDE];
    do {
      patience(tries);
      got[0] = look(words + base * THREADS * 4);
    } while (!fresh(got[0], tag));
#pragma unroll
    for (int i = 1; i < SIDE; ++i) got[i] = look(words + (base + i) * THREADS * 4);
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      if (i > 0)
        while (!fresh(got[i], tag)) {
          patience(tries);
          got[i] = look(words + (base + i) * THREADS * 4);
        }
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

// A matrix of a layer times what `get(x)` puts to x in shared memory, where weights are fetched before. `then(y, row)`: y[i]
// is that of the warp's row `row` + 4 i + lane / 8.
template <int M, class Get, class Then>
__device__ __forceinline__ void times(const Params& p, Shared& s, Self& self, int layer, Get&& get, Then&& then) {
  using T = Matrix<M>;
  constexpr bool NORM = M % 2 == 0;
  uint4 a[T::COUNT][4];
  take(p, s, self, layer, T::FIRST, a);
  const u32 x = smem_addr(NORM ? s.narrow : s.wide);
  get(x);
  __syncthreads();
  float f = 1.f;
#pragma unroll 1
  for (int row = 0; row < T::ROWS; row += T::PASS) {
    Sums<T::PASS> sums;
#pragma unroll 1
    for (int k = 0; k < T::PIECES; k += T::DEEP) {
      if (row + k > 0) take(p, s, self, layer, T::FIRST + row * T::PIECES + k * T::PASS, a);
#pragma unroll
      for (int i = 0; i < T::DEEP; ++i) sums.template add<M == 2>(a, i * T::PASS, x + (k + i) * PIECE_BYTES + self.lane * 16);
    }
    if (NORM && row == 0) f = norm_factor(s.square, p.eps, self.lane);
    float y[T::RESULTS];
    sums.total(self.lane, y);
#pragma unroll
    for (int i = 0; i < T::RESULTS; ++i) y[i] *= f;
    then(y, row);
  }
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
__device__ __forceinline__ int first_tile(const Place& at, int warp) { return at.few ? at.split * WARPS + warp : warp * SPLITS + at.split; }
__device__ __forceinline__ int newest_block(const Place& at) { return at.few ? (at.tiles - 1) / WARPS : (at.tiles - 1) % SPLITS; }

__device__ __forceinline__ long long tile_at(const Params& p, const Place& at, int tile) {
  return at.pages[tile / PAGE_TILES] * p.page_stride + at.head * p.head_stride + (tile % PAGE_TILES) * (TILE * HD);
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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
__device__ __forceinline__ void receive_heads(const Params& p, const Layer& layer, const Place& at, Shared& s, u32 tag, int warp, int lane) {
  if (warp >= GROUP + (newest_block(at) == at.split ? 2 : 0)) return;
  const int last = at.len - 1;
  const long long newest = tile_at(p, at, last / TILE) + last % TILE * HD;
  const int head = warp < GROUP ? at.head * GROUP + warp : HEADS + at.head + (warp > GROUP ? KV_HEADS : 0);
  const u32* from = p.words + Exchange::QKV_AT + head * HD + lane * 4;
  float4 weight = {};
  if (QK_NORM && warp <= GROUP) weight = __ldg(reinterpret_cast<const float4*>(warp < GROUP ? layer.q_norm : layer.k_norm) + lane);
  uint4 got;
  u32 tries = 0;
  do {
    patience(tries);
    got = look(from);
  } while (!fresh(got, tag));
  uint2 y = {pack2(value(got.x), value(got.y)), pack2(value(got.z), value(got.w))};
  if (warp <= GROUP) y = prepare(got, weight, at, lane, p.eps);
  bf16* to = warp < GROUP ? s.q[warp] : warp == GROUP ? s.k : s.v;
  sts64(smem_addr(to) + lane * 8, y.x, y.y);
  if (warp >= GROUP) *reinterpret_cast<uint2*>((warp == GROUP ? layer.k : layer.v) + newest + lane * 4) = y;
}

// This warp's tiles of the history. The first one is fetched before the projection is there.
__device__ __forceinline__ void attend(const Params& p, const Layer& layer, const Place& at, Shared& s, u32 tag, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint4 q[4];
  float o[8][4] = {};  // dims g * 8 + i and 64 further of heads 2 t and 2 t + 1
  float m0 = NEG, m1 = NEG, l0 = 0.f, l1 = 0.f;  // heads 2 t and 2 t + 1; l is this lane's share
  const int first = first_tile(at, warp);
#pragma unroll 1
  for (int tile = first; tile == first || tile < at.tiles; tile += WARPS * SPLITS) {
    uint4 k[8], v[4][2];
    if (tile < at.tiles) {
      const long long from = tile_at(p, at, tile);
      const bf16 *k_from = layer.k + from + g * HD + t * 8, *v_from = layer.v + from + t * 2 * HD + g * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) k[i] = ldg128(k_from + i / 4 * 8 * HD + i % 4 * 32);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = ldg128(v_from + (i / 2 % 2 + i / 4 * 8) * HD + i % 2 * 64);
    }
    if (tile == first) {
      receive_heads(p, layer, at, s, tag, warp, lane);
      __syncthreads();
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
    const float p0 = exp2_fast(x[0] - m0), p1 = exp2_fast(x[1] - m1), p2 = exp2_fast(x[2] - m0), p3 = exp2_fast(x[3] - m1);
    l0 = l0 * c0 + p0 + p2;
    l1 = l1 * c1 + p1 + p3;
    const u32 w0 = movmatrix(pack2(p0, p1)), w1 = movmatrix(pack2(p2, p3));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      auto pair = [&](int j, int half) { return __byte_perm(word_of(v[j][half], i / 2), word_of(v[j + 1][half], i / 2), i & 1 ? 0x7632 : 0x5410); };
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

// The partial result of this block.
__device__ __forceinline__ void tell_part(const Params& p, const Place& at, const Shared& s, u32 tag, int tid) {
  const int part = (at.head * SPLITS + at.split) * GROUP;
#pragma unroll 1
  for (int e = tid; e < GROUP * HD; e += THREADS) {
    const int head = e / HD, d = e % HD;
    float2 ml[WARPS];
    float each[WARPS], m = NEG, l = 0.f, x = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      ml[w] = {NEG, 0.f};
      each[w] = 0.f;
      if (first_tile(at, w) < at.tiles) {
        ml[w] = *reinterpret_cast<const float2*>(s.part_ml[w][head]);
        each[w] = s.part[w][head][d];
      }
      m = fmaxf(m, ml[w].x);
    }
    m = value(rounded(m));
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = exp2_fast(ml[w].x - m);
      l += f * ml[w].y;
      x += f * each[w];
    }
    tell(p.words + Exchange::PART + part * HD + e, x, tag);
    if (d < 2) tell(p.words + Exchange::PART_ML + (part + head) * 2 + d, d == 0 ? m : l, tag);
  }
}

// Waits for the partial results of a few blocks for each head, and merges them into shared memory as bf16: a warp a head.
__device__ __forceinline__ void receive_parts(const Params& p, const Place& at, u32 tag, u32 to, int warp, int lane) {
  u32 tries = 0;
#pragma unroll 1
  for (int head = warp; head < HEADS; head += WARPS) {
    const int part = head / GROUP * SPLITS * GROUP + head % GROUP;
    const u32 *from = p.words + Exchange::PART + part * HD + lane * 4, *from_ml = p.words + Exchange::PART_ML + part * 2;
    uint4 got[FEW];
    uint2 ml[FEW];
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        got[i] = look(from + i * GROUP * HD);
        ml[i] = look2(from_ml + i * GROUP * 2);
      }
    float m = NEG;
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        while (!fresh(got[i], tag) || (((ml[i].x ^ tag) | (ml[i].y ^ tag)) & 0xffu)) {
          patience(tries);
          got[i] = look(from + i * GROUP * HD);
          ml[i] = look2(from_ml + i * GROUP * 2);
        }
        m = fmaxf(m, value(ml[i].x));
      }
    float l = 0.f;
    float4 x = {};
#pragma unroll
    for (int i = 0; i < FEW; ++i)
      if (i < at.blocks) {
        const float f = exp2_fast(value(ml[i].x) - m);
        l += f * value(ml[i].y);
        x.x += f * value(got[i].x);
        x.y += f * value(got[i].y);
        x.z += f * value(got[i].z);
        x.w += f * value(got[i].w);
      }
    const float r = __fdividef(1.f, l);
    sts64(to + head * HD * 2 + lane * 8, pack2(x.x * r, x.y * r), pack2(x.z * r, x.w * r));
  }
}

// This block's slice of its KV head's outputs, merged over the blocks.
__device__ __forceinline__ void merge_slice(const Params& p, const Place& at, u32 tag, int tid) {
  const int quad = tid / SPLITS, other = tid % SPLITS;
  if (quad >= SLICE / 4) return;
  const int e = at.split * SLICE + quad * 4, part = (at.head * SPLITS + other) * GROUP;
  float m = NEG, l = 0.f;
  float4 x = {};
  if (other < at.tiles) {
    const u32 *from = p.words + Exchange::PART + part * HD + e, *from_ml = p.words + Exchange::PART_ML + (part + e / HD) * 2;
    uint4 got;
    uint2 ml;
    u32 tries = 0;
    do {
      patience(tries);
      got = look(from);
      ml = look2(from_ml);
    } while (!fresh(got, tag) || (((ml.x ^ tag) | (ml.y ^ tag)) & 0xffu));
    m = value(ml.x);
    l = value(ml.y);
    x = {value(got.x), value(got.y), value(got.z), value(got.w)};
  }
  float top = m;
#pragma unroll
  for (int d = 1; d < SPLITS; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float f = exp2_fast(m - top);
  l *= f;
  x = {x.x * f, x.y * f, x.z * f, x.w * f};
#pragma unroll
  for (int d = 1; d < SPLITS; d *= 2) {
    l += __shfl_xor_sync(~0u, l, d);
    x.x += __shfl_xor_sync(~0u, x.x, d);
    x.y += __shfl_xor_sync(~0u, x.y, d);
    x.z += __shfl_xor_sync(~0u, x.z, d);
    x.w += __shfl_xor_sync(~0u, x.w, d);
  }
  if (other == 0) {
    u32* to = p.words + Exchange::ATTENDED_AT + at.head * GROUP * HD + e;
    const float r = __fdividef(1.f, l);
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(rounded(x.x * r) | tag), "r"(rounded(x.y * r) | tag),
                 "r"(rounded(x.z * r) | tag), "r"(rounded(x.w * r) | tag)
                 : "memory");
  }
}

// --- the step

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + WARPS * DEPTH * PIECE_BYTES);
  Self self;
  int block;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(self.tid));  // volatile: or it is asked for again and again
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  self.warp = self.tid / 32;
  self.lane = self.tid % 32;
  self.me = block * WARPS + self.warp;
  self.head_first = int((long long)(p.vocab / 4) * self.me / ALL_WARPS) * 4;
  self.head_rows = int((long long)(p.vocab / 4) * (self.me + 1) / ALL_WARPS) * 4 - self.head_first;
  self.ring = smem_addr(smem) + self.warp * (DEPTH * PIECE_BYTES);
  self.full = smem_addr(s.full[self.warp]);
  for (int i = self.tid; i < p.count * int(sizeof(Layer) / 8); i += THREADS) reinterpret_cast<u64*>(s.layers)[i] = reinterpret_cast<const u64*>(p.layers)[i];
  for (int i = self.tid; i < WARPS * DEPTH; i += THREADS) piece_init(smem_addr(&s.full[0][0]) + i * 8);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  list_pieces(s, self);
  refill(p, s, self, 0, 0, 0, DEPTH);

  pdl_wait();
  u32 tag = *p.steps & 0xff;
  Place at;
  at.head = block % KV_HEADS;
  at.split = block / KV_HEADS;
  at.len = max(p.kv_len[0], 1);
  at.tiles = (at.len + TILE - 1) / TILE;
  at.few = at.tiles <= min(FEW, SPLITS) * WARPS;
  at.blocks = min(at.few ? (at.tiles + WARPS - 1) / WARPS : at.tiles, SPLITS);
  at.pages = p.page_table + (long long)p.slots[0] * p.table_stride;
  const float4* turns = reinterpret_cast<const float4*>(p.cos_sin + (long long)(at.len - 1) * HD) + self.lane % 16;
  at.cosine = turns[0];
  at.sine = turns[HD / 8];
  const bf16* token = p.embedding + (long long)p.ids[0] * HIDDEN;
  const int own = self.me * OWN + self.lane / 8;  // and every fourth after it
  const bool tells = self.lane % 8 == 0;
  float h[(OWN + 3) / 4];  // the residual stream there
  auto tell_h = [&](int words) {
#pragma unroll
    for (int i = 0; i < (OWN + 3) / 4; ++i)
      if (tells && 4 * i + self.lane / 8 < OWN) tell(p.words + words + own + 4 * i, h[i], tag);
  };
#pragma unroll
  for (int i = 0; i < (OWN + 3) / 4; ++i) h[i] = 4 * i + self.lane / 8 < OWN ? bf2f(token[own + 4 * i]) : 0.f;
  tell_h(Exchange::END);

#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer& layer = s.layers[l];
    const u32 before = tag;
    tag = (tag + 1) & 0xff;
    auto get_first = [&](u32 x) { receive<HIDDEN, true>(p.words + Exchange::END, before, x, layer.input_norm, s.square, self.tid); };
    times<0>(p, s, self, l, get_first, [&](const float(&y)[Matrix<0>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<0>::RESULTS; ++i)
        if (tells && 4 * i + self.lane / 8 < Matrix<0>::PASS)
          tell(p.words + Exchange::QKV_AT + self.me * Matrix<0>::ROWS + row + 4 * i + self.lane / 8, y[i], tag);
    });
    if (block == BLOCKS - 1 && self.tid < HIDDEN / 32) {  // norms soon wanted, which nobody has read yet
      asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.mlp_norm + self.tid * 32));
      asm volatile("prefetch.global.L2 [%0];" ::"l"((l + 1 < p.count ? (&layer)[1].input_norm : p.norm) + self.tid * 32));
    }
    if (at.split < at.blocks) {
      attend(p, layer, at, s, tag, self.warp, self.lane);
      __syncthreads();
      tell_part(p, at, s, tag, self.tid);
    }
    if (!at.few) merge_slice(p, at, tag, self.tid);
    auto add = [&](const float(&y)[(OWN + 3) / 4], int) {
#pragma unroll
      for (int i = 0; i < (OWN + 3) / 4; ++i) h[i] += y[i];
    };
    auto get_attended = [&](u32 x) {
      if (at.few) receive_parts(p, at, tag, x, self.warp, self.lane);
      else receive<ATTENDED, false>(p.words + Exchange::ATTENDED_AT, tag, x, nullptr, nullptr, self.tid);
    };
    times<1>(p, s, self, l, get_attended, add);
    tell_h(Exchange::MIDDLE);
    auto get_middle = [&](u32 x) { receive<HIDDEN, true>(p.words + Exchange::MIDDLE, tag, x, layer.mlp_norm, s.square, self.tid); };
    times<2>(p, s, self, l, get_middle, [&](const float(&y)[Matrix<2>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<2>::RESULTS; ++i) {
        const float up = __shfl_down_sync(~0u, y[i], 8), gate = y[i];
        const float z = __fdividef(gate, 1.f + exp2_fast(-1.442695041f * gate)) * up;
        if (self.lane % 16 == 0 && 4 * i + self.lane / 8 < Matrix<2>::PASS)
          tell(p.words + Exchange::INNER + self.me * (Matrix<2>::ROWS / 2) + row / 2 + 2 * i + self.lane / 16, z, tag);
      }
    });
    auto get_inner = [&](u32 x) { receive<INTER, false>(p.words + Exchange::INNER, tag, x, nullptr, nullptr, self.tid); };
    times<3>(p, s, self, l, get_inner, add);
    tell_h(Exchange::END);
  }

  const u32 x = smem_addr(s.narrow);
  receive<HIDDEN, true>(p.words + Exchange::END, tag, x, p.norm, s.square, self.tid);
  __syncthreads();
  pdl_launch();
  const float f = norm_factor(s.square, p.eps, self.lane);
#pragma unroll 1
  for (int row = 0; row < self.head_rows; row += 4) {
    Sums<4> sums;
    uint4 a[4][4];
#pragma unroll
    for (int k = 0; k < HEAD_PIECES; ++k) {
      take(p, s, self, p.count, row * HEAD_PIECES + k * 4, a);
      sums.add<false>(a, 0, x + k * PIECE_BYTES + self.lane * 16);
    }
    float y[1];
    sums.total(self.lane, y);
    if (tells) p.logits[self.head_first + row + self.lane / 8] = y[0] * f;
  }
  // All blocks have read the number of steps: every one has told its part of the last layer.
  if (block == 0 && self.tid == 0) *p.steps = tag + 1;
}
