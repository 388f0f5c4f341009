"""The user's own model and corpus, in every entry point and in worker processes, and their errors."""

import json
import sys
from pathlib import Path

import mlflow
import pytest
import torch
from conftest import OWN, ROOT, tiny
from project import SMALL, Project
from torch import nn

from pipeline.base.contracts import Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.cli import main
from pipeline.memory.device import hardware_of
from pipeline.models.user_model import UserModel
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute

MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, size)
    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))

def build(size):
    return Own(size)
"""
WORKS = MODEL.replace("WIDTH", "16")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the module, as a new process would."""
    monkeypatch.delitem(sys.modules, "own_code", raising=False)


def test_the_example_trains_in_a_fresh_process_and_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    experiment = tiny(**OWN, num_steps=20, learning_rate=3e-3, micro_batch_size=2, accumulation_steps=4)
    result = execute(experiment, tmp_path / "log.txt")
    assert result.outcome is Outcome.OK, result.detail
    assert result.steps[-1].loss < 0.8 * result.steps[0].loss
    assert result.memory is not None and result.memory.peak_allocated_bytes is not None
    predicted = predict(experiment, hardware_of(torch.device("cpu"))).peak_allocated_bytes
    assert predicted == pytest.approx(result.memory.peak_allocated_bytes, rel=0.02)
    assert predict(experiment, find_hardware("t4")).peak_reserved_bytes


