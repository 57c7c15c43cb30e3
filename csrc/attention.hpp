// Causal attention over the paged pool, prefill and decode in one arithmetic.
//
// Keys are walked in tiles of 64 and splits of 512, both counted from position 0 of the sequence:
// online softmax inside a split, splits merged in order by log-sum-exp. A query row therefore does
// the same sums in the same order whether it comes alone or in a chunk, whatever the block size.
// Keys past a row's own length get p = 0; adding 0 * v changes no bits (the last step turns -0,
// the one thing it could change, into +0). Slots past seq_len may hold anything, so V is copied
// with zeros there.
#pragma once

#include "elementwise.hpp"
#include "micro.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kTileKeys = 64;
constexpr i64 kTileUnits = kTileKeys / kUnit;
constexpr i64 kSplitKeys = 512;
constexpr i64 kTileQueries = 48;  // query rows x heads that share one walk over K and V
constexpr float kMinusInf = -__builtin_inff();

#if defined(__AMX_BF16__)
using AttentionBf16 = DotTiles;
template <class D>
constexpr bool kOnTiles = std::is_same_v<D, DotTiles>;
#else
using AttentionBf16 = DotPacked;
template <class D>
constexpr bool kOnTiles = false;
#endif

// Query rows [first_row, first_row + num_rows) of a request, for the heads that share a KV head.
struct AttentionItem {
    i64 request, kv_head, first_row, num_rows;
};

// Online softmax of `count` queries: running maximum, sum and weighted values.
struct Softmax {
    float* m;
    float* l;
    float* acc;  // [count][dim_padded]
};

inline i64 softmax_floats(i64 count, i64 dim) { return round_up(2 * count, 16) + count * dim; }

inline Softmax softmax_at(float* memory, i64 count, i64 dim) {
    (void)dim;
    return {memory, memory + count, memory + round_up(2 * count, 16)};
}

template <class D>
struct AttentionTask {
    using A = typename D::A;
    using B = typename D::B;

    const AttentionArgs& args;
    const AttentionItem& item;
    i64 group, count, dim;   // heads a KV head, queries here, padded head_dim
    i64 room;                // queries that the buffers below have room for: whole tiles
    i64 first_len, seq_len;  // keys of the first row; of the request
    A* q;                    // [room][dim]
    float* scores;           // [room][kTileKeys]
    A* p;                    // [room][kTileKeys]
    VF* sums;                // [count] sums of p, lane by lane
    float* alpha;            // [count]
    float* values;           // [16][dim], on tiles only
    B* gathered;             // [kTileUnits][2][kUnit * dim]
    const B* k_units[kTileUnits];
    const B* v_units[kTileUnits];
    bool quantised = false;
    float key_scales[kTileKeys], value_scales[kTileKeys];  // of int8 K and V
    const AttentionItem* after = nullptr;  // the item that this thread most likely does next
    const char* ahead[kTileUnits];         // units of the tile after this one
    i64 num_ahead = 0, next_ahead = 0;

    i64 row_len(i64 query) const { return first_len + query / group; }
    i64 longest() const { return first_len + item.num_rows - 1; }

    static i64 scratch_bytes(i64 count, i64 dim) {
        const i64 a = static_cast<i64>(sizeof(A)), b = static_cast<i64>(sizeof(B));
        const i64 states = 2 * 4 * softmax_floats(count, dim);
        count = round_up(count, 16);
        return round_up(count * dim * a, 64) + count * kTileKeys * (4 + a) +
               count * static_cast<i64>(sizeof(VF)) + round_up(count * 4, 64) +
               2 * kTileKeys * dim * b + 16 * dim * 4 + 1024 + states;
    }

