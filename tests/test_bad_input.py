"""Bad input: one or two lines with rule, value and remedy, exit code 2, before anything runs."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from project import SMALL, Project

from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.config.entry_points import TOOLS
from pipeline.config.variants import load_single, read_yaml

CASES = [
    (["foo"], "no entry point is called 'foo'; the entry points are main, profiling, accumulation, checkpointing"),
    (["main", "--precison", "fp16"], "no setting is called precison; did you mean precision?"),
    (["main", "--precision"], "--precision needs a value; write --precision value, see fitproof main --help"),
    (["export", "--config"], "--config needs a value; write --config value, see fitproof export --help"),
    (["main", "--config", "--budget", "2GiB"], "--config needs a value; write --config value, see fitproof main"),
    (["main", "--precision", "fp17"], "precision must be 'fp32', 'tf32', 'fp16' or 'bf16', and is 'fp17'"),
    (["main", "--precision", "tf32", "--device", "cpu"], "tf32 needs a CUDA GPU"),
    (["main", "--num_steps", "many"], "num_steps must be a valid integer"),
    (["main", "--num_steps", "0"], "num_steps must be greater than 0, and is '0'"),
    (["main", "--num_steps", "2"], "num_steps must be more than timing_warmup_steps"),
    (["main", "--num_steps", "3", "--timing_warmup_steps", "3"], "num_steps must be more than timing_warmup_steps"),
    (["main", "--num_steps", "9", "--num_epochs", "1"], "num_steps must agree with what it follows from: num_epochs=1"),
    (["serach"], "no entry point is called 'serach'; did you mean search?"),
    (["main", "--batch_size", "8"], "no setting is called batch_size; did you mean micro_batch_size or effective_bat"),
    (["search", "--lr", "1e-4"], "no setting is called lr; did you mean learning_rate?"),
    (["plan", "--per-device-train-batch-size", "4"], "did you mean micro_batch_size?"),
    (
        ["finetune", "--lora_r", "8", "--bf16"],
        "called lora_r; did you mean adapter_rank?\nno setting is called bf16; did you mean precision=bf16?",
    ),
    (
        ["search", "--verify_varying_steps", "9", "--effective_batch_size", "8", "--", "python", "-V"],
        "verify_varying_steps is of Fitproof's own trainings, and this search is of a command; leave it out",
    ),
    (["search", "--gpu", "rtx4090"], "gpu belongs to a search of a command, and there is none; write it behind --"),
    (["main", "--bf16", "true"], "no setting is called bf16; did you mean precision=bf16?"),
    (["main", "--warmup_steps", "5"], "did you mean learning_rate_warmup_steps?"),
    (["main", "--zzz", "5"], "no setting is called zzz; --help-all lists all settings"),
    (["main", "--learning_rate", "nan"], "learning_rate must be"),
    (["main", "--checkpointing", "sometimes"], "checkpointing must be none, every_layer, every_2_layers"),
    (["main", "--causal_lm.layers", "3"], "no setting is called causal_lm.layers; did you mean"),
    (["main", "--micro_batch_size", "3", "--effective_batch_size", "8"], "3 does not divide 8; take one of 1, 2, 4, 8"),
    (
        ["main", "--effective_batch_size", "8", "--accumulation_steps", "3"],
        "accumulation_steps must divide effective_batch_size: 3 does not divide 8",
    ),
    (["main", "--budget", "8 gigs"], "a budget is a number with a unit"),
    (["main", "--budget", "0GiB"], "a budget must be more than zero"),
    (
        ["main", "--sequence_length", "257", "--device", "cpu"],
        "257 is more than the 256 of gpt2-nano; set sequence_length=256",
    ),
    (["main", "--model", "gpt5"], "no model is called 'gpt5'; the models are"),
    (["main", "--corpus", "books"], "no corpus is called 'books'; the corpora are"),
    (["main", "--device", "cuda:7"], "needs a CUDA GPU, and this machine has"),
    (["main", "--device", "npu"], "a device is auto, cpu, cuda or cuda:N, not 'npu'"),
    (["main", "--corpus", "text_files"], "set text_files.path"),
    (
        ["main", "--corpus", "text_files", "--text_files.path", "absent.txt"],
        "absent.txt must be a readable file or folder",
    ),
    (["main", "--config", "absent.yaml"], "absent.yaml must be a readable file (No such file or directory)"),
    (["main", "--output", "/proc/runs"], "output folder must be writable"),
    (["accumulation", "--micro_batch_size", "8"], "every variant of accumulation sets micro_batch_size, so"),
    (["precision", "--precision", "fp32"], "run it alone: fitproof main --precision fp32"),
    (
        ["sync", "--output", "absent"],
        "sync needs the output folder of earlier jobs, and absent is no folder; set output",
    ),
    (["sync", "--output", "/proc"], "sync needs the output folder of earlier jobs, and /proc "),
    (["sync", "--outptu", "runs"], "no setting is called outptu; did you mean output?"),
    (["main", "fp32"], "settings are written as --name value, and 'fp32' has no name; add one"),
    (["report"], "folder must be given, and is missing; fitproof report --help explains it"),
    (["search", "--space", '{"precison": ["fp32"]}'], "no setting is called precison; did you mean precision?"),
    (["search", "--sampler", "bayes"], "sampler must be 'predictive', 'tpe', 'gp', 'random', 'brute' or 'nsga2'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("words", "message"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_a_wrong_word_is_answered_and_nothing_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    if words[0] == "main" and "--config" not in words:
        words = [*words, "--config", str(Path(__file__).parent.parent / "experiments" / "single" / "fp32.yaml")]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err.removeprefix(f"fitproof {words[0]}: {TOOLS.get(words[0])}\n")
    assert message in error
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("precision: [fp32", "must be plain YAML"),
        ("model: !!python/object/apply:os.system ['true']", "must be plain YAML, without objects"),
        ("- precision", "must contain `name: value` lines"),
        ("", "must contain `name: value` lines"),
        ("precison: fp32", "no setting is called precison"),
        ("precision: {dtype: fp32}", "precision must be"),
        (
            "base_model: gpt2\nsequence_len: 64\nadapter: lora",
            "of axolotl, .* axolotl train .*sequence_len is sequence_",
        ),
        ("model_name_or_path: gpt2\nstage: sft\ncutoff_len: 64", "of LLaMA-Factory, .* llamafactory-cli train"),
        (
            "model_name_or_path: gpt2\nlr_scheduler_type: cosine",
            "of TRL, .* lr_scheduler_type is learning_rate_schedule",
        ),
        (
            '{"train_micro_batch_size_per_gpu": 2}',
            "of DeepSpeed, .* train_micro_batch_size_per_gpu is micro_batch_size",
        ),
        ("compute_environment: LOCAL_MACHINE", "of Accelerate, .*accelerate launch"),
        ("per_device_train_batch_size: 2\nbf16: true", "of Trainer, .* bf16 is precision=bf16"),
    ],
)
def test_a_wrong_file_is_refused_by_name(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=message):
        load_single("main", {"config": file})


def test_a_yaml_that_makes_objects_makes_none(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: !!python/object/apply:os.mkdir ['{tmp_path}/made']")
    with pytest.raises(InvalidInputError):
        read_yaml(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://127.0.0.1:9", "the tracking store must be reachable, and http://127.0.0.1:9 is not"),
        ("sqlite:////proc/mlflow.db", "the tracking store must be reachable"),
        ("carrier-pigeon://here", "the tracking store must be reachable"),
    ],
)
def test_a_tracking_store_that_cannot_be_reached_is_refused(uri: str, message: str, tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    project.environment |= {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = project.here("main", SMALL)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("text")
    file.chmod(0)
    assert main(["main", "--corpus", "text_files", "--text_files.path", str(file)]) == 2


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_without_an_entry_point_lists_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("main", "accumulation", "search"))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fitproof {version('fitproof')}\n"


def test_a_file_in_place_of_the_output_folder_is_refused(tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    (tmp_path / "runs").write_text("")
    done = project.here("main", SMALL)
    assert done.returncode == 2
    assert "output folder" in done.stderr
    shutil.rmtree(tmp_path, ignore_errors=True)
