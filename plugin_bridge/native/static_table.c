#define _GNU_SOURCE
#include "static_table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "table.h"

#define MOST_BYTES (1u << 20)
#define MOST_LINE 255
#define MOST_BLOCKS 256
#define MOST_CHANNELS 64
#define FIELDS 8
#define UNLIMITED UINT64_MAX

static const char *const funcs[] = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"};
static const char *const algos[] = {"tree",      "ring", "collnet_direct", "collnet_chain", "nvls",
                                    "nvls_tree", "pat"};
static const char *const protos[] = {"ll", "ll128", "simple"};

struct block {
    uint64_t ranks, nodes, max_channels;
    char name[DCC_NAME_BYTES];
};

struct parser {
    const struct static_comm *comm;
    struct dcc_table *out;
    struct dcc_table entries; /* of the block that is being read */
    struct block blocks[MOST_BLOCKS];
    unsigned n_blocks, line;
    bool begun, ended, found;
    char *error;
};

static __attribute__((format(printf, 2, 3))) bool refuse(struct parser *p, const char *format, ...) {
    va_list arguments;
    int n = snprintf(p->error, STATIC_ERROR_BYTES, "%u: ", p->line);
    va_start(arguments, format);
    vsnprintf(p->error + n, STATIC_ERROR_BYTES - (size_t)n, format, arguments);
    va_end(arguments);
    return false;
}

/* Digits and nothing else. */
static bool number(const char *word, uint64_t *value) {
    *value = 0;
    if (!*word)
        return false;
    for (; *word; word++) {
        if (*word < '0' || *word > '9' || __builtin_mul_overflow(*value, 10, value) ||
            __builtin_add_overflow(*value, (uint64_t)(*word - '0'), value))
            return false;
    }
    return true;
}

static int place(const char *word, const char *const *names, int n) {
    for (int i = 0; i < n; i++)
        if (strcmp(word, names[i]) == 0)
            return i;
    return -1;
}

static bool is_own(const char *word) {
    return strcmp(word, "-") == 0;
}

/* The smallest message of a size bin: the inverse of dcc_size_bin(). */
static uint64_t bin_bytes(uint32_t bin) {
    return bin < 8 ? bin : (uint64_t)(8 | (bin & 7)) << ((bin >> 3) - 1);
}

static uint64_t last_of_bin(uint32_t bin) {
    return bin + 1 < DCC_BINS ? bin_bytes(bin + 1) - 1 : UNLIMITED;
}

/* ---- blocks ---- */

/* The next word of a header, which must begin with `what`. */
static bool header_number(struct parser *p, char **rest, const char *what, uint64_t most, uint64_t *value) {
    size_t n = strlen(what);
    char *word = strsep(rest, " ");
    if (!word || strncmp(word, what, n) != 0 || !number(word + n, value) || *value < 1 || *value > most)
        return refuse(p, "expected %s and a number from 1 to %llu, not %.40s", what, (unsigned long long)most,
                      word ? word : "the end of the line");
    return true;
}

static bool begin_block(struct parser *p, char *rest) {
    if (p->n_blocks == MOST_BLOCKS)
        return refuse(p, "more than %d communicators", MOST_BLOCKS);
    struct block *b = &p->blocks[p->n_blocks];
    if (!header_number(p, &rest, "ranks=", DCC_MOST_RANKS, &b->ranks) ||
        !header_number(p, &rest, "nodes=", b->ranks, &b->nodes) ||
        !header_number(p, &rest, "max_channels=", MOST_CHANNELS, &b->max_channels))
        return false;
    b->name[0] = 0;
    if (rest) { /* names may have spaces in them */
        size_t n = strlen(rest);
        if (strncmp(rest, "name=", 5) != 0 || n < 6 || n - 5 >= sizeof b->name)
            return refuse(p, "expected name= and 1 to %zu bytes, or the end of the line, not %.40s",
                          sizeof b->name - 1, rest);
        memcpy(b->name, rest + 5, n - 4);
    }
    for (unsigned i = 0; i < p->n_blocks; i++) {
        const struct block *other = &p->blocks[i];
        if (other->ranks == b->ranks && other->nodes == b->nodes && strcmp(other->name, b->name) == 0)
            return refuse(p, "a second block for the same communicator: ranks=%llu nodes=%llu%s%s",
                          (unsigned long long)b->ranks, (unsigned long long)b->nodes,
                          *b->name ? " name=" : "", b->name);
    }
    p->n_blocks++;
    memset(&p->entries, 0, sizeof p->entries);
    return true;
}

