/* What is known of a card's content: small copies from the host, and what they were copied to.
 *
 * No kernel computes anything, so whatever one may have written is not known: content is known until the next kernel is
 * launched. Later it may be other data's place, since torch's allocator uses memory again without a word to anybody.
 */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { NUM_KEPT = 512, LARGEST = 1 << 16, HOST_PAGE = 4096 };

static struct kept {
    const char *address;
    size_t bytes;
    char *content;
    uint64_t num_launches; /* of kernels, when it was copied */
} all_kept[NUM_KEPT];
static int next;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t num_launches;
static void (*watcher)(size_t bytes, int may_steer);
static int (*source)(void *to, const void *from, size_t bytes);

void card_launched(void) { atomic_fetch_add_explicit(&num_launches, 1, memory_order_relaxed); }

/* Call `watch` whenever the host reads what is not known. */
void card_watch_reads(void (*watch)(size_t bytes, int may_steer)) { watcher = watch; }

/* Ask `fill` for what is not known here: it returns 2 if it knew it, 1 if it guessed, 0 if it did nothing. */
void card_ask(int (*fill)(void *to, const void *from, size_t bytes)) { source = fill; }

static void forget(const char *address, size_t bytes) {
    for (int i = 0; i < NUM_KEPT; i++) {
        struct kept *it = &all_kept[i];
        if (!it->content || address + bytes <= it->address || address >= it->address + it->bytes) continue;
        free(it->content);
        it->content = NULL;
    }
}

static void keep(const char *address, char *content, size_t bytes, uint64_t launches) {
    struct kept *it = &all_kept[next];
    free(it->content);
    *it = (struct kept){address, bytes, content, launches};
    next = (next + 1) % NUM_KEPT;
}

static const char *content_at(const struct kept *it, const char *address) {
    return it->content + (address - it->address);
}

/* Return the newest kept content of these bytes. */
static struct kept *find(const char *address, size_t bytes) {
    for (int age = 1; bytes <= LARGEST && age <= NUM_KEPT; age++) {
        struct kept *it = &all_kept[(next + NUM_KEPT - age) % NUM_KEPT];
        if (it->content && address >= it->address && address + bytes <= it->address + it->bytes) return it;
    }
    return NULL;
}

/* Keep a value that stands so many times from an address on, and nothing of what was there before. */
static void fill(const void *to, const void *value, size_t value_bytes, size_t count, uint64_t launches) {
    size_t bytes = value_bytes * count;
    char *content = value && bytes && bytes <= LARGEST ? card_new(bytes) : NULL;
    for (size_t i = 0; content && i < count; i++) memcpy(content + i * value_bytes, value, value_bytes);
    forget(to, bytes);
    if (content) keep(to, content, bytes, launches);
}

void card_repeat(const void *to, const void *value, size_t value_bytes, size_t count) {
    pthread_mutex_lock(&lock);
    fill(to, value, value_bytes, count, atomic_load(&num_launches));
    pthread_mutex_unlock(&lock);
}

void card_write(const void *to, const void *content, size_t bytes) { card_repeat(to, content, bytes, 1); }

int card_move(const void *to, const void *from, size_t bytes, size_t count) {
    pthread_mutex_lock(&lock);
    struct kept *found = find(from, bytes);
    int is_known = found && found->num_launches == atomic_load(&num_launches);
    fill(to, found ? content_at(found, from) : NULL, bytes, count, found ? found->num_launches : 0);
    pthread_mutex_unlock(&lock);
    return is_known;
}

/* ---- answers that are known before an operator asks for them: how many elements it found ---- */

static __thread const int64_t *answers;
static __thread size_t num_answers;

/* The next reads of this thread are answered by these numbers, until the next call: one after another, or by several if
 * they are of an array. */
void card_answer(const int64_t *numbers, size_t count) {
    answers = numbers;
    num_answers = count;
}

