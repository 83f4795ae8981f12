// Paged decode attention for one query token a row: grouped heads on tensor cores, bound by reading the pages
// once.
//
// All (row, kv head) pairs are cut into tiles of 16 tokens and laid end to end; block c of C takes the c-th
// equal share, whatever the lengths are (the stream-K idea), so one launch of fixed size serves every batch
// and a graph can replay it. A border that falls close to the edge of a pair is moved there. What a block has
// of a pair is a unit. A pair that several blocks share is merged by the last of them to be done.
//
// The warps of a block have different parts, so that the stream of tiles never waits for anything but room:
//   one loads: it finds the units, announces them, and has the copy engine fetch their tiles into one ring;
//   some prepare the queries of the units to come;
//   most attend, each to the tiles of its own places in the ring. Scores are computed transposed (S^T = K
//   Q^T, O^T = V^T P^T), so that the group of query heads fills the narrow side (8) of the tensor-core
//   instruction; some merge what these leave of a unit, and write it.
//
// FUSED: q, k and v come straight from the projection; RMSNorm and rotation happen on the way and the new
// token's k and v go to the page and into the tile at hand. Nothing but q and the new token then depends on
// the kernel before, so the first tiles are loaded while it runs. (The kernels before that one have finished:
// each lets its successor start only after it has itself waited.)
//
// CASCADE: the first `skip` tokens of a row were attended elsewhere, together with the rows that share them;
// their partial results join the row's own when it is written.
//
// FP8: k and v are e4m3, and become half-precision numbers two by two. A lane holds four dims of k that
// follow each other, so q has the same ones there, and of v two, which permutes the dims of the output.
//
// INT8: k and v are int8 with a scale for each token and head, and keys are turned (times a Hadamard matrix,
// divided by HD), so q is turned here. Each head of it is then 256 times one int8 and another, with a scale,
// so keys are multiplied as they are, twice. A byte of v becomes bf16, in the places of FP8. What the new
// token's k and v are rounded to is what `turning.py` stores.
//
// INT4: k as INT8. v has 4 bits, two dims of a token in a byte, and for each GROUP_DIMS dims a word of two
// bf16: it is (1 + n / 16) * scale + low (`ops.to_int4`). Four bits put behind the exponent of 1 are 1 + n /
// 16, so one operation makes v of two of them, and P is as with bf16.
#include "common.cuh"

#ifndef HD
#define HD 128
#endif
#ifndef GROUP  // query heads of a part, at most 8
#define GROUP 4
#endif
// Parts of a kv head's query heads: a part is what is called a head here, and reads the pages itself.
#ifndef SHARE
#define SHARE 1
#endif
#ifndef LACK  // heads that the last part of a kv head has less than GROUP: a group of 13 is 7 and 6
#define LACK 0
#endif
#ifndef WARPS  // that attend: an even number, at most STAGES
#define WARPS 8
#endif
#ifndef MERGERS  // warps that merge
#define MERGERS 4
#endif
#ifndef PER_SM  // blocks on a multiprocessor
#define PER_SM 1
#endif
#ifndef STAGES
#define STAGES 20
#endif
#ifndef ROWS  // at most
#define ROWS 256
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef TURNED  // rotations go by positions of their own
#define TURNED 0
#endif
#ifndef LEAVES  // a row sees what stands before its position, and itself, the last of its tokens
#define LEAVES 0
#endif
#ifndef PAGE_TILES  // page size / 16
#define PAGE_TILES 1
#endif
#ifndef SNAP  // borders so close to the edge of a pair are moved there
#define SNAP 12
#endif
#ifndef FUSED
#define FUSED 0
#endif
#ifndef CASCADE
#define CASCADE 0
#endif
#ifndef FP8
#define FP8 0
#endif
#ifndef INT8
#define INT8 0
#endif
#ifndef INT4  // v; then k is INT8
#define INT4 0
#endif

#ifndef AT_ONCE  // tiles that are fetched together, where fetching them one by one would take longest
#define AT_ONCE (FP8 || INT8 ? 8 : PER_SM == 1 && HD <= 128 ? 4 : 1)
#endif
#ifndef SCALED  // FUSED: q is multiplied by factors when it is rotated
#define SCALED 0
#endif
#ifndef V_NORM  // FUSED: v has an RMSNorm, without weights
#define V_NORM 0
#endif
#ifndef ROT  // FUSED: the first dims of a head, which are rotated: a multiple of 32
#define ROT HD
#endif

constexpr int MIN_TILES = 8;  // that a block takes at least
// Of a pair, if equal ones keep nearly all blocks busy or pairs are short: heads of 256 leave twice as much
// to merge.
constexpr int MOST_PARTS = HD > 128 ? 32 : 1 << 16;
constexpr int TILE = 16;
constexpr int ALL = GROUP * SHARE - LACK;  // query heads of a kv head
constexpr bool BYTES = FP8 || INT8;         // of k and v
constexpr int ELEMENT = BYTES ? 1 : 2;      // bytes
constexpr int TOKEN_BYTES = HD * ELEMENT;
constexpr int V_BYTES = INT4 ? HD / 2 : TOKEN_BYTES;  // of a token's v
constexpr int CHUNKS = TOKEN_BYTES / 16, V_CHUNKS = V_BYTES / 16;
constexpr int K_TILE = TILE * TOKEN_BYTES, STAGE_BYTES = K_TILE + TILE * V_BYTES;
constexpr int GROUP_DIMS = 32, GROUPS = INT4 ? HD / GROUP_DIMS : 1;  // of v with scales of their own
constexpr int ACC = HD / 16;
constexpr int PREPARERS = WARPS > 4 ? 2 : 1;
constexpr int THREADS = (WARPS + MERGERS + PREPARERS + 1) * 32;
constexpr int MERGING = MERGERS * 32;                                 // threads
constexpr int EACH = (GROUP * HD + 4 * MERGING - 1) / (4 * MERGING);  // times 4 outputs of a merging thread
constexpr int BATCH = HD > 128 ? 16 : EACH > 2 ? 4 : 8;               // partial results merged at a time
constexpr int UNITS = 16, QUERIES = 4, RESULTS = 2;  // that a block has room for: announced, prepared, not
                                                     // yet merged
constexpr int PAGES = 128;  // tiles whose pages are looked up at a time
constexpr int SCALES = INT8 ? (1 + GROUPS) * TILE : 0;  // of a tile's k, then of its v
constexpr int LANES = 32 / AT_ONCE;  // that fetch those of a tile
// Fragments of q, the new token's k and v, their scales, and INT8 those of the 8 heads.
constexpr int Q_SCALES = ACC * 256 + TOKEN_BYTES + V_BYTES + (INT8 ? (1 + GROUPS + 3) / 4 * 16 : 0);
constexpr int Q_BYTES = Q_SCALES + (INT8 ? 32 : 0);
constexpr int PITCH = HD + 4, RESULT = WARPS * GROUP * PITCH + WARPS * 16;  // floats
constexpr float NEG = -1e30f, LOG2E = 1.4426950408889634f;

