// Vectors through the compiler's vector extensions, so that one source serves AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef float vf_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int PANEL = 32;            // output channels of a weight panel
constexpr int NV = PANEL / LANES;    // vectors in a panel's row

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define INLINED __attribute__((always_inline))

// f(0), ..., f(N - 1), with numbers that are constants to the compiler from the start: arrays that they index
// stay in registers, where GCC 12 keeps those of nested UNROLL loops in memory.
template <class F, int... I>
INLINE void each_of(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
INLINE void each(F f) {
  each_of(f, std::make_integer_sequence<int, N>{});
}

INLINE vf load(const float* p) { return *(const vf_mem*)p; }
INLINE vi load_int(const void* p) { return *(const vi_mem*)p; }
INLINE void store(float* p, vf v) { *(vf_mem*)p = v; }
INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf as_float(vi v) { return (vf)v; }

// To the nearest, of values below 2^22.
INLINE vi round_to_int(vf v) {
  const vf magic = splat(12582912.0f);
  return (vi)(v + magic) - (vi)magic;
}

// The low halves of the dwords.
INLINE void store_int16(int16_t* p, vi v) {
  typedef int16_t half_vector __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
  *(half_vector*)p = __builtin_convertvector(v, half_vector);
}

// Byte i of each dword, from 0 to 255: one instruction where it can be, for every weight of int8 is taken out
// so.
INLINE vi take_byte(vi raw, int i) {
  if (i == 0) return raw & 255;
  if (i == 3) return (vi)((vu)raw >> 24);
#if defined(__AVX2__)
  const int32_t first = (int32_t)0x80808000 + i;
  const __m128i lane = _mm_setr_epi32(first, first + 4, first + 8, first + 12);
#if defined(__AVX512BW__)
  return (vi)_mm512_shuffle_epi8((__m512i)raw, _mm512_broadcast_i32x4(lane));
#else
  return (vi)_mm256_shuffle_epi8((__m256i)raw, _mm256_broadcastsi128_si256(lane));
#endif
#else
  return (vi)((vu)raw >> (8 * i)) & 255;
#endif
}

// The low bytes of the dwords.
INLINE void store_int8(int8_t* p, vi v) {
  typedef int8_t quarter_vector __attribute__((vector_size(LANES), aligned(1), may_alias));
  *(quarter_vector*)p = __builtin_convertvector(v, quarter_vector);
}

// Byte i of each dword, from -128 to 127.
INLINE vi take_signed_byte(vi raw, int i) { return raw << (24 - 8 * i) >> 24; }

INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

// The vector with its halves of 2 * S lanes exchanged, S lanes at a time: log2(LANES) of them reduce a
// vector.
template <int S>
INLINE vf swap_lanes(vf v) {
  vi from;
  UNROLL for (int j = 0; j < LANES; j++) from[j] = j ^ S;
  return __builtin_shuffle(v, from);
}

INLINE float sum(vf v) {
#if defined(__AVX512F__)
  v += swap_lanes<8>(v);
#endif
#if defined(__AVX2__)
  v += swap_lanes<4>(v);
#endif
  v += swap_lanes<2>(v);
  v += swap_lanes<1>(v);
  return v[0];
}

INLINE float max_of(vf v) {
#if defined(__AVX512F__)
  v = vmax(v, swap_lanes<8>(v));
#endif
#if defined(__AVX2__)
  v = vmax(v, swap_lanes<4>(v));
#endif
  v = vmax(v, swap_lanes<2>(v));
  v = vmax(v, swap_lanes<1>(v));
  return v[0];
}

// exp to about 1 ulp: 2^n * polynomial in the rest (the degree-6 minimax of Cephes); exactly 0 below -87.
INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // its last bits are the integer that was added
  vf y = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
  vf shifted = y * 1.44269504088896341f + magic;
  vf n = shifted - magic;
  vf r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vf v = as_float((vi)p + ((vi)shifted << 23));
  return x < -87.0f ? vf{} : v;
}

