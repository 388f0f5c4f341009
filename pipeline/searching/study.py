"""The study in Optuna's storage: its trials, the queue of those to come, and the conditions of its measurements."""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import asdict
from datetime import datetime, timedelta
from queue import SimpleQueue
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat, get_heartbeat_thread
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.base.errors import InvalidInputError, differing
from pipeline.base.results import Outcome
from pipeline.config.space import Choice, Space
from pipeline.runtime.ownership import this_process
from pipeline.runtime.run import WorkerLostError
from pipeline.searching.optuna_samplers import distributions_of
from pipeline.searching.session import SESSION, Session
from pipeline.searching.settings import AUTO_STUDY
from pipeline.searching.storage import open_storage, reachable
from pipeline.searching.trial_record import DETAIL, METRICS, NUM_EARLIER_RUNS, OUTCOME, is_known
from pipeline.searching.trials import Proposal

IDENTITY, KEY, WORKER = "identity", "key", "worker"
"""Attributes of a study, what distinguishes it from those of its name elsewhere, and of a trial that was taken."""
PREDICTED, TRY = "predicted_seconds_per_step", "try"
"""Attributes of a queued trial, beside NUM_EARLIER_RUNS: its predicted time, and how often it began."""
OBJECTIVES = ("tokens per second", "peak bytes")
"""Names of the objectives, which Optuna's dashboard and plots show."""
PLAIN_NAME = "fitproof"
"""First part of an automatic name."""
HEARTBEATS_PER_TIMEOUT = 12
"""Heartbeats of a worker within the time after which it counts as dead."""
TRIES = 2
"""How often a configuration is begun by workers that die before it is known that it is the configuration's fault."""

OPEN = (TrialState.RUNNING, TrialState.WAITING)
"""States of trials that have not ended."""


Measure = Callable[[int, Proposal], FrozenTrial]
"""(number of the trial, its configuration) -> what its run came to."""


