"""Simulated cards: each of its cards, their memory, two of them in one machine."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cards import environment_of
from conftest import EACH_CARD, IS_SIMULATED, OnCard
from simulated_programs import run_in_fork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated cards: make test-cuda")]
MIB = 2**20
WITH_JSON = "import json, torch\n"


def printed_by_process(on_card: OnCard, card: str, code: str) -> Any:
    """Run code that prints one line of JSON in a new process on a card, and return what it says."""
    done = on_card(card, "-c", WITH_JSON + code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def printed(card: str, code: str, num_devices: int = 1, **variables: str) -> Any:
    """Do the same in a fork, which need not import torch."""
    base = {**os.environ, **variables}
    exit_code, out = run_in_fork(WITH_JSON + code, (), {**base, **environment_of(card, num_devices, base), **variables})
    assert exit_code == 0
    return json.loads(out)


@pytest.mark.parametrize("name", EACH_CARD)
def test_a_process_is_on_the_card(name: str, on_card: OnCard) -> None:
    code = """
import pynvml, subprocess
pynvml.nvmlInit()
it = torch.cuda.get_device_properties(0)
in_nvml = pynvml.nvmlDeviceGetHandleByIndex(0)
asked = ["nvidia-smi", "--query-gpu=name,memory.total,temperature.gpu", "--format=csv,noheader,nounits"]
print(json.dumps({
    "torch": [it.name, [it.major, it.minor], it.multi_processor_count, it.total_memory],
    "nvml": [pynvml.nvmlDeviceGetName(in_nvml), pynvml.nvmlDeviceGetMemoryInfo(in_nvml).total],
    "count": [torch.cuda.device_count(), pynvml.nvmlDeviceGetCount()],
    "load": [torch.cuda.utilization(), torch.cuda.temperature(), torch.cuda.power_draw(), torch.cuda.clock_rate()],
    "nvidia-smi": subprocess.check_output(asked, text=True).splitlines(),
}))
"""
    from pipeline.simulation.cards import CARDS

    card = CARDS[name]
    seen = printed_by_process(on_card, name, code)
    memory_bytes = card.memory_mib * MIB
    assert seen["torch"] == [card.name, list(card.capability), card.num_multiprocessors, memory_bytes]
    assert seen["nvml"] == [card.name, memory_bytes] and seen["count"] == [1, 1]
    assert seen["load"] == [0, 0, 0, 0]
    assert seen["nvidia-smi"] == [f"{card.name}, {card.memory_mib}, [N/A]"]


def test_nvidia_smi_lists_all_cards_or_those_that_are_named() -> None:
    code = """
import subprocess
def said(words):
    return subprocess.run(["nvidia-smi", *words.split()], capture_output=True, text=True).stdout
asked = ["-L", "-i 1", "--id=2", "--query-gpu=index,memory.free --format=csv", "--query-compute-apps=pid --format=csv"]
uuid = said("-i 1 --query-gpu=uuid --format=csv,noheader").strip()
print(json.dumps([*map(said, asked), said(f"--query-gpu=index --format=csv,noheader --id={uuid}")]))
"""
    listed, table, missing, queried, processes, of_uuid = printed("t4", code, num_devices=2)
    assert [line.split(" (")[0] for line in listed.splitlines()] == ["GPU 0: Tesla T4", "GPU 1: Tesla T4"]
    assert [line.split()[1] for line in table.splitlines() if line.startswith("|")] == ["1"]
    assert missing == "No devices were found\n" and processes == ""
    assert [line.split(",")[0] for line in queried.splitlines()] == ["index", "0", "1"]
    assert of_uuid == "1\n"


def test_without_a_cards_name_there_is_none(on_card: OnCard) -> None:
    code = "import os; del os.environ['SIMULATED_CARD_NAME']; os.execv(sys.executable, [sys.executable, '-c', inner])"
    inner = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    done = on_card("t4", "-c", f"import sys; inner = {inner!r}; {code}")
    assert done.stdout.split() == ["False", "0"], done.stderr


MEMORY = """
def seen():
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free, torch.cuda.device_memory_used()
torch.cuda.init()
readings = [seen()]
tensor = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
readings.append(seen())
[segment] = torch.cuda.memory._snapshot()["segments"]
del tensor
torch.cuda.empty_cache()
readings.append(seen())
print(json.dumps([segment["is_expandable"], *readings]))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_is_what_the_allocator_reserved_and_the_context_and_that_of_others(expandable: bool) -> None:
    sizes = {"SIMULATED_CARD_CONTEXT_MIB": "300", "SIMULATED_CARD_OTHERS_MIB": "50"}
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    is_expandable, before, during, after = printed("a100", MEMORY, **sizes, **allocator)
    assert is_expandable is expandable
    assert before == after == [0, 350 * MIB, 350 * MIB]
    assert during == [100 * MIB, 450 * MIB, 450 * MIB]


