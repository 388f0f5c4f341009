"""Profiling: where memory and time are, and advice that fits the configuration it is given for."""

import gzip
import json
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Received, tiny, with_corpus_of

from pipeline.base.contracts import Prepared
from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import nested
from pipeline.jobs.advice import ProfiledRun, advise
from pipeline.jobs.profiling import Profile, measure_and_profile, profiled_of
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.findings import FILE, read_findings, report_of, to_json
from pipeline.report.page import to_html
from pipeline.report.profile import ProfilingFindings
from pipeline.runtime.observer import Run
from pipeline.runtime.run import execute, run
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, OperatorCost, ProfileMessage, TimeProfile, profile_run
from pipeline.training.step import build_step

LONGER: dict[str, Any] = {"num_steps": 4, "sequence_length": 64}


def profiled(folder: Path, **settings: Any) -> ProfiledRun:
    """Measure and profile an experiment, in processes of their own."""
    experiment = tiny(**settings)
    row, profile = measure_and_profile(experiment, "it", folder, [])
    return profiled_of(experiment, row, profile)


def findings(one: ProfiledRun) -> ProfilingFindings:
    """Return what the report of a profile shows."""
    return ProfilingFindings(
        entry="profiling",
        question="Where?",
        row=one.row,
        memory=one.memory,
        time=one.time,
        advice=advise(one),
        environment={},
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfiledRun, Path]:
    folder = tmp_path_factory.mktemp("plain")
    return profiled(folder, **LONGER), folder


