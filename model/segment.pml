/* One rank, word by word: getCollInfo (decide.c) against the runner (reader.c) and its crashes.
 *
 * Every load, store and compare-and-swap of a word is a step of its own. The other ranks and the coordinator are one
 * process that may decide anything that the answers so far allow. What agreement.pml takes for granted about one rank
 * is checked here: a promised hold is never overtaken, nobody waits without a promise, the table in force is whole.
 *
 * M_...: one line broken; see docs/agreement_model.md. */

#ifndef CALLS
#define CALLS 5
#endif
#ifndef VERSIONS
#define VERSIONS 3
#endif
#ifndef TRIES
#define TRIES 2 /* PREPARE_TRIES */
#endif

#define NO_HOLD 15
#define UNDECIDED 0
#define ABORT 15
#define TORN 15
#define OPEN 0
#define PROMISED 1
#define REFUSED_BY_PLUGIN 2

#define word_of(version, slot) ((version) * 2 + (slot))
#define version_of(word) ((word) / 2)
#define slot_of(word) ((word) & 1)
#define promise_of(version, state) ((version) * 4 + (state))

/* The segment. */
byte dseq, hold_at = NO_HOLD, base, pending, decision, promise;
byte tables[2]; /* version of what is in the slot; TORN while it is written */

/* What is true, whoever knows it. */
byte outcome[VERSIONS + 1]; /* S, ABORT, or 0 */
byte answered[VERSIONS + 1]; /* the hold that was promised and may have been heard of; 0 for none */
bit given[VERSIONS + 1]; /* `promise` was moved to PROMISED by a runner */
byte chosen;                /* the last call whose table is chosen */
bit trained;

/* Every call at or after S uses the version, every one below does not. */
inline check(d, word) {
    d_step {
        want = 0;
        v = 1;
        do
        :: v <= VERSIONS ->
            if
            :: outcome[v] && outcome[v] != ABORT && outcome[v] <= d -> want = v
            :: else
            fi;
            v++
        :: else -> break
        od;
        assert(version_of(word) == want); /* another table than the other ranks' */
        chosen = d;
        want = 0;
        v = 0
    }
}

active proctype getCollInfo() {
    byte d, hold, word, seen_pending, seen_decision, seen_promise, table_word, want, v;
    do
    :: d < CALLS ->
#ifdef M_DSEQ_LATE
        hold = hold_at;
        atomic { d++; dseq = d };
#else
        atomic { d++; dseq = d };
        hold = hold_at;
#endif
        if
        :: d < hold -> word = base
        :: else ->
at_hold:
            if
            :: d < hold_at -> word = base; goto chosen_word
            :: else
            fi;
            seen_pending = pending;
            seen_decision = decision;
            seen_promise = promise;
            if
            :: atomic { seen_pending != pending -> seen_pending = 0; seen_decision = 0; seen_promise = 0; goto at_hold }
            :: else
            fi;
            if
            :: seen_decision != UNDECIDED ->
                if
                :: seen_decision != ABORT && d >= seen_decision -> word = seen_pending
                :: else -> word = base
                fi;
                goto chosen_word
            :: else
            fi;
            if
            :: seen_promise == promise_of(version_of(seen_pending), OPEN) ->
#ifdef M_REFUSE_WITHOUT_SWAP
                promise = promise_of(version_of(seen_pending), REFUSED_BY_PLUGIN)
#else
                atomic {
                    if
                    :: promise == seen_promise -> promise = promise_of(version_of(seen_pending), REFUSED_BY_PLUGIN)
                    :: else -> seen_pending = 0; seen_decision = 0; seen_promise = 0; goto at_hold
                    fi
                }
#endif
            :: else
            fi;
            if
#ifdef M_NEVER_WAIT
            :: true -> word = base; goto chosen_word
#elif !defined(M_ALWAYS_WAIT)
            :: seen_promise != promise_of(version_of(seen_pending), PROMISED) -> word = base; goto chosen_word
#endif
            :: else ->
                assert(given[version_of(seen_pending)]); /* waits without a promise */
                /* Looks again; without a change it would see the same. */
                hold_at > d || pending != seen_pending || decision != seen_decision || promise != seen_promise;
                atomic { seen_pending = 0; seen_decision = 0; seen_promise = 0 };
                goto at_hold
            fi
        fi;
chosen_word:
        check(d, word);
        if
        :: word != table_word ->
            assert(!word || tables[slot_of(word)] == version_of(word)); /* use_table() finds it bad: only this rank */
            table_word = word
        :: else
        fi;
        /* The call goes on with the table. */
        atomic {
            assert(!table_word || tables[slot_of(table_word)] == version_of(table_word)); /* written over while read */
            hold = 0; word = 0; seen_pending = 0; seen_decision = 0; seen_promise = 0
        }
    :: else -> break
    od;
    trained = 1
}

