// Products of int8: activations quantised per 32 values inside a row, weights in cells.
// One output is one chain of float32 over the groups of 32 k, in order:
//   sum = fma(float(dot) * scale, x_scale, sum), and then fma(minimum, x_scale * x_sum, sum)
#pragma once

#include "dot8.hpp"
#if defined(__AMX_INT8__)
#include "amx.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {

struct Activations8 {
    std::int8_t* quants;  // [rows][k_padded]
    std::int32_t* sums;   // [rows][num_groups]: of the quants
    float* scales;        // [rows][num_groups]
    float* scaled_sums;   // [rows][num_groups]: scales * sums
    i64 k_padded, num_groups;
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
    const i64 at = row * a.num_groups + group;
    const float scale = top / 127.0f + reduce_add(poison);
    a.sums[at] = sum;
    a.scales[at] = scale;
    a.scaled_sums[at] = scale * static_cast<float>(sum);
}

inline Activations8 quantise_rows(const Matrix& x, i64 k_padded) {
    Activations8 a{};
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
template <int R, int CV, int Bits, bool HasMinimum>
inline __attribute__((always_inline)) void cell_step(const Tile8& t, const std::uint8_t* cell,
                                                     CellFormat f, i64 group, i64 column,
                                                     VF (&acc)[R][CV]) {
    const std::uint8_t* quants = cell + f.quants_offset() + column * 4;
    const std::int8_t* x = t.x.quants + t.row * t.x.k_padded + group * kCellK;
    const i64 at = t.row * t.x.num_groups + group;
    Ints dots[R][CV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int c = 0; c < CV; ++c) dots[r][c] = start(t.x.sums[at + r * t.x.num_groups]);
    }
    const auto multiply = [&](const Bytes(&w)[CV], i64 quad) {
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
        const VF scale = load_scales(cell, f.wide, first);
        const VF minimum =
            HasMinimum ? load_scales(cell + f.vector_bytes(), f.wide, first) : zero();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const i64 group_at = at + r * t.x.num_groups;
            const VF scaled = mul(to_floats(dots[r][c]), scale);
            acc[r][c] = fma(scaled, set1(t.x.scales[group_at]), acc[r][c]);
            if constexpr (HasMinimum) {
                acc[r][c] = fma(minimum, set1(t.x.scaled_sums[group_at]), acc[r][c]);
            }
        }
    }
}

template <int R, int Bits, bool HasMinimum>
void panel_rows8(const Tile8& t, const CellPanel& panel, i64 first_column) {
    constexpr int CV = 2;
    for (i64 column = 0; column < kPanel; column += CV * VF::W) {
        VF acc[R][CV];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < CV; ++c) acc[r][c] = zero();
        }
        const std::uint8_t* cell = panel.data;
        for (i64 group = 0; group < t.x.num_groups; ++group) {
            cell_step<R, CV, Bits, HasMinimum>(t, cell, panel.format, group, column, acc);
            cell += panel.format.bytes();
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < CV; ++c) {
                store_columns8(t.out, t.row + r, first_column + column + c * VF::W, acc[r][c]);
            }
        }
    }
}

// Calls panel_rows8 with rows, bits and minimum as constants.
template <int R>
void some_rows8(const Tile8& t, i64 rows, const CellPanel& panel, i64 first_column) {
    if constexpr (R > 1) {
        if (rows < R) return some_rows8<R - 1>(t, rows, panel, first_column);
    }
    const CellFormat& f = panel.format;
    if (f.bits == 8) {
        f.has_minimum ? panel_rows8<R, 8, true>(t, panel, first_column)
                      : panel_rows8<R, 8, false>(t, panel, first_column);
    } else {
        f.has_minimum ? panel_rows8<R, 4, true>(t, panel, first_column)
                      : panel_rows8<R, 4, false>(t, panel, first_column);
    }
}

#if defined(__AMX_INT8__)

// Four groups of k at a time: tiles 0-3 are their sums, 4 and 5 activations, 6 and 7 weights.
inline void configure8(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(i < 6 ? rows : kCellK / 4);
        config.row_bytes[i] = i == 4 || i == 5 ? kCellK : 64;
    }
    _tile_loadconfig(&config);
}