struct Params {
  // Bytes: 128 or fewer of a token, token of a page, their number, k or v, head and page (`page_heads`).
  TensorMap pages;
  TensorMap values;       // INT4: v alone, and `pages` is k
  const bf16* q;          // [R, q_stride]; FUSED: q heads, k heads, v heads of a row, else q heads
  unsigned char* k;       // element (page p, head h, token i) at p * page_stride + h * head_stride + i * HD
  unsigned char* v;
  bf16* out;              // [R, Hkv * ALL * HD]
  const int* page_table;  // [slots, table_stride]
  const int* slots;       // [R]
  const int* kv_len;      // [R]; 0 = padding row
  const int* cum;         // [R + 1]: tiles of the rows before
  float* part;            // [2 C, GROUP, HD] unnormalised partial outputs
  float* part_ml;         // [2 C, GROUP, 2] their maxima and sums
  int* count;             // [R * kv_heads], zero before and after
  const float* q_norm;    // FUSED: [HD] or null
  const float* k_norm;
  const float* cos_sin;   // FUSED: [positions, HD], cosines then sines
  const int* skip;        // CASCADE: [R], tokens, whole tiles
  const int* first;       // CASCADE: [R + 1]: partial results of the rows before
  const float* prefix;    // CASCADE: [first[R], Hkv * ALL, HD] unnormalised
  const float* prefix_ml; // CASCADE: [first[R], Hkv * ALL, 2] maxima and sums
  const float* sinks;     // [Hkv * ALL] or null
  float* k_scales;        // INT8: of page p, head h, token i at p * scale_page + h * scale_head + i
  u32* v_scales;          // the same, floats; INT4: [page, head, GROUPS, token]
  const int* positions;   // TURNED: [R], of the rotation of q and the new k; else they follow from kv_len
  const int* ends;        // LEAVES: [R], behind the positions of rows
  const float* by;        // SCALED: of a row's dim at row * by_row + dim * by_dim
  const float* also;      // SCALED: as many, or null
  long long page_stride, head_stride, scale_page, scale_head;
  int q_stride, table_stride, rows, kv_heads, window;  // kv_heads: Hkv * SHARE
  int by_row, by_dim;
  int page_heads;  // page_stride in heads of a page
  float eps;
  float scale, softcap;   // scale already times log2(e), or 1 / softcap with soft cap
  float k_inverse, v_inverse, v_scale;  // FP8: 1 / scales of what is stored, and v's
};

// What a block has of a pair: `count` of the pair's `tiles` tiles from `tile` on, which is tile `first` +
// `tile` of the row. No tiles: the end.
struct __align__(16) Unit { int row, head, tile, count, tiles, len, first, slot; };

// The first query head of a part, and how many it has.
__device__ __forceinline__ int first_query(int head) {
  return head * GROUP - (LACK ? head / SHARE * LACK : 0);
}
__device__ __forceinline__ int queries_of(int head) {
  return GROUP - (LACK && head % SHARE == SHARE - 1 ? LACK : 0);
}

// Barriers of a unit: it is announced, its query is ready, its tiles are attended to, its results are merged.
enum { ANNOUNCED, PREPARED, ATTENDED, MERGED };

