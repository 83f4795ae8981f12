// Causal attention over KV pages, read in place, with online softmax.
//
// A task takes a block of query tokens of one row and the q heads that share one kv head, so that KV is read once for
// all of them. History is walked in blocks of 64 tokens (K transposed and V widened into scratch, then two small matrix
// products) inside segments of 256, whose results are merged in order. Blocks and segments lie at absolute positions,
// and masked tokens contribute exactly nothing, so a token's result depends neither on the other rows, nor on how the
// prompt was cut into steps, nor on whether segments went to different threads.
//
// in: 0 q [T, n * k]; out: 0 [T, n * k]; n: q heads, k: head dim; f: 0 scale, 1 softcap
// a: 0 kv heads, 1 window, 2 KV is bfloat16, 3 page stride, 4 token stride, 5 head stride, 6 k, 7 v, 8 y is bfloat16

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace {

constexpr int BLOCK = 64;
constexpr int SEGMENT = 256;
constexpr int TASK_ROWS = 96;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Shape {
  int64_t heads, dim, kv_heads, group, window, width;  // width: dim rounded up to whole panels
  float scale, softcap;
  bool bf16;

  explicit Shape(const Instr& i)
      : heads(i.n), dim(i.k), kv_heads(i.a[0]), group(i.n / i.a[0]), window(i.a[1]), width(round_up(i.k, PANEL)),
        scale(i.f[0]), softcap(i.f[1]), bf16(i.a[2]) {}

  int64_t max_rows() const { return std::max<int64_t>(group, TASK_ROWS / group * group); }
  int64_t state_size() const { return max_rows() * (width + 2); }
};

// Online softmax of some rows: maxima, sums, and unnormalized outputs as panels [width / 32][rows][32].
struct State {
  float *m, *l, *o;
  int64_t rows, panels;

  State(float* memory, int64_t rows, int64_t width)
      : m(memory), l(m + rows), o(l + rows), rows(rows), panels(width / PANEL) {}

  void clear() {
    std::fill(m, m + rows, -INFINITY);
    std::fill(l, l + rows, 0.0f);
    std::fill(o, o + panels * rows * PANEL, 0.0f);
  }

  void scale_row(int64_t r, float by) {
    for (int64_t p = 0; p < panels; p++) {
      float* x = o + (p * rows + r) * PANEL;
      for (int j = 0; j < PANEL; j++) x[j] *= by;
    }
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
  float *queries, *keys, *values, *scores, *weights, *state, *segment;

  Task(Context& c, const Instr& i, const Shape& s, const QueryBlock& q, int64_t head)
      : c(c), i(i), s(s), q(q), head(head), rows(q.count * s.group) {
    float* p = (float*)c.scratch;
    auto take = [&](int64_t n) { float* r = p; p += round_up(n, 16); return r; };
    queries = take(s.max_rows() * s.dim);
    keys = take(BLOCK * s.dim);
    values = take(BLOCK * s.width);
    scores = take(s.max_rows() * BLOCK);
    weights = take(s.max_rows() * BLOCK);
    state = take(s.state_size());
    segment = take(s.state_size());
  }

  int64_t end() const { return q.position + q.count; }
  int64_t begin() const { return s.window ? std::max<int64_t>(0, q.position - s.window + 1) : 0; }

  void load_queries() {
    const float* x = c.at(i.in[0]) + q.first * s.heads * s.dim + head * s.group * s.dim;
    for (int64_t t = 0; t < q.count; t++)
      std::memcpy(queries + t * s.group * s.dim, x + t * s.heads * s.dim, s.group * s.dim * sizeof(float));
  }

  // Tokens [at, at + count) of the row: K into panels [2][dim][32 tokens], V into panels [width / 32][64][32 dims].
  void load_block(int64_t at, int64_t count) {
    int64_t offsets[BLOCK];
    const int32_t* pages = c.step->page_table + c.step->slots[q.row] * c.step->max_pages;
    for (int64_t t = 0; t < count; t++) {
      int64_t page = (at + t) / c.step->page_size, offset = (at + t) % c.step->page_size;
      offsets[t] = pages[page] * i.a[3] + offset * i.a[4] + head * i.a[5];
    }
    if (s.bf16) {
      load_keys((const uint16_t*)i.a[6], offsets, count);
      load_values((const uint16_t*)i.a[7], offsets, count);
    } else {
      load_keys((const float*)i.a[6], offsets, count);
      load_values((const float*)i.a[7], offsets, count);
    }
  }

  static vf widen(const float* p) { return load(p); }
  static vf widen(const uint16_t* p) { return load_bf16(p); }
  static float widen1(const float* p) { return *p; }
  static float widen1(const uint16_t* p) { return from_bf16(*p); }

  template <class E>
  void load_keys(const E* base, const int64_t* offsets, int64_t count) {
    for (int64_t t = 0; t < round_up(count, PANEL); t += LANES) {
      float* out = keys + t / PANEL * s.dim * PANEL + t % PANEL;
      int64_t d = 0;
      for (; d + LANES <= s.dim; d += LANES) {
        vf r[LANES];
        UNROLL for (int j = 0; j < LANES; j++) r[j] = t + j < count ? widen(base + offsets[t + j] + d) : vf{};
        transpose(r);
        UNROLL for (int j = 0; j < LANES; j++) store(out + (d + j) * PANEL, r[j]);
      }
      for (; d < s.dim; d++)
        for (int j = 0; j < LANES; j++) out[d * PANEL + j] = t + j < count ? widen1(base + offsets[t + j] + d) : 0.0f;
    }
  }

  template <class E>
  void load_values(const E* base, const int64_t* offsets, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const E* x = base + offsets[t];
      int64_t d = 0;
      for (; d + LANES <= s.dim; d += LANES)
        store(values + (d / PANEL * BLOCK + t) * PANEL + d % PANEL, widen(x + d));
      for (; d < s.width; d++) values[(d / PANEL * BLOCK + t) * PANEL + d % PANEL] = d < s.dim ? widen1(x + d) : 0.0f;
    }
  }

  // Scores of row r against the block to weights; returns false if the row sees none of it.
  bool soften(State& state, int64_t r, int64_t at, int64_t count) {
    int64_t position = q.position + r / s.group;
    int64_t low = s.window ? position - s.window + 1 - at : 0, high = std::min(count, position + 1 - at);
    float* w = weights + r * BLOCK;
    if (low >= high) {
      std::fill(w, w + BLOCK, 0.0f);
      return false;
    }
    vf x[BLOCK / LANES], top = splat(state.m[r]);
    vi lane;
    UNROLL for (int j = 0; j < LANES; j++) lane[j] = j;
    UNROLL for (int b = 0; b < BLOCK / LANES; b++) {
      int t = b * LANES;
      if (t >= high) {
        x[b] = splat(-INFINITY);
        continue;
      }
      x[b] = load(scores + (t / PANEL * rows + r) * PANEL + t % PANEL) * s.scale;
      if (s.softcap != 0.0f) x[b] = s.softcap * vtanh(x[b] / s.softcap);
      vi place = lane + t;
      x[b] = (place >= (int)low) & (place < (int)high) ? x[b] : splat(-INFINITY);
      top = vmax(top, x[b]);
    }
    float m = max_of(top);
    float decay = state.m[r] == m ? 1.0f : std::exp(state.m[r] - m);
    vf total{};
    UNROLL for (int b = 0; b < BLOCK / LANES; b++) {
      vf e = vexp(x[b] - m);
      total += e;
      store(w + b * LANES, e);
    }
    state.l[r] = state.l[r] * decay + sum(total);
    state.m[r] = m;
    if (decay != 1.0f) state.scale_row(r, decay);
    return true;
  }

  void attend_block(State& state, int64_t at, int64_t count) {
    load_block(at, count);
    for (int64_t p = 0; p * PANEL < count; p++)
      rows_times_panel<Kernels<F32, MAX_MR>::pick>(
          queries, s.dim, (uint8_t*)(keys + p * s.dim * PANEL), s.dim, rows, scores + p * rows * PANEL, true);
    bool any = false;
    for (int64_t r = 0; r < rows; r++) any |= soften(state, r, at, count);
    if (!any) return;
    for (int64_t p = 0; p < state.panels; p++)
      rows_times_panel<Kernels<F32, MAX_MR>::pick>(
          weights, BLOCK, (uint8_t*)(values + p * BLOCK * PANEL), count, rows, state.o + p * rows * PANEL, false);
  }

  void attend_segment(int64_t index, State& state) {
    state.clear();
    int64_t stop = std::min(end(), (index + 1) * SEGMENT);
    int64_t at = std::max(index * SEGMENT, begin() / BLOCK * BLOCK);
    for (; at < stop; at += BLOCK) attend_block(state, at, std::min<int64_t>(BLOCK, stop - at));
  }

  void write(const State& state) {
    int64_t width = s.heads * s.dim, ld = i.a[8] ? width + (width & 1) : width;
    for (int64_t r = 0; r < rows; r++) {
      int64_t token = q.first + r / s.group, h = head * s.group + r % s.group;
      float scale = 1.0f / state.l[r];
      float* y = c.at(i.out[0]) + token * width + h * s.dim;
      uint16_t* y16 = (uint16_t*)c.at(i.out[0]) + token * ld + h * s.dim;
      for (int64_t d = 0; d < s.dim; d++) {
        float v = state.o[(d / PANEL * rows + r) * PANEL + d % PANEL] * scale;
        if (i.a[8])
          y16[d] = to_bf16(v);
        else
          y[d] = v;
      }
    }
    if (i.a[8] && width != ld)
      for (int64_t t = 0; t < q.count; t++) ((uint16_t*)c.at(i.out[0]))[(q.first + t) * ld + width] = 0;
  }

  void run() {
    load_queries();
    State total(state, rows, s.width), part(segment, rows, s.width);
    total.clear();
    for (int64_t g = begin() / SEGMENT; g * SEGMENT < end(); g++) {
      attend_segment(g, part);
      total.merge(part);
    }
    write(total);
  }
};

bool splits(const Shape& s, int64_t blocks, int threads) { return threads > 1 && blocks * s.kv_heads < 4 * threads; }

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

}  // namespace

int query_block(const Instr& i) { return (int)(Shape(i).max_rows() / Shape(i).group); }

int64_t partials_size(const Instr& i, const Step& step, int64_t blocks, int threads) {
  Shape s(i);
  return splits(s, blocks, threads) ? blocks * s.kv_heads * segments(step) * s.state_size() : 0;
}

void run_attention(Context& c, const Instr& i) {
  Shape s(i);
  auto& blocks = *c.blocks;
  if (splits(s, blocks.size(), c.threads) && segments(*c.step) > 1) return run_split(c, i, s);
  // The longest histories first: they are the last query blocks of each row.
  int64_t tasks = blocks.size() * s.kv_heads;
  spread(c, 0, tasks, [&](int64_t n) {
    int64_t task = tasks - 1 - n;
    Task(c, i, s, blocks[task / s.kv_heads], task % s.kv_heads).run();
  });
}
