// The vector type of this level, what is built on it alone, and the three kinds of dot product.
#pragma once

#include <type_traits>

#include "threads.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "simd_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {

#if !(defined(__AVX512F__) && defined(__AVX512BW__))
// Bit i: whether lane i reaches `limit`.
inline unsigned reaching(VF a, float limit) {
    float lanes[VF::W];
    store(lanes, a);
    unsigned found = 0;
    for (int i = 0; i < VF::W; ++i) found |= static_cast<unsigned>(lanes[i] >= limit) << i;
    return found;
}
// The chosen lanes of `values`, and first + lane for each, side by side; how many.
inline i64 append(VF values, std::int32_t first, unsigned chosen, float* out, std::int32_t* ids) {
    float lanes[VF::W];
    store(lanes, values);
    i64 count = 0;
    for (int i = 0; i < VF::W; ++i) {
        if (!(chosen >> i & 1u)) continue;
        out[count] = lanes[i];
        ids[count++] = first + i;
    }
    return count;
}
#endif

// A number that bf16 holds exactly.
inline void store_exact(bf16* p, VF a) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
#else
    store(p, a);
#endif
}

// exp, about 1 ulp; exactly 0 below -87.3 (so also for -inf), saturated above 88; a NaN stays one.
inline VF exp(VF x) {
    const VF bounded = min(set1(88.0f), max(set1(-87.3f), x));
    const VF n = round(mul(bounded, set1(1.44269504088896341f)));
    VF r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    VF p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return zero_below(mul(p, pow2(n)), x, -87.3f);
}

// 2^x for x <= 0 or a little above, within 2e-7; exactly 1 at 0, exactly 0 for -inf; a NaN stays
// one.
inline VF exp2(VF x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const VF r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
    const VF bounded = max(set1(-126.0f), x);
    const VF n = round(sub(bounded, set1(0.5f)));
    const VF r = sub(bounded, n);
#endif
    VF p = set1(1.8671302823349833e-3f);
    p = fma(p, r, set1(9.017029777169228e-3f));
    p = fma(p, r, set1(5.579991266131401e-2f));
    p = fma(p, r, set1(2.4016444385051727e-1f));
    p = fma(p, r, set1(6.931512951850891e-1f));
    p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return {_mm512_scalef_ps(p.v, x.v)};
#else
    return zero_below(mul(p, pow2(n)), x, -126.0f);
#endif
}

// Kinds of dot product. A kind says how activations (A) and weights (B) are stored, and adds the
// products of one pair of K to an accumulator, always the even k before the odd one.
// Weights of one pair and W columns: B [2] or [k][ldb]; column c of pair k2.

// float32 weights, float32 activations.
struct DotF32 {
    using A = float;
    using B = float;
    static constexpr int kSteps = 2;  // multiply-adds of one pair
    static constexpr DType kWeights = DType::f32;
    static const B* at(const B* b, i64 ldb, i64 k2, i64 column) {
        return b + 2 * k2 * ldb + column;
    }
    template <int Step>
    static VF weights(const B* at, i64 ldb) {
        return load(at + Step * ldb);
    }
    template <int Step>
    static VF step(const A* a, VF w, VF acc) {
        return fma(set1(a[Step]), w, acc);
    }
};

// bf16 weights widened to float32 in registers, float32 activations.
struct DotWiden {
    using A = float;
    using B = bf16;
    static constexpr int kSteps = 2;
    static constexpr DType kWeights = DType::bf16;
    static const B* at(const B* b, i64 ldb, i64 k2, i64 column) {
        return b + 2 * (k2 * ldb + column);
    }
    template <int Step>
    static VF weights(const B* at, i64) {
        return Step == 0 ? even_of(load_pairs(at)) : odd_of(load_pairs(at));
    }
    template <int Step>
    static VF step(const A* a, VF w, VF acc) {
        return fma(set1(a[Step]), w, acc);
    }
};

#if defined(__AVX512BF16__)
// bf16 weights and activations, one instruction a pair.
struct DotBf16 {
    using A = bf16;
    using B = bf16;
    static constexpr int kSteps = 1;
    static constexpr DType kWeights = DType::bf16;
    static const B* at(const B* b, i64 ldb, i64 k2, i64 column) {
        return b + 2 * (k2 * ldb + column);
    }
    template <int Step>
    static VF weights(const B* at, i64) {
        return {_mm512_castsi512_ps(load_pairs(at).v)};
    }
    template <int Step>
    static VF step(const A* a, VF w, VF acc) {
        int pair;
        std::memcpy(&pair, a, 4);
        const __m512i x = _mm512_set1_epi32(pair);
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)x, (__m512bh)w.v)};
    }
};
#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
using DotPacked = DotBf16;
#else
// Machines with AMX issue the bf16 dot product at half the rate of a float32 FMA (measured on
// Sapphire Rapids: 109 against 217 GFLOP/s a core), so what AMX does not do is done by FMA.
using DotPacked = DotWiden;
#endif

template <class F>
void parallel_for(i64 num_tasks, i64 grain, F body) {
    run_tasks(
        num_tasks, grain < 1 ? 1 : grain,
        [](void* context, i64 begin, i64 end) {
            F& call = *static_cast<F*>(context);
            for (i64 i = begin; i < end; ++i) call(i);
        },
        &body);
}

// Chunks of rows worth waking a thread for.
inline i64 row_grain(i64 columns) { return max64(1, 16384 / max64(columns, 1)); }

template <class F>
void with_type(DType dtype, F body) {
    if (dtype == DType::f32) {
        body(static_cast<float*>(nullptr));
    } else {
        body(static_cast<bf16*>(nullptr));
    }
}

}  // namespace octavo::OCTAVO_LEVEL
