// Cells of quantised weights back to numbers: a row for the embedding, and whole panels to bf16
// where two scales over 32 k (Q6_K) don't go with int8 dot products. A value is first rounded as
// ggml dequantises it to float32, then to bf16, so such a product has the bits of the widened
// weight's.
#pragma once

#include "dot8.hpp"

namespace octavo::OCTAVO_LEVEL {

inline float cell_scale(const std::uint8_t* at, bool wide, i64 i) {
    if (wide) return reinterpret_cast<const float*>(at)[i];
    return half_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
}

// Values [k0, k0 + count) of one column, dequantised; k0 is a multiple of 32.
inline void decode_column(const CellPanel& panel, i64 column, i64 k0, i64 count, float* out) {
    const CellFormat f = panel.format;
    const std::uint8_t* cell = panel.data + k0 / kCellK * f.bytes();
    const std::uint8_t* minimums = cell + f.num_scales * f.vector_bytes();
    for (i64 k = 0; k < count; ++k) {
        const i64 which = k * f.num_scales / kCellK;
        const std::uint8_t* scales = cell + which * f.vector_bytes();
        float value = static_cast<float>(cell_quant(cell, f, k, column));
        value *=
            f.scales_columns() ? panel.column_scales()[column] : cell_scale(scales, f.wide, column);
        if (f.has_minimum) value += cell_scale(minimums, f.wide, column);
        out[k] = value;
    }
}

// A cell with two scales to bf16 [16 pairs][32 columns][2].
inline void decode_cell(const std::uint8_t* cell, CellFormat f, bf16* out) {
    const auto* quants = reinterpret_cast<const std::int8_t*>(cell + f.quants_offset());
    for (i64 half = 0; half < 2; ++half) {
        float scale[2 * kPanel], value[2 * kPanel];
        for (i64 c = 0; c < kPanel; ++c) {
            scale[2 * c] = scale[2 * c + 1] = cell_scale(cell + half * f.vector_bytes(), f.wide, c);
        }
        for (i64 pair = half * 8; pair < half * 8 + 8; ++pair) {
            const std::int8_t* at = quants + pair * 2 * kPanel;
            for (i64 i = 0; i < 2 * kPanel; ++i) value[i] = static_cast<float>(at[i]) * scale[i];
            bf16* to = out + pair * 2 * kPanel;
            for (i64 i = 0; i < 2 * kPanel; i += VF::W) store(to + i, load(value + i));
        }
    }
}

// One panel as a bf16 weight of its own, in this thread's scratch memory.
inline PackedWeight decode_panel(const PackedWeight& w, i64 panel) {
    auto* out = static_cast<bf16*>(scratch(Scratch::weights, w.panel_elements() * 2));
    const CellPanel& from = w.cells[panel];
    for (i64 cell = 0; cell < w.k_padded / kCellK; ++cell) {
        decode_cell(from.data + cell * from.format.bytes(), from.format,
                    out + cell * kCellK * kPanel);
    }
    return PackedWeight{out, min64(kPanel, w.n - panel * kPanel), w.k, w.k_padded, DType::bf16};
}

// The columns of `out` that panels from `panel` on write.
inline Matrix from_panel(const Matrix& out, i64 panel) {
    Matrix part = out;
    part.cols = out.cols - panel * kPanel;
    part.data = static_cast<char*>(out.data) + panel * kPanel * item_size(out.dtype);
    return part;
}

}  // namespace octavo::OCTAVO_LEVEL
