// The sampler of whole rows [V] float32: which token, and log probabilities. One thread a row, in a
// fixed order, so a result depends on neither the batch nor the threads. What is kept and drawn is
// defined in octavo/sampling (truncation.py, noise.py, sampler.py); this finds the same without
// sorting, and without a double exp or a logarithm for each token.
#pragma once

#include "sampler_row.hpp"

namespace octavo::OCTAVO_LEVEL {

// Step 4: (logit - max) / temperature, never -0.
struct Scale {
    float highest, temperature;

    float operator()(float logit) const {
        const float shifted = logit - highest;
        return (temperature == 1.0f ? shifted : shifted / temperature) + 0.0f;
    }

    VF operator()(VF logit) const {
        const VF shifted = sub(logit, set1(highest));
        return add(temperature == 1.0f ? shifted : div(shifted, set1(temperature)), zero());
    }

    // The logit that scales to `value`, or a little less.
    float inverse(float value) const { return lowered(highest + value * temperature); }

    // Below all logits that scale to the same as this one, rounding included.
    float lowered(float logit) const {
        const float size = __builtin_fabsf(logit) + __builtin_fabsf(highest);
        return logit - (size * 0x1p-20f + __FLT_MIN__);
    }
};

// Steps 4 to 8 of the sampler on one row.
class Draw {
public:
    Draw(const Row& row, const SampleArgs& args, i64 index)
        : row_(row),
          scaled{row.highest(), args.temperature[index]},
          floor_(args.min_p_floor[index]),
          top_k_(args.top_k[index]),
          top_p_(args.top_p[index]),
          memory_(static_cast<char*>(scratch(Scratch::items, row.size() * 2 * Tokens::kBytes))),
          tokens_(memory_, row.size()),
          spare_(memory_ + row.size() * Tokens::kBytes, row.size()) {
        const std::uint64_t seed = args.seeds[index];
        const auto position = static_cast<std::uint64_t>(args.positions[index]);
        key_ = mix64(mix64(seed + 0x9E3779B97F4A7C15u) + (position + 1) * 0xD1342543DE82EF95u);
    }

    i64 token() {
        best_id_ = row_.argmax();
        best_ratio_ = 1.0 / exponential(token_bits(key_, static_cast<std::uint64_t>(best_id_)));
        best_of_all_ = best_id_;
        num_kept_ = truncate();
        num_kept_ == kAll ? draw_from_all() : draw_from(num_kept_);
        return best_id_;
    }

    // Writes what token() drew from over the row: scaled logits, -inf where truncation dropped.
    void show(float* logits) const {
        for (i64 i = 0; i < row_.size(); ++i) {
            logits[i] = num_kept_ == kAll ? scaled(logits[i]) : -__builtin_inff();
        }
        for (i64 i = 0; i < num_kept_; ++i) logits[tokens_.ids[i]] = tokens_.values[i];
    }

private:
    static constexpr i64 kAll = -1, kUnsure = -2;

    // Steps 5 to 7: how many tokens stay, in tokens_ then with their weights, or kAll.
    i64 truncate() {
        const bool limited = top_k_ > 0 && top_k_ < row_.size();
        const bool floored = floor_ > -__builtin_inff();
        if (!limited && !floored) return top_p_ < 1.0 ? nucleus() : kAll;
        float bound = floored ? scaled.inverse(floor_) : -__FLT_MAX__;
        float least = floored ? floor_ : -__FLT_MAX__;
        if (limited) {
            const float reached = row_.floor_of(top_k_, spare_.ids);
            const float score = scaled(reached);
            if (score > least) bound = scaled.lowered(reached), least = score;
        }
        i64 count = row_.collect(bound, least, tokens_, scaled);
        if (limited) {
            for (i64 i = 0; i < count; ++i) tokens_.weights[i] = 1;
            count = keep_best(tokens_, count, top_k_, spare_);
        }
        const std::int64_t total = weigh(count);
        return top_p_ < 1.0 ? keep_best(tokens_, count, limit_of(total), spare_) : count;
    }

    // Step 7 over the whole row. As a rule few tokens matter: what those below a border weigh in
    // all need not be known exactly to know where the limit falls above it.
    i64 nucleus() {
        const float borders[] = {scaled.inverse(-3.5f), scaled.inverse(-6.0f),
                                 scaled.inverse(-9.0f)};
        double total, below[3];
        row_.weigh(scaled.temperature, borders, &total, below);
        for (int b = 0; b < 3; ++b) {
            if (total - below[b] < top_p_ * total * 1.001) continue;
            const i64 kept = nucleus_above(borders[b], below[b]);
            if (kept != kUnsure) return kept;
            break;
        }
        const i64 count = row_.collect(-__FLT_MAX__, -__FLT_MAX__, tokens_, scaled);
        return keep_best(tokens_, count, limit_of(weigh(count)), spare_);
    }

