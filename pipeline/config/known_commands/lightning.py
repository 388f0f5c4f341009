"""`python main.py fit ...` of Lightning's command line, whose options are those of its trainer, model and data."""

from collections.abc import Mapping
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.command import ACCUMULATION
from pipeline.config.known_command import BF16, KnownCommand, Lever
from pipeline.config.space import MICRO_BATCH


class Lightning(KnownCommand):
    """A script with a LightningCLI, whose data has the option `batch_size`, as it is usually called."""

    marks: ClassVar[tuple[str, ...]] = ("LightningCLI",)
    batch_options: ClassVar[Mapping[str, str]] = {
        "data.batch_size": MICRO_BATCH,
        "trainer.accumulate_grad_batches": ACCUMULATION,
    }
    batch_defaults: ClassVar[Mapping[str, str]] = {"trainer.accumulate_grad_batches": "1"}
    levers: ClassVar[tuple[Lever, ...]] = (
        Lever(
            name="trainer.precision",
            values=("32-true", "bf16-mixed"),
            mathematics=Mathematics.ROUNDING,
            is_usual=True,
            by_memory=("32-true", "bf16-mixed", "16-mixed"),
            price=BF16.price,
        ),
    )
    file_options: ClassVar[tuple[str, ...]] = ("config", "c")
