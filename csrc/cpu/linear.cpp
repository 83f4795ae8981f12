// y = x @ w.T with the epilogue fused: scale, bias, residual, gated activation, output type.
//
// a: 0 kind, 1 activation (the weight's panels are gate then up, n = both), 2 x is bfloat16, 3 y is bfloat16
// in: 0 x, 1 residual; p: 0 panels, 1 bias [n]

#include <algorithm>

#include "amx.h"
#include "fixed.h"

namespace {

constexpr int64_t PLAIN_ROWS = 2;  // up to here x is read where it lies
constexpr int64_t TASK_ROWS = 192;
constexpr int64_t TASK_PANELS = 4;
constexpr int64_t CHUNK_BYTES = 32 << 10;
constexpr int64_t X_BYTES = 448 << 10;      // of packed rows: half an L2 cache
constexpr int64_t X_BYTES_MAX = 2 << 20;

#if defined(__AMX_BF16__)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

struct Linear {
  const Instr& i;
  Kind kind;
  Act act;
  bool x_bf16, y_bf16, fixed;  // fixed: x is packed as integers
  bool halves = false;         // of which each half is a byte
  int64_t rows, panels, n_out, ldx;
  int64_t x_stride;  // dwords of BLOCK_K channels of a packed row: spread over the sets of a cache
  const float* x;
  const uint8_t* w;
  int64_t stride;  // bytes of a panel

  Linear(Context& c, const Instr& i)
      : i(i), kind((Kind)i.a[0]), act((Act)i.a[1]), x_bf16(i.a[2]), y_bf16(i.a[3]), rows(c.rows(i)) {
    n_out = act == NONE ? i.n : i.n / 2;
    panels = (n_out + PANEL - 1) / PANEL;
    ldx = x_width(i.k);
#if INTEGER_PRODUCTS
    fixed = kind == FIXED || (grouped(kind) && !(BYTE_PRODUCTS && wide(kind)));
    x_stride = fixed ? BLOCK_K / FIXED_GROUP * FIXED_X : x_width(BLOCK_K) + 16;
#else
    fixed = false;
    x_stride = x_width(BLOCK_K) + 16;
#endif
    x = c.at(i.in[0]);
    w = (const uint8_t*)i.p[0];
    stride = panel_bytes(kind, i.k);
  }

  const uint8_t* panel(int64_t p) const { return w + p * stride; }
  bool tiles() const { return x_bf16 && AMX; }
#if INTEGER_PRODUCTS
  int64_t registers() const { return fixed ? FIXED_MR : MAX_MR; }  // rows whose sums are in registers
#else
  int64_t registers() const { return MAX_MR; }
#endif
  // Of packed x: dwords from a row to the next, and what kernels take for ldx.
#if INTEGER_PRODUCTS
  int64_t packed_row() const { return fixed ? FIXED_X : x_stride; }
  int64_t packed_ldx(int64_t rows) const { return fixed ? rows * FIXED_X : x_stride; }
#else
  int64_t packed_row() const { return x_stride; }
  int64_t packed_ldx(int64_t) const { return x_stride; }
#endif
  int64_t block() const { return tiles() ? 32 : registers(); }  // rows that are multiplied together
  int64_t x_width(int64_t k) const { return x_bf16 ? (k + 1) / 2 : k; }  // in dwords
};

// The scratch of a thread.
struct Scratch {
  float *tiles, *blocks, *x;

