"""The arguments of Hugging Face's Trainer, and so of the trainers that are made from it."""

from typing import Any

from pipeline.export.facts import DEFAULT_LOSS_SCALE, Facts

CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""The argument that enables checkpointing, the newest name first; only the newest supports every n-th layer."""


def trainer_arguments(facts: Facts) -> dict[str, Any]:
    """Return the arguments by name."""
    return {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": facts.settings.micro_batch_size,
        "gradient_accumulation_steps": facts.accumulation_steps,
        "max_steps": facts.settings.num_steps,
        **({} if facts.settings.num_epochs is None else {"num_train_epochs": facts.settings.num_epochs}),
        "bf16": facts.settings.precision == "bf16",
        "fp16": facts.settings.precision == "fp16",
        "tf32": facts.settings.precision == "tf32",
        **_checkpointing(facts),
        "optim": "adamw_torch_fused",
        "learning_rate": facts.learning_rate,
        **trainer_schedule(facts),
        "weight_decay": facts.settings.weight_decay,
        "max_grad_norm": facts.settings.max_grad_norm or 0.0,
        "seed": facts.settings.seed,
        "dataloader_drop_last": True,
        "use_cpu": facts.device_type == "cpu",
        **facts.arguments,
    }


def trainer_schedule(facts: Facts) -> dict[str, Any]:
    """Return the schedule; warmup_stable_decay without decay is exactly a constant rate after warm-up.

    transformers' warm-up begins at its lowest rate and has one step more than Fitproof's, which begins at 1 / n.
    """
    if facts.decays:
        return {
            "lr_scheduler_type": facts.settings.learning_rate_schedule,
            "warmup_steps": facts.settings.learning_rate_warmup_steps,
        }
    if not facts.has_warmup:
        return {"lr_scheduler_type": "constant", "warmup_steps": 0}
    shape = {"num_decay_steps": 0, "min_lr_ratio": 1 / facts.settings.learning_rate_warmup_steps}
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": facts.settings.learning_rate_warmup_steps - 1,
        "lr_scheduler_kwargs": shape,
    }


def prepares_layers(facts: Facts) -> bool:
    """Whether code checkpoints the layers, since no argument expresses how."""
    return bool(facts.checkpointed) and not _has_argument(facts)


def trainer_notes(facts: Facts) -> list[str]:
    """Return what the arguments of length, checkpointing and precision mean, and what none expresses."""
    notes = []
    if facts.settings.num_epochs is not None:
        notes.append(epochs_note(facts, "num_train_epochs"))
    if facts.settings.sequences == "grouped":
        notes.append(
            "Trainer can group sequences by length only across optimizer steps, which is another training: here they "
            "are not grouped, and there is more padding than measured."
        )
    if (facts.every_n_layers or 1) > 1 and checkpointing_name() != CHECKPOINTING_NAMES[0]:
        notes.append(
            f"This version of transformers checkpoints every layer or none: every layer here, instead of one of "
            f"{facts.every_n_layers}; the training is the same, in less memory and more time."
        )
    if facts.settings.checkpointing == "offloaded" and _has_argument(facts):
        notes.append(
            "Trainer copies layer inputs to the host within the computation, not beside it: its losses are the "
            "measured ones, its memory and time are not."
        )
    if facts.settings.precision == "tf32":
        notes.append("tf32=true needs a GPU of compute capability 8.0 (Ampere) or newer.")
    if facts.scales_loss:
        notes.append("fp16 needs a GPU: Accelerate, which Trainer uses, refuses it on a CPU.")
    if facts.scales_loss and facts.settings.initial_loss_scale != DEFAULT_LOSS_SCALE:
        measured = f"{facts.settings.initial_loss_scale:g} was measured"
        notes.append(f"Trainer's first loss scale is {DEFAULT_LOSS_SCALE:g}, and {measured}.")
    return notes


def epochs_note(facts: Facts, of_epochs: str) -> str:
    """Return how the optimizer steps follow from the epochs, and what to do with other data."""
    return (
        f"max_steps are the optimizer steps of {of_epochs}={facts.settings.num_epochs:g} on the measured corpus, and "
        "count before it: with other data take max_steps out."
    )


def checkpointing_name() -> str:
    """Return the name of the argument in this version of transformers."""
    from transformers import TrainingArguments

    return next(name for name in CHECKPOINTING_NAMES if name in TrainingArguments.__dataclass_fields__)


def _checkpointing(facts: Facts) -> dict[str, Any]:
    name = checkpointing_name()
    if not facts.checkpointed or not _has_argument(facts):
        return {name: False}
    more: dict[str, Any] = {}
    if facts.settings.checkpointing == "offloaded":
        more = {"offload": True}
    elif name == CHECKPOINTING_NAMES[0]:
        more = {"every_n_layers": facts.every_n_layers}
    return {name: True, f"{name}_kwargs": {"use_reentrant": False, **more}}


def _has_argument(facts: Facts) -> bool:
    """Whether an argument expresses the checkpointing: of layers 0, n, 2n, ..., or on a GPU with inputs on the host."""
    if facts.settings.checkpointing != "offloaded":
        return facts.every_n_layers is not None
    return facts.device_type == "cuda" and checkpointing_name() == CHECKPOINTING_NAMES[0]
