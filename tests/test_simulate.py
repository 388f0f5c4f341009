"""`simulate`: commands on simulated cards, and what is said of their memory."""

import json
import os
import pickle
import re
import shlex
import socketserver
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from conftest import ROOT
from project import Project, new_store

from fitproof import InvalidInputError
from fitproof import simulate as simulate_here
from pipeline.cli import main
from pipeline.memory.breakdown import at_peak
from pipeline.prediction.commands.memory_check import CheckVerdict, MemoryCheck
from pipeline.prediction.commands.simulation import LATE_OPTIMIZER, NEEDS_KNOWN_WORKSPACES, OWN_UPDATES
from pipeline.prediction.commands.snapshot import history_of
from pipeline.report.findings import read_findings
from pipeline.report.simulation import answer
from pipeline.simulation.cards import CARDS
from pipeline.simulation.environment import environment
from pipeline.simulation.record import Record, read_records

README = (ROOT / "README.md").read_text()
CUDA_PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
needs_cuda_build = pytest.mark.skipif(not CUDA_PYTHON.exists(), reason="needs .venv-cuda, which `make test-cuda` makes")

SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
rows = int(sys.argv[1])
for step in range(5):
    x = torch.ones(rows, 1024, device="cuda")
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
    torch.cuda.reset_peak_memory_stats()
"""
LINE_OF_FORWARD = "train.py:11"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder with the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    new_store(tmp_path)
    return Project(tmp_path, {"PYTHONPATH": str(ROOT)})


def simulate(project: Project, *words: str, gpu: str = "rtx4090", **settings: str) -> Any:
    """Run the command on a simulated card."""
    return project.here("simulate", {"gpu": gpu, **settings}, "--", str(CUDA_PYTHON), *words)


def findings(project: Project) -> Any:
    """Return what the last simulation found."""
    return read_findings(sorted(project.folder.glob("runs/*-simulate-*"))[-1])


@pytest.mark.quick
@needs_cuda_build
def test_a_script_that_fits_is_told_in_bytes_lines_and_cards(project: Project) -> None:
    done = simulate(project, "train.py", "4096")
    assert done.returncode == 0, done.stderr
    printed = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("peak")]
    assert len(printed) == 2  # the third step ends the script
    found = findings(project)
    largest = found.largest
    assert (found.verdict, largest.num_steps, largest.ended_by) == ("fits", 3, "its number of steps")
    assert largest.peak_allocated_bytes == max(
        allocated for allocated, _ in printed
    )  # kept through the script's resets
    assert largest.peak_reserved_bytes == max(reserved for _, reserved in printed)
    parameters = 4 * (2 * 1024 * 4096 + 1024 + 4096)
    assert largest.peak.category_bytes["parameters"] == parameters
    assert largest.peak.category_bytes["optimizer state"] == pytest.approx(2 * parameters, abs=64)
    assert {line.rpartition(":")[0] for line in largest.peak.module_bytes} == {"train.py"}
    assert found.smallest_bytes <= largest.device_bytes
    alike = [CARDS[name] for name in found.cards_that_fit]
    assert {"l4", "rtx4090", "l40s"} <= {card.gpu for card in alike} and {card.capability for card in alike} == {(8, 9)}
    assert [card.memory_mib for card in alike] == sorted(card.memory_mib for card in alike)
    run = project.parent_of("simulate")
    assert run.data.metrics["memory/peak_allocated_mib"] == pytest.approx(largest.peak_allocated_bytes / 2**20)
    assert (run.data.tags["verdict"], run.data.tags["with_values"]) == ("fits", "false")


@needs_cuda_build
def test_a_script_that_does_not_fit_ends_with_the_line_that_asked_for_too_much(project: Project) -> None:
    """With --json, all of stdout is the answer; the last lines of a terminal have it in words."""
    command = ("--", str(CUDA_PYTHON), "train.py", "2000000")
    given = {"gpu": "rtx4090", "budget": "23000MiB", "time_limit": "500.0"}
    done = project.here("simulate", given, "--json", *command)
    assert done.returncode == 3, done.stderr
    assert "torch.OutOfMemoryError" in done.stderr  # the script's own traceback
    found = findings(project)
    failed = found.out_of_memory
    assert (found.verdict, failed.line) == ("does not fit", LINE_OF_FORWARD)
    assert failed.wanted_bytes > failed.free_bytes
    assert found.largest.device_bytes > found.memory_bytes  # told by the run on a card with room
    assert found.largest.num_steps == 3
    assert found.smallest_bytes > found.memory_bytes
    assert found.memory_bytes < found.smallest_expandable_bytes <= 1.01 * found.smallest_bytes

    content = json.loads(done.stdout)
    assert (content["kind"], content["verdict"]) == ("Simulation", "does not fit")
    assert content["out_of_memory"]["line"] == LINE_OF_FORWARD
    assert content["processes"][0]["peak"]["category_bytes"]["activations"] > 0
    *_, answer = re.split(r"(?=Does not fit NVIDIA)", done.stderr)
    less = r"With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True [\d,]+ MiB are enough, [\d,]+ MiB less\."
    said = " ".join(answer.split())
    assert re.search(rf"none that Fitproof knows\. {less} This is of torch .*defaults\.", said)
    [page] = project.folder.glob("runs/*-simulate-*/report.html")
    _, advice = page.read_text().split("<h2>what to try</h2>")
    assert advice.index("Gradient checkpointing keeps fewer activations") < advice.index("<h2>memory</h2>")
    repeated = f"fitproof simulate {' '.join(f'--{name} {value}' for name, value in given.items())} -- "
    assert f'data-copied="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {repeated}' in advice


@needs_cuda_build
def test_options_that_a_script_gives_the_allocator_itself_are_those_of_the_smallest_memory(train_py: Path) -> None:
    own = 'import os\nos.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"\n'
    train_py.write_text(own + SCRIPT)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py", "4096"], gpu="t4")
    assert found.smallest_bytes == found.smallest_expandable_bytes <= found.largest.device_bytes
    assert "expandable_segments:True" in found.answer and "are enough" not in found.answer


@needs_cuda_build
def test_the_example_of_the_readme_fits_as_it_says() -> None:
    [example] = re.findall(r"\$ fitproof simulate --gpu (\w+) -- python (.*)\n((?:.+\n)+?)```", README)
    gpu, words, answer = example
    done = simulate(Project(ROOT), *shlex.split(words), gpu=gpu)
    stated, said = " ".join(answer.split()), " ".join(done.stdout.split())
    assert done.returncode == 0 and stated in said, done.stdout + done.stderr


@needs_cuda_build
def test_a_script_that_fails_gets_no_verdict(project: Project) -> None:
    done = simulate(project, "train.py", "many")
    assert done.returncode == 1
    assert "ValueError" in done.stderr and "No verdict" in done.stdout


GAN = """
import gc, sys, torch
from torch import nn
made = nn.Sequential(*[nn.Linear(2048, 2048, device="cuda") for _ in range(4)])
critic = nn.Linear(2048, 1).cuda()
untrained = nn.Linear(2048, 2048).cuda()
of_made, of_critic = torch.optim.AdamW(made.parameters()), torch.optim.AdamW(critic.parameters())
if sys.argv[2:]:
    gc.freeze()  # gc.get_objects leaves all of them out from here on
