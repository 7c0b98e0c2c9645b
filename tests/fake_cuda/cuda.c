// As much of CUDA's driver as this backend asks of it, in host memory. What is enqueued happens at once, and the one
// kernel is run as C. Freed memory is filled with a pattern.

#include <stdlib.h>
#include <string.h>

#include "../../src/memory/device/emulate.c"

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, GPUS = 2 };

static size_t used, limit = (size_t)1 << 32;
static __thread int current = -1;

// Bytes of device memory in use, and how many there are.
size_t fake_cuda_used(void) { return __atomic_load_n(&used, __ATOMIC_SEQ_CST); }
void fake_cuda_limit(size_t bytes) { limit = bytes; }

int cuDeviceGetCount(int *count) { *count = GPUS; return SUCCESS; }
int cuDeviceGet(int *device, int number) { *device = number; return SUCCESS; }
int cuDeviceGetName(char *name, int room, int device) { (void)device; strncpy(name, "fake", room); return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute; (void)device; *value = 1; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(device + 1); return SUCCESS; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return SUCCESS; }
int cuMemPoolCreate(void **pool, const void *properties) { (void)properties; *pool = (void *)1; return SUCCESS; }
int cuModuleLoadData(void **module, const char *image) { *module = (void *)1; return strstr(image, "move_rows") ? SUCCESS : 200; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = (void *)1;
    return strcmp(name, "move_rows") == 0 ? SUCCESS : 500;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return flags == 1 ? SUCCESS : 1; }
int cuStreamDestroy_v2(void *stream) { free(stream); return SUCCESS; }

int cuMemAllocFromPoolAsync(u64 *memory, size_t bytes, void *pool, void *stream) {
    (void)pool; (void)stream;
    if (current < 0) return 201;
    if (__atomic_add_fetch(&used, bytes, __ATOMIC_SEQ_CST) > limit) {
        __atomic_sub_fetch(&used, bytes, __ATOMIC_SEQ_CST);
        return OUT_OF_MEMORY;
    }
    size_t *head = aligned_alloc(256, (bytes + 511) / 256 * 256);
    *head = bytes;
    memset((char *)head + 256, 0xab, bytes);
    *memory = (u64)head + 256;
    return SUCCESS;
}
int cuMemFreeAsync(u64 memory, void *stream) {
    (void)stream;
    if (current < 0) return 201;
    size_t *head = (size_t *)(memory - 256);
    memset((void *)memory, 0xdd, *head);
    __atomic_sub_fetch(&used, *head, __ATOMIC_SEQ_CST);
    free(head);
    return SUCCESS;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { *memory = malloc(bytes); return flags == 1 ? SUCCESS : 1; }
int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = limit - used; *total = limit; return SUCCESS; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, from, bytes);
    return current < 0 ? 201 : SUCCESS;
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, void *stream) {
    (void)stream;
    memcpy(to, (void *)from, bytes);
    return current < 0 ? 201 : SUCCESS;
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, (void *)from, bytes);
    return SUCCESS;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **parameters, void **extra) {
    (void)function; (void)shared; (void)stream; (void)extra;
    if (current < 0 || x == 0 || y * z * threads_y * threads_z != 1 || threads != THREADS) return 1;
    triton_stateful_emulate_move_rows(*(const RowMove **)parameters[0], *(unsigned *)parameters[1], x);
    return SUCCESS;
}
int cuGetErrorName(int error, const char **name) { *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "an error"; return SUCCESS; }
