/* Agreement in band: runners only stage tables, the training processes agree among themselves.
 *
 * At the boundary before step k every rank uses the result of the all-reduce that was launched at step k - 1, and
 * launches one of its own: MIN over (version, -version, digest, -digest) of what is staged on it, zeros for nothing.
 * All ranks have staged the same if the minima of a number and of its opposite are opposites; then every rank switches.
 *
 * A table is two halves and a head (version and digest), so that it can be torn; its digest fits where both halves are
 * what the head says. Tables 1 and 2 have the same version and other contents: two control planes made them.
 *
 * (default)  each process copies what is staged, checks the copy, offers it and switches to that copy
 * HANDSHAKE  no copy: the process says what it offers before it checks, the runner takes the head away before it looks
 * RECHECK    no copy: what was offered is checked again before its use, and refused where it has changed
 * TRUST      no copy, no check
 * FINE       that many ranks stage and copy word by word, the others in one step: all that a rank shows the others is
 *            its offers
 * M_...      one rule broken; see docs/agreement_model.md */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 4
#endif
#ifndef TABLES
#define TABLES 3
#endif

#ifndef FINE
#define FINE 1
#endif

#define TORN 7
#define version_of(table) (((table) + 1) / 2)
#define other(slot) (1 - (slot))

#ifdef HANDSHAKE
#define SLOTS 2
#else
#define SLOTS 1 /* what is in force is a copy of the process's own */
#endif

typedef Table { byte head; byte half[2] };
typedef Rank {
    byte step;
    /* the segment */
    Table staged[SLOTS];
    bit slot;       /* in force, with HANDSHAKE */
    byte offered;   /* slot + 1, with HANDSHAKE */
    /* the process's own */
    byte in_force;  /* which table */
    byte copy;      /* what it offered */
    byte begun;     /* all-reduces that it has contributed to */
    byte offer[2]   /* its contributions to the last two */
};
Rank rank[RANKS];
byte told[STEPS + 1]; /* the table of the first rank that made the step, + 1 */
byte left_alone, left_at;
hidden byte k_, out;

#ifdef HANDSHAKE
#define FREE other(rank[r].slot)
#else
#define FREE 0
#endif
#define whole(r, s) (rank[r].staged[s].half[0] == rank[r].staged[s].head && \
                     rank[r].staged[s].half[1] == rank[r].staged[s].head)
#ifdef M_VERSION_ONLY
#define same(a, b) (version_of(a) == version_of(b))
#else
#define same(a, b) ((a) == (b))
#endif
#define reduced(k) (rank[0].begun >= (k) && rank[1].begun >= (k) && rank[RANKS - 1].begun >= (k))
#define agreed(k) (same(rank[0].offer[(k) & 1], rank[1].offer[(k) & 1]) && \
                   same(rank[0].offer[(k) & 1], rank[RANKS - 1].offer[(k) & 1]))

proctype Trainer(byte r) {
    byte head, first, second;
    do
    :: rank[r].step < STEPS ->
        /* The boundary. It waits for the other ranks, as training does, and for nothing else. */
        atomic {
            rank[r].step == 0 || reduced(rank[r].step) ->
            rank[r].step++;
            if
#ifdef M_USES_WHAT_HAS_COME
            /* The result is looked at, and not waited for. */
            :: rank[r].step > 1
#endif
            :: rank[r].step > 1 && agreed(rank[r].step - 1) && rank[r].offer[(rank[r].step - 1) & 1] ->
#if defined(HANDSHAKE)
                rank[r].slot = rank[r].offered - 1;
                rank[r].in_force = rank[r].copy
#elif defined(RECHECK)
                if
                :: whole(r, 0) && rank[r].staged[0].head == rank[r].copy -> rank[r].in_force = rank[r].copy
                :: else
                fi
#elif defined(TRUST)
                rank[r].in_force = (whole(r, 0) -> rank[r].staged[0].head : TORN)
#else
                rank[r].in_force = rank[r].copy
#endif
            :: else
            fi;
            rank[r].copy = 0
        };
#ifdef HANDSHAKE
        rank[r].offered = 0;
#endif
        d_step {
            if
            :: told[rank[r].step] == 0 -> told[rank[r].step] = rank[r].in_force + 1
            :: else -> assert(told[rank[r].step] == rank[r].in_force + 1) /* two tables at one step */
            fi;
            assert(!left_alone || rank[r].step < left_at + 2 ||
                   version_of(rank[r].in_force) >= version_of(left_alone)); /* left alone and not taken */
            /* Once all have made the step, nobody looks at what led to it. */
            k_ = 0;
            out = 0;
            do
            :: k_ < RANKS -> out = out + (rank[k_].step >= rank[r].step); k_++
            :: else -> break
            od;
            if
            :: out == RANKS ->
                told[rank[r].step] = 0;
                k_ = 0;
                do
                :: k_ < RANKS -> rank[k_].offer[(rank[r].step - 1) & 1] = 0; k_++
                :: else -> break
                od
            :: else
            fi;
#ifdef HANDSHAKE
            assert(!rank[r].in_force || (rank[r].staged[rank[r].slot].half[0] == rank[r].in_force &&
                                         rank[r].staged[rank[r].slot].half[1] == rank[r].in_force)) /* written over */;
#endif
            skip
        };
        /* The offer. */
        if
        :: r >= FINE ->
            atomic {
#ifdef HANDSHAKE
                rank[r].offered = FREE + 1;
#endif
                head = rank[r].staged[FREE].head;
                first = rank[r].staged[FREE].half[0];
                second = rank[r].staged[FREE].half[1]
            }
        :: else ->
#if defined(HANDSHAKE) && !defined(M_CHECKS_FIRST)
            rank[r].offered = FREE + 1;
#endif
            head = rank[r].staged[FREE].head;
            first = rank[r].staged[FREE].half[0];
            second = rank[r].staged[FREE].half[1];
#if defined(HANDSHAKE) && defined(M_CHECKS_FIRST)
            rank[r].offered = FREE + 1
#endif
        fi;
        atomic {
            if
#ifdef M_NO_DIGEST
            :: version_of(head) > version_of(rank[r].in_force) -> rank[r].copy = (first == second -> first : TORN)
#else
            :: first == head && second == head && version_of(head) > version_of(rank[r].in_force) -> rank[r].copy = head
#endif
            :: else -> head = 0
#ifdef HANDSHAKE
                ; rank[r].offered = 0
#endif
            fi;
            rank[r].offer[rank[r].step & 1] = head;
            rank[r].begun = rank[r].step;
            head = 0; first = 0; second = 0
        }
    :: else -> break
    od
}

