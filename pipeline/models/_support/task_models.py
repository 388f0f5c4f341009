"""Models of transformers that are trained for a task with the loss of their own class."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, Prepared, Sequences, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.checkpoints import read_configuration
from pipeline.data._support.sequences import IGNORED_LABEL, PackedSequences, PaddedSequences
from pipeline.models._support.tasks import ELSEWHERE, check_task, task_of
from pipeline.models._support.transformers_models import TransformersModel, has_tokenizer, position_limit


class TaskModel(TransformersModel):
    """A model of transformers' class for one of its tasks, in a folder or on the hub."""

    made_of: ClassVar[str]
    """What its inputs and labels are made of."""
    types: ClassVar[tuple[str, ...]] = ()
    """Types of models whose inputs are known; none: any of the task."""
    instead: ClassVar[str] = ELSEWHERE
    """What to do with a model of another type."""

    num_layers: PositiveInt | None = None
    """Number of layers, of an encoder and of a decoder; none: the model's own."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` is a folder or an `owner/name` of the hub whose configuration is for this task."""
        return task_of(name) == cls.task

    def describe(self, name: str) -> Description:
        """Return the description that the configuration gives."""
        config = self.configuration(name, 1)
        note = f"{name} is trained for {self.task}, by transformers' {self.auto_class}: {self.made_of}"
        return replace(self._described(name, config), published_type=self.published_type(config), note=note)

    @abstractmethod
    def _described(self, name: str, config: Any) -> Description:
        """Return its inputs, and what else is particular to the task."""

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model with the layers that transformers checkpoints, and its own loss."""
        module = self.module(name, vocabulary_size)
        return Trainable(module=module, layers=_layers(module), loss=own_loss)

    def configuration(self, name: str, vocabulary_size: int) -> Any:
        """Return transformers' configuration of model `name`, changed by the settings of this family."""
        config = read_configuration(name, pretrained=self.pretrained)
        check_task(name, config.model_type, self.task)
        if self.types and config.model_type not in self.types:
            raise InvalidInputError(
                f"{self.task} knows the inputs of {', '.join(self.types)}, and {name} is a {config.model_type}, whose "
                f"inputs are not known; {self.instead}"
            )
        config.use_cache = False
        if self.num_layers is not None:
            if self.pretrained:
                raise InvalidInputError(
                    f"pretrained weights have one shape, and {self.task}.num_layers would change it; set "
                    f"{self.task}.pretrained=false or leave the shape alone"
                )
            for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"):
                if getattr(config, key, None) is not None:
                    setattr(config, key, self.num_layers)
        return self._completed(config)

    def _completed(self, config: Any) -> Any:
        """Return a configuration with what the task needs."""
        return config

    def has_layers(self, name: str) -> bool:
        """Whether transformers checkpoints layers of its class."""
        return bool(self.structure(name).layers)

    def inseparable_documents(self, name: str) -> str | None:
        """Return that no task but causal language modelling packs documents."""
        return f"{name} is trained for {self.task}"

    def inseparable_head(self, name: str, soft_cap: bool) -> str | None:
        """Return that the loss is that of the class."""
        return f"the loss of {name} is that of its class for {self.task}, which computes all logits"


class TextTask(TaskModel):
    """A task whose inputs are made from the tokens of a corpus."""

    def _described(self, name: str, config: Any) -> Description:
        needs_tokenizer = self.pretrained or has_tokenizer(name)
        return Description(
            max_sequence_length=position_limit(config),
            vocabulary_size=config.vocab_size,
            tokenizer=name if needs_tokenizer else None,
            needs_tokenizer=needs_tokenizer,
        )

    def inputs(self, name: str, prepared: Prepared, seed: int) -> Prepared:
        """Return the sequences as the task's inputs."""
        for sequences in (prepared.train, prepared.held_out):
            if type(sequences) not in (PackedSequences, PaddedSequences):
                raise InvalidInputError(
                    f"{self.task} takes sequences of one length, and those of {prepared.source} vary or have several "
                    "documents; set sequences=packed or fixed_length"
                )
        make = self.make_inputs(name, seed)
        train, held_out = (TaskSequences(each, make) for each in (prepared.train, prepared.held_out))
        return replace(prepared, train=train, held_out=held_out, digest=f"{prepared.digest}-{self.task}")

    @abstractmethod
    def make_inputs(self, name: str, seed: int) -> "MakeInputs":
        """Return what makes the task's inputs of token ids."""


MakeInputs = Callable[[Tensor, Tensor, Sequence[int]], Batch]
"""(token ids [B, T], which of them are no padding [B, T], numbers of the sequences) -> inputs and labels."""


class TaskSequences(Sequences):
    """Sequences of tokens as the inputs of a task, with an attention mask where they are padded."""

    def __init__(self, sequences: Sequences, make: MakeInputs) -> None:
        self.documents, self._make = sequences, make
        self._is_padded = isinstance(sequences, PaddedSequences)

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the inputs of these sequences."""
        tokens = self.documents.batch(rows)
        ids_BT = tokens["input_ids"]
        is_token_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        if self._is_padded:
            positions_T = torch.arange(ids_BT.shape[1])
            is_target_BT = tokens["labels"] != IGNORED_LABEL
            is_token_BT = positions_T <= (is_target_BT * positions_T).amax(dim=1, keepdim=True)
        made = self._make(ids_BT, is_token_BT, rows)
        return {**made, "attention_mask": is_token_BT.to(torch.int64)} if self._is_padded else made

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are no padding, and of labels."""
        num_tokens = int(batch["attention_mask"].sum()) if self._is_padded else self.num_positions(batch)
        return num_tokens, int((batch["labels"] != IGNORED_LABEL).sum())

    def num_positions(self, batch: Batch) -> int:
        """Return B x T."""
        return batch["input_ids"].numel()

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of the sequences."""
        return self.documents.mean_tokens()


def own_loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the mean loss that the model computes times its labels, divided by the window's number of targets."""
    mean: Tensor = module(**batch).loss
    return mean.float() * (batch["labels"] != IGNORED_LABEL).sum() / num_targets


def set_image_size(model: TaskModel, config: Any, size: int) -> None:
    """Set the height and width of images in a configuration.

    Raises:
        InvalidInputError: it is that of pretrained weights, for images of another size.

    """
    if model.pretrained and config.image_size != size:
        raise InvalidInputError(
            f"pretrained weights have one shape, and images of {size} pixels would change it; set "
            f"{model.task}.image_size={config.image_size} or {model.task}.pretrained=false"
        )
    config.image_size = size


def with_decoder_start(config: Any) -> Any:
    """Return a configuration that shifts labels to the decoder's inputs, also where it does not say how."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def _layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that transformers checkpoints; none, of a model that it does not checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return tuple(part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
