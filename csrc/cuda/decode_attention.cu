// Paged decode attention for one query token a row: grouped heads on tensor cores, work split evenly over the chip.
//
// All (row, kv head) pairs are cut into tiles of 16 tokens and laid end to end; block c of C takes the c-th equal share,
// whatever the lengths are (the stream-K idea), so one launch of fixed size serves every batch and a graph can replay it.
// A border that falls close to the edge of a pair is moved there. A pair that several blocks share is merged by the last
// of them to finish, which costs about as much as SNAP tiles. Inside a block each warp walks its own tiles
// with its own cp.async ring, and scores are computed transposed (S^T = K Q^T, O^T = V^T P^T), so that the group of query
// heads fills the narrow side (8) of the tensor-core instruction.
//
// FUSED: q, k and v come straight from the projection; RMSNorm and rotation happen in registers and the new token's k and v
// go to the page and into the tile at hand. Nothing but q and the new token then depends on the kernel before, so the
// first tiles are loaded while it runs. (The kernels before that one have finished: each lets its successor start only
// after it has itself waited.)
//
// CASCADE: the first `skip` tokens of a row were attended elsewhere, together with the rows that share them; their partial
// results join the row's own when it is written.
//
// FP8: k and v are e4m3. A byte becomes a half-precision number by moving its bits, 2^-8 times too small, which the scales
// make good; a word then holds two numbers of even and two of odd places, so places are permuted: of k's dims alike in q, of
// v's dims in the output.
#include "common.cuh"

#ifndef HD
#define HD 128
#endif
#ifndef GROUP  // query heads per kv head, at most 8
#define GROUP 4
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef PAGE_TILES  // page size / 16
#define PAGE_TILES 1
#endif
#ifndef MIN_TILES  // tiles a block takes at least
#define MIN_TILES 8
#endif
#ifndef SNAP
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

constexpr int TILE = 16;
constexpr int ELEMENT = FP8 ? 1 : 2;       // bytes
constexpr int TOKEN_BYTES = HD * ELEMENT;
constexpr int CHUNKS = TOKEN_BYTES / 16;
constexpr int TILE_BYTES = TILE * TOKEN_BYTES;  // of K, and of V
constexpr int RING_BYTES = WARPS * STAGES * 2 * TILE_BYTES;
constexpr int ACC = HD / 16, THREADS = WARPS * 32;
constexpr int EACH = (GROUP * HD + THREADS - 1) / THREADS;  // outputs of a thread
constexpr int EARLY = CASCADE && EACH <= 8 ? 2 : 0;  // partial results of a prefix that are fetched before they are needed
constexpr int BATCH = 64;  // partial results merged at a time
constexpr float NEG = -1e30f;
constexpr float PREFIX_UNIT = FP8 ? 1.f / 256 : 1.f;  // prefixes' results are in units of what is stored

struct Params {
  const bf16* q;          // [R, q_stride]; FUSED: q heads, k heads, v heads of a row, else q heads
  unsigned char* k;       // element (page p, head h, token i) at p * page_stride + h * head_stride + i * HD
  unsigned char* v;
  bf16* out;              // [R, Hkv * GROUP * HD]
  const int* page_table;  // [slots, table_stride]
  const int* slots;       // [R]
  const int* kv_len;      // [R]; 0 = padding row
  const int* cum;         // [R + 1]: tiles of the rows before
  float* part;            // [2 C, GROUP, HD] unnormalised partial outputs
  float* part_ml;         // [2 C, GROUP, 2] their maxima and sums
  int* count;             // [R * Hkv], zero before and after
  const float* q_norm;    // FUSED: [HD] or null
  const float* k_norm;
  const float* cos_sin;   // FUSED: [positions, HD], cosines then sines
  const int* skip;        // CASCADE: [R], tokens, whole tiles
  const int* first;       // CASCADE: [R + 1]: partial results of the rows before
  const float* prefix;    // CASCADE: [first[R], Hkv * GROUP, HD] unnormalised
  const float* prefix_ml; // CASCADE: [first[R], Hkv * GROUP, 2] maxima and sums
  long long page_stride, head_stride;
  int q_stride, table_stride, rows, kv_heads, window;
  float eps;
  float scale, softcap;   // scale already times log2(e), or 1 / softcap with soft cap
  float k_inverse, v_inverse, v_scale;  // FP8: 1 / scales of what is stored, and v's times 2^8
};

