"""The study in Optuna's storage: its trials, their owners and the conditions of its measurements."""

import hashlib
import json
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result
from pipeline.config.space import Choice, Space
from pipeline.runtime.ownership import is_gone, is_here, this_process
from pipeline.searching.acquisition import Acquisition
from pipeline.searching.judge import CONSTRAINT, LOWER_BOUND, OUTCOME, Verdict
from pipeline.searching.optuna_samplers import distributions_of
from pipeline.searching.results import Measurement
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.settings import AUTO_STUDY
from pipeline.searching.storage import open_storage, reachable

IDENTITY, OWNER, DETAIL, METRICS = "identity", "owner", "detail", "metrics"
OBJECTIVES = ("tokens per second", "peak bytes")
"""Names of the objectives, which Optuna's dashboard and plots show."""
COMPARED_METRICS = ("peak_allocated_mib", "peak_reserved_mib", "seconds_per_step", "common_steps_loss")
"""Metrics that are attributes of their own, since Optuna's dashboard plots only attributes that are numbers."""
PLAIN_NAME = "headroom"
"""First part of an automatic name."""
MOST_INTERMEDIATE_VALUES = 8
"""Optimizer steps of a trial whose speed is stored, at most: each takes about 16 ms in SQLite."""
KEY = "key"
"""Attribute that identifies a trial that is being started among those of other processes."""


