"""`explain`: out-of-memory messages in every form, and the smallest change of their commands that fits."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from project import Project, new_store
from test_simulate import CUDA_PYTHON, needs_cuda_build

from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.config.command_options import option_of, with_option
from pipeline.config.command_template import Template
from pipeline.memory.out_of_memory import OutOfMemoryMessage, Place, read_messages
from pipeline.prediction.commands.levers import command_with, levers_of
from pipeline.report.findings import read_findings
from pipeline.report.out_of_memory import sentences, size
from pipeline.simulation.cards import CARDS

GIB, MIB = 2**30, 2**20


def old(asked: str, total: str, allocated: str, free: str, rest: str, gpu: int = 0) -> str:
    """Return the message of torch up to 2.0; `rest` is what it says of cached, allowed and reserved memory."""
    return (
        f"CUDA out of memory. Tried to allocate {asked} (GPU {gpu}; {total} total capacity; {allocated} already "
        f"allocated; {free} free; {rest}"
    )


def new(
    asked: str, total: str, free: str, processes: str, allocated: str, rest: str, capacity: str = "capacity"
) -> str:
    """Return the message of torch from 2.1 on, which wrote `capacty` first."""
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total {capacity} of {total} of which {free} is "
        f"free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, {rest} is reserved by PyTorch "
        "but unallocated."
    )


def own(used: str) -> str:
    """Return what the message says of its process."""
    return f"Including non-PyTorch memory, this process has {used} memory in use. "


def of(pid: int, used: str) -> str:
    """Return what the message says of another process, or of its own in a container."""
    return f"Process {pid} has {used} memory in use. "


NOT_KNOWN = "17179869184.00 GiB"  # 2**64 bytes: NVML does not tell under WSL
OTHER_RANKS = (
    f"{of(3441597, '2.54 GiB')}{of(2618016, '274.00 MiB')}{of(2618019, '274.00 MiB')}{of(2618020, '274.00 MiB')}"
)
PUBLISHED = {
    "huggingface/transformers#1819, torch 1.3": (
        old("198.00 MiB", "5.93 GiB", "4.64 GiB", "54.94 MiB", "233.05 MiB cached)"),
        {"allocated": 4.64, "unallocated": 0.2276, "beside": 1.009},
        "At that moment it was fragmentation",
    ),
    "pytorch/pytorch#16417, torch 1.0": (
        old("12.50 MiB", "10.92 GiB", "8.57 MiB", "9.28 GiB", "4.68 MiB cached)"),
        {"total": 10.92, "free": 9.28},
        "The card says that there was room",
    ),
    "Morizeyao/GPT2-Chinese#104, torch 1.3": (
        old("384.00 MiB", "10.73 GiB", "9.59 GiB", "290.56 MiB", "25.84 MiB cached)", gpu=2),
        {"allocated": 9.59},
        "The process itself fills the card",
    ),
    "huggingface/transformers#2784, torch 1.4": (
        old("12.00 MiB", "6.00 GiB", "4.44 GiB", "3.06 MiB", "4.57 GiB reserved in total by PyTorch)"),
        {"unallocated": 0.13, "available": 4.573},
        "At that moment it was fragmentation",
    ),
    "huggingface/transformers#3360, torch 1.4": (
        old("786.00 MiB", "14.73 GiB", "13.33 GiB", "575.88 MiB", "13.38 GiB reserved in total by PyTorch)"),
        {"unallocated": 0.05, "beside": 0.788},
        "The process itself fills the card",
    ),
    "pytorch/pytorch#35901, torch 1.4": (
        old("10.84 GiB", "23.65 GiB", "1.06 GiB", "10.26 GiB", "12.53 GiB reserved in total by PyTorch)"),
        {"unallocated": 11.47},
        "At that moment it was fragmentation",
    ),
    "bitsandbytes-foundation/bitsandbytes#65, torch 1.12": (
        old(
            "1024.00 MiB", "14.76 GiB", "12.29 GiB", "945.75 MiB", "12.57 GiB reserved in total by PyTorch) If reserved"
        ),
        {"asked": 1.0, "unallocated": 0.28},
        "At that moment it was fragmentation",
    ),
    "pytorch/pytorch#111729, torch 2.0": (
        old(
            "32.00 MiB", "11.91 GiB", "4.63 GiB", "7.00 GiB", "4.77 GiB allowed; 4.74 GiB reserved in total by PyTorch)"
        ),
        {"available": 4.77},
        "It is a limit",
    ),
    "kerrj/lerf#73, torch 2.1": (
        new("3.00 GiB", "23.65 GiB", "1.66 GiB", own("20.81 GiB"), "12.09 GiB", "and 4.84 GiB", "capacty"),
        {"own": 20.81, "others": 1.18, "available": 18.59},
        "At that moment it was fragmentation",
    ),
    "FoundationVision/GenerateU#10, torch 2.1 in a container": (
        new("496.00 MiB", "14.75 GiB", "235.06 MiB", of(20398, "14.52 GiB"), "14.06 GiB", "and 330.42 MiB", "capacty"),
        {"own": 14.52, "others": 0.0004},
        "At that moment it was fragmentation",
    ),
    "richard-peng-xia/MMed-RAG#38, torch 2.1 on Windows": (
        new("64.00 MiB", "8.00 GiB", "0 bytes", "", "22.44 GiB", "and 3.16 MiB", "capacty"),
        {"available": 8.0, "free": 0.0},
        "The driver has lent memory of the host",
    ),
    "facebookresearch/seamless_communication#341, torch 2.1 under WSL": (
        new("318.00 MiB", "6.00 GiB", "0 bytes", own(NOT_KNOWN), "5.00 GiB", "and 271.88 MiB", "capacty"),
        {"own": None, "others": None, "beside": 0.734},
        "The process itself fills the card",
    ),
    "murong-xu/CADS#4, torch 2.5": (
        new("22.78 GiB", "31.47 GiB", "12.73 GiB", own("18.73 GiB"), "9.08 GiB", "and 9.35 GiB"),
        {"unallocated": 9.35, "others": 0.01},
        "The process itself fills the card",
    ),
    "lllyasviel/FramePack#369, torch 2.6": (
        new("30.29 GiB", "10.74 GiB", "3.69 GiB", own("6.68 GiB"), "6.10 GiB", "and 396.58 MiB"),
        {"own": 6.68},
        "The tensor alone is larger than the card",
    ),
    "a shared card, torch 2.6": (
        "[rank2]: "
        + new("56.00 MiB", "7.79 GiB", "20.75 MiB", OTHER_RANKS + own("4.41 GiB"), "3.90 GiB", "and 220.70 MiB"),
        {"others": 3.36, "own": 4.41},
        "Other processes hold 3.36 GiB",
    ),
    "CUDA graphs, torch 2.8": (
        new(
            *("672.00 MiB", "140.06 GiB", "200.75 MiB", of(1939284, "139.86 GiB"), "128.50 GiB"),
            "with 3.23 GiB allocated in private pools (e.g., CUDA Graphs), and 1.01 GiB",
        ),
        {"private_pools": 3.23, "own": None, "unallocated": 1.01},
        "At that moment it was fragmentation",
    ),
    "a limit, torch 2.9": (
        new(
            *("250.00 MiB", "79.19 GiB", "2.07 GiB", own("77.11 GiB") + "75.23 GiB allowed; ", "74.23 GiB"),
            "and 943.54 MiB",
        ),
        {"allowed": 75.23, "available": 75.23},
        "It is a limit",
    ),
}


def the_one(text: str) -> OutOfMemoryMessage:
    """Return the only message of a log."""
    found = read_messages(text)
    assert found.num_messages == 1
    [message] = found.first
    return message


@pytest.mark.quick
@pytest.mark.parametrize(("text", "numbers", "cause"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_message_is_read_in_the_form_of_its_version(
    text: str, numbers: dict[str, float | None], cause: str
) -> None:
    """GiB and two decimals are as the thread has them."""
    message = the_one(f"  0%|  | 0/10\nRuntimeError: {text}\n")
    for name, stated in numbers.items():
        found = getattr(message, f"{name}_bytes")
        assert found is None if stated is None else found == pytest.approx(stated * GIB, abs=0.006 * GIB), name
    assert sentences(message)[0].startswith(cause), sentences(message)


sizes = st.integers(0, 2**37)


@given(asked=sizes, total=sizes, free=sizes, own_use=sizes, allocated=sizes, unallocated=sizes)
def test_any_message_is_read_back_and_explained(
    asked: int, total: int, free: int, own_use: int, allocated: int, unallocated: int
) -> None:
    written = map(size, (asked, total, free, own_use, allocated, unallocated))
    a, t, f, o, al, u = (text.replace(",", "") for text in written)
    message = the_one(new(a, t, f, own(o), al, f"and {u}"))
    assert message.asked_bytes == pytest.approx(asked, abs=0.006 * GIB)
    assert message.own_bytes == pytest.approx(own_use, abs=0.006 * GIB)
    assert message.reserved_bytes == pytest.approx(allocated + unallocated, abs=0.012 * GIB)
    assert all(sentence.endswith(".") for sentence in sentences(message))


LIBRARIES = {
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": ("cuBLAS", Place.CARD),
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED": ("cuDNN", Place.CARD),
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": ("cuDNN", Place.HOST),
    "RuntimeError: CUDA error: out of memory": ("CUDA", Place.CARD),
    "node:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'": ("NCCL", Place.CARD),
    "Cuda failure 2 'out of memory'": ("NCCL", Place.CARD),
    "NCCL WARN Failed to CUDA calloc async 608 bytes": ("NCCL", Place.CARD),
    "Error out of memory at line 351 in file /home/bitsandbytes/csrc/pythonInterface.c": ("bitsandbytes", Place.CARD),
    "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "116813856768 bytes. Error code 12 (Cannot allocate memory)": ("torch", Place.HOST),
    "data. DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 bytes.": ("torch", Place.HOST),
    "MPS backend out of memory (MPS allocated: 7.80 GiB, other allocations: 6.94 GiB, max allowed: 18.13 GiB). Tried "
    "to allocate 3.46 GiB on private pool.": ("torch", Place.MPS),
    new("2.00 GiB", "15.98 GiB", "512.00 MiB", "", "14.20 GiB", "and 96.00 MiB").replace("CUDA", "HIP"): (
        "torch",
        Place.CARD,
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize(("text", "library", "place"), [(text, *kind) for text, kind in LIBRARIES.items()])
def test_messages_of_libraries_and_of_other_memory_are_told_apart(text: str, library: str, place: Place) -> None:
    message = the_one(text)
    assert (message.library, message.place) == (library, place)
    assert message.rank == (0 if " [0] " in text else None)
    said = " ".join(sentences(message))
    assert (("memory of the host" in said) == (place is Place.HOST)) and (("Apple" in said) == (place is Place.MPS))


@pytest.mark.quick
def test_of_several_messages_the_first_of_each_rank_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"[rank{rank}]: RuntimeError: {old(f'{asked}.00 MiB', *NUMBERS)}" for rank, asked in RANKS]
    log = "\n".join([*texts, "node:1:1 [1] NCCL WARN Cuda failure 'out of memory'"])
    found = read_messages(log)
    assert found.num_messages == 5
    assert [(one.rank, one.asked_bytes) for one in found.first] == [(3, 100 * MIB), (1, 200 * MIB)]
    assert main(["explain", log]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "5 out-of-memory messages" in said and "2 ranks" in said and "Rank 3: " in said and "Rank 1: " in said


@pytest.mark.parametrize("beginning", ["[48213]", "10:00:00 [{number}] INFO", "Epoch [{number}]", "[{number}/90]"])
def test_a_number_in_brackets_is_no_rank(beginning: str) -> None:
    texts = (f"{beginning.format(number=number)} {old('100.00 MiB', *NUMBERS)}" for number in (1, 2))
    [message] = read_messages("\n".join(texts)).first
    assert message.rank is None


NUMBERS = ("14.76 GiB", "13.43 GiB", "17.88 MiB", "13.75 GiB reserved in total by PyTorch)")
RANKS = [(3, 100), (1, 200), (3, 300), (1, 400)]


@pytest.mark.quick
def test_a_message_that_a_log_has_broken_into_lines_is_read() -> None:
    text = PUBLISHED["a shared card, torch 2.6"][0]
    broken = "\n# ".join(re.findall(r".{1,70}(?: |$)", text))
    assert the_one(broken) == the_one(text)


@pytest.mark.quick
def test_a_log_comes_as_text_as_a_file_or_on_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = old("100.00 MiB", *NUMBERS)
    (tmp_path / "log.txt").write_text(text)
    (tmp_path / "of_powershell.txt").write_text(text, "utf-16")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff" + text.encode())))
    said = []
    for words in ([text], text.split(), [str(tmp_path / "log.txt")], [str(tmp_path / "of_powershell.txt")], []):
        assert main(["explain", *words]) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1 and "100.00 MiB were asked for" in " ".join(said[0].split())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no memory error here"], "looked for are torch's"),
        ([""], "looked for are torch's"),
        (["显存不足" * 40 + " 了"], "looked for are torch's"),
        (["no_such_log.txt"], "'no_such_log.txt' is neither"),
        (
            [old("1.00 GiB", "5.21 GiB", *NUMBERS[1:]), "--", sys.executable, "x.py"],
            "the closest in memory are gtx1060, m60, rtx4060ti-8gb, all",
        ),
        (["CUDA error: out of memory", "--", sys.executable, "x.py"], "it must be named; add --gpu"),
        (["CUDA error: out of memory", "--gpu", "rtx9090", "--", sys.executable, "x.py"], "no card is called"),
        (["CUDA error: out of memory", "--gpu", "t4", "--", "pyton", "x.py"], "'pyton' is not"),
        (["CUDA error: out of memory", "--levers", "4,2"], "levers must be JSON"),
        (["CUDA error: out of memory", "--gpu", "t4", "--steps", "0", "--", sys.executable, "x.py"], "steps must be a"),
        (["CUDA error: out of memory", "--batch", "4"], "no setting is called batch"),
        (
            ["CUDA error: out of memory", "--gpu", "t4", "--", "x", "{a:1,2}", "{a:3,4}"],
            "give one of them another name",
        ),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert sum(name in message for name in CARDS) <= len(CARDS) / 10, f"a wall of names: {message}"


@pytest.mark.quick
def test_options_of_a_command_are_set_where_they_stand() -> None:
    words = ("python", "train.py", "--per-device-train-batch-size=8", "--bf16", "--lr", "1", "--bf16_full_eval")
    assert option_of(words, "per_device_train_batch_size") == "8"
    assert with_option(words, "per_device_train_batch_size", "4")[2] == "--per-device-train-batch-size=4"
    assert (option_of(words, "bf16"), option_of(words, "lr"), option_of(words, "fp16")) == ("", "1", None)
    assert with_option(words, "bf16", "False")[3:6] == ("--bf16", "False", "--lr")
    assert with_option(words, "lr", "2")[4:6] == ("--lr", "2")
    assert with_option(words, "optim", "adafactor")[-2:] == ("--optim", "adafactor")


@pytest.mark.quick
def test_levers_are_those_that_the_script_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    (tmp_path / "hf.py").write_text("parser = HfArgumentParser(TrainingArguments)")
    (tmp_path / "own.py").write_text('parser.add_argument("--gradient_checkpointing", action="store_true")')

    def shown(*command: str, **own: tuple[str, ...]) -> list[list[str]]:
        template = Template(("python", *command))
        found = levers_of(template, own, Path(sys.executable), (8, 0))
        return [[change.shown for change in changes] for changes in found if "optim" not in changes[0].lever]

    expandable = ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    hf, plain = str(tmp_path / "hf.py"), str(tmp_path / "own.py")
    halves = [
        f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps}"
        for batch, steps in ((2, 6), (1, 12))
    ]
    batch = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3")
    assert shown(hf, *batch) == [expandable, halves, ["--gradient_checkpointing true"], ["--bf16 true"]]
    assert shown(hf, "--per_device_train_batch_size", "1", "--fp16", "--gradient_checkpointing") == [expandable]
    assert shown("absent.py", "--attn_implementation=eager")[1:] == [["--attn_implementation sdpa"]]
    assert shown(plain) == [expandable, ["--gradient_checkpointing"]]
    assert shown("absent.py", "{rows:8,4}", '{"json":1}', size=("2", "1")) == [
        *(expandable, ["rows=4"], ["--size 2", "--size 1"])
    ]
    assert command_with(Template(("python", "{rows:8,4}"))) == ("python", "8")


@pytest.mark.quick
def test_known_commands_have_the_levers_of_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.prediction.commands.levers._has_package", lambda python, name: name == "liger_kernel")
    Path("main.py").write_text("LightningCLI(Net, Rows)")
    Path("c.yaml").write_text("data: {batch_size: 4}\ntrainer: {precision: 32-true}\n")
    Path("sft.yaml").write_text(
        "gradient_checkpointing: false\nper_device_train_batch_size: 1\nattn_implementation: eager"
    )

    def shown(command: str, capability: tuple[int, int] = (8, 0)) -> list[list[str]]:
        found = levers_of(Template(tuple(command.split())), {}, Path(sys.executable), capability)
        return [[change.shown for change in changes] for changes in found]

    halves = [[f"--data.batch_size {4 // n} --trainer.accumulate_grad_batches {n}" for n in (2, 4)]]
    lightning = "python main.py fit --config c.yaml"
    assert shown(lightning) == [*halves, ["--trainer.precision bf16-mixed"]]
    assert shown(lightning, (7, 5)) == [*halves, ["--trainer.precision 16-mixed"]]
    assert shown(f"{lightning} --data.batch_size 1 --trainer.precision=bf16-mixed") == []
    liger = ["--use_liger_kernel true"]
    assert shown("trl sft --per_device_train_batch_size 1") == [liger, ["--optim adafactor"]]  # the others are on
    assert shown("trl sft --config sft.yaml --optim sgd --bf16=no") == [
        *(liger, ["--attn_implementation sdpa"], ["--gradient_checkpointing true"], ["--bf16 true"])
    ]
    titan = "torchrun --nproc_per_node 4 -m torchtitan.train --training.local_batch_size 2"
    modes = [f"--activation_checkpoint.mode {mode}" for mode in ("selective", "full")]
    assert shown(titan) == [["--training.local_batch_size 1 --training.global_batch_size 8"], modes]
    assert shown(f"{titan} --training.global_batch_size=16")[0] == ["--training.local_batch_size 1"]


def test_marks_of_one_name_must_agree() -> None:
    with pytest.raises(InvalidInputError, match="another name"):
        command_with(Template(("{a:1,2}", "{a:1,3}")))


SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
parser.add_argument("--fails", type=int, default=0)
settings = parser.parse_args()
assert not settings.fails, "it must not fail"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, device="cuda"), nn.Linear(4096, 1024, device="cuda")

    def forward(self, x):
        hidden = self.up(x)
        hidden = nn.functional.gelu(hidden)
        return x + self.down(hidden)


model = nn.Sequential(*[Block() for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for step in range(5):
    x = torch.ones(settings.rows, 1024, device="cuda")
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINE_OF_FORWARD = "train.py:19"
OTHERS = new("626.00 MiB", "14.56 GiB", "57.81 MiB", of(99, "9.50 GiB") + own("5.00 GiB"), "4.70 GiB", "and 94.44 MiB")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A folder with the script, and the CUDA build's Python under its short name."""
    (tmp_path / "train.py").write_text(SCRIPT)
    new_store(tmp_path)
    return Project(tmp_path, {"PYTHONPATH": str(ROOT), "PATH": f"{CUDA_PYTHON.parent}:{os.environ['PATH']}"})


