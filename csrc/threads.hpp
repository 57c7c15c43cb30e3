// One persistent team of threads for the whole process.
#pragma once

#include "common.hpp"

namespace octavo {

// Runs fn(context, begin, end) over [0, num_tasks) in chunks of `grain`, handed out by an atomic
// counter. Who computes a chunk never changes its result, so neither does the number of threads.
// What fn throws on any thread, the first of it, comes back to the caller when all have left.
// The caller works too; a call from a second Python thread meanwhile runs alone, on that thread.
using TaskFn = void (*)(void* context, i64 begin, i64 end);
void run_tasks(i64 num_tasks, i64 grain, TaskFn fn, void* context);

int num_threads();
void set_num_threads(int count);

// Scratch memory of the calling thread, 64-byte aligned, contents undefined, valid until the next
// request for the same slot from this thread.
enum class Scratch {
    activations,
    activations8,
    attention,
    items,
    partials,
    piece,
    ranks,
    weights,
    count
};
void* scratch(Scratch slot, i64 bytes);

}  // namespace octavo