class StoredStudy:
    """One study, to which other processes may add trials at the same time."""

    def __init__(self, storage: str, name: str, directions: Sequence[str], identity: Mapping[str, Any]) -> None:
        """Open the study, or create it; `auto` names it by its identity.

        Raises:
            InvalidInputError: the storage cannot be reached, or the study was measured under other conditions.

        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with reachable(storage, Exception):  # any error of the database and its driver
            opened = open_storage(storage)
            full_name = _name_of(identity, opened) if name == AUTO_STUDY else name
            self._study = optuna.create_study(
                storage=opened, study_name=full_name, directions=list(directions), load_if_exists=True
            )
            _name_objectives(self._study, OBJECTIVES[: len(directions)])
            self._refuse_other(identity)
            self.free_abandoned()
        self.directions = directions
        self._storage = storage

    @property
    def name(self) -> str:
        """Name of the study in its storage."""
        return str(self._study.study_name)

    @property
    def trials(self) -> list[FrozenTrial]:
        """Trials that ended, with any outcome."""
        return [trial for trial in self._study.trials if _is_known(trial)]

    @property
    def taken(self) -> list[Choice]:
        """Configurations that are measured, or being measured."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [dict(trial.params) for trial in (*self.trials, *running)]

    @property
    def num_running_here(self) -> int:
        """Number of trials that processes of this machine are measuring."""
        return sum(_runs_here(trial) for trial in self._study.get_trials(deepcopy=False))

    def evaluate(self, sampler: PredictiveSampler, extra: Sequence[Measurement] = ()) -> Acquisition:
        """Return the sampler's candidates evaluated on all trials, and on the measurements `extra`."""
        return sampler.evaluate(self._study, extra=extra)

    def start(self, choice: Choice, space: Space, total: int, *, repeat: bool = False) -> optuna.Trial | None:
        """Return a running trial of this configuration; None if another process has it, or `total` is reached.

        A measured configuration gets a second trial only as a `repeat`, and no third. A trial is stored at once with
        its number, configuration and owner: of two processes that choose the same at the same moment, the one with the
        lower number has it.
        """
        if self.taken.count(dict(choice)) > repeat:
            return None
        key = uuid.uuid4().hex
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(choice),
            distributions=dict(distributions_of(space)),
            user_attrs={OWNER: this_process(), KEY: key},
        )
        self._study.add_trial(trial)
        trials = self._study.get_trials(deepcopy=False)
        mine = next(trial for trial in trials if trial.user_attrs.get(KEY) == key)
        earlier = [trial for trial in trials[: mine.number] if _is_known(trial) or trial.state is TrialState.RUNNING]
        is_taken = [trial.params for trial in earlier].count(mine.params) > repeat
        if is_taken or sum(_is_known(trial) or _runs_here(trial) for trial in earlier) >= total:
            self.abandon(mine.number)
            return None
        return optuna.Trial(self._study, mine._trial_id)

    def finish(self, trial: optuna.Trial, verdict: Verdict, result: Result, metrics: Mapping[str, float]) -> None:
        """Store the result of a trial; a process that is killed before the last line leaves it abandoned."""
        trial.set_user_attr(METRICS, dict(metrics))
        for name in set(COMPARED_METRICS) & set(metrics):
            trial.set_user_attr(name, metrics[name])
        trial.set_user_attr(DETAIL, result.detail)
        trial.set_user_attr(LOWER_BOUND, verdict.is_lower_bound)
        trial.set_user_attr(OUTCOME, result.outcome.value)
        if verdict.violation_bytes is not None:
            trial.set_constraint(CONSTRAINT, verdict.violation_bytes)
            trial.set_user_attr(CONSTRAINT, verdict.violation_bytes)  # for optuna-dashboard, which shows no constraints
        if verdict.state is TrialState.COMPLETE:
            values = [value for value in (verdict.tokens_per_second, verdict.peak_bytes) if value is not None]
            if len(self.directions) == 1:  # Optuna takes intermediate values of one objective only
                for record in result.steps[:: len(result.steps) // MOST_INTERMEDIATE_VALUES + 1]:
                    trial.report(record.tokens / record.seconds, record.step)
            self._study.tell(trial, values[: len(self.directions)])
        else:
            self._study.tell(trial, state=verdict.state)

    def abandon(self, number: int) -> None:
        """Close an interrupted trial, so that its configuration may be proposed again."""
        with suppress(UpdateFinishedTrialError):  # another process has closed it at the same moment
            trial = optuna.Trial(self._study, self._study.trials[number]._trial_id)
            trial.set_user_attr(OUTCOME, Outcome.INTERRUPTED.value)
            self._study.tell(number, state=TrialState.FAIL)

    def _refuse_other(self, identity: Mapping[str, Any]) -> None:
        """Store the identity with a new study, and refuse a study of another one."""
        stored = self._study.user_attrs.get(IDENTITY)
        if stored is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
            return
        differing = sorted(name for name in {*stored, *identity} if stored.get(name) != identity.get(name))
        if differing:
            changes = "; ".join(f"{name} is {identity.get(name)}, and was {stored.get(name)}" for name in differing)
            raise InvalidInputError(
                f"the study {self._study.study_name!r} was measured under other conditions: {changes}; set study=NAME "
                "to begin another, or leave study out"
            )

    def free_abandoned(self) -> None:
        """Close the running trials of processes that ended."""
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get(OWNER)
            if owner is None or is_gone(owner):
                self.abandon(trial.number)

    def storage_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises InvalidInputError if the storage cannot be reached."""
        return reachable(self._storage, StorageInternalError)


def _name_objectives(study: optuna.Study, names: Sequence[str]) -> None:
    """Store the names of the objectives with a new study."""
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(names))


def _name_of(identity: Mapping[str, Any], storage: BaseStorage) -> str:
    """Return the name of the study with this identity: PLAIN_NAME if that study has it, else one with its digest."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    plain = next((one for one in storage.get_all_studies() if one.study_name == PLAIN_NAME), None)
    has_identity = plain is not None and plain.user_attrs.get(IDENTITY) == identity
    return PLAIN_NAME if has_identity else f"{PLAIN_NAME}-{digest}"


def _is_known(trial: FrozenTrial) -> bool:
    """Whether a trial ended without being interrupted; a study of an earlier version has no METRICS."""
    interrupted = Outcome.INTERRUPTED
    is_whole = METRICS in trial.user_attrs and trial.user_attrs.get(OUTCOME, interrupted) != interrupted
    return bool(trial.state.is_finished() and is_whole)


def _runs_here(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.RUNNING and OWNER in trial.user_attrs and is_here(trial.user_attrs[OWNER])
