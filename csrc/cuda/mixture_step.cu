// One token of one row through all layers of a mixture of experts, from the embedding to the logits, in a
// single kernel.
//
// As in decode_step.cu a block stays on a multiprocessor, weights run ahead through the warps' rings, and
// what blocks tell each other goes through the L2 cache in words that carry the number of the layer. What
// differs:
//
// Every block keeps the whole residual stream, each thread for its own places, and is told updates. Blocks of
// a KV head multiply its outputs alone by their columns of o, so a block merges and reads one head's share of
// attention, and adds up the KV heads' updates.
//
// A block computes the logit of one expert, and every warp chooses for itself. Only then is it known which
// weights come next.
//
// The chosen experts' inner activations lie behind each other in the order of the choice. A warp has rows of
// one expert's gate and up. Of down, a block has the same rows of all experts, each of its warps one
// expert's.
//
// Several ranks (see one_row.cuh) tell each other's blocks their updates as they tell their own, and all
// choose for themselves.
#ifndef HIDDEN
#define HIDDEN 2048
#endif
#ifndef HEADS
#define HEADS 32
#endif
#ifndef KV_HEADS
#define KV_HEADS 4
#endif
#ifndef INTER  // of an expert, on this rank
#define INTER 768
#endif
#ifndef NORMALIZE  // 1: the probabilities of the chosen experts add up to 1
#define NORMALIZE 1
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
#include "one_row.cuh"

constexpr int EXPERTS = BLOCKS, TOP_K = WARPS, INNER_ALL = TOP_K * INTER;
constexpr int PLACE = 2048, PLACE_BYTES = PLACE * 2, DEPTH = 5;  // weights of a place of the ring; places
constexpr int QKV_ROWS = (QKV + ALL_WARPS - 1) / ALL_WARPS, OUT_COLUMNS = GROUP * HD,
              OUT_ROWS = HIDDEN / SPLITS / WARPS;  // rows of a warp; every second warp has one row of q, k
                                                   // and v less where QKV is no multiple of ALL_WARPS
constexpr int PAIRS = INNER_ALL / ALL_WARPS, EXPERT_WARPS = ALL_WARPS / TOP_K;  // of gate and up; that have
                                                                                // rows of an expert
constexpr int DOWN_ROWS = HIDDEN / BLOCKS;  // of a block
constexpr int OUT_PAIRS = OUT_ROWS / 2, INTER_STEPS = INTER / 128;
// Where updates are: those of each rank's KV heads behind attention, and of each rank behind a layer.
constexpr int MIDDLE = 0, MIDDLE_PARTS = RANKS * KV_HEADS, END = MIDDLE_PARTS * HIDDEN;
constexpr int UPDATES = Exchange::MIDDLE, LOGITS = UPDATES + (RANKS == 1 ? END + HIDDEN : 0),
              INNER = LOGITS + WARPS * EXPERTS;

static_assert(HIDDEN == PLACE && QKV * 2 % ALL_WARPS == 0 && QKV_ROWS % 2 && QKV_ROWS <= DEPTH &&
              OUT_ROWS % 4 == 0 && OUT_COLUMNS == PLACE / 2);
// The places of q, k and v that are read make room for o's.
static_assert(OUT_PAIRS <= (QKV_ROWS == DEPTH ? QKV_ROWS : DEPTH - QKV_ROWS));
static_assert(INTER % 128 == 0 && 2 * PAIRS >= DEPTH && DOWN_ROWS == 16 && 2 * INTER <= PLACE && TOP_K == 8);

struct Layer {
  // [QKV, HIDDEN], [HIDDEN, ATTENDED], [EXPERTS, HIDDEN], [EXPERTS * 2 INTER, HIDDEN], [EXPERTS * HIDDEN,
  // INTER].
  const bf16 *qkv, *out, *router, *gate_up, *down;
  const float *input_norm, *mlp_norm;               // [HIDDEN]
  const float *q_norm, *k_norm;                     // [HD]
  bf16 *k, *v;                                      // pages
#if COPIED
  bf16* input;  // [HIDDEN], of the residual stream in front of it; or none
#endif
};

