// Cells of quantised weights to bf16 panels, in registers and the first cache. A value is rounded as
// ggml dequantises it to float32 (a product, then a sum) and then to bf16: so a weight kept
// quantised and the same weight widened at load give the same bits.
#pragma once

#include "quantised.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kCellK = 32;
constexpr i64 kCellElements = kCellK * kPanel;

inline float cell_scale(const std::uint8_t* at, bool wide, i64 i) {
    if (wide) return reinterpret_cast<const float*>(at)[i];
    return half_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
}

inline int cell_quant(const std::uint8_t* cell, CellFormat f, i64 k, i64 column) {
    const std::uint8_t* quants = cell + f.quants_offset();
    if (f.bits == 8) return static_cast<std::int8_t>(quants[k / 2 * 64 + column * 2 + k % 2]);
    const i64 within = column % 16;
    const int byte = quants[k / 2 * 32 + column / 16 * 16 + within % 8 * 2 + k % 2];
    return (within < 8 ? byte & 15 : byte >> 4) - f.bias;
}

// One column of one cell, as float32 of bf16: the embedding's way.
inline void decode_column(const std::uint8_t* cell, CellFormat f, i64 column, i64 count,
                          float* out) {
    const std::uint8_t* minimums = cell + f.num_scales * f.vector_bytes();
    for (i64 k = 0; k < count; ++k) {
        const i64 which = k * f.num_scales / kCellK;
        const std::uint8_t* scales = cell + which * f.vector_bytes();
        float value = static_cast<float>(cell_quant(cell, f, k, column));
        value *= cell_scale(scales, f.wide, column);
        if (f.has_minimum) value += cell_scale(minimums, f.wide, column);
        out[k] = to_float(to_bf16(value));
    }
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

// 32 scales, each twice: lane 2c and 2c + 1 of the 4 vectors belong to column c.
inline void load_scales(const std::uint8_t* at, bool wide, __m512 (&out)[4]) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < 2; ++i) {
        const __m512 columns =
            wide ? _mm512_loadu_ps(at + i * 64)
                 : _mm512_cvtph_ps(
                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + i * 32)));
        out[2 * i] = _mm512_permutexvar_ps(low, columns);
        out[2 * i + 1] = _mm512_permutexvar_ps(high, columns);
    }
}

// Two vectors of columns, pairs of k side by side, as 32 bf16.
inline void store_pairs(bf16* out, __m512 low, __m512 high) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    _mm512_store_si512(out, (__m512i)both);
#else
    store(out, VF{low});
    store(out + 16, VF{high});
#endif
}

template <int Bits, bool HasMinimum>
inline __attribute__((always_inline)) void decode_pairs(const std::uint8_t* quants,
                                                        const __m512 (&scale)[4],
                                                        const __m512 (&minimum)[4], __m512 table,
                                                        i64 num_pairs, bf16* out) {
    for (i64 pair = 0; pair < num_pairs; ++pair) {
        __m512 value[4];
        if constexpr (Bits == 8) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const auto* at = reinterpret_cast<const __m128i*>(quants + pair * 64 + i * 16);
                value[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
            }
        } else {
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const auto* at = reinterpret_cast<const __m128i*>(quants + pair * 32 + i * 16);
                const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
                // A look-up by the low 4 bits of each lane: mask and conversion at once.
                value[2 * i] = _mm512_permutexvar_ps(bytes, table);
                value[2 * i + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            value[i] = _mm512_mul_ps(value[i], scale[i]);
            if constexpr (HasMinimum) value[i] = _mm512_add_ps(value[i], minimum[i]);
        }
        store_pairs(out + pair * 64, value[0], value[1]);
        store_pairs(out + pair * 64 + 32, value[2], value[3]);
    }
}