class StoredStudy:
    """One study, to which other threads, processes and machines may add trials at the same time.

    Workers share a queue: its trials in Optuna's state WAITING. A worker adds a configuration to the queue and runs
    what is first in it. The trial of a worker that died, which no longer stores heartbeats (Optuna's),
    returns to the queue once.
    """

    def __init__(
        self,
        storage: str,
        name: str,
        directions: Sequence[str],
        identity: Mapping[str, Any],
        worker_timeout: int = 60,
    ) -> None:
        """Open the study, or create it; `auto` names it by its identity.

        A worker counts as dead after `worker_timeout` seconds without a heartbeat.

        Raises:
            InvalidInputError: the storage cannot be reached, or the study was measured under other conditions.

        """
        self.directions = directions
        self._storage, self._worker_timeout = storage, worker_timeout
        self._lost = SimpleQueue[tuple[int, bool]]()
        with reachable(storage, Exception):  # any error of the database and its driver
            opened = open_storage(
                storage,
                heartbeat_interval=max(1, worker_timeout // HEARTBEATS_PER_TIMEOUT),
                grace_period=worker_timeout,
                heartbeat_stale_trial_callback=self._queue_again,
            )
            full_name = _name_of(identity, opened) if name == AUTO_STUDY else name
            self._study = optuna.create_study(
                storage=opened, study_name=full_name, directions=list(directions), load_if_exists=True
            )
            if self._study.metric_names is None:
                self._study.set_metric_names(list(OBJECTIVES[: len(directions)]))
            self._refuse_other(identity)
            if KEY not in self._study.user_attrs:
                self._study.set_user_attr(KEY, uuid.uuid4().hex)
            self.free_stale()
        self._study.sampler = RandomSampler()  # proposes nothing: all parameters of a queued trial are known

    @property
    def optuna_study(self) -> optuna.Study:
        """Optuna's own study."""
        return self._study

    @property
    def name(self) -> str:
        """Name of the study in its storage."""
        return str(self._study.study_name)

    @property
    def key(self) -> str:
        """What distinguishes the study from those of the same name in other storages."""
        return str(self._study.user_attrs[KEY])

    @property
    def trials(self) -> list[FrozenTrial]:
        """Trials that ended, with any outcome but an interruption."""
        return [trial for trial in self._study.trials if is_known(trial)]

    @property
    def states(self) -> list[TrialState]:
        """The state of each trial: what is proposed changes only with them."""
        return [trial.state for trial in self._study.get_trials(deepcopy=False)]

    @property
    def taken(self) -> list[Choice]:
        """Configurations that are measured, being measured, or queued."""
        return [dict(trial.params) for trial in (*self.trials, *self._open_trials)]

    @property
    def num_open(self) -> int:
        """Number of trials that any worker is measuring, and of those in the queue."""
        return len(self._open_trials)

    @property
    def num_waiting(self) -> int:
        """Number of trials in the queue."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    @property
    def _open_trials(self) -> list[FrozenTrial]:
        return list(self._study.get_trials(deepcopy=False, states=OPEN))

    def announce(self, session: Session) -> None:
        """Store the search that begins now, so that other workers can join it."""
        self._study.set_user_attr(SESSION, asdict(session))

    def enqueue(self, one: Proposal, space: Space) -> bool:
        """Add a configuration to the queue; return False if it is taken.

        A measured configuration gets a further trial only as a repeat, and none while one of its trials is open.
        """
        choice = dict(one.choice)
        num_earlier = self.taken.count(choice)
        if num_earlier and (not one.is_repeat or choice in [trial.params for trial in self._open_trials]):
            return False
        self._study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=choice,
                distributions=distributions_of(space),
                user_attrs={NUM_EARLIER_RUNS: num_earlier, PREDICTED: one.predicted_seconds},
            )
        )
        return True

    def run_next(self, measure: Measure, total: int, began: Callable[[], None]) -> int | None:
        """Take the first trial of the queue, measure and store it; return its number.

        `began` is called once it is taken. None is returned if the queue was empty, if `total` trials are reached, if a
        trial with a lower number has the same configuration, since two workers may queue the same at the same moment,
        if the process that hosted the run died, or if no heartbeat was stored for so long that another worker has
        closed the trial.
        """
        self.free_stale()
        trial, storage = self._study.ask(), self._study._storage
        with get_heartbeat_thread(trial._trial_id, storage):
            try:
                if isinstance(storage, BaseHeartbeat):  # not left to Optuna's thread, which begins some time
                    storage.record_heartbeat(trial._trial_id)
                trial.set_user_attr(WORKER, this_process())
                began()
                if not trial.params or self._is_superfluous(trial, total):
                    self._interrupt(trial)
                    return None
                known = trial.user_attrs
                queued = Proposal(dict(trial.params), known.get(PREDICTED), bool(known.get(NUM_EARLIER_RUNS)))
                return trial.number if self._store(trial, measure(trial.number, queued)) else None
            except WorkerLostError:
                if self._interrupt(trial):
                    self._queue_again(self._study, self._study.trials[trial.number])
                return None
            except BaseException:
                self._interrupt(trial)
                raise

    def add(self, choice: Choice, space: Space, record: FrozenTrial) -> bool:
        """Store a run that was measured outside of the queue; return False if its configuration is taken."""
        if dict(choice) in self.taken:
            return False
        record = copy(record)
        record.params, record.distributions = dict(choice), distributions_of(space)
        self._study.add_trial(record)
        return True

    def _store(self, trial: optuna.Trial, record: FrozenTrial) -> bool:
        """Store the record of a trial, which stays running if the worker is killed meanwhile; False if it is closed."""
        try:
            for name, value in record.user_attrs.items():
                trial.set_user_attr(name, value)
            for name, value in record.constraints.items():
                trial.set_constraint(name, value)
            for step, speed in record.intermediate_values.items():
                trial.report(speed, step)
            self._study.tell(trial, record.values, record.state)
        except (UpdateFinishedTrialError, ValueError):
            if not self._study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                raise
            return False
        return True

    def _interrupt(self, trial: optuna.Trial) -> bool:
        """Close a trial whose configuration may be proposed again; return False if another worker has closed it."""
        try:
            trial.set_user_attr(OUTCOME, Outcome.INTERRUPTED.value)
            self._study.tell(trial, state=TrialState.FAIL)
        except (UpdateFinishedTrialError, ValueError):
            return False
        return True

    def _is_superfluous(self, trial: optuna.Trial, total: int) -> bool:
        """Whether earlier trials, known or open, have its configuration already, or are as many as there may be."""
        others = self._study.get_trials(deepcopy=False)[: trial.number]
        earlier = [one for one in others if is_known(one) or one.state in OPEN]
        is_taken = [one.params for one in earlier].count(trial.params) > trial.user_attrs.get(NUM_EARLIER_RUNS, 0)
        return is_taken or len(earlier) >= total

    def _refuse_other(self, identity: Mapping[str, Any]) -> None:
        """Store the identity with a new study, and refuse a study of another one."""
        stored = self._study.user_attrs.get(IDENTITY)
        if stored is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
            return
        names = differing(stored, identity)
        if names:
            changes = "; ".join(f"{name} is {identity.get(name)}, and was {stored.get(name)}" for name in names)
            raise InvalidInputError(
                f"the study {self._study.study_name!r} was measured under other conditions: {changes}; measure under "
                "the same conditions, or begin another study: set study=NAME, or leave study out"
            )

    def free_stale(self) -> None:
        """Close the trials of workers that died, and queue each one again that was not begun twice.

        Optuna finds those that stored a heartbeat and then none. A worker that was killed as it took a trial, before
        its first, is recognized by the attribute that it had no time to set.
        """
        fail_stale_trials(self._study)
        limit = datetime.now() - timedelta(seconds=2 * self._worker_timeout)  # clocks of machines differ
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if WORKER not in trial.user_attrs and trial.datetime_start is not None and trial.datetime_start < limit:
                try:
                    self._study.tell(trial.number, state=TrialState.FAIL)
                except (UpdateFinishedTrialError, ValueError):  # another worker has closed it at the same moment
                    continue
                self._queue_again(self._study, trial)

    def lost(self) -> Iterator[tuple[int, bool]]:
        """Yield the trials of dead workers that this process has found since the last call.

        Each as its number and whether its configuration is measured again.
        """
        while not self._lost.empty():
            yield self._lost.get()

    def _queue_again(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Queue the trial of a worker that died; of the second one that died with it, store that its run crashed."""
        if not trial.params:  # it was begun without a configuration
            return
        tries = trial.user_attrs.get(TRY, 1)
        self._lost.put((trial.number, tries < TRIES))
        shared = {"params": trial.params, "distributions": trial.distributions}
        if tries < TRIES:
            kept = {name: known for name, known in trial.user_attrs.items() if name in (NUM_EARLIER_RUNS, PREDICTED)}
            study.add_trial(create_trial(state=TrialState.WAITING, user_attrs={**kept, TRY: tries + 1}, **shared))
            return
        detail = f"the worker died in {tries} trials of this configuration"
        crashed = {METRICS: {}, DETAIL: detail, OUTCOME: Outcome.CRASHED.value}
        study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=crashed, **shared))

    def storage_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises InvalidInputError if the storage cannot be reached."""
        return reachable(self._storage, StorageInternalError)


def _name_of(identity: Mapping[str, Any], storage: BaseStorage) -> str:
    """Return the name of the study with this identity: PLAIN_NAME if that study has it, else one with its digest."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    plain = next((one for one in storage.get_all_studies() if one.study_name == PLAIN_NAME), None)
    has_identity = plain is not None and plain.user_attrs.get(IDENTITY) == identity
    return PLAIN_NAME if has_identity else f"{PLAIN_NAME}-{digest}"