    AttentionTask(const AttentionArgs& args, const AttentionItem& item, char*& memory)
        : args(args), item(item) {
        group = args.query.heads / args.pool.num_heads;
        count = item.num_rows * group;
        dim = args.pool.dim_padded;
        quantised = args.pool.dtype == DType::i8;
        room = kOnTiles<D> ? round_up(count, 16) : count;
        seq_len = args.seq_lens[item.request];
        const i64 begin = args.query_start_loc[item.request];
        const i64 end = args.query_start_loc[item.request + 1];
        first_len = seq_len - (end - begin) + item.first_row + 1;
        auto take = [&](i64 bytes) {
            char* at = memory;
            memory += round_up(bytes, 64);
            return at;
        };
        q = reinterpret_cast<A*>(take(room * dim * static_cast<i64>(sizeof(A))));
        scores = reinterpret_cast<float*>(take(room * kTileKeys * 4));
        p = reinterpret_cast<A*>(take(room * kTileKeys * static_cast<i64>(sizeof(A))));
        sums = reinterpret_cast<VF*>(take(count * static_cast<i64>(sizeof(VF))));
        alpha = reinterpret_cast<float*>(take(count * 4));
        values = reinterpret_cast<float*>(take(kOnTiles<D> ? 16 * dim * 4 : 0));
        gathered = reinterpret_cast<B*>(take(2 * kTileKeys * dim * static_cast<i64>(sizeof(B))));
        load_queries(begin);
    }

    void load_queries(i64 begin) {
        with_type(args.query.dtype, [&](auto* type) {
            using X = std::remove_pointer_t<decltype(type)>;
            for (i64 i = 0; i < count; ++i) {
                const i64 token = begin + item.first_row + i / group;
                const X* in = args.query.head<X>(token, item.kv_head * group + i % group);
                for_vectors(args.query.dim, [&](i64 d, i64 n) {
                    store_some(q + i * dim + d, load_some(in + d, n), n);
                });
                for (i64 d = args.query.dim; d < dim; ++d) q[i * dim + d] = A{};
            }
        });
    }

    const B* head_of_block(i64 index) const {
        const i64 block = args.block_table[item.request * args.block_table_stride + index];
        return reinterpret_cast<const B*>(args.pool.head(block, args.layer, item.kv_head));
    }

    // An int8 unit in the form that attention computes in, without its scales: those of K count in
    // the scores, those of V in p, once for each key instead of once for each number.
    void expand_unit(const char* unit, B* out) const {
        const auto* q = reinterpret_cast<const std::int8_t*>(unit);
        if constexpr (sizeof(B) == 2) {  // int8 lies as bf16 does
            for (i64 i = 0; i < 2 * kUnit * dim; i += VF::W) store_exact(out + i, load(q + i));
        } else {
            KvPool from = args.pool, to = args.pool;
            from.block_size = to.block_size = kUnit;
            to.dtype = to.compute;
            for (i64 key = 0; key < kUnit; ++key) {
                for (i64 d = 0; d < dim; ++d) {
                    for (int value = 0; value < 2; ++value) {
                        out[kv_offset(to, value != 0, key, d)] =
                            static_cast<float>(q[kv_offset(from, value != 0, key, d)]);
                    }
                }
            }
        }
    }

    // Scales of 16 keys; zero past the end of the request, where they may be anything.
    void find_scales(i64 u, i64 position) {
        float* const to[2] = {key_scales + u * kUnit, value_scales + u * kUnit};
        const i64 size = args.pool.block_size, count = min64(kUnit, seq_len - position);
        const char* unit = args.pool.has_units() ? unit_at(item, position) : nullptr;
        for (int value = 0; value < 2; ++value) {
            if (unit != nullptr) {
                std::memcpy(to[value], unit + kv_scale_offset(args.pool, value != 0, 0), kUnit * 4);
            }
            for (i64 key = 0; key < count && unit == nullptr; ++key) {
                const i64 at = position + key;
                const auto* head = reinterpret_cast<const char*>(head_of_block(at / size));
                std::memcpy(to[value] + key,
                            head + kv_scale_offset(args.pool, value != 0, at % size), 4);
            }
            for (i64 key = count; key < kUnit; ++key) to[value][key] = 0.0f;
        }
    }

    const char* unit_at(const AttentionItem& of, i64 position) const {
        const i64 size = args.pool.block_size;
        const i64 block = args.block_table[of.request * args.block_table_stride + position / size];
        return args.pool.head(block, args.layer, of.kv_head) +
               position % size / kUnit * args.pool.unit_bytes();
    }