// Shared memory behind the rings.
struct Shared {
  bf16 narrow[HIDDEN], wide[INNER_ALL];  // inputs of matrices
  float4 stream[2][THREADS];  // the residual stream, a thread's places at 4 tid ... and 4 (tid + THREADS) ...
  float sums[2][WARPS];                  // the warps' shares of the sum of squares, and of the logit
  float down[DOWN_ROWS][WARPS];          // the experts' shares of the update
  float part[WARPS][GROUP][HD];          // unnormalised outputs of the warps' tiles
  float part_ml[WARPS][8][2];            // their maxima and sums
  bf16 q[GROUP][HD], k[HD], v[HD];       // as attention takes them
  Layer layers[MAX_LAYERS];
  u64 full[WARPS][DEPTH];
};

// What a thread knows of itself.
struct Self {
  int tid, warp, lane, me;        // me: the warp's number among all
  u32 ring, full;                 // the warp's places and their barriers
  u64 policy;
  int place = 0;                  // of the ring, the next to read
  u32 round = 0;
};

// --- the ring

__device__ __forceinline__ int wrapped(int place) { return place >= DEPTH ? place - DEPTH : place; }

__device__ __forceinline__ void expect(const Self& self, int place, u32 bytes) {
  barrier_expect(self.full + place * 8, bytes);
}
__device__ __forceinline__ void copy(const Self& self, u32 to, const bf16* from, u32 bytes, int place) {
  copy_bytes(to, from, bytes, self.full + place * 8, self.policy);
}

// The calling lane fills a place.
__device__ __forceinline__ void fill(const Self& self, int place, const bf16* from, u32 bytes = PLACE_BYTES) {
  expect(self, place, bytes);
  copy(self, self.ring + place * PLACE_BYTES, from, bytes, place);
}

// The first row of the output layer that warp `me` has: rows come in pairs.
__device__ __forceinline__ int head_first(const Params& p, int me) {
  return int((long long)(p.vocab / 2) * me / ALL_WARPS) * 2;
}

// The first row of q, k and v that warp `me` has.
__device__ __forceinline__ int qkv_first(int me) { return me * QKV / ALL_WARPS; }

// Place `i` of what the warp reads first in a layer: a row of q, k and v, or of the output layer behind the
// last one, if it has as many.
__device__ __forceinline__ void fill_first(const Params& p, const Shared& s, const Self& self, int layer,
                                           int i, int place) {
  const int row = head_first(p, self.me) + i, first = qkv_first(self.me);
  if (layer < p.count) {
    if (QKV % ALL_WARPS == 0 || i < qkv_first(self.me + 1) - first)
      fill(self, place, s.layers[layer].qkv + (first + i) * HIDDEN);
  } else if (row < head_first(p, self.me + 1)) fill(self, place, p.head + (long long)row * HIDDEN);
}

// Place `i` of the warp's expert's down: two of the block's rows.
__device__ __forceinline__ void fill_down(const Layer& layer, const Self& self, int expert, int i,
                                          int place) {
  fill(self, place, layer.down + (long long)(expert * HIDDEN + self.me / WARPS * DOWN_ROWS + 2 * i) * INTER,
       4 * INTER);
}

// Waits until the next `count` places are full: a lane for each.
__device__ __forceinline__ void await(const Self& self, int count) {
  const int mine = self.place + self.lane;
  if (self.lane < count) piece_wait(self.full + wrapped(mine) * 8, self.round ^ (mine >= DEPTH));
  __syncwarp();
}
__device__ __forceinline__ u32 place_at(const Self& self, int i) {
  return self.ring + wrapped(self.place + i) * PLACE_BYTES;
}
// Goes on behind `count` places, all of which are in registers. Returns the first of them.
__device__ __forceinline__ int leave(Self& self, int count) {
  __syncwarp();
  const int first = self.place;
  self.place += count;
  if (self.place >= DEPTH) {
    self.place -= DEPTH;
    self.round ^= 1;
  }
  return first;
}

