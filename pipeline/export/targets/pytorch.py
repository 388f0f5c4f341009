"""Plain PyTorch: a training script."""

from dataclasses import replace
from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, render
from pipeline.memory.meter import WATCHED_STEPS


class PyTorch(Target):
    """train.py."""

    purpose: ClassVar[str] = "For plain PyTorch: `python train.py`, or `python train.py your_text.txt`."

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the script, for a model that transformers builds from a configuration."""
        if facts.configuration is None:
            return {}
        alone = replace(facts, accumulation_steps=facts.accumulation_steps * facts.world_size, world_size=1)
        return {"train.py": render("train.py.jinja", alone, watched_steps=WATCHED_STEPS)}

    def differences(self, facts: Facts) -> list[str]:
        """Return what data it reads, and whether its losses are the measured ones."""
        losses = [] if facts.missing else ["It has the measured losses, step by step."]
        other = (
            "It takes no text file: a file of token ids needs its targets and offsets beside it."
            if facts.masked
            else "The bytes of a text file are its tokens; a .npy file holds the token ids of any tokenizer, one "
            "document after the other."
        )
        alone = (
            [f"It is for one process, which takes the passes of all {facts.world_size}: its time is not that measured."]
            if facts.world_size > 1
            else []
        )
        return [*losses, *alone, f"It reads the token ids that Fitproof prepared, in the same order. {other}"]
