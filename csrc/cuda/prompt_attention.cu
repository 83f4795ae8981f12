// Causal attention of prompts, on `wgmma`.
//
// A tile is some tokens of one row with all query heads of one KV head, 128 (token, head) rows, against every
// key up to them, the last keys first. Blocks stay and take tiles by turns. Four warps feed the rings of keys
// and values with the copy engine, from pages, 16 tokens at a time, or from where the projection left them.
// Two groups of warps multiply 64 rows each: the scores of the next keys and the values of these are issued
// together, and while one group's are computed, the other has its softmax (as FlashAttention 3, Shah et al.,
// 2024). The first scores of a tile go with the last values of the one before, so products never pause.
//
// Few tiles behind long histories would leave multiprocessors idle, so a tile may be cut into parts, each
// with some of its keys. Their sums go to memory, and `merge_parts` makes one result of them.
//
// CHUNKED, a token's result is the same bits whatever else there is: all keys are cut at the same places, a
// block goes through the chunks of its tile one after another, the last ones first, and joins their sums as
// it goes. DECODE: tiles of one token, whose parts, chunks too, go to several blocks; merged in that order
// they give the same bits.
//
// WHOLE: of texts that lie behind each other with their keys and values every token sees all of its own, as
// in towers of pictures.
//
// FP8: pages of e4m3. They come into rings of their own, from which three warps make fp16 of them, which is
// exact, for the rings that are multiplied; q and the weights are fp16 then, too.
#include "wgmma.cuh"

#ifndef HD  // 64 or 128; WHOLE: a multiple of 8 up to 128
#define HD 128
#endif
#ifndef GROUP  // query heads of a KV head
#define GROUP 4
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef FP8
#define FP8 0
#endif
#ifndef CHUNKED
#define CHUNKED 0
#endif
#ifndef DECODE
#define DECODE 0
#endif
#ifndef WHOLE
#define WHOLE 0
#endif

constexpr int GROUPS = DECODE ? 1 : 2;  // of warps that multiply
// Of a tile; its tokens; keys of a stage.
constexpr int ROWS = GROUPS * 64, QUERIES = DECODE ? 1 : ROWS / GROUP, BN = 128;
constexpr int HALVES = (HD + 63) / 64;     // a row of shared memory has 64 columns, zeros behind the last one
constexpr int WIDTH = (HD + 15) / 16 * 16;  // columns of products
constexpr int Q_HALF = ROWS * 128, Q_BYTES = HALVES * Q_HALF, KV_HALF = BN * 128, KV_BYTES = HALVES * KV_HALF;
constexpr float NEVER = -1e30f;  // the score of a key that is not seen
constexpr int PIECE = 16, PIECES = BN / PIECE;  // tokens of a copy out of a page
// The last group loads, and gives up its registers if there are not enough.
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
// A part: sums of values, [USED][HD]; maxima of scores, [USED]; sums of weights, [USED].
constexpr int USED = DECODE ? GROUP : ROWS, PART = USED * (HD + 2);
constexpr int RAW = 2, RAW_BYTES = FP8 ? BN * HD : 0;  // FP8: stages of pages as they are, of k or v
constexpr int MAKERS = FP8 ? 3 : 1;  // arrivals that fill a stage
constexpr int KEPT = HD / 2 + 4;  // floats that a thread keeps of the chunks so far
constexpr int MERGERS = 256, SHARES = DECODE ? 1 : 4;  // threads of a block, blocks that share a tile's rows

struct Params {
  TensorMap q;                   // dims: column, head, token
  TensorMap k, v;                // dims: column, token of a head of a page, and what lies between pages
  TensorMap k_beside, v_beside;  // dims: column of all KV heads, token; WHOLE: as of q
  bf16* out;                     // [T, Hq * HD]
  const int* page_table;
  // Slot (-1: keys and values lie beside q; WHOLE: how many keys), first token in q, its position, tokens;
  // the longest first.
  const int4* tiles;   // merge_parts: first token in q, tokens, first part, parts
  const int4* parts;   // null, or of each tile: its first and last block of keys, its part (-1: all keys)
  const int* order;    // null, or of each turn what each block does: a tile times heads and a head, or -1
  float* sums;         // of parts: [part][KV heads][PART]; CHUNKED: [blocks][KEPT][CONSUMERS]
  int tile_count, table_stride, kv_heads, page_size;
  float scale;  // with log2(e)
  int chunk;    // CHUNKED: blocks of keys
  float v_scale;  // of the pages' values
  int turns;      // of `order`
  int page_rows;  // tokens of a head between the beginnings of pages
};

