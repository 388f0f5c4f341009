/* cuDNN: one engine for any graph of its newer interface; descriptors, batch norm and recurrent nets of the older one.
 *
 * Only the real library knows the workspaces of its engines. They are assumed as they mostly are, or with
 * SIMULATED_CARD_WORKSPACES=smallest none, or =largest as large as they may be. The rules are of what was measured on an
 * H200 with cuDNN 9.19, benchmarks/cudnn_workspaces_cuda_h200_2026-11-26.csv.
 */
#include "card.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int are(const char *size) {
    const char *text = getenv("SIMULATED_CARD_WORKSPACES");
    return text && !strcmp(text, size);
}

static size_t workspace(const char *name, size_t likely, size_t largest) {
    size_t bytes = are("largest") ? largest : are("smallest") ? 0 : likely;
    card_assumed(name, bytes);
    return bytes;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return SIMULATED_CUDA_VERSION; }
int cudnnGetProperty(int of_version, int *value) { /* 0: major, 1: minor, 2: patch */
    *value = of_version == 0 ? CUDNN_VERSION / 10000 : of_version == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
    return 0;
}

void cudnnGetLastErrorString(char *message, size_t bytes) {
    if (bytes) *message = 0;
}

int cudnnGetStream(void *handle, void **stream) {
    *stream = NULL;
    return 0;
}

/* ---- graphs ---- */

enum { /* of cudnnBackendAttributeName_t */
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_WORKSPACE_SIZE = 303,
    ENGINECFG_SHARED_MEMORY_USED = 304,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    EXECUTION_PLAN_JSON_REPRESENTATION = 405,
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
    TENSOR_DATA_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    TENSOR_STRIDES = 903,
    TENSOR_IS_VIRTUAL = 907,
    TENSOR_IS_BY_VALUE = 908,
    ENGINE_GLOBAL_INDEX = 1301,
};

enum { /* of cudnnBackendDescriptorType_t */
    CONVOLUTION_FORWARD = 10,
    CONVOLUTION_BACKWARD_DATA = 12,
    TENSOR = 17,
    OPERATION_MATMUL = 19,
    OPERATION_SDPA_FWD = 41,
};
enum { DESCRIPTOR = 15 };                                             /* of cudnnBackendAttributeType_t */
enum { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9, INT64 = 10 };   /* of cudnnDataType_t */

/* Of types that are smaller than two bytes, too much is assumed. */
static size_t element_bytes(int type) {
    return type == DOUBLE || type == INT64 ? 8 : type == HALF || type == BFLOAT16 ? 2 : 4;
}

struct descriptor {
    int type, element_type, is_on_card, is_contiguous; /* whether a tensor's channels are not its innermost dimension */
    size_t elements, points;                           /* of a tensor; without its first two dimensions */
    size_t bytes, converted;                           /* the most that it may need; copies in the engine's layout */
    size_t points_of[3];                               /* of the tensors of an operation */
    int num_tensors;
};
_Static_assert(sizeof(struct descriptor) <= CARD_HANDLE_BYTES, "a handle holds a descriptor");

/* torch's graphs are convolutions, and attention, which alone has products of matrices. */
int cudnnBackendCreateDescriptor(int type, struct descriptor **made) {
    if (type == OPERATION_MATMUL || type == OPERATION_SDPA_FWD) card_attention("cuDNN");
    *made = card_new(CARD_HANDLE_BYTES);
    **made = (struct descriptor){.type = type, .is_on_card = 1, .elements = 1, .points = 1};
    return 0;
}

/* What a convolution's sums take beside copies of its tensors: of 657 that were measured one took more. */
static const size_t MOST_OF_SUMS = 32 * MIB;

/* Engines on tensor cores, which have channels innermost: they convert tensors of another layout. */
static int is_on_tensor_cores(int element_type) {
    return element_type == FLOAT ? card_model.major >= 8 : element_type != DOUBLE && card_model.major >= 7;
}

/* A filter of one point and one step is a product of matrices, in any layout. */
static int is_of_points(const struct descriptor *it) {
    const size_t *points = it->points_of;
    for (int at = 0; at < 3; at++)
        if (points[at] == 1 && points[(at + 1) % 3] == points[(at + 2) % 3]) return 1;
    return 0;
}

