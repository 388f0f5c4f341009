"""Settings -> Experiment: one run, resolved and checked before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import yaml

from pipeline.base.contracts import Corpus, CorpusRequest, Description, Hardware, Model, Prepared, Technique
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import parse_budget
from pipeline.base.user_functions import digest, names_function
from pipeline.config.settings import (
    CORPORA,
    MODELS,
    TECHNIQUES,
    AllSettings,
    RunSettings,
    dotted,
    nested,
    setting_names,
    unknown_setting,
    validate,
)
from pipeline.memory.device import find_device, hardware_of, total_bytes

AUTO_MODEL = {"cuda": "gpt2", "cpu": "gpt2-nano"}
"""What `model: auto` stands for on each kind of device."""


@dataclass(frozen=True)
class Experiment:
    """One run, fully specified: no setting is left to be derived."""

    settings: RunSettings
    """An instance of AllSettings."""

    @cached_property
    def device(self) -> torch.device:
        """The device to train on."""
        return torch.device(self.settings.device)

    @cached_property
    def techniques(self) -> tuple[Technique, ...]:
        """Every technique, each with its own settings; most do nothing by default."""
        return _techniques(self.settings)

    @property
    def model(self) -> Model:
        """The family that `settings.model` belongs to, with its settings."""
        member: Model = getattr(self.settings, _family(self.settings.model))
        return member

    @property
    def corpus(self) -> Corpus:
        """The corpus, with its settings."""
        member: Corpus = getattr(self.settings, _corpus(self.settings.corpus))
        return member

    @cached_property
    def description(self) -> Description:
        """What is known of the model before it is built."""
        return self.model.describe(self.settings.model)

    @property
    def effective_batch_size(self) -> int:
        """Sequences in one optimizer step."""
        return int(self.settings.effective_batch_size)  # type: ignore[attr-defined]

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward and backward pass."""
        return int(self.settings.micro_batch_size)  # type: ignore[attr-defined]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that its process needs before its first CUDA call."""
        return {name: value for technique in self.techniques for name, value in technique.environment().items()}

    @property
    def budget_bytes(self) -> int | None:
        """Memory the run may use, if it is limited."""
        budget = self.settings.budget
        return None if budget is None else parse_budget(budget, total_bytes(self.device))

    def unsupported(self, hardware: Hardware | None = None) -> str | None:
        """Return why `hardware` (by default its device of this machine) cannot run it, or None where it can."""
        hardware = hardware or hardware_of(self.device)
        reasons = (technique.unsupported(hardware) for technique in self.techniques)
        return next((reason for reason in reasons if reason), None)

    def prepare(self) -> Prepared:
        """Return the corpus, tokenized (from the cache after the first time) and checked against model and batch.

        Raises:
            InvalidInputError: the corpus cannot be read, or is too short, or does not suit the model.

        """
        prepared = self.read_corpus()
        _check_corpus(prepared, self)
        return prepared

    def read_corpus(self) -> Prepared:
        """Return the corpus as prepare() does, but however short it is."""
        settings = self.settings
        return self.corpus.prepare(
            CorpusRequest(
                name=settings.corpus,
                description=self.description,
                sequence_length=settings.sequence_length,
                padded=settings.sequences == "padded",
                vocabulary_size=settings.vocabulary_size,
                seed=settings.seed,
            )
        )

    def with_random_weights(self, device: str) -> "Experiment":
        """Return the same run on another device, with weights of the same shapes that are not loaded."""
        changes: dict[str, Any] = {"device": device}
        if getattr(self.model, "pretrained", False):
            changes[_family(self.settings.model)] = self.model.model_copy(update={"pretrained": False})
        return Experiment(self.settings.model_copy(update=changes))

    def with_layers(self, num_layers: int) -> "Experiment":
        """Return the same run of a model with another number of layers."""
        other = self.model.model_copy(update={"num_layers": num_layers})
        return Experiment(self.settings.model_copy(update={_family(self.settings.model): other}))

    def params(self) -> dict[str, Any]:
        """Return every setting that this run uses by its dotted name, and a digest of the user's code that it uses."""
        names = [name for name in (self.settings.model, self.settings.corpus) if names_function(name)]
        code = {"user_code": " ".join(digest(name) for name in names)} if names else {}
        return {**self._own_settings(), **code}

    def to_yaml(self) -> str:
        """Return a file that `config` takes to run this again."""
        return yaml.safe_dump(nested(self._own_settings()), sort_keys=False)

    def _own_settings(self) -> dict[str, Any]:
        """Return every setting by its dotted name but those of other models and corpora."""
        used = {_family(self.settings.model), _corpus(self.settings.corpus)}
        groups = ({*MODELS} | {*CORPORA}) - used
        return {k: v for k, v in dotted(self.settings.model_dump(mode="json", exclude=groups)) if v != {}}


