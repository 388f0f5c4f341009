"""The search: it never repeats itself, learns from what does not fit, and finds the fastest that does."""

import io
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from conftest import PNG, THREE_LEVERS, TINY, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import MemoryUse, Outcome, Result
from pipeline.base.units import MIB
from pipeline.config.space import Choice, Space, make_space
from pipeline.memory.device import hardware_of
from pipeline.memory.work import Work
from pipeline.report.search import answer, ranking_table, runs_table
from pipeline.report.trial_plots import NOT_COUNTED, over_time_plot, parallel_plot
from pipeline.runtime.ownership import is_gone, this_process
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate
from pipeline.searching.experiment_problem import ExperimentProblem, make_experiment_problem
from pipeline.searching.loop import findings_of, trials_of
from pipeline.searching.optuna_samplers import SAMPLERS, choose, next_baseline
from pipeline.searching.proposals import PredictiveProposer
from pipeline.searching.results import SearchFindings
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.settings import SearchSettings
from pipeline.searching.study import StoredStudy
from pipeline.searching.trial_record import CONSTRAINT, judge
from pipeline.searching.trials import ANSWER, Proposal, Trial, best_trial, one_per_configuration, pareto_front, speed_of

SPACE = Space(
    {"micro_batch_size": (1, 2, 4, 8, 16), "checkpointing": ("none", "every_layer"), "precision": ("fp32", "bf16")}
)
BUDGET = 100 * MIB


def made_up(choice: Choice) -> tuple[int, float]:
    """Return (peak bytes, tokens per second) of a made-up machine on which larger micro-batches are faster."""
    micro = int(str(choice["micro_batch_size"]))
    checkpointed, bf16 = choice["checkpointing"] == "every_layer", choice["precision"] == "bf16"
    peak = 20 + micro * (6 if checkpointed else 16) * (0.6 if bf16 else 1.0)
    speed = 1000 * micro / (micro + 1) * (0.75 if checkpointed else 1.0) * (1.8 if bf16 else 1.0)
    return round(peak * MIB), speed


def result_of(choice: Choice, oom: bool) -> tuple[Result, dict[str, float]]:
    peak, speed = made_up(choice)
    outcome = Outcome.OK if peak <= BUDGET else Outcome.OUT_OF_MEMORY if oom else Outcome.OVER_BUDGET
    metrics = {"peak_allocated_mib": peak / MIB, "tokens_per_second": speed}
    if outcome is Outcome.OUT_OF_MEMORY:
        metrics = {"peak_reserved_mib": BUDGET / MIB - 3}
    memory = MemoryUse(
        peak_allocated_bytes=peak,
        peak_process_bytes=1,
    )
    detail = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB." if not outcome.completed else None
    return Result(outcome=outcome, detail=detail, memory=memory, seconds_total=1.0), metrics


def measure(
    study: StoredStudy, choice: Choice, measured: tuple[Result, dict[str, float]], total: int, repeat: bool = False
) -> int | None:
    """Queue and measure a configuration; return its trial's number, or None if it is not to be measured."""
    if not study.enqueue(Proposal(choice, is_repeat=repeat), SPACE):
        return None

    def made_up_run(_: int, queued: Proposal) -> FrozenTrial:
        assert queued.choice == choice and queued.is_repeat == repeat
        return judge(*measured, BUDGET, len(study.directions))

    return study.run_next(made_up_run, total, lambda: None)


def run(study: StoredStudy, sampler: str, num_trials: int, oom: bool = False, seed: int = 0) -> list[Choice]:
    """Measure on the made-up machine and return the configurations in order."""
    chosen = []
    for _ in range(num_trials):
        choice = choose(SPACE.choices, SPACE, study.trials, study.taken, study.directions, sampler, seed)
        if choice is None:
            break
        assert measure(study, choice, result_of(choice, oom), len(SPACE.choices)) is not None
        chosen.append(choice)
    return chosen


def new_study(directions: tuple[str, ...] = ("maximize",), storage: str = "sqlite:///:memory:") -> StoredStudy:
    return StoredStudy(storage, "test", directions, {"budget": "100MiB"})


