// Linear layers: packing, the blocked product, and the embedding lookup out of the same panels.
#pragma once

#include "decode.hpp"
#include "gemm8.hpp"
#include "micro.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#include "amx8.hpp"
#include "amx_cells.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {

#if defined(__AMX_BF16__)
constexpr bool kDecodesCells = true;
#else
constexpr bool kDecodesCells = false;
#endif

inline i64 packed_offset(const PackedWeight& w, i64 column, i64 k) {
    return w.dtype == DType::f32 ? k * kPanel + column : (k / 2) * kPanel * 2 + column * 2 + k % 2;
}

template <class T>
void pack_panel(const float* weight, i64 stride, const PackedWeight& w, i64 panel) {
    T* out = static_cast<T*>(w.data) + panel * w.panel_elements();
    const i64 columns = min64(kPanel, w.n - panel * kPanel);
    // Fresh memory is zero already; 64 k at a time keep the written lines in the first cache.
    for (i64 k0 = 0; k0 < w.k; k0 += 64) {
        const i64 k1 = min64(k0 + 64, w.k);
        for (i64 column = 0; column < columns; ++column) {
            const float* row = weight + (panel * kPanel + column) * stride;
            if constexpr (sizeof(T) == 4) {
                for (i64 k = k0; k < k1; ++k) out[k * kPanel + column] = row[k];
            } else {
                for (i64 k = k0; k < k1; ++k) out[packed_offset(w, column, k)] = to_bf16(row[k]);
            }
        }
    }
}

inline void pack(const float* weight, i64 stride, PackedWeight w) {
    parallel_for(w.num_panels(), 1, [&](i64 panel) {
        if (w.dtype == DType::f32) {
            pack_panel<float>(weight, stride, w, panel);
        } else {
            pack_panel<bf16>(weight, stride, w, panel);
        }
    });
}

inline void embedding(const std::int32_t* ids, PackedWeight w, Matrix out) {
    parallel_for(out.rows, row_grain(4 * out.cols), [&](i64 t) {
        const i64 panel = ids[t] / kPanel, column = ids[t] % kPanel;
        float* row = out.row<float>(t);
        if (w.cells != nullptr) {
            for (i64 k = 0; k < w.k; k += kCellK) {
                decode_column(w.cells[panel], column, k, min64(kCellK, w.k - k), row + k);
            }
            // As the product reads them.
            if (kDecodesCells && !w.cells[panel].format.scales_columns()) {
                for (i64 k = 0; k < w.k; ++k) row[k] = to_float(to_bf16(row[k]));
            }
        } else if (w.dtype == DType::f32) {
            const float* in = static_cast<const float*>(w.data) + panel * w.panel_elements();
            for (i64 k = 0; k < w.k; ++k) row[k] = in[packed_offset(w, column, k)];
        } else {
            const bf16* in = static_cast<const bf16*>(w.data) + panel * w.panel_elements();
            for (i64 k = 0; k < w.k; ++k) row[k] = to_float(in[packed_offset(w, column, k)]);
        }
    });
}

// x as rows of T with a zero tail up to k_padded: in place where that is what it is, else a copy.
template <class T>
struct Activations {
    const T* data;
    i64 stride;
};

template <class T>
Activations<T> activations(const Matrix& x, i64 k_needed, i64 k_padded) {
    const bool same = (x.dtype == DType::f32) == (sizeof(T) == 4);
    if (same && x.cols == k_needed) return {x.row<T>(0), x.stride};
    T* copy = static_cast<T*>(
        scratch(Scratch::activations, x.rows * k_padded * static_cast<i64>(sizeof(T))));
    with_type(x.dtype, [&](auto* type) {
        using X = std::remove_pointer_t<decltype(type)>;
        parallel_for(x.rows, row_grain(x.cols), [&](i64 r) {
            const X* in = x.row<X>(r);
            T* out = copy + r * k_padded;
            i64 k = 0;
            for (; k + VF::W <= x.cols; k += VF::W) store(out + k, load(in + k));
            if (k < x.cols) store_n(out + k, load_n(in + k, x.cols - k), x.cols - k);
            for (k = x.cols; k < k_padded; ++k) out[k] = T{};
        });
    });
    return {copy, k_padded};
}

inline void store_columns(const Matrix& out, i64 row, i64 column, VF value) {
    const i64 count = min64(VF::W, out.cols - column);
    if (count <= 0) return;
    if (out.dtype == DType::f32) {
        float* at = out.row<float>(row) + column;
        count == VF::W ? store(at, value) : store_n(at, value, count);
    } else {
        bf16* at = out.row<bf16>(row) + column;
        count == VF::W ? store(at, value) : store_n(at, value, count);
    }
}

// How a product is cut into tasks: blocks of rows by chunks of panels.
struct Cut {
    i64 block_rows, num_blocks, chunk_panels;
};

