"""The settings that the entry point `search` adds."""

from typing import Literal

from pydantic import PositiveInt

from pipeline.space import SpaceSettings


class SearchSettings(SpaceSettings):
    """What is searched, how, and where the study is kept."""

    budget: str = "auto"
    """Memory to stay within: 8GiB, 8GB, 512MiB, 80%; auto: 80% of a GPU, 256MiB on a CPU, in scale with gpt2-nano."""
    num_trials: PositiveInt = 12
    """Configurations to measure, those of earlier sessions of the study included."""
    sampler: Literal["tpe", "gp", "random", "brute", "nsga2"] = "tpe"
    """Optuna's sampler that proposes them."""
    objectives: Literal["throughput", "pareto"] = "throughput"
    """throughput: the fastest within the budget; pareto: the front of memory and throughput as well."""
    storage: str = "sqlite:///optuna.db"
    """URL of Optuna's own storage, in which a study outlives its process."""
    study: str = "headroom"
    """Name of the study in that storage; the same command resumes it."""
