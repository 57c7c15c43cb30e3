// Products of int8: activations quantised per 32 values inside a row, weights in cells.
// One output is one chain of float32 over the groups of 32 k, in order:
//   sum = fma(float(dot) * scale, x_scale, sum), and then fma(minimum, x_scale * x_sum, sum)
// Where a column has one scale in all: sum = fma(float(dot), x_scale, sum), and that * scale.
#pragma once

#include "dot8.hpp"

namespace octavo::OCTAVO_LEVEL {

struct Activations8 {
    std::int8_t* quants;  // [rows][k_padded]
    std::int32_t* sums;   // [num_groups][rows]: of the quants
    float* scales;        // [num_groups][rows]
    float* scaled_sums;   // [num_groups][rows]: scales * sums
    i64 rows, k_padded, num_groups;
};

// 32 values: scale = largest / 127, quants by the nearest whole number. A value that is no number
// makes the scale one that is none.
template <class X>
void quantise_group(const X* x, i64 count, const Activations8& a, i64 row, i64 group) {
    alignas(64) float values[kCellK] = {};
    VF largest = zero(), poison = zero();
    for (i64 k = 0; k < count; k += VF::W) {
        const VF v = k + VF::W <= count ? load(x + k) : load_n(x + k, count - k);
        store(values + k, v);
        largest = max(max(v, sub(zero(), v)), largest);
        poison = fma(v, zero(), poison);
    }
    const float top = reduce_max(largest);
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    for (i64 k = 0; k < kCellK; k += VF::W) {
        const VF q = round(mul(load(values + k), set1(inverse)));
        store(values + k, min(max(q, set1(-127.0f)), set1(127.0f)));
    }
    std::int8_t* out = a.quants + row * a.k_padded + group * kCellK;
    std::int32_t sum = 0;
    for (i64 k = 0; k < kCellK; ++k) {
        const auto q = static_cast<std::int32_t>(values[k]);
        out[k] = static_cast<std::int8_t>(q);
        sum += q;
    }
    const i64 at = group * a.rows + row;
    const float scale = top / 127.0f + reduce_add(poison);
    a.sums[at] = sum;
    a.scales[at] = scale;
    a.scaled_sums[at] = scale * static_cast<float>(sum);
}

inline Activations8 quantise_rows(const Matrix& x, i64 k_padded) {
    Activations8 a{};
    a.rows = x.rows;
    a.k_padded = k_padded;
    a.num_groups = k_padded / kCellK;
    const i64 cells = x.rows * a.num_groups;
    auto* memory =
        static_cast<char*>(scratch(Scratch::activations8, x.rows * k_padded + 12 * cells));
    a.quants = reinterpret_cast<std::int8_t*>(memory);
    a.sums = reinterpret_cast<std::int32_t*>(memory + x.rows * k_padded);
    a.scales = reinterpret_cast<float*>(a.sums + cells);
    a.scaled_sums = a.scales + cells;
    with_type(x.dtype, [&](auto* type) {
        using X = std::remove_pointer_t<decltype(type)>;
        parallel_for(x.rows, row_grain(4 * x.cols), [&](i64 r) {
            for (i64 g = 0; g < a.num_groups; ++g) {
                const i64 count = min64(kCellK, x.cols - g * kCellK);
                quantise_group(x.row<X>(r) + g * kCellK, count, a, r, g);
            }
        });
    });
    return a;
}

inline void store_columns8(const Matrix& out, i64 row, i64 column, VF value) {
    const i64 count = min64(VF::W, out.cols - column);
    if (count <= 0) return;
    with_type(out.dtype, [&](auto* type) {
        using O = std::remove_pointer_t<decltype(type)>;
        O* at = out.row<O>(row) + column;
        count == VF::W ? store(at, value) : store_n(at, value, count);
    });
}

struct Tile8 {
    const Activations8& x;
    const Matrix& out;
    i64 row;  // of x and out
};

inline std::int32_t quad_at(const std::int8_t* at) {
    std::int32_t quad;
    std::memcpy(&quad, at, 4);
    return quad;
}

// R rows of one cell, CV vectors of columns: acc += the dots of 32 k, scaled.
template <int R, int CV, int Bits, int NumScales, bool HasMinimum>
inline __attribute__((always_inline)) void cell_step(const Tile8& t, const std::uint8_t* cell,
                                                     CellFormat f, i64 group, i64 column,
                                                     VF (&acc)[R][CV]) {
    const std::uint8_t* quants = cell + f.quants_offset() + column * 4;
    const std::int8_t* x = t.x.quants + t.row * t.x.k_padded + group * kCellK;
    const i64 at = group * t.x.rows + t.row;
    Ints dots[R][CV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int c = 0; c < CV; ++c) dots[r][c] = start(t.x.sums[at + r]);
    }
    const auto multiply = [&](const Bytes(&w)[CV], i64 quad) __attribute__((always_inline)) {
        Weights8 weights[CV];
        for (int c = 0; c < CV; ++c) weights[c] = prepare(w[c]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const std::int32_t four = quad_at(x + r * t.x.k_padded + quad * 4);
#pragma GCC unroll 2
            for (int c = 0; c < CV; ++c) dots[r][c] = dot4(dots[r][c], weights[c], four);
        }
    };
    for (i64 quad = 0; quad < Bits; ++quad) {
        Bytes w[CV], high[CV];
        for (int c = 0; c < CV; ++c) {
            w[c] = load_bytes(quants + quad * 4 * kPanel + c * 4 * VF::W);
            if constexpr (Bits == 4) {
                high[c] = minus(high_nibbles(w[c]), f.bias);
                w[c] = minus(low_nibbles(w[c]), f.bias);
            }
        }
        multiply(w, quad);
        if constexpr (Bits == 4) multiply(high, quad + 4);
    }
#pragma GCC unroll 2
    for (int c = 0; c < CV; ++c) {
        const i64 first = column + c * VF::W;
        const VF scale = NumScales > 0 ? load_scales(cell, f.wide, first) : zero();
        const VF minimum =
            HasMinimum ? load_scales(cell + f.vector_bytes(), f.wide, first) : zero();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const VF dot = to_floats(dots[r][c]);
            const VF scaled = NumScales > 0 ? mul(dot, scale) : dot;
            acc[r][c] = fma(scaled, set1(t.x.scales[at + r]), acc[r][c]);
            if constexpr (HasMinimum) {
                acc[r][c] = fma(minimum, set1(t.x.scaled_sums[at + r]), acc[r][c]);
            }
        }
    }
}

