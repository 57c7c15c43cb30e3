// 8 lanes of float on AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include "common.hpp"

namespace octavo::OCTAVO_LEVEL {

struct VF {
    static constexpr int W = 8;
    __m256 v;
};
struct VI {
    __m256i v;
};

inline __m256i first_lanes(i64 count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
}

inline VF zero() { return {_mm256_setzero_ps()}; }
inline VF set1(float x) { return {_mm256_set1_ps(x)}; }
inline VF load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline VF load_n(const float* p, i64 n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
inline VF load(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline VF load_n(const bf16* p, i64 n) {
    bf16 whole[8] = {};
    std::memcpy(whole, p, static_cast<std::size_t>(n) * sizeof(bf16));
    return load(whole);
}
inline VF load(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
inline void store(float* p, VF a) { _mm256_storeu_ps(p, a.v); }
inline void store_n(float* p, VF a, i64 n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
inline void store(bf16* p, VF a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline void store_n(bf16* p, VF a, i64 n) {
    bf16 whole[8];
    store(whole, a);
    std::memcpy(p, whole, static_cast<std::size_t>(n) * sizeof(bf16));
}
inline VF add(VF a, VF b) { return {_mm256_add_ps(a.v, b.v)}; }
inline VF sub(VF a, VF b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline VF mul(VF a, VF b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline VF div(VF a, VF b) { return {_mm256_div_ps(a.v, b.v)}; }
inline VF fma(VF a, VF b, VF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// max and min give the second operand where either is a NaN.
inline VF max(VF a, VF b) { return {_mm256_max_ps(a.v, b.v)}; }
inline VF min(VF a, VF b) { return {_mm256_min_ps(a.v, b.v)}; }
inline VF round(VF a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline VF pow2(VF n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
// value where x >= limit or x is a NaN, else 0.
inline VF zero_below(VF value, VF x, float limit) {
    return {_mm256_and_ps(value.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ))};
}
// The first n lanes of a, fill in the others.
inline VF keep_first(VF a, i64 n, float fill) {
    return {_mm256_blendv_ps(_mm256_set1_ps(fill), a.v, _mm256_castsi256_ps(first_lanes(n)))};
}
inline float reduce_add(VF a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float reduce_max(VF a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// 8 pairs of bf16, low half = even index.
inline VI load_pairs(const bf16* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline VF even_of(VI pairs) { return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.v, 16))}; }
inline VF odd_of(VI pairs) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs.v, high))};
}

// Shape of the micro-kernel: accumulators that fit beside weights and one broadcast.
constexpr int kMaxRows = 6;
constexpr int vecs_of(int rows) { return rows <= 3 ? 4 : 2; }
constexpr int panels_of(int rows) { return rows == 1 ? 2 : 1; }

}  // namespace octavo::OCTAVO_LEVEL
