/* Events, which are the times at which they were recorded, and what torch's watchdog of NCCL learns from them.
 *
 * The watchdog is a thread that asks whether the event behind each collective has passed, and then lets go of the
 * collective's tensors.
 */
#define _GNU_SOURCE
#include "card.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct event {
    int64_t nanoseconds;
    int epoch;                /* how often the host had waited for the card when it was recorded */
    int is_behind_collective; /* one whose end nobody has seen */
};

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = card_new(sizeof(struct event));
    return cudaSuccess;
}

ALIAS(cudaEventCreateWithFlags, cudaEventCreate);

/* How often the host has waited for the card; collectives whose end nobody has seen, and those of them that began since the host last waited for the card. */
static int epoch, num_unseen, num_unseen_now;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void see(struct event *it) {
    if (!it || !it->is_behind_collective) return;
    pthread_mutex_lock(&lock);
    num_unseen -= it->is_behind_collective;
    if (it->epoch == epoch) num_unseen_now -= it->is_behind_collective;
    it->is_behind_collective = 0;
    pthread_mutex_unlock(&lock);
}

static __thread int has_begun; /* a collective behind which this thread has recorded no event yet */

void card_begins_collective(void) { has_begun = 1; }

static void put_behind_collective(struct event *it) {
    see(it); /* it is used again */
    pthread_mutex_lock(&lock);
    it->epoch = epoch, it->is_behind_collective = 1, num_unseen++, num_unseen_now++;
    pthread_mutex_unlock(&lock);
}

static cudaError_t host_waits(void) {
    pthread_mutex_lock(&lock);
    epoch++, num_unseen_now = 0;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* A training's iteration begins: without a host that waits, a real card is behind it by less than one. */
void card_begin_iteration(void) {
    static int begun_in = -1;
    if (epoch == begun_in) host_waits();
    begun_in = epoch;
}

/* How many collectives have ended whose end nobody has seen: no stream waits for them, nor has torch's watchdog looked. */
int card_num_unseen_collectives(void) { return num_unseen - num_unseen_now; }

ALIAS(cudaDeviceSynchronize, host_waits);
ALIAS(cudaStreamSynchronize, host_waits);
ALIAS(cudaEventSynchronize, host_waits);

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    see((struct event *)event);
    free(event);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    see((struct event *)event);
    return cudaSuccess;
}

/* What the card has computed so far, in nanoseconds: only products of matrices take any time, see cublas.c. */
static _Atomic int64_t work_nanoseconds;

void card_works(int64_t nanoseconds) { atomic_fetch_add_explicit(&work_nanoseconds, nanoseconds, memory_order_relaxed); }

static int64_t now_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec + work_nanoseconds;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct event *it = (struct event *)event;
    it->nanoseconds = now_nanoseconds();
    if (has_begun && stream) put_behind_collective(it); /* for one on the default stream torch holds nothing */
    has_begun = 0;
    return cudaSuccess;
}

ALIAS(cudaEventRecordWithFlags, cudaEventRecord);

static int is_watchdog(void) {
    static __thread char name[16];
    if (!name[0]) pthread_getname_np(pthread_self(), name, sizeof name);
    return !strcmp(name, "pt_nccl_watchdg");
}

/* All has passed, but for the watchdog: a real card would still be at what the host has not waited for, for a second. */
cudaError_t cudaEventQuery(cudaEvent_t event) {
    struct event *it = (struct event *)event;
    if (!it || !it->is_behind_collective || !is_watchdog()) return cudaSuccess;
    if (it->epoch == epoch && now_nanoseconds() - it->nanoseconds < 1000000000ll) return cudaErrorNotReady;
    see(it);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = (float)((((struct event *)end)->nanoseconds - ((struct event *)start)->nanoseconds) / 1e6);
    return cudaSuccess;
}