for step in range(1, 13):
    critic(torch.ones(8, 2048, device="cuda")).mean().backward()
    of_critic.step()
    of_critic.zero_grad()
    if step % int(sys.argv[1]) == 0:
        critic(made(torch.ones(8, 2048, device="cuda"))).mean().backward()
        of_made.step()
        of_made.zero_grad()
"""


@needs_cuda_build
def test_an_optimizer_that_steps_later_than_another_is_waited_for(train_py: Path) -> None:
    train_py.write_text(GAN)

    def run(*words: str, steps: str) -> Any:
        return simulate_here(command=[str(CUDA_PYTHON), "train.py", *words], gpu="t4", steps=steps, smallest=False)

    ended, frozen, whole, never = (
        run("4", steps="3"),
        run("4", "frozen", steps="3"),
        run("4", steps="all"),
        run("100", steps="1"),
    )
    for one in (ended, frozen):
        assert (one.verdict, one.largest.num_steps) == ("fits", 9)  # two of the generator, and the critic's next
        assert one.largest.peak_allocated_bytes == whole.largest.peak_allocated_bytes
        assert one.largest.peak.category_bytes["parameters"] == 4 * (5 * 2048 * 2049 + 2049)
    assert (never.verdict, never.exit_code, never.largest.num_steps) == ("no verdict", 0, 10)
    assert LATE_OPTIMIZER in never.notes and "one of its optimizers took too few steps" in never.answer


WITHOUT_OPTIMIZER = """
import sys, torch
from torch import nn
net, kind = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda(), sys.argv[1]

def passes():
    for _ in range(2):
        x = torch.ones(8, 1024, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True).mean().backward()  # one backward inside another

class Empty(nn.Module):
    def __init__(self):
        pass  # and so it has no parameters, not even none

empty, moments = Empty(), {}
torch.ones(1, device="cuda", requires_grad=True).sum().backward()  # a look at whether the card works
if kind == "torch":
    passes()
    net.zero_grad()
    optimizer = torch.optim.AdamW(net.parameters())  # made late
for step in range(25):
    for _ in range(15 if kind == "torch" and step < 2 else 1):
        passes()
        if kind == "torch":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if kind == "torch":
        optimizer.step()
        optimizer.zero_grad()
    for p in net.parameters() if kind != "torch" else ():
        moment = moments.setdefault(p, torch.zeros_like(p))
        if kind == "in place":
            p.data.add_(moment.mul_(0.9).add_(p.grad), alpha=-0.1)
            p.grad.zero_()
        else:
            with torch.no_grad():
                p -= moment.mul_(0.9).add_(p.grad)
            p.grad = None
