// The keys and values of one request and KV head, a tile of 64 at a time, in units of 16: pointers
// into the pool where it holds them as attention reads them, copies where it doesn't.
#pragma once

#include "elementwise.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace octavo::OCTAVO_LEVEL {

constexpr i64 kTileKeys = 64;
constexpr i64 kTileUnits = kTileKeys / kUnit;

#if defined(__AMX_BF16__)
template <class D>
constexpr bool kOnTiles = std::is_same_v<D, DotTiles>;
#else
template <class D>
constexpr bool kOnTiles = false;
#endif

// Query rows [first_row, first_row + num_rows) of a request, for the heads that share a KV head.
struct AttentionItem {
    i64 request, kv_head, first_row, num_rows;
};

template <class D>
struct KeyUnits {
    using B = typename D::B;

    const AttentionArgs& args;
    const AttentionItem& item;
    i64 dim, seq_len;  // padded head_dim; keys of the request
    bool quantised;
    B* copies = nullptr;  // [2][kTileUnits][kUnit * dim]: K, then V, of which tiles are made
    const B* k_units[kTileUnits];
    const B* v_units[kTileUnits];
    float key_scales[kTileKeys], value_scales[kTileKeys];  // of int8 K and V
    const AttentionItem* after = nullptr;  // the item that this thread most likely does next
    const char* ahead[kTileUnits];         // units of the tile after this one
    i64 num_ahead = 0, next_ahead = 0;

    KeyUnits(const AttentionArgs& args, const AttentionItem& item)
        : args(args),
          item(item),
          dim(args.pool.dim_padded),
          seq_len(args.seq_lens[item.request]),
          quantised(args.pool.dtype == DType::i8) {}

    static i64 copied_bytes(i64 dim) { return 2 * kTileKeys * dim * static_cast<i64>(sizeof(B)); }

    // Units of the keys from `tile` on. On tiles two units of V make one operand, so V is copied
    // side by side, and an odd number of units gets one of zeros.
    void find_tile(i64 tile, i64 num_units) {
        for (i64 u = 0; u < num_units; ++u) find_unit(u, tile + u * kUnit);
        if (kOnTiles<D> && num_units % 2 == 1) {
            std::memset(copy_of(true, num_units), 0, unit_size() * sizeof(B));
            v_units[num_units] = copy_of(true, num_units);
            for (i64 k = num_units * kUnit; k < (num_units + 1) * kUnit; ++k) {
                key_scales[k] = value_scales[k] = 0.0f;
            }
        }
    }

