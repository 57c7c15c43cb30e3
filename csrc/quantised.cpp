// From the blocks of a model file to cells. Runs once, at load; formats are those of ggml-common.h.
#include "quantised.hpp"

#include <cmath>

namespace octavo {
namespace {

// One column of a cell: 32 quants, and their scales as the cell stores them.
struct Group {
    std::int8_t quants[32];
    std::uint16_t half[2];  // scale and minimum where they are float16
    float wide[3];          // two scales and the minimum where they are float32
};

struct BlockSize {
    i64 elements, bytes;
};

BlockSize block_size(Stored kind) {
    switch (kind) {
        case Stored::f32:
            return {1, 4};
        case Stored::f16:
        case Stored::bf16:
            return {1, 2};
        case Stored::q8_0:
            return {32, 34};
        case Stored::q4_0:
            return {32, 18};
        case Stored::q4_1:
            return {32, 20};
        case Stored::q5_0:
            return {32, 22};
        case Stored::q5_1:
            return {32, 24};
        case Stored::q4_k:
            return {256, 144};
        case Stored::q5_k:
            return {256, 176};
        case Stored::q6_k:
            return {256, 210};
    }
    return {1, 1};
}

std::uint16_t half_at(const std::uint8_t* at) {
    return static_cast<std::uint16_t>(at[0] | at[1] << 8);
}

// The scale of a row of int8: symmetric, over all of it. What is no number makes it one that is
// none.
float row_scale(const float* values, i64 count) {
    float largest = 0.0f, poison = 0.0f;
    for (i64 i = 0; i < count; ++i) {
        const float size = std::fabs(values[i]);
        if (size > largest) largest = size;
        poison += values[i] * 0.0f;
    }
    return largest / 127.0f + poison;
}

void quantise(const float* values, i64 count, float scale, Group& g) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (i64 i = 0; i < 32; ++i) {
        const float q = i < count ? std::nearbyint(values[i] * inverse) : 0.0f;
        g.quants[i] = static_cast<std::int8_t>(std::fmax(-127.0f, std::fmin(127.0f, q)));
    }
}

void nibbles(const std::uint8_t* in, const std::uint8_t* high, int bias, Group& g) {
    std::uint32_t fifth = 0;
    if (high != nullptr) {
        for (int i = 0; i < 4; ++i) fifth |= static_cast<std::uint32_t>(high[i]) << 8 * i;
    }
    for (int i = 0; i < 16; ++i) {
        const int low = (in[i] & 15) | static_cast<int>(fifth >> i & 1u) << 4;
        const int up = (in[i] >> 4) | static_cast<int>(fifth >> (i + 16) & 1u) << 4;
        g.quants[i] = static_cast<std::int8_t>(low - bias);
        g.quants[i + 16] = static_cast<std::int8_t>(up - bias);
    }
}

// Group j (of 8) of a Q4_K or Q5_K block: scales and minimums of 6 bits spread over 12 bytes.
void k_scales(const std::uint8_t* block, i64 j, Group& g) {
    const std::uint8_t* at = block + 4;
    const int scale = j < 4 ? at[j] & 63 : (at[j + 4] & 15) | (at[j - 4] >> 6) << 4;
    const int minimum = j < 4 ? at[j + 4] & 63 : at[j + 4] >> 4 | (at[j] >> 6) << 4;
    g.wide[0] = g.wide[1] = half_to_float(half_at(block)) * static_cast<float>(scale);
    g.wide[2] = -(half_to_float(half_at(block + 2)) * static_cast<float>(minimum));
}

// Group j of a block of 256.
void unpack_k(Stored kind, const std::uint8_t* block, i64 j, Group& g) {
    if (kind == Stored::q6_k) {
        const i64 part = j / 4, quarter = j % 4;
        const std::uint8_t* low = block + part * 64 + quarter % 2 * 32;
        const std::uint8_t* high = block + 128 + part * 32;
        for (int i = 0; i < 32; ++i) {
            const int nibble = low[i] >> 4 * (quarter / 2) & 15;
            g.quants[i] =
                static_cast<std::int8_t>((nibble | (high[i] >> 2 * quarter & 3) << 4) - 32);
        }
        const float scale = half_to_float(half_at(block + 208));
        for (int i = 0; i < 2; ++i) {
            g.wide[i] =
                scale * static_cast<float>(static_cast<std::int8_t>(block[192 + 2 * j + i]));
        }
        return;
    }
    k_scales(block, j, g);
    const std::uint8_t* packed = block + (kind == Stored::q5_k ? 48 : 16) + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        const int nibble = packed[i] >> 4 * (j % 2) & 15;
        const int fifth = kind == Stored::q5_k ? block[16 + i] >> j & 1 : 0;
        g.quants[i] = static_cast<std::int8_t>(nibble | fifth << 4);
    }
}

// Values [32 * cell, + 32) of a stored row.
void unpack(Stored kind, const std::uint8_t* row, i64 cell, Group& g) {
    const BlockSize size = block_size(kind);
    const std::uint8_t* block = row + cell * 32 / size.elements * size.bytes;
    g.half[0] = half_at(block);
    g.half[1] = half_at(block + 2);
    switch (kind) {
        case Stored::q8_0:
            std::memcpy(g.quants, block + 2, 32);
            break;
        case Stored::q4_0:
            nibbles(block + 2, nullptr, 0, g);
            break;
        case Stored::q4_1:
            nibbles(block + 4, nullptr, 0, g);
            break;
        case Stored::q5_0:
            nibbles(block + 6, block + 2, 16, g);
            break;
        case Stored::q5_1:
            nibbles(block + 8, block + 4, 0, g);
            break;
        default:
            unpack_k(kind, block, cell % 8, g);
    }
}

