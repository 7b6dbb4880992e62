// Products of bf16 matrices in shared memory on tensor cores, with fp32 sums, and copies into shared memory that run beside
// them. A warp has sixteen rows of the left operand; a block has one or two groups of four warps.
#pragma once

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
