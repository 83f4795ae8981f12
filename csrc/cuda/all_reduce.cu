// Sums, maxima and rows of the ranks of one host, through inboxes in each other's memory and without a
// barrier: a rank stores its part into the inboxes of its peers, and who reads a word knows that it has come
// because it is no longer EMPTY. The reader empties it again. There are two inboxes, used in turn: a peer can
// only write to the one of this call again when it has seen our part of the next call, hence after we have
// emptied it. So in each call every rank hears of every other.
//
// One shot: every rank sends its rows to all and adds up all rows. Two shots: each row has an owner, who
// alone gets the parts, adds them up and sends the sum to all; fewer bytes from three ranks on, but twice the
// latency. The order of the sum is that of the ranks, so all ranks hold the same bits. Where ranks have
// tokens of their own, each gets the sum of its rows alone (reduce_scatter), or the rows of all (all_gather).
//
// Defined by the launcher: RANKS, THREADS, VECS (16-byte vectors of a row that a thread holds), TWO_SHOT,
// NORM (1: add the sum into the residual and give its RMSNorm; 2: give that of the sum; 3: as 1, but its
// LayerNorm), SENT (one shot: the kernel before has sent this rank's rows, to the inboxes of this call, when
// it made them; 2: to its own, too, so that nobody waits for that kernel's end, when all that it has sent has
// been acknowledged).
#include "common.cuh"
#include "inbox.cuh"

#ifndef SENT
#define SENT 0
#endif
#define ADDED (NORM == 1 || NORM == 3)
#define LAYER (NORM == 3)

struct Params {
  const uint4* x;       // [rows, width]
  uint4* out;           // [rows, width]; may be x
  uint4* residual;      // [rows, width]
  const float* weight;  // [width * 8]
  const float* bias;    // the same
  uint4* inbox[8];      // of every rank
  u32* state;           // calls so far, blocks done in this one
  long long half;       // vectors of one of the two inboxes
  int rank, rows, width;  // width: vectors of a row
  float eps;
  int first[9];  // row where those of each rank begin, and how many there are
};

// A vector of this rank's part.
__device__ __forceinline__ uint4 part(const Params& p, int row, int i) {
  return p.x[(long long)row * p.width + i];
}

// Sum of what every rank has sent to `place` (+ r * stride for rank r), with `own` for the one that has not,
// if there is one; empties the places.
__device__ __forceinline__ void collect(float* sum, uint4 own, uint4* place, long long stride, int rank) {
  uint4 got[RANKS];
  Patience patience;
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      got[r] = r == rank ? own : look(place + r * stride);
      missing |= r != rank && empty(got[r]);
    }
    patience.check();
  } while (missing);
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] = 0.f;
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    if (r != rank) place[r * stride] = nothing();
    add(sum, got[r]);
  }
}

// What a peer has sent to `place`, which is empty then.
__device__ __forceinline__ uint4 take(uint4* place) {
  Patience patience;
  uint4 got = look(place);
  while (empty(got)) {
    patience.check();
    got = look(place);
  }
  *place = nothing();
  return got;
}

__device__ __forceinline__ float block_sum(float v) {
  __shared__ float parts[32];
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();  // the parts of the row before have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < THREADS / 32 ? parts[threadIdx.x % 32] : 0.f;
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// What `finish` needs beside the sum, loaded before the wait for it.
struct Ahead {
#if NORM
  float4 weight[VECS][2];
#endif
#if ADDED
  uint4 residual[VECS];
#endif
  __device__ __forceinline__ void load_weight(const Params& p) {
#if NORM
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < p.width) {
        weight[k][0] = ((const float4*)p.weight)[2 * i];
        weight[k][1] = ((const float4*)p.weight)[2 * i + 1];
      }
    }
#endif
  }
  __device__ __forceinline__ void load_residual(const Params& p, int row) {
#if ADDED
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < p.width) residual[k] = p.residual[(long long)row * p.width + i];
    }
#endif
  }
};

// What becomes of the sum of a row.
__device__ __forceinline__ void finish(const Params& p, int row, float (&v)[VECS][8], const Ahead& ahead) {
  const long long base = (long long)row * p.width;
#if NORM
  float square = 0.f, total = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; k++) {
    const int i = threadIdx.x + k * THREADS;
    if (i < p.width) {
#if ADDED
      add(v[k], ahead.residual[k]);
#endif
      const uint4 h = round8(v[k]);
#if ADDED
      p.residual[base + i] = h;
#endif
#pragma unroll
      for (int j = 0; j < 8; j++) v[k][j] = 0.f;
      add(v[k], h);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        square += v[k][j] * v[k][j];
        total += v[k][j];
      }
    }
  }
#if LAYER
  const float mean = block_sum(total) / (8 * p.width);
  square = 0.f;
#pragma unroll
  for (int k = 0; k < VECS; k++) {
    if (threadIdx.x + k * THREADS < p.width) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        v[k][j] -= mean;
        square += v[k][j] * v[k][j];
      }
    }
  }
