/* NCCL: communicators, and collective operations, which like any kernel leave what is not known. */
#include "card.h"

#include <stdlib.h>
#include <string.h>

struct communicator {
    int num_ranks, rank;
    char padding[504]; /* nobody reads it */
};

static int make(struct communicator **made, int num_ranks, int rank) {
    *made = calloc(1, sizeof **made);
    **made = (struct communicator){num_ranks, rank, {0}};
    return 0;
}

struct unique_id {
    char bytes[128];
};

int ncclGetVersion(int *version) {
    *version = 22900; /* 2.29.0 */
    return 0;
}

int ncclGetUniqueId(struct unique_id *id) {
    memset(id, 1, sizeof *id);
    return 0;
}

int ncclCommInitRank(struct communicator **made, int num_ranks, struct unique_id id, int rank) {
    return make(made, num_ranks, rank);
}

int ncclCommInitRankConfig(struct communicator **made, int num_ranks, struct unique_id id, int rank, void *config) {
    return make(made, num_ranks, rank);
}

int ncclCommInitRankScalable(struct communicator **made, int num_ranks, int rank, int num_ids, struct unique_id *ids,
                             void *config) {
    return make(made, num_ranks, rank);
}

/* Who else has this colour is not known: it is taken for all. */
int ncclCommSplit(struct communicator *of, int colour, int key, struct communicator **made, void *config) {
    if (colour >= 0) return make(made, of->num_ranks, of->rank);
    *made = NULL;
    return 0;
}

int ncclCommDestroy(struct communicator *it) {
    free(it);
    return 0;
}

int ncclCommAbort(struct communicator *it) { return ncclCommDestroy(it); }

int ncclCommCount(struct communicator *it, int *count) {
    *count = it->num_ranks;
    return 0;
}

int ncclCommUserRank(struct communicator *it, int *rank) {
    *rank = it->rank;
    return 0;
}

int ncclCommCuDevice(struct communicator *it, int *device) {
    *device = card_current_device();
    return 0;
}

int ncclCommGetAsyncError(struct communicator *it, int *error) {
    *error = 0;
    return 0;
}

const char *ncclGetErrorString(int status) { return status ? "an error of the simulated card" : "no error"; }
const char *ncclGetLastError(struct communicator *it) { return ""; }

int ncclCommRegister(struct communicator *it, void *buffer, size_t bytes, void **handle) {
    *handle = buffer;
    return 0;
}

static int begin(int writes) {
    card_begins_collective();
    if (writes) card_launched();
    return 0;
}

int ncclAllReduce(void) { return begin(1); }
int ncclAlltoAll(void) { return begin(1); }
int ncclReduceScatter(void) { return begin(1); }
int ncclReduce(void) { return begin(1); }
int ncclSend(void) { return begin(0); }
int ncclRecv(void) { return begin(1); }

/* What another rank has is taken for what this one has: the order of DistributedDataParallel's buckets, Python objects. */
int ncclBcast(void) { return begin(0); }

static size_t bytes_of(size_t count, int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
    return count * (type < (int)sizeof sizes / (int)sizeof *sizes ? sizes[type] : 1);
}

int ncclBroadcast(const void *sent, void *received, size_t count, int type) {
    if (sent != received) card_move(received, sent, bytes_of(count, type));
    return begin(0);
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, struct communicator *it) {
    size_t bytes = bytes_of(count, type);
    void *own = malloc(bytes);
    int is_known = card_known(own, sent, bytes);
    if (is_known) card_repeat(received, own, bytes, it->num_ranks);
    free(own);
    return begin(!is_known);
}
