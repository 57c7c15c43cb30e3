// int8 weights with one scale an output column, on AMX tiles. A row of activations becomes two int8
// parts, value = scale * (128 * high + low): 15 bits, so one scale a row is enough, and integers
// are summed over all of K where they are, in the tiles. They are exact, so rows don't depend on
// each other; floats come in once, at the end:
//   out = (float(high . w) * 128 + float(low . w)) * (x_scale * w_scale), the first by an fma
#pragma once

#include "amx.hpp"
#include "quantised.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kPartRows = 16;          // rows of a block: high parts fill a tile, low parts another
constexpr i64 kTileK = 64;             // k of a tile of int8
constexpr float kLargestPart = 16319;  // 127 * 128 + 63

// [ceil(rows / 16)] blocks of [k_padded / 64][2 parts][rows of the block][64 k]: what a step reads
// lies together.
struct ActivationParts {
    std::int8_t* quants;
    float* scales;  // [rows]
    i64 rows, k_padded;

    i64 rows_of(i64 block) const { return min64(kPartRows, rows - block * kPartRows); }
    std::int8_t* block(i64 index) const { return quants + index * kPartRows * 2 * k_padded; }
};

// A value that is no number makes the scale one that is none.
template <class X>
void split_row(const X* x, i64 count, const ActivationParts& a, i64 row) {
    VF largest = zero(), poison = zero();
    const auto values = [&](i64 k) {
        return k + VF::W <= count ? load(x + k) : load_n(x + k, max64(0, count - k));
    };
    for (i64 k = 0; k < count; k += VF::W) {
        const VF v = values(k);
        largest = max(max(v, sub(zero(), v)), largest);
        poison = fma(v, zero(), poison);
    }
    const float top = reduce_max(largest);
    const VF inverse = set1(top > 0.0f ? kLargestPart / top : 0.0f);
    a.scales[row] = top / kLargestPart + reduce_add(poison);
    const i64 block = row / kPartRows, rows = a.rows_of(block);
    std::int8_t* out = a.block(block) + row % kPartRows * kTileK;
    for (i64 k = 0; k < a.k_padded; k += VF::W) {
        const __m512i q = _mm512_cvtps_epi32(mul(values(k), inverse).v);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
        const __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 7));
        std::int8_t* to = out + k / kTileK * 2 * rows * kTileK + k % kTileK;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(high));
        to += rows * kTileK;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(low));
    }
}

inline ActivationParts split_rows(const Matrix& x, i64 k_padded) {
    ActivationParts a{nullptr, nullptr, x.rows, k_padded};
    const i64 bytes = round_up(x.rows, kPartRows) * 2 * k_padded;
    auto* memory = static_cast<char*>(scratch(Scratch::activations8, bytes + 4 * x.rows));
    a.quants = reinterpret_cast<std::int8_t*>(memory);
    a.scales = reinterpret_cast<float*>(memory + bytes);
    with_type(x.dtype, [&](auto* type) {
        using X = std::remove_pointer_t<decltype(type)>;
        parallel_for(x.rows, row_grain(4 * x.cols),
                     [&](i64 r) { split_row(x.row<X>(r), x.cols, a, r); });
    });
    return a;
}

// Tiles 0-3 are sums (high parts of 16 columns and the next 16, then low ones), 4 and 5
// activations, 6 and 7 weights. Up to 8 rows: both parts in one tile, and sums in 0 and 1.
inline void configure_parts(i64 rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<std::uint8_t>(i >= 6 ? 16 : rows <= 8 ? 2 * rows : rows);
        config.row_bytes[i] = 64;
    }
    load_config(config);
}

// One block of rows against one panel.
struct PartsPass {
    const ActivationParts& a;
    i64 block;
    const CellPanel& panel;
    bool alone;                 // the only block that meets these weights now
    const std::uint8_t* ahead;  // weights to ask for meanwhile
    i64 ahead_step;             // bytes of it a step
};

