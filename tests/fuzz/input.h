/* What the fuzzer gave, read from the front; zeros where it has ended. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct input {
    const uint8_t *at, *end;
};

static inline bool more(const struct input *in) {
    return in->at < in->end;
}

static inline uint64_t take(struct input *in, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

static inline uint8_t take8(struct input *in) {
    return (uint8_t)take(in, 1);
}

/* The next bytes as an input of their own. */
static inline struct input take_part(struct input *in, size_t bytes) {
    size_t left = (size_t)(in->end - in->at);
    struct input part = {in->at, in->at + (bytes < left ? bytes : left)};
    in->at = part.end;
    return part;
}

/* What must hold whatever is in the input. The fuzzer keeps the input that it does not hold for. */
#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                   \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
