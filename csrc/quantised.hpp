// Weights that stay quantised in memory. Every stored format becomes cells: 32 output columns x 32
// k with their scales. gemm8.hpp multiplies them as int8; on AMX they are turned into bf16 just
// before their use instead (amx_cells.hpp), and on every level those with two scales over 32 k are
// (Q6_K, decode.hpp). int8 of our own has no scales in
// its cells but one for each output column, before the panel's first cell: amx8.hpp sums it in
// integers over all of K.
#pragma once

#include "common.hpp"

namespace octavo {

// A cell: scales [num_scales][32] and, where there are minimums, minimums [32], both float16 or
// float32; then quants: value = quant * scale + minimum.
//   8 bits  int8 [32 / g][32 columns][g of k]
//   4 bits  [16 / g][32 columns][g of k]: element k in the low nibble, k + 16 in the high one
// g is 4 where they are multiplied as int8, else 2, as bf16 panels have them. 4 bits that become
// bf16 have all 32 k of a column side by side, four columns to 16 bits: [8][32 k] uint16.
struct CellFormat {
    std::uint8_t bits;        // 8 or 4
    std::uint8_t bias;        // subtracted from a nibble
    std::uint8_t num_scales;  // over the 32 k of a cell: 1 or 2; 0 where a column has one in all
    bool has_minimum;
    bool wide;            // scales and minimums are float32
    std::uint8_t nearby;  // k of a column side by side: 2, 4 or 32

    bool operator==(const CellFormat& other) const {
        return bits == other.bits && bias == other.bias && num_scales == other.num_scales &&
               has_minimum == other.has_minimum && wide == other.wide && nearby == other.nearby;
    }
    bool multiplies_as_int8() const { return nearby == 4; }
    bool scales_columns() const { return num_scales == 0; }
    i64 vector_bytes() const { return kPanel * (wide ? 4 : 2); }
    i64 quants_offset() const { return (num_scales + (has_minimum ? 1 : 0)) * vector_bytes(); }
    i64 bytes() const { return quants_offset() + kPanel * 32 * bits / 8; }
    i64 column_bytes() const { return scales_columns() ? kPanel * 4 : 0; }
    i64 panel_bytes(i64 k_padded) const { return column_bytes() + k_padded / 32 * bytes(); }
};

// Cells of our own int8 come in pairs, 64 k: the depth of an int8 tile. Sums over so many products
// of int8 fit int32.
constexpr i64 kAlignK8 = 64;
constexpr i64 kMaxK8 = i64{1} << 17;

// Panels may differ: q, k and v of one product can be stored in three formats.
struct CellPanel {
    const std::uint8_t* data;  // [Kp / 32] cells
    CellFormat format;

    // [32], where there are such: before the cells.
    const float* column_scales() const {
        return reinterpret_cast<const float*>(data - format.column_bytes());
    }
};

// What a model file holds: ggml's block formats by name, or float32 to be quantised to int8.
enum class Stored : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

struct StoredRows {
    const std::uint8_t* data;
    i64 rows, stride;  // bytes from row to row
    Stored kind;
};

CellFormat cell_format(Stored kind, bool to_bf16);  // to_bf16: on a level that decodes cells
i64 row_bytes(Stored kind, i64 k);                  // 0 where k is no whole number of blocks

// Fills panel `panel` (its data is writable here) with columns [column, column + count) of the
// panel from `rows`, starting at row `first`.
void pack_cells(const StoredRows& rows, i64 first, i64 count, const PackedWeight& w, i64 panel,
                i64 column);

// One stored row of `k` values in float32, as the file's format defines them.
void widen_row(Stored kind, const std::uint8_t* row, i64 k, float* out);

float half_to_float(std::uint16_t half);

// Of a quant, in its cell's quants.
static inline i64 cell_byte(CellFormat f, i64 k, i64 column) {
    if (f.nearby == 32) return column / 4 * 64 + 2 * k + column % 4 / 2;
    if (f.bits == 4) k %= 16;
    return k / f.nearby * kPanel * f.nearby + column * f.nearby + k % f.nearby;
}

static inline bool in_high_nibble(CellFormat f, i64 k, i64 column) {
    return f.nearby == 32 ? column % 2 == 1 : k >= 16;
}

static inline int cell_quant(const std::uint8_t* cell, CellFormat f, i64 k, i64 column) {
    const std::uint8_t byte = cell[f.quants_offset() + cell_byte(f, k, column)];
    if (f.bits == 8) return static_cast<std::int8_t>(byte);
    return (in_high_nibble(f, k, column) ? byte >> 4 : byte & 15) - f.bias;
}

}  // namespace octavo
