/* Kernels: torch registers and launches them, and none is run. */
#include "card.h"

#include <cuda_runtime_api.h>
#include <string.h>

/* ---- the kernels of torch.all, whose answer memory.c gives: the loader names each kernel's host function ---- */

#define MAX_KERNELS_OF_ALL 256

static const void *kernels_of_all[MAX_KERNELS_OF_ALL];
static int num_kernels_of_all;
static __thread int was_asked_for_all;

int card_was_asked_for_all(void) { return was_asked_for_all; }

static void note(const void *kernel) {
    card_launched();
    was_asked_for_all = 0;
    for (int i = 0; i < num_kernels_of_all; i++) was_asked_for_all |= kernels_of_all[i] == kernel;
}

void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int thread_limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
    if (num_kernels_of_all < MAX_KERNELS_OF_ALL && strstr(name, "and_kernel_cuda"))
        kernels_of_all[num_kernels_of_all++] = host;
}

void **__cudaRegisterFatBinary(void *binary) { return (void **)kernels_of_all; }

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

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *host) { return __cudaGetKernel(kernel, host); }

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
    note(kernel);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    note(kernel);
    return cudaSuccess;
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    note(kernel);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    note(kernel);
    return cudaSuccess;
}

/* ---- attributes and occupancy: torch and CUB size grids and temporary memory by them ---- */

/* CUB takes the version for one that it was compiled for: the newest of torch's build that the card can run. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    static const int built[] = {BUILT_CAPABILITIES};
    memset(attributes, 0, sizeof *attributes);
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (built[i] <= 10 * card_model.major + card_model.minor && built[i] > attributes->ptxVersion)
            attributes->ptxVersion = attributes->binaryVersion = built[i];
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

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared_bytes, unsigned int flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}
