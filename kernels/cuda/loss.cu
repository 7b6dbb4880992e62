// Cross-entropy of logits against target tokens. Its gradient is a producer of the fused cast.
#include "common.cuh"

// lse[row] = log Σ exp(logits[row]), losses[row] = lse - logits[row, target]. A block has a row. A target beyond the
// vocabulary makes the loss NaN.
KERNEL(loss_rows, 512)(const u16* logits, const u32* targets, float* lse, float* losses, int vocabulary) {
    __shared__ float first[16], second[16];
    const u16* row = logits + (i64)blockIdx.x * vocabulary;
    const bool aligned = (vocabulary & 7) == 0;
    float largest = -__uint_as_float(INFINITY_BITS);
    for (int at = threadIdx.x * 8; at < vocabulary; at += blockDim.x * 8) {
        const int count = min(vocabulary - at, 8);
        float v[8];
        load8(row + at, count, aligned, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) largest = fmaxf(largest, v[i]);
    }
    const float shift = block_max(largest, first);
    float mass = 0.0f;
    for (int at = threadIdx.x * 8; at < vocabulary; at += blockDim.x * 8) {
        const int count = min(vocabulary - at, 8);
        float v[8];
        load8(row + at, count, aligned, v);
#pragma unroll
        for (int i = 0; i < 8; i++) mass += i < count ? exponential(v[i] - shift) : 0.0f;
    }
    mass = block_sum(mass, second);
    if (threadIdx.x != 0) return;
    const float log_sum = shift + (float)log((double)mass);
    const u32 target = targets[blockIdx.x];
    lse[blockIdx.x] = log_sum;
    losses[blockIdx.x] = target < (u32)vocabulary ? log_sum - from_bf16(row[target]) : __uint_as_float(0x7FC00000u);
}

// loss = (losses[0] + losses[1] + ..) / rows, ascending; the flag is raised if it is infinite or NaN. One warp.
KERNEL(loss_mean, 32)(const float* losses, float* loss, u32* flag, int rows) {
    float total = 0.0f;
    for (int base = 0; base < rows; base += 32) {
        const int row = base + threadIdx.x;
        const float mine = row < rows ? losses[row] : 0.0f;
        const int count = min(rows - base, 32);
        for (int i = 0; i < count; i++) total += __shfl_sync(EVERY_LANE, mine, i);
    }
    if (threadIdx.x != 0) return;
    const float mean = total / (float)rows;
    *loss = mean;
    if (flag && (__float_as_uint(mean) & 0x7FFFFFFFu) >= INFINITY_BITS) atomicOr(flag, 1u);
}