"""


@needs_cuda_build
@pytest.mark.parametrize("kind", ["in place", "none", "torch"])
def test_a_script_without_an_optimizer_of_torch_is_ended_once_it_has_used_its_gradients_often(
    train_py: Path, kind: str
) -> None:
    train_py.write_text(WITHOUT_OPTIMIZER)
    ended, whole = (
        simulate_here(command=[str(CUDA_PYTHON), "train.py", kind], gpu="t4", steps=steps, smallest=False)
        for steps in ("2", "all")
    )
    assert (ended.verdict, ended.largest.ended_by) == ("fits", "its number of steps")
    assert ended.largest.num_steps == (2 if kind == "torch" else 20)
    assert ended.largest.peak_allocated_bytes == whole.largest.peak_allocated_bytes
    parameters = 4 * 4 * 1025 * 1024
    assert whole.largest.peak.category_bytes == ended.largest.peak.category_bytes
    if kind != "torch":
        purposes = ("parameters", "gradients", "optimizer state")
        assert {ended.largest.peak.category_bytes[name] for name in purposes} == {parameters}
    assert (OWN_UPDATES in ended.notes) == (kind != "torch")


@pytest.mark.slow
@needs_cuda_build
def test_what_the_time_limit_cut_short_is_not_known_of_a_card_with_room_either(train_py: Path) -> None:
    script = SCRIPT.replace("optimizer.zero_grad()", "optimizer.zero_grad()\n    time.sleep(600)")
    train_py.write_text(f"import time{script}")
    command = [str(CUDA_PYTHON), "train.py", "64"]
    found = simulate_here(command=command, gpu="t4", budget="60MiB", time_limit=30)
    assert (found.verdict, found.largest.num_steps, found.smallest_bytes) == ("does not fit", 1, None)
    assert "On a card with room the time limit ended it after 1 optimizer steps: what it needs" in " ".join(found.notes)


LAUNCHER = """
import subprocess, sys
started = subprocess.Popen([sys.executable, "train.py", "64"])
import torch
sys.exit(started.wait())
"""


@needs_cuda_build
def test_a_launcher_waits_at_the_time_limit_for_the_records_and_what_is_left_is_ended(train_py: Path) -> None:
    leaves = 'import pathlib, subprocess, time\nleft = subprocess.Popen(["sleep", "600"])\n'
    ends = 'optimizer.zero_grad()\n    if step == 2:\n        pathlib.Path("left").write_text(str(left.pid))\n'
    script = SCRIPT.replace("optimizer.zero_grad()", f"{ends}        time.sleep(600)")
    train_py.write_text(leaves + script)
    train_py.with_name("launcher.py").write_text(LAUNCHER)
    command = [str(CUDA_PYTHON), "launcher.py"]
    found = simulate_here(command=command, gpu="t4", steps="all", time_limit=20, smallest=False)
    assert (found.verdict, found.largest.num_steps, found.largest.ended_by) == ("fits", 3, "the time limit")
    left = int(Path("left").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


SHARED = """
import multiprocessing, sys
from torch import nn, ones, optim

