// Random tokens from rows of logits: see sgla/sampling/draw.py, whose definition this is.
//
// No logarithm is needed to see that a token cannot win: E > v, so its score is below that of the best so far
// if its bits, a uniform number, are above a limit that its block's largest logit sets. Only the few that
// pass get a score.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "program.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = 64;  // values whose weights are summed in float32, and that have one limit
constexpr int VECTORS = BLOCK / LANES;
constexpr float LOG2_E = 1.442695041f;
constexpr double MOST_NOISE = 33;  // bits: the largest -log2(E)

// A block of the first of ``count`` values, padded with -inf.
INLINE void load_values(const float* from, int64_t count, vf* v) {
  float tail[BLOCK];
  if (count < BLOCK) {
    std::fill(std::copy(from, from + count, tail), tail + BLOCK, -INFINITY);
    from = tail;
  }
  UNROLL for (int j = 0; j < VECTORS; j++) v[j] = load(from + j * LANES);
}

struct Row {
  const float* x;
  const int64_t* ids;  // the tokens; null: 0, 1, ...
  int64_t n;
  double temperature;
  const float* most;  // the largest of each block
  float top;

  int64_t blocks() const { return (n + BLOCK - 1) / BLOCK; }

  void load_block(int64_t b, vf* v) const { load_values(x + b * BLOCK, n - b * BLOCK, v); }

  // The sum of the weights of ``count`` logits; the largest of the row has 1.
  double weigh(const float* values, int64_t count) const {
    const float inverse = (float)(1 / temperature);
    double total = 0;
    for (int64_t at = 0; at < count; at += BLOCK) {
      vf v[VECTORS], s{};
      load_values(values + at, count - at, v);
      UNROLL for (int j = 0; j < VECTORS; j++) s += vexp((v[j] - top) * inverse);
      total += sum(s);
    }
    return total;
  }

  // The logits from ``least`` on.
  void gather(float least, std::vector<float>& out) const {
    out.clear();
    for (int64_t b = 0; b < blocks(); b++) {
      if (most[b] < least) continue;
      const int64_t end = std::min((b + 1) * BLOCK, n);
      for (int64_t i = b * BLOCK; i < end; i++)
        if (x[i] >= least) out.push_back(x[i]);
    }
  }
};

// False if the largest logit is not finite, or one is NaN.
bool find_largest(Row& row) {
  thread_local std::vector<float> most;
  most.resize(row.blocks());
  row.most = most.data();
  vf odd{};
  row.top = -INFINITY;
  for (int64_t b = 0; b < row.blocks(); b++) {
    vf v[VECTORS], m = splat(-INFINITY);
    row.load_block(b, v);
    UNROLL for (int j = 0; j < VECTORS; j++) {
      m = vmax(m, v[j]);
      odd += v[j] != v[j] ? splat(1.0f) : vf{};
    }
    most[b] = max_of(m);
    row.top = std::max(row.top, most[b]);
  }
  return std::isfinite(row.top) && sum(odd) == 0;
}

// The largest logits: at least ``top_k`` of them, or as many as hold ``mass``, from ever more of the row.
void find_likeliest(const Row& row, int64_t top_k, double mass, std::vector<float>& found) {
  for (double depth : {1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, (double)INFINITY}) {
    row.gather((float)(row.top - depth * row.temperature), found);
    if (top_k > 0 ? (int64_t)found.size() >= top_k : row.weigh(found.data(), found.size()) > mass) return;
  }
}

// The largest value such that the values from it on weigh ``mass``; the smallest if all weigh less. Reorders
// them.
float find_mass(const Row& row, float* begin, float* end, double mass) {
  float least = INFINITY;
  while (begin < end) {
    float* middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, std::greater<float>());  // what is before it is not smaller
    const double held = row.weigh(begin, middle - begin), own = row.weigh(middle, 1);
    if (held >= mass) {
      end = middle;
      continue;
    }
    least = *middle;
    if (held + own >= mass) break;
    mass -= held + own;
    begin = middle + 1;
  }
  return least;
}

// The smallest logit that may be drawn.
float find_threshold(const Row& row, int64_t top_k, double top_p, double min_p) {
  thread_local std::vector<float> found;
  float least = -INFINITY;
  if (top_k >= row.n) top_k = 0;
  if (top_k > 0 || top_p < 1) {
    double mass = top_k > 0 ? 0 : top_p * row.weigh(row.x, row.n);
    find_likeliest(row, top_k, mass, found);
    float *begin = found.data(), *end = begin + found.size();
    if (top_k > 0) {
      std::nth_element(begin, begin + top_k - 1, end, std::greater<float>());
      least = begin[top_k - 1];
      end = std::partition(begin, end, [&](float value) { return value >= least; });
      mass = top_p * row.weigh(begin, end - begin);
    }
    if (top_p < 1) least = find_mass(row, begin, end, mass);
  }
  if (min_p > 0) least = std::max(least, (float)(row.top + row.temperature * std::log(min_p)));
  return std::min(least, row.top);
}

