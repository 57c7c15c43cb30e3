// Attention on AMX tiles: 16 queries against 64 keys at a time. With tiles the sums take less time
// than exp, so whatever can be is done for 16 queries in one vector.
#pragma once

#include "key_units.hpp"

#if defined(__AMX_BF16__)
namespace octavo::OCTAVO_LEVEL {

constexpr i64 kTileRows = 16;

// Tiles 0-3 are sums, 4 the left operand and 6 the right one, 32 deep; 5 and 7 are 16 deep, for the
// rest of a head_dim that is no multiple of 32.
inline void configure_attention(i64 rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(i < 6 ? rows : i == 6 ? 16 : 8);
        config.row_bytes[i] = i == 5 ? 32 : 64;
    }
    load_config(config);
}

// scores[rows][kTileKeys] = q[rows][dim] . K
inline void amx_scores(const bf16* q, i64 dim, const bf16* const* k_units, i64 num_units,
                       float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    i64 d = 0;
    for (; d + 32 <= dim; d += 32) {
        _tile_loadd(4, q + d, dim * 2);
        _tile_loadd(6, k_units[0] + d * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (num_units < 2) continue;
        _tile_loadd(6, k_units[1] + d * 16, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (num_units < 3) continue;
        _tile_loadd(6, k_units[2] + d * 16, 64);
        _tile_dpbf16ps(2, 4, 6);
        if (num_units < 4) continue;
        _tile_loadd(6, k_units[3] + d * 16, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    if (d < dim) {
        _tile_loadd(5, q + d, dim * 2);
        _tile_loadd(7, k_units[0] + d * 16, 64);
        _tile_dpbf16ps(0, 5, 7);
        if (num_units > 1) _tile_loadd(7, k_units[1] + d * 16, 64);
        if (num_units > 1) _tile_dpbf16ps(1, 5, 7);
        if (num_units > 2) _tile_loadd(7, k_units[2] + d * 16, 64);
        if (num_units > 2) _tile_dpbf16ps(2, 5, 7);
        if (num_units > 3) _tile_loadd(7, k_units[3] + d * 16, 64);
        if (num_units > 3) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores, kTileKeys * 4);
    if (num_units > 1) _tile_stored(1, scores + 16, kTileKeys * 4);
    if (num_units > 2) _tile_stored(2, scores + 32, kTileKeys * 4);
    if (num_units > 3) _tile_stored(3, scores + 48, kTileKeys * 4);
}

// acc[rows][dim] += p[rows][kTileKeys] . V [][16][dim][2], two units of 16 keys a step; `fresh`:
// from zero.
inline void amx_values(const bf16* p, const bf16* v, i64 num_units, i64 dim, bool fresh,
                       float* acc) {
    asm volatile("" ::: "memory");  // the compiler does not see that tiles read p
    for (i64 column = 0; column < dim; column += 64) {
        const i64 tiles = min64(4, (dim - column) / 16);
        float* to = acc + column;
        if (fresh) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, to, dim * 4);
            if (tiles > 1) _tile_loadd(1, to + 16, dim * 4);
            if (tiles > 2) _tile_loadd(2, to + 32, dim * 4);
            if (tiles > 3) _tile_loadd(3, to + 48, dim * 4);
        }
        for (i64 unit = 0; unit < num_units; unit += 2) {
            const bf16* b = v + unit * kUnit * dim + column * 2;
            _tile_loadd(4, p + unit * kUnit, kTileKeys * 2);
            _tile_loadd(6, b, dim * 4);
            _tile_dpbf16ps(0, 4, 6);
            if (tiles < 2) continue;
            _tile_loadd(6, b + 32, dim * 4);
            _tile_dpbf16ps(1, 4, 6);
            if (tiles < 3) continue;
            _tile_loadd(6, b + 64, dim * 4);
            _tile_dpbf16ps(2, 4, 6);
            if (tiles < 4) continue;
            _tile_loadd(6, b + 96, dim * 4);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, to, dim * 4);
        if (tiles > 1) _tile_stored(1, to + 16, dim * 4);
        if (tiles > 2) _tile_stored(2, to + 32, dim * 4);
        if (tiles > 3) _tile_stored(3, to + 48, dim * 4);
    }
}

// 16 vectors to one: lane i is op over the lanes of rows[i], always in the same order.
template <class F>
inline VF reduce_rows(const VF (&rows)[kTileRows], F op) {
    __m512 a[8], b[4];
    for (int i = 0; i < 8; ++i) {
        const __m512 x = rows[2 * i].v, y = rows[2 * i + 1].v;
        a[i] = op(VF{_mm512_unpacklo_ps(x, y)}, VF{_mm512_unpackhi_ps(x, y)}).v;
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = op(VF{_mm512_castpd_ps(_mm512_unpacklo_pd(x, y))},
                  VF{_mm512_castpd_ps(_mm512_unpackhi_pd(x, y))})
                   .v;
    }
    auto fold = [&](__m512 x, __m512 y) {
        return op(VF{_mm512_shuffle_f32x4(x, y, 0x44)}, VF{_mm512_shuffle_f32x4(x, y, 0xee)}).v;
    };
    const __m512 low = fold(b[0], b[1]), high = fold(b[2], b[3]);
    return op(VF{_mm512_shuffle_f32x4(low, high, 0x88)}, VF{_mm512_shuffle_f32x4(low, high, 0xdd)});
}

// Two vectors to bf16, side by side.
inline void store_two(bf16* p, VF a, VF b) {
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}

// The softmax of up to 16 queries that goes on from tile to tile.
struct TileSoftmax {
    float* m;          // [16] running maximum of the scores, not yet scaled
    VF* sums;          // [16] sums of p, lane by lane
    float* scores;     // [16][kTileKeys]
    bf16* p;           // [16][kTileKeys]
    float log2_scale;  // of scores, to base 2
    i64 rows;
    i64 num_vectors;          // of 16 keys; even
    const i64* limits;        // [16] keys of this tile that each row sees; null: all
    const float* key_scales;  // [kTileKeys] of int8 keys, else null
    const float* value_scales;

    bool has(i64 vectors) const { return num_vectors == vectors && rows == kTileRows; }
};

// Scores that a row doesn't see become -inf, those of int8 keys get their scales.
inline void finish_scores(const TileSoftmax& t) {
    for (i64 r = 0; r < t.rows && t.key_scales != nullptr; ++r) {
        for (i64 i = 0; i < t.num_vectors * 16; i += 16) {
            float* s = t.scores + r * kTileKeys + i;
            store(s, mul(load(s), load(t.key_scales + i)));
        }
    }
    for (i64 r = 0; r < t.rows && t.limits != nullptr; ++r) {
        for (i64 i = max64(0, t.limits[r]) / 16; i < t.num_vectors; ++i) {
            float* s = t.scores + r * kTileKeys + i * 16;
            store(s, keep_first(load(s), max64(0, t.limits[r] - i * 16), -__builtin_inff()));
        }
    }
}

inline __attribute__((always_inline)) VF largest_of_row(const TileSoftmax& t, i64 r,
                                                        i64 num_vectors) {
    const float* s = t.scores + r * kTileKeys;
    // Of two where one is a NaN, the second is taken: never the NaN of a score.
    VF top = set1(-__builtin_inff());
#pragma GCC unroll 4
    for (i64 i = 0; i < num_vectors; ++i) top = max(load(s + i * 16), top);
    return top;
}

// Largest score of each row.
inline VF largest_scores(const TileSoftmax& t) {
    VF top[kTileRows];
    auto all = [&](i64 num_vectors) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (i64 r = 0; r < kTileRows; ++r) top[r] = largest_of_row(t, r, num_vectors);
        return reduce_rows(top, [](VF a, VF b) { return max(a, b); });
    };
    if (t.has(4)) return all(4);
    if (t.has(2)) return all(2);
    float each[kTileRows] = {};
    for (i64 r = 0; r < t.rows; ++r) each[r] = reduce_max(largest_of_row(t, r, t.num_vectors));
    return load(each);
}

// p of `num_vectors` vectors of one row; returns the row's sums.
template <bool kScaled>
inline __attribute__((always_inline)) VF soften_row(const TileSoftmax& t, i64 r, i64 num_vectors,
                                                    float base, float factor) {
    const float* s = t.scores + r * kTileKeys;
    bf16* p = t.p + r * kTileKeys;
    const VF scale = set1(t.log2_scale), minus = set1(-base);
    VF sum = mul(t.sums[r], set1(factor));
#pragma GCC unroll 2
    for (i64 i = 0; i < num_vectors; i += 2, s += 32, p += 32) {
        VF a = exp2(fma(load(s), scale, minus)), b = exp2(fma(load(s + 16), scale, minus));
        sum = add(add(sum, a), b);
        if (kScaled) {
            a = mul(a, load(t.value_scales + i * 16));
            b = mul(b, load(t.value_scales + i * 16 + 16));
        }
        store_two(p, a, b);
    }
    return sum;
}

// Scores to p, moving the running maximum. Returns alpha, the factor of what came before.
// between() is called after each row where there are few.
template <class F>
inline VF soften_tile(const TileSoftmax& t, F between) {
    finish_scores(t);
    const VF before = load(t.m), scale = set1(t.log2_scale);
    const VF m = max(largest_scores(t), before);
    const VF alpha = exp2(mul(sub(before, m), scale));
    alignas(64) float bases[kTileRows], factors[kTileRows];
    store(t.m, m);
    store(bases, mul(m, scale));
    store(factors, alpha);
    if (t.value_scales == nullptr && (t.has(4) || t.has(2))) {
        for (i64 r = 0; r < kTileRows; ++r) {
            t.sums[r] = t.num_vectors == 4 ? soften_row<false>(t, r, 4, bases[r], factors[r])
                                           : soften_row<false>(t, r, 2, bases[r], factors[r]);
        }
        return alpha;
    }
    for (i64 r = 0; r < t.rows; ++r) {
        between();
        t.sums[r] = t.value_scales == nullptr
                        ? soften_row<false>(t, r, t.num_vectors, bases[r], factors[r])
                        : soften_row<true>(t, r, t.num_vectors, bases[r], factors[r]);
    }
    return alpha;
}

// acc[i] *= alpha[i], where that is not 1.
inline void shrink_rows(VF alpha, i64 rows, i64 dim, float* acc) {
    alignas(64) float factors[kTileRows];
    store(factors, alpha);
    unsigned changed = _mm512_cmp_ps_mask(alpha.v, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    for (changed &= (1u << rows) - 1; changed != 0; changed &= changed - 1) {
        const int r = __builtin_ctz(changed);
        float* row = acc + r * dim;
        const VF factor = set1(factors[r]);
        for (i64 d = 0; d < dim; d += 16) store(row + d, mul(load(row + d), factor));
    }
}

}  // namespace octavo::OCTAVO_LEVEL
#endif