struct Memory {  // of a block
  u32 ring, bars;
  float* scales;           // [STAGES][SCALES]
  unsigned char* queries;  // [QUERIES][Q_BYTES]
  float* results;          // [RESULTS][RESULT]: [WARPS][GROUP][PITCH] outputs, [WARPS][8][2] maxima and sums
  Unit* units;             // [UNITS]
  int* pages;              // [PAGES]: of a row
  int *cum, *len, *slot, *skip;  // [ROWS + 1] each
  __device__ __forceinline__ Memory() {
    extern __shared__ unsigned char smem[];
    unsigned char* at = smem + (-smem_addr(smem) & 1023);
    ring = smem_addr(at), at += STAGES * STAGE_BYTES;
    scales = reinterpret_cast<float*>(at), at += STAGES * SCALES * 4;
    queries = at, at += QUERIES * Q_BYTES;
    results = reinterpret_cast<float*>(at), at += RESULTS * RESULT * 4;
    units = reinterpret_cast<Unit*>(at), at += UNITS * sizeof(Unit);
    bars = smem_addr(at), at += (STAGES * 2 + UNITS * 4) * 8;
    pages = reinterpret_cast<int*>(at), cum = pages + PAGES, len = cum + ROWS + 1, slot = len + ROWS + 1,
    skip = slot + ROWS + 1;
  }
  __device__ __forceinline__ u32 full(int stage) const { return bars + stage * 8; }
  __device__ __forceinline__ u32 empty(int stage) const { return bars + (STAGES + stage) * 8; }
  __device__ __forceinline__ u32 bar(int kind, int unit) const {
    return bars + (STAGES * 2 + kind * UNITS + unit % UNITS) * 8;
  }
  __device__ __forceinline__ void wait(int kind, int unit) const {
    if (unit >= 0) barrier_wait(bar(kind, unit), unit / UNITS & 1);
  }
  __device__ __forceinline__ Unit get(int unit) const {
    wait(ANNOUNCED, unit);
    const int4* at = reinterpret_cast<const int4*>(units + unit % UNITS);
    const int4 a = at[0], b = at[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
};

// The list of all tiles, cut into equal shares.
struct Shares {
  const int* cum;
  int rows, heads, pairs, most, whole, fit, total, blocks, each, rest, snap;
  // What can be said before the tiles are counted: blocks if all take whole pairs, or how many there are for
  // each pair.
  __device__ __forceinline__ Shares(const Params& p, const int* cum)
      : cum(cum), rows(p.rows), heads(p.kv_heads) {
    pairs = rows * heads, most = gridDim.x;
    const u32 n = (u32(pairs) + most - 1) / most;
    whole = (pairs + n - 1) / n, fit = u32(most) / pairs;
  }
  __device__ __forceinline__ void cut() {
    total = cum[rows] * heads;
    // Whole pairs, if all are as long (very likely) and that keeps nearly all busy: then nothing is left to
    // merge.
    if (pairs > most) {
      const bool alike = total == cum[1] * pairs;
      blocks = alike && whole * 10 >= most * 9 ? whole : most;
    } else {  // equal parts of pairs, if that keeps nearly all busy or pairs are short
      const int even = pairs * max(1, min(min(fit, MOST_PARTS), int(u32(total) / (pairs * MIN_TILES))));
      blocks = even * 20 >= most * 17 || total < most * 24 ? even : most;
    }
    blocks = min(blocks, total);
    each = u32(total) / blocks, rest = total - each * blocks;
    snap = max(1, min(SNAP, each / 4));
  }
  // Total * block / blocks.
  __device__ __forceinline__ int raw(int block) const { return each * block + u32(rest * block) / blocks; }
  // The first border at tile x or later, if they are not moved.
  __device__ __forceinline__ int from(int x) const {
    return int(((long long)x * blocks + total - 1) / total);
  }
  // The row that holds `tile`: a warp looks at 32 rows at a time.
  __device__ __forceinline__ int row_of(int tile) const {
    const int lane = threadIdx.x % 32;
    int lo = 0;
    for (int n = rows; n > 1;) {
      const int step = (n + 31) / 32;
      const bool before = lane * step < n && cum[lo + lane * step] * heads <= tile;
      const int part = __popc(__ballot_sync(~0u, before)) - 1;
      lo += part * step;
      n = min(step, n - part * step);
    }
    return lo;
  }
  // First tile of a block; the row that holds it is `row` or, at its end, a later one.
  __device__ __forceinline__ int begin(int block, int& row) const {
    const int x = raw(block);
    row = 0;
    if (block == 0 || block == blocks) return x;
    row = row_of(x);
    const int n = cum[row + 1] - cum[row], off = u32(x - cum[row] * heads) % n;
    return off < snap ? x - off : n - off < snap ? x - off + n : x;
  }
  // The first and the last block that begin strictly inside the pair [start, end).
  __device__ __forceinline__ int first_inside(int start) const { return from(start + snap); }
  __device__ __forceinline__ int last_inside(int end) const { return from(end - snap + 1) - 1; }
};

__device__ __forceinline__ float round_bf(float x) { return lo2f(pack2(x, 0.f)); }

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Adds one to what other blocks count, too: what each has written before is seen by who comes later. Returns
// what was there.
__device__ __forceinline__ int count_one(int* count) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// Two floats as bf16, or as fp16 with FP8: what the tensor cores take.
__device__ __forceinline__ u32 pack_operand(float lo, float hi) {
  if (!FP8) return pack2(lo, hi);
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (!FP8) return mma(d, a0, a1, a2, a3, b0, b1);
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Bytes 0 and 1, or 2 and 3, of a word of e4m3 as fp16.
__device__ __forceinline__ u32 first_halves(u32 x) {
  u32 r;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, a;\n}" : "=r"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ u32 last_halves(u32 x) {
  u32 r;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, b;\n}" : "=r"(r) : "r"(x));
  return r;
}
// x & MASK | BITS, which the compiler makes two operations of.
template <u32 MASK, u32 BITS>
__device__ __forceinline__ u32 with_bits(u32 x) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "n"(MASK), "n"(BITS));
  return r;
}
// Bytes 0 and 2 of a word of int8 as bf16: 128 plus seven bits, less 128 or, if the eighth is set, 256.
__device__ __forceinline__ u32 even_numbers(u32 x) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;"
      : "=r"(r)
      : "r"(with_bits<0x007f007fu, 0x43004300u>(x)), "r"(with_bits<0x00800080u, 0x43004300u>(x)));
  return r;
}
// d[16x8] += a[16x32] * b[32x8] in int8: a word is four places of a row of a, or of a column of b.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Bytes 0 and 2, and bytes 1 and 3.
struct Places { u32 even, odd; };
__device__ __forceinline__ Places places(u32 x) {
  if (INT8) return {even_numbers(x), even_numbers(x >> 8)};
  x = __byte_perm(x, 0, 0x3120);
  return {first_halves(x), last_halves(x)};
}
__device__ __forceinline__ unsigned short to_e4m3(float lo, float hi) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
// The j-th four bits of each half of a word as bf16: 1 + n / 16, times `scale`, plus `low`.
__device__ __forceinline__ u32 value(u32 x, int j, u32 scale, u32 low) {
  const u32 n = with_bits<0x00780078u, 0x3f803f80u>(j == 0 ? x << 3 : x >> (4 * j - 3));
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(n), "r"(scale), "r"(low));
  return r;
}
// Where a 16-byte chunk of a token of so many bytes lies in a tile: swizzled by the copy engine, so that 8
// tokens' same chunks are in different banks.
template <int OF_TOKEN>
__device__ __forceinline__ u32 in_tile_at(int row, int chunk) {
  if (OF_TOKEN == 32) return row * 32 + (chunk ^ (row >> 2 & 1)) * 16;
  if (OF_TOKEN == 64) return row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
  return chunk / 8 * (TILE * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}
// The first of two dims that lane t holds as number j of the q fragment of 16 dims.
__device__ __forceinline__ int q_dim(int t, int j) { return BYTES ? t * 4 + j * 2 : t * 2 + j * 8; }
// Its four numbers as fragment.
__device__ __forceinline__ void q_fragment(u32 (&qf)[2], float x0, float x1, float x2, float x3) {
  qf[0] = pack_operand(x0, x1), qf[1] = pack_operand(x2, x3);
}

// a and b become their sum and their difference.
__device__ __forceinline__ void cross(float& a, float& b) {
  const float x = a;
  a = x + b, b = x - b;
}
// The same with the number of the lane that differs in `bit`.
__device__ __forceinline__ float cross_lanes(float x, int bit) {
  const float y = __shfl_xor_sync(~0u, x, bit);
  return threadIdx.x & bit ? y - x : y + x;
}
// A head of q, 4 dims of each 16 a lane, times the Hadamard matrix.
__device__ __forceinline__ void turn_q(float (&x)[ACC][4]) {
#pragma unroll
  for (int i = 0; i < ACC; ++i) {
    cross(x[i][0], x[i][1]), cross(x[i][2], x[i][3]);
    cross(x[i][0], x[i][2]), cross(x[i][1], x[i][3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] = cross_lanes(cross_lanes(x[i][j], 1), 2);
  }
#pragma unroll
  for (int bit = 1; bit < ACC; bit *= 2)
#pragma unroll
    for (int i = 0; i < ACC; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!(i & bit)) cross(x[i][j], x[i | bit][j]);
}

// The scale of numbers whose largest has the bits `most` without its sign; NaN where one is not finite.
__device__ __forceinline__ float scale_of_largest(u32 most, float range) {
  return most < 0x7f800000u ? __uint_as_float(most) / range : __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ u32 size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ float divisor(float scale) { return scale == 0.f ? 1.f : scale; }

// A head of q as B fragments in int8: of each 32 dims those that count 256, then the others; its scale.
__device__ __forceinline__ float q_integers(u32 (&qf)[ACC][2], const float (&x)[ACC][4]) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < ACC; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) most = max(most, size_bits(x[i][j]));
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  const float scale = scale_of_largest(most, 127 * 256), by = 1.f / divisor(scale);
#pragma unroll
  for (int i = 0; i < ACC; ++i) {
    u32 high = 0, low = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = max(-127 * 256, min(127 * 256, __float2int_rn(x[i][j] * by)));
      high |= (u32(n + 128) >> 8 & 0xff) << 8 * j, low |= (u32(n) & 0xff) << 8 * j;
    }
    qf[i & ~1][i & 1] = high, qf[i | 1][i & 1] = low;
  }
  return scale;
}

// q of head `g` of the row, normalised and rotated, as the B fragments of K Q^T; INT8: its scale.
__device__ __forceinline__ float prepare_q(const Params& p, const bf16* q, int row, int position, int t,
                                           bool live, u32 (&qf)[ACC][2]) {
  constexpr int FAR = ROT / 32;  // from a dim to the one that it is rotated with, in 16
  const float* table = p.cos_sin + (long long)position * ROT;
  auto weight = [&](int i, int j) {
    return p.q_norm ? *reinterpret_cast<const float2*>(p.q_norm + i * 16 + q_dim(t, j)) : float2{1.f, 1.f};
  };
  auto of_table = [&](int from, int i, int j) {
    return *reinterpret_cast<const float2*>(table + from + i * 16 + q_dim(t, j));
  };
  constexpr bool AHEAD = HD <= 128;  // all is asked for before any of it is used; more has no registers
  float x[ACC][4];
  float2 weights[AHEAD ? ACC : 1][2], cosines[AHEAD ? FAR : 1][2], sines[AHEAD ? FAR : 1][2];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ACC; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 v = live ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, j)) : 0;
      x[i][2 * j] = lo2f(v);
      x[i][2 * j + 1] = hi2f(v);
      if (AHEAD) weights[i][j] = weight(i, j);
    }
#pragma unroll
  for (int i = 0; i < (AHEAD ? FAR : 0); ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) cosines[i][j] = of_table(0, i, j), sines[i][j] = of_table(ROT / 2, i, j);
