// The sampler of whole rows [V] float32: which token, and log probabilities. One thread a row, in a
// fixed order, so a result depends on neither the batch nor the threads. What is kept and drawn is
// defined in octavo/sampling (truncation.py, noise.py, sampler.py); this finds the same without
// sorting, and without a double exp or a logarithm for each token.
#pragma once

#include <math.h>

#include "elementwise.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kSpan = 64;  // tokens that are looked at together
constexpr std::int32_t kInfinityKey = 0x7f800000;

// Integers in the order of floats (-0 just below +0); a NaN lies beyond the infinities.
inline std::int32_t key_of(float value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float value_of(std::int32_t key) {
    const std::int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// exp for -709 < x <= 0 within 1 ulp, in plain arithmetic that compilers vectorise.
inline double exp_double(double x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const double shifted = x * 1.4426950408889634 + magic;
    const double n = shifted - magic;
    const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    std::uint64_t bits, scale;
    std::memcpy(&scale, &shifted, 8);
    std::memcpy(&bits, &p, 8);
    bits += scale << 52;  // the low bits of `shifted` are n
    double out;
    std::memcpy(&out, &bits, 8);
    return out;
}

// exp(x), -40 <= x <= 0, in multiples of 2^-40, rounded to nearest even.
inline std::int64_t fixed_exp(double x) {
    const double shifted = exp_double(x) * 1099511627776.0 + 4503599627370496.0;
    std::int64_t bits;
    std::memcpy(&bits, &shifted, 8);
    return bits & ((std::int64_t{1} << 52) - 1);
}

inline double at_least_minus_40(float x) { return static_cast<double>(x < -40.0f ? -40.0f : x); }

// The weight of a token: exp(scaled) in multiples of 2^-40; 0 far below.
inline std::int64_t fixed_weight(float scaled) { return fixed_exp(at_least_minus_40(scaled)); }

inline double weight_below(float logit, float highest) {
    const double x = static_cast<double>(logit) - static_cast<double>(highest);
    const double weight = exp_double(x < -700.0 ? -700.0 : x);
    return x < -700.0 ? 0.0 : weight;
}

// Sum of exp(logit - highest): eight chains in a fixed order, whatever the vectors are.
inline double sum_exp(const float* logits, i64 size, float highest) {
    double sums[8] = {};
    i64 begin = 0;
    for (; begin + 8 <= size; begin += 8) {
        for (i64 i = 0; i < 8; ++i) sums[i] += weight_below(logits[begin + i], highest);
    }
    for (i64 i = 0; begin + i < size; ++i) sums[i] += weight_below(logits[begin + i], highest);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

inline std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// 32 random bits of a token, from the key of (seed, position).
inline std::uint32_t token_bits(std::uint64_t key, std::uint64_t token) {
    std::uint64_t z = key + token * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<std::uint32_t>(z >> 32);
}

inline double exponential(std::uint32_t bits) {
    return -log1p(-((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

struct Candidate {
    float value;
    std::int32_t id;
};

// The one order everywhere: value descending, id ascending.
inline bool before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

inline void sift_down(Candidate* heap, i64 at, i64 count) {
    const Candidate moved = heap[at];
    for (;;) {
        i64 child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && before(heap[child], heap[child + 1])) ++child;
        if (!before(moved, heap[child])) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

// Best first. (No std::sort here: see common.hpp about shared inline functions.)
inline void sort_best_first(Candidate* items, i64 count) {
    for (i64 i = count / 2 - 1; i >= 0; --i) sift_down(items, i, count);
    for (i64 end = count - 1; end > 0; --end) {
        const Candidate last = items[end];
        items[end] = items[0];
        items[0] = last;
        sift_down(items, 0, end);
    }
}

// One row of logits, cleaned of NaNs.
class Row {
public:
    Row(float* logits, i64 size) : logits_(logits), size_(size) {
        std::int32_t low = kInfinityKey, high = key_of(-__builtin_inff());
        bounds(&low, &high);
        if (high > kInfinityKey || low < key_of(-__builtin_inff())) {
            for (i64 i = 0; i < size; ++i) {
                if (logits[i] != logits[i]) logits[i] = -__builtin_inff();
            }
            low = kInfinityKey, high = key_of(-__builtin_inff());
            bounds(&low, &high);
        }
        highest_ = value_of(high);
    }

    float highest() const { return highest_; }
    i64 size() const { return size_; }
    const float* logits() const { return logits_; }

    i64 argmax() const {
        for (i64 i = 0; i < size_; ++i) {
            if (logits_[i] == highest_) return i;
        }
        return 0;
    }

    // A value that at least `num` tokens reach, from the maxima of spans; -inf: look at all.
    float floor_of(i64 num, std::int32_t* maxima) const {
        const i64 num_spans = size_ / kSpan;
        if (num > num_spans) return -__builtin_inff();
        for (i64 s = 0; s < num_spans; ++s) {
            std::int32_t high = key_of(-__builtin_inff());
            for (i64 i = s * kSpan; i < (s + 1) * kSpan; ++i) {
                const std::int32_t key = key_of(logits_[i]);
                high = key > high ? key : high;
            }
            maxima[s] = high;
        }
        // The num-th largest, by bisection over the keys: 32 passes over a few hundred integers.
        i64 low = key_of(-__builtin_inff()), top = i64{kInfinityKey} + 1;
        while (top - low > 1) {
            const i64 middle = low + (top - low) / 2;
            i64 count = 0;
            for (i64 s = 0; s < num_spans; ++s) count += maxima[s] >= middle;
            (count >= num ? low : top) = middle;
        }
        return value_of(static_cast<std::int32_t>(low));
    }

    // Tokens whose score(logit), a rising function, reaches that of `floor`; ids ascending.
    template <class Score>
    i64 collect(float floor, Candidate* out, Score score) const {
        const float least = score(floor);
        i64 count = 0;
        for (i64 begin = 0; begin < size_; begin += kSpan) {
            const i64 end = min64(begin + kSpan, size_);
            int any = 0;
            for (i64 i = begin; i < end; ++i) any |= score(logits_[i]) >= least;
            if (!any) continue;
            for (i64 i = begin; i < end; ++i) {
                const float value = score(logits_[i]);
                if (value >= least) out[count++] = Candidate{value, static_cast<std::int32_t>(i)};
            }
        }
        return count;
    }

    // The `num` best by score, best first; out has room for all tokens.
    template <class Score>
    i64 best(i64 num, Candidate* out, std::int32_t* maxima, Score score) const {
        num = min64(num, size_);
        const i64 count = collect(floor_of(num, maxima), out, score);
        sort_best_first(out, count);
        return min64(num, count);
    }

private:
    void bounds(std::int32_t* low, std::int32_t* high) const {
        std::int32_t least = *low, most = *high;
        for (i64 i = 0; i < size_; ++i) {
            const std::int32_t key = key_of(logits_[i]);
            least = key < least ? key : least;
            most = key > most ? key : most;
        }
        *low = least, *high = most;
    }

    float* logits_;
    i64 size_;
    float highest_;
};

// Step 4: (logit - max) / temperature.
struct Scale {
    float highest, temperature;
    float operator()(float logit) const {
        const float shifted = logit - highest;
        return temperature == 1.0f ? shifted : shifted / temperature;
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
          top_p_(args.top_p[index]) {
        const std::uint64_t seed = args.seeds[index];
        const auto position = static_cast<std::uint64_t>(args.positions[index]);
        key_ = mix64(mix64(seed + 0x9E3779B97F4A7C15u) + (position + 1) * 0xD1342543DE82EF95u);
        const i64 size = row.size();
        candidates_ =
            static_cast<Candidate*>(scratch(Scratch::items, size * (i64{sizeof(Candidate)} + 8)));
        weights_ = reinterpret_cast<std::int64_t*>(candidates_ + size);
        maxima_ = reinterpret_cast<std::int32_t*>(weights_);  // never both in one draw
    }

    i64 token() {
        best_id_ = row_.argmax();
        best_ratio_ = 1.0 / exponential(token_bits(key_, static_cast<std::uint64_t>(best_id_)));
        best_of_all_ = best_id_;
        if (top_k_ > 0 && top_k_ < row_.size()) {
            i64 count = row_.best(top_k_, candidates_, maxima_, scaled);
            while (count > 1 && candidates_[count - 1].value < floor_) --count;
            if (top_p_ < 1.0) count = cut(count, limit_of(sum(count)));
            draw_from(count);
        } else if (top_p_ < 1.0) {
            draw_from(cut_whole_row());
        } else {
            draw_from_all();
        }
        return best_id_;
    }

private:
    std::int64_t sum(i64 count) const {
        std::int64_t total = 0;
        for (i64 i = 0; i < count; ++i) total += fixed_weight(candidates_[i].value);
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

    // How many of the sorted candidates top-p keeps: while the sum before is below the limit.
    i64 cut(i64 count, std::int64_t limit) const {
        std::int64_t before = 0;
        i64 kept = 0;
        while (kept < count && before < limit) {
            before += fixed_weight(candidates_[kept].value);
            ++kept;
        }
        return kept;
    }

    // Weights of scaled logits [begin, begin + count) that min_p leaves; 0 for the others.
    std::int64_t weigh(i64 begin, i64 count, float* shifted, std::int64_t* weights) const {
        const float* logits = row_.logits() + begin;
        const auto floor = static_cast<double>(floor_);
        for (i64 i = 0; i < count; ++i) shifted[i] = scaled(logits[i]);
        std::int64_t total = 0;
        double clamped[kSpan];  // a loop of its own: else the compiler splits the next by cases
        for (i64 i = 0; i < count; ++i) clamped[i] = at_least_minus_40(shifted[i]);
        for (i64 i = 0; i < count; ++i) weights[i] = fixed_exp(clamped[i]);
        for (i64 i = 0; i < count; ++i) {
            weights[i] = static_cast<double>(shifted[i]) >= floor ? weights[i] : 0;
        }
        for (i64 i = 0; i < count; ++i) total += weights[i];
        return total;
    }

    // Top-p without sorting: the value t down to which the weights reach the limit is found by
    // bisection among the tokens that may matter. All above t stay; of those at t, by id, as many
    // as the limit still wants.
    i64 cut_whole_row() {
        alignas(64) float shifted[kSpan];
        alignas(64) std::int64_t weights[kSpan];
        std::int64_t total = 0;
        for (i64 begin = 0; begin < row_.size(); begin += kSpan) {
            total += weigh(begin, min64(kSpan, row_.size() - begin), shifted, weights);
        }
        const std::int64_t limit = limit_of(total);
        i64 count = 0;
        for (float least = -4.0f;; least = least < -8.0f ? -__builtin_inff() : 2.0f * least) {
            std::int64_t reached = 0;
            count = 0;
            for (i64 begin = 0; begin < row_.size(); begin += kSpan) {
                const i64 size = min64(kSpan, row_.size() - begin);
                int any = 0;
                for (i64 i = 0; i < size; ++i) {
                    shifted[i] = scaled(row_.logits()[begin + i]);
                    any |= shifted[i] >= least;
                }
                if (!any) continue;
                for (i64 i = 0; i < size; ++i) {
                    if (!(shifted[i] >= least && shifted[i] >= floor_)) continue;
                    candidates_[count] =
                        Candidate{shifted[i], static_cast<std::int32_t>(begin + i)};
                    weights_[count] = fixed_weight(shifted[i]);
                    reached += weights_[count++];
                }
            }
            if (reached >= limit) break;
        }
        return keep(count, limit);
    }

    i64 keep(i64 count, std::int64_t limit) {
        i64 low = key_of(-__builtin_inff()), high = 1;  // keys: the sum at `low` reaches the limit
        while (high - low > 1) {
            const i64 middle = low + (high - low) / 2;
            const float value = value_of(static_cast<std::int32_t>(middle));
            std::int64_t sum = 0;
            for (i64 i = 0; i < count; ++i) sum += candidates_[i].value >= value ? weights_[i] : 0;
            (sum >= limit ? low : high) = middle;
        }
        const float value = value_of(static_cast<std::int32_t>(low));
        std::int64_t before = 0;
        for (i64 i = 0; i < count; ++i) before += candidates_[i].value > value ? weights_[i] : 0;
        i64 kept = 0;
        for (i64 i = 0; i < count; ++i) {
            const bool at = candidates_[i].value == value;
            if (candidates_[i].value < value || (at && before >= limit)) continue;
            before += at ? weights_[i] : 0;
            candidates_[kept++] = candidates_[i];
        }
        return kept;
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
        for (i64 i = 0; i < count; ++i) {
            const Candidate& one = candidates_[i];
            if (one.id == best_of_all_) continue;
            const std::uint32_t bits = token_bits(key_, static_cast<std::uint64_t>(one.id));
            // The weight in 2^-40, rounded up, against u * best_ratio in the same unit.
            const double least = static_cast<double>(bits) * best_ratio_ * 256.0;
            if (least <= static_cast<double>(fixed_weight(one.value) + 1)) {
                consider(one.id, one.value, bits);
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
                any |= (static_cast<float>(bits[i]) <= limits[i]) & (shifted[i] >= floor_);
            }
            if (!any) continue;
            for (i64 i = 0; i < count; ++i) {
                const bool possible =
                    static_cast<float>(bits[i]) <= limits[i] && shifted[i] >= floor_;
                if (possible && begin + i != best_of_all_) {
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
    Candidate* candidates_;
    std::int64_t* weights_;
    std::int32_t* maxima_;
    i64 best_id_ = 0, best_of_all_ = 0;
    double best_ratio_ = 0.0;
};

inline void sample(const SampleArgs& args) {
    parallel_for(args.num_rows, 1, [&](i64 index) {
        const Row row(args.logits.row<float>(args.rows[index]), args.logits.cols);
        if (row.highest() == -__builtin_inff() || row.highest() == __builtin_inff()) {
            args.out[index] = -1;
        } else if (args.temperature[index] == 0.0f) {
            args.out[index] = static_cast<std::int32_t>(row.argmax());
        } else {
            args.out[index] = static_cast<std::int32_t>(Draw(row, args, index).token());
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
        auto* items =
            static_cast<Candidate*>(scratch(Scratch::items, size * (i64{sizeof(Candidate)} + 8)));
        auto* maxima = reinterpret_cast<std::int32_t*>(items + size);
        row.best(args.num_top, items, maxima, [](float logit) { return logit; });
        for (i64 i = 0; i < args.num_top; ++i) args.top[index * args.num_top + i] = items[i].id;
    });
}

}  // namespace octavo::OCTAVO_LEVEL
