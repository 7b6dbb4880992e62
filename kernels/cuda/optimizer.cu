// The commit: norm of the gradients, clipping, and AdamW, which also makes the FP8 weight in both layouts.
//
// Nothing here is written while the step's flag is raised.
#include "tile.cuh"

constexpr int NORM_PIECE = 4096;
// Rows of sixteen elements that eight threads ask for at once.
constexpr int SQUARE_ROWS = 32;
constexpr int SQUARE_THREADS = 128;

// Sixteen lanes of a fixed order: element i goes to lane i mod 16, lanes are folded 0 with 8 .. 7 with 15, then by 4, 2, 1.
// A thread has two neighbouring lanes, so eight threads have a sequence and a warp has four.
__device__ __forceinline__ float fold_lanes(float even, float odd) {
#pragma unroll
    for (int width = 4; width > 0; width >>= 1) {
        even += __shfl_down_sync(EVERY_LANE, even, width, 8);
        odd += __shfl_down_sync(EVERY_LANE, odd, width, 8);
    }
    return even + odd;
}

// A gradient, as floats or as bf16. Where it has few rows that are not zero, as that of an embedding has, `touched` has a
// word per row of `columns` elements: rows whose word is 0 are zero, and are not read.
template <class G>
struct Gradient {
    const G* values;
    const u32* touched;
    i64 columns;

    // Whether the elements from `at` on, which lie in one row, may be other than zero.
    __device__ __forceinline__ bool read(i64 at) const { return !touched || __ldg(touched + at / columns); }
};

// Two neighbours, which lie at a multiple of two elements.
__device__ __forceinline__ void load2(const float* p, float& even, float& odd) {
    const float2 pair = __ldg(reinterpret_cast<const float2*>(p));
    even = pair.x, odd = pair.y;
}

__device__ __forceinline__ void load2(const u16* p, float& even, float& odd) {
    const u32 pair = __ldg(reinterpret_cast<const u32*>(p));
    even = __uint_as_float(pair << 16), odd = __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ float load1(const float* p) { return __ldg(p); }
__device__ __forceinline__ float load1(const u16* p) { return from_bf16(__ldg(p)); }

// partials[piece] = Σ (gradient · factor)² over pieces of 4,096 elements, in sixteen lanes. Eight threads have a piece, and
// ask for `ROWS` times sixteen elements at once: few threads so keep the memory busy.
template <int ROWS, class G>
__device__ __forceinline__ void squares(const Gradient<G>& gradient, float factor, float* partials, i64 length) {
    const i64 piece = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 3;
    const int lane = (threadIdx.x & 7) * 2;
    const i64 base = piece * NORM_PIECE;
    const int count = (int)min(max(length - base, (i64)0), (i64)NORM_PIECE);
    float even = 0.0f, odd = 0.0f;
    int i = lane;
    for (; i - lane + ROWS * 16 <= count; i += ROWS * 16) {
        if (!gradient.read(base + i)) continue; // adds zeros
        float x[ROWS], y[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) load2(gradient.values + base + i + k * 16, x[k], y[k]);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            x[k] *= factor, y[k] *= factor;
            even += x[k] * x[k], odd += y[k] * y[k];
        }
    }
    for (; i < count; i += 16) {
        const float x = load1(gradient.values + base + i) * factor;
        even += x * x;
        if (i + 1 >= count) break;
        const float y = load1(gradient.values + base + i + 1) * factor;
        odd += y * y;
    }
    const float sum = fold_lanes(even, odd);
    if (lane == 0 && count > 0) partials[piece] = sum;
}