// --- products

__device__ __forceinline__ uint4 load_matrix(u32 from) {
  u32 r[4];
  ldmatrix(r, from);
  return {r[0], r[1], r[2], r[3]};
}

// Two weight rows, 128 columns in an element; as the 16 rows of an instruction want them.
template <int COUNT>
__device__ __forceinline__ void load_pair(uint4 (&a)[COUNT], u32 low, u32 high, int lane) {
  const u32 from = (lane & 8 ? high : low) + lane / 16 * 128 + lane % 8 * 16;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) a[i] = load_matrix(from + i * 256);
}

// One row, 256 columns in an element.
template <int COUNT>
__device__ __forceinline__ void load_row(uint4 (&x)[COUNT], u32 from, int lane) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = load_matrix(from + lane * 16 + i * 512);
}

// Adds the products of two weight rows with x to those of a pair of `Sums`.
template <int COUNT, int PIECES, int CHAINS>
__device__ __forceinline__ void add_pair(float (&d)[CHAINS][4], const uint4 (&a)[COUNT],
                                         const uint4 (&x)[PIECES]) {
  static_assert(PIECES == (COUNT + 1) / 2);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const uint4 w = a[i], b = x[i / 2];
    mma(d[i % CHAINS], w.x, w.y, w.z, w.w, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
  }
}

// The same for a single row.
template <int COUNT, int CHAINS>
__device__ __forceinline__ void add_row(float (&d)[CHAINS][4], const uint4 (&a)[COUNT],
                                        const uint4 (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    mma(d[0], a[i].x, a[i].x, a[i].y, a[i].y, x[i].x, x[i].y);
    mma(d[1], a[i].z, a[i].z, a[i].w, a[i].w, x[i].z, x[i].w);
  }
}

// --- the residual stream

// Where all ranks' updates come.
__device__ __forceinline__ const u32* updates(const Params& p) {
#if RANKS > 1
  return p.own;
#else
  return p.words + UPDATES;
#endif
}
// Tells this rank's blocks, and the others', what its part `part` of `parts` at `at` adds at `place`.
__device__ __forceinline__ void tell_update(const Params& p, int at, int parts, int part, int place, float x,
                                            u32 tag) {
#if RANKS > 1
  tell_ranks(p, at + (p.rank * parts + part) * HIDDEN + place, x, tag);
#else
  tell(p.words + UPDATES + at + part * HIDDEN + place, x, tag);
#endif
}

// Adds what words say of PARTS vectors of updates to the thread's places of the stream.
template <int PARTS>
__device__ __forceinline__ void receive_updates(Shared& s, const u32* words, u32 tag, int tid) {
  uint4 got[PARTS][2];
  bool missing[PARTS][2], any;
  u32 tries = 0;
  words += tid * 4;
#pragma unroll
  for (int i = 0; i < PARTS * 2; ++i) missing[i / 2][i % 2] = true;
  do {
    patience(tries);
    any = false;
#pragma unroll
    for (int i = 0; i < PARTS * 2; ++i)
      if (missing[i / 2][i % 2]) got[i / 2][i % 2] = look_far(words + i / 2 * HIDDEN + i % 2 * THREADS * 4);
#pragma unroll
    for (int i = 0; i < PARTS * 2; ++i) any |= missing[i / 2][i % 2] = !fresh(got[i / 2][i % 2], tag);
  } while (any);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 h = s.stream[i][tid];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      h.x += value(got[part][i].x);
      h.y += value(got[part][i].y);
      h.z += value(got[part][i].z);
      h.w += value(got[part][i].w);
    }
    s.stream[i][tid] = h;
  }
}

