"""The interfaces that all layers share: Hardware, Model, Corpus.

Axes: B sequences in a micro-batch, T tokens in a sequence, C channels, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from pipeline.base.errors import InvalidInputError, first_line, origin
from pipeline.base.host_memory import WithinHostMemory
from pipeline.base.settings import Settings
from pipeline.base.user_functions import once_of_each

BF16_CAPABILITY = (8, 0)
"""CUDA compute capability from which on there are bf16 and tf32: Ampere."""

Batch = dict[str, Tensor]
"""The tensors of some sequences, by the names of the model's arguments; the first axis is the sequence."""
SequencesKind = Literal["packed", "packed_documents", "fixed_length", "padded", "grouped"]
"""The values of the setting `sequences`."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The properties of a device on which memory and techniques depend; it need not be in this machine."""

    kind: str
    """`cpu` or `cuda`."""
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    """CUDA compute capability; None for a device that is not CUDA."""
    num_multiprocessors: int | None
    """Number of streaming multiprocessors, on which the buffers of sums depend; None likewise."""
    count: int | None = None
    """GPUs of the machine, or the CPU's cores that a process may use; None if it need not be in this machine."""

    def is_older_than(self, capability: tuple[int, int]) -> bool:
        """Whether it is a CUDA device of a lower compute capability."""
        return self.capability is not None and self.capability < capability

    @property
    def name_of_one(self) -> str:
        """The name of a card without how many there are of it."""
        return self.name.removeprefix(f"{self.count} x ")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last layer of a language model, which can be computed apart from the rest: hidden states -> logits."""

    layer: nn.Linear
    """Its weight is [V, C]; it may be shared with the embedding."""
    logits: Callable[[nn.Module, Batch], Tensor]
    """(module, batch) -> logits of the whole model, [B, T, V]."""
    soft_cap: float | None = None
    """The s of logits = s x tanh(product / s), if the model caps them."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """A model with its layers and its loss."""

    module: nn.Module
    layers: tuple[nn.Module, ...]
    """The identical blocks, in forward order: the units of activation checkpointing."""
    loss: Callable[[nn.Module, Batch, int], Tensor]
    """(module, batch, number of targets in the whole window) -> the batch's summed loss divided by that number."""
    head: Head | None = None
    """The head, if the loss is the cross-entropy of its logits; None if it is another."""
    scores: Callable[[nn.Module, Batch], Tensor] | None = None
    """(module, batch) -> what the loss compares with `reference` in the batch: the same of a frozen module, if any."""


@dataclass(frozen=True)
class RandomInput:
    """A tensor that a model takes where its inputs are made up."""

    name: str
    """The name of the model's argument."""
    shape: tuple[int | None, ...]
    """Of one example; None stands for sequence_length."""
    num_values: int | None = None
    """Integers below this number; None: normally distributed numbers."""
    first: int = 0
    """The smallest of these integers."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The properties of a model that are known before it is built."""

    max_sequence_length: int | None = None
    """Maximum sequence length in tokens; None if there is no limit."""
    vocabulary_size: int | None = None
    """Rows of its embedding; None if the corpus's tokenizer determines them."""
    tokenizer: str | None = None
    """Name or folder of its published tokenizer, if it has one."""
    needs_tokenizer: bool = False
    """Whether a corpus must be tokenized with that tokenizer."""
    activation: str | None = None
    """transformers' name of the activation function of its layers, if they have one of them."""
    inputs: tuple[RandomInput, ...] = ()
    """What a model that takes vectors and no tokens takes, its targets last."""
    published_type: str | None = None
    """torch's name of the type of the weights in its checkpoint; None if it is not known or begins at random ones."""
    pairs: bool = False
    """Whether its examples are pairs of a chosen and a rejected answer."""
    needs_whole_batch: bool = False
    """Whether its loss compares the examples of a batch, so that smaller micro-batches are another training."""
    note: str | None = None
    """What a user needs to know of how it is trained, a sentence."""

    @property
    def kind(self) -> str:
        """Its inputs: `tokens` or `vectors`."""
        return "vectors" if self.inputs else "tokens"


SMALLEST_VOCABULARY = 300
"""Rows of an embedding that a corpus would determine, where only the layers count: it changes none of them."""


