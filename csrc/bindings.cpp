// Python's door: checks shapes, types and every index, then releases the GIL and runs the kernel.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>

#include "arrays.hpp"
#include "checks.hpp"
#include "levels.hpp"
#include "linear.hpp"
#include "memory.hpp"
#include "packed.hpp"
#include "program.hpp"
#include "quantised.hpp"
#include "threads.hpp"

using namespace nb::literals;

namespace octavo {
namespace {

class KVCache {
public:
    KVCache(KvPool shape) : pool(shape), region_(checked_bytes(shape)) {
        pool.data = region_.data();
    }

    KvPool pool;
    i64 nbytes() const { return pool.bytes(); }

    nb::tuple read_block(i64 layer, i64 block) const {
        require_inside(layer, block);
        const i64 size = pool.block_size * pool.num_heads * pool.dim;
        return nb::make_tuple(read(layer, block, false, size), read(layer, block, true, size));
    }

    void fill_block(i64 block, float value) {
        require_inside(0, block);
        for (i64 layer = 0; layer < pool.num_layers; ++layer) {
            char* base = pool.head(block, layer, 0);
            const i64 count = pool.block_bytes() / item_size(pool.dtype);
            if (pool.dtype == DType::i8) {
                fill_i8(base, value);
            } else if (pool.dtype == DType::f32) {
                auto* at = reinterpret_cast<float*>(base);
                for (i64 i = 0; i < count; ++i) at[i] = value;
            } else {
                auto* at = reinterpret_cast<bf16*>(base);
                for (i64 i = 0; i < count; ++i) at[i] = to_bf16(value);
            }
        }
    }

    i64 block_nbytes() const { return pool.num_layers * pool.block_bytes(); }

    // A block as it lies in the pool, layer after layer: to be kept elsewhere and put back.
    void save_block(i64 block, const Bytes& out) const {
        require_bytes(block, static_cast<i64>(out.shape(0)));
        const auto size = static_cast<std::size_t>(pool.block_bytes());
        for (i64 layer = 0; layer < pool.num_layers; ++layer) {
            std::memcpy(out.data() + static_cast<std::size_t>(layer) * size,
                        pool.head(block, layer, 0), size);
        }
    }

    void restore_block(i64 block, const ConstBytes& data) {
        require_bytes(block, static_cast<i64>(data.shape(0)));
        const auto size = static_cast<std::size_t>(pool.block_bytes());
        for (i64 layer = 0; layer < pool.num_layers; ++layer) {
            std::memcpy(pool.head(block, layer, 0),
                        data.data() + static_cast<std::size_t>(layer) * size, size);
        }
    }

private:
    // Every number 127 with the scale that gives `value`.
    void fill_i8(char* block, float value) {
        const float scale = value / 127.0f;
        std::memset(block, 127, static_cast<std::size_t>(pool.block_bytes()));
        for (i64 h = 0; h < pool.num_heads; ++h) {
            for (i64 slot = 0; slot < pool.block_size; ++slot) {
                for (const bool is_value : {false, true}) {
                    char* head = block + h * pool.head_bytes();
                    std::memcpy(head + kv_scale_offset(pool, is_value, slot), &scale, 4);
                }
            }
        }
    }

    static float element(const KvPool& pool, const char* head, bool value, i64 slot, i64 d) {
        const i64 at = kv_offset(pool, value, slot, d);
        if (pool.dtype == DType::f32) return reinterpret_cast<const float*>(head)[at];
        if (pool.dtype == DType::bf16) return to_float(reinterpret_cast<const bf16*>(head)[at]);
        float scale;
        std::memcpy(&scale, head + kv_scale_offset(pool, value, slot), 4);
        return static_cast<float>(reinterpret_cast<const std::int8_t*>(head)[at]) * scale;
    }