// The stream times the norm's weight as bf16; the shares of the sum of squares and, with a router's row, of
// its product.
template <bool ROUTER>
__device__ __forceinline__ void put_stream(Shared& s, const Self& self, const float4 (&weight)[2],
                                           const uint2 (&router)[2]) {
  float square = 0.f, dot = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 h = s.stream[i][self.tid];
    const float a = h.x * weight[i].x, b = h.y * weight[i].y, c = h.z * weight[i].z, d = h.w * weight[i].w;
    square += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
    if (ROUTER)
      dot += a * lo2f(router[i].x) + b * hi2f(router[i].x) + c * lo2f(router[i].y) + d * hi2f(router[i].y);
    sts64(smem_addr(s.narrow) + (i * THREADS + self.tid) * 8, pack2(a, b), pack2(c, d));
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    square += __shfl_xor_sync(~0u, square, d);
    if (ROUTER) dot += __shfl_xor_sync(~0u, dot, d);
  }
  if (self.lane == 0) {
    s.sums[0][self.warp] = square;
    if (ROUTER) s.sums[1][self.warp] = dot;
  }
}

// Each thread its places of the stream, times the weight and f.
__device__ __forceinline__ void copy_stream(const Shared& s, bf16* to, const float4 (&weight)[2], float f,
                                            int tid) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 h = s.stream[i][tid], w = weight[i];
    reinterpret_cast<uint2*>(to)[i * THREADS + tid] = {pack2(h.x * f * w.x, h.y * f * w.y),
                                                       pack2(h.z * f * w.z, h.w * f * w.w)};
  }
}

__device__ __forceinline__ float sum_of(const float (&x)[WARPS]) {
  const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
  return a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
}
__device__ __forceinline__ float norm_of(const Shared& s, float eps) {
  return rsqrt_fast(sum_of(s.sums[0]) / HIDDEN + eps);
}

__device__ __forceinline__ void load_norm(float4 (&weight)[2], const float* from, int tid) {
#pragma unroll
  for (int i = 0; i < 2; ++i) weight[i] = __ldg(reinterpret_cast<const float4*>(from) + i * THREADS + tid);
}

// --- the choice

// Waits for the logits, four a lane, as words. Returns the expert and its logit, in lane i the i-th best;
// equal ones go by number.
struct Choice {
  int expert;
  float logit;
};
__device__ __forceinline__ Choice choose(const u32* logits, u32 tag, int lane, uint4& got) {
  u32 tries = 0;
  do {
    patience(tries);
    got = look(logits + lane * 4);
  } while (!fresh(got, tag));
  u32 key[4], best = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 word = word_of(got, i), ordered = int(word) < 0 ? ~word : word | 0x80000000u;
    key[i] = (ordered & 0xffffff00u) | (EXPERTS - 1 - (lane * 4 + i));
  }
  auto order = [&](int i, int j) {
    const u32 more = max(key[i], key[j]);
    key[j] = min(key[i], key[j]);
    key[i] = more;
  };
  order(0, 1); order(2, 3); order(0, 2); order(1, 3); order(1, 2);
#pragma unroll
  for (int i = 0; i < TOP_K; ++i) {
    const u32 most = __reduce_max_sync(~0u, key[0]);
    if (lane == i) best = most;
    if (key[0] == most) {
      key[0] = key[1];
      key[1] = key[2];
      key[2] = key[3];
      key[3] = 0;
    }
  }
  return {EXPERTS - 1 - int(best & 0xff),
          __uint_as_float((best >> 31 ? best ^ 0x80000000u : ~best) & 0xffffff00u)};
}

// The probability of a lane's expert.
__device__ __forceinline__ float probability_of(const Choice& choice, const uint4& logits, int lane) {
  const float top = __shfl_sync(~0u, choice.logit, 0);
  auto weight = [&](float x) { return exp2_fast((x - top) * 1.442695041f); };
  const float mine = lane < TOP_K ? weight(choice.logit) : 0.f;
  float sum = NORMALIZE ? mine
                        : weight(value(logits.x)) + weight(value(logits.y)) + weight(value(logits.z)) +
                              weight(value(logits.w));
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return __fdividef(mine, sum);
}