#pragma unroll
  for (int i = 0; i < ACC; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += x[i][j] * x[i][j];
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const float f = p.q_norm ? rsqrtf(sum / HD + p.eps) : 1.f;
#pragma unroll
  for (int i = 0; i < ACC; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 w = AHEAD ? weights[AHEAD ? i : 0][j] : weight(i, j);
      x[i][2 * j] = round_bf(x[i][2 * j] * f * w.x);
      x[i][2 * j + 1] = round_bf(x[i][2 * j + 1] * f * w.y);
    }
#pragma unroll
  for (int i = 0; i < FAR; ++i) {
    float a[4], b[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 c = AHEAD ? cosines[AHEAD ? i : 0][j] : of_table(0, i, j),
                   s = AHEAD ? sines[AHEAD ? i : 0][j] : of_table(ROT / 2, i, j);
      const float a0 = x[i][2 * j], a1 = x[i][2 * j + 1], b0 = x[i + FAR][2 * j],
                  b1 = x[i + FAR][2 * j + 1];
      a[2 * j] = a0 * c.x - b0 * s.x;
      a[2 * j + 1] = a1 * c.y - b1 * s.y;
      b[2 * j] = b0 * c.x + a0 * s.x;
      b[2 * j + 1] = b1 * c.y + a1 * s.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] = a[j], x[i + FAR][j] = b[j];
  }
  if constexpr (SCALED) {
#pragma unroll
    for (int i = 0; i < ACC; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = row * p.by_row + (i * 16 + q_dim(t, j / 2) + j % 2) * p.by_dim;
        x[i][j] = round_bf(x[i][j]) * (p.also ? p.by[at] * p.also[at] : p.by[at]);
      }
  }
  if constexpr (INT8) {
#pragma unroll
    for (int i = 0; i < ACC; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = round_bf(x[i][j]);
    turn_q(x);
    return q_integers(qf, x);
  } else {
#pragma unroll
    for (int i = 0; i < ACC; ++i) q_fragment(qf[i], x[i][0], x[i][1], x[i][2], x[i][3]);
    return 1.f;
  }
}

// By what a row's q and new k are rotated.
__device__ __forceinline__ int turned_by(const Params& p, const Unit& x) {
  return TURNED ? p.positions[x.row] : x.len - 1;
}

// A lane has PAIRS pairs of dims of the new token's k, which are rotated together or not at all.
constexpr int PAIRS = HD / 64;
static_assert(AT_ONCE <= STAGES && 32 % AT_ONCE == 0, "lanes wait for them, and fetch their scales");
static_assert(!INT4 || INT8, "keys are in 8 bits");
static_assert(!INT8 || (!CASCADE && (!FUSED || ROT == HD)), "of turned keys all dims are rotated");
__device__ __forceinline__ bool rotated(int pair) { return ROT == HD || pair < ROT / 2; }
__device__ __forceinline__ int k_dim(int pair, int half) {
  return rotated(pair) ? pair + half * (ROT / 2) : pair + (half ? HD / 2 : ROT / 2);
}

// That of all lanes' numbers in int8.
__device__ __forceinline__ float scale_of(u32 most) {
  return scale_of_largest(__reduce_max_sync(~0u, most), 127.f);
}
// x in units of `scale`, which is not 0, as a byte; 0 where either is not finite.
__device__ __forceinline__ u32 to_int8(float x, float scale) {
  const float y = x / scale;
  return y == y ? max(-127, min(127, __float2int_rn(y))) & 0xff : 0;
}

// The new token's k, turned, as it is stored; its scale.
__device__ __forceinline__ float turn_k(float (&x)[2][PAIRS], int lane, bf16 (&out)[2][PAIRS]) {
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) cross(x[0][j], x[1][j]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int bit = 1; bit < PAIRS; bit *= 2)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j)
        if (!(j & bit)) cross(x[h][j], x[h][j | bit]);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) x[h][j] = cross_lanes(x[h][j], bit);
      x[h][j] /= HD;
      most = max(most, size_bits(x[h][j]));
    }
  }
  const float scale = scale_of(most), by = divisor(scale);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) out[h][j] = to_int8(x[h][j], by);
  return scale;
}

// It is normalised and rotated, and becomes what is stored; its scale.
__device__ __forceinline__ float prepare_k(const Params& p, float (&x)[2][PAIRS],
                                           const float (&norm)[2][PAIRS], const float2 (&turn)[PAIRS],
                                           int lane, bf16 (&out)[2][PAIRS]) {
  if (p.k_norm) {
    float sum = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) sum += x[h][j] * x[h][j];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float f = rsqrtf(sum / HD + p.eps);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) x[h][j] = round_bf(x[h][j] * f * norm[h][j]);
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const float c = turn[j].x, s = turn[j].y;
    const float a = x[0][j] * c - x[1][j] * s, b = x[1][j] * c + x[0][j] * s;
    if (INT8) {
      x[0][j] = round_bf(a), x[1][j] = round_bf(b);
      continue;
    }
    out[0][j] = FP8 ? to_e4m3(a * p.k_inverse, 0.f) : f2bf(a);
    out[1][j] = FP8 ? to_e4m3(b * p.k_inverse, 0.f) : f2bf(b);
  }
  if constexpr (INT8) return turn_k(x, lane, out);
  return 1.f;
}

// The lanes' v, 8 numbers or none each, normalised.
__device__ __forceinline__ uint4 prepare_v(const Params& p, uint4 v) {
  float sum = square2(v.x) + square2(v.y) + square2(v.z) + square2(v.w);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  const float f = rsqrtf(sum / HD + p.eps);
  return {mul2(v.x, f, f), mul2(v.y, f, f), mul2(v.z, f, f), mul2(v.w, f, f)};
}

// 8 numbers of v as they are stored.
__device__ __forceinline__ uint4 narrow_v(const Params& p, uint4 v) {
  const float f = p.v_inverse;
  auto four = [&](u32 a, u32 b) {
    return u32(to_e4m3(lo2f(a) * f, hi2f(a) * f)) | u32(to_e4m3(lo2f(b) * f, hi2f(b) * f)) << 16;
  };
  return {four(v.x, v.y), four(v.z, v.w), 0, 0};
}

// The lanes' v, 8 numbers or none each, in int8; its scale.
__device__ __forceinline__ float narrow_v(uint4 v, uint2& to) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = max(most, max(size_bits(lo2f(words[i])), size_bits(hi2f(words[i]))));
  const float scale = scale_of(most), by = divisor(scale);
  u32 halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) halves[i] = to_int8(lo2f(words[i]), by) | to_int8(hi2f(words[i]), by) << 8;
  to = {halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
  return scale;
}

// The lanes' v, 8 numbers or none each, in 4 bits; the word of this lane's group, of 4 lanes.
__device__ __forceinline__ u32 narrow_v(uint4 v, u32& to) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  u32 most = 0;
  float low = lo2f(v.x), high = low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = lo2f(words[i]), b = hi2f(words[i]);
    low = fminf(low, fminf(a, b)), high = fmaxf(high, fmaxf(a, b));
    most = max(most, max(size_bits(a), size_bits(b)));
  }
#pragma unroll
  for (int bit = 1; bit < GROUP_DIMS / 8; bit *= 2) {
    low = fminf(low, __shfl_xor_sync(~0u, low, bit)), high = fmaxf(high, __shfl_xor_sync(~0u, high, bit));
    most = max(most, __shfl_xor_sync(~0u, most, bit));
  }
  to = 0;
  if (most >= 0x7f800000u) return 0x7fc07fc0u;
  const float scale = round_bf((high - low) * (16.f / 15.f));
  low = round_bf(low - scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = i % 2 ? hi2f(words[i / 2]) : lo2f(words[i / 2]);
    to |= u32(max(0, min(15, __float2int_rn(((x - low) / divisor(scale) - 1.f) * 16.f)))) << 4 * i;
  }
  return pack2(scale, low);
}

