// What encoders have and decoders have not: attention in both directions within the step, layer
// normalization, activations without a gate.

#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace {

constexpr int64_t GRAIN = 8192;    // elements worth a chunk of their own
constexpr int64_t QUERIES = 96;    // of a task
constexpr int64_t KEYS = 256;      // of a block

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// erf to 1.5e-7: Abramowitz and Stegun, 7.1.26.
INLINE vf verf(vf x) {
  vf a = vmax(x, -x), t = 1.0f / (1.0f + 0.3275911f * a);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * vexp(-a * a);
  return x < 0.0f ? -y : y;
}

INLINE vf activate(int64_t act, vf x) {
  if (act == GELU) return 0.5f * x * (1.0f + verf(x * 0.70710678f));
  if (act == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  if (act == SILU) return x * sigmoid(x);
  return vmax(x, vf{});
}

// The sum of d values, given as vectors and at the end one by one.
template <class V, class S>
INLINE float total(int64_t d, V vector, S single) {
  vf sums{};
  int64_t j = 0;
  for (; j + LANES <= d; j += LANES) sums += vector(j);
  float all = sum(sums);
  for (; j < d; j++) all += single(j);
  return all;
}

// A block of queries of one sequence and head against all its keys.
struct Task {
  const Instr& i;
  int64_t dim, width, ld;  // width: dim in whole panels; ld: from token to token in qkv
  float *keys, *values, *scores, *weights, *out, *top, *total;

  Task(Context& c, const Instr& i) : i(i), dim(i.k), width(round_up(i.k, PANEL)), ld(3 * i.n * i.k) {
    float* p = (float*)c.scratch;
    auto take = [&](int64_t n) { float* r = p; p += round_up(n, 16); return r; };
    keys = take(KEYS * dim);
    values = take(KEYS * width);
    scores = take(QUERIES * KEYS);
    weights = take(QUERIES * KEYS);
    out = take(QUERIES * width);
    top = take(QUERIES);
    total = take(QUERIES);
  }

  // ``count`` rows of K into panels [KEYS / 32][dim][32].
  void load_keys(const float* k, int64_t count) {
    for (int64_t t = 0; t < round_up(count, LANES); t += LANES) {
      float* to = keys + t / PANEL * dim * PANEL + t % PANEL;
      int64_t d = 0;
      for (; d + LANES <= dim; d += LANES) {
        vf r[LANES];
        UNROLL for (int j = 0; j < LANES; j++) r[j] = load(k + std::min(t + j, count - 1) * ld + d);
        transpose(r);
        UNROLL for (int j = 0; j < LANES; j++) store(to + (d + j) * PANEL, r[j]);
      }
      for (; d < dim; d++)
        for (int j = 0; j < LANES; j++) to[d * PANEL + j] = k[std::min(t + j, count - 1) * ld + d];
    }
  }

  // ``count`` rows of V into panels [width / 32][KEYS][32].
  void load_values(const float* v, int64_t count) {
    for (int64_t t = 0; t < count; t++)
      for (int64_t d = 0; d < width; d += PANEL) {
        float* to = values + (d / PANEL * KEYS + t) * PANEL;
        int64_t some = std::min<int64_t>(PANEL, dim - d);
        std::memcpy(to, v + t * ld + d, some * sizeof(float));
        std::fill(to + some, to + PANEL, 0.0f);
      }
  }

  // Scores of row r of ``rows`` to weights, with the running maximum and sum brought up to date.
  void soften(int64_t r, int64_t rows, int64_t count) {
    float* w = weights + r * KEYS;
    vi lane;
    UNROLL for (int j = 0; j < LANES; j++) lane[j] = j;
    vf tops = splat(top[r]), sums{};
    for (int64_t t = 0; t < count; t += LANES) {
      vf x = load(scores + (t / PANEL * rows + r) * PANEL + t % PANEL) * i.f[0];
      x = lane < (int)(count - t) ? x : splat(-INFINITY);
      store(w + t, x);
      tops = vmax(tops, x);
    }
    float most = max_of(tops);
    for (int64_t t = 0; t < count; t += LANES) {
      vf e = vexp(load(w + t) - most);
      store(w + t, e);
      sums += e;
    }
    float decay = std::exp(top[r] - most);
    if (decay != 1.0f)
      for (int64_t p = 0; p < width / PANEL; p++)
        for (int64_t j = 0; j < PANEL; j++) out[(p * rows + r) * PANEL + j] *= decay;
    total[r] = total[r] * decay + sum(sums);
    top[r] = most;
  }

  // Queries [first, first + rows) of the sequence at ``qkv`` with ``length`` tokens; y: where the first one's
  // result goes.
  void run(const float* qkv, int64_t head, int64_t first, int64_t rows, int64_t length, float* y) {
    const float *q = qkv + first * ld + head * dim, *k = qkv + (i.n + head) * dim, *v = k + i.n * dim;
    std::fill(top, top + rows, -INFINITY);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * width, 0.0f);
    for (int64_t at = 0; at < length; at += KEYS) {
      int64_t count = std::min(KEYS, length - at);
      load_keys(k + at * ld, count);
      load_values(v + at * ld, count);
      for (int64_t p = 0; p * PANEL < count; p++)
        rows_times_panel<Kernels<F32, MAX_MR>::pick>(
            q, ld, (uint8_t*)(keys + p * dim * PANEL), dim, rows, scores + p * rows * PANEL, true);
      for (int64_t r = 0; r < rows; r++) soften(r, rows, count);
      for (int64_t p = 0; p < width / PANEL; p++)
        rows_times_panel<Kernels<F32, MAX_MR>::pick>(
            weights, KEYS, (uint8_t*)(values + p * KEYS * PANEL), count, rows, out + p * rows * PANEL, false);
    }
    for (int64_t r = 0; r < rows; r++, y += i.n * dim) {
      float scale = 1.0f / total[r];
      for (int64_t d = 0; d < dim; d++)
        y[head * dim + d] = out[(d / PANEL * rows + r) * PANEL + d % PANEL] * scale;
    }
  }
};

}  // namespace

