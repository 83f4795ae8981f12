// Causal attention over KV pages, read in place, with online softmax.
//
// A task takes a block of query tokens of one row and the q heads that share one kv head, so that KV is read
// once for all of them. History is walked in blocks of 64 tokens (K transposed and V widened into scratch,
// then two small matrix products) inside segments of 256, whose results are merged in order. Blocks and
// segments lie at absolute positions, and masked tokens contribute exactly nothing, so a token's result
// depends neither on the other rows, nor on how the prompt was cut into steps, nor on whether segments went
// to different threads. Segments that the histories of several decoded rows have in common, page for page,
// are computed for all of these rows together.
//
// Of int8 pages the scales of k multiply the scores, and those of v the weights; queries are turned by the
// Hadamard matrix that keys were turned by (``turn`` in elementwise.cpp).
//
// in: 0 q [T, n * k]; out: 0 [T, n * k]; n: q heads, k: head dim; f: 0 scale, 1 softcap
// p: 0 sinks [n], 1 slopes [n], of int8 pages 3 scales of k and 4 of v [pages, kv heads, page size]
// a: 0 kv heads, 1 window (below 0: chunks), 2 Cached, 3 page stride, 4 token stride, 5 head stride, 6 k,
// 7 v, 8 y is bfloat16, 9 cache group

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace {

constexpr int BLOCK = 64;
constexpr int SEGMENT = 256;
constexpr int TASK_ROWS = 96;
constexpr size_t SHARERS = 3;  // rows that make a common prefix worth a task of its own
constexpr int FEW_ROWS = 4;  // up to here K and V are used as they come, without a copy in scratch

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Shape {
  int64_t heads, dim, kv_heads, group, window, width;  // width: dim rounded up to whole panels
  float scale, softcap;
  Cached type;

  explicit Shape(const Instr& i)
      : heads(i.n), dim(i.k), kv_heads(i.a[0]), group(i.n / i.a[0]), window(i.a[1]),
        width(round_up(i.k, PANEL)), scale(i.f[0]), softcap(i.f[1]), type((Cached)i.a[2]) {}

  // The first token that the one at ``position`` sees.
  int64_t first(int64_t position) const {
    if (window < 0) return position - position % -window;
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
  }
  int64_t max_rows() const { return std::max<int64_t>(group, TASK_ROWS / group * group); }
  int64_t state_size(int64_t rows) const { return rows * width + 2 * round_up(rows, LANES); }
  int64_t state_size() const { return state_size(max_rows()); }
};

// Online softmax of some rows: maxima, sums, and unnormalized outputs as panels [width / 32][rows][32].
struct State {
  float *m, *l, *o;
  int64_t rows, panels;

  State(float* memory, int64_t rows, int64_t width)
      : m(memory), l(m + round_up(rows, LANES)), o(l + round_up(rows, LANES)), rows(rows),
        panels(width / PANEL) {}

  void clear() {
    std::fill(m, l, -INFINITY);
    std::fill(l, l + rows, 0.0f);
    std::fill(o, o + panels * rows * PANEL, 0.0f);
  }

  void scale_row(int64_t r, float by) {
    for (int64_t p = 0; p < panels; p++) {
      float* x = o + (p * rows + r) * PANEL;
      for (int j = 0; j < PANEL; j++) x[j] *= by;
    }
  }

  // Rows from ``first`` on of ``s``, a state of more rows.
  void take(const State& s, int64_t first) {
    std::copy(s.m + first, s.m + first + rows, m);
    std::copy(s.l + first, s.l + first + rows, l);
    for (int64_t p = 0; p < panels; p++)
      std::memcpy(o + p * rows * PANEL, s.o + (p * s.rows + first) * PANEL, rows * PANEL * sizeof(float));
  }

  // Take in the later segment ``s``.
  void merge(const State& s) {
    for (int64_t r = 0; r < rows; r++) {
      if (s.l[r] == 0.0f) continue;
      float top = std::max(m[r], s.m[r]);
      float mine = std::exp(m[r] - top), theirs = std::exp(s.m[r] - top);
      m[r] = top;
      l[r] = l[r] * mine + s.l[r] * theirs;
      for (int64_t p = 0; p < panels; p++) {
        float *x = o + (p * rows + r) * PANEL, *y = s.o + (p * rows + r) * PANEL;
        for (int j = 0; j < PANEL; j++) x[j] = x[j] * mine + y[j] * theirs;
      }
    }
  }
};

struct Task {
  Context& c;
  const Instr& i;
  const Shape& s;
  const QueryBlock& q;
  int64_t head;  // kv head
  int64_t rows;
  // Of a prefix: as many blocks as ``q`` has tokens, which see all of ``common`` tokens.
  const int32_t* members = nullptr;
  int64_t common = 0;
  const Task* following = nullptr;
  // Of the block at hand and the one after it, also that of the following task, whose rows are fetched while
  // this one is computed: they are too short and too far apart for the hardware to see them coming.
  int64_t offsets[BLOCK], next[BLOCK];
  float *queries, *keys, *values, *scores, *weights, *tops, *state, *segment, *k_scales, *v_scales;

  Task(Context& c, const Instr& i, const Shape& s, const QueryBlock& q, int64_t head)
      : c(c), i(i), s(s), q(q), head(head), rows(q.count * s.group) {
    float* p = (float*)c.scratch;
    auto take = [&](int64_t n) { float* r = p; p += round_up(n, 16); return r; };
    queries = take(s.max_rows() * s.dim);
    keys = take(BLOCK * s.dim);
    values = take(BLOCK * s.width);
    scores = take(s.max_rows() * BLOCK);
    weights = take(s.max_rows() * BLOCK);
    tops = take(round_up(s.max_rows(), LANES));
    state = take(s.state_size());
    segment = take(s.state_size());
    k_scales = take(BLOCK);
    v_scales = take(BLOCK);
  }

  int64_t end() const { return members ? common : q.position + q.count; }
  int64_t begin() const { return s.first(q.position); }

  void load_queries() {
    const float* x = c.at(i.in[0]) + head * s.group * s.dim;
    for (int64_t t = 0; t < q.count; t++) {
      int64_t token = members ? (*c.blocks)[members[t]].first : q.first + t;
      std::memcpy(queries + t * s.group * s.dim, x + token * s.heads * s.dim,
                  s.group * s.dim * sizeof(float));
    }
    if (s.type == KV_INT8)
      for (int64_t r = 0; r < rows; r++) hadamard(queries + r * s.dim, s.dim, hadamard_size(s.dim));
  }

  const int32_t* table() const {
    return c.step->page_table + i.a[9] * c.step->table_size + c.step->slots[q.row] * c.step->max_pages;
  }

  // Where tokens [at, at + count) of the row begin, in elements. Those behind the window, which are masked,
  // are not the row's any more: the window's first token stands in for them, since another request's may be
  // no numbers, and 0 times that is none either.
  void locate(int64_t at, int64_t count, int64_t* places) const {
    const int32_t* pages = table();
    int64_t size = c.step->page_size, page = at / size, offset = at % size;
    for (int64_t t = 0; t < count; page++, offset = 0) {
      int64_t place = pages[page] * i.a[3] + offset * i.a[4] + head * i.a[5];
      for (; offset < size && t < count; offset++, t++, place += i.a[4]) places[t] = place;
    }
    int64_t behind = begin() - at;
    for (int64_t t = 0; t < behind; t++) places[t] = places[behind];
  }

  // Of the tokens that ``locate`` finds, by the same rule.
  void load_scales(const float* from, int64_t at, int64_t count, float* scales) const {
    const int32_t* pages = table();
    int64_t size = c.step->page_size, page = at / size, offset = at % size;
    for (int64_t t = 0; t < count; page++, offset = 0) {
      const float* of_page = from + (pages[page] * s.kv_heads + head) * size;
      for (; offset < size && t < count; offset++, t++) scales[t] = of_page[offset];
    }
    int64_t behind = begin() - at;
    for (int64_t t = 0; t < behind; t++) scales[t] = scales[behind];
    std::fill(scales + count, scales + BLOCK, 0.0f);
  }

  void locate_first(int64_t* places) const {
    int64_t at = begin() / BLOCK * BLOCK;
    locate(at, std::min<int64_t>(BLOCK, end() - at), places);
  }

  static vf widen(const float* p) { return load(p); }
  static vf widen(const uint16_t* p) { return load_bf16(p); }
  static float widen1(const float* p) { return *p; }
  static float widen1(const uint16_t* p) { return from_bf16(*p); }
  static vf widen(const int8_t* p) { return load_int8(p); }
  static float widen1(const int8_t* p) { return *p; }

  // K into panels [2][dim][32 tokens].
  template <class E>
  void load_keys(const E* base, int64_t count) {
    for (int64_t t = count; t < round_up(count, LANES); t++) offsets[t] = offsets[0];
    for (int64_t t = 0; t < count; t += LANES) {
      float* out = keys + t / PANEL * s.dim * PANEL + t % PANEL;
      const int64_t *from = offsets + t, *then = next + t;
      int64_t d = 0;
      for (; d + LANES * 4 / (int64_t)sizeof(E) <= s.dim; d += LANES * 4 / sizeof(E)) {
        vf r[LANES];
        UNROLL for (int j = 0; j < LANES; j++) {
          r[j] = load((const float*)(base + from[j] + d));
          prefetch(base + then[j] + d);
        }
        transpose(r);
        UNROLL for (int j = 0; j < LANES; j++) put_key(out, d, j, r[j], base);
      }
      for (; d < s.dim; d++)
        for (int j = 0; j < LANES; j++) out[d * PANEL + j] = widen1(base + from[j] + d);
    }
  }

  static void put_key(float* out, int64_t d, int j, vf v, const float*) { store(out + (d + j) * PANEL, v); }

  // Pairs of dims were moved as one.
  static void put_key(float* out, int64_t d, int j, vf v, const uint16_t*) {
    store(out + (d + 2 * j) * PANEL, as_float((vi)v << 16));
    store(out + (d + 2 * j + 1) * PANEL, as_float((vi)v & (int32_t)0xffff0000));
  }

  // Four of them.
  static void put_key(float* out, int64_t d, int j, vf v, const int8_t*) {
    UNROLL for (int b = 0; b < 4; b++)
      store(out + (d + 4 * j + b) * PANEL, to_float(take_signed_byte((vi)v, b)));
  }

  // V into panels [width / 32][64][32 dims].
  template <class E>
  void load_values(const E* base, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const E* x = base + offsets[t];
      int64_t d = 0;
      for (; d + LANES <= s.dim; d += LANES)
        store(values + (d / PANEL * BLOCK + t) * PANEL + d % PANEL, widen(x + d));
      for (int64_t b = 0; b < s.dim; b += PANEL) prefetch(base + next[t] + b);
      for (; d < s.width; d++)
        values[(d / PANEL * BLOCK + t) * PANEL + d % PANEL] = d < s.dim ? widen1(x + d) : 0.0f;
    }
  }

  // scores = queries times K for few rows: 16 tokens at a time are transposed in registers. Sums run over the
  // dims in order, as in rows_times_panel.
  template <class E, int MR>
  void score_few(const E* base, int64_t count) {
    for (int64_t t = count; t < round_up(count, LANES); t++) offsets[t] = offsets[0];
    for (int64_t t = 0; t < count; t += LANES) {
      const int64_t *from = offsets + t, *then = next + t;
      vf acc[MR] = {};
      int64_t d = 0;
      for (; d + LANES * 4 / (int64_t)sizeof(E) <= s.dim; d += LANES * 4 / sizeof(E)) {
        vf r[LANES];
        UNROLL for (int j = 0; j < LANES; j++) {
          r[j] = load((const float*)(base + from[j] + d));
          prefetch(base + then[j] + d);
        }
        transpose(r);
        UNROLL for (int j = 0; j < LANES; j++) add_key<MR>(acc, d, j, r[j], base);
      }
      for (; d < s.dim; d++) {
        vf v;
        for (int j = 0; j < LANES; j++) v[j] = widen1(base + from[j] + d);
        UNROLL for (int m = 0; m < MR; m++) acc[m] += splat(queries[m * s.dim + d]) * v;
      }
      UNROLL for (int m = 0; m < MR; m++) store(scores + (t / PANEL * MR + m) * PANEL + t % PANEL, acc[m]);
    }
  }

  template <int MR>
  INLINE void add_key(vf* acc, int64_t d, int j, vf v, const float*) {
    UNROLL for (int m = 0; m < MR; m++) acc[m] += splat(queries[m * s.dim + d + j]) * v;
  }
  template <int MR>
  INLINE void add_key(vf* acc, int64_t d, int j, vf v, const uint16_t*) {
    vf even = as_float((vi)v << 16), odd = as_float((vi)v & (int32_t)0xffff0000);
    UNROLL for (int m = 0; m < MR; m++) acc[m] += splat(queries[m * s.dim + d + 2 * j]) * even;
    UNROLL for (int m = 0; m < MR; m++) acc[m] += splat(queries[m * s.dim + d + 2 * j + 1]) * odd;
  }

  template <int MR>
  INLINE void add_key(vf* acc, int64_t d, int j, vf v, const int8_t*) {
    UNROLL for (int b = 0; b < 4; b++) {
      vf x = to_float(take_signed_byte((vi)v, b));
      UNROLL for (int m = 0; m < MR; m++) acc[m] += splat(queries[m * s.dim + d + 4 * j + b]) * x;
    }
  }

  // o += weights times V for few rows, P panels of dims at a time. bfloat16 is summed up with even and odd
  // dims apart.
  template <class E, int MR, int P>
  void add_few(const E* base, int64_t count, State& state, int64_t panel) {
    constexpr int PAIRS = PANEL / (2 * LANES);
    vf acc[MR][P][PAIRS][2];
    auto out = [&](int m, int p, int i) { return state.o + ((panel + p) * MR + m) * PANEL + i * 2 * LANES; };
    UNROLL for (int m = 0; m < MR; m++)
      UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int i = 0; i < PAIRS; i++) {
          acc[m][p][i][0] = load(out(m, p, i));
          acc[m][p][i][1] = load(out(m, p, i) + LANES);
          if (sizeof(E) == 2) deinterleave(acc[m][p][i]);
        }
    for (int64_t t = 0; t < count; t++) {
      const E *x = base + offsets[t] + panel * PANEL, *then = base + next[t] + panel * PANEL;
      UNROLL for (int p = 0; p < P; p++) {
        prefetch(then + p * PANEL);
        if (sizeof(E) == 4) prefetch(then + p * PANEL + PANEL / 2);
        UNROLL for (int i = 0; i < PAIRS; i++) {
          vf b[2];
          load_pair(x + p * PANEL + i * 2 * LANES, b);
          UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int h = 0; h < 2; h++) acc[m][p][i][h] += splat(weights[m * BLOCK + t]) * b[h];
        }
      }
    }
    UNROLL for (int m = 0; m < MR; m++)
      UNROLL for (int p = 0; p < P; p++)
        UNROLL for (int i = 0; i < PAIRS; i++) {
          if (sizeof(E) == 2) interleave(acc[m][p][i]);
          store(out(m, p, i), acc[m][p][i][0]);
          store(out(m, p, i) + LANES, acc[m][p][i][1]);
        }
  }

  static INLINE void load_pair(const float* p, vf* v) {
    v[0] = load(p);
    v[1] = load(p + LANES);
  }
  static INLINE void load_pair(const uint16_t* p, vf* v) {
    vi raw = load_int(p);
    v[0] = as_float(raw << 16);
    v[1] = as_float(raw & (int32_t)0xffff0000);
  }
  static INLINE void load_pair(const int8_t* p, vf* v) {
    v[0] = load_int8(p);
    v[1] = load_int8(p + LANES);
  }

  template <class E, int MR>
  void add_few(const E* base, int64_t count, State& state) {
    int64_t p = 0;
    for (; p + 2 <= state.panels; p += 2) add_few<E, MR, 2>(base, count, state, p);
    if (p < state.panels) add_few<E, MR, 1>(base, count, state, p);
  }

  template <class E>
  void add_weighted(const E* base, int64_t count, State& state) {
    if (s.dim == s.width && rows <= FEW_ROWS) {
      if (rows == 1) return add_few<E, 1>(base, count, state);
      if (rows == 2) return add_few<E, 2>(base, count, state);
      if (rows == 3) return add_few<E, 3>(base, count, state);
      return add_few<E, 4>(base, count, state);
    }
    load_values(base, count);
    for (int64_t p = 0; p < state.panels; p++)
      rows_times_panel<Kernels<F32, MAX_MR>::pick>(weights, BLOCK, (uint8_t*)(values + p * BLOCK * PANEL),
                                                   count, rows, state.o + p * rows * PANEL, false);
  }

  // Scores of row r (a head of the token at ``position``), scaled, capped, rising with their places and
  // masked, to weights. Returns their maximum, -inf if the row sees nothing.
  INLINE float mask(int64_t r, int64_t position, int64_t at, int64_t count) {
    int low = (int)std::max<int64_t>(0, s.first(position) - at);
    int high = (int)std::min(count, position + 1 - at);
    vf top = splat(-INFINITY);
    float slope = i.p[1] ? ((const float*)i.p[1])[head * s.group + r % s.group] : 0.0f;
    vi lane;
    UNROLL for (int j = 0; j < LANES; j++) lane[j] = j;
    UNROLL for (int t = 0; t < BLOCK; t += LANES) {
      // Scores of tokens past ``count`` were not computed: whatever lies there is masked.
      vf scale = s.type == KV_INT8 ? load(k_scales + t) * s.scale : splat(s.scale);
      vf x = load(scores + (t / PANEL * rows + r) * PANEL + t % PANEL) * scale;
      if (s.softcap != 0.0f) x = s.softcap * vtanh(x / s.softcap);
      vi place = lane + t;
      if (slope != 0.0f) x += slope * to_float(place + (int)at);
      x = (place >= low) & (place < high) ? x : splat(-INFINITY);
      store(weights + r * BLOCK + t, x);
      top = vmax(top, x);
    }
    return max_of(top);
  }

  // New maxima of all rows; ``tops`` become what earlier sums are to be multiplied with.
  void raise(State& state) {
    for (int64_t r = 0; r < rows; r += LANES) {
      vf old = load(state.m + r), m = vmax(old, load(tops + r));
      store(state.m + r, m);
      store(tops + r, vexp(m == splat(-INFINITY) ? m : old - m));
    }
  }

  // Weights of row r become exp(score - maximum); earlier sums decay.
  INLINE void soften(State& state, int64_t r) {
    float* w = weights + r * BLOCK;
    // A row that has seen nothing has no maximum.
    vf total{}, m = splat(state.m[r] == -INFINITY ? 0.0f : state.m[r]);
    UNROLL for (int t = 0; t < BLOCK; t += LANES) {
      vf e = vexp(load(w + t) - m);
      total += e;
      store(w + t, s.type == KV_INT8 ? e * load(v_scales + t) : e);
    }
    float decay = tops[r];
    state.l[r] = state.l[r] * decay + sum(total);
    if (decay != 1.0f) state.scale_row(r, decay);
  }

  template <class E>
  void score(const E* base, int64_t count) {
    if (rows == 1) return score_few<E, 1>(base, count);
    if (rows == 2) return score_few<E, 2>(base, count);
    if (rows == 3) return score_few<E, 3>(base, count);
    if (rows == FEW_ROWS) return score_few<E, FEW_ROWS>(base, count);
    load_keys(base, count);
    for (int64_t p = 0; p * PANEL < count; p++)
      rows_times_panel<Kernels<F32, MAX_MR>::pick>(
          queries, s.dim, (uint8_t*)(keys + p * s.dim * PANEL), s.dim, rows, scores + p * rows * PANEL, true);
  }

  template <class E>
  void attend_block(State& state, int64_t at, int64_t count, const E* k, const E* v) {
    score(k, count);
    // In two passes, so that the maxima of many rows are in flight at once.
    for (int64_t t = 0, r = 0; t < q.count; t++)
      for (int64_t h = 0; h < s.group; h++, r++)
        tops[r] = mask(r, members ? common : q.position + t, at, count);
    raise(state);
    for (int64_t r = 0; r < rows; r++) soften(state, r);
    if (all_numbers(v, at, count)) return add_weighted(v, count, state);
    load_values(v, count);
    for (int64_t t = std::max<int64_t>(0, at - q.position); t < q.count; t++)
      for (int64_t p = 0; p < state.panels; p++)
        rows_times_panel<Kernels<F32, MAX_MR>::pick>(
            weights + t * s.group * BLOCK, BLOCK, (uint8_t*)(values + p * BLOCK * PANEL),
            std::min(count, q.position + t + 1 - at), s.group,
            state.o + (p * rows + t * s.group) * PANEL, false);
  }

  // False if a token of the block has values that are no numbers, and comes behind the first of the query's,
  // as a wrong guess may: 0 times these is none either, so each token's sum has to end with itself.
  template <class E>
  bool all_numbers(const E* base, int64_t at, int64_t count) const {
    if (members) return true;
    for (int64_t t = std::max<int64_t>(0, q.position + 1 - at); t < count; t++) {
      if (s.type == KV_INT8 ? !std::isfinite(v_scales[t]) : !finite(base + offsets[t], s.dim)) return false;
    }
    return true;
  }

  static bool finite(const float* x, int64_t n) {
    uint32_t top = 0;
    for (int64_t d = 0; d < n; d++) {
      uint32_t bits;
      std::memcpy(&bits, x + d, sizeof bits);
      top = std::max(top, bits & 0x7fffffff);
    }
    return top < 0x7f800000;
  }
  static bool finite(const uint16_t* x, int64_t n) {
    uint16_t top = 0;
    for (int64_t d = 0; d < n; d++) top = std::max<uint16_t>(top, x[d] & 0x7fff);
    return top < 0x7f80;
  }
  static bool finite(const int8_t*, int64_t) { return true; }

  void attend_segment(int64_t index, State& state) {
    state.clear();
    int64_t stop = std::min(end(), (index + 1) * SEGMENT);
    int64_t at = std::max(index * SEGMENT, begin() / BLOCK * BLOCK);
    for (; at < stop; at += BLOCK) {
      int64_t count = std::min<int64_t>(BLOCK, stop - at);
      locate(at, count, offsets);
      std::fill(next, next + BLOCK, offsets[0]);
      if (at + BLOCK < end())
        locate(at + BLOCK, std::min<int64_t>(BLOCK, end() - at - BLOCK), next);
      else if (following)
        following->locate_first(next);
      if (s.type == KV_F32) attend_block(state, at, count, (const float*)i.a[6], (const float*)i.a[7]);
      if (s.type == KV_BF16)
        attend_block(state, at, count, (const uint16_t*)i.a[6], (const uint16_t*)i.a[7]);
      if (s.type == KV_INT8) {
        load_scales((const float*)i.p[3], at, count, k_scales);
        load_scales((const float*)i.p[4], at, count, v_scales);
        attend_block(state, at, count, (const int8_t*)i.a[6], (const int8_t*)i.a[7]);
      }
    }
  }

  void write(const State& state) {
    int64_t width = s.heads * s.dim, ld = i.a[8] ? width + (width & 1) : width;
    for (int64_t r = 0; r < rows; r++) {
      int64_t token = q.first + r / s.group, h = head * s.group + r % s.group;
      float scale = 1.0f / (state.l[r] + (i.p[0] ? std::exp(((const float*)i.p[0])[h] - state.m[r]) : 0.0f));
      float* y = c.at(i.out[0]) + token * width + h * s.dim;
      uint16_t* y16 = (uint16_t*)c.at(i.out[0]) + token * ld + h * s.dim;
      for (int64_t p = 0; p < state.panels; p++) {
        const float* o = state.o + (p * rows + r) * PANEL;
        int64_t count = std::min<int64_t>(PANEL, s.dim - p * PANEL);
        if (i.a[8])
          for (int64_t d = 0; d < count; d++) y16[p * PANEL + d] = to_bf16(o[d] * scale);
        else
          for (int64_t d = 0; d < count; d++) y[p * PANEL + d] = o[d] * scale;
      }
    }
    if (i.a[8] && width != ld)
      for (int64_t t = 0; t < q.count; t++) ((uint16_t*)c.at(i.out[0]))[(q.first + t) * ld + width] = 0;
  }

  // ``done``: states of the first ``count`` segments, ``stride`` apart.
  void run(float* done = nullptr, int64_t count = 0, int64_t stride = 0) {
    load_queries();
    State total(state, rows, s.width), part(segment, rows, s.width);
    total.clear();
    for (int64_t g = 0; g < count; g++) total.merge(State(done + g * stride, rows, s.width));
    for (int64_t g = std::max(count, begin() / SEGMENT); g * SEGMENT < end(); g++) {
      attend_segment(g, part);
      total.merge(part);
    }
    write(total);
  }
};

