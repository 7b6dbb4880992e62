// Delayed scaling: rolls amax histories and sets scales, as `ScaleRule::roll` of the core does, bit for bit.
//
// Entry i of cell c of n is history[i · n + c]; row 0 is the staging row, rows 1 to H - 1 run from oldest to newest. A cell
// whose staged amax is zero did not run and is left alone. Scale = target / amax of the window of H values (one division,
// at most the largest finite number); an amax that is zero, infinite or NaN leaves the scale.
#include "common.cuh"

// One block of whole warps per cell. `reduced`, where given, replaces the staged amax where it is not zero. If the flag
// `unless` is given and raised, nothing is done.
KERNEL(roll_scales, 256)
(float* scale, float* history, const float* reduced, const u32* unless, float target, int most_recent, int cells, int length) {
    __shared__ float shared[8];
    if (unless && *unless) return;
    const int cell = blockIdx.x;
    float newest = history[cell];
    if (reduced && reduced[cell] != 0.0f) newest = reduced[cell];
    if (newest == 0.0f) return; // the same for the whole block
    __syncthreads();            // all have read row 0
    float amax = 0.0f;
    for (int base = 0; base < length; base += blockDim.x) {
        const int row = base + threadIdx.x;
        float value = 0.0f;
        if (row < length) {
            value = row + 1 < length ? history[(i64)(row + 1) * cells + cell] : newest;
            amax = fmaxf(amax, value); // a NaN is passed over
        }
        __syncthreads(); // row + 1 has been read before it is overwritten
        if (row < length) history[(i64)row * cells + cell] = row > 0 ? value : 0.0f;
    }
    amax = block_max(amax, shared);
    if (threadIdx.x != 0) return;
    if (most_recent) amax = newest;
    if (amax > 0.0f && __float_as_uint(amax) < INFINITY_BITS) {
        const float quotient = target / amax;
        scale[cell] = __float_as_uint(quotient) == INFINITY_BITS ? FLT_LARGEST : quotient;
    }
}

// Factors of up to 32 members of a group, and their table of block scales: that of depth block b and row, or block of
// rows, i lies at table[b · along + i · across].
struct Spread {
    const float* factor[32];
    float* table;
    i64 along;
    i64 across;
    i64 count; // of rows, or of blocks of rows
};

__device__ __forceinline__ void spread(const Spread& side, int member, i64 block) {
    const float value = *side.factor[member];
    float* out = side.table + block * side.along;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < side.count; i += step) out[i * side.across] = value;
}

// Both sides of a product over a group: each member's factor goes to its `blocks` blocks of depth, from block `first` on.
KERNEL(spread_scales, 256)(const __grid_constant__ Spread left, const __grid_constant__ Spread right, i64 first, int blocks) {
    const int member = blockIdx.y / blocks;
    spread(left, member, first + blockIdx.y);
    spread(right, member, first + blockIdx.y);
}