def make_experiment(values: Mapping[str, Any], entry: str) -> Experiment:
    """Return the Experiment that these settings describe, resolved and checked; its corpus is not read yet.

    Raises:
        InvalidInputError: a setting is unknown, out of range, or at odds with another or with this machine.

    """
    settings = validate(AllSettings, values, entry)
    device = find_device(settings.device)
    model = AUTO_MODEL[device.type] if settings.model == "auto" else settings.model
    derived: dict[str, Any] = {"device": str(device), "model": model}
    for technique in _techniques(settings):
        derived |= technique.resolved().model_dump()
    experiment = Experiment(settings.model_copy(update=derived))
    _check_settings(experiment)
    return experiment


def _techniques(settings: RunSettings) -> tuple[Technique, ...]:
    return tuple(kind(**{name: getattr(settings, name) for name in kind.model_fields}) for kind in TECHNIQUES.values())


def _family(name: str) -> str:
    """Return the family that opens model `name`; exact names come before folders and hub names."""
    for key, family in MODELS.items():
        if name in family.names:
            return key
    for key, family in MODELS.items():
        if family.opens(name):
            return key
    names = [name for family in MODELS.values() for name in family.names]
    raise InvalidInputError(
        f"no model is called {name!r}; the models are {', '.join(names)}, a local folder, owner/name of the hub, or "
        "path.to.module:function of your own"
    )


def _corpus(name: str) -> str:
    """Return the corpus that `name` stands for: its own name, or that of the kind which opens it."""
    if name in CORPORA:
        return name
    for key, corpus in CORPORA.items():
        if corpus.opens(name):
            return key
    raise InvalidInputError(
        f"no corpus is called {name!r}; the corpora are {', '.join(CORPORA)}, or path.to.module:function of your own"
    )


def _check_settings(experiment: Experiment) -> None:
    settings = experiment.settings
    _corpus(settings.corpus)
    longest = experiment.description.max_sequence_length
    if longest is not None and settings.sequence_length > longest:
        raise InvalidInputError(
            f"sequence_length must fit the model's positions: {settings.sequence_length} is more than the {longest} of "
            f"{settings.model}; set sequence_length={longest} or less"
        )
    if experiment.description.kind != experiment.corpus.kind:
        suited = [name for name, corpus in CORPORA.items() if corpus.kind == experiment.description.kind]
        raise InvalidInputError(
            f"{settings.model} is fed with {experiment.description.kind}, and the corpus {settings.corpus} gives "
            f"{experiment.corpus.kind}; set corpus={' or '.join(suited)}"
        )
    if reason := why_untimed("num_steps", settings.num_steps, settings.timing_warmup_steps):
        raise InvalidInputError(reason)
    experiment.budget_bytes  # noqa: B018  raises where it cannot be parsed


def why_untimed(name: str, num_steps: int, timing_warmup_steps: int) -> str | None:
    """Return why so many optimizer steps, the setting `name`, leave none to be timed; None where one is left."""
    if num_steps > timing_warmup_steps:
        return None
    return (
        f"{name} must be more than timing_warmup_steps, or no step is timed: {num_steps} is not more than "
        f"{timing_warmup_steps}; set {name}={timing_warmup_steps + 1} or more"
    )


def _check_corpus(prepared: Prepared, experiment: Experiment) -> None:
    settings, needed = experiment.settings, experiment.effective_batch_size
    if len(prepared.train) < needed:
        raise InvalidInputError(
            f"the text must fill one batch: {prepared.source} gives {len(prepared.train)} sequences of "
            f"{settings.sequence_length} tokens, and effective_batch_size is {needed}; add text, or lower "
            "sequence_length or effective_batch_size"
        )
    if settings.eval_steps and not len(prepared.held_out):
        raise InvalidInputError(
            f"the held-out text must fill one sequence of {settings.sequence_length} tokens, and {prepared.source} is "
            "too short; add text, lower sequence_length, or set eval_steps=0"
        )
    own = experiment.description.vocabulary_size
    if own is not None and prepared.vocabulary_size > own:
        raise InvalidInputError(
            f"the model must tell the corpus's tokens apart: it knows {own}, and the corpus has "
            f"{prepared.vocabulary_size}; set vocabulary_size={own} or less"
        )


def check_setting_name(name: str) -> None:
    """Raise InvalidInputError, with the valid names, where no setting has this dotted name."""
    if name not in set(setting_names(AllSettings)):
        raise InvalidInputError(unknown_setting(AllSettings, name))
