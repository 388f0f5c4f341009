"""The shapes that all floors agree on: Settings, Step, Technique, Model, Corpus, Result.

Axes: B sequences in a micro-batch, T tokens in a sequence, C channels, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""The tensors of some sequences by the name under which the model takes them; the first axis is the sequence."""

Context = Callable[[], AbstractContextManager[object]]


class Settings(BaseModel):
    """Frozen settings: unknown names are refused, and the text below a field is its description everywhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: object, info: ValidationInfo) -> object:
        """Read `none` as nothing where nothing is allowed, and refuse true and false where a number is wanted."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if value == "none" and type(None) in get_args(annotation):
            return None
        if isinstance(value, bool) and annotation is not bool:
            raise ValueError("must not be true or false")
        return value


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a run's memory and a technique's availability depend on, of a device that need not be in this machine."""

    kind: str
    """`cpu` or `cuda`."""
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    """CUDA compute capability; None where it is no CUDA device."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """A built model, and all that the training step and the techniques need to know about it."""

    module: nn.Module
    layers: tuple[nn.Module, ...]
    """The identical blocks, in forward order: what activation checkpointing forgets and recomputes."""
    loss: Callable[[nn.Module, Batch, int], Tensor]
    """(module, batch, number of targets in the whole window) -> the batch's summed loss divided by that number."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step is made of; a technique returns a copy with some parts replaced."""

    trainable: Trainable
    device: torch.device
    micro_batch_size: int
    """Sequences in one forward pass."""
    accumulation_steps: int
    """Forward and backward passes in one optimizer step."""
    scaler: torch.amp.GradScaler
    """Scales losses and unscales gradients; a disabled one leaves both alone."""
    forward_context: Context = nullcontext
    """Entered around every forward pass."""
    run_context: Context = nullcontext
    """Entered once, around all optimizer steps."""


class Technique(Settings, ABC):
    """One way to train in less memory or time; its fields are settings of every entry point."""

    def resolved(self) -> Self:
        """Return a copy in which every derived setting has its value; raise InvalidInputError where none fits."""
        return self

    @property
    def layer_period(self) -> int:
        """Layers after which what it does to them repeats."""
        return 1

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return why `hardware` cannot do this, or None where it can."""
        del hardware
        return None

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the values of `setting` that a space with `auto` tries on `hardware`: by default all of a Literal."""
        del hardware
        return get_args(cls.model_fields[setting].annotation)

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that a run's process needs before its first CUDA call."""
        return {}

    @abstractmethod
    def apply(self, step: Step) -> Step:
        """Return `step` with this technique in place."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is known of a model before it is built."""

    kind: str
    """What it is fed: `tokens` or `vectors`."""
    max_sequence_length: int | None
    """Positions it was made for, in tokens; None where it has no bound."""
    vocabulary_size: int | None
    """Tokens it tells apart; None where it takes the corpus's own."""
    tokenizer: str | None
    """Name or folder of its published tokenizer, if it has one."""
    needs_tokenizer: bool
    """Whether its weights make sense with that tokenizer alone."""
    width: int | None
    """Channels of its layers; None where that is not known."""
    num_layers: int | None = None
    """Layers that are alike, whose number the family's setting `num_layers` changes; None where it has no such."""


class Model(Settings, ABC):
    """A family of models; its fields are the settings `<family>.<field>`."""

    names: ClassVar[tuple[str, ...]]
    """The values of the setting `model` that this family answers to."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` is a model of this family."""
        return name in cls.names

    @abstractmethod
    def describe(self, name: str) -> Description:
        """Return what is known of model `name` without building it; raise InvalidInputError where it cannot be read."""

    @abstractmethod
    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return model `name` in float32 on the CPU; `vocabulary_size` is the corpus's, 0 for one without tokens."""


class Sequences(ABC):
    """Training examples of one length, addressed by number and in memory before the first step."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the examples of these numbers, in this order, on the CPU."""

    @abstractmethod
    def count(self, batch: Batch) -> tuple[int, int]:
        """Return how many real (not padding) tokens and how many targets of the loss a batch on the CPU holds."""


@dataclass(frozen=True, kw_only=True)
class CorpusRequest:
    """What a corpus is asked to prepare."""

    name: str
    """The value of the setting `corpus`."""
    description: Description
    sequence_length: int
    padded: bool
    """One document a row with its labels masked, instead of documents packed without padding."""
    vocabulary_size: int
    """Tokens of the tokenizer that is trained where the model brings none."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corpus, ready for training."""

    train: Sequences
    held_out: Sequences
    """Documents that training never sees."""
    vocabulary_size: int
    """Tokens told apart; 0 without tokens."""
    source: str
    """Where it came from, for the MLflow dataset input."""
    digest: str
    """Changes whenever the sequences do."""


class Corpus(Settings, ABC):
    """A source of training examples; its fields are the settings `<corpus>.<field>`."""

    kind: ClassVar[str] = "tokens"
    """What it feeds a model with: `tokens` or `vectors`."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name`, which is no corpus's own, is a corpus of this kind."""
        del name
        return False

    @abstractmethod
    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences, from the cache where they were prepared before; raise InvalidInputError on bad data."""
