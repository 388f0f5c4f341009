"""The trials of a search: what each measured, the best of them, and those that no other beats."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.results import Outcome
from pipeline.base.units import MIB

TOO_LARGE = (Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET)
"""Outcomes of what does not fit."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured configuration."""

    number: int
    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    outcome: str
    detail: str | None
    fits: bool
    peak_bytes: int | None
    """The peak that the budget limits."""
    metrics: Mapping[str, float]
    """Summary metrics, named as in MLflow."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput, where it was measured to the end."""
        return self.metrics.get("tokens_per_second") if self.outcome in ("ok", "over_budget") else None

    @property
    def in_words(self) -> str:
        """What the trial showed, in a few words."""
        if self.tokens_per_second is None or self.peak_bytes is None:
            return self.outcome
        return f"{self.outcome}, {self.peak_bytes / MIB:,.1f} MiB, {self.tokens_per_second:,.0f} tokens/s"


def in_words(choice: Mapping[str, Any]) -> str:
    """Return a configuration as people say it: `micro-batch 4, checkpointing none, precision bf16`."""
    return ", ".join(f"{heading(name)} {value}" for name, value in choice.items())


def heading(dimension: str) -> str:
    """Return a dimension's name as people say it."""
    return dimension.replace("micro_batch_size", "micro-batch")


def each_once(rows: Sequence[Trial]) -> list[Trial]:
    """Return the trial of each configuration that counts: of two the one that did not fit, or the faster one.

    A configuration is measured again where its first time is doubted, since another load may have slowed it.
    """
    counting: dict[tuple[Any, ...], Trial] = {}
    for row in sorted(rows, key=lambda row: (row.outcome not in TOO_LARGE, -(row.tokens_per_second or 0))):
        counting.setdefault(tuple(row.choice.values()), row)
    return sorted(counting.values(), key=lambda row: row.number)


def best_trial(rows: Sequence[Trial]) -> Trial | None:
    """Return the fastest configuration that fits."""
    return max((row for row in each_once(rows) if row.fits), key=lambda row: row.tokens_per_second or 0, default=None)


def pareto_front(rows: Sequence[Trial]) -> list[Trial]:
    """Return the measured configurations that no other beats in both memory and throughput, the leanest first."""
    front: list[Trial] = []
    for row in sorted(measured(each_once(rows)), key=lambda row: (row.peak_bytes or 0, -(row.tokens_per_second or 0))):
        if not front or (row.tokens_per_second or 0) > (front[-1].tokens_per_second or 0):
            front.append(row)
    return front


def measured(rows: Sequence[Trial]) -> list[Trial]:
    """Return the trials that ran to their end."""
    return [row for row in rows if row.tokens_per_second is not None and row.peak_bytes is not None]


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A configuration that was never run."""

    choice: Mapping[str, Any]
    predicted_peak_bytes: int | None
    predicted_seconds_per_step: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How far the answer can be from the best configuration of the space, and what that rests on."""

    gap: float
    """Share of its time that the answer was allowed to be slower."""
    bound: float | None
    """The share reached; None where nothing that fits was measured, or the law of time does not hold."""
    left: float | None
    """Share by which an unmeasured configuration may beat the measured ones; the rest is noise of measurements."""
    confidence: float
    """Probability with which the bound holds, as the model of time has it."""
    law_is_off: float
    """Root mean square of what the law of time leaves over, as a share."""
    holds: bool
    """Whether that is little enough for the law to be believed."""
    num_configurations: int
    num_measured: int
    unmeasured: tuple[Unmeasured, ...]
    seconds_measured: float
    """Device time of all trials, from the start of each process to its end."""
    seconds_of_brute_force: float | None
    """Estimate of the same for the whole space, each configuration as long as the median trial."""

    @property
    def in_words(self) -> str:
        """The certificate as a sentence."""
        counts = Counter(one.reason for one in self.unmeasured)
        summary = f"{self.num_measured} measured, {counts[UNFIT]} {UNFIT}"
        summary += f", {counts[SLOWER]} {SLOWER}" if counts[SLOWER] else ""
        summary += f", {counts[NOT_REACHED]} left when the search ended" if counts[NOT_REACHED] else ""
        if not self.holds:
            return (
                f"No certificate: the law of time leaves {100 * self.law_is_off:.0f} % over, so Optuna's TPE went on "
                f"({summary} of {self.num_configurations} configurations)"
            )
        if self.bound is None:
            return f"No certificate: nothing that fits was measured ({summary} of {self.num_configurations})"
        within = max(self.bound, self.gap)
        noisy = self.left is not None and self.left <= self.gap < self.bound
        return (
            f"Within {100 * within:.3g} % of the best of {self.num_configurations} configurations, with "
            f"{100 * self.confidence:.0f} % confidence: {summary}"
            + ("; nearer than that the noise of measurements does not let it be told" if noisy else "")
        )

    @property
    def saved_in_words(self) -> str | None:
        """What was saved against measuring every configuration."""
        if self.seconds_of_brute_force is None:
            return None
        share = self.seconds_measured / self.seconds_of_brute_force
        return (
            f"Device time: {self.seconds_measured:,.0f} s, {100 * share:.0f} % of the "
            f"{self.seconds_of_brute_force:,.0f} s that all configurations would have taken (estimated)"
        )


