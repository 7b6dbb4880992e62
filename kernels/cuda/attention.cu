// Causal multi-head attention on packed rows [q | k | v], where heads may share keys and values in equal groups, on tensor
// cores (bf16 products, fp32 sums).
//
// A block has 64 rows of one sequence and head, a warp 16 of them; it goes through the other side in tiles, ascending. Where
// there is shared memory enough, two groups of four warps take every other tile each, and the second's sums are added to the
// first's in the end. So every sum has one order. Forward: online softmax; probabilities are rounded to bf16 for the second
// product, their sum is not. Backward: δ first, Σ out · dout of a row where the output is at hand, else Σ P · dP. Then dQ, with
// dS = P · (dP - δ) · scale, and beside it dK and dV, a block per 64 keys. Nothing is added by two blocks.
//
// Tiles are fetched while the ones before are worked on. Exponentials are the hardware's powers of two, which are within two
// units in the last place.
//
// Head dimensions are padded with zeros to 32, 64 or 128 in shared memory. Rows beyond the sequence are zero and are not
// stored. `lse` and `delta` are [sequences, heads, length].
#include "tensor.cuh"

struct Shape {
    int length, heads, kv_heads, dim;
    float scale; // 1 / √dim
};

// Rows of the other side that are worked on at once: as many as registers are there for.
constexpr int FORWARD_TILE = 64;
template <int D>
constexpr int backward_tile() {
    return D > 64 ? 32 : 64;
}

constexpr float LOG2_E = 1.44269504088896340736f;

__device__ __forceinline__ float power_of_two(float x) {
    float value;
    asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// Where a sequence and head lie. Heads share keys and values in equal groups of neighbours.
struct Place {
    i64 stride;         // of a row of qkv
    const u16 *q, *k, *v; // row 0 of this sequence and head
    int hidden;         // elements of a row of the output
    i64 rows;           // first row of the sequence
    int head;
    i64 statistics; // first entry of lse and delta

    __device__ __forceinline__ Place(const u16* qkv, const Shape& shape, int sequence, int head) : head(head) {
        hidden = shape.heads * shape.dim;
        stride = (shape.heads + 2 * shape.kv_heads) * (i64)shape.dim;
        rows = (i64)sequence * shape.length;
        const u16* row = qkv + rows * stride;
        q = row + head * shape.dim;
        k = row + hidden + head / (shape.heads / shape.kv_heads) * shape.dim;
        v = k + shape.kv_heads * shape.dim;
        statistics = (i64)(sequence * shape.heads + head) * shape.length;
    }
};

// A block of 64 queries of one head: what it holds in shared memory, and how it goes through the keys up to its last query,
// N for each group at a time. With UPPER, the gradients of the output lie beside the queries.
template <int D, int N, bool UPPER>
struct Queries {
    static constexpr int STEP = GROUPS * N;
    u16* memory;
    Lines<D> queries, upper;
    Pair<D, STEP> keys, values;
    Place place;
    Warp warp;
    int first, row, end; // of the block, of this thread, behind the last query
    const Shape& shape;

    __device__ __forceinline__ Queries(const u16* qkv, const Shape& shape)
        : memory(reinterpret_cast<u16*>(shared_memory)), queries(take<D, ROWS>(memory)),
          upper(take<D, UPPER ? ROWS : 0>(memory)), keys{take<D, 2 * STEP>(memory)}, values{take<D, 2 * STEP>(memory)},
          place(qkv, shape, blockIdx.y / shape.heads, blockIdx.y % shape.heads), shape(shape) {
        // Blocks with many keys start first.
        first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS;
        row = first + warp.mine + (warp.lane >> 2);
        end = min(first + ROWS, shape.length);
    }

    // Row 0 of this sequence and head in a matrix like the output.
    __device__ __forceinline__ i64 corner() const { return place.rows * place.hidden + place.head * shape.dim; }

    __device__ __forceinline__ void fetch(int tile, int side) const {
        if (tile < end) {
            fill<D, STEP>(keys[side], place.k, place.stride, tile, end, shape.dim);
            fill<D, STEP>(values[side], place.v, place.stride, tile, end, shape.dim);
        }
        commit();
    }

    // Calls f(first key, keys, values) of this group's tiles, ascending, but for those of which every key comes after every
    // query of the warp; the next tiles are on their way meanwhile.
    template <class F>
    __device__ __forceinline__ void for_tiles(const u16* dout, const F& f) const {
        fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);
        if (UPPER) fill<D, ROWS>(upper, dout + corner(), place.hidden, first, shape.length, shape.dim);
        fetch(0, 0);
        for (int step = 0, side = 0; step < end; step += STEP, side ^= 1) {
            fetch(step + STEP, side ^ 1);
            wait<1>();
            __syncthreads();
            const int tile = step + warp.group * N;
            if (tile < first + warp.mine + 16) f(tile, keys[side].from(warp.group * N), values[side].from(warp.group * N));
            __syncthreads();
        }
    }

    // One number for each of the two rows of this thread; zero beyond the sequence.
    __device__ __forceinline__ void statistic(const float* from, float factor, float (&to)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            to[half] = row + 8 * half < shape.length ? from[place.statistics + row + 8 * half] * factor : 0.0f;
    }
};