    // Notes where the next tile lies: of this item, else of the one after it.
    void look_ahead(i64 tile, i64 end) {
        num_ahead = next_ahead = 0;
        // With many queries a tile the sums take far longer than the memory.
        if (!args.pool.has_units() || count > 16) return;
        const AttentionItem* of = &item;
        i64 start = tile + kTileKeys;
        if (start >= end) {
            of = after;
            start = 0;
            if (of == nullptr) return;
            end = args.seq_lens[of->request];
        }
        const i64 stop = min64(end, start + kTileKeys);
        for (i64 at = start; at < stop; at += kUnit) ahead[num_ahead++] = unit_at(*of, at);
    }

    // Asks for the next `count` units of it: some at a time between the sums, because one burst
    // would fill the buffers that the loads of this tile need.
    void fetch_ahead(i64 count) {
        const i64 bytes = args.pool.unit_bytes();
        for (; count > 0 && next_ahead < num_ahead; --count, ++next_ahead) {
            const char* unit = ahead[next_ahead];
            for (i64 at = 0; at < bytes; at += 64) __builtin_prefetch(unit + at, 0, 2);
        }
    }

    B stored(const B* head, bool value, i64 offset, i64 d) const {
        const i64 at = kv_offset(args.pool, value, offset, d);
        if (!quantised) return head[at];
        const auto q = static_cast<float>(reinterpret_cast<const std::int8_t*>(head)[at]);
        if constexpr (sizeof(B) == 4) {
            return q;
        } else {
            return to_bf16(q);
        }
    }

    // Rows of small blocks into one unit; keys past the end of the request are zero.
    void gather_unit(i64 position, B* k_unit, B* v_unit) const {
        KvPool unit = args.pool;
        unit.block_size = kUnit;
        unit.dtype = unit.compute;
        B* base = k_unit;
        (void)v_unit;
        const i64 size = args.pool.block_size;
        for (i64 key = 0; key < kUnit; ++key) {
            const i64 at = position + key;
            const B* head = at < seq_len ? head_of_block(at / size) : nullptr;
            for (i64 d = 0; d < dim; ++d) {
                B k{}, v{};
                if (head != nullptr) {
                    k = stored(head, false, at % size, d);
                    v = stored(head, true, at % size, d);
                }
                base[kv_offset(unit, false, key, d)] = k;
                base[kv_offset(unit, true, key, d)] = v;
            }
        }
    }

    void find_unit(i64 u, i64 position) {
        const i64 size = kUnit * dim;
        B* own = gathered + u * 2 * size;
        if (quantised) find_scales(u, position);
        if (!args.pool.has_units()) {
            gather_unit(position, own, own + size);
            k_units[u] = own;
            v_units[u] = own + size;
            return;
        }
        const char* unit_bytes = unit_at(item, position);
        if (quantised) expand_unit(unit_bytes, own);
        k_units[u] = quantised ? own : reinterpret_cast<const B*>(unit_bytes);
        v_units[u] = k_units[u] + size;
        if (quantised || position + kUnit <= seq_len) return;
        // The unit that the request ends in: what lies past the end must not reach the sums.
        KvPool unit = args.pool;
        unit.block_size = kUnit;
        std::memcpy(own + size, v_units[u], static_cast<std::size_t>(size) * sizeof(B));
        for (i64 key = seq_len - position; key < kUnit; ++key) {
            for (i64 d = 0; d < dim; ++d) own[kv_offset(unit, true, key, d)] = B{};
        }
        v_units[u] = own + size;
    }

#if defined(__AMX_BF16__)
    void score_on_tiles(i64 first, i64 num_units) {
        for (i64 i = first / 16 * 16; i < count; i += 16) {
            amx_scores(q + i * dim, dim, k_units, num_units, scores + i * kTileKeys, kTileKeys);
        }
    }

    void weigh_on_tiles(i64 first, i64 num_units, const Softmax& state) {
        for (i64 i = first / 16 * 16; i < count; i += 16) {
            amx_values(p + i * kTileKeys, kTileKeys, v_units, num_units, dim, values);
            for (i64 row = max64(i, first); row < min64(i + 16, count); ++row) {
                float* sum = state.acc + row * dim;
                const float* more = values + (row - i) * dim;
                const VF factor = set1(alpha[row]);
                for (i64 d = 0; d < dim; d += VF::W) {
                    store(sum + d, fma(load(sum + d), factor, load(more + d)));
                }
            }
        }
    }
#endif

