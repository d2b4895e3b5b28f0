/* Which release of NCCL is emulated, and what differs between releases. */
#ifndef DYNAMICCL_EMULATED_RELEASE_H
#define DYNAMICCL_EMULATED_RELEASE_H

#include <stdbool.h>
#include <stddef.h>

struct release {
    int minor, patch;    /* of 2.minor.patch: the first release that behaves like this */
    int tuner, profiler; /* newest version of each plugin that it looks for; 0: none */
    int algorithms;
    size_t least_traffic;    /* bytes that make one more channel worth it */
    size_t coll_bytes;       /* of a collective's work item */
    bool rounds_traffic;     /* a channel's share is rounded up to 16 bytes, not raised to least_traffic */
    bool registers_direct;   /* rings and trees use registered buffers */
    bool channel_per_device; /* they then have a channel per network device across nodes, not one */
    bool jobs_inline;        /* a group's only job runs on the caller's thread */
    bool mask_of_task; /* the profiler's mask is read when an operation is called; else when it is launched */
    bool names_in_events; /* Coll and P2p events of v1 to v3 say the communicator's name and hash */
    bool api_events;
    bool bcast_apart;      /* broadcasts of several roots are one kernel, and no broadcast has events */
    bool p2p_simple_first; /* channels of a transfer are counted before its protocol is chosen */
    /* Entries of a tuner's constants for Blackwell that 2.30 has changed; 0: as in 2.30. */
    double blackwell_ring_ll128[3], blackwell_nvls_tree;
    bool corrects_nvls_tree; /* Blackwell's NVLS tree is corrected by size like a tree */
};

/* By EMULATED_NCCL_VERSION, 2.30.7 if that is not set. Ends the process where there is no such release. */
const struct release *release(void);
int release_number(void); /* as ncclGetVersion() has it: 23007 */

#endif
