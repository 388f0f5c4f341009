"""What llama-3.1-8b and 70b need of 8 to 64 H100 in every layout, and how fast they are expected to train.

    python benchmarks/layouts.py benchmarks/layouts_h100_<date>.csv     appends the rows that the table does not have

Each row is a plan of one layout with the same lever values; times are estimated.
"""

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rows import add_missing

import fitproof
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB

CASES = {
    f"{model} x {num_gpus} fsdp tensor_parallel={divided}": (model, num_gpus, divided)
    for model, num_gpus, divided in product(("llama-3.1-8b", "llama-3.1-70b"), (8, 16, 32, 64), (1, 8))
}
"""Model, number of GPUs and tensor_parallel, by the name of the layout."""
SETTINGS = {
    "sharding": "fsdp",
    "sequence_length": 4096,
    "effective_batch_size": 64,
    "micro_batch_size": 1,
    "precision": "bf16",
    "checkpointing": "every_layer",
    "loss_kernel": "chunked",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of a model on some cards; `refused` says why it has no numbers."""

    layout: str
    fits: bool | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    seconds_if_all_overlaps: float | None = None
    seconds_if_nothing_does: float | None = None
    refused: str = ""


def planned(layout: str) -> Row:
    """Plan a layout."""
    model, num_gpus, divided = CASES[layout]
    space = {"tensor_parallel": [divided]}
    try:
        found = fitproof.plan(model=model, gpu="h100", gpus=str(num_gpus), space=space, **SETTINGS)
    except InvalidInputError as error:
        return Row(layout=layout, refused=str(error))
    [card] = found.cards
    [row] = card.rows
    assert row.peak_reserved_bytes is not None
    assert row.seconds_between is not None
    overlapped, serial = row.seconds_between
    return Row(
        layout=layout,
        fits=row.fits,
        allocated_mib=round(row.peak_allocated_bytes / MIB, 1),
        reserved_mib=round(row.peak_reserved_bytes / MIB, 1),
        tokens_per_second=round(row.tokens_per_second),
        seconds_per_step=round(row.seconds, 3),
        seconds_if_all_overlaps=round(overlapped, 3),
        seconds_if_nothing_does=round(serial, 3),
    )


def main() -> None:
    """Plan the layouts that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    add_missing(parser.parse_args().table, Row, CASES, planned)


if __name__ == "__main__":
    main()
