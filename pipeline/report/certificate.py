"""What a search proves beside its answer: the bound that it has reached, what it left out and why, and the checks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pipeline.metrics import MIB
from pipeline.report.table import Table
from pipeline.report.trials import heading, in_words


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
        told = f"{self.num_measured} measured, {counts[UNFIT]} {UNFIT}"
        told += f", {counts[SLOWER]} {SLOWER}" if counts[SLOWER] else ""
        told += f", {counts[NOT_REACHED]} left when the search ended" if counts[NOT_REACHED] else ""
        if not self.holds:
            return (
                f"No certificate: the law of time leaves {100 * self.law_is_off:.0f} % over, so Optuna's TPE went on "
                f"({told} of {self.num_configurations} configurations)"
            )
        if self.bound is None:
            return f"No certificate: nothing that fits was measured ({told} of {self.num_configurations})"
        within = max(self.bound, self.gap)
        noisy = self.left is not None and self.left <= self.gap < self.bound
        return (
            f"Within {100 * within:.3g} % of the best of {self.num_configurations} configurations, with "
            f"{100 * self.confidence:.0f} % confidence: {told}"
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
    figures: Mapping[str, float]
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
        speed, peak = self.figures.get("tokens_per_second"), self.figures.get("peak_allocated_mib")
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


def unmeasured_table(certificate: Certificate) -> Table:
    """Return what was never run and why, the fastest predicted first."""
    ordered = sorted(certificate.unmeasured, key=lambda one: one.predicted_seconds_per_step or 0)
    lines = [
        {
            **{heading(name): value for name, value in one.choice.items()},
            "predicted MiB": None if one.predicted_peak_bytes is None else one.predicted_peak_bytes / MIB,
            "predicted s/step": one.predicted_seconds_per_step,
            "why": one.reason,
        }
        for one in ordered
    ]
    forms = {"predicted MiB": "{:,.1f}", "predicted s/step": "{:.3f}"}
    return Table(name="never_run", title="never run", frame=pd.DataFrame(lines), forms=forms, num_in_terminal=8)


def verification_table(verification: Verification) -> Table:
    """Return the answer beside the plain configuration."""
    pairs = [(verification.choice, verification.outcome, verification.figures, "answer")]
    if verification.plain is not None:
        pairs.append((verification.plain, verification.plain_outcome or "", verification.plain_figures, "plain"))
    lines = [
        {
            **{heading(name): value for name, value in choice.items()},
            "outcome": outcome,
            "peak MiB": figures.get("peak_allocated_mib"),
            "tokens/s": figures.get("tokens_per_second"),
            "final loss": figures.get("final_loss"),
            "": label,
        }
        for choice, outcome, figures, label in pairs
    ]
    forms = {"peak MiB": "{:,.1f}", "tokens/s": "{:,.0f}", "final loss": "{:.4f}"}
    return Table(name="verification", title="the answer, trained again", frame=pd.DataFrame(lines), forms=forms)