def findings_with(rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> SearchFindings:
    """Return the findings of a search with these trials, and these runs of verifications."""
    return SearchFindings(
        model="gpt2-nano",
        effective_batch_size=32,
        budget_bytes=BUDGET,
        num_configurations=30,
        baselines=(),
        shows_front=False,
        rows=tuple(rows),
        extra=tuple(extra),
        settings={},
        environment={},
    )


def identity(choice: Choice) -> tuple[Any, ...]:
    return tuple(choice.items())


@pytest.mark.matrix(2)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(("directions", "oom"), pairs([("maximize",), ("maximize", "minimize")], [True, False]))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_configuration_is_measured_twice_and_all_are_reached(
    sampler: str, directions: tuple[str, ...], oom: bool
) -> None:
    study = new_study(directions)
    chosen = run(study, sampler, 25, oom)
    assert len(chosen) == 20
    assert {identity(c) for c in chosen} == {identity(c) for c in SPACE.choices}
    assert len(study.trials) == 20
    assert choose(SPACE.choices, SPACE, study.trials, study.taken, directions, sampler, 0) is None


@pytest.mark.slow
def test_tpe_turns_away_from_what_does_not_fit() -> None:
    """After twelve trials, configurations that fit are chosen more often than their share of what is left."""
    fitting = [c for c in SPACE.choices if made_up(c)[0] <= BUDGET]
    late, chance = 0, 0.0
    for seed in range(8):
        chosen = run(new_study(), "tpe", 16, oom=True, seed=seed)
        left = [c for c in SPACE.choices if c not in chosen[:12]]
        late += sum(c in fitting for c in chosen[12:])
        chance += 4 * sum(c in fitting for c in left) / len(left)
    assert late > chance


@pytest.mark.quick
def test_a_study_survives_its_process(tmp_path: Any) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    first = run(new_study(storage=storage), "tpe", 5)
    again = new_study(storage=storage)
    assert len(again.trials) == 5
    assert not {identity(c) for c in run(again, "tpe", 5)} & {identity(c) for c in first}


def test_other_conditions_are_refused_with_the_difference(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    StoredStudy(storage, "test", ("maximize",), {"budget": "100MiB", "seed": 0})
    with pytest.raises(InvalidInputError, match="budget is 50MiB, and was 100MiB; measure under"):
        StoredStudy(storage, "test", ("maximize",), {"budget": "50MiB", "seed": 0})


def test_a_storage_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="storage must be reachable, and sqlite:////nowhere/optuna.db is not"):
        new_study(storage="sqlite:////nowhere/optuna.db")
    with pytest.raises(InvalidInputError, match="storage must be reachable"):
        new_study(storage="no-url")


def test_verdicts_are_in_bytes() -> None:
    fits, over = SPACE.choices[0], {"micro_batch_size": 16, "checkpointing": "none", "precision": "fp32"}
    crashed = Result(outcome=Outcome.CRASHED, detail="", seconds_total=1.0)
    cases = [
        (result_of(fits, False), TrialState.COMPLETE, made_up(fits)[0] - BUDGET),
        (result_of(over, False), TrialState.COMPLETE, made_up(over)[0] - BUDGET),
        (result_of(over, True), TrialState.PRUNED, 17 * MIB),
        ((crashed, dict[str, float]()), TrialState.FAIL, None),
    ]
    for measured, state, excess in cases:
        record = judge(*measured, BUDGET, 2)
        assert record.state is state
        assert record.constraints == ({} if excess is None else {CONSTRAINT: float(excess)})
        peak, speed = measured[1].get("peak_allocated_mib", 0.0), measured[1].get("tokens_per_second")
        assert record.values == ([speed, peak * MIB] if state is TrialState.COMPLETE else None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 5 * 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 256000000000 bytes. Error", 256000000000),
        ("killed", 1),
    ],
)
def test_a_run_out_of_memory_exceeds_its_budget_by_what_its_message_asks_for(text: str, size: int) -> None:
    result = Result(outcome=Outcome.OUT_OF_MEMORY, detail=text, seconds_total=1.0)
    assert judge(result, {}, 0).constraints == {CONSTRAINT: float(size)}


@settings(max_examples=50)
@given(largest=st.integers(0, 7), sizes=st.lists(st.integers(1, 64), min_size=1, max_size=7, unique=True))
def test_the_baseline_is_found_by_bisection(largest: int, sizes: list[int]) -> None:
    baselines: list[Choice] = [{"micro_batch_size": size} for size in sorted(sizes, reverse=True)]
    fitting, taken = [], []
    while (choice := next_baseline(baselines, fitting, taken)) is not None:
        taken.append(choice)
        if baselines.index(choice) >= largest:
            fitting.append(choice)
    assert len(taken) <= len(baselines).bit_length()
    if largest < len(baselines):
        assert baselines[largest] in fitting


