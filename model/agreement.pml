/* The agreement of the coordinator mode: ranks, the runners that claim them, control planes.
 *
 * A step is what one part does without anybody looking on: a call of getCollInfo, one method of the coordinator, one
 * thing that a runner does to the segment that it holds by flock. segment.pml has the words of one rank one by one and
 * is why a call and a PREPARE are one step each here.
 *
 * Nothing bounds how often a part dies: a part that died is one that does nothing until it is started again, with
 * nothing in memory. A message is lost if nobody delivers it, repeated and late if it is delivered again later.
 *
 * OLD       decisions recorded with put_if_absent in a store that dies with the control plane
 * LATE      what a rank's segment said may reach a coordinator long after
 * FENCED    a coordinator that takes a rank over marks it; see docs/agreement_model.md
 * CALM      from some moment on one control plane stays up and reaches all ranks
 * M_...     one rule broken; see docs/agreement_model.md */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef PLANES
#define PLANES 1
#endif
#ifndef VERSIONS
#define VERSIONS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif

#define NO_HOLD 15
#define UNDECIDED 0
#define ABORT 15
#define NONE 14 /* a reply that says nothing; an answer without a promise */

/* A rank's segment, and the runner that holds it. Runners do one thing at a time. */
typedef Rank {
    byte dseq;
    byte hold_at;
    byte base;
    byte base_at;
    byte pending;
    byte decision;
    bit promised;
    bit table, base_table; /* whose content the pending one and the one in force have: the plane that sent it */
    byte plane;            /* whose runner holds the claim */
    bit joined;            /* it knows that its coordinator knows it */
    byte asked;            /* the version that it waits for */
    bit settling;          /* it asks what holds, and did not answer to PREPARE */
    byte inbox             /* the reply */
#ifdef FENCED
    ; byte term            /* of the last coordinator that it was shown to: none with a lower one may see it */
#endif
};
Rank rank[RANKS];

/* What a coordinator knows of a rank, and its runner's last PREPARE answer on the way. */
typedef Known {
    bit known;  /* a runner of it has joined */
    bit heard;  /* `_standing` has it */
    byte committed[VERSIONS]; /* what Standing.committed() says of each version */
    byte answer;              /* of the open version */
    byte mail_version;
    byte mail
#ifdef LATE
    ; bit late;                    /* a copy of what was shown is still on the way */
    byte late_committed[VERSIONS]
#endif
};
typedef Plane {
    bit up;
    byte next_version;
    byte first;
    byte open;
    byte committed; /* version */
    byte switch_at;
#ifdef FENCED
    byte term; /* no other coordinator has the same */
#endif
    Known member[RANKS]
};
Plane plane[PLANES];

#ifdef OLD
byte store[VERSIONS + 1];
#endif

/* What is true, whoever knows it. */
byte told[CALLS + 1];             /* the table that the first rank used at a call, + 1; 0 once all have made it */
byte fate[(VERSIONS + 1) * 2];    /* of a version and whose content: the first decision that a promised rank was told */
bit calm;

hidden byte r_, k_, out, p_, v_;  /* scratch */

#define waits(r) (rank[r].dseq + 1 >= rank[r].hold_at && rank[r].decision == UNDECIDED && rank[r].promised)
#define undecided(r) (rank[r].hold_at != NO_HOLD && rank[r].decision == UNDECIDED && rank[r].promised)
#define P plane[rank[r].plane]
#define KNOWN plane[rank[r].plane].member[r]

