// Moves rows of states between device memory: from slots into batch buffers, back, and between batch buffers.
//
// One launch does any number of moves, each a row of a tensor [outer, rows, inner]: `outer` pieces of `units` units, at
// strides of their own on both sides. The host cuts a move into tiles of TILE units; a block does one tile, and finds the
// move that it belongs to by the moves' first tiles. What a unit is, the kind says: 16 to 1 bytes where both sides are
// aligned for it, or an element where its type changes.
//
// The table is made in moves.rs, which has the same layout and the same numbers. To compile: scripts/kernels. The same
// source is compiled as C for the simulated device, with the few names that CUDA has built in defined by emulate.c.

#ifdef __CUDACC__
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define DEVICE static __device__ __forceinline__
DEVICE float widened(unsigned short half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
DEVICE unsigned short narrowed(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
#endif

enum { THREADS = 256, UNITS_A_THREAD = 4, TILE = THREADS * UNITS_A_THREAD };

enum Kind { COPY_16, COPY_8, COPY_4, COPY_2, COPY_1, ZERO_16, ZERO_8, ZERO_4, ZERO_2, ZERO_1, WIDEN, NARROW, ROUND };

typedef struct {
    u64 from;         // address of the row's first piece; not read where it is filled with zeros
    u64 to;           // address of the row's first piece
    u64 from_stride;  // bytes from one piece to the next
    u64 to_stride;
    unsigned units;  // of a piece
    unsigned outer;  // number of pieces
    unsigned kind;
    unsigned first_tile;  // tiles of the moves before this one
} RowMove;

// Bytes from the row's first piece to a unit of `bytes` bytes.
DEVICE u64 place(const RowMove *move, unsigned unit, u64 stride, unsigned bytes) {
    if (move->outer == 1) return (u64)unit * bytes;
    return (u64)(unit / move->units) * stride + (u64)(unit % move->units) * bytes;
}

// Loads go before stores, so that a thread has all of its own on the way at once.
#define COPY(TYPE)                                                                                             \
    {                                                                                                          \
        TYPE values[UNITS_A_THREAD];                                                                           \
        EACH_UNIT values[i] = *(const TYPE *)(move.from + place(&move, unit, move.from_stride, sizeof(TYPE)));  \
        EACH_UNIT *(TYPE *)(move.to + place(&move, unit, move.to_stride, sizeof(TYPE))) = values[i];            \
    }
#define ZERO(TYPE)                                                                                             \
    {                                                                                                          \
        const TYPE zero = {0};                                                                                 \
        EACH_UNIT *(TYPE *)(move.to + place(&move, unit, move.to_stride, sizeof(TYPE))) = zero;                 \
    }
#define CONVERT(FROM, TO, CONVERTED)                                                                           \
    {                                                                                                          \
        EACH_UNIT {                                                                                            \
            const FROM value = *(const FROM *)(move.from + place(&move, unit, move.from_stride, sizeof(FROM))); \
            *(TO *)(move.to + place(&move, unit, move.to_stride, sizeof(TO))) = CONVERTED;                     \
        }                                                                                                      \
    }
#define EACH_UNIT                                                                                              \
    for (unsigned i = 0, unit = first; i < UNITS_A_THREAD; i++, unit += THREADS)                               \
        if (unit < total)

KERNEL move_rows(const RowMove *moves, unsigned count) {
    // The last move that begins at this tile or before it.
    unsigned low = 0, high = count - 1;
    while (low < high) {
        const unsigned middle = (low + high + 1) / 2;
        if (moves[middle].first_tile <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const RowMove move = moves[low];
    const unsigned total = move.units * move.outer;
    const unsigned first = (blockIdx.x - move.first_tile) * TILE + threadIdx.x;
    switch (move.kind) {
        case COPY_16: COPY(uint4) break;
        case COPY_8: COPY(uint2) break;
        case COPY_4: COPY(unsigned) break;
        case COPY_2: COPY(unsigned short) break;
        case COPY_1: COPY(unsigned char) break;
        case ZERO_16: ZERO(uint4) break;
        case ZERO_8: ZERO(uint2) break;
        case ZERO_4: ZERO(unsigned) break;
        case ZERO_2: ZERO(unsigned short) break;
        case ZERO_1: ZERO(unsigned char) break;
        case WIDEN: CONVERT(unsigned short, float, widened(value)) break;
        case NARROW: CONVERT(float, unsigned short, narrowed(value)) break;
        case ROUND: CONVERT(float, float, widened(narrowed(value))) break;
    }
}
