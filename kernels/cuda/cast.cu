// Casts to FP8 with what is fused into them. Each kernel is one pass: values are made, rounded to bf16 where they are
// activations, and from there their amax, codes, transposed codes, and column sums are taken. A fused kernel so gives the
// bits of its parts.
//
// Code = round(value · scale): one multiplication in fp32, then saturation. amax is of the value before scaling.
// Without `codes` a kernel only makes its bf16 values.
#include "tile.cuh"

// A bf16 matrix as it is.
struct Stored {
    using Raw = uint4;
    const u16* x;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        raw = load8_raw(x + (i64)row * columns + column, count, wide);
    }
    __device__ __forceinline__ void make(const Raw& raw, int, int, bool, float (&v)[8]) const { unpack8(raw, v); }
};

// A float matrix as it is: master weights.
struct Master {
    struct Raw {
        float v[8];
    };
    const float* x;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        load8(x + (i64)row * columns + column, count, wide, raw.v);
    }
    __device__ __forceinline__ void make(const Raw& raw, int, int, bool, float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = raw.v[i];
    }
};

// Layer norm, from statistics: (x - mean) · rstd · gamma + beta; RMS norm where mean and beta are null.
struct Normalised {
    struct Raw {
        uint4 x;
        float center, factor;
    };
    const u16* x;
    const float *mean, *rstd, *gamma, *beta;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        raw.x = load8_raw(x + (i64)row * columns + column, count, wide);
        raw.center = mean ? __ldg(mean + row) : 0.0f;
        raw.factor = __ldg(rstd + row);
    }
    __device__ __forceinline__ void make(const Raw& raw, int column, int count, bool wide, float (&v)[8]) const {
        float g[8], b[8];
        unpack8(raw.x, v);
        load8(gamma + column, count, wide, g);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = (v[i] - raw.center) * raw.factor * g[i];
        if (beta) {
            load8(beta + column, count, wide, b);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += b[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = i < count ? round_bf16(v[i]) : 0.0f;
    }
};

// Values of one matrix, each by itself. F(0) is 0.
template <float (*F)(float)>
struct Each {
    using Raw = uint4;
    const u16* x;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        raw = load8_raw(x + (i64)row * columns + column, count, wide);
    }
    __device__ __forceinline__ void make(const Raw& raw, int, int, bool, float (&v)[8]) const {
        unpack8(raw, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = round_bf16(F(v[i]));
    }
};
using Gelu = Each<gelu>;
using Silu = Each<silu>;

struct Two {
    uint4 x, y;
};

// Values of a matrix and one beside it. F(0, 0) is 0.
template <float (*F)(float, float)>
struct Both {
    using Raw = Two;
    const u16 *x, *dy;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        raw.x = load8_raw(x + (i64)row * columns + column, count, wide);
        raw.y = load8_raw(dy + (i64)row * columns + column, count, wide);
    }
    __device__ __forceinline__ void make(const Raw& raw, int, int, bool, float (&v)[8]) const {
        float upper[8];
        unpack8(raw.x, v);
        unpack8(raw.y, upper);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = round_bf16(F(v[i], upper[i]));
    }
};
using GeluGradient = Both<gelu_gradient>;
using SiluGradient = Both<silu_gradient>;

// silu(gate) · up; a row of x holds all gates, then all ups. Columns are a multiple of 8.
struct Swiglu {
    using Raw = Two;
    const u16* x;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        const u16* gate = x + (i64)row * 2 * columns + column;
        raw.x = load8_raw(gate, count, wide);
        raw.y = load8_raw(gate + columns, count, wide);
    }
    __device__ __forceinline__ void make(const Raw& raw, int, int, bool, float (&v)[8]) const {
        float up[8];
        unpack8(raw.x, v);
        unpack8(raw.y, up);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = round_bf16(silu(v[i]) * up[i]);
    }
};