def test_the_baseline_has_default_precision_and_no_checkpointing() -> None:
    values = SPACE.plain_values({"micro_batch_size": 8, "checkpointing": "none", "precision": "fp32"})
    choices = SPACE.with_values(values)
    assert [c["micro_batch_size"] for c in choices] == [16, 8, 4, 2, 1]
    assert {(c["checkpointing"], c["precision"]) for c in choices} == {("none", "fp32")}
    assert all(c in SPACE.choices for c in choices)


def test_divisors_make_the_effective_batch_exact() -> None:
    space = make_space(SearchSettings(space={"micro_batch_size": "divisors"}), 12, {}, hardware_of(torch.device("cpu")))
    assert space.dimensions == {"micro_batch_size": (1, 2, 3, 4, 6, 12)}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"space": {"precision": "divisors"}}, "only micro_batch_size takes `divisors`"),
        ({"space": {"precision": []}}, "space.precision has none"),
        ({"space": {"micro_batch_size": [3]}}, "3 does not divide 16"),
        ({"space": {"precision": ["fp17"]}}, "precision must be 'fp32', 'tf32', 'fp16' or 'bf16', and is 'fp17'"),
        ({"space": {"precision": ["tf32"]}}, "tf32 needs a CUDA GPU .*; no configuration is left"),
        ({"effective_batch_size": "none"}, "a search needs effective_batch_size"),
        ({"budget": "lots"}, "a budget is a number with a unit"),
        ({"num_trials": 0}, "num_trials must be greater than 0"),
        ({"ray_address": "auto"}, "ray_address must go with executor=ray, or be left out where executor is local"),
        ({"verify_steps": 2, "timing_warmup_steps": 2}, "2 is not more than 2; set verify_steps=3 or more, or 0"),
    ],
)
def test_a_wrong_search_is_refused_before_anything_runs(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_experiment_problem({**TINY, **given_})


def test_a_setting_given_on_the_command_line_pins_its_dimension() -> None:
    plan = make_experiment_problem({**TINY, "space": THREE_LEVERS, "precision": "bf16", "micro_batch_size": "4"})
    assert plan.space.dimensions["precision"] == ("bf16",)
    assert plan.space.dimensions["micro_batch_size"] == (4,)
    assert len(plan.space.choices) == 3


def row(number: int, peak: float | None, speed: float | None, outcome: str = "ok", **choice: Any) -> Trial:
    return Trial(
        number=number,
        choice=choice or {"micro_batch_size": number + 1, "precision": "fp32"},
        outcome=outcome,
        fits=outcome == "ok",
        metrics={
            **({} if peak is None else {"peak_allocated_mib": float(peak)}),
            **({} if speed is None else {"tokens_per_second": speed}),
        },
    )


ROWS = [
    row(0, 200, 900, "over_budget"),
    row(1, None, None, "out_of_memory"),
    row(2, 50, 500),
    row(3, 60, 400),
    row(4, 90, 800),
]


def test_the_pareto_front_holds_what_nothing_beats() -> None:
    assert [r.number for r in pareto_front(ROWS)] == [2, 4, 0]
    failed = replace(ROWS[4], source=ANSWER, outcome="out_of_memory", fits=False, metrics={})
    assert [r.number for r in pareto_front([*ROWS, failed])] == [2, 0]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30))
def test_every_trial_is_on_the_pareto_front_or_beaten_by_it(points: list[tuple[int, int]]) -> None:
    rows = [row(n, peak, speed) for n, (peak, speed) in enumerate(points)]
    front = pareto_front(rows)
    for one in rows:
        better = [
            f
            for f in front
            if (f.peak_bytes or 0) <= (one.peak_bytes or 0) and f.tokens_per_second >= one.tokens_per_second
        ]  # type: ignore[operator]
        assert better
    assert len({(f.peak_bytes, f.tokens_per_second) for f in front}) == len(front)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:2], ROWS[2:3]], ids=["all", "over", "oom", "one"])
def test_figures_and_table_take_any_outcome(rows: list[Trial]) -> None:
    findings = findings_with(rows)
    for plot in (over_time_plot(findings), parallel_plot(findings)):
        assert plot.to_png().startswith(PNG)
    assert len(ranking_table(findings).lines) == len({tuple(row.choice.values()) for row in rows})
    assert list(runs_table(findings).frame["outcome"]) == [r.outcome for r in rows]