// Where the scales of v lie of a group of dims in a head of a page.
__device__ __forceinline__ long long value_scale(const Params& p, int page, int head, int group) {
  return (page * p.scale_page + head * p.scale_head) * GROUPS + group * (TILE * PAGE_TILES);
}

// The new token as the projection left it, this lane's part, with the norm's factors and cosine and sine; and
// its page.
struct Fresh {
  float k[2][PAIRS], norm[2][PAIRS];
  float2 turn[PAIRS];
  uint4 v;
  int page;
  __device__ __forceinline__ Fresh(const Params& p, const Unit& x, int slot, int lane) : v{} {
    const float* table = p.cos_sin + (long long)turned_by(p, x) * ROT + lane * PAIRS;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const bool turns = rotated(lane * PAIRS + j);
      turn[j] = {turns ? table[j] : 1.f, turns ? table[ROT / 2 + j] : 0.f};
#pragma unroll
      for (int h = 0; h < 2; ++h) norm[h][j] = p.k_norm ? p.k_norm[k_dim(lane * PAIRS + j, h)] : 1.f;
    }
    page = p.page_table[(long long)slot * p.table_stride + (x.len - 1) / TILE / PAGE_TILES];
    const bf16* from = p.q + (long long)x.row * p.q_stride + (p.kv_heads / SHARE * ALL + x.head / SHARE) * HD;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) k[h][j] = bf2f(from[k_dim(lane * PAIRS + j, h)]);
    if (lane < HD / 8) v = *reinterpret_cast<const uint4*>(from + p.kv_heads / SHARE * HD + lane * 8);
  }
  // To the page and to shared memory.
  __device__ __forceinline__ void store(const Params& p, const Unit& x, int lane, unsigned char* k_to) {
    const int last = x.len - 1;
    unsigned char* v_to = k_to + TOKEN_BYTES;
    bf16 new_k[2][PAIRS];
    const float k_scale = prepare_k(p, k, norm, turn, lane, new_k);
    if (V_NORM) v = prepare_v(p, v);
    const long long place =
        page * p.page_stride + x.head / SHARE * p.head_stride + (last % (TILE * PAGE_TILES)) * HD;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const int d = k_dim(lane * PAIRS + j, h);
        if (BYTES) {
          k_to[d] = p.k[place + d] = (unsigned char)new_k[h][j];
        } else {
          reinterpret_cast<bf16*>(k_to)[d] = reinterpret_cast<bf16*>(p.k)[place + d] = new_k[h][j];
        }
      }
    const long long at =
        page * p.scale_page + x.head / SHARE * p.scale_head + last % (TILE * PAGE_TILES);
    u32* scales = reinterpret_cast<u32*>(v_to + V_BYTES);
    if constexpr (INT4) {
      u32 bits;
      const u32 word = narrow_v(v, bits);
      if (lane < HD / 8) {
        *reinterpret_cast<u32*>(v_to + lane * 4) =
            *reinterpret_cast<u32*>(p.v + place / 2 + lane * 4) = bits;
        const int group = lane / (GROUP_DIMS / 8);
        const long long to = value_scale(p, page, x.head / SHARE, group) + last % (TILE * PAGE_TILES);
        if (lane % (GROUP_DIMS / 8) == 0) scales[1 + group] = p.v_scales[to] = word;
      }
      if (lane == 0) scales[0] = __float_as_uint(p.k_scales[at] = k_scale);
      return;
    }
    if constexpr (INT8) {
      uint2 bytes;
      const float v_scale = narrow_v(v, bytes);
      if (lane < HD / 8)
        *reinterpret_cast<uint2*>(v_to + lane * 8) =
            *reinterpret_cast<uint2*>(p.v + place + lane * 8) = bytes;
      if (lane > 0) return;
      scales[0] = __float_as_uint(p.k_scales[at] = k_scale);
      scales[1] = p.v_scales[at] = __float_as_uint(v_scale);
      return;
    }
    if (lane >= HD / 8) return;
    if (FP8) {
      const uint4 e = narrow_v(p, v);
      *reinterpret_cast<uint2*>(v_to + lane * 8) =
          *reinterpret_cast<uint2*>(p.v + place + lane * 8) = {e.x, e.y};
    } else {
      *reinterpret_cast<uint4*>(v_to + lane * 16) =
          *reinterpret_cast<uint4*>(p.v + (place + lane * 8) * ELEMENT) = v;
    }
  }
};

// What the first queries and the new token are multiplied by and rotated with, which no kernel has read since
// the layer or the step before, is brought to the L2 cache while others compute them.
__device__ __forceinline__ void fetch_factors(const Params& p, const Memory& memory) {
  constexpr int LINE = 32, NORM_LINES = HD / LINE, ROTATION = 2 * NORM_LINES;  // floats; lines of a norm
  const int lane = threadIdx.x % 32;
  const float* norm = lane < NORM_LINES ? p.q_norm : p.k_norm;
  if (norm && lane < ROTATION) prefetch_to_l2(norm + lane % NORM_LINES * LINE);
  const Unit first = memory.get(0);
  if (lane >= ROTATION && lane < ROTATION + ROT / LINE)
    prefetch_to_l2(p.cos_sin + (long long)turned_by(p, first) * ROT + (lane - ROTATION) * LINE);
}

// A warp that makes the queries of every PREPARERS-th unit, and stores the new token of the others.
__device__ __forceinline__ void prepare(const Params& p, const Memory& memory, int turn) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (FUSED) {
    if (turn == 0) fetch_factors(p, memory);
    pdl_wait();
    pdl_launch();
  }
  for (int u = 0;; ++u) {
    const Unit x = memory.get(u);
    if (x.count == 0) return;
    unsigned char* to = memory.queries + u % QUERIES * Q_BYTES;
    const bool own = u % PREPARERS == turn;
    if (FUSED && (PREPARERS == 1 || !own) && x.tile + x.count == x.tiles) {
      Fresh fresh(p, x, memory.slot[x.row], lane);
      memory.wait(MERGED, u - QUERIES);
      fresh.store(p, x, lane, to + ACC * 256);
    }
    if (!own) {
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.bar(PREPARED, u));
      continue;
    }
    const bf16* q = p.q + (long long)x.row * p.q_stride + (first_query(x.head) + g) * HD;
    const bool live = g < queries_of(x.head);
    u32 qf[ACC][2];
    float scale = 1.f;
    if (FUSED) {
      scale = prepare_q(p, q, x.row, turned_by(p, x), t, live, qf);
      memory.wait(MERGED, u - QUERIES);
    } else {
      float turned[ACC][4];
#pragma unroll
      for (int i = 0; i < ACC; ++i) {
        const u32 a = live ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, 0)) : 0;
        const u32 b = live ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, 1)) : 0;
        if (INT8) {
          turned[i][0] = lo2f(a), turned[i][1] = hi2f(a), turned[i][2] = lo2f(b), turned[i][3] = hi2f(b);
        } else {
          qf[i][0] = FP8 ? pack_operand(lo2f(a), hi2f(a)) : a;
          qf[i][1] = FP8 ? pack_operand(lo2f(b), hi2f(b)) : b;
        }
      }
      if constexpr (INT8) {
        turn_q(turned);
        scale = q_integers(qf, turned);
      }
      memory.wait(MERGED, u - QUERIES);
    }
