/* NCCL: communicators, and collective operations, which like any kernel leave what is not known. */
#include "card.h"

#include <stdlib.h>
#include <string.h>

struct communicator {
    int num_ranks, rank;
};

static int make(struct communicator **made, int num_ranks, int rank) {
    *made = card_new(CARD_HANDLE_BYTES);
    **made = (struct communicator){num_ranks, rank};
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

NEW_ALIAS(ncclCommInitRankConfig, ncclCommInitRank);

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

NEW_ALIAS(ncclCommAbort, ncclCommDestroy);

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

static int begin(void) {
    card_begins_collective();
    return 0;
}

static int begin_writing(void) {
    card_launched();
    return begin();
}

NEW_ALIAS(ncclAllReduce, begin_writing);
NEW_ALIAS(ncclAlltoAll, begin_writing);
NEW_ALIAS(ncclReduceScatter, begin_writing);
NEW_ALIAS(ncclReduce, begin_writing);
NEW_ALIAS(ncclRecv, begin_writing);
NEW_ALIAS(ncclSend, begin);

/* What another rank has is taken for what this one has: the order of DistributedDataParallel's buckets, Python objects. */
NEW_ALIAS(ncclBcast, begin);

static size_t bytes_of(size_t count, int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
    return count * (type < (int)sizeof sizes / (int)sizeof *sizes ? sizes[type] : 1);
}

int ncclBroadcast(const void *sent, void *received, size_t count, int type) {
    if (sent != received) card_move(received, sent, bytes_of(count, type), 1);
    return begin();
}

int ncclAllGather(const void *sent, void *received, size_t count, int type, struct communicator *it) {
    return card_move(received, sent, bytes_of(count, type), it->num_ranks) ? begin() : begin_writing();
}