/* Stages one table after the other, of whichever control plane; dies between any two steps. */
#define STEP(s) if :: atomic { !left_alone -> s } :: goto begin fi

proctype Runner(byte r) {
    byte table, slot;
end:
begin:
    atomic {
        !left_alone;
        slot = 0;
        if
        :: table = 1
        :: table = 2
#if TABLES > 2
        :: table = 3
#endif
        fi;
        if
        :: r >= FINE ->
            slot = FREE;
#ifdef HANDSHAKE
            if
            :: rank[r].offered == slot + 1 -> table = 0; slot = 0; goto begin
            :: else
            fi;
#endif
            if
            :: true
            :: table = 0 /* its runner died */
            fi;
            rank[r].staged[slot].half[0] = table;
            rank[r].staged[slot].half[1] = table;
            rank[r].staged[slot].head = table;
            table = 0;
            slot = 0;
            goto begin
        :: else
        fi
    };
#ifdef HANDSHAKE
    STEP(slot = FREE);
#ifdef M_LOOKS_FIRST
    if
    :: rank[r].offered == slot + 1 -> goto begin
    :: else
    fi;
    if
    :: rank[r].slot == slot -> goto begin
    :: else
    fi;
    STEP(rank[r].staged[slot].head = 0);
#else
    STEP(rank[r].staged[slot].head = 0);
    if
    :: rank[r].offered == slot + 1 -> goto begin
    :: else
    fi;
    if
    :: rank[r].slot == slot -> goto begin
    :: else
    fi;
#endif
#else
    STEP(rank[r].staged[slot].head = 0);
#endif
    STEP(rank[r].staged[slot].half[0] = table);
    STEP(rank[r].staged[slot].half[1] = table);
    STEP(rank[r].staged[slot].head = table);
    atomic { table = 0; slot = 0; goto begin }
}

#ifdef HANDSHAKE
#define SLOT(r) other(rank[r].slot)
#else
#define SLOT(r) 0
#endif
#define staged_on(r) (rank[r].staged[SLOT(r)].head == rank[0].staged[SLOT(0)].head && whole(r, SLOT(r)))

/* The same table is staged everywhere, and the runners are gone. */
proctype Leave() {
end:
    d_step {
        rank[0].staged[SLOT(0)].head && staged_on(0) && staged_on(1) && staged_on(RANKS - 1) &&
        version_of(rank[0].staged[SLOT(0)].head) > version_of(rank[0].in_force) ->
        left_alone = rank[0].staged[SLOT(0)].head;
        k_ = 0;
        do
        :: k_ < RANKS ->
            if
            :: rank[k_].step > left_at -> left_at = rank[k_].step
            :: else
            fi;
            k_++
        :: else -> break
        od;
        skip
    }
}

init {
    byte r;
    atomic {
        do
        :: r < RANKS -> run Trainer(r); run Runner(r); r++
        :: else -> break
        od;
        r = 0;
#ifndef NOBODY_LEAVES
        run Leave();
#endif
        skip
    }
}
