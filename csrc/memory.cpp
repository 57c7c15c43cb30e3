#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

#include "threads.hpp"

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kRegion = std::size_t{64} << 20;

constexpr std::size_t kPiece = std::size_t{8} << 20;  // read by one thread at a time
std::atomic<bool> huge_pages{true};

std::size_t round_up_size(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

char* aligned_up(void* address) {
    return reinterpret_cast<char*>(
        round_up_size(reinterpret_cast<std::uintptr_t>(address), kHugePage));
}

void ask_for_huge_pages(void* data, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
    if (huge_pages.load()) madvise(data, bytes, MADV_HUGEPAGE);
#else
    static_cast<void>(data);
    static_cast<void>(bytes);
#endif
}

// Whether the system would give huge pages to memory that asks for them.
bool has_huge_pages() {
    if (!huge_pages.load()) return false;
    std::FILE* file = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    if (file == nullptr) return false;
    char text[64] = {};
    const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    const std::string modes(text, length);
    return modes.find("[madvise]") != std::string::npos ||
           modes.find("[always]") != std::string::npos;
}

// Bytes of the mapping at `data` that lie on huge pages, as the system says; 0 where it doesn't.
std::size_t mapped_huge(const void* data) {
    std::FILE* file = std::fopen("/proc/self/smaps", "r");
    if (file == nullptr) return 0;
    const auto wanted = reinterpret_cast<std::uintptr_t>(data);
    char line[512];
    unsigned long begin = 0, end = 0, kib = 0;
    bool inside = false;
    while (std::fgets(line, sizeof line, file) != nullptr) {
        if (std::sscanf(line, "%lx-%lx ", &begin, &end) == 2) {
            inside = begin == wanted;
        } else if (inside && std::sscanf(line, "FilePmdMapped: %lu kB", &kib) == 1) {
            break;
        }
    }
    std::fclose(file);
    return std::size_t{kib} << 10;
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
    data_ = aligned_up(mapping_);
    ask_for_huge_pages(data_, round_up_size(bytes == 0 ? 1 : bytes, kHugePage));
}

void set_huge_pages(bool wanted) { huge_pages.store(wanted); }

Region::~Region() { munmap(mapping_, mapping_size_); }

FileImage::FileImage(int fd, std::size_t size, Way way) : size_(size) {
    if (way != Way::copy) {
        map(fd);
        const bool pays = huge_bytes_ < size / 2 && size >= kHugePage && has_huge_pages();
        if (way == Way::map || !pays) return;
        unmap();
    }
    read(fd);
}

FileImage::~FileImage() { unmap(); }

void FileImage::map(int fd) {
    if (lseek(fd, 0, SEEK_END) < static_cast<off_t>(size_)) {
        throw std::runtime_error("the file is cut off");  // touching what is not there kills us
    }
    reserved_size_ = round_up_size(size_ == 0 ? 1 : size_, kHugePage) + kHugePage;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    reserved_ = mmap(nullptr, reserved_size_, PROT_NONE, flags, -1, 0);
    if (reserved_ == MAP_FAILED) {
        reserved_ = nullptr;
        throw std::bad_alloc();
    }
    data_ = aligned_up(reserved_);
    if (mmap(data_, size_, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        unmap();
        throw std::runtime_error("the file can't be mapped");
    }
    ask_for_huge_pages(data_, size_);
    // Bring in all of it now, several threads at once, and in order where it comes from a disk.
    struct Job {
        char* data;
        std::size_t size;
    } job{data_, size_};
    run_tasks(
        static_cast<i64>(round_up_size(size_, kPiece) / kPiece), 1,
        [](void* context, i64 begin, i64 end) {
            const Job& j = *static_cast<const Job*>(context);
            const std::size_t first = static_cast<std::size_t>(begin) * kPiece;
            std::size_t last = static_cast<std::size_t>(end) * kPiece;
            if (last > j.size) last = j.size;
#ifdef MADV_POPULATE_READ
            if (madvise(j.data + first, last - first, MADV_POPULATE_READ) == 0) return;
#endif
            for (std::size_t at = first; at < last; at += 4096) {
                static_cast<void>(*static_cast<volatile char*>(j.data + at));
            }
        },
        &job);
    huge_bytes_ = mapped_huge(data_);
}

void FileImage::unmap() {
    if (reserved_ != nullptr) munmap(reserved_, reserved_size_);
    reserved_ = nullptr;
    data_ = nullptr;
    huge_bytes_ = 0;
}

void FileImage::read(int fd) {
    copy_ = std::make_unique<Region>(size_);
    struct Job {
        int fd;
        char* data;
        std::size_t size;
        std::atomic<bool> failed;
    } job{fd, copy_->data(), size_, {false}};
    run_tasks(
        static_cast<i64>(round_up_size(size_, kPiece) / kPiece), 1,
        [](void* context, i64 begin, i64 end) {
            Job& j = *static_cast<Job*>(context);
            std::size_t at = static_cast<std::size_t>(begin) * kPiece;
            std::size_t last = static_cast<std::size_t>(end) * kPiece;
            if (last > j.size) last = j.size;
            while (at < last) {
                const ssize_t got = pread(j.fd, j.data + at, last - at, static_cast<off_t>(at));
                if (got <= 0) {
                    j.failed.store(true);
                    return;
                }
                at += static_cast<std::size_t>(got);
            }
        },
        &job);
    if (job.failed.load()) throw std::runtime_error("the file can't be read to its end");
}

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
