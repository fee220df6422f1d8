// Sixteen fp32 lanes on whatever the compiler's target has, and the numbers that the kernels are made of.
//
// A *word* is 32 bits of a reduction: two neighbouring bf16 elements, or one fp32 element. Rounding to bf16 is to
// nearest even, as in torch. exp and log are within 2 ulp; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace rollout {

constexpr int kLanes = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));

#define ROLLOUT_INLINE inline __attribute__((always_inline))

struct Bf16 {
    uint16_t bits;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ROLLOUT_INLINE F32 splat(float x) { return F32{} + x; }

ROLLOUT_INLINE I32 lane_ids() { return I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <class V>
ROLLOUT_INLINE V load_as(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
ROLLOUT_INLINE void store_as(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// Have the second-level cache fetch a line. GCC takes a function of nothing but __builtin_prefetch for one without
// effect and drops its calls.
ROLLOUT_INLINE void prefetch(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
    __builtin_prefetch(line, 0, 2);
#endif
}

// Elements --------------------------------------------------------------------------------------------------------

ROLLOUT_INLINE F32 load(const float* from) { return load_as<F32>(from); }

ROLLOUT_INLINE F32 load(const Bf16* from) {
    return (F32)(__builtin_convertvector(load_as<U16>(from), U32) << 16);
}

ROLLOUT_INLINE U32 rounded_bits(F32 x) {
    const U32 bits = (U32)x;
    const U32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return x == x ? rounded : U32{} + 0x7fc00000u;
}

ROLLOUT_INLINE void store(float* to, F32 x) { store_as(to, x); }

ROLLOUT_INLINE void store(Bf16* to, F32 x) { store_as(to, __builtin_convertvector(rounded_bits(x) >> 16, U16)); }

// x as an element of type T holds it.
template <class T>
ROLLOUT_INLINE F32 rounded(F32 x);

template <>
ROLLOUT_INLINE F32 rounded<float>(F32 x) {
    return x;
}

template <>
ROLLOUT_INLINE F32 rounded<Bf16>(F32 x) {
    return (F32)(rounded_bits(x) & 0xffff0000u);
}

// The last, partly filled vector of a row.
template <class T>
ROLLOUT_INLINE F32 load_some(const T* from, int count) {
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
ROLLOUT_INLINE void store_some(T* to, F32 x, int count) {
    T padded[kLanes];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

// Calls f(index, count) for each vector of a row of n elements; count is kLanes for all but the last.
template <class F>
ROLLOUT_INLINE void each_vector(int n, F f) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
}

template <class T>
ROLLOUT_INLINE F32 load_up_to(const T* from, int count) {
    return count == kLanes ? load(from) : load_some(from, count);
}

template <class T>
ROLLOUT_INLINE void store_up_to(T* to, F32 x, int count) {
    if (count == kLanes)
        store(to, x);
    else
        store_some(to, x, count);
}

// a * b + c, rounded once where the CPU can, and the same everywhere: what a compiler chooses to fuse is not.
ROLLOUT_INLINE F32 fused(F32 a, F32 b, F32 c) {
#ifdef __AVX512F__
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    std::memcpy(z, &c, sizeof c);
    for (int half = 0; half < 2; half++) z[half] = _mm256_fmadd_ps(x[half], y[half], z[half]);
    std::memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

// Reductions ------------------------------------------------------------------------------------------------------

// Elements in one word.
template <class T>
constexpr int kWord = sizeof(uint32_t) / sizeof(T);

// acc + the products of the elements of `a` with those of each lane of `w`.
template <class T>
ROLLOUT_INLINE F32 dot(F32 acc, uint32_t a, U32 w);

template <>
ROLLOUT_INLINE F32 dot<float>(F32 acc, uint32_t a, U32 w) {
    float x;
    std::memcpy(&x, &a, sizeof x);
    return fused(splat(x), (F32)w, acc);
}

template <>
ROLLOUT_INLINE F32 dot<Bf16>(F32 acc, uint32_t a, U32 w) {
#ifdef __AVX512BF16__
    return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)(__m512i)w);
#else
    const U32 x = U32{} + a;
    acc = fused((F32)(x & 0xffff0000u), (F32)(w & 0xffff0000u), acc);
    return fused((F32)(x << 16), (F32)(w << 16), acc);
#endif
}

ROLLOUT_INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }

// x with its lanes rotated.
template <int by>
ROLLOUT_INLINE F32 rotated(F32 x) {
    return (F32)__builtin_shuffle((I32)x, (lane_ids() + by) & (kLanes - 1));
}

ROLLOUT_INLINE float sum(F32 x) {
    x += rotated<8>(x);
    x += rotated<4>(x);
    x += rotated<2>(x);
    return (x + rotated<1>(x))[0];
}

ROLLOUT_INLINE float largest(F32 x) {
    x = larger(x, rotated<8>(x));
    x = larger(x, rotated<4>(x));
    x = larger(x, rotated<2>(x));
    return larger(x, rotated<1>(x))[0];
}

// Whether a comparison holds for some lane.
ROLLOUT_INLINE bool any(I32 comparison) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < kLanes; i++) found |= comparison[i];
    return found != 0;
#endif
}

// Functions (polynomials: Cephes, S. Moshier) ---------------------------------------------------------------------

// Of numbers that are not positive.
ROLLOUT_INLINE F32 exp(F32 x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const F32 clamped = x < -87.0f ? splat(-87.0f) : x;
    const F32 shifted = fused(clamped, splat(1.44269504088896341f), splat(magic));
    const F32 n = shifted - magic;
    F32 r = fused(n, splat(-0.693359375f), clamped);
    r = fused(n, splat(2.12194440e-4f), r);
    F32 p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    const F32 y = p * (F32)(((I32)shifted - 0x4b400000 + 127) << 23);
    return x < -87.0f ? F32{} : y;
}

ROLLOUT_INLINE F32 sigmoid(F32 x) {
    const F32 e = exp(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// Of positive normal numbers.
ROLLOUT_INLINE F32 log(F32 x) {
    const U32 bits = (U32)x;
    I32 exponent = (I32)(bits >> 23) - 126;
    F32 m = (F32)((bits & 0x007fffffu) | 0x3f000000u);
    const I32 small = m < 0.707106781186547524f;
    exponent += small;
    m = m + (small ? m : F32{}) - 1.0f;
    F32 p = splat(7.0376836292e-2f);
    p = fused(p, m, splat(-1.1514610310e-1f));
    p = fused(p, m, splat(1.1676998740e-1f));
    p = fused(p, m, splat(-1.2420140846e-1f));
    p = fused(p, m, splat(1.4249322787e-1f));
    p = fused(p, m, splat(-1.6668057665e-1f));
    p = fused(p, m, splat(2.0000714765e-1f));
    p = fused(p, m, splat(-2.4999993993e-1f));
    p = fused(p, m, splat(3.3333331174e-1f));
    const F32 square = m * m;
    const F32 e = __builtin_convertvector(exponent, F32);
    F32 y = fused(e, splat(-2.12194440e-4f), m * square * p);
    y = fused(square, splat(-0.5f), y);
    return fused(e, splat(0.693359375f), m + y);
}

// log(1 - x) for 0 < x < 1, exact where x is small.
ROLLOUT_INLINE F32 log_one_minus(F32 x) {
    const F32 rest = 1.0f - x;
    const F32 lost = (-x) - (rest - 1.0f);
    return log(rest) + lost / rest;
}

}  // namespace rollout
