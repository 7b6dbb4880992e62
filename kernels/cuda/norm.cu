// Layer norm over rows; RMS norm where `mean` is null: nothing is subtracted, and there is no bias. Statistics in fp32; 1e-5
// is added to the variance.
//
// Sums over a row: each thread adds its elements ascending, a warp folds as a tree, warps ascending. What a norm's gradient has
// down the columns is made in norm_columns.cu.
#include "tile.cuh"

constexpr int ROW_THREADS = 256;
// Groups of eight elements that a thread keeps in registers; longer rows are read again.
constexpr int KEPT = 4;
constexpr float EPSILON = 1e-5f;

// Calls f(group of eight, its values) for every group of this thread: from registers, beyond them by `reload`.
template <class Reload, class F>
__device__ __forceinline__ void for_groups(float (&kept)[KEPT][8], int groups, const Reload& reload, const F& f) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * ROW_THREADS;
        if (group < groups) f(group, kept[k]);
    }
    for (int group = threadIdx.x + KEPT * ROW_THREADS; group < groups; group += ROW_THREADS) {
        float v[8];
        reload(group, v);
        f(group, v);
    }
}

// mean and rstd of each row of x, or of x + residual, which is rounded to bf16 and kept in `total`. With `y`, also
// y = (x - mean) · rstd · gamma + beta.
KERNEL(layer_norm_forward, ROW_THREADS)
(const u16* x, const u16* residual, u16* total, const float* gamma, const float* beta, u16* y, float* mean, float* rstd,
 int columns) {
    __shared__ float first[8], second[8];
    const int row = blockIdx.x, groups = (columns + 7) / 8;
    const i64 base = (i64)row * columns;
    const bool aligned = (columns & 7) == 0;
    const u16* source = residual ? total + base : x + base;
    auto size = [&](int group) { return min(columns - group * 8, 8); };
    // What this thread wrote to `total` it may read again: the same thread, the same addresses.
    auto reload = [&](int group, float(&v)[8]) { load8_own(source + group * 8, size(group), aligned, v); };

    float kept[KEPT][8];
    float sum = 0.0f;
    auto take = [&](int group, float(&v)[8]) {
        load8(x + base + group * 8, size(group), aligned, v);
        if (residual) {
            float other[8];
            load8(residual + base + group * 8, size(group), aligned, other);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = round_bf16(v[i] + other[i]);
            store8(total + base + group * 8, size(group), aligned, v);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i];
    };
    for_groups(kept, groups, [](int, float(&)[8]) {}, take);
    const float per_row = 1.0f / (float)columns;
    const float center = mean ? block_sum(sum, first) * per_row : 0.0f;

    float squares = 0.0f;
    for_groups(kept, groups, reload, [&](int group, float(&v)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) squares += i < size(group) ? (v[i] - center) * (v[i] - center) : 0.0f;
    });
    const float variance = block_sum(squares, second) * per_row;
    const float factor = 1.0f / sqrtf(variance + EPSILON);
    if (threadIdx.x == 0) {
        if (mean) mean[row] = center;
        rstd[row] = factor;
    }
    if (!y) return;
    for_groups(kept, groups, reload, [&](int group, float(&v)[8]) {
        float g[8], b[8];
        load8(gamma + group * 8, size(group), aligned, g);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = (v[i] - center) * factor * g[i];
        if (beta) {
            load8(beta + group * 8, size(group), aligned, b);
#pragma unroll
            for (int i = 0; i < 8; i++) g[i] += b[i];
        }
        store8(y + base + group * 8, size(group), aligned, g);
    });
}

