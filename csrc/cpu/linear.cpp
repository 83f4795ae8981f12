// y = x @ w.T with the epilogue fused: scale, bias, residual, gated activation, output type.
//
// a: 0 kind, 1 activation (the weight's panels are gate then up, n = both), 2 x is bfloat16, 3 y is bfloat16
// in: 0 x, 1 residual; p: 0 panels, 1 int8 scales [n padded to 32], 2 bias [n]

#include <algorithm>

#include "gemm.h"

namespace {

constexpr int64_t DIRECT_ROWS = 24;  // up to here weights are converted in registers, each time they are used
constexpr int64_t TILE_ROWS = 192;   // rows of a task
constexpr int64_t BLOCK_K = 192;     // a converted block of 192 x 32 floats leaves room in a 32 KiB L1 cache
constexpr int64_t CHUNK_BYTES = 32 << 10;

struct Linear {
  const Instr& i;
  Kind kind;
  Act act;
  bool x_bf16, y_bf16;
  int64_t rows, panels, n_out, ldx;
  const float* x;
  const uint8_t* w;
  int64_t stride;  // bytes of a panel

  Linear(Context& c, const Instr& i)
      : i(i), kind((Kind)i.a[0]), act((Act)i.a[1]), x_bf16(i.a[2]), y_bf16(i.a[3]), rows(c.rows(i)) {
    n_out = act == NONE ? i.n : i.n / 2;
    panels = (n_out + PANEL - 1) / PANEL;
    ldx = x_bf16 ? (i.k + 1) / 2 : i.k;
    x = c.at(i.in[0]);
    w = (const uint8_t*)i.p[0];
    stride = panel_bytes(kind, i.k);
  }

  const uint8_t* panel(int64_t p) const { return w + p * stride; }
  int64_t x_step(int64_t k) const { return x_bf16 ? k / 2 : k; }
};

void multiply(Kind kind, bool x_bf16, const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows, float* tile, bool first) {
#if defined(__AVX512BF16__)
  if (x_bf16) return rows_times_panel<PairKernels<MAX_MR>::pick>(x, ldx, w, k, rows, tile, first);
#endif
  (void)x_bf16;
  switch (kind) {
    case F32: return rows_times_panel<Kernels<F32, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first);
    case BF16: return rows_times_panel<Kernels<BF16, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first);
    case INT8: return rows_times_panel<Kernels<INT8, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first);
    case INT4: return rows_times_panel<Kernels<INT4, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first);
  }
}

// Dequantize k channels (whole groups, or up to the end) into rows of 32 floats.
template <Kind K>
void convert(const uint8_t* w, int64_t k, float* out) {
  constexpr int PER = Reader<K>::PER;
  Reader<K> reader;
  for (int64_t i = 0; i < k; i += PER, w += ROW_BYTES) {
    if (K == INT4 && i % 32 == 0) {
      reader.group(w);
      w += INT4_HEAD;
    }
    prefetch(w + PREFETCH);
    prefetch(w + PREFETCH + 64);
    for (int v = 0; v < NV; v++) {
      vi raw = load_int(w + v * LANES * 4);
      UNROLL for (int s = 0; s < PER; s++) store(out + (i + s) * PANEL + v * LANES, reader.get(raw, s, v));
    }
  }
}

void convert(Kind kind, const uint8_t* w, int64_t k, float* out) {
  if (kind == BF16) convert<BF16>(w, k, out);
  if (kind == INT8) convert<INT8>(w, k, out);
  if (kind == INT4) convert<INT4>(w, k, out);
}

// tile [rows, 32] = x[first row ..] times panel p
void compute_tile(const Linear& l, int64_t p, int64_t row, int64_t rows, float* tile, float* block) {
  const float* x = l.x + row * l.ldx;
  const uint8_t* w = l.panel(p);
  if (l.rows <= DIRECT_ROWS) return multiply(l.kind, l.x_bf16, x, l.ldx, w, l.i.k, rows, tile, true);
  bool as_is = l.kind == F32 || l.x_bf16;
  for (int64_t k = 0; k < l.i.k; k += BLOCK_K) {
    int64_t count = std::min(BLOCK_K, l.i.k - k);
    const uint8_t* source = w + panel_bytes(l.kind, k);
    if (!as_is) convert(l.kind, source, count, block);
    multiply(as_is ? l.kind : F32, l.x_bf16, x + l.x_step(k), l.ldx, as_is ? source : (uint8_t*)block, count, rows, tile, k == 0);
  }
}

