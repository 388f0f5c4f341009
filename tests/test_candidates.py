"""Candidates: each configuration has its own prediction, and one without a prediction affects no other."""

from collections.abc import Iterator

import pytest
from conftest import TINY
from test_prediction import CPU

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import why_refused
from pipeline.config.experiment import make_experiment
from pipeline.config.space import Choice
from pipeline.searching.candidates import make_candidates
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.searching.setup import make_sampler
from pipeline.techniques.precision import Precision


def test_a_configuration_that_cannot_be_predicted_leaves_the_others_their_predictions() -> None:
    choices: list[Choice] = [
        {"micro_batch_size": size, "precision": precision} for size in (1, 2) for precision in ("fp32", "tf32", "bf16")
    ]
    common = {**TINY, "effective_batch_size": 2}
    candidates = make_candidates(choices, [make_experiment({**common, **choice}, "search") for choice in choices])
    assert [one.predicted_bytes is None for one in candidates] == [False, True, False] * 2
    assert candidates[1].pass_work == candidates[0].pass_work and candidates[4].pass_work == candidates[3].pass_work
    assert candidates[3].pass_work.flops == 2 * candidates[0].pass_work.flops > 0
    assert set(candidates[0].pass_work.matrix_flops) == {"float32", "float32 attention"}
    assert set(candidates[2].pass_work.matrix_flops) == {"bfloat16", "bfloat16 attention"}


def test_what_cannot_be_predicted_takes_the_work_of_another_size_in_proportion() -> None:
    choices: list[Choice] = [
        {"micro_batch_size": size, "precision": precision} for size, precision in ((4, "tf32"), (1, "fp32"))
    ]
    common = {**TINY, "effective_batch_size": 4}
    unknown, known = make_candidates(choices, [make_experiment({**common, **choice}, "search") for choice in choices])
    assert unknown.predicted_bytes is None and known.predicted_bytes is not None
    assert unknown.pass_work.flops == 4 * known.pass_work.flops and unknown.update_work == known.update_work
    assert unknown.pass_work.num_kernels == known.pass_work.num_kernels


def test_the_advice_names_only_what_may_be_in_the_space() -> None:
    space = {"micro_batch_size": [4], "checkpointing": ["none"], "precision": ["fp32"]}
    given = {**TINY, "budget": "0.1MiB", "effective_batch_size": 4, "mathematics": "exact", "space": space}
    problem = make_experiment_problem(given)
    choice = problem.space.choices[0]
    other = {**choice, "precision": "bf16"}
    assert "mathematics is exact" in str(why_refused(problem.runnable(other), other, CPU, Mathematics.EXACT))
    with pytest.raises(InvalidInputError, match="would help most") as refused:
        make_sampler(problem)
    assert "precision=bf16" not in str(refused.value)


def test_the_advice_leaves_out_what_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bf16(self: Precision, *_: object) -> Iterator[str]:
        yield from ["bf16 needs a newer device"] if self.precision == "bf16" else []

    monkeypatch.setattr(Precision, "refusals", no_bf16)
    space = {"micro_batch_size": [4], "checkpointing": ["none"], "precision": ["fp32"]}
    problem = make_experiment_problem({**TINY, "budget": "0.1MiB", "effective_batch_size": 4, "space": space})
    with pytest.raises(InvalidInputError, match="would help most") as refused:
        make_sampler(problem)
    assert "bf16" not in str(refused.value) and " 0.0 MiB" not in str(refused.value)
