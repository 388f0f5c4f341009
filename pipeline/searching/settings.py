"""The settings that the entry point `search` adds."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.config.space import SpaceSettings


class SearchSettings(SpaceSettings):
    """What is searched, how, and where the study is kept."""

    budget: str = "auto"
    """Memory to stay within: 8GiB, 8GB, 512MiB, 80%; auto: 80% of a GPU, 256MiB on a CPU, in scale with gpt2-nano."""
    num_trials: PositiveInt = 24
    """Trials at most, those of earlier sessions of the study included."""
    search_time_limit: PositiveFloat | None = None
    """Seconds after which no further trial is begun; none: no limit."""
    sampler: Literal["predictive", "tpe", "gp", "random", "brute", "nsga2"] = "predictive"
    """What proposes them: predictive, which ends as soon as its answer is proven, or one of Optuna's own."""
    gap: float = Field(default=0.01, gt=0, lt=1)
    """Share of its time by which predictive's answer may be slower than the best configuration."""
    fit_confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Probability of fitting with which predictive tries a configuration without further reason."""
    precision_percent: PositiveFloat = 2.0
    """A trial ends once its median time per step is known this well (half its 95 % interval), or after num_steps."""
    verify_steps: NonNegativeInt = 10
    """Optimizer steps for which the answer is trained again beside the naive configuration; 0: it is not."""
    objectives: Literal["throughput", "pareto"] = "throughput"
    """throughput: the fastest within the budget; pareto: the front of memory and throughput as well."""
    storage: str = "sqlite:///optuna.db"
    """URL of Optuna's own storage, in which a study outlives its process."""
    study: str = "headroom"
    """Name of the study in that storage; the same command resumes it."""
