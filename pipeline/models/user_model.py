"""Models built by the user's own function, named as path.to.module:function."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, Model, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.heads import head_of, token_loss, why_inseparable
from pipeline.base.user_functions import call, digest, is_function_name

SMALLEST_VOCABULARY = 300
"""The minimum of the setting vocabulary_size, with which a model is built for its description."""


class UserModel(Model):
    """The result of build(vocabulary_size): an nn.Module from input ids to logits, or a Trainable."""

    names: ClassVar[tuple[str, ...]] = ()

    layers: str | None = None
    """Name inside the module of the list of identical layers, such as decoder.blocks; by default the longest list."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` has the form path.to.module:function."""
        return is_function_name(name)

    def describe(self, name: str) -> Description:
        """Return the description, with the number of positions if the module has a `config` as in transformers."""
        config = getattr(_built_for_shape(self, name, digest(name)).module, "config", None)
        return Description(
            kind="tokens",
            max_sequence_length=getattr(config, "max_position_embeddings", None),
            vocabulary_size=None,
            tokenizer=None,
            needs_tokenizer=False,
            width=None,
        )

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the function's model with its layers and its loss."""
        built = call(name, vocabulary_size)
        if isinstance(built, Trainable):
            return built
        if not isinstance(built, nn.Module):
            raise InvalidInputError(
                f"{name} must return a torch.nn.Module (or a Trainable), and returns {type(built).__name__}; "
                "return the model itself"
            )
        head, layers = head_of(built, _logits), self._layers(name, built)
        return Trainable(module=built.train(), layers=layers, loss=_token_loss, head=head)

    def inseparable_head(self, name: str, *, soft_cap: bool) -> str | None:
        """Return why the head cannot be separated; a Trainable without one has a loss of its own."""
        return _why_inseparable(self, name, digest(name), soft_cap)

    def _layers(self, name: str, module: nn.Module) -> tuple[nn.Module, ...]:
        """Return the layers that the setting names, or the longest list of modules of one class."""
        if self.layers is None:
            layers: Sequence[nn.Module] = max(_lists(module), key=len, default=())
        else:
            named = dict(module.named_modules())
            if self.layers not in named:
                lists = [name for name, part in named.items() if isinstance(part, nn.ModuleList | nn.Sequential)]
                raise InvalidInputError(
                    f"user_model.layers must name a module of the model, and {self.layers!r} is none; "
                    f"its lists are: {', '.join(lists) or 'none'}"
                )
            layers = list(named[self.layers].children())
        if len(layers) < 2 or not all(any(layer.children()) for layer in layers):
            raise InvalidInputError(
                f"the model of {name} must have its identical layers, the units of checkpointing, in a ModuleList or "
                f"Sequential, and {len(layers)} were found; set user_model.layers, or return a Trainable with them"
            )
        return tuple(layers)


@lru_cache
def _built_for_shape(model: UserModel, name: str, code: str) -> Trainable:
    """Return the model, of which no weights are made where its code allows that.

    Raises:
        InvalidInputError: it cannot be built.

    """
    del code
    return model.built_for_structure(name, SMALLEST_VOCABULARY)


@lru_cache
def _why_inseparable(model: UserModel, name: str, code: str, soft_cap: bool) -> str | None:
    trainable = _built_for_shape(model, name, code)
    if trainable.head is None and trainable.loss is not _token_loss:
        return Model.inseparable_head(model, name, soft_cap=soft_cap)
    return why_inseparable(name, trainable, soft_cap)


def _lists(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers of one class in a module."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    return [layers for layers in lists if len({type(layer) for layer in layers}) == 1]


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    output: Any = module(batch["input_ids"])
    logits_BTV: Tensor = getattr(output, "logits", output)
    return logits_BTV


def _token_loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed cross-entropy over the window's number of targets."""
    return token_loss(_logits(module, batch).float(), batch, num_targets)
