#include "program.hpp"

#include "checks.hpp"

namespace octavo {

// A step with its buffers in place: views become arrays.
struct Program::Placed {
    const Program& program;
    const Step& step;
    std::vector<i64> starts;

    Placed(const Program& program, const Step& step)
        : program(program), step(step), starts(program.layout(step.num_tokens, step.num_samples)) {}

    i64 rows(const View& view) const {
        const bool sampled = program.buffers_[static_cast<std::size_t>(view.buffer)].sampled;
        return sampled ? step.num_samples : step.num_tokens;
    }
    char* data(const View& view) const {
        return step.memory + starts[static_cast<std::size_t>(view.buffer)] + view.offset_bytes;
    }
    Matrix matrix(const View& view) const {
        return {data(view), rows(view), view.cols, view.stride, view.dtype};
    }
    Heads heads(const View& view) const {
        return {data(view),  rows(view),       view.heads, view.cols,
                view.stride, view.stride_head, view.dtype};
    }
    const Input& input(const Call& call, int which) const {
        return step.inputs[static_cast<std::size_t>(call.inputs[which])];
    }
    AttentionArgs attention(const Call& call) const {
        const Input& table = input(call, 0);
        return {heads(call.a), step.pool,           call.layer,          table.data,
                table.stride,  input(call, 1).data, input(call, 2).data, input(call, 2).size,
                call.number,   matrix(call.out)};
    }
};

i64 Program::add_buffer(bool sampled, i64 row_bytes) {
    buffers_.push_back({sampled, row_bytes});
    return static_cast<i64>(buffers_.size()) - 1;
}

void Program::add(const Call& call) {
    calls_.push_back(call);
    num_layers_ = max64(num_layers_, call.layer + 1);
    for (const Call& before : checked_) {
        if (before.op == call.op && before.a.buffer == call.a.buffer &&
            before.out.buffer == call.out.buffer && before.inputs[0] == call.inputs[0] &&
            before.inputs[1] == call.inputs[1]) {
            return;
        }
    }
    checked_.push_back(call);
}

std::vector<i64> Program::layout(i64 num_tokens, i64 num_samples) const {
    std::vector<i64> starts;
    i64 next = 0;
    for (const Buffer& buffer : buffers_) {
        starts.push_back(next);
        next += round_up(buffer.row_bytes * (buffer.sampled ? num_samples : num_tokens), 64);
    }
    starts.push_back(next);
    return starts;
}

void Program::check_call(const Call& call, const Placed& placed) const {
    i64 limit = 0, count = 0;
    const char* name = "";
    switch (call.op) {
        case Op::embedding:
            limit = call.weight.n, count = placed.rows(call.out), name = "input_ids";
            break;
        case Op::rotary:
            limit = call.table.rows, count = placed.rows(call.a), name = "positions";
            break;
        case Op::cache_write:
            limit = placed.step.pool.num_blocks * placed.step.pool.block_size;
            count = placed.rows(call.a), name = "slot_mapping";
            break;
        case Op::copy_rows:
            limit = placed.rows(call.a), count = placed.rows(call.out), name = "indices";
            break;
        case Op::lm_head:
            limit = 2, count = placed.rows(call.a), name = "argmax_only";
            break;
        case Op::attention: {
            const Input& starts = placed.input(call, 1);
            const i64 num_reqs = placed.input(call, 2).size;
            octavo::check(placed.input(call, 0).size == num_reqs && starts.size == num_reqs + 1,
                          "block_table, query_start_loc and seq_lens must be of as many requests");
            check_requests(placed.attention(call), placed.rows(call.a), placed.input(call, 0).cols);
            return;
        }
        default:
            return;
    }
    const Input& indices = placed.input(call, 0);
    octavo::check(indices.size == count, std::string(name) + " has " +
                                             std::to_string(indices.size) +
                                             " entries, but must have " + std::to_string(count));
    check_range(indices.data, count, limit, name);
}

void Program::check(const Step& step) const {
    octavo::check(num_layers_ <= step.pool.num_layers, "the KV pool has too few layers");
    const Placed placed(*this, step);
    for (const Call& call : checked_) check_call(call, placed);
}

void Program::run(const Level& level, const Step& step) const {
    const Placed at(*this, step);
    for (const Call& call : calls_) {
        switch (call.op) {
            case Op::embedding:
                level.embedding(at.input(call, 0).data, call.weight, at.matrix(call.out));
                break;
            case Op::linear:
                level.linear(at.matrix(call.a), call.weight, at.matrix(call.out));
                break;
            case Op::linear_silu_and_mul:
                level.linear_silu_and_mul(at.matrix(call.a), call.weight, at.matrix(call.out));
                break;
            case Op::rms_norm:
                level.rms_norm(at.matrix(call.a), nullptr, call.vector, call.number,
                               at.matrix(call.out));
                break;
            case Op::add_rms_norm: {
                const Matrix residual = at.matrix(call.b);
                level.rms_norm(at.matrix(call.a), &residual, call.vector, call.number,
                               at.matrix(call.out));
                break;
            }
            case Op::rotary:
                level.rotary(at.input(call, 0).data, at.heads(call.a), call.table);
                level.rotary(at.input(call, 0).data, at.heads(call.b), call.table);
                break;
            case Op::cache_write:
                level.cache_write(at.heads(call.a), at.heads(call.b), step.pool, call.layer,
                                  at.input(call, 0).data);
                break;
            case Op::attention:
                level.attention(at.attention(call));
                break;
            case Op::copy_rows:
                level.copy_rows(at.matrix(call.a), at.input(call, 0).data, at.matrix(call.out));
                break;
            case Op::lm_head:
                level.lm_head({at.matrix(call.a), call.weight, at.input(call, 0).data,
                               at.matrix(call.out), at.matrix(call.b).row<std::int32_t>(0)});
                break;
        }
    }
}

}  // namespace octavo
