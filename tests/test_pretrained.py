"""Pretrained checkpoints: sharded ones train, and one that cannot be read ends the command before any run."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, tiny
from test_chat import folder_with
from test_prediction import CPU, measured
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.data._support.chat_template import TEMPLATE
from pipeline.models.causal_lm import CausalLm
from pipeline.prediction.predict import predict

SHAPE = {"num_layers": None, "width": None, "num_heads": None}
PRETRAINED: dict[str, Any] = {"corpus": "chat", "causal_lm": {**SHAPE, "pretrained": True}}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the weights of a tiny model in several shards, in bfloat16, and a tokenizer."""
    folder = Path(folder_with(TEMPLATE, tmp_path_factory.mktemp("sharded")))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 2
    return folder


@pytest.fixture
def copied(sharded: Path, tmp_path: Path) -> Path:
    """Give a copy that a test may damage."""
    return Path(shutil.copytree(sharded, tmp_path / "copied"))


def command(folder: Path, *words: str) -> int:
    """Return the exit code of `fitproof main` in this process."""
    own = ["--model", str(folder), "--causal_lm.pretrained", "true", "--corpus", "chat", "--num_steps", "4"]
    return main(["main", *own, "--sequence_length", "32", *words])


def test_sharded_weights_are_those_that_were_saved(sharded: Path) -> None:
    experiment = tiny(model=str(sharded), **PRETRAINED)
    prepared = experiment.prepare()
    module = CausalLm(pretrained=True).build(str(sharded), prepared.vocabulary_size).module
    saved = AutoModelForCausalLM.from_pretrained(sharded, dtype=torch.float32).state_dict()
    found = module.state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_measured_peak_has_weights_that_were_loaded_in_16_bits(sharded: Path, adapter: str) -> None:
    experiment = tiny(model=str(sharded), adapter=adapter, **PRETRAINED)
    predicted = predict(experiment.with_random_weights("cpu"), CPU).peak_allocated_bytes
    assert measured(experiment) == pytest.approx(predicted, abs=500)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*-of-*.safetensors"))


def remove_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def truncate_shard(folder: Path) -> None:
    content = first_shard(folder).read_bytes()
    first_shard(folder).write_bytes(content[: len(content) // 2])


def exchange_shard(folder: Path) -> None:
    shutil.copy(max(folder.glob("model-*-of-*.safetensors")), first_shard(folder))


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def lack_shard_of_torch(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"weight": "pytorch_model-1.bin"}}')


def remove_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def truncate_whole(folder: Path) -> None:
    remove_weights(folder)
    (folder / "model.safetensors").write_bytes(b"\x08")


@pytest.mark.parametrize(
    ("damage", "rule", "remedy"),
    [
        (remove_shard, "every shard that model.safetensors.index.json names must be there", "download it again"),
        (truncate_shard, "weights must be files of safetensors", "copy or download it again"),
        (exchange_shard, "every tensor that model.safetensors.index.json names must be in its shard", "again"),
        (damage_index, "must be JSON with a weight_map", "write the checkpoint again"),
        (remove_weights, "pretrained weights need model.safetensors or", "set causal_lm.pretrained=false"),
        (lack_shard_of_torch, "every shard that pytorch_model.bin.index.json names must be there", "download it again"),
        (truncate_whole, "weights must be files of safetensors", "copy or download it again"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_ends_the_command_before_any_run(
    damage: Any,
    rule: str,
    remedy: str,
    copied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(copied)
    monkeypatch.chdir(tmp_path)
    assert command(copied) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert rule in text and remedy in text and str(copied) in text
    assert not (tmp_path / "runs").exists()


def test_a_quantized_checkpoint_is_refused_and_its_shape_is_not(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied / "config.json"
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    monkeypatch.chdir(tmp_path)
    for adapter in ("none", "qlora"):
        assert command(copied, "--adapter", adapter) == 2
        said = capsys.readouterr().err
        assert f"in 16 or 32 bits, and {copied} has weights quantized by bitsandbytes; name the checkpoint" in said
    assert not (tmp_path / "runs").exists()
    assert not hasattr(CausalLm().build(str(copied), 512).module.config, "quantization_config")


def test_code_of_a_checkpoint_is_never_executed(copied: Path, tmp_path: Path) -> None:
    """Where transformers has a class of that type it is used; where not, the model is refused."""
    trace = tmp_path / "executed"
    code = (
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import GPT2Config as Own, GPT2LMHeadModel as OwnModel\n"
    )
    (copied / "own.py").write_text(code)
    config = json.loads((copied / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (copied / "config.json").write_text(json.dumps(config))
    experiment = tiny(model=str(copied), **PRETRAINED)
    module = experiment.model.build(str(copied), experiment.prepare().vocabulary_size).module
    assert type(module).__module__.startswith("transformers.models.gpt2")
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "of_its_own"}))
    with pytest.raises(InvalidInputError, match="needs code of its own, which is never executed; name a model that"):
        tiny(model=str(copied), **PRETRAINED)
    assert not trace.exists()


@contextmanager
def hub(sharded: Path) -> Iterator[str]:
    """Serve the files of the repository open/model, but for weights; refuse closed/model and gated/model."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            owner, file = self.path.split("/")[1], sharded / self.path.rpartition("/")[2]
            refusal = {"gated": (403, "GatedRepo"), "closed": (401, "RepoNotFound")}.get(owner)
            if refusal is None and (file.suffix == ".safetensors" or not file.is_file()):
                refusal = (404, "EntryNotFound")
            content = b"" if refusal else file.read_bytes()
            status, code = refusal or (200, "")
            self.send_response(status)
            self.send_header("X-Error-Code", code) if code else None
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{file.name}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


OF_HUB = {
    "gated/model": ("log in with `hf auth login` or the variable HF_TOKEN", "gated"),
    "closed/model": ("log in with `hf auth login` or the variable HF_TOKEN", "closed/model"),
    "open/model": ("every shard that model.safetensors.index.json names must be there", "open/model has no"),
}
"""What is said of models that the hub below has, but that cannot be read."""
ABSENT = {"absent/model": ("check the network and the name, or give a local folder", "absent/model")}
MAIN = """
import sys
from pipeline.cli import main

for model in sys.argv[1:]:
    own = ["--model", model, "--causal_lm.pretrained", "true", "--corpus", "chat", "--sequence_length", "32"]
    assert main(["main", *own]) == 2
"""


@pytest.mark.parametrize(
    "models", [pytest.param(OF_HUB, id="hub"), pytest.param(ABSENT, id="no hub", marks=pytest.mark.slow)]
)
def test_a_model_of_the_hub_that_cannot_be_read_is_refused(
    models: dict[str, tuple[str, str]], sharded: Path, tmp_path: Path
) -> None:
    with hub(sharded) as endpoint:
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": "http://127.0.0.1:9" if models is ABSENT else endpoint,
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        }
        command = [sys.executable, "-c", MAIN, *models]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, *errors = " ".join(done.stderr.split()).split("error: ")
    for words, error in zip(models.values(), errors, strict=True):
        assert all(word in error for word in words), error
    assert "Retrying" not in done.stderr and not (tmp_path / "runs").exists()
