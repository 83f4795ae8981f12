// Layers that keep a state: rows go on from the units they begin with, token by token, and leave states in
// others. See the ops in sgla/kernels/ops.py.

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "program.h"

namespace {

constexpr int64_t BLOCK = 64;       // channels of a task of a convolution
constexpr int64_t HEADS = 16;       // of a task, where their states are small
constexpr int64_t SMALL = 1 << 10;  // values of such a state
constexpr float EPS = 1e-6f;        // beside the squares of q and k

// States in which row ``row`` is left on the way, behind its first ``tokens`` tokens.
template <class F>
void at_marks(const StateCall& s, int64_t row, int64_t tokens, F leave) {
  for (int64_t m = 0; m < s.marks_count; m++) {
    const int32_t* mark = s.marks + 3 * m;
    if (mark[0] == row && mark[1] == tokens && mark[2]) leave(mark[2]);
  }
}

// The state of one head of a row, ``size`` floats: body(token) changes it.
template <class F>
void walk(const Context& c, const StateCall& s, int64_t row, int64_t head, int64_t size, float* spare,
          F body) {
  float* units = (float*)s.units;
  auto unit = [&](int64_t u) { return units + (u * s.heads + head) * size; };
  int64_t before = s.reads[row], after = s.writes[row];
  float* state = after ? unit(after) : spare;  // all rows without a unit have the dummy one
  if (!before)
    std::fill(state, state + size, 0.0f);
  else if (before != after)
    std::copy(unit(before), unit(before) + size, state);
  int64_t first = c.step->q_start[row], end = c.step->q_start[row + 1];
  for (int64_t t = first; t < end; t++) {
    body(t, state);
    at_marks(s, row, t + 1 - first, [&](int64_t u) { std::copy(state, state + size, unit(u)); });
  }
}

float over_length(const float* x, int64_t n) {
  float squares = 0;
  for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
  return 1.0f / std::sqrt(squares + EPS);
}

// S = exp(decay) S; S += k (beta (v - S^T k))^T; o = S^T q, with k and q of length 1.
void delta_token(const StateCall& s, int64_t t, int64_t head, float* __restrict state, float* __restrict u) {
  int64_t dk = s.k, dv = s.n, of = head / s.group;
  const float* k = s.b + t * s.b_stride + of * dk;
  const float* q = s.c + t * s.c_stride + of * dk;
  const float* v = s.a + t * s.a_stride + head * dv;
  const float* decay = s.decay + (t * s.heads + head) * (s.wide ? dk : 1);
  float* __restrict out = s.out + (t * s.heads + head) * dv;
  float k_scale = over_length(k, dk), q_scale = over_length(q, dk) / std::sqrt((float)dk);
  float kept = std::exp(decay[0]), beta = s.rate[t * s.heads + head];
  std::fill(u, u + dv, 0.0f);
  for (int64_t i = 0; i < dk; i++) {
    float* __restrict row = state + i * dv;
    float e = s.wide ? std::exp(decay[i]) : kept, f = k[i] * k_scale;
    for (int64_t j = 0; j < dv; j++) {
      row[j] *= e;
      u[j] += f * row[j];
    }
  }
  for (int64_t j = 0; j < dv; j++) u[j] = beta * (v[j] - u[j]);
  std::fill(out, out + dv, 0.0f);
  for (int64_t i = 0; i < dk; i++) {
    float* __restrict row = state + i * dv;
    float f = k[i] * k_scale, g = q[i] * q_scale;
    for (int64_t j = 0; j < dv; j++) {
      row[j] += f * u[j];
      out[j] += g * row[j];
    }
  }
}

// S = exp(dt a) S + dt x b^T; y = S c.
void scan_token(const StateCall& s, int64_t t, int64_t head, float* __restrict state,
                float* __restrict kept) {
  int64_t width = s.n, size = s.k, of = head / s.group;
  const float* x = s.a + t * s.a_stride + head * width;
  const float* b = s.b + t * s.b_stride + of * size;
  const float* c = s.c + t * s.c_stride + of * size;
  float dt = s.rate[t * s.heads + head];
  float* out = s.out + (t * s.heads + head) * width;
  const float* a = s.decay + head * (s.wide ? size : 1);
  if (s.wide)
    for (int64_t i = 0; i < size; i++) kept[i] = std::exp(dt * a[i]);
  else
    std::fill(kept, kept + size, std::exp(dt * a[0]));
  for (int64_t p = 0; p < width; p++) {
    float* __restrict row = state + p * size;
    float given = dt * x[p];
    vf sums{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      vf made = load(row + i) * load(kept + i) + given * load(b + i);
      store(row + i, made);
      sums += made * load(c + i);
    }
    float y = sum(sums);
    for (; i < size; i++) {
      row[i] = row[i] * kept[i] + given * b[i];
      y += row[i] * c[i];
    }
    out[p] = y;
  }
}

// Channels [first, first + count) of one row: what comes before its tokens is in its unit.
// What later tokens see is rounded as units are, so that it does not matter where a step ends.
template <class Load, class Store, class Round>
void convolve(const Context& c, const StateCall& s, int64_t row, int64_t first, int64_t count, Load load_unit,
              Store store_unit, Round rounded) {
  int64_t taps = s.k, past = taps - 1;
  float* seen = (float*)c.scratch;      // [taps][BLOCK], the oldest first
  float* weight = seen + taps * BLOCK;  // [taps][BLOCK]
  auto place = [&](int64_t unit, int64_t j, int64_t k) { return (unit * s.n + first + j) * past + k; };
  for (int64_t k = 0; k < taps; k++)
    for (int64_t j = 0; j < count; j++) {
      weight[k * BLOCK + j] = s.decay[(first + j) * taps + k];
      seen[k * BLOCK + j] = k < past && s.reads[row] ? load_unit(place(s.reads[row], j, k)) : 0.0f;
    }
  auto leave = [&](int64_t unit) {  // behind a token, which is the last that is seen
    for (int64_t j = 0; j < count; j++)
      for (int64_t k = 0; k < past; k++) store_unit(place(unit, j, k), seen[k * BLOCK + j]);
  };
  int64_t begin = c.step->q_start[row], end = c.step->q_start[row + 1];
  for (int64_t t = begin; t < end; t++) {
    std::copy(s.a + t * s.a_stride + first, s.a + t * s.a_stride + first + count, seen + past * BLOCK);
    float* out = s.out + t * s.n + first;
    for (int64_t j = 0; j < count; j++) {
      float y = s.b ? s.b[first + j] : 0.0f;
      for (int64_t k = 0; k < taps; k++) y += weight[k * BLOCK + j] * seen[k * BLOCK + j];
      out[j] = y;
    }
    std::transform(seen + past * BLOCK, seen + past * BLOCK + count, seen + past * BLOCK, rounded);
    std::copy(seen + BLOCK, seen + taps * BLOCK, seen);
    at_marks(s, row, t + 1 - begin, leave);
  }
  if (s.writes[row]) leave(s.writes[row]);
}

}  // namespace

