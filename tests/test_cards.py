"""Cards by the names that people write, cards in words, and what is said of those that torch's builds have left."""

import pytest

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.jobs.plan_settings import budget_bytes_on, targets
from pipeline.planning.rates import RATES, rates_of
from pipeline.prediction import cards as predicted
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.simulation.cards import CARDS, find_card


def test_every_card_is_found_by_its_own_names_and_nothing_else_is_called_so() -> None:
    for key, card in CARDS.items():
        assert all(find_card(name) is card for name in (key, *card.other_names))
        alike = [other.gpu for other in CARDS.values() if other.name == card.name]
        if len(alike) == 1:
            assert find_card(card.name) is card, "nvidia-smi prints this name"
        else:
            with pytest.raises(InvalidInputError, match=f"{alike[0]} .* and {alike[1]}"):
                find_card(card.name)
        assert card.memory_source and card.float32_tflops <= card.tf32_tflops <= card.half_tflops


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *(("RTX 3090", "rtx3090"), ("3090", "rtx3090"), ("RTX 4090 24GB", "rtx4090"), ("A100 80GB", "a100")),
        *(("v100 32gb", "v100-32gb"), ("Tesla V100", "v100"), ("3060 12GB", "rtx3060"), ("2080 ti", "rtx2080ti")),
        ("RTX 4090 (24 GB)", "rtx4090"),
        *(("4060 Ti 16GB", "rtx4060ti-16gb"), ("rtx a6000", "a6000"), ("RTX 6000 Ada", "rtx6000ada")),
        *(("RTX PRO 6000 Blackwell", "rtxpro6000"), ("RTX 4060 Laptop", "rtx4060laptop"), ("1080Ti", "gtx1080ti")),
    ],
)
def test_names_are_matched_as_people_write_them(text: str, key: str) -> None:
    assert find_card(text).gpu == key


def test_any_other_card_is_described_in_words() -> None:
    unnamed = find_card("memory=31.7GiB,capability=7.0")
    assert (unnamed.memory_mib, unnamed.capability, unnamed.num_multiprocessors) == (32460, (7, 0), 80)
    larger = find_card("2080 Ti,memory=22GiB")
    assert (larger.memory_mib, larger.capability) == (22528, CARDS["rtx2080ti"].capability)
    assert find_card(unnamed.gpu) == unnamed and find_card(larger.gpu) == larger
    [first, second, third] = targets("2xmemory=24GiB,capability=8.6,multiprocessors=41,t4,rtx3080,memory=20GiB")
    assert (first.count, first.memory_bytes, first.num_multiprocessors) == (2, 24576 * MIB, 41)
    assert second.name == "Tesla T4" and third.memory_bytes == 20480 * MIB
    assert rates_of(third)["float16"] == RATES["rtx3080"]["float16"] and rates_of(targets("2xt4")[0]) == RATES["t4"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory=8GiB", "needs its memory and its compute capability, and 'memory=8GiB' has no capability"),
        ("memory=8,capability=8.6", "a size is a number with a unit"),
        ("memory=8GiB,capability=8", "a compute capability is two numbers"),
        ("t4,speed=3", "a card is described by memory, capability, multiprocessors"),
        ("t4,multiprocessors=0", "multiprocessors must be a number from 1 on"),
        ("t4,a100", "one card is needed here"),
        ("rtx 9090", "the closest are rtx5090"),
        ("unknown", r"the closest are ([\w-]+, ){3}all \d+ are in \S+/cards\.csv; any other card in words"),
    ],
)
def test_what_is_no_card_is_refused_with_a_remedy(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        find_card(text)


def test_a_card_says_which_build_of_torch_it_needs_and_where_its_memory_is_not_of_torch() -> None:
    notes = {name: " ".join(predicted.notes_on_card(predicted.find_hardware(name))) for name in CARDS}
    assert "2.14 or older built for CUDA 12.6" in notes["v100"] and "CUDA 12.6" in notes["gtx1080"]
    assert "built for CUDA 11.8" in notes["k80"] and "nvidia-smi's: torch shows up to 3 % less" in notes["gb200"]
    assert not notes["t4"] and not notes["rtx5090"]


def test_what_other_processes_hold_is_not_for_torch() -> None:
    card = predicted.find_hardware("rtx3060")
    free_bytes = budget_bytes_on(None, None, card)
    assert free_bytes == card.memory_bytes - context_bytes_of(card)
    assert budget_bytes_on(None, "1.5GiB", card) == free_bytes - 1536 * MIB
    with pytest.raises(InvalidInputError, match="give one of them"):
        budget_bytes_on("8GiB", "1GiB", card)
    for held in ("12GiB", f"{free_bytes // MIB + 1}MiB"):
        with pytest.raises(InvalidInputError, match="must leave memory"):
            budget_bytes_on(None, held, card)