// --- the parts of a layer

// Has the k and v of this warp's first tile brought to the L2 cache.
__device__ __forceinline__ void fetch_tile(const Params& p, const Layer& layer, const Place& at,
                                           const Self& self) {
  const int tile = first_tile(at, self.warp);
  if (self.lane >= 2 || at.split >= at.blocks || tile >= at.tiles) return;
  const bf16* from = (self.lane ? layer.v : layer.k) + tile_at(p, at, tile);
  fetch_bytes(from, TILE * HD * 2);
}

__device__ __forceinline__ void project(const Params& p, Shared& s, Self& self, int l, u32 tag) {
  const Layer& layer = s.layers[l];
  float4 weight[2];
  load_norm(weight, layer.input_norm, self.tid);
  constexpr int QKV_PAIRS = QKV_ROWS / 2;
  uint4 a[QKV_PAIRS][16], last[8], x[8];
  const int rows = QKV % ALL_WARPS == 0 ? QKV_ROWS : qkv_first(self.me + 1) - qkv_first(self.me);
  await(self, rows);
#pragma unroll
  for (int i = 0; i < QKV_PAIRS; ++i)
    load_pair(a[i], place_at(self, 2 * i), place_at(self, 2 * i + 1), self.lane);
  const u32 odd = place_at(self, QKV_ROWS - 1);
  leave(self, rows);
  const int block = self.me / WARPS, first = block / KV_HEADS * (OUT_ROWS * WARPS) + self.warp * OUT_ROWS;
  if (self.lane < OUT_PAIRS) {
    const int to = wrapped(self.place + self.lane);
    const bf16* from = layer.out + (first + self.lane * 2) * ATTENDED + block % KV_HEADS * OUT_COLUMNS;
    expect(self, to, PLACE_BYTES);
    copy(self, self.ring + to * PLACE_BYTES, from, OUT_COLUMNS * 2, to);
    copy(self, self.ring + to * PLACE_BYTES + OUT_COLUMNS * 2, from + ATTENDED, OUT_COLUMNS * 2, to);
  }
  __syncwarp();
  if (l > 0) receive_updates<RANKS>(s, updates(p) + END, tag - 1 & 0xff, self.tid);
#if COPIED
  const float4 one = {1.f, 1.f, 1.f, 1.f};
  if (layer.input && block == 0) copy_stream(s, layer.input, {one, one}, 1.f, self.tid);
#endif
  put_stream<false>(s, self, weight, {});
  __syncthreads();
  load_row(x, smem_addr(s.narrow), self.lane);
  Sums<QKV_ROWS> sums;
#pragma unroll
  for (int i = 0; i < QKV_PAIRS; ++i) add_pair(sums.sum[i], a[i], x);
  load_row(last, odd, self.lane);
  add_row(sums.sum[QKV_PAIRS], last, x);
  const float f = norm_of(s, p.eps);
  constexpr int RESULTS = (QKV_ROWS + 3) / 4;
  float y[RESULTS];
  sums.total(self.lane, y);
#pragma unroll
  for (int i = 0; i < RESULTS; ++i)
    if (const int row = 4 * i + self.lane / 8; self.lane % 8 == 0 && row < rows)
      tell(p.words + Exchange::QKV_AT + qkv_first(self.me) + row, y[i] * f, tag);
}