// Scale and bias of one panel's row, in place.
void finish_row(const Linear& l, int64_t p, float* t) {
  int64_t first = p * PANEL;
  if (l.kind == INT8) {
    const float* scale = (const float*)l.i.p[1] + first;
    for (int j = 0; j < PANEL; j++) t[j] *= scale[j];
  }
  if (auto bias = (const float*)l.i.p[2]) {
    int64_t count = std::min<int64_t>(PANEL, l.i.n - first);
    for (int j = 0; j < count; j++) t[j] += bias[first + j];
  }
}

void store_row(const Linear& l, Context& c, int64_t p, int64_t row, const float* t) {
  int64_t first = p * PANEL, count = std::min<int64_t>(PANEL, l.n_out - first);
  float out[PANEL];
  std::memcpy(out, t, sizeof out);
  if (const float* residual = c.at(l.i.in[1])) {
    residual += row * l.n_out + first;
    for (int j = 0; j < count; j++) out[j] += residual[j];
  }
  if (!l.y_bf16) {
    float* y = c.at(l.i.out[0]) + row * l.n_out + first;
    if (count == PANEL)
      std::memcpy(y, out, sizeof out);
    else
      std::memcpy(y, out, count * sizeof(float));
    return;
  }
  int64_t ld = l.n_out + (l.n_out & 1);
  uint16_t* y = (uint16_t*)c.at(l.i.out[0]) + row * ld + first;
  for (int j = 0; j < count; j++) y[j] = to_bf16(out[j]);
  if (count & 1) y[count] = 0;
}

void activate_row(Act act, float* gate, const float* up) {
  for (int j = 0; j < PANEL; j += LANES) {
    vf g = load(gate + j);
    vf u = g;
    if (act == GELU_TANH) u = 1.5957691216057308f * (g + 0.044715f * g * g * g);
    store(gate + j, g * sigmoid(u) * load(up + j));
  }
}

void run_task(const Linear& l, Context& c, int64_t p, int64_t row, int64_t rows) {
  float* tile = (float*)c.scratch;
  float* tile2 = tile + TILE_ROWS * PANEL;
  float* block = tile2 + TILE_ROWS * PANEL;
  compute_tile(l, p, row, rows, tile, block);
  if (l.act != NONE) compute_tile(l, p + l.panels, row, rows, tile2, block);
  for (int64_t r = 0; r < rows; r++) {
    float* t = tile + r * PANEL;
    finish_row(l, p, t);
    if (l.act != NONE) {
      finish_row(l, p + l.panels, tile2 + r * PANEL);
      activate_row(l.act, t, tile2 + r * PANEL);
    }
    store_row(l, c, p, row + r, t);
  }
}

}  // namespace

void run_linear(Context& c, const Instr& i) {
  Linear l(c, i);
  if (l.rows <= DIRECT_ROWS) {
    int64_t even = l.panels / (4 * c.threads), chunk = std::max<int64_t>(1, std::min(CHUNK_BYTES / l.stride, even));
    spread(c, 0, (l.panels + chunk - 1) / chunk, [&](int64_t b) {
      for (int64_t p = b * chunk; p < std::min((b + 1) * chunk, l.panels); p++) run_task(l, c, p, 0, l.rows);
    });
    return;
  }
  // Row ranges of even size; more of them where there are too few panels for the team.
  int64_t parts = (l.rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t wanted = (4 * c.threads + l.panels - 1) / l.panels;
  parts = std::max(parts, std::min(wanted, l.rows / 48));
  spread(c, 0, l.panels * parts, [&](int64_t b) {
    int64_t p = b / parts, part = b % parts;
    int64_t first = part * l.rows / parts, end = (part + 1) * l.rows / parts;
    run_task(l, c, p, first, end - first);
  });
}
