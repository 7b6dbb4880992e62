// Products of bf16 matrices in shared memory on tensor cores, with fp32 sums, and copies into shared memory that run beside
// them. Everything is in tiles of 64 rows; a block has four warps, a warp 16 rows of the left operand.
//
// Capability 9.0 has products of four warps together, which read tiles where they lie and run beside other instructions;
// elsewhere a warp loads fragments and multiplies them. Both leave an element of the result in the same register.
//
// A block runs a few thousand instructions once or four times, and waits for them longer than for data: what is here keeps
// code short.
#pragma once

#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PRODUCTS_OF_FOUR_WARPS 1
#else
#define PRODUCTS_OF_FOUR_WARPS 0
#endif

constexpr int THREADS = 128;
constexpr int ROWS = 64; // of a tile

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Sixteen rows and sixteen columns.
struct Fragment {
    u32 x[4];
};

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

// 64 rows of bf16 in shared memory, at a multiple of 1,024 bytes, in panels of 64 columns. Piece i of eight columns of row r of
// a panel lies in place i ^ (r mod 8) of the row's 128 bytes: products of four warps want it so, and eight rows of one piece
// have no bank in common.
template <int D>
struct Tile {
    static constexpr int PANEL = ROWS * 64, SIZE = ROWS * D;
    u16* p;

    // The tile behind it.
    __device__ __forceinline__ Tile next() const { return Tile{p + SIZE}; }

    // An element; those of a piece are neighbours.
    __device__ __forceinline__ u16* at(int row, int column) const {
        return p + column / 64 * PANEL + row * 64 + ((column / 8 ^ row) & 7) * 8 + column % 8;
    }

    // Rows first .. first + 15, columns k .. k + 15, as the left operand.
    __device__ __forceinline__ Fragment left(int first, int k) const {
        const int lane = threadIdx.x & 31;
        return load_matrices(at(first + (lane & 15), k + (lane >> 4) * 8));
    }

    // The same rows and columns as the right operand of a product over columns: x · thisᵀ.
    __device__ __forceinline__ Fragment right_over_columns(int first, int k) const {
        const int lane = threadIdx.x & 31;
        return load_matrices(at(first + (lane & 7) + (lane >> 4) * 8, k + ((lane >> 3) & 1) * 8));
    }

    // As the right operand of a product over rows: x · this.
    __device__ __forceinline__ Fragment right_over_rows(int first, int column) const {
        const int lane = threadIdx.x & 31;
        return load_matrices_transposed(at(first + (lane & 15), column + (lane >> 4) * 8));
    }

    // How products of four warps are told of the matrix that begins at a row, a multiple of eight, and a column, a multiple of
    // 16: address and distance of eight rows in units of 16 bytes, and the order of pieces.
    __device__ __forceinline__ u64 descriptor(int row, int column) const {
        const u32 address = (shared_address(p) >> 4) + (column / 64 * PANEL + row * 64 + column % 64) / 8;
        return (u64)(1 << 30 | 64) << 32 | address;
    }
};

extern __shared__ __align__(1024) u16 shared_memory[];

// The tiles of a block, one after the other.
template <int D>
__device__ __forceinline__ Tile<D> tile(int index) {
    return Tile<D>{shared_memory + index * Tile<D>::SIZE};
}

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
                 : "r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
                 : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of copies of every thread but its newest `LEFT` have arrived.
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#if PRODUCTS_OF_FOUR_WARPS
    // Products read by another way than copies write.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}

// Starts to copy rows first .. first + 63 of a matrix in global memory; what lies outside is zero.
template <int D>
__device__ __forceinline__ void fill(Tile<D> to, const u16* from, int stride, int first, int length, int dim) {
    constexpr int BETWEEN = THREADS / (D / 8); // rows of a thread; a multiple of eight
    const int column = threadIdx.x % (D / 8) * 8, row = threadIdx.x / (D / 8), left = length - first - row;
    u16* target = to.at(row, column);
    from += (i64)(first + row) * stride + column;
    if ((dim & 7) == 0) {
        const int rows = column < dim ? left : 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += BETWEEN, from += BETWEEN * stride) copy_async(target + i * 64, from, i < rows);
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS; i += BETWEEN, from += BETWEEN * stride)
#pragma unroll 1
            for (int j = 0; j < 8; j++) target[i * 64 + j] = i < left && column + j < dim ? from[j] : (u16)0;
    }
}

// Calls fetch(step, side) and work(step, side) for every step; what a step fetches is on its way while the one before works.
// Two sides of memory take turns.
template <class Fetch, class Work>
__device__ __forceinline__ void for_steps(int steps, const Fetch& fetch, const Work& work) {
#pragma unroll 1
    for (int step = -1; step < steps; step++) {
        if (step + 1 < steps) fetch(step + 1, (step + 1) & 1);
        commit();
        if (step < 0) continue;
        wait<1>();
        work(step, step & 1);
        __syncthreads();
    }
}

