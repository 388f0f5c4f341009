"""The settings that the entry point `search` adds."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.config.space import SpaceSettings
from pipeline.searching.trial_length import PRECISION_PERCENT

AUTO_STUDY = "auto"
"""The study whose name follows from the identity of the problem."""


class SearchSettings(SpaceSettings):
    """The space, the method, and the storage of the study."""

    budget: str = "auto"
    """Memory budget: 8GiB, 8GB, 512MiB, 80%; auto: 80% of the free memory of a GPU, 256MiB on a CPU."""
    num_trials: PositiveInt = 48
    """Maximum number of trials of the study, including those of earlier sessions."""
    search_time_limit: PositiveFloat | None = None
    """Seconds after which no further trial starts; none: no limit."""
    sampler: Literal["predictive", "tpe", "gp", "random", "brute", "nsga2"] = "predictive"
    """predictive, which ends as soon as `gap` is reached, or one of Optuna's samplers."""
    gap: float = Field(default=0.01, gt=0, lt=1)
    """The predictive sampler ends once no unmeasured configuration is likely to be faster by this fraction."""
    fit_confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Minimum probability of fitting the budget for the predictive sampler to consider a configuration feasible."""
    precision_percent: PositiveFloat = PRECISION_PERCENT
    """A trial ends once half the 95 % interval of its median step time is below this percentage, or after num_steps."""
    verify_steps: NonNegativeInt = 10
    """Optimizer steps for which the answer and the baseline are trained again; 0: no verification."""
    verify_varying_steps: NonNegativeInt = 100
    """Steps for which a GPU trains the answer again where lengths vary, if more than verify_steps: memory fragments."""
    objectives: Literal["throughput", "pareto"] = "throughput"
    """throughput: the fastest within the budget; pareto: the Pareto front of memory and throughput as well."""
    workers: PositiveInt | None = None
    """Trials at the same time on this machine, each on its own GPU; none: one for each visible GPU, one on a CPU."""
    executor: Literal["local", "ray"] = "local"
    """local: workers are on this machine; ray: each trial is a task of a Ray cluster (needs `pip install '.[ray]'`)."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as auto; none: one is started on this machine."""
    worker_timeout: int = Field(default=60, ge=6)
    """Seconds without a heartbeat after which a worker counts as dead, and its trial is measured by another."""
    storage: str = "sqlite:///optuna.db"
    """URL of the Optuna storage that keeps the study."""
    study: str = AUTO_STUDY
    """Name of the study in that storage; auto: derived from the settings, so the same command resumes its study."""
