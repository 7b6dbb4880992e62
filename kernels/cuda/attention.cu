// Causal multi-head attention on packed rows [q | k | v], where heads may share keys and values in equal groups, on tensor
// cores (bf16 products, fp32 sums).
//
// A block has a tile of 64 rows of one sequence and head and goes through the tiles of the other side, ascending, so that every
// sum has one order; nothing is added by two blocks. Forward: online softmax; probabilities are rounded to bf16 for the second
// product, their sum is not. Backward: δ first, Σ P · dP of a row; then, with dS = P · (dP - δ), dQ by blocks of queries and
// beside it dK and dV by blocks of keys.
//
// What comes after a query has no part in its row, unless it is infinite or NaN and lies in the same tile: 0 · ∞ is NaN.
//
// Exponentials are the hardware's powers of two, which are within two units in the last place.
//
// Head dimensions are padded with zeros to 64 or 128 in shared memory. Rows beyond the sequence are zero there and are not
// stored: as keys, no query sees them; as queries, they add nothing, for so are their gradients. `lse` and `delta` are
// [sequences, heads, length].
#include "tensor.cuh"

struct Shape {
    int length, heads, kv_heads, users, dim; // users: heads that share keys and values
    float scale;                             // 1 / √dim
};

// Where a sequence and head lie. Heads share keys and values in equal groups of neighbours.
struct Place {
    int stride, hidden;   // elements of a row of qkv, and of the output
    const u16 *q, *k, *v; // row 0 of this sequence and head
    i64 corner;           // row 0 of this sequence and head in a matrix like the output
    i64 statistics;       // first entry of lse and delta

    __device__ __forceinline__ Place(const u16* qkv, const Shape& shape, int sequence, int head, int kv_head) {
        hidden = shape.heads * shape.dim;
        stride = hidden + 2 * shape.kv_heads * shape.dim;
        const i64 row = (i64)sequence * shape.length;
        q = qkv + row * stride + head * shape.dim;
        k = qkv + row * stride + hidden + kv_head * shape.dim;
        v = k + shape.kv_heads * shape.dim;
        corner = row * hidden + head * shape.dim;
        statistics = (i64)(sequence * shape.heads + head) * shape.length;
    }

    // Of the n-th sequence and head.
    static __device__ __forceinline__ Place of_head(const u16* qkv, const Shape& shape, u32 n) {
        const u32 head = n % (u32)shape.heads;
        return Place(qkv, shape, n / (u32)shape.heads, head, head / (u32)shape.users);
    }

    // Of the n-th sequence and head of keys, and the first head that uses it.
    static __device__ __forceinline__ Place of_keys(const u16* qkv, const Shape& shape, u32 n) {
        const u32 head = n % (u32)shape.kv_heads;
        return Place(qkv, shape, n / (u32)shape.kv_heads, head * shape.users, head);
    }
};

// A thread's lane, and the first row of its warp in a tile.
struct Warp {
    int lane, mine;

    __device__ __forceinline__ Warp() : lane(threadIdx.x & 31), mine(threadIdx.x / 32 * 16) {}
};

// Scores of keys that come after their query, in the tile on the diagonal, become -∞.
__device__ __forceinline__ void mask(float (&scores)[8][4], const Warp& warp, bool rows_are_keys) {
    const int sign = rows_are_keys ? -1 : 1, behind = sign * ((warp.lane & 3) * 2 - warp.mine - (warp.lane >> 2));
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (behind + sign * (n * 8 + (i & 1) - 8 * (i >> 1)) > 0) scores[n][i] = -__uint_as_float(INFINITY_BITS);
}

// A block of 64 queries of one head, and how it goes through the keys up to its last query. With UPPER, the gradients of the
// output lie beside the queries.
template <int D, bool UPPER>
struct Queries {
    Place place;
    Warp warp;
    int first, row; // of the block, of this thread
    const Shape& shape;

    __device__ __forceinline__ Queries(const u16* qkv, const Shape& shape)
        : place(Place::of_head(qkv, shape, blockIdx.y)), shape(shape) {
        // Blocks with many keys start first.
        first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS;
        row = first + warp.mine + (warp.lane >> 2);
    }

    // Calls f(whether they are the last, keys, values) of the tiles.
    template <class F>
    __device__ __forceinline__ void for_tiles(const u16* dout, const F& f) const {
        fill(tile<D>(0), place.q, place.stride, first, shape.length, shape.dim);
        if (UPPER) fill(tile<D>(1), dout + place.corner, place.hidden, first, shape.length, shape.dim);
        auto keys = [](int side) { return tile<D>((UPPER ? 2 : 1) + side * 2); };
        for_steps(
            first / ROWS + 1,
            [&](int step, int side) {
                fill(keys(side), place.k, place.stride, step * ROWS, shape.length, shape.dim);
                fill(keys(side).next(), place.v, place.stride, step * ROWS, shape.length, shape.dim);
            },
            [&](int step, int side) { f(step * ROWS == first, keys(side), keys(side).next()); });
    }
};

