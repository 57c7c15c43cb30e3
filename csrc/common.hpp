// Plain views that cross from the bindings into the kernels. No templates of the standard library
// here: this header is compiled once per instruction-set level, and a shared inline function would
// let the linker keep the copy of the wrong level. Hence `static inline` and views only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace octavo {

using i64 = std::int64_t;

struct bf16 {
    std::uint16_t bits;
};

enum class DType : std::uint8_t { f32, bf16, i8 };  // i8 in the KV pool only

static inline i64 item_size(DType dtype) {
    return dtype == DType::f32 ? 4 : dtype == DType::bf16 ? 2 : 1;
}

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even; a NaN stays a (quiet) NaN.
static inline bf16 to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
    }
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return bf16{static_cast<std::uint16_t>(bits >> 16)};
}

static inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
static inline i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }
static inline i64 min64(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 max64(i64 a, i64 b) { return a > b ? a : b; }

// Asks for the lines of [from, from + bytes), for the first cache or for the second. In assembly,
// since gcc takes a loop of nothing but its own prefetches for an empty one, and drops it.
template <bool kNear>
static inline void fetch_lines_as(const void* from, i64 bytes) {
    for (const char *at = static_cast<const char*>(from), *end = at + bytes; at < end; at += 64) {
#if defined(__x86_64__)
        if (kNear) {
            asm volatile("prefetcht0 %0" ::"m"(*at));
        } else {
            asm volatile("prefetcht1 %0" ::"m"(*at));
        }
#else
        __builtin_prefetch(at, 0, kNear ? 3 : 2);
#endif
    }
}
static inline void fetch_lines_near(const void* from, i64 bytes) {
    fetch_lines_as<true>(from, bytes);
}
static inline void fetch_lines(const void* from, i64 bytes) { fetch_lines_as<false>(from, bytes); }

// The hardware reads ahead in a page of 4 KiB once it has seen two lines of it, and no further. Who
// reads in order, `step` bytes at a time, and says where it will soon be, finds the page after that
// one begun.
static inline void begin_next_page(const void* soon, i64 step) {
    const auto in_page = static_cast<i64>(reinterpret_cast<std::uintptr_t>(soon) & 4095);
    if (in_page < step) fetch_lines(static_cast<const char*>(soon) - in_page + 4096, 128);
}

// [rows, cols], last axis contiguous; strides count elements.
struct Matrix {
    void* data;
    i64 rows, cols, stride;
    DType dtype;

    template <class T>
    T* row(i64 r) const {
        return static_cast<T*>(data) + r * stride;
    }
};

// [tokens, heads, dim], last axis contiguous; strides count elements.
struct Heads {
    void* data;
    i64 tokens, heads, dim, stride_token, stride_head;
    DType dtype;

    template <class T>
    T* head(i64 token, i64 h) const {
        return static_cast<T*>(data) + token * stride_token + h * stride_head;
    }
};

// Weights of a linear layer in panels of 32 output columns, zero padded:
// bf16 [ceil(N/32)][Kp/2][32][2] (pairs of K side by side), float32 [ceil(N/32)][Kp][32].
constexpr i64 kPanel = 32;
constexpr i64 kAlignK = 32;  // Kp is a multiple of it: one tile of AMX is 32 deep

struct CellPanel;

struct PackedWeight {
    void* data;
    i64 n, k, k_padded;
    DType dtype;
    const CellPanel* cells = nullptr;  // [num_panels] where the weight stays quantised

    i64 num_panels() const { return ceil_div(n, kPanel); }
    i64 panel_elements() const { return k_padded * kPanel; }
};

// The KV pool: [num_layers][num_blocks][num_heads][one head of one block]. Blocks of one layer lie
// side by side, because reading scattered pages runs at a third of the memory's rate (measured:
// 6 GB/s a core in pieces of 4 KiB, 17 in pieces of 192) and a request's blocks are mostly
// neighbours. A head of a block is a row of units of 16 keys, each K then V, padded to dim_padded:
//   bf16     K [dim/2][16][2]   V [8][dim][2]
//   float32  K [dim][16]        V [16][dim]
//   int8     as bf16, then scales K [16] and V [16] float32: one for each key of each head
// A block of fewer than 16 tokens holds plain rows instead, K [block_size][dim] then V the same;
// attention gathers those into units. With int8, scales K [block_size] and V [block_size] follow.
constexpr i64 kUnit = 16;

struct KvPool {
    char* data;
    i64 num_blocks, num_layers, num_heads, block_size, dim, dim_padded;
    DType dtype;
    DType compute;  // what attention computes in; differs from dtype where that is int8

    bool has_units() const { return block_size >= kUnit; }
    i64 row_elements() const { return block_size * dim_padded; }
    i64 keys_together() const { return has_units() ? kUnit : block_size; }
    i64 unit_bytes() const {  // of what lies together: a unit, or a small block
        const i64 scale = dtype == DType::i8 ? 4 : 0;
        return 2 * keys_together() * (dim_padded * item_size(dtype) + scale);
    }
    i64 head_bytes() const { return block_size / keys_together() * unit_bytes(); }
    i64 block_bytes() const { return num_heads * head_bytes(); }  // of one layer
    i64 bytes() const { return num_layers * num_blocks * block_bytes(); }
    char* head(i64 block, i64 layer, i64 h) const {
        return data + (layer * num_blocks + block) * block_bytes() + h * head_bytes();
    }
};

// Where element (key or value, offset in block, d) of a head of a block lies, in elements.
static inline i64 kv_offset(const KvPool& pool, bool value, i64 offset, i64 d) {
    const i64 dim = pool.dim_padded;
    if (!pool.has_units()) return (value ? pool.row_elements() : 0) + offset * dim + d;
    const i64 unit = offset / kUnit, key = offset % kUnit;
    const i64 base = unit * (pool.unit_bytes() / item_size(pool.dtype)) + (value ? kUnit * dim : 0);
    if (pool.dtype == DType::f32) return base + (value ? key * dim + d : d * kUnit + key);
    if (value) return base + (key / 2) * dim * 2 + d * 2 + key % 2;
    return base + (d / 2) * kUnit * 2 + key * 2 + d % 2;
}

// Where the scale of a key or value of a head of an int8 block lies, in bytes.
static inline i64 kv_scale_offset(const KvPool& pool, bool value, i64 offset) {
    const i64 keys = pool.keys_together(), unit = offset / keys, key = offset % keys;
    return unit * pool.unit_bytes() + 2 * keys * pool.dim_padded + (value ? keys * 4 : 0) + key * 4;
}

struct AttentionArgs {
    Heads query;
    KvPool pool;
    i64 layer;
    const std::int32_t* block_table;
    i64 block_table_stride;
    const std::int32_t* query_start_loc;
    const std::int32_t* seq_lens;
    i64 num_reqs;
    float scale;
    Matrix out;
};

// The LM head of rows x: logits[r], or where argmax_only[r] is not 0 best[r] = the column of the
// largest (NaNs are passed over, of equals the first counts), and logits[r] is left alone. best[r]
// is -1 where logits[r] was written: also, with -inf, where no logit is above -inf.
struct HeadArgs {
    Matrix x;
    PackedWeight weight;
    const std::int32_t* argmax_only;
    Matrix logits;
    std::int32_t* best;
};

// Rows of logits to sample: parameters of rows[i] at [i]. out[i] is a token id, or -1 where the
// row's largest logit is infinite, which is left to the caller. Where show is not 0, a row that is
// drawn from (not a greedy one) becomes what was drawn from.
struct SampleArgs {
    Matrix logits;
    i64 num_rows;
    const std::int32_t* rows;
    const float* temperature;  // 0: greedy
    const float* min_p_floor;  // least (logit - max) / temperature that stays
    const std::int32_t* top_k;
    const double* top_p;
    const std::uint64_t* seeds;
    const i64* positions;
    const std::uint8_t* show;
    std::int32_t* out;
};

// Packed masks [R, num_bytes] of rows of logits: bit i % 8 of byte i / 8 says whether token i may
// be sampled (so 32 ids in a little-endian word); there is none for tokens past the end.
struct MaskArgs {
    Matrix logits;
    i64 num_rows, num_bytes;
    const std::int32_t* rows;
    const std::uint8_t* masks;
};

// log_softmax of rows: its normaliser, the rank of one token (0 where the largest logit is
// infinite, which is left to the caller) and the ids of the num_top best, best first.
struct LogprobArgs {
    Matrix logits;
    i64 num_rows, num_top;
    const std::int32_t* rows;
    const std::int32_t* token_ids;
    double* log_sum_exps;
    std::int32_t* ranks;
    std::int32_t* top;
};

// One level's table of kernels. Arguments are checked by the bindings; kernels trust them.
struct Level {
    const char* name;
    bool decodes_cells;  // weights in stored formats become bf16 before they are multiplied
    void (*pack)(const float* weight, i64 stride, PackedWeight packed);
    void (*linear)(Matrix x, PackedWeight weight, Matrix out);
    void (*linear_silu_and_mul)(Matrix x, PackedWeight gate_up_proj, Matrix out);
    void (*lm_head)(const HeadArgs& args);
    void (*embedding)(const std::int32_t* ids, PackedWeight weight, Matrix out);
    void (*rms_norm)(Matrix x, const Matrix* residual, const float* weight, float eps, Matrix out);
    void (*rotary)(const std::int32_t* positions, Heads heads, Matrix cos_sin);
    void (*cache_write)(Heads key, Heads value, KvPool pool, i64 layer, const std::int32_t* slots);
    void (*attention)(const AttentionArgs& args);
    void (*copy_rows)(Matrix x, const std::int32_t* indices, Matrix out);
    void (*mask)(const MaskArgs& args);
    void (*sample)(const SampleArgs& args);
    void (*logprobs)(const LogprobArgs& args);
};

}  // namespace octavo