    static std::size_t checked_bytes(const KvPool& shape) {
        const double bytes =
            static_cast<double>(shape.num_blocks) * static_cast<double>(shape.num_layers) *
            static_cast<double>(shape.num_heads) * static_cast<double>(shape.block_size) *
            static_cast<double>(shape.dim_padded) * 8.0;
        if (bytes > 9e15) throw std::bad_alloc();
        return static_cast<std::size_t>(shape.bytes());
    }

    void require_inside(i64 layer, i64 block) const {
        if (layer < 0 || layer >= pool.num_layers) throw nb::index_error("layer is out of range");
        if (block < 0 || block >= pool.num_blocks) throw nb::index_error("block is out of range");
    }

    void require_bytes(i64 block, i64 size) const {
        require_inside(0, block);
        if (size != block_nbytes()) {
            fail("a block has " + std::to_string(block_nbytes()) + " bytes, not " +
                 std::to_string(size));
        }
    }

    nb::object read(i64 layer, i64 block, bool value, i64 size) const {
        auto* out = new float[static_cast<std::size_t>(size)];
        nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        float* to = out;
        for (i64 slot = 0; slot < pool.block_size; ++slot) {
            for (i64 h = 0; h < pool.num_heads; ++h) {
                const char* head = pool.head(block, layer, h);
                for (i64 d = 0; d < pool.dim; ++d) {
                    *to++ = element(pool, head, value, slot, d);
                }
            }
        }
        return nb::cast(nb::ndarray<nb::numpy, float>(
            out,
            {static_cast<std::size_t>(pool.block_size), static_cast<std::size_t>(pool.num_heads),
             static_cast<std::size_t>(pool.dim)},
            owner));
    }

    Region region_;
};

class Ops {
public:
    Ops(const std::string& level, bool float32)
        : level_(find_level(level)), dtype_(float32 ? DType::f32 : DType::bf16) {
        if (level_ == nullptr) fail("no such instruction-set level on this machine: " + level);
    }

    Linear* pack_linear(const In& weight) {
        const Matrix m = matrix(weight, "weight");
        require(m.dtype == DType::f32, "weight must be float32");
        require(m.rows > 0 && m.cols > 0, "weight must not be empty");
        PackedWeight w{nullptr, m.rows, m.cols, round_up(m.cols, kAlignK), dtype_};
        const i64 bytes = w.num_panels() * w.panel_elements() * item_size(dtype_);
        RegionPool::Part part = regions_.take(static_cast<std::size_t>(bytes));
        w.data = part.data;
        nb::gil_scoped_release released;
        level_->pack(m.row<float>(0), m.stride, w);
        return new Linear(w, std::move(part));
    }

    // Parts [rows, bytes of a row] uint8 stacked along N, each in its own stored format, packed as
    // pack_linear packs their values.
    Linear* pack_widened(const std::vector<ByteRows>& parts, const std::vector<std::string>& kinds,
                         i64 in_features) {
        require(!parts.empty() && parts.size() == kinds.size(), "parts and kinds must be as many");
        PackedWeight w{nullptr, 0, in_features, round_up(in_features, kAlignK), dtype_};
        std::vector<StoredRows> rows;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            rows.push_back({parts[i].data(), static_cast<i64>(parts[i].shape(0)),
                            static_cast<i64>(parts[i].shape(1)), stored_kind(kinds[i])});
            w.n += rows.back().rows;
            require(rows.back().rows > 0 && in_features > 0 &&
                        rows.back().stride == row_bytes(rows.back().kind, in_features),
                    "a stored part has rows of another size than in_features says");
        }
        const i64 bytes = w.num_panels() * w.panel_elements() * item_size(dtype_);
        RegionPool::Part part = regions_.take(static_cast<std::size_t>(bytes));
        w.data = part.data;
        nb::gil_scoped_release released;
        widen_panels(rows, w, *level_);
        return new Linear(w, std::move(part));
    }

