"""Hugging Face Accelerate: the file of `accelerate launch`, and what belongs in the script."""

from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, render


class Accelerate(Target):
    """accelerate.Accelerator."""

    purpose: ClassVar[str] = (
        "For Accelerate: `accelerate launch --config_file accelerate.yaml your_script.py`, with the functions of "
        "accelerate_setup.py in that script."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the launcher's file, and the functions of a script."""
        return {
            "accelerate.yaml": render("accelerate.yaml.jinja", facts, notes=self.notes(facts)),
            "accelerate_setup.py": render("accelerate_setup.py.jinja", facts),
        }

    def notes(self, facts: Facts) -> list[str]:
        """Return what the launcher's file has no key for."""
        notes = []
        if facts.precision == "tf32":
            notes.append("The launcher's file has no key for tf32: accelerate_setup.py switches it on.")
        if facts.checkpointed:
            notes.append("The launcher's file has no key for checkpointing: checkpoint_layers in accelerate_setup.py.")
        if facts.scales_loss:
            notes.append("fp16 needs a GPU: Accelerate refuses it on a processor.")
        return notes