// Gradients of gates, then of ups; `columns` are those of both.
struct SwigluGradient {
    struct Raw {
        uint4 gate, up, dy;
    };
    const u16 *x, *dy;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        const int half = columns / 2, at = column < half ? column : column - half;
        raw.gate = load8_raw(x + (i64)row * columns + at, count, wide);
        raw.up = load8_raw(x + (i64)row * columns + half + at, count, wide);
        raw.dy = load8_raw(dy + (i64)row * half + at, count, wide);
    }
    __device__ __forceinline__ void make(const Raw& raw, int column, int, bool, float (&v)[8]) const {
        float gate[8], up[8];
        unpack8(raw.gate, gate);
        unpack8(raw.up, up);
        unpack8(raw.dy, v);
        const bool of_gates = column < columns / 2; // of all eight
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float open = sigmoid(gate[i]);
            const float factor = of_gates ? up[i] : gate[i] * open;
            v[i] *= factor;
            if (of_gates) v[i] *= silu_slope(gate[i], open);
            v[i] = round_bf16(v[i]);
        }
    }
};

// Gradient of the cross-entropy: (softmax - onehot) · factor, with the hardware's powers of two.
struct LossGradient {
    struct Raw {
        uint4 logits;
        u32 target;
        float shift;
    };
    const u16* logits;
    const u32* targets;
    const float* lse;
    float factor;
    int columns;

    __device__ __forceinline__ void fetch(int row, int column, int count, bool wide, Raw& raw) const {
        raw.logits = load8_raw(logits + (i64)row * columns + column, count, wide);
        raw.target = __ldg(targets + row);
        raw.shift = __ldg(lse + row);
    }
    __device__ __forceinline__ void make(const Raw& raw, int column, int count, bool, float (&v)[8]) const {
        unpack8(raw.logits, v);
        const i64 target = (i64)raw.target - column;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float mass = power_of_two((v[i] - raw.shift) * LOG2_E);
            v[i] = i < count ? round_bf16((i == target ? mass - 1.0f : mass) * factor) : 0.0f;
        }
    }
};

KERNEL(cast_bf16_e4m3, TILE_THREADS)(const u16* x, Sink sink, int rows, int columns) {
    cast_tile<E4M3>(Stored{x, columns}, sink, rows, columns);
}

KERNEL(cast_bf16_e5m2, TILE_THREADS)(const u16* x, Sink sink, int rows, int columns) {
    cast_tile<E5M2>(Stored{x, columns}, sink, rows, columns);
}

KERNEL(cast_f32_e4m3, TILE_THREADS)(const float* x, Sink sink, int rows, int columns) {
    cast_tile<E4M3>(Master{x, columns}, sink, rows, columns);
}

KERNEL(cast_norm_e4m3, TILE_THREADS)
(const u16* x, const float* mean, const float* rstd, const float* gamma, const float* beta, Sink sink, int rows,
 int columns) {
    cast_tile<E4M3>(Normalised{x, mean, rstd, gamma, beta, columns}, sink, rows, columns);
}

KERNEL(cast_gelu_e4m3, TILE_THREADS)(const u16* x, Sink sink, int rows, int columns) {
    cast_tile<E4M3>(Gelu{x, columns}, sink, rows, columns);
}

KERNEL(cast_gelu_backward_e5m2, TILE_THREADS)(const u16* x, const u16* dy, Sink sink, int rows, int columns) {
    cast_tile<E5M2>(GeluGradient{x, dy, columns}, sink, rows, columns);
}

KERNEL(cast_silu_e4m3, TILE_THREADS)(const u16* x, Sink sink, int rows, int columns) {
    cast_tile<E4M3>(Silu{x, columns}, sink, rows, columns);
}

KERNEL(cast_silu_backward_e5m2, TILE_THREADS)(const u16* x, const u16* dy, Sink sink, int rows, int columns) {
    cast_tile<E5M2>(SiluGradient{x, dy, columns}, sink, rows, columns);
}

