"""What every framework has to be told of an Experiment, each derived value worked out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.base.tokenizing import token_folder
from pipeline.config.experiment import Experiment
from pipeline.models.causal_lm import CausalLm
from pipeline.techniques.checkpointing import Checkpointing
from pipeline.training.loop import highest_learning_rate

DEFAULT_LOSS_SCALE = 65536.0
"""The first scale of torch.amp.GradScaler, which not every framework lets one change."""
LINE_LENGTH = 110


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An Experiment in the terms that all frameworks share."""

    micro_batch_size: int
    accumulation_steps: int
    effective_batch_size: int
    precision: str
    """fp32, tf32, fp16 or bf16."""
    initial_loss_scale: float
    every_n_layers: int | None
    """Of every so many layers the first is checkpointed; None where none is."""
    checkpointed: str | None
    """The names of those layers, as a Python expression."""
    learning_rate: float
    """The highest one, scaling included."""
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
    """What transformers builds the model from; None where it is not one of transformers'."""
    pretrained: bool
    tokens: Path | None
    """The file of token ids on which Headroom trained; None where the corpus has none."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.partition(":")[0]

    @property
    def autocast_dtype(self) -> str | None:
        """The name in torch of the format that autocast computes in; None without autocast."""
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.precision)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as fp16 needs it."""
        return self.precision == "fp16"

    @property
    def has_warmup(self) -> bool:
        """Whether the first learning rate is lower than the highest one."""
        return self.warmup_steps > 1

    @property
    def in_words(self) -> str:
        """The configuration in a line."""
        policies = {None: "no checkpointing", 1: "every layer checkpointed"}
        policy = policies.get(self.every_n_layers, f"one of every {self.every_n_layers} layers checkpointed")
        cut = f"{self.micro_batch_size} sequences x {self.accumulation_steps} forward passes an update"
        return f"{self.model}, {cut}, {self.precision}, {policy}"


def facts_of(experiment: Experiment) -> Facts:
    """Return the facts; the corpus is prepared where it was not before.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    settings: Any = experiment.settings
    prepared = experiment.read_corpus()
    every = next(each.every_n_layers for each in experiment.techniques if isinstance(each, Checkpointing))
    tokens = token_folder(prepared.digest) / "train.tokens.npy"
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
    )


def literal(value: object) -> str:
    """Return a value as Python code, a dictionary over several lines where it is long."""
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
    """Return what differs from the defaults of the model's kind in transformers."""
    if not isinstance(experiment.model, CausalLm):
        return None
    from transformers import AutoConfig

    config = experiment.model.configuration(experiment.settings.model, vocabulary_size)
    wanted: dict[str, Any] = config.to_dict()
    values = {"model_type": config.model_type}
    for _ in range(2):  # some defaults follow from values that differ
        built = AutoConfig.for_model(**values).to_dict()
        values |= {name: value for name, value in wanted.items() if name not in built or built[name] != value}
    return values


def _names(experiment: Experiment, vocabulary_size: int, every: int) -> str:
    """Return a Python expression for the names of the checkpointed layers."""
    plain = experiment.with_random_weights("cpu")
    try:
        with torch.device("meta"):
            trainable = plain.model.build(plain.settings.model, vocabulary_size)
    except InvalidInputError:  # a model whose code needs numbers
        trainable = plain.model.build(plain.settings.model, vocabulary_size)
    names = {module: name for name, module in trainable.module.named_modules()}
    layers = [names[layer] for layer in trainable.layers]
    prefix = layers[0].removesuffix("0")
    if layers == [f"{prefix}{index}" for index in range(len(layers))]:
        return f'[f"{prefix}{{index}}" for index in range(0, {len(layers)}, {every})]'
    return literal(layers[::every])