void write(const Group& g, CellFormat format, std::uint8_t* cell, i64 column) {
    const i64 vectors = format.num_scales + (format.has_minimum ? 1 : 0);
    for (i64 v = 0; v < vectors; ++v) {
        std::uint8_t* at = cell + v * format.vector_bytes();
        const i64 which = v < format.num_scales ? v : 2;
        if (format.wide) {
            std::memcpy(at + 4 * column, &g.wide[which], 4);
        } else {
            std::memcpy(at + 2 * column, &g.half[which == 2 ? 1 : 0], 2);
        }
    }
    std::uint8_t* quants = cell + format.quants_offset();
    for (i64 k = 0; k < 32; ++k) {
        const auto quant = static_cast<std::uint8_t>(g.quants[k]);
        std::uint8_t& byte = quants[cell_byte(format, k, column)];
        const bool high = in_high_nibble(format, k, column);
        const int nibbles = high ? (byte & 0x0f) | quant << 4 : (byte & 0xf0) | quant;
        byte = format.bits == 8 ? quant : static_cast<std::uint8_t>(nibbles);
    }
}

}  // namespace

float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    if (exponent == 0) {
        const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign != 0 ? -size : size;
    }
    const std::uint32_t rest = exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23;
    const std::uint32_t bits = sign | rest | fraction << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

CellFormat cell_format(Stored kind, bool to_bf16) {
    const std::uint8_t nearby = to_bf16 ? 2 : 4, nearby4 = to_bf16 ? 32 : 4;
    switch (kind) {
        case Stored::q4_0:
            return {4, 8, 1, false, false, nearby4};
        case Stored::q4_1:
            return {4, 0, 1, true, false, nearby4};
        case Stored::q5_1:
            return {8, 0, 1, true, false, nearby};
        case Stored::q4_k:
            return {4, 0, 1, true, true, nearby4};
        case Stored::q5_k:
            return {8, 0, 1, true, true, nearby};
        case Stored::q6_k:
            return {8, 0, 2, false, true, 2};
        case Stored::f32:
            return {8, 0, 0, false, true, 4};
        case Stored::f16:
        case Stored::bf16:
        case Stored::q8_0:
        case Stored::q5_0:
            break;
    }
    return {8, 0, 1, false, false, nearby};
}

i64 row_bytes(Stored kind, i64 k) {
    const BlockSize size = block_size(kind);
    return k % size.elements == 0 ? k / size.elements * size.bytes : 0;
}

void widen_row(Stored kind, const std::uint8_t* row, i64 k, float* out) {
    if (kind == Stored::f32) {
        std::memcpy(out, row, static_cast<std::size_t>(k) * 4);
    } else if (kind == Stored::bf16) {
        for (i64 i = 0; i < k; ++i) out[i] = to_float(octavo::bf16{half_at(row + 2 * i)});
    } else if (kind == Stored::f16) {
        for (i64 i = 0; i < k; ++i) out[i] = half_to_float(half_at(row + 2 * i));
    } else {
        const CellFormat format = cell_format(kind, false);
        Group g{};
        for (i64 cell = 0; cell < k / 32; ++cell) {  // a row is a whole number of blocks
            unpack(kind, row, cell, g);
            float scales[2], minimum = 0.0f;
            for (int i = 0; i < 2; ++i) {
                scales[i] = format.wide ? g.wide[i] : half_to_float(g.half[0]);
            }
            if (format.has_minimum) minimum = format.wide ? g.wide[2] : half_to_float(g.half[1]);
            float* to = out + 32 * cell;
            for (int i = 0; i < 32; ++i) {
                const float scale = scales[format.num_scales == 2 ? i / 16 : 0];
                const auto value = static_cast<float>(g.quants[i] - format.bias) * scale;
                to[i] = format.has_minimum ? value + minimum : value;
            }
        }
    }
}

void pack_cells(const StoredRows& rows, i64 first, i64 count, const PackedWeight& w, i64 panel,
                i64 column) {
    const CellPanel& to = w.cells[panel];
    auto* cells = const_cast<std::uint8_t*>(to.data);
    float* scales = const_cast<float*>(to.column_scales()) + column;
    const auto values = [&](i64 i) {
        return reinterpret_cast<const float*>(rows.data + (first + i) * rows.stride);
    };
    if (to.format.scales_columns()) {
        for (i64 i = 0; i < count; ++i) scales[i] = row_scale(values(i), w.k);
    }
    Group g{};
    for (i64 cell = 0; cell < ceil_div(w.k, 32); ++cell) {
        for (i64 i = 0; i < count; ++i) {
            if (to.format.scales_columns()) {
                quantise(values(i) + 32 * cell, min64(32, w.k - 32 * cell), scales[i], g);
            } else {
                unpack(rows.kind, rows.data + (first + i) * rows.stride, cell, g);
            }
            write(g, to.format, cells + cell * to.format.bytes(), column + i);
        }
    }
}

}  // namespace octavo