__device__ __forceinline__ void copy_q(u32 to, const TensorMap& map, u32 bar, int column, int head,
                                       int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
               "{%3, %4, %5}], [%2];"
               ::"r"(to), "l"(&map), "r"(bar), "r"(column), "r"(head), "r"(token) : "memory");
}

// s += q k^T, s = q k^T of 64 rows of q, in registers, and 128 keys.
#if FP8
#define FACTORS "f16.f16"
#else
#define FACTORS "bf16.bf16"
#endif
__device__ __forceinline__ void wgmma_held(float (&d)[BN / 2], const u32 (&q)[4], u64 k) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." FACTORS " {" S8
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
               : D_8("+f") : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k));
}
__device__ __forceinline__ void wgmma_held_first(float (&d)[BN / 2], const u32 (&q)[4], u64 k) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." FACTORS " {" S8
               "}, {%64,%65,%66,%67}, %68, 0, 1, 1, 0;"
               : D_8("=f") : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k));
}
// d += weights v.
__device__ __forceinline__ void wgmma_values(float (&d)[WIDTH / 2], const u32 (&w)[4], u64 v) {
#if !FP8
  wgmma_registers(d, w, v);
#elif HD == 128
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" S8
               "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : D_8("+f") : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(v));
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" S4
               "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : D_4("+f") : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(v));
#endif
}

// What is multiplied, of two floats and of two of bf16.
__device__ __forceinline__ u32 pack_half(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 packed(float lo, float hi) { return FP8 ? pack_half(lo, hi) : pack2(lo, hi); }
// Four of e4m3 as fp16.
__device__ __forceinline__ uint2 halves_of(u32 x) {
  uint2 r;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(r.x), "=r"(r.y) : "r"(x));
  return r;
}

// Shared memory: q, rings of keys and values, barriers.
struct Shared {
  u32 q, k, v, k_raw, v_raw, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  u32 k_raw_full, k_raw_empty, v_raw_full, v_raw_empty;
  __device__ __forceinline__ Shared(u32 base) {
    q = (base + 1023) & ~1023u, k = q + Q_BYTES, v = k + STAGES * KV_BYTES;
    k_raw = v + STAGES * KV_BYTES, v_raw = k_raw + RAW * RAW_BYTES;
    q_full = v_raw + RAW * RAW_BYTES, q_empty = q_full + 8;
    k_full = q_empty + 8, k_empty = k_full + STAGES * 8, v_full = k_empty + STAGES * 8,
    v_empty = v_full + STAGES * 8;
    k_raw_full = v_empty + STAGES * 8, k_raw_empty = k_raw_full + RAW * 8,
    v_raw_full = k_raw_empty + RAW * 8, v_raw_empty = v_raw_full + RAW * 8;
  }
};