    // scores[i][keys of num_units] = q[i] . K
    void score(i64 first, i64 num_units) {
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) return score_on_tiles(first, num_units);
#endif
        if constexpr (!kOnTiles<D>) score_on_vectors(first, num_units);
    }

    void score_on_vectors(i64 first, i64 num_units) {
        for (i64 u = 0; u < num_units; ++u) {
            for_row_tiles(count - first, [&](i64 offset, auto rows) {
                constexpr int R = decltype(rows)::value, V = kUnit / VF::W;
                constexpr int CV = V < vecs_of(R) ? V : vecs_of(R);
                for (int column = 0; column < kUnit; column += CV * VF::W) {
                    VF acc[R][CV];
                    for (int r = 0; r < R; ++r) {
                        for (int c = 0; c < CV; ++c) acc[r][c] = zero();
                    }
                    const i64 i = first + offset;
                    micro<D, R, 1, CV>(q + i * dim, dim, &k_units[u], 1, dim / 2, kUnit, 0, column,
                                       acc);
                    for (int r = 0; r < R; ++r) {
                        float* to = scores + (i + r) * kTileKeys + u * kUnit + column;
                        for (int c = 0; c < CV; ++c) store(to + c * VF::W, acc[r][c]);
                    }
                }
            });
        }
    }

    // Turns scores into p, moves the running maximum and leaves alpha, the factor of what was.
    void soften(i64 i, i64 tile_start, i64 num_units, const Softmax& state) {
        const i64 limit = row_len(i) - tile_start, keys = num_units * kUnit;
        float* s = scores + i * kTileKeys;
        const VF scale = set1(args.scale);
        VF top = set1(kMinusInf);
        for (i64 k = 0; k < keys; k += VF::W) {
            VF value = mul(load(s + k), scale);
            if (quantised) value = mul(value, load(key_scales + k));
            if (limit < k + VF::W) value = keep_first(value, max64(0, limit - k), kMinusInf);
            store(s + k, value);
            top = max(value, top);
        }
        const float tile_max = reduce_max(top);
        const float m = tile_max > state.m[i] ? tile_max : state.m[i];
        const VF shrink = exp(set1(state.m[i] - m));
        VF sum = zero();
        for (i64 k = 0; k < keys; k += VF::W) {
            const VF value = exp(sub(load(s + k), set1(m)));
            store(p + i * kTileKeys + k, quantised ? mul(value, load(value_scales + k)) : value);
            sum = add(sum, value);
        }
        sums[i] = fma(sums[i], shrink, sum);
        float lanes[VF::W];
        store(lanes, shrink);
        alpha[i] = lanes[0];
        state.m[i] = m;
    }

    // acc[i] = acc[i] * alpha[i] + p[i] . V
    void weigh(i64 first, i64 num_units, const Softmax& state) {
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) return weigh_on_tiles(first, num_units, state);
#endif
        if constexpr (!kOnTiles<D>) weigh_on_vectors(first, num_units, state);
    }

    void weigh_on_vectors(i64 first, i64 num_units, const Softmax& state) {
        for_row_tiles(count - first, [&](i64 offset, auto rows) {
            constexpr int R = decltype(rows)::value, CV = VF::W == 4 ? 2 : vecs_of(R);
            i64 column = 0;
            const i64 i = first + offset;
            for (; column + CV * VF::W <= dim; column += CV * VF::W) {
                weigh_columns<R, CV>(i, column, num_units, state);
            }
            for (; column < dim; column += VF::W) weigh_columns<R, 1>(i, column, num_units, state);
        });
    }

    template <int R, int CV>
    void weigh_columns(i64 i, i64 column, i64 num_units, const Softmax& state) {
        VF acc[R][CV];
        float* out = state.acc + i * dim + column;
        for (int r = 0; r < R; ++r) {
            const VF factor = set1(alpha[i + r]);
            for (int c = 0; c < CV; ++c) acc[r][c] = mul(load(out + r * dim + c * VF::W), factor);
        }
        micro<D, R, 1, CV>(p + i * kTileKeys, kTileKeys, v_units, num_units, kUnit / 2, dim, 0,
                           column, acc);
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < CV; ++c) store(out + r * dim + c * VF::W, acc[r][c]);
        }
    }

    // First query that has keys from `position` on.
    i64 first_query(i64 position) const { return max64(0, position - first_len + 1) * group; }

    void run_split(i64 split, const Softmax& state) {
        const i64 start = split * kSplitKeys, end = min64(start + kSplitKeys, longest());
        const i64 first = first_query(start);
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) configure_attention();
#endif
        for (i64 i = first; i < count; ++i) {
            state.m[i] = kMinusInf;
            sums[i] = zero();
            for (i64 d = 0; d < dim; ++d) state.acc[i * dim + d] = 0.0f;
        }
        for (i64 tile = start; tile < end; tile += kTileKeys) {
            const i64 num_units = ceil_div(min64(kTileKeys, end - tile), kUnit);
            for (i64 u = 0; u < num_units; ++u) find_unit(u, tile + u * kUnit);
            const i64 begin = first_query(tile);
            look_ahead(tile, end);
            fetch_ahead(1);
            score(begin, num_units);
            for (i64 i = begin; i < count; ++i) {
                fetch_ahead(1);
                soften(i, tile, num_units, state);
            }
            fetch_ahead(kTileUnits);
            weigh(begin, num_units, state);
        }
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) _tile_release();
#endif
        for (i64 i = first; i < count; ++i) state.l[i] = reduce_add(sums[i]);
    }

    // Adds one split to what the splits before it gave; split 0 starts.
    void merge(i64 split, const Softmax& total, const Softmax& part) const {
        for (i64 i = first_query(split * kSplitKeys); i < count; ++i) {
            float* sum = total.acc + i * dim;
            const float* add_on = part.acc + i * dim;
            if (split == 0) {
                total.m[i] = part.m[i];
                total.l[i] = part.l[i];
                std::memcpy(sum, add_on, static_cast<std::size_t>(dim) * 4);
                continue;
            }
            const float m = total.m[i] > part.m[i] ? total.m[i] : part.m[i];
            float a[VF::W], b[VF::W];
            const VF before = exp(set1(total.m[i] - m)), now = exp(set1(part.m[i] - m));
            store(a, before);
            store(b, now);
            total.m[i] = m;
            total.l[i] = total.l[i] * a[0] + part.l[i] * b[0];
            for (i64 d = 0; d < dim; d += VF::W) {
                store(sum + d, fma(load(sum + d), before, mul(load(add_on + d), now)));
            }
        }
    }

    void write(const Softmax& total) const {
        const i64 begin = args.query_start_loc[item.request] + item.first_row;
        with_type(args.out.dtype, [&](auto* type) {
            using O = std::remove_pointer_t<decltype(type)>;
            for (i64 i = 0; i < count; ++i) {
                const i64 head = item.kv_head * group + i % group;
                O* to = args.out.row<O>(begin + i / group) + head * args.query.dim;
                const VF factor = set1(1.0f / total.l[i]);
                for_vectors(args.query.dim, [&](i64 d, i64 n) {
                    const VF value = mul(load(total.acc + i * dim + d), factor);
                    store_some(to + d, add(value, zero()), n);
                });
            }
        });
    }
};

