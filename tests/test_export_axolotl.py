"""axolotl's file: its keys, what it says that it cannot express, and axolotl's own schema."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, tiny
from levers import EXPORTED, TOGETHER
from test_chat import HEADERS, MARKED, NO_MARK, ROWS, TALK, folder_with, tokenizer_with

from pipeline.data._support.chat_template import TEMPLATE, ChatTemplate
from pipeline.export.write import export_files

AXOLOTL = ("axolotl==0.19.0", "addict", "colorama", "fire", "termcolor")
"""What its schema and its chat templates import besides what the tests have."""
LORA = {"adapter": "lora", "adapter_rank": 4, "adapter_alpha": 8, "adapter_dropout": 0.1}
VALIDATE = """
import json, sys
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.utils.config import validate_config
from axolotl.utils.dict import DictDefault
for given in json.load(sys.stdin):
    for plugin in given.get("plugins", []):
        PluginManager.get_instance().register(plugin)
    known = {name for kind in merge_input_args() for name in kind.model_fields}
    checked = validate_config(DictDefault(given)).to_dict()
    changed = {name: [value, checked.get(name)] for name, value in given.items() if checked.get(name) != value}
    print("RESULT " + json.dumps([sorted(set(given) - known), changed]))
"""
TOKENIZE = """
import json, sys
from axolotl.prompt_strategies.chat_template import load
from axolotl.utils.dict import DictDefault
from transformers import AutoTokenizer
for given, conversations in json.load(sys.stdin):
    tokenizer = AutoTokenizer.from_pretrained(given["base_model"])
    [dataset] = given["datasets"]
    strategy = load(tokenizer, DictDefault(given), DictDefault(dataset))
    for messages in conversations:
        row = strategy.tokenize_prompt({"messages": messages})
        print("RESULT " + json.dumps([row["input_ids"], row["labels"]]))
"""


def exported(**changes: Any) -> tuple[dict[str, Any], str]:
    """Return the keys of the file, and its comments as one line."""
    text = export_files(tiny(**changes))["axolotl.yaml"]
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    return yaml.safe_load(text), comments


def test_the_settings_have_axolotls_names() -> None:
    changes = {"micro_batch_size": 2, "effective_batch_size": 8, "learning_rate": 5e-5, "max_grad_norm": "none"}
    keys, _ = exported(**changes, **LORA, adapter_targets="attention", checkpointing="every_layer", attention="eager")
    expected = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 4,
        "seed": 0,
        "sequence_len": 32,
        "learning_rate": 5e-5,
        "max_grad_norm": 0.0,
        "weight_decay": 0.01,
        "optimizer": "adamw_torch_fused",
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_fan_in_fan_out": True,
        "lora_target_modules": ["attn.c_attn", "attn.c_proj"],
        "lora_qkv_kernel": False,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "attn_implementation": "eager",
        "lr_scheduler": "warmup_stable_decay",
        "warmup_steps": 4,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "peft_autocast_adapter_dtype": True,
    }
    assert {name: keys[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("attention", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
    ],
)
def test_adapters_have_the_names_that_peft_knows(targets: str, expected: list[str]) -> None:
    keys, _ = exported(model="llama-nano", adapter="lora", adapter_targets=targets)
    assert keys["lora_target_modules"] == expected and not keys["lora_fan_in_fan_out"]


@pytest.mark.parametrize(
    ("changes", "keys", "words"),
    [
        ({"precision": "bf16"}, {"bf16": True}, "with bf16: true axolotl loads the weights in bfloat16, and float32"),
        ({"precision": "fp16"}, {"fp16": True}, "Full training with fp16: true ends with an error"),
        ({"weights": "bfloat16"}, {"bf16": True}, "axolotl computes under autocast, and precision=fp32 was measured"),
        ({"weights": "bfloat16", "precision": "bf16"}, {"bf16": True}, "converts norms, embeddings and head to float"),
        ({"adapter": "lora", "adapter_weights": "bfloat16"}, {}, "its adapters have the type of the weights, and bflo"),
        ({"checkpointing": "every_2_layers"}, {"gradient_checkpointing": True}, "all layers or none: all here, where"),
        ({"checkpointing": "offloaded"}, {"activation_offloading": "hidden_states"}, "copies layer inputs to the host"),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "optim_args": {"momentum": 0.9}}, ""),
        ({"optimizer": "muon"}, {"optimizer": "adamw_torch_fused"}, "it is without optimizer=muon"),
        ({"optimizer": "adamw_8bit"}, {"optimizer": "adamw_8bit"}, ""),
        ({"optimizer": "paged_adamw_8bit"}, {"optimizer": "paged_adamw_8bit"}, ""),
        ({"optimizer": "adamw_8bit", "adamw_8bit_embeddings": "8bit"}, {}, "it is without optimizer=adamw_8bit, adam"),
        ({"gelu": "fused"}, {}, "it is without gelu=fused, which these files cannot express"),
        ({"loss_kernel": "chunked"}, {}, "it is without loss_kernel=chunked"),
        (
            {"sequences": "packed"},
            {"sample_packing": True},
            "sample_packing fills a sequence with whole documents that",
        ),
        (
            {"sequences": "packed_documents"},
            {"sample_packing": True},
            "whole documents that do not attend to one another, as measured, but with others",
        ),
        ({"sequences": "padded"}, {"sample_packing": False, "excess_length_strategy": "truncate"}, ""),
        (
            {"learning_rate_schedule": "linear"},
            {"lr_scheduler": "linear", "warmup_steps": 5},
            "one step later than mea",
        ),
        (
            {"learning_rate_schedule": "cosine", "num_epochs": 0.01, "learning_rate_warmup_ratio": 0.1},
            {"lr_scheduler": "cosine", "num_epochs": 0.01, "warmup_steps": 1},
            "num_epochs=0.01 on the measured corpus",
        ),
        ({"learning_rate_warmup_steps": 2}, {"warmup_steps": 1}, "makes a warm-up of one step one of two"),
        ({"expandable_segments": True}, {}, "PYTORCH_ALLOC_CONF=expandable_segments:True as measured"),
        ({"model": "gpt2"}, {"overrides_of_model_config": {"n_embd": 32, "n_layer": 2, "n_head": 2}}, "random weights"),
    ],
    ids=str,
)
def test_what_axolotl_does_differently_is_said(changes: dict[str, Any], keys: dict[str, Any], words: str) -> None:
    found, comments = exported(**changes)
    assert {name: found[name] for name in keys} == keys
    assert words in comments
    assert ("This is not the training that was measured: it is without" in comments) == ("it is without" in words)


def test_conversations_are_read_from_the_same_file(tmp_path: Path) -> None:
    model = folder_with(HEADERS, tmp_path / "model")
    keys, comments = exported(model=model, corpus="chat", chat__path=ROOT / "pipeline/data/questions.jsonl")
    [dataset] = keys["datasets"]
    assert keys["base_model"] == model and keys["eot_tokens"] == ["<|end|>"]
    assert dataset["path"].endswith("questions.jsonl") and dataset["ds_type"] == "json"
    assert dataset["type"] == "chat_template" and dataset["roles_to_train"] == ["assistant"]
    assert "rows of prompt and completion have to be written so" in comments


def test_text_files_are_read_from_the_same_file(short_documents: Path) -> None:
    keys, _ = exported(corpus="text_files", text_files__path=str(short_documents))
    assert keys["datasets"] == [
        {"path": str(short_documents), "ds_type": "json", "type": "completion", "field": "text"}
    ]


def test_a_model_that_transformers_does_not_build_has_no_file() -> None:
    assert "axolotl.yaml" not in export_files(tiny(model="encoder_stack", corpus="random_vectors"))


@pytest.fixture(scope="module")
def axolotl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with axolotl, without what it depends on: it wants other versions than the tests have."""
    folder = tmp_path_factory.mktemp("axolotl")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*words, *AXOLOTL], check=True, timeout=300)
    return folder


