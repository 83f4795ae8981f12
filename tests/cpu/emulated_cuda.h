// What a CUDA kernel of ours asks of the hardware, on a CPU: each thread is a context of its own, which gives way
// wherever it waits. A block has MEMORY bytes of shared memory, whose addresses carry the block's number; copies
// by cp.async happen when they are waited for and not before, those of the copy engine at once. Functions that
// have PTX in the sources are here instead (see emulated_cuda.py).
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes)
#define __grid_constant__
using std::max;
using std::min;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { unsigned x; };
Index threadIdx, blockIdx, gridDim;
// Goes on where `to` stopped, and keeps where this one does: what a function must keep is on the stack.
extern "C" void switch_stack(void** from, void* to);
asm(R"(
switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
namespace emulated {
typedef unsigned u32;
constexpr u32 MEMORY = 320 << 10, STACK = 64 << 10;

struct Copy { u32 to; const void* from; u32 bytes, size; };
struct Thread {
  void* stack;
  int block, number, cluster_arrivals = 0;
  bool done = false;
  std::vector<Copy> copies;             // since the last commit
  std::deque<std::vector<Copy>> groups;  // committed
};
struct Warp {
  u32 given[32][10], made[32][4];
  int count = 0, turns = 0;
};
struct Block {
  std::vector<unsigned char> memory = std::vector<unsigned char>(MEMORY, 0xff);
  Warp warps[32];
  int count[16] = {}, turns[16] = {};  // at the barriers of the hardware; 0 is that of __syncthreads
};
struct Barrier { int32_t wanted : 12, missing : 12; uint32_t phase : 8; int32_t bytes; };  // the word in shared memory

std::vector<Thread> threads;
std::vector<Block> blocks;
Thread* me;
void* scheduler;
int threads_of_block, blocks_of_cluster, cluster_count, cluster_turns;

inline void fail(const char* why) { std::puts(why), std::abort(); }
inline void give_way() { switch_stack(&me->stack, scheduler); }
inline Block& block() { return blocks[me->block]; }
inline Warp& warp() { return block().warps[me->number / 32]; }
inline unsigned char* memory(u32 address, u32 size) {
  if (address % size || (address & 0xfffff) + size > MEMORY || address >> 20 >= blocks.size()) fail("an address");
  return blocks[address >> 20].memory.data() + (address & 0xfffff);
}
template <class T> T read(u32 address) {
  T value;
  std::memcpy(&value, memory(address, sizeof(T)), sizeof(T));
  return value;
}
template <class T> void write(u32 address, T value) { std::memcpy(memory(address, sizeof(T)), &value, sizeof(T)); }
template <class To, class From> To bits(From value) {
  To found;
  std::memcpy(&found, &value, sizeof(To));
  return found;
}
// All lanes of a warp meet: what each gives, and what `work` makes for each.
template <int GIVEN, int MADE>
void meet(const u32 (&given)[GIVEN], u32 (&made)[MADE], void (*work)(Warp&, int), int what) {
  const int lane = me->number % 32, turn = warp().turns;
  std::copy(given, given + GIVEN, warp().given[lane]);
  if (++warp().count == 32) {
    work(warp(), what);
    warp().count = 0, ++warp().turns;
  }
  while (warp().turns == turn) give_way();
  std::copy(warp().made[lane], warp().made[lane] + MADE, made);
}
inline u32 rounded(float x) {
  const u32 b = bits<u32>(x);
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline float lower(u32 x) { return bits<float>(x << 16); }
inline float upper(u32 x) { return bits<float>(x & 0xffff0000u); }
inline u32 there(u32 address, int rank) {
  return (me->block / blocks_of_cluster * blocks_of_cluster + rank) << 20 | (address & 0xfffff);
}
inline void counted(u32 address, int arrivals, int bytes) {
  Barrier bar = read<Barrier>(address);
  bar.missing -= arrivals, bar.bytes += bytes;
  if (bar.missing < 0) fail("a barrier with too many arrivals");
  if (bar.missing == 0 && bar.bytes == 0) ++bar.phase, bar.missing = bar.wanted;
  write(address, bar);
}

// Until so many threads of the block are here.
inline void meet_block(int count, int barrier) {
  const int turn = block().turns[barrier];
  if (++block().count[barrier] == count) block().count[barrier] = 0, ++block().turns[barrier];
  while (block().turns[barrier] == turn) give_way();
}

// Run a kernel of so many `ranks`, cluster by cluster: `entry` is what each thread does. A warp goes on while its
// lanes meet.
inline void launch(int grid, int ranks, int threads_each, int cluster, void (*entry)()) {
  gridDim.x = grid, threads_of_block = threads_each, blocks_of_cluster = cluster, grid *= ranks;
  blocks = std::vector<Block>(grid);
  const size_t count = size_t(cluster) * threads_each;
  char* stacks = static_cast<char*>(mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (int first = 0; first < grid; first += cluster) {
    threads = std::vector<Thread>(count);
    cluster_count = cluster_turns = 0;
    for (size_t i = 0; i < count; ++i) {
      Thread& t = threads[i];
      t.block = first + i / threads_each, t.number = i % threads_each;
      void** top = reinterpret_cast<void**>(stacks + (i + 1) * STACK);
      *(top -= 2) = reinterpret_cast<void*>(entry);
      t.stack = top - 6;
    }
    size_t left = count;
    for (long turns = 0; left; ++turns) {
      if (turns > 10000000) fail("threads wait for ever");
      for (size_t begin = 0; begin < count; begin += 32) {
        Warp& w = blocks[threads[begin].block].warps[threads[begin].number / 32];
        int met;
        do {
          met = w.turns;
          for (size_t i = begin; i < begin + 32; ++i) {
            Thread& t = threads[i];
            if (t.done) continue;
            me = &t, threadIdx.x = t.number, blockIdx.x = t.block % gridDim.x;
            switch_stack(&scheduler, t.stack);
            left -= t.done;
          }
        } while (w.turns != met);
      }
    }
  }
  munmap(stacks, count * STACK);
}
}  // namespace emulated

inline float __uint_as_float(unsigned x) { return emulated::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulated::bits<int>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
template <class T> T atomicMax(T* to, T v) { return std::exchange(*to, std::max(*to, v)); }
template <class T> T atomicAdd(T* to, std::common_type_t<T> v) { return std::exchange(*to, *to + v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const uint64_t from = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(from >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
template <class T> T __ldg(const T* from) { return *from; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float rsqrt_fast(float x) { return rsqrtf(x); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline unsigned pack2(float lo, float hi) { return emulated::rounded(lo) | emulated::rounded(hi) << 16; }
inline float half2f(unsigned x) { return emulated::bits<_Float16>(uint16_t(x)); }
inline unsigned sub2(unsigned a, unsigned b) {
  return pack2(emulated::lower(a) - emulated::lower(b), emulated::upper(a) - emulated::upper(b));
}

// e4m3, of ``skinny_gemm.cu``.
inline unsigned half_of(float x) { return emulated::bits<uint16_t>(_Float16(x)); }
inline unsigned half_of_e4m3(unsigned byte) {
  const int exponent = byte >> 3 & 15, rest = byte & 7;
  const float size = exponent ? std::ldexp(8.f + rest, exponent - 10) : std::ldexp(float(rest), -9);
  return half_of(byte & 128 ? -size : size);
}
inline void floats(unsigned x, float& lo, float& hi) { lo = half2f(x & 65535), hi = half2f(x >> 16); }
inline void halves(unsigned w, unsigned& lo, unsigned& hi) {
  lo = half_of_e4m3(w & 255) | half_of_e4m3(w >> 8 & 255) << 16;
  hi = half_of_e4m3(w >> 16 & 255) | half_of_e4m3(w >> 24) << 16;
}
inline unsigned halved(unsigned x, float by) {
  return half_of(emulated::lower(x) * by) | half_of(emulated::upper(x) * by) << 16;
}
inline unsigned widen(unsigned bits, unsigned shifted) {
  const unsigned r = (bits & 0x80008000u) | (shifted & 0x07f007f0u);
  return pack2(std::ldexp(emulated::lower(r), 120), std::ldexp(emulated::upper(r), 120));
}
inline unsigned most2(unsigned most, unsigned x) {
  return std::max(most & 0xffff, x & 0x7fff) | std::max(most >> 16, x >> 16 & 0x7fff) << 16;
}

// Shared memory.
inline unsigned __cvta_generic_to_shared(const void* p) {
  const auto at = static_cast<const unsigned char*>(p) - emulated::block().memory.data();
  return unsigned(emulated::me->block) << 20 | unsigned(at);
}
inline uint4 lds128(unsigned address) { return emulated::read<uint4>(address); }
inline void sts128(unsigned address, const uint4& v) { emulated::write(address, v); }
inline unsigned lds32(unsigned address) { return emulated::read<unsigned>(address); }
inline unsigned look_up(unsigned address) { return lds32(address); }
inline void sts32(unsigned address, float v) { emulated::write(address, v); }
inline float lds_float(unsigned address) { return emulated::read<float>(address); }
inline float2 lds64(unsigned address) { return emulated::read<float2>(address); }
inline uint2 lds_two(unsigned address) { return emulated::read<uint2>(address); }
inline float lds_of(unsigned address, int rank) { return emulated::read<float>(emulated::there(address, rank)); }

// Copies.
inline void copy(unsigned to, const void* from, unsigned bytes, unsigned size) {
  if (bytes && reinterpret_cast<uintptr_t>(from) % size) emulated::fail("a source of a copy");
  emulated::me->copies.push_back({to, from, bytes, size});
}
inline void cp_async16(unsigned to, const void* from, unsigned bytes) { copy(to, from, bytes, 16); }
inline void cp_async_once(unsigned to, const void* from, unsigned bytes, uint64_t) { copy(to, from, bytes, 16); }
inline void cp_async_commit() {
  emulated::me->groups.push_back(std::move(emulated::me->copies));
  emulated::me->copies.clear();
}
template <int N> inline void cp_async_wait() {
  auto& groups = emulated::me->groups;
  for (; int(groups.size()) > N; groups.pop_front())
    for (const auto& c : groups.front()) {
      std::memset(emulated::memory(c.to, c.size), 0, c.size);
      std::memcpy(emulated::memory(c.to, c.size), c.from, c.bytes);
    }
}

// Warps.
inline void __syncwarp() {
  const unsigned none[1] = {};
  unsigned nothing[1];
  emulated::meet(none, nothing, [](emulated::Warp&, int) {}, 0);
}
// Each lane gets what lane `from` gives.
template <class T> T from_lane(T v, int from) {
  const unsigned given[2] = {emulated::bits<unsigned>(v), unsigned(from)};
  unsigned made[1];
  emulated::meet(given, made, [](emulated::Warp& w, int) {
    for (int l = 0; l < 32; ++l) w.made[l][0] = w.given[w.given[l][1] % 32][0];
  }, 0);
  return emulated::bits<T>(made[0]);
}
template <class T> T __shfl_sync(unsigned, T v, int from) { return from_lane(v, from); }
template <class T> T __shfl_xor_sync(unsigned, T v, int distance) {
  return from_lane(v, emulated::me->number % 32 ^ distance);
}
template <class T> T __shfl_down_sync(unsigned, T v, int distance) {
  const int lane = emulated::me->number % 32;
  return from_lane(v, lane + distance < 32 ? lane + distance : lane);
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  const unsigned given[1] = {v};
  unsigned made[1];
  emulated::meet(given, made, [](emulated::Warp& w, int) {
    unsigned most = 0;
    for (int l = 0; l < 32; ++l) most = max(most, w.given[l][0]);
    for (int l = 0; l < 32; ++l) w.made[l][0] = most;
  }, 0);
  return made[0];
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const unsigned given[1] = {v};
  unsigned made[1];
  emulated::meet(given, made, [](emulated::Warp& w, int) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) all |= w.given[l][0] << l;
    for (int l = 0; l < 32; ++l) w.made[l][0] = all;
  }, 0);
  return made[0];
}
inline float __int_as_float(int x) { return emulated::bits<float>(unsigned(x)); }
inline unsigned movmatrix(unsigned x) {
  const unsigned given[1] = {x};
  unsigned made[1];
  emulated::meet(given, made, [](emulated::Warp& w, int) {
    for (int l = 0; l < 32; ++l) {
      w.made[l][0] = 0;
      for (int e = 0; e < 2; ++e) {
        const int row = l / 4, column = l % 4 * 2 + e;
        w.made[l][0] |= (w.given[column * 4 + row / 2][0] >> row % 2 * 16 & 0xffff) << 16 * e;
      }
    }
  }, 0);
  return made[0];
}
inline void ldmatrix(unsigned (&r)[4], unsigned address) {
  const unsigned given[1] = {address};
  emulated::meet(given, r, [](emulated::Warp& w, int) {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        emulated::memory(w.given[i * 8 + l / 4][0], 16);
        w.made[l][i] = emulated::read<unsigned>(w.given[i * 8 + l / 4][0] + l % 4 * 4);
      }
  }, 0);
}
// Halves: of float16, or of bfloat16.
template <bool Halves>
void mma_of(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  unsigned given[10] = {a0, a1, a2, a3, b0, b1}, made[4];
  std::memcpy(given + 6, d, 16);
  emulated::meet(given, made, [](emulated::Warp& w, int) {
    float a[16][16], b[16][8];
    auto number = [](unsigned x, int place) {
      if (Halves) return float(emulated::bits<_Float16>(uint16_t(x >> place * 16)));
      return place ? emulated::upper(x) : emulated::lower(x);
    };
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a[g + i % 2 * 8][t + i / 2 * 8 + e] = number(w.given[l][i], e);
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e)
          b[t + i * 8 + e][g] = number(w.given[l][4 + i], e);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = emulated::bits<float>(w.given[l][6 + i]);
        for (int k = 0; k < 16; ++k) sum += double(a[l / 4 + i / 2 * 8][k]) * b[k][l % 4 * 2 + i % 2];
        w.made[l][i] = emulated::bits<unsigned>(float(sum));
      }
  }, 0);
  std::memcpy(d, made, 16);
}
inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  mma_of<false>(d, a0, a1, a2, a3, b0, b1);
}
inline void mma_first(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  mma(d, a0, a1, a2, a3, b0, b1);
}

// Blocks, clusters, kernels.
inline void __syncthreads() { emulated::meet_block(emulated::threads_of_block, 0); }
template <int COUNT> void meet_at(int barrier) { emulated::meet_block(COUNT, barrier); }
inline void cluster_arrive() {
  emulated::me->cluster_arrivals = emulated::cluster_turns;
  if (++emulated::cluster_count == int(emulated::threads.size())) emulated::cluster_count = 0, ++emulated::cluster_turns;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  while (emulated::cluster_turns == emulated::me->cluster_arrivals) emulated::give_way();
}
inline void pdl_wait() {}
inline void pdl_launch() {}
inline void barrier_init(unsigned bar, int count) {
  emulated::Barrier made{};
  made.wanted = made.missing = count;
  emulated::write(bar, made);
}
inline void barriers_visible() {}
inline void barrier_arrive(unsigned bar) { emulated::counted(bar, 1, 0); }
inline void barrier_expect(unsigned bar, int bytes) { emulated::counted(bar, 1, bytes); }
inline void barrier_wait(unsigned bar, unsigned parity) {
  while (emulated::read<emulated::Barrier>(bar).phase % 2 == parity) emulated::give_way();
}
inline void tell(unsigned address, unsigned bar, int rank, float v) {
  emulated::write(emulated::there(address, rank), v);
  emulated::counted(emulated::there(bar, rank), 0, -4);
}

// What kernels of a whole step have besides: words in global memory, and the copy engine.
inline void fence_copies() {}
inline void __nanosleep(int) { emulated::give_way(); }
inline void __trap() { emulated::fail("a trap"); }
inline uint64_t policy_once() { return 0; }
inline void sts64(unsigned address, unsigned a, unsigned b) { emulated::write(address, uint2{a, b}); }
inline uint4 ldg128(const unsigned short* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("a load");
  uint4 v;
  std::memcpy(&v, from, 16);
  return v;
}
inline void piece_init(unsigned bar) { barrier_init(bar, 1); }
inline bool piece_there(unsigned bar, unsigned parity) {
  return emulated::read<emulated::Barrier>(bar).phase % 2 != parity;
}
inline void piece_wait(unsigned bar, unsigned parity) { barrier_wait(bar, parity); }
inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned bar, uint64_t policy = 0) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulated::fail("a source of a copy");
  for (int i = 0; i < bytes; i += 16) std::memcpy(emulated::memory(to + i, 16), static_cast<const char*>(from) + i, 16);
  emulated::counted(bar, 0, -bytes);
}
template <class T> T look_at(const unsigned* from) {
  emulated::give_way();
  T v;
  std::memcpy(&v, from, sizeof(T));
  return v;
}
inline int thread_number() { return threadIdx.x; }
inline int block_number() { return blockIdx.x; }
inline void prefetch_to_l2(const void*) {}
inline void fetch_bytes(const void*, int) {}
inline int lds_volatile(unsigned address) {
  emulated::give_way();
  return emulated::read<int>(address);
}
inline void sts_volatile(unsigned address, int x) { emulated::write(address, x); }
inline void put(unsigned* to, unsigned word) { *to = word; }
inline void put_far(unsigned* to, unsigned word) { *to = word; }
inline void put4(unsigned* to, unsigned a, unsigned b, unsigned c, unsigned d) {
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
}
inline uint4 look(const unsigned* from) { return look_at<uint4>(from); }
inline uint4 look(const uint4* from) { return look_at<uint4>(reinterpret_cast<const unsigned*>(from)); }
inline void send(uint4* to, uint4 v) { *to = v; }
inline uint2 look2(const unsigned* from) { return look_at<uint2>(from); }
inline uint4 look_far(const unsigned* from) { return look_at<uint4>(from); }

// The copy engine: a tensor with its strides in bytes, and the box of a copy, whose rows of 64 or 128 bytes are
// swizzled. What lies outside is zero.
struct Tensor {
  const unsigned char* data;
  long long rank, size, dims[5], strides[5], box[5];
};
inline unsigned swizzled(unsigned address, long long row) {
  return row == 128 ? address ^ (address >> 7 & 7) << 4 : row == 64 ? address ^ (address >> 7 & 3) << 4 : address;
}
template <class Map, class... Places> void copy_box(unsigned to, const Map& map, unsigned bar, Places... places) {
  const Tensor& t = **reinterpret_cast<const Tensor* const*>(&map);
  const long long at[] = {places...}, row = t.box[0] * t.size;
  if (to % 128) emulated::fail("where a copy goes");
  long long count = 1;
  for (int d = 0; d < t.rank; ++d) count *= t.box[d];
  for (long long i = 0; i < count; ++i) {
    long long rest = i, from = 0;
    bool inside = true;
    for (int d = 0; d < t.rank; ++d) {
      const long long place = at[d] + rest % t.box[d];
      rest /= t.box[d], inside &= place >= 0 && place < t.dims[d], from += place * t.strides[d];
    }
    for (int b = 0; b < t.size; ++b)
      *emulated::memory(swizzled(to + unsigned(i * t.size + b), row), 1) = inside ? t.data[from + b] : 0;
  }
  emulated::counted(bar, 0, -int(count * t.size));
}
template <class Map> void copy_2d(unsigned to, const Map& map, unsigned bar, int x, int y) {
  copy_box(to, map, bar, (long long)x, (long long)y);
}
template <class Map> void copy_q(unsigned to, const Map& map, unsigned bar, int x, int y, int z) {
  copy_box(to, map, bar, (long long)x, (long long)y, (long long)z);
}
template <class... Each> void copy_panels(const Each&...) {}
inline void fence_shared() {}

// Products of groups of warps, done where they are issued. A warp has 16 rows of a in registers; b lies in
// swizzled rows of 128 bytes, its columns by rows, or (`across`) its k.
#if FP8
inline float factor(unsigned x) { return half2f(x); }
#else
inline float factor(unsigned x) { return emulated::lower(x); }
#endif
inline unsigned pack_half(float lo, float hi) {
  return emulated::bits<uint16_t>(_Float16(lo)) | unsigned(emulated::bits<uint16_t>(_Float16(hi))) << 16;
}
inline float of_e4m3(unsigned b) {
  const int exponent = b >> 3 & 15, rest = b & 7;
  const float x = exponent ? std::ldexp(1.f + rest / 8.f, exponent - 7) : std::ldexp(rest / 8.f, -6);
  return (exponent == 15 && rest == 7 ? NAN : x) * (b & 128 ? -1.f : 1.f);
}
inline uint2 halves_of(unsigned x) {
  return {pack_half(of_e4m3(x & 255), of_e4m3(x >> 8 & 255)), pack_half(of_e4m3(x >> 16 & 255), of_e4m3(x >> 24))};
}
template <int SIZE> void held(float (&d)[SIZE], const unsigned (&a)[4], uint64_t b, bool first, bool across) {
  const int lane = emulated::me->number % 32;
  float rows[2][16];
  for (int i = 0; i < 4; ++i)
    for (int t = 0; t < 4; ++t) {
      const unsigned x = from_lane(a[i], lane / 4 * 4 + t);
      for (int e = 0; e < 2; ++e) rows[i % 2][i / 2 * 8 + t * 2 + e] = factor(x >> 16 * e & 0xffff);
    }
  const unsigned base = unsigned(b & 0x3fff) << 4 | unsigned(emulated::me->block) << 20;
  const unsigned far = unsigned(b >> 16 & 0x3fff) << 4;
  for (int i = 0; i < SIZE; ++i) {
    const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = first ? 0. : d[i];
    for (int k = 0; k < 16; ++k) {
      const unsigned at = across ? base + n / 64 * far + k * 128 + n % 64 * 2 : base + n * 128 + k * 2;
      sum += double(rows[i / 2 % 2][k]) * factor(emulated::read<uint16_t>(swizzled(at, 128)));
    }
    d[i] = float(sum);
  }
}
// Both in shared memory: a has 64 rows for the group's four warps.
template <int SIZE> void wgmma(float (&d)[SIZE], uint64_t a, uint64_t b) {
  const int lane = emulated::me->number % 32, warp = emulated::me->number % 128 / 32;
  const auto at = [](uint64_t x, int row, int k) {
    const unsigned base = unsigned(x & 0x3fff) << 4 | unsigned(emulated::me->block) << 20;
    return factor(emulated::read<uint16_t>(swizzled(base + row * 128 + k * 2, 128)));
  };
  for (int i = 0; i < SIZE; ++i) {
    const int n = i / 4 * 8 + lane % 4 * 2 + i % 2, row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) sum += double(at(a, row, k)) * at(b, n, k);
    d[i] = float(sum);
  }
}
template <int SIZE> void wgmma_first(float (&d)[SIZE], uint64_t a, uint64_t b) {
  std::fill(d, d + SIZE, 0.f);
  wgmma(d, a, b);
}
template <int SIZE> void wgmma_held(float (&d)[SIZE], const unsigned (&q)[4], uint64_t k) { held(d, q, k, false, false); }
template <int SIZE> void wgmma_left(float (&d)[SIZE], const unsigned (&a)[4], uint64_t b) { held(d, a, b, false, false); }
template <int SIZE> void wgmma_held_first(float (&d)[SIZE], const unsigned (&q)[4], uint64_t k) {
  held(d, q, k, true, false);
}
template <int SIZE> void wgmma_values(float (&d)[SIZE], const unsigned (&w)[4], uint64_t v) { held(d, w, v, false, true); }
// Both from shared memory, in rows of 128 bytes of e4m3, of which an instruction takes 32.
template <int SIZE> void of_bytes(float (&d)[SIZE], uint64_t a, uint64_t b, bool first) {
  const int lane = emulated::me->number % 32, row = emulated::me->number % 128 / 32 * 16 + lane / 4;
  auto number = [](uint64_t tile, int row, int k) {
    const unsigned base = unsigned(tile & 0x3fff) << 4 | unsigned(emulated::me->block) << 20;
    return of_e4m3(emulated::read<unsigned char>(swizzled(base + row * 128 + k, 128)));
  };
  float rows[2][32];
  for (int i = 0; i < 64; ++i) rows[i / 32][i % 32] = number(a, row + i / 32 * 8, i % 32);
  for (int i = 0; i < SIZE; ++i) {
    double sum = first ? 0. : d[i];
    for (int k = 0; k < 32; ++k)
      sum += double(rows[i / 2 % 2][k]) * number(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
    d[i] = float(sum);
  }
}
template <int SIZE> void wgmma_e4m3(float (&d)[SIZE], uint64_t a, uint64_t b) { of_bytes(d, a, b, false); }
template <int SIZE> void wgmma_e4m3_first(float (&d)[SIZE], uint64_t a, uint64_t b) { of_bytes(d, a, b, true); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING, int SIZE> void wgmma_wait(float (&)[SIZE]) {}
template <int COUNT> void fewer_registers() {}
template <int COUNT> void more_registers() {}
template <int COUNT> void arrive_at(int barrier) {
  auto& b = emulated::block();
  if (++b.count[barrier] == COUNT) b.count[barrier] = 0, ++b.turns[barrier];
}
inline bool __any_sync(unsigned, bool v) { return __reduce_max_sync(~0u, v); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline float2 make_float2(float x, float y) { return {x, y}; }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> void __stcg(T* to, T v) { *to = v; }
inline void ldmatrix_trans(unsigned (&r)[4], unsigned address) {
  ldmatrix(r, address);
  for (unsigned& x : r) x = movmatrix(x);
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class Map> void copy_2d(unsigned to, const Map& map, unsigned bar, int x, int y, uint64_t) {
  copy_2d(to, map, bar, x, y);
}