REFUSED = """
torch.cuda.set_per_process_memory_fraction(0.25)
def fits(mib):
    try:
        torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True
capped = [fits(3700), fits(3800), torch.cuda.max_memory_reserved()]
torch.cuda.set_per_process_memory_fraction(1.0)
print(json.dumps([*capped, fits(14000), fits(14900)]))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_a_cap_and_the_end_of_the_card_refuse_memory(expandable: bool) -> None:
    """A quarter of a T4's 14912 MiB is 3728 MiB; beside the context of 141 MiB, 14771 are left."""
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    within, beyond, reserved, most, all_of_it = printed("t4", REFUSED, **allocator)
    assert (within, beyond) == (True, False) and reserved <= 3728 * MIB
    assert (most, all_of_it) == (True, False)


ADDRESSES = """
kept = torch.ones(2**18, dtype=torch.uint8, device="cuda")
for _ in range(250):
    torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
with torch.cuda.stream(torch.cuda.Stream()):
    other = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
print(json.dumps([kept.data_ptr() == other.data_ptr(), torch.cuda.memory_reserved() >> 20]))
"""


def test_addresses_that_are_given_back_are_given_out_again() -> None:
    """An expandable segment takes addresses for all of a card, and 250 of them more than there are."""
    assert printed("h200", ADDRESSES, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == [False, 2 + 200]


TWO_CARDS = """
import pynvml
def used():
    free_bytes = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    by_nvml = [torch.cuda.device_memory_used(index) for index in range(torch.cuda.device_count())]
    return [total - free for free, total in free_bytes], by_nvml
before = used()
on_second = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda:1")
during = used()
on_first = torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda:0")
del on_second
torch.cuda.empty_cache()
pynvml.nvmlInit()
by_nvml = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(2)]
by_torch = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
print(json.dumps([before, during, used(), by_nvml, by_torch]))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_two_cards_count_their_memory_apart(expandable: bool) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}", "SIMULATED_CARD_CONTEXT_MIB": "1"}
    before, during, after, by_nvml, by_torch = printed("rtx4090", TWO_CARDS, num_devices=2, **variables)
    assert before == [[MIB, MIB], [MIB, MIB]]
    assert during == [[MIB, 101 * MIB], [MIB, 101 * MIB]]
    assert after == [[41 * MIB, MIB], [41 * MIB, MIB]]
    assert by_nvml == by_torch and len(set(by_nvml)) == 2


def test_visible_devices_are_those_of_the_machine_by_number() -> None:
    code = """
import pynvml
tensor = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda:0")
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used // 2**20 for handle in handles]
print(json.dumps([torch.cuda.device_count(), used, torch.cuda.device_memory_used() // 2**20]))
"""
    variables = {"CUDA_VISIBLE_DEVICES": "1", "SIMULATED_CARD_CONTEXT_MIB": "1"}
    assert printed("h200", code, num_devices=2, **variables) == [1, [0, 101], 101]


def test_what_makes_a_context_when_it_is_imported_is_left_to_the_forked_process(
    on_card: OnCard, tmp_path: Path
) -> None:
    (tmp_path / "as_torchao.py").write_text(
        "import torch\nhas_gpu = torch.cuda.is_available()\ntorch.cuda.current_device()"
    )
    code = f"""
import os, sys
from pipeline.runtime.fork_server import preload
sys.path.insert(0, {str(tmp_path)!r})
preload(["as_torchao", "colorsys"])
print(json.dumps(["as_torchao" in sys.modules, "colorsys" in sys.modules]), flush=True)
if os.fork() == 0:
    import as_torchao
    torch.zeros(1, device="cuda")
    os._exit(0 if as_torchao.has_gpu else 1)
assert os.wait()[1] == 0
"""
    assert printed_by_process(on_card, "t4", code) == [False, True]


def test_a_forked_child_has_a_context_of_its_own() -> None:
    code = """
import os
assert torch.cuda.device_count() == 1
child = os.fork()
tensor = torch.empty((2 if child else 4) * 2**20, dtype=torch.uint8, device="cuda")
(tensor + 1).sum()
if not child:
    os._exit(torch.cuda.memory_allocated() // 2**20)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([status, torch.cuda.memory_allocated() // 2**20]))
"""
    assert printed("t4", code) == [4, 2]  # each has what it allocated itself


def test_what_a_kernel_computed_reads_as_zero_but_the_answer_of_all() -> None:
    code = """
ones = torch.ones(3, device="cuda")
none, any_is = (ones == 0).all(), ones.isnan().any()
print(json.dumps([ones.tolist(), bool(none), bool(any_is), bool((ones == 0).all())]))
"""
    assert printed("h200", code) == [[0, 0, 0], False, False, True]


def test_what_the_host_put_on_a_card_can_be_read_again() -> None:
    code = """
lengths = torch.tensor([3, 5, 8], device="cuda")
pinned = torch.full((2,), 0.5).pin_memory().to("cuda", non_blocking=True)
zeros, copied = torch.zeros(2, device="cuda"), lengths.clone()
kept = [lengths.tolist(), lengths[1].item(), pinned.tolist(), zeros.tolist(), copied.tolist()]
lengths.copy_(torch.tensor([1, 2, 4]))
print(json.dumps([*kept, lengths.tolist()]))
"""
    assert printed("h200", code) == [[3, 5, 8], 5, [0.5, 0.5], [0, 0], [3, 5, 8], [1, 2, 4]]


def test_what_waits_on_the_host_has_zeros_and_takes_none_of_its_memory() -> None:
    """More than most machines have; what was there before, also on a part of a page, does not stay."""
    code = """
import psutil
before = psutil.Process().memory_info().rss
waiting = [torch.empty(2**30, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
for host in waiting:
    host[:4].fill_(7)
    host[2:-2].copy_(torch.empty(2**30 - 4, dtype=torch.uint8, device="cuda"))
taken_mib = (psutil.Process().memory_info().rss - before) >> 20
print(json.dumps([taken_mib, [host[:5].tolist() for host in waiting], int(waiting[0][2 : 2**20].max())]))
"""
    taken_mib, first, largest = printed("h200", code)
    assert taken_mib < 1024 and first == [[7, 7, 0, 0, 0]] * 4 and largest == 0


def test_the_host_cannot_touch_a_cards_memory(on_card: OnCard) -> None:
    code = "import ctypes, torch; ctypes.string_at(torch.zeros(8, device='cuda').data_ptr(), 1)"
    assert on_card("h200", "-c", code).returncode == -signal.SIGSEGV


def test_the_workspace_of_a_cudnn_engine_is_mostly_a_copy_of_the_tensors() -> None:
    code = """
from torch.nn.attention import SDPBackend, sdpa_kernel
heads = [torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
convolution = torch.nn.Conv2d(16, 32, 3, bias=False).cuda()
image = torch.empty(4, 16, 66, 66, device="cuda")
found = []
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
    for operation in (
        lambda: torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True), lambda: convolution(image)
    ):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        operation()
        found.append(torch.cuda.max_memory_allocated() - before)
print(json.dumps(found))
"""
    smallest, likely, largest = (
        printed("h200", code, SIMULATED_CARD_WORKSPACES=size) for size in ("smallest", "likely", "largest")
    )
    attention, convolution = (most - least for least, most in zip(smallest, largest, strict=True))
    heads, image, weights, made = 2 * 2 * 4 * 128 * 64, 4 * 4 * 16 * 66**2, 4 * 32 * 16 * 9, 4 * 4 * 32 * 64**2
    assert 4 * heads <= attention <= 5 * heads  # three inputs, the output, and small ones
    sums, unsplit = 32 * 2**20, 2**20  # what torch leaves of a block is at least this
    assert convolution == pytest.approx(image + weights + made + sums, abs=unsplit)
    assert likely[0] == smallest[0]
    assert likely[1] - smallest[1] == pytest.approx(image + weights + made, abs=512)  # copies with channels innermost


def test_managed_memory_takes_nothing_of_a_card() -> None:
    """Paged states of bitsandbytes' optimizers, whose own CUDA library runs."""
    code = """
from bitsandbytes.optim import AdamW32bit, PagedAdamW32bit
optimizers, found = [], []
for kind in (AdamW32bit, PagedAdamW32bit):
    parameter = torch.nn.Parameter(torch.zeros(512, 4096, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizers.append(kind([parameter]))
    before = torch.cuda.memory_allocated()
    optimizers[-1].step()
    found.append(torch.cuda.memory_allocated() - before)
print(json.dumps(found))
"""
    assert printed("h200", code) == [2 * 4 * 512 * 4096, 0]
