// Sums of tensors and of gradient slots, conversion, and column sums.
#include "common.cuh"

// out = a + b, rounded once: the residual connection, and gradients of a value that is used twice. `out` may be `a` or `b`.
KERNEL(add_bf16, 256)(const u16* a, const u16* b, u16* out, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= length) return;
    const int count = (int)min(length - at, (i64)8);
    float x[8], y[8];
    load8_own(a + at, count, count == 8, x);
    load8_own(b + at, count, count == 8, y);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] += y[i];
    store8(out + at, count, count == 8, x);
}

// out = the nearest bf16: the working copy of master weights.
KERNEL(convert_f32_bf16, 256)(const float* from, u16* to, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= length) return;
    const int count = (int)min(length - at, (i64)8);
    float v[8];
    load8(from + at, count, count == 8, v);
    store8(to + at, count, count == 8, v);
}

// out = the same number: bf16 are floats.
KERNEL(convert_bf16_f32, 256)(const u16* from, float* to, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= length) return;
    const int count = (int)min(length - at, (i64)8);
    float v[8];
    load8(from + at, count, count == 8, v);
    store8(to + at, count, count == 8, v);
}

// Where the slots of a launch lie.
struct Slots {
    const float* at[64];
};

// out = ((out +) slot[0] + slot[1] + ..) · factor, slots ascending. `carry`: what `out` holds is the sum of the slots before.
KERNEL(sum_slots, 256)(Slots slots, int count, int carry, float factor, float* out, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= length) return;
    if (length - at >= 4) {
        float4 sum = *reinterpret_cast<const float4*>((carry ? out : slots.at[0]) + at);
        for (int slot = carry ? 0 : 1; slot < count; slot++) {
            const float4 x = *reinterpret_cast<const float4*>(slots.at[slot] + at);
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        *reinterpret_cast<float4*>(out + at) =
            make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    } else {
        for (i64 i = at; i < length; i++) {
            float sum = (carry ? out : slots.at[0])[i];
            for (int slot = carry ? 0 : 1; slot < count; slot++) sum += slots.at[slot][i];
            out[i] = sum * factor;
        }
    }
}

// out += x: a microbatch's product is added to the arena.
KERNEL(accumulate_f32, 256)(const float* x, float* out, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= length) return;
    if (length - at >= 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + at), b = *reinterpret_cast<const float4*>(out + at);
        *reinterpret_cast<float4*>(out + at) = make_float4(b.x + a.x, b.y + a.y, b.z + a.z, b.w + a.w);
    } else {
        for (i64 i = at; i < length; i++) out[i] += x[i];
    }
}

// The name of a dropout mask, beside the step, which lies in memory.
struct Mask {
    u64 seed, site, microbatch;
    u32 threshold;  // an element is dropped if its word is below
    float factor;   // of those that are kept
};

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// One block of Philox-4x32 with ten rounds: four words for four elements.
__device__ __forceinline__ void philox(u64 block, u64 key, u32 (&word)[4]) {
    u32 low = (u32)key, high = (u32)(key >> 32);
    word[0] = (u32)block, word[1] = (u32)(block >> 32), word[2] = 0, word[3] = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 first = (u64)word[0] * 0xD2511F53u, second = (u64)word[2] * 0xCD9E8D57u;
        const u32 left = (u32)(second >> 32) ^ word[1] ^ low, right = (u32)(first >> 32) ^ word[3] ^ high;
        word[0] = left, word[1] = (u32)second, word[2] = right, word[3] = (u32)first;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
}

// y = x · factor where the mask keeps an element, else 0; of a gradient, the gradient. A mask's key is drawn from seed, step,
// site and microbatch as `rng::draw` of the runtime draws it; element i has word i mod 4 of block i / 4.
KERNEL(dropout, 256)(Mask mask, const u64* step, const u16* x, u16* y, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= length) return;
    u64 key = 0x9E3779B97F4A7C15ull;
    const u64 names[4] = {mask.seed, *step, mask.site, mask.microbatch};
#pragma unroll
    for (int i = 0; i < 4; i++) key = mix((key + mix(names[i])) * 0xD6E8FEB86659FD93ull);
    const int count = (int)min(length - at, (i64)8);
    float v[8];
    load8(x + at, count, count == 8, v);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 word[4];
        philox((u64)at / 4 + half, key, word);
#pragma unroll
        for (int i = 0; i < 4; i++) v[4 * half + i] = word[i] < mask.threshold ? 0.0f : v[4 * half + i] * mask.factor;
    }
    store8(y + at, count, count == 8, v);
}