UNFIT = "predicted not to fit"


SLOWER = "predicted not to be faster"


NOT_REACHED = "the search ended before it"


@dataclass(frozen=True)
class Twice:
    """A configuration that was trained twice."""

    choice: Mapping[str, Any]
    tokens_per_second: float
    """Geometric mean of the two."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer trained again in a fresh process within the budget, beside a plain configuration."""

    choice: Mapping[str, Any]
    plain: Mapping[str, Any] | None
    """The largest naive micro-batch that fits; None where there is no other configuration to compare with."""
    num_steps: int
    outcome: str
    metrics: Mapping[str, float]
    plain_outcome: str | None
    plain_figures: Mapping[str, float]
    max_loss_difference: float | None
    """Greatest difference of the two losses in any optimizer step."""
    tolerance: float
    """What the number formats of the two may make of the same training."""
    seconds_measured: float
    """Device time of all runs of it, from the start of each process to its end."""
    twice: tuple[Twice, ...] = ()
    """All that were trained again to their end, the answer among them."""
    refuted: tuple[str, ...] = ()
    """Faster configurations that did not fit, did not end, or were slower, when they were trained again."""

    @property
    def same_training(self) -> bool | None:
        """Whether the losses agree; None where they were not compared."""
        return None if self.max_loss_difference is None else self.max_loss_difference <= self.tolerance

    @property
    def verdict(self) -> str:
        """What it says of the answer, in a few words."""
        if self.same_training is None:
            return f"Trained again: {self.outcome}"
        verdict = "are" if self.same_training else "are NOT"
        return f"Trained again, its losses {verdict} those of plain training"

    @property
    def in_words(self) -> str:
        """The verification as a sentence."""
        speed, peak = self.metrics.get("tokens_per_second"), self.metrics.get("peak_allocated_mib")
        text = f"Trained again for {self.num_steps} optimizer steps in a fresh process: {self.outcome}"
        text += f", {speed:,.0f} tokens/s" if speed else ""
        text += f", {peak:,.1f} MiB" if peak else ""
        if self.plain is not None and self.max_loss_difference is not None:
            verdict = "the same training" if self.same_training else "NOT the same training"
            text += (
                f"; against {in_words(self.plain)} its losses differ by at most {self.max_loss_difference:.2g} "
                f"(tolerance {self.tolerance:.2g}): {verdict}"
            )
        text += "".join(f"; {refuted}" for refuted in self.refuted)
        return text


@dataclass(frozen=True, kw_only=True)
class SearchFindings:
    """All that the report of a search is made from."""

    entry: str
    model: str
    effective_batch_size: int
    budget_bytes: int
    num_configurations: int
    """In the whole space."""
    naive: tuple[Mapping[str, Any], ...]
    """What a person would try: default precision, no checkpointing, the largest micro-batch first."""
    shows_front: bool
    """Whether the answer names the Pareto front."""
    rows: tuple[Trial, ...]
    certificate: Certificate | None = None
    """None where the sampler proves nothing."""
    verification: Verification | None = None
    """None where the answer was not trained again."""
    settings: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def best(self) -> Trial | None:
        """Return the fastest trial that fits, and was not refuted when it was trained again; None where none does."""
        if self.verification is None:
            return best_trial(self.rows)
        verified = self.verification.choice if self.verification.outcome == "ok" else None
        return next((row for row in each_once(self.rows) if row.choice == verified), None)
