/* The driver's functions, which Triton, compiled graphs and bindings of the driver call: contexts, modules, kernels. */
#include "card.h"

#define __CUDA_API_VERSION_INTERNAL /* functions by the names under which they are looked up */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- entry points: every function is found by name in this library, the newest version of it first ---- */

static void *entry_point(const char *name) {
    void *library = dlopen(card_library(), RTLD_LAZY | RTLD_NOLOAD), *found = NULL;
    for (int version = 4; version > 1 && !found; version--) {
        char versioned[128];
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        found = dlsym(library, versioned);
    }
    return found ? found : dlsym(library, name);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *function = entry_point(name);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION, flags, status);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    *function = entry_point(name);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- devices and contexts: a context is its device's number plus one ---- */

CUresult cuInit(unsigned int flags) { return card_num_visible() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }

CUresult cuDeviceGetCount(int *count) {
    *count = card_num_visible();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *found, int device) {
    *found = device;
    return device < card_num_visible() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *text, int length, CUdevice device) {
    snprintf(text, length, "%s", card_model.name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = card_model.memory_bytes;
    return CUDA_SUCCESS;
}

/* The attributes of the driver and of the runtime have the same numbers. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    card_begin_context(card_number(device));
    *context = (CUcontext)(size_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    *flags = 0, *active = card_has_context(card_number(device));
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)(size_t)(card_current_device() + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) cudaSetDevice((int)(size_t)context - 1);
    return CUDA_SUCCESS;
}

ALIAS(cuCtxPushCurrent_v2, cuCtxSetCurrent);
ALIAS(cuCtxPopCurrent_v2, cuCtxGetCurrent);

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = card_current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated card";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    return cudaMalloc((void **)pointer, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) { return (CUresult)cudaFree((void *)pointer); }
CUresult cuMemGetInfo_v2(size_t *available, size_t *total) { return (CUresult)cudaMemGetInfo(available, total); }

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return (CUresult)cudaMemcpy((void *)to, (const void *)from, bytes, cudaMemcpyDefault);
}

ALIAS(cuMemcpyAsync, cuMemcpy);
ALIAS(cuMemcpyHtoD_v2, cuMemcpy);
ALIAS(cuMemcpyDtoH_v2, cuMemcpy);
ALIAS(cuMemcpyDtoD_v2, cuMemcpy);
ALIAS(cuMemcpyHtoDAsync_v2, cuMemcpy);
ALIAS(cuMemcpyDtoHAsync_v2, cuMemcpy);
ALIAS(cuMemcpyDtoDAsync_v2, cuMemcpy);

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return (CUresult)cudaMemset((void *)to, value, count);
}

ALIAS(cuMemsetD8Async, cuMemsetD8_v2);

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct cudaPointerAttributes it;
    cudaPointerGetAttributes(&it, (const void *)pointer);
    if (it.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = it.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)value = it.hostPointer; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)(size_t)(it.device + 1); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = it.device; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned int *)value = 0; break;
    default: *(int *)value = 0; card_unmodelled("cuPointerGetAttribute");
    }
    return CUDA_SUCCESS;
}

/* ---- modules and kernels: a handle is never read ---- */

static CUresult handle(void **made) {
    *made = &card_model;
    return CUDA_SUCCESS;
}

ALIAS(cuModuleLoad, handle);
ALIAS(cuModuleLoadData, handle);
ALIAS(cuModuleLoadDataEx, handle);
ALIAS(cuModuleLoadFatBinary, handle);
ALIAS(cuModuleGetFunction, handle);
ALIAS(cuLibraryLoadData, handle);
ALIAS(cuLibraryGetKernel, handle);
ALIAS(cuLibraryGetModule, handle);
ALIAS(cuKernelGetFunction, handle);

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction kernel) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 32
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                    : 0;
    return CUDA_SUCCESS;
}

ALIAS(cuKernelGetAttribute, cuFuncGetAttribute);

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction kernel, int threads, size_t bytes) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, NULL, threads, bytes);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction kernel, const CUlaunchConfig *config) {
    *clusters = card_model.num_multiprocessors;
    return CUDA_SUCCESS;
}

static CUresult launch(void) {
    card_launched();
    return CUDA_SUCCESS;
}

ALIAS(cuLaunchKernel, launch);
ALIAS(cuLaunchKernelEx, launch);
ALIAS(cuLaunchCooperativeKernel, launch);

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    function(data);
    return CUDA_SUCCESS;
}