#pragma unroll
    for (int i = 0; i < ACC; i += 2)
      reinterpret_cast<uint4*>(to)[i / 2 * 32 + lane] = {qf[i][0], qf[i][1], qf[i + 1][0], qf[i + 1][1]};
    if (INT8 && t == 0) reinterpret_cast<float*>(to + Q_SCALES)[g] = scale;
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.bar(PREPARED, u));
  }
}

// k and v of a tile, `at` a head of a page.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, u32 bar, int token, int at,
                                          u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %3, %3, %5}], [%2], %6;"
               ::"r"(to), "l"(&map), "r"(bar), "r"(0), "r"(token), "r"(at), "l"(policy)
               : "memory");
}
// This lane's 16 bytes, without the copy engine, whose orders take the one thread that gives them 50 ns each;
// and its word to `bar` when all that it has asked for is there.
__device__ __forceinline__ void copy_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The warp that loads.
__device__ __forceinline__ void load(const Params& p, const Memory& memory, const Shares& shares) {
  const int lane = threadIdx.x % 32;
  const u64 policy = policy_once();
  int row, end_row, at = shares.begin(blockIdx.x, row);
  const int stop = shares.begin(blockIdx.x + 1, end_row);
  int stage = 0, held_row = -1, held = 0;  // whose pages from which tile on are at hand
  u32 parity = 1;
  auto announce = [&](int u, const Unit& x) {
    memory.wait(MERGED, u - UNITS);
    if (lane != 0) return;
    int4* to = reinterpret_cast<int4*>(memory.units + u % UNITS);
    to[0] = {x.row, x.head, x.tile, x.count};
    to[1] = {x.tiles, x.len, x.first, x.slot};
    barrier_arrive(memory.bar(ANNOUNCED, u));
  };
  for (int u = 0;; ++u) {
    Unit x = {};
    if (at < stop) {
      while (memory.cum[row + 1] * p.kv_heads <= at) ++row;
      const int tiles = memory.cum[row + 1] - memory.cum[row], off = at - memory.cum[row] * p.kv_heads;
      const int head = u32(off) / tiles, tile = off - head * tiles, len = memory.len[row];
      const int first = CASCADE                          ? memory.skip[row] / TILE
                        : p.window > 0 && len > p.window ? (len - p.window) / TILE
                                                         : 0;
      // A pair's first part ends its block, the others begin theirs.
      x = {row,   head, tile,  min(tiles - tile, stop - at),
           tiles, len,  first, 2 * int(blockIdx.x) + (tile == 0 ? 1 : 0)};
      at += x.count;
    }
    announce(u, x);
    if (x.count == 0) return;
    const int* pages = p.page_table + (long long)memory.slot[row] * p.table_stride;
    for (int tile = x.first + x.tile, end = tile + x.count; tile < end;) {
      const int base = tile & -PAGES, n = min(end, base + PAGES);
      if (row != held_row || base != held) {
        int page[PAGES / 32];
#pragma unroll
        for (int i = 0; i < PAGES; i += 32) {
          const int at = base + i + lane;
          page[i / 32] = at < x.first + x.tiles ? pages[at / PAGE_TILES] : 0;
        }
#pragma unroll
        for (int i = 0; i < PAGES; i += 32) memory.pages[i + lane] = page[i / 32];
        held_row = row, held = base;
        __syncwarp();
      }
      while (tile < n) {
        const int several = min(AT_ONCE, n - tile);
        if (lane < several) {
          const u32 over = stage + lane >= STAGES;
          barrier_wait(memory.empty(stage + lane - over * STAGES), parity ^ over);
        }
        __syncwarp();
        if constexpr (INT8) {  // LANES of a tile
          const int i = lane / LANES;
          if (i < several) {
            const int at = stage + i - (stage + i >= STAGES ? STAGES : 0);
            const int page = memory.pages[tile + i - base], head = x.head / SHARE;
            const int token = (tile + i) % PAGE_TILES * TILE;
            const float* k = p.k_scales + page * p.scale_page + head * p.scale_head + token;
            const u32* v = p.v_scales + value_scale(p, page, head, 0) + token;
            const u32 to = smem_addr(memory.scales + at * SCALES);
            constexpr int EACH_16 = TILE / 4;  // parts of 16 bytes
#pragma unroll
            for (int part = lane % LANES; part < EACH_16; part += LANES) {
              copy_16(to + part * 16, k + part * 4);
#pragma unroll
              for (int group = 0; group < GROUPS; ++group)
                copy_16(to + ((1 + group) * EACH_16 + part) * 16, v + group * (TILE * PAGE_TILES) + part * 4);
            }
            arrive_when_copied(memory.full(at));
          }
        }
        if (lane == 0) {  // of several lanes at once the copy engine takes wrong orders
          int pages[AT_ONCE];
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) pages[i] = memory.pages[min(tile + i, n - 1) - base];
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            if (i >= several) break;
            const int at = stage + i - (stage + i >= STAGES ? STAGES : 0);
            const int token = (tile + i) % PAGE_TILES * TILE;
            const int head = pages[i] * p.page_heads + x.head / SHARE;
            const u32 to = memory.ring + at * STAGE_BYTES, bar = memory.full(at);
            barrier_expect(bar, STAGE_BYTES);
            copy_tile(to, p.pages, bar, token, head, policy);
            if (INT4) copy_tile(to + K_TILE, p.values, bar, token, head, policy);
          }
        }
        tile += several, stage += several;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
      }
      __syncwarp();
    }
  }
}

// The last tile of a row: the new token's k and v (FUSED), and zeros where v has no token yet.
__device__ __forceinline__ void complete_tile(u32 kt, u32 vt, float* scales, const unsigned char* fresh,
                                              int last, int lane) {
  const uint4* row = reinterpret_cast<const uint4*>(fresh);
  for (int i = lane; FUSED && i < CHUNKS; i += 32) sts128(kt + in_tile_at<TOKEN_BYTES>(last, i), row[i]);
  for (int i = lane; FUSED && i < V_CHUNKS; i += 32)
    sts128(vt + in_tile_at<V_BYTES>(last, i), row[CHUNKS + i]);
  for (int i = (last + 1) * V_CHUNKS + lane; i < TILE * V_CHUNKS; i += 32)
    sts128(vt + in_tile_at<V_BYTES>(i / V_CHUNKS, i % V_CHUNKS), {});
  const float* of = reinterpret_cast<const float*>(fresh + TOKEN_BYTES + V_BYTES);
  for (int i = lane; i < SCALES; i += 32) {
    const int token = i % TILE;
    if (FUSED && token == last) scales[i] = of[i / TILE];
    if (token > last && i >= TILE) scales[i] = 0.f;
  }
  fence_shared();  // the copy engine writes there next
  __syncwarp();
}