template <int D>
__device__ __forceinline__ void attention_forward(const u16* qkv, u16* out, float* lse, const Shape& shape) {
    constexpr int N = FORWARD_TILE;
    const Queries<D, N, false> block(qkv, shape);
    const Place& place = block.place;
    const Warp& warp = block.warp;
    const int lane = warp.lane, first = block.first, row = block.row;
    const float minus_infinity = -__uint_as_float(INFINITY_BITS), scale = shape.scale * LOG2_E;
    float sums[D / 8][4], largest[2] = {minus_infinity, minus_infinity}, mass[2] = {0.0f, 0.0f};
    clear(sums);
    block.for_tiles(nullptr, [&](int tile, Lines<D> keys, Lines<D> values) {
        float scores[N / 8][4];
        clear(scores);
        over_columns<D, N>(scores, block.queries, warp.mine, keys);
        if (tile + N > first + warp.mine) { // some keys come after some queries
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile + n * 8 + (lane & 3) * 2 + (i & 1) > row + 8 * (i >> 1)) scores[n][i] = minus_infinity;
        }
        float top[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) top[i >> 1] = fmaxf(top[i >> 1], scores[n][i]);
        float shrink[2], shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[half] = quad_max(top[half]);
            shrink[half] = power_of_two((largest[half] - top[half]) * scale);
            shift[half] = top[half] * scale;
            largest[half] = top[half];
            mass[half] *= shrink[half];
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = power_of_two(fmaf(scores[n][i], scale, -shift[i >> 1]));
                mass[i >> 1] += scores[n][i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i >> 1];
        over_rows<D, N>(sums, scores, values);
    });
    if (GROUPS == 2) {
        // Both groups take the larger maximum; a group without keys has -∞ and no mass.
        float* tops = reinterpret_cast<float*>(shared_memory);
        if ((lane & 3) == 0) {
            tops[warp.group * ROWS + warp.mine + (lane >> 2)] = largest[0];
            tops[warp.group * ROWS + warp.mine + (lane >> 2) + 8] = largest[1];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float other = tops[(1 - warp.group) * ROWS + warp.mine + (lane >> 2) + 8 * half];
            const float top = fmaxf(largest[half], other), shrink = power_of_two((largest[half] - top) * scale);
            largest[half] = top;
            mass[half] *= shrink;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                sums[n][2 * half] *= shrink;
                sums[n][2 * half + 1] *= shrink;
            }
        }
        float masses[1][4] = {{mass[0], mass[1], 0.0f, 0.0f}};
        join(masses, warp);
        mass[0] = masses[0][0];
        mass[1] = masses[0][1];
        join(sums, warp);
        if (warp.group == 1) return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mass[half] = quad_sum(mass[half]);
        if ((lane & 3) == 0 && row + 8 * half < shape.length)
            lse[place.statistics + row + 8 * half] = largest[half] * shape.scale + (float)log((double)mass[half]);
    }
    store_rows<D>(out + block.corner(), place.hidden, first + warp.mine, shape.length, shape.dim, sums, 1.0f / mass[0],
                  1.0f / mass[1]);
}

// A row's scores against a tile, scaled, less its log-sum-exp, as probabilities; and the slopes dP. Keys that come after their
// query, and rows beyond the sequence, have none.
template <int D, int N, class F>
__device__ __forceinline__ void for_pairs(const Lines<D>& queries, const Lines<D>& upper, const Lines<D>& keys,
                                          const Lines<D>& values, int mine, int tile, int row, int length, float scale,
                                          const float (&shift)[2], float (&scores)[N / 8][4], const F& f) {
    float slopes[N / 8][4];
    clear(scores);
    clear(slopes);
    over_columns<D, N>(scores, queries, mine, keys);
    over_columns<D, N>(slopes, upper, mine, values);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = tile + n * 8 + (threadIdx.x & 3) * 2 + (i & 1), half = i >> 1;
            const bool seen = key <= row + 8 * half && row + 8 * half < length;
            const float p = seen ? power_of_two(fmaf(scores[n][i], scale, -shift[half])) : 0.0f;
            f(seen, p, slopes[n][i], half, scores[n][i]);
        }
}

