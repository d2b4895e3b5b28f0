/* The profiler's activation mask is one word for a whole NCCL, and NCCL reads it with every call. Each
 * communicator wants events or does not; they are on while any does. */
#include "govern.h"

#include "table.h"

#define SWITCHES 4 /* copies of NCCL in a process; of more than these, everything is profiled */

static struct event_switch switches[SWITCHES];

/* Several threads may be here. The last to write looks again after its write, so what is left is right. */
static void settle(struct event_switch *events) {
    int *mask = load(&events->mask, relaxed);
    bool wanted = load(&events->wanting, seq_cst) > 0, before;
    do {
        before = wanted;
        dcc_interleave();
        if (wanted)
            __atomic_fetch_or(mask, load(&events->bits, relaxed), __ATOMIC_SEQ_CST);
        else
            __atomic_fetch_and(mask, ~load(&events->bits, relaxed), __ATOMIC_SEQ_CST);
        dcc_interleave();
        wanted = load(&events->wanting, seq_cst) > 0;
    } while (wanted != before);
}

static void want(struct comm *comm, bool wants) {
    struct event_switch *events = comm->events;
    if (wants == comm->wants_events)
        return;
    comm->wants_events = wants;
    uint32_t others =
        wants ? atomic_fetch_add(&events->wanting, 1) : atomic_fetch_sub(&events->wanting, 1) - 1;
    if (others)
        return;
    if (wants) /* before the mask: whoever is profiled from now on knows of the pause */
        atomic_fetch_add(&events->turns, 1);
    settle(events);
}

void govern_begin(struct comm *comm, int *mask, int bits) {
    store(&comm->profiling, true, relaxed);
    comm->joining = comm->profiling_next = true;
    /* Before 2.26 the mask is read for a kernel and kept in one word for all threads: it stays on. */
    for (unsigned i = 0; comm->children != CHILDREN_PROXY && i < SWITCHES && !comm->events; i++) {
        int *of = NULL;
        if (atomic_compare_exchange_strong(&switches[i].mask, &of, mask) || of == mask)
            comm->events = &switches[i];
    }
    if (!comm->events) {
        __atomic_fetch_or(mask, bits, __ATOMIC_RELAXED);
        return;
    }
    atomic_fetch_or(&comm->events->bits, bits);
    want(comm, true);
    store(&comm->turns, load(&comm->events->turns, relaxed), relaxed);
}

void govern_end(struct comm *comm) {
    if (comm->events)
        want(comm, false);
    comm->events = NULL;
}

/* SplitMix64 (Steele, Lea, Flood 2014), the same on all ranks. Windows of a longer duty are among those of a
 * shorter one, so that ranks which hear of a change at different calls still profile the same. Drawn, and not
 * every n-th, so that no part of a step is passed over for ever. */
static bool is_profiled(uint64_t window, uint64_t duty) {
    if (duty > DCC_MOST_DUTY)
        duty = DCC_MOST_DUTY;
    return (dcc_mix(window * 0x9e3779b97f4a7c15ull) & ((1u << duty) - 1)) == 0;
}

void govern_edge(struct comm *comm, uint64_t d) {
    store(&comm->seg->plugin.profile_ns, load(&comm->profile_ns, relaxed), relaxed);
    if (!comm->events)
        return;
    switch (d % DCC_WINDOW_CALLS) {
    case 0:
        store(&comm->profiling, comm->profiling_next, relaxed);
        want(comm, comm->profiling_next);
        break;
    case GOVERN_GUARD: /* a group that began in the window before has been called by now */
        comm->joining = load(&comm->profiling, relaxed);
        break;
    case DCC_WINDOW_CALLS - GOVERN_GUARD:
        comm->profiling_next = is_profiled(d / DCC_WINDOW_CALLS + 1, load(&comm->seg->runner.duty, relaxed));
        if (comm->profiling_next) {
            comm->joining = true;
            want(comm, true);
        }
        break;
    default:
        break;
    }
}
