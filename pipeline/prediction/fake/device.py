"""A simulated CPU: fake tensors whose operators allocate what they would there."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pipeline.prediction.fake.cached_operators import CachedFakeTensorMode
from pipeline.prediction.fake.ctc_loss import ctc_loss
from pipeline.prediction.fake.four_bit import four_bit_layers
from pipeline.prediction.fake.gradient_buckets import GradientBuckets
from pipeline.prediction.fake.grouped_products import grouped_products
from pipeline.prediction.patches import without_values
from pipeline.techniques._support import data_parallel


@contextmanager
def simulated(*, has_documents: bool = False) -> Iterator[CachedFakeTensorMode]:
    """Create fake tensors inside this context; the process is restored on exit.

    `has_documents` says whether sequences have several documents, which attention keeps apart.
    """
    with (
        without_values(has_documents=has_documents),
        patch.object(data_parallel, "DistributedDataParallel", GradientBuckets),
        grouped_products(),
        ctc_loss(),
        four_bit_layers(),
        CachedFakeTensorMode() as mode,
    ):
        yield mode
