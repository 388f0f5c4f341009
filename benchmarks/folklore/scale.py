"""The sizes at which the claims are measured: those they were made for, and small ones for any machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import merged, nested

WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the claims' models, lengths and gigabytes stand for."""

    name: str
    note: str
    """What a reader must know of these sizes."""
    device: str
    gigabyte: str
    """The unit that stands for the claims' GB."""
    gigabyte_mib: int
    """The same in MiB."""
    short_length: int
    """Tokens that stand for 256."""
    long_length: int
    """Tokens that stand for 1024."""
    num_training_steps: int
    """Optimizer steps where final losses are compared."""
    num_steps: int
    """Optimizer steps where memory and time alone are."""
    larger_micro_batches: tuple[int, ...]
    """Micro-batches of the checkpointing claims beside 2."""
    effective_batches: tuple[int, ...]
    """Of the claim about all techniques together."""
    depths: tuple[int, ...]
    """Numbers of layers."""
    cards: tuple[tuple[str, int, int, int], ...]
    """(model, GB of the card, least and greatest micro-batch that are said to suit it)."""
    models: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Settings of `small`, `medium`, `large`, `xl`, `billion`, `depth` (its layers are varied) and `stack`."""

    def model(self, name: str, **settings: Any) -> dict[str, Any]:
        """Return the settings of one of the models, and others beside them."""
        return {**self.models[name], **settings}

    def budget(self, gigabytes: int) -> str:
        """Return what stands for a card of this many GB."""
        return f"{gigabytes * self.gigabyte_mib}MiB"

    def experiment(self, settings: Mapping[str, Any], round_number: int) -> Experiment:
        """Return a run of these settings; each round has its own seed.

        Raises:
            InvalidInputError: as make_experiment.

        """
        common = {
            "device": self.device,
            "num_steps": self.num_steps,
            "timing_warmup_steps": WARM_UP_STEPS,
            "eval_steps": 0,
            "seed": round_number,
        }
        return make_experiment(merged(nested(common), nested(settings)), "main")


def _shape(num_layers: int, width: int, **more: Any) -> dict[str, Any]:
    return {"model": "gpt2-nano", "causal_lm.num_layers": num_layers, "causal_lm.width": width, **more}


def _stack(width: int, length: int) -> dict[str, Any]:
    shape = {"encoder_stack.width": width, "sequence_length": length}
    return {"model": "encoder_stack", "corpus": "random_vectors", **shape}


CARDS = (("small", 8, 1, 2), ("medium", 16, 2, 4), ("large", 24, 4, 8), ("xl", 40, 8, 16))

FULL = Scale(
    name="full",
    note="GPT-2 as published, with random weights; a card of 8 GB is emulated by a cap of 8 GiB on what the allocator "
    "may reserve, beside which the CUDA context counts.",
    device="cuda",
    gigabyte="GiB",
    gigabyte_mib=1024,
    short_length=256,
    long_length=1024,
    num_training_steps=1000,
    num_steps=20,
    larger_micro_batches=(8, 16),
    effective_batches=(8, 32),
    depths=(12, 24, 48, 96),
    cards=CARDS,
    models={
        "small": {"model": "gpt2"},
        "medium": {"model": "gpt2-medium"},
        "large": {"model": "gpt2-large"},
        "xl": {"model": "gpt2-xl"},
        "billion": {
            "model": "gpt2",
            "causal_lm.num_layers": 36,
            "causal_lm.width": 1536,
            "causal_lm.num_heads": 24,
        },
        "depth": {"model": "gpt2"},
        "stack": _stack(768, 256),
    },
)
SHORT = Scale(
    **{
        **vars(FULL),
        "name": "short",
        "num_training_steps": 50,
        "num_steps": 10,
        "larger_micro_batches": (),
        "effective_batches": (8,),
        "depths": (12, 48),
        "cards": CARDS[:1],
    }
)
TINY = Scale(
    name="tiny",
    note="Small models stand for GPT-2 (small: gpt2-nano, 4 layers of 128 channels, 1.4 M parameters), 10 MiB for a "
    "gigabyte, 16 and 64 tokens for 256 and 1024: all about a hundredth. The verdicts are about these shapes on this "
    "machine, and prove the script; they say nothing of a GPU.",
    device="cpu",
    gigabyte="x 10 MiB",
    gigabyte_mib=10,
    short_length=16,
    long_length=64,
    num_training_steps=12,
    num_steps=24,
    larger_micro_batches=(8,),
    effective_batches=(8, 32),
    depths=(12, 24, 48, 96),
    cards=CARDS,
    models={
        "small": _shape(4, 128),
        "medium": _shape(8, 160),
        "large": _shape(12, 192),
        "xl": _shape(16, 256),
        "billion": _shape(12, 256),
        "depth": {**_shape(12, 32, vocabulary_size=512), "causal_lm.num_heads": 2},
        "stack": _stack(192, 64),
    },
)