#ifdef SYMMETRIC
#define RANK_BYTES sizeof now.rank[0]
#define KNOWN_BYTES sizeof now.plane[0].member[0]
/* Ranks are alike: states that differ in who is who are one. Orders them. Off where a trace is to be read. */
inline order() {
    c_code {
        int i_, j_, l_;
        for (i_ = 0; i_ < RANKS - 1; i_++)
            for (j_ = 0; j_ < RANKS - 1 - i_; j_++) {
                int c_ = memcmp(&now.rank[j_], &now.rank[j_ + 1], RANK_BYTES);
                for (l_ = 0; !c_ && l_ < PLANES; l_++)
                    c_ = memcmp(&now.plane[l_].member[j_], &now.plane[l_].member[j_ + 1], KNOWN_BYTES);
                if (c_ > 0) {
                    char t_[RANK_BYTES + KNOWN_BYTES];
                    memcpy(t_, &now.rank[j_], RANK_BYTES);
                    memcpy(&now.rank[j_], &now.rank[j_ + 1], RANK_BYTES);
                    memcpy(&now.rank[j_ + 1], t_, RANK_BYTES);
                    for (l_ = 0; l_ < PLANES; l_++) {
                        memcpy(t_, &now.plane[l_].member[j_], KNOWN_BYTES);
                        memcpy(&now.plane[l_].member[j_], &now.plane[l_].member[j_ + 1], KNOWN_BYTES);
                        memcpy(&now.plane[l_].member[j_ + 1], t_, KNOWN_BYTES);
                    }
                }
            }
    }
}
#else
inline order() { skip }
#endif

/* Drops what can no longer matter, so that states that differ in nothing else are one. */
inline tidy(its) {
    r_ = 0;
    do
    :: r_ < RANKS ->
        if
        :: plane[its].up && plane[its].member[r_].mail_version &&
           plane[its].open != plane[its].member[r_].mail_version &&
           !(rank[r_].plane == its && rank[r_].asked == plane[its].member[r_].mail_version && !rank[r_].settling) ->
            plane[its].member[r_].mail_version = 0;
            plane[its].member[r_].mail = 0
        :: else
        fi;
        r_++
    :: else -> break
    od;
    r_ = 0;
    order()
}

/* -- the plugin -- */

inline use(r, word) {
    if
    :: told[rank[r].dseq] == 0 -> told[rank[r].dseq] = word
    :: else -> assert(told[rank[r].dseq] == word) /* two tables at one call */
    fi;
    k_ = 0;
    r_ = 0;
    do
    :: r_ < RANKS -> k_ = k_ + (rank[r_].dseq >= rank[r].dseq); r_++
    :: else -> break
    od;
    if
    :: k_ == RANKS -> told[rank[r].dseq] = 0
    :: else
    fi
}

#define table_word(version, content) (1 + (version) * 2 + ((version) -> (content) : 0))

proctype Plugin(byte r) {
end:
    do
    :: d_step {
        rank[r].dseq < CALLS && !waits(r) ->
        rank[r].dseq++;
        if
        :: rank[r].dseq >= rank[r].hold_at && rank[r].decision != UNDECIDED && rank[r].decision != ABORT &&
           rank[r].dseq >= rank[r].decision -> out = table_word(rank[r].pending, rank[r].table)
        :: else -> out = table_word(rank[r].base, rank[r].base_table)
        fi;
        use(r, out);
        printf("rank %d: call %d uses version %d\n", r, rank[r].dseq, (out - 1) / 2);
        order()
    }
    od
}

/* -- the coordinator's half: agreement.py -- */

inline close(its) {
    plane[its].open = 0;
    r_ = 0;
    do
    :: r_ < RANKS -> plane[its].member[r_].answer = 0; r_++
    :: else -> break
    od;
    r_ = 0
}

#ifdef OLD
inline record(its, version, decision_) {
    if
    :: store[version] == 0 -> store[version] = decision_
    :: else
    fi;
    out = store[version];
    if
    :: plane[its].open == version -> close(its)
    :: else
    fi
}
inline abort(its, version) { record(its, version, ABORT) }
inline resolve(its, version) { record(its, version, ABORT) }
inline commit(its, version, at) { record(its, version, at) }
#else
inline abort(its, version) {
    if
    :: plane[its].committed == version -> out = plane[its].switch_at
    :: else ->
        if
        :: plane[its].open == version -> close(its)
        :: else
        fi;
        out = ABORT
    fi
}

