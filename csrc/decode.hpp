// Cells of quantised weights back to numbers: a row for the embedding, and bf16 in the layout of
// panels where they aren't multiplied as int8. A value is first rounded as
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

// A cell to bf16 [16 pairs][32 columns][2].
using CellDecoder = void (*)(const std::uint8_t* cell, CellFormat f, bf16* out);

#if defined(__AVX512BF16__)

// The scales of 32 columns, each twice: lanes are pairs of k.
inline void load_doubled(const std::uint8_t* at, bool wide, __m512 (&out)[4]) {
    const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int i = 0; i < 2; ++i) {
        const VF of_16 = load_scales(at, wide, 16 * i);
        out[2 * i] = _mm512_permutexvar_ps(first, of_16.v);
        out[2 * i + 1] = _mm512_permutexvar_ps(second, of_16.v);
    }
}

// Products of a quant and a scale are exact, so that one rounding is left, ggml's.
template <int Bits, int NumScales, bool HasMinimum>
void decode_cell(const std::uint8_t* cell, CellFormat f, bf16* out) {
    __m512 scale[NumScales][4], minimum[4];
    for (int i = 0; i < NumScales; ++i) load_doubled(cell + i * f.vector_bytes(), f.wide, scale[i]);
    if (HasMinimum) load_doubled(cell + NumScales * f.vector_bytes(), f.wide, minimum);
    if (Bits == 4 && !HasMinimum) {  // exact, too: a bias of 8
        for (int i = 0; i < 4; ++i) minimum[i] = _mm512_mul_ps(scale[0][i], _mm512_set1_ps(-8.0f));
    }
    const std::uint8_t* quants = cell + f.quants_offset();
    const __m512i low_bits = _mm512_set1_epi32(15);
    const auto scaled = [&](__m512i quant, int half, int i) __attribute__((always_inline)) {
        const __m512 number = _mm512_cvtepi32_ps(quant), by = scale[half * (NumScales - 1)][i];
        if (Bits == 4 || HasMinimum) return _mm512_fmadd_ps(number, by, minimum[i]);
        return _mm512_mul_ps(number, by);
    };
    const auto put = [&](int pair, int i, __m512 first, __m512 second)
                         __attribute__((always_inline)) {
                             _mm512_storeu_si512(out + pair * 2 * kPanel + 16 * i,
                                                 (__m512i)_mm512_cvtne2ps_pbh(second, first));
                         };
    const auto sixteen = [&](int pair, int i) __attribute__((always_inline)) {
        const auto* at = reinterpret_cast<const __m128i*>(quants + pair * 2 * kPanel + 16 * i);
        const __m128i bytes = _mm_loadu_si128(at);
        return Bits == 8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
    };
#pragma GCC unroll 2
    for (int pair = 0; pair < 2 * Bits; ++pair) {
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m512i a = sixteen(pair, i), b = sixteen(pair, i + 1);
            if constexpr (Bits == 8) {
                put(pair, i, scaled(a, pair / 8, i), scaled(b, pair / 8, i + 1));
            } else {
                put(pair, i, scaled(_mm512_and_si512(a, low_bits), 0, i),
                    scaled(_mm512_and_si512(b, low_bits), 0, i + 1));
                put(pair + 8, i, scaled(_mm512_srli_epi32(a, 4), 0, i),
                    scaled(_mm512_srli_epi32(b, 4), 0, i + 1));
            }
        }
    }
}

inline CellDecoder cell_decoder(CellFormat f) {
    if (f.num_scales == 2) return decode_cell<8, 2, false>;
    if (f.bits == 8) return f.has_minimum ? decode_cell<8, 1, true> : decode_cell<8, 1, false>;
    return f.has_minimum ? decode_cell<4, 1, true> : decode_cell<4, 1, false>;
}

#else

inline CellDecoder cell_decoder(CellFormat) {
    return [](const std::uint8_t* cell, CellFormat f, bf16* out) {
        float column[kCellK];
        for (i64 c = 0; c < kPanel; ++c) {
            decode_column(CellPanel{cell, f}, c, 0, kCellK, column);
            for (i64 k = 0; k < kCellK; ++k)
                out[k / 2 * 2 * kPanel + 2 * c + k % 2] = to_bf16(column[k]);
        }
    };
}

#endif

// One panel as a bf16 weight of its own, in this thread's scratch memory.
inline PackedWeight decode_panel(const PackedWeight& w, i64 panel) {
    auto* out = static_cast<bf16*>(scratch(Scratch::weights, w.panel_elements() * 2));
    const CellPanel& from = w.cells[panel];
    const CellDecoder decode = cell_decoder(from.format);
    for (i64 cell = 0; cell < w.k_padded / kCellK; ++cell) {
        decode(from.data + cell * from.format.bytes(), from.format, out + cell * kCellK * kPanel);
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
