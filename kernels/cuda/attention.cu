// Causal multi-head attention on packed rows [q | k | v], on tensor cores (bf16 products, fp32 sums).
//
// A block of four warps has 64 rows of one sequence and head, a warp 16 of them; it goes through the other side in tiles,
// ascending, so every sum has one order. Forward: online softmax; probabilities are rounded to bf16 for the second product,
// their sum is not. Backward: dQ has a pass of its own, which goes through the keys twice: first for δ = Σ P · dP of each
// row, then for dS = P · (dP - δ) · scale; then dK and dV, a block per 64 keys. Nothing is added by two blocks.
//
// Head dimensions are padded with zeros to 32, 64 or 128 in shared memory. Rows beyond the sequence are zero and are not
// stored. `lse` and `delta` are [sequences, heads, length].
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int ROWS = 64; // of a block

struct Shape {
    int length, heads, dim;
    float scale; // 1 / √dim
};

// Rows of other side that are worked on at once.
template <int D>
constexpr int tile_of() {
    return D > 64 ? 32 : 64;
}

// A fragment of sixteen rows and sixteen columns, and two accumulators of eight columns.
struct Fragment {
    u32 x[4];
};

__device__ __forceinline__ u32 shared_address(const u16* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ Fragment load_matrices(const u16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"(shared_address(p))
                 : "memory");
    return f;
}

__device__ __forceinline__ Fragment load_matrices_transposed(const u16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"(shared_address(p))
                 : "memory");
    return f;
}

__device__ __forceinline__ void multiply(float (&c)[4], const Fragment& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// A matrix of bf16 in shared memory; lines are padded by 16 bytes against bank conflicts.
template <int D>
struct Lines {
    static constexpr int STRIDE = D + 8;
    u16* p;

    // Rows first .. first + 15, columns k .. k + 15, as the left operand.
    __device__ __forceinline__ Fragment left(int first, int k) const {
        const int lane = threadIdx.x & 31;
        return load_matrices(p + (first + (lane & 15)) * STRIDE + k + (lane >> 4) * 8);
    }

    // The same rows and columns as the right operand of a product over columns: x · thisᵀ.
    __device__ __forceinline__ Fragment right_over_columns(int first, int k) const {
        const int lane = threadIdx.x & 31;
        return load_matrices(p + (first + (lane & 7) + (lane >> 4) * 8) * STRIDE + k + ((lane >> 3) & 1) * 8);
    }

    // As the right operand of a product over rows: x · this.
    __device__ __forceinline__ Fragment right_over_rows(int first, int column) const {
        const int lane = threadIdx.x & 31;
        return load_matrices_transposed(p + (first + (lane & 15)) * STRIDE + column + (lane >> 4) * 8);
    }
};

// Copies rows first .. first + COUNT - 1 of a matrix in global memory; what lies outside is zero.
template <int D, int COUNT>
__device__ __forceinline__ void fill(Lines<D> to, const u16* from, i64 stride, int first, int length, int dim) {
    const bool wide = (dim & 7) == 0;
#pragma unroll
    for (int piece = threadIdx.x; piece < COUNT * D / 8; piece += THREADS) {
        const int row = piece / (D / 8), column = piece % (D / 8) * 8;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (first + row < length) {
            const u16* p = from + (first + row) * stride + column;
            if (wide) {
                if (column < dim) words = __ldg(reinterpret_cast<const uint4*>(p));
            } else {
                u32 w[4] = {};
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (column + i < dim) w[i >> 1] |= (u32)__ldg(p + i) << (16 * (i & 1));
                words = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
        *reinterpret_cast<uint4*>(to.p + row * Lines<D>::STRIDE + column) = words;
    }
}

// c += left[16 rows] · right[N rows]ᵀ over D columns.
template <int D, int N>
__device__ __forceinline__ void over_columns(float (&c)[N / 8][4], Lines<D> left, int first, Lines<D> right) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        const Fragment a = left.left(first, k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            const Fragment b = right.right_over_columns(n, k);
            multiply(c[n / 8], a, b.x[0], b.x[1]);
            multiply(c[n / 8 + 1], a, b.x[2], b.x[3]);
        }
    }
}

// c += p[16 rows, N] · right[N rows, D], with p rounded to bf16.
template <int D, int N>
__device__ __forceinline__ void over_rows(float (&c)[D / 8][4], const float (&p)[N / 8][4], Lines<D> right) {
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        Fragment a;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            a.x[2 * half] = to_bf16x2(p[k / 8 + half][0], p[k / 8 + half][1]);
            a.x[2 * half + 1] = to_bf16x2(p[k / 8 + half][2], p[k / 8 + half][3]);
        }
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            const Fragment b = right.right_over_rows(k, n);
            multiply(c[n / 8], a, b.x[0], b.x[1]);
            multiply(c[n / 8 + 1], a, b.x[2], b.x[3]);
        }
    }
}