inline resolve(its, version) {
    out = 0;
    if
    :: plane[its].committed == version -> out = plane[its].switch_at
    :: plane[its].committed != version && plane[its].first && version >= plane[its].first -> abort(its, version)
    :: else ->
        r_ = 0;
        k_ = 0;
        do
        :: r_ < RANKS ->
            k_ = k_ + plane[its].member[r_].heard;
            if
            :: !out && plane[its].member[r_].committed[version - 1] ->
                out = plane[its].member[r_].committed[version - 1]
            :: else
            fi;
            r_++
        :: else -> break
        od;
        if
        :: out -> plane[its].committed = version; plane[its].switch_at = out
#ifdef M_SILENT
        :: else -> out = ABORT
#else
        :: !out && k_ == RANKS -> out = ABORT
        :: else
#endif
        fi;
        r_ = 0;
        k_ = 0
    fi
}

inline commit(its, version, at) {
#ifndef M_FORGETS_COMMIT
    plane[its].committed = version;
    plane[its].switch_at = at;
#endif
    close(its);
    out = at
}
#endif

/* `out`: the decision, or 0 while ranks are missing. */
inline take_answer(its, r, version, promised_hold) {
    out = 0;
    if
    :: version != plane[its].open -> resolve(its, version)
    :: else ->
        if
        :: plane[its].member[r].answer == 0 -> plane[its].member[r].answer = promised_hold
        :: else
        fi;
        if
        :: promised_hold == NONE -> abort(its, version)
        :: else ->
            /* k_: the largest hold, or NONE while a rank is missing */
            r_ = 0;
            k_ = 0;
            do
            :: r_ < RANKS ->
                if
                :: plane[its].member[r_].answer == 0 -> k_ = NONE
                :: plane[its].member[r_].answer != 0 && plane[its].member[r_].answer > k_ ->
                    k_ = plane[its].member[r_].answer
                :: else
                fi;
                r_++
            :: else -> break
            od;
            r_ = 0;
#ifdef M_OWN_HOLD
            if
            :: k_ != NONE -> k_ = promised_hold
            :: else
            fi;
#endif
            if
            :: k_ == NONE
            :: else -> commit(its, version, k_)
            fi;
            k_ = 0
        fi
    fi
}

#ifdef LATE
#ifdef FENCED
#define FORGETS_LATE true /* messages say for which coordinator they are */
#else
#define FORGETS_LATE false
#endif
/* A request that nobody waits for any more arrives after all. */
inline hear_late(its, r) {
    plane[its].member[r].heard = 1;
    plane[its].member[r].late = 0;
    k_ = 0;
    do
    :: k_ < VERSIONS ->
        plane[its].member[r].committed[k_] = plane[its].member[r].late_committed[k_];
        plane[its].member[r].late_committed[k_] = 0;
        k_++
    :: else -> break
    od;
    order()
}
#endif

inline hear(its, r) {
    plane[its].member[r].heard = 1;
    k_ = 0;
    do
    :: k_ < VERSIONS ->
        plane[its].member[r].committed[k_] = 0;
        if
#ifndef M_BASE_AT
        :: rank[r].base == k_ + 1 -> plane[its].member[r].committed[k_] = rank[r].base_at
#endif
        :: rank[r].base != k_ + 1 && rank[r].pending == k_ + 1 && rank[r].decision != UNDECIDED &&
           rank[r].decision != ABORT -> plane[its].member[r].committed[k_] = rank[r].decision
        :: else
        fi;
        k_++
    :: else -> break
    od;
    k_ = 0
}