static int answer(void *to, size_t bytes) {
    size_t count = (bytes + sizeof *answers - 1) / sizeof *answers;
    if (!count || count > num_answers || (count > 1 && bytes % sizeof *answers)) return 0;
    memcpy(to, answers, bytes); /* the lowest bytes come first */
    answers += count;
    num_answers -= count;
    return 1;
}

/* Whether this thread's reads are known by other means, so that they are not counted as unknown. */
static __thread int is_known_otherwise;

void card_reads_are_known(int are) { is_known_otherwise = are; }

/* Copy what is known of a card's memory; return whether it is. */
int card_known(void *to, const void *from, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct kept *found = find(from, bytes);
    if (found && found->num_launches != atomic_load(&num_launches)) found = NULL;
    if (found) memcpy(to, content_at(found, from), bytes);
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

/* Whether the program asked for what is read: torch's item() and its copies to the host do, nonzero() asks for itself. */
static int is_asked_by_program(void) {
    static const char *const ASKS[] = {"_ZN2at6native24_local_scalar_dense_cuda", "_ZN2at6native5copy_E"};
    void *callers[16];
    Dl_info function;
    for (int i = 0, count = backtrace(callers, 16); i < count; i++)
        for (size_t k = 0; k < sizeof ASKS / sizeof *ASKS; k++)
            if (dladdr(callers[i], &function) && function.dli_sname &&
                !strncmp(function.dli_sname, ASKS[k], strlen(ASKS[k])))
                return 1;
    return 0;
}

/* Whether a program's course may depend on a read: on a truth value, an integer, a size that an operator found. Other
 * reads of 4 bytes are mostly losses and norms that are logged. */
static int may_steer(size_t bytes) {
    return bytes == 1 || bytes == 8 || (bytes == 4 && !is_asked_by_program());
}

/* Zero what a read gives. Of page-locked memory whole pages are given back to the system, which has zeros for them:
 * activations that wait on the host then take none of its memory. */
static void zero(char *to, size_t bytes) {
    char *first = (char *)(((size_t)to + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE);
    char *end = (char *)(((size_t)to + bytes) / HOST_PAGE * HOST_PAGE);
    if (first >= end || !card_is_page_locked(to, bytes) || madvise(first, end - first, MADV_DONTNEED)) {
        memset(to, 0, bytes);
        return;
    }
    memset(to, 0, first - to);
    memset(end, 0, to + bytes - end);
}

void card_read(void *to, const void *from, size_t bytes) {
    if (!answer(to, bytes)) {
        if (card_known(to, from, bytes)) return;
        int filled = source ? source(to, from, bytes) : 0;
        if (filled == 2) return;
        if (!filled && bytes == sizeof(char)) *(char *)to = (char)card_was_asked_for_all();
        else if (!filled) zero(to, bytes);
    }
    if (!is_known_otherwise && watcher) watcher(bytes, may_steer(bytes));
}

/* ---- dispatch modes that look on ---- */

static int num_looking_on;

void card_looks_on(void) { num_looking_on++; }

/* Under a dispatch mode torch computes in other ways, for tensors that may be more than memory: it adds gradients out of
 * place, say. Modes that look on change no tensor, so torch is told of modes if there are others beside them; its binding
 * to Python, which asks whom to call, of all.
 */
_Bool _ZN3c104impl21dispatch_mode_enabledEv(void) { /* c10::impl::dispatch_mode_enabled() */
    static _Bool (*is_enabled)(void);
    static int64_t (*num_modes)(void);
    if (!is_enabled) {
        void *c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        num_modes = (int64_t (*)(void))dlsym(c10, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
        is_enabled = (_Bool (*)(void))dlsym(c10, "_ZN3c104impl21dispatch_mode_enabledEv");
    }
    if (!is_enabled() || num_modes() > num_looking_on) return is_enabled();
    Dl_info caller;
    return dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libtorch_python") != NULL;
}
