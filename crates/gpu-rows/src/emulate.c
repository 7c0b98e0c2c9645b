// The kernel of rows.cu as C: each thread of each block, one after another.

typedef unsigned long u64;
typedef struct __attribute__((aligned(16))) { unsigned x, y, z, w; } uint4;
typedef struct __attribute__((aligned(8))) { unsigned x, y; } uint2;
typedef struct { unsigned x; } Index;

#define KERNEL static void
#define DEVICE static inline
static __thread Index blockIdx, threadIdx;

typedef union { float value; unsigned bits; } Float;

// Not _Float16, which compilers older than GCC 12 lack.
DEVICE float widened(unsigned short half) {
    const unsigned sign = (unsigned)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    Float wide;
    if (exponent == 0x1f) {
        wide.bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
        wide.bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        wide.value = (float)fraction / (1 << 24);
        wide.bits |= sign;
    }
    return wide.value;
}

// To the nearest, ties to even. A NaN stays one.
DEVICE unsigned short narrowed(float value) {
    const Float wide = {value};
    const unsigned sign = wide.bits >> 16 & 0x8000, magnitude = wide.bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (unsigned short)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // Below the normal numbers: what is added makes the unit of the sum that of the smallest one.
        const Float scaled = {((Float){.bits = magnitude}).value + 0.5f};
        return (unsigned short)(sign | (scaled.bits - 0x3f000000));
    }
    const unsigned rebased = magnitude - (112u << 23);
    return (unsigned short)(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
}

#include "rows.cu"

void triton_stateful_emulate_move_rows(const RowMove *moves, unsigned count, unsigned tiles) {
    for (blockIdx.x = 0; blockIdx.x < tiles; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) move_rows(moves, count);
}