    // The nucleus if it lies above the border whatever the exact weight of the tokens below it,
    // which is `below` times 2^40 but for 2^-15 of it and for the rounding of each weight.
    i64 nucleus_above(float border, double below) {
        const i64 count = row_.collect(border, -__FLT_MAX__, tokens_, scaled);
        const std::int64_t above = weigh(count);
        const double unit = 1099511627776.0;
        const auto least = static_cast<std::int64_t>(below * (1.0 - 0x1p-15) * unit);
        const auto most = static_cast<std::int64_t>(below * (1.0 + 0x1p-15) * unit);
        Last last;
        const std::int64_t limit = limit_of(above + max64(least - row_.size(), 0));
        if (!find_last(tokens_, count, limit, spare_, &last)) return kUnsure;
        const bool same = last.weight >= limit_of(above + most + row_.size());
        // A token below the border may scale to the value of one above, and come before it.
        if (!same || last.value <= scaled(border)) return kUnsure;
        return keep_up_to(last, tokens_, count);
    }

    // Gives tokens_ their weights, and returns the sum.
    std::int64_t weigh(i64 count) const {
        std::int64_t total = 0;
        double clamped[kSpan];  // a loop of its own: else the compiler splits the next by cases
        for (i64 begin = 0; begin < count; begin += kSpan) {
            const i64 span = min64(kSpan, count - begin);
            const float* values = tokens_.values + begin;
            std::int64_t* weights = tokens_.weights + begin;
            for (i64 i = 0; i < span; ++i) clamped[i] = at_least_minus_40(values[i]);
            for (i64 i = 0; i < span; ++i) weights[i] = fixed_exp(clamped[i]);
            for (i64 i = 0; i < span; ++i) total += weights[i];
        }
        return total;
    }

    // ceil(top_p * total), exactly.
    std::int64_t limit_of(std::int64_t total) const {
        int exponent;
        const double fraction = frexp(top_p_, &exponent);
        const int shift = 53 - exponent;
        if (shift > 120) return 1;
        __extension__ typedef unsigned __int128 Wide;
        const Wide product = static_cast<Wide>(ldexp(fraction, 53)) * static_cast<Wide>(total);
        const Wide one = 1;
        return static_cast<std::int64_t>((product + ((one << shift) - 1)) >> shift);
    }

    // A token whose u is above its weight over the best ratio so far can't win, as q > u.
    void consider(std::int32_t id, float x, std::uint32_t bits) {
        const double ratio = ::exp(static_cast<double>(x)) / exponential(bits);
        if (ratio > best_ratio_ || (ratio == best_ratio_ && id < best_id_)) {
            best_ratio_ = ratio;
            best_id_ = id;
        }
    }

    void draw_from(i64 count) {
        alignas(64) std::uint32_t bits[kSpan];
        for (i64 begin = 0; begin < count; begin += kSpan) {
            const i64 span = min64(kSpan, count - begin);
            const std::int32_t* ids = tokens_.ids + begin;
            const std::int64_t* weights = tokens_.weights + begin;
            for (i64 i = 0; i < span; ++i) {
                bits[i] = token_bits(key_, static_cast<std::uint64_t>(ids[i]));
            }
            // The weight in 2^-40, rounded up, against u * best_ratio in the same unit.
            const double factor = best_ratio_ * 256.0;
            const auto possible = [&](i64 i) {
                return static_cast<double>(bits[i]) * factor <= static_cast<double>(weights[i] + 1);
            };
            int any = 0;
            for (i64 i = 0; i < span; ++i) any |= possible(i);
            if (!any) continue;
            for (i64 i = 0; i < span; ++i) {
                if (possible(i) && ids[i] != best_of_all_) {
                    consider(ids[i], tokens_.values[begin + i], bits[i]);
                }
            }
        }
    }

