"""The values that the files for every framework are written from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Exported, Mathematics, Stage, Technique
from pipeline.base.tokenizing import token_folder
from pipeline.config.experiment import Experiment
from pipeline.models.causal_lm import CausalLm
from pipeline.techniques.accumulation import Accumulation
from pipeline.techniques.checkpointing import Checkpointing
from pipeline.techniques.precision import Precision
from pipeline.training.loop import highest_learning_rate

DEFAULT_LOSS_SCALE = 65536.0
"""The first scale of torch.amp.GradScaler, which some frameworks do not let one change."""
LINE_LENGTH = 110
IN_FACTS: tuple[type[Technique], ...] = (Accumulation, Checkpointing, Precision)
"""Techniques that have fields of their own in Facts; others add what their export() returns."""
CONSEQUENCES = {
    Mathematics.EXACT: "its losses are the measured ones but for the order of sums, its memory and time are not",
    Mathematics.ROUNDING: "its losses differ by rounding, its memory and time are not those measured",
    Mathematics.DIFFERENT: "its losses, memory and time are not those measured",
}
"""What is true of a training without a technique, by the technique's mathematics."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An Experiment in terms that all frameworks share."""

    micro_batch_size: int
    accumulation_steps: int
    effective_batch_size: int
    precision: str
    """fp32, tf32, fp16 or bf16."""
    initial_loss_scale: float
    every_n_layers: int | None
    """The n of the checkpointed layers 0, n, 2n, ...; None without checkpointing."""
    checkpointed: str | None
    """The names of those layers, as a Python expression."""
    learning_rate: float
    """After warm-up, with learning_rate_scaling applied."""
    warmup_steps: int
    schedule: str
    """constant or linear, after warm-up."""
    num_steps: int
    weight_decay: float
    max_grad_norm: float | None
    seed: int
    device: str
    sequence_length: int
    padded: bool
    model: str
    configuration: Mapping[str, Any] | None
    """The model's configuration for transformers' AutoConfig; None for models of other kinds."""
    pretrained: bool
    tokens: Path | None
    """The file of token ids on which Headroom trained; None for a corpus of vectors."""
    environment: Mapping[str, str]
    """Environment variables of the process."""
    others: tuple[str, ...]
    """Active techniques without fields of their own here, as `setting=value`."""
    replaces_optimizer: bool
    """Whether one of them changes the optimizer, which is AdamW otherwise."""
    exported: tuple[Exported, ...] = ()
    """What those techniques add to the files of one framework."""
    in_python: tuple[str, ...] = ()
    """Those of them that only Python code can express, as `setting=value`."""
    missing: tuple[str, ...] = ()
    """A sentence for each technique that the files of one framework cannot express."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.partition(":")[0]

    @property
    def autocast_dtype(self) -> str | None:
        """The name of autocast's dtype in torch; None without autocast."""
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.precision)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as in fp16."""
        return self.precision == "fp16"

    @property
    def has_warmup(self) -> bool:
        """Whether the first learning rate is lower than `learning_rate`."""
        return self.warmup_steps > 1

    @property
    def summary(self) -> str:
        """The configuration in one line."""
        policies = {None: "no checkpointing", 1: "every layer checkpointed"}
        policy = policies.get(self.every_n_layers, f"one of every {self.every_n_layers} layers checkpointed")
        cut = f"micro-batches of {self.micro_batch_size} sequences x {self.accumulation_steps} accumulation steps"
        return ", ".join([self.model, cut, self.precision, policy, *self.others])

    @property
    def has_prepare(self) -> bool:
        """Whether the model has to be changed before its optimizer is made."""
        return self.checkpointed is not None or any(each.prepare for each in self.exported)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the framework that techniques add."""
        return {name: value for each in self.exported for name, value in each.arguments.items()}

    @property
    def loss(self) -> str | None:
        """A Python expression for the summed loss, if a technique replaces it."""
        return next((each.loss for each in self.exported if each.loss), None)

    def optimizer(self, fused: bool) -> str:
        """Return a Python expression for the optimizer of `model`."""
        numbers = {"learning_rate": self.learning_rate, "weight_decay": self.weight_decay}
        expression = (
            f"torch.optim.AdamW(model.parameters(), lr={self.learning_rate}, weight_decay={self.weight_decay}, "
            f"fused={fused})"
        )
        for each in self.exported:
            names = {"optimizer": expression, **numbers}
            expression = each.optimizer
            for name, value in names.items():
                expression = expression.replace(f"{{{name}}}", str(value))
        return expression