// The block's tile of this number: what `order` says, or all go through the list to and fro, so that each
// gets long and short ones. CHUNKED: a chunk of it.
struct Work {
  int number, slot, token, start, count, head, first = 0, last, part = -1;  // first, last: blocks of keys
  __device__ __forceinline__ Work(const Params& p, int number) : number(number) {
    int at = number * gridDim.x + (number % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (p.order) at = number < p.turns ? p.order[number * gridDim.x + blockIdx.x] : -1;
    const bool there = 0 <= at && at < p.tile_count * p.kv_heads;
    const int4 tile = there ? p.tiles[at / p.kv_heads] : int4{0, 0, 0, 0};
    slot = tile.x, token = tile.y, start = tile.z, count = tile.w, head = at % p.kv_heads;
    last = (end() - 1) / BN;
    if (p.parts && count) {
      const int4 own = p.parts[at / p.kv_heads];
      first = own.x, last = own.y, part = own.z;
    }
    if (CHUNKED) first = last / p.chunk * p.chunk;
  }
  __device__ __forceinline__ int end() const { return WHOLE ? slot : start + count; }  // of keys
  // CHUNKED: whether the tile has chunks that came before this one, and whether some are to come.
  __device__ __forceinline__ bool goes_on() const { return CHUNKED && last < (end() - 1) / BN; }
  __device__ __forceinline__ bool ends() const { return !CHUNKED || first == 0; }
  __device__ __forceinline__ Work next(const Params& p) const {
    if (ends()) return Work(p, number + 1);
    Work before = *this;
    before.last = first - 1, before.first = first - p.chunk;
    return before;
  }
};

// Sums of a row over some keys: of weights, which are powers of 2 of scores less `top`, and of values times
// weights. They are joined with those over keys before.
struct Join {
  float top, old, now;
  __device__ __forceinline__ Join(float a, float b, float scale) : top(fmaxf(a, b)) {
    old = exp2_fast((a - top) * scale), now = exp2_fast((b - top) * scale);
  }
  __device__ __forceinline__ float operator()(float a, float b) const {
    return __fmaf_rn(a, old, __fmul_rn(b, now));
  }
};

// What lies behind the end stays as it is. An order to the copy engine takes a warp 60 cycles or more, and a
// stage of pages has 32 of them for 2700 cycles of products. So each of four warps has keys or values, and a
// half of their columns; its lanes copy 16 tokens each.
template <bool VALUES>
struct Loader {
  const Params& p;
  const Shared& shared;
  const int half, lane = threadIdx.x % 32;
  Slot<STAGES> slot;
  Slot<RAW> there;

  __device__ __forceinline__ void run() {
    pdl_wait();  // the tiles and the table are older than the kernel before
    pdl_launch();
    Work work(p, 0);
    for (int item = 0; work.count; ++item, work = work.next(p)) {
      if (!VALUES && half == 0) fetch_q(work, item);
      if (FP8) raw(work);
      else if (WHOLE || work.slot < 0) beside(work);
      else pages(work);
    }
  }

  __device__ __forceinline__ void fetch_q(const Work& work, int item) {
    barrier_wait(shared.q_empty, item % 2 ^ 1);
    if (lane) return;
    barrier_expect(shared.q_full, HALVES * GROUP * QUERIES * 128);
    for (int h = 0; h < HALVES; ++h)
      copy_q(shared.q + h * Q_HALF, p.q, shared.q_full, h * 64, work.head * GROUP, work.token);
  }

  // FP8: 16 tokens of a page are a copy, of k by the first lanes and of v by the next.
  __device__ __forceinline__ void raw(const Work& work) {
    const int piece = lane % PIECES * PIECE, end = lane < 2 * PIECES ? work.end() : 0;
    const bool values = lane >= PIECES;
    const int* pages = p.page_table + (long long)work.slot * p.table_stride;
    const auto page_of = [&](int token) {
      return token >= 0 && token < end ? pages[token / p.page_size] : 0;
    };
    const u32 raw_full = values ? shared.v_raw_full : shared.k_raw_full;
    int page = page_of(work.last * BN + piece);
    for (int block = work.last; block >= work.first; --block) {
      const int token = block * BN + piece, next = page_of(token - BN);
      const int bytes = min(PIECES, (work.end() - block * BN + PIECE - 1) / PIECE) * (PIECE * HD);
      const int row = page * p.page_rows + work.head * p.page_size + token % p.page_size;
      const u32 to = (values ? shared.v_raw : shared.k_raw) + there.stage * RAW_BYTES + piece * HD;
      barrier_wait(shared.k_raw_empty + there.stage * 8, there.parity ^ 1);
      barrier_wait(shared.v_raw_empty + there.stage * 8, there.parity ^ 1);
      if (lane == 0) barrier_expect(shared.k_raw_full + there.stage * 8, bytes);
      if (lane == 0) barrier_expect(shared.v_raw_full + there.stage * 8, bytes);
      __syncwarp();
      if (token < end) copy_2d(to, values ? p.v : p.k, raw_full + there.stage * 8, 0, row);
      page = next, there.next();
    }
  }

  __device__ __forceinline__ void beside(const Work& work) {
    const TensorMap& map = VALUES ? p.v_beside : p.k_beside;
    const int column = (WHOLE ? 0 : work.head * HD) + half * 64;
    for (int block = work.last; block >= work.first; --block, slot.next()) {
      const int token = work.token - work.start + block * BN;
      const u32 to = stage(), bar = expect(KV_BYTES);
      if (lane || half >= HALVES) continue;
      if (WHOLE) copy_q(to, map, bar, column, work.head, token);
      else copy_2d(to, map, bar, column, token);
    }
  }

