// Kernels that walk rows. A tail is a shorter vector with the same arithmetic.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_LEVEL {

// body(index, count) for vectors of a row; count == VF::W but for the tail.
template <class F>
inline void for_vectors(i64 columns, F body) {
    i64 i = 0;
    for (; i + VF::W <= columns; i += VF::W) body(i, i64{VF::W});
    if (i < columns) body(i, columns - i);
}

template <class T>
inline VF load_some(const T* p, i64 n) {
    return n == VF::W ? load(p) : load_n(p, n);
}
template <class T>
inline void store_some(T* p, VF a, i64 n) {
    n == VF::W ? store(p, a) : store_n(p, a, n);
}

template <class X, class O>
void norm_row(const X* x, float* residual, const float* weight, float eps, O* out, i64 columns) {
    VF sum = zero();
    for_vectors(columns, [&](i64 i, i64 n) {
        VF value = load_some(x + i, n);
        if (residual != nullptr) {
            value = add(load_some(residual + i, n), value);
            store_some(residual + i, value, n);
        }
        sum = fma(value, value, sum);
    });
    const float mean = reduce_add(sum) / static_cast<float>(columns);
    const VF scale = set1(1.0f / __builtin_sqrtf(mean + eps));
    for_vectors(columns, [&](i64 i, i64 n) {
        const VF value = residual != nullptr ? load_some(residual + i, n) : load_some(x + i, n);
        store_some(out + i, mul(mul(value, scale), load_some(weight + i, n)), n);
    });
}

inline void rms_norm(Matrix x, const Matrix* residual, const float* weight, float eps, Matrix out) {
    with_type(x.dtype, [&](auto* x_type) {
        using X = std::remove_pointer_t<decltype(x_type)>;
        with_type(out.dtype, [&](auto* out_type) {
            using O = std::remove_pointer_t<decltype(out_type)>;
            parallel_for(x.rows, row_grain(x.cols), [&](i64 t) {
                float* carried = residual != nullptr ? residual->row<float>(t) : nullptr;
                norm_row(x.row<X>(t), carried, weight, eps, out.row<O>(t), x.cols);
            });
        });
    });
}

inline void rotary(const std::int32_t* positions, Heads heads, Matrix cos_sin) {
    const i64 half = cos_sin.cols / 2;
    with_type(heads.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(heads.tokens, row_grain(heads.heads * heads.dim), [&](i64 t) {
            const float* cosine = cos_sin.row<float>(positions[t]);
            const float* sine = cosine + half;
            for (i64 h = 0; h < heads.heads; ++h) {
                T* low = heads.head<T>(t, h);
                T* high = low + half;
                for_vectors(half, [&](i64 i, i64 n) {
                    const VF c = load_some(cosine + i, n), s = load_some(sine + i, n);
                    const VF a = load_some(low + i, n), b = load_some(high + i, n);
                    store_some(low + i, sub(mul(a, c), mul(b, s)), n);
                    store_some(high + i, add(mul(b, c), mul(a, s)), n);
                });
            }
        });
    });
}

template <class T>
void silu_and_mul_row(const T* gate, const T* up, T* out, i64 columns) {
    for_vectors(columns, [&](i64 i, i64 n) {
        const VF x = load_some(gate + i, n);
        const VF silu = div(x, add(set1(1.0f), exp(sub(zero(), x))));
        store_some(out + i, mul(silu, load_some(up + i, n)), n);
    });
}

inline void silu_and_mul(Matrix gate_up, Matrix out) {
    with_type(out.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(out.rows, row_grain(2 * out.cols), [&](i64 t) {
            const T* gate = gate_up.row<T>(t);
            silu_and_mul_row(gate, gate + out.cols, out.row<T>(t), out.cols);
        });
    });
}

inline void copy_rows(Matrix x, const std::int32_t* indices, Matrix out) {
    with_type(x.dtype, [&](auto* x_type) {
        using X = std::remove_pointer_t<decltype(x_type)>;
        with_type(out.dtype, [&](auto* out_type) {
            using O = std::remove_pointer_t<decltype(out_type)>;
            parallel_for(out.rows, row_grain(out.cols), [&](i64 t) {
                const X* in = x.row<X>(indices[t]);
                O* to = out.row<O>(t);
                for_vectors(out.cols,
                            [&](i64 i, i64 n) { store_some(to + i, load_some(in + i, n), n); });
            });
        });
    });
}