def work():
    net = nn.Linear(8192, 8192, bias=False, device="cuda")
    optimizer = optim.AdamW(net.parameters(), foreach=False)
    for _ in range(3):
        net(ones(8, 8192, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    processes = [multiprocessing.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
        if sys.argv[1] == "one after another":
            process.join()
    for process in processes:
        process.join()
"""


@needs_cuda_build
def test_processes_on_one_card_are_added_if_they_run_at_the_same_time(train_py: Path) -> None:
    train_py.write_text(SHARED)

    def run(how: str, budget: str, smallest: bool = True) -> Any:
        command = [str(CUDA_PYTHON), "train.py", how]
        return simulate_here(command=command, gpu="t4", budget=budget, smallest=smallest)

    alone = run("one after another", "2GiB", smallest=False)
    assert (alone.verdict, len(alone.processes), alone.shared_bytes) == ("fits", 2, None)
    together = 2 * alone.largest.device_bytes
    tight, roomy = run("together", "2GiB"), run("together", "10GiB")
    assert (tight.verdict, tight.exit_code, tight.shared_bytes) == ("no verdict", 0, together)
    assert f"2 processes used card 0 at the same time: together at most {together / 2**20:,.1f} MiB" in tight.notes[0]
    assert "its processes may need more of a card together than it has" in tight.answer
    left = (roomy.memory_bytes - together) / 2**20
    assert roomy.verdict == "fits" and f"with {left:,.1f} of" in roomy.answer
    assert tight.smallest_bytes is None and roomy.smallest_bytes is None


FAILURES = {
    "no such GPU": (
        'import torch\ntorch.ones(1, device="cuda:3")',
        "invalid device ordinal",
        ["It asked for cuda:3, and sees 1 of the machine's GPUs: a real card refuses that as well."],
    ),
    "a download while offline": (
        'import torch\ntorch.hub.load_state_dict_from_url("http://127.0.0.1:1/weights.pt", "weights")',
        "Connection refused",
        [],
    ),
    "an extension of another torch": ("import torch, extension", "undefined symbol: of_another_torch", []),
    "memory of a card read by the host": (
        'import ctypes, torch\nx = torch.ones(1, device="cuda")\nctypes.string_at(x.data_ptr(), 4)',
        'train.py", line 3 in <module>',
        ["It touched memory of a card from the host: a real card refuses that as well."],
    ),
}


@needs_cuda_build
@pytest.mark.matrix(2)
@pytest.mark.parametrize(("script", "said", "notes"), FAILURES.values(), ids=FAILURES)
def test_what_would_fail_on_a_real_machine_fails_here_and_says_why(
    script: str, said: str, notes: list[str], train_py: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_py.write_text(script)
    train_py.with_name("extension.c").write_text(
        "void of_another_torch(void);\nvoid PyInit_extension(void) { of_another_torch(); }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "extension.c", "-o", "extension.so"], check=True)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", smallest=False)
    assert (found.verdict, found.largest, list(found.notes)) == ("no verdict", None, notes)
    assert found.exit_code != 0 and said in capfd.readouterr().err


@needs_cuda_build
@pytest.mark.parametrize("name", ["-lcuda", "-l:libcuda.so.1"], ids=["Triton of torch 2.8", "later"])
def test_triton_can_link_its_launchers_to_the_drivers_library(name: str, tmp_path: Path) -> None:
    folder = environment(CARDS["t4"], python=CUDA_PYTHON)["TRITON_LIBCUDA_PATH"]
    source = ("-x", "c", "/dev/null", "-x", "none")
    subprocess.run(["cc", "-shared", *source, name, f"-L{folder}", "-o", tmp_path / "own.so"], check=True)


STEPS_TWICE = """
import atexit, sys
atexit.register(lambda: print("imported", "torch._dynamo" in sys.modules))  # after all that follows
import torch
weight = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.AdamW([weight])
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
"""


@needs_cuda_build
def test_torchs_compiler_which_takes_seconds_is_not_imported_for_a_plain_step_or_the_record(
    train_py: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_py.write_text(STEPS_TWICE)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", smallest=False)
    assert (found.verdict, found.largest.num_steps) == ("fits", 2)
    assert "imported False" in capfd.readouterr().out


@needs_cuda_build
def test_a_command_that_takes_no_optimizer_step_is_told_what_was_seen(train_py: Path) -> None:
    train_py.write_text(
        'import torch\nx = torch.ones(8, device="cuda", requires_grad=True)\nx.sum().backward()\nx.sum().backward()'
    )
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", smallest=False)
    assert found.notes[0] == "No optimizer of torch.optim took a step (backward 2 times): the answer is of what ran."


@needs_cuda_build
def test_a_card_in_words_has_what_others_leave_and_says_that_torch_has_no_kernels_for_it(train_py: Path) -> None:
    train_py.write_text(
        'import torch\nx = torch.ones(1, 2, 8, 16, device="cuda", requires_grad=True)\n'
        "optimizer = torch.optim.SGD([x])\n"
        "attention = torch.nn.functional.scaled_dot_product_attention  # which asks for the kernels' capability\n"
        "for _ in range(2):\n    attention(x, x, x, is_causal=True).sum().backward()\n    optimizer.step()"
    )
    gpu, command = "memory=11GiB,capability=6.1", [str(CUDA_PYTHON), "train.py"]
    found = simulate_here(command=command, gpu=gpu, other_processes="1.5GiB", smallest=False)
    assert (found.verdict, found.gpu, found.memory_bytes) == ("fits", gpu, 9728 * 2**20)
    assert "has no kernels for card like NVIDIA GeForce GTX 1080 Ti" in found.notes[0]
    assert found.largest is not None
    assert "gtx1080ti" in replace(found, smallest_bytes=found.largest.device_bytes).cards_that_fit


@needs_cuda_build
def test_a_command_that_uses_no_card_is_refused(project: Project) -> None:
    for code in ("print('no GPU here')", "import torch; torch.cuda.synchronize()"):
        done = simulate(project, "-c", code)
        assert done.returncode == 2
        assert "must train on a GPU with torch" in done.stderr


@needs_cuda_build
def test_a_script_that_ends_at_once_leaves_its_record_and_one_that_leaves_none_is_told_why(train_py: Path) -> None:
    train_py.write_text(f"{SCRIPT}    if step == 1:\n        import os\n        os._exit(0)\n")
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py", "64"], gpu="t4", smallest=False)
    assert (found.verdict, found.largest.num_steps) == ("fits", 2)
    with pytest.raises(InvalidInputError, match="used a GPU and left no record.*without -I and -E"):
        simulate_here(command=[str(CUDA_PYTHON), "-I", "train.py", "64"], gpu="t4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "t4"], "command must be given"),
        (["--gpu", "t4", "--"], "a command follows --, and there is none"),
        (["--", "python", "train.py"], "gpu must be given"),
        (["--gpu", "t4", "--answer", "xml", "--", "python", "train.py"], "answer must be"),
        (["--gpu", "rtx9090", "--", "python", "train.py"], "no card is called 'rtx9090'"),
        (["--gpu", "t4", "--steps", "0", "--", "python", "train.py"], "steps must be a number of optimizer steps"),
        (["--gpu", "t4", "--budget", "16GiB", "--", "python", "train.py"], "more than the device's memory"),
        (["--gpu", "t4", "--other_processes", "16GiB", "--", "python", "train.py"], "must leave memory"),
        (
            ["--gpu", "t4", "--budget", "8GiB", "--other_processes", "1GiB", "--", "python", "train.py"],
            "give one of them",
        ),
        (["--gpu", "t4", "--world_size", "8", "--rank", "8", "--", "python", "a.py"], "which is 7, and is 8; set"),
        (["--gpu", "t4", "--rank", "1", "--", "python", "a.py"], "set --world_size to the number of ranks"),
        (["--gpu", "t4", "--ranks", "all", "--", "python", "a.py"], "world_size is 1; set --world_size"),
        (
            ["--gpu", "t4", "--world_size", "8", "--ranks", "all", "--rank", "2", "--", "python", "a.py"],
            "is 2; leave out --rank or --ranks",
        ),
        (["--gpu", "t4", "--world_size", "8", "--gpus", "2", "--", "python", "a.py"], "one of 8 ranks has one card"),
        (["--gpu", "t4", "--gpus", "17", "--", "python", "a.py"], "1 to 16 cards, not 17"),
        (["--gpu", "t4", "--", "pyton", "train.py"], "'pyton' is not"),
        (["--gpu", "t4", "--", "pyton", "train.py", "--config", "sft"], "'pyton' is not"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_without_a_history_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    with pytest.raises(InvalidInputError, match=f"{name} is backend:cudaMallocAsync; leave out backend:"):
        simulate_here(command=["python", "train.py"], gpu="t4")


def test_options_behind_the_dashes_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from pipeline.cli import parse

    given = parse("simulate", ["--gpu", "t4", "--", "python", "train.py", "--gpu", "0", "a b"])
    assert given == {"gpu": "t4", "command": "python train.py --gpu 0 'a b'"}


def event(action: str, address: int, size: int, time_us: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    """Return an event of torch's memory history."""
    stack = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": stack, "stream": 0}


def record(folder: Path, trace: list[dict[str, Any]], **changes: Any) -> Record:
    """Return the record of a process with these events on its card."""
    (folder / "1.pickle").write_bytes(pickle.dumps({"device_traces": [trace]}))
    content = {
        "pid": 1,
        "command": ["python", "train.py"],
        "rank": 0,
        "begin_us": 0,
        "end_us": 0,
        "ended_by": "the end of the script",
        "is_out_of_memory": None,
        "phases": [],
        "marks": [],
        "steps": [],
        "out_of_memory": [],
        "devices": [],
        "is_whole": True,
        "workspace_bytes": [64],
        "versions": {},
        "allocator": "",
        "own_code": ["/python"],
        **changes,
    }
    (folder / "1.json").write_text(json.dumps(content))
    [found] = read_records(folder)
    return found


def test_a_memory_history_becomes_phases_purposes_and_lines(tmp_path: Path) -> None:
    call = ("/env/site-packages/torch/nn/modules/module.py", 10, "_call_impl")
    loss = ("/env/site-packages/torch/nn/functional.py", 5, "cross_entropy")
    user = ("/home/me/train.py", 7, "forward")
    trace = [
        event("alloc", 0, 100, 1, ("/home/me/train.py", 1, "<module>")),
        event("alloc", 512, 30, 10, call, user),
        event("alloc", 1024, 40, 11, loss, call, user),
        event("alloc", 2048, 64, 12, call, user),
        event("alloc", 3072, 100, 21),
        event("free_requested", 512, 30, 22),
        event("alloc", 4096, 200, 41, ("/env/site-packages/torch/optim/adam.py", 9, "_init_group")),
        event("free_requested", 1024, 40, 60),
    ]
    backward = {"phase": "backward", "begin_us": 20, "end_us": 30, "stack": [("/home/me/train.py", 8, "<module>")]}
    optimizer = {"phase": "optimizer", "begin_us": 40, "end_us": 50, "stack": [("/home/me/train.py", 9, "<module>")]}
    marks = [
        {"time_us": 35, "category": "parameters", "addresses": [0]},
        {"time_us": 36, "category": "gradients", "addresses": [3072]},
        {"time_us": 51, "category": "optimizer state", "addresses": [4096]},
    ]
    made = record(tmp_path, trace, phases=[backward, optimizer], marks=marks, steps=[50])
    history = history_of(made, 0)
    categories = [one.category for one in history.timeline.storages]
    assert categories == ["parameters", "activations", "logits and loss", "workspaces", "gradients", "optimizer state"]
    spans = [(span.step, span.phase) for span in history.timeline.spans]
    assert spans == [(0, "load"), (0, "forward"), (0, "backward"), (0, "optimizer")]
    peak = at_peak(history.timeline)
    assert (peak.peak_bytes, peak.phase) == (100 + 40 + 64 + 100 + 200, "optimizer")
    assert history.user_lines == ("me/train.py:1", *["me/train.py:7"] * 3, "me/train.py:8", "me/train.py:9")


@needs_cuda_build
def test_a_loop_that_waits_for_a_value_ends(project: Project) -> None:
    script = """
import torch
weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight], momentum=0.9)
while not torch.ones(3, device="cuda").add(1).bool().any():
    weight.mul(2).sum().backward()
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
"""
    (project.folder / "waits.py").write_text(script)
    done = simulate(project, "waits.py", smallest="false")
    assert done.returncode == 0, done.stderr
    assert "reads numbers from the card" in done.stdout
    said, _, rest = " ".join(done.stdout.split()).partition(" results: ")
    assert said.endswith("allocator: torch's defaults, with values of small tensors.") and "Fits" not in rest
    assert findings(project).with_values
    assert project.parent_of("simulate").data.tags["with_values"] == "true"


RESUMED = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
optimizer = torch.optim.Adam([weight])
weight.sum().backward()
optimizer.step()
torch.save(optimizer.state_dict(), "adam.pt")
resumed = torch.optim.Adam([weight])
resumed.load_state_dict(torch.load("adam.pt", map_location="cuda"))
for _ in range(2):
    resumed.step()
"""
LENGTHS = """
import torch
scores = torch.nn.Parameter(torch.zeros(200, 4, 2000, device="cuda"))
optimizer = torch.optim.SGD([scores])
labels = torch.ones(4, 12, dtype=torch.long).tril(7).cuda()
for _ in range(2):
    is_label = labels > 0
    given = torch.full((4,), 200, device="cuda", dtype=torch.int32)
    torch.nn.functional.ctc_loss(scores.log_softmax(-1), labels[is_label], given, is_label.sum(-1).int()).backward()
    optimizer.step()
"""
CHECKS = """
import torch
mean = torch.nn.Parameter(torch.zeros(2**19, device="cuda"))
optimizer = torch.optim.SGD([mean])
for _ in range(2):
    spread = torch.ones_like(mean)
    torch.normal(mean.detach(), spread)
    torch.distributions.Normal(mean[:8], spread[:8]).sample()
    mean.sum().backward()
    optimizer.step()
"""


@needs_cuda_build
@pytest.mark.matrix(1)
@pytest.mark.parametrize("script", [RESUMED, LENGTHS, CHECKS], ids=["steps loaded", "lengths", "checks"])
def test_a_script_that_zeros_would_end_runs_with_values(script: str, train_py: Path) -> None:
    """An optimizer's counter of steps from a file, an operator that reads its arguments, one that checks them."""
    train_py.write_text(script)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", smallest=False)
    assert (found.verdict, found.with_values, found.smallest_bytes) == ("fits", True, None)


@needs_cuda_build
def test_the_time_of_a_step_is_that_of_its_work_on_the_card(train_py: Path) -> None:
    train_py.write_text(SCRIPT)
    command = [str(CUDA_PYTHON), "train.py", "1000"]
    found = simulate_here(command=command, gpu="h100", smallest=False, step_time=True)
    assert found.passes_work is not None and found.update_work is not None
    products = 5  # two forward, two of the weights' gradients, and one of the second layer's input
    assert found.passes_work.matrix_flops == {"float32": products * 2 * 1000 * 1024 * 4096}
    assert not found.update_work.flops and found.update_work.moved_bytes > 0
    computed = 5 * 2 * 1000 * 1024 * 4096 / (0.5 * 66.9e12) + found.passes_work.moved_bytes / (0.5 * 3.35e12)
    updated = max(found.update_work.moved_bytes / (0.5 * 3.35e12), 1e-5 * found.update_work.num_kernels)
    assert computed > 1e-5 * found.passes_work.num_kernels
    [seconds] = re.findall(r"An optimizer step takes about (\S+) s \(± \d+ %\)\. This is", found.answer)
    assert float(seconds) == pytest.approx(computed + updated, rel=0.005)
    without = simulate_here(command=command, gpu="h100", smallest=False)
    assert without.passes_work is None and "An optimizer step" not in without.answer
    assert without.largest == found.largest, "the step that is counted comes after those whose memory is recorded"
    last = simulate_here(command=command, gpu="h100", smallest=False, step_time=True, steps="5")
    assert "time of an optimizer step is not known" in " ".join(last.notes)
    with pytest.raises(InvalidInputError, match="set --steps to a number"):
        simulate_here(command=command, gpu="h100", step_time=True, steps="all")


BY_HAND = """
import torch, triton
from triton import language

@triton.jit
def double(x, y, count, SIZE: language.constexpr):
    numbers = language.program_id(0) * SIZE + language.arange(0, SIZE)
    inside = numbers < count
    language.store(y + numbers, 2 * language.load(x + numbers, mask=inside), mask=inside)

def doubled(x):
    y = torch.empty_like(x)
    double[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), SIZE=1024)
    return y

class Double(torch.autograd.Function):
    forward = staticmethod(lambda _, x: doubled(x))
    backward = staticmethod(lambda _, gradient: doubled(gradient.contiguous()))

weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(5):
    Double.apply(weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@needs_cuda_build
def test_kernels_that_are_written_by_hand_count_by_their_tensors(train_py: Path) -> None:
    train_py.write_text(BY_HAND)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="h100", smallest=False, step_time=True)
    assert found.passes_work is not None
    arrays = 7  # two each of both kernels and of the gradient's copy, and one of the sum
    assert found.passes_work.moved_bytes == pytest.approx(arrays * 4 * 2**20, abs=100)
    assert found.passes_work.num_kernels == 5


COMPILED_ALONE = """
import torch
from torch._dynamo.utils import counters
weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    torch.compile(lambda x: x.sin().exp().sum())(weight).backward()
    optimizer.step()
assert counters["stats"]["unique_graphs"] > 0
"""
RANDOM_SHARDS = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
distributed.init_process_group("nccl")
net = nn.Linear(64, 64).cuda()
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters())
nn.init.normal_(net.weight)
for _ in range(2):
    net(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
COMPILED_IN_PARTS = """
import torch
from torch import distributed, nn
from torch._dynamo.utils import counters
distributed.init_process_group("nccl")
net = nn.Sequential(*(nn.Linear(640, 640) for _ in range(2))).cuda()  # more than DDP's first bucket holds
optimizer = torch.optim.SGD(net.parameters())
net = nn.parallel.DistributedDataParallel(torch.compile(net))
step = torch.compile(optimizer.step)
for _ in range(2):
    net(torch.ones(8, 640, device="cuda")).sum().backward()
    step()
assert counters["stats"]["unique_graphs"] > 0
"""


@needs_cuda_build
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("script", "size"),
    [(COMPILED_IN_PARTS, 2), (RANDOM_SHARDS, 4), (COMPILED_ALONE, 1)],
    ids=["compiled in parts", "random shards", "compiled"],
)
def test_with_values_torch_compiles_and_its_operators_of_higher_order_run(
    script: str, size: int, train_py: Path
) -> None:
    train_py.write_text(script)
    found = simulate_here(
        command=[str(CUDA_PYTHON), "train.py"], gpu="a100", values="on", world_size=size, smallest=False
    )
    assert (found.verdict, found.exit_code) == ("fits", 0)


COMPILED = """
import torch
weight = torch.nn.Parameter(torch.ones(512, 512, device="cuda"))
optimizer = torch.optim.SGD([weight])
compiled = torch.compile(lambda x: (x @ weight).sin().exp().sum())
for _ in range(5):
    compiled(torch.ones(8192, 512, device="cuda")).backward()
    optimizer.step()
"""


@needs_cuda_build
def test_code_that_torch_compiles_is_called_so_with_the_line_that_calls_it(train_py: Path) -> None:
    found = simulated_compiled(train_py, COMPILED)
    assert re.search(r"backward at torch\.compile's c\w{7}:\d+, called by train\.py:5", found.answer)
    assert found.passes_work is not None
    assert found.passes_work.matrix_flops == {"float32": 2 * 2 * 8192 * 512 * 512}
    assert found.passes_work.moved_bytes < 5 * 4 * 8192 * 512, "fused kernels read and write less"


@pytest.mark.slow
@needs_cuda_build
def test_the_work_of_a_compiled_update_is_not_known(train_py: Path) -> None:
    found = simulated_compiled(train_py, COMPILED)
    updated = simulated_compiled(train_py, COMPILED.replace("optimizer.step()", "torch.compile(optimizer.step)()"))
    assert updated.processes[0].peak_allocated_bytes == found.processes[0].peak_allocated_bytes
    assert updated.passes_work is None, "its operators are not seen after a compiled update"


def simulated_compiled(train_py: Path, script: str) -> Any:
    """Return what is found of a script whose code is compiled anew."""
    train_py.write_text(script)
    anew = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # in its process, and not in others that import torch for it
    with TemporaryDirectory() as folder, patch.dict(os.environ, anew, TORCHINDUCTOR_CACHE_DIR=folder):
        return simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="a100", smallest=False, step_time=True)


@needs_cuda_build
def test_lengths_that_were_read_as_zeros_are_named_and_known_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import torch
weight = torch.nn.Parameter(torch.ones(512, 512, device="cuda"))
optimizer = torch.optim.SGD([weight])
for length in torch.ones(2, dtype=torch.long, device="cuda").mul(4096).tolist():
    (torch.ones(length, 512, device="cuda") @ weight).square().sum().backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    zeros, known = (
        simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", values=it, smallest=False)
        for it in ("auto", "on")
    )
    [note] = zeros.notes
    assert "went on with zeros: " in note and "train.py:5. " in note and "--values on" in note
    assert known.notes == () and known.largest is not None and zeros.largest is not None
    assert known.largest.peak_allocated_bytes > zeros.largest.peak_allocated_bytes + 4096 * 512 * 4


@pytest.mark.slow
@needs_cuda_build
def test_a_second_run_with_values_that_fails_shows_its_own_error(project: Project) -> None:
    script = """
import torch
assert torch.tensor([True]).cuda().sum().item() == 1, "with values"
if torch.ones(3).cuda().mul(2).nonzero().numel() == 3:
    raise RuntimeError("only seen with values")
"""
    (project.folder / "reads.py").write_text(script)
    done = simulate(project, "reads.py", smallest="false")
    assert done.returncode == 1
    assert "only seen with values" in done.stderr


OPERATOR = """
import torch
from torch import nn

@torch.library.custom_op("own::selected", mutates_args=())
def selected(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = (labels >= 0).nonzero().squeeze(-1)
    return torch.empty(len(rows), 2**20, device="cuda")[:, :8].contiguous()

net = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    net(selected(torch.ones(4, 8, device="cuda"), torch.tensor([1, -1, 1, 1]).cuda())).sum().backward()
    optimizer.step()
"""


@needs_cuda_build
def test_what_an_operator_in_python_selects_is_known_and_its_own_lines_are_named(train_py: Path) -> None:
    train_py.write_text(OPERATOR)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", smallest=False)
    assert found.with_values and not any("read sizes" in note for note in found.notes)
    assert found.largest.peak.module_bytes["train.py:8"] == 3 * 4 * (2**20 + 8)
    assert found.largest.peak.operator == "selected"


@pytest.mark.slow
@needs_cuda_build
def test_lines_and_operators_at_the_peak_are_the_same_with_values(project: Project) -> None:
    peaks = []
    for values in ("off", "on"):
        assert simulate(project, "train.py", "64", smallest="false", values=values).returncode == 0
        largest = findings(project).largest
        assert largest is not None
        peaks.append((largest.peak.module_bytes, largest.peak.category_bytes, largest.peak.operator))
    assert peaks[0] == peaks[1] and {line.rpartition(":")[0] for line in peaks[0][0]} == {"train.py"}


@needs_cuda_build
def test_a_store_that_cannot_be_reached_ends_the_command_that_has_begun(project: Project) -> None:
    script = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n"
    (project.folder / "sleeps.py").write_text(script)
    begun = project.folder / "begun"

    class Refuses(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            end = time.monotonic() + 60
            while not begun.exists() and time.monotonic() < end:
                time.sleep(0.05)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        project.environment |= {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
        done = simulate(project, "sleeps.py")
        server.shutdown()
    assert done.returncode == 2 and "the tracking store must be reachable" in done.stderr and begun.exists()


@needs_cuda_build
@pytest.mark.slow
def test_where_requests_cannot_be_given_again_runs_find_the_smallest_memory(project: Project) -> None:
    script = """
import torch
weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"))
optimizer = torch.optim.AdamW([weight], capturable=True)
x = torch.ones(8192, 1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    (x @ weight).sum()
for _ in range(3):
    graph.replay()
    (x @ weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (project.folder / "graph.py").write_text(script)
    assert simulate(project, "graph.py").returncode == 0
    found = findings(project)
    assert any("found by runs of the command" in note for note in found.notes)
    beside = found.largest.device_bytes - found.largest.peak_reserved_bytes
    assert found.largest.peak_allocated_bytes + beside <= found.smallest_bytes <= found.largest.device_bytes


@pytest.mark.slow
@needs_cuda_build
def test_two_simulations_are_compared_by_source_line(project: Project) -> None:
    for rows in ("1024", "4096"):
        assert simulate(project, "train.py", rows, smallest="false").returncode == 0
    runs = project.runs()
    ids = [run.info.run_id for run in sorted(runs, key=lambda run: run.info.start_time)]
    done = project.here("compare", {"runs": ",".join(ids)})
    assert done.returncode == 0, done.stderr
    few, many = (read_findings(folder).largest for folder in sorted(project.folder.glob("runs/*-simulate-*")))
    more = (many.peak_allocated_bytes - few.peak_allocated_bytes) / 2**20
    said = " ".join(done.stdout.split())
    assert re.search(rf"{more:,.1f} MiB more than .*; the largest difference is of \w[\w ]* at train.py:\d+", said)
    alone = project.here("compare", {"runs": ids[0]})
    assert alone.returncode == 2 and "two at least" in alone.stderr


NET = """
import sys, torch
from torch import nn

layers = nn.Conv2d(3, 32, 3, padding=1), *([nn.BatchNorm2d(32)] if sys.argv[1] == "norm" else [])
net = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(net.parameters())
image = torch.ones(16, 3, 256, 256, device="cuda")
for _ in range(2):
    net(image).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@needs_cuda_build
def test_workspaces_that_only_cudnn_knows_make_an_interval_and_no_verdict_where_it_matters(train_py: Path) -> None:
    train_py.write_text(NET)

    def run(kind: str, **settings: Any) -> Any:
        return simulate_here(command=[str(CUDA_PYTHON), "train.py", kind], gpu="t4", **settings)

    roomy = run("norm")
    assert roomy.verdict == "fits"
    made = 16 * 32 * 256 * 256 * 4
    more = roomy.bytes_with_workspaces - roomy.largest.device_bytes
    assert made < more < 6 * made  # batch norm: what goes in, what comes out, and its gradient
    assert f"with the largest that it may take, {roomy.bytes_with_workspaces / 2**20:,.1f} MiB" in answer(roomy)
    tight = f"{roomy.smallest_bytes // 2**20 + made // 2**20 - CARDS['t4'].context.mib}MiB"
    unknown = run("norm", budget=tight, smallest=False)
    assert (unknown.verdict, unknown.bytes_with_workspaces) == ("no verdict", None)
    assert "depends on workspaces that only cuDNN knows" in answer(unknown)
    assert unknown.notes[0] == NEEDS_KNOWN_WORKSPACES
    assert run("convolution", budget=tight, smallest=False).verdict == "fits"  # torch takes an engine that needs less


OUT_OF_MEMORY = 'import torch\nsteps(1)\ntorch.empty(2**35, dtype=torch.uint8, device="cuda")\n'
STEPS = """
import torch
def steps(number):
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for _ in range(number):
        weight.sum().backward()
        optimizer.step()
"""


@needs_cuda_build
@pytest.mark.parametrize(
    ("last", "verdict", "said"),
    [
        (OUT_OF_MEMORY, "does not fit", "Does not fit Tesla T4: train.py:11 asks for 32,768.0 MiB"),
        (
            "steps(2)\nraise ValueError\n",
            "no verdict",
            "No verdict: an error ended one of its processes, and the command went on.",
        ),
    ],
    ids=["out of memory", "another error"],
)
def test_a_launcher_that_ends_well_hides_no_process_that_did_not(
    last: str, verdict: str, said: str, train_py: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell script without `set -e`."""
    monkeypatch.setenv("PATH", f"{CUDA_PYTHON.parent}:{os.environ['PATH']}")
    train_py.write_text(STEPS + last)
    train_py.with_name("train.sh").write_text("python train.py\necho done\n")
    found = simulate_here(command=["bash", "train.sh"], gpu="t4", smallest=False)
    assert (found.verdict, found.exit_code) == (verdict, 0) and said in found.answer


ONCE = """
import os, torch
os.mkdir("out")
torch.cuda.memory._record_memory_history(max_entries=8)
torch.empty(2**35, dtype=torch.uint8, device="cuda")
"""


@needs_cuda_build
def test_what_does_not_fit_and_runs_once_alone_does_not_fit(train_py: Path) -> None:
    train_py.write_text(ONCE)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4")
    assert found.verdict == "does not fit" and found.largest is None
    assert "Does not fit Tesla T4: train.py:5 asks for" in found.answer and "What it needs is not known" in found.answer
    checked = MemoryCheck(
        simulation=found, command="", requirements=(), baseline_file=None, changes=(), other_conditions={}
    )
    assert checked.verdict is CheckVerdict.TOO_LARGE


STEERED = """
import torch
torch.cuda.memory._record_memory_history(max_entries=100000)
labels = torch.tensor([-100, 1, 2, -100] * 2**10).cuda()
weight = torch.ones(2**12, 2**16, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
for _ in range(2):
    chosen = weight[(labels != -100).nonzero().squeeze(1)]
    chosen.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.memory._record_memory_history(enabled=None)
"""


@needs_cuda_build
def test_what_it_needs_with_room_is_known_by_the_values_that_it_reads_there(train_py: Path) -> None:
    """The first run ends before it reads any; the script's own history of memory does not end the record of it."""
    train_py.write_text(STEERED)
    found = simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", budget="1800MiB", smallest=False)
    assert found.verdict == "does not fit" and found.with_values
    chosen = 2**11 * 2**16 * 4
    assert found.largest is not None and found.largest.peak_allocated_bytes >= 2**30 + 2 * 2**30 + chosen


@needs_cuda_build
def test_a_time_limit_that_ends_it_before_it_uses_a_gpu_is_the_reason(train_py: Path) -> None:
    train_py.write_text("import torch, time\ntime.sleep(60)\ntorch.ones(1).cuda()\n")
    with pytest.raises(InvalidInputError, match="use a GPU within its time limit, which is 3 seconds"):
        simulate_here(command=[str(CUDA_PYTHON), "train.py"], gpu="t4", time_limit=3)


def test_a_command_whose_quotes_are_open_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="each quote of a command must be closed"):
        simulate_here(command="python train.py --note it's", gpu="t4")


@needs_cuda_build
def test_a_program_that_cannot_be_started_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{CUDA_PYTHON.parent}:{os.environ['PATH']}")
    program = tmp_path / "train"
    program.write_text("python train.py\n")
    program.chmod(0o755)
    with pytest.raises(InvalidInputError, match=r"cannot be started \(Exec format error\); name its interpreter"):
        simulate_here(command=[str(program)], gpu="t4")
