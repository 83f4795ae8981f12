// One token of one row through all layers of a decoder, from the embedding to the logits, in a single kernel.
//
// With one row a layer is bound by the memory that holds its weights, and the rest is waiting. So one block
// stays on a multiprocessor for the whole step, and the weights never pause: each warp owns equal parts of
// the rows of every matrix and a further warp copies them, layer after layer, into its ring in shared memory,
// as far ahead as the ring reaches. What the blocks tell each other is small (a vector of activations) and
// goes through the L2 cache without barriers: every word carries the number of the layer in its low 8 bits,
// so who reads a word knows whether it is the one it waits for; 16 bits of mantissa remain. A word is written
// again one layer later, when every block must have read it, because each layer's vectors depend on all words
// of the ones before. All blocks must be on the GPU at once, which holds as long as whatever else runs there
// ends by itself.
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
// Of the layers' weights: 16 (bf16), 8 (e4m3 with a scale for a row) or 4 (``quant/integers.py``).
#ifndef BITS
#define BITS 16
#endif
#ifndef GROUPED  // of 4 bits: channels with one scale and zero: 32, 64 or 128
#define GROUPED 128
#endif
#ifndef PIECE  // weights of a row in a place of the ring; 16 bits: 1024
#define PIECE 1024
#endif
#ifndef INNER_PIECE  // of a row of down
#define INNER_PIECE PIECE
#endif
#ifndef SIDE_BY_SIDE  // most rows that a warp sums at a time
#define SIDE_BY_SIDE 8
#endif
#ifndef FLYING  // pieces of a warp that are on their way at a time
#define FLYING 2
#endif
#include "one_row.cuh"
#include "packed_row.cuh"

__host__ __device__ constexpr int bytes_of(int piece) { return piece / 8 * BITS; }
// Of the constants of a piece, which lie behind it.
__host__ __device__ constexpr int constants_of(int piece) { return BITS == 4 ? piece / GROUPED * 4 : 0; }
constexpr int LARGEST = PIECE > INNER_PIECE ? PIECE : INNER_PIECE;
constexpr int FILLED = bytes_of(LARGEST) + constants_of(LARGEST);
constexpr int HEAD_PIECE = 1024, HEAD_BYTES = HEAD_PIECE * 2;  // of the output layer, which is bf16
constexpr int PLACE_BYTES = FILLED > HEAD_BYTES ? FILLED : HEAD_BYTES;
constexpr int OWN = HIDDEN / ALL_WARPS;  // places of the residual stream that a warp owns
constexpr int WIDE = ATTENDED > INTER ? ATTENDED : INTER;
constexpr int OF_BLOCK = 128 + X_PAD / 2;  // places in shared memory that 128 channels take

static_assert(OWN <= 8 && HIDDEN % ALL_WARPS == 0 && QKV % ALL_WARPS == 0 && INTER % ALL_WARPS == 0 &&
              HIDDEN % PIECE == 0 && ATTENDED % PIECE == 0 && INTER % INNER_PIECE == 0);
static_assert(PIECE % 1024 == 0 && INNER_PIECE % 1024 == 0 && (BITS < 16 || LARGEST == 1024));

struct Layer {
  // Qkv [QKV, HIDDEN], o [HIDDEN, ATTENDED], gate and up [2 INTER, HIDDEN], down [HIDDEN, INTER].
  const char* matrix[4];
  const float *input_norm, *mlp_norm;    // [HIDDEN]
  const float *q_norm, *k_norm;          // [HD]
  const char* constants[4];              // e4m3: float32 [n]; integers: [n, k / GROUPED]
  bf16 *k, *v;                           // pages
};

constexpr int END = Exchange::INNER + INTER;  // in `words`: the residual stream behind a layer

// --- the matrices: which rows are whose, and in which order they are read

