// One token of one row through all layers of a decoder, from the embedding to the logits, in a single kernel.
//
// With one row a layer is bound by the memory that holds its weights, and the rest is waiting. So one block
// stays on a multiprocessor for the whole step, and the weights never pause: each warp owns equal parts of
// the rows of every matrix and a further warp copies them, layer after layer, into its ring in shared memory,
// as far ahead as the ring reaches. What the blocks tell each other is small (a vector of activations) and
// goes through the L2 cache without barriers: every word carries the number of the layer in its low 8 bits,
// so who reads a word knows whether it is the one it waits for; 16 bits of mantissa remain. A word is written
// again one layer later, when every block must have read it, because each layer's vectors depend on all words
// of the ones before. What all blocks read stands in COPIES, of which a block reads one: few words that all
// look at answer slowly. All blocks must be on the GPU at once, which holds as long as whatever else runs
// there ends by itself.
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
#ifndef COPIES  // of the words, at most 8
#define COPIES 8
#endif
#include "one_row.cuh"

constexpr int PIECE = 1024, PIECE_BYTES = PIECE * 2;  // of a weight row: a place of the ring
constexpr int OWN = HIDDEN / ALL_WARPS;  // places of the residual stream that a warp owns
constexpr int WIDE = ATTENDED > INTER ? ATTENDED : INTER;

constexpr int FLYING = 2;                // pieces of a warp that are on their way at a time

static_assert(OWN <= 8 && HIDDEN % ALL_WARPS == 0 && QKV % ALL_WARPS == 0 && INTER % ALL_WARPS == 0 &&
              ATTENDED % PIECE == 0);

struct Layer {
  // Qkv [QKV, HIDDEN], o [HIDDEN, ATTENDED], gate and up [2 INTER, HIDDEN], down [HIDDEN, INTER].
  const bf16* matrix[4];
  const float *input_norm, *mlp_norm;    // [HIDDEN]
  const float *q_norm, *k_norm;          // [HD]
  bf16 *k, *v;                           // pages
#if COPIED
  bf16* input;                           // [HIDDEN], of the residual stream in front of it; or none
#endif
};

constexpr int END = Exchange::INNER + INTER;  // in `words`: the residual stream behind a layer
constexpr int COPY_WORDS = END + HIDDEN;      // from a copy to the next
static_assert(COPIES <= 8);

// --- the matrices: which rows are whose, and in which order they are read

// Matrix 0 to 3 of a layer as a warp sees it: ROWS rows of PIECES pieces, of which PASS are summed side by
// side, DEEP pieces at a time. Gate and up have equal parts of a pass, gate the first. Piece FIRST of the
// layer's is the first.
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
  static constexpr int FIRST = (M > 0 ? QKV / ALL_WARPS * (HIDDEN / PIECE) : 0) +
                               (M > 1 ? OWN * (ATTENDED / PIECE) : 0) +
                               (M > 2 ? 2 * INTER / ALL_WARPS * (HIDDEN / PIECE) : 0);
  // Piece `i` of the layer: M, and where it is, in pieces of the matrix.
  __device__ __forceinline__ static u32 entry(int i, int me) {
    i -= FIRST;
    const int first = i / (PASS * PIECES) * PASS, k = i / PASS % PIECES, j = i % PASS;
    const int up = M == 2 && j >= PASS / 2,
              row = M == 2 ? me * (ROWS / 2) + first / 2 + j - up * (PASS / 2) + up * INTER
                           : me * ROWS + first + j;
    return u32(M) << 29 | u32(row * PIECES + k);
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
  int taken[WARPS];                 // pieces that the warps have read
  u32 table[WARPS][LAYER_PIECES];   // of the pieces of a layer, see Matrix::entry
};

// What a thread knows of itself. The output layer's rows come in fours.
struct Self {
  int tid, warp, lane, me;        // me: the warp's number among all
  int head_first, head_rows;
  u32 ring, full;                 // the warp's places and their barriers
  int place = 0, taken = 0;       // the next to read, or to fill; pieces read
  u32 round = 0;

