"""Hugging Face's Trainer: its arguments as JSON, for HfArgumentParser, and as Python."""

import json
from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, documents_note, processes_note, render
from pipeline.export.trainer_arguments import prepares_layers, trainer_arguments, trainer_notes


class HuggingFace(Target):
    """transformers.TrainingArguments."""

    purpose: ClassVar[str] = (
        "For Hugging Face's Trainer: `HfArgumentParser(TrainingArguments).parse_json_file('training_arguments.json')`, "
        "or `make_trainer(model, train_dataset)` of the Python file, which sets optimizer and schedule exactly."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the arguments in both forms."""
        arguments = trainer_arguments(facts)
        return {
            "training_arguments.json": json.dumps(arguments, indent=2) + "\n",
            "training_arguments.py": render(
                "training_arguments.py.jinja",
                facts,
                arguments=arguments,
                prepares_layers=prepares_layers(facts),
            ),
        }

    def differences(self, facts: Facts) -> list[str]:
        """Return what no argument can express, and what Trainer does differently."""
        notes = processes_note(facts, f"torchrun --nproc_per_node={facts.world_size} your_script.py")
        notes.append("Trainer shuffles the sequences in its own order; an epoch's last optimizer step may have fewer.")
        if facts.is_gpt2:
            notes.append(
                "With the JSON alone Trainer counts one target too many in every sequence of GPT-2, and its loss is "
                f"lower by 1 part in {facts.settings.sequence_length}; make_trainer corrects that."
            )
        if facts.packs_documents:
            notes.append(documents_note("The dataset needs"))
        if facts.lengths_vary:
            notes.append(
                "make_trainer pads each micro-batch to its longest sequence, as measured; with the JSON alone all "
                "sequences of a micro-batch need one length, or a data collator that pads."
            )
        if facts.in_python:
            notes.append(f"The JSON alone is without {', '.join(facts.in_python)}; make_trainer has it.")
        if facts.settings.weight_decay:
            notes.append(
                "With the JSON alone Trainer does not apply weight decay to biases and norms; make_trainer applies it "
                "to every parameter, as measured."
            )
        if facts.settings.learning_rate_warmup_steps and facts.decays:
            notes.append(
                "With the JSON alone the warm-up is one step later than measured; make_trainer has the measured one."
            )
        if prepares_layers(facts):
            notes.append(
                f"No argument expresses checkpointing={facts.settings.checkpointing}: make_trainer applies it. With "
                "the JSON alone nothing is checkpointed; the training is the same, in more memory and less time."
            )
        return notes + trainer_notes(facts)