template <int N>
__device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
}

// Sum, and largest, over the four threads that share a row.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(EVERY_LANE, x, 1);
    return x + __shfl_xor_sync(EVERY_LANE, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 1));
    return fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 2));
}

// Stores a warp's 16 rows × D, rounded.
template <int D>
__device__ __forceinline__ void store_rows(
    u16* to, i64 stride, int first, int length, int dim, const float (&c)[D / 8][4], float low, float high) {
    const int lane = threadIdx.x & 31, row = first + (lane >> 2);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const int column = n * 8 + (lane & 3) * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = half ? high : low;
            const u32 pair = to_bf16x2(c[n][2 * half] * factor, c[n][2 * half + 1] * factor);
            if (row + 8 * half >= length) continue;
            u16* p = to + (row + 8 * half) * stride + column;
            if ((dim & 1) == 0) {
                if (column < dim) *reinterpret_cast<u32*>(p) = pair;
            } else {
                if (column < dim) p[0] = (u16)pair;
                if (column + 1 < dim) p[1] = (u16)(pair >> 16);
            }
        }
    }
}

// Where a block's sequence and head lie.
struct Place {
    i64 stride;       // of a row of qkv
    const u16* q;     // row 0 of this sequence and head; k and v follow at `hidden` and 2 · `hidden`
    int hidden;
    i64 rows;         // first row of the sequence
    int head;
    i64 statistics;   // first entry of lse and delta

    __device__ __forceinline__ Place(const u16* qkv, const Shape& shape) {
        const int sequence = blockIdx.y / shape.heads;
        head = blockIdx.y % shape.heads;
        hidden = shape.heads * shape.dim;
        stride = 3 * (i64)hidden;
        rows = (i64)sequence * shape.length;
        q = qkv + rows * stride + head * shape.dim;
        statistics = (i64)blockIdx.y * shape.length;
    }
};

extern __shared__ uint4 shared_memory[];

