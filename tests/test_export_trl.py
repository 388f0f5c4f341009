"""TRL's script: SFTTrainer trains with the losses of Fitproof's run, on the same data, with the same adapters."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pairs, tiny
from levers import EXPORTED, ON_CPU, Lever, needs_package
from test_chat import HEADERS, MARKED, NO_SYSTEM, ROWS, TALK, THOUGHTS, folder_with, tokenizer_with, written
from test_export import COMBINED, PLAIN, losses_here

from pipeline.config.experiment import Experiment
from pipeline.data._support.chat_template import TEMPLATE, ChatTemplate
from pipeline.export.targets.trl import finding_of_answers
from pipeline.export.write import export_files, write_files
from pipeline.models.causal_lm import CausalLm

pytestmark = [pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")]
"""What peft reads of transformers."""
LORA = {"adapter": "lora", "adapter_rank": 4, "adapter_alpha": 8, "learning_rate": 1e-2}
CUT = {"effective_batch_size": 4, "micro_batch_size": 2}
TEMPLATES = {"ChatML": TEMPLATE, "headers": HEADERS, "thoughts": THOUGHTS, "marked": MARKED}
TWO_ANSWERS = [{"messages": TALK}, {"prompt": TALK[1:4], "completion": TALK[4:]}, *ROWS]
EXPRESSED = [
    lever
    for lever in ON_CPU
    if lever.technique not in ("compile", "optimizer_in_backward", "all") and lever.settings.get("precision") != "fp16"
]
"""What the script has; Accelerate refuses fp16 on a CPU."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep what SFTTrainer writes in a folder of the test, and what it would report on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "true")


def trainer_of(experiment: Experiment, folder: Path) -> Any:
    """Return the trainer of the exported script."""
    write_files(export_files(experiment), folder)
    script = runpy.run_path(str(folder / "trl_sft.py"), run_name="exported")
    script["arguments"].disable_tqdm, script["arguments"].save_strategy = True, "no"
    return script["make_trainer"](script.get("CONVERSATIONS") or script["TOKENS"])


def losses_of_trl(experiment: Experiment, folder: Path) -> list[float]:
    trainer = trainer_of(experiment, folder)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_its_reader_of_answers_says_what_a_template_refuses() -> None:
    script: dict[str, Any] = {"np": np}
    exec(finding_of_answers(), script)
    template = script["ChatTemplate"](tokenizer_with(NO_SYSTEM))
    with pytest.raises(script["UnreadableRowError"], match="refused by the tokenizer's chat template"):
        template.encode(TALK)
    assert template.encode(TALK[1:]) == ChatTemplate(tokenizer_with(NO_SYSTEM)).encode(TALK[1:])


@pytest.mark.parametrize("changes", [COMBINED, PLAIN], ids=["combined", "plain"])
def test_it_trains_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """To 1e-4; with AMX, which rounds bfloat16 by what it multiplies at a time, two losses of 6 differ by 1.3e-4."""
    tolerance = 1e-3 if changes["precision"] == "bf16" and torch.cpu._is_amx_tile_supported() else 1e-4
    assert losses_of_trl(tiny(**changes), tmp_path) == pytest.approx(losses_here(**changes), abs=tolerance)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("lever", EXPRESSED, ids=lambda lever: lever.name)