// Where the elements of one key or value of a head lie: at + d / 2 * pair + d % 2 * odd.
struct KvStride {
    i64 at, pair, odd;
};

inline KvStride kv_stride(const KvPool& pool, bool value, i64 offset) {
    const i64 at = kv_offset(pool, value, offset, 0);
    return {at, kv_offset(pool, value, offset, 2) - at, kv_offset(pool, value, offset, 1) - at};
}

// Elements [d, d + 16) of a key or value; zeros from dim on.
template <class T, class X>
inline void load_sixteen(const X* in, i64 d, i64 dim, T* out) {
    for (i64 i = 0; i < 16; i += VF::W) {
        const i64 count = max64(0, min64(VF::W, dim - d - i));
        store(out + i, count == VF::W ? load(in + d + i)
                       : count > 0    ? load_n(in + d + i, count)
                                      : zero());
    }
}

// One key or value of a head, up to dim_padded (a multiple of 16).
template <class T, class X>
inline void cache_write_row(const X* in, const KvPool& pool, const KvStride& to, T* head) {
    T* at = head + to.at;
    alignas(64) T row[16];
    for (i64 d = 0; d < pool.dim_padded; d += 16) {
        load_sixteen(in, d, pool.dim, row);
        for (i64 i = 0; i < 16; i += 2, at += to.pair) {
            at[0] = row[i];
            at[to.odd] = row[i + 1];
        }
    }
}

template <class T>
void cache_write_token(const Heads& key, const Heads& value, const KvPool& pool, i64 layer,
                       const std::int32_t* slots, i64 t) {
    const i64 block = slots[t] / pool.block_size, offset = slots[t] % pool.block_size;
    const KvStride to_key = kv_stride(pool, false, offset),
                   to_value = kv_stride(pool, true, offset);
    with_type(key.dtype, [&](auto* type) {
        using X = std::remove_pointer_t<decltype(type)>;
        for (i64 h = 0; h < pool.num_heads; ++h) {
            T* head = reinterpret_cast<T*>(pool.head(block, layer, h));
            cache_write_row(key.head<X>(t, h), pool, to_key, head);
            cache_write_row(value.head<X>(t, h), pool, to_value, head);
        }
    });
}

// One key or value of a head as int8 with a scale of its own: the largest magnitude is 127. What is
// not finite gives a scale that is none, so all of this key or value is NaN when read.
template <class X>
inline void quantise_row(const X* in, const KvPool& pool, const KvStride& to, char* head,
                         i64 scale_at) {
    float largest = 0.0f;
    bool finite = true;
    for (i64 d = 0; d < pool.dim; ++d) {
        const float size = __builtin_fabsf(to_float(in[d]));
        finite = finite && size < __builtin_inff();
        largest = size > largest ? size : largest;
    }
    const float scale = finite ? largest / 127.0f : __builtin_nanf("");
    std::memcpy(head + scale_at, &scale, 4);
    // A subnormal scale has no inverse: what is that small counts as zero.
    const float inverse = finite && scale >= 1.2e-38f ? 1.0f / scale : 0.0f;
    auto* at = reinterpret_cast<std::int8_t*>(head) + to.at;
    for (i64 d = 0; d < pool.dim_padded; d += 2, at += to.pair) {
        for (i64 i = 0; i < 2; ++i) {
            float q =
                finite && d + i < pool.dim ? __builtin_rintf(to_float(in[d + i]) * inverse) : 0.0f;
            q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
            at[i * to.odd] = static_cast<std::int8_t>(q);
        }
    }
}

inline void cache_write_i8(const Heads& key, const Heads& value, const KvPool& pool, i64 layer,
                           const std::int32_t* slots, i64 t) {
    const i64 block = slots[t] / pool.block_size, offset = slots[t] % pool.block_size;
    const KvStride to_key = kv_stride(pool, false, offset),
                   to_value = kv_stride(pool, true, offset);
    const i64 key_scale = kv_scale_offset(pool, false, offset);
    const i64 value_scale = kv_scale_offset(pool, true, offset);
    with_type(key.dtype, [&](auto* type) {
        using X = std::remove_pointer_t<decltype(type)>;
        for (i64 h = 0; h < pool.num_heads; ++h) {
            char* head = pool.head(block, layer, h);
            quantise_row(key.head<X>(t, h), pool, to_key, head, key_scale);
            quantise_row(value.head<X>(t, h), pool, to_value, head, value_scale);
        }
    });
}

