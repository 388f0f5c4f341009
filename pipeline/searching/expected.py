"""What is expected of the candidates that are not predicted yet, by those that are."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.planning.expectation import Expectation
from pipeline.searching.candidates import Candidate, known_peaks, with_work_of_alike
from pipeline.searching.time_model import TimeModel


def expectation_of(candidates: Sequence[Candidate]) -> Expectation:
    """Return what is expected of candidates."""
    return Expectation([one.choice for one in candidates], [one.micro_batch_size for one in candidates])


def with_expectations(candidates: Sequence[Candidate], budget_bytes: int, kind: str) -> list[Candidate]:
    """Return the candidates; those that are not predicted yet have the expected peak and work.

    The work is that of a candidate that is alike, as much more or less as its time is expected to be, with the prior
    costs of the device's kind.
    """
    candidates = with_work_of_alike(candidates)
    peaks = {number: peak_bytes / budget_bytes for peak_bytes, number in known_peaks(candidates)}
    if not peaks:
        return candidates
    expectation, model = expectation_of(candidates), TimeModel(candidates, kind)
    prior_N, _ = model.evaluate(model.prior[0])
    expected_N = expectation.of_all({number: prior_N[number] for number in peaks})
    more_N, peaks_N = np.exp(expected_N - prior_N), expectation.of_all(peaks)

    def with_expectation(candidate: Candidate, more: float, peak: float) -> Candidate:
        if not candidate.is_expected:
            return candidate
        peak_bytes, share = max(1, int(peak * budget_bytes)), 1.0 if candidate.is_work_known else more
        return replace(
            candidate,
            pass_work=candidate.pass_work * share,
            update_work=candidate.update_work * share,
            predicted_bytes=peak_bytes,
        )

    return list(map(with_expectation, candidates, more_N.tolist(), peaks_N.tolist()))
