// Matrix products on AMX tiles: bf16 pairs, float32 sums, 16 x 16 outputs a tile.
// One tile product sums 32 of K for each output on its own, so rows do not depend on each other;
// every row, alone or among 512, takes this path.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// gcc's tile instructions don't tell the compiler what memory they read: whatever was written just
// before must be in memory by then.
inline void written_for_tiles() { asm volatile("" ::: "memory"); }

inline void load_config(const TileConfig& config) {
    asm volatile("" ::"m"(config));
    _tile_loadconfig(&config);
}

// Tiles 0-3 are sums, 4 and 5 activations, 6 and 7 weights.
inline void configure_product(int rows_low, int rows_high) {
    TileConfig config;
    const int rows[8] = {rows_low, rows_low, rows_high, rows_high, rows_low, rows_high, 16, 16};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(rows[i]);
        config.row_bytes[i] = 64;
    }
    load_config(config);
}

struct AmxProduct {
    const bf16* a;  // row 0 of this tile of rows
    i64 lda;
    i64 num_steps;  // of 32 k each
    i64 num_rows;
    const PackedWeight& w;
    const Matrix& out;
    i64 row;              // of out
    i64 part, num_parts;  // which of the passes over a panel this is
};

constexpr i64 kStepBytes = 32 * kPanel * 2;  // of weights

inline const char* weights_at(const AmxProduct& p, i64 panel, i64 step) {
    const auto* panels = static_cast<const bf16*>(p.w.data) + panel * p.w.panel_elements();
    return reinterpret_cast<const char*>(panels) + step * kStepBytes;
}

// Before a step on weights that come from memory: some steps on, running into the next panel.
inline void amx_prefetch(const AmxProduct& p, i64 panel, i64 step) {
    begin_next_page(weights_at(p, panel, step + 4), kStepBytes);
}

// Asks for this pass's share of the next panel, step by step and in the order of memory, so that it
// is read at an even rate while the passes over this panel compute.
inline void amx_fetch_next(const AmxProduct& p, i64 panel, i64 step) {
    if (panel + 1 == p.w.num_panels()) return;
    const i64 bytes = round_up(ceil_div(kStepBytes, p.num_parts), 64);
    const char* share = weights_at(p, panel + 1, 0) + (p.part * p.num_steps + step) * bytes;
    begin_next_page(share + 4096, bytes);
    fetch_lines(share, bytes);
}

// Sums [rows][32] of one panel, from scratch to out.
inline void amx_store(const AmxProduct& p, const float* sums, i64 panel) {
    const i64 column = panel * kPanel;
    for (i64 r = 0; r < p.num_rows; ++r) {
        for (i64 c = 0; c < kPanel; c += VF::W) {
            const i64 count = min64(VF::W, p.out.cols - column - c);
            if (count <= 0) continue;
            const VF value = load(sums + r * kPanel + c);
            if (p.out.dtype == DType::f32) {
                store_n(p.out.row<float>(p.row + r) + column + c, value, count);
            } else {
                store_n(p.out.row<bf16>(p.row + r) + column + c, value, count);
            }
        }
    }
}

// Logits: megabytes that are read much later. Written past the caches, they need not be read
// first, nor do they push out weights.
inline bool amx_streams(const Matrix& out) {
    return out.rows * out.stride >= (1 << 19) && out.stride % 16 == 0 &&
           reinterpret_cast<std::uintptr_t>(out.data) % 64 == 0;
}

inline void amx_stream(const AmxProduct& p, const float* sums, i64 panel) {
    for (i64 r = 0; r < p.num_rows; ++r) {
        float* to = p.out.row<float>(p.row + r) + panel * kPanel;
        for (i64 c = 0; c < kPanel; c += 16) {
            _mm512_stream_ps(to + c, load(sums + r * kPanel + c).v);
        }
    }
}