  __device__ __forceinline__ void pages(const Work& work) {
    const TensorMap& map = VALUES ? p.v : p.k;
    const int piece = lane % PIECES * PIECE, end = lane < PIECES && half < HALVES ? work.end() : 0;
    const int* pages = p.page_table + (long long)work.slot * p.table_stride;
    const auto page_of = [&](int token) {
      return token >= 0 && token < end ? pages[token / p.page_size] : 0;
    };
    int page = page_of(work.last * BN + piece);
    for (int block = work.last; block >= work.first; --block, slot.next()) {
      const int token = block * BN + piece, next = page_of(token - BN);
      const int bytes = min(PIECES, (work.end() - block * BN + PIECE - 1) / PIECE) * (HALVES * PIECE * 128);
      const int row = page * p.page_rows + work.head * p.page_size + token % p.page_size;
      const u32 to = stage() + piece * 128, bar = expect(bytes);
      if (token < end) copy_2d(to, map, bar, half * 64, row);
      page = next;
    }
  }

  // Where this warp's half goes.
  __device__ __forceinline__ u32 stage() const {
    return (VALUES ? shared.v : shared.k) + slot.stage * KV_BYTES + half * KV_HALF;
  }
  // Wait until the stage is empty. One of the warps that fill it says how much will come. Its barrier.
  __device__ __forceinline__ u32 expect(int bytes) {
    const u32 bar = (VALUES ? shared.v_full : shared.k_full) + slot.stage * 8;
    barrier_wait((VALUES ? shared.v_empty : shared.k_empty) + slot.stage * 8, slot.parity ^ 1);
    if (half == 0 && lane == 0) barrier_expect(bar, bytes);
    __syncwarp();
    return bar;
  }
};

// FP8: a warp makes fp16 of a third of each stage, a lane of one token 16 values at a time.
struct Maker {
  const Params& p;
  const Shared& shared;
  const int warp, lane = threadIdx.x % 32;
  Slot<STAGES> slot;
  Slot<RAW> there;

  __device__ __forceinline__ void run() {
    Work work(p, 0);
    for (; work.count; work = work.next(p))
      for (int block = work.last; block >= work.first; --block, slot.next(), there.next()) {
        make(shared.k_raw, shared.k_raw_full, shared.k_raw_empty, shared.k, shared.k_full, shared.k_empty);
        make(shared.v_raw, shared.v_raw_full, shared.v_raw_empty, shared.v, shared.v_full, shared.v_empty);
      }
  }

  __device__ __forceinline__ void make(u32 raw, u32 raw_full, u32 raw_empty, u32 made, u32 full, u32 empty) {
    constexpr u32 CHUNKS = HD / 16, COUNT = BN / 32 * CHUNKS;  // of a token; of 32 tokens each
    barrier_wait(raw_full + there.stage * 8, there.parity);
    barrier_wait(empty + slot.stage * 8, slot.parity ^ 1);
    // As the copy engine swizzles rows of 128 bytes, and of 64.
    const u32 turn = HD == 128 ? lane % 8 : lane / 2 % 4, swap = lane % 8;
    const u32 from = raw + there.stage * RAW_BYTES + lane * HD,
              to = made + slot.stage * KV_BYTES + lane * 128;
    const auto load = [&](u32 i) {
      return lds128(from + i / CHUNKS * (32 * HD) + (i % CHUNKS ^ turn) * 16);
    };
    uint4 next = load(warp);
#pragma unroll 2
    for (u32 i = warp; i < COUNT; i += MAKERS) {
      const uint4 x = next;
      if (i + MAKERS < COUNT) next = load(i + MAKERS);  // while this one is made
      const uint2 a = halves_of(x.x), b = halves_of(x.y), c = halves_of(x.z), d = halves_of(x.w);
      const u32 row = to + i / CHUNKS * (32 * 128) + i % CHUNKS / 4 * KV_HALF, first = i % 4 * 2 ^ swap;
      sts128(row + first * 16, make_uint4(a.x, a.y, b.x, b.y));
      sts128(row + (first ^ 1) * 16, make_uint4(c.x, c.y, d.x, d.y));
    }
    fence_shared();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(raw_empty + there.stage * 8);
      barrier_arrive(full + slot.stage * 8);
    }
  }
};