def test_a_trial_that_does_not_count_is_not_the_fastest_so_far() -> None:
    slowed, again, other = row(0, 50, 40), replace(row(1, 50, 80), choice=row(0, 50, 40).choice), row(2, 60, 60)
    values = over_time_plot(findings_with([slowed, again, other])).panels[0].to_spec()["data"]["values"]
    assert [one["kind"] for one in values] == [NOT_COUNTED, "fits", "fits"]
    assert [one["fastest"] for one in values] == [None, pytest.approx(80), pytest.approx(80)]


def test_a_trial_that_others_queued_without_a_configuration_is_closed() -> None:
    study = new_study()
    study._study.enqueue_trial({})
    assert study.enqueue(Proposal(SPACE.choices[0]), SPACE)

    def never(number: int, queued: Proposal) -> FrozenTrial:
        raise AssertionError("nothing was to be measured")

    assert study.run_next(never, 20, lambda: None) is None
    assert study.trials == [] and study.taken == SPACE.choices[:1] and study.num_waiting == 1


def test_a_process_that_ended_is_gone_even_before_its_parent_has_looked() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        owner = {**this_process(), "pid": process.pid, "started": psutil.Process(process.pid).create_time()}
        assert not is_gone(owner) and is_gone({**owner, "started": owner["started"] - 60})
        assert not is_gone({**owner, "pid": 2**22 - 1, "host": "another machine"})
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert is_gone(owner)
    assert is_gone(owner)


def test_of_two_workers_that_choose_the_same_the_first_has_it(tmp_path: Any) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    first, second = new_study(storage=storage), new_study(storage=storage)
    assert first.enqueue(Proposal(SPACE.choices[0]), SPACE)
    assert not second.enqueue(Proposal(SPACE.choices[0]), SPACE)
    first._study.add_trial(first._study.get_trials()[0])  # what the second queues if it has not seen the first
    measured: list[Choice] = []

    def made_up_run(_: int, queued: Proposal) -> FrozenTrial:
        measured.append(queued.choice)
        result, metrics = result_of(queued.choice, oom=False)
        return judge(result, metrics, BUDGET)

    assert [study.run_next(made_up_run, 20, lambda: None) for study in (second, first)] == [0, None]
    assert measured == SPACE.choices[:1]
    assert second.enqueue(Proposal(SPACE.choices[1]), SPACE)
    assert second.run_next(made_up_run, 1, lambda: None) is None, "there may be one trial"
    assert first.taken == SPACE.choices[:1] and first.num_open == 0


def test_a_configuration_is_measured_again_as_often_as_that_is_asked_for() -> None:
    study = new_study()
    choice, *_ = run(study, "tpe", 1)
    measured = result_of(choice, oom=False)
    assert measure(study, choice, measured, 20) is None
    assert measure(study, choice, measured, 20, repeat=True) is not None
    assert measure(study, choice, measured, 20, repeat=True) is not None and len(study.trials) == 3


def candidate_of(choice: Choice) -> Candidate:
    size, peak = int(str(choice["micro_batch_size"])), made_up(choice)[0]
    return Candidate(
        choice=choice,
        micro_batch_size=size,
        num_passes=16 // size,
        num_tokens=16,
        pass_work=Work(
            {
                {"fp32": "float32", "bf16": "bfloat16"}[str(choice["precision"])]: size
                * (4.0 if choice["checkpointing"] == "every_layer" else 3.0)
            }
        ),
        update_work=Work(),
        predicted_bytes=peak,
    )


PROBLEM = SimpleNamespace(settings=SimpleNamespace(gap=0.01, objectives="throughput"), space=SPACE, seed=0)


def proposer_of(study: StoredStudy) -> PredictiveProposer:
    sampler = PredictiveSampler([candidate_of(choice) for choice in SPACE.choices], Rules(budget_bytes=BUDGET))
    return PredictiveProposer(cast(ExperimentProblem, PROBLEM), study, sampler)


