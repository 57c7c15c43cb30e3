// Weights in the formats of model files, on AMX tiles: cells become bf16 just before they are
// multiplied, while the tiles compute: 8 bits in the layout of a panel, 4 bits as left operands. So
// a product has the bits that it has with the weight widened at load.
#pragma once

#include "amx.hpp"
#include "decode.hpp"

namespace octavo::OCTAVO_LEVEL {

// Up to 32 rows against one panel: a ring of decoded cells in the first cache, one cell ahead.
inline void amx_cells_few(const AmxProduct& p, const CellPanel& cells, i64 panel) {
    constexpr i64 kCell = kCellK * kPanel, kRing = 4;
    alignas(64) bf16 ring[kRing * kCell];
    alignas(64) float sums[32 * kPanel];
    const CellDecoder decode = cell_decoder(cells.format);
    const i64 cell_bytes = cells.format.bytes();
    const std::uint8_t* cell = cells.data;
    const auto decode_next = [&](i64 step) {
        fetch_lines_near(cell + 2048, cell_bytes);
        decode(cell, cells.format, ring + step % kRing * kCell);
        cell += cell_bytes;
        written_for_tiles();
    };
    const bool tall = p.num_rows > 16;
    const bf16* low = p.a;
    const bf16* high = p.a + 16 * p.lda;
    amx_zero();
    decode_next(0);
    for (i64 step = 0; step < p.num_steps; ++step) {
        if (step + 1 < p.num_steps) decode_next(step + 1);
        const bf16* b = ring + step % kRing * kCell;
        _tile_loadd(4, low, p.lda * 2);
        _tile_loadd(6, b, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (tall) {
            _tile_loadd(5, high, p.lda * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        low += kCellK;
        high += kCellK;
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + 16, kPanel * 4);
    if (tall) {
        _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
        _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
    }
    amx_store(p, sums, panel);
}

// 4 bits are decoded column by column (decode.hpp), so there weights are the left operand and
// activations the right one, in pairs: blocks of `width` rows, each [k / 2][width][2].
struct PairedRows {
    const bf16* data;
    i64 width, k_padded;

    const bf16* block(i64 row) const { return data + row * k_padded; }
};
constexpr i64 kPairedRows = 16;

inline void transpose(__m512i (&v)[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
        v[j] = _mm512_shuffle_i32x4(even, even_high, 0x88);
        v[4 + j] = _mm512_shuffle_i32x4(odd, odd_high, 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(even, even_high, 0xdd);
        v[12 + j] = _mm512_shuffle_i32x4(odd, odd_high, 0xdd);
    }
}

// A single row is in pairs as it is.
inline PairedRows pair_rows(const bf16* a, i64 lda, i64 rows, i64 k_padded) {
    if (rows == 1) return {a, 1, k_padded};
    const i64 num_blocks = ceil_div(rows, kPairedRows);
    auto* out =
        static_cast<bf16*>(scratch(Scratch::activations8, num_blocks * kPairedRows * k_padded * 2));
    parallel_for(num_blocks, row_grain(kPairedRows * k_padded), [&](i64 block) {
        const i64 first = block * kPairedRows;
        bf16* to = out + first * k_padded;
        for (i64 k = 0; k < k_padded; k += kCellK) {
            __m512i v[16];
            for (i64 r = 0; r < kPairedRows; ++r) {
                v[r] = first + r < rows ? _mm512_loadu_si512(a + (first + r) * lda + k)
                                        : _mm512_setzero_si512();
            }
            transpose(v);
            for (int i = 0; i < 16; ++i) {
                _mm512_storeu_si512(to + k * kPairedRows + i * 2 * kPairedRows, v[i]);
            }
        }
    });
    return {out, kPairedRows, k_padded};
}

// Tiles 0-3 are sums, 4 and 5 activations, 6 and 7 weights.
inline void configure_paired(i64 rows) {
    TileConfig config;
    const i64 low = min64(rows, 16), high = max64(rows - 16, 1);
    const i64 columns[8] = {low, low, high, high, low, high, 16, 16};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = 16;
        config.row_bytes[i] = static_cast<std::uint16_t>(4 * columns[i]);
    }
    load_config(config);
}

// Tiles 0-3 grow by `steps` decoded cells.
inline void amx_paired_steps(const bf16* low, const bf16* high, i64 width, const bf16* cells,
                             i64 steps, bool tall) {
    for (i64 step = 0; step < steps; ++step) {
        _tile_loadd(4, low, width * 4);
        _tile_loadd(6, cells, kCellK * 2);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, cells + 16 * kCellK, kCellK * 2);
        _tile_dpbf16ps(1, 7, 4);
        if (tall) {
            _tile_loadd(5, high, width * 4);
            _tile_dpbf16ps(2, 6, 5);
            _tile_dpbf16ps(3, 7, 5);
        }
        low += kCellK * width;
        high += kCellK * width;
        cells += kCellK * kPanel;
    }
}

// Sums [2 of rows][2 of columns][16 columns][16 rows] to out.
inline void amx_paired_store(const AmxProduct& p, i64 panel) {
    alignas(64) float sums[32 * kPanel];
    if (p.num_rows == 1) {
        _tile_stored(0, sums, 4);
        _tile_stored(1, sums + 16, 4);
        amx_store(p, sums, panel);
        return;
    }
    alignas(64) float tiles[4][256];
    _tile_stored(0, tiles[0], 64);
    _tile_stored(1, tiles[1], 64);
    if (p.num_rows > 16) {
        _tile_stored(2, tiles[2], 64);
        _tile_stored(3, tiles[3], 64);
    }
    const bool whole = p.out.dtype == DType::f32 && (panel + 1) * kPanel <= p.out.cols;
    const bool past_caches = whole && amx_streams(p.out), direct = whole && !past_caches;
    for (i64 tile = 0; tile < (p.num_rows > 16 ? 4 : 2); ++tile) {
        __m512i v[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(tiles[tile] + 16 * i);
        transpose(v);
        const i64 row = tile / 2 * 16, column = tile % 2 * 16;
        const i64 count = direct ? min64(16, p.num_rows - row) : 16;
        const i64 stride = direct ? p.out.stride : kPanel;
        float* to = direct ? p.out.row<float>(p.row + row) + panel * kPanel : sums + row * kPanel;
        if (count == 16) {
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * stride + column, v[i]);
        } else {
            for (int i = 0; i < count; ++i) _mm512_storeu_si512(to + i * stride + column, v[i]);
        }
    }
    if (past_caches) {
        amx_stream(p, sums, panel);
    } else if (!direct) {
        amx_store(p, sums, panel);
    }
}

// Up to 32 rows against one panel of 4 bits, four cells at a time: changing between vectors and
// tiles costs 25 ns each time.
inline void amx_nibbles_few(const AmxProduct& p, const PairedRows& rows, const CellPanel& cells,
                            i64 panel) {
    constexpr i64 kCell = kCellK * kPanel, kTogether = 4;
    alignas(64) bf16 ring[2][kTogether * kCell];
    const CellDecoder decode = cell_decoder(cells.format);
    const i64 cell_bytes = cells.format.bytes();
    const std::uint8_t* cell = cells.data;
    amx_zero();
    for (i64 step = 0; step < p.num_steps; step += kTogether) {
        bf16* to = ring[step / kTogether % 2];
        const i64 count = min64(kTogether, p.num_steps - step);
        for (i64 i = 0; i < count; ++i) {
            fetch_lines_near(cell + 2048, cell_bytes);
            decode(cell, cells.format, to + i * kCell);
            cell += cell_bytes;
        }
        written_for_tiles();
        const i64 at = step * kCellK * rows.width;
        amx_paired_steps(rows.block(p.row) + at, rows.block(p.row + 16) + at, rows.width, to, count,
                         p.num_rows > 16);
    }
    amx_paired_store(p, panel);
}

// Rows [begin, end) of panels [first, last), which may differ in format. begin is a multiple of 16;
// `paired` is of use where there are 4 bits.
inline void amx_cells_product(const bf16* a, i64 lda, const PairedRows& paired, i64 begin, i64 end,
                              const PackedWeight& w, i64 first, i64 last, const Matrix& out) {
    const i64 num_steps = w.k_padded / kCellK;
    i64 configured = 0;  // for that many rows, negative where they are paired
    const auto configure = [&](i64 rows, bool nibbles) {
        const i64 wanted = nibbles ? -rows : rows;
        if (wanted == configured) return;
        nibbles ? configure_paired(rows) : configure_rows(rows);
        configured = wanted;
    };
    if (end - begin <= 32) {
        const AmxProduct p{a + begin * lda, lda, num_steps, end - begin, w, out, begin, 0, 1};
        for (i64 panel = first; panel < last; ++panel) {
            const CellPanel& cells = w.cells[panel];
            const bool nibbles = cells.format.bits == 4;
            configure(end - begin, nibbles);
            nibbles ? amx_nibbles_few(p, paired, cells, panel) : amx_cells_few(p, cells, panel);
        }
        _tile_release();
        _mm_sfence();
        return;
    }
    // Before each pass over a panel, its share of the next is decoded: in one go, because changing
    // between vectors and tiles costs 25 ns each time (measured).
    const i64 num_parts = ceil_div(end - begin, 32), panel_size = w.panel_elements();
    auto* decoded = static_cast<bf16*>(scratch(Scratch::weights, 2 * panel_size * 2));
    const auto decode = [&](i64 panel, i64 step, i64 until) {
        const CellPanel& cells = w.cells[panel];
        const CellDecoder decode_cell = cell_decoder(cells.format);
        for (; step < until; ++step) {
            const std::uint8_t* cell = cells.data + step * cells.format.bytes();
            fetch_lines_near(cell + 2048, cells.format.bytes());
            decode_cell(cell, cells.format,
                        decoded + panel % 2 * panel_size + step * kCellK * kPanel);
        }
        written_for_tiles();
    };
    decode(first, 0, num_steps);
    for (i64 panel = first; panel < last; ++panel) {
        const PackedWeight now{decoded + panel % 2 * panel_size, kPanel, w.k, w.k_padded,
                               DType::bf16};
        const Matrix part = from_panel(out, panel);
        const bool nibbles = w.cells[panel].format.bits == 4;
        for (i64 i = 0; i < num_parts; ++i) {
            const i64 row = begin + i * 32, rows = min64(32, end - row);
            const AmxProduct p{a + row * lda, lda, num_steps, rows, now, part, row, i, num_parts};
            configure(rows, nibbles);
            if (panel + 1 < last) {
                const i64 share = ceil_div(num_steps, num_parts);
                decode(panel + 1, i * share, min64((i + 1) * share, num_steps));
            }
            const auto nothing = [](i64) {};
            if (nibbles) {
                amx_zero();
                amx_paired_steps(paired.block(row), paired.block(row + 16), paired.width,
                                 static_cast<const bf16*>(now.data), num_steps, rows > 16);
                amx_paired_store(p, 0);
            } else if (rows > 16) {
                amx_panel_tall(p, 0, nothing);
            } else {
                amx_panels_flat(p, 0, false, nothing);
            }
        }
    }
    _tile_release();
    _mm_sfence();
}

}  // namespace octavo::OCTAVO_LEVEL
