// Products of int8: activations quantised per 32 values inside a row, weights in cells.
// One output is one chain of float32 over the groups of 32 k, in order:
//   sum = fma(float(dot) * scale, x_scale, sum), and then fma(minimum, x_scale * x_sum, sum)
// Where a column has one scale in all: sum = fma(float(dot), x_scale, sum), and that * scale.
#pragma once

#include "dot8.hpp"
#if defined(__AMX_INT8__)
#include "amx.hpp"
#endif

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

#if defined(__AMX_INT8__)

// Two groups of k at a time: tiles 0-3 are sums, 4 and 5 activations, 6 and 7 weights.
inline void configure8(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(i < 6 ? rows : kCellK / 4);
        config.row_bytes[i] = i == 4 || i == 5 ? kCellK : 64;
    }
    _tile_loadconfig(&config);
}

// Dots of 16 columns and one group (or two, `both`) into dots [2][16 rows][16]. Odd and even calls
// take tiles of their own, so that one's products overlap the other's stores. The instructions take
// their tiles as literal numbers only.
#define OCTAVO_DOTS(low, high)                  \
    _tile_zero(low);                            \
    _tile_loadd(4, a, lda);                     \
    _tile_loadd(6, b, kPanel * 4);              \
    _tile_dpbssd(low, 4, 6);                    \
    if (both) {                                 \
        _tile_zero(high);                       \
        _tile_loadd(5, a + kCellK, lda);        \
        _tile_loadd(7, b + b_step, kPanel * 4); \
        _tile_dpbssd(high, 5, 7);               \
    }                                           \
    _tile_stored(low, dots, 64);                \
    if (both) _tile_stored(high, dots + 16 * 16, 64);

template <bool Odd>
inline __attribute__((always_inline)) void amx_dots(const std::int8_t* a, i64 lda,
                                                    const std::uint8_t* b, i64 b_step, bool both,
                                                    std::int32_t* dots) {
    if constexpr (Odd) {
        OCTAVO_DOTS(2, 3)
    } else {
        OCTAVO_DOTS(0, 1)
    }
}
#undef OCTAVO_DOTS

// A 4-bit cell as int8 [8 quads][32 columns][4].
inline void spread_nibbles(const std::uint8_t* quants, int bias, std::uint8_t* out) {
    for (int i = 0; i < 8; ++i) {
        const Bytes v = load_bytes(quants + 64 * i);
        _mm512_store_si512(out + 64 * i, minus(low_nibbles(v), bias));
        _mm512_store_si512(out + 512 + 64 * i, minus(high_nibbles(v), bias));
    }
}

