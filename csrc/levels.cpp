#include "levels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

#define OCTAVO_DECLARE(name)  \
    namespace name {          \
    extern const Level level; \
    }
OCTAVO_DECLARE(portable)
#if defined(OCTAVO_HAVE_AVX2)
OCTAVO_DECLARE(avx2)
#endif
#if defined(OCTAVO_HAVE_AVX512)
OCTAVO_DECLARE(avx512)
#endif
#if defined(OCTAVO_HAVE_AVX512_BF16)
OCTAVO_DECLARE(avx512_bf16)
#endif
#if defined(OCTAVO_HAVE_AMX)
OCTAVO_DECLARE(amx)
#endif
#undef OCTAVO_DECLARE

namespace {

struct Cpu {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
    // Intel's cores issue the bf16 dot product at half the rate of a float32 FMA; AMD's at twice.
    bool slow_bf16_dot = false;
};

#if defined(__x86_64__)
std::uint64_t enabled_state() {
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

// Linux hands out the tile registers (8 KiB a thread) on request only, once for the process.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

Cpu detect() {
    Cpu cpu;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return cpu;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1;
    if (!osxsave) return cpu;
    const std::uint64_t state = enabled_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
    const bool tiles = (state & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return cpu;
    const unsigned max_subleaf = a;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    const bool amx_bf16 = d >> 22 & 1, amx_tile = d >> 24 & 1, amx_int8 = d >> 25 & 1;
    const bool vnni = c >> 11 & 1;  // every core with the bf16 dot product has it
    cpu.avx2 = ymm && fma && (b >> 5 & 1);
    cpu.avx512 = cpu.avx2 && zmm && f && dq && bw && vl;
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        cpu.avx512_bf16 = cpu.avx512 && vnni && (a >> 5 & 1);
    }
    cpu.amx = cpu.avx512_bf16 && tiles && amx_bf16 && amx_int8 && amx_tile && may_use_tiles();
    if (__get_cpuid(0, &a, &b, &c, &d)) cpu.slow_bf16_dot = b == signature_INTEL_ebx;
    return cpu;
}
#else
Cpu detect() { return Cpu{}; }
#endif

std::vector<const Level*> list_levels() {
    const Cpu cpu = detect();
    std::vector<const Level*> levels;
#if defined(OCTAVO_HAVE_AMX)
    if (cpu.amx) levels.push_back(&amx::level);
#endif
#if defined(OCTAVO_HAVE_AVX512)
    if (cpu.avx512 && cpu.slow_bf16_dot) levels.push_back(&avx512::level);
#endif
#if defined(OCTAVO_HAVE_AVX512_BF16)
    if (cpu.avx512_bf16) levels.push_back(&avx512_bf16::level);
#endif
#if defined(OCTAVO_HAVE_AVX512)
    if (cpu.avx512 && !cpu.slow_bf16_dot) levels.push_back(&avx512::level);
#endif
#if defined(OCTAVO_HAVE_AVX2)
    if (cpu.avx2) levels.push_back(&avx2::level);
#endif
    levels.push_back(&portable::level);
    (void)cpu;
    return levels;
}

}  // namespace

const std::vector<const Level*>& available_levels() {
    static const std::vector<const Level*> levels = list_levels();
    return levels;
}

const Level* find_level(const std::string& name) {
    for (const Level* level : available_levels()) {
        if (name == level->name) return level;
    }
    return nullptr;
}

}  // namespace octavo