__device__ __forceinline__ void project_out(const Params& p, Shared& s, Self& self, const Place& at, int l,
                                            u32 tag, float4 (&weight)[2], uint2 (&router)[2]) {
  const Layer& layer = s.layers[l];
  uint4 a[OUT_PAIRS][8], x[4];
  await(self, OUT_PAIRS);
#pragma unroll
  for (int i = 0; i < OUT_PAIRS; ++i)
    load_pair(a[i], place_at(self, i), place_at(self, i) + OUT_COLUMNS * 2, self.lane);
  leave(self, OUT_PAIRS);
  load_norm(weight, layer.mlp_norm, self.tid);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    router[i] = __ldg(reinterpret_cast<const uint2*>(layer.router + self.me / WARPS * HIDDEN) + i * THREADS +
                      self.tid);
  if (at.few)
    receive_head(p, at, tag, at.head * GROUP + self.warp, smem_addr(s.wide) + self.warp * HD * 2, self.lane);
  else
    receive<OUT_COLUMNS, false>(p.words + Exchange::ATTENDED_AT + at.head * OUT_COLUMNS, tag,
                                smem_addr(s.wide), nullptr, nullptr, self.tid);
  __syncthreads();
  load_row(x, smem_addr(s.wide), self.lane);
  Sums<OUT_ROWS> sums;
#pragma unroll
  for (int i = 0; i < OUT_PAIRS; ++i) add_pair(sums.sum[i], a[i], x);
  float y[OUT_ROWS / 4];
  sums.total(self.lane, y);
#pragma unroll
  for (int i = 0; i < OUT_ROWS / 4; ++i)
    if (self.lane % 8 == 0)
      tell_update(p, MIDDLE, KV_HEADS, at.head,
                  at.split * (OUT_ROWS * WARPS) + self.warp * OUT_ROWS + 4 * i + self.lane / 8, y[i], tag);
}

// The router, the choice, and the inner activations of this warp's rows, times the probability of their
// expert. Returns the expert whose down is this warp's.
__device__ __forceinline__ int expand(const Params& p, Shared& s, Self& self, int l, u32 tag,
                                      const float4 (&weight)[2], const uint2 (&router)[2]) {
  const Layer& layer = s.layers[l];
  receive_updates<MIDDLE_PARTS>(s, updates(p) + MIDDLE, tag, self.tid);
  put_stream<true>(s, self, weight, router);
  __syncthreads();
  const float f = norm_of(s, p.eps);
  // For each warp of a block an own place: a thousand warps at the same few words wait for each other.
  if (self.tid < WARPS)
    tell(p.words + LOGITS + self.tid * EXPERTS + self.me / WARPS, sum_of(s.sums[1]) * f, tag);
  uint4 x[8];
  load_row(x, smem_addr(s.narrow), self.lane);
  uint4 logits;
  const Choice choice = choose(p.words + LOGITS + self.warp * EXPERTS, tag, self.lane, logits);
  const int expert = __shfl_sync(~0u, choice.expert, self.me / EXPERT_WARPS),
            contracted = __shfl_sync(~0u, choice.expert, self.warp);
  const bf16* rows =
      layer.gate_up + ((long long)expert * (2 * INTER) + self.me % EXPERT_WARPS * PAIRS) * HIDDEN;
  auto fill_pair = [&](int i, int place) { fill(self, place, rows + (i / 2 + i % 2 * INTER) * HIDDEN); };
  if (self.lane < DEPTH) fill_pair(self.lane, wrapped(self.place + self.lane));
  __syncwarp();
  const float probability =
      __shfl_sync(~0u, probability_of(choice, logits, self.lane), self.me / EXPERT_WARPS) * f;
#pragma unroll 1
  for (int pair = 0; pair < PAIRS; ++pair) {
    uint4 a[16];
    await(self, 2);
    load_pair(a, place_at(self, 0), place_at(self, 1), self.lane);
    const int place = leave(self, 2), next = DEPTH + 2 * pair + self.lane;
    if (self.lane < 2) {
      const int to = wrapped(place + self.lane);
      if (next < 2 * PAIRS) fill_pair(next, to);
      else fill_down(layer, self, contracted, next - 2 * PAIRS, to);
    }
    __syncwarp();
    Sums<2> sums;
    add_pair(sums.sum[0], a, x);
    float y[1];
    sums.total(self.lane, y);
    const float up = __shfl_down_sync(~0u, y[0], 8) * probability, z = gate<false>(y[0] * f, up);
    if (self.lane == 0) tell(p.words + INNER + self.me * PAIRS + pair, z, tag);
  }
  return contracted;
}

