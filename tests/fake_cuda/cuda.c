// As much of CUDA's driver as this backend asks of it, in host memory.
//
// What is enqueued on a stream happens in its order, and not before somebody waits for the stream: what is enqueued on
// another stream than it should be comes too late, and gives wrong values. The one kernel is run as C. New and freed memory is
// filled with patterns. The runtime's stand-in (cudart.c) enqueues here, too.

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../crates/gpu-rows/src/emulate.c"
#include "streams.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700,
       CAPTURE_INVALIDATED = 901 };

static size_t used[GPUS], limit = (size_t)1 << 32;
static _Thread_local int current = -1;

// Bytes of a device's memory in use when all that is enqueued has happened, and how many each has.
size_t fake_cuda_used(int device) {
    fake_cuda_wait_for_all();
    return __atomic_load_n(&used[device], __ATOMIC_SEQ_CST);
}
void fake_cuda_limit(size_t bytes) { limit = bytes; }

// Set by a move to an address of the first page. From then on, as with the driver, nothing can be had of any device.
static int broken = SUCCESS;

static int is_in_first_page(const RowMove *moves, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        if (moves[i].to < 4096) return 1;
    return 0;
}

// Streams. The one of number 0 is every device's default stream, on which things happen at once.

typedef struct { Work *work; size_t count, room; int device; int is_open; Graph *captured; } Stream;

enum { STREAMS = 4096 };
static Stream streams[STREAMS];
static size_t opened = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Stream *stream_of(void *handle) {
    size_t number = (size_t)handle;
    return number < opened && (number == 0 || streams[number].is_open) ? &streams[number] : NULL;
}

typedef struct { size_t bytes; int device; } Head;
enum { HEAD = 256 };

int fake_cuda_allocate(void **memory, size_t bytes) {
    int device = fake_cuda_current();
    if (__atomic_add_fetch(&used[device], bytes, __ATOMIC_SEQ_CST) > limit) {
        __atomic_sub_fetch(&used[device], bytes, __ATOMIC_SEQ_CST);
        return OUT_OF_MEMORY;
    }
    char *block = aligned_alloc(HEAD, HEAD + (bytes + HEAD - 1) / HEAD * HEAD);
    *(Head *)block = (Head){bytes, device};
    *memory = block + HEAD;
    memset(*memory, 0xab, bytes);
    return SUCCESS;
}

static void free_now(void *memory) {
    Head *head = (Head *)((char *)memory - HEAD);
    memset(memory, 0xdd, head->bytes);
    __atomic_sub_fetch(&used[head->device], head->bytes, __ATOMIC_SEQ_CST);
    free(head);
}

void fake_cuda_free(void *memory) {
    fake_cuda_wait_for_all();
    if (memory != NULL) free_now(memory);
}

static void do_work(const Work *work) {
    switch (work->kind) {
    case COPY: memmove(work->to, work->from, work->bytes); break;
    case FILL: memset(work->to, work->value, work->bytes); break;
    case MOVE_ROWS:
        if (is_in_first_page(work->from, work->value)) broken = ILLEGAL_ADDRESS;
        if (broken == SUCCESS) triton_stateful_emulate_move_rows(work->from, work->value, work->bytes);
        break;
    case FREE: free_now(work->to); break;
    case CALL: work->call(work->to); break;
    case REPLAY:
        for (size_t i = 0; i < work->graph->count; i++) do_work(&work->graph->work[i]);
        break;
    }
}

static void work_off(Stream *stream) {
    for (size_t i = 0; i < stream->count; i++) do_work(&stream->work[i]);
    stream->count = 0;
}

int fake_cuda_enqueue(void *handle, Work work) {
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL) {
        result = INVALID_HANDLE;
    } else if (handle == NULL) {
        do_work(&work);
    } else if (stream->captured != NULL) {
        Graph *graph = stream->captured;
        if (graph->is_invalid) result = CAPTURE_INVALIDATED;
        else if (graph->count == sizeof graph->work / sizeof *graph->work) abort();
        else graph->work[graph->count++] = work;
    } else {
        if (stream->count == stream->room) {
            stream->room = 2 * stream->room + 64;
            stream->work = realloc(stream->work, stream->room * sizeof *stream->work);
        }
        stream->work[stream->count++] = work;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int fake_cuda_wait(void *handle) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream != NULL) work_off(stream);
    pthread_mutex_unlock(&lock);
    return stream != NULL ? broken : INVALID_HANDLE;
}

void fake_cuda_wait_for_all(void) {
    pthread_mutex_lock(&lock);
    for (size_t number = 1; number < opened; number++) work_off(&streams[number]);
    pthread_mutex_unlock(&lock);
}

void *fake_cuda_open_stream(void) {
    pthread_mutex_lock(&lock);
    if (opened == STREAMS) abort();
    size_t number = opened++;
    streams[number] = (Stream){.device = current, .is_open = 1};
    pthread_mutex_unlock(&lock);
    return (void *)number;
}

int fake_cuda_close_stream(void *handle) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int is_there = handle != NULL && stream != NULL;
    if (is_there) {
        work_off(stream);
        free(stream->work);
        *stream = (Stream){0};
    }
    pthread_mutex_unlock(&lock);
    return is_there ? SUCCESS : INVALID_HANDLE;
}

int fake_cuda_capture(void *handle, Graph *graph) {
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    int is_there = handle != NULL && stream != NULL;
    if (is_there) stream->captured = graph;
    pthread_mutex_unlock(&lock);
    return is_there ? SUCCESS : INVALID_HANDLE;
}

