// Large memory: mapped lazily, on huge pages where the system grants them.
#pragma once

#include <memory>

#include "common.hpp"

namespace octavo {

// Zero-filled memory that becomes resident on first use only.
class Region {
public:
    explicit Region(std::size_t bytes);  // throws std::bad_alloc
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    char* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    char* data_ = nullptr;
    std::size_t size_ = 0;
    void* mapping_ = nullptr;
    std::size_t mapping_size_ = 0;
};

// Hands out parts of shared regions, so that many small layers fill whole huge pages. A region
// goes back to the system when the last part of it does.
class RegionPool {
public:
    struct Part {
        std::shared_ptr<Region> region;
        char* data;
    };
    Part take(std::size_t bytes);

private:
    std::shared_ptr<Region> current_;
    std::size_t used_ = 0;
};

}  // namespace octavo
