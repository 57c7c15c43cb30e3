// Causal attention over the paged pool, prefill and decode in one arithmetic.
//
// Keys are walked in tiles of 64 and splits of 512, both counted from position 0 of the sequence:
// online softmax inside a split, splits merged in order by log-sum-exp. A query row therefore does
// the same sums in the same order whether it comes alone or in a chunk, whatever the block size.
// Keys past a row's own length get p = 0; adding 0 * v changes no bits (the last step turns -0,
// the one thing it could change, into +0). Slots past seq_len may hold anything, so V is copied
// with zeros there.
#pragma once

#include "attention_tiles.hpp"
#include "key_units.hpp"
#include "micro.hpp"

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kSplitKeys = 512;
// Query rows x heads that share one walk over K and V: many read them seldom, few share out well.
constexpr i64 kMinQueries = 48, kMaxQueries = 192;
constexpr float kMinusInf = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

#if defined(__AMX_BF16__)
using AttentionBf16 = DotTiles;
#else
using AttentionBf16 = DotPacked;
#endif

// Online softmax of queries, 16 at a time whether there are as many or not: running maximum of the
// scores before they are scaled, sum, and weighted values.
struct Softmax {
    float* m;
    float* l;
    float* acc;  // [count rounded up to 16][dim_padded]

    static i64 floats(i64 count, i64 dim) { return round_up(count, 16) * (2 + dim); }
    static Softmax at(float* memory, i64 count) {
        const i64 room = round_up(count, 16);
        return {memory, memory + room, memory + 2 * room};
    }
};

template <class D>
struct AttentionTask : KeyUnits<D> {
    using A = typename D::A;
    using B = typename D::B;
    using Units = KeyUnits<D>;
    using Units::args, Units::dim, Units::item, Units::k_units, Units::quantised, Units::seq_len,
        Units::v_units;

    i64 group, count;     // heads a KV head; queries here
    i64 first_len;        // keys of the first row
    float log2_scale;     // of scores, to base 2
    A* q;                 // [room][dim], room: count in whole tiles of 16
    float* scores;        // [room][kTileKeys]
    A* p;                 // [room][kTileKeys]
    VF* sums;             // [room] sums of p, lane by lane
    float* alpha;         // [room]
    Softmax total, part;  // all splits; one

    i64 row_len(i64 query) const { return first_len + query / group; }
    i64 longest() const { return first_len + item.num_rows - 1; }

    static i64 scratch_bytes(i64 count, i64 dim) {
        const i64 a = static_cast<i64>(sizeof(A)), room = round_up(count, 16);
        return room * (dim * a + kTileKeys * (4 + a) + static_cast<i64>(sizeof(VF)) + 4) +
               2 * 4 * Softmax::floats(count, dim) + Units::copied_bytes(dim) + 1024;
    }

    AttentionTask(const AttentionArgs& args, const AttentionItem& item, char* memory)
        : Units(args, item) {
        group = args.query.heads / args.pool.num_heads;
        count = item.num_rows * group;
        log2_scale = args.scale * kLog2E;
        const i64 room = round_up(count, 16);
        const i64 begin = args.query_start_loc[item.request];
        const i64 end = args.query_start_loc[item.request + 1];
        first_len = seq_len - (end - begin) + item.first_row + 1;
        auto take = [&](i64 bytes) {
            char* at = memory;
            memory += round_up(bytes, 64);
            return at;
        };
        this->copies = reinterpret_cast<B*>(take(Units::copied_bytes(dim)));
        q = reinterpret_cast<A*>(take(room * dim * static_cast<i64>(sizeof(A))));
        scores = reinterpret_cast<float*>(take(room * kTileKeys * 4));
        p = reinterpret_cast<A*>(take(room * kTileKeys * static_cast<i64>(sizeof(A))));
        sums = reinterpret_cast<VF*>(take(room * static_cast<i64>(sizeof(VF))));
        alpha = reinterpret_cast<float*>(take(room * 4));
        const i64 state = Softmax::floats(count, dim) * 4;
        total = Softmax::at(reinterpret_cast<float*>(take(state)), count);
        part = Softmax::at(reinterpret_cast<float*>(take(state)), count);
        load_queries(begin);
    }

