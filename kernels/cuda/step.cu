// What keeps a replayed step honest: counters, the choice of state after a bad step, tags of slots, and a delay that makes
// a missing wait show.
#include "common.cuh"

// to = from if the flag is raised: scales and histories go back to the copy of the step's start.
KERNEL(copy_if, 256)(const u32* flag, const u32* from, u32* to, i64 words) {
    if (!*flag) return;
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < words) to[at] = from[at];
}

// The flag is raised if a value is infinite or NaN.
KERNEL(check_finite, 256)(const u32* values, u32* flag, i64 count) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count && (values[at] & 0x7FFFFFFFu) >= INFINITY_BITS) atomicOr(flag, 1u);
}

// counter += 1, unless a flag is given and raised.
KERNEL(advance, 32)(u64* counter, const u32* unless) {
    if (threadIdx.x == 0 && !(unless && *unless)) *counter += 1;
}

// Marks a slot with what is in it: the step, the action's key, the slot's generation.
KERNEL(write_tag, 32)(u64* tag, const u64* step, u64 key, u64 generation) {
    if (threadIdx.x != 0) return;
    tag[0] = *step;
    tag[1] = key;
    tag[2] = generation;
}

// Compares a slot's mark with what should be in it. What differs raises the flag; the first difference of a step is kept in
// `report`: 1, then what was expected, then what was found.
KERNEL(check_tag, 32)(const u64* tag, const u64* step, u64 key, u64 generation, u32* flag, u64* report) {
    if (threadIdx.x != 0) return;
    const u64 expected[3] = {*step, key, generation};
    if (tag[0] == expected[0] && tag[1] == expected[1] && tag[2] == expected[2]) return;
    atomicOr(flag, 2u);
    if (atomicCAS(report, 0ull, 1ull) != 0) return;
    for (int i = 0; i < 3; i++) {
        report[1 + i] = expected[i];
        report[4 + i] = tag[i];
    }
}

// Runs for a while: what reads too early, reads too early for certain.
KERNEL(delay, 32)(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