// Matrix 0 to 3 of a layer as a warp sees it: ROWS rows of PIECES pieces, of which PASS are summed side by
// side, DEEP pieces at a time. Gate and up have equal parts of a pass, gate the first. Piece FIRST of the
// layer's is the first.
template <int M>
struct Matrix {
  static constexpr int ROWS = M == 0 ? QKV / ALL_WARPS : M == 2 ? 2 * INTER / ALL_WARPS : OWN;
  static constexpr int OF_ROW = M == 3 ? INNER_PIECE : PIECE;  // weights of a piece
  static constexpr int PIECES = (M == 1 ? ATTENDED : M == 3 ? INTER : HIDDEN) / OF_ROW;
  __device__ static constexpr int pass() {
    int most = 1;
    for (int n = 1; n <= SIDE_BY_SIDE; ++n)
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
constexpr int LAYER_PIECES = Matrix<3>::FIRST + OWN * (INTER / INNER_PIECE);
constexpr int HEAD_PIECES = HIDDEN / HEAD_PIECE;
static_assert(DEPTH >= 8 && DEPTH <= LAYER_PIECES && Matrix<1>::PASS == OWN && Matrix<3>::PASS == OWN);
static_assert(DEPTH >= FLYING && (BITS != 8 || Matrix<2>::ROWS <= 32));

// Shared memory behind the rings.
struct Shared {
  bf16 narrow[HIDDEN / 128 * OF_BLOCK], wide[WIDE / 128 * OF_BLOCK];  // inputs of matrices
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
    ring = smem_addr(&s) - (WARPS - warp) * (DEPTH * PLACE_BYTES);
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
    int done;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(done) : "r"(taken) : "memory");
    if (n - done >= DEPTH ||
        (layer < p.count && n >= FLYING && !piece_there(self.full + landing * 8, parity))) {
      __nanosleep(100);
      continue;
    }
    if (n >= FLYING && ++landing == DEPTH) {
      landing = 0;
      parity ^= 1;
    }
    const u32 full = self.full + self.place * 8, to = self.ring + self.place * PLACE_BYTES;
    if (layer < p.count) {
      const u32 entry = s.table[self.warp][i], m = entry >> 29;
      const long long piece = entry & 0x1fffffff;
      const int size = m == 3 ? INNER_PIECE : PIECE, bytes = bytes_of(size), more = constants_of(size);
      barrier_expect(full, bytes + more);
      copy_bytes(to, s.layers[layer].matrix[m] + piece * bytes, bytes, full);
      if (BITS == 4) copy_bytes(to + bytes, s.layers[layer].constants[m] + piece * more, more, full);
      if (++i == LAYER_PIECES) {
        i = 0;
        ++layer;
      }
    } else {
      const int row = i / (4 * HEAD_PIECES) * 4 + i % 4;
      const long long piece = (long long)(self.head_first + row) * HEAD_PIECES + i / 4 % HEAD_PIECES;
      barrier_expect(full, HEAD_BYTES);
      copy_bytes(to, p.head + piece * HEAD_PIECE, HEAD_BYTES, full);
      ++i;
    }
    if (++self.place == DEPTH) self.place = 0;
    ++n;
  }
}

// Waits for the ring's next pieces.
__device__ __forceinline__ void await(const Self& self, int count) {
  const int mine = self.place + self.lane;  // a lane waits for one of the places
  if (self.lane < count)
    piece_wait(self.full + (mine >= DEPTH ? mine - DEPTH : mine) * 8, self.round ^ (mine >= DEPTH));
  __syncwarp();
}
// Where the i-th of them is.
__device__ __forceinline__ u32 piece_at(const Self& self, int i) {
  const int place = self.place + i;
  return self.ring + (place >= DEPTH ? place - DEPTH : place) * PLACE_BYTES;
}
// Goes on behind them: they have been read.
__device__ __forceinline__ void leave(Shared& s, Self& self, int count) {
  __syncwarp();
  self.taken += count;
  if (self.lane == 0)
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(smem_addr(&s.taken[self.warp])), "r"(self.taken)
                 : "memory");
  self.place += count;
  if (self.place >= DEPTH) {
    self.place -= DEPTH;
    self.round ^= 1;
  }
}