template <class S>
Cut cut(i64 m, const PackedWeight& w, i64 max_block_rows, i64 panel_multiple) {
    Cut c;
    c.num_blocks = ceil_div(m, max_block_rows);
    c.block_rows = ceil_div(m, c.num_blocks);
    // Chunks of half a megabyte of weights at most (so that they stay in the second cache), and
    // enough of them to share out evenly; at least 2^18 multiply-adds, below which handing over
    // costs more than it brings.
    const i64 panels = w.num_panels() / S::kTogether, size = w.panel_elements() * S::kTogether;
    const i64 by_size = max64(1, (i64{1} << 19) / (size * item_size(w.dtype)));
    const i64 by_share = max64(1, panels * c.num_blocks / (i64{6} * num_threads()));
    const i64 least = ceil_div(i64{1} << 18, c.block_rows * size);
    c.chunk_panels = round_up(max64(min64(by_size, by_share), least), panel_multiple);
    if (num_threads() == 1) c.chunk_panels = round_up(by_size, panel_multiple);
    return c;
}

// Rows [row, end) against panels [first, last), and after those panel `next`, where that is known.
struct Piece {
    i64 row, end, first, last, next = -1;
};

// Where a product goes. A sink takes it in pieces, as many of equal parts of the weight together as
// it says. It has each computed, by product(piece, matrix), into a matrix of its choice, of which
// only the piece's rows and columns are written: here into the one that is the whole product.
struct WholeMatrix {
    static constexpr i64 kTogether = 1;
    const Matrix& out;

    i64 most_panels(i64) const { return i64{1} << 32; }  // of a piece of so many rows
    template <class F>
    void take(const Piece& p, F product) const {
        product(p, out);
    }
};

// Shares out all pieces (those of the first part of the weight, where there are several).
template <class S, class F>
void for_each_piece(const Cut& c, i64 rows, const PackedWeight& w, const S& sink, F product) {
    const i64 panels = w.num_panels() / S::kTogether;
    const i64 chunk_panels = min64(c.chunk_panels, sink.most_panels(c.block_rows));
    const i64 num_chunks = ceil_div(panels, chunk_panels);
    parallel_for(c.num_blocks * num_chunks, 1, [&](i64 task) {
        const i64 row = task / num_chunks * c.block_rows;
        const i64 first = task % num_chunks * chunk_panels;
        sink.take(
            Piece{row, min64(row + c.block_rows, rows), first, min64(first + chunk_panels, panels)},
            product);
    });
}

template <class D>
struct Product {
    Activations<typename D::A> x;
    PackedWeight w;
    Matrix out;
    i64 num_pairs;
};

template <class D, int R, int PN, int CV>
void product_tile(const Product<D>& p, i64 row, i64 panel, i64 column) {
    VF acc[R][PN * CV];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < PN * CV; ++c) acc[r][c] = zero();
    }
    const i64 panel_stride = p.w.panel_elements();
    const auto* b = static_cast<const typename D::B*>(p.w.data) + panel * panel_stride;
    micro<D, R, PN, CV>(p.x.data + row * p.x.stride, p.x.stride, &b, 1, p.num_pairs, kPanel,
                        panel_stride, column, acc);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < PN * CV; ++c) {
            const i64 at = (panel + c / CV) * kPanel + column + (c % CV) * VF::W;
            store_columns(p.out, row + r, at, acc[r][c]);
        }
    }
}

template <class D>
void product_rows(const Product<D>& p, i64 row, i64 count, i64 panel, i64 num_panels) {
    for_row_tiles(count, [&](i64 offset, auto rows) {
        constexpr int R = decltype(rows)::value, CV = vecs_of(R), PN = panels_of(R);
        for (i64 column = 0; column < kPanel; column += CV * VF::W) {
            if (num_panels == PN) {
                product_tile<D, R, PN, CV>(p, row + offset, panel, column);
            } else {
                for (i64 i = 0; i < num_panels; ++i) {
                    product_tile<D, R, 1, CV>(p, row + offset, panel + i, column);
                }
            }
        }
    });
}

template <class D, class S>
void linear_as(const Matrix& x, const PackedWeight& w, const S& sink) {
    const auto a = activations<typename D::A>(x, round_up(w.k, 2), w.k_padded);
    // A block of rows stays in the second cache while panels pass by.
    const i64 row_bytes = w.k_padded * static_cast<i64>(sizeof(typename D::A));
    const i64 max_rows = round_up(max64(kMaxRows, (i64{768} << 10) / row_bytes), kMaxRows);
    const i64 together = panels_of(static_cast<int>(min64(x.rows, kMaxRows)));
    const Cut c = cut<S>(x.rows, w, max_rows, together);
    for_each_piece(c, x.rows, w, sink, [&](const Piece& piece, const Matrix& out) {
        const Product<D> p{a, w, out, ceil_div(w.k, 2)};
        for (i64 panel = piece.first; panel < piece.last; panel += together) {
            product_rows(p, piece.row, piece.end - piece.row, panel,
                         min64(together, piece.last - panel));
        }
    });
}

