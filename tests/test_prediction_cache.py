"""The cache of predictions: what invalidates it, and its bound."""

import os
import shutil
import time
from compileall import compile_dir
from pathlib import Path

import pytest
import torch
from conftest import CPU, ROOT, tiny
from test_adapter import write_configuration

from pipeline.prediction import prediction_cache
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction_cache import CODE, cached, code_digest, prediction_file, remove_least_used
from pipeline.training.typical_step import typical_step


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache folder."""
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    return tmp_path


def test_only_code_that_a_prediction_depends_on_changes_its_key(tmp_path: Path) -> None:
    package = tmp_path / "pipeline"
    shutil.copytree(ROOT / "pipeline", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(package)
    for folder in sorted(path.name for path in package.iterdir() if path.is_dir()):
        with next((package / folder).glob("*.py")).open("a") as file:
            file.write("# edited\n")
        code_digest.cache_clear()
        after = code_digest(package)
        assert (after != before) == (folder in CODE), folder
        before = after
    for name in ("cli.py", "__main__.py", "__init__.py"):
        (package / name).write_text("")
    assert compile_dir(package / "base", quiet=1)  # as Python does when it first imports
    code_digest.cache_clear()
    assert code_digest(package) == before


def test_the_least_recently_used_files_are_removed_above_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, prepared = tiny(), tiny().read_corpus()
    prediction = predict(experiment, CPU, prepared)
    for file in filter(Path.is_file, folder.iterdir()):
        file.unlink()

    def ask(number: int) -> None:
        cached(experiment, CPU, prepared, lambda *_: prediction, (number,))

    identity = str(experiment.model.identity(experiment.settings.model))
    typical = typical_step(experiment, prepared)
    files = [prediction_file(experiment, CPU, prepared, identity, (number, typical)) for number in range(5)]
    for number, file in enumerate(files[:4]):
        ask(number)
        os.utime(file, times=(0, time.time() - 10 * prediction_cache.IN_USE_SECONDS + number))
    (folder / "another-file").write_bytes(bytes(10**6))
    cannot_be_removed = folder / "prediction-folder"
    cannot_be_removed.mkdir()
    os.utime(cannot_be_removed, times=(0, 0))
    ask(0)
    monkeypatch.setattr(prediction_cache, "LIMIT_BYTES", 2 * files[0].stat().st_size)
    remove_least_used.cache_clear()  # as in another process
    ask(4)
    assert [file.exists() for file in files] == [True, False, False, False, True]
    monkeypatch.setattr(prediction_cache, "LIMIT_BYTES", 0)
    remove_least_used.cache_clear()
    ask(3)
    assert [file.exists() for file in files] == [True, False, False, True, True]  # all used a moment ago
    assert (folder / "another-file").exists()


def test_limits_on_a_cpus_instructions_change_the_key_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, card = tiny(), find_hardware("t4")
    prepared = experiment.read_corpus()
    before = [prediction_file(experiment, each, prepared, "", ()) for each in (CPU, card)]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    limited = [prediction_file(experiment, each, prepared, "", ()) for each in (CPU, card)]
    assert limited[0] != before[0] and limited[1] == before[1]
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert prediction_file(experiment, CPU, prepared, "", ()) != limited[0]


def test_an_edited_configuration_is_predicted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path / "cache"))
    shape = dict.fromkeys(("causal_lm__num_layers", "causal_lm__width", "causal_lm__num_heads"))
    peaks = []
    for size in (64, 256, 64):
        write_configuration(tmp_path / "model", "llama", num_hidden_layers=2, intermediate_size=size)
        peaks.append(predict(tiny(model=str(tmp_path / "model"), **shape), CPU).peak_allocated_bytes)
    assert peaks[0] == peaks[2] != peaks[1]


def test_what_a_weight_decay_copies_is_not_answered_from_the_cache(folder: Path) -> None:
    """Torch's SGD over lists of tensors adds the decayed weights to a copy of all gradients."""
    sgd = {"optimizer": "sgd", "optimizer_implementation": "foreach", "micro_batch_size": 1, "sequence_length": 8}
    plain, decayed = (predict(tiny(**sgd, weight_decay=decay), CPU).peak_allocated_bytes for decay in (0.0, 0.01))
    assert decayed > plain