// Whether tokens [t, t + 16) fill a unit of their own, in order.
inline bool fills_unit(const std::int32_t* slots, i64 t, i64 end, const KvPool& pool) {
    if (!pool.has_units() || t + kUnit > end || slots[t] % kUnit != 0) return false;
    for (i64 i = 1; i < kUnit; ++i) {
        if (slots[t + i] != slots[t] + i) return false;
    }
    return true;
}

// The keys of 16 tokens, or their values, as a unit (kv_offset): keys are transposed, and in bf16
// two neighbours go side by side.
template <class T, class X>
inline void cache_write_unit(const Heads& from, i64 t, i64 h, const KvPool& pool, bool value,
                             T* to) {
    constexpr i64 kPair = 4 / static_cast<i64>(sizeof(T)), kColumns = 64;
    for (i64 d = 0; d < pool.dim_padded; d += kColumns) {
        const i64 columns = min64(kColumns, pool.dim_padded - d);
        alignas(64) T rows[kUnit][kColumns];
        for (i64 i = 0; i < kUnit; ++i) {
            for (i64 c = 0; c < columns; c += 16) {
                load_sixteen(from.head<X>(t + i, h), d + c, pool.dim, rows[i] + c);
            }
        }
        if (value) {
            for (i64 i = 0; i < kUnit; i += kPair) {
                T* line = to + i * pool.dim_padded + d * kPair;
                for (i64 c = 0; c < columns; ++c) {
                    for (i64 j = 0; j < kPair; ++j) *line++ = rows[i + j][c];
                }
            }
            continue;
        }
        for (i64 c = 0; c < columns; c += kPair) {
            for (i64 i = 0; i < kUnit; ++i) {
                std::memcpy(to + (d + c) * kUnit + i * kPair, rows[i] + c, 4);
            }
        }
    }
}

template <class T>
void cache_write_as(const Heads& key, const Heads& value, const KvPool& pool, i64 layer,
                    const std::int32_t* slots, i64 first, i64 end) {
    for (i64 t = first; t < end;) {
        if (!fills_unit(slots, t, end, pool)) {
            cache_write_token<T>(key, value, pool, layer, slots, t++);
            continue;
        }
        const i64 block = slots[t] / pool.block_size, offset = slots[t] % pool.block_size;
        with_type(key.dtype, [&](auto* type) {
            using X = std::remove_pointer_t<decltype(type)>;
            for (i64 h = 0; h < pool.num_heads; ++h) {
                T* head = reinterpret_cast<T*>(pool.head(block, layer, h));
                cache_write_unit<T, X>(key, t, h, pool, false,
                                       head + kv_offset(pool, false, offset, 0));
                cache_write_unit<T, X>(value, t, h, pool, true,
                                       head + kv_offset(pool, true, offset, 0));
            }
        });
        t += kUnit;
    }
}

inline void cache_write(Heads key, Heads value, KvPool pool, i64 layer, const std::int32_t* slots) {
    // Parts of some units each: the first and the last of a part may be cut.
    const i64 part = round_up(
        max64(row_grain(8 * key.heads * key.dim), key.tokens / (4 * num_threads())), kUnit);
    parallel_for(ceil_div(key.tokens, part), 1, [&](i64 index) {
        const i64 first = index * part, end = min64(first + part, key.tokens);
        if (pool.dtype == DType::i8) {
            for (i64 t = first; t < end; ++t) cache_write_i8(key, value, pool, layer, slots, t);
        } else if (pool.dtype == DType::f32) {
            cache_write_as<float>(key, value, pool, layer, slots, first, end);
        } else {
            cache_write_as<bf16>(key, value, pool, layer, slots, first, end);
        }
    });
}

}  // namespace octavo::OCTAVO_LEVEL