def test_the_fastest_and_a_slowed_trial_are_proposed_again_and_counted_once() -> None:
    study, slowed = new_study(), SPACE.choices[8]
    proposer = proposer_of(study)

    def measure_it(choice: Choice, slowness: float = 1.0, repeat: bool = False) -> None:
        result, metrics = result_of(choice, oom=False)
        metrics = {**metrics, "tokens_per_second": metrics["tokens_per_second"] / slowness, "seconds_total": 2.0}
        assert measure(study, choice, (result, metrics), 20, repeat) is not None

    for choice in SPACE.choices[:14]:
        measure_it(choice, 1.6 if choice == slowed else 1.0)
    fastest = proposer.next([])
    assert fastest is not None and fastest.is_repeat and fastest.choice != slowed
    measure_it(fastest.choice, repeat=True)
    outlier = proposer.next([])
    assert outlier is not None and outlier.is_repeat and outlier.choice == slowed
    measure_it(slowed, repeat=True)
    after = proposer.next([])
    assert after is None or not after.is_repeat
    certificate = proposer.certificate(trials_of(cast(ExperimentProblem, PROBLEM), study))
    assert certificate.num_measured == 14 and certificate.seconds_measured == 32.0
    assert len(certificate.unmeasured) == 6


@pytest.fixture
def repeated() -> tuple[StoredStudy, PredictiveProposer, Proposal]:
    """Give a study that has some trials, what proposes the next, and the repeat of the fastest that it proposes."""
    study = new_study()
    proposer = proposer_of(study)
    for choice in SPACE.choices[:6]:
        measure(study, choice, result_of(choice, oom=False), 20)
    fastest = proposer.next([])
    assert fastest is not None and fastest.is_repeat
    return study, proposer, fastest


def test_a_repeat_that_crashes_is_not_proposed_again(
    repeated: tuple[StoredStudy, PredictiveProposer, Proposal],
) -> None:
    study, proposer, fastest = repeated
    crashed = replace(result_of(fastest.choice, oom=False)[0], outcome=Outcome.CRASHED)
    assert measure(study, fastest.choice, (crashed, {}), 20, repeat=True) is not None
    after = proposer.next([])
    assert after is None or not after.is_repeat


def test_a_repeat_whose_worker_died_is_proposed_again(
    repeated: tuple[StoredStudy, PredictiveProposer, Proposal],
) -> None:
    """Its configuration has not failed, and has no second measurement."""
    study, proposer, fastest = repeated
    assert study.enqueue(Proposal(fastest.choice, is_repeat=True), SPACE)
    study._study.tell(study._study.ask(), state=TrialState.FAIL)  # as Optuna closes the trial of a dead worker
    assert proposer.next([]) == fastest


def test_of_a_configuration_measured_twice_one_trial_counts() -> None:
    def of_size(size: int, number: int, speed: float | None, outcome: str = "ok", peak_mib: float = 1.0) -> Trial:
        return row(number, peak_mib, speed, outcome, micro_batch_size=size)

    slow, fast, other = of_size(1, 0, 50.0), of_size(1, 2, 80.0), of_size(2, 1, 70.0)
    assert one_per_configuration([slow, other, fast]) == [other, fast] and best_trial([slow, other, fast]) is fast
    crashed, too_large = of_size(1, 3, None, "crashed"), of_size(1, 4, 90.0, "over_budget")
    assert one_per_configuration([fast, other, crashed]) == [other, fast] and best_trial([fast, other, crashed]) is fast
    assert (
        one_per_configuration([fast, other, too_large]) == [other, too_large]
        and best_trial([fast, other, too_large]) is other
    )
    larger = of_size(1, 2, 80.0, peak_mib=2.0)
    assert pareto_front([slow, larger]) == [larger]
    near = of_size(1, 5, 75.0)
    table = ranking_table(findings_with([slow, near, other, fast])).frame
    assert list(table[""]) == ["answer", ""] and list(table["runs"]) == [3, 1] and table[NOT_COUNTED][0] == 1
    assert list(table["tokens/s"]) == pytest.approx([6000**0.5, 70.0])
    assert (table["slowest run"][0], table["fastest run"][0]) == (50.0, 80.0)
    assert list(runs_table(findings_with([slow, near, other, fast])).frame["counts"]) == [False, True, True, True]
    refuted = ranking_table(findings_with([fast, other, too_large])).frame
    assert list(refuted[""]) == ["answer", ""] and list(refuted["outcome"]) == ["ok", "over_budget"]
    assert [speed_of(slow.choice, rows) for rows in ([slow, fast], [near, fast], [other])] == pytest.approx(
        [80.0, 6000**0.5, 0.0]
    )
    rows = [near, fast, of_size(2, 6, 78.0, peak_mib=2.0)]
    assert [one.choice["micro_batch_size"] for one in pareto_front(rows)] == [1, 2]


