"""What a certificate says: every configuration is counted once, and nothing is claimed that was not shown."""

import re
from dataclasses import replace

from pipeline.searching.results import NOT_REACHED, SLOWER, UNFIT, Certificate, Unmeasured


def left(reason: str) -> Unmeasured:
    return Unmeasured(choice={}, predicted_peak_bytes=None, predicted_seconds_per_step=None, reason=reason)


PROVEN = Certificate(
    gap=0.01,
    bound=0.004,
    left=0.0,
    confidence=0.95,
    law_is_off=0.02,
    holds=True,
    num_configurations=10,
    num_measured=3,
    unmeasured=(*[left(UNFIT)] * 4, *[left(SLOWER)] * 3),
    seconds_measured=30.0,
    seconds_of_brute_force=100.0,
)


def counted(certificate: Certificate) -> int:
    """Return how many configurations a certificate speaks of, one by one."""
    return sum(map(int, re.findall(r"(\d+) (?:measured|predicted|left)", certificate.in_words)))


def test_a_proof_counts_every_configuration_once() -> None:
    assert PROVEN.in_words == (
        "Within 1 % of the best of 10 configurations, with 95 % confidence: "
        "3 measured, 4 predicted not to fit, 3 predicted not to be faster"
    )
    assert counted(PROVEN) == 10


def test_what_a_search_did_not_come_to_is_not_said_to_be_slower() -> None:
    ended = replace(PROVEN, bound=0.2, left=0.18, unmeasured=(*[left(UNFIT)] * 4, *[left(NOT_REACHED)] * 3))
    assert ended.in_words.startswith("Within 20 % of") and "3 left when the search ended" in ended.in_words
    assert "faster" not in ended.in_words and "noise" not in ended.in_words and counted(ended) == 10


def test_the_noise_of_measurements_is_named_where_it_is_what_is_left() -> None:
    noisy = replace(PROVEN, bound=0.03)
    assert noisy.in_words.startswith("Within 3 %") and noisy.in_words.endswith("does not let it be told")


def test_there_is_no_certificate_without_a_law_or_an_answer() -> None:
    unlawful = replace(PROVEN, holds=False, bound=None, left=None, law_is_off=0.25)
    assert unlawful.in_words.startswith("No certificate: the law of time leaves 25 % over")
    nothing = replace(PROVEN, bound=None, left=None)
    assert nothing.in_words.startswith("No certificate: nothing that fits was measured")


def test_what_was_saved_is_told_against_measuring_everything() -> None:
    assert PROVEN.saved_in_words == (
        "Device time: 30 s, 30 % of the 100 s that all configurations would have taken (estimated)"
    )
    assert replace(PROVEN, seconds_of_brute_force=None).saved_in_words is None
