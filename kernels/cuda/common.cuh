// What every kernel shares: types, conversions, reductions of a fixed order, functions with the bits of the cpu device, and the
// hardware's power of two.
//
// No header of CUDA is included: NVRTC finds none where only its library is installed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A name, the threads of a block, and how many blocks a multiprocessor should have room for.
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name

constexpr u32 INFINITY_BITS = 0x7F800000u;
constexpr u32 EVERY_LANE = 0xFFFFFFFFu;
constexpr float FLT_LARGEST = 3.402823466e+38f;

// ---- conversions ----

// bf16 is kept as its bits.
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// Two values, each to the nearest bf16 (ties to even); the first in the low half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ u16 to_bf16(float x) { return (u16)to_bf16x2(x, 0.0f); }

__device__ __forceinline__ float round_bf16(float x) { return from_bf16(to_bf16x2(x, 0.0f) & 0xFFFFu); }

// FP8 codes: nearest, ties to even, saturated; every NaN is 0x7F.
struct E4M3 {
    static __device__ __forceinline__ u32 encode4(float a, float b, float c, float d) {
        u16 low, high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
        return (u32)low | (u32)high << 16;
    }
};

struct E5M2 {
    static __device__ __forceinline__ u32 encode4(float a, float b, float c, float d) {
        u16 low, high;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
        return (u32)low | (u32)high << 16;
    }
};

// ---- eight neighbours at once ----

// Eight bf16 values.
__device__ __forceinline__ void unpack8(const uint4& raw, float (&v)[8]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

// `count` of eight values from `p` on, the others zero. `wide`: p is aligned to 16 bytes and all eight are there.
// The memory must not be written while the kernel runs: such loads may overtake stores.
__device__ __forceinline__ void load8(const u16* p, int count, bool wide, float (&v)[8]) {
    if (wide) {
        unpack8(__ldg(reinterpret_cast<const uint4*>(p)), v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? from_bf16(__ldg(p + i)) : 0.0f;
    }
}

__device__ __forceinline__ void load8(const float* p, int count, bool wide, float (&v)[8]) {
    if (wide) {
        const float4 a = __ldg(reinterpret_cast<const float4*>(p)), b = __ldg(reinterpret_cast<const float4*>(p) + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? __ldg(p + i) : 0.0f;
    }
}

// As `load8`, as bits: of bf16, of codes.
__device__ __forceinline__ uint4 load8_raw(const u16* p, int count, bool wide) {
    if (wide) return __ldg(reinterpret_cast<const uint4*>(p));
    u32 w[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) w[i >> 1] |= (u32)__ldg(p + i) << (16 * (i & 1));
    return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void load8_raw(const u8* p, int count, bool wide, u32 (&w)[2]) {
    if (wide) {
        const uint2 raw = __ldg(reinterpret_cast<const uint2*>(p));
        w[0] = raw.x, w[1] = raw.y;
    } else {
        w[0] = w[1] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) w[i >> 2] |= (u32)__ldg(p + i) << (8 * (i & 3));
    }
}

// As `load8`, of memory that this thread also writes.
__device__ __forceinline__ void load8_own(const u16* p, int count, bool wide, float (&v)[8]) {
    if (wide) {
        unpack8(*reinterpret_cast<const uint4*>(p), v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? from_bf16(p[i]) : 0.0f;
    }
}

__device__ __forceinline__ void load8_own(const float* p, int count, bool wide, float (&v)[8]) {
    if (wide) {
        const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? p[i] : 0.0f;
    }
}

__device__ __forceinline__ void store8(u16* p, int count, bool wide, const float (&v)[8]) {
    if (wide) {
        *reinterpret_cast<uint4*>(p) = make_uint4(
            to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) p[i] = to_bf16(v[i]);
    }
}

__device__ __forceinline__ void store8(float* p, int count, bool wide, const float (&v)[8]) {
    if (wide) {
        reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) p[i] = v[i];
    }
}

// ---- reductions ----

// Sum over a warp, as a tree; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int width = 16; width > 0; width >>= 1) x += __shfl_xor_sync(EVERY_LANE, x, width);
    return x;
}

// Largest of a warp, passing over NaN; every lane gets it.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int width = 16; width > 0; width >>= 1) x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, width));
    return x;
}

// Sum over a block of whole warps: each warp as a tree, then the warps ascending. Every thread gets it. `shared` has one
// element per warp, and may be used again after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* shared) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = shared[0];
    for (int warp = 1; warp < blockDim.x >> 5; warp++) total += shared[warp];
    return total;
}

