// Operations over rows: embedding, norms, rotary embedding with the KV store, activations, gather, largest
// numbers.

#include <cmath>

#include "gemm.h"

namespace {

constexpr int64_t GRAIN = 8192;  // elements worth a chunk of their own

// The quants of a group of 5 bits of an output channel.
void unpack_five(const uint8_t* dword, int* q) {
  for (int half = 0; half < 2; half++) {
    int found[16] = {};
    for (int r = 0; r < 5; r++) {
      uint16_t bits;
      std::memcpy(&bits, dword + r * ROW_BYTES + half * 2, 2);
      for (int i = 0; i < 3; i++) found[r * 3 + i] = bits >> (5 * i) & 31;
      found[15] |= bits >> 15 << r;
    }
    for (int i = 0; i < 16; i++) q[i / 4 * 8 + half * 4 + i % 4] = found[i];
  }
}

// Output channel n of packed panels as ``width`` floats.
template <Kind K>
void unpack_row(const uint8_t* w, int64_t width, int64_t n, float* out) {
  constexpr int PER = five_bits(K) ? GROUP : per_dword(K), ROWS = five_bits(K) ? 5 : 1;
  const uint8_t* dword = w + n / PANEL * panel_bytes(K, width) + n % PANEL * 4;
  float scale = 1, low = 0;
  for (int64_t k = 0; k < width; k += PER, dword += ROWS * ROW_BYTES) {
    if (grouped(K) && k % GROUP == 0) {
      const uint16_t* head = (const uint16_t*)(dword - n % PANEL * 4) + n % PANEL;
      scale = from_f16(head[0]);
      if (affine(K)) low = from_f16(head[PANEL]);
      if (symmetric(K)) low = scale * -zero_of(K);
      dword += head_bytes(K);
    }
    if (K == FIXED && k % FIXED_GROUP == 0) {
      scale = from_bf16(((const uint16_t*)(dword - n % PANEL * 4))[n % PANEL]);
      dword += FIXED_HEAD;
    }
    uint32_t bits;
    int q[GROUP];
    std::memcpy(&bits, dword, 4);
    if (five_bits(K)) unpack_five(dword, q);
    for (int i = 0; i < PER && k + i < width; i++) {
      if (K == F32) std::memcpy(out + k, &bits, 4);
      if (K == BF16) out[k + i] = from_bf16(bits >> (16 * i));
      if (K == FIXED) out[k + i] = (float)(int16_t)(bits >> (16 * i)) * scale;
      if (bytes(K)) q[i] = bits >> (8 * i) & 255;
      if (nibbles(K) && !five_bits(K)) q[i] = bits >> (4 * i) & 15;
      if (coded(K)) q[i] = codes_of(K)[q[i]];
      if (grouped(K)) out[k + i] = std::fmaf((float)q[i], scale, low);
    }
  }
}

// The same of wide kinds.
template <Kind K>
void unpack_wide(const uint8_t* w, int64_t width, int64_t n, float* out) {
  const uint8_t *at = w + n / PANEL * panel_bytes(K, width), *scales = at;
  int v = n % PANEL / LANES, lane = n % LANES;
  float scale = 0;
  for (int64_t k = 0; k < width; k += summed(K), at += group_rows(K) * ROW_BYTES) {
    if (k % span(K) == 0) {
      scale = head_scale(at, v)[lane];
      at += head_bytes(K);
    }
    if (deep(K) && k % 64 == 0) {
      scales = at;
      at += ROW_BYTES;
    }
    float step = deep(K) ? scale * deep_scale(scales, k / 16 % 4, v)[lane] : scale;
    for (int64_t i = 0; i < summed(K) && k + i < width; i++) out[k + i] = step * value_of<K>(at, i, v)[lane];
  }
}

float square_sum(const float* x, int64_t d) {
  vf a{}, b{};
  int64_t j = 0;
  for (; j + 2 * LANES <= d; j += 2 * LANES) {
    vf u = load(x + j), v = load(x + j + LANES);
    a += u * u;
    b += v * v;
  }
  float s = sum(a + b);
  for (; j < d; j++) s += x[j] * x[j];
  return s;
}

float inverse_rms(const float* x, int64_t d, float eps) {
  return 1.0f / std::sqrt(square_sum(x, d) / d + eps);
}

}  // namespace

