"""A device that a run is simulated on: fake tensors, with all that makes them live and die as on that device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from pipeline.contracts import Hardware
from pipeline.simulation.cuda import cuda_operators
from pipeline.simulation.patches import without_numbers
from pipeline.simulation.remembered import RememberingFakeTensorMode


@contextmanager
def simulated(target: Hardware) -> Iterator[RememberingFakeTensorMode]:
    """Make tensors without numbers, as `target` would hold them; whatever happens, the process is as before."""
    operators = cuda_operators(target.capability) if target.capability else nullcontext()
    with (
        without_numbers(counts_host_memory=target.kind == "cpu"),
        operators,
        RememberingFakeTensorMode() as mode,
    ):
        yield mode
