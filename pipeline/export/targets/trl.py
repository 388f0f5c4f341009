"""TRL: a script with SFTConfig and SFTTrainer, and peft's LoraConfig where the run has adapters."""

import inspect
from typing import Any, ClassVar

from pipeline.base.technique import Exported
from pipeline.data._support import chat_template, conversations
from pipeline.data._support.tokenizing import HELD_OUT_EVERY
from pipeline.export.facts import NOT_MEASURED, Facts
from pipeline.export.target import Target, processes_note, render
from pipeline.export.trainer_arguments import prepares_layers, trainer_arguments, trainer_notes

PACKED_TOGETHER = 1000
"""Documents of which TRL makes packed sequences without a shorter one: a batch of datasets' map()."""
IMPORTS = """import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
"""
CONSTANTS = ("ANSWERS", "MARKED_ANSWERS", "TODAY", "DAY", "REASONING", "SURROGATE", "PLACEHOLDER")
"""What ChatTemplate needs in a file of its own: imports, and constants of chat_template.py."""


class Trl(Target):
    """trl.SFTTrainer."""

    purpose: ClassVar[str] = "For TRL: `python trl_sft.py`, or `python trl_sft.py` with data of your own."

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the script, for a model that transformers builds from a configuration."""
        if facts.configuration is None:
            return {}
        text = render(
            "trl_sft.py.jinja",
            facts,
            arguments=_arguments(facts),
            notes=self.differences(facts),
            prepares_layers=prepares_layers(facts),
            reads_rows=_reads_rows(facts),
            is_json=facts.source is not None and facts.source.file_format == "json",
            finding=finding_of_answers() if _reads_rows(facts) and not _marks_answers(facts) else "",
            messages_of=_reading_of_messages(),
            held_out_every=HELD_OUT_EVERY,
            quantizing=_quantizing(facts),
            loads_quantized=facts.lora is not None and facts.lora.is_quantized and facts.pretrained,
        )
        return {"trl_sft.py": text}

    def differences(self, facts: Facts) -> list[str]:
        """Return what it reads, and what SFTTrainer does differently."""
        losses = "It has the measured losses, step by step, but for the masks of dropout."
        packed = (
            f"{NOT_MEASURED}SFTTrainer packs {PACKED_TOGETHER} conversations at a time, "
            f"and of {facts.num_documents} all were packed; the sequences are others, its memory and time are the same."
        )
        is_packed = _reads_rows(facts) and facts.settings.sequences == "packed"
        is_packed_in_parts = is_packed and (facts.num_documents or 0) > PACKED_TOGETHER
        notes = [packed] if is_packed_in_parts else [] if facts.missing else [losses]
        notes += processes_note(facts, f"torchrun --nproc_per_node={facts.world_size} trl_sft.py") + _data_notes(facts)
        notes.append(
            "SFTTrainer computes the loss in chunks of tokens, without all logits in memory (seen in TRL 1.16), and "
            f"loss_kernel={facts.settings.loss_kernel} was measured: the loss is the same, its memory and time are not."
        )
        if facts.packs_documents:
            notes.append(
                "It packs the documents as measured, and padding_free=True lets SFTTrainer put a micro-batch into one "
                "sequence: the losses are the same. Without flash attention the mask of that sequence grows with the "
                f"square of its length, of up to {facts.settings.micro_batch_size} x {facts.settings.sequence_length} "
                "tokens: memory and time are not those measured unless micro-batches have one sequence."
            )
        if facts.is_padded:
            notes.append(
                "SFTTrainer hands attention a mask of the padding, which was measured without: the losses are the "
                "same, memory and time may differ."
            )
        if facts.lora and facts.checkpointed and not prepares_layers(facts):
            notes.append(
                "Beside adapters SFTTrainer lets the embeddings' output require gradients, which checkpointing without "
                "reentry does not need: the training is the same, in slightly more memory and time."
            )
        if prepares_layers(facts):
            notes.append(f"No argument expresses checkpointing={facts.settings.checkpointing}: make_model applies it.")
        if facts.in_python:
            notes.append(f"No argument expresses {', '.join(facts.in_python)}: make_model applies it.")
        return notes + trainer_notes(facts)


def finding_of_answers() -> str:
    """Return ChatTemplate as source for the top level of a file; it needs nothing of this package."""
    constants = "\n".join(f"{name} = {getattr(chat_template, name)!r}" for name in CONSTANTS)
    functions = (chat_template._function, chat_template._with_object)
    parts = (chat_template.UnreadableRowError, *functions, chat_template.ChatTemplate)
    return "\n\n\n".join([IMPORTS + constants, *(inspect.getsource(part).strip() for part in parts)])


def _reading_of_messages() -> str:
    """Return the function that reads the messages of a row as source, without types, which need imports."""
    source = inspect.getsource(conversations.messages_of).strip()
    return source.replace("(row: Mapping[str, Any]) -> list[dict[str, Any]]:", "(row):")


def _quantizing(facts: Facts) -> Exported:
    """Return the code that makes a model with random weights quantized: transformers does so with those it loads."""
    if facts.lora is None or not facts.lora.is_quantized or facts.pretrained:
        return Exported()
    return facts.lora.adapter.exported_quantizing()


def _reads_rows(facts: Facts) -> bool:
    """Whether it reads conversations; else it reads the token ids, as of a model without tokenizer."""
    source = facts.source
    return source is not None and source.is_chat and source.is_plain and facts.tokenizer is not None


def _marks_answers(facts: Facts) -> bool:
    return facts.source is not None and facts.source.marks_answers


def _arguments(facts: Facts) -> dict[str, Any]:
    """Return the arguments of SFTConfig: those of Trainer, and how it makes sequences of the data."""
    arguments = {
        **trainer_arguments(facts),
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "max_length": facts.settings.sequence_length,
    }
    if facts.packs_documents:
        arguments |= {"padding_free": True, "max_length": None}
    elif facts.settings.sequences == "fixed_length":
        arguments["pad_to_multiple_of"] = facts.settings.sequence_length
    elif _reads_rows(facts) and not facts.is_padded:
        arguments |= {"packing": True, "packing_strategy": "wrapped"}
    if _reads_rows(facts) and _marks_answers(facts):
        arguments["assistant_only_loss"] = True
    return arguments


def _data_notes(facts: Facts) -> list[str]:
    if not _reads_rows(facts):
        cause = "the corpus holds no conversations"
        if facts.tokenizer is None:
            cause = f"{facts.model} has no tokenizer"
        elif facts.source is not None and facts.source.is_chat:
            cause = (
                "rows of the corpus are not the messages, or prompt and completion, of one .jsonl or .parquet file, or "
                "have tools or marks of what is not trained"
            )
        return [
            f"It reads the token ids that Fitproof prepared, as {cause}: without tokens of its own SFTTrainer would "
            "tokenize in another way. The file train.offsets.npy, and train.targets.npy if there is one, lie beside it."
        ]
    assert facts.source is not None
    found = (
        "The model's chat template marks the answers, and assistant_only_loss=True has the loss on them alone."
        if facts.source.marks_answers
        else "The model's chat template does not mark its answers with {% generation %}, or has the date of the day: "
        "ChatTemplate finds them, and SFTTrainer takes its labels. assistant_only_loss refuses a template without "
        "marks, or puts one of TRL's own in its place; completion_only_loss also trains what follows the end of an "
        "answer, such as a line break."
    )
    pairs = (
        "Rows of prompt and completion become messages: completion_only_loss would not train the answers of a prompt."
    )
    return [found, pairs]