inline void amx_zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// 17 to 32 rows against steps [first, last) of one panel: four chains of sums grow. between(step)
// is done beside the tiles.
template <class F>
void amx_tall_steps(const AmxProduct& p, i64 panel, i64 first, i64 last, F between) {
    const bf16* b = static_cast<const bf16*>(p.w.data) + panel * p.w.panel_elements();
    b += first * 32 * kPanel;
    const bf16* low = p.a + first * 32;
    const bf16* high = low + 16 * p.lda;
    const i64 stride = p.lda * 2;
    for (i64 step = first; step < last; ++step) {
        between(step);
        _tile_loadd(6, b, kPanel * 4);
        _tile_loadd(4, low, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, high, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        low += 32;
        high += 32;
        b += 32 * kPanel;
    }
}

inline void amx_tall_store(const AmxProduct& p, i64 panel) {
    alignas(64) float sums[32 * kPanel];
    const bool whole = p.out.dtype == DType::f32 && (panel + 1) * kPanel <= p.out.cols;
    const bool past_caches = whole && amx_streams(p.out);
    const bool direct = whole && !past_caches;
    float* to = direct ? p.out.row<float>(p.row) + panel * kPanel : sums;
    const i64 to_stride = direct ? p.out.stride : kPanel;
    _tile_stored(0, to, to_stride * 4);
    _tile_stored(1, to + 16, to_stride * 4);
    _tile_stored(2, to + 16 * to_stride, to_stride * 4);
    _tile_stored(3, to + 16 * to_stride + 16, to_stride * 4);
    if (past_caches) {
        amx_stream(p, sums, panel);
    } else if (!direct) {
        amx_store(p, sums, panel);
    }
}

template <class F>
void amx_panel_tall(const AmxProduct& p, i64 panel, F between) {
    amx_zero();
    amx_tall_steps(p, panel, 0, p.num_steps, between);
    amx_tall_store(p, panel);
}

// The same against many panels, a part of K after the other, so that the rows of a part stay in the
// first cache while panels pass by. Sums wait in scratch memory: the chains are those of one pass.
inline void amx_panels_parts(const AmxProduct& p, i64 first_panel, i64 last_panel, bool fetch) {
    constexpr i64 kSums = 32 * kPanel, kMost = 9;
    const i64 length = ceil_div(p.num_steps, ceil_div(p.num_steps, kMost));
    auto* sums =
        static_cast<float*>(scratch(Scratch::partials, (last_panel - first_panel) * kSums * 4));
    for (i64 first = 0; first < p.num_steps; first += length) {
        const i64 last = min64(first + length, p.num_steps);
        for (i64 panel = first_panel; panel < last_panel; ++panel) {
            float* at = sums + (panel - first_panel) * kSums;
            if (first == 0) {
                amx_zero();
            } else {
                _tile_loadd(0, at, 64);
                _tile_loadd(1, at + 256, 64);
                _tile_loadd(2, at + 512, 64);
                _tile_loadd(3, at + 768, 64);
            }
            if (fetch) {
                amx_tall_steps(p, panel, first, last,
                               [&](i64 step) { amx_prefetch(p, panel, step); });
            } else {
                amx_tall_steps(p, panel, first, last, [](i64) {});
            }
            if (last == p.num_steps) {
                amx_tall_store(p, panel);
            } else {
                _tile_stored(0, at, 64);
                _tile_stored(1, at + 256, 64);
                _tile_stored(2, at + 512, 64);
                _tile_stored(3, at + 768, 64);
            }
        }
    }
}

// Up to 16 rows against two panels: four chains of sums again.
template <class F>
void amx_panels_flat(const AmxProduct& p, i64 panel, bool both, F between) {
    alignas(64) float sums[2][16 * kPanel];
    const bf16* b = static_cast<const bf16*>(p.w.data) + panel * p.w.panel_elements();
    const bf16* next = both ? b + p.w.panel_elements() : b;
    const bf16* a = p.a;
    amx_zero();
    for (i64 step = 0; step < p.num_steps; ++step) {
        between(step);
        _tile_loadd(4, a, p.lda * 2);
        _tile_loadd(6, b, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, next, kPanel * 4);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, next + 32, kPanel * 4);
            _tile_dpbf16ps(3, 4, 6);
        }
        a += 32;
        b += 32 * kPanel;
        next += 32 * kPanel;
    }
    _tile_stored(0, sums[0], kPanel * 4);
    _tile_stored(1, sums[0] + 16, kPanel * 4);
    amx_store(p, sums[0], panel);
    if (!both) return;
    _tile_stored(2, sums[1], kPanel * 4);
    _tile_stored(3, sums[1] + 16, kPanel * 4);
    amx_store(p, sums[1], panel + 1);
}

// Tile 5 holds weights here, so it has 16 rows whatever the sums have.
inline void configure_flat(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(i < 5 ? rows : 16);
        config.row_bytes[i] = 64;
    }
    load_config(config);
}

inline void configure_rows(i64 rows) {
    if (rows > 16) {
        configure_product(16, static_cast<int>(rows - 16));
    } else {
        configure_flat(static_cast<int>(rows));
    }
}

// 33 to 128 rows: each panel is read from memory once and meets all rows while it is near.
inline void amx_product_together(const bf16* a, i64 lda, i64 begin, i64 end, const PackedWeight& w,
                                 i64 first_panel, i64 last_panel, const Matrix& out) {
    const i64 num_parts = ceil_div(end - begin, 32);
    i64 configured = 0;
    for (i64 panel = first_panel; panel < last_panel; ++panel) {
        for (i64 part = 0; part < num_parts; ++part) {
            const i64 row = begin + part * 32, rows = min64(32, end - row);
            const AmxProduct p{a + row * lda, lda,  w.k_padded / 32, rows, w, out,
                               row,           part, num_parts};
            if (rows != configured) configure_rows(rows);
            configured = rows;
            const auto fetch = [&](i64 step) {
                if (part == 0 && panel == first_panel) amx_prefetch(p, panel, step);
                amx_fetch_next(p, panel, step);
            };
            if (rows > 16) {
                amx_panel_tall(p, panel, fetch);
            } else {
                amx_panels_flat(p, panel, false, fetch);
            }
        }
    }
}