#if defined(__AMX_BF16__)
template <class S>
void linear_amx(const Matrix& x, const PackedWeight& w, const S& sink) {
    const Activations<bf16> a = activations<bf16>(x, w.k_padded, w.k_padded);
    const i64 max_rows = round_up(max64(32, (i64{1} << 19) / (w.k_padded * 2)), 32);
    const i64 together = x.rows == 1 ? kRowPanels : x.rows <= 16 ? 2 : 1;
    const Cut c = cut<S>(x.rows, w, max_rows, together);
    for_each_piece(c, x.rows, w, sink, [&](const Piece& p, const Matrix& out) {
        amx_product(a.data, a.stride, p.row, p.end, w, p.first, p.last, out);
    });
}

// Stored formats. A block of rows stays in the second cache; decoding for each costs little.
template <class S>
void linear_cells_amx(const Matrix& x, const PackedWeight& w, const S& sink) {
    const Activations<bf16> a = activations<bf16>(x, w.k_padded, w.k_padded);
    bool nibbles = false;
    for (i64 panel = 0; panel < w.num_panels(); ++panel) nibbles |= w.cells[panel].format.bits == 4;
    PairedRows paired{};
    if (nibbles) paired = pair_rows(a.data, a.stride, x.rows, w.k_padded);
    const i64 max_rows = round_up(max64(32, (i64{1} << 20) / (w.k_padded * 2)), 32);
    Cut c = cut<S>(x.rows, w, max_rows, 1);
    c.block_rows = round_up(c.block_rows, kPairedRows);
    for_each_piece(c, x.rows, w, sink, [&](const Piece& p, const Matrix& out) {
        amx_cells_product(a.data, a.stride, paired, p.row, p.end, w, p.first, p.last, out);
    });
}

// int8 of our own: activations in two parts, sums over all of K. Each panel meets the rows of a
// block, which stay in the second cache, while it is near.
template <class S>
void linear_parts(const Matrix& x, const PackedWeight& w, const S& sink) {
    const ActivationParts a = split_rows(x, w.k_padded);
    const i64 max_rows =
        max64(kPartRows, (i64{3} << 18) / (2 * w.k_padded) / kPartRows * kPartRows);
    Cut c = cut<S>(x.rows, w, max_rows, 1);
    c.block_rows = round_up(c.block_rows, kPartRows);
    for_each_piece(c, x.rows, w, sink, [&](const Piece& p, const Matrix& out) {
        parts_product(a, p.row, p.end, w, p.first, p.last, p.next, out);
    });
}

template <class S>
void linear_cells(const Matrix& x, const PackedWeight& w, const S& sink) {
    w.cells[0].format.scales_columns() ? linear_parts(x, w, sink) : linear_cells_amx(x, w, sink);
}
#else

// Panels that multiply as int8, and others as bf16: decoding those is dear, so all rows meet them
// at once, and each is a task of its own.
template <class S>
void linear_cells(const Matrix& x, const PackedWeight& w, const S& sink) {
    i64 num_int8 = 0;
    for (i64 panel = 0; panel < w.num_panels(); ++panel) {
        num_int8 += w.cells[panel].format.multiplies_as_int8();
    }
    Activations8 quants{};
    Activations<DotPacked::A> plain{};
    Cut c = cut<S>(x.rows, w, round_up(max64(16, (i64{1} << 19) / w.k_padded), 16), 1);
    if (num_int8 > 0) quants = quantise_rows(x, w.k_padded);
    if (num_int8 < w.num_panels()) {
        plain = activations<DotPacked::A>(x, round_up(w.k, 2), w.k_padded);
        c = {x.rows, 1, 1};
    }
    for_each_piece(c, x.rows, w, sink, [&](const Piece& piece, const Matrix& out) {
        for (i64 panel = piece.first; panel < piece.last; ++panel) {
            if (w.cells[panel].format.multiplies_as_int8()) {
                panel_product8(quants, w.cells[panel], piece.row, piece.end, out, panel * kPanel);
            } else {
                const Product<DotPacked> p{plain, decode_panel(w, panel), from_panel(out, panel),
                                           ceil_div(w.k, 2)};
                product_rows(p, piece.row, piece.end - piece.row, 0, 1);
            }
        }
    });
}
#endif

template <class S>
void linear_into(const Matrix& x, const PackedWeight& w, const S& sink) {
    if (x.rows == 0) return;
    if (w.cells != nullptr) {
        linear_cells(x, w, sink);
        return;
    }
    if (w.dtype == DType::f32) {
        linear_as<DotF32>(x, w, sink);
        return;
    }
#if defined(__AMX_BF16__)
    linear_amx(x, w, sink);
#else
    linear_as<DotPacked>(x, w, sink);
#endif
}

inline void linear(Matrix x, PackedWeight w, Matrix out) { linear_into(x, w, WholeMatrix{out}); }

}  // namespace octavo::OCTAVO_LEVEL
