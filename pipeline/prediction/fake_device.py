"""A device that a run is simulated on: fake tensors, with all that makes them live and die as on that device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from pipeline.base.contracts import Hardware
from pipeline.prediction.cached_operators import CachedFakeTensorMode
from pipeline.prediction.cuda_operators import cuda_operators
from pipeline.prediction.grouped_products import grouped_products
from pipeline.prediction.patches import without_numbers


@contextmanager
def simulated(target: Hardware) -> Iterator[CachedFakeTensorMode]:
    """Make tensors without numbers, as `target` would hold them; whatever happens, the process is as before."""
    operators = cuda_operators(target.capability) if target.capability else nullcontext()
    with (
        without_numbers(counts_host_memory=target.kind == "cpu"),
        operators,
        grouped_products(),
        CachedFakeTensorMode() as mode,
    ):
        yield mode
