"""One search of several workers replayed on a table: each starts the next trial as soon as its own has ended."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.searching.acquisition import Acquisition, Rules, evaluate
from pipeline.searching.certificate import stated
from pipeline.searching.measurements import Measurements
from replay.search import Replayed, Search
from replay.table import read


@dataclass(frozen=True, kw_only=True)
class ReplayedInParallel:
    """The result of one search of several workers."""

    table: str
    budget_bytes: int
    workers: int
    seed: int
    trials: int
    repeats: int
    """Those that measured a configuration again."""
    over_budget: int
    seconds_to_near: float | None
    seconds_to_certificate: float | None
    """Until the search states a bound and nothing is left that is worth a trial, whatever still runs; None where its
    time model was not adequate."""
    certificate: float | None
    """The bound at that time."""
    certificate_holds: bool | None
    """Whether the optimum lies within it."""
    seconds: float
    """Until every trial has ended and the answer is confirmed."""
    bound: float | None
    """The bound at that time."""
    bound_holds: bool | None


def replay(file: Path, budget_bytes: int, workers: int, seed: int) -> ReplayedInParallel:
    """Replay the predictive sampler with some workers, without a limit of trials, until its answer was confirmed.

    With one worker it measures what search.predictive() measures, but for the limit.
    """
    rules = Rules(budget_bytes=budget_bytes)
    search = Search(read(file), "predictive", budget_bytes, seed)
    repeats, certified = 0, None
    while True:
        acquisition = _evaluate(file, search.measurements, rules)
        following = acquisition.next if acquisition.again is None else acquisition.again
        if following is not None and acquisition.is_adequate:
            repeats += acquisition.again is not None
            search.start(following)
            if search.num_running < workers:
                continue
        elif certified is None and acquisition.is_adequate and not acquisition.is_waiting:
            certified = _result(search, acquisition, rules)
        if search.num_running:
            search.finish()
        elif not search.confirm():
            break
    final = _result(search, acquisition, rules)
    return ReplayedInParallel(
        table=file.name,
        budget_bytes=budget_bytes,
        workers=workers,
        seed=seed,
        trials=final.trials,
        repeats=repeats,
        over_budget=final.over_budget,
        seconds_to_near=final.seconds_to_near,
        seconds_to_certificate=certified.seconds if certified else None,
        certificate=certified.bound if certified else None,
        certificate_holds=certified.certificate_holds if certified else None,
        seconds=final.seconds,
        bound=final.bound,
        bound_holds=final.certificate_holds,
    )


def _evaluate(file: Path, measured: Measurements, rules: Rules) -> Acquisition:
    if not measured.ended:
        return _at_start(file, measured.running, rules)
    return evaluate([entry.candidate for entry in read(file)], measured, rules)


@cache
def _at_start(file: Path, running: frozenset[int], rules: Rules) -> Acquisition:
    """Return the acquisition before a trial has ended, which is the same for every seed."""
    measured = Measurements(runs={}, peak_bytes={}, over_budget=frozenset(), failed=frozenset(), running=running)
    return evaluate([entry.candidate for entry in read(file)], measured, rules)


def _result(search: Search, acquisition: Acquisition, rules: Rules) -> Replayed:
    """Return the result of a search that ends now."""
    return search.result(stated(acquisition.bound, rules.gap) if acquisition.is_adequate else None)
