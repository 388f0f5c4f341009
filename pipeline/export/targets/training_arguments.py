"""Hugging Face's Trainer: its arguments as JSON, for HfArgumentParser, and as Python."""

import json
from typing import Any, ClassVar

from pipeline.export.facts import DEFAULT_LOSS_SCALE, Facts
from pipeline.export.target import Target, render

CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""The argument that enables checkpointing, the newest name first; only the newest supports every n-th layer."""


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
            "training_arguments.py": render(
                "training_arguments.py.jinja",
                facts,
                arguments=arguments,
                prepares_layers=bool(facts.checkpointed) and not _has_argument(facts),
            ),
        }

    def differences(self, facts: Facts) -> list[str]:
        """Return what no argument can express, and what Trainer does differently."""
        notes = ["Trainer shuffles the sequences in its own order; the last optimizer step of an epoch may have fewer."]
        if facts.configuration is not None:
            notes.append(
                "With the JSON alone Trainer counts one target too many in every sequence of GPT-2, and its loss is "
                f"lower by 1 part in {facts.sequence_length}; make_trainer corrects that."
            )
        if facts.lengths_vary:
            notes.append(
                "make_trainer pads each micro-batch to its longest sequence, as measured; with the JSON alone all "
                "sequences of a micro-batch need one length, or a data collator that pads."
            )
        if facts.sequences == "grouped":
            notes.append(
                "Trainer can group sequences by length only across optimizer steps, which is another training: here "
                "they are not grouped, and there is more padding than measured."
            )
        if facts.in_python:
            notes.append(f"The JSON alone is without {', '.join(facts.in_python)}; make_trainer has it.")
        if facts.weight_decay:
            notes.append(
                "With the JSON alone Trainer does not apply weight decay to biases and norms; make_trainer applies it "
                "to every parameter, as measured."
            )
        if facts.warmup_steps and facts.schedule == "linear":
            notes.append(
                "With the JSON alone the warm-up is one step later than measured; make_trainer has the measured one."
            )
        if (facts.every_n_layers or 1) > 1 and _checkpointing_name() != CHECKPOINTING_NAMES[0]:
            notes.append(
                f"This version of transformers checkpoints every layer or none: every layer here, instead of one of "
                f"{facts.every_n_layers}; the training is the same, in less memory and more time."
            )
        if facts.checkpointed and not _has_argument(facts):
            notes.append(
                f"No argument expresses checkpointing={facts.checkpointing}: make_trainer applies it. With the JSON "
                "alone nothing is checkpointed; the training is the same, in more memory and less time."
            )
        if facts.checkpointing == "offloaded" and _has_argument(facts):
            notes.append(
                "Trainer copies layer inputs to the host within the computation, not beside it: its losses are the "
                "measured ones, its memory and time are not."
            )
        if facts.precision == "tf32":
            notes.append("tf32=true needs a GPU of compute capability 8.0 (Ampere) or newer.")
        if facts.scales_loss:
            notes.append("fp16 needs a GPU: Accelerate, which Trainer uses, refuses it on a CPU.")
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
        **facts.arguments,
    }


def _checkpointing_name() -> str:
    from transformers import TrainingArguments

    return next(name for name in CHECKPOINTING_NAMES if name in TrainingArguments.__dataclass_fields__)


def _checkpointing(facts: Facts) -> dict[str, Any]:
    name = _checkpointing_name()
    if not facts.checkpointed or not _has_argument(facts):
        return {name: False}
    more: dict[str, Any] = {}
    if facts.checkpointing == "offloaded":
        more = {"offload": True}
    elif name == CHECKPOINTING_NAMES[0]:
        more = {"every_n_layers": facts.every_n_layers}
    return {name: True, f"{name}_kwargs": {"use_reentrant": False, **more}}


def _has_argument(facts: Facts) -> bool:
    """Whether an argument expresses the checkpointing: of layers 0, n, 2n, ..., or on a GPU with inputs on the host."""
    if facts.checkpointing != "offloaded":
        return facts.every_n_layers is not None
    return facts.device_type == "cuda" and _checkpointing_name() == CHECKPOINTING_NAMES[0]


def _schedule(facts: Facts) -> dict[str, Any]:
    """Return the schedule; warmup_stable_decay without decay is exactly a constant rate after warm-up.

    transformers' warm-up begins at its lowest rate and has one step more than Headroom's, which begins at 1 / n.
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