def explain(project: Project, message: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Explain the message with a command."""
    return project.here("explain", {}, message, *words)


def findings(project: Project) -> Any:
    """Return what was found last."""
    return read_findings(sorted(project.folder.glob("runs/*-explain-*"))[-1])


@needs_cuda_build
def test_the_command_fails_on_the_card_of_the_message_and_the_smallest_change_runs_there(project: Project) -> None:
    levers = json.dumps({"fails": [1]})
    done = explain(project, OTHERS, "--levers", levers, "--", "python", "train.py", "--rows", "{rows:40000,16000}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(project)
    card, failed = found.simulation, found.simulation.out_of_memory
    assert (card.card, card.verdict) == ("Tesla T4", "does not fit")
    context = round((5.00 - 4.70) * 1024 - 94.44)  # as the message shows it
    assert card.memory_bytes / MIB == pytest.approx(57.81 + 4.70 * 1024 + 94.44 + context, abs=3)
    tensor, asked = failed.tensor, 40000 * 4096 * 4
    assert (failed.line, tensor.shape, tensor.dtype) == (LINE_OF_FORWARD, (40000, 4096), "float32")
    assert (tensor.operator, tensor.variable) == ("aten.addmm", "hidden")
    assert re.fullmatch(r"\d\.up", tensor.module)  # of a Block, by its number in the Sequential
    assert asked <= failed.wanted_bytes < asked + 2 * MIB
    parameters = 4 * 4 * (2 * 1024 * 4096 + 1024 + 4096)
    assert failed.held.category_bytes["parameters"] == parameters
    assert failed.held.peak_bytes + failed.wanted_bytes > card.memory_bytes - context * MIB - 200 * MIB
    tried = {one.shown: one for one in found.tries}
    assert found.answer.shown == "rows=16000" and found.answer_command == ("python", "train.py", "--rows", "16000")
    assert tried[""].needed_bytes > card.memory_bytes >= tried["rows=16000"].needed_bytes
    assert not tried[""].fits and "it must not fail" in tried["--fails 1"].failure
    assert project.parent_of("explain").data.tags["change"] == "rows=16000"
    said = " ".join(done.stdout.split())
    assert "Other processes hold 9.50 GiB" in said and "as in the message" in said and "rows: not known" in said
    assert f"it would run as it is: it needs {tried[''].needed_bytes / MIB:,.0f} MiB" in said


@pytest.mark.slow
@needs_cuda_build
def test_levers_that_fit_only_together_are_found(project: Project) -> None:
    levers = json.dumps({"rows": [20000]})
    words = ("--levers", levers, "--json", "--", "python", "train.py", "--rows", "40000")
    script = project.folder / "train.py"
    script.write_text(
        SCRIPT.replace("model = nn", 'parser.add_argument("--gradient_checkpointing")\nmodel = nn')
        .replace("settings = parser.parse_args()", "settings, others = parser.parse_known_args()")
        .replace("model(x)", "run(x)")
        .replace("for step", "from torch.utils.checkpoint import checkpoint_sequential\n"
                 "run = model if not others else lambda x: checkpoint_sequential(model, 4, x.requires_grad_(), "
                 "use_reentrant=False)\nfor step")
    )  # fmt: skip
    message = new(
        "626.00 MiB", "14.56 GiB", "57.81 MiB", of(99, "12.50 GiB") + own("2.00 GiB"), "1.70 GiB", "and 94.44 MiB"
    )
    done = explain(project, message, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    alone = [one for one in content["tries"] if len(one["changes"]) == 1]
    assert content["kind"] == "Explanation" and len(alone) == 3 and not any(one["fits"] for one in alone)
    assert {change["lever"] for change in content["answer"]["changes"]} == {"rows", "gradient_checkpointing"}


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokens = torch.arange(512)
rows = [{"input_ids": tokens, "labels": tokens}] * 64
Trainer(GPT2LMHeadModel(GPT2Config(n_layer=2)), arguments, train_dataset=rows).train()
"""


@pytest.mark.slow
@needs_cuda_build
def test_a_trainer_script_needs_no_marks_and_says_the_price(project: Project) -> None:
    (project.folder / "train.py").write_text(TRAINER)
    fixed = ("--output_dir", "out", "--report_to", "none", "--max_steps", "4", "--optim", "sgd", "--fp16")
    words = (*fixed, "--per_device_train_batch_size", "8")
    message = new(
        "786.00 MiB", "14.56 GiB", "10.00 MiB", of(99, "11.50 GiB") + own("3.00 GiB"), "2.70 GiB", "and 94.44 MiB"
    )
    done = explain(project, message, "--", "python", "train.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(project)
    tried = {one.changes[0].lever: one for one in found.tries if len(one.changes) == 1}
    assert tried.keys() == {"PYTORCH_CUDA_ALLOC_CONF", "per_device_train_batch_size", "gradient_checkpointing"}
    plain, batch = found.tries[0], tried["per_device_train_batch_size"]
    assert not plain.fits and batch.fits and batch.needed_bytes < plain.needed_bytes
    assert "passes of 1/2 the size" in batch.changes[0].price
    assert found.answer.shown in done.stdout.replace("\n", " ")


@pytest.mark.slow
@needs_cuda_build
def test_a_command_that_has_room_is_not_explained_away(project: Project) -> None:
    roomy = old("2.00 GiB", "14.56 GiB", "12.00 GiB", "1.00 GiB", "12.10 GiB reserved in total by PyTorch)")
    done = explain(project, roomy, "--", "python", "train.py", "--rows", "1000")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "does not run out of memory in the simulation" in said and "--steps all" in said
    assert not findings(project).tries
    [*_, job] = sorted(project.folder.glob("runs/*-explain-*"))
    assert "what was tried" not in (job / "report.html").read_text()


def test_on_a_card_that_others_fill_no_change_of_the_command_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    processes = of(20398, "72.00 GiB") + of(3, "7.00 GiB")
    text = new("1.00 GiB", "79.15 GiB", "1.06 MiB", processes, "0 bytes", "and 0 bytes")
    assert main(["explain", text, "--", sys.executable, "train.py"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("79.15 GiB of the card are neither free nor torch's, which has reserved 0 bytes: other")
    assert "The command is not simulated: others leave it nothing of the card" in said


def test_a_message_of_another_memory_has_nothing_to_simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3077222400 bytes. Error code 12"
    assert main(["explain", text, "--", sys.executable, "train.py"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "torch asked for 2.87 GiB there" in said and "The command is not simulated" in said
