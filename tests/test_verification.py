"""The check of an answer: trained again, and again the next that was faster, until the fastest is so by both."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from conftest import TINY

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.report.page import to_html
from pipeline.report.search import search_report, verification_table
from pipeline.searching.experiment_problem import ExperimentProblem, make_experiment_problem, num_verified_steps
from pipeline.searching.loop import findings_of
from pipeline.searching.proposals import OptunaProposer
from pipeline.searching.results import Verification
from pipeline.searching.trials import ANSWER, Trial
from pipeline.searching.verification import VerificationRun, has_taken, verify

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def plan() -> ExperimentProblem:
    space = {"micro_batch_size": list(SIZES), "checkpointing": ["none"], "precision": ["fp32"]}
    return make_experiment_problem({**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space})


def choice_of(size: int) -> dict[str, Any]:
    return {"micro_batch_size": size, "checkpointing": "none", "precision": "fp32"}


def rows_of(trials: Mapping[int, float]) -> list[Trial]:
    return [
        Trial(
            number=size,
            choice=choice_of(size),
            outcome="ok",
            fits=True,
            metrics={"tokens_per_second": speed, "peak_allocated_mib": 1.0},
        )
        for size, speed in trials.items()
    ]


def run_of(choice: Mapping[str, Any], role: str, result: Result, metrics: dict[str, float]) -> VerificationRun:
    outcome = result.outcome
    trial = Trial(
        number=0, source=role, choice=dict(choice), outcome=outcome.value, fits=outcome is Outcome.OK, metrics=metrics
    )
    return VerificationRun(trial, result)


def verified(
    plan: ExperimentProblem, trials: Mapping[int, float], again: Mapping[int, float | Outcome]
) -> tuple[Verification | None, list[tuple[int, str]]]:
    """Return what verify() says where the trials had these speeds and training again gives those, and what it ran."""
    ran = []

    def measure(choice: Mapping[str, Any], role: str) -> VerificationRun:
        size = int(choice["micro_batch_size"])
        ran.append((size, role))
        seen = again[size]
        outcome = seen if isinstance(seen, Outcome) else Outcome.OK
        metrics = {} if isinstance(seen, Outcome) else {"tokens_per_second": seen}
        result = Result(outcome=outcome, seconds_total=2.0)
        return run_of(choice, role, result, metrics)

    done = verify(plan, rows_of(trials), lambda _: choice_of(1), measure)
    assert done is None or [(one.choice["micro_batch_size"], one.source) for one in done.runs] == ran
    return done, ran


def test_an_answer_that_is_as_fast_again_is_the_answer(plan: ExperimentProblem) -> None:
    done, ran = verified(plan, {1: 50.0, 2: 80.0, 4: 100.0}, {1: 50.0, 4: 98.0})
    assert (
        done is not None
        and done.answer.choice == choice_of(4)
        and done.plain is not None
        and done.plain.choice == choice_of(1)
    )
    assert ran == [(4, "answer"), (1, "plain")] and done.refuted == () and done.seconds_measured == 4.0
    assert [(one.choice, one.tokens_per_second) for one in done.runs] == [
        (choice_of(4), 98.0),
        (choice_of(1), 50.0),
    ]


def test_a_lucky_trial_loses_to_the_next(plan: ExperimentProblem) -> None:
    done, ran = verified(plan, {1: 50.0, 2: 96.0, 4: 100.0}, {1: 50.0, 2: 97.0, 4: 91.0})
    assert done is not None and done.answer.choice == choice_of(2)
    assert ran == [(4, "answer"), (2, "answer"), (1, "plain")]
    assert "micro-batch 4" in done.refuted[0] and "slower by the mean of its runs" in done.refuted[0]


def test_a_lucky_trial_that_is_still_faster_stays(plan: ExperimentProblem) -> None:
    done, ran = verified(plan, {1: 50.0, 2: 96.0, 4: 100.0}, {1: 50.0, 2: 90.0, 4: 91.0})
    assert done is not None and done.answer.choice == choice_of(4) and done.refuted == () and len(ran) == 3


def test_a_slowed_run_of_the_answer_does_not_refute_it(plan: ExperimentProblem) -> None:
    done, ran = verified(plan, {1: 50.0, 2: 96.0, 4: 100.0}, {1: 50.0, 4: 60.0})
    assert done is not None and done.answer.choice == choice_of(4) and done.refuted == () and len(ran) == 2
    assert "(more than 40 % slower than its fastest run: its speed is not counted)" in done.summary


def test_what_does_not_fit_again_is_refuted(plan: ExperimentProblem) -> None:
    done, _ = verified(plan, {2: 80.0, 4: 100.0}, {1: 50.0, 2: 80.0, 4: Outcome.OVER_BUDGET})
    assert done is not None and done.answer.choice == choice_of(2) and done.answer.outcome == "ok"
    assert "ended over_budget when it was trained again" in done.refuted[0]
    done, ran = verified(plan, {4: 100.0}, {4: Outcome.CRASHED})
    assert done is not None and done.answer.outcome == "crashed" and ran == [(4, "answer")]
    assert [one.outcome for one in done.runs] == ["crashed"]


def test_what_an_earlier_verification_refuted_is_not_trained_again(plan: ExperimentProblem) -> None:
    failed = Trial(number=0, source=ANSWER, choice=choice_of(4), outcome="crashed", fits=False, metrics={})
    runs, ran = [*rows_of({2: 80.0, 4: 100.0}), failed], []

    def measure(choice: Mapping[str, Any], role: str) -> VerificationRun:
        ran.append((choice["micro_batch_size"], role))
        result = Result(outcome=Outcome.OK, seconds_total=2.0)
        return run_of(choice, role, result, {"tokens_per_second": 80.0})

    done = verify(plan, runs, lambda _: choice_of(1), measure)
    assert done is not None and done.answer.choice == choice_of(2) and ran == [(2, "answer"), (1, "plain")]
    assert not done.is_contradicted(plan.settings.gap)


def test_the_peak_of_the_answer_is_the_largest_of_its_runs(plan: ExperimentProblem) -> None:
    rows = rows_of({2: 80.0, 4: 100.0})
    again = replace(rows[1], source=ANSWER, metrics={**rows[1].metrics, "peak_allocated_mib": 3.0})
    best = findings_of(plan, [*rows, again]).best
    assert best is not None and best.choice == choice_of(4) and best.peak_bytes == 3 * MIB
    assert "It peaks at 3.0 MiB (1,021.0 MiB of headroom)" in search_report(findings_of(plan, [*rows, again])).answer


def test_the_baseline_that_is_the_answer_is_not_its_own_rival(plan: ExperimentProblem) -> None:
    done, ran = verified(plan, {1: 100.0, 2: 80.0}, {1: 100.0})
    assert done is not None and done.plain is None and ran == [(1, "answer")]


def test_nothing_that_fits_is_nothing_to_check(plan: ExperimentProblem) -> None:
    assert verified(plan, {}, {})[0] is None


def test_its_peak_is_the_one_that_the_budget_limits(plan: ExperimentProblem) -> None:
    done, _ = verified(plan, {4: 100.0}, {1: 50.0, 4: 98.0})
    assert done is not None
    metrics = {**done.answer.metrics, "peak_allocated_mib": 7.0, "peak_reserved_mib": 9.0}
    on_cuda = replace(done, answer=replace(done.answer, metrics=metrics))
    assert not done.was_slowed
    assert ": ok, 9.0 MiB; against" in replace(on_cuda, max_loss_difference=0.0).summary
    assert verification_table(on_cuda).frame["peak MiB"][0] == 9.0


def test_the_plain_training_has_the_optimizer_of_the_answer() -> None:
    space = {"micro_batch_size": [1, 4], "optimizer": ["adamw", "sgd"], "precision": ["fp32", "bf16"]}
    shared = {**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space}
    with pytest.raises(InvalidInputError, match="set mathematics=different to allow it"):
        make_experiment_problem({**shared, "space": {**space, "optimizer": ["sgd"]}})
    assert make_experiment_problem(shared).space.dimensions["optimizer"] == ("adamw",)
    problem = make_experiment_problem({**shared, "mathematics": "different"})
    sgd, adamw = ({"micro_batch_size": 4, "optimizer": name, "precision": "bf16"} for name in ("sgd", "adamw"))
    sizes, plain = (4, 1), {"precision": "fp32"}
    assert problem.baseline_beside(adamw) == problem.baselines
    assert problem.baselines == [{"micro_batch_size": size, "optimizer": "adamw", **plain} for size in sizes]
    beside = problem.baseline_beside(sgd)
    assert beside == [{"micro_batch_size": size, "optimizer": "sgd", **plain} for size in sizes]
    proposer = OptunaProposer(problem, cast(Any, None))
    for measured in (beside[1], problem.baselines[1]):
        assert proposer.baseline([replace(rows_of({1: 50.0})[0], choice=measured)], sgd) == beside[1]
    assert proposer.baseline(rows_of({}), sgd) is None


def test_the_plain_training_is_a_configuration_of_the_space() -> None:
    space = {"micro_batch_size": [1, 4], "weights": ["float32", "bfloat16"], "loss_kernel": ["fused", "chunked"]}
    shared = {**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space, "mathematics": "different"}
    problem = make_experiment_problem(shared)
    answer = {"micro_batch_size": 1, "weights": "bfloat16", "loss_kernel": "chunked"}
    assert problem.baselines == [
        {"micro_batch_size": size, "weights": "float32", "loss_kernel": "fused"} for size in (4, 1)
    ]
    assert {**answer, "loss_kernel": "fused"} not in problem.space.choices
    assert problem.baseline_beside(answer) == [{**answer, "micro_batch_size": 4}, answer]
    proposer, fits = OptunaProposer(problem, cast(Any, None)), rows_of({1: 50.0})[0]
    rows = [replace(fits, choice=problem.baselines[0])]
    assert proposer.baseline(rows, answer) == {**answer, "micro_batch_size": 4}
    too_large = replace(fits, number=1, choice={**answer, "micro_batch_size": 4}, fits=False)
    assert proposer.baseline([*rows, too_large], answer) is None


def test_it_trains_with_the_policies_of_the_trial() -> None:
    space = {"micro_batch_size": [1], "checkpointing": ["full:50%"], "precision": ["fp32"]}
    problem = make_experiment_problem({**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space})
    [choice] = problem.space.choices
    trial: Any = problem.runnable(choice).settings
    again: Any = problem.verified(choice).settings
    assert again.checkpointing == trial.checkpointing == "full:50%"
    assert again.num_steps == problem.settings.verify_steps


def with_base(plan: ExperimentProblem, **changes: Any) -> ExperimentProblem:
    return replace(plan, base=Experiment(plan.base.settings.model_copy(update=changes)))


def test_a_gpu_verifies_varying_lengths_for_longer(plan: ExperimentProblem) -> None:
    few, many = plan.settings.verify_steps, plan.settings.verify_varying_steps
    assert few < many == 100
    for sequences, on_card in (("packed", few), ("fixed_length", few), ("padded", many), ("grouped", many)):
        assert num_verified_steps(with_base(plan, sequences=sequences, device="cuda:0")) == on_card
        assert num_verified_steps(with_base(plan, sequences=sequences)) == few
    dimension = replace(plan.space, dimensions={**plan.space.dimensions, "sequences": ("packed", "padded")})
    assert num_verified_steps(replace(with_base(plan, device="cuda:0"), space=dimension)) == many
    asked = replace(plan, settings=plan.settings.model_copy(update={"verify_varying_steps": 20}))
    assert num_verified_steps(with_base(asked, sequences="padded", device="cuda:0")) == 20
    assert [has_taken(3, [1.0] * count) for count in (2, 3, 4)] == [False, True, True]


def trained(num_steps: int, away: float = 0.0) -> Result:
    """Return the result of a run on a card; its losses are `away` from 2 in the first ten steps, and 9 after them."""
    steps = tuple(
        StepRecord(
            step=number,
            loss=2.0 + away if number < 10 else 9.0,
            grad_norm=1.0,
            seconds=1.0,
            tokens=1,
            positions=1,
            learning_rate=1.0,
            skipped=False,
            reserved_bytes=(10 + number) * MIB,
        )
        for number in range(num_steps)
    )
    return Result(outcome=Outcome.OK, steps=steps, seconds_total=2.0)


def test_a_longer_run_of_the_answer_is_compared_over_the_steps_of_the_plain_one(plan: ExperimentProblem) -> None:
    speed = {"tokens_per_second": 98.0, "effective_batch_size": 4.0, "predicted_peak_reserved_mib": 60.0}

    def measure(choice: Mapping[str, Any], role: str) -> VerificationRun:
        return run_of(choice, role, trained(100) if role == "answer" else trained(10, away=1e-6), speed)

    trials = rows_of({4: 100.0})
    done = verify(plan, trials, lambda _: choice_of(1), measure)
    assert done is not None and done.same_training and done.num_steps == 100
    assert done.max_loss_difference == pytest.approx(1e-6)
    assert done.tolerance == pytest.approx(2.0 * 2.0**-17)
    assert done.reserved_bytes == tuple((10 + number) * MIB for number in range(100))
    page = to_html(search_report(findings_of(plan, trials, None, done)))
    assert "reserved memory over the steps" in page
    on_cpu = replace(done, reserved_bytes=())
    assert "reserved memory over the steps" not in to_html(search_report(findings_of(plan, trials, None, on_cpu)))


def test_an_answer_that_runs_out_of_memory_as_lengths_vary_is_refuted(plan: ExperimentProblem) -> None:
    speed = {"tokens_per_second": 98.0, "effective_batch_size": 4.0}

    def measure(choice: Mapping[str, Any], role: str) -> VerificationRun:
        whole = trained(100)
        if choice["micro_batch_size"] == 4:
            return run_of(choice, role, replace(whole, outcome=Outcome.OUT_OF_MEMORY, steps=whole.steps[:70]), {})
        return run_of(choice, role, whole, speed)

    done = verify(plan, rows_of({2: 80.0, 4: 100.0}), lambda _: choice_of(1), measure)
    assert done is not None and done.answer.choice == choice_of(2) and done.is_contradicted(gap=0.01)
    assert "micro-batch 4" in done.refuted[0] and "out_of_memory" in done.refuted[0]
