"""Certificates count every configuration once, and claim only what the measurements show."""

import re
from dataclasses import replace

from pipeline.searching.certificate import (
    EXPECTED_UNFIT,
    FAILING,
    NOT_PREDICTED,
    NOT_TRIED,
    SLOWER,
    UNFIT,
    Certificate,
    Unmeasured,
)


def unmeasured(reason: str) -> Unmeasured:
    return Unmeasured(choice={}, predicted_peak_bytes=None, predicted_seconds_per_step=None, reason=reason)


PROVEN = Certificate(
    gap=0.01,
    bound=0.004,
    remaining_improvement=0.0,
    confidence=0.95,
    residual_rms=0.02,
    is_adequate=True,
    num_configurations=10,
    num_measured=3,
    unmeasured=(*[unmeasured(UNFIT)] * 4, *[unmeasured(SLOWER)] * 3),
    seconds_measured=30.0,
    seconds_of_brute_force=100.0,
)


def counted(certificate: Certificate) -> int:
    """Return how many configurations a certificate speaks of, one by one."""
    return sum(map(int, re.findall(r"(\d+) (?:measured|do|does|are|is|not|expected|with)\b", certificate.summary)))


def test_a_proof_counts_every_configuration_once() -> None:
    assert PROVEN.summary == (
        "At most 1 % slower than the best possible (95 % confidence): "
        "3 measured, by prediction 4 do not fit and 3 are slower"
    )
    assert counted(PROVEN) == 10


def test_what_a_search_did_not_try_is_not_called_slower() -> None:
    ended = replace(
        PROVEN,
        bound=0.2,
        remaining_improvement=0.18,
        unmeasured=(*[unmeasured(UNFIT)] * 4, *[unmeasured(NOT_TRIED)] * 3),
    )
    assert ended.summary.startswith("At most 20 % slower") and "3 not tried yet" in ended.summary
    assert "are slower" not in ended.summary and counted(ended) == 10
    assert ended.limit == "the number of trials: a configuration without one may be 18 % faster"


def test_what_is_not_predicted_is_neither_unfit_nor_slower() -> None:
    unknown = replace(PROVEN, unmeasured=(*[unmeasured(NOT_PREDICTED)] * 5, unmeasured(UNFIT), unmeasured(SLOWER)))
    assert unknown.summary.endswith("3 measured, by prediction 1 does not fit and 1 is slower, 5 not predicted")
    nothing = replace(PROVEN, unmeasured=(unmeasured(NOT_PREDICTED),) * 7)
    assert nothing.summary.endswith("3 measured, 7 not predicted")
    assert counted(unknown) == counted(nothing) == 10


def test_what_is_expected_not_to_fit_is_counted_apart_from_what_is_predicted_not_to() -> None:
    expected = replace(PROVEN, unmeasured=(*[unmeasured(UNFIT)] * 2, *[unmeasured(EXPECTED_UNFIT)] * 5))
    assert expected.summary.endswith("3 measured, by prediction 2 do not fit, 5 expected not to fit")
    assert counted(expected) == 10


def test_a_value_that_fails_is_named() -> None:
    failing = replace(unmeasured(FAILING), cause="bf16=true")
    some = replace(PROVEN, unmeasured=(*[unmeasured(UNFIT)] * 2, *[failing] * 5))
    assert some.summary.endswith("by prediction 2 do not fit, 5 with a value that fails (bf16=true)")
    assert counted(some) == 10


def test_the_noise_of_measurements_is_named_where_it_limits_the_bound() -> None:
    noisy = replace(PROVEN, bound=0.03, noise=0.07)
    assert noisy.summary.startswith("At most 3 % slower than the best possible (95 % confidence): ")
    assert noisy.limit == "the noise of this machine: two runs differ by about 9.9 %"
    assert PROVEN.limit is None and replace(noisy, bound=None).limit is None


def test_there_is_no_certificate_without_an_adequate_time_model_or_an_answer() -> None:
    inadequate = replace(PROVEN, is_adequate=False, bound=None, remaining_improvement=None, residual_rms=0.25)
    assert inadequate.summary.startswith("No bound: the time model misses the measured times by 25 %")
    nothing = replace(PROVEN, bound=None, remaining_improvement=None)
    assert nothing.summary.startswith("No bound: nothing that fits was measured")
    front = replace(nothing, is_of_front=True)
    assert front.summary.startswith("No bound: what is left may need less memory than all that was measured")


def test_the_device_time_is_compared_with_that_of_the_whole_space() -> None:
    assert PROVEN.saved_time == (
        "Device time: 30 s, 30 % of the 100 s that all configurations would have taken (estimated)"
    )
    assert replace(PROVEN, seconds_of_brute_force=None).saved_time is None
