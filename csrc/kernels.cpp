// One instruction-set level: this file is compiled once per level, with that level's flags and with
// OCTAVO_LEVEL naming its namespace.
#include "attention.hpp"
#include "gated.hpp"
#include "head.hpp"
#include "sampler.hpp"

#define OCTAVO_TEXT_OF(name) #name
#define OCTAVO_TEXT(name) OCTAVO_TEXT_OF(name)

namespace octavo::OCTAVO_LEVEL {

extern const Level level;
const Level level = {OCTAVO_TEXT(OCTAVO_LEVEL),
                     kDecodesCells,
                     pack,
                     linear,
                     linear_silu_and_mul,
                     lm_head,
                     embedding,
                     rms_norm,
                     rotary,
                     cache_write,
                     attention,
                     copy_rows,
                     mask,
                     sample,
                     logprobs};

}  // namespace octavo::OCTAVO_LEVEL
