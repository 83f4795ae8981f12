// The thread team and the executor of programs.

#include "fixed.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// 15 to 60 us before a waiting thread gives its core away; a pause is 60 to 140 cycles.
constexpr int SPINS = 1000;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  if (word.load() == seen) sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// On huge pages where the system has them: scratch is walked in many streams, which small pages make
// expensive.
uint8_t* allocate(int64_t bytes) {
  constexpr int64_t HUGE = 2 << 20;
  void* p = aligned_alloc(HUGE, (bytes + HUGE - 1) / HUGE * HUGE);
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return (uint8_t*)p;
}

}  // namespace

struct Team {
  int threads;
  std::vector<pthread_t> helpers;
  std::vector<uint8_t*> scratch;
  alignas(64) std::atomic<uint32_t> epoch{0};    // counts steps; helpers sleep on it
  alignas(64) std::atomic<uint32_t> round{0};    // counts barriers passed
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> sleeping{0};
  bool stop = false;

  // The step in progress.
  const Instr* program = nullptr;
  int64_t length = 0;
  const Step* step = nullptr;
  char* arena = nullptr;
  std::vector<QueryBlock> blocks;
  std::vector<Prefix> prefixes;
  std::vector<float> partials;
  std::atomic<int64_t>* counters = nullptr;
  int64_t counter_capacity = 0;

  int64_t counters_per_instr() const { return (int64_t)PHASES * threads * COUNTER_STRIDE; }
};

void barrier(Context& c) {
  Team& t = *c.team;
  if (t.threads == 1) return;
  uint32_t round = t.round.load(std::memory_order_relaxed);
  if (t.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == t.threads) {
    t.arrived.store(0, std::memory_order_relaxed);
    t.round.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; t.round.load(std::memory_order_acquire) == round; spins++) {
    if (spins < SPINS)
      pause_cpu();
    else
      sched_yield();
  }
}

namespace {

void execute(Context& c, const Instr& i) {
  switch ((Op)i.op) {
    case EMBEDDING: return run_embedding(c, i);
    case RMS_NORM:
    case ADD_RMS_NORM: return run_rms_norm(c, i);
    case ADD: return run_add(c, i);
    case LINEAR: return run_linear(c, i);
    case ROPE_STORE: return run_rope_store(c, i);
    case ATTENTION: return run_attention(c, i);
    case ACT_MUL: return run_act_mul(c, i);
    case GATHER: return run_gather(c, i);
    case TO_BF16: return run_to_bf16(c, i);
    case SELF_ATTENTION: return run_self_attention(c, i);
    case LAYER_NORM: return run_layer_norm(c, i);
    case ACTIVATE: return run_activate(c, i);
    case DRAW: return run_draw(c, i);
    case CAUSAL_CONV: return run_causal_conv(c, i);
    case GATED_DELTA:
    case SELECTIVE_SCAN: return run_scan(c, i);
  }
}

void work(Team& t, int thread) {
  Context c{&t,        t.step,      t.arena,          thread, t.threads, t.counters, t.scratch[thread],
            &t.blocks, &t.prefixes, t.partials.data()};
  // After the last barrier the team may already be given its next step: do not look at it again.
  const Instr* program = t.program;
  int64_t length = t.length;
  for (int64_t n = 0; n < length; n++) {
    execute(c, program[n]);
    c.counters += t.counters_per_instr();
    barrier(c);
  }
}

struct Start {
  Team* team;
  int thread;
};

void* help(void* argument) {
  Start* start = (Start*)argument;
  Team& t = *start->team;
  int thread = start->thread;
  delete start;
  uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; spins < SPINS && t.epoch.load(std::memory_order_acquire) == seen; spins++)
      pause_cpu();
    while (t.epoch.load(std::memory_order_acquire) == seen) {
      t.sleeping.fetch_add(1);
      sleep_on(t.epoch, seen);
      t.sleeping.fetch_sub(1);
    }
    seen++;
    if (t.stop) return nullptr;
    work(t, thread);
  }
}

void release(Team& t) {
  t.epoch.fetch_add(1);
  if (t.sleeping.load()) wake_all(t.epoch);
}

// Query blocks of all rows; rows without tokens have none.
void plan_attention(Team& t, const Instr& attention) {
  const Step& s = *t.step;
  int size = query_block(attention);
  t.blocks.clear();
  for (int32_t r = 0; r < s.rows; r++) {
    int32_t first = s.q_start[r], count = s.q_start[r + 1] - first;
    for (int32_t at = 0; at < count; at += size)
      t.blocks.push_back({r, first + at, std::min(size, count - at), s.kv_len[r] - count + at});
  }
  t.prefixes = find_prefixes(s, t.blocks);
}

}  // namespace

