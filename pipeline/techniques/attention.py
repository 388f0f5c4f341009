"""The implementation of attention, for models of transformers that let one choose it."""

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

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return why flash_attn does not run."""
        if self.attention != "flash":
            return None
        remedy = "set attention=sdpa, which has a flash kernel too"
        if hardware.kind != "cuda":
            return f"attention=flash needs a CUDA GPU, and the device is {hardware.kind}; {remedy}"
        if hardware.capability is not None and hardware.capability < FLASH_CAPABILITY:
            needed = "attention=flash needs compute capability 8.0 (Ampere) or newer"
            return f"{needed}, and {hardware.name} is older; {remedy}"
        if find_spec("flash_attn") is None:
            return f"attention=flash needs the package flash_attn, and it is not installed; install it, or {remedy}"
        return None

    def conflict(self, settings: Any) -> str | None:
        """Return that flash_attn needs a 16-bit format, or one sequence where documents are kept apart."""
        if self.attention == "flash" and settings.precision not in ("bf16", "fp16"):
            return (
                f"attention=flash computes in 16 bits, and precision is {settings.precision}; set precision=bf16 or "
                "attention=sdpa"
            )
        if self.attention == "flash" and settings.sequences == "packed_documents" and settings.micro_batch_size > 1:
            return (
                "transformers keeps documents apart with attention=flash in micro-batches of one sequence alone "
                f"(_is_packed_sequence), and micro_batch_size is {settings.micro_batch_size}; set micro_batch_size=1 "
                "with a larger sequence_length, or attention=sdpa"
            )
        return None

    def unsuited(self, model: Model, name: str) -> str | None:
        """Return that the model's attention cannot be chosen, or not this one."""
        if self.attention == "sdpa":
            return None
        chosen, known = NAMES[self.attention], model.attention_implementations(name)
        if chosen in known:
            return None
        return (
            f"attention={self.attention} needs a model of transformers that can be set to {chosen}, and {name} "
            f"{'knows ' + ', '.join(known) if known else 'has an attention of its own'}; set attention=sdpa"
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
