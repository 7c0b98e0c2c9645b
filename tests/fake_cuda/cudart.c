// As much of CUDA's runtime as ONNX Runtime's CUDA provider needs to think that there is a GPU, in host memory.
//
// Copies are made at once; kernels are not run. So models of copies alone (Identity) give their values, and what the
// provider does with tensors, streams and options can be seen without a GPU: how much it copies between the host and the
// device is asked of fake_cuda_copied(). The functions that are not here do nothing and succeed; build.py makes them.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };

static size_t copied[5], captures, launches;

// What a stream that is captured is asked for, to be done again by cudaGraphLaunch().
typedef struct { void *to; const void *from; size_t bytes; int kind; } Copy;
typedef struct { Copy copies[256]; size_t count; } Graph;
static __thread Graph *captured;

// Bytes that were copied in a direction: cudaMemcpyKind.
size_t fake_cuda_copied(int kind) { return copied[kind]; }
size_t fake_cuda_captures(void) { return captures; }
size_t fake_cuda_graph_launches(void) { return launches; }

int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute; (void)device; *value = 1; return SUCCESS; }
const char *cudaGetErrorName(int error) { (void)error; return "fake"; }
const char *cudaGetErrorString(int error) { (void)error; return "fake"; }

// The fields of cudaDeviceProp that the provider reads, by their offsets in CUDA 12 and 13.
int cudaGetDeviceProperties(char *properties, int device) {
    (void)device;
    memset(properties, 0, 400);
    strcpy(properties, "fake");
    *(size_t *)(properties + 288) = (size_t)1 << 33;  // totalGlobalMem
    *(size_t *)(properties + 296) = 48 << 10;         // sharedMemPerBlock
    *(int *)(properties + 308) = 32;                  // warpSize
    *(int *)(properties + 320) = 1024;                // maxThreadsPerBlock
    *(int *)(properties + 360) = 9;                   // major
    *(int *)(properties + 384) = 16;                  // multiProcessorCount, in CUDA 13
    *(int *)(properties + 388) = 16;                  // multiProcessorCount, in CUDA 12
    return SUCCESS;
}

int cudaMalloc(void **memory, size_t bytes) { *memory = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256); return SUCCESS; }
int cudaMallocHost(void **memory, size_t bytes) { return cudaMalloc(memory, bytes); }
int cudaHostAlloc(void **memory, size_t bytes, unsigned flags) { (void)flags; return cudaMalloc(memory, bytes); }
int cudaFree(void *memory) { free(memory); return SUCCESS; }
int cudaFreeHost(void *memory) { free(memory); return SUCCESS; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)1 << 33; return SUCCESS; }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    if (captured) {
        if (captured->count == sizeof captured->copies / sizeof *captured->copies) abort();
        captured->copies[captured->count++] = (Copy){to, from, bytes, kind};
        return SUCCESS;
    }
    memmove(to, from, bytes);
    __atomic_fetch_add(&copied[kind], bytes, __ATOMIC_RELAXED);
    return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) { (void)stream; memset(to, value, bytes); return SUCCESS; }
int cudaMemset(void *to, int value, size_t bytes) { memset(to, value, bytes); return SUCCESS; }

static char object;
int cudaStreamCreate(void **stream) { *stream = &object; return SUCCESS; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { (void)flags; *stream = &object; return SUCCESS; }
int cudaEventCreate(void **event) { *event = &object; return SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { (void)flags; *event = &object; return SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
int cudaStreamBeginCapture(void *stream, int mode) {
    (void)stream; (void)mode;
    captured = calloc(1, sizeof *captured);
    return SUCCESS;
}
int cudaStreamEndCapture(void *stream, void **graph) {
    (void)stream;
    *graph = captured;
    captured = NULL;
    captures++;
    return SUCCESS;
}
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    *executable = graph;
    return SUCCESS;
}
int cudaGraphLaunch(void *executable, void *stream) {
    const Graph *graph = executable;
    for (size_t i = 0; i < graph->count; i++) {
        const Copy *copy = &graph->copies[i];
        cudaMemcpyAsync(copy->to, copy->from, copy->bytes, copy->kind, stream);
    }
    launches++;
    return SUCCESS;
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
