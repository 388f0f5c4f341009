"""Models whose code reads values: predicted if it does so while building them, else measured and never judged."""

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import TINY, tiny
from project import SMALL, Project

import fitproof
from pipeline.base import host_memory
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.memory.device import hardware_of
from pipeline.memory.work import Work
from pipeline.models.user_model import UserModel
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict, predict_each
from pipeline.runtime.run import execute
from pipeline.searching.acquisition import Rules, evaluate
from pipeline.searching.candidates import Candidate, make_candidates
from pipeline.searching.measurements import Measurements
from pipeline.searching.proposals import PredictiveProposer
from pipeline.searching.sampler import PredictiveSampler

CPU = hardware_of(torch.device("cpu"))
MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 32)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(32, size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(64).expand(1, -1))
        self.register_buffer("odd", torch.arange(64)[1::2])
        self.scale = torch.ones(1000)
        CONSTRUCTOR
    def forward(self, ids):
        hidden = self.embedding(ids)
        FORWARD
        return self.head(self.blocks(hidden)) * self.scale[0].to(ids.device)

def build(size):
    return Own(size)
"""
READ_WHILE_BUILDING = {
    "trunc_normal_": "nn.init.trunc_normal_(self.embedding.weight, std=0.02)",
    "item": "self.rate = torch.linspace(0, 1, 3).sum().item()",
    "tolist": "self.rates = [rate for rate in torch.linspace(0, 1, 3).tolist()]",
    "numpy": "self.head.weight.data.copy_(torch.tensor(self.head.weight.detach().numpy() * 2))",
}
READ_IN_FORWARD = "hidden = hidden * 2 if hidden.mean().item() > 0 else hidden"
FAULT = "getattr(ids, 'missing' if type(ids).__name__ == 'FakeTensor' else 'shape')"
"""An error on fake tensors alone, as the recorder itself may raise after a change in torch."""
EVERYTHING = "; ".join(READ_WHILE_BUILDING.values())


def written(constructor: str = "pass", forward: str = "pass") -> str:
    return MODEL.replace("CONSTRUCTOR", constructor).replace("FORWARD", forward)


def line_of(text: str, code: str) -> int:
    return next(number for number, line in enumerate(code.splitlines(), 1) if text in line)


def peak(code: Path, monkeypatch: pytest.MonkeyPatch, text: str, **settings: str) -> int:
    """Return the peak that is predicted on a CPU of a module with this text."""
    code.write_text(text)
    monkeypatch.delitem(sys.modules, code.stem, raising=False)
    return predict(tiny(model=f"{code.stem}:build", **settings), CPU).peak_allocated_bytes


@pytest.mark.parametrize("read", READ_WHILE_BUILDING)
def test_a_value_that_is_read_while_building_changes_no_prediction(
    read: str, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_rng_state()
    assert peak(code, monkeypatch, written(READ_WHILE_BUILDING[read])) == peak(code, monkeypatch, written())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_prediction_of_such_a_model_is_exact_and_techniques_change_it(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = {"adapter": "lora", "checkpointing": "every_layer"}
    without = peak(code, monkeypatch, written(), **lean)
    assert peak(code, monkeypatch, written(EVERYTHING), **lean) == without
    experiment = tiny(model=f"{code.stem}:build")
    result = execute(experiment, tmp_path / "log.txt")
    assert result.memory is not None, result.detail
    assert predict(experiment, CPU).peak_allocated_bytes == result.memory.peak_allocated_bytes
    assert predict(experiment, find_hardware("rtx4090")).peak_reserved_bytes


@pytest.mark.parametrize(
    ("read", "without"),
    [
        ("item", r"RuntimeError: Tensor.item\(\) cannot be called on meta tensors"),
        ("trunc_normal_", r"build \(own_code.py:\d+\) reads a value"),
    ],
)
def test_a_model_too_large_to_be_built_with_values_is_refused(
    read: str, without: str, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    monkeypatch.setattr(host_memory, "CHECKED_BYTES", 2**10)
    code.write_text(written(READ_WHILE_BUILDING[read]).replace("32", "1024"))
    memory = r"must fit this machine's memory.* takes \d+ MiB, with 1 MiB free"
    with pytest.raises(InvalidInputError, match=rf"{memory}.*without values it cannot be built: {without}"):
        predict(tiny(model=f"{code.stem}:build"), CPU)


def test_where_a_model_cannot_be_built_with_values_either_both_causes_are_said(code: Path) -> None:
    code.write_text(written("assert torch.ones(1).item() == 2"))
    without = "without values it cannot be built: RuntimeError: Tensor.item() cannot be called on meta tensors"
    with pytest.raises(InvalidInputError) as caught:
        UserModel().built_for_structure(f"{code.stem}:build", 64)
    first, *_, last = str(caught.value).splitlines()
    assert first.endswith(f"and raises AssertionError; fix it; {without}") and last == "AssertionError"


def test_an_error_with_and_without_values_is_said_once(code: Path) -> None:
    code.write_text(written("raise KeyError('the same')"))
    with pytest.raises(InvalidInputError) as caught:
        UserModel().built_for_structure(f"{code.stem}:build", 64)
    assert str(caught.value).count("the same") == 2  # the line of code and its error


def test_a_sparse_tensor_has_no_storage_to_limit(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = "self.rate = torch.eye(3).to_sparse().coalesce().values().sum().item()"
    assert peak(code, monkeypatch, written(sparse)) == peak(code, monkeypatch, written())


def test_a_value_that_is_read_in_forward_is_named_with_its_line_and_blames_nobody(code: Path) -> None:
    text = written(forward=READ_IN_FORWARD)
    code.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        predict(tiny(model=f"{code.stem}:build"), CPU)
    place = f"Own.forward ({code.name}:{line_of('item', text)})"
    assert str(caught.value) == f"{place} reads a value, and a prediction runs the step on tensors without values"


def test_any_error_of_the_recorder_is_the_cause_of_a_missing_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("torch has no such name")

    monkeypatch.setattr("pipeline.prediction.fake.trace.record", broken)
    monkeypatch.setattr("pipeline.prediction.predict.worker_pool", nullcontext)  # a worker would not be broken
    monkeypatch.setattr("pipeline.prediction.predict.run_all", lambda _, work, tasks: enumerate(map(work, tasks)))
    [(_, outcome)] = predict_each([tiny(vocabulary_size=303)], CPU)
    assert str(outcome) == "predicting it raises AttributeError: torch has no such name"
    monkeypatch.setattr("pipeline.searching.candidates.predict_each", lambda *_, **__: iter([(0, outcome)]))
    [candidate] = make_candidates(
        [{"micro_batch_size": 2}], [make_experiment({**TINY, "micro_batch_size": 2}, "search")]
    )
    assert candidate.predicted_bytes is None and candidate.not_predicted == str(outcome)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project.copy(tmp_path_factory.mktemp("unpredicted"))
    for name, forward in (("reading", READ_IN_FORWARD), ("broken", FAULT)):
        (made.folder / f"{name}_model.py").write_text(written(forward=forward))
    return made


@pytest.mark.parametrize(
    ("model", "cause"),
    [("reading", "reads a value"), ("broken", "raises AttributeError in Own.forward (broken_model.py:")],
)
def test_a_search_of_what_is_not_predicted_measures_it_and_claims_nothing(
    model: str, cause: str, project: Project
) -> None:
    space = '{"micro_batch_size": [1, 2], "checkpointing": ["none", "every_layer"]}'
    given = {"model": f"{model}_model:build", "space": space, "effective_batch_size": "2", "budget": "64MiB"}
    said = project.succeed("search", {**SMALL, **given, "num_trials": "2", "verify_steps": "0"})
    begin, _, end = said.partition("trial 1: ")
    note = "4 of 4 configurations are not predicted: "
    assert note in begin and cause in begin and said.count(note) == 1
    assert said.count(": ok, ") == 2 and "2 measured, 2 not predicted" in end
    assert "not fit" not in said and "within 0 %" not in said and "Within 1 %" not in said
    folder = max((project.folder / "runs").glob("*-search-*"))
    rows = list(csv.DictReader((folder / "never_run.csv").read_text().splitlines()))
    assert [row["why"] for row in rows] == ["not predicted"] * 2 and all(cause in row["cause"] for row in rows)
    assert "must not raise an error" not in said


def test_every_job_says_in_the_terminal_why_a_prediction_is_missing(project: Project) -> None:
    given = {**SMALL, "model": "reading_model:build"}
    cause = f"Own.forward (reading_model.py:{line_of('item', written(forward=READ_IN_FORWARD))}) reads a value"
    main = project.here("main", given)
    assert main.returncode == 0 and f"not predicted: {cause}" in " ".join(main.stdout.split()), main.stdout
    _, child = project.only_run("main")
    assert child.data.metrics["memory/peak_allocated_mib"] > 0
    assert "memory/predicted_peak_allocated_mib" not in child.data.metrics
    assert child.data.tags["prediction"].startswith(f"not predicted: {cause}")
    several = project.here("precision", given)
    assert f"all 3 variants: not predicted: {cause}" in " ".join(several.stdout.split()), several.stdout
    plan = project.here("plan", {**given, "gpu": "cpu", "effective_batch_size": "2"})
    assert plan.returncode == 2 and plan.stderr.startswith(f"error: no configuration is predicted: {cause}")


def test_a_plan_counts_what_is_not_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what stands beside the best configuration, which differs from it in one default."""

    def failing(experiments: Sequence[Experiment], *args: Any, **options: Any) -> Iterator[tuple[int, object]]:
        for number, outcome in predict_each(experiments, *args, **options):
            is_plain = experiments[number].params()["checkpointing"] == "none"
            yield number, InvalidInputError("made up") if is_plain else outcome

    for module in ("planning.promising", "jobs.plan"):
        monkeypatch.setattr(f"pipeline.{module}.predict_each", failing)
    space = {"micro_batch_size": [1, 2], "checkpointing": ["none", "every_layer"]}
    shape = {"num_layers": 1, "width": 32, "num_heads": 2}
    [card] = fitproof.plan(
        model="gpt2-nano", gpu="cpu", effective_batch_size=2, sequence_length=32, space=space, causal_lm=shape
    ).cards
    assert card.num_configurations is None and len(card.rows) == 2
    assert card.notes.count("2 of 4 configurations are not predicted: made up") == 1


