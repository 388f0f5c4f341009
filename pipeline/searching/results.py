"""What a search found: its trials, the check of its answer, and all that its report needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.searching.certificate import Certificate
from pipeline.searching.trials import (
    TRIAL,
    Trial,
    best_trial,
    is_counted,
    label,
    one_per_configuration,
    speed_of,
    speed_text,
    speeds,
    unit_of,
)
from pipeline.training.metrics import with_time

OWN_COMMAND = "fitproof main --config best.yaml"
MAY_DIFFER = 100.0
"""Losses that differ by up to this multiple of what two runs of one configuration did tell nothing.

Of three losses drawn from one normal distribution, two differ by more than this multiple of what the third differs from
one of them in less than 1 of 100 cases: the ratio of the differences has the tails of a Cauchy distribution.
"""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer trained again in a clean process within the budget, and compared with a plain configuration."""

    answer: Trial
    plain: Trial | None
    """The baseline that is the same training; None if there is no other configuration to compare with."""
    num_steps: int
    max_loss_difference: float | None
    """Greatest difference of the two losses in any optimizer step."""
    tolerance: float
    """Difference that the round-off of the two number formats may cause."""
    repeat_difference: float | None = None
    """The same difference of two runs of the plain configuration, which is measured where the losses do not agree."""
    seconds_measured: float
    """Device time of all its runs, from the start of each process to its end."""
    runs: tuple[Trial, ...] = ()
    """All its runs: the answer, faster configurations that were refuted, and the plain one."""
    refuted: tuple[str, ...] = ()
    """Faster configurations that did not fit, did not complete or were slower when they were trained again."""
    was_slowed: bool = False
    """Whether this run of the answer was slowed, so that it does not count."""
    losses: tuple[float, ...] = ()
    """Of each optimizer step of the answer."""
    plain_losses: tuple[float, ...] = ()
    """The same of the plain configuration."""
    reserved_bytes: tuple[int, ...] = ()
    """What the caching allocator held after each optimizer step of the answer; empty on a CPU."""

    def is_contradicted(self, gap: float) -> bool:
        """Return whether a faster configuration failed, or the plain one was faster by more than the share `gap`."""
        failed = (
            one.outcome != Outcome.OK for one in self.runs if self.plain is None or one.choice != self.plain.choice
        )
        return any(failed) or self._is_slower_than_plain(gap)

    def _is_slower_than_plain(self, gap: float) -> bool:
        if self.plain is None or not self.answer.outcome == self.plain.outcome == Outcome.OK:
            return False
        speed, plain = self.answer.tokens_per_second, self.plain.tokens_per_second
        return speed is not None and plain is not None and speed < (1 - gap) * plain

    @property
    def same_training(self) -> bool | None:
        """Whether the losses agree; None if they were not compared, or do not tell since no run repeats itself."""
        if self.max_loss_difference is None or self.differs_as_repeats:
            return None
        return self.max_loss_difference <= self.tolerance

    @property
    def differs_as_repeats(self) -> bool:
        """Whether the losses differ by no more than chance may make of what two runs of one configuration differ by."""
        if self.max_loss_difference is None or self.repeat_difference is None:
            return False
        return self.tolerance < self.max_loss_difference <= MAY_DIFFER * self.repeat_difference

    @property
    def difference(self) -> str:
        """By how much and from which step on the losses differ, as text; empty if they agree."""
        pairs = list(zip(self.losses, self.plain_losses, strict=False))
        first = next((step for step, (one, other) in enumerate(pairs, 1) if abs(one - other) > self.tolerance), None)
        if first is None or self.plain is None:
            return ""
        share = max(abs(one - other) / abs(other) for one, other in pairs if other)
        differing = [name for name, value in self.answer.choice.items() if value != self.plain.choice.get(name)]
        of_batch = ": accumulation is not the same training here (has the model dropout, or is a mean of means taken?)"
        cause = of_batch if differing == ["micro_batch_size"] else ""
        if self.differs_as_repeats:
            cause = (
                f", and those of two runs of {label(self.plain.choice)} differ as well: this training does not repeat "
                "itself (is each seed set?), so losses do not tell whether it is the same"
            )
        return f"they differ by {100 * share:.2g} % at most, from step {first} on{cause}"

    @property
    def verdict(self) -> str:
        """The result in one short sentence."""
        if self.differs_as_repeats:
            return f"Trained again, its losses are not those of plain training; {self.difference}"
        if self.same_training is None:
            return f"Trained again: {self.answer.outcome}"
        verdict = "are" if self.same_training else "are NOT"
        difference = f"; {self.difference}" if self.difference else ""
        return f"Trained again, its losses {verdict} those of plain training{difference}"

    @property
    def summary(self) -> str:
        """The result in one sentence, with its numbers."""
        peak = self.answer.peak_bytes
        text = f"Trained again for {self.num_steps} optimizer steps in a fresh process: {self.answer.outcome}"
        text += f", {peak / MIB:,.1f} MiB" if peak else ""
        text += " (more than 40 % slower than its fastest run: its speed is not counted)" if self.was_slowed else ""
        if self.plain is not None and self.max_loss_difference is not None:
            verdict = "the same training" if self.same_training else "NOT the same training"
            verdict = "not comparable" if self.differs_as_repeats else verdict
            text += (
                f"; against {label(self.plain.choice)} its losses differ by at most {self.max_loss_difference:.2g} "
                f"(tolerance {self.tolerance:.2g}): {verdict}"
            )
            text += f"; {self.difference}" if self.difference else ""
        text += "".join(f"; {refuted}" for refuted in self.refuted)
        return text


