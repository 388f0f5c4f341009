/* NCCL: communicators, and what a collective operation leaves if all ranks do the same. */
#include "card.h"

#include <stdint.h>
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

/* ---- collective operations ---- */

static size_t bytes_of(size_t count, int type) { /* of ncclDataType_t */
    static const char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? count * sizes[type] : 0;
}

int ncclAllGather(const char *from, char *to, size_t count, int type, struct communicator *it, void *stream) {
    size_t bytes = bytes_of(count, type);
    card_launched();
    for (int rank = 0; rank < it->num_ranks; rank++)
        if (to + rank * bytes != from) card_move(to + rank * bytes, from, bytes);
    return 0;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *it,
                  void *stream) {
    card_launched();
    if (to != from) card_move(to, from, bytes_of(count, type));
    return 0;
}

enum { PRODUCT = 1, GREATEST = 2, LEAST = 3, MEAN = 4 }; /* of ncclRedOp_t */

/* The greatest, the least and the mean of equal numbers are the numbers; a sum is not known. */
static void reduce(const char *from, char *to, size_t count, int type, int operation) {
    size_t bytes = bytes_of(count, type);
    card_launched();
    if (operation >= GREATEST && operation <= MEAN) {
        if (to != from) card_move(to, from, bytes);
    } else card_forget(to, bytes);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, struct communicator *it,
                  void *stream) {
    reduce(from, to, count, type, operation);
    return 0;
}

int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, struct communicator *it,
               void *stream) {
    reduce(from, to, count, type, operation);
    return 0;
}

int ncclReduceScatter(const char *from, void *to, size_t count, int type, int operation, struct communicator *it,
                      void *stream) {
    reduce(from + it->rank * bytes_of(count, type), to, count, type, operation);
    return 0;
}