    void load_queries(i64 begin) {
        with_type(args.query.dtype, [&](auto* type) {
            using X = std::remove_pointer_t<decltype(type)>;
            for (i64 i = 0; i < count; ++i) {
                const i64 token = begin + item.first_row + i / group;
                const X* in = args.query.template head<X>(token, item.kv_head * group + i % group);
                for_vectors(args.query.dim, [&](i64 d, i64 n) {
                    store_some(q + i * dim + d, load_some(in + d, n), n);
                });
                for (i64 d = args.query.dim; d < dim; ++d) q[i * dim + d] = A{};
            }
            for (i64 i = count * dim; i < round_up(count, 16) * dim; ++i) q[i] = A{};
        });
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
        VF top = set1(kMinusInf);
        for (i64 k = 0; k < keys; k += VF::W) {
            VF value = load(s + k);
            if (quantised) value = mul(value, load(this->key_scales + k));
            if (limit < k + VF::W) value = keep_first(value, max64(0, limit - k), kMinusInf);
            store(s + k, value);
            top = max(value, top);
        }
        const float tile_max = reduce_max(top);
        const float m = tile_max > state.m[i] ? tile_max : state.m[i];
        const VF shrink = exp2(set1((state.m[i] - m) * log2_scale));
        const VF scale = set1(log2_scale), base = set1(-(m * log2_scale));
        VF sum = zero();
        for (i64 k = 0; k < keys; k += VF::W) {
            const VF value = exp2(fma(load(s + k), scale, base));
            store(p + i * kTileKeys + k,
                  quantised ? mul(value, load(this->value_scales + k)) : value);
            sum = add(sum, value);
        }
        sums[i] = fma(sums[i], shrink, sum);
        float lanes[VF::W];
        store(lanes, shrink);
        alpha[i] = lanes[0];
        state.m[i] = m;
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
        const i64 room = round_up(count, 16);
        for (i64 i = 0; i < room; ++i) {
            state.m[i] = kMinusInf;
            sums[i] = zero();
        }
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) configure_attention(min64(count, kTileRows));
#endif
        if (!kOnTiles<D>) std::memset(state.acc, 0, static_cast<std::size_t>(room * dim * 4));
        for (i64 tile = start; tile < end; tile += kTileKeys) {
            const i64 num_units = ceil_div(min64(kTileKeys, end - tile), kUnit);
            this->look_ahead(tile, end);
            this->find_tile(tile, num_units);
            if constexpr (kOnTiles<D>) {
                this->run_tile_on_tiles(tile, num_units, tile == start, state);
            } else {
                run_tile(tile, num_units, state);
            }
            this->begin_ahead(kTileUnits);
        }
#if defined(__AMX_BF16__)
        if constexpr (kOnTiles<D>) _tile_release();
#endif
        for (i64 i = first_query(start); i < count; ++i) state.l[i] = reduce_add(sums[i]);
    }

    void run_tile(i64 tile, i64 num_units, const Softmax& state) {
        const i64 begin = first_query(tile);
        this->begin_ahead(1);
        score_on_vectors(begin, num_units);
        for (i64 i = begin; i < count; ++i) {
            this->begin_ahead(1);
            soften(i, tile, num_units, state);
        }
        this->begin_ahead(kTileUnits);
        weigh_on_vectors(begin, num_units, state);
    }

#if defined(__AMX_BF16__)
    // One 16 of queries after the other. Nothing is won by weaving the tile products of one into
    // the softmax of another: tiles take the second vector port, which is most of what exp needs.
    void run_tile_on_tiles(i64 tile, i64 num_units, bool fresh, const Softmax& state) {
        i64 limits[kTileRows];
        for (i64 i = first_query(tile) / kTileRows * kTileRows; i < count; i += kTileRows) {
            const i64 rows = min64(kTileRows, count - i);
            // Units that one of them sees; all see all of their keys, or each is told how many.
            const i64 longest_len = row_len(i + rows - 1) - tile;
            const i64 units = min64(num_units, ceil_div(longest_len, kUnit));
            const i64 num_vectors = round_up(units, 2);
            const bool masked = row_len(i) - tile < num_vectors * kUnit;
            for (i64 r = 0; masked && r < rows; ++r) limits[r] = row_len(i + r) - tile;
            const TileSoftmax softmax{state.m + i,
                                      sums + i,
                                      scores,
                                      p,
                                      log2_scale,
                                      rows,
                                      num_vectors,
                                      masked ? limits : nullptr,
                                      quantised ? this->key_scales : nullptr,
                                      quantised ? this->value_scales : nullptr};
            float* acc = state.acc + i * dim;
            this->begin_ahead(1);
            amx_scores(q + i * dim, dim, k_units, units, scores);
            const VF factors = soften_tile(softmax, [&] { this->begin_ahead(1); });
            this->begin_ahead(1);
            if (!fresh) shrink_rows(factors, rows, dim, acc);
            amx_values(p, v_units[0], units, dim, fresh, acc);
        }
    }
