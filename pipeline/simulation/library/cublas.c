/* cuBLAS and cuBLASLt, as far as torch waits for an answer; a status of 0 is success.
 *
 * Their headers are not needed: an enumeration is an int here, and a handle a pointer to memory that nobody reads.
 */
#include "card.h"

#include <stdint.h>
#include <string.h>

/* ---- cuBLAS: the workspace that torch sets is torch's own memory ---- */

static int get_mode(void *handle, int *mode) {
    *mode = 0; /* CUBLAS_DEFAULT_MATH, CUBLAS_POINTER_MODE_HOST */
    return 0;
}

NEW_ALIAS(cublasGetMathMode, get_mode);
NEW_ALIAS(cublasGetPointerMode_v2, get_mode);

int cublasGetVersion_v2(void *handle, int *version) {
    *version = 10 * SIMULATED_CUDA_VERSION;
    return 0;
}

size_t cublasLtGetVersion(void) { return 10 * SIMULATED_CUDA_VERSION; }

/* ---- products take time: torch.compile pads matrices if it finds that faster ---- */

enum { HALF = 2, BFLOAT16 = 14 }; /* of cudaDataType_t */

static const double NANOSECONDS_OF_A_PRODUCT = 1e-5; /* on tensor cores: what counts is that they are faster */
enum { SLOWER = 4, ALIGNED = 8 };                    /* than without them; elements of a row that they need */

static void take_time(double products, int type, int64_t a, int64_t b, int64_t c) {
    int are_on_tensor_cores = (type != HALF && type != BFLOAT16) || (a | b | c) % ALIGNED == 0;
    card_works((int64_t)(products * NANOSECONDS_OF_A_PRODUCT * (are_on_tensor_cores ? 1 : SLOWER)));
}

int cublasGemmEx(void *handle, int a_form, int b_form, int m, int n, int k, const void *alpha, const void *a, int a_type,
                 int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                 int compute_type, int algorithm) {
    take_time((double)m * n * k, a_type, lda, ldb, ldc);
    card_launched();
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

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, struct heuristic_result results[], int *num_found) {
    memset(results, 0, sizeof results[0]);
    *num_found = 1;
    return 0;
}
