"""Lightning: a Trainer and the optimizers of a LightningModule."""

from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, lengths_note, processes_note, render, uneven_note


class Lightning(Target):
    """lightning.pytorch.Trainer."""

    purpose: ClassVar[str] = "For Lightning: `make_trainer()`, and `configure_optimizers(model)` for your module."

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the Python file."""
        text = render("lightning_trainer.py.jinja", facts, notes=self.differences(facts), fused=_fused(facts))
        return {"lightning_trainer.py": text}

    def differences(self, facts: Facts) -> list[str]:
        """Return what the Trainer has no argument for, and what Lightning does differently."""
        notes = processes_note(facts, "the script itself: devices starts the others") + lengths_note(facts)
        if facts.has_prepare:
            settings = ", ".join([*(["checkpointing"] if facts.checkpointed else []), *facts.in_python])
            notes.append(f"The Trainer has no argument for {settings}: call prepare_model(model) before fit().")
        if facts.settings.precision == "tf32":
            notes.append("The Trainer has no argument for tf32: importing this file enables it.")
        if facts.scales_loss:
            notes.append("fp16 is set by a plugin, since precision='16-mixed' becomes bf16 on a CPU.")
        if not _fused(facts):
            notes.append(
                "Lightning does not clip gradients under autocast with a fused optimizer: AdamW is not fused here."
            )
        return notes + uneven_note(facts, "return")


def _fused(facts: Facts) -> bool:
    """Whether AdamW may be fused: MixedPrecision.clip_gradients refuses a fused optimizer."""
    return facts.autocast_dtype is None or facts.settings.max_grad_norm is None