class Model(Settings, ABC):
    """A family of models; its fields are the settings `<family>.<field>`."""

    names: ClassVar[tuple[str, ...]] = ()
    """The values of the setting `model` that belong to this family."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name`, which is none of `names`, is a model of this family: here none is."""
        return False

    @abstractmethod
    def describe(self, name: str) -> Description:
        """Return the description of model `name` without building it; raise InvalidInputError if it cannot be read."""

    @abstractmethod
    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return model `name` in float32 on the CPU; `vocabulary_size` is the corpus's, 0 for a corpus of vectors."""

    def with_random_weights(self) -> Self:
        """Return the family with random weights in place of those of a checkpoint."""
        return self.model_copy(update={"pretrained": False}) if getattr(self, "pretrained", False) else self

    def structure(self, name: str) -> Trainable:
        """Return model `name` as built_for_structure() does, with random weights; it is shared, and not to be changed.

        Raises:
            InvalidInputError: it cannot be built in its shape.

        """
        return _structure(self.with_random_weights(), name)

    def built_for_structure(self, name: str, vocabulary_size: int = SMALLEST_VOCABULARY) -> Trainable:
        """Return model `name` on the meta device or, if its code needs the values of tensors, built with them.

        Its weights are not to be those of a checkpoint.

        Raises:
            InvalidInputError: it cannot be built in its shape.

        """
        try:
            with torch.device("meta"):
                return self.build(name, vocabulary_size)
        except Exception as error:  # whatever the model's code raises without values; with them it may raise again
            without = f"{type(origin(error)).__name__}: {first_line(origin(error))}"
        return self.built_with_values(name, vocabulary_size, without)

    def built_with_values(self, name: str, vocabulary_size: int, without: str, seed: int = 0) -> Trainable:
        """Return model `name` as build() does, from a seed; the process's random generator is restored.

        `without` says why it cannot be built without the values of tensors.

        Raises:
            InvalidInputError: nor with them, or the free memory does not suffice, before the values are written.

        """
        try:
            with torch.random.fork_rng(devices=[]), WithinHostMemory():
                torch.manual_seed(seed)
                return self.build(name, vocabulary_size)
        except Exception as error:  # whatever the model's code raises
            raise _not_built(name, error, without) from error

    def inputs(self, name: str, prepared: "Prepared", seed: int) -> "Prepared":
        """Return the sequences of a corpus as model `name` takes them: here as they are.

        Raises:
            InvalidInputError: it cannot be trained on such sequences.

        """
        return prepared

    def check_weights(self, name: str) -> None:
        """Raise InvalidInputError if model `name` begins with weights of a file that cannot be read: here with none."""

    def identity(self, name: str) -> str | None:
        """Return a text that differs if model `name` is built in another way with the same settings.

        It is None if what decides that cannot be known: then nothing that is predicted of it is used again.
        """
        return "" if name in self.names else None

    def attention_implementations(self, name: str) -> tuple[str, ...]:
        """Return transformers' names of the implementations of attention that model `name` can be set to: here none."""
        return ()

    def has_layers(self, name: str) -> bool:
        """Whether model `name` has identical layers, the units of checkpointing: here it has."""
        return True

    def inseparable_documents(self, name: str) -> str | None:
        """Return why model `name` cannot keep the documents of a sequence apart by `position_ids`, or None if it can.

        They are an input of its loss beside `input_ids`, and begin at 0 with every document.
        """
        return f"{name} is not of transformers, and does not take position_ids"

    def inseparable_head(self, name: str, soft_cap: bool) -> str | None:
        """Return why the head of model `name` cannot be computed apart from the rest of it, or None if it can.

        `soft_cap` says whether what computes it can cap the logits.
        """
        return f"the loss of {name} is its own, and not the cross-entropy of a head's logits"


@once_of_each
def _structure(model: Model, name: str) -> Trainable:
    return model.built_for_structure(name)


def _not_built(name: str, error: Exception, without: str) -> InvalidInputError:
    """Return why model `name` cannot be built with values and, if that is another error, why not without them."""
    shape = f"{name} cannot be built in this shape: {first_line(error)}; change its settings"
    text = str(error) if isinstance(error, InvalidInputError) else shape
    if first_line(origin(error)) in without:
        return InvalidInputError(text)
    line, newline, traceback = text.partition("\n")
    return InvalidInputError(f"{line}; without values it cannot be built: {without}{newline}{traceback}")


class Sequences(ABC):
    """Training examples, addressed by index and in memory before the first step."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the examples at these indices, in this order, on the CPU, all as long as the longest example."""

    @abstractmethod
    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of tokens (without padding) and of targets of the loss in a batch on the CPU."""

    def num_positions(self, batch: Batch) -> int:
        """Return the number of tokens in a batch with padding: here there is none."""
        return self.count(batch)[0]

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of an example, without padding: here all have as many."""
        return float(self.count(self.batch([0]))[0])

    def micro_batches(self, rows: Sequence[int], size: int) -> tuple[Batch, ...]:
        """Return the examples at these indices in micro-batches of `size`: here in this order and of one length."""
        return split(self.batch(rows), len(rows), size)


def split(batch: Batch, num_rows: int, size: int) -> tuple[Batch, ...]:
    """Return the first `num_rows` sequences of a batch in micro-batches of `size`, which share its memory."""
    cuts = range(0, num_rows, size)
    return tuple({name: tensor[cut : cut + size] for name, tensor in batch.items()} for cut in cuts)


@dataclass(frozen=True, kw_only=True)
class CorpusRequest:
    """The parameters of Corpus.prepare()."""

    name: str
    """The value of the setting `corpus`."""
    description: Description
    sequence_length: int
    sequences: SequencesKind
    """How documents become sequences, and these micro-batches: the value of the setting `sequences`."""
    vocabulary_size: int
    """Vocabulary size of the tokenizer that is trained on the corpus if the model does not need its own."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corpus as sequences, ready for training."""

    train: Sequences
    held_out: Sequences
    """Sequences for evaluation, of documents that are not trained on."""
    vocabulary_size: int
    """Size of the tokenizer; 0 for a corpus of vectors."""
    source: str
    """Where the corpus came from, for the MLflow dataset input."""
    digest: str
    """A digest of the sequences, for cache keys."""
    notes: tuple[str, ...] = ()
    """What was read of the source and what was not, a sentence each."""
    is_plain: bool = True
    """Whether other frameworks find the same in the source's rows as they are."""


class Corpus(Settings, ABC):
    """A source of training examples; its fields are the settings `<corpus>.<field>`."""

    kind: ClassVar[str] = "tokens"
    """Its sequences: `tokens` or `vectors`."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name`, which is not the name of a file in pipeline/data/, is a corpus of this class."""
        return False

    @abstractmethod
    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences, cached on disk after the first time; raise InvalidInputError on bad data."""