inline forget(its) {
    plane[its].first = 0;
    plane[its].committed = 0;
    plane[its].switch_at = 0;
    close(its);
    k_ = 0;
    do
    :: k_ < RANKS ->
        plane[its].member[k_].known = 0;
        plane[its].member[k_].heard = 0;
        r_ = 0;
        do
        :: r_ < VERSIONS -> plane[its].member[k_].committed[r_] = 0; r_++
        :: else -> break
        od;
#ifdef LATE
        if
        :: FORGETS_LATE -> plane[its].member[k_].late = 0; plane[its].member[k_].late_committed[0] = 0
        :: else
        fi;
#endif
#ifdef FENCED
        /* Messages say for which coordinator they are. */
        plane[its].member[k_].mail_version = 0;
        plane[its].member[k_].mail = 0;
#endif
        k_++
    :: else -> break
    od
}

#ifdef FENCED
/* Only the order of terms matters: those in use are 1, 2, 3, ... */
inline above(its, than) {
    out = than + 1;
    k_ = 0;
    do
    :: k_ < RANKS -> rank[k_].term = rank[k_].term + (rank[k_].term >= out); k_++
    :: else -> break
    od;
    k_ = 0;
    do
    :: k_ < PLANES -> plane[k_].term = plane[k_].term + (plane[k_].term >= out); k_++
    :: else -> break
    od;
    plane[its].term = out
}

inline renumber() {
    out = RANKS + PLANES + 1;
    do
    :: out > 0 ->
        v_ = 0;
        k_ = 0;
        do
        :: k_ < RANKS -> v_ = v_ + (rank[k_].term == out); k_++
        :: else -> break
        od;
        k_ = 0;
        do
        :: k_ < PLANES -> v_ = v_ + (plane[k_].term == out); k_++
        :: else -> break
        od;
        k_ = 0;
        do
        :: k_ < RANKS -> rank[k_].term = rank[k_].term - (!v_ && rank[k_].term > out); k_++
        :: else -> break
        od;
        k_ = 0;
        do
        :: k_ < PLANES -> plane[k_].term = plane[k_].term - (!v_ && plane[k_].term > out); k_++
        :: else -> break
        od;
        out--
    :: else -> break
    od;
    skip
}
#endif

inline kill_coordinator(its) {
    forget(its);
#ifdef FENCED
    plane[its].term = 0;
    renumber();
#endif
    plane[its].up = 0;
    plane[its].next_version = 0
}

inline start_coordinator(its) {
#ifdef FENCED
    above(its, 0);
#endif
    plane[its].up = 1;
    plane[its].next_version = 1
}

#ifdef M_OPEN_UNHEARD
#define may_open(its) true
#else
#define may_open(its) joined_all(its)
#endif
#define joined_all(its) (plane[its].member[0].known && plane[its].member[1].known && plane[its].member[RANKS - 1].known)

/* An answer arrives: for the first time, again, or after its runner has died. */
inline deliver(its, r) {
    d_step {
        plane[its].up && plane[its].member[r].mail_version &&
        (!calm || (plane[its].open == plane[its].member[r].mail_version && plane[its].member[r].known ->
                   plane[its].member[r].answer == 0 : !rank[r].inbox)) ->
        if
        :: !plane[its].member[r].known -> out = NONE
        :: else ->
            v_ = plane[its].member[r].mail_version;
            take_answer(its, r, v_, plane[its].member[r].mail);
            /* CoordinatorActor.promise: waits until the version is closed, then abort(). */
            if
            :: out == 0 && plane[its].open != v_ -> abort(its, v_)
            :: else
            fi
        fi;
        if
        :: true ->
            printf("coordinator %d: takes the answer of rank %d to version %d: says %d\n", its, r,
                   plane[its].member[r].mail_version, out)
        fi;
        if
        :: out && rank[r].plane == its && rank[r].asked == plane[its].member[r].mail_version && !rank[r].settling ->
            rank[r].inbox = out
        :: else
        fi;
        tidy(its)
    }
}

