"""A simulated device: fake tensors whose operators allocate what they would on that device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from pipeline.base.contracts import Hardware
from pipeline.memory import offloading
from pipeline.prediction.cached_operators import CachedFakeTensorMode
from pipeline.prediction.cuda_operators import cuda_operators
from pipeline.prediction.fake_card import HOST
from pipeline.prediction.four_bit import four_bit_layers
from pipeline.prediction.gradient_buckets import GradientBuckets
from pipeline.prediction.grouped_products import grouped_products
from pipeline.prediction.patches import clipping_in_lists, without_values
from pipeline.training import data_parallel


@contextmanager
def simulated(target: Hardware, *, has_documents: bool = False) -> Iterator[CachedFakeTensorMode]:
    """Create fake tensors inside this context, as on `target`; the process is restored on exit.

    `has_documents` says whether sequences have several documents, which attention keeps apart.
    """
    operators = cuda_operators(target.capability) if target.capability else nullcontext()
    clipping = clipping_in_lists() if target.capability else nullcontext()
    with (
        without_values(counts_host_memory=target.kind == "cpu", has_documents=has_documents),
        operators,
        patch.object(offloading, "HOST", HOST if target.capability else offloading.HOST),
        patch.object(data_parallel, "DistributedDataParallel", GradientBuckets),
        clipping,
        grouped_products(),
        four_bit_layers(target),
        CachedFakeTensorMode() as mode,
    ):
        yield mode
