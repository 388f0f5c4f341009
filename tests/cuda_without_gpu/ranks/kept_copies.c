/* What a rank sends to its card and reads again: a library to preload, for DistributedDataParallel on simulated cards.
 *
 * A card's memory reads as zero. DDP sends the order of its buckets to all ranks, in small tensors on the card. Here small
 * copies from the host are kept, by their address, and read again; collective operations change nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_KEPT = 64, LARGEST = 1 << 16, TO_CARD = 1, FROM_CARD = 2, ON_CARD = 3 };

static struct kept {
    const char *address;
    size_t bytes;
    char *content;
} all_kept[NUM_KEPT];
static int next;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static const char *find(const char *address, size_t bytes) {
    for (int age = 1; age <= NUM_KEPT; age++) { /* the newest first */
        struct kept *it = &all_kept[(next + NUM_KEPT - age) % NUM_KEPT];
        if (it->content && address >= it->address && address + bytes <= it->address + it->bytes)
            return it->content + (address - it->address);
    }
    return NULL;
}

static void keep(const char *address, const char *content, size_t bytes) {
    struct kept *it = &all_kept[next];
    char *copy = memcpy(malloc(bytes), content, bytes);
    free(it->content);
    *it = (struct kept){address, bytes, copy};
    next = (next + 1) % NUM_KEPT;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    static int (*copy)(void *, const void *, size_t, int, void *);
    if (!copy) copy = (int (*)(void *, const void *, size_t, int, void *))dlsym(RTLD_NEXT, "cudaMemcpyAsync");
    int result = copy(to, from, bytes, kind, stream);
    if (bytes > LARGEST) return result;
    pthread_mutex_lock(&mutex);
    const char *found = kind == TO_CARD ? from : find(from, bytes);
    if (found && kind == FROM_CARD) memcpy(to, found, bytes);
    else if (found && (kind == TO_CARD || kind == ON_CARD)) keep(to, found, bytes);
    pthread_mutex_unlock(&mutex);
    return result;
}

int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = 0;
    return 0;
}