struct Cursor {  // a place in the block's list of tiles
  int row, head, tile, end;  // current pair and tile; `end`: one past the last tile of this pair in this block
  int len, first;            // kv_len, first tile inside the window
  const int* pages;
};

// Tiles of a row: those that the window can see and nobody has attended yet.
__device__ __forceinline__ int first_tile(const Params& p, int row, int len) {
  if (CASCADE) return p.skip[row] / TILE;
  return p.window > 0 && len > p.window ? (len - p.window) / TILE : 0;
}

__device__ __forceinline__ void enter_row(const Params& p, Cursor& c, int row) {
  c.row = row;
  c.len = p.kv_len[row];
  c.first = first_tile(p, row, c.len);
  c.pages = p.page_table + (long long)p.slots[row] * p.table_stride;
}

// How many blocks work: whole pairs or equal parts of pairs each, if that keeps (nearly) all of them busy or pairs are short.
__device__ __forceinline__ int working_blocks(const Params& p, int total) {
  const int most = gridDim.x, pairs = p.rows * p.kv_heads;
  if (pairs > most) {
    const int each = (pairs + most - 1) / most, even = (pairs + each - 1) / each;
    return min(total, even * 10 >= most * 9 ? even : most);
  }
  const int even = pairs * max(1, min(most / pairs, total / (pairs * MIN_TILES)));
  return min(total, even * 20 >= most * 17 || total < most * 24 ? even : most);
}

struct Borders {
  long long total;
  int blocks, snap;
  __device__ __forceinline__ int raw(int block) const { return int(total * block / blocks); }
  // The row that holds `tile`: a warp looks at 32 rows at a time.
  __device__ __forceinline__ static int row_of(const Params& p, int tile) {
    const int lane = threadIdx.x % 32;
    int lo = 0;
    for (int n = p.rows; n > 1;) {
      const int step = (n + 31) / 32;
      const bool before = lane * step < n && p.cum[lo + lane * step] * p.kv_heads <= tile;
      const int part = __popc(__ballot_sync(~0u, before)) - 1;
      lo += part * step;
      n = min(step, n - part * step);
    }
    return lo;
  }
  // First tile of a block.
  __device__ __forceinline__ int at(const Params& p, int block) const {
    const int x = raw(block);
    if (block == 0 || block == blocks) return x;
    const int row = row_of(p, x), start = p.cum[row] * p.kv_heads, n = p.cum[row + 1] - p.cum[row];
    const int off = (x - start) % n;
    return off < snap ? x - off : n - off < snap ? x - off + n : x;
  }
  // Borders strictly inside the pair [start, end): the first and the last block that begin there.
  __device__ __forceinline__ int first_inside(int start) const { return int(((start + snap) * (long long)blocks + total - 1) / total); }
  __device__ __forceinline__ int last_inside(int end) const { return int(((end - snap + 1) * (long long)blocks + total - 1) / total) - 1; }
};

__device__ __forceinline__ float round_bf(float x) { return lo2f(pack2(x, 0.f)); }

// Two floats as bf16, or as fp16 with FP8: what the tensor cores take.
__device__ __forceinline__ u32 pack_operand(float lo, float hi) {
  if (!FP8) return pack2(lo, hi);
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (!FP8) return mma(d, a0, a1, a2, a3, b0, b1);
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Bytes 0 and 2, or 1 and 3, of a word of e4m3 as fp16, 2^-8 times as large.
__device__ __forceinline__ u32 even_halves(u32 x) { return (x << 8 & 0x80008000u) | (x << 7 & 0x3f803f80u); }
__device__ __forceinline__ u32 odd_halves(u32 x) { return (x & 0x80008000u) | (x >> 1 & 0x3f803f80u); }
__device__ __forceinline__ unsigned short to_e4m3(float lo, float hi) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
// Where a 16-byte chunk of a token lies in a tile, so that 8 tokens' same chunks are in different banks.
__device__ __forceinline__ u32 in_tile_at(int row, int chunk) {
  return row * TOKEN_BYTES + (CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3)) * 16;
}
// The first of two dims that lane t holds as number j of the q fragment of 16 dims.
__device__ __forceinline__ int q_dim(int t, int j) { return FP8 ? t * 4 + j * 2 : t * 2 + j * 8; }
// Its four numbers as fragment.
__device__ __forceinline__ void q_fragment(u32 (&qf)[2], float x0, float x1, float x2, float x3) {
  qf[0] = FP8 ? pack_operand(x0, x2) : pack_operand(x0, x1);
  qf[1] = FP8 ? pack_operand(x1, x3) : pack_operand(x2, x3);
}

