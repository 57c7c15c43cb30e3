// Which levels this build has and this machine can run.
#pragma once

#include <string>
#include <vector>

#include "common.hpp"

namespace octavo {

// Built and runnable here, best first.
const std::vector<const Level*>& available_levels();

// nullptr where the level is unknown, not built or not runnable here.
const Level* find_level(const std::string& name);

}  // namespace octavo