KERNEL(cast_swiglu_e4m3, TILE_THREADS)(const u16* x, Sink sink, int rows, int columns) {
    cast_tile<E4M3>(Swiglu{x, columns}, sink, rows, columns);
}

KERNEL(cast_swiglu_backward_e5m2, TILE_THREADS)(const u16* x, const u16* dy, Sink sink, int rows, int columns) {
    cast_tile<E5M2>(SwigluGradient{x, dy, columns}, sink, rows, columns);
}

KERNEL(cast_loss_e5m2, TILE_THREADS)
(const u16* logits, const u32* targets, const float* lse, float factor, Sink sink, int rows, int columns) {
    cast_tile<E5M2>(LossGradient{logits, targets, lse, factor, columns}, sink, rows, columns);
}

// amax alone, for scales taken from the tensor itself: folded into `amax`, which the caller has set to zero.
template <class T>
__device__ __forceinline__ void fold_amax(const T* x, u32* amax, u32* flag, i64 length) {
    Magnitudes seen;
    const i64 stride = (i64)gridDim.x * blockDim.x * 8;
    for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < length; at += stride) {
        float v[8];
        const int count = (int)min(length - at, (i64)8);
        load8(x + at, count, count == 8, v);
#pragma unroll
        for (int i = 0; i < 8; i++) seen.see(v[i]);
    }
    seen.publish(amax, flag);
}

KERNEL(amax_bf16, 256)(const u16* x, u32* amax, u32* flag, i64 length) { fold_amax(x, amax, flag, length); }

KERNEL(amax_f32, 256)(const float* x, u32* amax, u32* flag, i64 length) { fold_amax(x, amax, flag, length); }

// How a tensor fares under a scale: counts[0] += its values, counts[1] += those that saturate, counts[2] += those that are
// not zero but become so, counts[3] += those that are infinite or NaN; counts[4] becomes the bits of its largest magnitude,
// if that is larger; counts[5] += 1. `largest` is the format's largest value, `vanishing` half its smallest.
template <class T>
__device__ __forceinline__ void count_health(const T* x, const float* scale, float largest, float vanishing, u64* counts,
                                             i64 length) {
    const float factor = *scale;
    u32 saturated = 0, underflowed = 0, strange = 0, magnitude = 0;
    const i64 stride = (i64)gridDim.x * blockDim.x * 8;
    for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < length; at += stride) {
        float v[8];
        const int count = (int)min(length - at, (i64)8);
        load8(x + at, count, count == 8, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float scaled = fabsf(v[i] * factor);
            const u32 bits = __float_as_uint(v[i]) & 0x7FFFFFFFu;
            const bool finite = bits < INFINITY_BITS;
            strange += !finite;
            saturated += finite && scaled > largest;
            underflowed += v[i] != 0.0f && scaled <= vanishing;
            magnitude = max(magnitude, bits > INFINITY_BITS ? 0u : bits);
        }
    }
    saturated = __reduce_add_sync(EVERY_LANE, saturated);
    underflowed = __reduce_add_sync(EVERY_LANE, underflowed);
    strange = __reduce_add_sync(EVERY_LANE, strange);
    magnitude = __reduce_max_sync(EVERY_LANE, magnitude);
    if ((threadIdx.x & 31) != 0) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        atomicAdd(counts, (u64)length);
        atomicAdd(counts + 5, (u64)1);
    }
    if (saturated) atomicAdd(counts + 1, (u64)saturated);
    if (underflowed) atomicAdd(counts + 2, (u64)underflowed);
    if (strange) atomicAdd(counts + 3, (u64)strange);
    if (magnitude) atomicMax(counts + 4, (u64)magnitude);
}

KERNEL(health_bf16, 256)(const u16* x, const float* scale, float largest, float vanishing, u64* counts, i64 length) {
    count_health(x, scale, largest, vanishing, counts, length);
}

KERNEL(health_f32, 256)(const float* x, const float* scale, float largest, float vanishing, u64* counts, i64 length) {
    count_health(x, scale, largest, vanishing, counts, length);
}
