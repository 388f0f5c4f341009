/* cuSOLVER, cuSPARSE, cuFFT, NVRTC and CUPTI: sizes of workspaces, which only NVIDIA's libraries know and are assumed here. */
#include "card.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- cuSOLVER: as much as the matrix takes ---- */

static int assume_elements(const char *name, int *count, int64_t elements, size_t bytes) {
    *count = (int)(elements > INT32_MAX ? INT32_MAX : elements);
    return card_assumed(name, *count * bytes);
}

static int assume_bytes(const char *name, size_t *on_card, size_t *on_host, int64_t elements) {
    *on_card = elements * 8, *on_host = 0;
    return card_assumed(name, *on_card);
}

/* Functions that say how many elements a routine needs, or numbers of 8 bytes; their parameters name the sizes. */
#define ELEMENTS(ROUTINE, COUNT, BYTES, ...)                                                                           \
    int cusolverDn##ROUTINE##_bufferSize(void *handle, __VA_ARGS__) {                                                  \
        return assume_elements("cusolverDn" #ROUTINE, count, (int64_t)COUNT, BYTES);                                   \
    }
#define EIGHT_BYTES(ROUTINE, COUNT, ...)                                                                               \
    int cusolverDn##ROUTINE##_bufferSize(void *handle, __VA_ARGS__, size_t *on_card, size_t *on_host) {                \
        return assume_bytes("cusolverDn" #ROUTINE, on_card, on_host, COUNT);                                           \
    }