    // Parts [rows, bytes of a row] uint8 stacked along N, each in its own stored format; kinds as
    // in `stored_kinds`. int8: their values are quantised to our own int8.
    Linear* pack_stored(const std::vector<ByteRows>& parts, const std::vector<std::string>& kinds,
                        i64 in_features, bool int8) {
        require(dtype_ == DType::bf16, "stored weights are computed from with bfloat16 only");
        require(!parts.empty() && parts.size() == kinds.size(), "parts and kinds must be as many");
        std::vector<StoredRows> rows;
        std::vector<CellFormat> formats;  // by panel
        i64 n = 0;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const StoredRows part{parts[i].data(), static_cast<i64>(parts[i].shape(0)),
                                  static_cast<i64>(parts[i].shape(1)), stored_kind(kinds[i])};
            require(!int8 || in_features <= kMaxK8, "in_features is too large for sums of int8");
            require(part.rows > 0 && in_features > 0 &&
                        part.stride == row_bytes(part.kind, in_features),
                    "a stored part has rows of another size than in_features says");
            require(int8 || (part.kind != Stored::f16 && part.kind != Stored::bf16),
                    "plain numbers are not kept as they are stored");
            const CellFormat format =
                cell_format(int8 ? Stored::f32 : part.kind, level_->decodes_cells);
            require(n % kPanel == 0 || formats.back() == format,
                    "parts of different formats must meet at a multiple of 32 rows");
            n += part.rows;
            formats.resize(static_cast<std::size_t>(ceil_div(n, kPanel)), format);
            rows.push_back(part);
        }
        const i64 align = formats[0].scales_columns() ? kAlignK8 : kAlignK;
        PackedWeight w{nullptr, n, in_features, round_up(in_features, align), dtype_};
        i64 bytes = 0;
        std::vector<CellPanel> cells;
        for (const CellFormat& format : formats) {
            cells.push_back(CellPanel{nullptr, format});
            bytes += format.panel_bytes(w.k_padded);
        }
        RegionPool::Part memory = regions_.take(static_cast<std::size_t>(bytes));
        auto* data = reinterpret_cast<std::uint8_t*>(memory.data);
        for (CellPanel& panel : cells) {
            panel.data = data + panel.format.column_bytes();
            data += panel.format.panel_bytes(w.k_padded);
        }
        w.cells = cells.data();
        nb::gil_scoped_release released;
        int8 ? widen_panels(rows, w, *level_) : fill_panels(rows, w);
        return new Linear(w, std::move(cells), std::move(memory));
    }

    KVCache* allocate(i64 num_layers, i64 num_blocks, i64 block_size, i64 num_heads, i64 dim,
                      bool int8) {
        require(num_layers > 0 && num_blocks > 0 && num_heads > 0,
                "KV pool sizes must be positive");
        require(block_size > 0 && (block_size & (block_size - 1)) == 0,
                "block_size must be a power of two");
        require(dim > 0 && dim % 2 == 0, "head_dim must be even");
        return new KVCache(KvPool{nullptr, num_blocks, num_layers, num_heads, block_size, dim,
                                  padded(dim), int8 ? DType::i8 : dtype_, dtype_});
    }

    i64 bytes_per_token(i64 num_layers, i64 num_heads, i64 dim, bool int8) const {
        const i64 vector = int8 ? padded(dim) + 4 : padded(dim) * item_size(dtype_);
        return 2 * num_layers * num_heads * vector;
    }

    void embedding(const Indices& ids, const Linear& weight, const Out& out) const {
        const Matrix to = matrix(out, "out");
        require(to.dtype == DType::f32, "out must be float32");
        require_shape(to, static_cast<i64>(ids.shape(0)), weight.weight.k, "out");
        require_range(ids, to.rows, weight.weight.n, "input_ids");
        nb::gil_scoped_release released;
        level_->embedding(ids.data(), weight.weight, to);
    }

    void linear(const In& x, const Linear& weight, const Out& out) const {
        const Matrix from = matrix(x, "x"), to = matrix(out, "out");
        require_shape(from, from.rows, weight.weight.k, "x");
        require_shape(to, from.rows, weight.weight.n, "out");
        nb::gil_scoped_release released;
        level_->linear(from, weight.weight, to);
    }