namespace {

// Pairs of bfloat16 as float32.
INLINE vf evens(vi pairs) { return as_float(pairs << 16); }
INLINE vf odds(vi pairs) { return as_float(pairs & (int32_t)0xffff0000); }

// The power of two that makes the largest of 64 values an integer of 12 bits, as bfloat16; nothing for zeros.
uint16_t fixed_scale(const uint16_t* x) {
  vf top{};
  for (int64_t i = 0; i < FIXED_GROUP; i += 2 * LANES) {
    vi pairs = load_int(x + i) & 0x7fff7fff;
    top = vmax(top, vmax(evens(pairs), odds(pairs)));
  }
  int exponent = to_bf16(max_of(top)) >> 7;
  return exponent == 255 ? 0x7fc0 : exponent < 12 ? 0 : (exponent - 11) << 7;
}

// 64 values of each of ``rows`` channels, ``k`` apart.
void pack_group(const uint16_t* x, int64_t k, int64_t rows, uint8_t* out) {
  float up[PANEL] = {};
  for (int64_t j = 0; j < rows; j++) {
    uint16_t scale = ((uint16_t*)out)[j] = fixed_scale(x + j * k);
    up[j] = scale == 0 || scale == 0x7fc0 ? 0 : 1 / from_bf16(scale);
  }
  out += FIXED_HEAD;
  for (int64_t at = 0; at < FIXED_GROUP; at += 2 * LANES)
    for (int64_t j = 0; j < rows; j += LANES) {
      vf r[LANES] = {};
      for (int64_t l = 0; l < std::min<int64_t>(LANES, rows - j); l++) {
        vi pairs = load_int(x + (j + l) * k + at);
        vi even = round_to_int(evens(pairs) * up[j + l]), odd = round_to_int(odds(pairs) * up[j + l]);
        r[l] = as_float((even & 0xffff) | (odd << 16));
      }
      transpose(r);
      for (int64_t i = 0; i < LANES; i++) store((float*)(out + (at / 2 + i) * ROW_BYTES) + j, r[i]);
    }
}

}  // namespace

extern "C" {

Team* sgla_team(int threads) {
  Team* t = new Team;
  t->threads = threads;
  for (int i = 0; i < threads; i++) t->scratch.push_back(allocate(SCRATCH));
  for (int i = 1; i < threads; i++) {
    pthread_t helper;
    if (pthread_create(&helper, nullptr, help, new Start{t, i})) std::abort();
    t->helpers.push_back(helper);
  }
  return t;
}

void sgla_team_free(Team* t) {
  t->stop = true;
  release(*t);
  for (pthread_t helper : t->helpers) pthread_join(helper, nullptr);
  for (uint8_t* p : t->scratch) std::free(p);
  delete[] t->counters;
  delete t;
}

void sgla_run(Team* t, const Instr* program, int64_t length, const Step* step, char* arena) {
  int64_t needed = length * t->counters_per_instr();
  if (needed > t->counter_capacity) {
    delete[] t->counters;
    t->counters = new std::atomic<int64_t>[needed];
    t->counter_capacity = needed;
  }
  std::memset((void*)t->counters, 0, needed * sizeof(int64_t));
  t->program = program;
  t->length = length;
  t->step = step;
  t->arena = arena;
  const Instr* attention = nullptr;
  size_t partials = 0;
  for (int64_t n = 0; n < length; n++) {
    if (program[n].op != ATTENTION) continue;
    if (!attention) plan_attention(*t, *(attention = &program[n]));
    partials = std::max<size_t>(partials,
                                partials_size(program[n], *step, t->blocks.size(), t->prefixes, t->threads));
  }
  if (partials > t->partials.size()) t->partials.resize(partials);
  release(*t);
  work(*t, 0);
}

// Transpose rows of dwords [n, k] into panels [n / 32][k][32]; each ``group`` dword rows of a panel begin
// with ``head`` bytes left for the caller.
void sgla_pack(const uint32_t* x, int64_t n, int64_t k, int64_t group, int64_t head, uint8_t* out) {
  int64_t stride = (k + group - 1) / group * head + k * 128;
  for (int64_t p = 0; p * 32 < n; p++, out += stride) {
    int64_t rows = std::min<int64_t>(32, n - p * 32);
    for (int64_t g = 0; g < k; g += 16) {
      for (int64_t j = 0; j < rows; j++) {
        const uint32_t* row = x + (p * 32 + j) * k;
        for (int64_t i = g; i < std::min(g + 16, k); i++)
          std::memcpy(out + (i / group + 1) * head + i * 128 + j * 4, row + i, 4);
      }
    }
  }
}

// Rows of bfloat16 [n, k], k a multiple of 64, into FIXED panels.
void sgla_pack_fixed(const uint16_t* x, int64_t n, int64_t k, uint8_t* out) {
  for (int64_t p = 0; p * PANEL < n; p++)
    for (int64_t g = 0; g < k; g += FIXED_GROUP, out += FIXED_HEAD + FIXED_GROUP / 2 * ROW_BYTES)
      pack_group(x + p * PANEL * k + g, k, std::min<int64_t>(PANEL, n - p * PANEL), out);
}

const char* sgla_isa() {
#if defined(__AMX_BF16__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512VNNI__)
  return "avx512_vnni";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return "i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "dotprod";
#else
  return "generic";
#endif
}
}
