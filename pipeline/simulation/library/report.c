/* What a process did on its cards: the file PID.cards in $SIMULATED_CARD_REPORT, which the parent reads after the run.
 *
 * The file is mapped memory, so it is whole whenever and however the process ends. pipeline/simulation/report.py knows
 * its layout.
 */
#define _GNU_SOURCE
#include "card.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_FUNCTIONS = 512, NAME_BYTES = 80, UNMODELLED = 1, ASSUMED = 2, ATTENTION = 3, REFUSED = 4 };

struct report {
    uint64_t peak_bytes[MAX_CARDS]; /* of a card's memory that this process used, its context included */
    struct function {
        char name[NAME_BYTES];
        uint32_t kind, calls;
        uint64_t largest_bytes; /* that were assumed */
    } functions[MAX_FUNCTIONS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct report *report;

static void forget_parents(void) {
    report = NULL;
    pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_parents); }

/* Return this process's report; NULL if nobody asked for one. The file begins with what is said first. */
static struct report *open_report(void) {
    const char *folder = getenv("SIMULATED_CARD_REPORT");
    if (report || !folder) return report;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.cards", folder, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return NULL;
    void *at = MAP_FAILED;
    if (!ftruncate(file, sizeof *report)) at = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return report = at == MAP_FAILED ? NULL : at;
}

void card_report_use(int number, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct report *it = open_report();
    if (it && bytes > it->peak_bytes[number]) it->peak_bytes[number] = bytes;
    pthread_mutex_unlock(&lock);
}

static int note(const char *name, uint32_t kind, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct report *report = open_report();
    for (int i = 0; report && i < MAX_FUNCTIONS; i++) {
        struct function *it = &report->functions[i];
        if (it->kind && (it->kind != kind || strncmp(it->name, name, NAME_BYTES - 1))) continue;
        if (!it->kind) strncpy(it->name, name, NAME_BYTES - 1);
        it->kind = kind;
        it->calls++;
        if (bytes > it->largest_bytes) it->largest_bytes = bytes;
        break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int card_unmodelled(const char *name) {
    if (getenv("SIMULATED_CARD_VERBOSE")) fprintf(stderr, "simulated card: %s is not modelled\n", name);
    return note(name, UNMODELLED, 0);
}

int card_assumed(const char *name, size_t bytes) { return note(name, ASSUMED, bytes); }

int card_attention(const char *kernel) { return note(kernel, ATTENTION, 0); }

int card_refused(const char *what) { return note(what, REFUSED, 0); }
