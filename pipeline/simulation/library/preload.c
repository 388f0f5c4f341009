/* The way into a process: whatever asks for one of NVIDIA's libraries by name or by path is given this one.
 *
 * Libraries that are linked to NVIDIA's find the empty ones with their names, which are loaded before any other. dlopen
 * with a path would still load a real one: torch does so with NVIDIA's packages.
 */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <string.h>

static const char *const NVIDIAS[] = {NVIDIA_LIBRARIES}; /* how their names begin, of library.py */

static int is_nvidias(const char *file) {
    const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file;
    if (!strstr(name, ".so")) return 0;
    for (size_t i = 0; i < sizeof NVIDIAS / sizeof *NVIDIAS; i++)
        if (!strncmp(name, NVIDIAS[i], strlen(NVIDIAS[i]))) return 1;
    return 0;
}

const char *card_library(void) {
    static Dl_info own;
    if (!own.dli_fname) dladdr(&card_model, &own);
    return own.dli_fname;
}

/* A call in tail position: the real dlopen must see the caller's address, by which it finds the caller's RUNPATH. */
__attribute__((optimize("optimize-sibling-calls"))) void *dlopen(const char *file, int mode) {
    static void *(*real)(const char *, int);
    if (!real) real = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    if (file && is_nvidias(file)) file = card_library();
    return real(file, mode);
}
