// The LM head: logits for the rows that need them, and for the others no more than the column of
// their largest. Those never leave the second cache: a piece of the product goes to scratch memory,
// and all that is kept of it is the best of each row.
#pragma once

#include "gemm.hpp"
#include "sampler_row.hpp"

namespace octavo::OCTAVO_LEVEL {

// A value and its column as one number. The largest is the largest value, and of equals the first
// column, in whatever order they come; 0 is below all.
inline std::uint64_t ranked(float value, i64 column) {
    const auto key = static_cast<std::uint32_t>(key_of(value + 0.0f)) ^ 0x80000000u;  // -0 equals 0
    return std::uint64_t{key} << 32 | (0xffffffffu - static_cast<std::uint32_t>(column));
}

inline std::int32_t column_of(std::uint64_t rank) {
    return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(rank));
}

inline float highest_of(const float* values, i64 count) {
    VF most = set1(-__builtin_inff());
    i64 i = 0;
    for (; i + VF::W <= count; i += VF::W) most = max(load(values + i), most);  // passes over NaNs
    float highest = reduce_max(most);
    for (; i < count; ++i) highest = values[i] > highest ? values[i] : highest;
    return highest;
}

// *best becomes the rank of the best of these values, if that is higher.
inline void keep_best_of(const float* values, i64 first_column, i64 count, std::uint64_t* best) {
    const float highest = highest_of(values, count);
    std::uint64_t before = __atomic_load_n(best, __ATOMIC_RELAXED);
    if (highest == -__builtin_inff() || ranked(highest, first_column) <= before) return;
    i64 at = 0;
    while (at + VF::W <= count && reaching(load(values + at), highest) == 0) at += VF::W;
    while (!(values[at] == highest)) ++at;
    const std::uint64_t rank = ranked(highest, first_column + at);
    while (rank > before && !__atomic_compare_exchange_n(best, &before, rank, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// Logits are read much later: past the caches, where that can be, they push out no weights.
inline void copy_away(const float* from, i64 count, float* to) {
    i64 i = 0;
#if defined(__AVX512F__)
    if (reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
        for (; i + VF::W <= count; i += VF::W) _mm512_stream_ps(to + i, load(from + i).v);
    }
#endif
    std::memcpy(to + i, from + i, static_cast<std::size_t>(count - i) * 4);
}

// A sink (gemm.hpp): pieces in scratch memory.
struct BestColumns {
    static constexpr i64 kTogether = 1;
    const HeadArgs& args;
    std::uint64_t* best;  // [rows] ranks

    // Half a megabyte, beside as much of weights.
    i64 most_panels(i64 rows) const { return max64(1, (i64{1} << 17) / (rows * kPanel)); }

    // Rows and columns count as in the whole product. Rows lie apart by no power of two, so that
    // their lines find places in the caches.
    template <class F>
    void take(const Piece& p, F product) const {
        const i64 rows = p.end - p.row, first = p.first * kPanel;
        const i64 stride = (p.last - p.first) * kPanel + 16;
        auto* memory = static_cast<float*>(scratch(Scratch::piece, rows * stride * 4));
        const Matrix out{memory - p.row * stride - first, rows,
                         min64(p.last * kPanel, args.weight.n), stride, DType::f32};
        product(p, out);
        const i64 count = out.cols - first;
        for (i64 r = p.row; r < p.end; ++r) {
            const float* values = out.row<float>(r) + first;
            if (args.argmax_only[r] != 0) {
                keep_best_of(values, first, count, best + r);
            } else {
                copy_away(values, count, args.logits.row<float>(r) + first);
            }
        }
#if defined(__AVX512F__)
        _mm_sfence();  // what was streamed is seen by whoever sees that this task is done
#endif
    }
};

inline void lm_head(const HeadArgs& args) {
    const i64 rows = args.x.rows;
    i64 num_argmax_only = 0;
    for (i64 r = 0; r < rows; ++r) {
        args.best[r] = -1;
        num_argmax_only += args.argmax_only[r] != 0;
    }
    if (num_argmax_only == 0) return linear(args.x, args.weight, args.logits);
    auto* best = static_cast<std::uint64_t*>(scratch(Scratch::ranks, rows * 8));
    for (i64 r = 0; r < rows; ++r) best[r] = 0;
    linear_into(args.x, args.weight, BestColumns{args, best});
    for (i64 r = 0; r < rows; ++r) {
        if (args.argmax_only[r] == 0) continue;
        if (best[r] != 0) {
            args.best[r] = column_of(best[r]);
            continue;
        }
        float* row = args.logits.row<float>(r);
        for (i64 i = 0; i < args.logits.cols; ++i) row[i] = -__builtin_inff();
    }
}

}  // namespace octavo::OCTAVO_LEVEL
