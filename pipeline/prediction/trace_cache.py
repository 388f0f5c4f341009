"""Recorded timelines in the cache folder: found by a key, and the least recently used removed above a limit."""

import contextlib
import hashlib
import os
import platform
import sys
import time
import zlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import TypeAdapter

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.files import cache_folder, write_atomically
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Timeline
from pipeline.prediction.prediction import Prediction
from pipeline.prediction.recent import Recent
from pipeline.prediction.timeline_file import dump, load
from pipeline.runtime.environment import allocator_configuration

LIMIT_BYTES = 1024 * MIB
"""Size above which the least recently used files are removed."""
IN_USE_SECONDS = 3600
"""Files used since then are kept: another process may be about to read them."""
PATTERN = "trace-*"
NUM_RECENT = 48
"""Number of timelines that a process keeps in memory."""
IRRELEVANT = """
    device seed num_steps timing_warmup_steps learning_rate learning_rate_scaling base_batch_size
    learning_rate_warmup_steps learning_rate_warmup_ratio learning_rate_schedule num_epochs weight_decay eval_steps
    gradient_underflow dataset_size budget time_limit output expandable_segments corpus vocabulary_size sequence_length
    sequences
"""
"""Settings, separated by blanks, that change no storage, or only through the example and the vocabulary."""
CODE = ("base", "config", "memory", "models", "prediction", "simulation", "techniques", "training")
"""Folders of the package that a timeline depends on."""

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn")
"""Packages that a timeline depends on; some may be absent."""
CARD_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
"""Environment variables that set the sizes of workspaces on CUDA (torch's CUDA semantics)."""
CPU_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit oneDNN to some of a CPU's instructions."""

PREDICTION = TypeAdapter(Prediction)

recent_traces: Recent[Path, Timeline] = Recent(NUM_RECENT)
"""The timelines that were read or written last, by their files."""


def trace_file(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int, identity: str) -> Path:
    """Return the file of a timeline with `num_rows` sequences in an optimizer step; `identity` is the model's."""
    return cache_folder() / f"trace-{_key(experiment, target, prepared, num_rows, identity)}.json.gz"


def prediction_file(
    experiment: Experiment, target: Hardware, prepared: Prepared, identity: str, asked: tuple[object, ...]
) -> Path:
    """Return the file of a prediction from a simulated card; `asked` is what else it depends on."""
    allocator = allocator_configuration({**os.environ, **experiment.environment})
    parts = (_key(experiment, target, prepared, experiment.effective_batch_size, identity), allocator, target, asked)
    return cache_folder() / f"trace-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.json"


def find_prediction(file: Path) -> Prediction | None:
    """Return the prediction in a file, which is marked as used; None if there is no such file, or it is damaged."""
    try:
        os.utime(file)
        return PREDICTION.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_prediction(file: Path, prediction: Prediction) -> None:
    """Write a prediction, unless the disk is full, and remove the least recently used files above the limit."""
    _write(file, PREDICTION.dump_json(prediction))


def find_trace(file: Path) -> Timeline | None:
    """Return the timeline in a file, which is marked as used; None if there is no such file, or it is damaged."""
    try:
        os.utime(file)
        if file not in recent_traces:
            recent_traces[file] = load(file.read_bytes())
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return None
    return recent_traces[file]


def write_trace(file: Path, timeline: Timeline) -> None:
    """Write a timeline, unless the disk is full, and remove the least recently used files above the limit."""
    recent_traces[file] = timeline
    _write(file, dump(timeline))


def _write(file: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        write_atomically(file, content)
    used = sorted(_files(file.parent))
    total = sum(num_bytes for _, num_bytes, _ in used)
    for last_used, num_bytes, old in used:
        if total <= LIMIT_BYTES or last_used > time.time() - IN_USE_SECONDS:
            return
        old.unlink(missing_ok=True)
        total -= num_bytes


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each file was last used, its bytes and its path."""
    for file in folder.glob(PATTERN):
        try:
            state = file.stat()
        except FileNotFoundError:  # another process has removed it
            continue
        yield state.st_mtime, state.st_size, file


def _key(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int, identity: str) -> str:
    """Return a digest of everything that the timeline depends on."""
    corpus = f"{experiment.settings.corpus}."
    settings = {
        k: str(v) for k, v in experiment.params().items() if k not in IRRELEVANT.split() and not k.startswith(corpus)
    }
    example = {name: (tuple(part.shape), str(part.dtype), id(part)) for name, part in prepared.train.batch([0]).items()}
    tensors = [number for *_, number in example.values()]
    parts = (
        sorted(settings.items()),
        identity,
        num_rows,
        [(name, shape, dtype, tensors.index(number)) for name, (shape, dtype, number) in example.items()],
        prepared.vocabulary_size,
        (target.kind, target.capability, target.num_multiprocessors, *map(os.environ.get, CARD_VARIABLES)),
        None if target.capability else _cpu_state(target),
        code_digest(Path(__file__).parent.parent),
        [_file_digest(sys.modules[type(technique).__module__].__file__) for technique in experiment.techniques],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _cpu_state(target: Hardware) -> tuple[object, ...]:
    """Return what the memory of operators depends on, on a CPU."""
    instructions = map(os.environ.get, CPU_VARIABLES)
    return target.name, torch.get_num_threads(), torch.backends.mkldnn.enabled, *instructions


@lru_cache
def code_digest(package: Path) -> str:
    """Return a digest of the code that timelines depend on, and of the versions of Python and of PACKAGES."""
    versions = [platform.python_version(), *map(_version, PACKAGES)]
    digest = hashlib.sha256(repr(versions).encode())
    for folder in CODE:
        for file in sorted((package / folder).rglob("*.[pc]*")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@lru_cache
def _file_digest(file: str | None) -> str:
    """Return a digest of the file that defines a technique, which may lie outside the package."""
    return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
