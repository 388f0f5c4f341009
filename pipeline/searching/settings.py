"""The settings of the entry point `search`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from pipeline.base.settings import RESULTS, Settings
from pipeline.config.settings import RunSettings
from pipeline.config.space import SpaceSettings, Value
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
    """Trials at the same time on this machine, each on GPUs of its own; none: as many as there are groups of visible
    GPUs for the largest world_size, one on a CPU."""
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

    @field_validator("ray_address")
    @classmethod
    def _is_of_ray(cls, value: str | None, others: ValidationInfo) -> str | None:
        if value is not None and others.data.get("executor") == "local":
            raise ValueError("must go with executor=ray, or be left out where executor is local")
        return value


class CommandSettings(Settings):
    """What a search of a command needs in addition."""

    command: str | None = None
    """A training command with placeholders to search; on the command line it follows `--`."""
    patch: str | None = None
    """Files of a command whose keys are dimensions, as 'FILE key=value,value ...'; each run reads a copy."""
    env: str | None = None
    """Environment variables that are dimensions of a command, as 'NAME=value,value ...'; an empty value sets none."""
    gpu: str | None = None
    """Of a command: the card whose memory counts, by simulation; none: that of this machine."""
    install: bool = False
    """Of a command: whether torch's CUDA build may be fetched (0.7 GB) for simulated cards."""


class CommandSearchSettings(CommandSettings, SearchSettings):
    """All settings of a search of a command, with search.yaml's defaults: it has the others of a run itself."""

    space: dict[str, list[Value] | Literal["divisors", "auto"]] = Field(default={})
    """Values of placeholders, by name."""
    effective_batch_size: PositiveInt
    """Sequences in one optimizer step."""
    world_size: PositiveInt | None = None
    """Processes that the command starts to train together; none: as the options of its launcher say, else one."""
    device: str = RunSettings.model_fields["device"].default
    """Device to train on: auto, cpu, cuda or cuda:N."""
    num_steps: PositiveInt = RunSettings.model_fields["num_steps"].default
    """Optimizer steps of a trial, at most."""
    timing_warmup_steps: int = Field(default=RunSettings.model_fields["timing_warmup_steps"].default, ge=2)
    """Optimizer steps at the start that are not timed."""
    time_limit: PositiveFloat | None = None
    """Seconds after which a run is stopped; none: no limit."""
    output: Path = RESULTS
    """Folder of the results on local disk."""


class SearchEntrySettings(CommandSettings, SearchSettings):
    """What the entry point adds to the settings of a run."""