@dataclass(frozen=True, kw_only=True)
class SearchFindings:
    """The findings of a search, from which its report is made."""

    model: str
    effective_batch_size: int
    budget_bytes: int
    num_configurations: int
    """In the whole space."""
    baselines: tuple[Mapping[str, Any], ...]
    """The answer's training by default values, the largest micro-batch first: what its speed is compared with."""
    shows_front: bool
    """Whether the answer names the Pareto front."""
    rows: tuple[Trial, ...]
    certificate: Certificate | None = None
    """None if the sampler states no bound."""
    verification: Verification | None = None
    """None if the answer was not trained again."""
    extra: tuple[Trial, ...] = ()
    """The runs of all verifications that are no trials: of this answer, of earlier ones and of what was compared."""
    notes: tuple[str, ...] = ()
    """The automatic budget, and why values of the space were removed; a sentence each."""
    settings: Mapping[str, Any]
    given: Mapping[str, str] = field(default_factory=dict)
    """The settings of the command that started the search, as they are written there."""
    command: str = OWN_COMMAND
    """What runs the answer, in the job's folder."""
    num_trials: int = 0
    """The setting: the most trials."""
    environment: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock time of the session so far by what it did, until the report was made."""
    interrupted: str | None = None
    """How far the search came, such as 3 of at most 16 trials, if it was interrupted."""

    @property
    def runs(self) -> tuple[Trial, ...]:
        """All runs: the trials, and those of verifications."""
        return (*self.rows, *self.extra)

    @property
    def best(self) -> Trial | None:
        """Return the answer, by all of its runs; None if there is none."""
        best = answer_of(self.runs, self.verification)
        return None if best is None else self.of_all_its_runs(best)

    @property
    def baseline_trial(self) -> Trial | None:
        """Return the first baseline that fits, by all of its runs; None if none was measured to fit."""
        fitting = [row for row in one_per_configuration(self.rows) if row.fits]
        found = (row for choice in self.baselines for row in fitting if row.choice == choice)
        row = next(found, None)
        return None if row is None else self.of_all_its_runs(row)

    @property
    def speedup(self) -> float | None:
        """The answer's speed as a multiple of the baseline's; None if one of them is unknown."""
        best, baseline = self.best, self.baseline_trial
        if best is None or baseline is None:
            return None
        return self.speed_of(best.choice) / self.speed_of(baseline.choice)

    @property
    def unit(self) -> str:
        """The unit of all speeds."""
        return unit_of(self.rows)

    def speed_of(self, choice: Mapping[str, Any]) -> float:
        """Return the speed of a configuration by all of its runs that count."""
        return speed_of(choice, self.runs)

    def speed_range(self, choice: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return the speeds of the slowest and of the fastest run of a configuration; None if none completed."""
        found = speeds(choice, self.runs)
        return (min(found), max(found)) if found else None

    def speed_text(self, speed: float) -> str:
        """Return a speed with its unit."""
        return speed_text(speed, self.unit)

    def is_counted(self, run: Trial) -> bool:
        """Return whether a run counts in the speed of its configuration."""
        return is_counted(run, self.runs)

    def of_all_its_runs(self, row: Trial) -> Trial:
        """Return the trial of a configuration with the configuration's speed, and the largest peaks of its runs."""
        if not row.tokens_per_second:
            return row
        runs = [run.metrics for run in self.runs if run.choice == row.choice and run.tokens_per_second]
        peaks = {
            name: max(metrics.get(name, 0.0) for metrics in runs) for name in row.metrics if name.startswith("peak_")
        }
        metrics = with_time(row.metrics, row.tokens_per_second / self.speed_of(row.choice))
        return replace(row, metrics={**metrics, **peaks})


def answer_of(runs: Sequence[Trial], verification: Verification | None) -> Trial | None:
    """Return the fastest trial that fits and was not refuted; None if there is none.

    The verified configuration is not compared again with those that its verification compared it with.
    """
    compared: list[Mapping[str, Any]] = []
    if verification is not None and verification.answer.outcome == Outcome.OK:
        compared = [one.choice for one in verification.runs if one.choice != verification.answer.choice]
    return best_trial([run for run in runs if run.source != TRIAL or run.choice not in compared])
