// Large memory: mapped lazily, on huge pages where the system grants them.
#pragma once

#include <memory>

#include "common.hpp"

namespace octavo {

// Whether large memory asks for huge pages (the default); for what is made afterwards.
void set_huge_pages(bool wanted);

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

// A file as read-only memory at a multiple of 2 MiB. Mapped, it is the page cache itself: nothing
// is copied, processes share it, and where the file system keeps the file in huge pages (large
// folios) these are mapped whole. Where it does not, reading weights over pages of 4 KiB would cost
// more at each step than copying the file into huge pages does once.
class FileImage {
public:
    enum class Way : std::uint8_t { choose, map, copy };
    // Of the first `size` bytes of the open file `fd`, which may be closed afterwards. Throws
    // std::bad_alloc, or std::runtime_error where the file is shorter or can't be read.
    FileImage(int fd, std::size_t size, Way way);
    ~FileImage();
    FileImage(const FileImage&) = delete;
    FileImage& operator=(const FileImage&) = delete;

    const char* data() const { return copy_ ? copy_->data() : data_; }
    std::size_t size() const { return size_; }
    bool is_mapped() const { return !copy_; }
    std::size_t huge_bytes() const { return huge_bytes_; }  // of the mapping, on huge pages

private:
    void map(int fd);
    void unmap();
    void read(int fd);

    std::unique_ptr<Region> copy_;
    char* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t huge_bytes_ = 0;
    void* reserved_ = nullptr;
    std::size_t reserved_size_ = 0;
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