// q of head `g` of the row, normalised and rotated, as the B fragments of K Q^T.
__device__ __forceinline__ void prepare_q(const Params& p, const bf16* q, int position, int t, bool live, u32 (&qf)[ACC][2]) {
  float x[ACC][4];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ACC; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32 v = live ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, j)) : 0;
      x[i][2 * j] = lo2f(v);
      x[i][2 * j + 1] = hi2f(v);
      sum += x[i][2 * j] * x[i][2 * j] + x[i][2 * j + 1] * x[i][2 * j + 1];
    }
  if (p.q_norm) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float f = rsqrtf(sum / HD + p.eps);
#pragma unroll
    for (int i = 0; i < ACC; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(p.q_norm + i * 16 + q_dim(t, j));
        x[i][2 * j] = round_bf(x[i][2 * j] * f * w.x);
        x[i][2 * j + 1] = round_bf(x[i][2 * j + 1] * f * w.y);
      }
  }
  const float* table = p.cos_sin + (long long)position * HD;
#pragma unroll
  for (int i = 0; i < ACC / 2; ++i) {
    float a[4], b[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 c = *reinterpret_cast<const float2*>(table + i * 16 + q_dim(t, j));
      const float2 s = *reinterpret_cast<const float2*>(table + HD / 2 + i * 16 + q_dim(t, j));
      const float a0 = x[i][2 * j], a1 = x[i][2 * j + 1], b0 = x[i + ACC / 2][2 * j], b1 = x[i + ACC / 2][2 * j + 1];
      a[2 * j] = a0 * c.x - b0 * s.x;
      a[2 * j + 1] = a1 * c.y - b1 * s.y;
      b[2 * j] = b0 * c.x + a0 * s.x;
      b[2 * j + 1] = b1 * c.y + a1 * s.y;
    }
    q_fragment(qf[i], a[0], a[1], a[2], a[3]);
    q_fragment(qf[i + ACC / 2], b[0], b[1], b[2], b[3]);
  }
}