    void draw_from_all() {
        const float* logits = row_.logits();
        const float slack = 1.0f + 0x1p-12f;  // covers what float32 rounds away below
        alignas(64) std::uint32_t bits[kSpan];
        alignas(64) float limits[kSpan], shifted[kSpan];
        for (i64 begin = 0; begin < row_.size(); begin += kSpan) {
            const i64 count = min64(kSpan, row_.size() - begin);
            for (i64 i = 0; i < count; ++i) shifted[i] = scaled(logits[begin + i]);
            for (i64 i = 0; i < count; ++i) {
                bits[i] = token_bits(key_, static_cast<std::uint64_t>(begin + i));
            }
            const VF factor = set1(static_cast<float>(4294967296.0 / best_ratio_) * slack);
            for_vectors(count, [&](i64 i, i64 n) {
                store_some(limits + i, mul(exp(load_some(shifted + i, n)), factor), n);
            });
            int any = 0;
            for (i64 i = 0; i < count; ++i) {
                any |= static_cast<float>(bits[i]) <= limits[i];
            }
            if (!any) continue;
            for (i64 i = 0; i < count; ++i) {
                if (static_cast<float>(bits[i]) <= limits[i] && begin + i != best_of_all_) {
                    consider(static_cast<std::int32_t>(begin + i), shifted[i], bits[i]);
                }
            }
        }
    }

    const Row& row_;
    const Scale scaled;
    float floor_;
    i64 top_k_;
    double top_p_;
    std::uint64_t key_;
    char* memory_;
    Tokens tokens_, spare_;
    i64 num_kept_ = kAll;
    i64 best_id_ = 0, best_of_all_ = 0;
    double best_ratio_ = 0.0;
};

inline void sample(const SampleArgs& args) {
    parallel_for(args.num_rows, 1, [&](i64 index) {
        float* logits = args.logits.row<float>(args.rows[index]);
        const Row row(logits, args.logits.cols);
        if (row.highest() == -__builtin_inff() || row.highest() == __builtin_inff()) {
            args.out[index] = -1;
        } else if (args.temperature[index] == 0.0f) {
            args.out[index] = static_cast<std::int32_t>(row.argmax());
        } else {
            Draw draw(row, args, index);
            args.out[index] = static_cast<std::int32_t>(draw.token());
            if (args.show[index]) draw.show(logits);
        }
    });
}

// Bars every token whose bit is not set in its row's mask.
inline void mask(const MaskArgs& args) {
    parallel_for(args.num_rows, 1, [&](i64 index) {
        float* logits = args.logits.row<float>(args.rows[index]);
        const std::uint8_t* mask = args.masks + index * args.num_bytes;
        for (i64 begin = 0; begin < args.logits.cols; begin += 32) {
            std::uint32_t bits = 0;
            const i64 left = args.num_bytes - begin / 8;
            if (left > 0)
                std::memcpy(&bits, mask + begin / 8, static_cast<std::size_t>(min64(4, left)));
            if (bits == 0xffffffffu) continue;
            const i64 count = min64(32, args.logits.cols - begin);
            for (i64 i = 0; i < count; ++i) {
                const float logit = logits[begin + i];
                logits[begin + i] = (bits >> i) & 1u ? logit : -__builtin_inff();
            }
        }
    });
}

inline void logprobs(const LogprobArgs& args) {
    parallel_for(args.num_rows, 1, [&](i64 index) {
        const Row row(args.logits.row<float>(args.rows[index]), args.logits.cols);
        const float* logits = row.logits();
        const float highest = row.highest();
        args.ranks[index] = 0;
        if (highest == -__builtin_inff() || highest == __builtin_inff()) return;
        const double sum = sum_exp(logits, row.size(), highest);
        args.log_sum_exps[index] = static_cast<double>(highest) + ::log(sum);
        const i64 token = args.token_ids[index];
        const float value = logits[token];
        std::int32_t rank = 1;
        for (i64 i = 0; i < row.size(); ++i) rank += logits[i] > value;
        for (i64 i = 0; i < token; ++i) rank += logits[i] == value;
        args.ranks[index] = rank;
        if (args.num_top == 0) return;
        const i64 size = row.size();
        Tokens tokens(static_cast<char*>(scratch(Scratch::items, size * 2 * Tokens::kBytes)), size);
        Tokens spare(reinterpret_cast<char*>(tokens.weights) + size * Tokens::kBytes, size);
        const auto same = [](VF logit) { return add(logit, zero()); };
        const float reached = row.floor_of(args.num_top, spare.ids);
        i64 count = row.collect(reached, reached, tokens, same);
        for (i64 i = 0; i < count; ++i) tokens.weights[i] = 1;
        count = keep_best(tokens, count, args.num_top, spare);
        tokens.sort(count);
        for (i64 i = 0; i < args.num_top; ++i) {
            args.top[index * args.num_top + i] = tokens.ids[i];
        }
    });
}

}  // namespace octavo::OCTAVO_LEVEL