def facts_of(experiment: Experiment) -> Facts:
    """Return the facts that are the same for every framework; the corpus is read for them.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    settings: Any = experiment.settings
    prepared = experiment.read_corpus()
    every = next(each.every_n_layers for each in experiment.techniques if isinstance(each, Checkpointing))
    tokens = token_folder(prepared.digest) / "train.tokens.npy"
    others = _others(experiment, IN_FACTS)
    return Facts(
        micro_batch_size=settings.micro_batch_size,
        accumulation_steps=settings.accumulation_steps,
        effective_batch_size=experiment.effective_batch_size,
        precision=settings.precision,
        initial_loss_scale=settings.initial_loss_scale,
        every_n_layers=every,
        checkpointed=None if every is None else _names(experiment, prepared.vocabulary_size, every),
        learning_rate=highest_learning_rate(settings, experiment.effective_batch_size),
        warmup_steps=settings.learning_rate_warmup_steps,
        schedule=settings.learning_rate_schedule,
        num_steps=settings.num_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        device=settings.device,
        sequence_length=settings.sequence_length,
        padded=settings.sequences == "padded",
        model=settings.model,
        configuration=_configuration(experiment, prepared.vocabulary_size),
        pretrained=getattr(experiment.model, "pretrained", False),
        tokens=tokens if tokens.exists() else None,
        environment=experiment.environment,
        others=tuple(_settings_text(technique) for technique in others),
        replaces_optimizer=any(technique.stage >= Stage.OPTIMIZER for technique in others),
    )


def facts_for(facts: Facts, experiment: Experiment, target: str, known: tuple[type[Technique], ...]) -> Facts:
    """Return the facts with what techniques add for one target, whose own files express the techniques `known`."""
    exports = {technique: technique.export(target) for technique in _others(experiment, known)}
    missing = [
        f"This is not the training that was measured: it is without {_settings_text(technique)}, which these files "
        f"cannot express; {CONSEQUENCES[technique.mathematics]}."
        for technique, exported in exports.items()
        if exported is None
    ]
    found = {technique: exported for technique, exported in exports.items() if exported is not None}
    in_python = [_settings_text(technique) for technique, exported in found.items() if exported.needs_python]
    return replace(facts, exported=tuple(found.values()), in_python=tuple(in_python), missing=tuple(missing))


def _others(experiment: Experiment, known: tuple[type[Technique], ...]) -> list[Technique]:
    return [each for each in experiment.techniques if each.active and not isinstance(each, known)]


def _settings_text(technique: Technique) -> str:
    """Return the settings of a technique that differ from their defaults, as `setting=value`."""
    default = type(technique)().model_dump()
    changed = [f"{name}={value}" for name, value in technique.model_dump().items() if value != default[name]]
    return ", ".join(changed) or type(technique).__name__


def literal(value: object) -> str:
    """Return a value as Python code; a long dictionary spans several lines."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        items = [f"{literal(name)}: {literal(part)}" for name, part in value.items()]
        line = ", ".join(items)
        return f"{{{line}}}" if len(line) <= LINE_LENGTH else "".join(["{\n", *(f"    {i},\n" for i in items), "}"])
    if isinstance(value, list):
        return f"[{', '.join(literal(part) for part in value)}]"
    return repr(value)


def _configuration(experiment: Experiment, vocabulary_size: int) -> dict[str, Any] | None:
    """Return the values of transformers' configuration that differ from the defaults of the model type."""
    if not isinstance(experiment.model, CausalLm):
        return None
    from transformers import AutoConfig

    config = experiment.model.configuration(experiment.settings.model, vocabulary_size)
    wanted: dict[str, Any] = config.to_dict()
    values = {"model_type": config.model_type}
    for _ in range(2):  # some defaults depend on other values
        built = AutoConfig.for_model(**values).to_dict()
        values |= {name: value for name, value in wanted.items() if name not in built or built[name] != value}
    return values


def _names(experiment: Experiment, vocabulary_size: int, every: int) -> str:
    """Return a Python expression for the names of the checkpointed layers."""
    plain = experiment.with_random_weights("cpu")
    try:
        with torch.device("meta"):
            trainable = plain.model.build(plain.settings.model, vocabulary_size)
    except InvalidInputError:  # a model that cannot be built without real tensors
        trainable = plain.model.build(plain.settings.model, vocabulary_size)
    names = {module: name for name, module in trainable.module.named_modules()}
    layers = [names[layer] for layer in trainable.layers]
    prefix = layers[0].removesuffix("0")
    if layers == [f"{prefix}{index}" for index in range(len(layers))]:
        return f'[f"{prefix}{{index}}" for index in range(0, {len(layers)}, {every})]'
    return literal(layers[::every])
