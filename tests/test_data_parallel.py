"""Training in several processes: the training of one, whatever ends a rank, and the memory of a rank."""

import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import DIVISIBLE, FOUR_RANKS, Received, tiny
from processes import wait_for

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.ranks import whole
from pipeline.base.results import Finished, Outcome, Result
from pipeline.config.experiment import Experiment
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime import watch
from pipeline.runtime.run import execute
from pipeline.techniques.accumulation import Accumulation
from pipeline.training.loop import Loop, train
from pipeline.training.step import backpropagate, build_step, ranks_of

TWO = {"world_size": 2, "effective_batch_size": 8, "micro_batch_size": 2}


FSDP = {"sharding": "fsdp"}
TENSOR = {**DIVISIBLE, "tensor_parallel": 2}
PADDED = {"sequences": "padded", "sequence_length": 64, "max_grad_norm": 0.5}
TIED = {
    "model": "qwen3-0.6b",
    "vocabulary_size": 511,
    "causal_lm": {**DIVISIBLE["causal_lm"], "vocabulary_size": 511},
}
"""A model whose embedding is its head, with a vocabulary that ranks cannot divide evenly."""
ALONE = {
    "world_size": 1,
    "tensor_parallel": 1,
    "sharding": "none",
    "sharding_replicas": 1,
    "sharded_accumulation": True,
    "reshard_after_forward": True,
    "sharded_offloading": False,
}
BY_FOUR = {**FSDP, "world_size": 4, "micro_batch_size": 1}
REPLICATED = {**BY_FOUR, "sharding_replicas": 2}
EXACT = 1e-5
"""Largest relative difference of float32 losses and gradients that differ in the order of sums alone."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a log file, and prove that a run leaves no process that writes to it, and no temporary file."""
    file, temporary = tmp_path / "log.txt", tmp_path / "temporary"
    errors = set(Path(tempfile.gettempdir()).glob("pytorch-errorfile-*"))
    temporary.mkdir()
    multiprocessing.util.get_temp_dir()  # for sockets, whose paths must be short: the first call decides where it is
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield file
    monkeypatch.undo()
    assert not list(temporary.glob("*/store"))

    def is_gone() -> bool:
        return not set(Path(tempfile.gettempdir()).glob("pytorch-errorfile-*")) - errors

    wait_for(is_gone, "the files of torch, of which the ranks of another test have some too, are gone")
    left = [process.pid for process in psutil.process_iter() if str(file) in _open_files(process)]
    assert not left


def _open_files(process: psutil.Process) -> list[str]:
    try:
        return [one.path for one in process.open_files()]
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def of_one() -> dict[str, Result]:
    """Give the results of one process by its settings, which cases share that differ in how ranks divide the work."""
    return {}