Graph *fake_cuda_captured(void *handle) {
    Stream *stream = stream_of(handle);
    return stream != NULL ? stream->captured : NULL;
}

int fake_cuda_end_capture(void *handle, void **graph) {
    Graph *captured = fake_cuda_captured(handle);
    if (captured == NULL) return INVALID_VALUE;
    int is_invalid = captured->is_invalid;
    if (is_invalid) free(captured);
    *graph = is_invalid ? NULL : captured;
    fake_cuda_capture(handle, NULL);
    return is_invalid ? CAPTURE_INVALIDATED : SUCCESS;
}

int fake_cuda_current(void) { return current < 0 ? 0 : current; }
void fake_cuda_set_current(int device) { current = device; }

// As the driver does, refuses what is enqueued on a stream of another device than the thread's.
static int enqueue(void *handle, Work work) {
    Stream *stream = stream_of(handle);
    if (current < 0) return INVALID_CONTEXT;
    if (stream != NULL && handle != NULL && stream->device != current) return INVALID_HANDLE;
    return fake_cuda_enqueue(handle, work);
}

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = GPUS; return SUCCESS; }
int cuDeviceGet(int *device, int number) { *device = number; return SUCCESS; }
int cuDeviceGetName(char *name, int room, int device) { (void)device; strncpy(name, "fake", room); return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute; (void)device;
    // The one that is asked for is whether there are pools.
    *value = getenv("FAKE_CUDA_WITHOUT_POOLS") == NULL;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(device + 1); return SUCCESS; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return SUCCESS; }
int cuMemPoolCreate(void **pool, const void *properties) { (void)properties; *pool = (void *)1; return SUCCESS; }

static size_t modules;
// Kernels that are loaded.
size_t fake_cuda_modules(void) { return modules; }
int cuModuleLoadData(void **module, const char *image) {
    *module = (void *)1;
    if (strstr(image, "move_rows") == NULL) return 200;
    __atomic_add_fetch(&modules, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
int cuModuleUnload(void *module) { (void)module; __atomic_sub_fetch(&modules, 1, __ATOMIC_SEQ_CST); return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = (void *)1;
    return strcmp(name, "move_rows") == 0 ? SUCCESS : 500;
}

int cuStreamCreate(void **stream, unsigned flags) {
    if (current < 0) return INVALID_CONTEXT;
    if (broken != SUCCESS) return broken;
    *stream = fake_cuda_open_stream();
    return flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuStreamDestroy_v2(void *stream) { return fake_cuda_close_stream(stream); }
int cuStreamIsCapturing(void *stream, int *status) {
    Graph *captured = fake_cuda_captured(stream);
    *status = captured == NULL ? 0 : captured->is_invalid ? 2 : 1;
    return SUCCESS;
}
int cuStreamEndCapture(void *stream, void **graph) { return fake_cuda_end_capture(stream, graph); }
int cuGraphDestroy(void *graph) { free(graph); return SUCCESS; }
static size_t waits, host_allocations;
// Waits for streams, and allocations of pinned memory.
size_t fake_cuda_driver_waits(void) { return waits; }
size_t fake_cuda_host_allocations(void) { return host_allocations; }
int cuStreamSynchronize(void *stream) {
    __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
    return fake_cuda_wait(stream);
}

int cuMemAlloc_v2(u64 *memory, size_t bytes) {
    if (broken != SUCCESS) return broken;
    return current < 0 ? INVALID_CONTEXT : fake_cuda_allocate((void **)memory, bytes);
}
int cuMemFree_v2(u64 memory) {
    if (current < 0) return INVALID_CONTEXT;
    fake_cuda_free((void *)memory);
    return SUCCESS;
}
int cuMemAllocFromPoolAsync(u64 *memory, size_t bytes, void *pool, void *stream) {
    (void)pool;
    Stream *of = stream_of(stream);
    if (of == NULL || of->device != current) return INVALID_HANDLE;
    return cuMemAlloc_v2(memory, bytes);
}
int cuMemFreeAsync(u64 memory, void *stream) { return enqueue(stream, (Work){.kind = FREE, .to = (void *)memory}); }

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    __atomic_add_fetch(&host_allocations, 1, __ATOMIC_RELAXED);
    *memory = malloc(bytes);
    return flags == 1 ? SUCCESS : INVALID_VALUE;
}
int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = limit;
    *available = limit - fake_cuda_used(fake_cuda_current());
    return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    return enqueue(stream, (Work){.kind = COPY, .to = (void *)to, .from = from, .bytes = bytes});
}
// Refuses memory that begins with this: an address that the driver doesn't know.
enum { REFUSED = 0xdeadbeefu };
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, void *stream) {
    if (bytes >= sizeof(unsigned) && *(unsigned *)from == REFUSED) return INVALID_VALUE;
    return enqueue(stream, (Work){.kind = COPY, .to = to, .from = (void *)from, .bytes = bytes});
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *stream) {
    return enqueue(stream, (Work){.kind = COPY, .to = (void *)to, .from = (void *)from, .bytes = bytes});
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **parameters, void **extra) {
    (void)function; (void)shared; (void)extra;
    if (x == 0 || y * z * threads_y * threads_z != 1 || threads != THREADS) return INVALID_VALUE;
    const void *moves = *(const void **)parameters[0];
    return enqueue(stream, (Work){.kind = MOVE_ROWS, .from = moves, .value = *(unsigned *)parameters[1], .bytes = x});
}
int cuGetErrorName(int error, const char **name) { *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "an error"; return SUCCESS; }
