"""The runs that checks ask for: each settings in each round once, and known again when the same command goes on."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from folklore.claim import Check, Claim, NotMeasuredError, Record
from folklore.scale import Scale
from folklore.verdict import Finding, find
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.runtime.environment import environment
from pipeline.tracking.history import CONDITIONS


@dataclass(frozen=True, kw_only=True)
class PlannedCheck:
    """A check of a claim with its runs."""

    claim: Claim
    check: Check
    rounds: tuple[Mapping[str, Experiment], ...]
    """The runs of each round by their keys, in the order of the check's; empty where this machine cannot run one."""
    reason: str | None
    """Why this machine cannot run one, if so."""

    def finding(self, records: Mapping[str, Record]) -> Finding:
        """Return what the records show."""
        return find(self.check, [self._found(keys, records) for keys in self.rounds])

    def records(self, records: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
        """Yield those of the records that are of its runs, with their keys."""
        return ((key, records[key]) for runs in self.rounds for key in runs if key in records)

    def _found(self, keys: Collection[str], records: Mapping[str, Record]) -> list[Record] | NotMeasuredError:
        if self.reason is not None:
            return NotMeasuredError(self.reason)
        if any(key not in records for key in keys):
            return NotMeasuredError("not run yet")
        return [records[key] for key in keys]


def plan(claims: Sequence[Claim], scale: Scale, num_rounds: int) -> list[PlannedCheck]:
    """Return every check of the claims with its runs."""
    return [_planned(claim, check, scale, num_rounds) for claim in claims for check in claim.checks(scale)]


def in_random_order(checks: Sequence[PlannedCheck], known: Collection[str]) -> list[tuple[str, Experiment]]:
    """Return the runs that are not known, with their keys: round by round, in each in random order."""
    todo: list[tuple[str, Experiment]] = []
    for number in range(len(checks[0].rounds)):
        runs = {key: run for one in checks for key, run in one.rounds[number].items()}
        left = [(key, run) for key, run in runs.items() if key not in known]
        todo += [left[place] for place in np.random.default_rng(number).permutation(len(left))]
    return todo


def key_of(experiment: Experiment) -> str:
    """Return what tells a run from all others: its settings, and what else its figures depend on."""
    about = environment(experiment.device)
    settings = {name: str(value) for name, value in experiment.params().items() if name != "output"}
    conditions = {name: about[name] for name in CONDITIONS if name in about} | {"threads": torch.get_num_threads()}
    return hashlib.sha256(json.dumps([settings, conditions], sort_keys=True).encode()).hexdigest()[:12]


def _planned(claim: Claim, check: Check, scale: Scale, num_rounds: int) -> PlannedCheck:
    rounds: list[dict[str, Experiment]] = []
    reason = None
    for number in range(num_rounds):
        try:
            experiments = [scale.experiment(settings, number) for settings in check.runs]
        except InvalidInputError as error:
            reason = str(error)
        else:
            reason = next(filter(None, (experiment.unsupported() for experiment in experiments)), None)
        rounds.append({} if reason else {key_of(experiment): experiment for experiment in experiments})
    return PlannedCheck(claim=claim, check=check, rounds=tuple(rounds), reason=reason)