def results(folder: Path, code: str, given: Any) -> list[Any]:
    """Return what a process with axolotl prints for what it is given, as JSON."""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=json.dumps(given), capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def is_within(given: Any, checked: Any) -> bool:
    """Whether a value is as it was given, but for what is added to dictionaries inside."""
    if isinstance(given, dict):
        return isinstance(checked, dict) and all(is_within(each, checked.get(name)) for name, each in given.items())
    if isinstance(given, list):
        return isinstance(checked, list) and len(given) == len(checked) and all(map(is_within, given, checked))
    return bool(given == checked)


@pytest.mark.slow
def test_axolotls_own_schema_takes_every_file(axolotl: Path, tmp_path: Path) -> None:
    model = folder_with(TEMPLATE, tmp_path / "model")
    others = ({"model": model, "corpus": "chat", "sequences": "padded"}, {**LORA, "weights": "bfloat16"})
    given = [exported(**{**lever.companions, **lever.settings})[0] for lever in (*EXPORTED, TOGETHER)]
    given += [exported(**changes)[0] for changes in others]
    checked = results(axolotl, VALIDATE, given)
    assert len(checked) == len(given)
    for unknown, changed in checked:
        assert not unknown
        assert set(changed) <= {"datasets", "fsdp_config", "selective_checkpointing"}, changed
        assert all(is_within(*pair) for pair in changed.values()), changed  # it adds defaults inside of them


@pytest.mark.slow
@pytest.mark.parametrize("template", [TEMPLATE, HEADERS, MARKED, NO_MARK], ids=["ChatML", "headers", "marked", "none"])
def test_axolotl_has_the_targets_of_answers_alone(template: str, axolotl: Path, tmp_path: Path) -> None:
    model = folder_with(template, tmp_path / "model")
    conversations = [TALK, *(row["messages"] for row in ROWS if "messages" in row)]
    own = ChatTemplate(tokenizer_with(template))
    expected = [own.encode(messages) for messages in conversations]
    keys, _ = exported(model=model, corpus="chat", sequences="padded")
    found = results(axolotl, TOKENIZE, [[keys, conversations]])
    assert [(ids, [label != -100 for label in labels]) for ids, labels in found] == expected
