"""The engine of simulated cards with torch's CUDA build: what it answers, what it remembers, what it never touches."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import IS_SIMULATED, ROOT
from simulated_programs import only, run, run_code

from pipeline.simulation.cards import find_card
from pipeline.simulation.library import FILE_NAME, library_for, preloaded
from pipeline.simulation.report import read_report
from pipeline.simulation.torch_build import find_torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated cards: make test-cuda")]
GIB = 2**30
NVIDIAS = re.compile(
    r"lib(cuda|cudart|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvidia-ml|nvJitLink)\w*\.so"
)


@pytest.mark.parametrize(
    ("card", "dtype", "kernels"),
    [
        ("t4", "float16", ("memory-efficient",)),
        pytest.param("rtx4090", "bfloat16", ("flash",), marks=pytest.mark.slow),
        ("h100", "bfloat16", ("cuDNN",)),
        ("h100", "float64", ()),
    ],
)
def test_the_kernel_of_attention_that_torch_chose_is_named(card: str, dtype: str, kernels: tuple[str, ...]) -> None:
    code = """
import sys, torch
heads = torch.randn(2, 4, 256, 64, device="cuda", dtype=getattr(torch, sys.argv[1]), requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
"""
    assert only(run_code(code, dtype, card=card)).attention == kernels


def test_factorizations_and_recurrent_nets_run_and_their_workspaces_are_said_to_be_assumed() -> None:
    code = """
import torch
x = torch.eye(512, device="cuda")
torch.linalg.cholesky(x), torch.linalg.eigh(x), torch.linalg.svd(x), torch.linalg.solve(x, x)
net = torch.nn.LSTM(64, 128, num_layers=2, bidirectional=True, dropout=0.1).cuda()
net(torch.randn(20, 4, 64, device="cuda"))[0].sum().backward()
assert [p.grad.shape == p.shape for p in net.parameters()]
torch.nn.GRU(8, 8).cuda()(torch.randn(3, 2, 8, device="cuda"))
torch.fft.rfft(torch.randn(4, 1000, device="cuda"))
torch.nn.Conv2d(3, 8, 3).cuda()(torch.randn(2, 3, 32, 32, device="cuda")).sum().backward()
torch.lgamma(torch.ones(8, device="cuda"))
"""
    process = only(run_code(code))
    assert not process.unmodelled
    assert {"cusolverDnXpotrf", "cudnnRNN", "cufftXtMakePlanMany", "an engine of cuDNN"} <= set(process.assumed_bytes)
    assert process.assumed_bytes["cusolverDnXpotrf"] == 512 * 512 * 8
    assert process.peak_device_bytes[0] < 2 * GIB


def test_the_weights_of_an_lstm_lie_one_after_another_in_one_buffer() -> None:
    """Torch compares the addresses that cuDNN answers with, and copies all weights where they are wrong."""
    code = """
import torch, warnings
warnings.simplefilter("error")
for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
    for more in ({}, {"bias": False}, {"bidirectional": True}, {"proj_size": 5} if kind is torch.nn.LSTM else {}):
        net = kind(7, 11, num_layers=3, **more).cuda()
        [storage] = {p.untyped_storage().data_ptr() for p in net.parameters()}
        places = sorted((p.data_ptr() - storage, p.numel() * 4) for p in net.parameters())
        assert all(a + size == b for (a, size), (b, _) in zip(places, places[1:]))
        net(torch.randn(2, 2, 7, device="cuda"))
"""
    assert not only(run_code(code)).unmodelled


def test_a_function_that_is_not_modelled_is_remembered_and_leaves_no_garbage() -> None:
    code = """
import torch, ctypes
torch.zeros(1, device="cuda")
driver = ctypes.CDLL("libcuda.so.1")
number = ctypes.c_int(12345)
assert driver.cuDeviceGetP2PAttribute(ctypes.byref(number), 0, 0, 0) == 0 and number.value == 0
"""
    assert only(run_code(code)).unmodelled == {"cuDeviceGetP2PAttribute": 1}


def test_what_a_process_did_is_known_however_it_ended(tmp_path: Path) -> None:
    from cards import environment_of

    code = """
import torch, ctypes, os, signal
child = os.fork()
x = torch.empty((1 if child else 2) * 2**30, dtype=torch.uint8, device="cuda")
if child:
    os.wait()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(ctypes.c_int()), 0, 0, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    variables = {**os.environ, **environment_of("a100"), "SIMULATED_CARD_REPORT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables)
    assert done.returncode == -signal.SIGKILL
    parent, child = sorted(read_report(tmp_path), key=lambda process: process.pid)
    context = find_card("a100").context.mib * 2**20
    assert parent.peak_device_bytes == {0: GIB + context} and parent.unmodelled == {"cuDeviceGetP2PAttribute": 1}
    assert child.peak_device_bytes == {0: 2 * GIB + context} and not child.unmodelled


def test_a_budget_is_what_is_free_on_the_card() -> None:
    code = """
import torch, sys
try:
    torch.empty(int(sys.argv[1]) * 2**20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    sys.exit(3)
assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
"""
    ends = [run_code(code, mib, card="rtx4090", budget_bytes=300 * 2**20).exit_code for mib in ("300", "301")]
    assert ends == [0, 3]


def test_nothing_of_nvidias_own_is_ever_loaded(tmp_path: Path) -> None:
    """Every library of NVIDIA's that could be found is a trap that ends the process and says so."""
    torch = find_torch(Path(sys.executable))
    names = {file.name for file in preloaded(library_for(torch))} - {FILE_NAME}
    names |= {"libcudart.so", "libcuda.so", "libnvJitLink.so.13"}
    trap = tmp_path / "trap.c"
    trap.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        '__attribute__((constructor)) static void spring(void) { fprintf(stderr, "REAL LIBRARY"); _Exit(77); }\n'
    )
    for name in names:
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(trap), "-o", str(tmp_path / name)]
        subprocess.run(command, check=True)
    code = """
import ctypes, json, os, sys
folder = sys.argv[1]
import torch, pynvml
pynvml.nvmlInit()
x = torch.randn(64, 64, device="cuda", requires_grad=True)
(torch.nn.Conv1d(64, 8, 3).cuda()(x[None]) @ torch.randn(62, 4, device="cuda")).sum().backward()
torch.fft.rfft(x), torch.linalg.cholesky(x), torch.lgamma(x)
for name in sorted(os.listdir(folder)):
    if ".so" in name:
        ctypes.CDLL(name)
        ctypes.CDLL(os.path.join(folder, name))
print(json.dumps(sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})))
"""
    variables = {"LD_LIBRARY_PATH": str(tmp_path)}
    without = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
    )
    assert without.returncode == 77, "the traps must work"
    from cards import environment_of

    environment = {**os.environ, **variables, **environment_of("h100", base={**os.environ, **variables})}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loaded = [Path(file) for file in json.loads(done.stdout)]
    own = library_for(torch).resolve()
    assert [file for file in loaded if NVIDIAS.match(file.name) and file.parent != own] == []
    assert any(file.parent == own for file in loaded)