proctype Coordinator(byte its) {
end:
    do
    :: d_step {
        !plane[its].up && (!calm || its == 0) ->
        start_coordinator(its);
        order();
        printf("coordinator %d: starts\n", its)
    }
    :: d_step { plane[its].up && !calm -> kill_coordinator(its); order(); printf("coordinator %d: dies\n", its) }
    :: d_step {
        plane[its].up && plane[its].next_version <= VERSIONS && (!calm || !plane[its].open) && may_open(its) ->
        if
        :: plane[its].first == 0 -> plane[its].first = plane[its].next_version
        :: else
        fi;
        close(its);
        plane[its].open = plane[its].next_version;
        plane[its].next_version++;
        fate[plane[its].open * 2 + its] = 0; /* nobody remembers that it was asked for */
        printf("coordinator %d: opens version %d\n", its, plane[its].open);
        tidy(its)
    }
    /* PROMISE_WAIT_S */
    :: d_step {
        plane[its].up && plane[its].open && !calm ->
        v_ = plane[its].open;
        abort(its, v_);
        printf("coordinator %d: time is up for version %d\n", its, v_);
        tidy(its)
    }
    :: deliver(its, 0)
    :: deliver(its, 1)
#if RANKS > 2
    :: deliver(its, 2)
#endif
    od
}

/* -- the runner's half: reader.c, ranks.py, rank_runner.py -- */

inline fold(r) {
    if
    :: rank[r].hold_at != NO_HOLD && rank[r].decision == ABORT -> rank[r].hold_at = NO_HOLD
    :: rank[r].hold_at != NO_HOLD && rank[r].decision != UNDECIDED && rank[r].decision != ABORT &&
       rank[r].dseq >= rank[r].decision ->
        rank[r].base = rank[r].pending;
        rank[r].base_table = rank[r].table;
        rank[r].base_at = rank[r].decision;
        rank[r].hold_at = NO_HOLD
    :: else
    fi
}

/* dcc_decide */
inline decide(r, version, decision_) {
    if
    :: rank[r].pending == version && undecided(r) && (decision_ == ABORT || decision_ >= rank[r].hold_at) ->
        if
        :: fate[version * 2 + rank[r].table] == 0 -> fate[version * 2 + rank[r].table] = decision_
        :: else -> assert(fate[version * 2 + rank[r].table] == decision_) /* told differently */
        fi;
        rank[r].decision = decision_;
        printf("rank %d: is told %d about version %d\n", r, decision_, version);
        fold(r)
    :: else
    fi
}

inline idle(r) {
    rank[r].asked = 0;
    rank[r].settling = 0;
    rank[r].inbox = 0
}

/* The runner has died, or gives up waiting: it joins again before anything else. */
inline start_over(r) {
    idle(r);
    rank[r].joined = 0
}

/* dcc_prepare: promised, or overtaken by calls until it gave up; a runner that dies on the way leaves what is the same
 * as the latter. */
inline prepare(r, version, promises) {
    fold(r);
    if
    :: undecided(r) || rank[r].hold_at != NO_HOLD || version <= rank[r].base -> out = NONE
    :: else ->
        rank[r].pending = version;
        rank[r].table = rank[r].plane;
        if
        :: promises ->
            rank[r].decision = UNDECIDED;
            rank[r].promised = 1;
            rank[r].hold_at = rank[r].dseq + 1;
            out = rank[r].hold_at
        :: else -> rank[r].decision = ABORT; rank[r].promised = 0; out = NONE
        fi
    fi
}

#ifdef FENCED
#define shows (rank[r].term == P.term)
#else
#define shows true
#endif
#if defined(M_NEVER_ASKS)
#define may_ask false
#elif defined(M_ASKS_WHILE_IT_WAITS)
#define may_ask !rank[r].settling
#else
#define may_ask !rank[r].asked
#endif

/* RankRunner._switch, up to its question: any version that its coordinator has opened since it began. */
#define may_prepare(r, version) \
    (P.up && KNOWN.known && rank[r].joined && !rank[r].asked && shows && P.first && version >= P.first && \
     version < P.next_version && (version == P.open || version > rank[r].pending) && \
     (!calm || (version == P.open && KNOWN.answer == 0 && KNOWN.mail_version == 0 && !undecided(r))))