// The lane's two rows of scores: a number not far below their maxima so far, and their sums by this lane.
struct Softmax {
  float top[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f}, fade[2];
  // s becomes 2^(scale (s - top)); `fade`: what earlier sums are to be multiplied by. Returns whether that
  // changes any.
  __device__ __forceinline__ bool apply(float (&s)[BN / 2], float scale) {
    bool fades = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
      for (int i = 4 + 2 * r; i < BN / 2; i += 4) even = fmaxf(even, s[i]), odd = fmaxf(odd, s[i + 1]);
      float most = fmaxf(even, odd);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const bool grown = (most - top[r]) * scale > 8.f;  // less fits into float32 as well
      fade[r] = grown ? exp2_fast((top[r] - most) * scale) : 1.f;
      if (grown) top[r] = most;
      fades |= grown;
      const float base = top[r] == NEVER ? 0.f : top[r] * scale;
      float part = 0.f;
#pragma unroll
      for (int i = 2 * r; i < BN / 2; i += 4) {
        s[i] = exp2_fast(fmaf(s[i], scale, -base)), s[i + 1] = exp2_fast(fmaf(s[i + 1], scale, -base));
        part += s[i] + s[i + 1];
      }
      sum[r] = fmaf(sum[r], fade[r], part);
    }
    return __any_sync(~0u, fades);
  }
};

// Four warps with 64 rows of each tile.
struct Rows {
  const Params& p;
  const Shared& shared;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  Slot<STAGES> k, v;
  u32 q[WIDTH / 16][4], weights[BN / 16][4];
  float s[BN / 2], o[WIDTH / 2];
  Softmax softmax;

  __device__ __forceinline__ void run() {
    if (DECODE || WHOLE) pdl_wait();  // the tiles are made by a kernel shortly before
    int item = 0;
    Work work(p, 0);
    if (!work.count) return;
    if (group == 1) yield();
    fetch_q(item);
    barrier_wait(shared.k_full, 0);
    wgmma_fence();
    multiply();
    wgmma_wait<0>(s);
    release(shared.k_empty, k);
    release_q();
    mask(work, work.last);
    softmax.apply(s, p.scale);
    begin(work);
    while (true) {
      const Work next = work.next(p);
      int block = work.last;
      // Tokens may lie in two blocks of keys.
      while (!WHOLE && block > work.first && block * BN > work.start)
        --block, step<true, false>(work, work, block);
      while (block > work.first) --block, step<false, false>(work, work, block);
      if (!next.count) break;
      fetch_q(++item);
      step<true, true>(next, work, next.last);
      begin(next);
      work = next;
    }
    barrier_wait(shared.v_full + v.stage * 8, v.parity);
    wgmma_fence();
    weigh();
    wgmma_wait<0>(o);
    store(work, softmax);
  }

  // Scores of a block of keys and, behind them, the values of the one before. FIRST: of the next tile.
  template <bool MASKED, bool FIRST>
  __device__ __forceinline__ void step(const Work& work, const Work& before, int block) {
    barrier_wait(shared.k_full + k.stage * 8, k.parity);
    barrier_wait(shared.v_full + v.stage * 8, v.parity);
    if (GROUPS > 1) meet_at<256>(1 + group);
    wgmma_fence();
    multiply();
    weigh();
    yield();
    wgmma_wait<1>(s);
    release(shared.k_empty, k);
    if (FIRST) release_q();
    const Softmax done = softmax;
    if (FIRST) softmax = Softmax();
    if (MASKED) mask(work, block);
    const bool fades = softmax.apply(s, p.scale);
    if (FIRST) {
      wgmma_wait<0>(o);
      release(shared.v_empty, v);
      store(before, done);
      return;
    }
    if (fades) {  // two waits, or the compiler puts one before the exponentials
      wgmma_wait<0>(o);
#pragma unroll
      for (int j = 0; j < WIDTH / 2; ++j) o[j] *= softmax.fade[j / 2 & 1];
    } else {
      wgmma_wait<0>(o);
    }
    release(shared.v_empty, v);
    pack();
  }