// Tile products take subnormal numbers for zero; while this lives, vectors do, too.
class FlushSubnormals {
public:
    FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    ~FlushSubnormals() { _mm_setcsr(before_); }

private:
    unsigned before_;
};

// A row alone, on vectors: plain loads keep up with memory where tiles don't. What a tile product
// does, in its order (TDPBF16PS in Intel's manual): from zero, a chain over 16 even k and one over
// 16 odd ones, then their sum is added.
// sums[N][2 vectors] grow by one step: 32 k of the row, and of N panels, whose steps lie at b[N].
template <int N>
inline __attribute__((always_inline)) void amx_row_step(const bf16* a, const bf16* const (&b)[N],
                                                        __m512 (&sums)[N][2]) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 even[N][2], odd[N][2];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        for (int c = 0; c < 2; ++c) even[i][c] = odd[i][c] = _mm512_setzero_ps();
    }
    for (int pair = 0; pair < 16; ++pair) {
        std::int32_t both;
        std::memcpy(&both, a + 2 * pair, 4);
        const __m512i x = _mm512_set1_epi32(both);
        const __m512 x_even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        const __m512 x_odd = _mm512_castsi512_ps(_mm512_and_si512(x, high));
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) {
                const __m512i w = _mm512_loadu_si512(b[i] + pair * 2 * kPanel + c * 32);
                const __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
                const __m512 w_odd = _mm512_castsi512_ps(_mm512_and_si512(w, high));
                even[i][c] = _mm512_fmadd_ps(x_even, w_even, even[i][c]);
                odd[i][c] = _mm512_fmadd_ps(x_odd, w_odd, odd[i][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        for (int c = 0; c < 2; ++c) {
            sums[i][c] = _mm512_add_ps(sums[i][c], _mm512_add_ps(even[i][c], odd[i][c]));
        }
    }
}

template <int N>
inline void amx_row_panels(const AmxProduct& p, i64 panel) {
    __m512 sums[N][2];
    const bf16* b[N];
    for (int i = 0; i < N; ++i) {
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        b[i] = static_cast<const bf16*>(p.w.data) + (panel + i) * p.w.panel_elements();
    }
    for (i64 step = 0; step < p.num_steps; ++step) {
        amx_row_step<N>(p.a + step * 32, b, sums);
        for (int i = 0; i < N; ++i) b[i] += 32 * kPanel;
    }
    for (int i = 0; i < N; ++i) {
        alignas(64) float row[kPanel];
        _mm512_store_ps(row, sums[i][0]);
        _mm512_store_ps(row + 16, sums[i][1]);
        amx_store(p, row, panel + i);
    }
}

// Four panels at a time: memory gives most to a reader of several places.
constexpr i64 kRowPanels = 4;

inline void amx_row(const AmxProduct& p, i64 panel, i64 last_panel) {
    const FlushSubnormals flush;
    for (; panel + kRowPanels <= last_panel; panel += kRowPanels) {
        amx_row_panels<kRowPanels>(p, panel);
    }
    for (; panel < last_panel; ++panel) amx_row_panels<1>(p, panel);
}

inline void amx_product(const bf16* a, i64 lda, i64 begin, i64 end, const PackedWeight& w,
                        i64 first_panel, i64 last_panel, const Matrix& out) {
    if (end - begin == 1) {
        const AmxProduct p{a + begin * lda, lda, w.k_padded / 32, 1, w, out, begin, 0, 1};
        amx_row(p, first_panel, last_panel);
        return;
    }
    if (end - begin > 32 && end - begin <= 128) {
        amx_product_together(a, lda, begin, end, w, first_panel, last_panel, out);
        begin = end;
    }
    for (i64 row = begin; row < end; row += 32) {
        const i64 rows = min64(32, end - row);
        const AmxProduct p{a + row * lda, lda, w.k_padded / 32, rows, w, out, row, 0, 1};
        configure_rows(rows);
        if (rows > 16 && end - begin > 32) {
            // Only the first rows find weights in memory; asking again costs a fifth of the time.
            amx_panels_parts(p, first_panel, last_panel, row == begin);
        } else if (rows > 16) {
            for (i64 panel = first_panel; panel < last_panel; ++panel) {
                amx_panel_tall(p, panel, [&](i64 step) { amx_prefetch(p, panel, step); });
            }
        } else {
            for (i64 panel = first_panel; panel < last_panel; panel += 2) {
                const bool both = panel + 1 < last_panel;
                amx_panels_flat(p, panel, both, [&](i64 step) {
                    amx_prefetch(p, panel, step);
                    if (both) amx_prefetch(p, panel + 1, step);
                });
            }
        }
    }
    _tile_release();
    _mm_sfence();  // what was streamed is seen by whoever sees that this task is done
}

// Attention on tiles (attention_tiles.hpp).
struct DotTiles {
    using A = bf16;
    using B = bf16;
};

}  // namespace octavo::OCTAVO_LEVEL
