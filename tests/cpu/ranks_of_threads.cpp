// The exchanges of csrc/cuda/all_reduce.cu with threads of this machine in the place of a GPU's: each rank
// has BLOCKS blocks of THREADS threads, and goes from call to call without waiting for the others.
// `kernels.inc` has the kernels. Prints what is wrong: results, and words of inboxes that are not empty at the
// end.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sched.h>
#include <thread>
#include <vector>

typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx, gridDim;
thread_local std::barrier<>* block;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static void __syncthreads() { block->arrive_and_wait(); }
static void __trap() { abort(); }
static void pdl_wait() {}
static void pdl_launch() {}
static float __shfl_xor_sync(u32, float v, int) { return v; }  // of norms, which are not looked at here
static u32 __ldcg(const u32* p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static u32 atomicAdd(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
static float of_bits(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static float lo2f(u32 pair) { return of_bits(pair << 16); }
static float hi2f(u32 pair) { return of_bits(pair & 0xffff0000u); }
static u32 rounded(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pack2(float lo, float hi) { return rounded(lo) | rounded(hi) << 16; }

// Words cross one by one, so that a reader may see half of a vector.
static void store(u32* to, uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) {
    __atomic_store_n(to + i, words[i], __ATOMIC_SEQ_CST);
    if (i == 1) sched_yield();
  }
}
static uint4 load(const u32* from) {
  u32 words[4];
  for (int i = 0; i < 4; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_SEQ_CST);
  sched_yield();
  return {words[0], words[1], words[2], words[3]};
}

#include "kernels.inc"

constexpr int BLOCKS = 2, WIDTH = 33, CALLS = 12;
constexpr long long HALF = 4096;

enum Kind { SUM, SCATTER, GATHER, KINDS };
struct Call {
  Kind kind;
  int first[9] = {};
  std::vector<uint4> x[RANKS], out[RANKS];
  int rows(int rank) const { return kind == SUM ? first[RANKS] : first[rank + 1] - first[rank]; }
};

// What the kernel before has done: this thread's part of the rank's rows goes to all.
static void send_all(const Params& p) {
  const long long half = (calls(p.state) & 1) * p.half, count = (long long)p.rows * p.width;
  for (long long i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
    for (int r = 0; r < RANKS; ++r) send(p.inbox[r] + half + p.rank * count + i, tidy(p.x[i]));
  __syncthreads();  // all threads have read the state
}

int main() {
  std::mt19937 random(1);
  auto word = [&] {  // small numbers, and what an empty place looks like
    auto one = [&] { return float(int(random() % 17) - 8); };
    return random() % 5 ? pack2(one(), one()) : EMPTY;
  };
  std::vector<Call> calls(CALLS);
  for (Call& call : calls) {
    call.kind = Kind(random() % KINDS);
    for (int r = 0; r < RANKS; ++r) call.first[r + 1] = call.first[r] + 1 + random() % 5;
    for (int r = 0; r < RANKS; ++r) {
      const int rows = call.kind == GATHER ? call.rows(r) : call.first[RANKS];
      call.x[r].resize(rows * WIDTH);
      for (uint4& v : call.x[r]) v = {word(), word(), word(), word()};
      call.out[r].resize((call.kind == GATHER ? call.first[RANKS] : call.rows(r)) * WIDTH);
    }
  }
  std::vector<uint4> inboxes[RANKS];
  u32 state[RANKS][2] = {};
  for (auto& inbox : inboxes) inbox.assign(2 * HALF, nothing());
  std::vector<std::thread> threads;
  for (int r = 0; r < RANKS; ++r) {
    auto* rank = new std::barrier<>(BLOCKS * THREADS);
    for (int b = 0; b < BLOCKS; ++b) {
      auto* own = new std::barrier<>(THREADS);
      for (int t = 0; t < THREADS; ++t)
        threads.emplace_back([&, r, b, t, rank, own] {
          threadIdx = {unsigned(t)}, blockIdx = {unsigned(b)}, gridDim = {BLOCKS}, block = own;
          for (Call& call : calls) {
            Params p{};
            p.x = call.x[r].data(), p.out = call.out[r].data(), p.state = state[r], p.half = HALF;
            p.rank = r, p.rows = call.first[RANKS], p.width = WIDTH;
            for (int to = 0; to < RANKS; ++to) p.inbox[to] = inboxes[to].data();
            memcpy(p.first, call.first, sizeof p.first);
            if (call.kind == SUM && SENT == 2) send_all(p);
            if (call.kind == SUM) all_reduce(p);
            if (call.kind == SCATTER) reduce_scatter(p);
            if (call.kind == GATHER) all_gather(p);
            rank->arrive_and_wait();
          }
        });
    }
  }
  for (auto& thread : threads) thread.join();
  int wrong = 0, left = 0;
  for (const Call& call : calls)
    for (int r = 0; r < RANKS; ++r)
      for (int i = 0; i < int(call.out[r].size()); ++i) {
        float expected[8] = {}, found[8] = {};
        for (int from = 0; from < RANKS; ++from) {
          const int at = i - call.first[from] * WIDTH,
                    begin = call.kind == SCATTER ? call.first[r] * WIDTH : 0;
          if (call.kind != GATHER) add(expected, call.x[from][begin + i]);
          else if (at >= 0 && at < call.rows(from) * WIDTH) add(expected, call.x[from][at]);
        }
        add(found, call.out[r][i]);
        for (int j = 0; j < 8; ++j) wrong += expected[j] != found[j];
      }
  for (auto& inbox : inboxes)
    for (const uint4& v : inbox) left += memcmp(&v, &inbox[2 * HALF - 1], 16) != 0;
  for (auto& counts : state) left += counts[0] != CALLS || counts[1] != 0;
  printf("%d %d\n", wrong, left);
}