void run_scan(Context& c, const Instr& i) {
  const StateCall& s = *(const StateCall*)i.p[0];
  int64_t size = s.n * s.k, grain = size > SMALL ? 1 : HEADS, parts = (s.heads + grain - 1) / grain;
  spread(c, 0, c.step->rows * parts, [&](int64_t task) {
    int64_t row = task / parts, begin = task % parts * grain;
    float* room = (float*)c.scratch;
    for (int64_t head = begin; head < std::min(begin + grain, s.heads); head++)
      walk(c, s, row, head, size, room + std::max(s.n, s.k), [&](int64_t t, float* state) {
        auto token = i.op == GATED_DELTA ? delta_token : scan_token;
        token(s, t, head, state, room);
      });
  });
}

void run_causal_conv(Context& c, const Instr& i) {
  const StateCall& s = *(const StateCall*)i.p[0];
  int64_t parts = (s.n + BLOCK - 1) / BLOCK;
  spread(c, 0, c.step->rows * parts, [&](int64_t task) {
    int64_t row = task / parts, first = task % parts * BLOCK, count = std::min(BLOCK, s.n - first);
    if (s.wide) {
      uint16_t* units = (uint16_t*)s.units;
      convolve(c, s, row, first, count, [&](int64_t at) { return from_bf16(units[at]); },
               [&](int64_t at, float value) { units[at] = to_bf16(value); },
               [](float x) { return from_bf16(to_bf16(x)); });
    } else {
      float* units = (float*)s.units;
      convolve(c, s, row, first, count, [&](int64_t at) { return units[at]; },
               [&](int64_t at, float value) { units[at] = value; }, [](float x) { return x; });
    }
  });
}
