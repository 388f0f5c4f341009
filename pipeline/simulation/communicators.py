"""What NCCL takes of a card beside torch's allocator: published measurements, and the interval that they make.

| what was measured | memory of a card | source |
|---|---|---|
| a communicator of 2 ranks, all-reduce of 4 MB, 4 x A100 with NVLink | 544 MB | NVIDIA/nccl issue 964 |
| the same of 3 or 4 ranks | 688 MB | NVIDIA/nccl issue 964 |
| one of 8 ranks, a barrier, 8 x H100, with the context | 1,505 to 1,525 MiB | openai/parameter-golf |
| one communicator, all-reduce | about 1.6 GB | NVIDIA/nccl issue 864 |
| three communicators and more | about 6 GB | NVIDIA/nccl issue 864 |

It grows with the channels, so with the speed of the link, and no more from two machines on (issue 986). Point-to-point
operations take more: an all-to-all among 8 x H100 went from 1.06 to 4.34 GB (issue 1685).
"""

from pipeline.base.units import MIB

OF_EACH_MIB = (544, 2048)
"""Of one communicator: the smallest that was measured, and a third of what three took (1 GB taken for 1024 MiB)."""


def communicators_bytes(num_communicators: int) -> tuple[int, int]:
    """Return the smallest and the largest memory that so many communicators took where it was measured."""
    low, high = (each * num_communicators * MIB for each in OF_EACH_MIB)
    return low, high


def note_on_communicators(those: str, num_communicators: int = 1) -> str:
    """Return a sentence on the memory of NCCL, which torch's allocator does not count; `those` names communicators."""
    low, high = (each / MIB for each in communicators_bytes(num_communicators))
    return (
        f"NCCL's buffers are not counted: {those} would take {low:,.0f} to {high:,.0f} MiB of the card besides, by "
        "what others measured of all-reduces (NVIDIA/nccl issues 964 and 864); all-to-all takes more."
    )