  __device__ __forceinline__ void yield() {
    if (GROUPS > 1) arrive_at<256>(2 - group);
  }

  __device__ __forceinline__ void fetch_q(int item) {
    barrier_wait(shared.q_full, item % 2);
    const u32 row = shared.q + (threadIdx.x / 32 * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i)
      ldmatrix(q[i], row + i / 4 * Q_HALF + ((i % 4 * 2 + lane / 16) ^ (lane % 8)) * 16);
    if (FP8)
#pragma unroll
      for (int i = 0; i < HD / 16 * 4; ++i)
        q[i / 4][i % 4] = pack_half(lo2f(q[i / 4][i % 4]), hi2f(q[i / 4][i % 4]));
  }
  // Once the first product is done: an arrival may overtake the loads, which queue behind the stores of the
  // tile before.
  __device__ __forceinline__ void release_q() {
    if (lane == 0) barrier_arrive(shared.q_empty);
  }

  __device__ __forceinline__ void multiply() {  // s = q k^T
    const u32 keys = shared.k + k.stage * KV_BYTES;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
      const u64 b = tile_at(keys + i / 4 * KV_HALF + i % 4 * 32);
      if (i) wgmma_held(s, q[i], b);
      else wgmma_held_first(s, q[i], b);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void weigh() {  // o += weights v
    const u32 values = shared.v + v.stage * KV_BYTES;
#pragma unroll
    for (int j = 0; j < BN / 16; ++j)
      wgmma_values(o, weights[j], tile_at(values + j * (16 * 128), KV_HALF));
    wgmma_commit();
  }

  __device__ __forceinline__ void release(u32 empty, Slot<STAGES>& slot) {
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + slot.stage * 8);
    slot.next();
  }

  __device__ __forceinline__ int row() const { return threadIdx.x / 32 * 16 + lane / 4; }