// Dots of 4 groups (or of `count`, the rest) of 16 columns into dots [4][16 rows][16].
inline __attribute__((always_inline)) void amx_dots(const std::int8_t* a, i64 lda,
                                                    const std::uint8_t* const (&b)[4], i64 ldb,
                                                    i64 count, std::int32_t* dots) {
#define OCTAVO_GROUP(sum, rows_tile, weights_tile, index)              \
    if (index < count) {                                               \
        _tile_zero(sum);                                               \
        _tile_loadd(rows_tile, a + index * kCellK, lda);               \
        _tile_loadd(weights_tile, b[index], ldb);                      \
        _tile_dpbssd(sum, rows_tile, weights_tile);                    \
        _tile_stored(sum, dots + index * 16 * 16, 64);                 \
    }
    OCTAVO_GROUP(0, 4, 6, 0)
    OCTAVO_GROUP(1, 5, 7, 1)
    OCTAVO_GROUP(2, 4, 6, 2)
    OCTAVO_GROUP(3, 5, 7, 3)
#undef OCTAVO_GROUP
}

// A 4-bit cell as int8 [8 quads][32 columns][4].
inline void spread_nibbles(const std::uint8_t* quants, int bias, std::uint8_t* out) {
    for (int i = 0; i < 8; ++i) {
        const Bytes v = load_bytes(quants + 64 * i);
        _mm512_store_si512(out + 64 * i, minus(low_nibbles(v), bias));
        _mm512_store_si512(out + 512 + 64 * i, minus(high_nibbles(v), bias));
    }
}

// R rows (up to 16) of 16 columns over all of K. `quants` has the cells' int8, `cells` their scales.
template <int R, bool HasMinimum>
void amx_columns8(const Tile8& t, const CellPanel& panel, const std::uint8_t* quants,
                  i64 quants_stride, i64 column, i64 first_column) {
    const i64 num_groups = t.x.num_groups;
    const CellFormat f = panel.format;
    alignas(64) std::int32_t dots[2][4 * 16 * 16];
    VF acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = zero();
    const auto multiply = [&](i64 group, std::int32_t* to) {
        const std::uint8_t* b[4];
        for (i64 i = 0; i < 4; ++i) b[i] = quants + (group + i) * quants_stride + column * 4;
        amx_dots(t.x.quants + t.row * t.x.k_padded + group * kCellK, t.x.k_padded, b, kPanel * 4,
                 num_groups - group, to);
    };
    multiply(0, dots[0]);
    for (i64 first = 0; first < num_groups; first += 4) {
        const std::int32_t* now = dots[first / 4 % 2];
        if (first + 4 < num_groups) multiply(first + 4, dots[(first / 4 + 1) % 2]);
        for (i64 group = first; group < min64(first + 4, num_groups); ++group) {
            const std::uint8_t* cell = panel.data + group * f.bytes();
            const VF scale = load_scales(cell, f.wide, column);
            const VF minimum =
                HasMinimum ? load_scales(cell + f.vector_bytes(), f.wide, column) : zero();
            const float* x_scale = t.x.scales + t.row * num_groups + group;
            const float* x_sum = t.x.scaled_sums + t.row * num_groups + group;
            const std::int32_t* dot = now + (group - first) * 16 * 16;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const VF scaled = mul(to_floats(_mm512_load_si512(dot + r * 16)), scale);
                acc[r] = fma(scaled, set1(x_scale[r * num_groups]), acc[r]);
                if constexpr (HasMinimum) {
                    acc[r] = fma(minimum, set1(x_sum[r * num_groups]), acc[r]);
                }
            }
        }
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
    for (i64 column = 0; column < kPanel; column += 16) {
        if (panel.format.has_minimum) {
            amx_columns8<R, true>(t, panel, quants, quants_stride, column, first_column);
        } else {
            amx_columns8<R, false>(t, panel, quants, quants_stride, column, first_column);
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
        auto* spread = static_cast<std::uint8_t*>(
            scratch(Scratch::weights, x.num_groups * kCellK * kPanel));
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
