/* cuBLAS and cuBLASLt, as far as torch waits for an answer; a status of 0 is success.
 *
 * Their headers are not needed: an enumeration is an int here, and a handle a pointer to memory that nobody reads.
 */
#include "card.h"

#include <stdint.h>
#include <string.h>

/* ---- cuBLAS: the workspace that torch sets is torch's own memory ---- */

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0; /* CUBLAS_DEFAULT_MATH */
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0; /* CUBLAS_POINTER_MODE_HOST */
    return 0;
}

int cublasGetVersion_v2(void *handle, int *version) {
    *version = 10 * SIMULATED_CUDA_VERSION;
    return 0;
}

size_t cublasLtGetVersion(void) { return 10 * SIMULATED_CUDA_VERSION; }

/* ---- cuBLASLt: one algorithm, which needs no workspace beyond the one that torch offers ---- */

struct heuristic_result { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float num_waves;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, struct heuristic_result results[], int *num_found) {
    memset(results, 0, sizeof results[0]);
    *num_found = 1;
    return 0;
}
