"""What benchmarks/peers.py compares: models, configurations, the order of runs, and their conditions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from overhead import TINY

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import nested
from pipeline.runtime.environment import environment

FRAMEWORKS = ("transformers", "accelerate", "lightning")
"""The packages of the peers."""
DECISIVE = ("device_name", "threads", "driver", "cuda", "allocator", "python", "torch", *FRAMEWORKS)
"""Conditions besides the settings: runs that differ in one of these are not put into one file."""
SHOWN = ("cores", "host_memory_mib", "device_memory_mib", "system", *DECISIVE)
MODELS = {"cpu": ("gpt2-nano",), "cuda": ("gpt2", "gpt2-medium")}
LENGTHS = {"cpu": 256, "cuda": 512}
"""Tokens in a sequence."""
TINY_LENGTH = 128
"""That of the tiny form: some of the corpus's documents are shorter, and padded."""
ALIKE = {"eval_steps": 0, "causal_lm.dropout": 0.0}
"""Settings of every run."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": {"micro_batch_size": 8},
    "bf16_checkpointed": {
        "precision": "bf16",
        "micro_batch_size": 2,
        "accumulation_steps": 4,
        "checkpointing": "every_layer",
    },
    "padded": {"sequences": "fixed_length", "micro_batch_size": 2, "accumulation_steps": 4},
}
CUDA_MICRO_BATCH_SIZE = 8
"""Sequences in a forward pass on a GPU, in all configurations."""


@dataclass(frozen=True)
class Case:
    """A model in a configuration."""

    model: str
    configuration: str
    experiment: Experiment


def about_machine(device: torch.device) -> dict[str, str]:
    """Return the conditions besides the settings, by name; what is not available is left out."""
    versions = {name: version(name) for name in FRAMEWORKS}
    about = {**environment(device), **versions, "threads": str(torch.get_num_threads())}
    return {name: about[name] for name in SHOWN if name in about}


def cases_of(
    device: torch.device, models: Sequence[str], configurations: Sequence[str], num_steps: int, tiny: bool
) -> list[Case]:
    """Return a case for each model in each configuration; raise InvalidInputError if one cannot be trained."""
    common = {**ALIKE, "device": str(device), "num_steps": num_steps, "sequence_length": LENGTHS[device.type]}
    if tiny:
        common |= {**TINY, "sequence_length": TINY_LENGTH}
    cases = []
    for model in models:
        for name in configurations:
            settings = {**common, "model": model, **CONFIGURATIONS[name]}
            if device.type == "cuda":
                settings["micro_batch_size"] = CUDA_MICRO_BATCH_SIZE
            experiment = make_experiment(nested(settings), "main")
            reason = experiment.unsupported()
            if reason:
                raise InvalidInputError(f"{reason}; leave {name} out with --configurations")
            experiment.prepare()
            cases.append(Case(model, name, experiment))
    return cases


def conditions_of(cases: Sequence[Case], about: Mapping[str, str]) -> dict[str, str]:
    """Return all conditions of a case, by its name; runs under other conditions are not comparable."""
    decisive = {name: about[name] for name in DECISIVE if name in about}
    return {
        f"{case.model} {case.configuration}": json.dumps({**case.experiment.params(), **decisive, "output": ""})
        for case in cases
    }


def schedule(cases: Sequence[Case], peers: Sequence[str], num_runs: int) -> Iterator[tuple[int, Case, str]]:
    """Yield (round, case, peer): in a round each case once in random order, and in a case each peer."""
    for number in range(num_runs):
        random = np.random.default_rng(number)
        for index in random.permutation(len(cases)):
            for peer in random.permutation(list(peers)):
                yield number, cases[index], str(peer)
