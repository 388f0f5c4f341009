"""Hugging Face's Trainer: its arguments as JSON, for HfArgumentParser, and as Python."""

import json
from typing import Any, ClassVar

from pipeline.export.facts import DEFAULT_LOSS_SCALE, Facts
from pipeline.export.target import Target, render

CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""The argument that switches checkpointing on, the newest name first; only under the newest it can leave layers out."""


class HuggingFace(Target):
    """transformers.TrainingArguments."""

    purpose: ClassVar[str] = (
        "For Hugging Face's Trainer: `HfArgumentParser(TrainingArguments).parse_json_file('training_arguments.json')`, "
        "or `make_trainer(model, train_dataset)` of the Python file, which sets optimizer and schedule exactly."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the arguments in both forms."""
        arguments = _arguments(facts)
        return {
            "training_arguments.json": json.dumps(arguments, indent=2) + "\n",
            "training_arguments.py": render("training_arguments.py.jinja", facts, arguments=arguments),
        }

    def notes(self, facts: Facts) -> list[str]:
        """Return what no argument can say."""
        notes = ["It draws the sequences in an order of its own; the last window of an epoch may be smaller."]
        if facts.configuration is not None:
            notes.append(
                "The JSON alone lets Trainer count a target too many in every sequence of GPT-2, whose loss is lower "
                f"by 1 part in {facts.sequence_length}; make_trainer sets it right."
            )
        if facts.weight_decay:
            notes.append(
                "The JSON alone leaves biases and norms without weight decay, as Trainer does; make_trainer decays "
                "every parameter, as was measured."
            )
        if facts.warmup_steps and facts.schedule == "linear":
            notes.append("The JSON alone warms up one step later than was measured; make_trainer does it exactly.")
        if (facts.every_n_layers or 1) > 1 and _checkpointing_name() != CHECKPOINTING_NAMES[0]:
            notes.append(
                f"This version of transformers checkpoints every layer or none: every layer here, instead of one of "
                f"{facts.every_n_layers}; the training is the same, in less memory and more time."
            )
        if facts.precision == "tf32":
            notes.append("tf32=true needs a GPU of compute capability 8.0 (Ampere) or newer where it is read.")
        if facts.scales_loss:
            notes.append("fp16 needs a GPU: Accelerate, which Trainer builds on, refuses it on a processor.")
            notes += _scale_note(facts)
        return notes


def _scale_note(facts: Facts) -> list[str]:
    if facts.initial_loss_scale == DEFAULT_LOSS_SCALE:
        return []
    return [f"Trainer's first loss scale is {DEFAULT_LOSS_SCALE:g}, and {facts.initial_loss_scale:g} was measured."]


def _arguments(facts: Facts) -> dict[str, Any]:
    return {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": facts.micro_batch_size,
        "gradient_accumulation_steps": facts.accumulation_steps,
        "max_steps": facts.num_steps,
        "bf16": facts.precision == "bf16",
        "fp16": facts.precision == "fp16",
        "tf32": facts.precision == "tf32",
        **_checkpointing(facts),
        "optim": "adamw_torch_fused",
        "learning_rate": facts.learning_rate,
        **_schedule(facts),
        "weight_decay": facts.weight_decay,
        "max_grad_norm": facts.max_grad_norm or 0.0,
        "seed": facts.seed,
        "dataloader_drop_last": True,
        "use_cpu": facts.device_type == "cpu",
    }


def _checkpointing_name() -> str:
    from transformers import TrainingArguments

    return next(name for name in CHECKPOINTING_NAMES if name in TrainingArguments.__dataclass_fields__)


def _checkpointing(facts: Facts) -> dict[str, Any]:
    name = _checkpointing_name()
    if facts.every_n_layers is None:
        return {name: False}
    every = {"every_n_layers": facts.every_n_layers} if name == CHECKPOINTING_NAMES[0] else {}
    return {name: True, f"{name}_kwargs": {"use_reentrant": False, **every}}


def _schedule(facts: Facts) -> dict[str, Any]:
    """Return the schedule; a constant rate after warm-up is exact as warmup_stable_decay without a decay.

    transformers' warm-up begins at its smallest rate and has one step more than Headroom's, which begins at 1 / n.
    """
    if facts.schedule == "linear":
        return {"lr_scheduler_type": "linear", "warmup_steps": facts.warmup_steps}
    if not facts.has_warmup:
        return {"lr_scheduler_type": "constant", "warmup_steps": 0}
    shape = {"num_decay_steps": 0, "min_lr_ratio": 1 / facts.warmup_steps}
    return {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": facts.warmup_steps - 1,
        "lr_scheduler_kwargs": shape,
    }