#endif
  const float scale = rsqrtf(block_sum(square) / (8 * p.width) + p.eps);
#endif
#pragma unroll
  for (int k = 0; k < VECS; k++) {
    const int i = threadIdx.x + k * THREADS;
    if (i < p.width) {
#if NORM
      const float4 lo = ahead.weight[k][0], hi = ahead.weight[k][1];
      const float w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int j = 0; j < 8; j++) v[k][j] *= scale * w[j];
#endif
#if LAYER
      const float* bias = p.bias + 8 * i;
#pragma unroll
      for (int j = 0; j < 8; j++) v[k][j] += bias[j];
#endif
      p.out[base + i] = round8(v[k]);
    }
  }
}

__device__ __forceinline__ u32 calls(const u32* state) {
  return __ldcg(state);  // which another multiprocessor may have written at the end of the call before
}
// Counts a block whose threads have read the state. Returns how many were before it, to the first thread,
// which waits for that in `end_call`.
__device__ __forceinline__ u32 count_block(u32* state) {
  __syncthreads();
  return threadIdx.x == 0 && gridDim.x > 1 ? atomicAdd(state + 1, 1) : 0;
}
__device__ __forceinline__ void end_call(u32* state, u32 call, u32 before) {
  if (threadIdx.x == 0 && before == gridDim.x - 1) {
    state[1] = 0;
    state[0] = call + 1;
  }
}

// Send this rank's part of a row to every peer.
__device__ __forceinline__ void share(const Params& p, int row, long long half) {
#pragma unroll
  for (int k = 0; k < VECS; k++) {
    const int i = threadIdx.x + k * THREADS;
    if (i < p.width) {
      const uint4 v = tidy(part(p, row, i));
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r != p.rank) send(p.inbox[r] + half + ((long long)p.rank * p.rows + row) * p.width + i, v);
    }
  }
}

__device__ __forceinline__ uint4* inbox(const Params& p, int rank) {
  uint4* found = p.inbox[0];
#pragma unroll
  // No indexed read of the parameters.
  for (int r = 1; r < RANKS; r++) found = r == rank ? p.inbox[r] : found;
  return found;
}

// Returns what `count_block` does. Whoever has sent to all has read the state when the rows are here. Blocks
// that send theirs count at the end: earlier is slower.
__device__ __forceinline__ u32 one_shot(const Params& p, long long half, Ahead& ahead) {
  u32 before = 0;
  if (!SENT && blockIdx.x < p.rows) share(p, blockIdx.x, half);
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (!SENT && row + gridDim.x < p.rows) share(p, row + gridDim.x, half);
    ahead.load_residual(p, row);
    float v[VECS][8];
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      const long long at = (long long)row * p.width + i;
      if (i < p.width)
        collect(v[k], SENT == 2 ? nothing() : p.x[at], inbox(p, p.rank) + half + at,
                (long long)p.rows * p.width, SENT == 2 ? RANKS : p.rank);
    }
    if (SENT == 2 && row + gridDim.x >= p.rows) before = count_block(p.state);
    finish(p, row, v, ahead);
  }
  return SENT == 2 ? before : count_block(p.state);
}

__device__ __forceinline__ u32 two_shot(const Params& p, long long half, Ahead& ahead) {
  const long long each = (p.rows + RANKS - 1) / RANKS * p.width, sums = half + RANKS * each;
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int owner = row % RANKS;
    if (owner == p.rank) continue;
    uint4* to = inbox(p, owner) + half + p.rank * each + row / RANKS * p.width;
    for (int i = threadIdx.x; i < p.width; i += THREADS) send(to + i, tidy(part(p, row, i)));
  }
  uint4* own = inbox(p, p.rank);
  float v[VECS][8];
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (row % RANKS != p.rank) continue;
    ahead.load_residual(p, row);
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < p.width) {
        const long long at = (long long)row * p.width + i;
        collect(v[k], part(p, row, i), own + half + row / RANKS * p.width + i, each, p.rank);
        const uint4 sum = tidy(round8(v[k]));
#pragma unroll
        for (int r = 0; r < RANKS; r++)
          if (r != p.rank) send(p.inbox[r] + sums + at, sum);
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = 0.f;
        add(v[k], sum);  // what the others get
      }
    }
    finish(p, row, v, ahead);
  }
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (row % RANKS == p.rank) continue;
    ahead.load_residual(p, row);
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < p.width) {
        const uint4 sum = take(own + sums + (long long)row * p.width + i);
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = 0.f;
        add(v[k], sum);
      }
    }
    finish(p, row, v, ahead);
  }
  return count_block(p.state);
}

// At least 1024 threads on a multiprocessor: the launcher counts on it.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) all_reduce(Params p) {
  // What follows a sum reads nothing but weights before its own wait, which is for the end of this kernel and
  // so for all before: it may fetch them while the kernel before this one comes to its end.
  pdl_launch();
  Ahead ahead;
  ahead.load_weight(p);  // which no kernel before this one writes
  if (SENT < 2) pdl_wait();  // the kernels before the last one have ended
  const u32 call = calls(p.state);
  const long long half = (call & 1) * p.half;