def test_the_trials_fit_a_terminal_of_120_columns() -> None:
    metrics = dict.fromkeys(("seconds_per_step", "predicted_seconds_per_step", "common_steps_loss"), 123.4)
    row = Trial(
        number=0,
        choice={"micro_batch_size": 128, "checkpointing": "every_12_layers", "precision": "fp32"},
        outcome="over_budget",
        fits=False,
        metrics={
            **metrics,
            "peak_allocated_mib": 81920.0,
            "tokens_per_second": 123456.0,
            "predicted_peak_reserved_mib": 81234.5,
        },
    )
    console = Console(width=120, file=io.StringIO())
    table = ranking_table(findings_with([row, replace(row, number=1)]))
    console.print(table.to_terminal(120))
    assert "…" not in cast(io.StringIO, console.file).getvalue()
    narrow = Console(width=80, file=io.StringIO())
    narrow.print(table.to_terminal(80))
    said = " ".join(cast(io.StringIO, narrow.file).getvalue().split())
    assert "…" not in said and "123,456" in said and "More columns in ranking.csv: outcome, predicted MiB" in said


def test_a_locked_storage_is_waited_for_and_then_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    monkeypatch.setattr("pipeline.searching.storage.SECONDS_FOR_A_LOCK", 0.2)
    study = new_study(storage=storage)
    with closing(sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InvalidInputError, match="storage must be reachable, and .* is not .*database is locked"):
            new_study(storage=storage)
        with pytest.raises(InvalidInputError, match="database is locked"), study.storage_errors():
            study.enqueue(Proposal(SPACE.choices[0]), SPACE)
        other.execute("ROLLBACK")
    assert study.enqueue(Proposal(SPACE.choices[0]), SPACE)


def test_the_answer_compares_with_the_baseline_of_the_largest_micro_batch_that_fits() -> None:
    plan = make_experiment_problem({**TINY, "space": THREE_LEVERS, "budget": "1GiB", "effective_batch_size": 8})
    measured = [(2, "fp32", 100.0), (8, "fp32", 500.0), (4, "bf16", 1000.0)]
    rows = [
        row(number, 100.0, speed, micro_batch_size=size, checkpointing="none", precision=precision)
        for number, (size, precision, speed) in enumerate(measured)
    ]
    assert "2.00 x the baseline (micro-batch 8" in answer(findings_of(plan, rows))
    again = replace(rows[2], number=3, metrics={"tokens_per_second": 960.4})
    assert "trains 980 tokens/s, 1.96 x the baseline" in answer(findings_of(plan, [*rows, again]))


def test_an_answer_that_is_another_training_is_compared_with_that_training() -> None:
    shared = {**TINY, "mathematics": "different", "budget": "1GiB", "effective_batch_size": 8}
    plan = make_experiment_problem({**shared, "space": {**THREE_LEVERS, "optimizer": ["adamw", "sgd"]}})
    plain = {"micro_batch_size": 8, "checkpointing": "none", "precision": "fp32"}
    rows = [
        row(0, 100.0, 200.0, **plain, optimizer="adamw"),
        row(1, 100.0, 500.0, **plain, optimizer="sgd"),
        row(2, 100.0, 1000.0, **{**plain, "optimizer": "sgd", "precision": "bf16"}),
    ]
    findings = findings_of(plan, rows)
    assert {choice["optimizer"] for choice in findings.baselines} == {"sgd"}
    assert "2.00 x the baseline" in answer(findings)


def test_every_corpus_of_the_space_is_checked_before_anything_runs(tmp_path: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a short text that fills some short sequences " * 40)
    space = {"sequence_length": [8, 200], "micro_batch_size": [2]}
    with pytest.raises(InvalidInputError, match="the text must fill one batch"):
        make_experiment_problem(
            {**TINY, "corpus": "text_files", "text_files": {"path": text}, "space": space, "eval_steps": 0}
        )


def test_what_a_search_has_once_is_no_dimension() -> None:
    with pytest.raises(InvalidInputError, match=r"all configurations share one budget, .*; remove space.budget"):
        make_experiment_problem({**TINY, "space": {"budget": ["1GiB"]}})


def test_a_dimension_set_to_its_default_is_pinned_too() -> None:
    plan = make_experiment_problem({**TINY, "precision": "fp32", "micro_batch_size": "8"})
    assert plan.space.dimensions["precision"] == ("fp32",)
    assert plan.space.dimensions["micro_batch_size"] == (8,)
