/* The simulated cards: what they are, and the memory of theirs that this process uses. */
#include "card.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct card card_model;
int card_count;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t taken_bytes[MAX_CARDS];
static int has_context[MAX_CARDS];
static __thread int current_device;

void *card_new(size_t bytes) {
    void *made = calloc(1, bytes);
    if (made) return made;
    fprintf(stderr, "simulated card: the host has no %zu bytes of memory left\n", bytes);
    abort();
}

static const char *text_of(const char *variable) {
    const char *text = getenv(variable);
    if (!text) {
        fprintf(stderr, "simulated card: SIMULATED_CARD_NAME is set, and %s is not\n", variable);
        exit(2);
    }
    return text;
}

static size_t number_of(const char *variable) { return strtoull(text_of(variable), NULL, 10); }

/* Without SIMULATED_CARD_NAME the machine has no card. A forked process may read it again, before its first use of CUDA. */
__attribute__((constructor, visibility("default"))) void card_read_environment(void) {
    const char *name = getenv("SIMULATED_CARD_NAME");
    if (!name) return;
    snprintf(card_model.name, sizeof card_model.name, "%s", name);
    sscanf(text_of("SIMULATED_CARD_CAPABILITY"), "%d.%d", &card_model.major, &card_model.minor);
    sscanf(text_of("SIMULATED_CARD_CLOCKS"), "%d,%d,%d,%lf", &card_model.clock_mhz, &card_model.memory_clock_mhz,
           &card_model.bus_bits, &card_model.l2_mib);
    card_model.num_multiprocessors = (int)number_of("SIMULATED_CARD_MULTIPROCESSORS");
    card_model.memory_bytes = number_of("SIMULATED_CARD_MEMORY_MIB") * MIB;
    card_model.context_bytes = number_of("SIMULATED_CARD_CONTEXT_MIB") * MIB;
    card_model.others_bytes = number_of("SIMULATED_CARD_OTHERS_MIB") * MIB;
    card_count = (int)number_of("SIMULATED_CARD_COUNT");
    if (card_count > MAX_CARDS) card_count = MAX_CARDS;
}

/* ---- which cards CUDA sees: CUDA_VISIBLE_DEVICES, a list of numbers that ends at the first that is none ---- */

static int numbers[MAX_CARDS], num_visible;

static void read_visible_devices(void) {
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    for (int number = 0; !at && number < card_count; number++) numbers[num_visible++] = number;
    while (at && *at && num_visible < card_count) {
        char *end;
        long number = strtol(at, &end, 10);
        if (end == at || number < 0 || number >= card_count) break;
        numbers[num_visible++] = (int)number;
        at = *end == ',' ? end + 1 : "";
    }
}

int card_num_visible(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_visible_devices);
    return num_visible;
}

int card_number(int device) { return device >= 0 && device < card_num_visible() ? numbers[device] : 0; }

/* ---- memory ---- */

size_t card_used(int number) {
    return taken_bytes[number] + has_context[number] * card_model.context_bytes + card_model.others_bytes;
}

void card_begin_context(int number) {
    if (has_context[number]) return;
    has_context[number] = 1;
    card_report_use(number, card_used(number) - card_model.others_bytes);
}
int card_has_context(int number) { return has_context[number]; }

int card_take(int number, size_t bytes) {
    pthread_mutex_lock(&lock);
    card_begin_context(number);
    int fits = card_used(number) + bytes <= card_model.memory_bytes;
    if (fits) taken_bytes[number] += bytes;
    pthread_mutex_unlock(&lock);
    if (fits) card_report_use(number, card_used(number) - card_model.others_bytes);
    return fits;
}

void card_return(int number, size_t bytes) {
    pthread_mutex_lock(&lock);
    taken_bytes[number] -= bytes;
    pthread_mutex_unlock(&lock);
}

/* ---- the current device ---- */

int card_current_device(void) { return current_device; }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = card_num_visible();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return card_num_visible() ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= card_num_visible()) {
        char what[80];
        snprintf(what, sizeof what, "asked for cuda:%d, and sees %d of the machine's GPUs", device, card_num_visible());
        card_refused(what);
        return cudaErrorInvalidDevice;
    }
    current_device = device;
    card_begin_context(card_number(device));
    return cudaSuccess;
}