    void linear_silu_and_mul(const In& x, const Linear& gate_up_proj, const Out& out) const {
        const Matrix from = matrix(x, "x"), to = matrix(out, "out");
        const PackedWeight& w = gate_up_proj.weight;
        require(w.n % 2 == 0, "gate_up_proj must have as many rows for gate as for up");
        require_shape(from, from.rows, w.k, "x");
        require_shape(to, from.rows, w.n / 2, "out");
        nb::gil_scoped_release released;
        level_->linear_silu_and_mul(from, w, to);
    }

    void lm_head(const In& x, const Linear& weight, const Indices& argmax_only, const Out& logits,
                 const Out& best) const {
        const Matrix from = matrix(x, "x"), to = logits_of(logits);
        require_shape(from, from.rows, weight.weight.k, "x");
        require_shape(to, from.rows, weight.weight.n, "logits");
        require_range(argmax_only, from.rows, 2, "argmax_only");
        const auto* ids = column<std::int32_t>(best, from.rows, "best");
        nb::gil_scoped_release released;
        level_->lm_head(
            {from, weight.weight, argmax_only.data(), to, const_cast<std::int32_t*>(ids)});
    }

    void rms_norm(const In& x, const In& weight, float eps, const Out& out) const {
        const Matrix from = matrix(x, "x"), to = matrix(out, "out");
        require_shape(to, from.rows, from.cols, "out");
        const float* w = vector_of(weight, from.cols, "weight");
        nb::gil_scoped_release released;
        level_->rms_norm(from, nullptr, w, eps, to);
    }

    void fused_add_rms_norm(const In& x, const Out& residual, const In& weight, float eps,
                            const Out& out) const {
        const Matrix from = matrix(x, "x"), to = matrix(out, "out");
        const Matrix carried = matrix(residual, "residual");
        require(carried.dtype == DType::f32, "residual must be float32");
        require_shape(carried, from.rows, from.cols, "residual");
        require_shape(to, from.rows, from.cols, "out");
        const float* w = vector_of(weight, from.cols, "weight");
        nb::gil_scoped_release released;
        level_->rms_norm(from, &carried, w, eps, to);
    }

    void rotary(const Indices& positions, const Out& query, const Out& key,
                const In& cos_sin_cache) const {
        const Heads q = heads(query, "query"), k = heads(key, "key");
        const Matrix table = matrix(cos_sin_cache, "cos_sin_cache");
        require(table.dtype == DType::f32, "cos_sin_cache must be float32");
        require(table.cols % 2 == 0 && table.cols <= q.dim && table.cols <= k.dim,
                "cos_sin_cache is wider than a head");
        require(q.tokens == k.tokens, "query and key must have as many tokens");
        require_range(positions, q.tokens, table.rows, "positions");
        nb::gil_scoped_release released;
        level_->rotary(positions.data(), q, table);
        level_->rotary(positions.data(), k, table);
    }

    void cache_write(const In& key, const In& value, KVCache& cache, i64 layer,
                     const Indices& slots) const {
        const Heads k = heads(key, "key"), v = heads(value, "value");
        require_cache(cache, layer);
        for (const Heads* each : {&k, &v}) {
            require(each->heads == cache.pool.num_heads && each->dim == cache.pool.dim,
                    "key and value must be [T, num_kv_heads, head_dim] of the pool");
        }
        require(k.tokens == v.tokens && k.dtype == v.dtype, "key and value must be alike");
        require_range(slots, k.tokens, cache.pool.num_blocks * cache.pool.block_size,
                      "slot_mapping");
        nb::gil_scoped_release released;
        level_->cache_write(k, v, cache.pool, layer, slots.data());
    }