template <class D>
struct Attention {
    const AttentionArgs& args;
    AttentionItem* items;
    i64 num_items, rows_per_item, max_count, max_splits;

    char* task_memory(float*& states) const {
        const i64 bytes = AttentionTask<D>::scratch_bytes(max_count, args.pool.dim_padded);
        char* memory = static_cast<char*>(scratch(Scratch::attention, bytes));
        const i64 floats = softmax_floats(max_count, args.pool.dim_padded);
        states = reinterpret_cast<float*>(memory + bytes / 64 * 64 - round_up(8 * floats, 64));
        return memory;
    }

    i64 num_splits(const AttentionTask<D>& task) const {
        return ceil_div(task.longest(), kSplitKeys);
    }

    // One item, its splits one after the other.
    void run_whole(i64 index) const {
        float* states;
        char* memory = task_memory(states);
        AttentionTask<D> task(args, items[index], memory);
        if (index + 1 < num_items) task.after = &items[index + 1];
        const i64 dim = args.pool.dim_padded;
        const Softmax total = softmax_at(states, task.count, dim);
        const Softmax part = softmax_at(states + softmax_floats(task.count, dim), task.count, dim);
        task.run_split(0, total);
        for (i64 split = 1; split < num_splits(task); ++split) {
            task.run_split(split, part);
            task.merge(split, total, part);
        }
        task.write(total);
    }

