"""The adapters of a run in the terms of peft's LoraConfig."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from pipeline.base.contracts import Trainable
from pipeline.config.experiment import Experiment
from pipeline.techniques._support.lora import adapted_modules
from pipeline.techniques.adapter import Adapter


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What peft adds to a frozen model."""

    adapter: Adapter
    """Their settings."""
    targets: tuple[str, ...]
    """The modules that have one: the ends of their names, where no other module's name ends so."""
    is_transposed: bool
    """Whether their weights are transposed, as those of GPT-2 that are not in 4 bits."""

    @property
    def is_quantized(self) -> bool:
        """Whether the linear layers inside the model's layers have weights of 4 or 8 bits."""
        return self.adapter.adapter == "qlora"


def lora_of(experiment: Experiment, trainable: Trainable) -> Lora | None:
    """Return the adapters of a run whose model is `trainable`, or None if the model itself is trained."""
    adapter = next(each for each in experiment.techniques if isinstance(each, Adapter))
    if adapter.adapter == "none":
        return None
    from transformers.pytorch_utils import Conv1D

    adapted = adapted_modules(trainable.module, trainable.layers, adapter.adapter_targets)
    return Lora(
        adapter=adapter,
        targets=_targets(dict(trainable.module.named_modules()), adapted),
        is_transposed=adapter.adapter != "qlora" and any(isinstance(part, Conv1D) for part in adapted),
    )


def _targets(modules: Mapping[str, nn.Module], adapted: Mapping[nn.Module, str]) -> tuple[str, ...]:
    """Return the shortest ends of names that the adapted layers alone have: of one part, as in their layer, or all."""
    full = tuple(name for name, part in modules.items() if part in adapted)
    in_layer = tuple(dict.fromkeys(adapted.values()))
    for ends in (tuple(dict.fromkeys(name.rpartition(".")[2] for name in in_layer)), in_layer):
        if full == tuple(name for name in modules if any(f".{name}".endswith(f".{end}") for end in ends)):
            return ends
    return full
