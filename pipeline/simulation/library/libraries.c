/* cuBLAS, cuBLASLt and cuDNN's graph interface, as far as torch waits for an answer; a status of 0 is success.
 *
 * Their headers are not needed: an enumeration is an int here, and a handle a pointer to memory that nobody reads.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { HANDLE_BYTES = 512 }; /* torch gives some of them away for larger objects */

static int make(void **handle) {
    *handle = calloc(1, HANDLE_BYTES);
    return 0;
}

static int destroy(void *handle) {
    free(handle);
    return 0;
}

/* ---- cuBLAS: one handle a thread; the workspace that torch sets is torch's own memory ---- */

int cublasCreate_v2(void **handle) { return make(handle); }

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0; /* CUBLAS_DEFAULT_MATH */
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0; /* CUBLAS_POINTER_MODE_HOST */
    return 0;
}

/* ---- cuBLASLt: one algorithm, which needs no workspace beyond the one that torch offers ---- */

struct heuristic_result { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float num_waves;
    int reserved[4];
};

int cublasLtMatmulDescCreate(void **made, int compute_type, int scale_type) { return make(made); }
int cublasLtMatmulDescDestroy(void *made) { return destroy(made); }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return make(made);
}
int cublasLtMatrixLayoutDestroy(void *made) { return destroy(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return make(made); }
int cublasLtMatmulPreferenceDestroy(void *made) { return destroy(made); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, struct heuristic_result results[], int *num_found) {
    memset(results, 0, sizeof results[0]);
    *num_found = 1;
    return 0;
}

/* ---- cuDNN: one engine for any graph, whose own workspace is SIMULATED_CARD_CUDNN_WORKSPACE bytes ---- */

enum { /* of cudnnBackendAttributeName_t */
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_WORKSPACE_SIZE = 303,
    ENGINECFG_SHARED_MEMORY_USED = 304,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    EXECUTION_PLAN_JSON_REPRESENTATION = 405,
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
    ENGINE_GLOBAL_INDEX = 1301,
};

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
int cudnnGetProperty(int of_version, int *value) { /* 0: major, 1: minor, 2: patch */
    *value = of_version == 0 ? CUDNN_VERSION / 10000 : of_version == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
    return 0;
}
int cudnnCreate(void **handle) { return make(handle); }
int cudnnDestroy(void *handle) { return destroy(handle); }
const char *cudnnGetErrorString(int status) { return status ? "an error of the simulated card" : "success"; }
void cudnnGetLastErrorString(char *message, size_t bytes) {
    if (bytes) *message = 0;
}

int cudnnGetStream(void *handle, void **stream) {
    *stream = NULL;
    return 0;
}

int cudnnBackendCreateDescriptor(int type, void **made) { return make(made); }
int cudnnBackendDestroyDescriptor(void *made) { return destroy(made); }

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    int64_t ignored;
    if (!count) count = &ignored;
    int gives_values = room > 0 && values;
    const char *workspace = getenv("SIMULATED_CARD_CUDNN_WORKSPACE");
    *count = 1;
    switch (name) {
    case ENGINEHEUR_RESULTS:
    case ENGINECFG_ENGINE:
    case EXECUTION_PLAN_ENGINE_CONFIG: break;
    case OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
        if (gives_values) *(int64_t *)values = 1;
        break;
    case ENGINE_GLOBAL_INDEX:
        if (gives_values) *(int64_t *)values = 0;
        break;
    case ENGINECFG_SHARED_MEMORY_USED:
        if (gives_values) *(int32_t *)values = 0;
        break;
    case ENGINECFG_WORKSPACE_SIZE:
    case EXECUTION_PLAN_WORKSPACE_SIZE:
        if (gives_values) *(int64_t *)values = workspace ? atoll(workspace) : 0;
        break;
    case EXECUTION_PLAN_JSON_REPRESENTATION:
        *count = sizeof "{}";
        if (gives_values) strncpy(values, "{}", room);
        break;
    default: *count = 0;
    }
    return 0;
}

/* ---- cuDNN's older interface: sizes of workspaces and of what a backward pass needs ---- */

static size_t cudnn_workspace(void) {
    const char *text = getenv("SIMULATED_CARD_CUDNN_WORKSPACE");
    return text ? strtoull(text, NULL, 10) : 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes) {
    *bytes = cudnn_workspace();
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes) {
    *bytes = cudnn_workspace();
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation,
                                                         void *x, size_t *bytes) {
    *bytes = 0;
    return 0;
}