/* The other ranks and the coordinator. A hold of theirs may be one call further. */
active proctype Others() {
    byte v;
end:
    do
    :: atomic {
        v < VERSIONS && (answered[v + 1] || version_of(pending) > v) && !outcome[v + 1] ->
        if
#ifdef M_COMMIT_UNPROMISED
        :: version_of(pending) > v && hold_at != NO_HOLD -> outcome[v + 1] = hold_at
#endif
        :: answered[v + 1] -> outcome[v + 1] = answered[v + 1]
        :: answered[v + 1] -> outcome[v + 1] = answered[v + 1] + 1
#ifdef M_BELOW_HOLD
        :: answered[v + 1] > 1 -> outcome[v + 1] = answered[v + 1] - 1
#endif
        :: outcome[v + 1] = ABORT
        fi;
        assert(outcome[v + 1] == ABORT || chosen < outcome[v + 1]); /* has gone past S with the old table */
        v++
    }
    od
}

/* A runner dies between any two steps; its successor finds the segment as it is. CRASHES: at most that often, so that
 * a rank which waits for ever shows as an invalid end state. */
#ifdef CRASHES
byte crashes;
#define dies crashes < CRASHES -> crashes++; goto begin
#else
#define dies true -> goto begin
#endif
#define STEP(s) if :: s :: dies fi

#ifdef M_FOLD_EARLY
#define all_below_are_over true
#else
#define all_below_are_over (dseq >= decision)
#endif

inline fold() {
    if
    :: hold_at != NO_HOLD && decision == ABORT -> STEP(hold_at = NO_HOLD)
    :: hold_at != NO_HOLD && decision != UNDECIDED && decision != ABORT && all_below_are_over ->
        STEP(base = pending);
        STEP(hold_at = NO_HOLD)
    :: else
    fi
}

#define newest (version_of(pending) > version_of(base) -> version_of(pending) : version_of(base))

active proctype Runner() {
    byte version, slot, hold, tries, margin;
begin:

    atomic { version = 0; slot = 0; hold = 0; tries = 0; margin = 0 };
settle:
    fold();
    if
    :: hold_at == NO_HOLD -> goto prepare
    :: hold_at != NO_HOLD && decision != UNDECIDED -> /* decided, and S is ahead */
        if
        :: dseq >= decision -> goto settle
        :: trained -> goto done
        fi
    :: hold_at != NO_HOLD && decision == UNDECIDED && promise != promise_of(version_of(pending), PROMISED) ->
        /* Its runner died before anyone could hear of a promise. */
        STEP(decision = ABORT);
        STEP(hold_at = NO_HOLD);
        goto settle
    :: else -> version = version_of(pending); goto ask
    fi;

prepare:
    if
    :: newest >= VERSIONS -> goto done
    :: else
    fi;
    version = newest + 1;
    STEP(hold_at = NO_HOLD);
#ifdef M_SLOT_IN_FORCE
    slot = slot_of(base);
#else
    slot = (base && slot_of(base) == 0 -> 1 : 0);
#endif
    STEP(tables[slot] = TORN);
    STEP(tables[slot] = version);
#ifdef M_PENDING_FIRST
    STEP(pending = word_of(version, slot));
    STEP(decision = UNDECIDED);
#else
    STEP(decision = UNDECIDED);
    STEP(pending = word_of(version, slot));
#endif
    tries = 0;
    margin = 0;
again:
    if
    :: tries == TRIES ->
        STEP(decision = ABORT);
        STEP(hold_at = NO_HOLD);
        goto settle
    :: else
    fi;
    STEP(promise = promise_of(version, OPEN));
    STEP(hold = dseq + margin + 1);
    STEP(hold_at = hold);
    tries++;
    margin++;
#ifndef M_NO_SECOND_LOOK
    if
    :: dseq >= hold -> goto again
    :: dseq < hold
    fi;
#endif
    if
    :: atomic {
#ifndef M_PROMISE_WITHOUT_SWAP
        promise == promise_of(version, OPEN) ->
#endif
        promise = promise_of(version, PROMISED); given[version] = 1 }
#ifndef M_PROMISE_WITHOUT_SWAP
    :: atomic { promise != promise_of(version, OPEN) -> goto again }
#endif
    :: dies
    fi;
ask:
    /* The answer may be heard, or lost. It is the hold in the segment, whoever gives it. */
    if
    :: answered[version] = hold_at
    :: true
    fi;
    if
    :: outcome[version]
    :: dies
    fi;
    /* dcc_decide */
    STEP(decision = outcome[version]);
    if
    :: decision == ABORT -> STEP(hold_at = NO_HOLD)
    :: else
    fi;
    goto settle;
done:
    skip
}