template <int Bits, bool HasMinimum>
inline void decode_cell_as(const std::uint8_t* cell, CellFormat f, bf16* out) {
    __m512 scale[4], minimum[4] = {};
    const std::uint8_t* quants = cell + f.quants_offset();
    const __m512i lanes =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = _mm512_cvtepi32_ps(_mm512_sub_epi32(lanes, _mm512_set1_epi32(f.bias)));
    if (HasMinimum) load_scales(cell + f.num_scales * f.vector_bytes(), f.wide, minimum);
    const i64 num_pairs = 16 / f.num_scales;
    for (i64 s = 0; s < f.num_scales; ++s) {
        load_scales(cell + s * f.vector_bytes(), f.wide, scale);
        decode_pairs<Bits, HasMinimum>(quants + s * num_pairs * 8 * Bits, scale, minimum, table,
                                       num_pairs, out + s * num_pairs * 64);
    }
}

#else

template <int Bits, bool HasMinimum>
inline void decode_cell_as(const std::uint8_t* cell, CellFormat f, bf16* out) {
    float scale[2 * kPanel], minimum[2 * kPanel] = {};
    const auto load_scales = [&](const std::uint8_t* at, float* to) {
        for (i64 c = 0; c < kPanel; ++c) to[2 * c] = to[2 * c + 1] = cell_scale(at, f.wide, c);
    };
    if (HasMinimum) load_scales(cell + f.num_scales * f.vector_bytes(), minimum);
    const std::uint8_t* quants = cell + f.quants_offset();
    for (i64 pair = 0; pair < 16; ++pair) {
        if (pair * f.num_scales % 16 == 0) {
            load_scales(cell + pair * f.num_scales / 16 * f.vector_bytes(), scale);
        }
        float value[2 * kPanel];
        if constexpr (Bits == 8) {
            const auto* at = reinterpret_cast<const std::int8_t*>(quants + pair * 64);
            for (i64 i = 0; i < 64; ++i) value[i] = static_cast<float>(at[i]);
        } else {
            const std::uint8_t* at = quants + pair * 32;
            for (i64 half = 0; half < 2; ++half) {
                for (i64 i = 0; i < 16; ++i) {
                    const int byte = at[half * 16 + i];
                    value[half * 32 + i] = static_cast<float>((byte & 15) - f.bias);
                    value[half * 32 + 16 + i] = static_cast<float>((byte >> 4) - f.bias);
                }
            }
        }
        for (i64 i = 0; i < 64; ++i) value[i] *= scale[i];
        if constexpr (HasMinimum) {
            for (i64 i = 0; i < 64; ++i) value[i] += minimum[i];
        }
        for (i64 i = 0; i < 64; i += VF::W) store(out + pair * 64 + i, load(value + i));
    }
}

#endif

// One cell to bf16 [16 pairs][32 columns][2].
inline void decode_cell(const std::uint8_t* cell, CellFormat f, bf16* out) {
    if (f.bits == 8) {
        f.has_minimum ? decode_cell_as<8, true>(cell, f, out) : decode_cell_as<8, false>(cell, f, out);
    } else {
        f.has_minimum ? decode_cell_as<4, true>(cell, f, out) : decode_cell_as<4, false>(cell, f, out);
    }
}

// Panels [panel, panel + count) as a bf16 weight of their own, in this thread's scratch memory.
inline PackedWeight decode_panels(const PackedWeight& w, i64 panel, i64 count) {
    auto* out = static_cast<bf16*>(scratch(Scratch::weights, count * w.panel_elements() * 2));
    for (i64 i = 0; i < count; ++i) {
        const CellPanel& from = w.cells[panel + i];
        for (i64 cell = 0; cell < w.k_padded / kCellK; ++cell) {
            decode_cell(from.data + cell * from.format.bytes(), from.format,
                        out + i * w.panel_elements() + cell * kCellElements);
        }
    }
    return PackedWeight{out, min64(count * kPanel, w.n - panel * kPanel), w.k, w.k_padded,
                        DType::bf16};
}

// The columns of `out` that panels from `panel` on write.
inline Matrix from_panel(const Matrix& out, i64 panel) {
    Matrix part = out;
    part.cols = out.cols - panel * kPanel;
    part.data = static_cast<char*>(out.data) + panel * kPanel * item_size(out.dtype);
    return part;
}

}  // namespace octavo::OCTAVO_LEVEL