template <int D>
__device__ __forceinline__ void attention_forward(const u16* qkv, u16* out, float* lse, const Shape& shape) {
    const Queries<D, false> block(qkv, shape);
    const Place& place = block.place;
    const Warp& warp = block.warp;
    const int row = block.row;
    const float minus_infinity = -__uint_as_float(INFINITY_BITS), scale = shape.scale * LOG2_E;
    float sums[D / 8][4], largest[2] = {minus_infinity, minus_infinity}, mass[2] = {0.0f, 0.0f};
    clear(sums);
    block.for_tiles(nullptr, [&](bool diagonal, Tile<D> keys, Tile<D> values) {
        float scores[8][4];
        over_columns(scores, tile<D>(0), warp.mine, keys);
        finish<0>(scores);
        if (diagonal) mask(scores, warp, false);
        float top[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < 8; n++)
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
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = power_of_two(fmaf(scores[n][i], scale, -shift[i >> 1]));
                mass[i >> 1] += scores[n][i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i >> 1];
        const Rounded p(scores);
        over_rows<D>(sums, p, values);
        finish<0>(sums);
    });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mass[half] = quad_sum(mass[half]);
        if ((warp.lane & 3) == 0 && row + 8 * half < shape.length)
            lse[place.statistics + row + 8 * half] = largest[half] * shape.scale + logf(mass[half]);
    }
    store_rows(tile<D>(1), warp.mine, out + place.corner, place.hidden, block.first, shape.length, shape.dim, sums,
               1.0f / mass[0], 1.0f / mass[1]);
}

// δ.
template <int D>
__device__ __forceinline__ void attention_delta(
    const u16* qkv, const u16* dout, const float* lse, float* delta, const Shape& shape) {
    const Queries<D, true> block(qkv, shape);
    const Place& place = block.place;
    const Warp& warp = block.warp;
    const int row = block.row;
    float mean[2] = {0.0f, 0.0f};
    const float scale = shape.scale * LOG2_E;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        shift[half] = row + 8 * half < shape.length ? lse[place.statistics + row + 8 * half] * LOG2_E : 0.0f;
    block.for_tiles(dout, [&](bool diagonal, Tile<D> keys, Tile<D> values) {
        float p[8][4], slopes[8][4];
        over_columns(p, tile<D>(0), warp.mine, keys);
        over_columns(slopes, tile<D>(1), warp.mine, values);
        finish<1>(p);
        if (diagonal) mask(p, warp, false);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[n][i] = power_of_two(fmaf(p[n][i], scale, -shift[i >> 1]));
        finish<0>(slopes);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) mean[i >> 1] = fmaf(p[n][i], slopes[n][i], mean[i >> 1]);
    });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mean[half] = quad_sum(mean[half]);
        if ((warp.lane & 3) == 0 && row + 8 * half < shape.length) delta[place.statistics + row + 8 * half] = mean[half];
    }
}