// δ.
template <int D>
__device__ __forceinline__ void attention_delta(
    const u16* qkv, const u16* out, const u16* dout, const float* lse, float* delta, const Shape& shape) {
    constexpr int N = backward_tile<D>();
    __shared__ float means[ROWS];
    const Queries<D, N, true> block(qkv, shape);
    const Place& place = block.place;
    const Warp& warp = block.warp;
    const int lane = warp.lane, row = block.row;
    const i64 corner = block.corner();
    float mean[2] = {0.0f, 0.0f};
    if (out) {
        // Four threads of a row take every fourth group of eight columns each.
        const bool wide = (shape.dim & 7) == 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half < shape.length) {
                const i64 at = corner + (row + 8 * half) * (i64)place.hidden;
                for (int column = (lane & 3) * 8; column < shape.dim; column += 32) {
                    const int count = min(shape.dim - column, 8);
                    float a[8], b[8];
                    load8(out + at + column, count, wide, a);
                    load8(dout + at + column, count, wide, b);
#pragma unroll
                    for (int i = 0; i < 8; i++) mean[half] += a[i] * b[i];
                }
            }
            mean[half] = quad_sum(mean[half]);
        }
    } else {
        const float scale = shape.scale * LOG2_E;
        float shift[2];
        block.statistic(lse, LOG2_E, shift);
        block.for_tiles(dout, [&](int tile, Lines<D> keys, Lines<D> values) {
            float scores[N / 8][4];
            for_pairs<D, N>(block.queries, block.upper, keys, values, warp.mine, tile, row, shape.length, scale, shift, scores,
                            [&](bool seen, float p, float slope, int half, float&) {
                                mean[half] += seen ? p * slope : 0.0f;
                            });
        });
#pragma unroll
        for (int half = 0; half < 2; half++) mean[half] = quad_sum(mean[half]);
        if (GROUPS == 2) {
            const int at = warp.mine + (lane >> 2);
            if (warp.group == 1 && (lane & 3) == 0) means[at] = mean[0], means[at + 8] = mean[1];
            __syncthreads();
            if (warp.group == 0) mean[0] += means[at], mean[1] += means[at + 8];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (warp.group == 0 && (lane & 3) == 0 && row + 8 * half < shape.length)
            delta[place.statistics + row + 8 * half] = mean[half];
}

// dQ.
template <int D>
__device__ __forceinline__ void attention_queries(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, const Shape& shape) {
    constexpr int N = backward_tile<D>();
    const Queries<D, N, true> block(qkv, shape);
    const Place& place = block.place;
    const Warp& warp = block.warp;
    const int first = block.first;
    const float scale = shape.scale * LOG2_E;
    float shift[2], mean[2];
    block.statistic(lse, LOG2_E, shift);
    block.statistic(delta, 1.0f, mean);
    float sums[D / 8][4];
    clear(sums);
    block.for_tiles(dout, [&](int tile, Lines<D> keys, Lines<D> values) {
        float scores[N / 8][4];
        for_pairs<D, N>(block.queries, block.upper, keys, values, warp.mine, tile, block.row, shape.length, scale, shift,
                        scores, [&](bool seen, float p, float slope, int half, float& score) {
                            score = seen ? p * (slope - mean[half]) * shape.scale : 0.0f;
                        });
        over_rows<D, N>(sums, scores, keys);
    });
    join(sums, warp);
    if (warp.group == 0)
        store_rows<D>(
            dqkv + (place.q - qkv), place.stride, first + warp.mine, shape.length, shape.dim, sums, 1.0f, 1.0f);
}

// dK and dV: rows of the block are keys, tiles are queries, of one head that shares the keys after the other.
template <int D>
__device__ __forceinline__ void attention_keys(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, const Shape& shape, int block) {
    constexpr int N = backward_tile<D>(), STEP = GROUPS * N;
    __shared__ float shifts[2][STEP], means[2][STEP];
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> keys = take<D, ROWS>(memory), values = take<D, ROWS>(memory);
    const Pair<D, STEP> queries{take<D, 2 * STEP>(memory)}, upper{take<D, 2 * STEP>(memory)};
    const int sequence = block / shape.kv_heads, users = shape.heads / shape.kv_heads;
    const int first_head = block % shape.kv_heads * users;
    Place place(qkv, shape, sequence, first_head);
    const Warp warp;
    const int lane = warp.lane;
    const int first = (int)blockIdx.x * ROWS, row = first + warp.mine + (lane >> 2);
    auto fetch = [&](int tile, int side) {
        if (tile < shape.length) {
            fill<D, STEP>(queries[side], place.q, place.stride, tile, shape.length, shape.dim);
            fill<D, STEP>(upper[side], dout + place.rows * place.hidden + place.head * shape.dim, place.hidden, tile,
                          shape.length, shape.dim);
            if (threadIdx.x < STEP) {
                const bool there = tile + threadIdx.x < shape.length;
                const i64 at = there ? place.statistics + tile + threadIdx.x : 0;
                copy_async(&shifts[side][threadIdx.x], lse + at, there);
                copy_async(&means[side][threadIdx.x], delta + at, there);
            }
        }
        commit();
    };
    fill<D, ROWS>(keys, place.k, place.stride, first, shape.length, shape.dim);
    fill<D, ROWS>(values, place.v, place.stride, first, shape.length, shape.dim);

    const float scale = shape.scale * LOG2_E;
    float key_sums[D / 8][4], value_sums[D / 8][4];
    clear(key_sums);
    clear(value_sums);
    for (int head = first_head; head < first_head + users; head++) {
        place = Place(qkv, shape, sequence, head);
        fetch(first, 0);
        for (int step = first, side = 0; step < shape.length; step += STEP, side ^= 1) {
            fetch(step + STEP, side ^ 1);
            wait<1>();
            __syncthreads();
            const int mine = warp.group * N, tile = step + mine;
            if (tile < shape.length && tile + N > first + warp.mine) { // else no query sees a key
                const Lines<D> my_queries = queries[side].from(mine), my_upper = upper[side].from(mine);
                float scores[N / 8][4], slopes[N / 8][4];
                clear(scores);
                clear(slopes);
                over_columns<D, N>(scores, keys, warp.mine, my_queries);
                over_columns<D, N>(slopes, values, warp.mine, my_upper);
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int at = n * 8 + (lane & 3) * 2 + (i & 1), query = tile + at;
                        const bool seen = row + 8 * (i >> 1) <= query && query < shape.length;
                        const float shift = shifts[side][mine + at] * LOG2_E;
                        const float p = seen ? power_of_two(fmaf(scores[n][i], scale, -shift)) : 0.0f;
                        scores[n][i] = p;
                        slopes[n][i] = seen ? p * (slopes[n][i] - means[side][mine + at]) * shape.scale : 0.0f;
                    }
                over_rows<D, N>(value_sums, scores, my_upper);
                over_rows<D, N>(key_sums, slopes, my_queries);
            }
            __syncthreads();
        }
    }
    join(key_sums, warp);
    join(value_sums, warp);
    if (warp.group == 1) return;
    store_rows<D>(
        dqkv + (place.k - qkv), place.stride, first + warp.mine, shape.length, shape.dim, key_sums, 1.0f, 1.0f);
    store_rows<D>(
        dqkv + (place.v - qkv), place.stride, first + warp.mine, shape.length, shape.dim, value_sums, 1.0f, 1.0f);
}