inline promise(r, version, promises) {
    prepare(r, version, promises);
    rank[r].asked = version;
    KNOWN.mail_version = version;
    KNOWN.mail = out;
    printf("runner of rank %d: answers %d to version %d\n", r, out, version);
    p_ = rank[r].plane;
    tidy(p_)
}

proctype Runner(byte r) {
end:
    do
#ifdef FENCED
    /* A rank that a newer coordinator has seen: what this one knows may be wrong. It forgets all of it, and takes a
     * newer term. */
    :: d_step {
        P.up && !rank[r].asked && rank[r].term > P.term ->
        p_ = rank[r].plane;
        forget(p_);
        v_ = rank[r].term;
        above(p_, v_);
        renumber();
        printf("coordinator %d: starts over, newer than what rank %d has seen\n", p_, r);
        order()
    }
#ifdef M_ANY_MARK
    :: d_step {
        P.up && !rank[r].asked && rank[r].term > P.term && !KNOWN.heard ->
        rank[r].term = P.term;
        renumber();
        order()
    }
#endif
    /* Marked before it is shown. */
    :: d_step { P.up && !rank[r].asked && rank[r].term < P.term -> rank[r].term = P.term; renumber(); order() }
#endif
    :: d_step {
        P.up && !rank[r].asked && shows && (!calm || !rank[r].joined || !KNOWN.known) ->
        fold(r);
        p_ = rank[r].plane;
        hear(p_, r);
        KNOWN.known = 1;
        printf("runner of rank %d: joins coordinator %d: base %d, pending %d, decision %d\n", r, p_, rank[r].base,
               rank[r].pending, rank[r].decision);
        rank[r].joined = 1;
        if
        :: rank[r].base >= P.next_version -> P.next_version = rank[r].base + 1
        :: else
        fi;
        if
        :: rank[r].pending >= P.next_version -> P.next_version = rank[r].pending + 1
        :: else
        fi;
        order()
    }
#ifdef LATE
    /* Its request was sent, and it has given up waiting for the reply. */
    :: d_step {
        !rank[r].asked && shows && !KNOWN.late ->
        KNOWN.late = 1;
        if
        :: rank[r].base == 1 -> KNOWN.late_committed[0] = rank[r].base_at
        :: rank[r].base != 1 && rank[r].pending == 1 && rank[r].decision != UNDECIDED && rank[r].decision != ABORT ->
            KNOWN.late_committed[0] = rank[r].decision
        :: else
        fi;
        printf("runner of rank %d: sends what its rank was told, %d, and gives up\n", r, KNOWN.late_committed[0]);
        order()
    }
    :: d_step {
        P.up && KNOWN.late ->
        p_ = rank[r].plane;
        printf("coordinator %d: hears what rank %d was told then\n", p_, r);
        hear_late(p_, r)
    }
#endif
    /* Rank.settle: the reply may take its time. */
    :: d_step {
        P.up && may_ask && undecided(r) && shows && (!calm || joined_all(rank[r].plane)) ->
        p_ = rank[r].plane;
        v_ = rank[r].pending;
        hear(p_, r);
        resolve(p_, v_);
        printf("runner of rank %d: asks coordinator %d about version %d: %d is said\n", r, p_, v_, out);
        if
        :: out -> rank[r].asked = rank[r].pending; rank[r].settling = 1; rank[r].inbox = out
        :: else
        fi;
        out = 0;
        tidy(rank[r].plane)
    }
    :: d_step { may_prepare(r, 1) -> promise(r, 1, true) }
    :: d_step { may_prepare(r, 1) -> promise(r, 1, false) }
#if VERSIONS > 1
    :: d_step { may_prepare(r, 2) -> promise(r, 2, true) }
    :: d_step { may_prepare(r, 2) -> promise(r, 2, false) }
#endif
    /* The reply. */
    :: d_step {
        rank[r].asked && rank[r].inbox ->
        if
        :: rank[r].inbox == NONE -> rank[r].joined = 0
        :: else -> v_ = rank[r].asked; k_ = rank[r].inbox; decide(r, v_, k_)
        fi;
        idle(r);
        p_ = rank[r].plane;
        tidy(p_)
    }
    /* PROMISE_LIMIT_S, SETTLE_LIMIT_S; or it dies, and is started again. */
    :: d_step {
        (rank[r].asked || rank[r].joined) &&
        (!calm || (rank[r].asked && !rank[r].inbox && KNOWN.mail_version != rank[r].asked && KNOWN.answer == 0)) ->
#ifdef OLD
        /* RemoteCoordination.promise: records ABORT itself, unless a decision is there. */
        if
        :: rank[r].asked && store[rank[r].asked] == 0 -> store[rank[r].asked] = ABORT
        :: else
        fi;
        if
        :: rank[r].asked -> v_ = rank[r].asked; k_ = store[v_]; decide(r, v_, k_)
        :: else
        fi;
#endif
        printf("runner of rank %d: starts over\n", r);
        start_over(r);
        p_ = rank[r].plane;
        tidy(p_)
    }
#if PLANES > 1
    /* Its runner dies, and the other control plane claims the segment. */
    :: d_step {
        !calm ->
        printf("rank %d: claimed by the other plane\n", r);
        start_over(r);
        rank[r].plane = 1 - rank[r].plane;
        p_ = 0;
        tidy(p_);
        p_ = 1;
        tidy(p_)
    }
#endif
    od
}