template <int D>
__device__ __forceinline__ void attention_forward(const u16* qkv, u16* out, float* lse, const Shape& shape) {
    constexpr int N = tile_of<D>();
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> queries{memory}, keys{memory + ROWS * Lines<D>::STRIDE},
        values{memory + (ROWS + N) * Lines<D>::STRIDE};
    const Place place(qkv, shape);
    // Blocks with many keys start first.
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS, mine = threadIdx.x / 32 * 16;
    const int lane = threadIdx.x & 31, row = first + mine + (lane >> 2);
    fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);

    const float minus_infinity = -__uint_as_float(INFINITY_BITS);
    float sums[D / 8][4], largest[2] = {minus_infinity, minus_infinity}, mass[2] = {0.0f, 0.0f};
    clear(sums);
    const int end = min(first + ROWS, shape.length);
    for (int tile = 0; tile < end; tile += N) {
        __syncthreads();
        fill<D, N>(keys, place.q + place.hidden, place.stride, tile, shape.length, shape.dim);
        fill<D, N>(values, place.q + 2 * place.hidden, place.stride, tile, shape.length, shape.dim);
        __syncthreads();
        float scores[N / 8][4];
        clear(scores);
        over_columns<D, N>(scores, queries, mine, keys);
        float top[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = tile + n * 8 + (lane & 3) * 2 + (i & 1);
                scores[n][i] = key <= row + 8 * (i >> 1) ? scores[n][i] * shape.scale : minus_infinity;
                top[i >> 1] = fmaxf(top[i >> 1], scores[n][i]);
            }
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[half] = quad_max(top[half]);
            shrink[half] = exponential(largest[half] - top[half]);
            largest[half] = top[half];
            mass[half] *= shrink[half];
        }
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = exponential(scores[n][i] - top[i >> 1]);
                mass[i >> 1] += scores[n][i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i >> 1];
        over_rows<D, N>(sums, scores, values);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mass[half] = quad_sum(mass[half]);
        if ((lane & 3) == 0 && row + 8 * half < shape.length)
            lse[place.statistics + row + 8 * half] = largest[half] + (float)log((double)mass[half]);
    }
    store_rows<D>(out + place.rows * place.hidden + place.head * shape.dim, place.hidden, first + mine, shape.length,
                  shape.dim, sums, 1.0f / mass[0], 1.0f / mass[1]);
}

// δ and dQ.
template <int D>
__device__ __forceinline__ void attention_queries(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, float* delta, const Shape& shape) {
    constexpr int N = tile_of<D>();
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> queries{memory}, upper{memory + ROWS * Lines<D>::STRIDE},
        keys{memory + 2 * ROWS * Lines<D>::STRIDE}, values{memory + (2 * ROWS + N) * Lines<D>::STRIDE};
    const Place place(qkv, shape);
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS, mine = threadIdx.x / 32 * 16;
    const int lane = threadIdx.x & 31, row = first + mine + (lane >> 2);
    fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);
    fill<D, ROWS>(upper, dout + place.rows * place.hidden + place.head * shape.dim, place.hidden, first, shape.length,
                  shape.dim);
    float shift[2], mean[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; half++)
        shift[half] = row + 8 * half < shape.length ? lse[place.statistics + row + 8 * half] : 0.0f;

    float sums[D / 8][4];
    clear(sums);
    const int end = min(first + ROWS, shape.length);
    for (int sweep = 0; sweep < 2; sweep++) {
        for (int tile = 0; tile < end; tile += N) {
            __syncthreads();
            fill<D, N>(keys, place.q + place.hidden, place.stride, tile, shape.length, shape.dim);
            fill<D, N>(values, place.q + 2 * place.hidden, place.stride, tile, shape.length, shape.dim);
            __syncthreads();
            float scores[N / 8][4], slopes[N / 8][4];
            clear(scores);
            clear(slopes);
            over_columns<D, N>(scores, queries, mine, keys);
            over_columns<D, N>(slopes, upper, mine, values);
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = tile + n * 8 + (lane & 3) * 2 + (i & 1), half = i >> 1;
                    const bool seen = key <= row + 8 * half && row + 8 * half < shape.length;
                    const float p = seen ? exponential(scores[n][i] * shape.scale - shift[half]) : 0.0f;
                    if (sweep == 0) {
                        mean[half] += seen ? p * slopes[n][i] : 0.0f;
                    } else {
                        scores[n][i] = seen ? p * (slopes[n][i] - mean[half]) * shape.scale : 0.0f;
                    }
                }
            if (sweep == 1) over_rows<D, N>(sums, scores, keys);
        }
        if (sweep == 1) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            mean[half] = quad_sum(mean[half]);
            if ((lane & 3) == 0 && row + 8 * half < shape.length)
                delta[place.statistics + row + 8 * half] = mean[half];
        }
    }
    store_rows<D>(dqkv + (place.q - qkv), place.stride, first + mine, shape.length, shape.dim, sums, 1.0f, 1.0f);
}

