"""Where the processes of several workers run: each on a GPU of its own, or on its share of a CPU's cores."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.fork_server import cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that CUDA shows to a process."""


@dataclass(frozen=True)
class Placement:
    """Where a run's process runs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, set before its first CUDA call."""
    cores: frozenset[int] | None = None
    """The cores that it may use; None: all that this process may use."""


ANYWHERE = Placement()
"""On the device of the experiment, and on all cores."""


def placements(device: torch.device, num_workers: int | None) -> list[Placement]:
    """Return the place of each worker; None: a worker for each visible GPU, or one on a CPU.

    A single worker runs on the device itself. Of several, each sees one GPU alone, which is its first, or has an equal
    share of the cores.

    Raises:
        InvalidInputError: there are fewer GPUs or cores than workers, or several workers are to share one named GPU.

    """
    num_available = torch.cuda.device_count() if device.type == "cuda" else len(cores())
    if num_workers is None:
        num_workers = num_available if device.type == "cuda" and not device.index else 1
    if num_workers == 1:
        return [ANYWHERE]
    if num_workers > num_available:
        kind = "visible GPU" if device.type == "cuda" else "core"
        raise InvalidInputError(
            f"each worker needs a {kind} of its own, and this machine has {num_available} for {num_workers} workers; "
            f"set workers to {num_available} or less"
        )
    if device.type == "cuda":
        if device.index:
            raise InvalidInputError(
                f"{num_workers} workers need as many GPUs, and device={device} names one; set device=cuda, or workers=1"
            )
        shown = os.environ.get(VISIBLE)
        names = shown.split(",") if shown else [str(number) for number in range(num_available)]
        return [Placement({VISIBLE: name.strip()}) for name in names[:num_workers]]
    share = len(cores()) // num_workers
    own = [cores()[number * share : (number + 1) * share] for number in range(num_workers)]
    return [Placement(cores=frozenset(some)) for some in own]
