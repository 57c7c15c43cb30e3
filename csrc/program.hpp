// A model's step as a list of kernel calls: captured once, replayed for any number of tokens by one
// call, so that between two kernels lies a loop instead of an interpreter.
#pragma once

#include <vector>

#include "common.hpp"

namespace octavo {

// An array of the step's scratch memory, [rows, cols] or [rows, heads, cols]. Rows are the tokens
// or the sampled rows of the step that runs; strides count elements.
struct View {
    i64 buffer, offset_bytes, heads, cols, stride, stride_head;
    DType dtype;
};

// An index array of the step, by its place among the inputs.
struct Input {
    const std::int32_t* data;
    i64 size, cols, stride;  // of the first axis; of the second, where there is one
};

enum class Op : std::uint8_t {
    embedding,
    linear,
    linear_silu_and_mul,
    rms_norm,
    add_rms_norm,
    rotary,
    cache_write,
    attention,
    copy_rows,
    lm_head
};

struct Call {
    Op op;
    View a{}, b{}, out{};
    PackedWeight weight{};
    const float* vector = nullptr;
    Matrix table{};
    float number = 0.0f;  // eps or scale
    i64 layer = 0;
    i64 inputs[3] = {-1, -1, -1};
};

class Program {
public:
    struct Step {
        i64 num_tokens, num_samples;
        std::vector<Input> inputs;
        char* memory;  // of layout().back() bytes, 64-byte aligned
        KvPool pool;
    };

    i64 add_buffer(bool sampled, i64 row_bytes);
    void add(const Call& call);
    i64 size() const { return static_cast<i64>(calls_.size()); }

    // Where each buffer starts, and last how many bytes all take.
    std::vector<i64> layout(i64 num_tokens, i64 num_samples) const;

    // Throws where an index array of the step doesn't fit; then nothing has been computed.
    void check(const Step& step) const;
    void run(const Level& level, const Step& step) const;

private:
    struct Buffer {
        bool sampled;
        i64 row_bytes;
    };
    struct Placed;
    void check_call(const Call& call, const Placed& placed) const;

    std::vector<Buffer> buffers_;
    std::vector<Call> calls_;
    std::vector<Call> checked_;  // every layer asks the same of the same arrays: once is enough
    i64 num_layers_ = 0;
};

}  // namespace octavo
