"""Candidates: each configuration has its own prediction, and one without a prediction affects no other."""

import pytest
from conftest import TINY

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import make_experiment
from pipeline.config.space import Choice
from pipeline.searching.candidates import make_candidates
from pipeline.searching.feasibility import make_sampler
from pipeline.searching.problem import make_problem
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
    assert set(candidates[0].pass_work.matrix_flops) == {"float32"} != set(candidates[2].pass_work.matrix_flops)


def test_the_advice_leaves_out_what_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bf16(self: Precision, hardware: Hardware) -> str | None:
        return "bf16 needs a newer device" if self.precision == "bf16" else None

    monkeypatch.setattr(Precision, "unsupported", no_bf16)
    space = {"micro_batch_size": [4], "checkpointing": ["none"], "precision": ["fp32"]}
    problem = make_problem({**TINY, "budget": "0.1MiB", "effective_batch_size": 4, "space": space})
    with pytest.raises(InvalidInputError, match="would help most") as refused:
        make_sampler(problem)
    assert "bf16" not in str(refused.value) and " 0.0 MiB" not in str(refused.value)