  __device__ __forceinline__ void set_out(const Params& p, const Shared& s) {
    me = blockIdx.x * WARPS + warp;
    head_first = int((long long)(p.vocab / 4) * me / ALL_WARPS) * 4;
    head_rows = int((long long)(p.vocab / 4) * (me + 1) / ALL_WARPS) * 4 - head_first;
    ring = smem_addr(&s) - (WARPS - warp) * (DEPTH * PIECE_BYTES);
    full = smem_addr(s.full[warp]);
  }
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

// The warp that copies weights: a lane for each of the others goes through that one's pieces, the rows of the
// output layer last. Of a layer's no more than FLYING are on their way at a time, since what blocks tell each
// other waits behind them.
__device__ __forceinline__ void supply(const Params& p, Shared& s, Self self) {
  self.warp = self.lane;
  if (self.warp >= WARPS) return;
  self.set_out(p, s);
  const u32 taken = smem_addr(&s.taken[self.warp]);
  const int total = p.count * LAYER_PIECES + self.head_rows * HEAD_PIECES;
  int layer = 0, i = 0, landing = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int n = 0; n < total;) {
    const int done = lds_volatile(taken);
    if (n - done >= DEPTH ||
        (layer < p.count && n >= FLYING && !piece_there(self.full + landing * 8, parity))) {
      __nanosleep(100);
      continue;
    }
    if (n >= FLYING && ++landing == DEPTH) {
      landing = 0;
      parity ^= 1;
    }
    const bf16* from = p.head;
    if (layer < p.count) {
      const u32 entry = s.table[self.warp][i];
      from = s.layers[layer].matrix[entry >> 29] + (long long)(entry & 0x1fffffff) * PIECE;
      if (++i == LAYER_PIECES) {
        i = 0;
        ++layer;
      }
    } else {
      const int row = i / (4 * HEAD_PIECES) * 4 + i % 4;
      from += ((long long)(self.head_first + row) * HEAD_PIECES + i / 4 % HEAD_PIECES) * PIECE;
      ++i;
    }
    const u32 full = self.full + self.place * 8;
    barrier_expect(full, PIECE_BYTES);
    copy_bytes(self.ring + self.place * PIECE_BYTES, from, PIECE_BYTES, full);
    if (++self.place == DEPTH) self.place = 0;
    ++n;
  }
}

// The ring's next pieces into registers: COUNT / ROWS of each of ROWS rows.
template <int ROWS, bool GATED, int COUNT>
__device__ __forceinline__ void take(Shared& s, Self& self, u32 (&a)[COUNT][4][4]) {
  const int mine = self.place + self.lane;  // a lane waits for one of the places
  if (self.lane < COUNT)
    piece_wait(self.full + (mine >= DEPTH ? mine - DEPTH : mine) * 8, self.round ^ (mine >= DEPTH));
  __syncwarp();
#pragma unroll
  for (int first = 0; first < COUNT; first += ROWS)
    Dots<ROWS, GATED>::load(a, first, self.lane, [&](int i) {
      const int place = self.place + i;
      return self.ring + (place >= DEPTH ? place - DEPTH : place) * PIECE_BYTES;
    });
  __syncwarp();
  self.taken += COUNT;
  if (self.lane == 0) sts_volatile(smem_addr(&s.taken[self.warp]), self.taken);
  self.place += COUNT;
  if (self.place >= DEPTH) {
    self.place -= DEPTH;
    self.round ^= 1;
  }
}