  explicit Scratch(Context& c) {
    tiles = (float*)c.scratch;
    blocks = tiles + TASK_PANELS * TASK_ROWS * PANEL;
    x = blocks + TASK_PANELS * BLOCK_K * PANEL;
  }
};

#if INTEGER_PRODUCTS
template <Kind K>
void fixed_panel(const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows, float* tile,
                 bool first, Ahead ahead) {
  rows_times_panel<FixedKernels<K, FIXED_MR>::pick, FIXED_MR, FIXED_X>(x, ldx, w, k, rows, tile, first,
                                                                       ahead);
}
#endif

#if HALF_PRODUCTS
void multiply_halves(Kind kind, const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows,
                     float* tile, Ahead ahead) {
  switch (kind) {
    case INT8: return halved_panel<INT8>(x, ldx, w, k, rows, tile, ahead);
    case INT4: return halved_panel<INT4>(x, ldx, w, k, rows, tile, ahead);
    case Q8_0: return halved_panel<Q8_0>(x, ldx, w, k, rows, tile, ahead);
    case Q4_0: return halved_panel<Q4_0>(x, ldx, w, k, rows, tile, ahead);
    case IQ4_NL: return halved_panel<IQ4_NL>(x, ldx, w, k, rows, tile, ahead);
    case E2M1: return halved_panel<E2M1>(x, ldx, w, k, rows, tile, ahead);
    default: return;
  }
}
#endif

void multiply(Kind kind, bool x_bf16, const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows,
              float* tile, bool first, Ahead ahead) {
#if defined(__AMX_BF16__)
  if (x_bf16) return tiles_times_panel(x, ldx, w, k, rows, tile, first);
#elif PAIR_PRODUCTS
  if (x_bf16) return rows_times_panel<PairKernels<MAX_MR>::pick>(x, ldx, w, k, rows, tile, first, ahead);
#endif
  (void)x_bf16;
  switch (kind) {
    case F32: return rows_times_panel<Kernels<F32, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first, ahead);
    case BF16: return rows_times_panel<Kernels<BF16, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first, ahead);
#if INTEGER_PRODUCTS
    case INT8: return fixed_panel<INT8>(x, ldx, w, k, rows, tile, first, ahead);
    case INT4: return fixed_panel<INT4>(x, ldx, w, k, rows, tile, first, ahead);
    case Q8_0: return fixed_panel<Q8_0>(x, ldx, w, k, rows, tile, first, ahead);
    case Q4_0: return fixed_panel<Q4_0>(x, ldx, w, k, rows, tile, first, ahead);
    case IQ4_NL: return fixed_panel<IQ4_NL>(x, ldx, w, k, rows, tile, first, ahead);
    case E2M1: return fixed_panel<E2M1>(x, ldx, w, k, rows, tile, first, ahead);
#if BYTE_PRODUCTS
    default: return;  // such panels are made for other levels alone, or converted
#else
    case E4M3: return fixed_panel<E4M3>(x, ldx, w, k, rows, tile, first, ahead);
    case NF4: return fixed_panel<NF4>(x, ldx, w, k, rows, tile, first, ahead);
    case FP4: return fixed_panel<FP4>(x, ldx, w, k, rows, tile, first, ahead);
    case NVFP4: return fixed_panel<NVFP4>(x, ldx, w, k, rows, tile, first, ahead);
    case INT16: return fixed_panel<INT16>(x, ldx, w, k, rows, tile, first, ahead);
    case INT5: return fixed_panel<INT5>(x, ldx, w, k, rows, tile, first, ahead);
    case Q5_0: return fixed_panel<Q5_0>(x, ldx, w, k, rows, tile, first, ahead);
    case FIXED: return fixed_panel<FIXED>(x, ldx, w, k, rows, tile, first, ahead);
#endif
#else
    case INT8: return rows_times_panel<Kernels<INT8, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first, ahead);
    case INT4: return rows_times_panel<Kernels<INT4, MAX_MR>::pick>(x, ldx, w, k, rows, tile, first, ahead);
    default: return;
#endif
  }
}

// Dequantize k channels (whole groups, or up to the end) into rows of 32 floats.
template <Kind K>
void convert(const uint8_t* w, int64_t k, float* out) {
  constexpr int PER = Reader<K>::PER;
  Reader<K> reader;
  for (int64_t i = 0; i < k; i += PER, w += ROW_BYTES) {
    if (grouped(K) && i % GROUP == 0) {
      reader.group(w);
      w += head_bytes(K);
    }
    prefetch(w + PREFETCH);
    prefetch(w + PREFETCH + 64);
    for (int v = 0; v < NV; v++) {
      vi raw = load_int(w + v * LANES * 4);
      UNROLL for (int s = 0; s < PER; s++) store(out + (i + s) * PANEL + v * LANES, reader.get(raw, s, v));
    }
  }
}

template <Kind K>
void convert_wide(const uint8_t* w, int64_t k, float* out) {
  const uint8_t *head = w, *scales = w;
  for (int64_t at = 0; at < k; at += summed(K), w += group_rows(K) * ROW_BYTES) {
    if (at % span(K) == 0) {
      head = w;
      w += head_bytes(K);
    }
    if (deep(K) && at % FIXED_GROUP == 0) {
      scales = w;
      w += ROW_BYTES;
    }
    for (int v = 0; v < NV; v++) {
      vf scale = head_scale(head, v);
      if (deep(K)) scale *= deep_scale(scales, at / 16 % 4, v);
      for (int64_t i = 0; i < summed(K) && at + i < k; i++)
        store(out + (at + i) * PANEL + v * LANES, value_of<K>(w, i, v) * scale);
    }
  }
}

