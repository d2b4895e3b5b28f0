/* A step boundary, for all communicators of one process at once: what it brings to the all-reduce over all
 * ranks, and what follows from the result. MIN is all that the reduction has to know: of a value and of its
 * negative it gives the least and the most that any rank brought. */
#include "reader.h"

#define BITS ((1ull << 62) - 1) /* so that a value and its negative both fit */

enum word { COMM, OTHER_COMM, TOKEN, OTHER_TOKEN, CALLS, OTHER_CALLS, WORDS = DCC_BOUNDARY_WORDS };

/* Where a communicator stands in the all-reduce. Fibonacci hashing; another communicator that was met in one
 * place is most likely not met in the next. */
static int64_t *place_of(const struct dcc_place *place, int64_t *words) {
    uint64_t moved = place->moved;
    uint64_t mixed = (place->comm + moved) * 0x9E3779B97F4A7C15ull;
    return words + WORDS * ((mixed ^ (mixed >> 29) * (2 * moved + 1)) % DCC_BOUNDARY_PLACES);
}

static void bring(int64_t *word, uint64_t value) {
    if ((int64_t)value < word[0])
        word[0] = (int64_t)value;
    if (-(int64_t)value < word[1])
        word[1] = -(int64_t)value;
}

void dcc_boundary_bring(struct dcc_place *places, size_t n, int64_t *words) {
    for (size_t i = 0; i < WORDS * DCC_BOUNDARY_PLACES; i++)
        words[i] = INT64_MAX;
    for (struct dcc_place *place = places; place < places + n; place++) {
        if (!place->comm)
            continue;
        struct dcc_offer offer;
        place->offered = dcc_offer(place->seg, &offer) && !place->out_of_step;
        uint64_t token = offer.digest & BITS;
        int64_t *at = place_of(place, words);
        bring(at + COMM, place->comm & BITS);
        bring(at + TOKEN, !place->offered ? 0 : token ? token : 1);
        bring(at + CALLS, offer.dseq & BITS);
    }
}

size_t dcc_boundary_take(struct dcc_place *places, size_t n, int64_t *words) {
    size_t out_of_step = 0;
    for (struct dcc_place *place = places; place < places + n; place++) {
        if (!place->comm)
            continue;
        const int64_t *at = place_of(place, words);
        if (at[COMM] != -at[OTHER_COMM]) {
            place->moved++;
        } else if (at[CALLS] != -at[OTHER_CALLS]) {
            out_of_step += !place->out_of_step;
            place->out_of_step = 1;
            dcc_out_of_step(place->seg);
        } else if (at[TOKEN] == -at[OTHER_TOKEN] && at[TOKEN] > 0 && !place->out_of_step) {
            dcc_take_offer(place->seg);
        }
    }
    return out_of_step;
}

void dcc_boundary_report(struct dcc_place *places, size_t n, uint64_t step, uint64_t iteration_ns,
                         double loss) {
    for (struct dcc_place *place = places; place < places + n; place++)
        dcc_report_step(place->seg, step, iteration_ns, loss);
}
