"""Budgets, devices and memory meters."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from cards import environment_of
from conftest import EACH_CARD, ROOT
from hypothesis import given
from hypothesis import strategies as st
from simulated_programs import run_in_fork

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import UNIT_BYTES, allowed_bytes, parse_budget
from pipeline.memory.device import device_name, find_device, fraction_of, occupy, total_bytes
from pipeline.memory.meter import make_meter
from pipeline.simulation.cards import CARDS

TOTAL = 16 * 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("80%", int(0.8 * TOTAL)),
        ("1.5GiB", 3 * 2**29),
        (" 8 GiB ", 8 * 2**30),
        ("100%", TOTAL),
    ],
)
def test_a_budget_is_parsed(text: str, size: int) -> None:
    assert parse_budget(text, TOTAL) == size


@pytest.mark.parametrize(
    "text", ["", "8", "8G", "8gib", "-8GiB", "GiB", "8GiB8", "1e3MiB", "nan%", "8 KiB", "80 percent"]
)
def test_an_invalid_budget_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match="write for example 8GiB"):
        parse_budget(text, TOTAL)


@pytest.mark.parametrize("text", ["0GiB", "0%", "0.0MiB"])
def test_a_budget_of_zero_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="more than zero"):
        parse_budget(text, TOTAL)


@pytest.mark.parametrize("text", ["17GiB", "101%"])
def test_a_budget_beyond_the_device_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"of 16.0 GiB; write at most 100%"):
        parse_budget(text, TOTAL)


@pytest.mark.parametrize(("text", "size"), [("100%", 0.75 * TOTAL), ("50%", 0.5 * TOTAL)])
def test_a_percentage_is_of_the_device_and_no_more_than_its_context_leaves(text: str, size: float) -> None:
    assert allowed_bytes(text, None, TOTAL, context_bytes=TOTAL // 4) == size


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNIT_BYTES)))
def test_a_budget_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_budget(f"{number}{unit}", 2**80) == number * UNIT_BYTES[unit]


@given(total_mib=st.sampled_from([14_912, 24_084, 81_152, 143_156]), step=st.integers(1, 10**6))
def test_the_cap_is_the_budget_to_the_byte(total_mib: int, step: int) -> None:
    """Torch's cap is the whole number of bytes in the share times the card's total."""
    total = total_mib * 2**20
    for budget in (step * 2**20 % total + 1, step * 999_983 % total + 1, total - step, total):
        assert int(fraction_of(budget, total) * total) == budget
        assert fraction_of(budget, total) <= 1  # as set_per_process_memory_fraction() demands


def test_every_whole_mib_of_every_card_is_a_budget_that_torch_keeps() -> None:
    for card in CARDS.values():
        total = card.memory_mib * 2**20
        budgets = range(2 * 2**20, total + 1, 2 * 2**20)
        assert [budget for budget in budgets if int(fraction_of(budget, total) * total) != budget] == []


def test_the_cpu_meter_counts_live_bytes_and_their_peak() -> None:
    meter = make_meter(torch.device("cpu"))
    kept = torch.empty(1000, dtype=torch.float32)
    meter.mark(0, "load")
    passing = torch.empty(5000, dtype=torch.float32)
    del passing
    also_kept = torch.empty(300, dtype=torch.float64)
    meter.mark(0, "forward")
    meter.stop()
    after = torch.empty(10**6)
    memory = meter.read()
    assert [(p.step, p.phase, p.allocated_bytes) for p in memory.phases] == [(0, "load", 4000), (0, "forward", 6400)]
    assert memory.peak_allocated_bytes == 24000
    assert memory.peak_reserved_bytes is None
    assert memory.peak_process_bytes >= psutil.Process().memory_info().rss / 2
    assert len(kept) + len(also_kept) + len(after) > 0


def test_settling_twice_is_harmless() -> None:
    meter = make_meter(torch.device("cpu"))
    meter.stop()
    first = meter.read()
    meter.stop()
    assert meter.read().peak_allocated_bytes == first.peak_allocated_bytes == 0


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "cpu:0", "tpu", "", "cuda:-1"])
def test_an_invalid_device_is_refused_with_the_valid_names(text: str) -> None:
    with pytest.raises(InvalidInputError, match="auto, cpu, cuda or cuda:N"):
        find_device(text)


def test_a_device_that_this_machine_lacks_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"needs a CUDA GPU, and this machine has \d+.*; use device=cpu or auto"
    ):
        find_device("cuda:99")


BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 5), True),
        ((8, 9), True),
        ((9, 0), True),
        ((12, 1), True),
        ((13, 0), True),
        ((7, 0), False),
        ((11, 0), False),
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_refused(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code runs on cards of its major version from its minor version on, PTX on all newer cards."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == torch.device("cuda:0" if runs else "cpu")
    if runs:
        assert find_device("cuda") == torch.device("cuda", 0)
        return
    with pytest.raises(InvalidInputError, match=r"kernels for \(sm_75, .*Tesla V100.* has compute capability .*12\.6"):
        find_device("cuda")


@pytest.mark.parametrize("built", [[], ["gfx90a", "gfx1100"]])
def test_a_build_that_names_no_cuda_architecture_is_not_refused(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    assert find_device("cuda") == torch.device("cuda", 0)


def test_the_cpu_has_a_name_and_a_size() -> None:
    device = find_device("cpu")
    assert total_bytes(device) == psutil.virtual_memory().total
    assert device_name(device)


METER = """
import json, torch
from pipeline.memory.meter import make_meter
meter = make_meter(torch.device("cuda", 0))
tensor = torch.empty(2**20, device="cuda")
meter.mark(0, "load")
memory = meter.read()
peaks = memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.peak_device_bytes
print(json.dumps([tensor.nbytes, memory.phases[0].allocated_bytes, *peaks]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("card", EACH_CARD)
def test_the_cuda_meter_sees_allocations_and_the_context(card: str | None) -> None:
    """In a process that has no context yet."""
    if card is None:
        words = [sys.executable, "-c", METER]
        out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    else:
        _, out = run_in_fork(METER, (), environment_of(card))
    tensor, loaded, allocated, reserved, on_device = json.loads(out)
    assert tensor <= loaded <= allocated <= reserved
    assert on_device is None or on_device > reserved


@pytest.mark.gpu
def test_a_tensor_as_large_as_the_budget_fits() -> None:
    device = torch.device("cuda", 0)
    total = total_bytes(device)
    rounded_down = (b for b in range(20 * 2**20, total, 2 * 2**20) if int(b / total * total) < b)
    budget = next(rounded_down)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    try:
        occupy(device, budget + before)
        assert torch.empty(budget, dtype=torch.uint8, device=device).nbytes == budget
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(budget + 1, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
