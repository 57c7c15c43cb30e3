// A packed weight with the memory that it lives in, and stored formats by name: for the bindings.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "quantised.hpp"
#include "threads.hpp"

namespace octavo {

class Linear {
public:
    Linear(PackedWeight weight, RegionPool::Part part)
        : weight(weight), owner_(std::move(part.region)) {}
    Linear(PackedWeight quantised, std::vector<CellPanel> cells, RegionPool::Part part)
        : Linear(quantised, std::move(cells), std::shared_ptr<const void>(part.region)) {}
    // No cells: a weight that is not quantised. `owner` keeps the memory.
    Linear(PackedWeight packed, std::vector<CellPanel> cells, std::shared_ptr<const void> owner)
        : weight(packed), cells_(std::move(cells)), owner_(std::move(owner)) {
        if (!cells_.empty()) weight.cells = cells_.data();
    }
    Linear(const Linear&) = delete;
    PackedWeight weight;
    const std::vector<CellPanel>& cells() const { return cells_; }
    // [nbytes()]: all of it lies together.
    const void* data() const { return cells_.empty() ? weight.data : cells_.front().data; }
    i64 nbytes() const {
        if (weight.cells == nullptr) {
            return weight.num_panels() * weight.panel_elements() * item_size(weight.dtype);
        }
        i64 bytes = 0;
        for (const CellPanel& panel : cells_) {
            bytes += weight.k_padded / 32 * panel.format.bytes();
        }
        return bytes;
    }

private:
    std::vector<CellPanel> cells_;
    std::shared_ptr<const void> owner_;
};

struct NamedKind {
    const char* name;
    Stored kind;
};
constexpr NamedKind kStoredKinds[] = {
    {"F32", Stored::f32},   {"Q8_0", Stored::q8_0}, {"Q4_0", Stored::q4_0},
    {"Q4_1", Stored::q4_1}, {"Q5_0", Stored::q5_0}, {"Q5_1", Stored::q5_1},
    {"Q4_K", Stored::q4_k}, {"Q5_K", Stored::q5_k}, {"Q6_K", Stored::q6_k},
};

inline Stored stored_kind(const std::string& name) {
    for (const NamedKind& each : kStoredKinds) {
        if (name == each.name) return each.kind;
    }
    throw std::invalid_argument("no kernels for weights stored as " + name);
}

// Threads share the panels; one may hold the end of a part and the start of the next.
inline void fill_panels(const std::vector<StoredRows>& parts, const PackedWeight& w) {
    struct Job {
        const std::vector<StoredRows>& parts;
        const PackedWeight& w;
    } job{parts, w};
    run_tasks(
        w.num_panels(), 1,
        [](void* context, i64 begin, i64 end) {
            const Job& j = *static_cast<const Job*>(context);
            i64 start = 0;
            for (const StoredRows& part : j.parts) {
                for (i64 panel = begin; panel < end; ++panel) {
                    const i64 first = max64(start, panel * kPanel);
                    const i64 last = min64(start + part.rows, (panel + 1) * kPanel);
                    if (first < last) {
                        pack_cells(part, first - start, last - first, j.w, panel,
                                   first - panel * kPanel);
                    }
                }
                start += part.rows;
            }
        },
        &job);
}

inline std::vector<std::string> stored_kind_names() {
    std::vector<std::string> names;
    for (const NamedKind& each : kStoredKinds) names.emplace_back(each.name);
    return names;
}

}  // namespace octavo