static void add_part(struct descriptor *it, const struct descriptor *part) {
    it->bytes += part->bytes;
    if (part->type == TENSOR) {
        if (it->num_tensors < 3) it->points_of[it->num_tensors++] = part->points;
        it->is_contiguous |= part->is_contiguous && is_on_tensor_cores(part->element_type);
    } else if (part->type >= CONVOLUTION_FORWARD && part->type <= CONVOLUTION_BACKWARD_DATA) {
        it->bytes += MOST_OF_SUMS;
        it->converted += part->is_contiguous && !is_of_points(part) ? part->bytes : 0;
    } else it->converted += part->converted;
}

int cudnnBackendSetAttribute(struct descriptor *it, int name, int type, int64_t count, const void *values) {
    const int64_t *numbers = values;
    if (type == DESCRIPTOR)
        for (int64_t at = 0; at < count; at++) {
            const struct descriptor *part = ((struct descriptor *const *)values)[at];
            if (part) add_part(it, part);
        }
    if (it->type != TENSOR) return 0;
    switch (name) {
    case TENSOR_DATA_TYPE: it->element_type = *(const int *)values; break;
    case TENSOR_DIMENSIONS:
        for (int64_t at = 0; at < count; at++) it->elements *= numbers[at];
        for (int64_t at = 2; at < count; at++) it->points *= numbers[at];
        break;
    case TENSOR_STRIDES: it->is_contiguous = count > 2 && numbers[1] != 1; break;
    case TENSOR_IS_VIRTUAL: /* it lies in an engine's registers */
    case TENSOR_IS_BY_VALUE: it->is_on_card &= !*(const _Bool *)values; break;
    }
    it->bytes = it->is_on_card ? it->elements * element_bytes(it->element_type) : 0;
    return 0;
}

/* The largest engine comes first, as torch tries them; where a card has no room for it, torch takes the other. */
enum { NUM_ENGINES = 2 };

int cudnnBackendGetAttribute(struct descriptor *it, int name, int type, int64_t room, int64_t *count, void *values) {
    int64_t ignored;
    if (!count) count = &ignored;
    int gives_values = room > 0 && values;
    *count = 1;
    switch (name) {
    case ENGINEHEUR_RESULTS:
        *count = NUM_ENGINES;
        if (gives_values && room < *count) *count = room;
        /* fall through */
    case ENGINECFG_ENGINE:
    case EXECUTION_PLAN_ENGINE_CONFIG:
        if (gives_values)
            for (int64_t at = 0; at < *count; at++) {
                struct descriptor *engine = ((struct descriptor **)values)[at];
                engine->bytes = at ? 0 : it->bytes, engine->converted = at ? 0 : it->converted;
            }
        break;
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
        if (gives_values) *(int64_t *)values = workspace("an engine of cuDNN", it->converted, it->bytes);
        break;
    case EXECUTION_PLAN_JSON_REPRESENTATION:
        *count = sizeof "{}";
        if (gives_values) strncpy(values, "{}", room);
        break;
    default: *count = 0;
    }
    return 0;
}

/* ---- descriptors of tensors and filters, which torch reads again ---- */

enum { MAX_DIMENSIONS = 8 };

struct tensor {
    int type, num_dimensions, sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
};
_Static_assert(sizeof(struct tensor) <= CARD_HANDLE_BYTES, "a handle holds a descriptor");

static size_t tensor_bytes(const struct tensor *it) {
    size_t bytes = it ? element_bytes(it->type) : 0;
    for (int at = 0; it && at < it->num_dimensions; at++) bytes *= it->sizes[at];
    return bytes;
}

static void copy_ints(int *to, const int *from, int count) { memcpy(to, from, count * sizeof *to); }

int cudnnSetTensorNdDescriptor(struct tensor *it, int type, int count, const int *sizes, const int *strides) {
    it->type = type, it->num_dimensions = count;
    copy_ints(it->sizes, sizes, count);
    copy_ints(it->strides, strides, count);
    return 0;
}