// Blocks of queries, then, beyond `queries` lines of the grid, those of keys: neither waits for the other.
template <int D>
__device__ __forceinline__ void attention_gradients(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, const Shape& shape, int queries) {
    if ((int)blockIdx.y < queries) {
        attention_queries<D>(qkv, dout, lse, dqkv, delta, shape);
    } else {
        attention_keys<D>(qkv, dout, lse, dqkv, delta, shape, (int)blockIdx.y - queries);
    }
}

KERNEL(attention_forward_32, THREADS)(const u16* qkv, u16* out, float* lse, Shape shape) {
    attention_forward<32>(qkv, out, lse, shape);
}
KERNEL(attention_forward_64, THREADS)(const u16* qkv, u16* out, float* lse, Shape shape) {
    attention_forward<64>(qkv, out, lse, shape);
}
KERNEL(attention_forward_128, THREADS)(const u16* qkv, u16* out, float* lse, Shape shape) {
    attention_forward<128>(qkv, out, lse, shape);
}
KERNEL(attention_delta_32, THREADS)
(const u16* qkv, const u16* out, const u16* dout, const float* lse, float* delta, Shape shape) {
    attention_delta<32>(qkv, out, dout, lse, delta, shape);
}
KERNEL(attention_delta_64, THREADS)
(const u16* qkv, const u16* out, const u16* dout, const float* lse, float* delta, Shape shape) {
    attention_delta<64>(qkv, out, dout, lse, delta, shape);
}
KERNEL(attention_delta_128, THREADS)
(const u16* qkv, const u16* out, const u16* dout, const float* lse, float* delta, Shape shape) {
    attention_delta<128>(qkv, out, dout, lse, delta, shape);
}
KERNEL(attention_gradients_32, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape, int queries) {
    attention_gradients<32>(qkv, dout, lse, dqkv, delta, shape, queries);
}
KERNEL(attention_gradients_64, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape, int queries) {
    attention_gradients<64>(qkv, dout, lse, dqkv, delta, shape, queries);
}
KERNEL(attention_gradients_128, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape, int queries) {
    attention_gradients<128>(qkv, dout, lse, dqkv, delta, shape, queries);
}
