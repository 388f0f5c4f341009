"""The benchmark of predictions on a GPU: what its table compares."""

from typing import Any

import pytest
from gpu.prediction import error_percent


@pytest.mark.parametrize(("outcome", "expected"), [("ok", 100.0), ("over_budget", 100.0), ("out_of_memory", None)])
def test_only_completed_runs_are_compared_with_their_prediction(outcome: str, expected: float | None) -> None:
    row: dict[str, Any] = {
        "predicted": {"peak_allocated_bytes": 20},
        "measured": {"peak_allocated_bytes": 10, "outcome": outcome},
    }
    assert error_percent(row, "allocated") == expected