template <int N>
__device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
}

// ---- products: c[n] holds columns 8n .. 8n + 7 of a warp's rows ----

#if PRODUCTS_OF_FOUR_WARPS

// The operands of 64 columns of sums.
#define FOUR_SUMS(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define SUMS(c)                                                                                                         \
    FOUR_SUMS((c)[0]), FOUR_SUMS((c)[1]), FOUR_SUMS((c)[2]), FOUR_SUMS((c)[3]), FOUR_SUMS((c)[4]), FOUR_SUMS((c)[5]),   \
        FOUR_SUMS((c)[6]), FOUR_SUMS((c)[7])
#define PRODUCT                                                                                                         \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "                                                             \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"

// The compiler moves no use of the sums over this.
template <int N>
__device__ __forceinline__ void pin(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : FOUR_SUMS(c[n])::"memory");
}

// Products that follow see what was written to registers.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#endif

// Waits for all products but the newest `LEFT`; c is the result of one that was waited for.
template <int LEFT, int N>
__device__ __forceinline__ void finish(float (&c)[N][4]) {
#if PRODUCTS_OF_FOUR_WARPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    pin(c);
#endif
}

__device__ __forceinline__ void multiply(float (&c)[4], const Fragment& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// Starts c = left · rightᵀ over D columns; `mine` is the warp's first row.
template <int D>
__device__ __forceinline__ void over_columns(float (&c)[8][4], Tile<D> left, int mine, Tile<D> right) {
#if PRODUCTS_OF_FOUR_WARPS
    begin_products();
#pragma unroll
    for (int k = 0; k < D; k += 16)
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n" PRODUCT ", %32, %33, add, 1, 1, 0, 0;\n}"
                     : SUMS(c)
                     : "l"(left.descriptor(0, k)), "l"(right.descriptor(0, k)), "r"(k));
    commit_products();
#else
    clear(c);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        const Fragment a = left.left(mine, k);
#pragma unroll
        for (int n = 0; n < ROWS; n += 16) {
            const Fragment b = right.right_over_columns(n, k);
            multiply(c[n / 8], a, b.x[0], b.x[1]);
            multiply(c[n / 8 + 1], a, b.x[2], b.x[3]);
        }
    }
#endif
}

// A warp's 16 rows of 64 columns, rounded, as left operand.
struct Rounded {
    Fragment a[4];

    __device__ __forceinline__ Rounded(const float (&p)[8][4]) {
#pragma unroll
        for (int i = 0; i < 16; i++) a[i / 4].x[i % 4] = to_bf16x2(p[i / 2][i % 2 * 2], p[i / 2][i % 2 * 2 + 1]);
    }
};

// Starts c += p · right over 64 rows.
template <int D>
__device__ __forceinline__ void over_rows(float (&c)[D / 8][4], const Rounded& p, Tile<D> right) {
#if PRODUCTS_OF_FOUR_WARPS
    pin(c);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < D; n += 64)
            asm volatile(PRODUCT ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                         : SUMS(c + n / 8)
                         : "r"(p.a[k].x[0]), "r"(p.a[k].x[1]), "r"(p.a[k].x[2]), "r"(p.a[k].x[3]),
                           "l"(right.descriptor(16 * k, n)));
    commit_products();
#else
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            const Fragment b = right.right_over_rows(16 * k, n);
            multiply(c[n / 8], p.a[k], b.x[0], b.x[1]);
            multiply(c[n / 8 + 1], p.a[k], b.x[2], b.x[3]);
        }
#endif
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

// Stores a warp's 16 rows, rounded, by way of its rows `mine` of a tile that nobody uses any more: 16 bytes go at once.
template <int D>
__device__ __forceinline__ void store_rows(Tile<D> through, int mine, u16* to, int stride, int first, int length, int dim,
                                           const float (&c)[D / 8][4], float low, float high) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = half ? high : low;
            *reinterpret_cast<u32*>(through.at(mine + (lane >> 2) + 8 * half, n * 8 + (lane & 3) * 2)) =
                to_bf16x2(c[n][2 * half] * factor, c[n][2 * half + 1] * factor);
        }
    __syncwarp();
    constexpr int BETWEEN = 32 / (D / 8); // rows of a thread
    const int column = lane % (D / 8) * 8, end = min(16, length - first - mine);
    int row = lane / (D / 8);
    to += (i64)(first + mine + row) * stride + column;
#pragma unroll 1
    for (; row < end; row += BETWEEN, to += BETWEEN * stride) {
        const u16* from = through.at(mine + row, column);
        if ((dim & 7) == 0) {
            if (column < dim) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
            for (int i = 0; i < min(8, dim - column); i++) to[i] = from[i];
        }
    }
}