#endif

    // Adds one split to what the splits before it gave; split 0 starts.
    void merge(i64 split, const Softmax& sum, const Softmax& more) const {
        const i64 first = first_query(split * kSplitKeys);
        const VF scale = set1(log2_scale);
        alignas(64) float before[16], now[16];
        for (i64 i = first / 16 * 16; i < count; i += 16) {
            for (i64 lane = 0; lane < 16; lane += VF::W) {
                const VF a = load(sum.m + i + lane), b = load(more.m + i + lane), m = max(a, b);
                const VF keep = exp2(mul(sub(a, m), scale)), gain = exp2(mul(sub(b, m), scale));
                store(before + lane, keep);
                store(now + lane, gain);
                // Rows that have no keys in this split keep what they have.
                for (i64 row = max64(i + lane, first); row < min64(i + lane + VF::W, count);
                     ++row) {
                    sum.m[row] = sum.m[row] > more.m[row] ? sum.m[row] : more.m[row];
                    sum.l[row] = sum.l[row] * before[row - i] + more.l[row] * now[row - i];
                }
            }
            for (i64 row = max64(i, first); row < min64(i + 16, count); ++row) {
                float* to = sum.acc + row * dim;
                const float* from = more.acc + row * dim;
                const VF a = set1(before[row - i]), b = set1(now[row - i]);
                for (i64 d = 0; d < dim; d += VF::W) {
                    store(to + d, fma(load(to + d), a, mul(load(from + d), b)));
                }
            }
        }
    }

    void write(const Softmax& total) const {
        const i64 begin = args.query_start_loc[item.request] + item.first_row;
        with_type(args.out.dtype, [&](auto* type) {
            using O = std::remove_pointer_t<decltype(type)>;
            for (i64 i = 0; i < count; ++i) {
                const i64 head = item.kv_head * group + i % group;
                O* to = args.out.template row<O>(begin + i / group) + head * args.query.dim;
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
    i64 num_items, max_count, max_splits;

    char* task_memory() const {
        const i64 bytes = AttentionTask<D>::scratch_bytes(max_count, args.pool.dim_padded);
        return static_cast<char*>(scratch(Scratch::attention, bytes));
    }

    i64 num_splits(const AttentionTask<D>& task) const {
        return ceil_div(task.longest(), kSplitKeys);
    }

    // One item, its splits one after the other.
    void run_whole(i64 index) const {
        AttentionTask<D> task(args, items[index], task_memory());
        if (index + 1 < num_items) task.after = &items[index + 1];
        task.run_split(0, task.total);
        for (i64 split = 1; split < num_splits(task); ++split) {
            task.run_split(split, task.part);
            task.merge(split, task.total, task.part);
        }
        task.write(task.total);
    }

    // Few long requests: splits are tasks of their own, merged in the same order afterwards.
    void run_parts() const {
        const i64 floats = Softmax::floats(max_count, args.pool.dim_padded);
        float* parts =
            static_cast<float*>(scratch(Scratch::partials, num_items * max_splits * floats * 4));
        auto part = [&](i64 index, i64 split, i64 count) {
            return Softmax::at(parts + (index * max_splits + split) * floats, count);
        };
        parallel_for(num_items * max_splits, 1, [&](i64 job) {
            AttentionTask<D> task(args, items[job / max_splits], task_memory());
            const i64 split = job % max_splits;
            if (split < num_splits(task)) {
                task.run_split(split, part(job / max_splits, split, task.count));
            }
        });
        parallel_for(num_items, 8, [&](i64 index) {
            AttentionTask<D> task(args, items[index], task_memory());
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
    const i64 queries = args.query_start_loc[args.num_reqs] * args.query.heads;
    const i64 share = max64(kMinQueries, min64(queries / (4 * num_threads()), kMaxQueries));
    const i64 rows_per_item = max64(1, share / group);
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
        // Head by head, so that its K and V stay in the second cache for all rows. The last rows
        // have the most keys: long items first leave no long tail.
        for (i64 h = 0; h < kv_heads; ++h) {
            for (i64 tile = ceil_div(rows, rows_per_item) - 1; tile >= 0; --tile) {
                const i64 first = tile * rows_per_item;
                items[next++] = {b, h, first, min64(rows_per_item, rows - first)};
            }
        }
    }
    const i64 max_splits = ceil_div(longest, kSplitKeys);
    const Attention<D> whole{args, items, num_items, max_rows * group, max_splits};
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
