"""Exported files: other frameworks train with the measured losses."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from conftest import OWN, ROOT, TINY, pairs, tiny, with_corpus_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import free_port
from trainings import steps_of
from transformers import AutoConfig

from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique
from pipeline.cli import main
from pipeline.export import trainer_arguments
from pipeline.export.facts import facts_of
from pipeline.export.write import TARGETS, export_files, write_files
from pipeline.models._support.causal_models import PRESETS
from pipeline.runtime.worker_pool import run_all, worker_pool
from pipeline.techniques._support.optimizers import with_master_weights
from pipeline.training.loop import learning_rate

OF_TRL = 3e-4
"""Largest difference of TRL's losses in bfloat16, of 1.3e-4 on a processor with AMX: a step changes them by 3e-2."""
COMBINED = {
    "precision": "bf16",
    "checkpointing": "every_layer",
    "micro_batch_size": 2,
    "effective_batch_size": 8,
    "learning_rate_scaling": "sqrt",
    "learning_rate": 1e-2,
}
SMALL_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
}
PLAIN = {
    "precision": "fp32",
    "learning_rate_schedule": "cosine",
    "learning_rate_warmup_ratio": 0.3,
    "num_epochs": 0.006,
    "max_grad_norm": "none",
}
EVERYTHING = st.fixed_dictionaries(
    {
        "micro_batch_size": st.sampled_from([1, 2, 4]),
        "accumulation_steps": st.integers(1, 4),
        "precision": st.sampled_from(["fp32", "tf32", "fp16", "bf16"]),
        "checkpointing": st.sampled_from(["none", "every_layer", "every_2_layers"]),
        "learning_rate_warmup_steps": st.integers(0, 4),
        "learning_rate_schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "learning_rate_scaling": st.sampled_from(["none", "linear", "sqrt"]),
        "max_grad_norm": st.sampled_from([None, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "sequences": st.sampled_from(["packed", "packed_documents", "fixed_length", "padded", "grouped"]),
    }
)
each_configuration = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def losses_here(**changes: Any) -> list[float]:
    """Return the losses of Fitproof's own run."""
    return [step.loss for step in steps_of(tiny(**changes))]


def run(*words: str) -> list[float]:
    """Run a Python command, and return the losses that it prints."""
    free = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MLFLOW_"))}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}  # what a launcher sets
    environment = {**free, **alone, "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def losses_in(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss ([\d.]+)$", output, re.MULTILINE)]


def losses_of_script(*words: str) -> list[float]:
    """Run an exported script in a process that is forked from one with torch, which takes a new one seconds to load."""
    with worker_pool(1) as pool:
        [(_, output)] = run_all(pool, output_of_script, [words])
    return losses_in(output)


def output_of_script(words: Sequence[str]) -> str:
    """Run a script with these words in this process, and return what it prints."""
    sys.argv[:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(words[0], run_name="__main__")
    return out.getvalue()


def executed(text: str) -> dict[str, Any]:
    """Return the names that an exported Python file defines."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), names)
    return names


@pytest.fixture(scope="module", params=[COMBINED, PLAIN], ids=["combined", "plain"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Give a folder of exported files, and the losses of the run that they are made from."""
    folder = tmp_path_factory.mktemp("export")
    write_files(export_files(tiny(**request.param)), folder)
    return folder, losses_here(**request.param)


@pytest.mark.matrix(1)
def test_the_script_trains_the_same_without_fitproof(exported: tuple[Path, list[float]]) -> None:
    folder, expected = exported
    assert "pipeline" not in (folder / "train.py").read_text()
    assert run("-I", str(folder / "train.py")) == pytest.approx(expected, abs=1e-4)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("framework", ["accelerate", "hugging_face", "lightning"])
def test_a_framework_trains_the_same(framework: str, tmp_path: Path) -> None:
    write_files(export_files(tiny(**COMBINED)), tmp_path)
    assert run_framework(framework, tmp_path) == pytest.approx(losses_here(**COMBINED), abs=1e-4)


@pytest.mark.slow
def test_accelerate_trains_the_same_on_two_processes_and_refuses_one(tmp_path: Path) -> None:
    values = {"effective_batch_size": 8, "micro_batch_size": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    write_files(export_files(tiny(**values, world_size=2)), tmp_path)
    [command] = [line for line in (tmp_path / "accelerate.yaml").read_text().splitlines() if "your_script.py" in line][
        :1
    ]
    assert command == "# torchrun --nproc_per_node=2 your_script.py"
    words = (str(ROOT / "tests" / "frameworks.py"), "accelerate", str(tmp_path))
    losses = run("-m", "torch.distributed.run", "--nproc_per_node=2", *words)
    assert losses == pytest.approx(losses_here(**values), abs=1e-4)
    with pytest.raises(AssertionError, match="2 processes must train together, and there are 1"):
        run(*words)


@pytest.mark.slow
def test_trl_trains_the_same_rows_on_two_processes(tmp_path: Path) -> None:
    values = {"effective_batch_size": 8, "micro_batch_size": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    write_files(export_files(tiny(**values, world_size=2)), tmp_path)
    script = str(tmp_path / "trl_sft.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses == pytest.approx(losses_here(**values), abs=1e-3)


def test_float32_copies_that_a_framework_would_lose_are_said_to_be_missing() -> None:
    shards = {"world_size": 2, "sharding": "fsdp", "weights": "bfloat16_master"}
    files = export_files(tiny(**shards, effective_batch_size=8, micro_batch_size=2))
    for name in ("accelerate_setup.py", "training_arguments.py", "trl_sft.py"):
        assert "without weights=bfloat16_master" in files[name]


@pytest.mark.gpu
def test_float32_copies_follow_a_model_that_is_moved() -> None:
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = with_master_weights(torch.optim.AdamW(model.parameters()))
    model.cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(copy.is_cuda for group in optimizer.param_groups for copy in group["params"])


def test_a_folder_is_found_from_any_other_and_has_the_type_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model("llama", **SMALL_LLAMA, dtype="bfloat16").save_pretrained("of/mine")
    values = {"model": "of/mine"}
    files = export_files(tiny(**values))
    write_files(files, tmp_path / "out")
    assert losses_of_script(str(tmp_path / "out" / "train.py")) == pytest.approx(losses_here(**values), abs=1e-5)
    assert str(tmp_path / "of" / "mine") in files["axolotl.yaml"]


@pytest.mark.parametrize(("reshards", "stage"), [(True, 3), (False, 2)])
def test_a_sharded_model_is_one_of_each_framework_that_shards(reshards: bool, stage: int, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments

    several = {"world_size": 2, "effective_batch_size": 8, "micro_batch_size": 2, "sharding": "fsdp"}
    files = export_files(tiny(**several, reshard_after_forward=reshards))
    write_files(files, tmp_path)
    launched: Any = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert launched.distributed_type == "FSDP" and launched.num_processes == 2
    assert (launched.fsdp_config["fsdp_version"], launched.fsdp_config["fsdp_reshard_after_forward"]) == (2, reshards)
    of_trainer = TrainingArguments(**json.loads(files["training_arguments.json"])).fsdp_plugin_args
    assert (of_trainer["fsdp_version"], of_trainer["reshard_after_forward"]) == (2, reshards)
    of_axolotl = yaml.safe_load(files["axolotl.yaml"])
    assert of_axolotl["fsdp_version"] == 2 and of_axolotl["fsdp_config"]["reshard_after_forward"] is reshards
    assert json.loads(files["deepspeed.json"])["zero_optimization"] == {"stage": stage}
    assert "without sharding=fsdp" in files["lightning_trainer.py"]


def test_parts_on_the_host_are_a_setting_of_each_framework_that_has_one(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments

    several = {"world_size": 2, "effective_batch_size": 8, "micro_batch_size": 2, "sharding": "fsdp"}
    files = export_files(tiny(**several, sharded_offloading=True))
    write_files(files, tmp_path)
    launched: Any = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert launched.fsdp_config["fsdp_offload_params"] is True
    of_trainer = TrainingArguments(**json.loads(files["training_arguments.json"])).fsdp_plugin_args
    assert of_trainer["cpu_offload"] is True
    assert yaml.safe_load(files["axolotl.yaml"])["fsdp_config"]["offload_params"] is True
    assert json.loads(files["deepspeed.json"])["zero_optimization"] == {"stage": 0}
    assert "without sharding=fsdp" in files["deepspeed_setup.py"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "hugging_face", "lightning", "deepspeed", "trl"])
def test_any_framework_trains_the_same(
    framework: str, exported: tuple[Path, list[float]], request: pytest.FixtureRequest
) -> None:
    """DeepSpeed compiles an operator of its own the first time."""
    folder, expected = exported
    is_plain = request.node.callspec.params["exported"] == PLAIN
    assert run_framework(framework, folder) == pytest.approx(
        expected, abs=OF_TRL if framework == "trl" and not is_plain else 1e-4
    )


def run_framework(framework: str, folder: Path) -> list[float]:
    """Return the losses of a framework with the exported files, started as its documentation says."""
    words = (str(ROOT / "tests" / "frameworks.py"), framework, str(folder))
    if framework == "accelerate":
        return run("-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml"), *words)
    return run(*words) if framework == "deepspeed" else losses_of_script(*words)


@pytest.mark.parametrize("sequences", ["fixed_length", "padded", "grouped"])
def test_the_script_weights_padded_tokens_as_fitproof_does(
    sequences: str, short_documents: Path, tmp_path: Path
) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": sequences}
    cut = {"effective_batch_size": 4, "micro_batch_size": 2, "causal_lm__num_layers": 3}
    values = {**cut, **text, "precision": "fp16", "checkpointing": "every_2_layers"}
    write_files(export_files(tiny(**values)), tmp_path)
    assert losses_of_script(str(tmp_path / "train.py")) == pytest.approx(losses_here(**values), abs=1e-4)


@pytest.mark.slow
def test_trainer_pads_each_micro_batch_to_its_longest_sequence(short_documents: Path, tmp_path: Path) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": "padded"}
    values = {**text, "effective_batch_size": 4, "micro_batch_size": 2}
    write_files(export_files(tiny(**values)), tmp_path)
    assert run_framework("hugging_face", tmp_path) == pytest.approx(losses_here(**values), abs=1e-4)
    pad = executed((tmp_path / "training_arguments.py").read_text())["pad_to_longest"]
    batch = pad([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("loss_kernel", "corpus"), pairs(["full", "chunked"], ["chat", "text_files"]))
def test_the_script_keeps_documents_apart(loss_kernel: str, corpus: str, short_documents: Path, tmp_path: Path) -> None:
    values = {
        "corpus": corpus,
        "text_files__path": str(short_documents),
        "sequences": "packed_documents",
        "sequence_length": 128,
        "loss_kernel": loss_kernel,
        "checkpointing": "every_layer",
        "effective_batch_size": 4,
        "micro_batch_size": 2,
    }
    write_files(export_files(tiny(**values)), tmp_path)
    assert losses_of_script(str(tmp_path / "train.py")) == pytest.approx(losses_here(**values), abs=1e-4)
    if loss_kernel == "full":
        assert run_framework("hugging_face", tmp_path) == pytest.approx(losses_here(**values), abs=1e-4)
        told = " ".join((tmp_path / "README.md").read_text().split())
        assert "position_ids beside input_ids and labels, which begin at 0 with each document" in told
    else:
        losses = losses_of_script(str(tmp_path / "train.py"), str(short_documents))
        assert len(losses) == TINY["num_steps"] and losses[-1] < losses[0]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sequences", ["packed", "fixed_length", "grouped"])
def test_the_script_has_the_targets_of_answers_alone(sequences: str, tmp_path: Path) -> None:
    values = {"corpus": "chat", "sequences": sequences, "effective_batch_size": 4, "micro_batch_size": 2}
    write_files(export_files(tiny(**values)), tmp_path)
    assert losses_of_script(str(tmp_path / "train.py")) == pytest.approx(losses_here(**values), abs=1e-4)


def test_the_script_takes_any_text_file(tmp_path: Path) -> None:
    write_files(export_files(tiny(micro_batch_size=2)), tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    losses = losses_of_script(str(tmp_path / "train.py"), str(tmp_path / "text.txt"))
    assert len(losses) == TINY["num_steps"] and losses[-1] < losses[0]


@given(EVERYTHING)
@each_configuration
def test_every_file_has_the_same_numbers(changes: dict[str, Any]) -> None:
    experiment = tiny(**changes)
    files = export_files(experiment)
    arguments, deepspeed = (json.loads(files[name]) for name in ("training_arguments.json", "deepspeed.json"))
    micro, steps = changes["micro_batch_size"], changes["accumulation_steps"]
    assert experiment.effective_batch_size == micro * steps == deepspeed["train_batch_size"]
    assert arguments["per_device_train_batch_size"] == deepspeed["train_micro_batch_size_per_gpu"] == micro
    assert arguments["gradient_accumulation_steps"] == deepspeed["gradient_accumulation_steps"] == steps
    assert arguments["learning_rate"] == deepspeed["optimizer"]["params"]["lr"] == facts_of(experiment).learning_rate
    assert arguments["weight_decay"] == deepspeed["optimizer"]["params"]["weight_decay"] == changes["weight_decay"]
    assert arguments["max_grad_norm"] == deepspeed["gradient_clipping"] == (changes["max_grad_norm"] or 0)
    assert [arguments[name] for name in ("bf16", "fp16", "tf32")] == [
        changes["precision"] == name for name in ("bf16", "fp16", "tf32")
    ]
    axolotl = yaml.safe_load(files["axolotl.yaml"])
    for name, value in {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps}.items():
        assert f"    {name}={value},\n" in files["trl_sft.py"]
        assert axolotl[name.replace("per_device_train", "micro")] == value
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "fp16", "bf16", "tf32", "max_steps", "seed"):
        assert axolotl[name] == arguments[name]
    for name in (name for name in files if name.endswith(".py")):
        compile(files[name], name, "exec")
        high = changes["precision"] == "tf32"
        if name not in ("training_arguments.py", "trl_sft.py"):  # they have an argument for it
            assert f'set_float32_matmul_precision("{"high" if high else "highest"}")' in files[name]
    check_the_schedule(experiment, executed(files["deepspeed_setup.py"])["learning_rate_factor"])


def check_the_schedule(experiment: Any, factor: Any) -> None:
    """Check the learning rate of every optimizer step."""
    values, effective = experiment.settings, experiment.effective_batch_size
    highest = facts_of(experiment).learning_rate
    for step in range(values.num_steps):
        assert highest * factor(step) == pytest.approx(learning_rate(step, values, effective))
    factor(values.num_steps)  # a scheduler computes it after the last step


def test_notes_are_of_this_model_and_corpus(short_documents: Path, tmp_path: Path) -> None:
    gpt2, llama = (export_files(tiny(model=model))["README.md"] for model in ("gpt2-nano", "llama-nano"))
    assert "one target too many" in gpt2 and "one target too many" not in llama
    vectors = export_files(tiny(model="encoder_stack", corpus="random_vectors", sequences="padded"))
    assert "pads each micro-batch" not in vectors["README.md"]
    table = tmp_path / "rows.tsv"
    table.write_text("text\n" + "\n".join(short_documents.read_text().splitlines()).replace('"', ""))
    of_table = facts_of(tiny(corpus="text_files", text_files__path=table))
    assert of_table.source is None, "axolotl reads commas alone"


@given(EVERYTHING)
@each_configuration
def test_what_a_file_cannot_express_is_in_the_notes(changes: dict[str, Any]) -> None:
    files = export_files(tiny(**changes))
    notes = json.loads(files["deepspeed.json"])["notes"]
    assert all(note in files["README.md"] for note in notes)
    lengths_vary = changes["sequences"] in ("padded", "grouped")
    assert ("pads each micro-batch to its longest" in files["README.md"]) == lengths_vary
    assert any("pad each to its longest sequence" in note for note in notes) == lengths_vary
    assert ("only across optimizer steps" in files["README.md"]) == (changes["sequences"] == "grouped")
    assert any("tf32" in note for note in notes) == (changes["precision"] == "tf32")
    assert any("checkpoint" in note for note in notes) == (changes["checkpointing"] != "none")
    assert ("tf32" in files["accelerate.yaml"].partition("compute_environment")[0]) == (changes["precision"] == "tf32")
    assert ("fused=False" in files["lightning_trainer.py"]) == (
        changes["precision"] in ("fp16", "bf16") and changes["max_grad_norm"] is not None
    )


@pytest.mark.parametrize("changes", [COMBINED, PLAIN, {"checkpointing": "every_2_layers"}, {"precision": "tf32"}])
def test_hugging_face_reads_its_arguments(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    tf32: list[bool] = []
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", tf32.append)
    experiment = tiny(**changes)
    files = export_files(experiment)
    arguments = TrainingArguments(**json.loads(files["training_arguments.json"]))
    file = tmp_path / "training_arguments.json"
    file.write_text(files[file.name])
    [parsed] = HfArgumentParser(TrainingArguments).parse_json_file(str(file))
    made = executed(files["training_arguments.py"])["arguments"]
    assert arguments == parsed == made
    assert arguments.train_batch_size * arguments.gradient_accumulation_steps == experiment.effective_batch_size
    assert tf32 == [changes.get("precision") == "tf32"] * 3


@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 5])
def test_the_json_alone_has_the_exact_constant_schedule(warmup_steps: int) -> None:
    import torch
    from transformers import get_scheduler

    experiment = tiny(learning_rate_warmup_steps=warmup_steps, num_steps=8)
    arguments = json.loads(export_files(experiment)["training_arguments.json"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments["learning_rate"])
    schedule = get_scheduler(
        arguments["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=arguments["warmup_steps"],
        num_training_steps=arguments["max_steps"],
        scheduler_specific_kwargs=arguments.get("lr_scheduler_kwargs"),
    )
    for step in range(8):
        assert schedule.get_last_lr() == [pytest.approx(learning_rate(step, experiment.settings, 8))]
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_the_json_alone_has_8_bit_adamw(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.optim import GlobalOptimManager
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    monkeypatch.setattr(GlobalOptimManager, "_instance", None)  # it holds what Trainer leaves in float32
    files = export_files(tiny(optimizer=optimizer))
    arguments = {**json.loads(files["training_arguments.json"]), "output_dir": str(tmp_path)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2))
    made = Trainer(model, TrainingArguments(**arguments)).create_optimizer()
    in_float32 = {(module, config["optim_bits"]) for module, _, config in made.mng.module_weight_config_triple}
    assert (made.args.optim_bits, made.is_paged) == (8, optimizer == "paged_adamw_8bit")
    assert in_float32 == {(model.transformer.wte, 32), (model.transformer.wpe, 32)}
    assert f"without optimizer={optimizer}" not in files["README.md"]
    other = export_files(tiny(optimizer=optimizer, adamw_8bit_embeddings="8bit"))
    assert json.loads(other["training_arguments.json"])["optim"] == "adamw_torch_fused"
    assert f"The JSON alone is without optimizer={optimizer}, adamw_8bit_embeddings=8bit" in other["README.md"]


def test_an_older_transformers_gets_the_older_name_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_arguments, "checkpointing_name", lambda: "gradient_checkpointing")
    files = export_files(tiny(checkpointing="every_2_layers"))
    arguments = json.loads(files["training_arguments.json"])
    assert arguments["gradient_checkpointing"] and arguments["gradient_checkpointing_kwargs"] == {
        "use_reentrant": False
    }
    assert "checkpoints every layer or none: every layer here, instead of one of 2" in files["README.md"]


def test_accelerate_reads_its_configuration(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    for changes, expected in ((COMBINED, "bf16"), (PLAIN, "no"), ({"precision": "fp16"}, "fp16")):
        file = tmp_path / "accelerate.yaml"
        file.write_text(export_files(tiny(**changes))[file.name])
        config = load_config_from_file(str(file))
        assert (config.mixed_precision, config.num_processes, config.use_cpu) == (expected, 1, True)
        assert config.distributed_type.value == "NO"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lightning_takes_its_trainer(precision: str) -> None:
    text = export_files(tiny(precision=precision, accumulation_steps=3))["lightning_trainer.py"]
    trainer = executed(text)["make_trainer"](logger=False, enable_checkpointing=False)
    assert (trainer.accumulate_grad_batches, trainer.max_steps, trainer.gradient_clip_val) == (3, 4, 1.0)
    assert trainer.precision == {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]


PARSE = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for line in sys.stdin:
    c = DeepSpeedConfig(json.loads(line))
    batch = c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps
    print(json.dumps([*batch, c.gradient_clipping, c.torch_autocast_enabled, str(c.torch_autocast_dtype)]))
"""


@pytest.mark.slow
def test_deepspeed_parses_its_configuration() -> None:
    experiments = [tiny(**changes) for changes in (COMBINED, PLAIN, {"precision": "fp16", "accumulation_steps": 3})]
    lines = [json.dumps(json.loads(export_files(experiment)["deepspeed.json"])) for experiment in experiments]
    words = [sys.executable, "-c", PARSE]
    done = subprocess.run(words, input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[") and "WARN" not in line]
    assert parsed == [
        [8, 2, 4, 1.0, True, "torch.bfloat16"],
        [8, 8, 1, 0.0, False, "None"],
        [24, 8, 3, 1.0, True, "torch.float16"],
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_the_script_builds_the_same_shape(name: str) -> None:
    from transformers import AutoConfig

    changed = tiny(model=name, causal_lm__dropout=0.05, checkpointing="every_layer")
    text = export_files(changed)
    script = executed(text["train.py"])
    expected = changed.model.configuration(name, 512)  # type: ignore[attr-defined]
    assert AutoConfig.for_model(**script["MODEL"]).to_dict() == expected.to_dict()
    assert "for index in range(0, 2, 1)" in text["train.py"]


def test_a_model_that_is_not_of_transformers_has_all_files_but_the_script() -> None:
    files = export_files(tiny(**with_corpus_of("encoder_stack"), checkpointing="every_layer"))
    assert "train.py" not in files
    absent = "There are no files for plain PyTorch, TRL and axolotl: transformers does not build encoder_stack"
    assert absent in files["README.md"]
    module = tiny(**with_corpus_of("encoder_stack")).model.build("encoder_stack", 0).module
    made = executed(files["accelerate_setup.py"])
    made["prepare_model"](module)
    assert all("partial" in str(layer.forward) for layer in module)
    assert "optimizer_step" not in made and "Its loss is of no labels" in files["README.md"]


def test_a_user_model_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = export_files(tiny(**OWN, checkpointing="every_2_layers"))
    assert '[f"blocks.{index}" for index in range(0, 4, 2)]' in files["deepspeed_setup.py"]
    assert "train.py" not in files


class Added(Technique):
    """A technique that every target can express."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER
    mathematics: ClassVar[Mathematics] = Mathematics.DIFFERENT  # type: ignore[assignment]

    added: bool = False

    def environment(self) -> dict[str, str]:
        return {"ADDED": "1"}

    def export(self, target: str) -> Exported | None:
        arguments = {"training_arguments": {"optim": "sgd"}, "lightning": {"profiler": None}}
        if target == "axolotl":
            return Exported(arguments={"added": 1e-5}, notes=("added to axolotl",))
        return Exported(
            code="import math",
            prepare="model.added = math.pi",
            optimizer="[{optimizer}, {learning_rate}, {weight_decay}]",
            arguments=arguments.get(target, {}),
            notes=(f"added to {target}",),
        )

    def apply(self, step: Step) -> Step:
        return step


def test_every_target_writes_what_a_technique_exports() -> None:
    experiment = tiny()
    experiment.__dict__["techniques"] = (*experiment.techniques, Added(added=True))
    files = export_files(experiment)
    module = torch.nn.Linear(2, 2)
    for name in ("accelerate_setup.py", "deepspeed_setup.py", "lightning_trainer.py"):
        names = executed(files[name])
        names["prepare_model"](module)
        [optimizer, rate, decay] = names["make_optimizer"](module)
        assert (type(optimizer).__name__, rate, decay) == ("AdamW", 5e-4, 0.01)
        assert module.added == math.pi
    assert "    prepare_model(model)\n    model.to(DEVICE)\n    optimizer = [torch.optim.AdamW(" in files["train.py"]
    assert json.loads(files["training_arguments.json"])["optim"] == "sgd"
    assert "        profiler=None,\n" in files["lightning_trainer.py"]
    for name in ("training_arguments.py", "trl_sft.py"):
        assert "    model.added = math.pi\n" in files[name]
    assert yaml.safe_load(files["axolotl.yaml"])["added"] == 1e-5 and "# added to axolotl\n" in files["axolotl.yaml"]
    assert all(f"added to {target}" in files["README.md"] for target in TARGETS if target != "torchtitan")
    assert "AdamW as changed by the techniques" in files["README.md"] and "`ADDED=1`" in files["README.md"]
    assert "added=True" in files["README.md"] and "it is without" not in "".join(files.values())


def test_the_readme_has_the_purpose_of_every_target_that_can_train_the_model() -> None:
    names = {"accelerate", "axolotl", "deepspeed", "lightning", "pytorch", "torchtitan", "training_arguments", "trl"}
    assert names == set(TARGETS)
    readme = export_files(tiny())["README.md"]
    assert {name for name, kind in TARGETS.items() if kind.purpose in readme} == names - {"torchtitan"}


def test_the_tool_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "best.yaml"
    config.write_text(tiny(**COMBINED).to_yaml())
    assert main(["export", "--config", str(config), "--output", str(tmp_path / "files")]) == 0
    written = {file.name: file.read_text() for file in (tmp_path / "files").iterdir()}
    assert written == export_files(tiny(**COMBINED))
    out = capsys.readouterr().out
    assert all(name in out for name in written)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "absent.yaml"], "absent.yaml must be a readable file"),
        (["--output", "/proc/export"], "the folder of the files must be writable, and /proc/export is not"),
    ],
)
def test_a_wrong_setting_gives_a_clear_error(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.yaml").write_text(tiny().to_yaml())
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_files_of_ones_own_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    config = tmp_path / "best.yaml"
    config.write_text(tiny().to_yaml())
    assert main(["export", "--config", str(config), "--output", str(tmp_path)]) == 2
    assert (tmp_path / "train.py").read_text() == "mine" and not (tmp_path / "README.md").exists()
    for _ in range(2):
        assert main(["export", "--config", str(config), "--output", str(tmp_path / "new")]) == 0
