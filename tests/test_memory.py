"""Budgets, devices and memory meters."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import UNIT_BYTES, parse_budget
from pipeline.memory.device import device_name, find_device, total_bytes
from pipeline.memory.meter import make_meter

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


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNIT_BYTES)))
def test_a_budget_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_budget(f"{number}{unit}", 2**80) == number * UNIT_BYTES[unit]


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
@pytest.mark.every_card
def test_the_cuda_meter_sees_allocations_and_the_context() -> None:
    """In a process that has no context yet."""
    done = subprocess.run([sys.executable, "-c", METER], cwd=ROOT, capture_output=True, text=True, check=True)
    tensor, loaded, allocated, reserved, on_device = json.loads(done.stdout)
    assert tensor <= loaded <= allocated <= reserved
    assert on_device is None or on_device > reserved