    void attention(const In& query, const KVCache& cache, i64 layer, const In& block_table,
                   const Indices& query_start_loc, const Indices& seq_lens, float scale,
                   const Out& out) const {
        AttentionArgs args{};
        args.query = heads(query, "query");
        args.pool = cache.pool;
        args.layer = layer;
        args.query_start_loc = query_start_loc.data();
        args.seq_lens = seq_lens.data();
        args.num_reqs = static_cast<i64>(seq_lens.shape(0));
        args.scale = scale;
        args.out = matrix(out, "out");
        require_cache(cache, layer);
        require(args.query.dim == args.pool.dim && args.query.heads % args.pool.num_heads == 0 &&
                    args.query.heads > 0,
                "query must be [T, num_heads, head_dim], num_heads a multiple of num_kv_heads");
        require_shape(args.out, args.query.tokens, args.query.heads * args.query.dim, "out");
        require(block_table.ndim() == 2 && block_table.dtype() == nb::dtype<std::int32_t>() &&
                    static_cast<i64>(block_table.shape(0)) == args.num_reqs,
                "block_table must be int32 [B, max_num_blocks]");
        require_last_axis(block_table, "block_table");
        args.block_table = static_cast<const std::int32_t*>(block_table.data());
        args.block_table_stride = block_table.stride(0);
        require(static_cast<i64>(query_start_loc.shape(0)) == args.num_reqs + 1,
                "query_start_loc must have B + 1 entries");
        check_requests(args, args.query.tokens, static_cast<i64>(block_table.shape(1)));
        nb::gil_scoped_release released;
        level_->attention(args);
    }

    void gather_rows(const In& x, const Indices& indices, const Out& out) const {
        const Matrix from = matrix(x, "x"), to = matrix(out, "out");
        require_shape(to, static_cast<i64>(indices.shape(0)), from.cols, "out");
        require_range(indices, to.rows, from.rows, "indices");
        nb::gil_scoped_release released;
        level_->copy_rows(from, indices.data(), to);
    }

    void mask(const Out& logits, const Indices& rows, const ByteRows& masks) const {
        MaskArgs args{};
        args.logits = logits_of(logits);
        args.num_rows = static_cast<i64>(masks.shape(0));
        args.num_bytes = static_cast<i64>(masks.shape(1));
        require_range(rows, args.num_rows, args.logits.rows, "rows");
        args.rows = rows.data();
        args.masks = masks.data();
        nb::gil_scoped_release released;
        level_->mask(args);
    }

    void sample(const Out& logits, const Indices& rows, const In& temperature, const In& floors,
                const Indices& top_k, const In& top_p, const In& seeds, const In& positions,
                const In& show, const Out& out) const {
        SampleArgs args{};
        args.logits = logits_of(logits);
        args.num_rows = static_cast<i64>(rows.shape(0));
        require_range(rows, args.num_rows, args.logits.rows, "rows");
        args.rows = rows.data();
        args.temperature = vector_of(temperature, args.num_rows, "temperature");
        args.min_p_floor = vector_of(floors, args.num_rows, "min_p_floor");
        require(static_cast<i64>(top_k.shape(0)) == args.num_rows, "top_k has another length");
        args.top_k = top_k.data();
        args.top_p = column<double>(top_p, args.num_rows, "top_p");
        args.seeds = column<std::uint64_t>(seeds, args.num_rows, "seeds");
        args.positions = column<i64>(positions, args.num_rows, "positions");
        args.show = column<std::uint8_t>(show, args.num_rows, "show");
        args.out = const_cast<std::int32_t*>(column<std::int32_t>(out, args.num_rows, "out"));
        nb::gil_scoped_release released;
        level_->sample(args);
    }

