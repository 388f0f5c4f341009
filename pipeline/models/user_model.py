"""Models built by the user's own function, named as path.to.module:function."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeline.base.by_key import summed
from pipeline.base.contracts import Batch, Description, Model, Prepared, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.user_functions import call, is_function_name, once_of_each, user_code_error
from pipeline.models._support.heads import head_of, token_loss, why_inseparable
from pipeline.models._support.transformers_models import position_limit

PROBE = (2, 3)
"""Sequences and tokens of the batch on which its output is checked."""


class UserModel(Model):
    """The result of build(vocabulary_size): an nn.Module from input ids to logits, or a Trainable."""

    layers: str | None = None
    """Name inside the module of the list of identical layers, such as decoder.blocks; by default the longest list."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` has the form path.to.module:function."""
        return is_function_name(name)

    def describe(self, name: str) -> Description:
        """Return the description, with the number of positions if the module has a `config` as in transformers.

        Raises:
            InvalidInputError: it cannot be built, or does not return the logits of all positions.

        """
        trainable = self.structure(name)
        if trainable.loss is _token_loss:
            _check_logits(self, name)
        limit = position_limit(getattr(trainable.module, "config", None))
        return Description(max_sequence_length=limit, note=_note_of_types(name, trainable.module))

    def inputs(self, name: str, prepared: Prepared, seed: int) -> Prepared:
        """Return the sequences as they are, which must have token ids unless the function returns a loss too."""
        trainable = self.structure(name)
        names = prepared.train.batch([0]).keys() if len(prepared.train) else ["input_ids"]
        if trainable.loss is _token_loss and "input_ids" not in names:
            raise InvalidInputError(
                f"the model of {name} is called with input_ids, and the batches of {prepared.source} have "
                f"{', '.join(names)}; return a Trainable, whose loss takes them"
            )
        return prepared

    def has_layers(self, name: str) -> bool:
        """Whether the model has them, or the function names some."""
        return bool(self.structure(name).layers)

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the function's model with its layers and its loss."""
        built = call(name, vocabulary_size)
        if isinstance(built, Trainable):
            if _is_lazy(built.module):
                raise _lazy_error(name, "that of a Trainable is given no input here")
            return built
        if not isinstance(built, nn.Module):
            raise InvalidInputError(
                f"{name} must return a torch.nn.Module (or a Trainable), and returns {type(built).__name__}; "
                "return the model itself"
            )
        if _is_lazy(built):
            _give_shapes(name, built)
        head, layers = head_of(built, _logits), self._layers(name, built)
        return Trainable(module=built.train(), layers=layers, loss=_token_loss, head=head)

    @once_of_each
    def inseparable_head(self, name: str, soft_cap: bool) -> str | None:
        """Return why the head cannot be separated; a Trainable without one has a loss of its own."""
        trainable = self.structure(name)
        if trainable.head is None and trainable.loss is not _token_loss:
            return super().inseparable_head(name, soft_cap)
        return why_inseparable(name, trainable, soft_cap)

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
        return tuple(layers) if len(layers) > 1 else ()


def _note_of_types(name: str, module: nn.Module) -> str | None:
    """Return of which types the weights are, if not all are in float32."""
    sizes = summed((str(one.dtype).removeprefix("torch."), one.numel()) for one in module.parameters())
    if {*sizes} <= {"float32"}:
        return None
    shares = ", ".join(f"{100 * count / sizes.total():.0f} % in {kind}" for kind, count in sizes.most_common())
    return f"the weights of {name} are as its function returns them: {shares}"


def _lists(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers of one class in a module."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    return [layers for layers in lists if len({type(layer) for layer in layers}) == 1]


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(part) for part in (*module.parameters(), *module.buffers()))


def _give_shapes(name: str, module: nn.Module) -> None:
    """Call a module with lazy layers once, which gives their parameters a shape."""
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(*PROBE, dtype=torch.int64))
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(name, error) from error
    if _is_lazy(module):
        raise _lazy_error(name, f"a call with input_ids {list(PROBE)} does not reach all of them")


def _lazy_error(name: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"the parameters of {name} must have a shape, and those of its lazy layers have none: {reason}; call the model "
        "once in the function, or give these layers their sizes"
    )


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    logits_BTV: Tensor = _logits_in(module(batch["input_ids"]))
    return logits_BTV


_token_loss = partial(token_loss, _logits)


def _logits_in(output: Any) -> Any:
    """Return the logits of what a model returns: a tensor, an object or a dict with logits, or first of a tuple."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return output[0] if output else None
    return getattr(output, "logits", output)


@once_of_each
def _check_logits(model: UserModel, name: str) -> None:
    """Call the model on fake tensors, and refuse what is none of its logits; code that reads values is not called."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = model.structure(name).module
    try:
        with suppress(ValueError):  # traced code has no signature
            inspect.signature(module.forward).bind(None)
    except TypeError as error:
        raise InvalidInputError(
            f"the model of {name} must take token ids alone, and its forward does not ({error}); give its other "
            "arguments defaults, or return a Trainable with a loss of its own"
        ) from error
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            output = module(torch.zeros(*PROBE, dtype=torch.int64, device=device))
    except Exception:  # the user's code may raise anything without values: then the run itself says it
        return
    logits = _logits_in(output)
    found = "" if output is logits else f"a {type(output).__name__} with "
    if isinstance(logits, Tensor):
        if logits.ndim == 3 and logits.shape[:2] == PROBE and logits.is_floating_point():
            return
        found += f"a tensor {list(logits.shape)} of {str(logits.dtype).removeprefix('torch.')}"
    else:
        found += f"a {type(logits).__name__} for them"
    raise InvalidInputError(
        f"the model of {name} must return logits [B, T, V] of all positions (a tensor, logits of an object or a dict, "
        f"or the first of a tuple), and returns {found} for input_ids {list(PROBE)}; return those, or a Trainable with "
        "a loss of its own"
    )