  __device__ __forceinline__ void mask(const Work& work, int block) {
    const int from = (WHOLE ? work.end() - 1 : work.start) - block * BN - lane % 4 * 2;
    const int most[2] = {WHOLE ? from : from + row() / GROUP, WHOLE ? from : from + (row() + 8) / GROUP};
#pragma unroll
    for (int j = 0; j < BN / 2; ++j)
      if (j / 4 * 8 + (j & 1) > most[j / 2 & 1]) s[j] = NEVER;
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < BN / 4; ++j) weights[j / 4][j % 4] = packed(s[j * 2], s[j * 2 + 1]);
  }

  // A tile's first scores are weights now. Values behind the last token may be anything: each group clears
  // them for itself.
  __device__ __forceinline__ void begin(const Work& work) {
#pragma unroll
    for (int j = 0; j < WIDTH / 2; ++j) o[j] = 0.f;
    pack();
    const int from = work.end() % BN;
    if (from == 0 || work.last * BN + BN < work.end()) return;
    barrier_wait(shared.v_full + v.stage * 8, v.parity);
    for (int i = threadIdx.x % 128; i < (BN - from) * 8 * HALVES; i += 128) {
      const int half = i / ((BN - from) * 8), chunk = i % ((BN - from) * 8);
      sts128(shared.v + v.stage * KV_BYTES + half * KV_HALF + from * 128 + chunk * 16,
             make_uint4(0, 0, 0, 0));
    }
    fence_shared();
    meet_at<128>(3 + group);
  }

  __device__ __forceinline__ void store(const Work& work, const Softmax& done) {
    // CHUNKED: what this thread keeps.
    float* kept = p.sums + (long long)blockIdx.x * (KEPT * CONSUMERS) + threadIdx.x;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = done.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (CHUNKED && (work.goes_on() || !work.ends())) {
        float top = done.top[r];
        float *most = kept + (HD / 2 + r) * CONSUMERS, *all = most + 2 * CONSUMERS;
        if (work.goes_on()) {
          const Join join(*most, top, p.scale);
          top = join.top, sum = join(*all, sum);
#pragma unroll
          for (int j = 0; j < HD / 2; ++j)
            if (j / 2 % 2 == r) o[j] = join(kept[j * CONSUMERS], o[j]);
        }
        if (!work.ends()) {
          *most = top, *all = sum;
#pragma unroll
          for (int j = 0; j < HD / 2; ++j)
            if (j / 2 % 2 == r) kept[j * CONSUMERS] = o[j];
          continue;
        }
      }
      const int query = (row() + 8 * r) / GROUP;
      if (query >= work.count) continue;
      if (work.part >= 0) {
        float* part = p.sums + ((long long)work.part * p.kv_heads + work.head) * PART;
        const int at = row() + 8 * r;
        float2* values = reinterpret_cast<float2*>(part + at * HD) + lane % 4;
#pragma unroll
        for (int j = 0; j < HD / 8; ++j) values[j * 4] = {o[j * 4 + 2 * r], o[j * 4 + 2 * r + 1]};
        if (lane % 4 == 0) part[USED * HD + at] = done.top[r], part[USED * HD + USED + at] = sum;
        continue;
      }
      const long long to =
          (long long)(work.token + query) * p.kv_heads * GROUP + work.head * GROUP + (row() + 8 * r) % GROUP;
      u32* words = reinterpret_cast<u32*>(p.out + to * HD) + lane % 4;
      const float part = p.v_scale * __fdividef(1.f, sum);
#pragma unroll
      for (int j = 0; j < HD / 8; ++j)
        words[j * 4] = pack2(o[j * 4 + 2 * r] * part, o[j * 4 + 2 * r + 1] * part);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt_attention(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const Shared shared(smem_addr(smem));
  if (threadIdx.x == 0) {
    barrier_init(shared.q_full, 1);
    barrier_init(shared.q_empty, CONSUMERS / 32);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared.k_full + i * 8, MAKERS);
      barrier_init(shared.v_full + i * 8, MAKERS);
      barrier_init(shared.k_empty + i * 8, CONSUMERS / 128);
      barrier_init(shared.v_empty + i * 8, CONSUMERS / 128);
    }
    for (int i = 0; FP8 && i < RAW; ++i) {
      barrier_init(shared.k_raw_full + i * 8, 1);
      barrier_init(shared.v_raw_full + i * 8, 1);
      barrier_init(shared.k_raw_empty + i * 8, MAKERS);
      barrier_init(shared.v_raw_empty + i * 8, MAKERS);
    }
    barriers_visible();
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    if (!DECODE) fewer_registers<(FP8 ? 56 : 40)>();
    const int warp = (threadIdx.x - CONSUMERS) / 32;
    if (FP8 && warp) Maker{p, shared, warp - 1}.run();
    else if (warp % 2) Loader<true>{p, shared, warp / 2}.run();
    else Loader<false>{p, shared, warp / 2}.run();
  } else {
    if (!DECODE) more_registers<(FP8 ? 224 : 232)>();
    Rows{p, shared}.run();
  }
}

// A warp takes a row of a tile at a time, a lane some of its columns.
extern "C" __global__ void __launch_bounds__(MERGERS) merge_parts(const __grid_constant__ Params p) {
  constexpr int COLUMNS = HD / 32;
  const int unit = blockIdx.x / SHARES, share = blockIdx.x % SHARES, lane = threadIdx.x % 32;
  const int4 work = p.tiles[unit / p.kv_heads];  // first token, tokens, first part, parts
  const int head = unit % p.kv_heads;
  pdl_wait();
  pdl_launch();
  for (int row = share * (ROWS / SHARES) + threadIdx.x / 32; row < (share + 1) * (ROWS / SHARES);
       row += MERGERS / 32) {
    if (row / GROUP >= work.y) break;
    float top = NEVER, total = 0.f, o[COLUMNS] = {};
    for (int i = work.w - 1; i >= 0; --i) {
      const float* part = p.sums + ((long long)(work.z + i) * p.kv_heads + head) * PART;
      const Join join(top, part[USED * HD + row], p.scale);
      top = join.top, total = join(total, part[USED * HD + USED + row]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) o[j] = join(o[j], part[row * HD + lane * COLUMNS + j]);
    }
    const long long to = (long long)(work.x + row / GROUP) * p.kv_heads * GROUP + head * GROUP + row % GROUP;
    u32* words = reinterpret_cast<u32*>(p.out + to * HD) + lane * (COLUMNS / 2);
    const float part = p.v_scale * __fdividef(1.f, total);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 2) words[j / 2] = pack2(o[j] * part, o[j + 1] * part);
  }
}
