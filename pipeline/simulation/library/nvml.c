/* NVML: the cards by their numbers, and what this process and others use of their memory; a status of 0 is success. */
#include "card.h"

#include <stdio.h>
#include <string.h>

enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };

struct memory {
    unsigned long long total, free, used;
};

/* A handle is the card's number plus one: NULL would be no handle. */
static int number_of(void *handle) { return (int)(size_t)handle - 1; }

int nvmlInit(void) { return card_count ? 0 : DRIVER_NOT_LOADED; }
NEW_ALIAS(nvmlInit_v2, nvmlInit);
NEW_ALIAS(nvmlInitWithFlags, nvmlInit);
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status ? "an error of the simulated card" : "Success"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, CARD_DRIVER);
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = card_count;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    if (index >= (unsigned int)card_count) return INVALID_ARGUMENT;
    *handle = (void *)(size_t)(index + 1);
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
    unsigned int domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || bus > (unsigned int)card_count) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int length) {
    snprintf(text, length, CARD_UUID, number_of(handle) + 1);
    return 0;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned int length) {
    snprintf(text, length, "%s", card_model.name);
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    memory->total = card_model.memory_bytes;
    memory->used = card_used(number_of(handle));
    memory->free = memory->total - memory->used;
    return 0;
}

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    struct memory it;
    nvmlDeviceGetMemoryInfo(handle, &it);
    memory->total = it.total, memory->reserved = 0, memory->free = it.free, memory->used = it.used;
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = SIMULATED_CUDA_VERSION;
    return 0;
}

NEW_ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2);

int nvmlDeviceGetIndex(void *handle, unsigned int *index) {
    *index = number_of(handle);
    return 0;
}

NEW_ALIAS(nvmlDeviceGetMinorNumber, nvmlDeviceGetIndex);

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = card_model.major, *minor = card_model.minor;
    return 0;
}

/* What a card is busy with: nothing, at any time. */
int nvmlDeviceGetUtilizationRates(void *handle, unsigned int percent[2]) {
    percent[0] = percent[1] = 0;
    return 0;
}

static int none(void *handle, unsigned int *value) {
    *value = 0;
    return 0;
}

static int none_of_kind(void *handle, int kind, unsigned int *value) { return none(handle, value); }

NEW_ALIAS(nvmlDeviceGetPowerUsage, none);
NEW_ALIAS(nvmlDeviceGetTemperature, none_of_kind);
NEW_ALIAS(nvmlDeviceGetClockInfo, none_of_kind);

/* The fabric between cards: torch has set its state to "not supported" before. */
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) { return 0; }

NEW_ALIAS(nvmlDeviceGetComputeRunningProcesses, none);
NEW_ALIAS(nvmlDeviceGetComputeRunningProcesses_v3, none);

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
