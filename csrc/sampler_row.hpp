// One row of logits [V] float32 as the sampler sees it: weights, noise, and finding the best tokens
// without sorting. What is kept is defined in octavo/sampling (truncation.py, noise.py).
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

// 2^x for -126 <= x <= 0 within 2^-18 (a polynomial of least relative error for the fraction).
inline VF exp2_roughly(VF x) {
    const VF n = round(x), f = sub(x, n);
    VF p = fma(set1(9.5701022e-3f), f, set1(5.5917863e-2f));
    p = fma(p, f, set1(2.4024744e-1f));
    p = fma(p, f, set1(6.9312179e-1f));
    p = fma(p, f, set1(9.9999928e-1f));
    return mul(p, pow2(n));
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

// Some tokens of a row, side by side.
struct Tokens {
    float* values;
    std::int32_t* ids;
    std::int64_t* weights;

    static constexpr i64 kBytes = 16;  // of one token

    Tokens(char* memory, i64 capacity)
        : values(reinterpret_cast<float*>(memory + 8 * capacity)),
          ids(reinterpret_cast<std::int32_t*>(memory + 12 * capacity)),
          weights(reinterpret_cast<std::int64_t*>(memory)) {}

    void copy(i64 to, const Tokens& from, i64 i) const {
        values[to] = from.values[i];
        ids[to] = from.ids[i];
        weights[to] = from.weights[i];
    }

    // By value descending; of equal values those first that were first.
    void sort(i64 count) const {
        for (i64 end = 1; end < count; ++end) {
            const float value = values[end];
            const std::int32_t id = ids[end];
            const std::int64_t weight = weights[end];
            i64 at = end;
            for (; at > 0 && values[at - 1] < value; --at) copy(at, *this, at - 1);
            values[at] = value, ids[at] = id, weights[at] = weight;
        }
    }
};

// The worst token that stays, and the weight of all that do.
struct Last {
    float value;
    std::int32_t id;
    std::int64_t weight;
};

// Best first, tokens stay while those before them weigh less than `limit`. Where that leaves some
// out, finds the last to stay. tokens: ids ascending, and none is -0. The token is looked for in
// one of kBins equal ranges of values, then in a part of that, until few are left or all are equal.
inline bool find_last(const Tokens& tokens, i64 count, std::int64_t limit, const Tokens& spare,
                      Last* last) {
    constexpr i64 kBins = 256, kFew = 24;
    Tokens from = tokens;
    std::int64_t weight = 0;
    for (;;) {
        std::int32_t low = kInfinityKey, high = -kInfinityKey - 1;
        for (i64 i = 0; i < count; ++i) {
            const std::int32_t key = key_of(from.values[i]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (count <= kFew) from.sort(count);
        if (count <= kFew || low == high) break;
        const auto top = static_cast<std::uint32_t>(high);
        int shift = 0;
        while (((top - static_cast<std::uint32_t>(low)) >> shift) >= kBins) ++shift;
        const float best = value_of(high), scale = (kBins - 1) / (best - value_of(low));
        const bool even = scale > 0.0f && scale < __builtin_inff();  // else by the bits
        const auto bin_of = [=](float value) {
            const auto key = static_cast<std::uint32_t>(key_of(value));
            return even ? static_cast<std::int32_t>((best - value) * scale)
                        : static_cast<std::int32_t>((top - key) >> shift);
        };
        std::int64_t sums[kBins + 1] = {};
        for (i64 i = 0; i < count; ++i) sums[bin_of(from.values[i])] += from.weights[i];
        i64 bin = 0;
        for (; bin <= kBins && weight + sums[bin] < limit; ++bin) weight += sums[bin];
        if (bin > kBins) return false;
        i64 num_there = 0;
        for (i64 i = 0; i < count; ++i) {
            if (bin_of(from.values[i]) == bin) spare.copy(num_there++, from, i);
        }
        from = spare;
        count = num_there;
    }
    for (i64 i = 0; i < count; ++i) {
        weight += from.weights[i];
        if (weight >= limit) {
            *last = {from.values[i], from.ids[i], weight};
            return true;
        }
    }
    return false;
}

// Those up to `last`, moved to the front.
inline i64 keep_up_to(const Last& last, const Tokens& tokens, i64 count) {
    i64 kept = 0;
    for (i64 i = 0; i < count; ++i) {
        const float value = tokens.values[i];
        const bool stays = value > last.value || (value == last.value && tokens.ids[i] <= last.id);
        tokens.copy(kept, tokens, i);
        kept += stays;
    }
    return kept;
}

inline i64 keep_best(const Tokens& tokens, i64 count, std::int64_t limit, const Tokens& spare) {
    Last last;
    return find_last(tokens, count, limit, spare, &last) ? keep_up_to(last, tokens, count) : count;
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
        for (i64 begin = 0; begin < size_; begin += kSpan) {
            if (!any_reaches(highest_, begin)) continue;
            for (i64 i = begin; i < size_; ++i) {
                if (logits_[i] == highest_) return i;
            }
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

    // Logits from `bound` up whose score, a rising function, reaches `least`: values (scores) and
    // ids, ascending.
    template <class Score>
    i64 collect(float bound, float least, const Tokens& out, Score score) const {
        i64 count = 0;
        for_vectors(size_, [&](i64 begin, i64 n) {
            const VF logit = load_some(logits_ + begin, n);
            const unsigned there = reaching(logit, bound) & ((1u << n) - 1u);
            if (there == 0) return;
            const VF scores = score(logit);
            const unsigned chosen = there & reaching(scores, least);
            const auto first = static_cast<std::int32_t>(begin);
            count += append(scores, first, chosen, out.values + count, out.ids + count);
        });
        return count;
    }

    // exp((logit - highest) / temperature) in float32, summed; and of logits below each border.
    // Within 2^-15 of each sum: for x > -40 2^-16 is what x rounds to, 2^-18 the power, 2^-18 sums
    // of 64 terms a lane; the rest is nothing.
    template <int N>
    void weigh(float temperature, const float (&borders)[N], double* total,
               double (&below)[N]) const {
        constexpr i64 kBlock = 256;
        const VF highest = set1(highest_), factor = set1(1.44269504f / temperature);
        *total = 0.0;
        for (double& sum : below) sum = 0.0;
        for (i64 begin = 0; begin < size_; begin += kBlock) {
            VF all = zero(), some[N];
            for (VF& sum : some) sum = zero();
            for_vectors(min64(kBlock, size_ - begin), [&](i64 i, i64 n) {
                const VF logit = load_some(logits_ + begin + i, n);
                const VF x = max(set1(-126.0f), mul(sub(logit, highest), factor));
                const VF weight = keep_first(exp2_roughly(x), n, 0.0f);
                all = add(all, weight);
                for (int b = 0; b < N; ++b) {
                    some[b] = add(some[b], sub(weight, zero_below(weight, logit, borders[b])));
                }
            });
            *total += static_cast<double>(reduce_add(all));
            for (int b = 0; b < N; ++b) below[b] += static_cast<double>(reduce_add(some[b]));
        }
    }

private:
    bool any_reaches(float bound, i64 begin) const {
        const i64 end = min64(begin + kSpan, size_);
        int any = 0;
        for (i64 i = begin; i < end; ++i) any |= logits_[i] >= bound;
        return any != 0;
    }

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

}  // namespace octavo::OCTAVO_LEVEL