    void logprobs(const Out& logits, const Indices& rows, const Indices& token_ids,
                  const Out& log_sum_exps, const Out& ranks, const Out& top) const {
        LogprobArgs args{};
        args.logits = logits_of(logits);
        args.num_rows = static_cast<i64>(rows.shape(0));
        require_range(rows, args.num_rows, args.logits.rows, "rows");
        require_range(token_ids, args.num_rows, args.logits.cols, "token_ids");
        args.rows = rows.data();
        args.token_ids = token_ids.data();
        args.log_sum_exps =
            const_cast<double*>(column<double>(log_sum_exps, args.num_rows, "log_sum_exps"));
        args.ranks = const_cast<std::int32_t*>(column<std::int32_t>(ranks, args.num_rows, "ranks"));
        require(args.num_rows == 0 || top.size() % rows.shape(0) == 0, "top must be [R, num_top]");
        args.num_top = args.num_rows == 0 ? 0 : static_cast<i64>(top.size()) / args.num_rows;
        require(args.num_top <= args.logits.cols, "top has more columns than there are tokens");
        args.top = const_cast<std::int32_t*>(
            column<std::int32_t>(top, args.num_rows * args.num_top, "top"));
        nb::gil_scoped_release released;
        level_->logprobs(args);
    }

    // One captured step over `memory`, whose parts are as program.layout() says.
    void replay(const Program& program, i64 num_tokens, i64 num_samples,
                const std::vector<Index>& inputs, KVCache& cache, const Memory& memory) const {
        require_cache(cache, 0);
        Program::Step step{
            num_tokens, num_samples, {}, reinterpret_cast<char*>(memory.data()), cache.pool};
        require(static_cast<i64>(memory.size()) >= program.layout(num_tokens, num_samples).back(),
                "memory is too small for the step");
        for (const Index& each : inputs) {
            require_last_axis(each, "input");
            const bool table = each.ndim() == 2;
            step.inputs.push_back({each.data(), static_cast<i64>(each.shape(0)),
                                   table ? static_cast<i64>(each.shape(1)) : 1, each.stride(0)});
        }
        nb::gil_scoped_release released;
        program.check(step);
        program.run(*level_, step);
    }

private:
    static Matrix logits_of(const Out& logits) {
        const Matrix found = matrix(logits, "logits");
        require(found.dtype == DType::f32 && found.cols > 0, "logits must be float32 [S, V]");
        return found;
    }

    static i64 padded(i64 dim) { return round_up(dim, 16); }

    void require_cache(const KVCache& cache, i64 layer) const {
        if (layer < 0 || layer >= cache.pool.num_layers) {
            throw nb::index_error("layer is out of range");
        }
        require(cache.pool.compute == dtype_, "the KV pool has another dtype than these kernels");
    }

    const Level* level_;
    DType dtype_;
    RegionPool regions_;
};

View view(i64 buffer, i64 offset_bytes, const std::vector<i64>& shape,
          const std::vector<i64>& strides, bool is_bf16) {
    const bool flat = shape.size() == 2;
    return {buffer,
            offset_bytes,
            flat ? 1 : shape[1],
            shape.back(),
            strides[0],
            strides[1],
            is_bf16 ? DType::bf16 : DType::f32};
}

