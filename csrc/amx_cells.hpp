// Weights in the formats of model files, on AMX tiles: cells become bf16 in the layout of a panel
// just before they are multiplied, while the tiles compute. So a product has the bits that it has
// with the weight widened at load.
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
        for (i64 i = 0; i < cell_bytes; i += 64) __builtin_prefetch(cell + 2048 + i, 0, 3);
        decode(cell, cells.format, ring + step % kRing * kCell);
        cell += cell_bytes;
        written_for_tiles();
    };
    const bool tall = p.num_rows > 16;
    const bf16* low = p.a;
    const bf16* high = p.a + 16 * p.lda;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
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

// Rows [begin, end) of panels [first, last), which may differ in format.
inline void amx_cells_product(const bf16* a, i64 lda, i64 begin, i64 end, const PackedWeight& w,
                              i64 first, i64 last, const Matrix& out) {
    const i64 num_steps = w.k_padded / kCellK;
    if (end - begin <= 32) {
        configure_rows(end - begin);
        const AmxProduct p{a + begin * lda, lda, num_steps, end - begin, w, out, begin, 0, 1};
        for (i64 panel = first; panel < last; ++panel) amx_cells_few(p, w.cells[panel], panel);
        _tile_release();
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
            for (i64 at = 0; at < cells.format.bytes(); at += 64) {
                __builtin_prefetch(cell + 2048 + at, 0, 3);
            }
            decode_cell(cell, cells.format,
                        decoded + panel % 2 * panel_size + step * kCellK * kPanel);
        }
        written_for_tiles();
    };
    decode(first, 0, num_steps);
    i64 configured = 0;
    for (i64 panel = first; panel < last; ++panel) {
        const PackedWeight now{decoded + panel % 2 * panel_size, kPanel, w.k, w.k_padded,
                               DType::bf16};
        const Matrix part = from_panel(out, panel);
        for (i64 i = 0; i < num_parts; ++i) {
            const i64 row = begin + i * 32, rows = min64(32, end - row);
            const AmxProduct p{a + row * lda, lda, num_steps, rows, now, part, row, i, num_parts};
            if (rows != configured) configure_rows(rows);
            configured = rows;
            if (panel + 1 < last) {
                const i64 share = ceil_div(num_steps, num_parts);
                decode(panel + 1, i * share, min64((i + 1) * share, num_steps));
            }
            const auto nothing = [](i64) {};
            if (rows > 16) {
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