def test_it_trains_the_same_with_a_lever(lever: Lever, tmp_path: Path) -> None:
    needs_package(lever)
    changes = {"model": lever.models[0], **CUT, **lever.companions, **lever.settings}
    if "accumulation_steps" in changes:
        changes.pop("effective_batch_size")
    assert losses_of_trl(tiny(**changes), tmp_path) == pytest.approx(losses_here(**changes), abs=1e-4)
    text = (tmp_path / "trl_sft.py").read_text()
    assert "It has the measured losses" in text and "not the training that was measured" not in text


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "llama-nano", "adapter_targets": "attention", "checkpointing": "every_layer"},
        {"adapter_weights": "bfloat16", "weights": "bfloat16", "precision": "bf16"},
        {"optimizer": "muon", "checkpointing": "attention_saved"},
        {"adapter": "qlora"},
        {"adapter": "qlora", "model": "llama-nano", "weights": "bfloat16", "qlora_double_quantization": False},
    ],
    ids=str,
)
def test_the_adapters_are_those_of_the_run(changes: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    changes = {**LORA, **CUT, **changes}
    trainer = trainer_of(tiny(**changes), tmp_path)
    assert isinstance(trainer.model, PeftModel)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {getattr(torch, changes.get("adapter_weights", "float32"))}
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trained}
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == pytest.approx(losses_here(**changes), abs=1e-4)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("template", "sequences"),
    pairs([*TEMPLATES], ["packed", "packed_documents", "padded"]),
)
def test_conversations_have_the_same_answers(template: str, sequences: str, tmp_path: Path) -> None:
    """It reads the same file with the model's own chat template, and the answers alone are targets."""
    changes = {
        "model": folder_with(TEMPLATES[template], tmp_path / "model"),
        "corpus": "chat",
        "chat__path": str(written(tmp_path, TWO_ANSWERS)),
        "sequences": sequences,
        "sequence_length": 48,
        **CUT,
    }
    assert losses_of_trl(tiny(**changes), tmp_path / "files") == pytest.approx(losses_here(**changes), abs=1e-4)
    text = (tmp_path / "files" / "trl_sft.py").read_text()
    assert ("assistant_only_loss=True," in text) == (template == "marked") == ("class ChatTemplate" not in text)
    assert "tokens-" not in text and ("packing=True" in text) == (sequences == "packed")


def test_trls_own_ways_have_other_answers_without_marks(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    model = folder_with(TEMPLATE, tmp_path / "model")
    module = AutoModelForCausalLM.from_config(CausalLm().configuration(model, 1))
    shared = {"output_dir": "files", "use_cpu": True, "bf16": False}
    pair = Dataset.from_dict({"prompt": [TALK[1:4]], "completion": [TALK[4:]]})
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = SFTTrainer(module, SFTConfig(**shared), train_dataset=pair, processing_class=tokenizer)
    answers = [label for label in trainer.train_dataset[0]["labels"] if label != -100]
    assert tokenizer.decode(answers) == "No, slow.<|im_end|>\n"
    with pytest.raises(ValueError, match="missing prefix-preservation or `{% generation %}` markers"):
        SFTTrainer(
            module,
            SFTConfig(**shared, assistant_only_loss=True),
            train_dataset=Dataset.from_dict({"messages": [TALK]}),
            processing_class=tokenizer,
        )


def test_a_parquet_file_and_a_dataset_of_conversations_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = folder_with(TEMPLATE, tmp_path / "model")
    rows = [row for row in TWO_ANSWERS if "messages" in row]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "data").mkdir()
    written(tmp_path / "data", rows)
    for number, source in enumerate([{"path": str(tmp_path / "rows.parquet")}, {"name": str(tmp_path / "data")}]):
        changes = {"model": model, "corpus": "chat", "chat": source, "sequences": "padded", **CUT}
        folder = tmp_path / f"files-{number}"
        assert losses_of_trl(tiny(**changes), folder) == pytest.approx(losses_here(**changes), abs=1e-4)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("changes", [{}, {"adapter": "lora"}, {"model": "llama-nano", "checkpointing": "every_layer"}])