// A matrix of a layer times what `get(x)` puts to x in shared memory, where weights are fetched before.
// `then(y, row)`: y[i] is that of the warp's row `row` + 4 i + lane / 8.
template <int M, class Get, class Then>
__device__ __forceinline__ void times(const Params& p, Shared& s, Self& self, Get&& get, Then&& then) {
  using T = Matrix<M>;
  constexpr bool NORM = M % 2 == 0;
  using Sum = Dots<T::PASS, M == 2>;
  u32 a[T::COUNT][4][4];
  take<T::PASS, M == 2>(s, self, a);
  const u32 x = smem_addr(NORM ? s.narrow : s.wide);
  get(x);
  meet();
  float f = 1.f;
#pragma unroll 1
  for (int row = 0; row < T::ROWS; row += T::PASS) {
    Sum sums;
#pragma unroll 1
    for (int k = 0; k < T::PIECES; k += T::DEEP) {
      if (row + k > 0) take<T::PASS, M == 2>(s, self, a);
#pragma unroll
      for (int i = 0; i < T::DEEP; ++i) sums.add(a, i * T::PASS, x + (k + i) * PIECE_BYTES + self.lane * 16);
    }
    if (NORM && row == 0) f = norm_factor(s.square, p.eps, self.lane);
    float y[T::RESULTS];
    sums.total(self.lane, y);
#pragma unroll
    for (int i = 0; i < T::RESULTS; ++i) y[i] *= f;
    then(y, row);
  }
}

// Tells all copies, by a lane each. The 8 lanes of a group call it with the same `to` and x.
__device__ __forceinline__ void tell_copies(u32* to, float x, u32 tag, int lane) {
  if (lane % 8 < COPIES) tell(to + lane % 8 * COPY_WORDS, x, tag);
}

// --- the step

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + WARPS * DEPTH * PIECE_BYTES);
  Self self;
  self.tid = thread_number();
  const int block = block_number();
  self.warp = self.tid / 32;
  self.lane = self.tid % 32;
  self.set_out(p, s);
  for (int i = self.tid; i < p.count * int(sizeof(Layer) / 8); i += THREADS + 32)
    reinterpret_cast<u64*>(s.layers)[i] = reinterpret_cast<const u64*>(p.layers)[i];
  for (int i = self.tid; i < WARPS * DEPTH; i += THREADS + 32) piece_init(smem_addr(&s.full[0][0]) + i * 8);
  if (self.tid < WARPS) s.taken[self.tid] = 0;
  if (self.warp < WARPS) list_pieces(s, self);
  fence_copies();
  __syncthreads();
  if (self.warp == WARPS) return supply(p, s, self);

  pdl_wait();
  u32 tag = *static_cast<volatile u32*>(p.steps) & 0xff;  // not what the step before left in the L1 cache
  Place at;
  at.head = block % KV_HEADS;
  at.split = block / KV_HEADS;
  at.len = max(p.kv_len[0], 1);
  at.tiles = (at.len + TILE - 1) / TILE;
  at.few = at.tiles <= min(FEW, SPLITS) * WARPS;
  at.blocks = min(at.few ? (at.tiles + WARPS - 1) / WARPS : at.tiles, SPLITS);
  at.pages = p.page_table + (long long)p.slots[0] * p.table_stride;
  const Spots spots = find_spots(p, at, self.warp);
  forget_parts(p, at, tag, self.tid);
  const float4* turns =
      reinterpret_cast<const float4*>(p.cos_sin + (long long)p.positions[0] * HD) + self.lane % 16;
  at.cosine = turns[0];
  at.sine = turns[HD / 8];
  const bf16* token = p.embedding + (long long)p.ids[0] * HIDDEN;
  const int own = self.me * OWN + self.lane / 8;  // and every fourth after it
  const bool tells = self.lane % 8 == 0;
  const u32* heard = p.words + at.split % COPIES * COPY_WORDS;
  float h[(OWN + 3) / 4];  // the residual stream there
  auto tell_h = [&](int words) {
#pragma unroll
    for (int i = 0; i < (OWN + 3) / 4; ++i)
      if (4 * i + self.lane / 8 < OWN) tell_copies(p.words + words + own + 4 * i, h[i], tag, self.lane);
  };