__device__ __forceinline__ float block_max(float x, float* shared) {
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    float largest = shared[0];
    for (int warp = 1; warp < blockDim.x >> 5; warp++) largest = fmaxf(largest, shared[warp]);
    return largest;
}

// The larger one, NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// Largest magnitudes: of all elements, NaN if one is, and of those that are numbers. The bits of non-negative floats are
// ordered as the floats are, and those of NaN are above them.
struct Magnitudes {
    float all = 0.0f, numbers = 0.0f;

    __device__ __forceinline__ void see(float x) {
        all = max_or_nan(all, fabsf(x));
        numbers = fmaxf(numbers, fabsf(x));
    }

    // Folds the warp's into `amax`, and raises `flag` if an element was infinite or NaN.
    __device__ __forceinline__ void publish(u32* amax, u32* flag) const {
        const u32 warp_all = __reduce_max_sync(EVERY_LANE, __float_as_uint(all) & 0x7FFFFFFFu);
        const u32 warp_numbers = __reduce_max_sync(EVERY_LANE, __float_as_uint(numbers));
        if ((threadIdx.x & 31) != 0) return;
        if (amax && warp_numbers > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, warp_numbers);
        if (flag && warp_all >= INFINITY_BITS) atomicOr(flag, 1u);
    }
};

// ---- functions ----

constexpr float LOG2_E = 1.44269504088896340736f;

// The hardware's power of two: within two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
    float value;
    asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// 1 + e^x, operation for operation as the cpu device computes it: 2^n · e^r with n = round(x / ln 2) and e^r a polynomial,
// within two units in the last place. Of NaN it is some number.
__device__ __forceinline__ float one_plus_exponential(float x) {
    const float lowest = -87.33654f, highest = 88.72283f, ln2_high = 0.6933594f, ln2_low = -2.1219444e-4f;
    const float rounder = 12582912.0f;
    const float bounded = fminf(fmaxf(x, lowest), highest);
    const float shifted = bounded * LOG2_E + rounder;
    const float n = shifted - rounder;
    const float r = __fmaf_rn(n, -ln2_high, bounded) - n * ln2_low; // n · ln2_high is exact
    float p = 1.9875691e-4f;
    p = p * r + 1.3982e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5e-1f;
    p = (p * (r * r) + r) + 1.0f;
    // n is added to the exponent of p: its bits are the low ones of `shifted`, whose high ones fall off. As p · 2^n is a normal
    // number everywhere, this is its product with 2^n. What is below the smallest is nothing beside 1.
    return 1.0f + __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

// 1 / (1 + e^-x), the logistic function; 0 where it is not above the smallest normal number. What becomes of NaN does not matter:
// it is multiplied by what is NaN, too. The quotient is what the compiler makes of one, correctly rounded from 1 to 2^126, less a
// branch for other divisors, behind which each element would wait for the one before it.
__device__ __forceinline__ float sigmoid(float x) {
    const float y = one_plus_exponential(-x);
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(y));
    return y < 0x1p126f ? __fmaf_rn(guess, __fmaf_rn(-y, guess, 1.0f), guess) : 0.0f;
}

// GELU in its tanh form, which is x · sigmoid(2u) with u = √(2/π) (x + 0.044715 x³).
__device__ __forceinline__ float gelu_gate(float x) {
    return sigmoid(1.5957691216057307f * x * (1.0f + 0.044715f * x * x));
}

__device__ __forceinline__ float gelu(float x) { return x * gelu_gate(x); }

__device__ __forceinline__ float gelu_gradient(float x, float dy) {
    const float gate = gelu_gate(x), slope = 1.5957691216057307f * (1.0f + 0.134145f * x * x);
    return dy * (gate + x * gate * (1.0f - gate) * slope);
}

// SiLU, x · sigmoid(x).
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// Its slope, where sigmoid(x) is `gate`.
__device__ __forceinline__ float silu_slope(float x, float gate) { return gate * (1.0f + x * (1.0f - gate)); }

__device__ __forceinline__ float silu_gradient(float x, float dy) { return dy * silu_slope(x, sigmoid(x)); }
