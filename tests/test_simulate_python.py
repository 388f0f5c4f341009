"""`from fitproof import simulate`: commands, functions, and three optimizer steps of a model."""

import sys
import threading
from collections import UserDict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_simulate import CUDA_PYTHON, needs_cuda_build
from torch import nn

from fitproof import InvalidInputError, Simulation, simulate
from pipeline.prediction.commands.three_steps import three_steps

MODULE = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def train(rows):
    model = Tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.ones(rows, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(4096)
"""
CELL = """
import torch
def train():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3): step(model, optimizer)
def step(model, optimizer):
    model(torch.ones(rows, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARAMETERS = 4 * 512 * 512


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a module in a folder of its own, where the environment has a CUDA build of torch."""
    (tmp_path / "training_of_a_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("installed", "install"):
        monkeypatch.setattr(f"pipeline.simulation.run.{name}", lambda: CUDA_PYTHON)
    yield import_module("training_of_a_test")
    del sys.modules["training_of_a_test"]


@pytest.mark.slow
@needs_cuda_build
def test_a_function_needs_what_the_command_needs_that_calls_it(module: Any, tmp_path: Path) -> None:
    by_command = simulate(command=[str(CUDA_PYTHON), "training_of_a_test.py"], gpu="rtx4090")
    by_function = simulate(module.train, 4096, gpu="rtx4090")
    assert isinstance(by_function, Simulation)
    assert repr(by_function).startswith("Does training_of_a_test.train() fit NVIDIA GeForce RTX 4090?\n")
    for found in (by_command, by_function):
        assert found.largest is not None
        assert (found.verdict, found.largest.num_steps) == ("fits", 3)
        assert found.largest.user_line is not None and found.largest.user_line.startswith("training_of_a_test.py:")
    one, other = by_command.largest, by_function.largest
    assert one is not None and other is not None
    assert (one.peak_allocated_bytes, one.peak_reserved_bytes, one.lines) == (
        other.peak_allocated_bytes,
        other.peak_reserved_bytes,
        other.lines,
    )
    assert by_command.smallest_bytes == by_function.smallest_bytes
    assert not list(tmp_path.glob("runs")) and not list(tmp_path.glob("mlflow.db"))


@needs_cuda_build
def test_a_training_that_fails_at_once_is_shown_all_the_same(module: Any) -> None:
    found = simulate(command=[str(CUDA_PYTHON), "-c", "raise SystemExit('no such corpus')"], gpu="t4")
    assert found.verdict == "no verdict" and found.to_frame().empty
    assert "no rows in to_frame()" in repr(found) and "no verdict" in found._repr_html_().lower()


@needs_cuda_build
def test_a_model_on_the_device_meta_is_trained_for_three_steps_with_its_tied_weights(module: Any) -> None:
    with torch.device("meta"):
        model = module.Tied()
    adamw = torch.optim.AdamW
    found = simulate(model=model, inputs=torch.ones(4096, 512), optimizer=adamw, gpu="a100", smallest=False)
    assert repr(found).startswith("Does three optimizer steps of training_of_a_test.Tied fit ")
    assert found.largest is not None
    assert (found.verdict, found.largest.num_steps) == ("fits", 3)
    assert found.largest.peak.category_bytes["parameters"] == PARAMETERS
    assert found.largest.peak.category_bytes["optimizer state"] == 2 * PARAMETERS


ROWS = torch.ones(4, 8)


@pytest.mark.parametrize("inputs", [ROWS, (ROWS,), {"input": ROWS}, UserDict({"input": ROWS})])
@pytest.mark.parametrize("model", [nn.Linear(8, 8), lambda: nn.Linear(8, 8)])
def test_the_three_steps_take_a_module_or_what_makes_it(
    model: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.prediction.commands.three_steps.CARD", "meta")
    steps = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps.append([parameter.grad is not None for parameter in self.param_groups[0]["params"]])
            super().step(closure)

    three_steps(model, inputs, Counting)
    assert steps == [[True, True]] * 3


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([], {}, "is given none of them; give one of the three"),
        ([torch.ones], {"command": "python train.py"}, "is given function, command; give one of the three"),
        ([], {"model": nn.Linear(1, 1), "inputs": torch.ones(1)}, "is given model, inputs; give one of the three"),
        ([torch.save, threading.Lock()], {}, "or an argument is not .*; write it into a file"),
        ([["python", "train.py"]], {}, r"is a function, and is \['python', 'train.py'\]; give a command by name"),
        ([torch.save], {"steeps": 3}, "no setting is called steeps; did you mean steps"),
    ],
    ids=["nothing", "two", "no optimizer", "a lock", "a command", "a typo"],
)
def test_wrong_input_raises(given: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        simulate(*given, gpu="t4", **settings)  # type: ignore[call-overload]


@needs_cuda_build
def test_a_lambda_of_a_script_and_a_function_of_a_notebook_are_sent_with_their_code(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it uses of the session too: another function, and a number; nothing of either can be imported."""
    session: dict[str, Any] = {"__name__": "__main__", "rows": 4096, "make": lambda: module.Tied().cuda()}
    exec(compile(CELL, "cell", "exec"), session)
    own = sys.modules["__main__"]
    monkeypatch.setattr(own, "__file__", module.__file__, raising=False)
    by_name = simulate(module.train, 4096, gpu="t4", smallest=False)
    of_script = simulate(lambda: module.train(4096), gpu="t4", smallest=False)
    monkeypatch.delattr(own, "__file__")
    by_code = simulate(session["train"], gpu="t4", smallest=False)
    assert repr(by_code).startswith("Does __main__.train() fit Tesla T4?\n")
    assert by_name.largest is not None and of_script.largest is not None and by_code.largest is not None
    assert by_code.largest.peak_allocated_bytes == by_name.largest.peak_allocated_bytes
    assert of_script.largest.peak_allocated_bytes == by_name.largest.peak_allocated_bytes
    assert by_code.largest.user_line == "<dynamic-code>:8"