// Values of a pair of vectors at even places, then those at odd places; and back.
INLINE void deinterleave(vf* v) {
  vi even, odd;
  UNROLL for (int j = 0; j < LANES; j++) even[j] = 2 * j, odd[j] = 2 * j + 1;
  vf a = v[0], b = v[1];
  v[0] = __builtin_shuffle(a, b, even);
  v[1] = __builtin_shuffle(a, b, odd);
}
INLINE void interleave(vf* v) {
  vi low, high;
  UNROLL for (int j = 0; j < LANES; j++) low[j] = j / 2 + j % 2 * LANES,
                                         high[j] = LANES / 2 + j / 2 + j % 2 * LANES;
  vf a = v[0], b = v[1];
  v[0] = __builtin_shuffle(a, b, low);
  v[1] = __builtin_shuffle(a, b, high);
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (1.0f + vexp(2.0f * x)); }

// Of each two values S lanes apart the sum and the difference.
template <int S>
INLINE vf sum_and_difference(vf v) {
  vi sign;
  UNROLL for (int j = 0; j < LANES; j++) sign[j] = j & S ? INT32_MIN : 0;
  return swap_lanes<S>(v) + as_float((vi)v ^ sign);
}

// x[d] times a Hadamard matrix in blocks of ``size``, a power of two: what a few dims have becomes a part of
// all.
inline void hadamard(float* x, int64_t d, int64_t size) {
  int64_t half = 1;
  if (size >= LANES) {
    for (int64_t i = 0; i < d; i += LANES) {
      vf v = sum_and_difference<2>(sum_and_difference<1>(load(x + i)));
#if defined(__AVX2__)
      v = sum_and_difference<4>(v);
#endif
#if defined(__AVX512F__)
      v = sum_and_difference<8>(v);
#endif
      store(x + i, v);
    }
    half = LANES;
  }
  for (; half < size; half *= 2)
    for (int64_t i = 0; i < d; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
}

// Of keys of d dims.
inline int64_t hadamard_size(int64_t d) { return d & -d; }

INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (u >> 16) | 64;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

INLINE float from_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// LANES bf16 values.
INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  typedef uint16_t half_vector __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
  return (vf)(__builtin_convertvector(*(const half_vector*)p, vu) << 16);
#endif
}

// Finite values only: a NaN may come out as infinity.
INLINE void store_bf16(uint16_t* p, vf v) {
  typedef uint16_t half_vector __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
  vu u = (vu)v;
  *(half_vector*)p = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, half_vector);
}

// LANES values, a NaN among them, where an instruction rounds them.
#if defined(__AVX512BF16__)
INLINE void round_bf16(uint16_t* p, vf v) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE void round_bf16(uint16_t* p, vf v) {
  vst1_bf16((bfloat16_t*)p, vcvt_bf16_f32((float32x4_t)v));
}
#endif

// LANES integers of 8 bits.
INLINE vf load_int8(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t quarter_vector __attribute__((vector_size(LANES), aligned(1), may_alias));
  return to_float(__builtin_convertvector(*(const quarter_vector*)p, vi));
#endif
}

INLINE float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff;
  float x;
  uint32_t u = (body << 13) + (112u << 23);
  if (body >= 0x7c00) u += 112u << 23;
  std::memcpy(&x, &u, 4);
  if (body < 0x400) x = (float)body * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
  std::memcpy(&u, &x, 4);
  u |= sign;
  std::memcpy(&x, &u, 4);
  return x;
}

INLINE vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_f16(p[i]);
  return v;
#endif
}

// Transpose a LANES x LANES block in place: log2(LANES) rounds of two-source shuffles.
template <int S>
INLINE void transpose_round(vf* r) {
  vi first, second;
  UNROLL for (int j = 0; j < LANES; j++) {
    first[j] = j & S ? LANES + j - S : j;
    second[j] = j & S ? LANES + j : j + S;
  }
  UNROLL for (int i = 0; i < LANES; i++) {
    if (i & S) continue;
    vf a = r[i], b = r[i + S];
    r[i] = __builtin_shuffle(a, b, first);
    r[i + S] = __builtin_shuffle(a, b, second);
  }
}

INLINE void transpose(vf* r) {
#if defined(__AVX512F__)
  transpose_round<8>(r);
#endif
#if defined(__AVX2__)
  transpose_round<4>(r);
#endif
  transpose_round<2>(r);
  transpose_round<1>(r);
}
