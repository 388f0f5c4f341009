"""The values that the files for every framework are written from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.technique import Exported, Mathematics, Stage, Technique, source_of
from pipeline.config.experiment import Experiment
from pipeline.data._support import packing
from pipeline.data._support.tokenizing import token_folder
from pipeline.export.literals import literal
from pipeline.export.model import (
    Lora,
    configuration_changes,
    configuration_of,
    layer_names,
    lora_of,
    published_name,
    structure_of,
)
from pipeline.export.source import Source, data_source
from pipeline.memory import attention_saved
from pipeline.models._support.task_models import TaskModel
from pipeline.techniques._support import offloading
from pipeline.techniques.accumulation import Accumulation
from pipeline.techniques.checkpointing import Checkpointing
from pipeline.techniques.precision import Precision
from pipeline.training.loop import highest_learning_rate

DEFAULT_LOSS_SCALE = 65536.0
"""The first scale of torch.amp.GradScaler, which some frameworks do not let one change."""
IN_FACTS = (Accumulation, Checkpointing, Precision)
"""Techniques that the files of every framework express; others add what their export() returns."""
OF_ACCELERATE = ("accelerate", "training_arguments", "trl")
"""Targets whose FSDP puts other parameters into the optimizer than those with which it was made."""
NOT_MEASURED = "This is not the training that was measured: "
"""Beginning of a sentence on what is another training in a framework."""
CONSEQUENCES = {
    Mathematics.EXACT: "its losses are the measured ones but for the order of sums, its memory and time are not",
    Mathematics.ROUNDING: "its losses differ by rounding, its memory and time are not those measured",
    Mathematics.DIFFERENT: "its losses, memory and time are not those measured",
}
"""What is true of a training without a technique, by the technique's mathematics."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """An Experiment in terms that all frameworks share."""

    settings: Any
    """All settings of the run, by their names."""
    accumulation_steps: int
    """Of one process."""
    world_size: int
    """Processes that train together."""
    effective_batch_size: int
    every_n_layers: int | None
    """The n of the checkpointed layers 0, n, 2n, ...; None without checkpointing, or with another policy."""
    checkpointed: tuple[tuple[str, str], ...]
    """For each policy but `none`, and in their order: its name, and the names of its layers as a Python expression."""
    layers: str
    """The names of all layers, likewise."""
    learning_rate: float
    """After warm-up, with learning_rate_scaling applied."""
    lengths_vary: bool
    """Whether each micro-batch is as long as its longest sequence."""
    masked: bool
    """Whether some tokens are no targets: train.targets.npy, beside `tokens`, says which are."""
    model: str
    has_labels: bool
    """Whether its loss is of labels."""
    configuration: Mapping[str, Any] | None
    """The model's configuration for transformers' AutoConfig; None for models of other kinds."""
    shifts_labels: bool
    """Whether the label of a token is the target of the one before it, as in causal language models."""
    pretrained: bool
    tokens: Path | None
    """The file of token ids on which Fitproof trained; None for a corpus of vectors."""
    num_documents: int | None
    """Documents to train on; None for a corpus of vectors."""
    source: Source | None
    """Where the rows of the corpus come from; None for a corpus that no other framework can read."""
    tokenizer: str | None
    """Name or folder of the model's own tokenizer; None if Fitproof trained one on the corpus."""
    published: str | None
    """Name on the hub or folder of the model's weights; None for a shape that has none."""
    changes: Mapping[str, Any]
    """What the settings change in the configuration of that model."""
    lora: Lora | None
    """The adapters, if the model itself is frozen."""
    weights: str
    """Type of the model's own parameters: float32 or bfloat16."""
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
    def is_padded(self) -> bool:
        """Whether each sequence is one document."""
        return bool(self.settings.sequences not in ("packed", "packed_documents"))

    @property
    def packs_documents(self) -> bool:
        """Whether each sequence has whole documents, which do not attend to one another."""
        return bool(self.settings.sequences == "packed_documents")

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return str(self.settings.device).partition(":")[0]

    @property
    def autocast_dtype(self) -> str | None:
        """The name of autocast's dtype in torch; None without autocast."""
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.settings.precision)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as in fp16."""
        return bool(self.settings.precision == "fp16")

    @property
    def has_warmup(self) -> bool:
        """Whether the first learning rate is lower than `learning_rate`."""
        return bool(self.settings.learning_rate_warmup_steps > 1)

    @property
    def decays(self) -> bool:
        """Whether the learning rate falls to zero after warm-up."""
        return bool(self.settings.learning_rate_schedule != "constant")

    @property
    def summary(self) -> str:
        """The configuration in one line."""
        sequences, checkpointing = self.settings.micro_batch_size, self.settings.checkpointing
        policies = {"none": "no checkpointing", "every_layer": "every layer checkpointed"}
        every = f"one of every {self.every_n_layers} layers checkpointed"
        other = every if self.every_n_layers else f"checkpointing={checkpointing}"
        policy = policies.get(checkpointing, other)
        cut = f"micro-batches of {sequences} sequences x {self.accumulation_steps} accumulation steps"
        if self.world_size > 1:
            cut += f" x {self.world_size} processes"
        return ", ".join([self.model, cut, self.settings.precision, policy, *self.others])

    @property
    def has_prepare(self) -> bool:
        """Whether the model has to be changed before its optimizer is made."""
        return bool(self.checkpointed) or any(each.prepare for each in self.exported)

    @property
    def policies(self) -> tuple[str, ...]:
        """The checkpointing policies that occur."""
        return tuple(policy for policy, _ in self.checkpointed)

    @property
    def is_gpt2(self) -> bool:
        """Whether transformers' class of the model is GPT-2's, whose loss Trainer computes in another way."""
        return self.configuration is not None and self.configuration["model_type"] == "gpt2"

    @property
    def recomputation_code(self) -> str:
        """Source for the top level of a file that checkpoints the layers, as Fitproof does."""
        modules = {"attention_saved": attention_saved, "offloaded": offloading}
        sources = [source_of(module) for policy, module in modules.items() if policy in self.policies]
        known = {each.code for each in self.exported}
        return "\n\n\n".join(source for source in sources if source not in known)

    @property
    def packing(self) -> str:
        """Source of the function that decides which documents share a sequence."""
        return source_of(packing)

    def prepared(self, code: str) -> str:
        """Return statements of a technique with the names of the model's layers in them."""
        return code.replace("{layers}", self.layers)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the framework that techniques add."""
        return {name: value for each in self.exported for name, value in each.arguments.items()}

    @property
    def loss(self) -> str | None:
        """A Python expression for the summed loss, if a technique replaces it."""
        return next((each.loss for each in self.exported if each.loss), None)

    def optimizer(self, fused: bool, parameters: str = "model.parameters()") -> str:
        """Return a Python expression for the optimizer of `model`."""
        rate, decay = self.learning_rate, self.settings.weight_decay
        known = {"learning_rate": rate, "weight_decay": decay, "layers": self.layers}
        expression = f"torch.optim.AdamW({parameters}, lr={rate}, weight_decay={decay}, fused={fused})"
        made = [each.optimizer for each in self.exported]
        for each in (*made, *(each.finished_optimizer for each in self.exported)):
            names = {"optimizer": expression, **known}
            expression = each
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
    checkpointing = next(each for each in experiment.techniques if isinstance(each, Checkpointing))
    trainable = structure_of(experiment, prepared.vocabulary_size)
    names = layer_names(trainable)
    tokens, targets = (token_folder(prepared.digest) / f"train.{name}.npy" for name in ("tokens", "targets"))
    others = _others(experiment)
    tokenizer, published = experiment.description.tokenizer, published_name(experiment)
    return Facts(
        settings=settings,
        accumulation_steps=experiment.accumulation_steps,
        world_size=experiment.num_data_ranks,
        effective_batch_size=experiment.effective_batch_size,
        every_n_layers=checkpointing.every_n_layers,
        checkpointed=_by_policy(names, checkpointing.by_layer(len(names))),
        layers=_expression(names, range(len(names))),
        learning_rate=highest_learning_rate(settings, experiment.effective_batch_size),
        lengths_vary=experiment.lengths_vary,
        masked=targets.exists(),
        model=_absolute(settings.model),
        has_labels="labels" in prepared.train.batch([0]),
        configuration=configuration_of(experiment, prepared.vocabulary_size),
        shifts_labels=not isinstance(experiment.model, TaskModel),
        pretrained=getattr(experiment.model, "pretrained", False),
        tokens=tokens if tokens.exists() else None,
        num_documents=_num_documents(tokens),
        source=data_source(experiment, is_plain=prepared.is_plain),
        tokenizer=_absolute(tokenizer) if tokenizer and experiment.description.needs_tokenizer else None,
        published=_absolute(published) if published else None,
        changes=configuration_changes(experiment, prepared.vocabulary_size),
        lora=lora_of(experiment, trainable),
        weights=settings.weights.removesuffix("_master"),
        environment=experiment.environment,
        others=tuple(_settings_text(technique) for technique in others),
        replaces_optimizer=any(Stage.OPTIMIZER <= technique.stage < Stage.RANKS for technique in others),
    )


def facts_for(facts: Facts, experiment: Experiment, target: str, *, takes_code: bool) -> Facts:
    """Return the facts with what techniques add for one target, whose files may not be able to hold Python code."""
    exports = {technique: technique.export(target) for technique in _others(experiment)}
    if experiment.settings.sharding == "fsdp" and target in OF_ACCELERATE:  # type: ignore[attr-defined]
        exports = {each: None if own and own.wraps_optimizer else own for each, own in exports.items()}
    if not takes_code:
        exports = {each: None if exported and exported.needs_python else exported for each, exported in exports.items()}
    missing = [
        f"{NOT_MEASURED}it is without {_settings_text(technique)}, which these files "
        f"cannot express; {CONSEQUENCES[technique.mathematics]}."
        for technique, exported in exports.items()
        if exported is None
    ]
    found = {technique: exported for technique, exported in exports.items() if exported is not None}
    in_python = [_settings_text(technique) for technique, exported in found.items() if exported.needs_python]
    return replace(facts, exported=tuple(found.values()), in_python=tuple(in_python), missing=tuple(missing))


def _absolute(name: str) -> str:
    """Return the name of a model; a folder as its whole path, as the files may run in another folder."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _others(experiment: Experiment) -> list[Technique]:
    return [each for each in experiment.techniques if each.active and not isinstance(each, IN_FACTS)]