// sums [2 parts][rows][32].
inline void parts_sums(const PartsPass& p, std::int32_t* sums) {
    const i64 rows = p.a.rows_of(p.block), num_steps = p.a.k_padded / kTileK;
    const std::int8_t* a = p.a.block(p.block);
    const std::uint8_t* b = p.panel.data;
    const std::uint8_t* ahead = p.ahead;
    const auto fetch = [&] {
        if (p.ahead_step == 0) return;
        begin_next_page(ahead + (p.alone ? 0 : 4096), p.ahead_step);
        p.alone ? fetch_lines_near(ahead, p.ahead_step) : fetch_lines(ahead, p.ahead_step);
        ahead += p.ahead_step;
    };
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 8) {
        for (i64 step = 0; step < num_steps; ++step) {
            fetch();
            _tile_loadd(4, a, kTileK);
            _tile_loadd(6, b, kPanel * 4);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, b + 64, kPanel * 4);
            _tile_dpbssd(1, 4, 7);
            a += 2 * rows * kTileK;
            b += kTileK * kPanel;
        }
        _tile_stored(0, sums, kPanel * 4);
        _tile_stored(1, sums + 16, kPanel * 4);
        return;
    }
    _tile_zero(2);
    _tile_zero(3);
    for (i64 step = 0; step < num_steps; ++step) {
        fetch();
        _tile_loadd(6, b, kPanel * 4);
        _tile_loadd(4, a, kTileK);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, b + 64, kPanel * 4);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, a + rows * kTileK, kTileK);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        a += 2 * rows * kTileK;
        b += kTileK * kPanel;
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + 16, kPanel * 4);
    _tile_stored(2, sums + rows * kPanel, kPanel * 4);
    _tile_stored(3, sums + rows * kPanel + 16, kPanel * 4);
}

inline void parts_store(const PartsPass& p, const std::int32_t* sums, const Matrix& out,
                        i64 first_column) {
    const i64 rows = p.a.rows_of(p.block), first_row = p.block * kPartRows;
    const bool past_caches =
        out.dtype == DType::f32 && amx_streams(out) && first_column + kPanel <= out.cols;
    for (i64 c = 0; c < kPanel; c += VF::W) {
        const i64 column = first_column + c, count = min64(VF::W, out.cols - column);
        if (count <= 0) continue;
        const VF scale = load(p.panel.column_scales() + c);
        for (i64 r = 0; r < rows; ++r) {
            const std::int32_t* at = sums + r * kPanel + c;
            const VF high{_mm512_cvtepi32_ps(_mm512_load_si512(at))};
            const VF low{_mm512_cvtepi32_ps(_mm512_load_si512(at + rows * kPanel))};
            const VF sum = fma(high, set1(128.0f), low);
            const VF value = mul(sum, mul(scale, set1(p.a.scales[first_row + r])));
            if (past_caches) {
                _mm512_stream_ps(out.row<float>(first_row + r) + column, value.v);
            } else if (out.dtype == DType::f32) {
                store_n(out.row<float>(first_row + r) + column, value, count);
            } else {
                store_n(out.row<bf16>(first_row + r) + column, value, count);
            }
        }
    }
}

// Rows [begin, end) of some panels; begin is the first of a block.
inline void parts_product(const ActivationParts& a, i64 begin, i64 end, const PackedWeight& w,
                          i64 first_panel, i64 last_panel, i64 next, const Matrix& out) {
    alignas(64) std::int32_t sums[2 * kPartRows * kPanel];
    constexpr i64 kStep = kTileK * kPanel;
    const i64 first = begin / kPartRows, last = ceil_div(end, kPartRows);
    // A block alone asks for its weights two steps on, running into the next panel. Several share
    // asking for the next panel, an even rate of it while they compute.
    const bool alone = last - first == 1;
    const i64 share = round_up(ceil_div(kStep, last - first), 64);
    i64 configured = 0;
    for (i64 panel = first_panel; panel < last_panel; ++panel) {
        const CellPanel& now = w.cells[panel];
        for (i64 block = first; block < last; ++block) {
            if (a.rows_of(block) != configured) {
                configured = a.rows_of(block);
                configure_parts(configured);
            }
            const i64 after = panel + 1 < last_panel ? panel + 1 : next;
            const bool more = after >= 0 && (block - first) * share < kStep;
            const std::uint8_t* ahead = now.data + 2 * kStep;
            if (!alone && more) {
                ahead = w.cells[after].data + (block - first) * share * (a.k_padded / kTileK);
            }
            const PartsPass p{a, block, now, alone, ahead, alone || more ? share : 0};
            parts_sums(p, sums);
            parts_store(p, sums, out, panel * kPanel);
        }
    }
    _tile_release();
    _mm_sfence();  // what was streamed is seen by whoever sees that this task is done
}

}  // namespace octavo::OCTAVO_LEVEL