void convert(Kind kind, const uint8_t* w, int64_t k, float* out) {
#if INTEGER_PRODUCTS && !BYTE_PRODUCTS
  if (kind == E4M3) widen<E4M3>(w, k, (uint8_t*)out);
  if (kind == NF4) widen<NF4>(w, k, (uint8_t*)out);
  if (kind == FP4) widen<FP4>(w, k, (uint8_t*)out);
#else
  if (kind == E4M3) convert_wide<E4M3>(w, k, out);
  if (kind == NF4) convert_wide<NF4>(w, k, out);
  if (kind == FP4) convert_wide<FP4>(w, k, out);
  if (kind == NVFP4) convert_wide<NVFP4>(w, k, out);
#endif
  if (kind == BF16) convert<BF16>(w, k, out);
  if (kind == INT8) convert<INT8>(w, k, out);
  if (kind == INT4) convert<INT4>(w, k, out);
}

int64_t k_blocks(const Linear& l) { return (l.i.k + BLOCK_K - 1) / BLOCK_K; }
int64_t packed_bytes(const Linear& l, int64_t rows) {
  return k_blocks(l) * rows * l.x_stride * (int64_t)sizeof(float);
}

#if INTEGER_PRODUCTS
void quantize(Kind kind, bool halves, const float* x, int64_t k, float* out, int64_t step) {
#if HALF_PRODUCTS
  if (halves)
    return bytes(kind) ? quantize_row<INT8, true>(x, k, out, step)
                       : quantize_row<INT4, true>(x, k, out, step);
#endif
  (void)halves;
  if (kind == FIXED) return quantize_row<FIXED>(x, k, out, step);  // of AVX2 and AVX512_VNNI alone
  if (kind == E4M3) return quantize_row<E4M3>(x, k, out, step);
  if (bytes(kind)) return quantize_row<INT8>(x, k, out, step);
  if (nibbles(kind)) return quantize_row<INT4>(x, k, out, step);
}
#endif

// Rows of x in blocks of BLOCK_K channels, or as fixed.h says.
void pack_x(const Linear& l, int64_t row, int64_t rows, float* out) {
#if INTEGER_PRODUCTS
  if (l.fixed) {
    for (int64_t r = 0; r < rows; r++)
      quantize(l.kind, l.halves, l.x + (row + r) * l.ldx, l.i.k, out + r * FIXED_X, rows * FIXED_X);
    return;
  }
#endif
  for (int64_t k = 0; k < l.i.k; k += BLOCK_K) {
    const float* x = l.x + row * l.ldx + l.x_width(k);
    for (int64_t r = 0; r < rows; r++, out += l.x_stride)
      std::memcpy(out, x + r * l.ldx, l.x_width(std::min(BLOCK_K, l.i.k - k)) * sizeof(float));
  }
}

// Few rows: weights straight from memory. ``packed`` is x after pack_x, or null.
void compute_direct(const Linear& l, int64_t panel, const float* packed, float* tile) {
  const uint8_t* w = l.panel(panel);
  int32_t pace = pace_of(l.kind);
#if HALF_PRODUCTS
  if (l.halves)
    return multiply_halves(l.kind, packed, l.packed_ldx(l.rows), w, l.i.k, l.rows, tile,
                           {w + PREFETCH, pace});
#endif
  if (!packed)
    return multiply(l.kind, l.x_bf16, l.x, l.ldx, w, l.i.k, l.rows, tile, true, {w + PREFETCH, pace});
  // One register block of rows reads the panel once; more of them read each block of it again, and the next
  // block comes meanwhile.
  bool once = l.rows <= l.registers();
  int64_t block = l.fixed && once ? l.i.k : BLOCK_K, ldx = l.packed_ldx(l.rows);
  int64_t distance = once ? PREFETCH : panel_bytes(l.kind, BLOCK_K);
  for (int64_t k = 0; k < l.i.k; k += block, packed += l.rows * l.x_stride) {
    int64_t count = std::min(block, l.i.k - k);
    multiply(l.kind, l.x_bf16, packed, ldx, w, count, l.rows, tile, k == 0, {w + distance, pace});
    w += panel_bytes(l.kind, count);
  }
}

// Where a task's results go: brought near while it computes, for stores that miss would stall it at the end.
struct Output {
  const char *y, *residual;
  int64_t stride, bytes;

  void fetch(int64_t row, int64_t rows) const {
    for (int64_t r = row; r < row + rows; r++)
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(y + r * stride + b, 1, 2);
        if (residual) __builtin_prefetch(residual + r * stride + b, 0, 2);
      }
  }
};