// A call as the recorder in kernels/cpu/capture.py describes it; it has run once with the same
// arrays, so shapes and types have been checked.
void add_call(Program& program, Op op, const std::vector<View>& views, const Linear* weight,
              const std::optional<In>& constant, float number, i64 layer,
              const std::vector<i64>& inputs) {
    Call call{};
    call.op = op;
    View* const places[] = {&call.out, &call.a, &call.b};
    for (std::size_t i = 0; i < views.size() && i < 3; ++i) *places[i] = views[i];
    if (weight != nullptr) call.weight = weight->weight;
    if (constant && constant->ndim() == 1) {
        call.vector = static_cast<const float*>(constant->data());
    } else if (constant) {
        call.table = matrix(*constant, "constant");
    }
    call.number = number;
    call.layer = layer;
    for (std::size_t i = 0; i < inputs.size() && i < 3; ++i) call.inputs[i] = inputs[i];
    program.add(call);
}

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (const Level* level : available_levels()) names.emplace_back(level->name);
    return names;
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;
    m.def("available_levels", &level_names);
    m.def("stored_kinds", &stored_kind_names);
    m.def("decodes_stored", [](const std::string& level) {
        const Level* found = find_level(level);
        return found != nullptr && found->decodes_cells;
    });
    m.def("num_threads", &num_threads);
    m.def(
        "set_num_threads",
        [](int count) {
            require(count >= 1 && count <= 1024, "threads must be 1 to 1024");
            nb::gil_scoped_release released;
            set_num_threads(count);
        },
        "count"_a);

    nb::class_<octavo::Linear>(m, "Linear")
        .def_prop_ro("out_features", [](const octavo::Linear& l) { return l.weight.n; })
        .def_prop_ro("in_features", [](const octavo::Linear& l) { return l.weight.k; })
        .def_prop_ro("nbytes", &octavo::Linear::nbytes);

    bind_packed(m);

    nb::class_<KVCache>(m, "KVCache")
        .def_prop_ro("num_layers", [](const KVCache& c) { return c.pool.num_layers; })
        .def_prop_ro("num_blocks", [](const KVCache& c) { return c.pool.num_blocks; })
        .def_prop_ro("block_size", [](const KVCache& c) { return c.pool.block_size; })
        .def_prop_ro("nbytes", &KVCache::nbytes)
        .def_prop_ro("block_nbytes", &KVCache::block_nbytes)
        .def("save_block", &KVCache::save_block, "block_id"_a, "out"_a)
        .def("restore_block", &KVCache::restore_block, "block_id"_a, "data"_a)
        .def("read_block", &KVCache::read_block, "layer"_a, "block_id"_a)
        .def("fill_block", &KVCache::fill_block, "block_id"_a, "value"_a);

    nb::class_<Ops>(m, "Ops")
        .def(nb::init<const std::string&, bool>(), "level"_a, "float32"_a)
        .def("pack_linear", &Ops::pack_linear, nb::rv_policy::take_ownership)
        .def("pack_stored", &Ops::pack_stored, nb::rv_policy::take_ownership)
        .def("pack_widened", &Ops::pack_widened, nb::rv_policy::take_ownership)
        .def("allocate_kv_cache", &Ops::allocate, nb::rv_policy::take_ownership)
        .def("kv_bytes_per_token", &Ops::bytes_per_token)
        .def("embedding", &Ops::embedding)
        .def("linear", &Ops::linear)
        .def("linear_silu_and_mul", &Ops::linear_silu_and_mul)
        .def("lm_head", &Ops::lm_head)
        .def("rms_norm", &Ops::rms_norm)
        .def("fused_add_rms_norm", &Ops::fused_add_rms_norm)
        .def("rotary_embedding", &Ops::rotary)
        .def("reshape_and_cache", &Ops::cache_write)
        .def("paged_attention", &Ops::attention)
        .def("gather_rows", &Ops::gather_rows)
        .def("mask", &Ops::mask)
        .def("sample", &Ops::sample)
        .def("logprobs", &Ops::logprobs)
        .def("replay", &Ops::replay);

    nb::enum_<Op>(m, "Op")
        .value("embedding", Op::embedding)
        .value("linear", Op::linear)
        .value("linear_silu_and_mul", Op::linear_silu_and_mul)
        .value("rms_norm", Op::rms_norm)
        .value("fused_add_rms_norm", Op::add_rms_norm)
        .value("rotary_embedding", Op::rotary)
        .value("reshape_and_cache", Op::cache_write)
        .value("paged_attention", Op::attention)
        .value("gather_rows", Op::copy_rows)
        .value("lm_head", Op::lm_head);

    nb::class_<View>(m, "View");
    m.def("view", &view, "buffer"_a, "offset"_a, "shape"_a, "strides"_a, "bfloat16"_a);

    nb::class_<Program>(m, "Program")
        .def(nb::init<>())
        .def("__len__", &Program::size)
        .def("add_buffer", &Program::add_buffer, "sampled"_a, "row_bytes"_a)
        .def("add", &add_call, "op"_a, "views"_a, "weight"_a.none(), "constant"_a.none(),
             "number"_a, "layer"_a, "inputs"_a)
        .def("layout", &Program::layout, "num_tokens"_a, "num_samples"_a);
}
