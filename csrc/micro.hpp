// The micro-kernel that GEMM and attention share: R rows of activations against PN x CV vectors of
// weights. Each accumulator is one chain over K in order, so a row's bits do not depend on R.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

template <class D, int Step, int R, int PN, int CV>
inline __attribute__((always_inline)) void micro_step(const typename D::A* const* rows, i64 lda,
                                                      const typename D::B* b, i64 ldb,
                                                      i64 panel_stride, i64 k2, i64 column,
                                                      VF (&acc)[R][PN * CV]) {
    VF w[PN * CV];
#pragma GCC unroll 8
    for (int c = 0; c < PN * CV; ++c) {
        const i64 at = column + (c % CV) * VF::W;
        w[c] = D::template weights<Step>(D::at(b + (c / CV) * panel_stride, ldb, k2, at), ldb);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const typename D::A* a = rows[r / 3] + (r % 3) * lda;
#pragma GCC unroll 8
        for (int c = 0; c < PN * CV; ++c) acc[r][c] = D::template step<Step>(a, w[c], acc[r][c]);
    }
}

// acc[R][PN * CV] += a[R][2 * num_pairs] . b. Weights may lie in `num_segments` pieces of
// `num_pairs` pairs each; panels beside each other are `panel_stride` elements apart.
template <class D, int R, int PN, int CV>
inline __attribute__((always_inline)) void micro(const typename D::A* a, i64 lda,
                                                 const typename D::B* const* segments,
                                                 i64 num_segments, i64 num_pairs, i64 ldb,
                                                 i64 panel_stride, i64 column,
                                                 VF (&acc)[R][PN * CV]) {
    // One pointer for three rows: twelve of them would not fit the integer registers.
    const typename D::A* rows[(R + 2) / 3];
    for (int r = 0; r < R; r += 3) rows[r / 3] = a + r * lda;
    for (i64 s = 0; s < num_segments; ++s) {
        const typename D::B* b = segments[s];
        for (i64 k2 = 0; k2 < num_pairs; ++k2) {
            micro_step<D, 0, R, PN, CV>(rows, lda, b, ldb, panel_stride, k2, column, acc);
            if constexpr (D::kSteps == 2) {
                micro_step<D, 1, R, PN, CV>(rows, lda, b, ldb, panel_stride, k2, column, acc);
            }
            for (int r = 0; r < R; r += 3) rows[r / 3] += 2;
        }
    }
}

// Calls body with rows as a compile-time constant, 1 <= rows <= kMaxRows.
template <int R>
struct Rows {
    static constexpr int value = R;
};

template <class F, int R = kMaxRows>
inline void with_rows(i64 rows, F& body) {
    if (rows == R) {
        body(Rows<R>{});
    } else if constexpr (R > 1) {
        with_rows<F, R - 1>(rows, body);
    }
}

// Splits `count` rows into the fewest tiles of at most kMaxRows, as even as they come.
template <class F>
inline void for_row_tiles(i64 count, F body) {
    const i64 num_tiles = ceil_div(count, kMaxRows);
    for (i64 i = 0; i < num_tiles; ++i) {
        const i64 begin = count * i / num_tiles, end = count * (i + 1) / num_tiles;
        auto call = [&](auto rows) { body(begin, rows); };
        with_rows(end - begin, call);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