// The same with the codes of the normalised rows in both layouts, in one pass: a block has four rows, whose bytes a thread
// transposes in registers. GROUPS groups of eight elements of a row belong to a thread. Rows are a multiple of four, columns
// of eight. The bits are those of the two kernels that do it one after the other.
template <int GROUPS>
__device__ __forceinline__ void layer_norm_cast(const u16* x, const u16* residual, u16* total, const float* gamma,
                                                const float* beta, float* mean, float* rstd, const Sink& sink, int columns) {
    __shared__ float first[4][8], second[4][8];
    const int top = blockIdx.x * 4, groups = columns / 8, warp = threadIdx.x >> 5;
    const i64 base = (i64)top * columns;
    const float scale = *sink.scale, per_row = 1.0f / (float)columns;
    float v[4][GROUPS][8], center[4], factor[4];
    // Calls f(k, group of eight) for the groups of this thread.
    auto each = [&](const auto& f) {
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int group = threadIdx.x + k * ROW_THREADS;
            if (group < groups) f(k, group);
        }
    };
    // Sums of the four rows over the block, in the order of `block_sum`.
    auto block_sums = [&](float (&sum)[4], float (*shared)[8]) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            sum[r] = warp_sum(sum[r]);
            if ((threadIdx.x & 31) == 0) shared[r][warp] = sum[r];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; r++) {
            sum[r] = shared[r][0];
#pragma unroll
            for (int other = 1; other < ROW_THREADS / 32; other++) sum[r] += shared[r][other];
        }
    };

    each([&](int k, int group) {
#pragma unroll
        for (int r = 0; r < 4; r++) load8(x + base + (i64)r * columns + group * 8, 8, true, v[r][k]);
    });
    if (residual) {
        each([&](int k, int group) {
            float other[4][8];
#pragma unroll
            for (int r = 0; r < 4; r++) load8(residual + base + (i64)r * columns + group * 8, 8, true, other[r]);
#pragma unroll
            for (int r = 0; r < 4; r++) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[r][k][i] = round_bf16(v[r][k][i] + other[r][i]);
                store8(total + base + (i64)r * columns + group * 8, 8, true, v[r][k]);
            }
        });
    }
    float sum[4] = {};
    if (mean) {
        each([&](int k, int) {
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum[r] += v[r][k][i];
        });
        block_sums(sum, first);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        center[r] = mean ? sum[r] * per_row : 0.0f;
        sum[r] = 0.0f;
    }
    each([&](int k, int) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int i = 0; i < 8; i++) sum[r] += (v[r][k][i] - center[r]) * (v[r][k][i] - center[r]);
    });
    block_sums(sum, second);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        factor[r] = 1.0f / sqrtf(sum[r] * per_row + EPSILON);
        if (threadIdx.x != 0) continue;
        if (mean) mean[top + r] = center[r];
        rstd[top + r] = factor[r];
    }

    Magnitudes seen;
    each([&](int k, int group) {
        float g[8], b[8];
        load8(gamma + group * 8, 8, true, g);
        if (beta) load8(beta + group * 8, 8, true, b);
        u32 codes[4][2];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float(&y)[8] = v[r][k];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                y[i] = (y[i] - center[r]) * factor[r] * g[i];
                if (beta) y[i] += b[i];
                y[i] = round_bf16(y[i]);
                seen.see(y[i]);
            }
            const i64 at = base + (i64)r * columns + group * 8;
            if (sink.values) store8(sink.values + at, 8, true, y);
            codes[r][0] = E4M3::encode4(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
            codes[r][1] = E4M3::encode4(y[4] * scale, y[5] * scale, y[6] * scale, y[7] * scale);
            *reinterpret_cast<uint2*>(sink.codes + at) = make_uint2(codes[r][0], codes[r][1]);
        }
        if (!sink.transposed) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 rows[4] = {codes[0][half], codes[1][half], codes[2][half], codes[3][half]};
            u32 lines[4];
            transpose4(rows, lines);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *reinterpret_cast<u32*>(sink.transposed + (group * 8 + half * 4 + i) * sink.line + top) = lines[i];
        }
    });
    seen.publish(sink.amax, sink.flag);
    if (blockIdx.x == 0 && threadIdx.x == 0) *sink.scale_inv = 1.0f / scale;
}

KERNEL(layer_norm_cast_2048, ROW_THREADS)
(const u16* x, const u16* residual, u16* total, const float* gamma, const float* beta, float* mean, float* rstd, Sink sink,
 int columns) {
    layer_norm_cast<1>(x, residual, total, gamma, beta, mean, rstd, sink, columns);
}

