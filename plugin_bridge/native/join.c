/* NCCL decides once per aggregate of operations, all of a group before it launches any, and launches them in
 * an order of its own; some decisions are never launched (ncclGroupSimulateEnd), some long after (graphs). */
#include "join.h"
#include "short.h"

#define DECISIONS_KEPT (COMM_DECISIONS / 2) /* a group decides all of its operations first */
#define DECISIONS_LIKELY 32

/* Groups are numbered modulo 2^24. */
static bool is_older(uint32_t a, uint32_t b) {
    return (int32_t)((a - b) << 8) < 0;
}

/* What NCCL used can be what was decided. */
static bool as_asked(const struct dcc_record *decision, const struct coll_event *event) {
    return !(decision->flags & DCC_RECORD_APPLIED) || decision->asked_algo == 255 ||
           (decision->asked_algo == event->algo && decision->asked_proto == event->proto);
}

/* The operations of one aggregate come one after the other, and aggregates of one kind in the order in which
 * they were decided: so the aggregate that has begun, then the oldest decision of exactly this size, then the
 * oldest that is larger. */
static int claim_in_group(const struct comm *comm, const struct coll_event *event, uint64_t bytes,
                          uint64_t from, uint64_t to, uint32_t group) {
    int best = -1, best_fit = 0;
    for (uint64_t i = from; i < to; i++) {
        int at = (int)(i % COMM_DECISIONS);
        const struct dcc_record *decision = &comm->decisions[at];
        uint64_t left = comm->claims[at].bytes_left;
        if (left < bytes || left == 0 || decision->plan != group || decision->func != event->func ||
            !as_asked(decision, event))
            continue;
        int fit = left != decision->bytes ? 3 : left == bytes ? 2 : 1;
        if (fit > best_fit) {
            best_fit = fit;
            best = at;
        }
    }
    return best;
}

/* Where the profiler does not tell groups apart: the newest decision that fits best, the whole message rather
 * than a part of an aggregate. */
static int claim_newest(const struct comm *comm, const struct coll_event *event, uint64_t bytes,
                        uint64_t from, uint64_t to) {
    int best = -1, best_fit = -1;
    for (uint64_t i = to; i-- > from && best_fit < 3;) {
        int at = (int)(i % COMM_DECISIONS);
        const struct dcc_record *decision = &comm->decisions[at];
        uint64_t left = comm->claims[at].bytes_left;
        if (left < bytes || left == 0 || decision->func != event->func)
            continue;
        int fit = 2 * (left == bytes) + as_asked(decision, event);
        if (fit > best_fit) {
            best_fit = fit;
            best = at;
        }
    }
    return best;
}

int join_claim(struct comm *comm, const struct coll_event *event, uint64_t bytes, uint32_t group) {
    /* Pairs with the release in decide(): the decisions below are whole. */
    uint64_t decided = load(&comm->decided, acquire);
    uint64_t claimed = load(&comm->claimed, relaxed);
    for (; comm->looked < decided; comm->looked++) {
        uint64_t at = comm->looked % COMM_DECISIONS;
        comm->claims[at] = (struct claim){.bytes_left = comm->decisions[at].bytes};
    }
    int found = group ? claim_in_group(comm, event, bytes, claimed, decided, group)
                      : claim_newest(comm, event, bytes, claimed, decided);
    if (found >= 0)
        comm->claims[found].bytes_left -= bytes;
    return found;
}

void join_finish(struct comm *comm, bool found, uint32_t group) {
    uint64_t claimed = load(&comm->claimed, relaxed), before = claimed;
    while (claimed < comm->looked && comm->claims[claimed % COMM_DECISIONS].bytes_left == 0)
        claimed++;
    /* Groups are launched in the order in which they were decided: what an older one left behind never comes.
     */
    while (group && claimed < comm->looked && is_older(comm->decisions[claimed % COMM_DECISIONS].plan, group))
        claimed++;
    uint64_t waiting = comm->looked - claimed;
    /* What is never launched must neither fill the ring nor make every search long: it goes little by little
     * whenever an operation finds no decision, as in the replay of a graph. */
    if (unlikely(waiting > DECISIONS_KEPT))
        claimed += waiting - DECISIONS_KEPT;
    else if (unlikely(!found && waiting > DECISIONS_LIKELY))
        claimed++;
    if (claimed != before)
        store(&comm->claimed, claimed, release); /* pairs with the acquire in decide() */
}
