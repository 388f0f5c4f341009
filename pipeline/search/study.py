"""The study in Optuna's own storage: what has been measured, by whom, and under which conditions."""

import datetime
import math
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
import psutil
from optuna.samplers import PartialFixedSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from pipeline.contracts import InvalidInputError, Outcome, Result
from pipeline.search.judge import Verdict
from pipeline.search.space import Choice, Space

IDENTITY, OWNER, OUTCOME, DETAIL, FIGURES, LOWER_BOUND = (
    "identity",
    "owner",
    "outcome",
    "detail",
    "figures",
    "is_lower_bound",
)
CONSTRAINT = "bytes_over_budget"
SECONDS_TO_SAY_WHO = 60.0
"""A process that has not put its name on its trial after so long was killed before it could."""


class StoredStudy:
    """One study; other processes may add to it at the same time."""

    def __init__(self, storage: str, name: str, directions: Sequence[str], identity: Mapping[str, Any]) -> None:
        """Open the study, or make it.

        Raises:
            InvalidInputError: the storage cannot be reached, or its study measured under other conditions.

        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            self._study = optuna.create_study(
                storage=storage, study_name=name, directions=list(directions), load_if_exists=True
            )
            self._refuse_other(identity)
        except InvalidInputError:
            raise
        except Exception as error:  # whatever the database and its driver raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise InvalidInputError(
                f"the study's storage must be reachable, and {storage} is not ({first}); set storage=sqlite:///optuna.db"
            ) from error
        self.directions = directions
        self._free_abandoned()

    @property
    def trials(self) -> list[FrozenTrial]:
        """Trials whose outcome is known, whatever it is."""
        known = (trial for trial in self._study.trials if trial.state.is_finished())
        return [trial for trial in known if trial.user_attrs.get(OUTCOME, Outcome.INTERRUPTED) != Outcome.INTERRUPTED]

    @property
    def taken(self) -> list[Choice]:
        """Configurations measured already, or being measured now."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [dict(trial.params) for trial in (*self.trials, *running)]

    def start(self, choice: Choice, space: Space) -> optuna.Trial:
        """Return a running trial of this configuration."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = PartialFixedSampler(dict(choice), RandomSampler())
        trial = self._study.ask(space.distributions)
        trial.set_user_attr(OWNER, _owner())
        return trial

    def finish(self, trial: optuna.Trial, verdict: Verdict, result: Result, figures: Mapping[str, float]) -> None:
        """Store what was measured; a trial that is killed before the end of this counts as abandoned."""
        trial.set_user_attr(FIGURES, dict(figures))
        trial.set_user_attr(DETAIL, result.detail)
        trial.set_user_attr(LOWER_BOUND, verdict.is_lower_bound)
        trial.set_user_attr(OUTCOME, result.outcome.value)
        if verdict.violation_bytes is not None:
            trial.set_constraint(CONSTRAINT, verdict.violation_bytes)
        if verdict.state is TrialState.COMPLETE:
            values = [value for value in (verdict.tokens_per_second, verdict.peak_bytes) if value is not None]
            self._study.tell(trial, values[: len(self.directions)])
        else:
            self._study.tell(trial, state=verdict.state)

    def abandon(self, number: int) -> None:
        """Close a trial that was not measured to its end, so that its configuration may be tried again."""
        trial = optuna.Trial(self._study, self._study.trials[number]._trial_id)
        trial.set_user_attr(OUTCOME, Outcome.INTERRUPTED.value)
        self._study.tell(number, state=TrialState.FAIL)

    def _refuse_other(self, identity: Mapping[str, Any]) -> None:
        """Keep what this study measures with it, and refuse to mix it with anything else."""
        stored = self._study.user_attrs.get(IDENTITY)
        if stored is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
            return
        differing = sorted(name for name in {*stored, *identity} if stored.get(name) != identity.get(name))
        if differing:
            changes = "; ".join(f"{name} is {identity.get(name)}, and was {stored.get(name)}" for name in differing)
            raise InvalidInputError(
                f"the study {self._study.study_name!r} was measured under other conditions: {changes}; set study=NAME "
                "to begin another, or go back to what was"
            )

    def _free_abandoned(self) -> None:
        """Close the trials that a killed process of this machine has left running."""
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get(OWNER)
            if _is_gone(owner) if owner else _age_seconds(trial) > SECONDS_TO_SAY_WHO:
                self.abandon(trial.number)


def _owner() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to be gone: of other machines nothing is known."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(owner["pid"]).create_time() != owner["started"])
    except psutil.NoSuchProcess:
        return True


def _age_seconds(trial: FrozenTrial) -> float:
    start = trial.datetime_start
    return (datetime.datetime.now() - start).total_seconds() if start else math.inf
