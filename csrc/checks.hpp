// What is checked of index arrays before a kernel trusts them. Throws std::out_of_range
// (IndexError) and std::invalid_argument (ValueError).
#pragma once

#include <stdexcept>
#include <string>

#include "common.hpp"

namespace octavo {

static inline void check(bool condition, const std::string& text) {
    if (!condition) throw std::invalid_argument(text);
}

static inline void check_range(const std::int32_t* indices, i64 count, i64 limit,
                               const char* name) {
    for (i64 i = 0; i < count; ++i) {
        if (indices[i] >= 0 && indices[i] < limit) continue;
        throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "] is " +
                                std::to_string(indices[i]) + ", outside [0, " +
                                std::to_string(limit) + ")");
    }
}

// query_start_loc, seq_lens and block_table, of `max_blocks` columns, against `num_tokens` rows.
static inline void check_requests(const AttentionArgs& args, i64 num_tokens, i64 max_blocks) {
    check(args.query_start_loc[0] == 0 && args.query_start_loc[args.num_reqs] == num_tokens,
          "query_start_loc must run from 0 to the number of tokens");
    for (i64 b = 0; b < args.num_reqs; ++b) {
        const i64 rows = args.query_start_loc[b + 1] - args.query_start_loc[b];
        check(rows >= 0, "query_start_loc must not fall");
        const i64 num_blocks = ceil_div(args.seq_lens[b], args.pool.block_size);
        check(args.seq_lens[b] >= rows, "seq_lens must count at least the rows of a request");
        check(num_blocks <= max_blocks, "block_table has too few columns for seq_lens");
        for (i64 i = 0; i < num_blocks; ++i) {
            const std::int32_t id = args.block_table[b * args.block_table_stride + i];
            if (id >= 0 && id < args.pool.num_blocks) continue;
            throw std::out_of_range("block_table[" + std::to_string(b) + ", " + std::to_string(i) +
                                    "] is " + std::to_string(id) +
                                    ", but the request has keys there");
        }
    }
}

}  // namespace octavo