def test_packed_documents_are_kept_apart(changes: dict[str, Any], short_documents: Path, tmp_path: Path) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": "packed_documents"}
    values = {**text, **CUT, **changes, "sequence_length": 64}
    assert losses_of_trl(tiny(**values), tmp_path) == pytest.approx(losses_here(**values), abs=1e-4)
    text = " ".join((tmp_path / "trl_sft.py").read_text().split())
    assert "padding_free=True" in text and "of up to 2 x 64 tokens: memory and time are not those measured" in text


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sequences", ["fixed_length", "padded", "grouped"])
def test_documents_of_any_length_are_padded_as_measured(sequences: str, short_documents: Path, tmp_path: Path) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": sequences}
    changes = {**text, **CUT, "checkpointing": "every_2_layers"}
    trainer = trainer_of(tiny(**changes), tmp_path)
    lengths = {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}
    assert lengths == {32} if sequences == "fixed_length" else len(lengths) > 1 and max(lengths) <= 32
    is_told = "there is more padding than measured" in " ".join((tmp_path / "trl_sft.py").read_text().split())
    assert is_told == (sequences == "grouped")
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == pytest.approx(losses_here(**changes), abs=1e-4)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("count", [1000, 1001])
def test_more_conversations_than_trl_packs_together_are_said_to_be_others(count: int, tmp_path: Path) -> None:
    model = folder_with(TEMPLATE, tmp_path / "model")
    rows = [ROWS[number % len(ROWS)] for number in range(count * 10 // 9)]  # one of ten is held out
    changes = {"model": model, "corpus": "chat", "chat__path": str(written(tmp_path, rows)), **CUT}
    experiment = tiny(**changes)
    text = " ".join(export_files(experiment)["trl_sft.py"].split())
    assert ("of 1001 all were packed" in text) == ("It has the measured losses" not in text) == (count == 1001)
    found = losses_of_trl(experiment, tmp_path / "files")
    assert (found == pytest.approx(losses_here(**changes), abs=1e-4)) == (count == 1000)


def test_it_reads_other_conversations(tmp_path: Path) -> None:
    model = folder_with(TEMPLATE, tmp_path / "model")
    write_files(export_files(tiny(model=model, corpus="chat", sequences="padded", **CUT)), tmp_path)
    other = written(tmp_path, [{"prompt": "Is it?", "completion": "Yes."}] * 20)
    script = runpy.run_path(str(tmp_path / "trl_sft.py"), run_name="exported")
    script["arguments"].disable_tqdm, script["arguments"].save_strategy = True, "no"
    trainer = script["make_trainer"](str(other))
    answers = [label for label in trainer.train_dataset[0]["labels"] if label != -100]
    assert trainer.processing_class.decode(answers) == "Yes.<|im_end|>"
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize("lever", [pytest.param(lever, id=lever.name) for lever in EXPORTED if lever not in EXPRESSED])
def test_what_it_cannot_express_is_said(lever: Lever) -> None:
    text = export_files(tiny(**lever.companions, **lever.settings))["trl_sft.py"]
    said = "not the training that was measured" in text
    assert said == (
        lever.technique in ("compile", "optimizer_in_backward", "tensor_parallel") or "liger" in lever.settings.values()
    )


def test_a_model_that_transformers_does_not_build_has_no_script() -> None:
    assert "trl_sft.py" not in export_files(tiny(model="encoder_stack", corpus="random_vectors"))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adapter": "qlora"},
        {"adapter": "qlora", "weights": "bfloat16"},
        {"adapter": "qlora", "weights": "bfloat16", "qlora_float32_rest": False, "qlora_double_quantization": False},
    ],
    ids=str,
)
def test_pretrained_weights_are_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = folder_with(TEMPLATE, tmp_path / "model")
    module = AutoModelForCausalLM.from_config(tiny().model.configuration("gpt2-nano", 400))  # type: ignore[attr-defined]
    module.resize_token_embeddings(json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"])
    module.save_pretrained(model)
    plain = {"causal_lm": {"pretrained": True, "num_layers": None, "width": None, "num_heads": None}}
    shared = {"model": model, "corpus": "chat", "sequences": "padded", "sequence_length": 48, **CUT, **LORA, **plain}
    changes = {**shared, **changes}
    found = losses_of_trl(tiny(**changes), tmp_path / "files")
    assert found == pytest.approx(losses_here(**changes), abs=1e-4)
    text = (tmp_path / "files" / "trl_sft.py").read_text()
    assert ("BitsAndBytesConfig(" in text) == (changes["adapter"] == "qlora") and "quantize_layers" not in text
