/* A static table of any text: what is refused, what is read of it, and whether it is still that when it is
 * written anew. docs/static_tables.md has the format. */
#include "static_table.h"

#include <string.h>

#include "input.h"
#include "memory.h"
#include "table.h"

#define MOST_TEXT 8192
#define MOST_WRITTEN (1u << 20)

/* What a byte of the input stands for; the rest are themselves. */
static const char *const words[] = {
    "dynamiccl-table 1\n",
    "communicator ranks=8 nodes=2 max_channels=16\n",
    "communicator ranks=8 nodes=2 max_channels=4 name=dp\n",
    "communicator ranks=8 nodes=2 max_channels=64 name=d p\n",
    "communicator ranks=16 nodes=2 max_channels=16\n",
    "communicator ",
    "ranks=",
    " nodes=",
    " max_channels=",
    " name=",
    "end\n",
    "all_reduce ",
    "broadcast ",
    "reduce ",
    "all_gather ",
    "reduce_scatter ",
    "0 ",
    "1024 ",
    "1151 ",
    "1152 ",
    "4096 ",
    "8191 ",
    "2061584302080 ",
    "18446744073709551615 ",
    "18446744073709551616 ",
    "- ",
    "no ",
    "yes ",
    "any ",
    "tree ",
    "ring ",
    "nvls_tree ",
    "pat ",
    "ll ",
    "ll128 ",
    "simple ",
    "- - ",
    "4 65536\n",
    "- -\n",
    "16 -\n",
    "64 2\n",
    "0 67108864\n",
    "all_reduce 1024 1151 any ring simple 4 65536\n",
    "all_reduce 0 1023 no - - 8 -\n",
    "all_reduce 8192 - yes tree ll 2 -\n",
    "# words\n",
    "\n",
};
enum { WORDS = sizeof words / sizeof *words };

static size_t make_text(struct input *in, char *text) {
    size_t n = 0;
    while (more(in)) {
        uint8_t next = take8(in);
        const char *word = next >= 128 ? words[(next - 128) % WORDS] : (char[]){(char)next, 0};
        size_t length = next >= 128 ? strlen(word) : 1;
        if (n + length > MOST_TEXT)
            break;
        memcpy(text + n, word, length);
        n += length;
    }
    return n;
}

/* A copy that ends where the text ends, so that a byte too far is noticed. */
static enum static_result parse(const char *text, size_t n, const struct static_comm *comm,
                                struct dcc_table *table, char *error) {
    char *copy = malloc(n ? n : 1);
    MUST(copy);
    memcpy(copy, text, n);
    enum static_result result = static_table_parse(copy, n, comm, table, error);
    free(copy);
    return result;
}

static void must_make_sense(const struct dcc_table *table) {
    MUST(dcc_table_valid(table, 1) && table->apply == 1);
    MUST(table->max_channels >= 1 && table->max_channels <= 64);
    for (unsigned i = 0; i < DCC_KEYS; i++) {
        const struct dcc_entry *e = &table->entries[i];
        bool own = e->algo == 255 && e->proto == 255;
        uint64_t word;
        memcpy(&word, e, sizeof word);
        MUST(e->set ? e->set == 1 : word == 0);
        MUST(e->path == 0 && e->reserved == 0 && e->reserved2 == 0);
        MUST(!e->set || own || (e->algo < DCC_ALGOS && e->proto < DCC_PROTOS));
        MUST(e->channels <= table->max_channels && e->chunk_log2 <= DCC_MAX_CHUNK_LOG2);
        MUST(!own || e->chunk_log2 == 0);
    }
}

/* One line for each bin, from docs/static_tables.md. */
static size_t write_anew(const struct dcc_table *table, const struct static_comm *comm, char *out) {
    static const char *const funcs[] = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"};
    static const char *const algos[] = {"tree",      "ring", "collnet_direct", "collnet_chain", "nvls",
                                        "nvls_tree", "pat"};
    static const char *const protos[] = {"ll", "ll128", "simple"};
    size_t n = (size_t)sprintf(out, "dynamiccl-table 1\ncommunicator ranks=%zu nodes=%zu max_channels=%u\n",
                               comm->ranks, comm->nodes, table->max_channels);
    for (unsigned i = 0; i < DCC_KEYS; i++) {
        const struct dcc_entry *e = &table->entries[i];
        if (!e->set)
            continue;
        MUST(n < MOST_WRITTEN - 256);
        unsigned bin = i % 312, octave = bin / 8;
        unsigned long long least = bin < 8 ? bin : (8ull + bin % 8) << (octave - 1);
        n += (size_t)sprintf(out + n, "%s %llu ", funcs[i / 624], least);
        if (bin == 311)
            n += (size_t)sprintf(out + n, "- ");
        else
            n += (size_t)sprintf(out + n, "%llu ", least + (bin < 16 ? 1 : 1ull << (octave - 1)) - 1);
        n += (size_t)sprintf(out + n, "%s %s %s %u %llu\n", i / 312 % 2 ? "yes" : "no",
                             e->algo == 255 ? "-" : algos[e->algo], e->proto == 255 ? "-" : protos[e->proto],
                             e->channels, e->chunk_log2 ? 1ull << e->chunk_log2 : 0);
    }
    return n + (size_t)sprintf(out + n, "end\n");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char text[MOST_TEXT], anew[MOST_WRITTEN];
    static struct dcc_table table, other;
    struct input in = {data, data + size};
    uint8_t who = take8(&in);
    struct static_comm comm = {who & 1 ? 16 : 8, 2, who & 2 ? "dp" : who & 4 ? "d p" : ""};
    size_t n = make_text(&in, text);
    char error[STATIC_ERROR_BYTES];
    memset(error, 'x', sizeof error);
    enum static_result result = parse(text, n, &comm, &table, error);
    if (result == STATIC_REFUSED) {
        const char *end = memchr(error, 0, sizeof error);
        MUST(end && end > error && error[0] >= '1' && error[0] <= '9' && !strchr(error, '\n'));
        return 0;
    }
    /* Without any part of its end it would be a table that was cut short. */
    MUST(n >= 4 && memcmp(text + n - 4, "end\n", 4) == 0);
    MUST(parse(text, n - 4, &comm, &other, error) == STATIC_REFUSED);
    MUST(parse(text, n - 1, &comm, &other, error) == STATIC_REFUSED);
    if (result == STATIC_NO_BLOCK)
        return 0;
    must_make_sense(&table);
    n = write_anew(&table, &comm, anew);
    MUST(n > MOST_WRITTEN || parse(anew, n, &comm, &other, error) == STATIC_FOUND);
    MUST(other.digest == table.digest);
    return 0;
}
