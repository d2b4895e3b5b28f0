#define _GNU_SOURCE
#include "launch.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "events.h"
#include "layout.h"
#include "proxy.h"
#include "schedule.h"

enum { NAP_NS = 50000 };

/* ---- kernels ---- */

struct kernel {
    struct comm *comm;
    bool once; /* played once: the player gets the arrays themselves */
    struct gpu_kernel is;
};

static void *checked(void *memory) {
    if (memory == NULL)
        abort();
    return memory;
}

struct kernel *kernel_new(struct comm *comm) {
    struct kernel *kernel = checked(calloc(1, sizeof(*kernel)));
    kernel->comm = comm;
    return kernel;
}

void kernel_fill(struct kernel *kernel, struct gpu_work *works, uint32_t n_works, struct gpu_batch *batches,
                 uint32_t n_batches, struct gpu_member *members, uint32_t n_members) {
    kernel->is.works = works;
    kernel->is.batches = batches;
    kernel->is.members = members;
    kernel->is.n_works = n_works;
    kernel->is.n_batches = n_batches;
    kernel->is.n_members = n_members;
}

static void *copy(const void *from, size_t bytes) {
    return memcpy(checked(malloc(bytes + 1)), from, bytes);
}

static void parse_kernel(void *launched, struct gpu_kernel *out) {
    struct kernel *kernel = launched;
    struct comm *comm = kernel->comm;
    *out = kernel->is;
    if (kernel->once) {
        memset(&kernel->is, 0, sizeof(kernel->is));
    } else {
        out->works = copy(out->works, out->n_works * sizeof(*out->works));
        out->batches = copy(out->batches, out->n_batches * sizeof(*out->batches));
        out->members = copy(out->members, out->n_members * sizeof(*out->members));
    }
    out->comm = gpu_comm_find(comm);
    out->abort = &comm->aborted;
    out->started = comm->started;
    out->completed = comm->completed;
    for (int c = 0; c < MAX_CHANNELS; c++)
        out->work_counter[c] = &comm->gpu_work[c];
}

static void release_kernel(void *launched) {
    struct kernel *kernel = launched;
    free(kernel->is.works);
    free(kernel->is.batches);
    free(kernel->is.members);
    free(kernel);
}

/* ---- plans ---- */

static struct plan *new_plan(struct comm *comm) {
    struct plan *plan = checked(calloc(1, sizeof(*plan)));
    plan->comm = comm;
    plan->persistent = comm->planner.persistent;
    plan->layout = layout_new();
    return plan;
}

static void free_plan(struct plan *plan) {
    for (struct coll_task *task = plan->colls.head, *next; task; task = next) {
        next = task->next;
        free(task);
    }
    for (struct p2p_task *task = plan->p2ps.head, *next; task; task = next) {
        next = task->next;
        free(task);
    }
    layout_free(plan->layout);
    free(plan->ops);
    free(plan);
}

void add_op(struct plan *plan, const struct proxy_op *op) {
    if (plan->n_ops == plan->max_ops) {
        plan->max_ops = plan->max_ops ? 2 * plan->max_ops : 32;
        plan->ops = checked(realloc(plan->ops, (size_t)plan->max_ops * sizeof(*plan->ops)));
    }
    plan->ops[plan->n_ops++] = *op;
}

/* Collectives first, so that every rank cuts its kernels at the same place. */
static nccl_result fill_plan(struct comm *comm, struct plan *plan, int *epoch, int *round) {
    const struct planner *planner = &comm->planner;
    nccl_result result = NCCL_SUCCESS;
    if (planner->n_colls > 0)
        result = schedule_colls(comm, plan);
    if (result == NCCL_SUCCESS && planner->n_colls == 0 && planner->n_bcasts > 0)
        result = schedule_bcasts(comm, plan);
    if (result == NCCL_SUCCESS && planner->n_colls == 0 && planner->n_bcasts == 0)
        result = schedule_p2ps(comm, plan, epoch, round);
    return result;
}

