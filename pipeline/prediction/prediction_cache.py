"""Predictions in the cache folder: found by a key, and the least recently used removed above a limit."""

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.files import cache_folder, write_atomically
from pipeline.base.units import MIB
from pipeline.base.user_functions import module_digest
from pipeline.config.experiment import Experiment
from pipeline.memory.allocator_options import options_in
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.environment import version_of
from pipeline.training.typical_step import TypicalStep, typical_step

LIMIT_BYTES = 1024 * MIB
"""Size above which the least recently used files are removed."""
IN_USE_SECONDS = 3600
"""Files used since then are kept: another process may be about to read them."""
PATTERN = "prediction-*"
IRRELEVANT = (
    *("device", "seed", "num_steps", "timing_warmup_steps", "learning_rate", "learning_rate_scaling"),
    *("base_batch_size", "learning_rate_warmup_steps", "learning_rate_warmup_ratio", "learning_rate_schedule"),
    *("num_epochs", "eval_steps", "gradient_underflow", "dataset_size", "budget", "time_limit", "output"),
    "expandable_segments",  # of which its environment variable tells
)
"""Settings that change no storage."""
OF_EXAMPLE = ("corpus", "vocabulary_size", "sequence_length", "sequences")
"""Settings that change storage only through the example and the vocabulary."""
PACKAGE = Path(__file__).parents[1]
CODE = ("base", "config", "data", "memory", "models", "prediction", "simulation", "techniques", "training")
"""Folders of the package that a prediction depends on."""
SOURCES = (".py", ".c", ".h", ".csv")
"""Files of them that it depends on; Python writes compiled ones beside them whenever it first imports one."""

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn", "liger-kernel", "triton")
"""Packages that a prediction depends on; some may be absent."""
CARD_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
"""Environment variables that set the sizes of workspaces on CUDA (torch's CUDA semantics)."""
CPU_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit oneDNN to some of a CPU's instructions."""

PREDICTION = TypeAdapter(Prediction)
T = TypeVar("T")


def cached(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None,
    predict: Callable[[Experiment, Prepared, TypicalStep], Prediction],
    asked: tuple[object, ...] = (),
    needs_breakdown: bool = False,
) -> Prediction:
    """Return the prediction that the cache has, else the one of `predict`, which is then cached.

    `predict` is given the run with random weights, its corpus, which is read unless it is `prepared`, and its typical
    step. `asked` is what else it depends on. Of a model that may change unseen (Model.identity()) none is cached.
    """
    prepared = prepared or experiment.read_corpus()
    typical = typical_step(experiment, prepared)
    experiment = experiment.with_random_weights("cpu")  # whose corpus is that of the model's own tokenizer
    identity = experiment.model.identity(experiment.settings.model)
    if identity is None:
        return predict(experiment, prepared, typical)
    file = prediction_file(experiment, target, prepared, identity, (*asked, typical))
    found = read_cached(file, PREDICTION)
    if found is None or (needs_breakdown and found.breakdown is None):
        found = predict(experiment, prepared, typical)
        write_cached(file, PREDICTION, found)
    return found


def prediction_file(
    experiment: Experiment, target: Hardware, prepared: Prepared, identity: str, asked: tuple[object, ...]
) -> Path:
    """Return the file of a prediction: its name is a digest of everything that the prediction depends on."""
    corpus = f"{experiment.settings.corpus}."
    left_out = {*IRRELEVANT, *OF_EXAMPLE}
    settings = {k: str(v) for k, v in experiment.params().items() if k not in left_out and not k.startswith(corpus)}
    example = {name: (tuple(part.shape), str(part.dtype), id(part)) for name, part in prepared.train.batch([0]).items()}
    tensors = [number for *_, number in example.values()]
    modules = {type(one).__module__ for one in experiment.techniques}
    parts = (
        sorted(settings.items()),
        identity,
        experiment.effective_batch_size,
        [(name, shape, dtype, tensors.index(number)) for name, (shape, dtype, number) in example.items()],
        prepared.vocabulary_size,
        target,
        _card_state(experiment) if target.capability else _cpu_state(),
        asked,
        code_digest(),
        [module_digest(name) for name in sorted(modules) if not name.startswith("pipeline.")],
    )
    return cache_file(repr(parts))


def cache_file(depends_on: str) -> Path:
    """Return the file of a prediction that depends on what a text says."""
    return cache_folder() / f"prediction-{hashlib.sha256(depends_on.encode()).hexdigest()[:20]}.json"


def read_cached(file: Path, kind: TypeAdapter[T]) -> T | None:
    """Return the prediction in a file, which is marked as used; None if there is no such file, or it is damaged."""
    try:
        os.utime(file)
        return kind.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_cached(file: Path, kind: TypeAdapter[T], prediction: T) -> None:
    """Write a prediction, unless the disk is full."""
    with contextlib.suppress(OSError):
        write_atomically(file, kind.dump_json(prediction))
    remove_least_used(file.parent)


@lru_cache
def remove_least_used(folder: Path) -> None:
    """Remove the least recently used files above the limit, once in a process: it looks at every file."""
    used: list[tuple[float, int, Path]] = []
    for file in folder.glob(PATTERN):
        with contextlib.suppress(OSError):  # another process has removed it, or it is another user's
            state = file.stat()
            used.append((state.st_mtime, state.st_size, file))
    total = sum(num_bytes for _, num_bytes, _ in used)
    for last_used, num_bytes, old in sorted(used):
        if total <= LIMIT_BYTES or last_used > time.time() - IN_USE_SECONDS:
            return
        with contextlib.suppress(OSError):
            old.unlink()
            total -= num_bytes


def _card_state(experiment: Experiment) -> tuple[object, ...]:
    """Return what the memory of a process on a card depends on besides the card."""
    return options_in({**os.environ, **experiment.environment}), *map(os.environ.get, CARD_VARIABLES)


def _cpu_state() -> tuple[object, ...]:
    """Return what the memory of operators depends on, on a CPU, besides its name."""
    return torch.get_num_threads(), torch.backends.mkldnn.enabled, *map(os.environ.get, CPU_VARIABLES)


@lru_cache
def code_digest(package: Path = PACKAGE) -> str:
    """Return a digest of the code that predictions depend on, and of the versions of Python and of PACKAGES."""
    versions = [platform.python_version(), *map(version_of, PACKAGES)]
    digest = hashlib.sha256(repr(versions).encode())
    for folder in CODE:
        for file in sorted((package / folder).rglob("*")):
            if file.suffix in SOURCES:
                digest.update(file.read_bytes())
    return digest.hexdigest()