KERNEL(layer_norm_cast_4096, ROW_THREADS)
(const u16* x, const u16* residual, u16* total, const float* gamma, const float* beta, float* mean, float* rstd, Sink sink,
 int columns) {
    layer_norm_cast<2>(x, residual, total, gamma, beta, mean, rstd, sink, columns);
}

// dx = rstd · (g - Σg/n - normal · Σ(g · normal)/n) with g = dy · gamma and normal = (x - mean) · rstd. With `residual`, the
// gradient that bypasses the norm is added to the rounded dx, and the sum rounded.
KERNEL(layer_norm_backward, ROW_THREADS)
(const u16* x, const u16* dy, const float* gamma, const float* mean, const float* rstd, const u16* residual, u16* dx,
 int columns) {
    __shared__ float first[8], second[8];
    const int row = blockIdx.x, groups = (columns + 7) / 8;
    const i64 base = (i64)row * columns;
    const bool aligned = (columns & 7) == 0;
    const float center = mean ? mean[row] : 0.0f, factor = rstd[row];
    auto size = [&](int group) { return min(columns - group * 8, 8); };

    float scaled[KEPT][8], normal[KEPT][8];
    float shift_sum = 0.0f, slope_sum = 0.0f;
    auto take = [&](int group, float(&g)[8], float(&n)[8]) {
        float gain[8];
        load8(dy + base + group * 8, size(group), aligned, g);
        load8(x + base + group * 8, size(group), aligned, n);
        load8(gamma + group * 8, size(group), aligned, gain);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            g[i] = g[i] * gain[i];
            n[i] = (n[i] - center) * factor;
        }
    };
    auto add = [&](float(&g)[8], float(&n)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            shift_sum += g[i];
            slope_sum += g[i] * n[i]; // beyond the row g is zero
        }
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * ROW_THREADS;
        if (group < groups) {
            take(group, scaled[k], normal[k]);
            add(scaled[k], normal[k]);
        }
    }
    for (int group = threadIdx.x + KEPT * ROW_THREADS; group < groups; group += ROW_THREADS) {
        float g[8], n[8];
        take(group, g, n);
        add(g, n);
    }
    const float per_row = 1.0f / (float)columns;
    const float shift = mean ? block_sum(shift_sum, first) * per_row : 0.0f, slope = block_sum(slope_sum, second) * per_row;

    auto finish = [&](int group, float(&g)[8], float(&n)[8]) {
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = factor * (g[i] - shift - n[i] * slope);
        if (residual) {
            float other[8];
            load8(residual + base + group * 8, size(group), aligned, other);
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = round_bf16(out[i]) + other[i];
        }
        store8(dx + base + group * 8, size(group), aligned, out);
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int group = threadIdx.x + k * ROW_THREADS;
        if (group < groups) finish(group, scaled[k], normal[k]);
    }
    for (int group = threadIdx.x + KEPT * ROW_THREADS; group < groups; group += ROW_THREADS) {
        float g[8], n[8];
        take(group, g, n);
        finish(group, g, n);
    }
}