def losses(result: Result) -> list[float]:
    assert result.outcome is Outcome.OK, result.detail
    return [record.loss for record in result.steps]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="packed", marks=pytest.mark.slow),
        pytest.param(PADDED, id="padded and clipped"),
        pytest.param({"precision": "fp16", "initial_loss_scale": 2.0**40}, id="skipped steps"),
        pytest.param({"adapter": "qlora"}, id="frozen parameters", marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "muon", "checkpointing": "every_layer", "loss_kernel": "chunked"},
            id="techniques",
            marks=pytest.mark.slow,
        ),
        pytest.param({**FSDP, **PADDED}, id="sharded"),
        pytest.param({**FSDP, "sharded_accumulation": False}, id="sharded, whole gradients", marks=pytest.mark.slow),
        pytest.param({**BY_FOUR, "reshard_after_forward": 2}, id="sharded by 4, then by 2", marks=FOUR_RANKS),
        pytest.param(
            {**REPLICATED, **PADDED},
            id="two copies, each sharded by 2",
            marks=FOUR_RANKS,
        ),
        pytest.param({**REPLICATED, "sharded_accumulation": False}, id="two copies, whole gradients", marks=FOUR_RANKS),
        pytest.param({**FSDP, "precision": "fp16", "initial_loss_scale": 2.0**40}, id="sharded, skipped steps"),
        pytest.param(
            {**FSDP, "sharded_offloading": True, **PADDED},
            id="sharded, on the host",
        ),
        pytest.param(
            {**FSDP, "checkpointing": "every_layer", "loss_kernel": "chunked", "optimizer": "muon"},
            id="sharded, techniques",
            marks=pytest.mark.slow,
        ),
        pytest.param({**FSDP, "compile": "layers"}, id="sharded, compiled", marks=pytest.mark.slow),
        pytest.param(
            {**FSDP, "adapter": "lora", "reshard_after_forward": False, "weights": "bfloat16"},
            id="sharded, frozen parameters",
            marks=pytest.mark.slow,
        ),
        pytest.param({**TENSOR, **PADDED}, id="divided matrices"),
        pytest.param({**TENSOR, "precision": "fp16", "initial_loss_scale": 2.0**40}, id="divided matrices, skipped"),
        pytest.param({**TENSOR, **PADDED, "world_size": 4}, id="divided matrices, two groups", marks=FOUR_RANKS),
        pytest.param({**TENSOR, **PADDED, **FSDP, "world_size": 4}, id="divided, then sharded", marks=FOUR_RANKS),
        pytest.param(
            {**TENSOR, "optimizer": "muon", "checkpointing": "every_layer", "loss_kernel": "chunked"},
            id="divided matrices, techniques",
            marks=pytest.mark.slow,
        ),
        pytest.param({**TENSOR, "compile": "layers"}, id="divided matrices, compiled", marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one(settings: dict[str, Any], log: Path, of_one: dict[str, Result]) -> None:
    several = TWO | {"eval_steps": 3} | settings
    alone = {**several, **ALONE}
    key = json.dumps(alone, sort_keys=True)
    if key not in of_one:
        of_one[key] = execute(tiny(**alone), log)
    one, two = of_one[key], execute(tiny(**several), log)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    if "max_grad_norm" in settings:
        assert max(record.grad_norm for record in one.steps) > settings["max_grad_norm"], "it is clipped"
    assert [record.grad_norm for record in two.steps] == pytest.approx(
        [record.grad_norm for record in one.steps], rel=1e-3, nan_ok=True
    )
    assert [(record.tokens, record.skipped) for record in two.steps] == [
        (record.tokens, record.skipped) for record in one.steps
    ]
    assert one.finished is not None and two.finished is not None
    assert two.finished.eval_loss == pytest.approx(one.finished.eval_loss, rel=1e-5)


def write_gradients(file: Path, experiment: Experiment, prepared: Any, emit: Any) -> None:
    """Write the gradient of the first optimizer step by the parameter's name, gathered from all ranks."""
    torch.manual_seed(experiment.settings.seed)
    step = build_step(experiment, prepared, ranks=ranks_of(experiment, emit))
    loop = Loop(experiment, prepared.train, step, step.make_optimizer(step.trainable.module), emit)
    window = loop.window(0)
    backpropagate(step, window.batches, window.num_targets)
    trained = [pair for pair in step.trainable.module.named_parameters() if pair[1].grad is not None]
    gradients = {name: whole(parameter.grad) for name, parameter in trained if parameter.grad is not None}
    if step.ranks.rank == 0:
        torch.save(gradients, file)
    emit(Finished(block_forwards_per_step=0))


@pytest.mark.parametrize(
    "settings",
    [
        {**FSDP, "loss_kernel": "chunked"},
        {**FSDP, "sharded_accumulation": False, "checkpointing": "every_layer"},
        pytest.param({**FSDP, "sharded_offloading": True}, marks=pytest.mark.slow),
        pytest.param({**BY_FOUR, "reshard_after_forward": 2}, marks=FOUR_RANKS),
        pytest.param({**REPLICATED, "checkpointing": "every_layer"}, marks=FOUR_RANKS),
        pytest.param({**FSDP, "adapter": "lora", "reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param({}, id="ddp", marks=pytest.mark.slow),
        pytest.param(TENSOR, marks=pytest.mark.slow),
        {**TENSOR, **TIED, "loss_kernel": "chunked"},
        pytest.param({**TENSOR, "world_size": 4}, marks=FOUR_RANKS),
        pytest.param({**TENSOR, **TIED, **FSDP, "world_size": 4, "sharded_offloading": True}, marks=FOUR_RANKS),
    ],
    ids=str,
)
def test_every_gathered_gradient_is_that_of_one_process(settings: dict[str, Any], log: Path, tmp_path: Path) -> None:
    found = []
    for number, values in enumerate(({**settings, **ALONE}, settings)):
        file = tmp_path / f"gradients_{number}.pt"
        result = execute(tiny(**TWO | values), log, work=partial(write_gradients, file))
        assert result.outcome is Outcome.OK, result.detail
        found.append(torch.load(file))
    one, several = found
    assert one.keys() == several.keys() and one
    for name, gradient in one.items():
        assert float((several[name] - gradient).norm()) <= EXACT * float(gradient.norm()) + 1e-9, name


def hang(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once(_: object) -> None:
    os._exit(7)


def run_out_of_memory(_: object) -> None:
    torch.empty(2**60)


def raise_an_error(_: object) -> None:
    raise ValueError("a bad number")


def stop_short(which: int, act: Callable[[object], None], experiment: Experiment, prepared: Any, emit: Any) -> None:
    """Train, and act in one rank at the end of its second optimizer step."""

    def emit_or_act(event: Any) -> None:
        emit(event)
        if torch.distributed.get_rank() == which and getattr(event, "step", None) == 1:
            act(event)

    train(experiment, prepared, emit_or_act)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize(
    ("rank", "act", "outcome", "detail"),
    [
        (0, be_killed, Outcome.OUT_OF_MEMORY, "killed by SIGKILL"),
        (1, be_killed, Outcome.OUT_OF_MEMORY, "killed by SIGKILL"),
        (1, exit_at_once, Outcome.CRASHED, "exit code 7"),
        (1, run_out_of_memory, Outcome.OUT_OF_MEMORY, "can't allocate memory"),
        (0, raise_an_error, Outcome.CRASHED, "ValueError: a bad number"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(
    act: Callable[[object], None], outcome: Outcome, detail: str, rank: int, sharding: str, log: Path
) -> None:
    received = Received()
    result = execute(tiny(**TWO, sharding=sharding), log, [received], work=partial(stop_short, rank, act))
    assert result.outcome is outcome
    assert result.detail is not None
    assert result.detail.startswith(f"rank {rank}: ")
    assert detail in result.detail
    assert len(received.steps) == len(result.steps) == 2


def test_ranks_that_made_different_weights_are_refused(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_user_functions import WORKS  # it imports MLflow, and so would each process of these tests

    (tmp_path / "drawn_anew.py").write_text(WORKS.replace("return Own", "torch.seed(); return Own"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = execute(tiny(**TWO, model="drawn_anew:build", corpus="quick_fox"), log)
    assert result.outcome is Outcome.CRASHED
    assert "all ranks must begin with the same weights" in str(result.detail)


@pytest.mark.parametrize(("sharding", "seconds"), [("none", 10), pytest.param("fsdp", 30, marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_named_at_the_time_limit(sharding: str, seconds: int, log: Path) -> None:
    settings = TWO | {"time_limit": seconds, "sharding": sharding}
    result = execute(tiny(**settings), log, work=partial(stop_short, 1, hang))
    assert result.outcome is Outcome.TIMED_OUT
    assert result.detail == f"ended after its time_limit of {seconds} seconds; the other ranks waited for rank 1"


def test_ranks_that_stand_still_are_ended(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STILL_SECONDS", 2.0)
    result = execute(tiny(**TWO), log, work=partial(stop_short, 0, hang))
    assert result.outcome is Outcome.TIMED_OUT
    assert result.detail == "ended after 2 seconds without progress; the other ranks waited for rank 0"


def evaluate_slowly(experiment: Experiment, prepared: Any, emit: Any) -> None:
    """Train with an evaluation that takes longer than ranks may stand still, and each of its passes does not."""
    held_out = prepared.held_out
    count = held_out.count

    def slow_count(batch: Any) -> tuple[int, int]:
        time.sleep(0.5)
        return count(batch)

    held_out.count = slow_count
    train(experiment, prepared, emit)


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_ranks_may_stand_still(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STILL_SECONDS", 2.0)
    result = execute(tiny(**TWO, eval_steps=4), log, work=evaluate_slowly)
    assert result.outcome is Outcome.OK, result.detail


def test_a_loss_that_is_not_finite_ends_all_ranks(log: Path) -> None:
    result = execute(tiny(**TWO, learning_rate=1e30, max_grad_norm=None, learning_rate_warmup_steps=0), log)
    assert result.outcome is Outcome.DIVERGED
    assert "the loss of optimizer step" in str(result.detail)


def stop_after_three(seconds: Any) -> bool:
    return len(seconds) == 3


def test_all_ranks_stop_at_the_same_step(log: Path) -> None:
    result = execute(tiny(**TWO, num_steps=30), log, stop=stop_after_three)
    assert len(losses(result)) == 3


def slow_and_large_in_rank_1(experiment: Experiment, prepared: Any, emit: Any) -> None:
    """Train with a rank whose optimizer takes longer and keeps more memory."""
    if torch.distributed.get_rank() == 1:
        step, kept = torch.optim.AdamW.step, list[torch.Tensor]()

        def slow_step(self: torch.optim.AdamW, closure: None = None) -> None:
            step(self, closure)
            kept.append(torch.ones(2**20))
            time.sleep(0.2)

        torch.optim.AdamW.step = slow_step  # type: ignore[method-assign, assignment]
    train(experiment, prepared, emit)


def test_the_slowest_rank_and_the_largest_are_what_is_measured(log: Path) -> None:
    plain, other = (execute(tiny(**TWO), log, work=work) for work in (None, slow_and_large_in_rank_1))
    assert all(record.seconds >= 0.2 for record in other.steps)
    assert plain.memory is not None and other.memory is not None
    more_bytes = 2 * 2**20 * torch.float32.itemsize
    assert other.memory.phases[-1].allocated_bytes == pytest.approx(
        plain.memory.phases[-1].allocated_bytes + more_bytes, abs=2048
    )
    assert other.memory.peak_allocated_bytes is not None and plain.memory.peak_allocated_bytes is not None
    assert other.memory.peak_allocated_bytes > plain.memory.peak_allocated_bytes + more_bytes // 4


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"micro_batch_size": 4}, id="no accumulation", marks=pytest.mark.slow),
        pytest.param({"precision": "bf16", "sequences": "grouped"}, id="bf16"),
        pytest.param({"checkpointing": "every_layer", "loss_kernel": "chunked"}, id="recomputation"),
        pytest.param({"optimizer": "sgd", "causal_lm__width": 128}, id="several buckets"),
        pytest.param({"adapter": "qlora"}, id="frozen parameters", marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_a_rank_is_predicted(settings: dict[str, Any], log: Path) -> None:
    experiment = tiny(**TWO | {"eval_steps": 0} | settings)
    result = execute(experiment, log)
    assert result.memory is not None, result.detail
    predicted = predict(experiment, hardware_of(experiment.device)).peak_allocated_bytes
    assert predicted == pytest.approx(result.memory.peak_allocated_bytes, rel=0.01)


def test_a_sharded_model_is_not_predicted_on_a_cpu_and_says_why() -> None:
    experiment = tiny(**TWO, **FSDP)
    with pytest.raises(InvalidInputError, match="fake tensors have no processes that exchange parts"):
        predict(experiment, hardware_of(experiment.device))


def test_gradients_stay_in_their_buckets(log: Path) -> None:
    """Accumulation in several processes costs no second copy of the gradients."""
    one, two = (execute(tiny(**TWO | {"world_size": size, "eval_steps": 0}), log) for size in (1, 2))
    assert one.memory is not None and two.memory is not None
    assert two.memory.peak_allocated_bytes == pytest.approx(one.memory.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 8}, "set micro_batch_size to one of 1, 2, 4"),
        ({"effective_batch_size": 9, "micro_batch_size": 3}, "multiple of 2, or world_size to one of 1, 3, 9"),
        ({"optimizer_in_backward": True, "max_grad_norm": None}, "before the ranks have added theirs"),
        ({**FSDP, "world_size": 1}, "set world_size=2 or more, or sharding=none"),
        ({**FSDP, "adapter": "qlora"}, "set adapter=lora or sharding=none"),
        ({**FSDP, "optimizer": "adafactor"}, "set optimizer=adamw or muon, or sharding=none"),
        ({**FSDP, "optimizer": "sgd"}, "set optimizer=adamw or muon, or sharding=none"),
        ({**FSDP, "optimizer": "adamw_8bit"}, "set optimizer=adamw or muon, or sharding=none"),
        ({**FSDP, "activation_offloading": True}, "set checkpointing=offloaded and activation_offloading=false"),
        ({**FSDP, "sharded_accumulation": False, "micro_batch_size": 4}, "or a smaller micro_batch_size"),
        ({"reshard_after_forward": False}, "reshard_after_forward=false is a setting of sharding=fsdp"),
        ({"sharding_replicas": 2}, "sharding_replicas=2 is a setting of sharding=fsdp"),
        ({"sharded_offloading": True}, "sharded_offloading=true is a setting of sharding=fsdp"),
        ({**FSDP, "sharded_offloading": True, "optimizer": "muon"}, "set optimizer=adamw or sharded_offloading=false"),
        ({**FSDP, "sharded_offloading": True, "precision": "fp16"}, "set precision=bf16 or sharded_offloading=false"),
        ({**FSDP, "sharding_replicas": 2}, "and is 2 with world_size=2; set it to 1, or sharding=none"),
        ({**BY_FOUR, "sharding_replicas": 3}, "and is 3 with world_size=4; set it to 1 or 2, or sharding=none"),
        ({**BY_FOUR, "reshard_after_forward": 4}, "and is 4 with 4 ranks; set it to true or false or 2"),
        ({**REPLICATED, "reshard_after_forward": 2}, "and is 2 with 2 ranks; set it to true or false"),
        ({"tensor_parallel": 2}, "and gpt2-nano has none; set tensor_parallel=1, and sharding=fsdp to divide it"),
        ({"model": "qwen3-nano", "tensor_parallel": 2}, "num_key_value_heads of qwen3-nano is 1; set it to 1"),
        ({**TENSOR, "world_size": 3}, "and is 2 with world_size=3; set world_size to a multiple of 2"),
        ({**TENSOR, "world_size": 4, "micro_batch_size": 8}, "x world_size / tensor_parallel must divide"),
        ({**TENSOR, **FSDP}, "set world_size to a multiple of tensor_parallel, 4 or more"),
        ({**TENSOR, "adapter": "lora"}, "set adapter=none, or tensor_parallel=1 and sharding=fsdp"),
        ({**TENSOR, "optimizer": "sgd"}, "set optimizer=adamw or muon, or tensor_parallel=1"),
        ({**TENSOR, "loss_kernel": "liger"}, "set loss_kernel=chunked, which gathers it, or tensor_parallel=1"),
        (
            {**TENSOR, **BY_FOUR, "world_size": 8, "reshard_after_forward": 2},
            "must be true or false with tensor_parallel",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    reason = tiny(**TWO | settings).unsupported(machine("cpu", count=8))
    assert reason is not None
    assert message in reason


def test_a_product_that_is_not_the_batch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="micro_batch_size x accumulation_steps x world_size"):
        tiny(**TWO, accumulation_steps=3)


def machine(kind: str, count: int | None) -> Hardware:
    capability, num_multiprocessors = ((9, 0), 132) if kind == "cuda" else (None, None)
    return Hardware(
        kind=kind,
        name="a device",
        memory_bytes=2**35,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
        count=count,
    )


@pytest.mark.parametrize(("kind", "what"), [("cuda", "GPUs"), ("cpu", "CPU cores")])
def test_more_processes_than_devices_are_refused(kind: str, what: str) -> None:
    experiment = tiny(**TWO)
    assert experiment.unsupported(machine(kind, 2)) is experiment.unsupported(machine(kind, None)) is None
    reason = experiment.unsupported(machine(kind, 1))
    assert reason is not None
    assert f"as many {what}" in reason
    assert "there are 1; set it to 1 or less" in reason


@pytest.mark.parametrize(
    ("kind", "count", "values"),
    [("cuda", 1, (1,)), ("cuda", 4, (1, 2, 4)), ("cuda", 6, (1, 2, 4, 6)), ("cuda", None, (1,)), ("cpu", 64, (1,))],
)
def test_world_size_is_searched_where_there_are_several_gpus(kind: str, count: int | None, values: Any) -> None:
    assert Accumulation.values_to_try("world_size", machine(kind, count)) == values


@pytest.mark.parametrize(
    ("entry", "settings", "message"),
    [
        ("profiling", {"world_size": "2"}, "profiling looks at one process, and world_size is 2"),
        ("main", {"world_size": "1000", "effective_batch_size": "1000"}, "world_size=1000 needs as many CPU cores"),
        (
            "main",
            {"world_size": "2", "effective_batch_size": "3"},
            "2 does not divide 3; set effective_batch_size to a multiple of 2",
        ),
    ],
)
def test_commands_refuse_what_several_processes_cannot_do(
    entry: str, settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    from project import Project

    done = Project.copy(tmp_path).here(entry, {"device": "cpu", "micro_batch_size": "1", **settings})
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_search_measures_several_processes(tmp_path: Path) -> None:
    """Its answer is trained again beside a plain configuration of one process, with the same losses."""
    from project import Project

    space = '{"micro_batch_size": [1, 2], "world_size": [1, 2]}'
    settings = {"device": "cpu", "model": "gpt2-nano", "sequence_length": "32", "vocabulary_size": "512"}
    more = {
        "effective_batch_size": "4",
        "causal_lm.num_layers": "2",
        "causal_lm.width": "32",
        "causal_lm.num_heads": "2",
    }
    done = Project.copy(tmp_path).here("search", {**settings, **more, "space": space, "num_trials": "4"})
    assert done.returncode == 0, done.stderr
    assert "world_size 2" in done.stdout
    assert "its losses are those of plain training" in " ".join(done.stdout.split())