// The ring's next pieces of bf16 into registers: COUNT / ROWS of each of ROWS rows.
template <int ROWS, bool GATED, int COUNT>
__device__ __forceinline__ void take(Shared& s, Self& self, u32 (&a)[COUNT][4][4]) {
  await(self, COUNT);
#pragma unroll
  for (int first = 0; first < COUNT; first += ROWS)
    Dots<ROWS, GATED>::load(a, first, self.lane, [&](int i) { return piece_at(self, i); });
  leave(s, self, COUNT);
}

// A matrix of a layer in bf16 times what `get(x)` puts to x in shared memory, where weights are fetched
// before. `then(y, row)`: y[i] is that of the warp's row `row` + 4 i + lane / 8.
template <int M, class Get, class Then>
__device__ __forceinline__ void times_plain(const Params& p, Shared& s, Self& self, Get&& get, Then&& then) {
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
      for (int i = 0; i < T::DEEP; ++i) sums.add(a, i * T::PASS, x + (k + i) * HEAD_BYTES + self.lane * 16);
    }
    if (NORM && row == 0) f = norm_factor(s.square, p.eps, self.lane);
    float y[T::RESULTS];
    sums.total(self.lane, y);
#pragma unroll
    for (int i = 0; i < T::RESULTS; ++i) y[i] *= f;
    then(y, row);
  }
}

// The same in fewer bits.
template <int M, class Get, class Then>
__device__ __forceinline__ void times_packed(const Params& p, Shared& s, Self& self, const Layer& layer,
                                             Get&& get, Then&& then) {
  using T = Matrix<M>;
  constexpr bool NORM = M % 2 == 0;
  constexpr int CHUNKS = T::OF_ROW / CHUNK, BYTES = bytes_of(T::OF_ROW);
  float scale = 1.f;  // of e4m3: that of the warp's row `lane`
  if (BITS == 8 && self.lane < T::ROWS) {
    constexpr int HALF = M == 2 ? T::ROWS / 2 : T::ROWS;
    const int up = self.lane >= HALF, row = self.me * HALF + self.lane - up * HALF + up * INTER;
    scale = __ldg(reinterpret_cast<const float*>(layer.constants[M]) + row) * 1.099511627776e12f;  // 2^40
  }
  const u32 x = smem_addr(NORM ? s.narrow : s.wide);
  get(x);
  meet();
  float f = 1.f;
#pragma unroll 1
  for (int row = 0; row < T::ROWS; row += T::PASS) {
    PackedDots<T::PASS, M == 2> sums;
#pragma unroll 1
    for (int k = 0; k < T::PIECES; ++k) {
      await(self, T::PASS);
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        auto at = [&](int i) { return piece_at(self, i) + c * 512; };
        auto constants = [&](int i) { return piece_at(self, i) + BYTES + c * (CHUNK / GROUPED * 4); };
        sums.add(x + (k * CHUNKS + c) * (CHUNK / 64 * OF_BLOCK), self.lane, at, constants);
      }
      leave(s, self, T::PASS);
    }
    if (NORM && row == 0) f = norm_factor(s.square, p.eps, self.lane);
    float y[T::RESULTS];
    sums.total(self.lane, y);
#pragma unroll
    for (int i = 0; i < T::RESULTS; ++i) {
      y[i] *= f;
      if (BITS == 8) {
        const int of = 4 * i + self.lane / 8;  // of a pass, gate and up in turn
        const int own = M == 2 ? (row + of) / 2 + of % 2 * (T::ROWS / 2) : row + of;
        y[i] *= __shfl_sync(~0u, scale, own % 32);
      }
    }
    then(y, row);
  }
}

template <int M, class Get, class Then>
__device__ __forceinline__ void times(const Params& p, Shared& s, Self& self, const Layer& layer, Get&& get,
                                      Then&& then) {
  if constexpr (BITS == 16) times_plain<M>(p, s, self, get, then);
  else times_packed<M>(p, s, self, layer, get, then);
}

