// Down the columns of a norm's gradient. Sums as column sums of casts (tile.cuh): four rows ascending, then the sixteen fours
// of a tile ascending, then tiles ascending.
#include "tile.cuh"

// All that goes down the columns: gradients of gain and bias, dgamma[j] = Σ dy[i, j] · normal[i, j] and dbeta[j] = Σ dy[i, j];
// with `sums`, the column sums of dx; with `transposed`, the codes of dx as lines, from one to the next `line` bytes.
//
// A block has 256 rows × 32 columns, a thread 4 rows × 8 columns. Where there are more rows than one block has, `partial` holds
// the sums of tiles, one kind after the other; `finished` is zero before and after.
constexpr int WIDTH = 32;
constexpr int QUADS = 64;
constexpr int TILES = QUADS / 16;
constexpr int DOWN_THREADS = QUADS * WIDTH / 8;

KERNEL(layer_norm_gradients, DOWN_THREADS)
(const u16* x, const u16* dy, const float* mean, const float* rstd, const u16* dx, const u8* codes, float* dgamma,
 float* dbeta, float* sums, u8* transposed, i64 line, float* partial, u32* finished, int rows, int columns) {
    __shared__ float quads[3][QUADS][WIDTH + 1];
    __shared__ float tiles[3][TILES][WIDTH];
    __shared__ uint4 turned[WIDTH * QUADS / 4];
    const int group = threadIdx.x % (WIDTH / 8), quad = threadIdx.x / (WIDTH / 8);
    const int first = blockIdx.x * WIDTH, column = first + group * 8, top = (blockIdx.y * QUADS + quad) * 4;
    const int count = min(max(columns - column, 0), 8);
    const bool wide = (columns & 7) == 0 && count == 8;
    // A kind that nobody wants is null.
    auto out = [&](int kind) { return kind == 0 ? dgamma : kind == 1 ? dbeta : sums; };
    float sum[3][8] = {};
    u32 bytes[4][2] = {};
    auto load = [&](bool whole) {
        uint4 g[4], n[4], d[4];
        float center[4], factor[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int there = whole || top + r < rows ? count : 0;
            const i64 at = (i64)(top + r) * columns + column;
            g[r] = load8_raw(dy + at, there, whole);
            n[r] = load8_raw(x + at, there, whole);
            if (sums) d[r] = load8_raw(dx + at, there, whole);
            if (transposed) load8_raw(codes + at, there, whole, bytes[r]);
            center[r] = mean && there ? __ldg(mean + top + r) : 0.0f;
            factor[r] = there ? __ldg(rstd + top + r) : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float upper[8], input[8];
            unpack8(g[r], upper);
            unpack8(n[r], input);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float gain = upper[i] * ((input[i] - center[r]) * factor[r]);
                sum[0][i] = r == 0 ? gain : sum[0][i] + gain;
                sum[1][i] = r == 0 ? upper[i] : sum[1][i] + upper[i];
            }
            if (!sums) continue;
            unpack8(d[r], input);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[2][i] = r == 0 ? input[i] : sum[2][i] + input[i];
        }
    };
    if (wide && top + 4 <= rows) {
        load(true);
    } else if (count > 0 && top < rows) {
        load(false);
    }
#pragma unroll
    for (int kind = 0; kind < 3; kind++)
#pragma unroll
        for (int i = 0; i < 8; i++) quads[kind][quad][group * 8 + i] = sum[kind][i];
    if (transposed) {
        // Word w of a line holds rows 4w .. 4w + 3; swizzled by eight words against bank conflicts.
        u32* words = reinterpret_cast<u32*>(turned);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 four[4] = {bytes[0][half], bytes[1][half], bytes[2][half], bytes[3][half]};
            u32 lines[4];
            transpose4(four, lines);
#pragma unroll
            for (int i = 0; i < 4; i++) words[(group * 8 + half * 4 + i) * QUADS + (quad ^ group * 8)] = lines[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * TILES * WIDTH; i += DOWN_THREADS) {
        const int kind = i / (TILES * WIDTH), tile = i / WIDTH % TILES, j = i % WIDTH;
        const float(*of)[WIDTH + 1] = quads[kind] + tile * 16;
        float total = of[0][j];
#pragma unroll
        for (int quad = 1; quad < 16; quad++) total += of[quad][j];
        tiles[kind][tile][j] = total;
        const int piece = blockIdx.y * TILES + tile;
        if (gridDim.y > 1 && out(kind) && piece * 64 < rows && first + j < columns)
            partial[((i64)kind * ((rows + 63) / 64) + piece) * columns + first + j] = total;
    }
    if (transposed) {
#pragma unroll
        for (int k = 0; k < WIDTH * QUADS / 4 / DOWN_THREADS; k++) {
            const int piece = threadIdx.x + k * DOWN_THREADS, at = piece / (QUADS / 4), part = piece % (QUADS / 4);
            const int row = blockIdx.y * QUADS * 4 + part * 16;
            if (first + at < columns && row < rows)
                store_line(transposed + (first + at) * line + row, turned[at * (QUADS / 4) + (part ^ at / 8 * 2)], rows - row,
                           (line & 15) == 0);
        }
    }
    if (gridDim.y > 1) {
        // Blocks of the same 64 columns have one counter.
        const int of = first / 64, across = min(64 / WIDTH, (int)gridDim.x - of * (64 / WIDTH)), pieces = (rows + 63) / 64;
        if (!last_of(finished + of, across * gridDim.y)) return;
        for (int kind = 0; kind < 3; kind++)
            if (out(kind)) add_rows(partial + (i64)kind * pieces * columns, out(kind), of * 64, 64, columns, pieces);
        return;
    }
    __syncthreads();
    if (threadIdx.x < 3 * WIDTH) {
        const int kind = threadIdx.x / WIDTH, j = threadIdx.x % WIDTH;
        float total = tiles[kind][0][j];
        for (int tile = 1; tile * 64 < rows; tile++) total += tiles[kind][tile][j];
        if (out(kind) && first + j < columns) out(kind)[first + j] = total;
    }
}
