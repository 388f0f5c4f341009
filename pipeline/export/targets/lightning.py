"""Lightning: a Trainer and the optimizers of a LightningModule."""

from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, render, uneven_note


class Lightning(Target):
    """lightning.pytorch.Trainer."""

    purpose: ClassVar[str] = "For Lightning: `make_trainer()`, and `configure_optimizers(model)` for your module."

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the Python file."""
        text = render("lightning_trainer.py.jinja", facts, notes=self.notes(facts), fused=_fused(facts))
        return {"lightning_trainer.py": text}

    def notes(self, facts: Facts) -> list[str]:
        """Return what the Trainer has no argument for."""
        notes = []
        if facts.checkpointed:
            notes.append("Checkpointing is the model's affair in Lightning: call checkpoint_layers(model).")
        if facts.precision == "tf32":
            notes.append("The Trainer has no argument for tf32: importing this file switches it on.")
        if facts.scales_loss:
            notes.append("A plugin sets fp16, since precision='16-mixed' becomes bf16 on a processor.")
        if not _fused(facts):
            notes.append("Lightning does not clip under autocast with a fused optimizer: AdamW is not fused here.")
        remedy = "return the summed loss x accumulation steps / targets of the whole window"
        return notes + uneven_note(facts, remedy)


def _fused(facts: Facts) -> bool:
    """Whether AdamW may be fused: MixedPrecision.clip_gradients refuses one that is."""
    return facts.autocast_dtype is None or facts.max_grad_norm is None
