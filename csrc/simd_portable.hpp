// 4 lanes of float in plain C++ (vector types of gcc and clang): SSE2, NEON, whatever there is.
#pragma once

#include "common.hpp"

namespace octavo::OCTAVO_LEVEL {

typedef float Float4 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::uint32_t UInt4 __attribute__((vector_size(16)));

struct VF {
    static constexpr int W = 4;
    Float4 v;
};
struct VI {
    UInt4 v;
};

inline VF zero() { return {Float4{0.0f, 0.0f, 0.0f, 0.0f}}; }
inline VF set1(float x) { return {Float4{x, x, x, x}}; }
inline VF load(const float* p) {
    VF a;
    std::memcpy(&a.v, p, 16);
    return a;
}
inline VF load_n(const float* p, i64 n) {
    VF a = zero();
    std::memcpy(&a.v, p, static_cast<std::size_t>(n) * 4);
    return a;
}
inline VF load(const bf16* p) {
    const UInt4 bits = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
    return {(Float4)(bits << 16)};
}
inline VF load(const std::int8_t* p) {
    VF out;
    for (int i = 0; i < VF::W; ++i) out.v[i] = static_cast<float>(p[i]);
    return out;
}
inline VF load_n(const bf16* p, i64 n) {
    bf16 whole[4] = {};
    std::memcpy(whole, p, static_cast<std::size_t>(n) * sizeof(bf16));
    return load(whole);
}
inline void store(float* p, VF a) { std::memcpy(p, &a.v, 16); }
inline void store_n(float* p, VF a, i64 n) {
    std::memcpy(p, &a.v, static_cast<std::size_t>(n) * 4);
}
inline void store_n(bf16* p, VF a, i64 n) {
    for (i64 i = 0; i < n; ++i) p[i] = to_bf16(a.v[i]);
}
inline void store(bf16* p, VF a) { store_n(p, a, 4); }
inline VF add(VF a, VF b) { return {a.v + b.v}; }
inline VF sub(VF a, VF b) { return {a.v - b.v}; }
inline VF mul(VF a, VF b) { return {a.v * b.v}; }
inline VF div(VF a, VF b) { return {a.v / b.v}; }
// Two roundings: a machine of this level may lack the instruction, and a call to fmaf is slow.
inline VF fma(VF a, VF b, VF c) { return {a.v * b.v + c.v}; }
// max and min give the second operand where either is a NaN.
inline VF max(VF a, VF b) { return {a.v > b.v ? a.v : b.v}; }
inline VF min(VF a, VF b) { return {a.v < b.v ? a.v : b.v}; }
// Adding 1.5 * 2^23 leaves no bits for a fraction: exact for |a| < 2^22.
inline VF round(VF a) {
    const VF big = set1(12582912.0f);
    return sub(add(a, big), big);
}
inline VF pow2(VF n) {
    // The integer sits in the low bits once n + 1.5 * 2^23 is taken as bits (no NaN conversion).
    const UInt4 bits = (UInt4)(n.v + set1(12582912.0f).v);
    return {(Float4)((bits + 127u) << 23)};
}
// value where x >= limit or x is a NaN, else 0.
inline VF zero_below(VF value, VF x, float limit) {
    return {x.v < set1(limit).v ? zero().v : value.v};
}
// The first n lanes of a, fill in the others.
inline VF keep_first(VF a, i64 n, float fill) {
    for (i64 i = n; i < 4; ++i) a.v[i] = fill;
    return a;
}
inline float reduce_add(VF a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(VF a) {
    const float x = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
    const float y = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
    return x > y ? x : y;
}

// 4 pairs of bf16, low half = even index (little-endian machines).
inline VI load_pairs(const bf16* p) {
    VI pairs;
    std::memcpy(&pairs.v, p, 16);
    return pairs;
}
inline VF even_of(VI pairs) { return {(Float4)(pairs.v << 16)}; }
inline VF odd_of(VI pairs) { return {(Float4)(pairs.v & 0xffff0000u)}; }

// Shape of the micro-kernel: accumulators that fit beside weights and one broadcast.
constexpr int kMaxRows = 4;
constexpr int vecs_of(int rows) { return rows == 1 ? 8 : 2; }
constexpr int panels_of(int) { return 1; }

}  // namespace octavo::OCTAVO_LEVEL
