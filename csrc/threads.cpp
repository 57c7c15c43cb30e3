#include "threads.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

#if defined(__linux__)
int current_cpu() { return sched_getcpu(); }

// The system wakes a thread where its waker runs, if all cores are busy, be it with a process of
// the lowest priority: there the two take turns, and a team is slower than its caller alone. So a
// worker that finds itself on the caller's core leaves it for any other that the process may use.
void leave_cpu(int cpu) {
    cpu_set_t others;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(getpid(), sizeof(others), &others))
        return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof(others), &others);
}
#else
int current_cpu() { return -1; }
void leave_cpu(int) {}
#endif

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Workers spin this long for the next op of a step, then sleep: an idle server burns no CPU.
constexpr auto kSpin = std::chrono::microseconds(60);

using Clock = std::chrono::steady_clock;
constexpr Clock::time_point kNever = Clock::time_point::max();

// A worker lets others have its core between two tasks before the system takes it away inside one,
// for which the caller would have to wait: slices are about 3 ms. Alone, it is back in a
// microsecond.
constexpr auto kTurn = std::chrono::microseconds(1000);

class Team {
public:
    ~Team() { resize(1); }

    int size() const { return size_.load(std::memory_order_relaxed); }

    void resize(int count) {
        std::lock_guard<std::mutex> busy(run_mutex_);
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            stop_.store(true);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stop_.store(false);
        size_.store(count);
        const std::uint64_t seen = gate_.load() & kEpochMask;
        num_started_.store(1);
        for (int i = 1; i < count; ++i) {
            workers_.emplace_back([this, seen] {
                // The system makes a thread's own variables when they are first used, and ends the
                // process where there is no memory for them then.
                try {
                    scratch(Scratch::items, 1);
                } catch (const std::bad_alloc&) {
                }
                num_started_.fetch_add(1);
                work(seen);
            });
        }
        while (num_started_.load() < count) std::this_thread::yield();
    }

    void run(i64 num_tasks, i64 grain, TaskFn fn, void* context) {
        std::unique_lock<std::mutex> busy(run_mutex_, std::defer_lock);
        if (num_tasks <= grain || size() == 1 || !busy.try_lock()) {
            if (num_tasks > 0) fn(context, 0, num_tasks);
            return;
        }
        num_tasks_ = num_tasks;
        grain_ = grain;
        fn_ = fn;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        caller_cpu_.store(current_cpu(), std::memory_order_relaxed);
        const std::uint64_t epoch = (gate_.load() & kEpochMask) + kEpochStep;
        gate_.store(epoch | kOpen);
        if (num_sleeping_.load() > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_mutex_);
            }
            wake_.notify_all();
        }
        share(kNever);
        // Close the gate, then wait only for workers that came in: one that a busy neighbour keeps
        // off its core never delays the op.
        gate_.fetch_and(~kOpen);
        for (int spins = 0; (gate_.load(std::memory_order_acquire) & kInsideMask) != 0; ++spins) {
            if (spins < 4000) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
        if (failed_.load(std::memory_order_relaxed)) {
            failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(error_, nullptr));
        }
    }

private:
    // gate_: epoch of the job | open bit | workers inside.
    static constexpr std::uint64_t kInsideMask = 0xffff;
    static constexpr std::uint64_t kOpen = 1u << 16;
    static constexpr std::uint64_t kEpochStep = 1u << 17;
    static constexpr std::uint64_t kEpochMask = ~(kEpochStep - 1);

    // Takes tasks until none is left, or `until` has come: false.
    // An exception ends no thread, nor does it leave others inside: the first is kept for the
    // caller, who gets it when all have left.
    bool share(Clock::time_point until) {
        for (;;) {
            if (until != kNever && Clock::now() > until) return false;
            const i64 begin = next_.fetch_add(grain_, std::memory_order_relaxed);
            if (begin >= num_tasks_) return true;
            try {
                fn_(context_, begin, min64(begin + grain_, num_tasks_));
            } catch (...) {
                if (!failed_.exchange(true)) error_ = std::current_exception();
            }
        }
    }

    bool is_news(std::uint64_t seen) const {
        return (gate_.load() & kEpochMask) != seen || stop_.load();
    }

    void work(std::uint64_t seen) {
        Clock::time_point turn_ends{};
        for (;;) {
            if (wait_for_news(seen)) turn_ends = Clock::now() + kTurn;
            if (stop_.load()) return;
            const int cpu = current_cpu();
            if (cpu >= 0 && cpu == caller_cpu_.load(std::memory_order_relaxed)) leave_cpu(cpu);
            std::uint64_t gate = gate_.load();
            seen = gate & kEpochMask;
            while ((gate & kOpen) != 0 && (gate & kEpochMask) == seen) {
                if (!gate_.compare_exchange_weak(gate, gate + 1)) continue;
                const bool is_done = share(turn_ends);
                gate_.fetch_sub(1, std::memory_order_release);
                if (is_done) break;
                std::this_thread::yield();
                turn_ends = Clock::now() + kTurn;
                gate = gate_.load();
            }
        }
    }

    // Whether it slept.
    bool wait_for_news(std::uint64_t seen) {
        const auto until = Clock::now() + kSpin;
        do {
            for (int i = 0; i < 32; ++i) {
                if (is_news(seen)) return false;
                relax();
            }
        } while (Clock::now() < until);
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return is_news(seen); });
        num_sleeping_.fetch_sub(1);
        return true;
    }

    std::mutex run_mutex_;
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
    std::atomic<int> caller_cpu_{-1};
    std::atomic<int> size_{1};
    std::atomic<bool> stop_{false};
    std::atomic<int> num_sleeping_{0};
    std::atomic<int> num_started_{1};
    i64 num_tasks_ = 0;
    i64 grain_ = 1;
    TaskFn fn_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<std::uint64_t> gate_{0};
    alignas(64) std::atomic<i64> next_{0};
};

Team& team() {
    static Team instance;
    return instance;
}

struct Buffer {
    void* data = nullptr;
    i64 size = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void run_tasks(i64 num_tasks, i64 grain, TaskFn fn, void* context) {
    team().run(num_tasks, grain, fn, context);
}

int num_threads() { return team().size(); }

void set_num_threads(int count) {
    if (count != team().size()) team().resize(count);
}

void* scratch(Scratch slot, i64 bytes) {
    static thread_local Buffer buffers[static_cast<int>(Scratch::count)];
    Buffer& buffer = buffers[static_cast<int>(slot)];
    if (buffer.size < bytes) {
        std::free(buffer.data);
        buffer.size = 0;
        buffer.data = std::aligned_alloc(64, static_cast<std::size_t>(round_up(bytes, 4096)));
        if (buffer.data == nullptr) throw std::bad_alloc();
        buffer.size = round_up(bytes, 4096);
    }
    return buffer.data;
}

}  // namespace octavo