// A warp waits for its expert's inner activations alone, and multiplies the block's rows by them.
__device__ __forceinline__ void contract(const Params& p, Shared& s, Self& self, const Place& at, int l,
                                         u32 tag, int expert) {
  constexpr int REST = DOWN_ROWS / 2 - DEPTH, EACH = INTER_STEPS;
  const Layer& layer = s.layers[l];
  uint4 a[DEPTH][EACH], b[REST][EACH], got[EACH], x[(EACH + 1) / 2];
  await(self, DEPTH);
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    load_pair(a[i], place_at(self, i), place_at(self, i) + INTER * 2, self.lane);
  int place = leave(self, DEPTH);
  if (self.lane < REST) fill_down(layer, self, expert, DEPTH + self.lane, wrapped(place + self.lane));
  if (l + 1 < p.count) fetch_tile(p, s.layers[l + 1], at, self);
  __syncwarp();
  const u32 *words = p.words + INNER + self.warp * INTER + self.lane * 4,
            inner = smem_addr(s.wide + self.warp * INTER);
  u32 tries = 0;
  do {
    patience(tries);
    got[0] = look(words);
  } while (!fresh(got[0], tag));
#pragma unroll
  for (int i = 1; i < EACH; ++i) got[i] = look(words + i * 128);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    while (!fresh(got[i], tag)) {
      patience(tries);
      got[i] = look(words + i * 128);
    }
    sts64(inner + i * 256 + self.lane * 8, pack2(value(got[i].x), value(got[i].y)),
          pack2(value(got[i].z), value(got[i].w)));
  }
  // Not before the activations are there: what has to queue behind many weights takes long.
  if (self.lane < DEPTH - REST) fill_first(p, s, self, l + 1, self.lane, wrapped(place + REST + self.lane));
  __syncwarp();
  load_row(x, inner, self.lane);
  Sums<DOWN_ROWS> sums;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) add_pair(sums.sum[i], a[i], x);
  await(self, REST);
#pragma unroll
  for (int i = 0; i < REST; ++i) load_pair(b[i], place_at(self, i), place_at(self, i) + INTER * 2, self.lane);
  place = leave(self, REST);
  if (self.lane < REST) fill_first(p, s, self, l + 1, DEPTH - REST + self.lane, wrapped(place + self.lane));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < REST; ++i) add_pair(sums.sum[DEPTH + i], b[i], x);
  float y[DOWN_ROWS / 4];
  sums.total(self.lane, y);
  if (self.lane % 8 == 0)
#pragma unroll
    for (int i = 0; i < DOWN_ROWS / 4; ++i) s.down[4 * i + self.lane / 8][self.warp] = y[i];
  __syncthreads();
  if (self.tid < DOWN_ROWS)
    tell_update(p, END, 1, 0, self.me / WARPS * DOWN_ROWS + self.tid, sum_of(s.down[self.tid]), tag);
}

// The output layer behind the last norm.
__device__ __forceinline__ void project_head(const Params& p, Shared& s, Self& self, u32 tag) {
  float4 weight[2];
  load_norm(weight, p.norm, self.tid);
  receive_updates<RANKS>(s, updates(p) + END, tag, self.tid);
  put_stream<false>(s, self, weight, {});
  __syncthreads();
  pdl_launch();
  const float f = norm_of(s, p.eps);
  if (COPIED && p.last && self.me < WARPS) copy_stream(s, p.last, weight, f, self.tid);
  const int first = head_first(p, self.me), rows = head_first(p, self.me + 1) - first;
  uint4 x[8];
  load_row(x, smem_addr(s.narrow), self.lane);
#pragma unroll 1
  for (int row = 0; row < rows; row += 2) {
    uint4 a[16];
    await(self, 2);
    load_pair(a, place_at(self, 0), place_at(self, 1), self.lane);
    const int place = leave(self, 2), next = row + DEPTH + self.lane;
    if (self.lane < 2) fill_first(p, s, self, p.count, next, wrapped(place + self.lane));
    __syncwarp();
    Sums<2> sums;
    add_pair(sums.sum[0], a, x);
    float y[1];
    sums.total(self.lane, y);
    if (self.lane % 8 == 0 && self.lane / 8 < 2) p.logits[first + row + self.lane / 8] = y[0] * f;
  }
}