def test_what_is_advised_trains_the_same(plain: tuple[ProfiledRun, Path]) -> None:
    """Every setting that is advised is one that the command line takes, at the same effective batch."""
    one, _ = plain
    assert one.time is not None
    slow_data = {**one.time.phase_seconds, "data": 0.2 * one.time.seconds_per_step}
    slow = replace(one, time=replace(one.time, phase_seconds=slow_data, device_idle_percent=70.0))
    params = one.row.params
    for size, chunks in ((8, True), (4, False), (1, False)):
        cut = {**params, "micro_batch_size": size, "accumulation_steps": 8 // size}
        advised = advise(replace(slow, row=replace(one.row, params=cut), can_chunk_loss=chunks))
        assert any(advice.settings for advice in advised)
        for advice in advised:
            assert make_experiment(nested({**cut, **advice.settings}), "main").effective_batch_size == 8


def test_a_cut_that_has_no_next_one_is_no_setting(plain: tuple[ProfiledRun, Path]) -> None:
    """The micro-batch that is the whole effective batch has no larger one beside it."""
    one, _ = plain
    assert one.time is not None and one.micro_batch_size == 8
    idle = replace(one, time=replace(one.time, device_idle_percent=70.0))
    [launches] = [advice for advice in advise(idle) if "idle" in advice.text]
    assert not launches.settings and "No larger micro-batch size divides the effective batch" in launches.text
    only = replace(findings(idle), advice=(launches,))
    assert report_of(only).answer.endswith(launches.text)


def settings_advised(one: ProfiledRun) -> str:
    return "; ".join(advice.change or advice.text for advice in advise(one))


def test_memory_and_time_are_told(plain: tuple[ProfiledRun, Path]) -> None:
    one, folder = plain
    assert one.memory is not None and one.time is not None and one.memory.course is not None
    peak_mib = one.memory.peak.peak_bytes / 2**20
    assert peak_mib == pytest.approx(one.row.metrics["peak_allocated_mib"], rel=0.01)
    assert set(one.time.phase_seconds) == {"data", "forward", "backward", "optimizer"}
    assert sum(one.time.phase_seconds.values()) == pytest.approx(one.time.seconds_per_step)
    assert {"mm", "addmm", "_fused_adamw_"} <= {cost.name for cost in one.time.operators}
    trace = json.loads(gzip.decompress((folder / "traces" / "trace.json.gz").read_bytes()))
    assert {"aten::mm", "aten::_fused_adamw_"} <= {event.get("name") for event in trace["traceEvents"]}


def test_its_report_is_made_again_from_the_findings(plain: tuple[ProfiledRun, Path], tmp_path: Path) -> None:
    found = findings(plain[0])
    (tmp_path / FILE).write_text(to_json(found))
    report = report_of(read_findings(tmp_path))
    assert to_html(report) == to_html(report_of(found))
    assert [plot.name for plot in report.plots] == ["memory", "modules", "phases", "time"]
    tables = {table.name: table for table in report.tables}
    assert set(tables["categories"].frame["categories"]) <= set(CATEGORIES)
    assert tables["modules"].frame["%"].sum() == pytest.approx(100)
    assert "Memory peaks at" in report.answer


def test_memory_that_is_no_tensor_is_said(plain: tuple[ProfiledRun, Path]) -> None:
    """As on CUDA, where cuBLAS holds its workspaces."""
    found = findings(plain[0])
    assert "as workspaces" not in report_of(found).answer
    assert found.memory is not None
    more = {"peak_allocated_mib": found.memory.peak.peak_bytes / 2**20 + 64}
    with_workspaces = replace(found, row=replace(found.row, metrics={**found.row.metrics, **more}))
    assert "has 64.0 MiB more, which operators hold as workspaces" in report_of(with_workspaces).answer


def test_dominant_logits_ask_for_a_chunked_loss_or_a_smaller_micro_batch(plain: tuple[ProfiledRun, Path]) -> None:
    one, _ = plain
    for can_chunk, setting in (
        (True, "loss_kernel=chunked"),
        (False, "micro_batch_size=4, accumulation_steps=2, effective_batch_size=8"),
    ):
        [logits] = [advice for advice in advise(replace(one, can_chunk_loss=can_chunk)) if "Logits" in advice.text]
        assert logits.change == setting
        assert logits.evidence.startswith("logits at the peak: ")
    assert one.can_chunk_loss


def test_dominant_activations_ask_for_checkpointing(tmp_path: Path) -> None:
    deep = {**LONGER, "vocabulary_size": 300, "causal_lm__num_layers": 8, "micro_batch_size": 4}
    assert "checkpointing=every_layer" in settings_advised(profiled(tmp_path, **deep))


def test_dominant_state_says_what_does_not_help(tmp_path: Path) -> None:
    wide = {**LONGER, "sequence_length": 8, "micro_batch_size": 1, "accumulation_steps": 2, "causal_lm__width": 256}
    cut = "micro_batch_size=2, accumulation_steps=1, effective_batch_size=2"
    assert cut in settings_advised(profiled(tmp_path, **wide))


@pytest.mark.slow
def test_float32_matrix_products_ask_for_autocast_until_it_is_there(tmp_path: Path) -> None:
    large = {**LONGER, "sequence_length": 128, "causal_lm__width": 256}
    found = profiled(tmp_path, **large)
    assert "precision=bf16" in settings_advised(found)
    (tmp_path / "bf16").mkdir()
    without_bf16 = [one.change for one in advise(replace(found, autocast="fp16"))]
    assert "precision=fp16" in without_bf16 and "precision=bf16" not in without_bf16
    assert "precision=bf16" not in settings_advised(profiled(tmp_path / "bf16", **large, precision="bf16"))


def test_short_operators_ask_for_a_larger_micro_batch(tmp_path: Path) -> None:
    one = profiled(tmp_path, num_steps=4, sequence_length=8, micro_batch_size=1)
    assert one.time is not None
    for seconds, percent in ((1e-6, 100), (1e-2, 0)):
        costs = tuple(replace(cost, seconds=seconds * cost.calls) for cost in one.time.operators)
        like = replace(one, time=replace(one.time, operators=costs))
        assert like.short_operators_percent == pytest.approx(percent)
        is_advised = any(advice.text.startswith("The overhead of calling operators") for advice in advise(like))
        assert is_advised == (percent == 100)


def test_slow_data_gets_advice(tmp_path: Path) -> None:
    """A model that does next to nothing with large inputs."""
    thin = {"encoder_stack__num_layers": 1, "micro_batch_size": 16, "sequence_length": 8}
    one = profiled(tmp_path, num_steps=4, **thin, **with_corpus_of("encoder_stack"))
    assert one.time is not None
    slow = replace(one.time, phase_seconds={**one.time.phase_seconds, "data": 0.2 * one.time.seconds_per_step})
    assert any("Preparing the data" in advice.text for advice in advise(replace(one, time=slow)))


def test_an_idle_device_asks_for_a_larger_micro_batch(plain: tuple[ProfiledRun, Path]) -> None:
    one, _ = plain
    assert one.time is not None
    idle = replace(one, time=replace(one.time, device_idle_percent=70.0))
    assert any(advice.evidence == "the device is idle for 70 % of the time" for advice in advise(idle))
    busy = replace(one, time=replace(one.time, device_idle_percent=3.0))
    assert not any("idle" in advice.evidence for advice in advise(busy))


def test_a_run_out_of_memory_shows_what_was_alive(tmp_path: Path) -> None:
    """Memory that the system refuses in the first forward pass, of which the parameters were alive."""
    experiment = tiny(**LONGER, micro_batch_size=128, vocabulary_size=4096)
    this, profile = Run(name="it", runnable=experiment, folder=tmp_path / "it"), Profile()
    result, _ = run(this, [profile], stop=at_once, then=_profile_within_little_memory)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.detail
    row = Row(comparison="cost", name="it", is_baseline=True, params={}, result=result, skipped=None, metrics={})
    one = profiled_of(experiment, replace(row, params=experiment.params()), profile)
    assert one.memory is not None and one.time is None
    assert one.memory.peak.phase == "forward" and one.memory.peak.category_bytes["parameters"] > 0
    report = report_of(findings(one))
    assert report.answer.startswith("The run did not complete: out_of_memory. Memory peaks at")
    shown = {table.name: table.to_terminal(100) for table in report.tables}
    assert {"tensors", "modules"} <= shown.keys() and shown["categories"].row_count > 2
    assert to_html(report)


def test_what_was_alive_is_known_even_after_a_kill(tmp_path: Path) -> None:
    """Every phase's memory has been emitted before the next one begins."""
    received = Received()
    result = execute(tiny(**LONGER), tmp_path / "log.txt", [received], work=_profile_and_die)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert received.messages and received.messages[-1].peak.phase == "forward"


def test_a_model_too_large_to_begin_with_has_a_report(tmp_path: Path) -> None:
    one = profiled(tmp_path, **LONGER, causal_lm__vocabulary_size=2**37)
    assert one.row.result is not None and one.row.result.outcome is Outcome.OUT_OF_MEMORY
    report = report_of(findings(one))
    assert "out_of_memory" in report.answer and to_html(report)


def at_once(seconds: Sequence[float]) -> bool:
    """Stop after the first step that may be the last."""
    return True


def _profile_within_little_memory(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Profile, with 128 MiB more than the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 128 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    profile_run(experiment, prepared, emit)


def _profile_and_die(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Kill this process, as the kernel would, at the end of the first forward pass."""
    sent: list[object] = []

    def emit_and_die(message: object) -> None:
        emit(message)
        sent.append(message)
        if len(sent) == 3:  # after load, data and the first forward pass
            os.kill(os.getpid(), signal.SIGKILL)

    profile_run(experiment, prepared, emit_and_die)


def test_operators_and_categories_are_those_of_the_model() -> None:
    received: list[ProfileMessage] = []
    experiment = tiny(**LONGER, precision="bf16", checkpointing="every_layer")
    profile_run(experiment, experiment.prepare(), received.append)
    memory = [part for part in received if isinstance(part, MemoryProfile)][-1]
    names = {name for name, _ in build_step(experiment, experiment.prepare()).trainable.module.named_modules()}
    assert set(memory.peak.module_bytes) <= names | {"loss", "optimizer"}
    assert memory.matrix_products_float32_percent is not None and memory.matrix_products_float32_percent < 50
    [timed] = [part for part in received if isinstance(part, TimeProfile)]
    assert all(isinstance(cost, OperatorCost) and cost.seconds >= 0 for cost in timed.operators)
