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

// out = (slot[0] + slot[1] + ..) · factor, slots ascending; slot s begins at slots + s · stride.
KERNEL(sum_slots, 256)(const float* slots, i64 stride, int count, float factor, float* out, i64 length) {
    const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at >= length) return;
    if (length - at >= 4 && (stride & 3) == 0) {
        float4 sum = *reinterpret_cast<const float4*>(slots + at);
        for (int slot = 1; slot < count; slot++) {
            const float4 x = *reinterpret_cast<const float4*>(slots + slot * stride + at);
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        *reinterpret_cast<float4*>(out + at) =
            make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    } else {
        for (i64 i = at; i < min(at + 4, length); i++) {
            float sum = slots[i];
            for (int slot = 1; slot < count; slot++) sum += slots[slot * stride + i];
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