// Whether many rows have the weights as INT16.
bool is_widened(const Linear& l) { return l.fixed && wide(l.kind) && !deep(l.kind); }

// Whether converting weights in registers, each time they are used, beats converting them once into L2: the
// more work a conversion is, the fewer rows.
bool is_direct(const Linear& l) {
  if (wide(l.kind) && !l.fixed) return false;
  if (l.rows <= l.registers()) return packed_bytes(l, l.rows) <= X_BYTES_MAX;
  int64_t limit = l.fixed || !grouped(l.kind) ? 48 : MAX_MR;
  if (is_widened(l)) limit = 2 * l.registers();
  return l.rows <= limit && packed_bytes(l, l.rows) <= X_BYTES;
}

// Many rows: a block of the panels is converted once; then a register block's rows of x stay in the L1 cache
// while the panels stream out of L2.
void compute_blocked(const Linear& l, const Scratch& s, const int64_t* panels, int64_t count, int64_t rows,
                     const Output& out) {
  bool as_is = l.kind == F32 || l.x_bf16 || (l.fixed && !is_widened(l));
  Kind kind = as_is ? l.kind : l.fixed ? INT16 : F32;
  const float* x = s.x;
  for (int64_t k0 = 0; k0 < l.i.k; k0 += BLOCK_K, x += rows * l.x_stride) {
    int64_t k = std::min(BLOCK_K, l.i.k - k0);
    const uint8_t* w[TASK_PANELS];
    for (int64_t p = 0; p < count; p++) {
      w[p] = l.panel(panels[p]) + panel_bytes(l.kind, k0);
      if (as_is) continue;
      float* block = s.blocks + p * BLOCK_K * PANEL;
      convert(l.kind, w[p], k, block);
      w[p] = (const uint8_t*)block;
    }
    auto some = [&](int64_t m, int64_t p) {
      int64_t count = std::min(l.block(), rows - m);
      if (k0 == 0 && p == 0) out.fetch(m, count);
      multiply(kind, l.x_bf16, x + m * l.packed_row(), l.packed_ldx(rows), w[p], k, count,
               s.tiles + (p * TASK_ROWS + m) * PANEL, k0 == 0,
               {w[p] + PREFETCH, pace_of(kind)});
    };
    if (as_is && grouped(l.kind)) {  // the L1 cache holds a panel's block
      for (int64_t p = 0; p < count; p++)
        for (int64_t m = 0; m < rows; m += l.block()) some(m, p);
    } else {
      for (int64_t m = 0; m < rows; m += l.block())
        for (int64_t p = 0; p < count; p++) some(m, p);
    }
  }
}

INLINE vf gated(Act act, vf gate, vf up) {
  vf z = act == GELU_TANH ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * sigmoid(z) * up;
}

// The epilogue of one panel.
struct Finish {
  const Linear& l;
  int64_t p, first, count;  // count: channels that exist
  const float* residual;
  float bias[PANEL] = {}, up_bias[PANEL] = {};
  float* y;

  Finish(const Linear& l, Context& c, int64_t p)
      : l(l), p(p), first(p * PANEL), count(std::min<int64_t>(PANEL, l.n_out - first)) {
    auto all_bias = (const float*)l.i.p[1];
    if (all_bias) std::memcpy(bias, all_bias + first, count * sizeof(float));
    if (all_bias && l.act != NONE) std::memcpy(up_bias, all_bias + l.n_out + first, count * sizeof(float));
    residual = c.at(l.i.in[1]);
    y = c.at(l.i.out[0]);
  }

  // Row ``row`` of y out of the panel's sums t (and u, the sums of the other half, if gated). One copy of the
  // code, so that all callers round alike.
  __attribute__((noinline)) void store_row(int64_t row, const float* t, const float* u) const {
    vf out[NV];
    UNROLL for (int j = 0; j < NV; j++) {
      out[j] = load(t + j * LANES) + load(bias + j * LANES);
      if (u) out[j] = gated(l.act, out[j], load(u + j * LANES) + load(up_bias + j * LANES));
    }
    if (count == PANEL && !l.y_bf16) {
      int64_t at = row * l.n_out + first;
      UNROLL for (int j = 0; j < NV; j++)
        store(y + at + j * LANES, residual ? out[j] + load(residual + at + j * LANES) : out[j]);
#if PAIR_PRODUCTS
    } else if (count == PANEL && !residual) {
      uint16_t* y16 = (uint16_t*)y + row * (l.n_out + (l.n_out & 1)) + first;
      UNROLL for (int j = 0; j < NV; j++) round_bf16(y16 + j * LANES, out[j]);
#endif
    } else {
      store_slow(row, (const float*)out);
    }
  }