/* A block with the communicator's name goes before one without any, wherever they stand. */
static void end_block(struct parser *p) {
    if (p->n_blocks == 0)
        return;
    const struct block *b = &p->blocks[p->n_blocks - 1];
    bool named = b->name[0] != 0;
    if (b->ranks != p->comm->ranks || b->nodes != p->comm->nodes ||
        (named && strcmp(b->name, p->comm->name) != 0) || (p->found && !named))
        return;
    p->found = true;
    memcpy(p->out, &p->entries, sizeof *p->out);
    p->out->magic = DCC_TABLE_MAGIC;
    p->out->abi = DCC_ABI;
    p->out->version = 1;
    p->out->max_channels = (uint32_t)b->max_channels;
    p->out->apply = 1;
    p->out->digest = dcc_table_digest(p->out);
}

/* ---- lines ---- */

/* From the first to the last bin of a range whose ends must be those of bins. */
static bool range(struct parser *p, const char *least, const char *most, uint32_t *from, uint32_t *to) {
    uint64_t low, high = UNLIMITED;
    if (!number(least, &low))
        return refuse(p, "min_bytes is %.40s; it must be a number", least);
    if (!is_own(most) && !number(most, &high))
        return refuse(p, "max_bytes is %.40s; it must be a number, or - for no limit", most);
    *from = dcc_size_bin(low);
    *to = dcc_size_bin(high);
    if (low > high)
        return refuse(p, "min_bytes %s is above max_bytes %s", least, most);
    if (bin_bytes(*from) != low)
        return refuse(p, "min_bytes %s is not where a size bin begins; %llu is", least,
                      (unsigned long long)bin_bytes(*from));
    if (last_of_bin(*to) != high) {
        if (last_of_bin(*to) == UNLIMITED)
            return refuse(p, "max_bytes %s is in the last size bin; it ends with -", most);
        return refuse(p, "max_bytes %s is not where a size bin ends; %llu is", most,
                      (unsigned long long)last_of_bin(*to));
    }
    return true;
}

static bool pair(struct parser *p, const char *algo, const char *proto, struct dcc_entry *entry) {
    int a = place(algo, algos, DCC_ALGOS), q = place(proto, protos, DCC_PROTOS);
    if (is_own(algo) != is_own(proto))
        return refuse(p, "algorithm %.40s and protocol %.40s: both are -, or none", algo, proto);
    if (!is_own(algo) && a < 0)
        return refuse(p, "there is no algorithm %.40s", algo);
    if (!is_own(proto) && q < 0)
        return refuse(p, "there is no protocol %.40s", proto);
    entry->algo = a < 0 ? 255 : (uint8_t)a;
    entry->proto = q < 0 ? 255 : (uint8_t)q;
    return true;
}

static bool amounts(struct parser *p, const char *channels, const char *chunk, struct dcc_entry *entry) {
    uint64_t most = p->blocks[p->n_blocks - 1].max_channels, count = 0, bytes = 0;
    if (!is_own(channels) && (!number(channels, &count) || count > most))
        return refuse(p,
                      "channels is %.40s; it must be 1 to max_channels, which is %llu, or - for NCCL's own",
                      channels, (unsigned long long)most);
    if (!is_own(chunk) &&
        (!number(chunk, &bytes) || bytes & (bytes - 1) || bytes == 1 || bytes > 1u << DCC_MAX_CHUNK_LOG2))
        return refuse(p, "chunk_bytes is %.40s; it must be a power of two from 2 to %u, or - for NCCL's own",
                      chunk, 1u << DCC_MAX_CHUNK_LOG2);
    if (bytes && entry->algo == 255)
        return refuse(p, "chunk_bytes %s needs an algorithm and a protocol", chunk);
    entry->channels = (uint8_t)count;
    entry->chunk_log2 = bytes ? (uint8_t)__builtin_ctzll(bytes) : 0;
    return true;
}

static bool add_entries(struct parser *p, int n, char *const *fields) {
    if (n != FIELDS)
        return refuse(
            p,
            "expected %d fields, separated by single spaces: collective min_bytes max_bytes pipelined "
            "algorithm protocol channels chunk_bytes",
            FIELDS);
    int func = place(fields[0], funcs, DCC_FUNCS);
    if (func < 0)
        return refuse(p, "there is no collective %.40s", fields[0]);
    if (p->n_blocks == 0)
        return refuse(p, "a line before the first communicator");
    static const char *const words[] = {"no", "yes", "any"};
    int pipelined = place(fields[3], words, 3);
    if (pipelined < 0)
        return refuse(p, "pipelined is %.40s; it must be yes, no or any", fields[3]);
    uint32_t from = 0, to = 0;
    struct dcc_entry entry = {.set = 1};
    if (!range(p, fields[1], fields[2], &from, &to) || !pair(p, fields[4], fields[5], &entry) ||
        !amounts(p, fields[6], fields[7], &entry))
        return false;
    for (int way = 0; way < 2; way++)
        for (uint32_t bin = from; bin <= to && (pipelined == 2 || pipelined == way); bin++) {
            struct dcc_entry *at = &p->entries.entries[(uint32_t)(func * 2 + way) * DCC_BINS + bin];
            if (at->set)
                return refuse(p, "%s of %llu bytes, %s, has a line already", fields[0],
                              (unsigned long long)bin_bytes(bin), way ? "pipelined" : "not pipelined");
            *at = entry;
        }
    return true;
}

