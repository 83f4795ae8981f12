// bfloat16 products in AMX tiles: 16 rows of x times 16 output channels times 32 channels of k in an
// instruction.
//
// A panel's rows of dwords are what a tile of the second factor wants: two tiles side by side. The process
// must have asked the kernel for the tile registers (sgla/kernels/build.py); they are set up for the length
// of one linear.
#pragma once

#include "gemm.h"

#if defined(__AMX_BF16__)

// The intrinsics do not tell the compiler what memory they read.
INLINE void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Tiles 0 to 3: sums of two times 16 rows; 4 and 5: x; 6 and 7: weights. ``rows``: of x and of the sums, up
// to 16.
struct TileRegisters {
  explicit TileRegisters(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; t++) {
      config.bytes[t] = 64;
      config.rows[t] = t < 6 && rows < 16 ? rows : 16;
    }
    memory_is_read(&config);
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
};

template <bool TWO>
INLINE void tile_step(const void* x, int64_t ldx, const uint8_t* w) {
  _tile_loadd(6, w, ROW_BYTES);
  _tile_loadd(4, x, ldx * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, w + 64, ROW_BYTES);
  _tile_dpbf16ps(1, 4, 7);
  if (!TWO) return;
  _tile_loadd(5, (const int32_t*)x + 16 * ldx, ldx * 4);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// tile[rows][32] (+)= x * panel for up to 16 rows, with TWO up to 32. x has rows of k / 2 dwords, ldx apart.
// ``fresh``: the panel comes from memory. Of 16 rows, those that are not there are read and written too, if
// there are 16 in the registers.
template <bool TWO>
__attribute__((noinline)) void tile_rows(const float* x_, int64_t ldx, const uint8_t* w, int64_t k,
                                         int64_t rows, float* tile, bool first, bool fresh) {
  const int32_t* x = (const int32_t*)x_;
  float* second = tile + 16 * PANEL;
  memory_is_read(x);
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) _tile_zero(2);
    if (TWO) _tile_zero(3);
  } else {
    _tile_loadd(0, tile, ROW_BYTES);
    _tile_loadd(1, tile + 16, ROW_BYTES);
    if (TWO) _tile_loadd(2, second, ROW_BYTES);
    if (TWO) _tile_loadd(3, second + 16, ROW_BYTES);
  }
  for (; k >= 32; k -= 32, x += 16, w += 16 * ROW_BYTES) {
    if (fresh)
      for (int64_t b = 0; b < 16 * ROW_BYTES; b += 64) prefetch(w + PREFETCH + b);
    tile_step<TWO>(x, ldx, w);
  }
  if (k > 0) {  // the rest of k, among zeros
    alignas(64) int32_t xs[32][16] = {};
    alignas(64) uint8_t ws[16 * ROW_BYTES] = {};
    for (int64_t m = 0; m < rows; m++) std::memcpy(xs[m], x + m * ldx, (k + 1) / 2 * 4);
    std::memcpy(ws, w, (k + 1) / 2 * ROW_BYTES);
    memory_is_read(xs);
    memory_is_read(ws);
    tile_step<TWO>(xs, 16, ws);
  }
  _tile_stored(0, tile, ROW_BYTES);
  _tile_stored(1, tile + 16, ROW_BYTES);
  if (TWO) _tile_stored(2, second, ROW_BYTES);
  if (TWO) _tile_stored(3, second + 16, ROW_BYTES);
  memory_is_read(tile);
}

inline void tiles_times_panel(const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t rows,
                              float* tile, bool first) {
  for (int64_t m = 0; m < rows; m += 32) {
    auto product = rows - m > 16 ? tile_rows<true> : tile_rows<false>;
    product(x + m * ldx, ldx, w, k, rows - m < 32 ? rows - m : 32, tile + m * PANEL, first, m == 0);
  }
}
#endif
