"""The certificate of a search: how far its answer can be from the best configuration of the space."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_PREDICTED = "not predicted"
"""Nothing is known of its memory and its work but what measured configurations show."""
UNFIT = "does not fit"
"""By its prediction, corrected by the measured ones."""
EXPECTED_UNFIT = "expected not to fit"
"""By what the predictions of others, corrected by the measured ones, let expect of it."""
FAILING = "with a value that fails"
"""Several configurations with this value failed, and none with it completed."""
SLOWER = "slower"
"""It is not likely to be faster than the answer by more than the setting `gap`."""
NOT_TRIED = "not tried yet"
"""It may fit and be faster: the search ended before."""


REPEATED_GAPS = 3
"""Bound, in units of `gap`, above which the two fastest are measured again once nothing unmeasured is worth a trial."""


def stated(bound: float | None, gap: float) -> float | None:
    """Return the bound as it is stated: not below `gap`, up to which nothing more is measured; None without one."""
    return None if bound is None else max(bound, gap)


def at_most(bound: float, confidence: float | None = None) -> str:
    """Return the bound in words: how much slower than the best configuration the answer can be."""
    text = f"at most {100 * bound:.3g} % slower than the best possible"
    return text if confidence is None else f"{text} ({100 * confidence:.0f} % confidence)"


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A configuration that was not measured."""

    choice: Mapping[str, Any]
    predicted_peak_bytes: int | None
    """None if it is not predicted, or was not yet: what is expected of it by others was enough."""
    predicted_seconds_per_step: float | None
    reason: str
    """One of NOT_PREDICTED, UNFIT, EXPECTED_UNFIT, FAILING, SLOWER and NOT_TRIED."""
    cause: str | None = None
    """Why it is not predicted, which value fails, or that it fits too closely; None for other reasons."""
    predicted_deviation: float | None = None
    """Standard deviation of the logarithm of these seconds: 0.2 is about 20 %."""
    probability_of_fit: float | None = None
    """None if no time model predicts it, as the next."""
    probability_of_improvement: float | None = None
    """Probability with which it is faster than the answer."""

    @property
    def is_refused(self) -> bool:
        """Whether it does not fit or does not run, by its prediction or by what is known of others."""
        return self.reason in (UNFIT, EXPECTED_UNFIT, FAILING)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A bound on how much slower the answer is than the best configuration, and what the bound rests on."""

    gap: float
    """The setting `gap`: the remaining improvement at which the search ends."""
    bound: float | None
    """Fraction by which the best may be faster than the answer; None if nothing fits or the model is not adequate."""
    remaining_improvement: float | None
    """Fraction by which an unmeasured one may be faster; the rest of the bound is measurement noise."""
    confidence: float
    """Probability with which the bound holds, according to the time model."""
    residual_rms: float
    """Root mean square residual of the time model, as a fraction."""
    is_adequate: bool
    """Whether that is small enough for a bound."""
    num_configurations: int
    num_measured: int
    """Those that were run, whether or not a run told their time or memory."""
    unmeasured: tuple[Unmeasured, ...]
    seconds_measured: float
    """Device time of all trials, from the start of each process to its end."""
    seconds_of_brute_force: float | None
    """Estimated device time of measuring the whole space, each configuration as long as the median trial."""
    num_failed: int = 0
    """How many of those that were run failed for another reason than memory."""
    is_of_front: bool = False
    """Whether each configuration is compared with those that need no more memory (objectives=pareto)."""
    noise: float | None = None
    """Standard deviation of the time of a run from process to process, as a fraction, as far as it is known."""

    @property
    def stated_bound(self) -> float | None:
        """The bound as it is stated, which is not below `gap`; None without one."""
        return stated(self.bound, self.gap)

    @property
    def claim(self) -> str | None:
        """The stated bound in words; None without one."""
        return None if self.stated_bound is None else at_most(self.stated_bound, self.confidence)

    @property
    def summary(self) -> str:
        """The bound and the counts in one sentence."""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        summary = f"{self.num_measured - self.num_failed} measured{failed}{self._why_not_measured}"
        if not self.is_adequate:
            return (
                f"No bound: the time model misses the measured times by {100 * self.residual_rms:.0f} %, so Optuna's "
                f"TPE chose what to measure (of {self.num_configurations} configurations {summary})"
            )
        if self.claim is None:
            return f"No bound: {self.missing} (of {self.num_configurations} {summary})"
        return f"{self.claim[0].upper()}{self.claim[1:]}: {summary}"

    @property
    def _why_not_measured(self) -> str:
        """How many configurations were not measured for each reason, as the end of a sentence."""
        num = Counter(one.reason for one in self.unmeasured)
        unfit = f"{num[UNFIT]} {'does' if num[UNFIT] == 1 else 'do'} not fit"
        slower = f"{num[SLOWER]} {'is' if num[SLOWER] == 1 else 'are'} slower"
        predicted = [text for reason, text in ((UNFIT, unfit), (SLOWER, slower)) if num[reason]]
        parts = [f"by prediction {' and '.join(predicted)}"] if predicted else []
        which = {FAILING: f" ({'; '.join(self.causes(FAILING))})"}
        reasons = [reason for reason in (EXPECTED_UNFIT, FAILING, NOT_TRIED, NOT_PREDICTED) if num[reason]]
        parts += [f"{num[reason]} {reason}{which.get(reason, '')}" for reason in reasons]
        return "".join(f", {part}" for part in parts)

    def causes(self, reason: str) -> list[str]:
        """Return the causes of those that were not measured for a reason."""
        return sorted({one.cause for one in self.unmeasured if one.reason == reason and one.cause})

    @property
    def missing(self) -> str:
        """What keeps an adequate time model from a bound."""
        if self.is_of_front:
            return "what is left may need less memory than all that was measured"
        return "nothing that fits was measured"

    @property
    def is_limited_by_trials(self) -> bool:
        """Whether an unmeasured configuration may be faster by more than `gap`, so that more trials are needed."""
        return self.remaining_improvement is not None and self.remaining_improvement > self.gap

    @property
    def limit(self) -> str | None:
        """What keeps the bound above `gap`, in words; None if nothing does."""
        remaining = self.remaining_improvement
        if self.bound is None or remaining is None or self.bound <= self.gap:
            return None
        if self.is_limited_by_trials:
            return f"the number of trials: a configuration without one may be {100 * remaining:.2g} % faster"
        noise = "" if self.noise is None else f": two runs differ by about {100 * math.sqrt(2) * self.noise:.2g} %"
        return f"the noise of this machine{noise}"

    @property
    def saved_time(self) -> str | None:
        """The device time of the trials and that of measuring every configuration, as a sentence."""
        if self.seconds_of_brute_force is None:
            return None
        share = self.seconds_measured / self.seconds_of_brute_force
        return (
            f"Device time: {self.seconds_measured:,.0f} s, {100 * share:.0f} % of the "
            f"{self.seconds_of_brute_force:,.0f} s that all configurations would have taken (estimated)"
        )
