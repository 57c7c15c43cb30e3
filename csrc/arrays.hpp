// Arrays as Python hands them over: their types, and the checks of shape, type and index at the
// door. bf16 arrays arrive as views of uint16 (the buffer protocol knows no bfloat16).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "checks.hpp"
#include "common.hpp"

namespace nb = nanobind;

namespace octavo {

using In = nb::ndarray<nb::ro, nb::device::cpu>;
using Out = nb::ndarray<nb::device::cpu>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteRows =
    nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::ro, nb::device::cpu>;
using Indices = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Index = nb::ndarray<const std::int32_t, nb::device::cpu>;
using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void fail(const std::string& text) { throw nb::value_error(text.c_str()); }

inline void require(bool condition, const char* text) {
    if (!condition) fail(text);
}

template <class Array>
DType dtype_of(const Array& array, const char* name) {
    if (array.dtype() == nb::dtype<float>()) return DType::f32;
    if (array.dtype() == nb::dtype<std::uint16_t>()) return DType::bf16;
    fail(std::string(name) + " must be float32 or bfloat16");
}

template <class Array>
void require_last_axis(const Array& array, const char* name) {
    const auto last = array.ndim() - 1;
    if (array.size() > 0 && array.shape(last) > 1 && array.stride(last) != 1) {
        fail(std::string(name) + ": the last axis must be contiguous");
    }
}

template <class Array>
Matrix matrix(const Array& array, const char* name) {
    if (array.ndim() != 2) fail(std::string(name) + " must have 2 axes");
    require_last_axis(array, name);
    return Matrix{const_cast<void*>(static_cast<const void*>(array.data())),
                  static_cast<i64>(array.shape(0)), static_cast<i64>(array.shape(1)),
                  array.stride(0), dtype_of(array, name)};
}

template <class Array>
Heads heads(const Array& array, const char* name) {
    if (array.ndim() != 3) fail(std::string(name) + " must have 3 axes: tokens, heads, head_dim");
    require_last_axis(array, name);
    return Heads{const_cast<void*>(static_cast<const void*>(array.data())),
                 static_cast<i64>(array.shape(0)),
                 static_cast<i64>(array.shape(1)),
                 static_cast<i64>(array.shape(2)),
                 array.stride(0),
                 array.stride(1),
                 dtype_of(array, name)};
}

inline void require_shape(const Matrix& m, i64 rows, i64 cols, const char* name) {
    if (m.rows == rows && m.cols == cols) return;
    fail(std::string(name) + " is [" + std::to_string(m.rows) + ", " + std::to_string(m.cols) +
         "], but must be [" + std::to_string(rows) + ", " + std::to_string(cols) + "]");
}

inline const float* vector_of(const In& array, i64 size, const char* name) {
    if (array.ndim() != 1 || static_cast<i64>(array.shape(0)) != size ||
        array.dtype() != nb::dtype<float>()) {
        fail(std::string(name) + " must be float32 [" + std::to_string(size) + "]");
    }
    require_last_axis(array, name);
    return static_cast<const float*>(array.data());
}

// The elements of a contiguous array of `count` of them.
template <class T, class Array>
const T* column(const Array& array, i64 count, const char* name) {
    bool contiguous = true;
    i64 stride = 1;
    for (auto axis = static_cast<i64>(array.ndim()) - 1; axis >= 0; --axis) {
        const auto i = static_cast<std::size_t>(axis);
        contiguous = contiguous && (array.shape(i) <= 1 || array.stride(i) == stride);
        stride *= static_cast<i64>(array.shape(i));
    }
    if (array.dtype() != nb::dtype<T>() || static_cast<i64>(array.size()) != count || !contiguous) {
        fail(std::string(name) + " has the wrong type, size or layout");
    }
    return static_cast<const T*>(array.data());
}

inline void require_range(const Indices& indices, i64 count, i64 limit, const char* name) {
    if (static_cast<i64>(indices.shape(0)) != count) {
        fail(std::string(name) + " has " + std::to_string(indices.shape(0)) +
             " entries, but must have " + std::to_string(count));
    }
    check_range(indices.data(), count, limit, name);
}

}  // namespace octavo