// The same for few pieces, with a block for each: squares are made as they come from memory, and then added.
template <class G>
__device__ __forceinline__ void few_squares(const Gradient<G>& gradient, float factor, float* partials, i64 length) {
    __shared__ float4 squared[NORM_PIECE / 4];
    const i64 base = (i64)blockIdx.x * NORM_PIECE;
    const int count = (int)min(length - base, (i64)NORM_PIECE);
#pragma unroll
    for (int k = 0; k < NORM_PIECE / 8 / SQUARE_THREADS; k++) {
        const int at = (threadIdx.x + k * SQUARE_THREADS) * 8, own = min(count - at, 8);
        float x[8] = {};
        if (own > 0 && gradient.read(base + at)) load8(gradient.values + base + at, own, own == 8, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= factor;
        squared[at / 4] = make_float4(x[0] * x[0], x[1] * x[1], x[2] * x[2], x[3] * x[3]);
        squared[at / 4 + 1] = make_float4(x[4] * x[4], x[5] * x[5], x[6] * x[6], x[7] * x[7]);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float2* pair = reinterpret_cast<const float2*>(squared) + (threadIdx.x & 7);
    float even = 0.0f, odd = 0.0f;
#pragma unroll 16
    for (int i = 0; i < NORM_PIECE / 16; i++) even += pair[i * 8].x, odd += pair[i * 8].y;
    const float sum = fold_lanes(even, odd);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

KERNEL(sum_squares, SQUARE_THREADS)
(const float* gradient, const u32* touched, i64 columns, float factor, float* partials, i64 length) {
    // Rows that may be zero are a multiple of 256 elements.
    if (touched) {
        squares<16>(Gradient<float>{gradient, touched, columns}, factor, partials, length);
    } else {
        squares<SQUARE_ROWS>(Gradient<float>{gradient, nullptr, 1}, factor, partials, length);
    }
}

KERNEL(sum_few_squares, SQUARE_THREADS)
(const float* gradient, const u32* touched, i64 columns, float factor, float* partials, i64 length) {
    few_squares(Gradient<float>{gradient, touched, columns}, factor, partials, length);
}

KERNEL(sum_squares_bf16, SQUARE_THREADS)
(const u16* gradient, const u32* touched, i64 columns, float factor, float* partials, i64 length) {
    squares<SQUARE_ROWS>(Gradient<u16>{gradient, nullptr, 1}, factor, partials, length);
}

KERNEL(sum_few_squares_bf16, SQUARE_THREADS)
(const u16* gradient, const u32* touched, i64 columns, float factor, float* partials, i64 length) {
    few_squares(Gradient<u16>{gradient, nullptr, 1}, factor, partials, length);
}

// norm = √(Σ partials): 512 lanes add every 512th ascending, and are folded as a tree. clip = min(1, limit / (norm + 1e-6)),
// 1 for an infinite limit. The flag is raised if the norm is not finite, or if any of `flags` is. One block.
KERNEL(settle, 512)
(const float* partials, i64 count, const u32* flags, int ranks, float limit, float* norm, float* clip, u32* flag) {
    __shared__ float lanes[512];
    float sum = 0.0f;
    i64 i = threadIdx.x;
    for (; i + 31 * 512 < count; i += 32 * 512) {
        float x[32];
#pragma unroll
        for (int k = 0; k < 32; k++) x[k] = __ldg(partials + i + k * 512);
#pragma unroll
        for (int k = 0; k < 32; k++) sum += x[k];
    }
    for (; i + 7 * 512 < count; i += 8 * 512) {
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = __ldg(partials + i + k * 512);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += x[k];
    }
    for (; i < count; i += 512) sum += __ldg(partials + i);
    lanes[threadIdx.x] = sum;
    for (int width = 256; width > 0; width >>= 1) {
        __syncthreads();
        if (threadIdx.x < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    }
    if (threadIdx.x >= 32) return;
    u32 raised = 0;
    for (int rank = threadIdx.x; rank < ranks; rank += 32) raised |= flags[rank];
    raised = __reduce_or_sync(EVERY_LANE, raised);
    if (threadIdx.x != 0) return;
    const float value = sqrtf(lanes[0]);
    *norm = value;
    const float factor = limit / (value + 1e-6f);
    *clip = __float_as_uint(limit) < INFINITY_BITS && factor < 1.0f ? factor : 1.0f;
    if (raised || (__float_as_uint(value) & 0x7FFFFFFFu) >= INFINITY_BITS) atomicOr(flag, 1u);
}

// What a step of AdamW needs besides its tensors. Rows of `table`: learning rate, learning rate / (1 - β1^t), √(1 - β2^t).
struct Adam {
    const float* table;
    const u64* counter;  // good commits so far: the row of the table
    u64 last;            // the last row
    const float* clip;
    const u32* unless;   // if raised, nothing is done
    double weight_decay;
    float factor;        // what gradients are multiplied by before clipping
    float share1, beta2, share2, epsilon;
    u32 zero;
};

// One step in PyTorch's order of operations: the decoupled decay, the moments, the update with epsilon after correction.
struct AdamStep {
    Adam fixed;
    float step_size, correction2_sqrt, decay, clip;

    __device__ __forceinline__ explicit AdamStep(const Adam& adam) : fixed(adam) {
        const u64 done = *adam.counter;
        const float* row = adam.table + 3 * (done < adam.last ? done : adam.last);
        step_size = row[1];
        correction2_sqrt = row[2];
        decay = (float)(1.0 - (double)row[0] * adam.weight_decay);
        clip = *adam.clip;
    }

    __device__ __forceinline__ void update(float gradient, float& w, float& m, float& v) const {
        const float g = gradient * fixed.factor * clip;
        m = m + fixed.share1 * (g - m);
        v = v * fixed.beta2 + fixed.share2 * g * g;
        const float denominator = sqrtf(v) / correction2_sqrt + fixed.epsilon;
        w = w * decay - step_size * m / denominator;
    }
};

// ---- a run of neighbours at once ----

// `count` of N values from `p` on, the others zero. `wide`: all are there, and p is aligned to as many, at most 16 bytes.
__device__ __forceinline__ void load_run(const float* p, int count, bool wide, float (&v)[8]) { load8_own(p, count, wide, v); }
__device__ __forceinline__ void load_run(const u16* p, int count, bool wide, float (&v)[8]) { load8(p, count, wide, v); }

__device__ __forceinline__ void load_run(const float* p, int count, bool wide, float (&v)[4]) {
    if (wide) {
        const float4 a = *reinterpret_cast<const float4*>(p);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = i < count ? p[i] : 0.0f;
    }
}

__device__ __forceinline__ void load_run(const u16* p, int count, bool wide, float (&v)[4]) {
    if (wide) {
        const uint2 raw = *reinterpret_cast<const uint2*>(p);
        v[0] = __uint_as_float(raw.x << 16), v[1] = __uint_as_float(raw.x & 0xFFFF0000u);
        v[2] = __uint_as_float(raw.y << 16), v[3] = __uint_as_float(raw.y & 0xFFFF0000u);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = i < count ? from_bf16(p[i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void store_run(T* p, int count, bool wide, const float (&v)[8]) {
    store8(p, count, wide, v);
}

__device__ __forceinline__ void store_run(float* p, int count, bool wide, const float (&v)[4]) {
    if (wide) {
        *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) p[i] = v[i];
    }
}

__device__ __forceinline__ void store_run(u16* p, int count, bool wide, const float (&v)[4]) {
    if (wide) {
        *reinterpret_cast<uint2*>(p) = make_uint2(to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) p[i] = to_bf16(v[i]);
    }
}

// The tensors of a parameter.
template <class G>
struct Updates {
    AdamStep step;
    Gradient<G> gradient;
    float *weight, *first, *second;

    // Old values of N elements that lie in one row.
    template <int N>
    __device__ __forceinline__ void load(i64 at, int count, bool wide, float (&g)[N], float (&w)[N], float (&m)[N],
                                         float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) g[i] = 0.0f;
        if (gradient.read(at)) load_run(gradient.values + at, count, wide, g);
        load_run(weight + at, count, wide, w);
        load_run(first + at, count, wide, m);
        load_run(second + at, count, wide, v);
    }

    // Makes new ones of them, and stores those.
    template <int N>
    __device__ __forceinline__ void finish(i64 at, int count, bool wide, const float (&g)[N], float (&w)[N], float (&m)[N],
                                           float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) step.update(g[i], w[i], m[i], v[i]);
        store_run(weight + at, count, wide, w);
        store_run(first + at, count, wide, m);
        store_run(second + at, count, wide, v);
    }
};

constexpr int UPDATE_THREADS = 256;

template <class G>
__device__ __forceinline__ void update_run(const Updates<G>& updates, u16* copy, i64 length) {
    const i64 at = ((i64)blockIdx.x * UPDATE_THREADS + threadIdx.x) * 8;
    if (at >= length) return;
    const int count = (int)min(length - at, (i64)8);
    float g[8], w[8], m[8], v[8];
    updates.load(at, count, count == 8, g, w, m, v);
    updates.finish(at, count, count == 8, g, w, m, v);
    if (copy) store8(copy + at, count, count == 8, w);
}

// The same of a tile of 64 rows and columns, and the codes of the new weights in both layouts: as `cast_tile`, with four
// columns to a thread, so that a warp's accesses lie without gaps. A thread asks for all of its four rows before it writes
// one, which the compiler may not do by itself; where the rows are whole, no branch stands between the loads.
template <class G>
__device__ __forceinline__ void update_tile(const Updates<G>& updates, const Sink& sink, int rows, int columns) {
    constexpr int LINE = TILE / 4 + 1; // words of four rows, and one against bank conflicts
    __shared__ u32 words[TILE * LINE];
    const int group = threadIdx.x & 15, quad = threadIdx.x >> 4;
    const int top = blockIdx.y * TILE, row = top + quad * 4, column = blockIdx.x * TILE + group * 4;
    const int count = min(max(columns - column, 0), 4), down = count > 0 ? rows - row : 0;
    const bool wide = (columns & 3) == 0 && count == 4;
    const i64 at = (i64)row * columns + column;
    const float scale = sink.codes ? *sink.scale : 0.0f;
    float w[4][4] = {};
    auto all = [&](int down, int count, bool wide) {
        float g[4][4], m[4][4], v[4][4];
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < down) updates.load(at + (i64)r * columns, count, wide, g[r], w[r], m[r], v[r]);
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r < down) updates.finish(at + (i64)r * columns, count, wide, g[r], w[r], m[r], v[r]);
    };
    if (wide && down >= 4) {
        all(4, 4, true);
    } else {
        all(down, count, wide);
    }
    Magnitudes seen;
    u32 codes[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const i64 to = at + (i64)r * columns;
#pragma unroll
        for (int i = 0; i < 4; i++) seen.see(w[r][i]);
        codes[r] = E4M3::encode4(w[r][0] * scale, w[r][1] * scale, w[r][2] * scale, w[r][3] * scale);
        if (r >= down) continue;
        if (sink.values) store_run(sink.values + to, count, wide, w[r]);
        if (!sink.codes) continue;
        if (wide) {
            *reinterpret_cast<u32*>(sink.codes + to) = codes[r];
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < count) sink.codes[to + i] = (u8)(codes[r] >> (8 * i));
        }
    }
    seen.publish(sink.codes ? sink.amax : nullptr, sink.flag);
    if (sink.codes && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *sink.scale_inv = 1.0f / scale;
    if (!sink.transposed) return;
    u32 lines[4];
    transpose4(codes, lines);
#pragma unroll
    for (int i = 0; i < 4; i++) words[(group * 4 + i) * LINE + quad] = lines[i];
    __syncthreads();
    const int line = threadIdx.x >> 2, part = threadIdx.x & 3, first = top + part * 16;
    if (blockIdx.x * TILE + line >= columns || first >= rows) return;
    const u32* from = words + line * LINE + part * 4;
    store_line(sink.transposed + (i64)(blockIdx.x * TILE + line) * sink.line + first,
               make_uint4(from[0], from[1], from[2], from[3]), rows - first, (sink.line & 15) == 0);
}

// A matrix: weights, moments, and the codes of the new weights in both layouts with the scale in force.
KERNEL(adamw_e4m3, UPDATE_THREADS)
(Adam adam, const float* gradient, float* weight, float* first, float* second, Sink sink, int rows, int columns) {
    if (*adam.unless) return;
    const Updates<float> updates{AdamStep(adam), {gradient, nullptr, 1}, weight, first, second};
    update_tile(updates, sink, rows, columns);
}

KERNEL(adamw_e4m3_bf16, UPDATE_THREADS)
(Adam adam, const u16* gradient, float* weight, float* first, float* second, Sink sink, int rows, int columns) {
    if (*adam.unless) return;
    const Updates<u16> updates{AdamStep(adam), {gradient, nullptr, 1}, weight, first, second};
    update_tile(updates, sink, rows, columns);
}

// Any run of elements; with `copy`, also the nearest bf16 of each new weight.
KERNEL(adamw, UPDATE_THREADS)
(Adam adam, const float* gradient, const u32* touched, i64 columns, float* weight, float* first, float* second, u16* copy,
 i64 length) {
    if (*adam.unless) return;
    const Updates<float> updates{AdamStep(adam), {gradient, touched, columns}, weight, first, second};
    update_run(updates, copy, length);
}

KERNEL(adamw_bf16, UPDATE_THREADS)
(Adam adam, const u16* gradient, const u32* touched, i64 columns, float* weight, float* first, float* second, u16* copy,
 i64 length) {
    if (*adam.unless) return;
    const Updates<u16> updates{AdamStep(adam), {gradient, touched, columns}, weight, first, second};
    update_run(updates, copy, length);
}