bool splits(const Shape& s, int64_t blocks, int threads) {
  return threads > 1 && blocks * s.kv_heads < 4 * threads;
}

int64_t segments(const Step& step) {
  int32_t longest = 1;
  for (int64_t r = 0; r < step.rows; r++) longest = std::max(longest, step.kv_len[r]);
  return (longest + SEGMENT - 1) / SEGMENT;
}

// Few tasks and a long history: segments are computed by different threads, then merged in order.
void run_split(Context& c, const Instr& i, const Shape& s) {
  auto& blocks = *c.blocks;
  int64_t parts = segments(*c.step), tasks = blocks.size() * s.kv_heads;
  auto partial = [&](int64_t task, int64_t g) { return c.partials + (task * parts + g) * s.state_size(); };
  spread(c, 0, tasks * parts, [&](int64_t n) {
    int64_t task = n / parts, g = n % parts;
    Task t(c, i, s, blocks[task / s.kv_heads], task % s.kv_heads);
    if (g < t.begin() / SEGMENT || g * SEGMENT >= t.end()) return;
    t.load_queries();
    State state(partial(task, g), t.rows, s.width);
    t.attend_segment(g, state);
  });
  barrier(c);
  spread(c, 1, tasks, [&](int64_t task) {
    Task t(c, i, s, blocks[task / s.kv_heads], task % s.kv_heads);
    State total(t.state, t.rows, s.width);
    total.clear();
    for (int64_t g = t.begin() / SEGMENT; g * SEGMENT < t.end(); g++)
      total.merge(State(partial(task, g), t.rows, s.width));
    t.write(total);
  });
}