#define OF_TYPE(T, BYTES)                                                                                              \
    ELEMENTS(T##potrf, n * n, BYTES, int uplo, int n, void *a, int lda, int *count)                                    \
    ELEMENTS(T##getrf, m * n, BYTES, int m, int n, void *a, int lda, int *count)                                       \
    ELEMENTS(T##geqrf, m * n, BYTES, int m, int n, void *a, int lda, int *count)                                       \
    ELEMENTS(T##sytrf, n * n, BYTES, int n, void *a, int lda, int *count)                                              \
    ELEMENTS(T##gesvd, m * n, BYTES, int m, int n, int *count)                                                         \
    ELEMENTS(T##gesvdj, m * n, BYTES, int job, int economy, int m, int n, void *a, int lda, void *s, void *u, int ldu, \
             void *v, int ldv, int *count)                                                                             \
    ELEMENTS(T##gesvdjBatched, m * n * batch, BYTES, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, \
             void *v, int ldv, int *count, void *parameters, int batch)                                                \
    ELEMENTS(T##gesvdaStridedBatched, m * n * batch, BYTES, int job, int rank, int m, int n, void *a, int lda,         \
             int64_t stride_a, void *s, int64_t stride_s, void *u, int ldu, int64_t stride_u, void *v, int ldv,        \
             int64_t stride_v, int *count, int batch)
OF_TYPE(S, 4)
OF_TYPE(D, 8)
OF_TYPE(C, 8)
OF_TYPE(Z, 16)

#define OF_FIELD(T, GENERATE, MULTIPLY, EIGENVALUES, BATCHED, BYTES)                                                   \
    ELEMENTS(T##GENERATE, m * n, BYTES, int m, int n, int k, void *a, int lda, void *tau, int *count)                  \
    ELEMENTS(T##MULTIPLY, m * n, BYTES, int side, int form, int m, int n, int k, void *a, int lda, void *tau, void *c, \
             int ldc, int *count)                                                                                      \
    ELEMENTS(T##EIGENVALUES, n * n, BYTES, int job, int uplo, int n, void *a, int lda, void *w, int *count)            \
    ELEMENTS(T##BATCHED, n * n * batch, BYTES, int job, int uplo, int n, void *a, int lda, void *w, int *count,        \
             void *parameters, int batch)
OF_FIELD(S, orgqr, ormqr, syevd, syevjBatched, 4)
OF_FIELD(D, orgqr, ormqr, syevd, syevjBatched, 8)
OF_FIELD(C, ungqr, unmqr, heevd, heevjBatched, 8)
OF_FIELD(Z, ungqr, unmqr, heevd, heevjBatched, 16)

EIGHT_BYTES(Xpotrf, n * n, void *parameters, int uplo, int64_t n, int type, void *a, int64_t lda, int compute)
EIGHT_BYTES(Xgeqrf, m * n, void *parameters, int64_t m, int64_t n, int type, void *a, int64_t lda, int type_tau,
            void *tau, int compute)
EIGHT_BYTES(Xsyevd, n * n, void *parameters, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int type_w,
            void *w, int compute)
EIGHT_BYTES(Xgeev, n * n, void *parameters, int left, int right, int64_t n, int type, void *a, int64_t lda, int type_w,
            void *w, int type_l, void *l, int64_t ldl, int type_r, void *r, int64_t ldr, int compute)
EIGHT_BYTES(Xsytrs, n * n, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, void *pivots,
            int type_b, void *b, int64_t ldb)

int cusolverDnXsyevBatched_bufferSize(void *handle, void *parameters, int job, int uplo, int64_t n, int type, void *a,
                                      int64_t lda, int type_w, void *w, int compute, size_t *on_card, size_t *on_host,
                                      int64_t batch) {
    return assume_bytes("cusolverDnXsyevBatched", on_card, on_host, n * n * batch);
}

/* ---- cuSPARSE: none ---- */

#define NO_BYTES(NAME, SUFFIX, ...)                                                                                    \
    int NAME##SUFFIX(void *handle, __VA_ARGS__, size_t *bytes) {                                                       \
        *bytes = 0;                                                                                                    \
        return card_assumed(#NAME, 0);                                                                                 \
    }
NO_BYTES(cusparseSpMM, _bufferSize, int op_a, int op_b, void *alpha, void *a, void *b, void *beta, void *c, int type,
         int how)
NO_BYTES(cusparseSDDMM, _bufferSize, int op_a, int op_b, void *alpha, void *a, void *b, void *beta, void *c, int type,
         int how)
NO_BYTES(cusparseSpMV, _bufferSize, int op, void *alpha, void *a, void *x, void *beta, void *y, int type, int how)
NO_BYTES(cusparseSpSV, _bufferSize, int op, void *alpha, void *a, void *x, void *y, int type, int how, void *plan)
NO_BYTES(cusparseSpSM, _bufferSize, int op_a, int op_b, void *alpha, void *a, void *b, void *c, int type, int how,
         void *plan)
NO_BYTES(cusparseXcoosort, _bufferSizeExt, int m, int n, int count, void *rows, void *columns)
NO_BYTES(cusparseXcsrsort, _bufferSizeExt, int m, int n, int count, void *rows, void *columns)

/* ---- cuFFT: as much as the transformed numbers take ---- */

int cufftCreate(int *plan) {
    *plan = 1;
    return 0;
}

int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in, long long in_stride, long long in_distance,
                        int in_type, long long *out, long long out_stride, long long out_distance, int out_type,
                        long long batch, size_t *bytes, int type) {
    *bytes = batch * 8;
    for (int i = 0; i < rank; i++) *bytes *= sizes[i];
    return card_assumed("cufftXtMakePlanMany", *bytes);
}

/* ---- NVRTC: a program is compiled to nothing ---- */

int nvrtcVersion(int *major, int *minor) {
    *major = SIMULATED_CUDA_VERSION / 1000, *minor = SIMULATED_CUDA_VERSION % 1000 / 10;
    return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char **headers,
                       const char **names) {
    *program = card_new(CARD_HANDLE_BYTES);
    return 0;
}

int nvrtcDestroyProgram(void **program) {
    free(*program);
    return 0;
}

int nvrtcCompileProgram(void *program, int count, const char **options) { return 0; }
int nvrtcAddNameExpression(void *program, const char *name) { return 0; }

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    *lowered = "kernel";
    return 0;
}

static int one_byte(void *program, size_t *bytes) {
    *bytes = 1;
    return 0;
}

static int empty(void *program, char *text) {
    *text = 0;
    return 0;
}

NEW_ALIAS(nvrtcGetPTXSize, one_byte);
NEW_ALIAS(nvrtcGetCUBINSize, one_byte);
NEW_ALIAS(nvrtcGetProgramLogSize, one_byte);
NEW_ALIAS(nvrtcGetPTX, empty);
NEW_ALIAS(nvrtcGetCUBIN, empty);
NEW_ALIAS(nvrtcGetProgramLog, empty);
const char *nvrtcGetErrorString(int status) { return status ? "an error of the simulated card" : "success"; }

/* ---- CUPTI, by which profilers watch kernels: there is never any record ---- */

int cuptiGetVersion(uint32_t *version) {
    *version = 100 * SIMULATED_CUDA_VERSION / 10;
    return 0;
}

int cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) { return 12; /* no more records */ }
