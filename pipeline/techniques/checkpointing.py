"""Activation checkpointing: a layer's activations are not stored, and recomputed in the backward pass."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.base.contracts import Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Mathematics, Stage, Step, Technique, without_layers
from pipeline.memory.attention_saved import attention_saved_contexts
from pipeline.techniques._support.offloading import offloaded_checkpoint

WHOLE = r"none|every_layer|every_([2-9]|[1-9]\d+)_layers|attention_saved|offloaded"
ONE = "(full|attention_saved|offloaded)"
PART = rf"{ONE}:\d+(-\d+)?"
SHARE = re.compile(rf"{ONE}:([1-9]\d?)%")
POLICY = re.compile(rf"{WHOLE}|{SHARE.pattern}|{PART}(,{PART})*")
RULE = (
    "must be none, every_layer, every_2_layers, every_3_layers, ..., attention_saved, offloaded, a policy with its "
    "share of the layers as in full:25%, or policies with their layers as in full:0-7,attention_saved:8-11"
)
REMEDY = (
    "must say what is recomputed; fitproof plan finds the fastest policy that fits any card, and fitproof search the "
    'one here, with --space \'{"micro_batch_size": "divisors", "checkpointing": ["none", "full:25%", "full:50%", '
    '"full:75%", "every_layer"]}\''
)
"""What is said of `auto`: no setting of a run has a value that needs a prediction."""

OPTIONS = {"use_reentrant": False}
"""Arguments of torch.utils.checkpoint; the non-reentrant variant supports hooks and keyword arguments."""
NONE, FULL, ATTENTION_SAVED, OFFLOADED = "none", "full", "attention_saved", "offloaded"
"""Policies of one layer: everything is stored; all is recomputed from its inputs; all but attention's result; as full,
and its inputs wait on the host."""


def _checked_policy(value: str) -> str:
    if value == "auto":
        raise ValueError(REMEDY)
    if POLICY.fullmatch(value) is None:
        raise ValueError(RULE)
    layers = [layer for _, part in _parts(value) for layer in part]
    if len(layers) != len(set(layers)) or any(not part for _, part in _parts(value)):
        raise ValueError(f"{RULE}, each range ascending and each layer in one of them")
    return value


class Checkpointing(Technique):
    """Checkpoint no layer, every layer, every n-th layer, or each layer by a policy of its own."""

    stage: ClassVar[Stage] = Stage.RECOMPUTATION

    checkpointing: Annotated[str, AfterValidator(_checked_policy)] = "none"
    """What is recomputed: none, every_layer, every_2_layers, ..., attention_saved, offloaded, full:0-7, or
    full:25% for the first quarter of the layers."""

    @property
    def mathematics(self) -> Mathematics:
        """The recomputed activations, dropout included, are equal to the ones that are not stored."""
        return Mathematics.EXACT

    @property
    def every_n_layers(self) -> int | None:
        """The n of the checkpointed layers 0, n, 2n, ...; None without checkpointing, or with another policy."""
        found = re.fullmatch(r"every_(?:(\d+)_layers|layer)", self.checkpointing)
        return int(found.group(1) or 1) if found else None

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the policies worth trying on `hardware`."""
        values = (NONE, "every_layer", "every_2_layers", ATTENTION_SAVED)
        return (*values, OFFLOADED) if hardware.kind == "cuda" else values

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that it offloads twice, keeps what compiled layers do not have, or names a layer that is not there."""
        if OFFLOADED in self.checkpointing and settings.activation_offloading:
            yield (
                f"layer inputs are offloaded by one technique, and checkpointing={self.checkpointing} and "
                "activation_offloading=true both do; set checkpointing=every_layer, which offloads the same inputs"
            )
        if ATTENTION_SAVED in self.checkpointing and settings.compile != "none":
            yield (
                f"attention's result is kept by an operator's name, which compiled layers do not have, and "
                f"checkpointing={self.checkpointing} is set with compile={settings.compile}; set compile=none or "
                "checkpointing=every_layer"
            )
        yield from without_layers(self, settings, model)
        if _parts(self.checkpointing):
            try:
                self.by_layer(len(model.structure(settings.model).layers))
            except InvalidInputError as error:
                yield str(error)

    def by_layer(self, num_layers: int) -> tuple[str, ...]:
        """Return the policy of each of `num_layers` layers: none, full, attention_saved or offloaded.

        Raises:
            InvalidInputError: it names a layer that the model does not have.

        """
        if self.checkpointing in (NONE, ATTENTION_SAVED, OFFLOADED):
            return (self.checkpointing,) * num_layers
        if self.every_n_layers is not None:
            return tuple(NONE if layer % self.every_n_layers else FULL for layer in range(num_layers))
        if share := SHARE.fullmatch(self.checkpointing):
            count = max(1, round(int(share[2]) / 100 * num_layers))
            return (share[1],) * count + (NONE,) * (num_layers - count)
        policies = {layer: policy for policy, layers in _parts(self.checkpointing) for layer in layers}
        if max(policies) >= num_layers:
            raise InvalidInputError(
                f"checkpointing must name layers that the model has, 0 to {num_layers - 1}, and is "
                f"{self.checkpointing}; end it at {num_layers - 1}"
            )
        return tuple(policies.get(layer, NONE) for layer in range(num_layers))

    def apply(self, step: Step) -> Step:
        """Enable checkpointing by transformers' own method, or by torch.utils.checkpoint on the layers."""
        module, layers = step.trainable.module, step.trainable.layers
        policies = self.by_layer(len(layers))
        if {*policies} <= {NONE}:
            return step
        functions = _functions()
        if all(hasattr(layer, "gradient_checkpointing") for layer in layers) and _enable(module):
            for layer, policy in zip(layers, policies, strict=True):
                layer.gradient_checkpointing = policy != NONE  # type: ignore[assignment]
                layer._gradient_checkpointing_func = functions.get(policy)  # type: ignore[assignment]
        else:
            for layer, policy in zip(layers, policies, strict=True):
                if policy != NONE:
                    layer.forward = partial(functions[policy], layer.forward)
        return step


def _parts(text: str) -> list[tuple[str, range]]:
    """Return the policies with their layers, of a text as `full:0-7,attention_saved:8`."""
    if ":" not in text or SHARE.fullmatch(text):
        return []
    parts = []
    for part in text.split(","):
        policy, _, numbers = part.partition(":")
        begin, _, end = numbers.partition("-")
        parts.append((policy, range(int(begin), int(end or begin) + 1)))
    return parts


def _functions() -> dict[str, Callable[..., Any]]:
    """Return the function that runs a layer's forward pass, by policy."""
    return {
        FULL: partial(checkpoint, **OPTIONS),  # type: ignore[arg-type]
        ATTENTION_SAVED: partial(checkpoint, context_fn=attention_saved_contexts, **OPTIONS),  # type: ignore[arg-type]
        OFFLOADED: offloaded_checkpoint(),
    }


def _enable(module: nn.Module) -> bool:
    """Enable transformers' own checkpointing of every layer, by its new or older name; return whether it has one."""
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=OPTIONS)  # type: ignore[operator]
    elif hasattr(module, "gradient_checkpointing_enable"):
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=OPTIONS)  # type: ignore[operator]
    else:
        return False
    return True