// The same with four rows per block, and with the gradient's codes, row-major, unless `sink.codes` is null. Everything that
// is read is on its way before the first use. Rows are a multiple of four, columns of eight. The bits are those of the
// kernels that do it one after the other.
template <int GROUPS>
__device__ __forceinline__ void layer_norm_backward_cast(const u16* x, const u16* dy, const float* gamma, const float* mean,
                                                         const float* rstd, const u16* residual, const Sink& sink,
                                                         int columns) {
    __shared__ float shared[2][4][8];
    const int top = blockIdx.x * 4, groups = columns / 8, warp = threadIdx.x >> 5;
    const i64 base = (i64)top * columns;
    const float scale = sink.codes ? *sink.scale : 0.0f, per_row = 1.0f / (float)columns;
    uint4 upper[4][GROUPS], input[4][GROUPS], other[4][GROUPS];
    float center[4], factor[4], shift[4] = {}, slope[4] = {};
    auto each = [&](const auto& f) {
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int group = threadIdx.x + k * ROW_THREADS;
            if (group < groups) f(k, group);
        }
    };
    auto words = [&](const u16* p, int r, int group) {
        return __ldg(reinterpret_cast<const uint4*>(p + base + (i64)r * columns + group * 8));
    };
    each([&](int k, int group) {
#pragma unroll
        for (int r = 0; r < 4; r++) upper[r][k] = words(dy, r, group);
#pragma unroll
        for (int r = 0; r < 4; r++) input[r][k] = words(x, r, group);
    });
    if (residual) {
        each([&](int k, int group) {
#pragma unroll
            for (int r = 0; r < 4; r++) other[r][k] = words(residual, r, group);
        });
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        center[r] = mean ? __ldg(mean + top + r) : 0.0f;
        factor[r] = __ldg(rstd + top + r);
    }
    // g and normal of eight neighbours; made twice rather than kept.
    auto terms = [&](int k, int r, const float(&gain)[8], float(&g)[8], float(&n)[8]) {
        unpack8(upper[r][k], g);
        unpack8(input[r][k], n);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            g[i] = g[i] * gain[i];
            n[i] = (n[i] - center[r]) * factor[r];
        }
    };
    each([&](int k, int group) {
        float gain[8];
        load8(gamma + group * 8, 8, true, gain);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float g[8], n[8];
            terms(k, r, gain, g, n);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                shift[r] += g[i];
                slope[r] += g[i] * n[i];
            }
        }
    });
    // In the order of `block_sum`.
#pragma unroll
    for (int r = 0; r < 4; r++) {
        shift[r] = warp_sum(shift[r]);
        slope[r] = warp_sum(slope[r]);
        if ((threadIdx.x & 31) == 0) shared[0][r][warp] = shift[r], shared[1][r][warp] = slope[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        shift[r] = shared[0][r][0];
        slope[r] = shared[1][r][0];
#pragma unroll
        for (int i = 1; i < ROW_THREADS / 32; i++) {
            shift[r] += shared[0][r][i];
            slope[r] += shared[1][r][i];
        }
        shift[r] = mean ? shift[r] * per_row : 0.0f;
        slope[r] *= per_row;
    }

    Magnitudes seen;
    each([&](int k, int group) {
        float gain[8];
        load8(gamma + group * 8, 8, true, gain);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float g[8], n[8], out[8];
            terms(k, r, gain, g, n);
#pragma unroll
            for (int i = 0; i < 8; i++) out[i] = round_bf16(factor[r] * (g[i] - shift[r] - n[i] * slope[r]));
            if (residual) {
                float by[8];
                unpack8(other[r][k], by);
#pragma unroll
                for (int i = 0; i < 8; i++) out[i] = round_bf16(out[i] + by[i]);
            }
            const i64 at = base + (i64)r * columns + group * 8;
            store8(sink.values + at, 8, true, out);
            if (!sink.codes) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) seen.see(out[i]);
            const u32 low = E5M2::encode4(out[0] * scale, out[1] * scale, out[2] * scale, out[3] * scale);
            const u32 high = E5M2::encode4(out[4] * scale, out[5] * scale, out[6] * scale, out[7] * scale);
            *reinterpret_cast<uint2*>(sink.codes + at) = make_uint2(low, high);
        }
    });
    if (!sink.codes) return;
    seen.publish(sink.amax, sink.flag);
    if (blockIdx.x == 0 && threadIdx.x == 0) *sink.scale_inv = 1.0f / scale;
}

KERNEL(layer_norm_backward_cast_2048, ROW_THREADS)
(const u16* x, const u16* dy, const float* gamma, const float* mean, const float* rstd, const u16* residual, Sink sink,
 int columns) {
    layer_norm_backward_cast<1>(x, dy, gamma, mean, rstd, residual, sink, columns);
}

KERNEL(layer_norm_backward_cast_4096, ROW_THREADS, 2)
(const u16* x, const u16* dy, const float* gamma, const float* mean, const float* rstd, const u16* residual, Sink sink,
 int columns) {
    layer_norm_backward_cast<2>(x, dy, gamma, mean, rstd, residual, sink, columns);
}