// The finaliser of splitmix64.
uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

constexpr uint32_t STRIDE = 0x9E3779B1;  // between the starts of tokens

// The upper half of each product.
INLINE vu mul_high(vu a, uint32_t b) {
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi64(b), even = _mm512_mul_epu32((__m512i)a, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), m);
  return (vu)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi64x(b), even = _mm256_mul_epu32((__m256i)a, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), m);
  return (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  typedef uint64_t wide __attribute__((vector_size(LANES * 8)));
  return __builtin_convertvector(__builtin_convertvector(a, wide) * b >> 32, vu);
#endif
}

INLINE bool any(vi mask) {
  typedef int64_t pairs __attribute__((vector_size(LANES * 4)));
  const pairs p = (pairs)mask;
  int64_t all = 0;
  UNROLL for (int j = 0; j < LANES / 2; j++) all |= p[j];
  return all != 0;
}

// The noise of one row.
struct Noise {
  uint32_t low, high;

  // Of tokens that start at ``start``, each its id times STRIDE.
  INLINE vu bits(vu start) const {
    vu t = start + high;
    t ^= t >> 16;
    const vu h = mul_high(t, low) + (t * high + low * 0x85EBCA6B);
    return h << 9 | h >> 23;
  }
};

// log2(E)
double log2_noise(uint32_t bits) {
  const float v = std::min(((float)bits + 0.5f) * (1 / 4294967296.0f), 0.99999994f);
  return std::log2(-std::log1p(-(double)v));
}

// The largest bits that a token may have whose score is ``below`` the best one without noise. Rounded up.
uint32_t find_limit(double below) {
  if (below <= 0) return UINT32_MAX;
  return (uint32_t)std::min(4294967295.0, std::exp2((float)-below) * 4294967296.0 * 1.00001 + 2);
}

template <bool IDS>
int64_t draw_above(const Row& row, float threshold, Noise noise) {
  const float factor = LOG2_E / (float)row.temperature;
  vu lane, apart = vu{} + LANES * STRIDE;
  UNROLL for (int j = 0; j < LANES; j++) lane[j] = j * STRIDE;
  double best = -INFINITY;
  int64_t winner = row.n;

  auto look = [&](int64_t b) {
    if (row.most[b] < threshold) return;
    const double below = best - (double)row.most[b] * factor;
    if (below > MOST_NOISE) return;
    const uint32_t limit = find_limit(below);
    const int64_t first = b * BLOCK, count = std::min(BLOCK, row.n - first);
    vu bits[VECTORS], start = lane + (uint32_t)first * STRIDE;
    vi close{};
    uint32_t starts[BLOCK] = {};
    if (IDS)
      for (int64_t i = 0; i < count; i++) starts[i] = (uint32_t)row.ids[first + i] * STRIDE;
    UNROLL for (int j = 0; j < VECTORS; j++) {
      if (IDS) std::memcpy(&start, starts + j * LANES, sizeof start);
      bits[j] = noise.bits(start);
      close |= bits[j] <= limit;
      start += apart;
    }
    if (!any(close)) return;
    for (int64_t i = 0; i < count; i++) {
      const uint32_t own = ((const uint32_t*)bits)[i];
      const float x = row.x[first + i];
      if (own > limit || x < threshold) continue;
      const double score = (double)x * factor - log2_noise(own);
      if (score > best || (score == best && first + i < winner)) best = score, winner = first + i;
    }
  };

  const int64_t likely = std::max_element(row.most, row.most + row.blocks()) - row.most;
  look(likely);  // a good score to begin with
  for (int64_t b = 0; b < row.blocks(); b++)
    if (b != likely) look(b);
  return winner;
}

}  // namespace

// Index of the token drawn for ``position``, or -1 if the logits are not numbers. Off: top_k <= 0, top_p >=
// 1, min_p <= 0.
extern "C" int32_t sgla_draw(const float* x, const int64_t* ids, int64_t n, double temperature, int64_t top_k,
                             double top_p, double min_p, uint64_t seed, uint64_t position) {
  Row row{x, ids, n, temperature, nullptr, 0};
  if (!find_largest(row)) return -1;
  const float threshold = find_threshold(row, top_k, top_p, min_p);
  const uint64_t of_row = mix(mix(seed) ^ position);
  const Noise noise{(uint32_t)of_row, (uint32_t)(of_row >> 32)};
  return (int32_t)(ids ? draw_above<true>(row, threshold, noise) : draw_above<false>(row, threshold, noise));
}

// in: 0 logits [S, k]; p: 0 Draw[a0]
void run_draw(Context& c, const Instr& i) {
  spread_rows(c, i.a[0], 1, [&](int64_t n) {
    Draw& d = ((Draw*)i.p[0])[n];
    const float* x = c.at(i.in[0]) + d.row * i.k;
    d.token = d.temperature > 0
                  ? sgla_draw(x, nullptr, i.k, d.temperature, d.top_k, d.top_p, d.min_p, d.seed, d.position)
                  : argmax_row(x, i.k);
  });
}