static bool parse_line(struct parser *p, char *line) {
    if (p->ended)
        return refuse(p, "something behind the end");
    if (!p->begun) {
        p->begun = true;
        return strcmp(line, "dynamiccl-table 1") == 0 ||
               refuse(p, "a table begins with dynamiccl-table 1, this one with %.40s", line);
    }
    if (!*line || *line == '#')
        return true;
    if (strcmp(line, "end") == 0) {
        end_block(p);
        p->ended = true;
        return true;
    }
    if (strncmp(line, "communicator ", 13) == 0) {
        end_block(p);
        return begin_block(p, line + 13);
    }
    char *fields[FIELDS], *rest = line;
    int n = 0;
    while (rest) {
        char *field = strsep(&rest, " ");
        if (n < FIELDS)
            fields[n] = field;
        n++;
    }
    return add_entries(p, n, fields);
}

static bool parse(struct parser *p, const char *text, size_t bytes) {
    for (const char *end = text + bytes; text < end;) {
        char line[MOST_LINE + 1];
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        p->line++;
        if (!stop)
            return refuse(p, "the last line does not end: the file was cut short");
        size_t n = (size_t)(stop - text);
        if (n > MOST_LINE)
            return refuse(p, "a line of %zu bytes; at most %d are read", n, MOST_LINE);
        for (size_t i = 0; i < n; i++)
            if (text[i] < ' ' || text[i] > '~')
                return refuse(p, "byte %u; a table is plain ASCII, and lines end with a newline alone",
                              (unsigned char)text[i]);
        memcpy(line, text, n);
        line[n] = 0;
        if (!parse_line(p, line))
            return false;
        text = stop + 1;
    }
    p->line++;
    return p->ended || refuse(p, "a table ends with a line that says end: the file was cut short");
}

enum static_result static_table_parse(const char *text, size_t bytes, const struct static_comm *comm,
                                      struct dcc_table *table, char *error) {
    struct parser *p = calloc(1, sizeof *p);
    if (!p) {
        snprintf(error, STATIC_ERROR_BYTES, "0: no memory");
        return STATIC_REFUSED;
    }
    p->comm = comm;
    p->out = table;
    p->error = error;
    bool whole = parse(p, text, bytes), found = p->found;
    free(p);
    return !whole ? STATIC_REFUSED : found ? STATIC_FOUND : STATIC_NO_BLOCK;
}

/* ---- files ---- */

static ssize_t read_all(int fd, char *into, size_t bytes) {
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = read(fd, into + got, bytes - got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    return (ssize_t)got;
}

/* Why a file cannot be believed; NULL if it can. */
static const char *objection(const struct stat *st) {
    if (!S_ISREG(st->st_mode))
        return "it is not a file";
    if (st->st_uid != geteuid() && st->st_uid != 0)
        return "it belongs to another user; it must be this user's or root's";
    if (st->st_mode & 022)
        return "others than its owner may write to it: chmod go-w";
    if (st->st_size > MOST_BYTES)
        return "it is larger than 1 MiB";
    return NULL;
}

enum static_result static_table_read(const char *path, const struct static_comm *comm,
                                     struct dcc_table *table, char *error) {
    static const char outcome[] = "the table is not used, and NCCL decides";
    struct stat st;
    const char *wrong = NULL;
    char *text = NULL, said[STATIC_ERROR_BYTES];
    enum static_result result = STATIC_REFUSED;
    ssize_t bytes = -1;
    /* Whatever it is, opening it does not wait. */
    int fd = *path == '/' ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    if (*path != '/')
        wrong = "it must be an absolute path";
    else if (fd < 0 || fstat(fd, &st) != 0)
        wrong = strerror(errno);
    else if (!(wrong = objection(&st))) {
        text = malloc((size_t)st.st_size + 1);
        if (!text)
            wrong = "no memory";
        else if ((bytes = read_all(fd, text, (size_t)st.st_size + 1)) < 0)
            wrong = strerror(errno);
        else if (bytes != st.st_size)
            wrong = "it was changed while it was read";
    }
    if (wrong) {
        snprintf(error, STATIC_ERROR_BYTES, "DYNAMICCL_TABLE=%.200s: %s; %s", path, wrong, outcome);
    } else {
        result = static_table_parse(text, (size_t)bytes, comm, table, said);
        if (result == STATIC_REFUSED)
            snprintf(error, STATIC_ERROR_BYTES, "%.160s:%.280s; %s", path, said, outcome);
    }
    free(text);
    if (fd >= 0)
        close(fd);
    return result;
}
