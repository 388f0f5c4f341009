"""The engine of simulated cards with torch's CUDA build: what it answers, what it remembers, what it never touches."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline.simulation.cards import find_card
from pipeline.simulation.library import FILE_NAME, library_for, preloaded
from pipeline.simulation.report import Process, read_report
from pipeline.simulation.run import Simulate, SimulatedRun, run_command
from pipeline.simulation.torch_build import find_torch

pytestmark = pytest.mark.gpu
GIB = 2**30
NVIDIAS = re.compile(
    r"lib(cuda|cudart|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvidia-ml|nvJitLink)\w*\.so"
)


@pytest.fixture(autouse=True)
def simulated() -> None:
    if "SIMULATED_CARD_NAME" not in os.environ:
        pytest.skip("needs simulated cards: make test-cuda")


def run(*words: str, card: str = "h100", **options: Any) -> SimulatedRun:
    wanted = Simulate(command=(sys.executable, *words), card=find_card(card), num_steps=None, **options)
    with tempfile.TemporaryDirectory() as folder:
        return run_command(wanted, Path(folder))


def run_code(code: str, *words: str, **options: Any) -> SimulatedRun:
    return run("-c", code, *words, **options)


def only(result: SimulatedRun) -> Process:
    assert result.exit_code == 0
    [process] = result.processes
    return process


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


VALUES = """
import json, sys, torch
mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).cuda()
ids = torch.arange(6, device="cuda").view(2, 3)
ids[0] = 7
picked = torch.zeros(4, device="cuda")
picked[torch.tensor([True, False, True, False]).cuda()] = 2.5
found = [
    mask.sum().item(), list(mask.nonzero().shape), bool(mask.bool().all()), ids[mask.bool()].tolist(), ids.tolist(),
    list(torch.unique(ids).shape), torch.repeat_interleave(ids[1], mask.sum(0) + 1).tolist(), picked.tolist(),
    torch.equal(picked, picked.clone()), torch.bincount(ids.flatten()).tolist(), torch.tensor(5, device="cuda").item(),
    torch.cat([ids, ids[:, :1]], 1).argmax(-1).tolist(), bool(torch.isin(ids, torch.tensor([4], device="cuda")).any()),
]
open(sys.argv[1], "w").write(json.dumps(found))
"""


def test_what_a_program_computes_from_its_own_small_tensors_is_right(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = only(run_code(VALUES, str(file), values=True))
    assert json.loads(file.read_text()) == [
        *(3, [3, 2], False, [7, 7, 3], [[7, 7, 7], [3, 4, 5]]),
        *([4], [3, 3, 3, 4, 4, 5], [2.5, 0, 2.5, 0]),
        *(True, [0, 0, 0, 1, 1, 1, 0, 3], 5, [0, 2], True),
    ]
    assert process.unknown_reads == ()


STEPS = """
import sys, torch
net = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 1000))
net = net.cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    ids = torch.randint(0, 1000, (8, 128)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(net(ids).view(-1, 1000), ids.view(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
open(sys.argv[1], "w").write(f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")
"""


def test_peaks_with_and_without_values_are_equal_and_what_was_read_is_named(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    peaks = []
    for values in (False, True):
        file = tmp_path / f"peaks-{values}"
        process = only(run(str(script), str(file), values=values))
        [read] = process.unknown_reads
        assert (read.place, read.bytes, read.count) == (f"{script}:14", 4, 3) and not read.may_steer
        peaks.append(file.read_text())
    assert peaks[0] == peaks[1]


def test_gradients_are_added_in_place_with_and_without_values(tmp_path: Path) -> None:
    code = """
import sys, torch
weight = torch.nn.Parameter(torch.zeros(4096, 1024, device="cuda"))
((torch.zeros(8, 1024, device="cuda") @ weight.t()).sum() + (2 * weight).sum() + (3 * weight).sum()).backward()
open(sys.argv[1], "w").write(str(torch.cuda.max_memory_allocated()))
"""
    files = [tmp_path / f"{values}" for values in (False, True)]
    for file in files:
        run_code(code, str(file), values=file.name == "True")
    assert files[0].read_text() == files[1].read_text()


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


def test_a_mask_that_is_not_known_may_steer_where_a_loss_does_not() -> None:
    code = """
import torch
labels, logits = torch.randint(0, 4, (8,), device="cuda"), torch.randn(8, device="cuda")
print((logits[labels != 2].mean() + logits.mean()).item())
"""
    for values in (False, True):
        reads = only(run_code(code, values=values)).unknown_reads
        assert {(read.place, read.bytes, read.may_steer) for read in reads} == {
            ("<string>:4", 4, True),
            ("<string>:4", 4, False),
        }


def test_printing_tensors_steers_nothing() -> None:
    code = """
import torch
print(torch.randn(3, device="cuda"), torch.randint(0, 4, (2,), device="cuda"))
"""
    for values in (False, True):
        reads = only(run_code(code, values=values)).unknown_reads
        assert {read.place for read in reads} == {"<string>:3"} and not any(read.may_steer for read in reads)


def test_sparse_tensors_have_no_values_and_run() -> None:
    code = """
import torch
places = torch.tensor([[0, 1], [1, 0]]).cuda()
matrix = torch.sparse_coo_tensor(places, torch.ones(2, device="cuda"), (2, 2)).coalesce()
embedding = torch.nn.Embedding(8, 4, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(embedding.parameters())
torch.sparse.mm(matrix, embedding(torch.tensor([1, 3]).cuda())).sum().backward()
optimizer.step()
"""
    assert only(run_code(code, values=True)).unmodelled == {}


def test_a_subclass_that_dispatches_as_a_tensor_does_has_values() -> None:
    """As the 4-bit parameters of bitsandbytes do, which intercept functions alone."""
    code = """
import torch
class Parameter(torch.nn.Parameter): pass
weight = Parameter(torch.tensor([1, 2]).cuda(), requires_grad=False)
assert weight.detach().sum().item() == 3
"""
    assert only(run_code(code, values=True)).unknown_reads == ()


def test_products_in_half_precision_have_values_that_are_rounded_once() -> None:
    code = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    one = torch.arange(6.0).view(2, 3).to(dtype).cuda() / 3
    other, added = one.t().contiguous(), torch.ones(2, dtype=dtype, device="cuda")
    products = torch.addmm(added, one, other), (one[None] @ other[None])[0] + added
    for product in products:
        exact = one.cpu().float() @ other.cpu().float() + 1
        assert product.dtype is dtype and torch.allclose(product.cpu().float(), exact, rtol=0.01)
"""
    assert only(run_code(code, values=True)).unknown_reads == ()


def test_what_a_known_mask_selects_has_a_known_size_with_values() -> None:
    code = """
import torch
mask = torch.tensor([True, False, True]).cuda()
assert torch.randn(3, device="cuda")[mask].shape == (2,)
"""
    assert only(run_code(code, values=True)).unknown_reads == ()


def test_a_known_mask_selects_of_a_tensor_too_large_to_be_computed_on_the_host() -> None:
    code = """
import torch
mask = torch.tensor([True, False, True]).cuda()
large = torch.randn(3, 2**20, device="cuda")
assert large[mask].shape == (2, 2**20) and large[:, :5].masked_select(mask[:, None]).shape == (10,)
mask[mask] = False
assert not mask.any()
"""
    assert only(run_code(code, values=True)).unknown_reads == ()


def test_values_take_a_bounded_part_of_the_hosts_memory_and_known_ones_stay() -> None:
    code = """
import resource, torch
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
numbers = torch.arange(4, device="cuda")
before = peak()
for _ in range(2000):
    torch.ones(2**18, device="cuda")
assert numbers.sum().item() == 6 and peak() - before < 5 * 2**28  # of 2000 MiB; freed memory is given back later
"""
    assert only(run_code(code, values=True)).unknown_reads == ()


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_parameters_are_not_known_after_a_step_of_operators_that_return_nothing(kind: str) -> None:
    code = """
import sys, torch
parameter = torch.nn.Parameter(torch.zeros(4, device="cuda"))
parameter.grad = torch.randn(4, device="cuda")
torch.optim.AdamW([parameter], **{sys.argv[1]: True}).step()
print(parameter.sum().item())
"""
    [read] = only(run_code(code, kind, values=True)).unknown_reads
    assert (read.place, read.bytes) == ("<string>:6", 4)


def test_a_read_in_the_backward_pass_is_counted_at_an_unknown_place(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import torch
x = torch.randn(8, device="cuda", requires_grad=True)
x[x > 0].sum().backward()
"""
    reads = only(run_code(code)).unknown_reads
    assert {(read.place, read.may_steer) for read in reads} == {("<string>:4", True), ("?", True)}
    assert "Traceback" not in capfd.readouterr().err


def test_a_package_whose_name_begins_like_torchs_has_lines_of_its_own() -> None:
    code = """
import os, torch
file = os.path.dirname(torch.__file__) + "metrics.py"
exec(compile("torch.randn(1, device='cuda').item()", file, "exec"))
"""
    [read] = only(run_code(code)).unknown_reads
    assert read.place.endswith("torchmetrics.py:1")


def test_the_reads_of_a_forked_process_are_its_own() -> None:
    code = """
import os, torch
if os.fork():
    os.wait()
else:
    torch.randn(1, device="cuda").item()
"""
    [read] = only(run_code(code)).unknown_reads
    assert (read.place, read.count) == ("<string>:6", 1)


def test_generation_ends_where_it_should(tmp_path: Path) -> None:
    code = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config
config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, eos_token_id=99)
model = AutoModelForCausalLM.from_config(config).cuda()
ids = torch.ones(2, 5, dtype=torch.long).cuda()
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=99)
assert out.shape == (2, 9), out.shape
"""
    process = only(run_code(code, values=True))
    assert all(read.may_steer for read in process.unknown_reads)  # whether a row has ended


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
