// The fused cast: a producer makes a matrix, a tile at a time; its codes are written row-major and transposed, with amax.
//
// A block of 128 threads has a tile of 64 rows × 64 columns; a thread has 4 rows × 8 columns. Bytes are transposed 4 × 4 in
// registers, then through shared memory, so that both layouts are written in runs of 64 bytes.
//
// Column sums, where asked for: the 4 rows of a thread ascending, then the 16 threads of a column ascending, then the tiles
// ascending. The last of the blocks of a column to finish adds the tiles; which one that is changes nothing.
#pragma once

#include "common.cuh"

constexpr int TILE = 64;
constexpr int TILE_THREADS = 128;

// Where a tile's values go. Null pointers are left out, `codes` and `transposed` apart.
struct Sink {
    u16* values;         // rows × columns, bf16: the values themselves
    u8* codes;           // rows × columns
    u8* transposed;      // columns lines of rows
    float* scale_inv;    // 1: beside the bytes
    const float* scale;  // 1: in force
    u32* amax;           // 1: staging entry of the cell, as bits
    u32* flag;           // 1: raised if a value is infinite or NaN
    float* column_sums;  // columns
    float* partial;      // ceil(rows / 64) × columns: scratch
    u32* finished;       // ceil(columns / 64): zero before and after
    i64 line;            // from one line of `transposed` to the next: its rows, or more where others lie beside it
};

// out[j] = partial[0, j] + partial[1, j] + .. for `width` columns from `first` on: pieces ascending.
__device__ __forceinline__ void add_rows(const float* partial, float* out, int first, int width, int columns, int pieces) {
    for (int column = first + threadIdx.x; column < min(first + width, columns); column += blockDim.x) {
        float total = __ldcg(partial + column);
        for (int piece = 1; piece < pieces; piece++) total += __ldcg(partial + (i64)piece * columns + column);
        out[column] = total;
    }
}

// Called by all threads of each of `blocks` blocks after they have written their part of `partial`: whether this is the last
// of them, and sees what all have written. `finished` is zero before and after.
__device__ __forceinline__ bool last_of(u32* finished, u32 blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); // what the block has written is visible before the count is
        last = atomicInc(finished, blocks - 1) == blocks - 1; // up to the number of blocks, then again from zero
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Four rows of four bytes become four columns of four bytes.
__device__ __forceinline__ void transpose4(const u32 (&rows)[4], u32 (&columns)[4]) {
    const u32 low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const u32 high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Stores up to sixteen bytes of a line.
__device__ __forceinline__ void store_line(u8* to, const uint4& bytes, int count, bool aligned) {
    if (aligned && count >= 16) {
        *reinterpret_cast<uint4*>(to) = bytes;
    } else {
        const u32 w[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < count) to[i] = (u8)(w[i >> 2] >> (8 * (i & 3)));
    }
}

// A producer has a type `Raw`, `fetch`, which asks for what a run of a row is made of, and `make`, which makes values of it.
// A thread asks for all of its rows before it makes anything of the first; where they are whole, no branch stands between.
template <class Format, class Producer>
__device__ __forceinline__ void cast_tile(const Producer& producer, const Sink& sink, int rows, int columns) {
    __shared__ uint4 turned[TILE * TILE / 16];
    __shared__ float sums[TILE / 4][TILE + 1];

    const int group = threadIdx.x & 7, quad = threadIdx.x >> 3; // 8 columns; 4 rows
    const int column = blockIdx.x * TILE + group * 8;
    const int top = blockIdx.y * TILE, row = top + quad * 4;
    const int count = min(max(columns - column, 0), 8);
    const bool wide = (columns & 7) == 0 && count == 8;
    const float scale = sink.codes ? *sink.scale : 0.0f;

    Magnitudes seen;
    u32 codes[4][2];
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    typename Producer::Raw raw[4];
    if (wide && row + 4 <= rows) {
#pragma unroll
        for (int r = 0; r < 4; r++) producer.fetch(row + r, column, 8, true, raw[r]);
    } else if (count > 0) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (row + r < rows) producer.fetch(row + r, column, count, wide, raw[r]);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const bool there = row + r < rows && count > 0;
        float v[8] = {};
        if (there) producer.make(raw[r], column, count, wide, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            seen.see(v[i]);
            sum[i] = r == 0 ? v[i] : sum[i] + v[i];
        }
        codes[r][0] = Format::encode4(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
        codes[r][1] = Format::encode4(v[4] * scale, v[5] * scale, v[6] * scale, v[7] * scale);
        if (!there) continue;
        const i64 at = (i64)(row + r) * columns + column;
        if (sink.values) store8(sink.values + at, count, wide, v);
        if (sink.codes) {
            if (wide) {
                *reinterpret_cast<uint2*>(sink.codes + at) = make_uint2(codes[r][0], codes[r][1]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (i < count) sink.codes[at + i] = (u8)(codes[r][i >> 2] >> (8 * (i & 3)));
            }
        }
    }
    if (sink.codes) {
        seen.publish(sink.amax, sink.flag);
        if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *sink.scale_inv = 1.0f / scale;
    } else {
        seen.publish(nullptr, sink.flag);
    }

    if (sink.column_sums) {
#pragma unroll
        for (int i = 0; i < 8; i++) sums[quad][group * 8 + i] = sum[i];
    }
    if (sink.transposed) {
        // Word w of a line holds rows 4w .. 4w + 3. Lines are swizzled by 16 bytes against bank conflicts.
        u32* words = reinterpret_cast<u32*>(turned);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 quarter[4] = {codes[0][half], codes[1][half], codes[2][half], codes[3][half]};
            u32 lines[4];
            transpose4(quarter, lines);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int line = group * 8 + half * 4 + i;
                words[line * 16 + (((quad >> 2) ^ (group & 3)) << 2) + (quad & 3)] = lines[i];
            }
        }
    }
    __syncthreads();

    if (sink.column_sums && threadIdx.x < TILE) {
        const int at = blockIdx.x * TILE + threadIdx.x;
        if (at < columns) {
            float total = sums[0][threadIdx.x];
#pragma unroll
            for (int i = 1; i < TILE / 4; i++) total += sums[i][threadIdx.x];
            sink.partial[(i64)blockIdx.y * columns + at] = total;
        }
    }
    if (sink.transposed) {
        const bool aligned = (sink.line & 15) == 0;
#pragma unroll
        for (int k = 0; k < TILE * TILE / 16 / TILE_THREADS; k++) {
            const int piece = threadIdx.x + k * TILE_THREADS, line = piece >> 2, part = piece & 3;
            const int at = blockIdx.x * TILE + line, first = top + part * 16;
            if (at >= columns || first >= rows) continue;
            const uint4 bytes = turned[line * 4 + (part ^ ((line >> 3) & 3))];
            store_line(sink.transposed + at * sink.line + first, bytes, rows - first, aligned);
        }
    }
    if (sink.column_sums && last_of(sink.finished + blockIdx.x, gridDim.y))
        add_rows(sink.partial, sink.column_sums, blockIdx.x * TILE, TILE, columns, gridDim.y);
}
