"""The implementation of attention, for models of transformers that let one choose it."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

from pipeline.base.contracts import Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Step, Technique

NAMES = {"eager": "eager", "flash": "flash_attention_2"}
"""transformers' names of the implementations that are chosen here."""
FLASH_CAPABILITY = (8, 0)
"""CUDA compute capability from which on flash_attn's kernels run: Ampere (its README, "NVIDIA CUDA Support")."""


class Attention(Technique):
    """Scores and their softmax as plain operators, torch's fused attention, or the kernels of flash_attn."""

    attention: Literal["sdpa", "eager", "flash"] = "sdpa"
    """sdpa: torch's fused attention, or the model's own where it has none; eager; flash: the package flash_attn."""

    @property
    def mathematics(self) -> Mathematics:
        """The same formula; every implementation rounds differently."""
        return Mathematics.EXACT if self.attention == "sdpa" else Mathematics.ROUNDING

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[str, ...]:
        """Return what has been measured: flash has not."""
        return ("sdpa", "eager")

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield why flash_attn does not run, or that the model's attention cannot be chosen, or not this one."""
        if self.attention == "sdpa":
            return
        if self.attention == "flash":
            yield from _refusals_of_flash(settings, hardware)
        chosen, known = NAMES[self.attention], model.attention_implementations(settings.model)
        if chosen not in known:
            yield (
                f"attention={self.attention} needs a model of transformers that can be set to {chosen}, and "
                f"{settings.model} {'knows ' + ', '.join(known) if known else 'has an attention of its own'}; set "
                "attention=sdpa"
            )

    def export(self, target: str) -> Exported:
        """Return the call that chooses it, for any framework; axolotl has a key."""
        if target == "axolotl":
            return Exported(arguments={"attn_implementation": NAMES[self.attention]})
        return Exported(prepare=f'model.set_attn_implementation("{NAMES[self.attention]}")')

    def apply(self, step: Step) -> Step:
        """Choose the implementation by transformers' own method."""
        if self.attention != "sdpa":
            step.trainable.module.set_attn_implementation(NAMES[self.attention])  # type: ignore[operator]
        return step


def _refusals_of_flash(settings: Any, hardware: Hardware) -> Iterator[str]:
    """Yield what flash_attn needs and does not have: a 16-bit format, documents of their own, a GPU, the package."""
    remedy = "set attention=sdpa, which has a flash kernel too"
    if settings.precision not in ("bf16", "fp16"):
        yield (
            f"attention=flash computes in 16 bits, and precision is {settings.precision}; set precision=bf16 or "
            "attention=sdpa"
        )
    if settings.sequences == "packed_documents" and settings.micro_batch_size > 1:
        yield (
            "transformers keeps documents apart with attention=flash in micro-batches of one sequence alone "
            f"(_is_packed_sequence), and micro_batch_size is {settings.micro_batch_size}; set micro_batch_size=1 "
            "with a larger sequence_length, or attention=sdpa"
        )
    if hardware.kind != "cuda":
        yield f"attention=flash needs a CUDA GPU, and the device is {hardware.kind}; {remedy}"
    if hardware.is_older_than(FLASH_CAPABILITY):
        needed = "attention=flash needs compute capability 8.0 (Ampere) or newer"
        yield f"{needed}, and {hardware.name} is older; {remedy}"
    if find_spec("flash_attn") is None:
        yield f"attention=flash needs the package flash_attn, and it is not installed; install it, or {remedy}"