// The new token's k, normalised and rotated: this lane's dims are lane * PAIRS + j and HD / 2 further.
// As it is stored.
constexpr int PAIRS = HD / 64;
__device__ __forceinline__ void prepare_k(const Params& p, const bf16* k, int position, int lane, bf16 (&out)[2][PAIRS]) {
  float x[2][PAIRS];
  float sum = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      x[h][j] = bf2f(k[h * (HD / 2) + lane * PAIRS + j]);
      sum += x[h][j] * x[h][j];
    }
  if (p.k_norm) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float f = rsqrtf(sum / HD + p.eps);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) x[h][j] = round_bf(x[h][j] * f * p.k_norm[h * (HD / 2) + lane * PAIRS + j]);
  }
  const float* table = p.cos_sin + (long long)position * HD + lane * PAIRS;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const float c = table[j], s = table[HD / 2 + j];
    const float a = x[0][j] * c - x[1][j] * s, b = x[1][j] * c + x[0][j] * s;
    out[0][j] = FP8 ? to_e4m3(a * p.k_inverse, 0.f) : f2bf(a);
    out[1][j] = FP8 ? to_e4m3(b * p.k_inverse, 0.f) : f2bf(b);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_attention(const Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  float* merge_o = reinterpret_cast<float*>(smem + RING_BYTES);  // [WARPS][GROUP][HD]
  float* merge_ml = merge_o + WARPS * GROUP * HD;                // [WARPS][8][2]
  __shared__ int is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (!FUSED) {
    pdl_wait();
    pdl_launch();
  }

  const int total = p.cum[p.rows] * p.kv_heads;
  if (total == 0) {
    if (FUSED) pdl_wait();  // whoever waits for this kernel relies on it
    return;
  }
  Borders borders{total, working_blocks(p, total), 0};
  borders.snap = max(1, min(SNAP, total / borders.blocks / 4));
  const int block = blockIdx.x;
  if (block >= borders.blocks) return;
  const int begin = borders.at(p, block), stop = borders.at(p, block + 1);
  if (begin >= stop) return;
  const int lo = Borders::row_of(p, begin);
  Cursor at;  // consumer
  enter_row(p, at, lo);
  int left = stop - begin;  // tiles of this block from the consumer's pair on
  {
    const int n = p.cum[lo + 1] - p.cum[lo], off = begin - p.cum[lo] * p.kv_heads;
    at.head = off / n;
    at.tile = off - at.head * n;
    at.end = min(n, at.tile + left);
  }
  int tiles = p.cum[at.row + 1] - p.cum[at.row];
  Cursor in = at;  // producer: the next tile to load is in.tile + warp (strided by WARPS)
  int in_left = left, in_tiles = tiles, in_tile = in.tile + warp;
  bool in_done = false;

  const u32 ring = smem_addr(smem) + warp * (STAGES * 2 * TILE_BYTES);
  auto advance_producer = [&]() {  // to a pair that has a tile for this warp
    while (!in_done && in_tile >= in.end) {
      in_left -= in.end - in.tile;
      if (in_left <= 0) { in_done = true; break; }
      if (++in.head == p.kv_heads) {
        in.head = 0;
        int row = in.row;
        do { ++row; in_tiles = p.cum[row + 1] - p.cum[row]; } while (in_tiles == 0);
        enter_row(p, in, row);
      }
      in.tile = 0;
      in.end = min(in_tiles, in_left);
      in_tile = warp;
    }
  };
  auto load = [&](int stage) {
    if (!in_done) {
      const int tile = in_tile + in.first, page = in.pages[tile / PAGE_TILES];
      const long long base = page * p.page_stride + in.head * p.head_stride + (tile % PAGE_TILES) * (TILE * HD);
      const u32 dst = ring + stage * (2 * TILE_BYTES);
#pragma unroll
      for (int j = 0; j < TILE * CHUNKS / 32; ++j) {
        const int i = j * 32 + lane, row = i / CHUNKS, chunk = i % CHUNKS;
        const u32 bytes = tile * TILE + row < in.len - FUSED ? 16 : 0;  // FUSED: the last token is not there yet
        const u32 to = dst + in_tile_at(row, chunk);
        cp_async16(to, p.k + base * ELEMENT + i * 16, bytes);
        cp_async16(to + TILE_BYTES, p.v + base * ELEMENT + i * 16, bytes);
      }
      in_tile += WARPS;
      advance_producer();
    }
    cp_async_commit();
  };
  advance_producer();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  if (FUSED) {
    pdl_wait();
    pdl_launch();
  }
  int stage = 0;

  while (left > 0) {
    u32 qf[ACC][2];
    const bf16* q = p.q + (long long)at.row * p.q_stride + (at.head * GROUP + g) * HD;
    bf16 new_k[2][PAIRS] = {};
    uint4 new_v = {};  // FP8: its first half
    int new_tile = -1;  // the tile of this warp that lacks the new token
    if (FUSED) {
      prepare_q(p, q, at.len - 1, t, g < GROUP, qf);
      if (at.end == tiles && (tiles - 1 - at.tile) % WARPS == warp) {
        new_tile = tiles - 1;
        const bf16* fresh = p.q + (long long)at.row * p.q_stride + (p.kv_heads * GROUP + at.head) * HD;
        prepare_k(p, fresh, at.len - 1, lane, new_k);
        const int last = at.len - 1, page = at.pages[last / TILE / PAGE_TILES];
        const long long place = page * p.page_stride + at.head * p.head_stride + (last % (TILE * PAGE_TILES)) * HD;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < PAIRS; ++j) {
            const long long d = place + h * (HD / 2) + lane * PAIRS + j;
            if (FP8) p.k[d] = (unsigned char)new_k[h][j]; else reinterpret_cast<bf16*>(p.k)[d] = new_k[h][j];
          }
        if (lane < HD / 8) {
          new_v = *reinterpret_cast<const uint4*>(fresh + p.kv_heads * HD + lane * 8);
          if (FP8) {
            const float f = p.v_inverse;
            auto four = [&](u32 a, u32 b) {
              return u32(to_e4m3(lo2f(a) * f, hi2f(a) * f)) | u32(to_e4m3(lo2f(b) * f, hi2f(b) * f)) << 16;
            };
            new_v = {four(new_v.x, new_v.y), four(new_v.z, new_v.w), 0, 0};
            *reinterpret_cast<uint2*>(p.v + place + lane * 8) = {new_v.x, new_v.y};
          } else {
            *reinterpret_cast<uint4*>(p.v + (place + lane * 8) * ELEMENT) = new_v;
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < ACC; ++i) {
        const u32 a = g < GROUP ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, 0)) : 0;
        const u32 b = g < GROUP ? *reinterpret_cast<const u32*>(q + i * 16 + q_dim(t, 1)) : 0;
        qf[i][0] = FP8 ? pack_operand(lo2f(a), lo2f(b)) : a;
        qf[i][1] = FP8 ? pack_operand(hi2f(a), hi2f(b)) : b;
      }
    }
    const bool whole = at.tile == 0 && at.end == tiles;
    const int prefixes = CASCADE ? p.first[at.row + 1] - p.first[at.row] : 0;
    auto prefix = [&](int i, int head) {  // the i-th prefix's result for a head
      return (long long)(p.first[at.row] + i) * p.kv_heads * GROUP + at.head * GROUP + head;
    };
    float early[EARLY + 1][EACH], early_m[EARLY + 1][EACH], early_l[EARLY + 1][EACH];
#pragma unroll
    for (int i = 0; i < EARLY; ++i)
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const int e = j * THREADS + threadIdx.x;
        early[i][j] = early_l[i][j] = 0.f;
        early_m[i][j] = NEG;
        if (whole && i < prefixes && e < GROUP * HD) {
          const long long k = prefix(i, e / HD);
          early[i][j] = p.prefix[k * HD + e % HD] * PREFIX_UNIT;
          early_m[i][j] = p.prefix_ml[2 * k];
          early_l[i][j] = p.prefix_ml[2 * k + 1];
        }
      }
    float o[ACC][4] = {};
    float m0 = NEG, m1 = NEG, l0 = 0.f, l1 = 0.f;  // heads 2t and 2t + 1; l is this lane's share
    const int oldest = p.window > 0 ? at.len - p.window : 0;

    for (int tile = at.tile + warp; tile < at.end; tile += WARPS) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();
      load(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 kt = ring + stage * (2 * TILE_BYTES), vt = kt + TILE_BYTES;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if (FUSED && tile == new_tile) {
        const int row = (at.len - 1) % TILE;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < PAIRS; ++j) {
            const int d = h * (HD / 2) + lane * PAIRS + j;
            const u32 to = kt + in_tile_at(row, d * ELEMENT / 16) + d * ELEMENT % 16;
            if (FP8) asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"(new_k[h][j]) : "memory");
            else asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(new_k[h][j]) : "memory");
          }
        if (lane < HD / 8) {
          const u32 to = vt + in_tile_at(row, lane * ELEMENT / 2) + (FP8 ? lane % 2 * 8 : 0);
          if (FP8) asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(new_v.x), "r"(new_v.y) : "memory");
          else asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(new_v.x), "r"(new_v.y), "r"(new_v.z), "r"(new_v.w) : "memory");
        }
        __syncwarp();
      }
      float s[4] = {};
      const int r = lane & 15, half = lane >> 4;
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; ++i) {
        u32 a[4];
        ldmatrix(a, kt + in_tile_at(r, 2 * i + half));
        if constexpr (FP8) {
          multiply(s, even_halves(a[0]), even_halves(a[1]), odd_halves(a[0]), odd_halves(a[1]), qf[2 * i][0], qf[2 * i][1]);
          multiply(s, even_halves(a[2]), even_halves(a[3]), odd_halves(a[2]), odd_halves(a[3]), qf[2 * i + 1][0], qf[2 * i + 1][1]);
        } else {
          multiply(s, a[0], a[1], a[2], a[3], qf[i][0], qf[i][1]);
        }
      }
      const int token = (tile + at.first) * TILE + g;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = s[j] * p.scale;
        if (SOFTCAP) {
          float y;
          asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
          x = y * p.softcap;
        }
        const int at_token = token + (j >= 2 ? 8 : 0);
        s[j] = at_token < at.len && at_token >= oldest ? x : NEG;
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
      const float p0 = exp2_fast(s[0] - b0), p1 = exp2_fast(s[1] - b1), p2 = exp2_fast(s[2] - b0), p3 = exp2_fast(s[3] - b1);
      l0 += p0 + p2;
      l1 += p1 + p3;
      const u32 w0 = movmatrix(pack_operand(p0, p1)), w1 = movmatrix(pack_operand(p2, p3));
      const int vr = (lane & 7) + (lane >> 4) * 8, vc = (lane >> 3) & 1;
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; ++i) {
        u32 a[4];
        ldmatrix_trans(a, vt + in_tile_at(vr, 2 * i + vc));
        if constexpr (FP8) {
          multiply(o[2 * i], even_halves(a[0]), odd_halves(a[0]), even_halves(a[2]), odd_halves(a[2]), w0, w1);
          multiply(o[2 * i + 1], even_halves(a[1]), odd_halves(a[1]), even_halves(a[3]), odd_halves(a[3]), w0, w1);
        } else {
          multiply(o[i], a[0], a[1], a[2], a[3], w0, w1);
        }
      }
      __syncwarp();
    }

    // Merge the warps' shares of this pair.
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      l0 += __shfl_xor_sync(~0u, l0, d);
      l1 += __shfl_xor_sync(~0u, l1, d);
    }
    __syncthreads();  // the previous pair's readers are done
    if (g == 0) {
      float* ml = merge_ml + (warp * 8 + t * 2) * 2;
      ml[0] = m0; ml[1] = l0; ml[2] = m1; ml[3] = l1;
    }