def candidate(size: int, checkpointing: str, predicted_bytes: int | None = None) -> Candidate:
    return Candidate(
        choice={"micro_batch_size": size, "checkpointing": checkpointing},
        micro_batch_size=size,
        num_passes=8 // size,
        num_tokens=8.0,
        pass_work=Work({"float32": size * 1e6}),
        update_work=Work({"float32": 1e6}),
        predicted_bytes=predicted_bytes,
        not_predicted=None if predicted_bytes else "it reads a value",
    )


def measured(peaks: dict[int, float], over: frozenset[int] = frozenset()) -> Measurements:
    runs = {number: [-7.0] for number in peaks if number not in over}
    return Measurements(runs=runs, peak_bytes=peaks, over_budget=over, failed=frozenset(), running=frozenset())


UNKNOWN = [candidate(size, policy) for size in (1, 2, 4, 8) for policy in ("none", "every_layer")]
RULES = Rules(budget_bytes=1000)


def test_what_is_not_predicted_is_a_rival_in_the_bound() -> None:
    predicted = [candidate(size, "none", 100) for size in (1, 2, 4, 8)]
    known = measured(dict.fromkeys(range(4), 100.0))
    alone, beside = (evaluate([*predicted, *others], known, RULES) for others in ([], [candidate(8, "every_layer")]))
    assert alone.bound is not None and beside.bound is not None and beside.bound > max(0.1, 2 * alone.bound)
    assert beside.next == 4 and 4 in beside.possible


