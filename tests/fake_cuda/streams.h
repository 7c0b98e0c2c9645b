// Streams and memory of the stand-in, which its driver (cuda.c) keeps for its runtime (cudart.c), too.

#pragma once

#include <stddef.h>

enum { GPUS = 2 };

typedef struct Graph Graph;

// COPY, FILL (with `value`), MOVE_ROWS (a table of `value` moves and `bytes` tiles), FREE, REPLAY, CALL (`call` with `to`).
typedef struct {
    enum { COPY, FILL, MOVE_ROWS, FREE, REPLAY, CALL } kind;
    void *to;
    const void *from;
    size_t bytes;
    unsigned value;
    const Graph *graph;
    void (*call)(void *);
} Work;

// What is enqueued after something that CUDA forbids during a capture makes the graph invalid.
struct Graph { Work work[256]; size_t count; int is_invalid; };

// Handles are numbers; NULL is the default stream.
int fake_cuda_enqueue(void *stream, Work work);
int fake_cuda_wait(void *stream);
void fake_cuda_wait_for_all(void);
void *fake_cuda_open_stream(void);
int fake_cuda_close_stream(void *stream);

// What is enqueued from now on goes into the graph; NULL ends that.
int fake_cuda_capture(void *stream, Graph *graph);
Graph *fake_cuda_captured(void *stream);
// Ends the capture. Fails, without a graph, if that is invalid.
int fake_cuda_end_capture(void *stream, void **graph);

// Memory of the calling thread's device.
int fake_cuda_allocate(void **memory, size_t bytes);
void fake_cuda_free(void *memory);

// The calling thread's device.
int fake_cuda_current(void);
void fake_cuda_set_current(int device);
