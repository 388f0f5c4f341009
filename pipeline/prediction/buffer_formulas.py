"""The formulas of buffers inside operators that do not grow linearly with the batch.

The shape of such a buffer holds the arguments of its formula, so that the formula is asked at every micro-batch size.
"""

from collections.abc import Callable
from functools import cache

import torch

from pipeline.base.contracts import Hardware
from pipeline.memory.timeline import Origin, Shape
from pipeline.prediction.attention_buffers import efficient_workspace_bytes, flash_part_bytes
from pipeline.prediction.cpu_products import is_scratchpad, scratchpad_bytes
from pipeline.prediction.reductions import column_sum_bytes, embedding_buffer_bytes

Formula = Callable[[Shape, Hardware], int]


def _partial_sums(shape: Shape, hardware: Hardware) -> int:
    return column_sum_bytes(*shape, hardware)[0]


def _semaphores(shape: Shape, hardware: Hardware) -> int:
    return column_sum_bytes(*shape, hardware)[1]


def _flash_parts(shape: Shape, hardware: Hardware) -> int:
    assert hardware.num_multiprocessors is not None  # it is CUDA
    return flash_part_bytes(*shape, num_multiprocessors=hardware.num_multiprocessors)


FORMULAS: dict[tuple[str, torch.dtype], Formula] = {
    ("inside sum", torch.float32): _partial_sums,
    ("inside sum", torch.int32): _semaphores,
    ("inside linalg_vector_norm", torch.float32): _partial_sums,
    ("inside linalg_vector_norm", torch.int32): _semaphores,
    ("inside embedding_dense_backward", torch.float32): lambda shape, _: embedding_buffer_bytes(*shape),
    ("inside _scaled_dot_product_flash_attention", torch.float32): _flash_parts,
    ("inside _scaled_dot_product_efficient_attention_backward", torch.float32): (
        lambda shape, _: efficient_workspace_bytes(*shape)
    ),
}
"""By what made the buffer and its type. The scratchpads of a CPU's products have one as well: scratchpad_bytes()."""


@cache
def has_formula(origin: Origin) -> bool:
    """Whether buffer_bytes() knows the size of a buffer."""
    return (origin.operator, origin.dtype) in FORMULAS or is_scratchpad(origin.operator, origin.dtype)


def buffer_bytes(origin: Origin, shape: Shape, hardware: Hardware) -> int:
    """Return the size that a buffer has with another shape, which holds the arguments of its formula."""
    formula = FORMULAS.get((origin.operator, origin.dtype))
    return scratchpad_bytes(origin.operator, shape) if formula is None else formula(shape, hardware)
