/* The simulated card as CUDA describes it, and what runs on it: streams, graphs, errors.
 *
 * What follows from the compute capability is from the CUDA programming guide's table of technical specifications.
 */
#include "card.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB ((size_t)1 << 10)

/* ---- properties ---- */

static int is_data_centre(void) { /* of those since Ampere: 8.0, 9.0, 10.0, 10.3 */
    return card_model.major < 12 && (card_model.major != 8 || card_model.minor == 0);
}

static size_t shared_bytes_of_a_multiprocessor(void) {
    if (card_model.major == 7) return (card_model.minor == 5 ? 64 : 96) * KIB;
    if (!is_data_centre()) return 100 * KIB;
    return (card_model.major == 8 ? 164 : 228) * KIB;
}

/* Most resident blocks of a multiprocessor: the CUDA programming guide's table of compute capabilities. */
static int blocks_of_a_multiprocessor(void) {
    int capability = 10 * card_model.major + card_model.minor;
    if (capability == 89 || capability >= 120) return 24;
    return capability == 75 || capability == 86 || capability == 87 ? 16 : 32;
}

static int threads_of_a_multiprocessor(void) {
    if (card_model.major == 7) return card_model.minor == 5 ? 1024 : 2048;
    return is_data_centre() ? 2048 : 1536;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *it, int device) {
    size_t reserved_bytes = card_model.major == 7 ? 0 : 1 * KIB;
    memset(it, 0, sizeof *it);
    memcpy(it->name, card_model.name, sizeof card_model.name);
    it->uuid.bytes[15] = (char)(card_number(device) + 1); /* as nvmlDeviceGetUUID says it */
    it->pciBusID = card_number(device) + 1;
    it->major = card_model.major, it->minor = card_model.minor;
    it->totalGlobalMem = card_model.memory_bytes;
    it->multiProcessorCount = card_model.num_multiprocessors;
    it->sharedMemPerBlock = 48 * KIB;
    it->sharedMemPerMultiprocessor = shared_bytes_of_a_multiprocessor();
    it->sharedMemPerBlockOptin = it->sharedMemPerMultiprocessor - reserved_bytes;
    it->reservedSharedMemPerBlock = reserved_bytes;
    it->regsPerBlock = it->regsPerMultiprocessor = 65536;
    it->l2CacheSize = (int)(card_model.l2_mib * MIB);
    it->warpSize = 32;
    it->maxThreadsPerBlock = 1024;
    it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024, it->maxThreadsDim[2] = 64;
    it->maxGridSize[0] = 2147483647, it->maxGridSize[1] = it->maxGridSize[2] = 65535;
    it->maxThreadsPerMultiProcessor = threads_of_a_multiprocessor();
    it->maxBlocksPerMultiProcessor = blocks_of_a_multiprocessor();
    it->textureAlignment = 512;
    it->totalConstMem = 64 * KIB;
    it->unifiedAddressing = it->canMapHostMemory = it->concurrentKernels = it->managedMemory = 1;
    it->cooperativeLaunch = it->streamPrioritiesSupported = 1;
    it->clusterLaunch = card_model.major >= 9;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp it;
    cudaGetDeviceProperties(&it, device);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = it.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = it.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = it.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = it.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = it.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = it.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = it.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)it.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)it.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)it.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)it.reservedSharedMemPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = it.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = it.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = it.maxGridSize[2]; break;
    case cudaDevAttrUnifiedAddressing: *value = it.unifiedAddressing; break;
    case cudaDevAttrCooperativeLaunch: *value = it.cooperativeLaunch; break;
    case cudaDevAttrClockRate: *value = 1000 * card_model.clock_mhz; break; /* in kHz */
    case cudaDevAttrMemoryClockRate: *value = 1000 * card_model.memory_clock_mhz; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = card_model.bus_bits; break;
    case cudaDevAttrL2CacheSize: *value = it.l2CacheSize; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = it.regsPerMultiprocessor; break;
    case cudaDevAttrMaxBlockDimX: *value = it.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = it.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = it.maxThreadsDim[2]; break;
    case cudaDevAttrPciBusId: *value = it.pciBusID; break;
    case cudaDevAttrTotalConstantMemory: *value = (int)it.totalConstMem; break;
    case cudaDevAttrConcurrentKernels: *value = it.concurrentKernels; break;
    case cudaDevAttrManagedMemory: *value = it.managedMemory; break;
    case cudaDevAttrConcurrentManagedAccess: *value = it.managedMemory; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", card_number(device) + 1); /* as nvmlDeviceGetHandleByPciBusId reads it */
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = SIMULATED_CUDA_VERSION;
    return cudaSuccess;
}

ALIAS(cudaRuntimeGetVersion, cudaDriverGetVersion);

/* ---- errors: nothing is ever left over, since each function says at once what went wrong ---- */

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the simulated card";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    default: return "an error of the simulated card";
    }
}

/* ---- streams: all work is done at once ---- */

static cudaError_t make(void **handle) {
    *handle = card_new(CARD_HANDLE_BYTES);
    return cudaSuccess;
}

static cudaError_t destroy(void *handle) {
    free(handle);
    return cudaSuccess;
}

ALIAS(cudaStreamCreate, make);
ALIAS(cudaStreamCreateWithFlags, make);
ALIAS(cudaStreamCreateWithPriority, make);
ALIAS(cudaStreamDestroy, destroy);

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned int flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* ---- capture of graphs: a stream of ours knows whether it captures; a graph is a handle, and its launch nothing ---- */

struct stream {
    unsigned long long capture_id; /* 0: it does not capture */
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    static unsigned long long last_id;
    if (!stream) return cudaErrorStreamCaptureUnsupported;
    ((struct stream *)stream)->capture_id = ++last_id;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ((struct stream *)stream)->capture_id = 0;
    return make((void **)graph);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    int captures = stream && ((struct stream *)stream)->capture_id;
    *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (edges) *edges = NULL;
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count) {
#endif
    cudaStreamIsCapturing(stream, status);
    if (id) *id = stream ? ((struct stream *)stream)->capture_id : 0;
    if (graph) *graph = NULL;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1; /* torch warns of an empty graph */
    return cudaSuccess;
}

ALIAS(cudaGraphInstantiate, make);
ALIAS(cudaGraphInstantiateWithFlags, make);
ALIAS(cudaGraphDestroy, destroy);
ALIAS(cudaGraphExecDestroy, destroy);
