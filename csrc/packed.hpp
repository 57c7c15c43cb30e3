// Packed weights as bytes, and back from a file: for the cache of kernels/cpu/packed.py.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_packed(nanobind::module_& m);

}  // namespace octavo
