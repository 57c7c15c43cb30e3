// 16 lanes of float on AVX-512.
#pragma once

#include <immintrin.h>

#include "common.hpp"

namespace octavo::OCTAVO_LEVEL {

struct VF {
    static constexpr int W = 16;
    __m512 v;
};
struct VI {
    __m512i v;
};

inline __mmask16 first_lanes(i64 count) { return static_cast<__mmask16>((1u << count) - 1u); }

inline VF zero() { return {_mm512_setzero_ps()}; }
inline VF set1(float x) { return {_mm512_set1_ps(x)}; }
inline VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline VF load_n(const float* p, i64 n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline VF widen(__m256i half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline VF load(const bf16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline VF load_n(const bf16* p, i64 n) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline VF load(const std::int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
inline void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
inline void store_n(float* p, VF a, i64 n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline __m256i narrow(VF a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void store(bf16* p, VF a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
inline void store_n(bf16* p, VF a, i64 n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a));
}
inline VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
inline VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
inline VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// max and min give the second operand where either is a NaN.
inline VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
inline VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
inline VF round(VF a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline VF pow2(VF n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// value where x >= limit or x is a NaN, else 0.
inline VF zero_below(VF value, VF x, float limit) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
    return {_mm512_maskz_mov_ps(keep, value.v)};
}
// The first n lanes of a, fill in the others.
inline VF keep_first(VF a, i64 n, float fill) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(n), a.v)};
}
inline float reduce_add(VF a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(VF a) { return _mm512_reduce_max_ps(a.v); }

// Bit i: whether lane i reaches `limit`.
inline unsigned reaching(VF a, float limit) {
    return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GE_OQ);
}
// The chosen lanes of `values`, and first + lane for each, side by side; how many.
inline i64 append(VF values, std::int32_t first, unsigned chosen, float* out, std::int32_t* ids) {
    const auto lanes = static_cast<__mmask16>(chosen);
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_mask_compressstoreu_ps(out, lanes, values.v);
    _mm512_mask_compressstoreu_epi32(ids, lanes, _mm512_add_epi32(count, _mm512_set1_epi32(first)));
    return __builtin_popcount(chosen);
}

// 16 pairs of bf16, low half = even index.
inline VI load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline VF even_of(VI pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs.v, 16))}; }
inline VF odd_of(VI pairs) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(pairs.v, high))};
}

// Shape of the micro-kernel: accumulators that fit beside weights and one broadcast.
constexpr int kMaxRows = 12;
constexpr int vecs_of(int) { return 2; }
constexpr int panels_of(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }

}  // namespace octavo::OCTAVO_LEVEL