// A warp that attends to the tiles of its own places in the ring. (Of another's it could not tell a tile from
// the one before.)
__device__ __forceinline__ void attend(const Params& p, const Memory& memory, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int before = 0, next = warp, stage = warp;  // tiles of the units before, and until its next, which is there
  u32 parity = 0;
  for (int u = 0;; ++u) {
    const Unit x = memory.get(u);
    if (x.count == 0) return;
    float o[ACC][4] = {};
    float m0 = NEG, m1 = NEG, l0 = 0.f, l1 = 0.f;  // heads 2t and 2t + 1; l is this lane's share
    if (next < before + x.count) {
      const int oldest = p.window > 0 ? x.len - p.window : 0;
      const int position = LEAVES ? p.ends[x.row] - 1 : 0;
      const unsigned char* query = memory.queries + u % QUERIES * Q_BYTES;
      u32 qf[ACC][2];
      memory.wait(PREPARED, u);
#pragma unroll
      for (int i = 0; i < ACC; i += 2) {
        const uint4 q = reinterpret_cast<const uint4*>(query)[i / 2 * 32 + lane];
        qf[i][0] = q.x, qf[i][1] = q.y, qf[i + 1][0] = q.z, qf[i + 1][1] = q.w;
      }
      float2 scale = {p.scale, p.scale};  // of heads 2t and 2t + 1
      if constexpr (INT8) {
        const float2 of = reinterpret_cast<const float2*>(query + Q_SCALES)[t];
        scale = {scale.x * of.x, scale.y * of.y};
      }
      while (next < before + x.count) {
        const int tile = x.first + x.tile + next - before;
        const u32 kt = memory.ring + stage * STAGE_BYTES, vt = kt + K_TILE;
        barrier_wait(memory.full(stage), parity);
        float* scales = memory.scales + stage * SCALES;
        if (tile == (x.len - 1) / TILE)
          complete_tile(kt, vt, scales, query + ACC * 256, (x.len - 1) % TILE, lane);
        if (INT4 && tile * TILE < oldest) {  // nor may v of what is left out be NaN
          for (int i = TILE + lane; i < SCALES; i += 32)
            if (tile * TILE + i % TILE < oldest) scales[i] = 0.f;
          __syncwarp();
        }
        float s[4] = {}, s_odd[4] = {};
        int high[4] = {}, low[4] = {};
        const int r = lane & 15, half = lane >> 4;
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; ++i) {
          u32 a[4];
          ldmatrix(a, kt + in_tile_at<TOKEN_BYTES>(r, 2 * i + half));
          if constexpr (INT8) {
            multiply_bytes(high, a, qf[2 * i]);
            multiply_bytes(low, a, qf[2 * i + 1]);
          } else if constexpr (FP8) {
            multiply(s, first_halves(a[0]), first_halves(a[1]), last_halves(a[0]), last_halves(a[1]),
                     qf[2 * i][0], qf[2 * i][1]);
            multiply(s_odd, first_halves(a[2]), first_halves(a[3]), last_halves(a[2]), last_halves(a[3]),
                     qf[2 * i + 1][0], qf[2 * i + 1][1]);
          } else {
            multiply(i % 2 ? s_odd : s, a[0], a[1], a[2], a[3], qf[i][0], qf[i][1]);
          }
        }
        const int token = tile * TILE + g;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float y = (INT8 ? float(high[j] * 256 + low[j]) : s[j] + s_odd[j]) * (j % 2 ? scale.y : scale.x);
          if constexpr (INT8) y *= scales[g + j / 2 * 8];
          if (SOFTCAP) y = tanh_fast(y) * p.softcap;
          const int at_token = token + (j >= 2 ? 8 : 0);
          const bool before = LEAVES ? at_token < position || at_token == x.len - 1 : at_token < x.len;
          s[j] = before && at_token >= oldest ? y : NEG;
        }
        float n0 = fmaxf(s[0], s[2]), n1 = fmaxf(s[1], s[3]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, d));
          n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, d));
        }
        n0 = fmaxf(n0, m0);
        n1 = fmaxf(n1, m1);
        if (__any_sync(~0u, n0 > m0 || n1 > m1)) {
          const float c0 = exp2_fast(m0 - n0), c1 = exp2_fast(m1 - n1);
          l0 *= c0;
          l1 *= c1;
#pragma unroll
          for (int i = 0; i < ACC; ++i) { o[i][0] *= c0; o[i][1] *= c1; o[i][2] *= c0; o[i][3] *= c1; }
          m0 = n0;
          m1 = n1;
        }
        // A tile may be masked as a whole (window edge): its maximum is NEG and must add nothing.
        const float b0 = m0 == NEG ? 0.f : m0, b1 = m1 == NEG ? 0.f : m1;
        const float p0 = exp2_fast(s[0] - b0), p1 = exp2_fast(s[1] - b1), p2 = exp2_fast(s[2] - b0),
                    p3 = exp2_fast(s[3] - b1);
        l0 += p0 + p2;
        l1 += p1 + p3;
        float v0 = 1.f, v1 = 1.f;  // what a token's v is in units of; of one that is left out it may be NaN
        if constexpr (INT8 && !INT4) {
          v0 = s[0] == NEG ? 0.f : scales[TILE + g];
          v1 = s[2] == NEG ? 0.f : scales[TILE + g + 8];
        }
        const u32 w0 = movmatrix(pack_operand(p0 * v0, p1 * v0)),
                  w1 = movmatrix(pack_operand(p2 * v1, p3 * v1));
        const int vr = (lane & 7) + (lane >> 4) * 8, vc = (lane >> 3) & 1;
#pragma unroll
        for (int i = 0; i < V_CHUNKS / 2; ++i) {
          u32 a[4];
          ldmatrix_trans(a, vt + in_tile_at<V_BYTES>(vr, 2 * i + vc));
          if constexpr (INT4) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float* words = scales + (1 + 2 * i + h) * TILE + 2 * t;
              const uint2 x = *reinterpret_cast<const uint2*>(words);
              const uint2 y = *reinterpret_cast<const uint2*>(words + 8);
              const u32 sx = __byte_perm(x.x, x.y, 0x5410), lx = __byte_perm(x.x, x.y, 0x7632);
              const u32 sy = __byte_perm(y.x, y.y, 0x5410), ly = __byte_perm(y.x, y.y, 0x7632);
#pragma unroll
              for (int j = 0; j < 2; ++j)
                multiply(o[4 * i + 2 * h + j], value(a[h], 2 * j, sx, lx), value(a[h], 2 * j + 1, sx, lx),
                         value(a[h + 2], 2 * j, sy, ly), value(a[h + 2], 2 * j + 1, sy, ly), w0, w1);
            }
          } else if constexpr (BYTES) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const Places x = places(a[h]), y = places(a[h + 2]);
              multiply(o[2 * i + h], x.even, x.odd, y.even, y.odd, w0, w1);
            }
          } else {
            multiply(o[i], a[0], a[1], a[2], a[3], w0, w1);
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(memory.empty(stage));
        next += WARPS, stage += WARPS;
        if (stage >= STAGES) next += STAGES - stage + warp, stage = warp, parity ^= 1;
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        l0 += __shfl_xor_sync(~0u, l0, d);
        l1 += __shfl_xor_sync(~0u, l1, d);
      }
    }
    memory.wait(MERGED, u - RESULTS);
    float* result = memory.results + u % RESULTS * RESULT;
    if (g == 0)
      *reinterpret_cast<float4*>(result + WARPS * GROUP * PITCH + (warp * 8 + t * 2) * 2) = {m0, l0, m1, l1};
    if (m0 != NEG) {  // the same in all lanes: some tile was its
#pragma unroll
      for (int i = 0; i < ACC; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int head = t * 2 + (j & 1);
          const int d = INT4    ? i / 2 * 32 + g * 4 + i % 2 * 2 + j / 2
                        : BYTES ? i * 16 + g * 2 + j / 2
                                : i * 16 + g + j / 2 * 8;
          if (head < GROUP) result[(warp * GROUP + head) * PITCH + d] = o[i][j];
        }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.bar(ATTENDED, u));
    before += x.count;
  }
}

__device__ __forceinline__ void add(float4& x, float f, float4 y) {
  x = {x.x + f * y.x, x.y + f * y.y, x.z + f * y.z, x.w + f * y.w};
}