def test_a_card_has_the_cache_that_torch_compile_clears_before_it_times_a_kernel(tmp_path: Path) -> None:
    code = "import sys, torch; open(sys.argv[1], 'w').write(str(torch.cuda.get_device_properties(0).L2_cache_size))"
    run_code(code, str(tmp_path / "bytes"), card="h200")
    assert (tmp_path / "bytes").read_text() == str(60 * 2**20)


def test_a_product_takes_longer_where_rows_do_not_suit_tensor_cores(tmp_path: Path) -> None:
    """As on a card: torch.compile times both, and pads the matrices."""
    code = """
import sys, torch
def milliseconds(num_columns):
    left, right = (torch.zeros(size, 1024, device="cuda", dtype=torch.bfloat16) for size in (2048, num_columns))
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        left @ right.t()
        end.record()
        found.append(begin.elapsed_time(end))
    return min(found)
open(sys.argv[1], "w").write(f"{milliseconds(50264)} {milliseconds(50257)}")
"""
    run_code(code, str(tmp_path / "milliseconds"))
    suiting, other = map(float, (tmp_path / "milliseconds").read_text().split())
    assert other > 2 * suiting


def test_ranks_that_torchrun_starts_have_a_card_each(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(
        """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
    )
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", str(script))
    result = run(*words, card="t4", num_cards=2, values=True)
    assert result.exit_code == 0
    first, second = sorted(result.processes, key=lambda process: min(process.peak_device_bytes))
    assert set(first.peak_device_bytes) == {0} and set(second.peak_device_bytes) == {1}
    assert first.peak_device_bytes[0] == second.peak_device_bytes[1]
    assert not first.unmodelled and not first.unknown_reads
