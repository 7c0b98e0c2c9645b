// As much of CUDA's runtime as ONNX Runtime's CUDA provider needs to think that there is a GPU, in host memory.
//
// Copies are enqueued on the driver's streams (cuda.c); kernels are not run. So models of copies alone (Identity) give
// their values, and what the provider does with tensors, streams and options can be seen without a GPU: how much it copies
// between the host and the device is asked of fake_cuda_copied(). The functions that are not here do nothing and succeed;
// build.py makes them.

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "streams.h"

enum { SUCCESS = 0, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };

static size_t copied[5], captures, launches, pinned, failing;

// Bytes that were copied in a direction: cudaMemcpyKind.
size_t fake_cuda_copied(int kind) { return copied[kind]; }
// Bytes of pinned host memory that were ever allocated.
size_t fake_cuda_pinned(void) { return pinned; }
// So many captures from now on are invalid from their beginning.
void fake_cuda_fail_captures(size_t count) { failing = count; }
size_t fake_cuda_captures(void) { return captures; }
size_t fake_cuda_graph_launches(void) { return launches; }

int cudaGetDeviceCount(int *count) { *count = GPUS; return SUCCESS; }
int cudaGetDevice(int *device) { *device = fake_cuda_current(); return SUCCESS; }
int cudaSetDevice(int device) { fake_cuda_set_current(device); return SUCCESS; }
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

int cudaMalloc(void **memory, size_t bytes) { return fake_cuda_allocate(memory, bytes); }
int cudaFree(void *memory) { fake_cuda_free(memory); return SUCCESS; }
int cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    __atomic_fetch_add(&pinned, bytes, __ATOMIC_RELAXED);
    *memory = malloc(bytes);
    return *memory == NULL;
}
int cudaMallocHost(void **memory, size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
int cudaFreeHost(void *memory) { free(memory); return SUCCESS; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)1 << 33; return SUCCESS; }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    __atomic_fetch_add(&copied[kind], bytes, __ATOMIC_RELAXED);
    return fake_cuda_enqueue(stream, (Work){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    return fake_cuda_enqueue(stream, (Work){.kind = FILL, .to = to, .value = value, .bytes = bytes});
}
int cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

int cudaStreamCreateWithFlags(void **stream, unsigned flags) { (void)flags; *stream = fake_cuda_open_stream(); return SUCCESS; }
int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaStreamDestroy(void *stream) { return fake_cuda_close_stream(stream); }
int cudaStreamSynchronize(void *stream) { return fake_cuda_wait(stream); }
int cudaDeviceSynchronize(void) { fake_cuda_wait_for_all(); return SUCCESS; }

int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
    return fake_cuda_enqueue(stream, (Work){.kind = CALL, .call = call, .to = data});
}

static char event;
int cudaEventCreateWithFlags(void **made, unsigned flags) { (void)flags; *made = &event; return SUCCESS; }
int cudaEventCreate(void **made) { return cudaEventCreateWithFlags(made, 0); }

int cudaStreamIsCapturing(void *stream, int *status) {
    Graph *captured = fake_cuda_captured(stream);
    *status = captured == NULL ? 0 : captured->is_invalid ? 2 : 1;
    return SUCCESS;
}
int cudaStreamBeginCapture(void *stream, int mode) {
    (void)mode;
    Graph *graph = calloc(1, sizeof *graph);
    if (failing > 0) { failing--; graph->is_invalid = 1; }
    return fake_cuda_capture(stream, graph);
}
int cudaStreamEndCapture(void *stream, void **graph) {
    captures++;
    return fake_cuda_end_capture(stream, graph);
}
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    *executable = graph;
    return SUCCESS;
}
int cudaGraphLaunch(void *executable, void *stream) {
    launches++;
    return fake_cuda_enqueue(stream, (Work){.kind = REPLAY, .graph = executable});
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
