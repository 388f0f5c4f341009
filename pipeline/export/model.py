"""The model of a run, for frameworks that build it: its configuration in transformers, its layers, its adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeline.base.contracts import Trainable
from pipeline.config.experiment import Experiment
from pipeline.models._support.causal_models import UNPUBLISHED
from pipeline.models._support.published_shapes import HUB_NAMES
from pipeline.models.causal_lm import CausalLm
from pipeline.techniques._support.lora import adapted_modules
from pipeline.techniques.adapter import Adapter


def configuration_of(experiment: Experiment, vocabulary_size: int) -> dict[str, Any] | None:
    """Return what differs from the model type's defaults in transformers' configuration; None for other models."""
    if not isinstance(experiment.model, CausalLm):
        return None
    from transformers import AutoConfig

    config = experiment.model.configuration(experiment.settings.model, vocabulary_size)
    wanted = {name: value for name, value in config.to_dict().items() if name not in ("dtype", "torch_dtype")}
    values = {"model_type": config.model_type}
    for _ in range(2):  # some defaults depend on other values
        built = AutoConfig.for_model(**values).to_dict()
        values |= {name: value for name, value in wanted.items() if name not in built or built[name] != value}
    return values


def published_name(experiment: Experiment) -> str | None:
    """Return the name on the hub or the folder of the model's weights; None for a shape that has none."""
    name = experiment.settings.model
    return None if name in UNPUBLISHED or not isinstance(experiment.model, CausalLm) else HUB_NAMES.get(name, name)


def configuration_changes(experiment: Experiment, vocabulary_size: int) -> dict[str, Any]:
    """Return the values of transformers' configuration that settings change, of a model that is published."""
    name, model = experiment.settings.model, experiment.model
    if published_name(experiment) is None or not isinstance(model, CausalLm):
        return {}
    own = CausalLm(pretrained=model.pretrained).configuration(name, vocabulary_size).to_dict()
    changed: dict[str, Any] = model.configuration(name, vocabulary_size).to_dict()
    return {key: value for key, value in changed.items() if own.get(key) != value}


def structure_of(experiment: Experiment, vocabulary_size: int) -> Trainable:
    """Return the model, of which no weights are made where its code allows that; the vocabulary is the corpus's.

    Raises:
        InvalidInputError: the model cannot be built.

    """
    plain = experiment.with_random_weights("cpu")
    return plain.model.built_for_structure(plain.settings.model, vocabulary_size)


def layer_names(trainable: Trainable) -> list[str]:
    """Return the dotted names of a model's layers, from the first to the last."""
    names = {module: name for name, module in trainable.module.named_modules()}
    return [names[layer] for layer in trainable.layers]


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