#pragma unroll
  for (int i = 0; i < (OWN + 3) / 4; ++i) h[i] = 4 * i + self.lane / 8 < OWN ? bf2f(token[own + 4 * i]) : 0.f;
  tell_h(END);
  auto copy_h = [&](bf16* to, float f, const float* weight) {
#pragma unroll
    for (int i = 0; i < (OWN + 3) / 4; ++i)
      if (tells && 4 * i + self.lane / 8 < OWN)
        to[own + 4 * i] = f2bf(weight ? h[i] * f * weight[own + 4 * i] : h[i]);
  };

#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer& layer = s.layers[l];
    const u32 before = tag;
    tag = (tag + 1) & 0xff;
#if COPIED
    if (layer.input) copy_h(layer.input, 1.f, nullptr);
#endif
    if (at.split < at.blocks) {  // they are read while others use the memory
      prefetch_to_l2(layer.k + spots.first + self.lane * 64);
      prefetch_to_l2(layer.v + spots.first + self.lane * 64);
    }
    auto get_first = [&](u32 x) {
      receive<HIDDEN, true>(heard + END, before, x, layer.input_norm, s.square, self.tid);
    };
    times<0>(p, s, self, get_first, [&](const float(&y)[Matrix<0>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<0>::RESULTS; ++i)
        if (tells && 4 * i + self.lane / 8 < Matrix<0>::PASS)
          tell(p.words + Exchange::QKV_AT + self.me * Matrix<0>::ROWS + row + 4 * i + self.lane / 8, y[i],
               tag);
    });
    if (block == BLOCKS - 1 && self.tid < HIDDEN / 32) {  // norms soon wanted, which nobody has read yet
      prefetch_to_l2(layer.mlp_norm + self.tid * 32);
      prefetch_to_l2((l + 1 < p.count ? (&layer)[1].input_norm : p.norm) + self.tid * 32);
    }
    if (at.split < at.blocks) {
      attend(p, layer, at, spots, s, tag, self.warp, self.lane);
      meet();
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
    times<1>(p, s, self, get_attended, add);
    tell_h(Exchange::MIDDLE);
    auto get_middle = [&](u32 x) {
      receive<HIDDEN, true>(heard + Exchange::MIDDLE, tag, x, layer.mlp_norm, s.square, self.tid);
    };
    times<2>(p, s, self, get_middle, [&](const float(&y)[Matrix<2>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<2>::RESULTS; ++i) {
        const float z = gate<false>(y[i], __shfl_down_sync(~0u, y[i], 8));
        const int place = self.me * (Matrix<2>::ROWS / 2) + row / 2 + 2 * i + self.lane / 16;
        if (self.lane % 16 < 8 && 4 * i + self.lane / 8 < Matrix<2>::PASS)
          tell_copies(p.words + Exchange::INNER + place, z, tag, self.lane);
      }
    });
    auto get_inner = [&](u32 x) {
      receive<INTER, false>(heard + Exchange::INNER, tag, x, nullptr, nullptr, self.tid);
    };
    times<3>(p, s, self, get_inner, add);
    tell_h(END);
  }

  const u32 x = smem_addr(s.narrow);
  receive<HIDDEN, true>(heard + END, tag, x, p.norm, s.square, self.tid);
  meet();
  pdl_launch();
  const float f = norm_factor(s.square, p.eps, self.lane);
  if (COPIED && p.last) copy_h(p.last, f, p.norm);
#pragma unroll 1
  for (int row = 0; row < self.head_rows; row += 4) {
    Dots<4, false> sums;
    u32 a[4][4][4];
#pragma unroll
    for (int k = 0; k < HEAD_PIECES; ++k) {
      take<4, false>(s, self, a);
      sums.add(a, 0, x + k * PIECE_BYTES + self.lane * 16);
    }
    float y[1];
    sums.total(self.lane, y);
    if (tells) p.logits[self.head_first + row + self.lane / 8] = y[0] * f;
  }
  // All blocks have read the number of steps: every one has told its part of the last layer.
  if (block == 0 && self.tid == 0) *p.steps = tag + 1;
}
