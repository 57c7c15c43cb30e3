// A packed weight is its bytes and a layout: sizes, then the formats of its panels, as runs. Both
// mean something to the very build that wrote them only; the cache keys its files by that.
#include "packed.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "arrays.hpp"
#include "linear.hpp"

using namespace nb::literals;

namespace octavo {
namespace {

static_assert(std::is_trivially_copyable_v<CellFormat>);

// Neighbouring panels of one format, and where their cells lie in the weight's memory.
struct Run {
    i64 num_panels, offset, stride;
    CellFormat format;
};

template <class T>
void put(std::vector<char>& out, const T& value) {
    const auto at = out.size();
    out.resize(at + sizeof(T));
    std::memcpy(out.data() + at, &value, sizeof(T));
}

class Cursor {
public:
    explicit Cursor(const nb::bytes& bytes) : at_(bytes.c_str()), left_(bytes.size()) {}
    bool at_end() const { return left_ == 0; }
    template <class T>
    T get() {
        require(left_ >= sizeof(T), "the layout of a packed weight is cut off");
        T value;
        std::memcpy(&value, at_, sizeof(T));
        at_ += sizeof(T);
        left_ -= sizeof(T);
        return value;
    }

private:
    const char* at_;
    std::size_t left_;
};

nb::bytes layout_of(const Linear& linear) {
    std::vector<char> out;
    put(out, linear.weight.n);
    put(out, linear.weight.k);
    put(out, linear.weight.k_padded);
    put(out, static_cast<i64>(linear.weight.dtype));
    const std::vector<CellPanel>& cells = linear.cells();
    const auto* memory = reinterpret_cast<const std::uint8_t*>(linear.memory());
    for (std::size_t i = 0; i < cells.size();) {
        std::size_t end = i + 1;
        const i64 stride = end < cells.size() ? cells[end].data - cells[i].data : 0;
        while (end < cells.size() && cells[end].format == cells[i].format &&
               cells[end].data - cells[end - 1].data == stride) {
            ++end;
        }
        put(out, static_cast<i64>(end - i));
        put(out, static_cast<i64>(cells[i].data - memory));
        put(out, stride);
        put(out, cells[i].format);
        i = end;
    }
    return nb::bytes(out.data(), out.size());
}

nb::object bytes_of(nb::handle self) {
    const auto& linear = nb::cast<const Linear&>(self);
    auto* data = reinterpret_cast<const std::uint8_t*>(linear.memory());
    return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(
        data, {static_cast<std::size_t>(linear.nbytes())}, self));
}

// Memory of nothing yet, on huge pages where there are any.
nb::object fresh_bytes(std::size_t nbytes) {
    auto region = std::make_unique<Region>(nbytes);
    auto* data = reinterpret_cast<std::uint8_t*>(region->data());
    nb::capsule owner(region.get(), [](void* p) noexcept { delete static_cast<Region*>(p); });
    static_cast<void>(region.release());
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(data, {nbytes}, owner));
}

// A weight that lies at `offset` of the image.
Linear* adopt(const nb::bytes& layout, std::shared_ptr<FileImage> image, i64 offset, i64 nbytes) {
    Cursor in(layout);
    PackedWeight w{};
    w.n = in.get<i64>();
    w.k = in.get<i64>();
    w.k_padded = in.get<i64>();
    const i64 dtype = in.get<i64>();
    constexpr i64 kLimit = i64{1} << 31;
    require(w.n > 0 && w.k > 0 && w.n < kLimit && w.k <= w.k_padded && w.k_padded < kLimit,
            "a packed weight has no size");
    require(dtype == static_cast<i64>(DType::f32) || dtype == static_cast<i64>(DType::bf16),
            "a packed weight has an unknown dtype");
    w.dtype = static_cast<DType>(dtype);
    const auto size = static_cast<i64>(image->size());
    require(nbytes >= 0 && offset >= 0 && offset % 64 == 0 && nbytes <= size - offset,
            "a packed weight lies outside of its file");
    auto* data = reinterpret_cast<const std::uint8_t*>(image->data()) + offset;
    w.data = const_cast<std::uint8_t*>(data);
    std::vector<CellPanel> cells;
    while (!in.at_end()) {
        Run run{};
        run.num_panels = in.get<i64>();
        run.offset = in.get<i64>();
        run.stride = in.get<i64>();
        run.format = in.get<CellFormat>();
        require(
            run.num_panels > 0 && run.num_panels <= w.num_panels() - static_cast<i64>(cells.size()),
            "a packed weight has too many panels");
        for (i64 i = 0; i < run.num_panels; ++i) {
            const i64 at = run.offset + i * run.stride;
            require(at >= run.format.column_bytes() && at < nbytes,
                    "a panel lies outside of its packed weight");
            cells.push_back(CellPanel{data + at, run.format});
        }
    }
    require(cells.empty() || static_cast<i64>(cells.size()) == w.num_panels(),
            "a packed weight has too few panels");
    const char* memory = image->data() + offset;
    auto linear = std::make_unique<Linear>(w, std::move(cells), memory, std::move(image));
    require(linear->nbytes() == nbytes, "a packed weight has another size than its layout says");
    return linear.release();
}

std::shared_ptr<FileImage> open_image(int fd, i64 size, const std::string& way) {
    require(size >= 0, "size must not be negative");
    require(way == "auto" || way == "map" || way == "copy", "way must be auto, map or copy");
    const auto how = way == "map"    ? FileImage::Way::map
                     : way == "copy" ? FileImage::Way::copy
                                     : FileImage::Way::choose;
    nb::gil_scoped_release released;
    return std::make_shared<FileImage>(fd, static_cast<std::size_t>(size), how);
}

}  // namespace

void bind_packed(nb::module_& m) {
    // A thread that is left writing packed weights at exit holds some, and the system frees them.
    nb::set_leak_warnings(false);
    nb::class_<FileImage>(m, "FileImage")
        .def_prop_ro("is_mapped", &FileImage::is_mapped)
        .def_prop_ro("huge_bytes", &FileImage::huge_bytes);
    m.def("open_image", &open_image, "fd"_a, "size"_a, "way"_a);
    m.def("adopt", &adopt, "layout"_a, "image"_a, "offset"_a, "nbytes"_a,
          nb::rv_policy::take_ownership);
    m.def("packed_layout", &layout_of, "linear"_a);
    m.def("packed_bytes", &bytes_of, "linear"_a);
    m.def("fresh_bytes", &fresh_bytes, "nbytes"_a);
    m.def("set_huge_pages", &set_huge_pages, "wanted"_a);
}

}  // namespace octavo
