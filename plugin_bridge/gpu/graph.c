/* Graphs: what capturing streams are given instead of playing it. */
#include <pthread.h>
#include <stdlib.h>

#include "queue.h"

void gpu_leave_capture(struct gpu_stream *stream) {
    struct gpu_stream **p = stream->capture ? &stream->capture->joined : NULL;
    while (p && *p && *p != stream)
        p = &(*p)->capture_next;
    if (p && *p)
        *p = stream->capture_next;
    stream->capture = NULL;
}

void gpu_capture_begin(struct gpu_stream *stream) {
    struct gpu_graph *graph = calloc(1, sizeof(*graph));
    if (graph == NULL)
        abort();
    graph->refs = 1;
    pthread_mutex_lock(&gpu_lock);
    stream->capture = graph;
    stream->capture_next = NULL;
    graph->joined = stream;
    pthread_mutex_unlock(&gpu_lock);
}

struct gpu_graph *gpu_capture_end(struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    struct gpu_graph *graph = stream->capture;
    for (struct gpu_stream *s = graph ? graph->joined : NULL, *next; s; s = next) {
        next = s->capture_next;
        s->capture = NULL;
        s->capture_next = NULL;
    }
    if (graph)
        graph->joined = NULL;
    pthread_mutex_unlock(&gpu_lock);
    return graph;
}

struct gpu_graph *gpu_capturing(struct gpu_stream *stream) {
    return stream->capture;
}

void gpu_graph_keep(struct gpu_graph *graph, gpu_host_fn fn, void *argument) {
    struct gpu_op *op = calloc(1, sizeof(*op));
    if (op == NULL)
        abort();
    op->fn = fn;
    op->argument = argument;
    pthread_mutex_lock(&gpu_lock);
    op->next = graph->kept;
    graph->kept = op;
    pthread_mutex_unlock(&gpu_lock);
}

void gpu_graph_launch(struct gpu_graph *graph, struct gpu_stream *stream) {
    pthread_mutex_lock(&gpu_lock);
    for (const struct gpu_op *captured = graph->head; captured; captured = captured->next) {
        struct gpu_op *op = gpu_new_op(captured->kind, stream->device);
        op->parse = captured->parse;
        op->fn = captured->fn;
        op->argument = captured->argument;
        op->ns = captured->ns;
        /* What was launched belongs to the graph, which waits for its plays. */
        op->graph = graph;
        graph->refs++;
        gpu_push(stream, op);
    }
    pthread_mutex_unlock(&gpu_lock);
}

static void release_graph(struct gpu_graph *graph) {
    for (struct gpu_op *op = graph->head, *next; op; op = next) {
        next = op->next;
        if (op->release)
            op->release(op->argument);
        free(op);
    }
    for (struct gpu_op *op = graph->kept, *next; op; op = next) {
        next = op->next;
        op->fn(op->argument);
        free(op);
    }
    free(graph);
}

void gpu_graph_destroy(struct gpu_graph *graph) {
    pthread_mutex_lock(&gpu_lock);
    bool last = --graph->refs == 0;
    pthread_mutex_unlock(&gpu_lock);
    if (last)
        release_graph(graph);
}
