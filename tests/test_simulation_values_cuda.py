"""Values of simulated programs on torch's CUDA build: what is computed, what is read unknown, and what may steer."""

import json
from pathlib import Path

import pytest
from conftest import IS_SIMULATED
from simulated_programs import only, run, run_code

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated cards: make test-cuda")]


VALUES = """
import json, sys, torch
mode = torch.inference_mode(sys.argv[2] == "inference")
mode.__enter__()
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
    torch._nested_tensor_from_mask(torch.zeros(2, 3, 4, device="cuda"), mask.bool())._nested_tensor_size().tolist(),
]
mode.__exit__(None, None, None)
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_what_a_program_computes_from_its_own_small_tensors_is_right(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = only(run_code(VALUES, str(file), mode, values=True))
    assert json.loads(file.read_text()) == [
        *(3, [3, 2], False, [7, 7, 3], [[7, 7, 7], [3, 4, 5]]),
        *([4], [3, 3, 3, 4, 4, 5], [2.5, 0, 2.5, 0]),
        *(True, [0, 0, 0, 1, 1, 1, 0, 3], 5, [0, 2], True, [[2, 4], [1, 4]]),
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
peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
torch.cuda.reset_peak_memory_stats()
with torch.inference_mode():
    net(torch.randint(0, 1000, (32, 128)).cuda()).softmax(-1).topk(5).values.sort()
peaks += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
open(sys.argv[1], "w").write(str(peaks))
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


def test_an_operator_of_the_programs_own_python_code_knows_what_it_selects_and_what_it_gives_is_a_guess() -> None:
    code = """
import torch
@torch.library.custom_op("own::selected", mutates_args=())
def selected(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = (labels >= 0).nonzero().squeeze(-1)
    assert len(rows) == 2
    return labels[rows].clone()
found = selected(torch.randn(3, 4, device="cuda"), torch.tensor([5, -1, 7]).cuda())
print(found.sum().item())
"""
    [read] = only(run_code(code, values=True)).unknown_reads
    assert read.place == "<string>:9"


def test_what_a_kernel_of_triton_was_given_is_a_guess_afterwards(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("""
import torch, triton, triton.language as tl

@triton.jit
def fill(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), 1)

given, reinterpreted, other = (torch.full((8,), value, dtype=torch.int64, device="cuda") for value in (0, 0, 1))
fill[(1,)](given, 8)
fill[(1,)](triton.reinterpret(reinterpreted, tl.int64), 8)
assert other.sum().item() == 8
given.nonzero()
reinterpreted.nonzero()
""")
    reads = only(run(str(tmp_path / "kernels.py"), values=True)).unknown_reads
    assert {(read.place.rpartition(":")[2], read.may_steer) for read in reads} == {("12", True), ("13", True)}


def test_what_a_captured_graph_writes_is_a_guess() -> None:
    code = """
import torch
given, other, graph = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    given.add_(other)
given.zero_()
assert given.sum().item() == 0
graph.replay()
assert other.sum().item() == 8
given.sum().item()
"""
    [read] = only(run_code(code, values=True)).unknown_reads
    assert read.place == "<string>:10"


def test_a_program_may_divide_by_scales_that_it_reads_of_an_unknown_tensor() -> None:
    code = """
import torch
x = torch.randn(2**20, device="cuda")
class Image(torch.Tensor): pass
scales = x.max() - x.min(), x.std(), x.norm(), x.amax(), torch.linalg.vector_norm(x), x.as_subclass(Image).max()
for scale in scales:
    assert 1 / scale.item() == 1
"""
    [read] = only(run_code(code, values=True)).unknown_reads
    assert read.place == "<string>:7" and not read.may_steer


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


OF_ONE_RANK = """
import json, os, sys, torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
world, sent, outs = distributed.group.WORLD, torch.tensor([3, 5], device="cuda"), torch.zeros(6, 2, device="cuda")
group = world if torch.__version__ >= (2, 13) else world.group_name
distributed.all_gather_into_tensor(outs[0], sent.float())
distributed.reduce_scatter_tensor(outs[1], sent.float())
distributed.all_to_all_single(outs[2], sent.float())
distributed.all_gather([outs[3]], sent.float())
distributed.scatter(outs[4], [sent.float()])
distributed.gather(sent.float(), [outs[5]])
for reduce in (distributed.all_reduce, distributed.broadcast, distributed.reduce):
    reduce(sent, *([] if reduce is distributed.all_reduce else [0]))
found = [
    functional.all_reduce(sent, "sum", world) + 1, functional.reduce_scatter_tensor(sent, "avg", 0, world),
    functional.all_to_all_single(sent, None, None, world), functional.all_gather_tensor(sent, 0, world),
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(sent, "sum", group)),
    functional.broadcast(sent, 0, world), functional.all_reduce_coalesced([sent, sent + 2], "max", world)[1],
]
open(sys.argv[1], "w").write(json.dumps([outs.tolist(), sent.tolist(), *(one.tolist() for one in found)]))
distributed.destroy_process_group()
"""


def test_what_a_single_rank_receives_is_what_it_sent(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = only(run_code(OF_ONE_RANK, str(file), values=True))
    own = [3, 5]
    assert json.loads(file.read_text()) == [[own] * 6, own, [4, 6], *[own] * 5, [5, 7]]
    assert process.unknown_reads == ()


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
    reads = only(run("-c", code)).unknown_reads
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
    [read] = only(run("-c", code)).unknown_reads
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
