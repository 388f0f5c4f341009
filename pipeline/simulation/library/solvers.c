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

#define SIZES(T, BYTES)                                                                                                \
    int cusolverDn##T##potrf_bufferSize(void *h, int uplo, int n, void *a, int lda, int *count) {                     \
        return assume_elements("cusolverDn" #T "potrf", count, (int64_t)n * n, BYTES);                                 \
    }                                                                                                                  \
    int cusolverDn##T##getrf_bufferSize(void *h, int m, int n, void *a, int lda, int *count) {                         \
        return assume_elements("cusolverDn" #T "getrf", count, (int64_t)m * n, BYTES);                                 \
    }                                                                                                                  \
    int cusolverDn##T##geqrf_bufferSize(void *h, int m, int n, void *a, int lda, int *count) {                         \
        return assume_elements("cusolverDn" #T "geqrf", count, (int64_t)m * n, BYTES);                                 \
    }                                                                                                                  \
    int cusolverDn##T##sytrf_bufferSize(void *h, int n, void *a, int lda, int *count) {                                \
        return assume_elements("cusolverDn" #T "sytrf", count, (int64_t)n * n, BYTES);                                 \
    }                                                                                                                  \
    int cusolverDn##T##gesvd_bufferSize(void *h, int m, int n, int *count) {                                           \
        return assume_elements("cusolverDn" #T "gesvd", count, (int64_t)m * n, BYTES);                                 \
    }                                                                                                                  \
    int cusolverDn##T##gesvdj_bufferSize(void *h, int job, int econ, int m, int n, void *a, int lda, void *s, void *u, \
                                         int ldu, void *v, int ldv, int *count, void *params) {                        \
        return assume_elements("cusolverDn" #T "gesvdj", count, (int64_t)m * n, BYTES);                                \
    }                                                                                                                  \
    int cusolverDn##T##gesvdjBatched_bufferSize(void *h, int job, int m, int n, void *a, int lda, void *s, void *u,    \
                                                int ldu, void *v, int ldv, int *count, void *params, int batch) {      \
        return assume_elements("cusolverDn" #T "gesvdjBatched", count, (int64_t)m * n * batch, BYTES);                 \
    }                                                                                                                  \
    int cusolverDn##T##gesvdaStridedBatched_bufferSize(void *h, int job, int rank, int m, int n, void *a, int lda,     \
                                                       long long stride_a, void *s, long long stride_s, void *u,       \
                                                       int ldu, long long stride_u, void *v, int ldv,                  \
                                                       long long stride_v, int *count, int batch) {                    \
        return assume_elements("cusolverDn" #T "gesvdaStridedBatched", count, (int64_t)m * n * batch, BYTES);          \
    }
SIZES(S, 4)
SIZES(D, 8)
SIZES(C, 8)
SIZES(Z, 16)

#define FACTORS(NAME_G, NAME_M, BYTES)                                                                                 \
    int cusolverDn##NAME_G##_bufferSize(void *h, int m, int n, int k, void *a, int lda, void *tau, int *count) {       \
        return assume_elements("cusolverDn" #NAME_G, count, (int64_t)m * n, BYTES);                                    \
    }                                                                                                                  \
    int cusolverDn##NAME_M##_bufferSize(void *h, int side, int trans, int m, int n, int k, void *a, int lda,           \
                                        void *tau, void *c, int ldc, int *count) {                                     \
        return assume_elements("cusolverDn" #NAME_M, count, (int64_t)m * n, BYTES);                                    \
    }
FACTORS(Sorgqr, Sormqr, 4)
FACTORS(Dorgqr, Dormqr, 8)
FACTORS(Cungqr, Cunmqr, 8)
FACTORS(Zungqr, Zunmqr, 16)

#define EIGENVALUES(NAME, NAME_BATCHED, BYTES)                                                                         \
    int cusolverDn##NAME##_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w, int *count) {      \
        return assume_elements("cusolverDn" #NAME, count, (int64_t)n * n, BYTES);                                      \
    }                                                                                                                  \
    int cusolverDn##NAME_BATCHED##_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w,            \
                                              int *count, void *params, int batch) {                                   \
        return assume_elements("cusolverDn" #NAME_BATCHED, count, (int64_t)n * n * batch, BYTES);                      \
    }
EIGENVALUES(Ssyevd, SsyevjBatched, 4)
EIGENVALUES(Dsyevd, DsyevjBatched, 8)
EIGENVALUES(Cheevd, CheevjBatched, 8)
EIGENVALUES(Zheevd, ZheevjBatched, 16)

int cusolverDnXpotrf_bufferSize(void *h, void *params, int uplo, int64_t n, int type, void *a, int64_t lda, int compute,
                                size_t *on_card, size_t *on_host) {
    return assume_bytes("cusolverDnXpotrf", on_card, on_host, n * n);
}
int cusolverDnXgeqrf_bufferSize(void *h, void *params, int64_t m, int64_t n, int type, void *a, int64_t lda,
                                int type_tau, void *tau, int compute, size_t *on_card, size_t *on_host) {
    return assume_bytes("cusolverDnXgeqrf", on_card, on_host, m * n);
}
int cusolverDnXsyevd_bufferSize(void *h, void *params, int job, int uplo, int64_t n, int type, void *a, int64_t lda,
                                int type_w, void *w, int compute, size_t *on_card, size_t *on_host) {
    return assume_bytes("cusolverDnXsyevd", on_card, on_host, n * n);
}
int cusolverDnXsyevBatched_bufferSize(void *h, void *params, int job, int uplo, int64_t n, int type, void *a,
                                      int64_t lda, int type_w, void *w, int compute, size_t *on_card, size_t *on_host,
                                      int64_t batch) {
    return assume_bytes("cusolverDnXsyevBatched", on_card, on_host, n * n * batch);
}
int cusolverDnXgeev_bufferSize(void *h, void *params, int left, int right, int64_t n, int type, void *a, int64_t lda,
                               int type_w, void *w, int type_l, void *l, int64_t ldl, int type_r, void *r, int64_t ldr,
                               int compute, size_t *on_card, size_t *on_host) {
    return assume_bytes("cusolverDnXgeev", on_card, on_host, n * n);
}
int cusolverDnXsytrs_bufferSize(void *h, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda,
                                void *pivots, int type_b, void *b, int64_t ldb, size_t *on_card, size_t *on_host) {
    return assume_bytes("cusolverDnXsytrs", on_card, on_host, n * n);
}

/* ---- cuSPARSE: none ---- */

static int no_bytes(const char *name, size_t *bytes) {
    *bytes = 0;
    return card_assumed(name, 0);
}

int cusparseSpMM_bufferSize(void *h, int op_a, int op_b, void *alpha, void *a, void *b, void *beta, void *c, int type,
                            int algorithm, size_t *bytes) {
    return no_bytes("cusparseSpMM", bytes);
}
int cusparseSDDMM_bufferSize(void *h, int op_a, int op_b, void *alpha, void *a, void *b, void *beta, void *c, int type,
                             int algorithm, size_t *bytes) {
    return no_bytes("cusparseSDDMM", bytes);
}
int cusparseSpMV_bufferSize(void *h, int op, void *alpha, void *a, void *x, void *beta, void *y, int type,
                            int algorithm, size_t *bytes) {
    return no_bytes("cusparseSpMV", bytes);
}
int cusparseSpSV_bufferSize(void *h, int op, void *alpha, void *a, void *x, void *y, int type, int algorithm,
                            void *descriptor, size_t *bytes) {
    return no_bytes("cusparseSpSV", bytes);
}
int cusparseSpSM_bufferSize(void *h, int op_a, int op_b, void *alpha, void *a, void *b, void *c, int type,
                            int algorithm, void *descriptor, size_t *bytes) {
    return no_bytes("cusparseSpSM", bytes);
}
int cusparseXcoosort_bufferSizeExt(void *h, int m, int n, int count, void *rows, void *columns, size_t *bytes) {
    return no_bytes("cusparseXcoosort", bytes);
}
int cusparseXcsrsort_bufferSizeExt(void *h, int m, int n, int count, void *rows, void *columns, size_t *bytes) {
    return no_bytes("cusparseXcsrsort", bytes);
}

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
    *program = calloc(1, 8);
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

static int one_byte(size_t *bytes) {
    *bytes = 1;
    return 0;
}

static int end(char *text) {
    *text = 0;
    return 0;
}

int nvrtcGetPTXSize(void *program, size_t *bytes) { return one_byte(bytes); }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return one_byte(bytes); }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return one_byte(bytes); }
int nvrtcGetPTX(void *program, char *text) { return end(text); }
int nvrtcGetCUBIN(void *program, char *text) { return end(text); }
int nvrtcGetProgramLog(void *program, char *text) { return end(text); }
const char *nvrtcGetErrorString(int status) { return status ? "an error of the simulated card" : "success"; }

/* ---- CUPTI, by which profilers watch kernels: there is never any record ---- */

int cuptiGetVersion(uint32_t *version) {
    *version = 100 * SIMULATED_CUDA_VERSION / 10;
    return 0;
}

int cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) { return 12; /* no more records */ }
