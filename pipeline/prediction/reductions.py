"""The buffers of reductions on CUDA that do not grow linearly with the batch: sums of columns, gradients of embeddings.

Sums over the rows of a matrix make the gradients of biases and of the weights of norms. Several blocks of threads share
a column if it is long; their partial sums need memory. The rules are those of torch's
aten/src/ATen/native/cuda/Reduce.cuh (ReduceConfig and setReduceConfig) with a sum in float32. Sums of rows and of all
elements need a few KiB at most, which is left out.
"""

from functools import cache
from math import gcd

from pipeline.base.contracts import Hardware

VALUES_PER_THREAD = (16, 256)
"""Fewest and most elements that a thread adds up when a column is divided."""
MAX_THREADS = 512
"""Threads of a block (mnt_wrapper)."""
EMBEDDING_SORTED_TOKENS = 3072
"""Largest number of tokens whose embedding's gradient is computed without sorting (embedding_dense_backward_cuda)."""
EMBEDDING_PART = 10
"""Tokens that a thread adds up there (NROWS_PER_THREAD)."""
WARP = 32
"""Threads of a warp."""
MULTIPROCESSOR_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor (CUDA C++ programming guide, "Technical Specifications"); 2,048 otherwise."""


@cache
def column_sum_bytes(rows: int, columns: int, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of the partial sums, and of the semaphores, of the column sums of a contiguous matrix."""
    assert hardware.capability is not None and hardware.num_multiprocessors is not None  # it is CUDA
    vector = gcd(columns, 4)
    limit = MAX_THREADS // vector
    outer, inner = min(_power_of_two(columns // vector), limit), min(_power_of_two(rows), limit)
    height = min(inner, limit // min(outer, WARP))
    width = min(outer, limit // height)
    fewest, most = VALUES_PER_THREAD
    values = -(-rows // height)
    blocks = -(-(columns // vector) // width)
    resident = MULTIPROCESSOR_THREADS.get(hardware.capability, 2048) // (width * height)
    if rows < min(height * fewest, most) or values < most or blocks > hardware.num_multiprocessors * resident:
        return 0, 0
    enough = -(-hardware.num_multiprocessors * resident // blocks)
    shares = max(min(enough, -(-values // fewest)), -(-values // most))
    return (4 * columns * shares * width * vector, 4 * blocks) if shares > 1 else (0, 0)


def embedding_buffer_bytes(tokens: int, vocabulary_size: int, channels: int) -> int:
    """Return the bytes of the gradients of all parts of the sorted tokens (grad_weight_per_segment, in float32).

    The source is embedding_backward_cuda_kernel in aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    if tokens <= EMBEDDING_SORTED_TOKENS:
        return 0
    return 4 * channels * (tokens // EMBEDDING_PART + min(tokens, vocabulary_size))


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << max(number, 1).bit_length() - 1
