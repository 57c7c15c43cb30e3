// Dot products of int8: W columns x 4 k of weights in a vector against 4 k of one row, in int32.
// Integer sums are exact, so every level and every shape gives the same ones.
#pragma once

#include "quantised.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kCellK = 32;

#if defined(__AVX512F__) && defined(__AVX512BW__)

using Bytes = __m512i;
using Ints = __m512i;

inline Bytes load_bytes(const std::uint8_t* at) { return _mm512_loadu_si512(at); }
inline Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
inline Bytes minus(Bytes v, int bias) {
    return _mm512_sub_epi8(v, _mm512_set1_epi8(static_cast<char>(bias)));
}
inline VF to_floats(Ints v) { return {_mm512_cvtepi32_ps(v)}; }
inline VF load_halves(const std::uint8_t* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
}

#if defined(__AVX512VNNI__)
// The instruction takes the first factor as unsigned: weights + 128, and sums that start at
// -128 x the sum of the row's 32 values.
struct Weights8 {
    Bytes shifted;
};
inline Weights8 prepare(Bytes w) { return {_mm512_xor_si512(w, _mm512_set1_epi8(-128))}; }
inline Ints start(std::int32_t row_sum) { return _mm512_set1_epi32(-128 * row_sum); }
inline Ints dot4(Ints acc, Weights8 w, std::int32_t x) {
    return _mm512_dpbusd_epi32(acc, w.shifted, _mm512_set1_epi32(x));
}
#else
// |w| as unsigned, its sign moved to x: two products never pass 128 x 127 x 2, so pairs of them
// fit 16 bits.
struct Weights8 {
    Bytes size;
    __mmask64 negative;
};
inline Weights8 prepare(Bytes w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
inline Ints start(std::int32_t) { return _mm512_setzero_si512(); }
inline Ints dot4(Ints acc, Weights8 w, std::int32_t x) {
    const Bytes row = _mm512_set1_epi32(x);
    const Bytes factor = _mm512_mask_sub_epi8(row, w.negative, _mm512_setzero_si512(), row);
    const Ints pairs = _mm512_maddubs_epi16(w.size, factor);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif

constexpr int kRows8 = 6;

#elif defined(__AVX2__) && defined(__FMA__)

using Bytes = __m256i;
using Ints = __m256i;

inline Bytes load_bytes(const std::uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
inline Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
inline Bytes minus(Bytes v, int bias) {
    return _mm256_sub_epi8(v, _mm256_set1_epi8(static_cast<char>(bias)));
}
inline VF to_floats(Ints v) { return {_mm256_cvtepi32_ps(v)}; }
inline VF load_halves(const std::uint8_t* at) {
    float wide[VF::W];
    for (int i = 0; i < VF::W; ++i) {
        wide[i] = half_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
    }
    return load(wide);
}

// |w| as unsigned, its sign moved to x: two products never pass 128 x 127 x 2, so pairs of them
// fit 16 bits.
struct Weights8 {
    Bytes size, sign;
};
inline Weights8 prepare(Bytes w) { return {_mm256_abs_epi8(w), w}; }
inline Ints start(std::int32_t) { return _mm256_setzero_si256(); }
inline Ints dot4(Ints acc, Weights8 w, std::int32_t x) {
    const Bytes factor = _mm256_sign_epi8(_mm256_set1_epi32(x), w.sign);
    const Ints pairs = _mm256_maddubs_epi16(w.size, factor);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

constexpr int kRows8 = 3;

#else

typedef std::int8_t Bytes __attribute__((vector_size(16)));
using Ints = Int4;

inline Bytes load_bytes(const std::uint8_t* at) {
    Bytes v;
    std::memcpy(&v, at, 16);
    return v;
}
inline Bytes low_nibbles(Bytes v) { return v & 15; }
inline Bytes high_nibbles(Bytes v) { return (v >> 4) & 15; }
inline Bytes minus(Bytes v, int bias) { return v - static_cast<std::int8_t>(bias); }
inline VF to_floats(Ints v) {
    return {Float4{static_cast<float>(v[0]), static_cast<float>(v[1]), static_cast<float>(v[2]),
                   static_cast<float>(v[3])}};
}
inline VF load_halves(const std::uint8_t* at) {
    float wide[VF::W];
    for (int i = 0; i < VF::W; ++i) {
        wide[i] = half_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
    }
    return load(wide);
}

struct Weights8 {
    Ints of[4];  // by k
};
inline Weights8 prepare(Bytes w) {
    Weights8 out;
    for (int k = 0; k < 4; ++k) out.of[k] = Ints{w[k], w[4 + k], w[8 + k], w[12 + k]};
    return out;
}
inline Ints start(std::int32_t) { return Ints{0, 0, 0, 0}; }
inline Ints dot4(Ints acc, const Weights8& w, std::int32_t x) {
    std::int8_t row[4];
    std::memcpy(row, &x, 4);
    for (int k = 0; k < 4; ++k) acc += w.of[k] * static_cast<std::int32_t>(row[k]);
    return acc;
}

constexpr int kRows8 = 2;

#endif

inline VF load_scales(const std::uint8_t* at, bool wide, i64 column) {
    return wide ? load(reinterpret_cast<const float*>(at) + column) : load_halves(at + 2 * column);
}

}  // namespace octavo::OCTAVO_LEVEL