// in: 0 qkv [T, 3 * n * k]; out: 0 [T, n * k]; n: heads, k: head dim; f: 0 scale. The step's rows are whole
// sequences.
void run_self_attention(Context& c, const Instr& i) {
  const Step& s = *c.step;
  int64_t blocks = 0;
  for (int64_t r = 0; r < s.rows; r++) blocks += (s.q_start[r + 1] - s.q_start[r] + QUERIES - 1) / QUERIES;
  spread(c, 0, blocks * i.n, [&](int64_t n) {
    int64_t block = n / i.n, row = 0;
    for (;; row++) {
      int64_t some = (s.q_start[row + 1] - s.q_start[row] + QUERIES - 1) / QUERIES;
      if (block < some) break;
      block -= some;
    }
    int64_t start = s.q_start[row], length = s.q_start[row + 1] - start, first = block * QUERIES;
    Task task(c, i);
    task.run(c.at(i.in[0]) + start * task.ld, n % i.n, first, std::min(QUERIES, length - first), length,
             c.at(i.out[0]) + (start + first) * i.n * i.k);
  });
}

// in: 0 x [rows, k]; out: 0; p: 0 weight, 1 bias; f: 0 eps
void run_layer_norm(Context& c, const Instr& i) {
  int64_t d = i.k;
  auto weight = (const float*)i.p[0], bias = (const float*)i.p[1];
  spread_rows(c, c.rows(i), GRAIN / d, [&](int64_t t) {
    const float* x = c.at(i.in[0]) + t * d;
    float* out = c.at(i.out[0]) + t * d;
    float mean = total(d, [&](int64_t j) { return load(x + j); }, [&](int64_t j) { return x[j]; }) / d;
    float squares = total(d, [&](int64_t j) { vf v = load(x + j) - mean; return v * v; },
                          [&](int64_t j) { return (x[j] - mean) * (x[j] - mean); });
    float r = 1.0f / std::sqrt(squares / d + i.f[0]);
    for (int64_t j = 0; j < d; j++) out[j] = (x[j] - mean) * r * weight[j] + bias[j];
  });
}

// in: 0 x [rows, k]; out: 0; a: 0 activation
void run_activate(Context& c, const Instr& i) {
  spread_rows(c, c.rows(i), GRAIN / 8 / i.k, [&](int64_t t) {
    const float* x = c.at(i.in[0]) + t * i.k;
    float* out = c.at(i.out[0]) + t * i.k;
    int64_t j = 0;
    for (; j + LANES <= i.k; j += LANES) store(out + j, activate(i.a[0], load(x + j)));
    if (j == i.k) return;
    float rest[LANES] = {};
    std::memcpy(rest, x + j, (i.k - j) * sizeof(float));
    store(rest, activate(i.a[0], load(rest)));
    std::memcpy(out + j, rest, (i.k - j) * sizeof(float));
  });
}