@pytest.mark.parametrize("checkpointing", ["none", "every_layer", "every_2_layers"])
def test_a_user_model_is_checkpointed(checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plain = execute(tiny(**OWN), tmp_path / "plain.txt")
    result = execute(tiny(**OWN, checkpointing=checkpointing), tmp_path / "log.txt")
    assert [step.loss for step in result.steps] == pytest.approx([step.loss for step in plain.steps], abs=1e-5)
    assert result.finished is not None
    assert result.finished.block_forwards_per_step == {"none": 4, "every_layer": 8, "every_2_layers": 6}[checkpointing]


@pytest.mark.slow
def test_every_kind_of_entry_point_takes_them(project: Project) -> None:
    config = {"config": "experiments/examples/own.yaml"}
    space = {"space": '{"micro_batch_size": [2, 4], "checkpointing": ["none", "every_layer"]}'}
    few = {**SMALL, **OWN, **space, "effective_batch_size": "4", "budget": "64MiB", "num_trials": "2"}
    planned = {k: v for k, v in few.items() if k != "num_trials"}
    for entry, settings in (
        ("main", {**SMALL, **config}),
        ("plan", {**planned, "gpu": "t4", "budget": "none"}),
        ("search", few),
    ):
        done = project.mlflow_run(entry, settings) if entry == "search" else project.here(entry, settings)
        assert done.returncode == 0, done.stderr
    _, child = project.only_run("main")
    assert child.data.params["model"] == OWN["model"]
    assert len(child.data.params["user_code"].split()) == 2
    assert child.data.metrics["check/prediction_error_percent"] == pytest.approx(0, abs=2)
    again = mlflow.MlflowClient(project.store).download_artifacts(child.info.run_id, "config.yaml")
    assert project.here("main", {"config": again}).returncode == 0


def test_a_changed_function_is_another_study_and_another_prediction(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for width in ("16", "64"):
        code.write_text(MODEL.replace("WIDTH", width))
        forget(monkeypatch)
        experiment = tiny(model="own_code:build")
        peak = predict(experiment, hardware_of(torch.device("cpu"))).peak_allocated_bytes
        found.append((experiment.params()["user_code"], peak))
    assert found[0][0] != found[1][0]
    assert found[1][1] > found[0][1]


@pytest.mark.parametrize("text", ["['one two three'] * 200", "('one two three' for _ in range(200))"])
def test_texts_become_a_corpus(text: str, code: Path) -> None:
    code.write_text(f"def read(request):\n    return {text}\n")
    prepared = tiny(corpus="own_code:read").prepare()
    assert prepared.vocabulary_size == 512 and prepared.source == "own_code:read"


def test_ready_sequences_become_a_corpus(code: Path) -> None:
    code.write_text(
        "import torch\ndef read(request):\n    return torch.arange(20 * request.sequence_length).view(20, -1) % 7\n"
    )
    prepared = tiny(corpus="own_code:read").prepare()
    assert (len(prepared.train), len(prepared.held_out), prepared.vocabulary_size) == (18, 2, 7)
    assert prepared.train.batch([1])["input_ids"][0].tolist() == [n % 7 for n in range(32, 64)]


def test_a_function_may_return_a_trainable(code: Path) -> None:
    code.write_text(
        WORKS + "\nfrom pipeline.base.contracts import Trainable\ndef build(size):\n    m = Own(size)\n"
        "    return Trainable(module=m, layers=tuple(m.blocks[:2]), loss=lambda m, b, n: m(b['input_ids']).sum() / n)\n"
    )
    experiment = tiny(model="own_code:build")
    built = experiment.model.build("own_code:build", 512)
    assert isinstance(built, Trainable) and len(built.layers) == 2


def test_layers_are_the_longest_list_or_the_one_named(code: Path) -> None:
    code.write_text(WORKS)
    assert len(tiny(model="own_code:build").model.build("own_code:build", 512).layers) == 3
    with pytest.raises(
        InvalidInputError, match="user_model.layers must name a module.*its lists are: blocks, blocks.0"
    ):
        tiny(model="own_code:build", user_model__layers="stages")


@pytest.mark.parametrize("form", ["(LOGITS, None)", "{'logits': LOGITS, 'loss': None}"])
def test_logits_are_found_in_what_the_model_returns(form: str, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for returned in ("LOGITS", form):
        logits = "self.head(self.blocks(self.embedding(ids)))"
        code.write_text(WORKS.replace(logits, returned.replace("LOGITS", logits)))
        forget(monkeypatch)
        experiment = tiny(model="own_code:build")
        prepared = experiment.prepare()
        torch.manual_seed(0)
        built = experiment.model.build("own_code:build", prepared.vocabulary_size)
        losses.append(built.loss(built.module, prepared.train.batch([0]), 31).item())
    assert losses[0] == losses[1]


LEAVES = """
from torch import nn
class Leaves(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(NUM))
        self.head = nn.Linear(16, size)
    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)
def build(size):
    return Leaves(size)TYPE
"""


def test_layers_may_be_leaves_or_absent(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without layers the levers that change them are left out by name."""
    code.write_text(LEAVES.replace("NUM", "3").replace("TYPE", ""))
    plain, checkpointed = (
        execute(tiny(model="own_code:build", checkpointing=policy), tmp_path / "log.txt")
        for policy in ("none", "every_layer")
    )
    assert plain.outcome is checkpointed.outcome is Outcome.OK
    assert [step.loss for step in checkpointed.steps] == pytest.approx([step.loss for step in plain.steps], abs=1e-5)
    with torch.device("meta"):
        assert len(UserModel().build("own_code:build", 300).layers) == 3
    code.write_text(LEAVES.replace("NUM", "0").replace("TYPE", "") + "\n")  # of another size: it is compiled again
    forget(monkeypatch)
    assert execute(tiny(model="own_code:build"), tmp_path / "log.txt").outcome is Outcome.OK
    reason = tiny(model="own_code:build", checkpointing="every_layer").unsupported()
    assert reason is not None and reason.startswith(
        "checkpointing=every_layer changes the identical layers of a model, and none are known of own_code:build; set "
        "checkpointing=none"
    )


RECURRENT = """
from torch import nn
class Recurrent(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(size, 32), nn.LSTM(32, 64, 2), nn.LazyLinear(size)
    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])
def build(size):
    return Recurrent(size)
"""


def test_lazy_layers_get_shapes_and_what_an_lstm_keeps_is_predicted(code: Path, tmp_path: Path) -> None:
    code.write_text(RECURRENT)
    experiment = tiny(model="own_code:build")
    result = execute(experiment, tmp_path / "log.txt")
    assert result.outcome is Outcome.OK and result.memory is not None, result.detail
    predicted = predict(experiment, hardware_of(torch.device("cpu"))).peak_allocated_bytes
    assert predicted == pytest.approx(result.memory.peak_allocated_bytes, rel=0.001)


def test_weights_of_another_type_are_said(code: Path) -> None:
    code.write_text(LEAVES.replace("NUM", "3").replace("TYPE", ".bfloat16()"))
    experiment = tiny(model="own_code:build")
    assert experiment.description.note == (
        "the weights of own_code:build are as its function returns them: 100 % in bfloat16"
    )


def test_batches_without_token_ids_need_a_loss_of_their_own(code: Path) -> None:
    code.write_text(
        f"{WORKS}\nfrom dataclasses import replace\nfrom pipeline.data.random_vectors import RandomVectors\n"
        "from pipeline.base.contracts import RandomInput\ndef read(request):\n"
        "    inputs = (RandomInput('pixel_values', (3, 8, 8)), RandomInput('labels', (), 10))\n"
        "    described = replace(request.description, inputs=inputs)\n"
        "    return RandomVectors().prepare(replace(request, description=described))\n"
    )
    with pytest.raises(InvalidInputError, match="is called with input_ids, .* have pixel_values, labels; return a Tr"):
        tiny(model="own_code:build", corpus="own_code:read").prepare()


def test_of_few_sequences_of_tokens_one_is_held_out(code: Path) -> None:
    code.write_text("import torch\ndef rows(request): return torch.arange(128).view(4, 32)")
    prepared = tiny(corpus="own_code:rows", micro_batch_size=1, accumulation_steps=2).prepare()
    assert (len(prepared.train), len(prepared.held_out)) == (3, 1)


@pytest.mark.parametrize("setting", ["model", "corpus"])
def test_a_function_of_a_file_is_named_by_its_module(setting: str) -> None:
    with pytest.raises(InvalidInputError, match="folder/own.py:build names a file; write own:build, and run .* folder"):
        tiny(**{setting: "folder/own.py:build"})


def test_a_model_that_reads_tensors_is_built_on_the_cpu(code: Path) -> None:
    code.write_text(WORKS.replace("super().__init__()", "super().__init__(); int(torch.ones(1).item())"))
    assert isinstance(tiny(model="own_code:build").model.build("own_code:build", 512).module, nn.Module)


WRONG: list[tuple[str, str, str]] = [
    ("model", "", "own_code:build must name a function, and own_code has none called build; its functions are: none"),
    ("model", "def make(size): pass", "its functions are: make"),
    (
        "model",
        "def build(size): return 3",
        "own_code:build must return a torch.nn.Module (or a Trainable), and returns int",
    ),
    (
        "model",
        "def build(size):\n    return helper(size)\ndef helper(size):\n    return 1 / 0",
        "raises ZeroDivisionError",
    ),
    ("model", "def build(): pass", "own_code:build must not raise an error, and raises TypeError; fix it"),
    ("model", "import absent", "own_code:build must not raise an error, and raises ModuleNotFoundError; fix it"),
    ("model", "def build(", "own_code:build must not raise an error, and raises SyntaxError; fix it"),
    (
        "model",
        WORKS.replace("return self.head(", "return None, self.head("),
        "must return logits [B, T, V] of all positions (a tensor, logits of an object or a dict, or the first of a "
        "tuple), and returns a tuple with a NoneType for them for input_ids [2, 3]",
    ),
    (
        "model",
        WORKS.replace("self.embedding(ids)", "self.embedding(ids)[:, -1:]"),
        "and returns a tensor [2, 1, 300] of float32 for input_ids [2, 3]; return those, or a Trainable",
    ),
    (
        "model",
        WORKS.replace("forward(self, ids", "forward(self, ids, mask"),
        "must take token ids alone, and its forward does not (missing a required argument: 'mask')",
    ),
    (
        "model",
        "from torch import nn\ndef build(size):\n"
        "    model = nn.Sequential(nn.Embedding(size, 4), nn.LazyLinear(size))\n"
        "    model[0].spare = nn.LazyLinear(4)\n    return model",
        "the parameters of own_code:build must have a shape, and those of its lazy layers have none: a call with "
        "input_ids [2, 3] does not reach all of them; call the model once in the function",
    ),
    ("corpus", "def build(request): return 'text'", "own_code:build must return texts, one a document"),
    ("corpus", "def build(request): return [1, 2]", "and returns a list with a int; return a list of str"),
    (
        "corpus",
        "def build(request):\n    yield 'a'\n    1 / 0",
        "own_code:build must not raise an error, and raises ZeroDivisionError",
    ),
    ("corpus", "def build(request): return []", "a corpus needs text, and own_code:build has none"),
    ("corpus", "import torch\ndef build(request): return torch.ones(3, 4)", "and returns [3, 4] of torch.float32"),
]


@pytest.mark.parametrize(("setting", "text", "message"), WRONG, ids=[message[:60] for *_, message in WRONG])
def test_a_wrong_function_gives_a_clear_error(
    setting: str,
    text: str,
    message: str,
    code: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code.write_text(text)
    forget(monkeypatch)
    config = str(ROOT / "experiments" / "single" / "fp32.yaml")
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["main", "--config", config, *words, f"--{setting}", "own_code:build"]) == 2
    first, *rest = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("error: ") and message in first
    if "raises" in first:
        assert 1 <= len(rest) <= 10
        assert rest[-1].startswith(first.rpartition("raises ")[2].partition(";")[0])
        assert not [line for line in rest if "pipeline" in line or "site-packages" in line]
    else:
        assert rest == []
    assert [file.name for file in code.parent.iterdir()] == [code.name]


def test_a_traceback_shows_the_users_own_lines(code: Path) -> None:
    code.write_text("def build(size):\n    return helper(size)\ndef helper(size):\n    return 1 / 0\n")
    with pytest.raises(InvalidInputError) as caught:
        tiny(model="own_code:build")
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines if "return" in line] == ["return helper(size)", "return 1 / 0"]


def test_a_plan_shows_where_a_user_model_raises(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code.write_text(WORKS.replace("return self.head(", "raise ValueError('wrong side up')\n        return self.head("))
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["plan", *words, "--gpu", "cpu", "--model", "own_code:build"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    cause = "on tensors without values the step raises ValueError in Own.forward (own_code.py:12): wrong side up"
    assert line == f"error: no configuration is predicted: {cause}"


def test_a_missing_module_is_named(code: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no module absent_code; write path.to.module:function"):
        tiny(model="absent_code:build")
    assert not code.exists()


def test_params_and_yaml_describe_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    experiment = tiny(**OWN)
    assert "user_code" not in experiment.to_yaml()
    assert set(json.loads(json.dumps(experiment.params()))) >= {"user_code", "model", "corpus"}