#ifdef OLD
/* Everything but the ranks. */
proctype Chaos() {
    byte version;
end:
    do
    :: d_step {
        true ->
        p_ = 0;
        kill_coordinator(p_);
        version = 1;
        do
        :: version <= VERSIONS -> store[version] = 0; version++
        :: else -> break
        od;
        version = 0;
        do
        :: version < RANKS -> start_over(version); version++
        :: else -> break
        od;
        version = 0
    }
    od
}
#endif

#ifdef CALM
#define in_force(r) (rank[r].hold_at != NO_HOLD && rank[r].decision != UNDECIDED && rank[r].decision <= CALLS -> \
                     rank[r].pending : rank[r].base)
#define done(r) (rank[r].dseq == CALLS && !undecided(r))

proctype Watch() {
    /* Every other part dies; coordinator 0 and a runner of its on every rank stay, or are started and do. */
    d_step {
        true ->
        calm = 1;
#if PLANES > 1
        p_ = 1;
        kill_coordinator(p_);
        v_ = 0;
        do
        :: v_ < RANKS ->
            if
            :: rank[v_].plane -> start_over(v_); rank[v_].plane = 0
            :: else
            fi;
            v_++
        :: else -> break
        od;
#endif
        order()
    };
    /* When nothing can happen any more, everything has. */
    timeout -> assert(done(0) && done(1) && done(RANKS - 1));
    d_step {
        v_ = 1;
        do
        :: v_ <= VERSIONS ->
            if
            :: fate[v_ * 2] && fate[v_ * 2] <= CALLS ->
                assert(in_force(0) >= v_ && in_force(1) >= v_ && in_force(RANKS - 1) >= v_) /* decided and not taken */
            :: else
            fi;
            v_++
        :: else -> break
        od;
        skip
    }
}

/* And it comes to that: nothing goes on for ever. */
never {
    do
    :: !calm
    :: calm -> goto accept
    od;
accept:
    do
    :: calm
    od
}
#endif

init {
    byte r;
    atomic {
        do
        :: r < RANKS -> rank[r].hold_at = NO_HOLD; run Plugin(r); run Runner(r); r++
        :: else -> break
        od;
        r = 0;
        do
        :: r < PLANES -> run Coordinator(r); r++
        :: else -> break
        od;
        r = 0;
#ifdef OLD
        run Chaos();
#endif
#ifdef CALM
        run Watch();
#endif
        skip
    }
}
