// The MLP's first half, silu(gate(x)) * up(x): a piece of both products goes to scratch memory, and
// on from there while it is in the second cache.
#pragma once

#include "elementwise.hpp"
#include "gemm.hpp"

namespace octavo::OCTAVO_LEVEL {

// A sink (gemm.hpp) for a weight whose first half is gate and whose second is up, of whole panels.
struct Gated {
    static constexpr i64 kTogether = 2;
    const Matrix& out;  // [rows, columns of a half]

    // A quarter of a megabyte, beside twice as much of weights.
    i64 most_panels(i64 rows) const {
        return max64(1, (i64{1} << 18) / (rows * kTogether * kPanel * item_size(out.dtype)));
    }

    // Rows [gate, up], apart by no power of two. Rows and columns count as in the whole product.
    template <class F>
    void take(const Piece& p, F product) const {
        const i64 rows = p.end - p.row, first = p.first * kPanel, size = item_size(out.dtype);
        const i64 half = out.cols / kPanel, width = (p.last - p.first) * kPanel;
        const i64 stride = 2 * width + 64 / size;
        auto* memory = static_cast<char*>(scratch(Scratch::piece, rows * stride * size));
        char* at = memory - (p.row * stride + first) * size;
        const Matrix gate{at, rows, first + width, stride, out.dtype};
        const Matrix up{at + (width - out.cols) * size, rows, out.cols + first + width, stride,
                        out.dtype};
        product(Piece{p.row, p.end, p.first, p.last, half + p.first}, gate);
        product(Piece{p.row, p.end, half + p.first, half + p.last}, up);
        with_type(out.dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            for (i64 r = p.row; r < p.end; ++r) {
                const T* row = gate.row<T>(r) + first;
                silu_and_mul_row(row, row + width, out.row<T>(r) + first, width);
            }
        });
    }
};

// gate_up_proj(x), rounded to the type of `out`, and of that silu(gate) * up.
inline void linear_silu_and_mul(Matrix x, PackedWeight w, Matrix out) {
    if (out.cols % kPanel == 0) return linear_into(x, w, Gated{out});
    // Gate and up meet inside a panel.
    void* memory = scratch(Scratch::piece, out.rows * w.n * item_size(out.dtype));
    const Matrix gate_up{memory, out.rows, w.n, w.n, out.dtype};
    linear(x, w, gate_up);
    silu_and_mul(gate_up, out);
}

}  // namespace octavo::OCTAVO_LEVEL
