"""YAML and overrides -> Experiments, each resolved and checked before the first one runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from pipeline.contracts import (
    Corpus,
    CorpusRequest,
    Description,
    InvalidInputError,
    Model,
    Prepared,
    Settings,
    Technique,
)
from pipeline.memory.budget import parse_budget
from pipeline.memory.device import find_device, total_bytes
from pipeline.settings import (
    CORPORA,
    MODELS,
    TECHNIQUES,
    AllSettings,
    RunSettings,
    dotted,
    merged,
    nested,
    setting_names,
    unknown_setting,
    validate,
)

FOLDER = Path(__file__).parent.parent / "experiments"
"""The entry points' YAML files."""


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
        member: Corpus = getattr(self.settings, self.settings.corpus)
        return member

    @property
    def description(self) -> Description:
        """What is known of the model before it is built."""
        return self.model.describe(self.settings.model)

    @property
    def effective_batch_size(self) -> int:
        """Sequences in one optimizer step."""
        return int(self.settings.effective_batch_size)  # type: ignore[attr-defined]

    @property
    def budget_bytes(self) -> int | None:
        """Memory the run may use, if it is limited."""
        budget = self.settings.budget
        return None if budget is None else parse_budget(budget, total_bytes(self.device))

    def unsupported(self) -> str | None:
        """Return why this machine cannot run it, or None where it can."""
        reasons = (technique.unsupported(self.device) for technique in self.techniques)
        return next((reason for reason in reasons if reason), None)

    def prepare(self) -> Prepared:
        """Return the corpus, tokenized (from the cache after the first time) and checked against model and batch.

        Raises:
            InvalidInputError: the corpus cannot be read, or is too short, or does not suit the model.

        """
        settings, model = self.settings, self.description
        prepared = self.corpus.prepare(
            CorpusRequest(
                description=model,
                sequence_length=settings.sequence_length,
                padded=settings.sequences == "padded",
                vocabulary_size=settings.vocabulary_size,
                seed=settings.seed,
            )
        )
        _check_corpus(prepared, self)
        return prepared

    def params(self) -> dict[str, Any]:
        """Return every setting that this run uses by its dotted name; other models' and corpora's are left out."""
        used = {_family(self.settings.model), self.settings.corpus}
        groups = ({*MODELS} | {*CORPORA}) - used
        return {k: v for k, v in dotted(self.settings.model_dump(mode="json", exclude=groups)) if v != {}}

    def to_yaml(self) -> str:
        """Return a file that `config` takes to run this again."""
        return yaml.safe_dump(nested(self.params()), sort_keys=False)


@dataclass(frozen=True)
class Variant:
    """One way of doing it, among those that an entry point compares."""

    name: str
    experiment: Experiment
    skipped: str | None
    """Why this machine cannot run it, if it cannot."""


@dataclass(frozen=True)
class Comparison:
    """Variants beside each other, one of them the baseline."""

    name: str
    baseline: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Plan:
    """What an entry point runs."""

    entry: str
    question: str
    comparisons: tuple[Comparison, ...]

    @property
    def variants(self) -> Iterator[Variant]:
        """Every variant of every comparison."""
        return (variant for comparison in self.comparisons for variant in comparison.variants)


class ComparisonSettings(Settings):
    """One comparison in an entry point's YAML."""

    baseline: str
    """The variant that the others are compared with."""
    variants: dict[str, dict[str, Any]]
    """By name, what each variant sets."""


class PlanSettings(Settings):
    """What an entry point's YAML says beside settings."""

    question: str
    """What the entry point answers."""
    comparisons: dict[str, ComparisonSettings]
    """By name, the variants to run."""


def entry_points() -> list[str]:
    """Return the names of all entry points: `main`, and each file of experiments/."""
    return ["main", *sorted(file.stem for file in FOLDER.glob("*.yaml"))]


def make_experiment(values: Mapping[str, Any], entry: str) -> Experiment:
    """Return the Experiment that these settings describe, resolved and checked; its corpus is not read yet.

    Raises:
        InvalidInputError: a setting is unknown, out of range, or at odds with another or with this machine.

    """
    settings = validate(AllSettings, values, entry)
    device = find_device(settings.device)
    model = settings.model if settings.model != "auto" else "gpt2" if device.type == "cuda" else "gpt2-nano"
    derived: dict[str, Any] = {"device": str(device), "model": model}
    for technique in _techniques(settings):
        derived |= technique.resolved().model_dump()
    experiment = Experiment(settings.model_copy(update=derived))
    _check_settings(experiment)
    return experiment


