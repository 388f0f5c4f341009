"""Trials by one of Optuna's samplers: the baselines first, and no configuration twice."""

import random
import warnings
from collections.abc import Callable, Collection, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, BruteForceSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from pipeline.config.space import Choice, Space

SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, multivariate=True),
    "gp": lambda seed: GPSampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
    "brute": lambda seed: BruteForceSampler(seed=seed),
    "nsga2": lambda seed: NSGAIISampler(seed=seed),
}
PROPOSALS = 10
"""Proposals that are already taken before one of the others is drawn at random."""


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Return the dimensions as Optuna's distributions."""
    return {name: CategoricalDistribution(values) for name, values in space.dimensions.items()}


def choose(
    choices: Sequence[Choice],
    space: Space,
    finished: Sequence[FrozenTrial],
    taken: Collection[Choice],
    directions: Sequence[str],
    sampler: str,
    seed: int,
) -> Choice | None:
    """Return one of `choices` of `space` that is not among `taken`, or None if all are.

    The sampler proposes within a study in memory that has the finished trials, so that the stored study holds measured
    configurations only.
    """
    left = [choice for choice in choices if choice not in taken]
    if not left:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(directions=list(directions), sampler=SAMPLERS[sampler]((seed + len(taken)) % 2**32))
    if sampler != "random":  # the random sampler ignores them
        study.add_trials(finished)
    for _ in range(PROPOSALS):
        trial = study.ask(distributions_of(space))
        if trial.params in left:
            return dict(trial.params)
        study.tell(trial, state=TrialState.FAIL)
    return random.Random(seed + len(taken)).choice(left)  # noqa: S311  nothing secret


def next_baseline(baselines: Sequence[Choice], fitting: Collection[Choice], taken: Collection[Choice]) -> Choice | None:
    """Return the next baseline in a bisection for the largest micro-batch that fits.

    `baselines` has the largest micro-batch first. None is returned once the largest that fits is known.
    """
    fits = next((index for index, choice in enumerate(baselines) if choice in fitting), len(baselines))
    too_large = max((i for i, choice in enumerate(baselines[:fits]) if choice in taken), default=-1)
    possible = baselines[too_large + 1 : fits]
    return possible[len(possible) // 2] if possible else None