// R rows (up to 16) of 16 columns over all of K. `quants` has the cells' int8, `cells` their
// scales.
template <int R, bool HasMinimum, bool Wide>
void amx_columns8(const Tile8& t, const CellPanel& panel, const std::uint8_t* quants,
                  i64 quants_stride, i64 column, i64 first_column) {
    const i64 num_groups = t.x.num_groups;
    const CellFormat f = panel.format;
    // One page in all: no store here has the low address bits of a load that must not wait for it.
    alignas(4096) std::int32_t dots[2][2 * 16 * 16];
    VF acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = zero();
    const std::int8_t* a = t.x.quants + t.row * t.x.k_padded;
    const auto multiply = [&](i64 group, auto odd) __attribute__((always_inline)) {
        amx_dots<decltype(odd)::value>(a + group * kCellK, t.x.k_padded,
                                       quants + group * quants_stride + column * 4, quants_stride,
                                       group + 1 < num_groups, dots[decltype(odd)::value]);
    };
    const auto add_group = [&](i64 group, const std::int32_t* dot) __attribute__((always_inline)) {
        const std::uint8_t* cell = panel.data + group * f.bytes();
        const VF scale = load_scales(cell, Wide, column);
        const VF minimum = HasMinimum ? load_scales(cell + f.vector_bytes(), Wide, column) : zero();
        const float* x_scale = t.x.scales + group * t.x.rows + t.row;
        const float* x_sum = t.x.scaled_sums + group * t.x.rows + t.row;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const VF scaled = mul(to_floats(_mm512_load_si512(dot + r * 16)), scale);
            acc[r] = fma(scaled, set1(x_scale[r]), acc[r]);
            if constexpr (HasMinimum) acc[r] = fma(minimum, set1(x_sum[r]), acc[r]);
        }
    };
    const auto add = [&](i64 first, const std::int32_t* now) __attribute__((always_inline)) {
        add_group(first, now);
        if (first + 1 < num_groups) add_group(first + 1, now + 16 * 16);
    };
    multiply(0, std::false_type{});
    for (i64 group = 0; group < num_groups; group += 4) {
        if (group + 2 < num_groups) multiply(group + 2, std::true_type{});
        add(group, dots[0]);
        if (group + 4 < num_groups) multiply(group + 4, std::false_type{});
        if (group + 2 < num_groups) add(group + 2, dots[1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store_columns8(t.out, t.row + r, first_column + column, acc[r]);
}

template <int R>
void amx_rows8(const Tile8& t, i64 rows, const CellPanel& panel, const std::uint8_t* quants,
               i64 quants_stride, i64 first_column) {
    if constexpr (R > 1) {
        if (rows < R) {
            return amx_rows8<R - 1>(t, rows, panel, quants, quants_stride, first_column);
        }
    }
    const CellFormat& f = panel.format;
    for (i64 column = 0; column < kPanel; column += 16) {
        if (f.has_minimum && f.wide) {
            amx_columns8<R, true, true>(t, panel, quants, quants_stride, column, first_column);
        } else if (f.has_minimum) {
            amx_columns8<R, true, false>(t, panel, quants, quants_stride, column, first_column);
        } else {
            amx_columns8<R, false, false>(t, panel, quants, quants_stride, column, first_column);
        }
    }
}

// Rows [begin, end) of one panel. Few rows are done by vectors: the same integers, no tiles to set.
inline void panel_product8(const Activations8& x, const CellPanel& panel, i64 begin, i64 end,
                           const Matrix& out, i64 first_column) {
    if (end - begin <= kRows8) {
        some_rows8<kRows8>(Tile8{x, out, begin}, end - begin, panel, first_column);
        return;
    }
    const CellFormat f = panel.format;
    const std::uint8_t* quants = panel.data + f.quants_offset();
    i64 stride = f.bytes();
    if (f.bits == 4) {
        auto* spread =
            static_cast<std::uint8_t*>(scratch(Scratch::weights, x.num_groups * kCellK * kPanel));
        for (i64 g = 0; g < x.num_groups; ++g) {
            spread_nibbles(quants + g * stride, f.bias, spread + g * kCellK * kPanel);
        }
        quants = spread;
        stride = kCellK * kPanel;
    }
    i64 configured = 0;
    for (i64 row = begin; row < end; row += 16) {
        const i64 rows = min64(16, end - row);
        if (rows != configured) configure8(static_cast<int>(rows));
        configured = rows;
        amx_rows8<16>(Tile8{x, out, row}, rows, panel, quants, stride, first_column);
    }
    _tile_release();
}

#else

inline void panel_product8(const Activations8& x, const CellPanel& panel, i64 begin, i64 end,
                           const Matrix& out, i64 first_column) {
    const i64 num_tiles = ceil_div(end - begin, kRows8);
    for (i64 i = 0; i < num_tiles; ++i) {
        const i64 row = begin + (end - begin) * i / num_tiles;
        const i64 next = begin + (end - begin) * (i + 1) / num_tiles;
        some_rows8<kRows8>(Tile8{x, out, row}, next - row, panel, first_column);
    }
}

#endif

}  // namespace octavo::OCTAVO_LEVEL