def _settings_text(technique: Technique) -> str:
    """Return the settings of a technique that differ from their defaults, as `setting=value`."""
    default = type(technique)().model_dump()
    changed = [f"{name}={value}" for name, value in technique.model_dump().items() if value != default[name]]
    return ", ".join(changed) or type(technique).__name__


def _num_documents(tokens: Path) -> int | None:
    """Return the number of documents of a file of token ids, whose starts and end lie beside it."""
    offsets = tokens.with_name("train.offsets.npy")
    return len(np.load(offsets, mmap_mode="r")) - 1 if offsets.exists() else None


def _by_policy(names: Sequence[str], policies: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each policy but `none` with a Python expression for the names of its layers."""
    numbers = {policy: [n for n, each in enumerate(policies) if each == policy] for policy in dict.fromkeys(policies)}
    return tuple((policy, _expression(names, found)) for policy, found in numbers.items() if policy != "none")


def _expression(names: Sequence[str], numbers: Sequence[int]) -> str:
    """Return a Python expression for the names of the layers with these numbers."""
    if not names:
        return literal([])
    prefix = names[0].removesuffix("0")
    step = numbers[1] - numbers[0] if len(numbers) > 1 else len(names)
    end = len(names) if numbers[-1] + step >= len(names) else numbers[-1] + 1
    regular = range(numbers[0], end, step)
    if list(names) == [f"{prefix}{index}" for index in range(len(names))] and list(regular) == list(numbers):
        return f'[f"{prefix}{{index}}" for index in range({numbers[0]}, {end}, {step})]'
    return literal([names[number] for number in numbers])