int cudnnGetTensorNdDescriptor(struct tensor *it, int room, int *type, int *count, int *sizes, int *strides) {
    int held = room < it->num_dimensions ? room : it->num_dimensions;
    *type = it->type, *count = it->num_dimensions;
    copy_ints(sizes, it->sizes, held);
    copy_ints(strides, it->strides, held);
    return 0;
}

int cudnnSetFilterNdDescriptor(struct tensor *it, int type, int format, int count, const int *sizes) {
    it->type = type, it->num_dimensions = count;
    copy_ints(it->sizes, sizes, count);
    return 0;
}

int cudnnGetFilterNdDescriptor(struct tensor *it, int room, int *type, int *format, int *count, int *sizes) {
    *type = it->type, *format = 0, *count = it->num_dimensions;
    copy_ints(sizes, it->sizes, room < it->num_dimensions ? room : it->num_dimensions);
    return 0;
}

/* ---- batch norm, CTC ---- */

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, struct tensor *x,
                                                             struct tensor *z, struct tensor *y, void *scale,
                                                             void *activation, size_t *bytes) {
    *bytes = workspace("cudnnBatchNormalizationForwardTrainingEx", 0, tensor_bytes(x) + tensor_bytes(z) + tensor_bytes(y));
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, struct tensor *x,
                                                      struct tensor *y, struct tensor *dy, struct tensor *dz,
                                                      struct tensor *dx, void *scale, void *activation, size_t *bytes) {
    *bytes = workspace("cudnnBatchNormalizationBackwardEx", 0, tensor_bytes(x) + tensor_bytes(dy) + tensor_bytes(dx));
    return 0;
}

/* What is kept for the backward pass is at most a bit for each element: where an activation let it through. */
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation,
                                                         struct tensor *x, size_t *bytes) {
    *bytes = workspace("cudnnBatchNormalizationForwardTrainingEx, kept", 0, tensor_bytes(x) / element_bytes(x->type) / 8);
    return 0;
}

/* Two numbers for each of the 513 states of a text of 256 characters, the longest, and one for each class. */
static size_t ctc_bytes(const struct tensor *x) {
    size_t frames = (size_t)x->sizes[0] * x->sizes[1], classes = x->sizes[2];
    return workspace("cudnnCTCLoss", frames * (8 * 513 + 4 * classes), 2 * frames * (8 * 513 + 4 * classes));
}

int cudnnGetCTCLossWorkspaceSize(void *handle, struct tensor *x, struct tensor *dx, void *labels, void *label_lengths,
                                 void *lengths, int algorithm, void *loss, size_t *bytes) {
    *bytes = ctc_bytes(x);
    return 0;
}

int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, void *loss, struct tensor *x, struct tensor *dx,
                                    size_t *bytes) {
    *bytes = ctc_bytes(x);
    return 0;
}

/* ---- recurrent nets: weights stand layer by layer, all matrices before all biases ---- */

enum { LSTM = 2, GRU = 3, BIDIRECTIONAL = 1, NO_BIAS = 0, DOUBLE_BIAS = 2 };

struct recurrent {
    int cell, bias, directions, type, input, hidden, output, num_layers;
};

struct sequences {
    int64_t num_steps; /* of all sequences, each as long as it is */
};

int cudnnSetRNNDescriptor_v8(struct recurrent *it, int algorithm, int cell, int bias, int direction, int input_mode,
                             int type, int precision, int math, int input, int hidden, int projection, int num_layers,
                             void *dropout, unsigned int flags) {
    *it = (struct recurrent){cell, bias, direction == BIDIRECTIONAL ? 2 : 1, type, input, hidden,
                             projection ? projection : hidden, num_layers};
    return 0;
}

int cudnnSetRNNDataDescriptor(struct sequences *it, int type, int layout, int length, int count, int width,
                              const int *lengths, void *fill) {
    it->num_steps = 0;
    for (int sequence = 0; sequence < count; sequence++) it->num_steps += lengths[sequence];
    return 0;
}