// a: 0 kind; p: 0 panels; f: 0 scale; n: vocabulary, k: width
void run_embedding(Context& c, const Instr& i) {
  Kind kind = (Kind)i.a[0];
  auto w = (const uint8_t*)i.p[0];
  spread_rows(c, c.step->tokens, GRAIN / 4 / i.k, [&](int64_t t) {
    int64_t id = c.step->ids[t];
    float* out = c.at(i.out[0]) + t * i.k;
    switch (kind) {
      case F32: unpack_row<F32>(w, i.k, id, out); break;
      case BF16: unpack_row<BF16>(w, i.k, id, out); break;
      case INT8: unpack_row<INT8>(w, i.k, id, out); break;
      case INT4: unpack_row<INT4>(w, i.k, id, out); break;
      case FIXED: unpack_row<FIXED>(w, i.k, id, out); break;
      case INT5: unpack_row<INT5>(w, i.k, id, out); break;
      case Q8_0: unpack_row<Q8_0>(w, i.k, id, out); break;
      case Q5_0: unpack_row<Q5_0>(w, i.k, id, out); break;
      case Q4_0: unpack_row<Q4_0>(w, i.k, id, out); break;
      case IQ4_NL: unpack_row<IQ4_NL>(w, i.k, id, out); break;
      case E2M1: unpack_row<E2M1>(w, i.k, id, out); break;
      case E4M3: unpack_wide<E4M3>(w, i.k, id, out); break;
      case NF4: unpack_wide<NF4>(w, i.k, id, out); break;
      case FP4: unpack_wide<FP4>(w, i.k, id, out); break;
      case NVFP4: unpack_wide<NVFP4>(w, i.k, id, out); break;
    }
    if (i.f[0] == 1.0f) return;
    for (int64_t j = 0; j < i.k; j++) out[j] *= i.f[0];
  });
}

// in: 0 x, 1 residual or -1; out: 0 normed, 1 sum; p: 0 weight; a: 0 normed is bfloat16; f: 0 eps
void run_rms_norm(Context& c, const Instr& i) {
  int64_t d = i.k;
  auto weight = (const float*)i.p[0];
  spread_rows(c, c.rows(i), GRAIN / d, [&](int64_t t) {
    const float* x = c.at(i.in[0]) + t * d;
    if (const float* residual = c.at(i.in[1])) {
      float* h = c.at(i.out[1]) + t * d;
      residual += t * d;
      for (int64_t j = 0; j < d; j++) h[j] = residual[j] + x[j];
      x = h;
    }
    float r = inverse_rms(x, d, i.f[0]);
    if (i.a[0]) {
      uint16_t* out = (uint16_t*)c.at(i.out[0]) + t * (d + (d & 1));
      for (int64_t j = 0; j < d; j++) out[j] = to_bf16(x[j] * r * weight[j]);
      if (d & 1) out[d] = 0;
    } else {
      float* out = c.at(i.out[0]) + t * d;
      for (int64_t j = 0; j < d; j++) out[j] = x[j] * r * weight[j];
    }
  });
}

// in: 0 x, 1 y; k: width
void run_add(Context& c, const Instr& i) {
  spread_rows(c, c.rows(i), GRAIN / i.k, [&](int64_t t) {
    const float *x = c.at(i.in[0]) + t * i.k, *y = c.at(i.in[1]) + t * i.k;
    float* out = c.at(i.out[0]) + t * i.k;
    for (int64_t j = 0; j < i.k; j++) out[j] = x[j] + y[j];
  });
}

