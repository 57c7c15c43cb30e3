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
        : Linear(weight, {}, part.data, std::move(part.region)) {}
    Linear(PackedWeight quantised, std::vector<CellPanel> cells, RegionPool::Part part)
        : Linear(quantised, std::move(cells), part.data, std::move(part.region)) {}
    // Of [nbytes()] memory that `owner` keeps. No cells: a weight that is not quantised.
    Linear(PackedWeight packed, std::vector<CellPanel> cells, const char* memory,
           std::shared_ptr<const void> owner)
        : weight(packed), cells_(std::move(cells)), memory_(memory), owner_(std::move(owner)) {
        if (!cells_.empty()) weight.cells = cells_.data();
    }
    Linear(const Linear&) = delete;
    PackedWeight weight;
    const std::vector<CellPanel>& cells() const { return cells_; }
    const char* memory() const { return memory_; }
    i64 nbytes() const {
        if (weight.cells == nullptr) {
            return weight.num_panels() * weight.panel_elements() * item_size(weight.dtype);
        }
        i64 bytes = 0;
        for (const CellPanel& panel : cells_) {
            bytes += panel.format.panel_bytes(weight.k_padded);
        }
        return bytes;
    }

private:
    std::vector<CellPanel> cells_;
    const char* memory_;
    std::shared_ptr<const void> owner_;
};

struct NamedKind {
    const char* name;
    Stored kind;
};
constexpr NamedKind kStoredKinds[] = {
    {"F32", Stored::f32},   {"F16", Stored::f16},   {"BF16", Stored::bf16}, {"Q8_0", Stored::q8_0},
    {"Q4_0", Stored::q4_0}, {"Q4_1", Stored::q4_1}, {"Q5_0", Stored::q5_0}, {"Q5_1", Stored::q5_1},
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

// Rows stacked along N, decoded and packed (or quantised to cells) a panel at a time, so that no
// more than one panel for each thread is alive in float32.
inline void widen_panels(const std::vector<StoredRows>& parts, const PackedWeight& w,
                         const Level& level) {
    struct Job {
        const std::vector<StoredRows>& parts;
        const PackedWeight& w;
        const Level& level;
    } job{parts, w, level};
    run_tasks(
        w.num_panels(), 1,
        [](void* context, i64 begin, i64 end) {
            const Job& j = *static_cast<const Job*>(context);
            const i64 k = j.w.k, panel_bytes = j.w.panel_elements() * item_size(j.w.dtype);
            auto* rows = static_cast<float*>(scratch(Scratch::weights, kPanel * k * 4));
            for (i64 panel = begin; panel < end; ++panel) {
                const i64 count = min64(kPanel, j.w.n - panel * kPanel);
                std::size_t part = 0;
                i64 start = 0;  // of that part
                for (i64 i = 0; i < count; ++i) {
                    const i64 row = panel * kPanel + i;
                    while (row - start >= j.parts[part].rows) start += j.parts[part++].rows;
                    const StoredRows& from = j.parts[part];
                    widen_row(from.kind, from.data + (row - start) * from.stride, k, rows + i * k);
                }
                if (j.w.cells != nullptr) {
                    const StoredRows values{reinterpret_cast<const std::uint8_t*>(rows), count,
                                            4 * k, Stored::f32};
                    pack_cells(values, 0, count, j.w, panel, 0);
                    continue;
                }
                PackedWeight one{static_cast<char*>(j.w.data) + panel * panel_bytes, count, k,
                                 j.w.k_padded, j.w.dtype};
                j.level.pack(rows, k, one);
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
