#include "memory.hpp"

#include <sys/mman.h>

#include <new>

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kRegion = std::size_t{64} << 20;

std::size_t round_up_size(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace

Region::Region(std::size_t bytes) : size_(bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    mapping_size_ = round_up_size(bytes == 0 ? 1 : bytes, kHugePage) + kHugePage;
    mapping_ = mmap(nullptr, mapping_size_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    data_ = reinterpret_cast<char*>(round_up_size(address, kHugePage));
#ifdef MADV_HUGEPAGE
    madvise(data_, round_up_size(bytes == 0 ? 1 : bytes, kHugePage), MADV_HUGEPAGE);
#endif
}

Region::~Region() { munmap(mapping_, mapping_size_); }

RegionPool::Part RegionPool::take(std::size_t bytes) {
    bytes = round_up_size(bytes, 4096);
    if (bytes > kRegion / 2) {
        auto own = std::make_shared<Region>(bytes);
        return Part{own, own->data()};
    }
    if (!current_ || used_ + bytes > current_->size()) {
        current_ = std::make_shared<Region>(kRegion);
        used_ = 0;
    }
    char* data = current_->data() + used_;
    used_ += bytes;
    return Part{current_, data};
}

}  // namespace octavo