// An unnormalised output: 4 places of a head, with the head's maximum and sum.
struct Sum {
  float4 x = {};
  float m = NEG, l = 0.f;
  template <int N>
  __device__ __forceinline__ void join(const float4 (&y)[N], const float2 (&ml)[N]) {
    float top = m;
#pragma unroll
    for (int i = 0; i < N; ++i) top = fmaxf(top, ml[i].x);
    const float f = exp2_fast(m - top);
    l *= f;
    x = {f * x.x, f * x.y, f * x.z, f * x.w};
    m = top;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float w = exp2_fast(ml[i].x - top);
      l += w * ml[i].y;
      add(x, w, y[i]);
    }
  }
};

// The warps that merge what those that attend have left of a unit, and write it; of a pair that several
// blocks share, the last to be done merges what all have left in global memory.
__device__ __forceinline__ void merge(const Params& p, const Memory& memory, const Shares& shares) {
  __shared__ bool last;
  const int thread = threadIdx.x - WARPS * 32;
  auto sync = [&]() { meet_at<MERGING>(1); };
  auto place = [&](int j) { return (j * MERGING + thread) * 4; };
  if (FUSED) pdl_wait();
  for (int u = 0;; ++u) {
    const Unit x = memory.get(u);
    if (x.count == 0) return;
    const bool whole = x.count == x.tiles;
    const float2* part_ml = reinterpret_cast<const float2*>(p.part_ml);
    Sum sums[EACH];
    auto join_prefixes = [&]() {
      for (int i = p.first[x.row]; i < p.first[x.row + 1]; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int e = place(j);
          if (e >= queries_of(x.head) * HD) break;
          const long long k = (long long)i * (p.kv_heads / SHARE * ALL) + first_query(x.head) + e / HD;
          const float4 y = *reinterpret_cast<const float4*>(p.prefix + k * HD + e % HD);
          sums[j].join<1>({y}, {{p.prefix_ml[2 * k], p.prefix_ml[2 * k + 1]}});
        }
    };
    if (CASCADE && whole) join_prefixes();
    memory.wait(ATTENDED, u);
    const float* result = memory.results + u % RESULTS * RESULT;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int e = place(j), head = e / HD;
      if (e >= GROUP * HD) break;
#pragma unroll
      for (int half = 0; half < WARPS; half += WARPS / 2) {
        float4 y[WARPS / 2];
        float2 ml[WARPS / 2];
#pragma unroll
        for (int i = 0; i < WARPS / 2; ++i) {
          const int warp = half + i;
          ml[i] = *reinterpret_cast<const float2*>(result + WARPS * GROUP * PITCH + (warp * 8 + head) * 2);
          y[i] = {};
          if (ml[i].x != NEG)
            y[i] = *reinterpret_cast<const float4*>(result + (warp * GROUP + head) * PITCH + e % HD);
        }
        sums[j].join(y, ml);
      }
    }
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory.bar(MERGED, u));
    if (!whole) {
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int e = place(j);
        if (e >= GROUP * HD) break;
        __stcg(reinterpret_cast<float4*>(p.part + (long long)x.slot * GROUP * HD + e), sums[j].x);
        if (e % HD == 0)
          __stcg(reinterpret_cast<float2*>(p.part_ml) + x.slot * GROUP + e / HD,
                 make_float2(sums[j].m, sums[j].l));
        sums[j] = {};
      }
      // Of the pair, in the list of all tiles.
      const int start = memory.cum[x.row] * p.kv_heads + x.head * x.tiles;
      const int first = shares.first_inside(start) - 1,
                parts = shares.last_inside(start + x.tiles) - first + 1;
      sync();
      if (thread == 0) {
        int* count = p.count + x.row * p.kv_heads + x.head;
        last = count_one(count) == parts - 1;
        if (last) *count = 0;
      }
      sync();
      if (!last) continue;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int e = place(j);
        if (e >= GROUP * HD) break;
        for (int base = 0; base < parts; base += BATCH) {
          float4 y[BATCH];
          float2 ml[BATCH];
#pragma unroll
          for (int i = 0; i < BATCH; ++i) {
            const bool live = base + i < parts;
            const int slot = 2 * (first + base + i) + (base + i == 0 ? 1 : 0);
            ml[i] = live ? __ldcg(part_ml + slot * GROUP + e / HD) : make_float2(NEG, 0.f);
            y[i] = live ? __ldcg(reinterpret_cast<const float4*>(p.part + (long long)slot * GROUP * HD + e))
                        : float4{};
          }
          sums[j].join(y, ml);
        }
      }
      if (CASCADE) join_prefixes();
    }
    bf16* out = p.out + (long long)(x.row * (p.kv_heads / SHARE * ALL) + first_query(x.head)) * HD;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (place(j) >= queries_of(x.head) * HD) break;
      const Sum& sum = sums[j];
      const float sink =
          p.sinks ? exp2_fast(p.sinks[first_query(x.head) + place(j) / HD] * LOG2E - sum.m) : 0.f;
      const float f = (FP8 ? p.v_scale : 1.f) / (sum.l + sink);
      *reinterpret_cast<uint2*>(out + place(j)) = {pack2(sum.x.x * f, sum.x.y * f),
                                                   pack2(sum.x.z * f, sum.x.w * f)};
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
    decode_attention(const __grid_constant__ Params p) {
  const Memory memory;
  if (threadIdx.x == 0) prefetch(p.pages);
  if (!FUSED) {
    pdl_wait();
    pdl_launch();
  }
  struct Row { int cum, len, slot, skip; };
  auto ask = [&](int i) -> Row {
    const bool row = i < p.rows;
    return {p.cum[i], row ? p.kv_len[i] : 0, row ? p.slots[i] : 0, CASCADE && row ? p.skip[i] : 0};
  };
  Row asked = {};  // for before barriers are set up, which the lanes of a warp do one by one: few each
  if (int(threadIdx.x) <= p.rows) asked = ask(threadIdx.x);
  for (int i = threadIdx.x % 32 * (THREADS / 32) + threadIdx.x / 32; i < STAGES * 2 + UNITS * 4;
       i += THREADS) {
    const int kind = i < STAGES * 2 ? -1 : (i - STAGES * 2) / UNITS;
    const int who = kind == PREPARED   ? PREPARERS
                    : kind == ATTENDED ? WARPS
                    : kind == MERGED   ? MERGERS
                    : INT8 && i < STAGES ? 1 + LANES
                                         : 1;
    barrier_init(memory.bars + i * 8, who);
  }
  barriers_visible();
  Shares shares(p, memory.cum);
  for (int i = threadIdx.x; i <= p.rows; i += THREADS) {
    if (i >= THREADS) asked = ask(i);
    memory.cum[i] = asked.cum, memory.len[i] = asked.len;
    memory.slot[i] = asked.slot, memory.skip[i] = asked.skip;
  }
  __syncthreads();
  if (memory.cum[p.rows] == 0) {
    if (FUSED) pdl_wait();  // whoever waits for this kernel relies on it
    return;
  }
  shares.cut();
  if (blockIdx.x >= shares.blocks) return;
  const int warp = threadIdx.x / 32;
  if (warp < WARPS) return attend(p, memory, warp);
  if (warp < WARPS + MERGERS) return merge(p, memory, shares);
  if (warp < WARPS + MERGERS + PREPARERS) return prepare(p, memory, warp - WARPS - MERGERS);
  load(p, memory, shares);
}