#pragma unroll
    for (int i = 0; i < ACC; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int head = t * 2 + (j & 1), d = i * 16 + (FP8 ? g * 2 + j / 2 : g + j / 2 * 8);
        if (head < GROUP) merge_o[(warp * GROUP + head) * HD + d] = o[i][j];
      }
    __syncthreads();
    const int pair_start = p.cum[at.row] * p.kv_heads + at.head * tiles;  // in the list of all tiles
    const int my_slot = 2 * block + (at.tile == 0 ? 1 : 0);  // a pair's first part ends its block, the others begin theirs
    bf16* out = p.out + (long long)(at.row * p.kv_heads + at.head) * GROUP * HD;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int e = j * THREADS + threadIdx.x, head = e / HD;
      if (e >= GROUP * HD) break;
      float m = NEG, l = 0.f, x = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) m = fmaxf(m, merge_ml[(w * 8 + head) * 2]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float f = exp2_fast(merge_ml[(w * 8 + head) * 2] - m);
        l += f * merge_ml[(w * 8 + head) * 2 + 1];
        x += f * merge_o[w * GROUP * HD + e];
      }
      if (whole) {
        auto join = [&](float other_m, float other_l, float other) {
          const float top = fmaxf(m, other_m), a = exp2_fast(m - top), b = exp2_fast(other_m - top);
          l = a * l + b * other_l;
          x = a * x + b * other;
          m = top;
        };
#pragma unroll
        for (int i = 0; i < EARLY; ++i) join(early_m[i][j], early_l[i][j], early[i][j]);
        for (int i = EARLY; i < prefixes; ++i) {
          const long long k = prefix(i, head);
          join(p.prefix_ml[2 * k], p.prefix_ml[2 * k + 1], p.prefix[k * HD + e % HD] * PREFIX_UNIT);
        }
        out[e] = f2bf(x / l * (FP8 ? p.v_scale : 1.f));
      } else {
        __stcg(p.part + (long long)my_slot * GROUP * HD + e, x);
        if (e % HD == 0) {
          __stcg(p.part_ml + (my_slot * GROUP + head) * 2, m);
          __stcg(p.part_ml + (my_slot * GROUP + head) * 2 + 1, l);
        }
      }
    }
    if (!whole) {
      __threadfence();
      __syncthreads();
      const int first_block = borders.first_inside(pair_start) - 1, last_block = borders.last_inside(pair_start + tiles);
      int* count = p.count + at.row * p.kv_heads + at.head;
      if (threadIdx.x == 0) {
        is_last = atomicAdd(count, 1) == last_block - first_block;
        if (is_last) *count = 0;
      }
      __syncthreads();
      if (is_last) {
        __threadfence();
        const int parts = last_block - first_block + 1;
        auto slot = [&](int i) { return 2 * (first_block + i) + (i == 0 ? 1 : 0); };
        for (int head = warp; head < GROUP; head += WARPS) {
          float m = NEG, l = 0.f;
          for (int i = lane; i < prefixes; i += 32) m = fmaxf(m, p.prefix_ml[2 * prefix(i, head)]);
          for (int i = lane; i < parts; i += 32) m = fmaxf(m, __ldcg(p.part_ml + (slot(i) * GROUP + head) * 2));
#pragma unroll
          for (int d = 1; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
          for (int i = lane; i < parts; i += 32) {
            const float* ml = p.part_ml + (slot(i) * GROUP + head) * 2;
            l += exp2_fast(__ldcg(ml) - m) * __ldcg(ml + 1);
          }
          for (int i = lane; i < prefixes; i += 32) {
            const float* ml = p.prefix_ml + 2 * prefix(i, head);
            l += exp2_fast(ml[0] - m) * ml[1];
          }
#pragma unroll
          for (int d = 1; d < 32; d *= 2) l += __shfl_xor_sync(~0u, l, d);
          if (lane == 0) {
            merge_ml[head * 2] = m;
            merge_ml[head * 2 + 1] = 1.f / l;
          }
        }
        float x[EACH] = {};
        float* weight = merge_o;  // [BATCH][GROUP]
        for (int base = 0; base < parts; base += BATCH) {
          const int count = min(BATCH, parts - base);
          __syncthreads();
          for (int i = threadIdx.x; i < count * GROUP; i += THREADS)
            weight[i] = exp2_fast(__ldcg(p.part_ml + (slot(base + i / GROUP) * GROUP + i % GROUP) * 2) - merge_ml[i % GROUP * 2]);
          __syncthreads();
#pragma unroll 4
          for (int i = 0; i < count; ++i) {
            const float* part = p.part + (long long)slot(base + i) * GROUP * HD;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
              const int e = j * THREADS + threadIdx.x;
              if (e < GROUP * HD) x[j] += weight[i * GROUP + e / HD] * __ldcg(part + e);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int e = j * THREADS + threadIdx.x;
          for (int i = 0; i < prefixes && e < GROUP * HD; ++i) {
            const long long o = prefix(i, e / HD);
            x[j] += exp2_fast(p.prefix_ml[2 * o] - merge_ml[e / HD * 2]) * p.prefix[o * HD + e % HD] * PREFIX_UNIT;
          }
          if (e < GROUP * HD) out[e] = f2bf(x[j] * merge_ml[e / HD * 2 + 1] * (FP8 ? p.v_scale : 1.f));
        }
      }
    }

    left -= at.end - at.tile;
    if (left > 0) {
      if (++at.head == p.kv_heads) {
        at.head = 0;
        int row = at.row;
        do { ++row; tiles = p.cum[row + 1] - p.cum[row]; } while (tiles == 0);
        enter_row(p, at, row);
      }
      at.tile = 0;
      at.end = min(tiles, left);
    }
  }
}