def load_plan(entry: str, overrides: Mapping[str, Any]) -> Plan:
    """Return the plan of experiments/`entry`.yaml with the user's overrides, all of its variants checked.

    Raises:
        InvalidInputError: as make_experiment, or an override has no effect because every variant sets it.

    """
    values = read_yaml(FOLDER / f"{entry}.yaml")
    plan = validate(
        PlanSettings, {name: values.pop(name) for name in PlanSettings.model_fields if name in values}, entry
    )
    base = merged(nested(values), overrides)
    settings = [variant for comparison in plan.comparisons.values() for variant in comparison.variants.values()]
    _refuse_overridden_variants(nested(values), overrides, settings, entry)
    comparisons = []
    for name, comparison in plan.comparisons.items():
        variants = tuple(
            _variant(label, merged(base, nested(own)), entry) for label, own in comparison.variants.items()
        )
        comparisons.append(Comparison(name, comparison.baseline, variants))
    return Plan(entry, plan.question, tuple(comparisons))


def load_single(config: Path, overrides: Mapping[str, Any]) -> Plan:
    """Return the plan of `main`: the one configuration in the file `config`, with the user's overrides.

    Raises:
        InvalidInputError: as make_experiment, or this machine cannot run it.

    """
    variant = _variant(config.stem, merged(nested(read_yaml(config)), overrides), "main")
    if variant.skipped:
        raise InvalidInputError(f"{variant.skipped}; choose another value")
    return Plan("main", f"What does {config} cost?", (Comparison("single", variant.name, (variant,)),))


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; no tags are followed, so no objects are made.

    Raises:
        InvalidInputError: it is missing, is not YAML, or is not a mapping.

    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidInputError(f"{file} must be a readable file ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise InvalidInputError(f"{file} must be plain YAML, without objects: {problem}; mend it there") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidInputError(f"{file} must hold settings as `name: value` lines, and holds {values!r}; mend it")
    return values


def _techniques(settings: RunSettings) -> tuple[Technique, ...]:
    return tuple(kind(**{name: getattr(settings, name) for name in kind.model_fields}) for kind in TECHNIQUES.values())


def _variant(name: str, values: Mapping[str, Any], entry: str) -> Variant:
    experiment = make_experiment(values, entry)
    skipped = experiment.unsupported()
    if skipped is None:
        experiment.prepare()
    return Variant(name, experiment, skipped)


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
        f"no model is called {name!r}; the models are {', '.join(names)}, a local folder, or owner/name of the hub"
    )


def _check_settings(experiment: Experiment) -> None:
    settings = experiment.settings
    if settings.corpus not in CORPORA:
        raise InvalidInputError(f"no corpus is called {settings.corpus!r}; the corpora are {', '.join(CORPORA)}")
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
    if settings.num_steps <= settings.timing_warmup_steps:
        raise InvalidInputError(
            f"num_steps must be more than timing_warmup_steps, or no step is timed: {settings.num_steps} is not more "
            f"than {settings.timing_warmup_steps}; set num_steps={settings.timing_warmup_steps + 1} or more"
        )
    experiment.budget_bytes  # noqa: B018  raises where it cannot be parsed


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


def _refuse_overridden_variants(
    values: Mapping[str, Any], overrides: Mapping[str, Any], variants: list[dict[str, Any]], entry: str
) -> None:
    """Refuse an override that no variant would see; the default, which MLproject always passes on, is no override."""
    default = dict(dotted(validate(AllSettings, values, entry).model_dump()))
    given = dict(dotted(validate(AllSettings, merged(values, overrides), entry).model_dump()))
    for name in (name for name, _ in dotted(overrides) if given[name] != default[name]):
        if all(name in variant for variant in variants):
            raise InvalidInputError(
                f"{name} is what {entry} varies, so {name}={given[name]} would have no effect; "
                f"run it alone: python -m pipeline main --{name} {given[name]}"
            )


def known_setting(name: str) -> None:
    """Raise InvalidInputError, with the valid names, where no setting has this dotted name."""
    if name not in set(setting_names(AllSettings)):
        raise InvalidInputError(unknown_setting(AllSettings, name))
