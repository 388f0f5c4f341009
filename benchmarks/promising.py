"""How much slower the answer of a plan is than the fastest configuration of the whole space, within many budgets.

    python benchmarks/promising.py benchmarks/promising_<date>.csv     appends the rows that the table does not have

The whole space of a case is predicted once (minutes); each plan then has these predictions. Times are estimated.
"""

import argparse
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rows import add_missing

from pipeline.base.contracts import Hardware
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.jobs.plan import make_plan
from pipeline.planning.plan import CardPlan
from pipeline.prediction.predict import Predicted, predict_each

CASES: dict[str, dict[str, Any]] = {
    "gpt2 on t4": {"gpu": "t4", "model": "gpt2", "effective_batch_size": 8},
    "gpt2 on rtx4090": {"gpu": "rtx4090", "model": "gpt2", "effective_batch_size": 64},
    "qwen3-0.6b on rtx4090": {
        "gpu": "rtx4090",
        "model": "qwen3-0.6b",
        "effective_batch_size": 16,
        "sequence_length": 512,
    },
    "smollm2-135m on t4": {"gpu": "t4", "model": "smollm2-135m", "effective_batch_size": 32, "sequence_length": 512},
}
SHARES = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""How many of the configurations fit the budget."""
NAMES = {f"{case}, {share:.1%} fit": (case, share) for case, share in product(CASES, SHARES)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The plan of a case within a budget."""

    case: str
    budget_mib: int
    num_configurations: int
    num_predicted: int
    slower_percent: float | None
    """Its answer against the fastest of all that fit; None if the plan found none that fits."""


@contextmanager
def remembered(known: dict[str, Predicted]) -> Iterator[None]:
    """Let plans take predictions from `known`, and add those that it does not have."""

    def predict(
        experiments: Sequence[Experiment], target: Hardware, *, budget_bytes: int
    ) -> Generator[tuple[int, Predicted], None, None]:
        keys = [one.settings.model_dump_json() for one in experiments]
        missing = [number for number, key in enumerate(keys) if key not in known]
        for place, outcome in predict_each([experiments[n] for n in missing], target, budget_bytes=budget_bytes):
            known[keys[missing[place]]] = outcome
        yield from ((number, known[key]) for number, key in enumerate(keys))

    names = ("pipeline.jobs.plan.predict_each", "pipeline.planning.promising.predict_each")
    with patch(names[0], predict), patch(names[1], predict):
        yield


def planned(**settings: Any) -> CardPlan:
    """Return the plan of the one card."""
    [card] = make_plan(settings).cards
    return card


@cache
def whole_space(case: str) -> tuple[CardPlan, dict[str, Predicted]]:
    """Return the plan of all configurations of a case, and their predictions."""
    known: dict[str, Predicted] = {}
    with remembered(known):
        return planned(**CASES[case], all=True), known


def made(name: str) -> Row:
    """Plan a case within a budget, twice: whole, and as a plan does."""
    case, share = NAMES[name]
    whole, known = whole_space(case)
    peaks = sorted(row.peak_bytes for row in whole.rows)
    budget_mib = -(-min(peaks[max(0, int(share * len(peaks)) - 1)], whole.budget_bytes) // MIB)
    with remembered(known):
        everything = planned(**CASES[case], budget=f"{budget_mib}MiB", all=True)
        asked = planned(**CASES[case], budget=f"{budget_mib}MiB")
    assert everything.recommended is not None
    found = asked.recommended
    ratio = None if found is None else everything.recommended.tokens_per_second / found.tokens_per_second
    return Row(
        case=name,
        budget_mib=budget_mib,
        num_configurations=len(whole.rows),
        num_predicted=len(asked.rows),
        slower_percent=None if ratio is None else round(100 * (ratio - 1), 2),
    )


def main() -> None:
    """Make the rows that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the .csv file of the rows")
    add_missing(parser.parse_args().table, Row, NAMES, made)


if __name__ == "__main__":
    main()