// States of common segments, for each block and kv head in the order of the prefixes.
struct Shared {
  Context& c;
  const Shape& s;
  int64_t stride;

  Shared(Context& c, const Shape& s) : c(c), s(s), stride(s.state_size(s.group)) {}

  // Of the ``member``-th block of prefix ``p``, which comes after ``before`` states of a head.
  float* states(const Prefix& p, int64_t before, int64_t member, int64_t head) const {
    return c.partials + ((before + member * p.segments) * s.kv_heads + head * p.segments) * stride;
  }

  // Compute them all, a task for each segment, kv head and as many members as fit.
  void compute(const Instr& i) const {
    int64_t most = s.max_rows() / s.group, tasks = 0;
    auto parts = [&](const Prefix& p) { return ((int64_t)p.blocks.size() + most - 1) / most; };
    for (const Prefix& p : *c.prefixes) tasks += parts(p) * p.segments * s.kv_heads;
    spread(c, 0, tasks, [&](int64_t n) {
      int64_t before = 0;
      const Prefix* p = c.prefixes->data();
      for (; n >= parts(*p) * p->segments * s.kv_heads; p++) {
        n -= parts(*p) * p->segments * s.kv_heads;
        before += p->blocks.size() * p->segments;
      }
      int64_t head = n % s.kv_heads, g = n / s.kv_heads % p->segments, part = n / s.kv_heads / p->segments;
      int64_t first = part * most, count = std::min<int64_t>(most, p->blocks.size() - first);
      QueryBlock q{(*c.blocks)[p->blocks[0]].row, 0, (int32_t)count, 0};
      Task t(c, i, s, q, head);
      t.members = p->blocks.data() + first;
      t.common = p->segments * SEGMENT;
      t.load_queries();
      State all(t.segment, t.rows, s.width);
      t.attend_segment(g, all);
      for (int64_t m = 0; m < count; m++)
        State(states(*p, before, first + m, head) + g * stride, s.group, s.width).take(all, m * s.group);
    });
  }
};

