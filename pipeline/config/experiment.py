"""Experiment: the settings of one run, completed and checked before anything runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pipeline.base.contracts import Corpus, CorpusRequest, Description, Hardware, Model, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.machines import this_machine
from pipeline.base.processes import num_cores
from pipeline.base.ranks import num_data_ranks
from pipeline.base.technique import ROUNDOFF, Technique
from pipeline.base.units import parse_budget
from pipeline.base.user_functions import check_names_no_file, digest, is_function_name, module_digest
from pipeline.config.given import FOLLOWS, dotted, nested, validate, yaml_text
from pipeline.config.settings import CORPORA, MODELS, TECHNIQUES, AllSettings, RunSettings
from pipeline.config.user_techniques import is_user_technique
from pipeline.data._support.sequences import DynamicallyPaddedSequences
from pipeline.memory.device import find_device, hardware_of, total_bytes
from pipeline.memory.meter import WATCHED_STEPS
from pipeline.models._support.tasks import OF_PAIRS

AUTO_MODEL = {"cuda": "gpt2", "cpu": "gpt2-nano"}
"""The model for `model: auto` on each kind of device."""
VARYING = ("padded", "grouped")
"""Values of `sequences` with which micro-batches differ in length."""


@dataclass(frozen=True)
class Experiment:
    """One run; every derived setting has its value."""

    settings: RunSettings
    """An instance of AllSettings."""

    @cached_property
    def device(self) -> torch.device:
        """The device that it trains on."""
        return torch.device(self.settings.device)

    @cached_property
    def techniques(self) -> tuple[Technique, ...]:
        """Every technique with its settings, in the order in which they are applied; not all are active."""
        return tuple(_techniques(self.settings))

    @property
    def family(self) -> str:
        """The name of the family of its model."""
        return family_of(self.settings.model, self.settings.task)

    @property
    def model(self) -> Model:
        """The model family of `settings.model`, with its settings."""
        member: Model = getattr(self.settings, self.family)
        return member

    @property
    def corpus(self) -> Corpus:
        """The corpus, with its settings."""
        member: Corpus = getattr(self.settings, corpus_of(self.settings.corpus))
        return member

    @cached_property
    def description(self) -> Description:
        """The description of the model, which is not built for it."""
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
    def accumulation_steps(self) -> int:
        """Forward and backward passes of a rank in one optimizer step."""
        return int(self.settings.accumulation_steps)  # type: ignore[attr-defined]

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return int(self.settings.world_size)  # type: ignore[attr-defined]

    @property
    def tensor_parallel(self) -> int:
        """Neighbouring processes that divide each matrix, and take the same sequences."""
        return int(self.settings.tensor_parallel)  # type: ignore[attr-defined]

    @property
    def num_data_ranks(self) -> int:
        """Groups of processes that take sequences of their own."""
        return num_data_ranks(self.world_size, self.tensor_parallel)

    @property
    def title(self) -> str:
        """The name of the model."""
        return self.settings.model

    @property
    def num_ranks_here(self) -> int:
        """Ranks that are started on this machine; 0 where one process trains alone."""
        return self.world_size // this_machine().count if self.world_size > 1 else 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps to train."""
        return self.settings.num_steps

    @property
    def timing_warmup_steps(self) -> int:
        """Optimizer steps at the start that are not timed."""
        return self.settings.timing_warmup_steps

    @property
    def time_limit(self) -> float | None:
        """Seconds after which it is ended; None: no limit."""
        return self.settings.time_limit

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that its techniques need in the process before the first CUDA call."""
        return {name: value for technique in self.techniques for name, value in technique.environment().items()}

    @property
    def lengths_vary(self) -> bool:
        """Whether each micro-batch is as long as its longest document."""
        return self.settings.sequences in VARYING and self.corpus.kind == "tokens"

    def notes(self, hardware: Hardware) -> tuple[str, ...]:
        """Return what a reader of its prediction on `hardware` needs to know, a sentence each."""
        notes = [note for each in self.techniques for note in each.notes(self.settings, hardware, self.model)]
        if hardware.kind == "cuda" and self.lengths_vary:
            notes.append(
                f"sequences={self.settings.sequences}: predicted for the longest micro-batch; as lengths vary, CUDA's "
                "allocator reserves more, and within a tight budget can run out of memory later"
            )
        return tuple(notes)

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes, if there is one."""
        budget = self.settings.budget
        return None if budget is None else parse_budget(budget, total_bytes(self.device))

    def unsupported(self, hardware: Hardware | None = None) -> str | None:
        """Return why it cannot run on `hardware` (by default its own device), or None if it can.

        Either a technique cannot be combined with other settings, or the hardware or the model does not support it.
        """
        hardware = hardware or hardware_of(self.device)
        for each in self.techniques:
            reason = next(each.refusals(self.settings, hardware, self.model), None) or _unknown_number_format(each)
            if reason is not None:
                return reason
        return self._joins_documents() or self._cuts_the_batch()

    def _cuts_the_batch(self) -> str | None:
        """Return that its loss is of the whole batch, if a micro-batch is only a part of it."""
        if not self.description.needs_whole_batch or self.micro_batch_size == self.effective_batch_size:
            return None
        return (
            f"the loss of {self.settings.model} compares all examples of a batch with each other, so that parts of it "
            f"are another training, and effective_batch_size={self.effective_batch_size} is cut into micro-batches of "
            f"{self.micro_batch_size}; set micro_batch_size={self.effective_batch_size} and world_size=1, or "
            "checkpointing=every_layer to save memory"
        )

    def _joins_documents(self) -> str | None:
        """Return why its model cannot keep apart the documents of a sequence, if it has to."""
        settings = self.settings
        if settings.sequences != "packed_documents":
            return None
        reason = self.model.inseparable_documents(settings.model)
        rule = "sequences=packed_documents needs a model whose attention keeps documents apart by position_ids"
        return reason and f"{rule}, and {reason}; set sequences=packed, padded or grouped"

    def prepare(self) -> Prepared:
        """Return the corpus, cached on disk after the first time, and checked against the model and the batch size.

        Raises:
            InvalidInputError: the corpus cannot be read, is too short, or has a larger vocabulary than the model, or
                the model's weights cannot be read.

        """
        self.model.check_weights(self.settings.model)
        prepared = self.read_corpus()
        _check_corpus(prepared, self)
        return prepared

    def read_corpus(self) -> Prepared:
        """Return the corpus without the checks of prepare()."""
        settings = self.settings
        prepared = self.corpus.prepare(
            CorpusRequest(
                name=settings.corpus,
                description=self.description,
                sequence_length=settings.sequence_length,
                sequences=settings.sequences,
                vocabulary_size=settings.vocabulary_size,
                seed=settings.seed,
            )
        )
        prepared = self.model.inputs(settings.model, prepared, settings.seed)
        return _with_room_for_evaluation(prepared, settings.eval_steps * self.effective_batch_size)

    def on_device(self, device: str) -> "Experiment":
        """Return the same run on another device, which this machine need not have."""
        return Experiment(self.settings.model_copy(update={"device": device}))

    def with_random_weights(self, device: str) -> "Experiment":
        """Return the same run on another device, with random weights in place of pretrained ones."""
        changes = {"device": device, self.family: self.model.with_random_weights()}
        return Experiment(self.settings.model_copy(update=changes))

    @property
    def num_threads(self) -> int | None:
        """Threads of a rank on a CPU, whose cores the ranks share; None if it is torch's own choice."""
        is_shared = self.world_size > 1 and self.device.type == "cpu"
        return max(1, num_cores() // self.num_ranks_here) if is_shared else None

    def params(self) -> dict[str, Any]:
        """Return every setting that the run uses by its dotted name, and digests of the user's code that it uses."""
        digests = [digest(name) for name in (self.settings.model, self.settings.corpus) if is_function_name(name)]
        used = [type(each) for each in self.techniques if each.active and is_user_technique(type(each))]
        digests += [module_digest(technique.__module__) for technique in used]
        return {**self._own_settings(), **({"user_code": " ".join(digests)} if digests else {})}

    def to_yaml(self) -> str:
        """Return the settings as YAML, for the setting `config`, without what follows from another one."""
        own = self._own_settings()
        given = {name: value for name, value in own.items() if own.get(FOLLOWS.get(name, "")) is None}
        return yaml_text(nested(given))

    def _own_settings(self) -> dict[str, Any]:
        """Return every setting by its dotted name, without those of other model families and corpora."""
        used = {self.family, corpus_of(self.settings.corpus)}
        groups = ({*MODELS} | {*CORPORA}) - used
        return {k: v for k, v in dotted(self.settings.model_dump(mode="json", exclude=groups)) if v != {}}


def make_experiment(values: Mapping[str, Any], entry: str) -> Experiment:
    """Return the Experiment with these settings, completed and checked; its corpus is read for num_epochs alone.

    Raises:
        InvalidInputError: a setting is unknown or out of range, contradicts another, or names an absent device.

    """
    experiment = completed(validate(AllSettings, values, entry))
    check_settings(experiment)
    return with_length(experiment)


def completed(settings: RunSettings) -> Experiment:
    """Return the Experiment with validated settings, every derived one with its value; check_settings() checks it.

    Raises:
        InvalidInputError: settings of a technique contradict each other, or the device is absent.

    """
    device = find_device(settings.device)
    model = AUTO_MODEL[device.type] if settings.model == "auto" else settings.model
    accumulation: Any = TECHNIQUES["accumulation"]
    batch = accumulation(**{name: getattr(settings, name) for name in accumulation.model_fields})
    numbers = batch.resolved(settings.tensor_parallel).model_dump()  # type: ignore[attr-defined]
    return Experiment(settings.model_copy(update={"device": str(device), "model": model, **numbers}))


def _unknown_number_format(technique: Technique) -> str | None:
    known, its = [*ROUNDOFF], technique.number_format
    if its is None or its in known:
        return None
    return f"number_format of {type(technique).__name__} must be one of {', '.join(known)} or None, and is {its!r}"


_IN_ORDER = [
    (kind, tuple(kind.model_fields))
    for _, kind in sorted(TECHNIQUES.items(), key=lambda item: (item[1].stage, item[0]))
]
"""The techniques in the order in which they are applied, and their settings."""
_MADE: dict[tuple[type[Technique], str], Technique] = {}
"""Techniques by their class and the values of their settings: a space has few of each, and many combinations."""


def _techniques(settings: RunSettings) -> list[Technique]:
    """Return every technique with its settings, sorted by stage and name."""
    made = []
    for kind, names in _IN_ORDER:
        values = {name: getattr(settings, name) for name in names}
        key = kind, repr(values)
        if key not in _MADE:
            _MADE[key] = kind(**values)
        made.append(_MADE[key])
    return made


_NUM_SEQUENCES: dict[str, int] = {}
"""Sequences to train on, by the settings that decide them."""


def family_of(name: str, task: str | None = None) -> str:
    """Return the name of the family of model `name`; the families' own names come before folders and hub names.

    Without a `task` it is that of which the model's configuration says that it is for.

    Raises:
        InvalidInputError: there is no such model, or it cannot be trained for the task.

    """
    for key, family in MODELS.items():
        if name in family.names:
            if task in (None, key) or (key == "causal_lm" and task in OF_PAIRS):
                return task or key
            raise InvalidInputError(f"{name} is trained for {key}, and task is {task}; set task=none, or name a folder")
    check_names_no_file(name)
    if task is not None and not is_function_name(name):
        return task
    for key, family in MODELS.items():
        if family.opens(name):
            return key
    names = [name for family in MODELS.values() for name in family.names]
    raise InvalidInputError(
        f"no model is called {name!r}; the models are {', '.join(names)}, a local folder, owner/name of the hub, or "
        "path.to.module:function of your own"
    )


def corpus_of(name: str) -> str:
    """Return the name of the corpus class for `name`."""
    if name in CORPORA:
        return name
    check_names_no_file(name)
    for key, corpus in CORPORA.items():
        if corpus.opens(name):
            return key
    raise InvalidInputError(
        f"no corpus is called {name!r}; the corpora are {', '.join(CORPORA)}, or path.to.module:function of your own"
    )


def check_settings(experiment: Experiment) -> None:
    """Raise InvalidInputError if settings of a run, its model and its corpus contradict each other."""
    settings = experiment.settings
    corpus_of(settings.corpus)
    longest = experiment.description.max_sequence_length
    if longest is not None and settings.sequence_length > longest:
        raise InvalidInputError(
            f"sequence_length must fit the model's positions: {settings.sequence_length} is more than the {longest} of "
            f"{settings.model}; set sequence_length={longest} or less"
        )
    if experiment.description.kind != experiment.corpus.kind:
        suited = [name for name, corpus in CORPORA.items() if corpus.kind == experiment.description.kind]
        named = ", ".join(one.name for one in experiment.description.inputs[:-1])
        raise InvalidInputError(
            f"{settings.model} takes {experiment.description.kind}{named and f' ({named})'}, and the corpus "
            f"{settings.corpus} has {experiment.corpus.kind}; set corpus={' or '.join(suited)}"
        )
    experiment.budget_bytes  # noqa: B018  raises where it cannot be parsed


def with_length(experiment: Experiment) -> Experiment:
    """Return the same with its optimizer steps: all of them, those of warm-up, and those that are not timed.

    Raises:
        InvalidInputError: settings say different lengths, or no step is timed.

    """
    settings = experiment.settings
    given, changes = settings.model_fields_set, dict[str, Any]()
    if settings.num_epochs is not None:
        num_sequences = _num_sequences(experiment)
        num_steps = max(1, math.ceil(settings.num_epochs * num_sequences / experiment.effective_batch_size))
        of_epochs = f"num_epochs={settings.num_epochs:g} of {num_sequences:,} sequences"
        changes["num_steps"] = _agreeing(settings, "num_steps", num_steps, of_epochs)
    num_steps = changes.get("num_steps", settings.num_steps)
    if settings.learning_rate_warmup_ratio is not None:
        num_warmup_steps = math.ceil(settings.learning_rate_warmup_ratio * num_steps)
        share = f"learning_rate_warmup_ratio={settings.learning_rate_warmup_ratio:g} of {num_steps} steps"
        changes["learning_rate_warmup_steps"] = _agreeing(
            settings, "learning_rate_warmup_steps", num_warmup_steps, share
        )
    num_untimed = settings.timing_warmup_steps
    if "timing_warmup_steps" not in given:
        num_untimed = min(num_untimed, max(WATCHED_STEPS, num_steps - 1))
        changes["timing_warmup_steps"] = num_untimed
    if reason := why_untimed("num_steps", num_steps, num_untimed):
        raise InvalidInputError(reason)
    return Experiment(settings.model_copy(update=changes))


def _agreeing(settings: RunSettings, name: str, num_steps: int, source: str) -> int:
    """Return the steps that follow from another setting; refuse other steps that are given beside it."""
    own = getattr(settings, name)
    if name in settings.model_fields_set and own != num_steps:
        raise InvalidInputError(
            f"{name} must agree with what it follows from: {source} are {num_steps}, and {name} is {own}; give one of "
            "both"
        )
    return num_steps


def _num_sequences(experiment: Experiment) -> int:
    """Return the sequences of the corpus to train on; configurations that differ in techniques alone share it."""
    settings = experiment.settings
    key = repr((settings.model_dump(include={*RunSettings.model_fields}), experiment.model, experiment.corpus))
    if key not in _NUM_SEQUENCES:
        _NUM_SEQUENCES[key] = len(experiment.read_corpus().train)
    return _NUM_SEQUENCES[key]


def why_untimed(name: str, num_steps: int, timing_warmup_steps: int) -> str | None:
    """Return the error if no step is timed with `num_steps` optimizer steps, the value of setting `name`, or None."""
    if num_steps > timing_warmup_steps:
        return None
    return (
        f"{name} must be more than timing_warmup_steps, or no step is timed: {num_steps} is not more than "
        f"{timing_warmup_steps}; set {name}={timing_warmup_steps + 1} or more"
    )


def _with_room_for_evaluation(prepared: Prepared, num_evaluated: int) -> Prepared:
    """Return the corpus with its training sequences padded to the longest of those that are evaluated, where one is
    longer: a step of that length needs more than their evaluation, which keeps no activations and has no gradients.
    """
    train, held_out = prepared.train, prepared.held_out
    if not isinstance(train, DynamicallyPaddedSequences) or not isinstance(held_out, DynamicallyPaddedSequences):
        return prepared
    longest = int(held_out.lengths[:num_evaluated].max(initial=0))
    return replace(prepared, train=train.padded_to(longest))


def _check_corpus(prepared: Prepared, experiment: Experiment) -> None:
    settings, needed = experiment.settings, experiment.effective_batch_size
    if len(prepared.train) < needed:
        raise InvalidInputError(
            f"the text must fill one batch: {prepared.source} has {len(prepared.train)} sequences of "
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
            f"the corpus's vocabulary must not exceed the model's: the model has {own} tokens, and the corpus "
            f"{prepared.vocabulary_size}; set vocabulary_size={own} or less"
        )
