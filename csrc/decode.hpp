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

// A cell to bf16: of 8 bits [16 pairs][32 columns][2], of 4 bits [32 columns][32 k].
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
template <int NumScales, bool HasMinimum>
void decode_bytes(const std::uint8_t* cell, CellFormat f, bf16* out) {
    __m512 scale[NumScales][4], minimum[4];
    for (int i = 0; i < NumScales; ++i) load_doubled(cell + i * f.vector_bytes(), f.wide, scale[i]);
    if (HasMinimum) load_doubled(cell + NumScales * f.vector_bytes(), f.wide, minimum);
    const std::uint8_t* quants = cell + f.quants_offset();
    const auto sixteen = [&](int pair, int i) __attribute__((always_inline)) {
        const auto* at = reinterpret_cast<const __m128i*>(quants + pair * 2 * kPanel + 16 * i);
        const __m512 number = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        const __m512 by = scale[pair / 8 * (NumScales - 1)][i];
        if (HasMinimum) return _mm512_fmadd_ps(number, by, minimum[i]);
        return _mm512_mul_ps(number, by);
    };
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; ++pair) {
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m512 first = sixteen(pair, i), second = sixteen(pair, i + 1);
            _mm512_storeu_si512(out + pair * 2 * kPanel + 16 * i,
                                (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
    }
}

// A column has 16 values in a cell: a table of them in bf16, in which its quants are looked up.
template <bool HasMinimum>
void decode_nibbles(const std::uint8_t* cell, CellFormat f, bf16* out) {
    alignas(64) float scales[kPanel], minimums[kPanel];
    for (i64 i = 0; i < kPanel; i += VF::W) {
        store(scales + i, load_scales(cell, f.wide, i));
        if (HasMinimum) store(minimums + i, load_scales(cell + f.vector_bytes(), f.wide, i));
    }
    const __m512 counted = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 numbers = _mm512_sub_ps(counted, _mm512_set1_ps(static_cast<float>(f.bias)));
    const __m512i low_bits = _mm512_set1_epi16(15);
    const std::uint8_t* quants = cell + f.quants_offset();
#pragma GCC unroll 2
    for (int four = 0; four < kPanel; four += 4) {
        const __m512i words = _mm512_loadu_si512(quants + 16 * four);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int column = four + i;
            const __m512 scale = _mm512_set1_ps(scales[column]);
            const __m512 values =
                HasMinimum ? _mm512_fmadd_ps(numbers, scale, _mm512_set1_ps(minimums[column]))
                           : _mm512_mul_ps(numbers, scale);
            const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
            const __m512i which = _mm512_and_si512(_mm512_srli_epi16(words, 4 * i), low_bits);
            _mm512_storeu_si512(out + column * kCellK, _mm512_permutexvar_epi16(which, table));
        }
    }
}

inline CellDecoder cell_decoder(CellFormat f) {
    if (f.bits == 4) return f.has_minimum ? decode_nibbles<true> : decode_nibbles<false>;
    if (f.num_scales == 2) return decode_bytes<2, false>;
    return f.has_minimum ? decode_bytes<1, true> : decode_bytes<1, false>;
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
