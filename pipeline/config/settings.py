"""Every setting of a run, with type, default and description."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, create_model, field_validator

from pipeline.base.contracts import Corpus, Model, SequencesKind
from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import RESULTS, Settings
from pipeline.base.technique import Technique, idle_settings
from pipeline.base.user_functions import Family, classes_in
from pipeline.config.given import dotted
from pipeline.config.user_techniques import user_techniques
from pipeline.models._support.tasks import CLASSES, OF_PAIRS

OF_DPO = "reference"
"""The technique that is a part of task=dpo: runs of other tasks do not show it."""


def discover(package: str, family: type[Family]) -> dict[str, type[Family]]:
    """Return the class of `family` in each file of pipeline.`package`, by the file's name; no member begins with _."""
    folder = Path(__file__).parent.parent.joinpath(*package.split("."))
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules([str(folder)])):
        if name.startswith("_"):
            continue
        [found[name]] = classes_in(import_module(f"pipeline.{package}.{name}"), family)
    return found


TECHNIQUES = {**discover("techniques", Technique), **user_techniques()}  # type: ignore[type-abstract]
MODELS = discover("models", Model)  # type: ignore[type-abstract]
CORPORA = discover("data", Corpus)  # type: ignore[type-abstract]
TASKS = (*(name for name in CLASSES if name in MODELS), *OF_PAIRS)
"""Families of models that are tasks of transformers, or of pairs of answers."""


class RunSettings(Settings):
    """Settings of a run that belong to no technique, model or corpus."""

    model: str = "auto"
    """A preset such as gpt2, a folder, a hub name or path.to.module:function; auto: gpt2, gpt2-nano on a CPU."""
    task: Literal[TASKS] | None = None  # type: ignore[valid-type]
    """Class of transformers' models that a folder or hub name is trained as, or what pairs of answers train a causal
    language model for: dpo, reward; none: what its configuration says."""
    corpus: str = "python_docs"
    """Training data: python_docs, text_files, chat, hub, quick_fox, random_vectors or path.to.module:function."""
    sequences: SequencesKind = "packed"
    """packed: concatenated documents; packed_documents: whole ones, kept apart; else one document each, padded to
    sequence_length (fixed_length), to the longest of its micro-batch (padded), or so after sorting (grouped)."""
    sequence_length: PositiveInt = Field(default=256, ge=2)
    """Tokens per sequence; padded and grouped truncate documents there. auto, of plan alone: the longest that fits."""
    vocabulary_size: PositiveInt = Field(default=4096, ge=300, le=1_000_000)
    """Vocabulary size of the tokenizer that is trained if the model has none."""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda or cuda:N."""
    seed: NonNegativeInt = Field(default=0, lt=2**32)
    """Seed of the weights, of dropout and of the order of the sequences."""
    num_steps: PositiveInt = 30
    """Optimizer steps to train."""
    num_epochs: PositiveFloat | None = None
    """How many times to train each sequence of the corpus, in place of num_steps; none: num_steps counts."""
    timing_warmup_steps: PositiveInt = Field(default=3, ge=2)
    """Optimizer steps at the start that are not timed; fewer by default where num_steps is no more than that."""
    learning_rate: PositiveFloat = 5e-4
    """Peak learning rate, before learning_rate_scaling."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with effective_batch_size / base_batch_size."""
    base_batch_size: PositiveInt = 8
    """The effective batch size for which learning_rate was chosen."""
    learning_rate_warmup_steps: NonNegativeInt = 5
    """Optimizer steps over which the learning rate rises to its peak."""
    learning_rate_warmup_ratio: float | None = Field(default=None, ge=0, lt=1)
    """The same as a share of num_steps, in place of learning_rate_warmup_steps; none: those count."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or decay to zero along a line or half a cosine."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay on every parameter: decoupled, but an L2 penalty with optimizer=sgd."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum gradient norm, to which gradients are clipped; none: no clipping."""
    eval_steps: NonNegativeInt = 1
    """Held-out batches of effective_batch_size sequences to evaluate after training; 0: no evaluation."""
    gradient_underflow: bool = False
    """Measure after training which share of the gradient fp16 would lose without loss scaling."""
    dataset_size: PositiveInt = 10_000
    """Sequences in an epoch, for the table of forward passes and updates; it does not change the training."""
    budget: str | None = None
    """Memory limit: 8GiB, 8GB, 512MiB, 80%; enforced on CUDA, checked after the run on a CPU; none: no limit."""
    time_limit: PositiveFloat | None = None
    """Seconds after which a run is stopped; none: no limit."""
    output: Path = RESULTS
    """Folder of the results on local disk."""

    @field_validator("sequence_length", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        """Refuse `auto`, which only a plan searches."""
        if value == "auto":
            raise ValueError(
                "must be a number of tokens: fitproof plan --sequence_length auto shows the longest that fits"
            )
        return value


def _all_settings() -> type[RunSettings]:
    """Return RunSettings with every technique's settings, and each model's and corpus's under its name."""
    fields: dict[str, Any] = {}
    for technique in TECHNIQUES.values():
        for name, field in technique.model_fields.items():
            if name in fields or name in RunSettings.model_fields:
                raise InvalidInputError(
                    f"the names of settings must be unique, and {name} of {technique.__name__} is in use; rename it"
                )
            fields[name] = (field.annotation, field)
    for name, member in {**MODELS, **CORPORA}.items():
        fields[name] = (member, Field(default=member(), description=(member.__doc__ or "").splitlines()[0]))
    # All fields have descriptions: to look for docstrings takes pydantic long in a process of many modules.
    own = {"use_attribute_docstrings": False}
    model = create_model("AllSettings", __base__=RunSettings, __module__=__name__, __cls_kwargs__=own, **fields)
    return cast(type[RunSettings], model)


AllSettings = _all_settings()
"""RunSettings with the settings of every technique, model and corpus: everything that an Experiment takes."""


@cache
def default_values() -> dict[str, Any]:
    """Return the default of every setting, by its dotted name."""
    return dict(dotted(AllSettings().model_dump()))


def in_use(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of techniques that are not in use, and of values that a technique does not have.

    Whether one is in use is said by its first setting. A setting that differs from its default stays.
    """
    left_out = set() if params.get("task") == "dpo" else {OF_DPO}
    for technique in TECHNIQUES.values():
        switch = next(iter(technique.model_fields))
        if switch in params:
            left_out |= idle_settings(technique, params[switch]).keys()
    defaults = default_values()
    return {name: value for name, value in params.items() if name not in left_out or value != defaults[name]}