    // Few long requests: splits are tasks of their own, merged in the same order afterwards.
    void run_parts() const {
        const i64 dim = args.pool.dim_padded, floats = softmax_floats(max_count, dim);
        float* parts = static_cast<float*>(
            scratch(Scratch::partials, num_items * max_splits * round_up(floats, 16) * 4));
        auto part = [&](i64 index, i64 split, i64 count) {
            float* at = parts + (index * max_splits + split) * round_up(floats, 16);
            return softmax_at(at, count, dim);
        };
        parallel_for(num_items * max_splits, 1, [&](i64 job) {
            float* states;
            char* memory = task_memory(states);
            AttentionTask<D> task(args, items[job / max_splits], memory);
            const i64 split = job % max_splits;
            if (split < num_splits(task)) {
                task.run_split(split, part(job / max_splits, split, task.count));
            }
        });
        parallel_for(num_items, 8, [&](i64 index) {
            float* states;
            char* memory = task_memory(states);
            AttentionTask<D> task(args, items[index], memory);
            const Softmax total = part(index, 0, task.count);
            for (i64 split = 1; split < num_splits(task); ++split) {
                task.merge(split, total, part(index, split, task.count));
            }
            task.write(total);
        });
    }
};

template <class D>
void attention_as(const AttentionArgs& args) {
    const i64 kv_heads = args.pool.num_heads, group = args.query.heads / kv_heads;
    const i64 rows_per_item = max64(1, kTileQueries / group);
    i64 num_items = 0, max_rows = 0, longest = 0;
    for (i64 b = 0; b < args.num_reqs; ++b) {
        const i64 rows = args.query_start_loc[b + 1] - args.query_start_loc[b];
        num_items += ceil_div(rows, rows_per_item) * kv_heads;
        max_rows = max64(max_rows, min64(rows, rows_per_item));
        if (rows > 0) longest = max64(longest, args.seq_lens[b]);
    }
    if (num_items == 0) return;
    auto* items = static_cast<AttentionItem*>(
        scratch(Scratch::items, num_items * static_cast<i64>(sizeof(AttentionItem))));
    i64 next = 0;
    for (i64 b = 0; b < args.num_reqs; ++b) {
        const i64 rows = args.query_start_loc[b + 1] - args.query_start_loc[b];
        // The last rows have the most keys: long items first leave no long tail.
        for (i64 tile = ceil_div(rows, rows_per_item) - 1; tile >= 0; --tile) {
            const i64 first = tile * rows_per_item;
            for (i64 h = 0; h < kv_heads; ++h) {
                items[next++] = {b, h, first, min64(rows_per_item, rows - first)};
            }
        }
    }
    const i64 max_splits = ceil_div(longest, kSplitKeys);
    const Attention<D> whole{args, items, num_items, rows_per_item, max_rows * group, max_splits};
    if (max_splits > 1 && num_items < 4 * num_threads() && num_threads() > 1) {
        whole.run_parts();
        return;
    }
    // Handing over costs about a microsecond; a small step stays on this thread.
    const i64 work = num_items * longest * max_rows * group * args.pool.dim_padded;
    // The heads of a request one after the other on one thread, where there is enough to share.
    const i64 grain = num_items >= 8 * kv_heads * num_threads() ? kv_heads : 1;
    parallel_for(num_items, work < (1 << 17) ? num_items : grain,
                 [&](i64 index) { whole.run_whole(index); });
}

inline void attention(const AttentionArgs& args) {
    if (args.pool.compute == DType::f32) {
        attention_as<DotF32>(args);
    } else {
        attention_as<AttentionBf16>(args);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
