// The kernel of rows.cu as C: each thread of each block, one after another.

typedef unsigned long u64;
typedef struct __attribute__((aligned(16))) { unsigned x, y, z, w; } uint4;
typedef struct __attribute__((aligned(8))) { unsigned x, y; } uint2;
typedef struct { unsigned x; } Index;

#define KERNEL static void
#define DEVICE static inline
static __thread Index blockIdx, threadIdx;

DEVICE float widened(unsigned short half) {
    union { unsigned short bits; _Float16 value; } from = {half};
    return (float)from.value;
}
DEVICE unsigned short narrowed(float value) {
    union { _Float16 value; unsigned short bits; } to = {(_Float16)value};
    return to.bits;
}

#include "rows.cu"

void triton_stateful_emulate_move_rows(const RowMove *moves, unsigned count, unsigned tiles) {
    for (blockIdx.x = 0; blockIdx.x < tiles; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) move_rows(moves, count);
}