template <int R, int Bits, int NumScales, bool HasMinimum>
void panel_rows8(const Tile8& t, const CellPanel& panel, i64 first_column) {
    constexpr int CV = 2;
    for (i64 column = 0; column < kPanel; column += CV * VF::W) {
        VF acc[R][CV];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < CV; ++c) acc[r][c] = zero();
        }
        const std::uint8_t* cell = panel.data;
        for (i64 group = 0; group < t.x.num_groups; ++group) {
            cell_step<R, CV, Bits, NumScales, HasMinimum>(t, cell, panel.format, group, column,
                                                          acc);
            cell += panel.format.bytes();
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < CV; ++c) {
                const i64 at = column + c * VF::W;
                const VF sum =
                    NumScales > 0 ? acc[r][c] : mul(acc[r][c], load(panel.column_scales() + at));
                store_columns8(t.out, t.row + r, first_column + at, sum);
            }
        }
    }
}

// Calls panel_rows8 with rows and format as constants.
template <int R>
void some_rows8(const Tile8& t, i64 rows, const CellPanel& panel, i64 first_column) {
    if constexpr (R > 1) {
        if (rows < R) return some_rows8<R - 1>(t, rows, panel, first_column);
    }
    const CellFormat& f = panel.format;
    if (f.scales_columns()) {
        panel_rows8<R, 8, 0, false>(t, panel, first_column);
    } else if (f.bits == 8) {
        f.has_minimum ? panel_rows8<R, 8, 1, true>(t, panel, first_column)
                      : panel_rows8<R, 8, 1, false>(t, panel, first_column);
    } else {
        f.has_minimum ? panel_rows8<R, 4, 1, true>(t, panel, first_column)
                      : panel_rows8<R, 4, 1, false>(t, panel, first_column);
    }
}

// Rows [begin, end) of one panel.
inline void panel_product8(const Activations8& x, const CellPanel& panel, i64 begin, i64 end,
                           const Matrix& out, i64 first_column) {
    const i64 num_tiles = ceil_div(end - begin, kRows8);
    for (i64 i = 0; i < num_tiles; ++i) {
        const i64 row = begin + (end - begin) * i / num_tiles;
        const i64 next = begin + (end - begin) * (i + 1) / num_tiles;
        some_rows8<kRows8>(Tile8{x, out, row}, next - row, panel, first_column);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