    // Notes where the next tile lies: of this item, else of the one after it.
    void look_ahead(i64 tile, i64 end) {
        num_ahead = next_ahead = 0;
        if (!args.pool.has_units()) return;
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

    // Begins the next `count` units of it: the first lines of a page, and the hardware goes on. To
    // ask for all of them takes the buffers that the loads of this tile need.
    void begin_ahead(i64 count) {
        const i64 bytes = args.pool.unit_bytes();
        for (; count > 0 && next_ahead < num_ahead; --count, ++next_ahead) {
            for (i64 at = 0; at < bytes; at += 4096) fetch_lines(ahead[next_ahead] + at, 128);
        }
    }

private:
    std::size_t unit_size() const { return static_cast<std::size_t>(kUnit * dim); }
    B* copy_of(bool value, i64 u) const {
        return copies + (value ? kTileUnits + u : u) * kUnit * dim;
    }

    // A unit of numbers of this kind, as kv_offset sees it.
    KvPool plain_unit() const {
        KvPool unit = args.pool;
        unit.block_size = kUnit;
        unit.dtype = unit.compute;
        return unit;
    }

    const char* head_of_block(i64 index) const {
        const i64 block = args.block_table[item.request * args.block_table_stride + index];
        return args.pool.head(block, args.layer, item.kv_head);
    }

    const char* unit_at(const AttentionItem& of, i64 position) const {
        const i64 size = args.pool.block_size;
        const i64 block = args.block_table[of.request * args.block_table_stride + position / size];
        return args.pool.head(block, args.layer, of.kv_head) +
               position % size / kUnit * args.pool.unit_bytes();
    }

    // An int8 unit in the form that attention computes in, without its scales: those of K count in
    // the scores, those of V in p, once for each key instead of once for each number.
    void expand_unit(const char* bytes, B* k, B* v) const {
        const auto* q = reinterpret_cast<const std::int8_t*>(bytes);
        const i64 size = kUnit * dim;
        if constexpr (sizeof(B) == 2) {  // int8 lies as bf16 does
            for (i64 i = 0; i < size; i += VF::W) store_exact(k + i, load(q + i));
            for (i64 i = 0; i < size; i += VF::W) store_exact(v + i, load(q + size + i));
        } else {
            KvPool from = args.pool;
            from.block_size = kUnit;
            const KvPool to = plain_unit();
            for (i64 key = 0; key < kUnit; ++key) {
                for (i64 d = 0; d < dim; ++d) {
                    k[kv_offset(to, false, key, d)] = q[kv_offset(from, false, key, d)];
                    v[kv_offset(to, true, key, d) - size] = q[kv_offset(from, true, key, d)];
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
                const char* head = head_of_block(at / size);
                std::memcpy(to[value] + key,
                            head + kv_scale_offset(args.pool, value != 0, at % size), 4);
            }
            for (i64 key = count; key < kUnit; ++key) to[value][key] = 0.0f;
        }
    }

    B stored(const char* head, bool value, i64 offset, i64 d) const {
        const i64 at = kv_offset(args.pool, value, offset, d);
        if (!quantised) return reinterpret_cast<const B*>(head)[at];
        const auto q = static_cast<float>(reinterpret_cast<const std::int8_t*>(head)[at]);
        if constexpr (sizeof(B) == 4) {
            return q;
        } else {
            return to_bf16(q);
        }
    }

    // Rows of small blocks into one unit; keys past the end of the request are zero.
    void gather_unit(i64 position, B* k_unit, B* v_unit) const {
        const KvPool unit = plain_unit();
        const i64 size = args.pool.block_size;
        for (i64 key = 0; key < kUnit; ++key) {
            const i64 at = position + key;
            const char* head = at < seq_len ? head_of_block(at / size) : nullptr;
            for (i64 d = 0; d < dim; ++d) {
                B k{}, v{};
                if (head != nullptr) {
                    k = stored(head, false, at % size, d);
                    v = stored(head, true, at % size, d);
                }
                k_unit[kv_offset(unit, false, key, d)] = k;
                v_unit[kv_offset(unit, true, key, d) - kUnit * dim] = v;
            }
        }
    }

    void find_unit(i64 u, i64 position) {
        B *const own_k = copy_of(false, u), *const own_v = copy_of(true, u);
        if (quantised) find_scales(u, position);
        k_units[u] = own_k;
        v_units[u] = own_v;
        if (!args.pool.has_units()) {
            gather_unit(position, own_k, own_v);
            return;
        }
        const char* bytes = unit_at(item, position);
        if (quantised) {
            expand_unit(bytes, own_k, own_v);
            return;
        }
        k_units[u] = reinterpret_cast<const B*>(bytes);
        const B* values = k_units[u] + kUnit * dim;
        const bool is_last = position + kUnit > seq_len;
        if (!kOnTiles<D> && !is_last) {
            v_units[u] = values;
            return;
        }
        std::memcpy(own_v, values, unit_size() * sizeof(B));
        // The unit that the request ends in: what lies past the end must not reach the sums.
        const KvPool unit = plain_unit();
        for (i64 key = seq_len - position; key < kUnit; ++key) {
            for (i64 d = 0; d < dim; ++d) {
                own_v[kv_offset(unit, true, key, d) - kUnit * dim] = B{};
            }
        }
    }
};

}  // namespace octavo::OCTAVO_LEVEL