  void store_slow(int64_t row, const float* out) const {
    const float* add = residual ? residual + row * l.n_out + first : nullptr;
    float* y32 = y + row * l.n_out + first;
    uint16_t* y16 = (uint16_t*)y + row * (l.n_out + (l.n_out & 1)) + first;
    for (int64_t j = 0; j < count; j++) {
      float v = add ? out[j] + add[j] : out[j];
      if (l.y_bf16)
        y16[j] = to_bf16(v);
      else
        y32[j] = v;
    }
    if (l.y_bf16 && (count & 1)) y16[count] = 0;
  }
};

void run_direct(Context& c, const Linear& l) {
  Scratch s(c);
  const float* packed = l.fixed || l.rows > PLAIN_ROWS ? s.x : nullptr;
  if (packed) pack_x(l, 0, l.rows, s.x);
  float *tile = s.tiles, *up = l.act == NONE ? nullptr : tile + TASK_ROWS * PANEL;
  int64_t even = l.panels / (4 * c.threads),
          chunk = std::max<int64_t>(1, std::min(CHUNK_BYTES / l.stride, even));
  spread(c, 0, (l.panels + chunk - 1) / chunk, [&](int64_t b) {
    for (int64_t p = b * chunk; p < std::min((b + 1) * chunk, l.panels); p++) {
      compute_direct(l, p, packed, tile);
      if (up) compute_direct(l, p + l.panels, packed, up);
      Finish f(l, c, p);
      for (int64_t r = 0; r < l.rows; r++) f.store_row(r, tile + r * PANEL, up ? up + r * PANEL : nullptr);
    }
  });
}

// A task is some panels times a range of rows. A thread's next task mostly has the same rows, already packed.
void run_blocked(Context& c, const Linear& l) {
  Scratch s(c);
  int64_t size = l.act == NONE ? TASK_PANELS : TASK_PANELS / 2, groups = (l.panels + size - 1) / size;
  int64_t most = std::max<int64_t>(4 * MAX_MR, X_BYTES / packed_bytes(l, 1));
  most = std::max<int64_t>(1, std::min({most, TASK_ROWS, X_BYTES_MAX / packed_bytes(l, 1)}));
  int64_t parts = (l.rows + most - 1) / most, wanted = (6 * c.threads + groups - 1) / groups;
  parts = std::max(parts, std::min(wanted, l.rows / (4 * MAX_MR)));
  int64_t packed = -1;
  spread(c, 0, groups * parts, [&](int64_t b) {
    int64_t part = b / groups, first = b % groups * size, count = std::min(size, l.panels - first);
    int64_t row = part * l.rows / parts, rows = (part + 1) * l.rows / parts - row;
    if (packed != part) pack_x(l, row, rows, s.x);
    packed = part;
    int64_t panels[TASK_PANELS];
    for (int64_t p = 0; p < count; p++) {
      panels[p] = first + p;
      if (l.act != NONE) panels[count + p] = l.panels + first + p;
    }
    int64_t at = row * l.n_out + first * PANEL;
    const float* residual = c.at(l.i.in[1]);
    Output out{(char*)(c.at(l.i.out[0]) + at), residual ? (char*)(residual + at) : nullptr,
               l.n_out * (int64_t)sizeof(float), count * ROW_BYTES};
    compute_blocked(l, s, panels, l.act == NONE ? count : 2 * count, rows, out);
    for (int64_t p = 0; p < count; p++) {
      Finish f(l, c, first + p);
      const float* tile = s.tiles + p * TASK_ROWS * PANEL;
      const float* up = l.act == NONE ? nullptr : tile + count * TASK_ROWS * PANEL;
      for (int64_t r = 0; r < rows; r++)
        f.store_row(row + r, tile + r * PANEL, up ? up + r * PANEL : nullptr);
    }
  });
}

}  // namespace

void run_linear(Context& c, const Instr& i) {
  Linear l(c, i);
  if (l.rows == 0) return;
#if defined(__AMX_BF16__)
  TileRegisters registers(l.rows);
#endif
  if (!is_direct(l)) return run_blocked(c, l);
#if HALF_PRODUCTS
  l.halves = halved(l.kind, l.rows);
#endif
  run_direct(c, l);
}