// dK and dV: rows of the block are keys, tiles are queries.
template <int D>
__device__ __forceinline__ void attention_keys(
    const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, const Shape& shape) {
    constexpr int N = tile_of<D>();
    __shared__ float shifts[N], means[N];
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> keys{memory}, values{memory + ROWS * Lines<D>::STRIDE},
        queries{memory + 2 * ROWS * Lines<D>::STRIDE}, upper{memory + (2 * ROWS + N) * Lines<D>::STRIDE};
    const Place place(qkv, shape);
    const int first = (int)blockIdx.x * ROWS, mine = threadIdx.x / 32 * 16;
    const int lane = threadIdx.x & 31, row = first + mine + (lane >> 2);
    fill<D, ROWS>(keys, place.q + place.hidden, place.stride, first, shape.length, shape.dim);
    fill<D, ROWS>(values, place.q + 2 * place.hidden, place.stride, first, shape.length, shape.dim);

    float key_sums[D / 8][4], value_sums[D / 8][4];
    clear(key_sums);
    clear(value_sums);
    for (int tile = first; tile < shape.length; tile += N) {
        __syncthreads();
        fill<D, N>(queries, place.q, place.stride, tile, shape.length, shape.dim);
        fill<D, N>(upper, dout + place.rows * place.hidden + place.head * shape.dim, place.hidden, tile, shape.length,
                   shape.dim);
        if (threadIdx.x < N) {
            const bool inside = tile + threadIdx.x < shape.length;
            shifts[threadIdx.x] = inside ? lse[place.statistics + tile + threadIdx.x] : 0.0f;
            means[threadIdx.x] = inside ? delta[place.statistics + tile + threadIdx.x] : 0.0f;
        }
        __syncthreads();
        float scores[N / 8][4], slopes[N / 8][4];
        clear(scores);
        clear(slopes);
        over_columns<D, N>(scores, keys, mine, queries);
        over_columns<D, N>(slopes, values, mine, upper);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = n * 8 + (lane & 3) * 2 + (i & 1), query = tile + at;
                const bool seen = row + 8 * (i >> 1) <= query && query < shape.length;
                const float p = seen ? exponential(scores[n][i] * shape.scale - shifts[at]) : 0.0f;
                scores[n][i] = p;
                slopes[n][i] = seen ? p * (slopes[n][i] - means[at]) * shape.scale : 0.0f;
            }
        over_rows<D, N>(value_sums, scores, upper);
        over_rows<D, N>(key_sums, slopes, queries);
    }
    u16* to = dqkv + (place.q - qkv);
    store_rows<D>(to + place.hidden, place.stride, first + mine, shape.length, shape.dim, key_sums, 1.0f, 1.0f);
    store_rows<D>(to + 2 * place.hidden, place.stride, first + mine, shape.length, shape.dim, value_sums, 1.0f, 1.0f);
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
KERNEL(attention_queries_32, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, float* delta, Shape shape) {
    attention_queries<32>(qkv, dout, lse, dqkv, delta, shape);
}
KERNEL(attention_queries_64, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, float* delta, Shape shape) {
    attention_queries<64>(qkv, dout, lse, dqkv, delta, shape);
}
KERNEL(attention_queries_128, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, float* delta, Shape shape) {
    attention_queries<128>(qkv, dout, lse, dqkv, delta, shape);
}
KERNEL(attention_keys_32, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape) {
    attention_keys<32>(qkv, dout, lse, dqkv, delta, shape);
}
KERNEL(attention_keys_64, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape) {
    attention_keys<64>(qkv, dout, lse, dqkv, delta, shape);
}
KERNEL(attention_keys_128, THREADS)
(const u16* qkv, const u16* dout, const float* lse, u16* dqkv, const float* delta, Shape shape) {
    attention_keys<128>(qkv, dout, lse, dqkv, delta, shape);
}