#if TWO_SHOT
  const u32 before = two_shot(p, half, ahead);
#else
  const u32 before = one_shot(p, half, ahead);
#endif
  end_call(p.state, call, before);
}

// Rows of a rank: [begin, end).
struct Own {
  int begin, end;
};
__device__ __forceinline__ Own rows_of(const Params& p, int rank) {
  Own found = {p.first[0], p.first[1]};
#pragma unroll
  for (int r = 1; r < RANKS; r++)
    if (r == rank) found = {p.first[r], p.first[r + 1]};
  return found;
}
__device__ __forceinline__ int owner_of(const Params& p, int row) {
  int owner = 0;
#pragma unroll
  for (int r = 1; r < RANKS; r++) owner += row >= p.first[r];
  return owner;
}

// Of x [rows, width] each rank gets the sum of its own rows, out [own rows, width].
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) reduce_scatter(Params p) {
  pdl_launch();  // as in all_reduce
  Ahead ahead;
  ahead.load_weight(p);
  pdl_wait();
  const u32 call = calls(p.state);
  const long long half = (call & 1) * p.half;
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int owner = owner_of(p, row);
    if (owner == p.rank) continue;
    const Own theirs = rows_of(p, owner);
    const long long place = (long long)p.rank * (theirs.end - theirs.begin) + row - theirs.begin;
    uint4* to = inbox(p, owner) + half + place * p.width;
    for (int i = threadIdx.x; i < p.width; i += THREADS) send(to + i, tidy(part(p, row, i)));
  }
  const Own own = rows_of(p, p.rank);
  const int count = own.end - own.begin;
  for (int row = blockIdx.x; row < count; row += gridDim.x) {
    ahead.load_residual(p, row);
    float v[VECS][8];
#pragma unroll
    for (int k = 0; k < VECS; k++) {
      const int i = threadIdx.x + k * THREADS;
      const long long at = (long long)row * p.width + i;
      if (i < p.width)
        collect(v[k], part(p, own.begin + row, i), inbox(p, p.rank) + half + at,
                (long long)count * p.width, p.rank);
    }
    finish(p, row, v, ahead);
  }
  end_call(p.state, call, count_block(p.state));
}

// All ranks get the rows of all: x [own rows, width] of each, out [rows, width].
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) all_gather(Params p) {
  pdl_launch();  // as in all_reduce
  pdl_wait();
  const u32 call = calls(p.state);
  const long long half = (call & 1) * p.half;
  const Own own = rows_of(p, p.rank);
  for (int row = own.begin + blockIdx.x; row < own.end; row += gridDim.x) {
    for (int i = threadIdx.x; i < p.width; i += THREADS) {
      const uint4 v = tidy(p.x[(long long)(row - own.begin) * p.width + i]);
      const long long at = (long long)row * p.width + i;
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r != p.rank) send(p.inbox[r] + half + at, v);
      p.out[at] = v;
    }
  }
  uint4* places = inbox(p, p.rank) + half;
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (row >= own.begin && row < own.end) continue;
    for (int i = threadIdx.x; i < p.width; i += THREADS) {
      const long long at = (long long)row * p.width + i;
      p.out[at] = take(places + at);
    }
  }
  end_call(p.state, call, count_block(p.state));
}

struct MaxParams {
  long long* keys;  // [rows], none of them 0; replaced by their maxima
  u64* inbox[8];    // of every rank, empty where 0
  u32* state;
  long long half;  // words
  int rank, rows;
};

__device__ __forceinline__ void send_key(u64* to, long long key) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(key) : "memory");
}
__device__ __forceinline__ long long look_at_key(const u64* from) {
  long long key;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(key) : "l"(from) : "memory");
  return key;
}

extern "C" __global__ void __launch_bounds__(THREADS) all_max(MaxParams p) {
  pdl_wait();
  pdl_launch();
  const u32 call = calls(p.state);
  const long long half = (call & 1) * p.half;
  u64* own = p.inbox[0];
#pragma unroll
  for (int r = 1; r < RANKS; r++) own = r == p.rank ? p.inbox[r] : own;
  for (int row = blockIdx.x * THREADS + threadIdx.x; row < p.rows; row += gridDim.x * THREADS) {
    long long best = p.keys[row];
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != p.rank) send_key(p.inbox[r] + half + p.rank * p.rows + row, best);
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      if (r == p.rank) continue;
      u64* place = own + half + r * p.rows + row;
      Patience patience;
      long long other;
      do {
        other = look_at_key(place);
        patience.check();
      } while (other == 0);
      *place = 0;
      best = other > best ? other : best;
    }
    p.keys[row] = best;
  }
  end_call(p.state, call, count_block(p.state));
}