static nccl_result make_plans(struct comm *comm) {
    struct planner *planner = &comm->planner;
    int epoch = 0, round = 0;
    while (planner->n_colls + planner->n_bcasts + planner->n_sends + planner->n_recvs > 0) {
        struct plan *plan = new_plan(comm);
        nccl_result result = fill_plan(comm, plan, &epoch, &round);
        if (result != NCCL_SUCCESS || plan->channel_mask == 0) {
            free_plan(plan);
            if (result != NCCL_SUCCESS)
                return result;
            continue;
        }
        plan->kernel = layout_finish(plan);
        plan->kernel->once = !plan->persistent;
        layout_free(plan->layout);
        plan->layout = NULL;
        proxy_sort_ops(plan);
        *(planner->last_plan ? &planner->last_plan->next : &planner->plans) = plan;
        planner->last_plan = plan;
    }
    planner->unlaunched = planner->plans;
    return NCCL_SUCCESS;
}

/* The host's part: what the profiler is told, and the proxy's work. */
static void host_part(void *argument) {
    struct plan *plan = argument;
    events_begin_plan(plan);
    proxy_post(plan->comm, plan);
    events_end_plan(plan);
    if (!plan->persistent)
        free_plan(plan);
}

static void forget_captured(void *argument) {
    struct plan *plan = argument;
    plan->comm->graphs--;
    free_plan(plan);
}

/* A graph has the host's part of all plans before their kernels, where the proxy has work for them; else it
 * is done once, now. */
static void capture_host_parts(struct comm *comm) {
    const struct planner *planner = &comm->planner;
    for (struct plan *plan = planner->plans; plan; plan = plan->next) {
        plan->by_callback = plan->n_ops > 0;
        if (plan->by_callback)
            gpu_call(planner->streams[0], host_part, plan);
        comm->graphs++;
        gpu_graph_keep(planner->graph, forget_captured, plan);
    }
}

static void launch_plan(struct comm *comm, struct plan *plan) {
    struct gpu_stream *stream = comm->planner.streams[0];
    if (!plan->persistent)
        proxy_make_room(comm, plan);
    events_begin_launch(plan, stream);
    gpu_launch(stream, parse_kernel, release_kernel, plan->kernel);
    events_end_launch(plan);
    if (!plan->by_callback)
        host_part(plan);
}

/* A communicator's kernels run one after the other, whichever streams the user gives it; a group's other
 * streams wait for the first, and it for them. */
static void enter_streams(struct comm *comm) {
    const struct planner *planner = &comm->planner;
    struct gpu_stream *stream = planner->streams[0];
    if (planner->graph)
        return;
    if (planner->n_streams > 1) {
        struct gpu_event *event = gpu_event_create();
        for (int i = 1; i < planner->n_streams; i++) {
            gpu_event_record(event, planner->streams[i]);
            gpu_stream_wait(stream, event);
        }
        gpu_event_destroy(event);
    }
    if (comm->last_stream && comm->last_stream != stream)
        gpu_stream_wait(stream, comm->launched);
}

static void leave_streams(struct comm *comm) {
    const struct planner *planner = &comm->planner;
    if (planner->graph)
        return;
    gpu_event_record(comm->launched, planner->streams[0]);
    comm->last_stream = planner->streams[0];
    for (int i = 1; i < planner->n_streams; i++)
        gpu_stream_wait(planner->streams[i], comm->launched);
}

nccl_result launch_group(struct comm *comms) {
    for (struct comm *comm = comms; comm; comm = comm->group_next) {
        nccl_result result = make_plans(comm);
        if (result != NCCL_SUCCESS)
            return result;
        if (comm->planner.plans == NULL)
            continue;
        enter_streams(comm);
        if (comm->planner.graph)
            capture_host_parts(comm);
        while (comm->planner.unlaunched) {
            struct plan *plan = comm->planner.unlaunched;
            comm->planner.unlaunched = plan->next;
            plan->next = NULL;
            launch_plan(comm, plan);
        }
        leave_streams(comm);
    }
    return NCCL_SUCCESS;
}

void launch_drain(struct comm *comm) {
    gpu_event_sync(comm->launched);
    while (comm->graphs > 0)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}