// dQ of 64 queries or, beyond `queries` lines of the grid, dK and dV of 64 keys; neither waits for the other, and both are the
// same work. The block has a tile of each of its own side's matrices A and a, [q, dout] or [k, v], and goes through those of the
// other side, B and b: S = A · Bᵀ, dP = a · bᵀ, and the gradient of A is the sum of dS · B. That of v is the sum of P · b.
template <int D>
__device__ __forceinline__ void attention_gradients(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, const Shape& shape, int queries) {
    const bool of_keys = (int)blockIdx.y >= queries;
    const Place place = of_keys ? Place::of_keys(qkv, shape, blockIdx.y - queries) : Place::of_head(qkv, shape, blockIdx.y);
    const Warp warp;
    // Blocks with much to do start first.
    const int first = (of_keys ? (int)blockIdx.x : (int)gridDim.x - 1 - (int)blockIdx.x) * ROWS;
    // The other side: queries from the first key on, of every head that uses it; keys up to the last query.
    const int from = of_keys ? first : 0, to = of_keys ? shape.length : first + 1;
    const int steps = (to - from + ROWS - 1) / ROWS * (of_keys ? shape.users : 1);

    struct Side {
        const u16 *a, *b;
        int stride_a, stride_b;
    };
    const Side upper{place.q, dout + place.corner, place.stride, place.hidden};
    const Side lower{place.k, place.v, place.stride, place.stride};
    const Side own = of_keys ? lower : upper;
    Side other = of_keys ? upper : lower;
    fill(tile<D>(0), own.a, own.stride_a, first, shape.length, shape.dim);
    fill(tile<D>(1), own.b, own.stride_b, first, shape.length, shape.dim);

    // lse and δ of the queries, for each side of memory, as a thread needs them for its four elements of eight columns: of two
    // columns, which depend on the lane, or of two rows, which depend on the warp too.
    float4* statistics = reinterpret_cast<float4*>(shared_memory + 6 * Tile<D>::SIZE);
    const int thread = threadIdx.x;
    const int query = of_keys ? (thread >> 2) * 2 + (thread & 1)
                              : first + (thread >> 5) * 16 + (thread >> 2 & 7) + (thread & 2) * 4;
    const int mine = of_keys ? thread & 3 : thread >> 2, between = of_keys ? 4 : 0;
    lse += place.statistics;
    delta += place.statistics;

    const float scale = shape.scale * LOG2_E;
    float sums[D / 8][4], value_sums[D / 8][4];
    clear(sums);
    clear(value_sums);
    int fetched = from, worked = from; // rows of the other side
    for_steps(
        steps,
        [&](int step, int side) {
            const Tile<D> tiles = tile<D>(2 + side * 2);
            fill(tiles, other.a, other.stride_a, fetched, shape.length, shape.dim);
            fill(tiles.next(), other.b, other.stride_b, fetched, shape.length, shape.dim);
            const int row = query + (of_keys ? fetched : 0);
            float* target = reinterpret_cast<float*>(statistics + side * 64) + thread;
            copy_async(target, lse + row, row < shape.length);
            copy_async(target + THREADS, delta + row, row < shape.length);
            fetched += ROWS;
            if (fetched >= to) { // on to the next head that shares the keys
                fetched = from;
                other.a += shape.dim;
                other.b += shape.dim;
                lse += shape.length;
                delta += shape.length;
            }
        },
        [&](int step, int side) {
            const Tile<D> a = tile<D>(2 + side * 2), b = a.next();
            const float4 *shifts = statistics + side * 64 + mine, *means = shifts + THREADS / 4;
            float p[8][4], slopes[8][4];
            over_columns(p, tile<D>(0), warp.mine, a);
            over_columns(slopes, tile<D>(1), warp.mine, b);
            finish<1>(p);
            if (worked == first) mask(p, warp, of_keys);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 four = shifts[n * between];
                const float shift[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; i++) p[n][i] = power_of_two(fmaf(p[n][i], scale, -shift[i] * LOG2_E));
            }
            finish<0>(slopes);
            if (of_keys) over_rows<D>(value_sums, Rounded(p), b);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float4 four = means[n * between];
                const float mean[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; i++) slopes[n][i] = p[n][i] * (slopes[n][i] - mean[i]);
            }
            over_rows<D>(sums, Rounded(slopes), a);
            finish<0>(sums);
            finish<0>(value_sums);
            worked = worked + ROWS < to ? worked + ROWS : from;
        });
    store_rows(tile<D>(2), warp.mine, dqkv + (own.a - qkv), place.stride, first, shape.length, shape.dim, sums, shape.scale,
               shape.scale);
    if (of_keys)
        store_rows(tile<D>(3), warp.mine, dqkv + (own.b - qkv), place.stride, first, shape.length, shape.dim, value_sums,
                   1.0f, 1.0f);
}

KERNEL(attention_forward_64, THREADS)(const u16* qkv, u16* out, float* lse, Shape shape) {
    attention_forward<64>(qkv, out, lse, shape);
}
KERNEL(attention_forward_128, THREADS)(const u16* qkv, u16* out, float* lse, Shape shape) {
    attention_forward<128>(qkv, out, lse, shape);
}
KERNEL(attention_delta_64, THREADS)(const u16* qkv, const u16* dout, const float* lse, float* delta, Shape shape) {
    attention_delta<64>(qkv, dout, lse, delta, shape);
}
KERNEL(attention_delta_128, THREADS)(const u16* qkv, const u16* dout, const float* lse, float* delta, Shape shape) {
    attention_delta<128>(qkv, dout, lse, delta, shape);
}
KERNEL(attention_gradients_64, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape, int queries) {
    attention_gradients<64>(qkv, dout, lse, dqkv, delta, shape, queries);
}
KERNEL(attention_gradients_128, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape, int queries) {
    attention_gradients<128>(qkv, dout, lse, dqkv, delta, shape, queries);
}
