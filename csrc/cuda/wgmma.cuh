// Tensor-core products of a group of four warps (`wgmma`, Hopper), and what the kernels around them share:
// tiles in shared memory, a ring of stages.
#pragma once
#include "common.cuh"

// A tile with rows of 128 bytes, swizzled; 8 rows are 1024 bytes. `far`: bytes to the next 64 columns, where
// the columns are the N of the instruction.
__device__ __forceinline__ u64 tile_at(u32 addr, u32 far = 16) {
  return u64((addr & 0x3ffff) >> 4) | u64(far >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// d[64 x N] of a group of warps: lane (g = lane / 4, t = lane % 4) of warp w holds rows 16 w + g and + 8, of
// every 8 columns 2t and 2t + 1. `wgmma`: d += a b^T with both in shared memory, b's rows being columns of d;
// `wgmma_first`: d = a b^T; `wgmma_registers`: d += a b with a in registers, as the results of another such
// product lie, and b's columns being those of d; `wgmma_left`: the same with b's rows. All take 16 of k.
// `wgmma_e4m3`, `wgmma_e4m3_first`: the first two of e4m3, 32 of k.
#define D8(KIND, i)                                                                                          \
  KIND(d[i]), KIND(d[i + 1]), KIND(d[i + 2]), KIND(d[i + 3]), KIND(d[i + 4]), KIND(d[i + 5]),                \
      KIND(d[i + 6]), KIND(d[i + 7])
#define S1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define S2 S1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S3 S2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define S4 S3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define S5 S4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define S6 S5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define S7 S6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define S8 S7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define S9 S8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define S10 S9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define S11 S10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define S12 S11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define S13 S12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define S14 S13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define S15 S14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define S16 S15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define D_1(KIND) D8(KIND, 0)
#define D_2(KIND) D_1(KIND), D8(KIND, 8)
#define D_3(KIND) D_2(KIND), D8(KIND, 16)
#define D_4(KIND) D_3(KIND), D8(KIND, 24)
#define D_5(KIND) D_4(KIND), D8(KIND, 32)
#define D_6(KIND) D_5(KIND), D8(KIND, 40)
#define D_7(KIND) D_6(KIND), D8(KIND, 48)
#define D_8(KIND) D_7(KIND), D8(KIND, 56)
#define D_9(KIND) D_8(KIND), D8(KIND, 64)
#define D_10(KIND) D_9(KIND), D8(KIND, 72)
#define D_11(KIND) D_10(KIND), D8(KIND, 80)
#define D_12(KIND) D_11(KIND), D8(KIND, 88)
#define D_13(KIND) D_12(KIND), D8(KIND, 96)
#define D_14(KIND) D_13(KIND), D8(KIND, 104)
#define D_15(KIND) D_14(KIND), D8(KIND, 112)
#define D_16(KIND) D_15(KIND), D8(KIND, 120)
#define WGMMA(N, EIGHTS, A, A1, A2, A3, B)                                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a, u64 b) {                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##EIGHTS "}, " A ", " A1      \
                                                                                        ", 1, 1, 1, 0, 0;"   \
                 : D_##EIGHTS("+f")                                                                          \
                 : "l"(a), "l"(b));                                                                          \
  }                                                                                                          \
  __device__ __forceinline__ void wgmma_first(float (&d)[N / 2], u64 a, u64 b) {                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##EIGHTS "}, " A ", " A1      \
                                                                                        ", 0, 1, 1, 0, 0;"   \
                 : D_##EIGHTS("=f")                                                                          \
                 : "l"(a), "l"(b));                                                                          \
  }                                                                                                          \
  __device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], u64 a, u64 b) {                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" S##EIGHTS "}, " A ", " A1      \
                                                                                        ", 1, 1, 1;"         \
                 : D_##EIGHTS("+f")                                                                          \
                 : "l"(a), "l"(b));                                                                          \
  }                                                                                                          \
  __device__ __forceinline__ void wgmma_e4m3_first(float (&d)[N / 2], u64 a, u64 b) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" S##EIGHTS "}, " A ", " A1      \
                                                                                        ", 0, 1, 1;"         \
                 : D_##EIGHTS("=f")                                                                          \
                 : "l"(a), "l"(b));                                                                          \
  }                                                                                                          \
  __device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const u32(&a)[4], u64 b) {              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##EIGHTS                      \
                 "}, {" A "," A1 "," A2 "," A3 "}, " B ", 1, 1, 1, 1;"                                       \
                 : D_##EIGHTS("+f")                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                      \
  }                                                                                                          \
  __device__ __forceinline__ void wgmma_left(float (&d)[N / 2], const u32(&a)[4], u64 b) {                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" S##EIGHTS                      \
                 "}, {" A "," A1 "," A2 "," A3 "}, " B ", 1, 1, 1, 0;"                                       \
                 : D_##EIGHTS("+f")                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                      \
  }
WGMMA(16, 1, "%8", "%9", "%10", "%11", "%12")
WGMMA(32, 2, "%16", "%17", "%18", "%19", "%20")
WGMMA(48, 3, "%24", "%25", "%26", "%27", "%28")
WGMMA(64, 4, "%32", "%33", "%34", "%35", "%36")
WGMMA(80, 5, "%40", "%41", "%42", "%43", "%44")
WGMMA(96, 6, "%48", "%49", "%50", "%51", "%52")
WGMMA(112, 7, "%56", "%57", "%58", "%59", "%60")
WGMMA(128, 8, "%64", "%65", "%66", "%67", "%68")
WGMMA(144, 9, "%72", "%73", "%74", "%75", "%76")
WGMMA(160, 10, "%80", "%81", "%82", "%83", "%84")
WGMMA(176, 11, "%88", "%89", "%90", "%91", "%92")
WGMMA(192, 12, "%96", "%97", "%98", "%99", "%100")
WGMMA(208, 13, "%104", "%105", "%106", "%107", "%108")
WGMMA(224, 14, "%112", "%113", "%114", "%115", "%116")
WGMMA(240, 15, "%120", "%121", "%122", "%123", "%124")
WGMMA(256, 16, "%128", "%129", "%130", "%131", "%132")
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most PENDING groups of products are under way; `d` may be read then.
template <int PENDING, int SIZE>
__device__ __forceinline__ void wgmma_wait(float (&d)[SIZE]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// How many registers each thread of a group of warps has from here on.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A place in a ring of COUNT stages.
template <int COUNT>
struct Slot {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};
