"""Compiled layers: compiled once, before the steps that are timed, and never while a mode records operators."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, tiny, with_corpus_of
from test_export import executed, losses_here
from test_prediction import CPU

from pipeline.base.results import Finished, StepRecord
from pipeline.export.write import export_files
from pipeline.prediction.predict import predict
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.techniques import compile as technique
from pipeline.training.loop import train

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, while it traces


@pytest.fixture(autouse=True)
def fast_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trace the layers as torch.compile does, without its code generation, which takes a minute."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(technique, "ARGUMENTS", {"dynamic": False, "backend": "aot_eager"})
    return counters


@pytest.mark.matrix(1)
@pytest.mark.parametrize("model", ["gpt2-nano", "encoder_stack"])
def test_layers_are_compiled_in_the_first_step_and_train_the_same(model: str, fast_backend: Any) -> None:
    settings = {
        **with_corpus_of(model),
        "causal_lm__dropout": 0.1,
        "encoder_stack__dropout": 0.1,
        "num_steps": 10,
        "eval_steps": 0,
        "causal_lm__num_layers": 3,
        "encoder_stack__num_layers": 3,
        "micro_batch_size": 2,
        "accumulation_steps": 4,
    }
    plain, compiled = (tiny(**settings, **more) for more in ({}, {"compile": "layers"}))
    losses = []
    for experiment in (plain, compiled):
        messages: list[Any] = []
        frames = [0]

        def received(message: Any, messages: list[Any] = messages, frames: list[int] = frames) -> None:
            messages.append(message)
            if isinstance(message, StepRecord):
                frames.append(fast_backend["frames"]["total"])

        train(experiment, experiment.prepare(), received)
        losses.append([message.loss for message in messages if isinstance(message, StepRecord)])
        assert isinstance(messages[-1], Finished) and messages[-1].block_forwards_per_step == 3 * 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 0 < frames[1] <= 2, "the first layer's input may need no gradient; all others share what was compiled"
    assert frames[1:] == [frames[1]] * 10
    assert not fast_backend["graph_break"]


def test_a_prediction_does_not_compile_and_says_what_it_does_not_see(fast_backend: Any) -> None:
    plain, compiled, cpu = tiny(), tiny(compile="layers"), CPU
    assert predict(compiled, CPU).peak_allocated_bytes == predict(plain, CPU).peak_allocated_bytes
    assert not fast_backend["frames"]
    assert plain.notes(cpu) == ()
    assert compiled.notes(cpu) == (
        "compile=layers: predicted as if it were not compiled: what compiled layers allocate cannot be traced",
    )


def test_a_search_says_what_its_predictions_do_not_see() -> None:
    space = {"micro_batch_size": [2], "compile": ["none", "layers"]}
    problem = make_experiment_problem(
        {**TINY, "effective_batch_size": 2, "num_steps": 10, "budget": "64MiB", "space": space}
    )
    assert problem.notes == tiny(compile="layers").notes(CPU)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "absent-compiler")
    assert tiny(compile="layers").unsupported() == (
        "compile=layers needs a C++ compiler, and absent-compiler is not found; install one, or set compile=none"
    )


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({"activation_offloading": True}, "activation_offloading=false"), ({"checkpointing": "offloaded"}, "every_layer")],
)
def test_copies_to_the_host_are_not_compiled(changes: dict[str, Any], remedy: str) -> None:
    reason = tiny(compile="layers", **changes).unsupported()
    assert reason is not None and "is set with compile=layers; set compile=none or" in reason
    assert reason.endswith(remedy)


def test_the_exported_script_compiles_each_layer_and_trains_the_same(
    fast_backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"compile": "layers", "num_steps": 4, "checkpointing": "every_layer"}
    script = executed(export_files(tiny(**settings))["train.py"])
    script["main"](Path(script["TOKENS"]))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if " loss " in line]
    assert 0 < fast_backend["frames"]["total"] <= 3
    assert losses == pytest.approx(losses_here(**{**settings, "compile": "none"}), abs=1e-4)
