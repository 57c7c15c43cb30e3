// Weights that stay quantised in memory. Every stored format becomes cells of one layout: 32 output
// columns x 32 k with their scales, which decode.hpp turns into a bf16 panel just before its use.
#pragma once

#include "common.hpp"

namespace octavo {

// A cell: scales [num_scales][32] and, where there are minimums, minimums [32], both float16 or
// float32; then quants in pairs of k, as bf16 panels have them: value = quant * scale + minimum.
//   8 bits  int8 [16 pairs][32 columns][2]
//   4 bits  [16 pairs][2 halves][16 bytes]: byte i holds element i % 2 of column 16 * half + i / 2
//           in its low nibble, and that of the column 8 further in its high one
struct CellFormat {
    std::uint8_t bits;        // 8 or 4
    std::uint8_t bias;        // subtracted from a nibble
    std::uint8_t num_scales;  // over the 32 k of a cell: 1 or 2
    bool has_minimum;
    bool wide;  // scales and minimums are float32

    bool operator==(const CellFormat& other) const {
        return bits == other.bits && bias == other.bias && num_scales == other.num_scales &&
               has_minimum == other.has_minimum && wide == other.wide;
    }
    i64 vector_bytes() const { return kPanel * (wide ? 4 : 2); }
    i64 quants_offset() const { return (num_scales + (has_minimum ? 1 : 0)) * vector_bytes(); }
    i64 bytes() const { return quants_offset() + kPanel * 32 * bits / 8; }
};

// Panels may differ: q, k and v of one product can be stored in three formats.
struct CellPanel {
    const std::uint8_t* data;  // [Kp / 32] cells
    CellFormat format;
};

// What a model file holds: ggml's block formats by name, or float32 to be quantised to int8.
enum class Stored : std::uint8_t { f32, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

struct StoredRows {
    const std::uint8_t* data;
    i64 rows, stride;  // bytes from row to row
    Stored kind;
};

CellFormat cell_format(Stored kind);
i64 row_bytes(Stored kind, i64 k);  // 0 where k is no whole number of blocks

// Fills panel `panel` (its data is writable here) with columns [column, column + count) of the panel
// from `rows`, starting at row `first`.
void pack_cells(const StoredRows& rows, i64 first, i64 count, const PackedWeight& w, i64 panel,
                i64 column);

float half_to_float(std::uint16_t half);

}  // namespace octavo