// in: 0 x; k: width
void run_to_bf16(Context& c, const Instr& i) {
  spread_rows(c, c.rows(i), GRAIN / i.k, [&](int64_t t) {
    const float* x = c.at(i.in[0]) + t * i.k;
    uint16_t* out = (uint16_t*)c.at(i.out[0]) + t * (i.k + (i.k & 1));
    for (int64_t j = 0; j < i.k; j++) out[j] = to_bf16(x[j]);
    if (i.k & 1) out[i.k] = 0;
  });
}

namespace {

struct Rope {
  const Instr& i;
  int64_t dim, rot;
  float eps;

  void head(const float* x, float* out, const float* norm, const float* cos_sin) const {
    float scale = norm ? inverse_rms(x, dim, eps) : 1.0f;
    for (int64_t j = 0; j < dim; j++) out[j] = norm ? x[j] * scale * norm[j] : x[j];
    int64_t half = rot / 2;
    const float *cos = cos_sin, *sin = cos_sin + half;
    for (int64_t j = 0; j < half; j++) {
      float a = out[j], b = out[j + half];
      out[j] = a * cos[j] - b * sin[j];
      out[j + half] = b * cos[j] + a * sin[j];
    }
  }
};

// Keys as int8 pages have them: turned, so that no dim takes more of the range than others. Queries are
// turned too, and their products stay what they are.
void turn(float* x, int64_t dim) {
  int64_t size = hadamard_size(dim);
  float by = 1.0f / size;
  hadamard(x, dim, size);
  for (int64_t j = 0; j < dim; j++) x[j] *= by;
}

// Returns the scale, which is not finite if one of x is not: such bits are the largest as integers.
float store_rounded(const float* x, int8_t* out, int64_t dim) {
  int32_t top = 0;
  for (int64_t j = 0; j < dim; j++) {
    int32_t bits;
    std::memcpy(&bits, x + j, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float most, scale;
  std::memcpy(&most, &top, 4);
  scale = most / 127.0f;
  vf by = splat(scale == 0 ? 1.0f : scale);
  for (int64_t j = 0; j < dim; j += LANES) {
    float part[LANES] = {};
    int8_t rounded[LANES];
    int64_t count = dim - j < LANES ? dim - j : LANES;
    std::memcpy(part, x + j, count * 4);
    store_int8(rounded, round_to_int(vmin(vmax(load(part) / by, splat(-127.0f)), splat(127.0f))));
    std::memcpy(out + j, rounded, count);
  }
  return scale;
}

void store_kv(Cached type, const float* x, void* base, int64_t offset, int64_t dim, float* scale) {
  if (type == KV_F32) std::memcpy((float*)base + offset, x, dim * sizeof(float));
  if (type == KV_BF16)
    for (int64_t j = 0; j < dim; j++) ((uint16_t*)base)[offset + j] = to_bf16(x[j]);
  if (type == KV_INT8) *scale = store_rounded(x, (int8_t*)base + offset, dim);
}

}  // namespace

// in: 0 qkv; out: 0 q; n: q heads, k: head dim; f: 0 eps
// p: 0 cos_sin [P, rot], 1 q norm, 2 k norm, of int8 pages 3 scales of k and 4 of v [pages, kv heads, page
// size]
// a: 0 kv heads, 1 rot, 2 Cached, 3 page stride, 4 token stride, 5 head stride, 6 k pages, 7 v pages, 9 cache
// group
void run_rope_store(Context& c, const Instr& i) {
  Rope rope{i, i.k, i.a[1], i.f[0]};
  int64_t heads = i.n, kv_heads = i.a[0], width = (heads + 2 * kv_heads) * rope.dim;
  float head_out[1024];
  spread_rows(c, c.step->tokens, GRAIN / width, [&](int64_t t) {
    const float* x = c.at(i.in[0]) + t * width;
    float* q = c.at(i.out[0]) + t * heads * rope.dim;
    const float* cos_sin = (const float*)i.p[0] + c.step->positions[t] * rope.rot;
    for (int64_t h = 0; h < heads; h++, x += rope.dim)
      rope.head(x, q + h * rope.dim, (const float*)i.p[1], cos_sin);
    int64_t loc = c.step->out_loc[i.a[9] * c.step->tokens + t], page = loc / c.step->page_size,
            offset = loc % c.step->page_size;
    int64_t place = page * i.a[3] + offset * i.a[4];
    for (int64_t h = 0; h < kv_heads; h++, x += rope.dim) {
      int64_t at = place + h * i.a[5], scale = (page * kv_heads + h) * c.step->page_size + offset;
      rope.head(x, head_out, (const float*)i.p[2], cos_sin);
      if (i.a[2] == KV_INT8) turn(head_out, rope.dim);
      store_kv((Cached)i.a[2], head_out, (void*)i.a[6], at, rope.dim, (float*)i.p[3] + scale);
      store_kv((Cached)i.a[2], x + kv_heads * rope.dim, (void*)i.a[7], at, rope.dim, (float*)i.p[4] + scale);
    }
  });
}

// in: 0 x [rows, 2n]; out: 0 [rows, n]; a: 1 activation, 3 y is bfloat16
void run_act_mul(Context& c, const Instr& i) {
  int64_t f = i.n;
  spread_rows(c, c.rows(i), GRAIN / 8 / f, [&](int64_t t) {
    const float *gate = c.at(i.in[0]) + t * 2 * f, *up = gate + f;
    for (int64_t j = 0; j < f; j += LANES) {
      float g_[LANES] = {}, u_[LANES] = {}, out[LANES];
      int64_t count = f - j < LANES ? f - j : LANES;
      std::memcpy(g_, gate + j, count * 4);
      std::memcpy(u_, up + j, count * 4);
      vf g = load(g_), z = g;
      if (i.a[1] == GELU_TANH) z = 1.5957691216057308f * (g + 0.044715f * g * g * g);
      store(out, g * sigmoid(z) * load(u_));
      std::memcpy(c.at(i.out[0]) + t * f + j, out, count * 4);
    }
  });
}

// in: 0 x [T, k]; out: 0 [S, k]
void run_gather(Context& c, const Instr& i) {
  spread_rows(c, c.step->sampled, GRAIN / i.k, [&](int64_t s) {
    std::memcpy(c.at(i.out[0]) + s * i.k, c.at(i.in[0]) + c.step->sample_rows[s] * i.k, i.k * sizeof(float));
  });
}

namespace {

// NaN if one of them is.
float largest(const float* x, int64_t n) {
  vf m[4];
  vi odd{};
  UNROLL for (int v = 0; v < 4; v++) m[v] = splat(-INFINITY);
  int64_t j = 0;
  for (; j + 4 * LANES <= n; j += 4 * LANES)
    UNROLL for (int v = 0; v < 4; v++) {
      vf y = load(x + j + v * LANES);
      odd |= y != y;
      m[v] = vmax(y, m[v]);
    }
  float best = max_of(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
  bool bad = false;
  UNROLL for (int v = 0; v < LANES; v++) bad |= odd[v] != 0;
  for (; j < n; j++) best = x[j] > best ? x[j] : best, bad |= x[j] != x[j];
  return bad ? NAN : best;
}

}  // namespace

// Maxima of chunks first, so that only one chunk is searched value by value.
int32_t argmax_row(const float* x, int64_t n) {
  constexpr int64_t CHUNK = 1024;
  float best = -INFINITY;
  int64_t place = 0;
  for (int64_t j = 0; j < n; j += CHUNK) {
    float m = largest(x + j, n - j < CHUNK ? n - j : CHUNK);
    if (m != m) return -1;
    if (m > best) best = m, place = j;
  }
  if (!std::isfinite(best)) return -1;
  while (x[place] != best) place++;
  return (int32_t)place;
}
