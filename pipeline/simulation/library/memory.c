/* Memory of the simulated cards: counted, never written and never read.
 *
 * An address of a card lies in a range that no process may touch, so that what would be wrong on a real card ends the
 * process here too. values.c knows what little is known of the content.
 */
#define _GNU_SOURCE
#include "card.h"

#define __CUDA_API_VERSION_INTERNAL /* the driver's functions by the names that torch asks for */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE (2 * MIB) /* the granularity of a card's memory */
#define ALL_ADDRESSES ((size_t)1 << 45)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *addresses, *lowest_address;

/* Memory that cudaMalloc, cudaHostAlloc or cudaMallocManaged gave, and addresses that the driver reserved; there are few
 * blocks, since torch caches what it frees. */
static struct block {
    char *address;
    size_t bytes;
    int number; /* of the card; -1 on the host */
    struct block *next;
} *blocks;

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static void add_block(void *address, size_t bytes, int number) {
    struct block *block = card_new(sizeof *block);
    *block = (struct block){address, bytes, number, blocks};
    blocks = block;
}

static struct block *block_within(const char *address, size_t bytes) {
    struct block *block = blocks;
    while (block && (address + bytes <= block->address || block->address + block->bytes <= address)) block = block->next;
    return block;
}

/* Return a block of a card, whose addresses lie below all earlier ones, as CUDA's driver gives them: torch's allocator
 * prefers the lowest of free blocks of one size. After the last ones come those that were given back. */
static char *new_block(size_t bytes, int number) {
    struct block *other = NULL;
    int num_rounds = 0;
    bytes = whole_pages(bytes);
    pthread_mutex_lock(&lock);
    if (!addresses)
        addresses = mmap(NULL, ALL_ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    do {
        if (other) lowest_address = other->address;
        if (!lowest_address || bytes > (size_t)(lowest_address - addresses)) {
            lowest_address = (char *)((size_t)(addresses + ALL_ADDRESSES) / PAGE * PAGE);
            num_rounds++;
        }
        if (addresses == MAP_FAILED || num_rounds > 2 || bytes > (size_t)(lowest_address - addresses)) {
            fprintf(stderr, "simulated card: no addresses are left\n");
            abort();
        }
        other = block_within(lowest_address - bytes, bytes);
    } while (other);
    char *found = lowest_address -= bytes;
    add_block(found, bytes, number);
    pthread_mutex_unlock(&lock);
    return found;
}

static int is_on_card(const void *pointer) {
    return addresses && (char *)pointer >= addresses && (char *)pointer < addresses + ALL_ADDRESSES;
}

/* Return the block that a pointer lies in, and take it out of the list if `remove`. */
static struct block find_block(const void *pointer, int remove) {
    struct block found = {NULL, 0, -1, NULL};
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        if ((char *)pointer < (*at)->address || (char *)pointer >= (*at)->address + (*at)->bytes) continue;
        found = **at;
        if (remove) {
            free(*at);
            *at = found.next;
        }
        break;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int card_is_page_locked(const void *pointer, size_t bytes) {
    struct block block = find_block(pointer, 0);
    return block.address && block.number < 0 && (char *)pointer + bytes <= block.address + block.bytes;
}

/* ---- the runtime: memory of the current device, and page-locked memory of the host ---- */

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    int number = card_number(card_current_device());
    if (!card_take(number, whole_pages(bytes))) return cudaErrorMemoryAllocation;
    *pointer = new_block(bytes, number);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    card_begin_context(card_number(card_current_device()));
    struct block block = find_block(pointer, 1);
    if (block.address && block.number < 0) free(block.address);
    else if (block.address) card_return(block.number, block.bytes);
    return cudaSuccess;
}

/* Managed memory, which bitsandbytes pages its optimizers' states with: all its pages stay on the host. */
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
    card_begin_context(card_number(card_current_device()));
    return cudaHostAlloc(pointer, bytes, flags);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    if (posix_memalign(pointer, 4096, bytes)) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    add_block(*pointer, bytes, -1);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    find_block(pointer, 1);
    free(pointer);
    return cudaSuccess;
}

ALIAS(cudaMallocAsync, cudaMalloc);
ALIAS(cudaFreeAsync, cudaFree);
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned int flags) {
    *device_pointer = pointer;
    return cudaSuccess;
}

/* A variable of a kernel's module, whose memory is the context's. */
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    *pointer = new_block(PAGE, card_number(card_current_device()));
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    int number = card_number(card_current_device());
    card_begin_context(number);
    *total = card_model.memory_bytes;
    *available = *total - card_used(number);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct block block = find_block(pointer, 0);
    void *address = (void *)pointer;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = is_on_card(pointer) ? cudaMemoryTypeDevice
                       : block.address     ? cudaMemoryTypeHost
                                           : cudaMemoryTypeUnregistered;
    attributes->devicePointer = attributes->type == cudaMemoryTypeUnregistered ? NULL : address;
    attributes->hostPointer = is_on_card(pointer) ? NULL : address;
    for (int device = 0; device < card_num_visible(); device++)
        if (card_number(device) == block.number) attributes->device = device;
    return cudaSuccess;
}

/* ---- copies ---- */

static void copy(void *to, const void *from, size_t bytes) {
    if (is_on_card(to) && is_on_card(from)) card_move(to, from, bytes, 1);
    else if (is_on_card(to)) card_write(to, from, bytes);
    else if (is_on_card(from)) card_read(to, from, bytes);
    else memmove(to, from, bytes);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes);
    return cudaSuccess;
}

ALIAS(cudaMemcpyAsync, cudaMemcpy);

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int of_device, size_t bytes,
                                cudaStream_t stream) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    if (is_on_card(to)) card_repeat(to, &(char){(char)value}, 1, bytes);
    else memset(to, value, bytes);
    return cudaSuccess;
}

ALIAS(cudaMemsetAsync, cudaMemset);

/* ---- a host that touches a card's memory: it ends as on a real card, and is told why ---- */

static struct sigaction earlier;

static void on_fault(int signal, siginfo_t *fault, void *context) {
    static const char said[] = "simulated card: the host touched memory of a card, such as at a tensor's data_ptr(), "
                               "which ends a process on a real card too\n";
    sigaction(signal, &earlier, NULL); /* it ends the process, when the same instruction runs again */
    if (fault->si_code <= 0) raise(signal); /* which a process has sent */
    else if (is_on_card(fault->si_addr) && write(STDERR_FILENO, said, sizeof said - 1))
        card_refused("touched memory of a card from the host");
}

/* From now on, say why a process ends that touches a card's memory from the host. */
void card_watch_faults(void) {
    sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, &earlier);
}

/* ---- the driver: pages that expandable segments map into addresses ---- */

struct pages {
    size_t bytes;
    int number;
};

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    *bytes = PAGE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    *pointer = (CUdeviceptr)new_block(bytes, card_number(card_current_device()));
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    find_block((void *)pointer, 1);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    int number = card_number(properties->location.id);
    if (!card_take(number, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct pages *pages = card_new(sizeof *pages);
    *pages = (struct pages){bytes, number};
    *handle = (CUmemGenericAllocationHandle)pages;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct pages *pages = (struct pages *)handle;
    card_return(pages->number, pages->bytes);
    free(pages);
    return CUDA_SUCCESS;
}
