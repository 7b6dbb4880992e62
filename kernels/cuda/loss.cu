// Cross-entropy of logits against target tokens. Its gradient is a producer of the fused cast.
#include "common.cuh"

constexpr int LOSS_THREADS = 512;
// Groups of eight logits that a thread keeps, as they are stored; what lies beyond is read again.
constexpr int LOGIT_GROUPS = 8;

// lse[row] = log Σ exp(logits[row]), losses[row] = lse - logits[row, target]. A block has a row. A target beyond the
// vocabulary makes the loss NaN. Exponentials are the hardware's powers of two; the cpu device computes them otherwise, so bits differ.
KERNEL(loss_rows, LOSS_THREADS)(const u16* logits, const u32* targets, float* lse, float* losses, int vocabulary) {
    __shared__ float first[16], second[16];
    const u16* row = logits + (i64)blockIdx.x * vocabulary;
    const bool aligned = (vocabulary & 7) == 0;
    const float minus_infinity = -__uint_as_float(INFINITY_BITS);
    uint4 kept[LOGIT_GROUPS];
    // Eight logits from a place on; those beyond the row are -∞.
    auto load = [&](int at) {
        if (aligned) return __ldg(reinterpret_cast<const uint4*>(row + at));
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 low = at + 2 * i < vocabulary ? __ldg(row + at + 2 * i) : 0xFF80u;
            const u32 high = at + 2 * i + 1 < vocabulary ? __ldg(row + at + 2 * i + 1) : 0xFF80u;
            words[i] = low | high << 16;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    };
    // Calls f(logit) for all of this thread.
    auto each = [&](const auto& f) {
        auto unpack = [&](const uint4& raw) {
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int i = 0; i < 4; i++) f(__uint_as_float(words[i] << 16)), f(__uint_as_float(words[i] & 0xFFFF0000u));
        };
#pragma unroll
        for (int k = 0; k < LOGIT_GROUPS; k++)
            if ((threadIdx.x + k * LOSS_THREADS) * 8 < vocabulary) unpack(kept[k]);
        for (int at = (threadIdx.x + LOGIT_GROUPS * LOSS_THREADS) * 8; at < vocabulary; at += LOSS_THREADS * 8)
            unpack(load(at));
    };
#pragma unroll
    for (int k = 0; k < LOGIT_GROUPS; k++) {
        const int at = (threadIdx.x + k * LOSS_THREADS) * 8;
        if (at < vocabulary) kept[k] = load(at);
    }
    float largest = minus_infinity;
    each([&](float x) { largest = fmaxf(largest, x); });
    const float shift = block_max(largest, first);
    float mass = 0.0f;
    each([&](float x) { mass += power_of_two((x - shift) * LOG2_E); });
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
