// Causal multi-head attention on packed rows [q | k | v], where heads may share keys and values in equal groups, on tensor cores (bf16 products, fp32 sums).
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
#include "common.cuh"

// Compute capabilities 9 to 11 have 227 KiB of shared memory for a block, the others 99.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int GROUPS = 2;
#else
constexpr int GROUPS = 1;
#endif
constexpr int GROUP = 128; // threads
constexpr int THREADS = GROUPS * GROUP;
constexpr int ROWS = 64; // of a block

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

// A fragment of sixteen rows and sixteen columns, and two accumulators of eight columns.
struct Fragment {
    u32 x[4];
};

__device__ __forceinline__ u32 shared_address(const u16* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ Fragment load_matrices(const u16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"(shared_address(p)));
    return f;
}

__device__ __forceinline__ Fragment load_matrices_transposed(const u16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                 : "r"(shared_address(p)));
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

    // The lines from a row on.
    __device__ __forceinline__ Lines from(int row) const { return Lines{p + row * STRIDE}; }

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

// Starts to copy 16 bytes, or to write zeros where there is nothing to copy.
__device__ __forceinline__ void copy_async(u16* to, const u16* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async(float* to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups but the newest `LEFT` have arrived.
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Starts to copy rows first .. first + COUNT - 1 of a matrix in global memory; what lies outside is zero.
template <int D, int COUNT>
__device__ __forceinline__ void fill(Lines<D> to, const u16* from, i64 stride, int first, int length, int dim) {
    const bool wide = (dim & 7) == 0;
#pragma unroll
    for (int step = 0; step < (COUNT * D / 8 + THREADS - 1) / THREADS; step++) {
        const int piece = threadIdx.x + step * THREADS, row = piece / (D / 8), column = piece % (D / 8) * 8;
        if (COUNT * D / 8 % THREADS != 0 && piece >= COUNT * D / 8) break;
        const bool there = first + row < length && column < dim;
        const u16* p = from + (there ? (first + row) * stride + column : 0);
        u16* target = to.p + row * Lines<D>::STRIDE + column;
        if (wide) {
            copy_async(target, p, there);
        } else {
            u32 w[4] = {};
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (there && column + i < dim) w[i >> 1] |= (u32)__ldg(p + i) << (16 * (i & 1));
            *reinterpret_cast<uint4*>(target) = make_uint4(w[0], w[1], w[2], w[3]);
        }
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

extern __shared__ uint4 shared_memory[];

// Two places for the same rows, one to be read while the other is filled.
template <int D, int COUNT>
struct Pair {
    Lines<D> first;

    __device__ __forceinline__ Lines<D> operator[](int side) const {
        return Lines<D>{first.p + side * (COUNT * Lines<D>::STRIDE)};
    }
};

// Memory for COUNT rows, after those that were taken before.
template <int D, int COUNT>
__device__ __forceinline__ Lines<D> take(u16*& memory) {
    const Lines<D> lines{memory};
    memory += COUNT * Lines<D>::STRIDE;
    return lines;
}

// Which rows a warp has, and which tiles its group.
struct Warp {
    int group, mine, lane;

    __device__ __forceinline__ Warp()
        : group(threadIdx.x / GROUP), mine(threadIdx.x % GROUP / 32 * 16), lane(threadIdx.x & 31) {}
};

// Adds the second group's values to the first's, through shared memory that nobody uses any more.
template <int N>
__device__ __forceinline__ void join(float (&c)[N][4], const Warp& warp) {
    if (GROUPS == 1) return;
    float* memory = reinterpret_cast<float*>(shared_memory) + threadIdx.x % GROUP;
    __syncthreads();
    if (warp.group == 1) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) memory[i * GROUP] = c[i / 4][i % 4];
    }
    __syncthreads();
    if (warp.group == 0) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) c[i / 4][i % 4] += memory[i * GROUP];
    }
}

template <int D>
__device__ __forceinline__ void attention_forward(const u16* qkv, u16* out, float* lse, const Shape& shape) {
    constexpr int N = FORWARD_TILE, STEP = GROUPS * N;
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> queries = take<D, ROWS>(memory);
    const Pair<D, STEP> keys{take<D, 2 * STEP>(memory)}, values{take<D, 2 * STEP>(memory)};
    const Place place(qkv, shape, blockIdx.y / shape.heads, blockIdx.y % shape.heads);
    const Warp warp;
    const int lane = warp.lane;
    // Blocks with many keys start first.
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS, row = first + warp.mine + (lane >> 2);
    const int end = min(first + ROWS, shape.length);
    auto fetch = [&](int tile, int side) {
        if (tile < end) {
            fill<D, STEP>(keys[side], place.k, place.stride, tile, end, shape.dim);
            fill<D, STEP>(values[side], place.v, place.stride, tile, end, shape.dim);
        }
        commit();
    };
    fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);
    fetch(0, 0);

    const float minus_infinity = -__uint_as_float(INFINITY_BITS), scale = shape.scale * LOG2_E;
    float sums[D / 8][4], largest[2] = {minus_infinity, minus_infinity}, mass[2] = {0.0f, 0.0f};
    clear(sums);
    for (int step = 0, side = 0; step < end; step += STEP, side ^= 1) {
        fetch(step + STEP, side ^ 1);
        wait<1>();
        __syncthreads();
        const int tile = step + warp.group * N;
        if (tile < first + warp.mine + 16) { // else every key comes after every query
            float scores[N / 8][4];
            clear(scores);
            over_columns<D, N>(scores, queries, warp.mine, keys[side].from(warp.group * N));
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
            over_rows<D, N>(sums, scores, values[side].from(warp.group * N));
        }
        __syncthreads();
    }
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
    store_rows<D>(out + place.rows * place.hidden + place.head * shape.dim, place.hidden, first + warp.mine,
                  shape.length, shape.dim, sums, 1.0f / mass[0], 1.0f / mass[1]);
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
    constexpr int N = backward_tile<D>(), STEP = GROUPS * N;
    __shared__ float means[ROWS];
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> queries = take<D, ROWS>(memory), upper = take<D, ROWS>(memory);
    const Pair<D, STEP> keys{take<D, 2 * STEP>(memory)}, values{take<D, 2 * STEP>(memory)};
    const Place place(qkv, shape, blockIdx.y / shape.heads, blockIdx.y % shape.heads);
    const Warp warp;
    const int lane = warp.lane;
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS, row = first + warp.mine + (lane >> 2);
    const int end = min(first + ROWS, shape.length);
    const i64 corner = place.rows * place.hidden + place.head * shape.dim; // of out and dout
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
        auto fetch = [&](int tile, int side) {
            if (tile < end) {
                fill<D, STEP>(keys[side], place.k, place.stride, tile, end, shape.dim);
                fill<D, STEP>(values[side], place.v, place.stride, tile, end, shape.dim);
            }
            commit();
        };
        fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);
        fill<D, ROWS>(upper, dout + corner, place.hidden, first, shape.length, shape.dim);
        fetch(0, 0);
        const float scale = shape.scale * LOG2_E;
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            shift[half] = row + 8 * half < shape.length ? lse[place.statistics + row + 8 * half] * LOG2_E : 0.0f;
        for (int step = 0, side = 0; step < end; step += STEP, side ^= 1) {
            fetch(step + STEP, side ^ 1);
            wait<1>();
            __syncthreads();
            const int tile = step + warp.group * N;
            if (tile < first + warp.mine + 16) { // else every key comes after every query
                float scores[N / 8][4];
                for_pairs<D, N>(queries, upper, keys[side].from(warp.group * N), values[side].from(warp.group * N),
                                warp.mine, tile, row, shape.length, scale, shift, scores,
                                [&](bool seen, float p, float slope, int half, float&) {
                                    mean[half] += seen ? p * slope : 0.0f;
                                });
            }
            __syncthreads();
        }
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
    constexpr int N = backward_tile<D>(), STEP = GROUPS * N;
    u16* memory = reinterpret_cast<u16*>(shared_memory);
    const Lines<D> queries = take<D, ROWS>(memory), upper = take<D, ROWS>(memory);
    const Pair<D, STEP> keys{take<D, 2 * STEP>(memory)}, values{take<D, 2 * STEP>(memory)};
    const Place place(qkv, shape, blockIdx.y / shape.heads, blockIdx.y % shape.heads);
    const Warp warp;
    const int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * ROWS, row = first + warp.mine + (warp.lane >> 2);
    const int end = min(first + ROWS, shape.length);
    auto fetch = [&](int tile, int side) {
        if (tile < end) {
            fill<D, STEP>(keys[side], place.k, place.stride, tile, end, shape.dim);
            fill<D, STEP>(values[side], place.v, place.stride, tile, end, shape.dim);
        }
        commit();
    };
    fill<D, ROWS>(queries, place.q, place.stride, first, shape.length, shape.dim);
    fill<D, ROWS>(
        upper, dout + place.rows * place.hidden + place.head * shape.dim, place.hidden, first, shape.length, shape.dim);
    fetch(0, 0);
    const float scale = shape.scale * LOG2_E;
    float shift[2], mean[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool there = row + 8 * half < shape.length;
        shift[half] = there ? lse[place.statistics + row + 8 * half] * LOG2_E : 0.0f;
        mean[half] = there ? delta[place.statistics + row + 8 * half] : 0.0f;
    }
    float sums[D / 8][4];
    clear(sums);
    for (int step = 0, side = 0; step < end; step += STEP, side ^= 1) {
        fetch(step + STEP, side ^ 1);
        wait<1>();
        __syncthreads();
        const int tile = step + warp.group * N;
        if (tile < first + warp.mine + 16) { // else every key comes after every query
            const Lines<D> my_keys = keys[side].from(warp.group * N);
            float scores[N / 8][4];
            for_pairs<D, N>(queries, upper, my_keys, values[side].from(warp.group * N), warp.mine, tile, row, shape.length,
                            scale, shift, scores, [&](bool seen, float p, float slope, int half, float& score) {
                                score = seen ? p * (slope - mean[half]) * shape.scale : 0.0f;
                            });
            over_rows<D, N>(sums, scores, my_keys);
        }
        __syncthreads();
    }
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
