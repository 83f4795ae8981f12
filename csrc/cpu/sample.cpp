// Random tokens from rows of logits: see sgla/sampling/draw.py, whose rules these are.

#include <algorithm>
#include <cmath>
#include <vector>

#include "program.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = 64;  // values whose weights are summed in float32

struct Candidate {
  float value;
  int32_t id;
  bool operator<(const Candidate& other) const { return value > other.value || (value == other.value && id < other.id); }
};

struct Row {
  const float* x;
  int64_t n;
  float top, inverse, floor;  // floor: scaled logits below it have no weight

  // Weights of block b, the last one padded with zeros.
  void weights(int64_t b, vf* w) const {
    float tail[BLOCK];
    const float* from = x + b * BLOCK;
    if (n - b * BLOCK < BLOCK) {
      std::fill(tail, tail + BLOCK, -INFINITY);
      std::copy(from, x + n, tail);
      from = tail;
    }
    UNROLL for (int64_t j = 0; j < BLOCK / LANES; j++) {
      vf scaled = (load(from + j * LANES) - top) * inverse;
      w[j] = scaled < splat(floor) ? vf{} : vexp(scaled);
    }
  }

  int64_t blocks() const { return (n + BLOCK - 1) / BLOCK; }

  // Cumulative weights of the blocks.
  void sum_blocks(std::vector<double>& sums) const {
    double total = 0;
    sums.resize(blocks());
    for (int64_t b = 0; b < blocks(); b++) {
      vf w[BLOCK / LANES], s{};
      weights(b, w);
      UNROLL for (int64_t j = 0; j < BLOCK / LANES; j++) s += w[j];
      sums[b] = total += sum(s);
    }
  }

  // The logits from ``least`` on, in the order of the vocabulary.
  void gather(float least, std::vector<Candidate>& out) const {
    out.clear();
    for (int64_t at = 0; at < n; at += BLOCK) {
      int64_t end = std::min(at + BLOCK, n);
      if (end - at == BLOCK) {
        vf most = load(x + at);
        UNROLL for (int64_t j = 1; j < BLOCK / LANES; j++) most = vmax(most, load(x + at + j * LANES));
        if (max_of(most) < least) continue;
      }
      for (int64_t i = at; i < end; i++)
        if (x[i] >= least) out.push_back({x[i], (int32_t)i});
    }
  }
};

// First index whose sum exceeds ``target``, but never one that adds nothing.
int64_t search(const double* sums, int64_t count, double target) {
  int64_t i = std::upper_bound(sums, sums + count, target) - sums;
  return i < count ? i : std::lower_bound(sums, sums + count, sums[count - 1]) - sums;
}

int32_t draw_in_order(const Row& row, double u) {
  thread_local std::vector<double> sums;
  row.sum_blocks(sums);
  double total = sums.back();
  if (!(total > 0)) return -1;
  int64_t b = search(sums.data(), sums.size(), u * total);
  vf w[BLOCK / LANES];
  row.weights(b, w);
  double inside[BLOCK], sum = 0;
  for (int64_t i = 0; i < BLOCK; i++) inside[i] = sum += ((const float*)w)[i];
  int64_t i = search(inside, std::min(BLOCK, row.n - b * BLOCK), u * total - (b ? sums[b - 1] : 0.0));
  return (int32_t)(b * BLOCK + i);
}

// Falling candidates, at least ``top_k`` of them or as many as hold ``mass``: from ever more of the row.
void find_candidates(const Row& row, double temperature, int64_t top_k, double mass, std::vector<Candidate>& found) {
  for (double depth : {1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, (double)INFINITY}) {
    row.gather((float)(row.top - depth * temperature), found);
    if (std::isinf(depth)) break;
    if (top_k > 0 && (int64_t)found.size() >= top_k) break;
    double held = 0;
    if (top_k <= 0)
      for (const Candidate& c : found) held += std::exp(((double)c.value - row.top) / temperature);
    if (top_k <= 0 && held > mass) break;
  }
  if (top_k > 0 && (int64_t)found.size() > top_k) {
    std::nth_element(found.begin(), found.begin() + top_k - 1, found.end());
    found.resize(top_k);
  }
  std::sort(found.begin(), found.end());
}

int32_t draw_sorted(Row row, double temperature, int64_t top_k, double top_p, double min_p, double u) {
  thread_local std::vector<Candidate> found;
  thread_local std::vector<double> sums;
  double mass = 0;
  if (top_k <= 0) {
    row.floor = -INFINITY;
    row.sum_blocks(sums);
    mass = top_p * sums.back();
    if (!(mass >= 0)) return -1;
  }
  find_candidates(row, temperature, top_k, mass, found);
  sums.clear();
  double total = 0;
  int64_t likely = 0;  // candidates that min_p lets stay
  for (const Candidate& c : found) {
    double weight = std::exp(((double)c.value - row.top) / temperature);
    sums.push_back(total += weight);
    likely += weight >= min_p;
  }
  if (top_k > 0) mass = top_p * total;
  int64_t count = sums.size();
  if (top_p < 1) count = std::min<int64_t>(count, std::lower_bound(sums.begin(), sums.end(), mass) - sums.begin() + 1);
  if (min_p > 0) count = std::min(count, likely);
  count = std::max<int64_t>(1, count);
  return found[search(sums.data(), count, u * sums[count - 1])].id;
}

// The finaliser of splitmix64.
uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

double uniform(uint64_t seed, uint64_t position) { return (double)(mix(mix(seed) ^ position) >> 24) / (double)(1ULL << 40); }

}  // namespace

// The token at ``u`` of the CDF, or -1 if the logits are not numbers. Off: top_k <= 0, top_p >= 1, min_p <= 0.
extern "C" int32_t sgla_draw(const float* x, int64_t n, double temperature, int64_t top_k, double top_p, double min_p, double u) {
  vf most = splat(-INFINITY), odd{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = load(x + i);
    most = vmax(most, v);
    odd += v != v ? splat(1.0f) : vf{};
  }
  float top = max_of(most), bad = sum(odd);
  for (; i < n; i++) top = std::max(top, x[i]), bad += x[i] != x[i];
  if (!std::isfinite(top) || bad > 0) return -1;
  float floor = min_p > 0 ? (float)std::log(min_p) : -INFINITY;
  Row row{x, n, top, (float)(1 / temperature), floor};
  if (top_k > 0 || top_p < 1) return draw_sorted(row, temperature, std::min(top_k, n), top_p, min_p, u);
  return draw_in_order(row, u);
}

// in: 0 logits [S, k]; p: 0 Draw[a0]
void run_draw(Context& c, const Instr& i) {
  spread_rows(c, i.a[0], 1, [&](int64_t n) {
    Draw& d = ((Draw*)i.p[0])[n];
    const float* x = c.at(i.in[0]) + d.row * i.k;
    d.token = d.temperature > 0
                  ? sgla_draw(x, i.k, d.temperature, d.top_k, d.top_p, d.min_p, uniform(d.seed, d.position))
                  : argmax_row(x, i.k);
  });
}
