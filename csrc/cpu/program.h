// A program is a list of instructions over an arena; a step runs it for T tokens of R rows, S of them
// sampled. The layouts of Instr, Step, Draw and StateCall are mirrored in sgla/kernels/cpu/native.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

enum Op : int32_t {
  EMBEDDING,
  RMS_NORM,
  ADD_RMS_NORM,
  ADD,
  LINEAR,
  ROPE_STORE,
  ATTENTION,
  ACT_MUL,
  GATHER,
  TO_BF16,
  SELF_ATTENTION,
  LAYER_NORM,
  ACTIVATE,
  DRAW,
  CAUSAL_CONV,
  GATED_DELTA,
  SELECTIVE_SCAN,
};

enum Kind : int64_t {
  F32, BF16, INT8, INT4, FIXED, Q8_0, Q5_0, Q4_0, INT5, IQ4_NL, E2M1, E4M3, NF4, FP4, NVFP4, INT16
};
enum Cached : int64_t { KV_F32, KV_BF16, KV_INT8 };  // how pages hold k and v
enum Act : int64_t { NONE, SILU, GELU_TANH, GELU, RELU };

struct Instr {
  int32_t op;
  int32_t sampled;    // rows: 0 = T, 1 = S
  int64_t in[2];      // byte offsets in the arena; -1 = absent
  int64_t out[2];
  const void* p[5];   // weights and tables outside the arena; null = absent
  int64_t n, k;       // output and input width
  int64_t a[10];      // see each op
  float f[4];
};

struct Step {
  int64_t tokens, rows, sampled, page_size, max_pages;
  // Numbers in the page table of one cache group, of which there are several in a row, as of ``out_loc``.
  int64_t table_size;
  const int32_t *ids, *positions, *slots, *q_start, *kv_len, *out_loc, *page_table, *sample_rows;
};

// One random token wanted of a row of logits, or the best one at temperature 0: see sgla/sampling/draw.py.
struct Draw {
  int64_t row, position;  // position: of the token in its request; the upper half is 0
  uint64_t seed;
  int64_t top_k;  // <= 0, top_p >= 1 and min_p <= 0 are off
  double temperature, top_p, min_p;
  int64_t token;  // the answer; -1 if the logits are not numbers
};

// What p[0] of an instruction of layers with states points to. Of the delta rule a, b, c are v, k, q,
// ``decay`` the logarithms of decays [T, heads] or, if ``wide``, [T, heads, k], ``rate`` is beta, and n, k
// are dv, dk. Of a scan they are x, B, C, ``decay`` is a [heads] or, if ``wide``, [heads, k], ``rate`` are
// time steps, and n, k are P, N. Of a convolution a is x, b the bias or null, ``decay`` the weight [n, k],
// and ``wide`` says that units are bfloat16. Strides are from token to token; ``out`` has none between them.
struct StateCall {
  const float *a, *b, *c, *decay, *rate;
  float* out;
  void* units;
  const int32_t *reads, *writes, *marks;
  int64_t a_stride, b_stride, c_stride, marks_count, heads, group, n, k, wide;
};

// Query tokens [first, first + count) of a row, whose token ``first`` stands at ``position``.
struct QueryBlock {
  int32_t row, first, count, position;
};

// One-token blocks of rows whose histories begin with the same pages. ``segments``: so many are the same for
// all of them.
struct Prefix {
  std::vector<int32_t> blocks;
  int64_t segments;
};

struct Team;

// What a thread sees of the running step.
struct Context {
  Team* team;
  const Step* step;
  char* arena;
  int thread, threads;
  std::atomic<int64_t>* counters;  // of this instruction: one a thread and phase
  uint8_t* scratch;                // of this thread, SCRATCH bytes
  const std::vector<QueryBlock>* blocks;
  const std::vector<Prefix>* prefixes;
  float* partials;                 // of attention in parts, for all threads

  float* at(int64_t offset) const { return offset < 0 ? nullptr : (float*)(arena + offset); }
  int64_t rows(const Instr& i) const { return i.sampled ? step->sampled : step->tokens; }
};

constexpr int64_t SCRATCH = 4 << 20;
constexpr int PHASES = 2;
constexpr int COUNTER_STRIDE = 8;  // a cache line for each counter

void barrier(Context& c);

// Run body(i) for each i in [0, count). A thread starts with its own contiguous share and then helps the
// others, so a thread that loses its core does not hold up the step.
template <class F>
inline void spread(Context& c, int phase, int64_t count, F body) {
  for (int turn = 0; turn < c.threads; turn++) {
    int owner = c.thread + turn;
    if (owner >= c.threads) owner -= c.threads;
    int64_t begin = owner * count / c.threads, end = (owner + 1) * count / c.threads;
    auto& next = c.counters[(phase * c.threads + owner) * COUNTER_STRIDE];
    while (next.load(std::memory_order_relaxed) < end - begin) {
      int64_t i = begin + next.fetch_add(1, std::memory_order_relaxed);
      if (i >= end) break;
      body(i);
    }
  }
}

// The same over rows, in blocks of about ``grain`` rows.
template <class F>
inline void spread_rows(Context& c, int64_t rows, int64_t grain, F body) {
  if (grain < 1) grain = 1;
  spread(c, 0, (rows + grain - 1) / grain, [&](int64_t b) {
    int64_t end = (b + 1) * grain < rows ? (b + 1) * grain : rows;
    for (int64_t r = b * grain; r < end; r++) body(r);
  });
}

void run_embedding(Context& c, const Instr& i);
void run_rms_norm(Context& c, const Instr& i);
void run_add(Context& c, const Instr& i);
void run_rope_store(Context& c, const Instr& i);
void run_act_mul(Context& c, const Instr& i);
void run_gather(Context& c, const Instr& i);
void run_to_bf16(Context& c, const Instr& i);
void run_self_attention(Context& c, const Instr& i);
void run_layer_norm(Context& c, const Instr& i);
void run_activate(Context& c, const Instr& i);
void run_linear(Context& c, const Instr& i);
void run_attention(Context& c, const Instr& i);
void run_draw(Context& c, const Instr& i);
void run_causal_conv(Context& c, const Instr& i);
void run_scan(Context& c, const Instr& i);

// The first of equals; -1: the largest is not finite, or one is NaN.
int32_t argmax_row(const float* x, int64_t n);

int query_block(const Instr& attention);  // tokens of a row that one task takes
std::vector<Prefix> find_prefixes(const Step& step, const std::vector<QueryBlock>& blocks);
// In floats.
int64_t partials_size(const Instr& attention, const Step& step, int64_t blocks,
                      const std::vector<Prefix>& prefixes, int threads);
