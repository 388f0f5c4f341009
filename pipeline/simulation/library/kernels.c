/* Kernels: torch registers and launches them, and none is run. */
#include "card.h"

#include <cuda_runtime_api.h>
#include <string.h>

/* ---- the kernels whose result is known: torch.all, whose answer values.c gives, and fill_, whose value is an argument;
 * and those of attention, which are reported. The loader names each kernel's host function. ---- */

enum { NUM_PLACES = 1 << 13, OF_ALL = -1, FLASH = -2, MEMORY_EFFICIENT = -3 };

static struct known_kernel {
    const void *host;
    int kind; /* one of those above, or the bytes of an element that is filled */
} known_kernels[NUM_PLACES];
static __thread int was_asked_for_all;

int card_was_asked_for_all(void) { return was_asked_for_all; }

/* Return the place of a kernel's host function, or the free one where it belongs. */
static struct known_kernel *place_of(const void *host) {
    size_t at = (size_t)host / 16 * 2654435761u % NUM_PLACES;
    while (known_kernels[at].host && known_kernels[at].host != host) at = (at + 1) % NUM_PLACES;
    return &known_kernels[at];
}

/* Return the bytes of an element that a kernel fills, by its mangled name; 0 for other kernels. */
static int filled_bytes(const char *name) {
    static const char FILL[] = "11FillFunctorI";
    static const struct {
        const char *type;
        int bytes;
    } types[] = {{"lE", 8}, {"dE", 8}, {"iE", 4}, {"fE", 4}, {"sE", 2}, {"N3c104HalfE", 2}, {"N3c108BFloat16E", 2},
                 {"hE", 1}, {"aE", 1}, {"bE", 1}};
    const char *found = strstr(name, "vectorized_elementwise_kernel") ? strstr(name, FILL) : NULL;
    for (size_t i = 0; found && i < sizeof types / sizeof *types; i++)
        if (!strncmp(found + sizeof FILL - 1, types[i].type, strlen(types[i].type))) return types[i].bytes;
    return 0;
}

/* Return the kind of a kernel by its mangled name; 0 if nothing need be known of it. */
static int kind_of(const char *name) {
    if (strstr(name, "and_kernel_cuda")) return OF_ALL;
    if (strstr(name, "flash_fwd")) return FLASH;
    if (strstr(name, "fmha_cutlassF")) return MEMORY_EFFICIENT;
    return filled_bytes(name);
}

static void note(const void *kernel, void **arguments) {
    struct known_kernel *it = place_of(kernel);
    was_asked_for_all = it->host && it->kind == OF_ALL;
    if (it->host && it->kind == FLASH) card_attention("flash");
    if (it->host && it->kind == MEMORY_EFFICIENT) card_attention("memory-efficient");
    if (it->host && it->kind > 0) /* its arguments: the number of elements, the value, the address */
        card_repeat(*(void **)arguments[2], arguments[1], it->kind, *(int *)arguments[0]);
    else card_launched();
}

void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int thread_limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
    static int count;
    int kind = kind_of(name);
    if (kind && count++ < NUM_PLACES / 2) *place_of(host) = (struct known_kernel){host, kind};
}

void **__cudaRegisterFatBinary(void *binary) { return (void **)known_kernels; }

/* ---- launches: the configuration between <<< and >>> is handed from the caller to the kernel's host function ---- */

static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} configuration;

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared_bytes = shared_bytes, configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, cudaStream_t *stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared_bytes = configuration.shared_bytes, *stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}

NEW_ALIAS(__cudaGetKernel, cudaGetKernel);

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    note(kernel, arguments);
    return cudaSuccess;
}

ALIAS(cudaLaunchCooperativeKernel, cudaLaunchKernel);
NEW_ALIAS(__cudaLaunchKernel, cudaLaunchKernel);

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    note(kernel, arguments);
    return cudaSuccess;
}

/* ---- attributes and occupancy: torch and CUB size grids and temporary memory by them ---- */

/* CUB takes the version for one that it was compiled for: the newest of torch's build that the card can run. Where the
   build has none for an old card, attention asks whether there is one, as in a build that has. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    static const int built[] = {BUILT_CAPABILITIES};
    int of_card = 10 * card_model.major + card_model.minor;
    memset(attributes, 0, sizeof *attributes);
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (built[i] <= of_card && built[i] > attributes->ptxVersion)
            attributes->ptxVersion = built[i];
    attributes->binaryVersion = attributes->ptxVersion ? attributes->ptxVersion : of_card;
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    cudaDeviceGetAttribute(&attributes->maxDynamicSharedSizeBytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                          size_t shared_bytes) {
    int threads_of_a_multiprocessor;
    cudaDeviceGetAttribute(&threads_of_a_multiprocessor, cudaDevAttrMaxThreadsPerMultiProcessor, 0);
    *blocks = threads_of_a_multiprocessor / threads;
    return cudaSuccess;
}

ALIAS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cudaOccupancyMaxActiveBlocksPerMultiprocessor);