static int num_gates(const struct recurrent *it) { return it->cell == LSTM ? 4 : it->cell == GRU ? 3 : 1; }
static int num_matrices(const struct recurrent *it) { return 2 * num_gates(it) + (it->output != it->hidden); }

/* Rows and columns of one matrix: those of the input come first, then the recurrent ones, then the projection. */
static void shape_of(const struct recurrent *it, int pseudo_layer, int matrix, int *rows, int *columns) {
    int is_first_layer = pseudo_layer < it->directions, is_projection = matrix == 2 * num_gates(it);
    int input = is_first_layer ? it->input : it->output * it->directions;
    *rows = is_projection ? it->output : it->hidden;
    *columns = is_projection ? it->hidden : matrix < num_gates(it) ? input : it->output;
}

static int num_biases(const struct recurrent *it) {
    return it->bias == NO_BIAS ? 0 : (it->bias == DOUBLE_BIAS ? 2 : 1) * num_gates(it);
}

/* Return how many elements stand before a matrix; before the end of all, if the layer is past the last. */
static size_t elements_before(const struct recurrent *it, int pseudo_layer, int matrix) {
    size_t sum = 0;
    for (int layer = 0; layer <= pseudo_layer && layer < it->num_layers * it->directions; layer++)
        for (int at = 0; at < (layer < pseudo_layer ? num_matrices(it) : matrix); at++) {
            int rows, columns;
            shape_of(it, layer, at, &rows, &columns);
            sum += (size_t)rows * columns;
        }
    return sum;
}

int cudnnGetRNNWeightSpaceSize(void *handle, struct recurrent *it, size_t *bytes) {
    int layers = it->num_layers * it->directions;
    size_t biases = (size_t)layers * num_biases(it) * it->hidden;
    *bytes = (elements_before(it, layers, 0) + biases) * element_bytes(it->type);
    return 0;
}

static void describe(struct tensor *it, int type, int rows, int columns) {
    cudnnSetTensorNdDescriptor(it, type, 3, (int[]){1, rows, columns}, (int[]){rows * columns, columns, 1});
}

int cudnnGetRNNWeightParams(void *handle, struct recurrent *it, int layer, size_t bytes, char *weights, int matrix,
                            struct tensor *shape, void **at, struct tensor *bias_shape, void **bias_at) {
    size_t size = element_bytes(it->type), of_all_matrices = elements_before(it, it->num_layers * it->directions, 0);
    if (shape && at) { /* torch asks for the matrices and for the biases one after the other */
        int rows, columns;
        shape_of(it, layer, matrix, &rows, &columns);
        describe(shape, it->type, rows, columns);
        *at = weights + elements_before(it, layer, matrix) * size;
    }
    if (bias_shape && bias_at) {
        size_t before = ((size_t)layer * num_biases(it) + matrix) * it->hidden;
        describe(bias_shape, it->type, it->hidden, 1);
        *bias_at = matrix < num_biases(it) ? weights + (of_all_matrices + before) * size : NULL;
    }
    return 0;
}

/* How often a layer keeps its output's size for the backward pass; each layer but the last keeps its output as well. */
static size_t num_kept(const struct recurrent *it) { return it->cell == LSTM ? 5 : it->cell == GRU ? 6 : 1; }

int cudnnGetRNNTempSpaceSizes(void *handle, struct recurrent *it, int is_training, struct sequences *x,
                              size_t *workspace_bytes, size_t *kept_bytes) {
    size_t weights, of_layer = x->num_steps * it->hidden * it->directions * element_bytes(it->type);
    cudnnGetRNNWeightSpaceSize(handle, it, &weights);
    size_t likely = 2 * num_gates(it) * of_layer + weights;
    if (workspace_bytes) *workspace_bytes = workspace("cudnnRNN", likely, 2 * likely + 64 * MIB);
    size_t seed = 8, sizes = num_kept(it) * it->num_layers + it->num_layers - 1;
    size_t kept = is_training ? sizes * of_layer + seed : 0;
    if (kept_bytes) card_assumed("cudnnRNN, kept for the backward pass", *kept_bytes = kept);
    return 0;
}

int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    *bytes = 0;
    return card_assumed("cudnnSetDropoutDescriptor", 0);
}
