"""Hugging Face Accelerate: the configuration file of `accelerate launch`, and functions for the script."""

from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, lengths_note, processes_note, render


class Accelerate(Target):
    """accelerate.Accelerator."""

    purpose: ClassVar[str] = (
        "For Accelerate: `accelerate launch --config_file accelerate.yaml your_script.py`, with the functions of "
        "accelerate_setup.py in that script."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the launcher's file, and the functions for a script."""
        return {
            "accelerate.yaml": render(
                "accelerate.yaml.jinja", facts, notes=self.differences(facts), command=_command(facts)
            ),
            "accelerate_setup.py": render("accelerate_setup.py.jinja", facts),
        }

    def differences(self, facts: Facts) -> list[str]:
        """Return what the launcher's file has no key for, and what Accelerate refuses."""
        notes = processes_note(facts, _command(facts)) + lengths_note(facts)
        if facts.settings.precision == "tf32":
            notes.append("The launcher's file has no key for tf32: accelerate_setup.py enables it.")
        if facts.checkpointed:
            notes.append(
                "The launcher's file has no key for checkpointing: call prepare_model(model) of accelerate_setup.py."
            )
        if not facts.has_labels:
            notes.append("Its loss is of no labels: accelerate_setup.py has no optimizer_step, which the script takes.")
        if facts.scales_loss:
            notes.append("fp16 needs a GPU: Accelerate refuses it on a CPU.")
        return notes


def _command(facts: Facts) -> str:
    """Return the command that starts a script; on CPUs accelerate's launcher starts one process without MPI."""
    if facts.device_type == "cpu" and facts.world_size > 1:
        return f"torchrun --nproc_per_node={facts.world_size} your_script.py"
    return "accelerate launch --config_file accelerate.yaml your_script.py"
