// Token and position embeddings, their gradients without atomics, and rotary positions.
//
// `order` holds the rows of a microbatch sorted by token, then ascending; the host makes it with the batch.
#include "common.cuh"

// y[t] = table[ids[t]] + positions[t mod length], rounded once; without `positions` the first alone. A block has a row. An id beyond the vocabulary raises the
// flag, if there is one, and reads nothing.
KERNEL(embedding_forward, 128)
(const u32* ids, const float* table, const float* positions, u16* y, u32* flag, int vocabulary, int length, int hidden) {
    const int row = blockIdx.x;
    const u32 id = ids[row];
    if (id >= (u32)vocabulary) {
        if (flag && threadIdx.x == 0) atomicOr(flag, 1u);
        return;
    }
    const bool aligned = (hidden & 7) == 0;
    for (int at = threadIdx.x * 8; at < hidden; at += blockDim.x * 8) {
        const int count = min(hidden - at, 8);
        float token[8];
        load8(table + (i64)id * hidden + at, count, aligned, token);
        if (positions) {
            float position[8];
            load8(positions + (i64)(row % length) * hidden + at, count, aligned, position);
#pragma unroll
            for (int i = 0; i < 8; i++) token[i] += position[i];
        }
        store8(y + (i64)row * hidden + at, count, aligned, token);
    }
}

// Rows of `out` whose word is not 0 become zero, and their word 0. A block has four rows, a warp one.
KERNEL(clear_rows, 128)(float* out, u32* touched, int rows, int hidden) {
    const int row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= rows || !touched[row]) return;
    float* to = out + (i64)row * hidden;
    for (int at = lane; at < hidden; at += 32) to[at] = 0.0f;
    __syncwarp(); // every lane has read the word
    if (lane == 0) touched[row] = 0;
}

// For each token that occurs: out[token] = Σ dy[row] over its rows ascending. With `accumulate`, that sum is added to what
// `out` holds; rows of other tokens are left alone. A block has one entry of `order`, and works if a token begins there.
KERNEL(token_gradient, 128)
(const u32* ids, const u32* order, const u16* dy, float* out, u32* touched, int accumulate, int rows, int vocabulary,
 int hidden) {
    const int begin = blockIdx.x;
    const u32 token = ids[order[begin]];
    if (token >= (u32)vocabulary) return;
    if (begin > 0 && ids[order[begin - 1]] == token) return;
    if (touched && threadIdx.x == 0) touched[token] = 1;
    int end = begin + 1;
    while (end < rows && ids[order[end]] == token) end++;
    const bool aligned = (hidden & 7) == 0;
    for (int at = threadIdx.x * 8; at < hidden; at += blockDim.x * 8) {
        const int count = min(hidden - at, 8);
        float sum[8] = {};
        for (int i = begin; i < end; i++) {
            float v[8];
            load8(dy + (i64)order[i] * hidden + at, count, aligned, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
        float* to = out + (i64)token * hidden + at;
        if (accumulate) {
            float before[8];
            load8_own(to, count, aligned, before);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] = before[j] + sum[j];
        }
        store8(to, count, aligned, sum);
    }
}

// out[p] = Σ dy[p + s · length] over sequences s ascending. With `accumulate`, that sum is added to what `out` holds. A
// block has a position.
KERNEL(position_gradient, 128)(const u16* dy, float* out, int accumulate, int sequences, int length, int hidden) {
    const int position = blockIdx.x;
    const bool aligned = (hidden & 7) == 0;
    for (int at = threadIdx.x * 8; at < hidden; at += blockDim.x * 8) {
        const int count = min(hidden - at, 8);
        float sum[8] = {};
        for (int sequence = 0; sequence < sequences; sequence++) {
            float v[8];
            load8(dy + ((i64)sequence * length + position) * hidden + at, count, aligned, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
        float* to = out + (i64)position * hidden + at;
        if (accumulate) {
            float before[8];
            load8_own(to, count, aligned, before);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] = before[j] + sum[j];
        }
        store8(to, count, aligned, sum);
    }
}

// Turns the first heads of each row, the first half of a head against its second: (a, b) becomes (a · cos - b · sin,
// b · cos + a · sin), rounded; the rest of a row is copied. `table` has cos, then sin, of half a head for each position. The
// gradient turns back: `back`. A block has a row; `out` may be `x`.
KERNEL(rotary, 128)(const u16* x, const float* table, u16* out, int back, int length, int heads, int dim, int width) {
    const int half = dim / 2, pairs = heads * half;
    const float* cosines = table + (i64)(blockIdx.x % length) * dim;
    const u16* from = x + (i64)blockIdx.x * width;
    u16* to = out + (i64)blockIdx.x * width;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int at = i % half, p = i / half * dim + at;
        const float a = from_bf16(from[p]), b = from_bf16(from[p + half]);
        const float c = cosines[at], s = back ? -cosines[half + at] : cosines[half + at];
        to[p] = to_bf16(a * c - b * s);
        to[p + half] = to_bf16(b * c + a * s);
    }
    for (int i = heads * dim + threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}