def test_what_is_predicted_to_fit_is_measured_first() -> None:
    assert evaluate([*UNKNOWN, candidate(2, "some", 100)], measured({}), RULES).next == len(UNKNOWN)
    assert evaluate(UNKNOWN, measured({}), RULES).next == 0  # the smallest, which is the likeliest to fit


def test_the_peaks_of_what_is_not_predicted_are_learned_from_those_measured() -> None:
    before = evaluate(UNKNOWN, measured({}), RULES)
    assert before.probability_of_fit[:2] == pytest.approx([0.5, 0.5]) and not before.feasible
    assert evaluate(UNKNOWN, measured({0: 50.0}), RULES).feasible >= {0, 1, 2, 3}
    large = evaluate(UNKNOWN, measured({0: 900.0, 2: 1600.0}, over=frozenset({2})), RULES)
    assert 6 not in large.possible and large.probability_of_fit[6] == 0.0  # as the largest of the same policy


def test_what_cannot_be_predicted_later_in_a_search_is_noted_too() -> None:
    later = [replace(one, is_expected=True, not_predicted=None) for one in UNKNOWN]
    sampler = PredictiveSampler(later, RULES, lambda candidates: UNKNOWN[: len(candidates)])
    proposer = PredictiveProposer(cast(Any, None), cast(Any, None), sampler)
    assert proposer.notes == ()
    sampler.predict([0])
    assert proposer.notes == ("1 of 1 configurations is not predicted: it reads a value",)
    sampler.predict([0, 1, 2])
    assert proposer.notes == ("3 of 3 configurations are not predicted: it reads a value",)