// --- the step

// What follows from these is to be worked out where it is needed: kept for all layers it would take registers
// from weights.
__device__ __forceinline__ void forget(Self& self, Place& at) {
  asm volatile(""
               : "+r"(self.me), "+r"(self.lane), "+r"(self.warp), "+r"(self.tid), "+r"(self.ring),
                 "+r"(self.full), "+r"(at.head), "+r"(at.split), "+r"(at.blocks));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mixture_step(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + WARPS * DEPTH * PLACE_BYTES);
  Self self;
  self.tid = thread_number();
  const int block = block_number();
  self.warp = self.tid / 32;
  self.lane = self.tid % 32;
  self.me = block * WARPS + self.warp;
  self.ring = smem_addr(smem) + self.warp * (DEPTH * PLACE_BYTES);
  self.full = smem_addr(s.full[self.warp]);
  self.policy = policy_once();
  for (int i = self.tid; i < p.count * int(sizeof(Layer) / 8); i += THREADS)
    reinterpret_cast<u64*>(s.layers)[i] = reinterpret_cast<const u64*>(p.layers)[i];
  for (int i = self.tid; i < WARPS * DEPTH; i += THREADS) piece_init(smem_addr(&s.full[0][0]) + i * 8);
  fence_copies();
  __syncthreads();
  if (self.lane < DEPTH) fill_first(p, s, self, 0, self.lane, self.lane);
  __syncwarp();

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
  const float4* turns =
      reinterpret_cast<const float4*>(p.cos_sin + (long long)p.positions[0] * HD) + self.lane % 16;
  const uint2* token = reinterpret_cast<const uint2*>(p.embedding + (long long)p.ids[0] * HIDDEN) + self.tid;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 x = token[i * THREADS];
    s.stream[i][self.tid] = {lo2f(x.x), hi2f(x.x), lo2f(x.y), hi2f(x.y)};
  }

#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer& layer = s.layers[l];
    tag = (tag + 1) & 0xff;
    forget(self, at);
    project(p, s, self, l, tag);
    if (block == BLOCKS - 1) {  // norms soon wanted, which nobody has read yet
      if (self.tid < HIDDEN / 32) {
        prefetch_to_l2(layer.mlp_norm + self.tid * 32);
        prefetch_to_l2((l + 1 < p.count ? (&layer)[1].input_norm : p.norm) + self.tid * 32);
      }
    }
    forget(self, at);
    if (at.split < at.blocks) {
      at.cosine = __ldg(turns);
      at.sine = __ldg(turns + HD / 8);
      attend(p, layer, at, find_spots(p, at, self.warp), s, tag, self.warp, self.lane);
      __syncthreads();
      tell_part(p, at, s, tag, self.tid);
    }
    if (!at.few) merge_slice(p, at, tag, self.tid);
    forget(self, at);
    float4 weight[2];
    uint2 router[2];
    project_out(p, s, self, at, l, tag, weight, router);
    forget(self, at);
    const int expert = expand(p, s, self, l, tag, weight, router);
    forget(self, at);
    contract(p, s, self, at, l, tag, expert);
  }
  project_head(p, s, self, tag);
  // All blocks have read the number of steps: every one has told its part of the last layer.
  if (block == 0 && self.tid == 0) *p.steps = tag;
}