// --- the step

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + WARPS * DEPTH * PLACE_BYTES);
  Self self;
  int block;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(self.tid));  // volatile: or it is asked for again and again
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
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
  u32 tag = *p.steps & 0xff;
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
  float h[(OWN + 3) / 4];  // the residual stream there
  auto tell_h = [&](int words) {
#pragma unroll
    for (int i = 0; i < (OWN + 3) / 4; ++i)
      if (tells && 4 * i + self.lane / 8 < OWN) tell(p.words + words + own + 4 * i, h[i], tag);
  };
#pragma unroll
  for (int i = 0; i < (OWN + 3) / 4; ++i) h[i] = 4 * i + self.lane / 8 < OWN ? bf2f(token[own + 4 * i]) : 0.f;
  tell_h(END);

#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer& layer = s.layers[l];
    const u32 before = tag;
    tag = (tag + 1) & 0xff;
    if (at.split < at.blocks) {  // they are read while others use the memory
      asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.k + spots.first + self.lane * 64));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.v + spots.first + self.lane * 64));
    }
    auto get_first = [&](u32 x) {
      receive<HIDDEN, true, Put>(p.words + END, before, x, layer.input_norm, s.square, self.tid);
    };
    times<0>(p, s, self, layer, get_first, [&](const float(&y)[Matrix<0>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<0>::RESULTS; ++i)
        if (tells && 4 * i + self.lane / 8 < Matrix<0>::PASS)
          tell(p.words + Exchange::QKV_AT + self.me * Matrix<0>::ROWS + row + 4 * i + self.lane / 8, y[i],
               tag);
    });
    if (block == BLOCKS - 1 && self.tid < HIDDEN / 32) {  // norms soon wanted, which nobody has read yet
      asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.mlp_norm + self.tid * 32));
      asm volatile("prefetch.global.L2 [%0];" ::"l"((l + 1 < p.count ? (&layer)[1].input_norm : p.norm) +
                                                    self.tid * 32));
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
      if (at.few) receive_parts<Put>(p, at, tag, x, self.warp, self.lane);
      else receive<ATTENDED, false, Put>(p.words + Exchange::ATTENDED_AT, tag, x, nullptr, nullptr, self.tid);
    };
    times<1>(p, s, self, layer, get_attended, add);
    tell_h(Exchange::MIDDLE);
    auto get_middle = [&](u32 x) {
      receive<HIDDEN, true, Put>(p.words + Exchange::MIDDLE, tag, x, layer.mlp_norm, s.square, self.tid);
    };
    times<2>(p, s, self, layer, get_middle, [&](const float(&y)[Matrix<2>::RESULTS], int row) {
#pragma unroll
      for (int i = 0; i < Matrix<2>::RESULTS; ++i) {
        const float z = gate<false>(y[i], __shfl_down_sync(~0u, y[i], 8));
        if (self.lane % 16 == 0 && 4 * i + self.lane / 8 < Matrix<2>::PASS)
          tell(p.words + Exchange::INNER + self.me * (Matrix<2>::ROWS / 2) + row / 2 + 2 * i + self.lane / 16,
               z, tag);
      }
    });
    auto get_inner = [&](u32 x) {
      receive<INTER, false, Put>(p.words + Exchange::INNER, tag, x, nullptr, nullptr, self.tid);
    };
    times<3>(p, s, self, layer, get_inner, add);
    tell_h(END);
  }

  const u32 x = smem_addr(s.narrow);
  receive<HIDDEN, true>(p.words + END, tag, x, p.norm, s.square, self.tid);
  meet();
  pdl_launch();
  const float f = norm_factor(s.square, p.eps, self.lane);
#pragma unroll 1
  for (int row = 0; row < self.head_rows; row += 4) {
    Dots<4, false> sums;
    u32 a[4][4][4];
#pragma unroll
    for (int k = 0; k < HEAD_PIECES; ++k) {
      take<4, false>(s, self, a);
      sums.add(a, 0, x + k * HEAD_BYTES + self.lane * 16);
    }
    float y[1];
    sums.total(self.lane, y);
    if (tells) p.logits[self.head_first + row + self.lane / 8] = y[0] * f;
  }
  // All blocks have read the number of steps: every one has told its part of the last layer.
  if (block == 0 && self.tid == 0) *p.steps = tag + 1;
}