// Common segments first, then each row's own.
void run_shared(Context& c, const Instr& i, const Shape& s) {
  Shared shared(c, s);
  shared.compute(i);
  barrier(c);
  auto& blocks = *c.blocks;
  struct Place {
    const Prefix* prefix = nullptr;
    int64_t before, member;
  };
  std::vector<Place> places(blocks.size());
  int64_t before = 0;
  for (const Prefix& p : *c.prefixes) {
    for (size_t m = 0; m < p.blocks.size(); m++) places[p.blocks[m]] = {&p, before, (int64_t)m};
    before += p.blocks.size() * p.segments;
  }
  int64_t tasks = blocks.size() * s.kv_heads;
  spread(c, 1, tasks, [&](int64_t n) {
    int64_t at = tasks - 1 - n, head = at % s.kv_heads;
    Place& place = places[at / s.kv_heads];
    Task task(c, i, s, blocks[at / s.kv_heads], head);
    if (place.prefix)
      task.run(shared.states(*place.prefix, place.before, place.member, head), place.prefix->segments,
               shared.stride);
    else
      task.run();
  });
}

}  // namespace

int query_block(const Instr& i) { return (int)(Shape(i).max_rows() / Shape(i).group); }

std::vector<Prefix> find_prefixes(const Step& step, const std::vector<QueryBlock>& blocks) {
  std::vector<Prefix> found;
  if (SEGMENT % step.page_size) return found;
  int64_t pages = SEGMENT / step.page_size;  // of a segment
  auto table = [&](int32_t b) { return step.page_table + step.slots[blocks[b].row] * step.max_pages; };
  for (int32_t b = 0; b < (int32_t)blocks.size(); b++) {
    int64_t segments = blocks[b].count == 1 ? (blocks[b].position + 1) / SEGMENT : 0;
    if (segments == 0) continue;
    bool taken = false;
    for (Prefix& p : found) {
      const int32_t* other = table(p.blocks[0]);
      int64_t most = std::min(segments, p.segments), same = 0;
      while (same < most &&
             !std::memcmp(table(b) + same * pages, other + same * pages, pages * sizeof(int32_t)))
        same++;
      if (same == 0) continue;
      p.blocks.push_back(b);
      p.segments = same;
      taken = true;
      break;
    }
    if (!taken) found.push_back({{b}, segments});
  }
  found.erase(
      std::remove_if(found.begin(), found.end(), [](const Prefix& p) { return p.blocks.size() < SHARERS; }),
      found.end());
  return found;
}

int64_t partials_size(const Instr& i, const Step& step, int64_t blocks, const std::vector<Prefix>& prefixes,
                      int threads) {
  Shape s(i);
  int64_t states = 0;
  for (const Prefix& p : prefixes) states += p.blocks.size() * p.segments * s.kv_heads;
  if (states && !s.window) return states * s.state_size(s.group);
  return splits(s, blocks, threads) ? blocks * s.kv_heads * segments(step) * s.state_size() : 0;
}

void run_attention(Context& c, const Instr& i) {
  Shape s(i);
  auto& blocks = *c.blocks;
  if (!c.prefixes->empty() && !s.window) return run_shared(c, i, s);
  if (splits(s, blocks.size(), c.threads) && segments(*c.step) > 1) return run_split(c, i, s);
  // The longest histories first: they are the last query blocks of each row.
  int64_t tasks = blocks.size() * s.kv_heads;
  spread(c, 0, tasks, [&](int64_t n) {
    int64_t at = tasks - 1 - n, next = std::max<int64_t>(0, at - 1);
    Task task(c, i, s, blocks[at / s.kv_heads], at % s.kv_heads),
        following(c, i, s, blocks[next / s.kv_heads], next % s.kv_heads);
    task.following = &following;
    task.run();
  });
}
