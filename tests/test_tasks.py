"""Models of transformers by task: which one a folder is for, the loss of a plain loop, predicted peaks, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny
from torch.nn.utils import clip_grad_norm_
from trainings import check_peak, loop_of, losses

from pipeline.base.errors import InvalidInputError
from pipeline.config.settings import TASKS
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.export.write import export_files
from pipeline.jobs.notes import document_lengths, left_out
from pipeline.models._support.tasks import CLASSES, OF_PAIRS
from pipeline.training.loop import learning_rate
from pipeline.training.typical_step import typical_step

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT: dict[str, Any] = {"model_type": "bert", "vocab_size": 512, "max_position_embeddings": 64, **SHAPE}
BERT |= WITHOUT_DROPOUT
T5 = {
    "dropout_rate": 0.0,
    "model_type": "t5",
    "vocab_size": 512,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_labels": 5, **SHAPE}
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": 512,
    "dropout": 0.0,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "max_source_positions": 50,
    "max_target_positions": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}
WAV2VEC2: dict[str, Any] = {
    "model_type": "wav2vec2",
    **SHAPE,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 8],
    "conv_stride": [8, 8],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    "final_dropout": 0.0,
}
CLIP = {
    "model_type": "clip",
    "projection_dim": 16,
    "text_config": {"vocab_size": 512, "max_position_embeddings": 64, **SHAPE},
    "vision_config": {"image_size": 32, "patch_size": 8, **SHAPE},
}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64, **SHAPE},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **SHAPE},
}
RESNET = {"model_type": "resnet", "hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
RANDOM = {"corpus": "random_vectors"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masked_lm": (BERT, {}),
    "sequence_classification": (BERT, {"task": "sequence_classification", "sequences": "fixed_length"}),
    "token_classification": (BERT, {"task": "token_classification"}),
    "seq2seq": (T5, {"seq2seq__target_length": 8}),
    "image_classification": (VIT, RANDOM),
    "speech_recognition": (WHISPER, RANDOM),
    "contrastive": (CLIP, RANDOM),
    "image_text": (LLAVA, RANDOM),
    "ctc": (WAV2VEC2, {**RANDOM, "ctc__seconds_of_audio": 0.5}),
}
"""A configuration and the settings that train it, by task."""


def folder_of(folder: Path, values: dict[str, Any]) -> str:
    """Write a configuration of transformers to a folder, and return its path."""
    transformers.AutoConfig.for_model(**values).save_pretrained(folder)
    return str(folder)


def test_what_documents_lose_is_known_beneath_the_inputs_of_a_task(tmp_path: Path, short_documents: Path) -> None:
    padded: dict[str, Any] = {"corpus": "text_files", "text_files__path": short_documents, "sequences": "fixed_length"}
    bert = folder_of(tmp_path, BERT)
    assert document_lengths(tiny(model=bert, **padded)) == document_lengths(tiny(model="gpt2-nano", **padded)) != ()
    assert "sequences of 4 tokens have no target" in str(left_out(tiny(model=bert, corpus="chat", sequence_length=4)))


def test_every_task_is_trained_or_refused_by_name() -> None:
    assert {*TASKS} == {*CLASSES, *OF_PAIRS} and {*CASES, "causal_lm", *OF_PAIRS} == {*TASKS}


@pytest.mark.parametrize("task", CASES)
def test_losses_are_those_of_a_plain_loop_with_the_models_own_loss(task: str, tmp_path: Path) -> None:
    """Of any micro-batch, and the weights are drawn by transformers' class for the task."""
    values, more = CASES[task]
    shared: dict[str, Any] = {"model": folder_of(tmp_path, values), **more}
    experiment = tiny(**shared, micro_batch_size=8, accumulation_steps=1)
    assert experiment.family == task
    _, loop = loop_of(experiment)
    torch.manual_seed(0)
    plain = experiment.model.build(experiment.settings.model, experiment.prepare().vocabulary_size).module
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.01, fused=True)
    expected = []
    for number in range(3):
        [batch] = loop.window(number).batches
        loss = plain(**batch, **({"return_loss": True} if task == "contrastive" else {})).loss
        loss.backward()
        clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(number, experiment.settings, 8)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(experiment, 3) == pytest.approx(expected, rel=1e-5)
    cut = tiny(**shared, micro_batch_size=2, accumulation_steps=4)
    if task == "contrastive":
        assert "compares all examples of a batch" in str(cut.unsupported())
    else:
        assert losses(cut, 3) == pytest.approx(expected, rel=1e-4)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("task", CASES)
def test_its_peak_is_predicted(task: str, tmp_path: Path, short_documents: Path) -> None:
    values, more = CASES[task]
    if "sequences" in more:  # some padding in every micro-batch: a mask is predicted, which one without does not have
        more = {**more, "corpus": "text_files", "text_files__path": str(short_documents)}
    check_peak(tiny(model=folder_of(tmp_path, values), eval_steps=0, micro_batch_size=4, **more))


def test_masks_that_a_model_makes_itself_hide_nothing_in_a_prediction(tmp_path: Path) -> None:
    bart = {key: value for key, value in WHISPER.items() if "source" not in key} | {"model_type": "bart"}
    bart |= {"max_position_embeddings": 64, "attention_dropout": 0.0}
    check_peak(tiny(model=folder_of(tmp_path, bart), eval_steps=0, micro_batch_size=4))


@pytest.mark.matrix(3)
@pytest.mark.gpu
@pytest.mark.parametrize("task", CASES)
def test_its_peak_on_a_card_is_predicted(task: str, tmp_path: Path, card: Any) -> None:
    values, more = CASES[task]
    settings = {"model": folder_of(tmp_path, values), "micro_batch_size": 4, "precision": "bf16"}
    settings |= {"sequence_length": 64, "vocabulary_size": 512}
    settings |= {name.replace("__", "."): value for name, value in more.items()}
    predicted, real = (card.ask(kind=kind, settings=settings) for kind in ("predict", "measure"))
    assert real["outcome"] == "ok"
    has_mask = "sequences" in more  # a mask is predicted, and none is made where no sequence has padding
    tolerance = {"rel": 2e-3 if has_mask else 5e-4}
    assert predicted["predicted_allocated_bytes"] == pytest.approx(real["measured_allocated_bytes"], **tolerance)


def test_hidden_tokens_are_masked_replaced_or_left_and_alone_have_labels(tmp_path: Path) -> None:
    experiment = tiny(model=folder_of(tmp_path, BERT), masked_lm__masked_share=0.4)
    sequences = experiment.prepare().train
    batch = sequences.batch(range(8))
    is_target = batch["labels"] != IGNORED_LABEL
    assert 0.3 < float(is_target.float().mean()) < 0.5
    is_masked, is_left = batch["input_ids"] == 511, batch["input_ids"] == batch["labels"]
    assert 0.7 < float(is_masked[is_target].float().mean()) < 0.9 and not is_masked[~is_target].any()
    assert 0.02 < float(is_left[is_target].float().mean()) < 0.2
    assert sequences.count(batch) == (batch["input_ids"].numel(), int(is_target.sum()))
    again = sequences.batch([3])
    assert all(torch.equal(part[0], batch[name][3]) for name, part in again.items()), "whatever the batch"


def test_each_masked_sequence_has_a_target_so_that_every_micro_batch_has_a_loss(tmp_path: Path) -> None:
    settings = {"model": folder_of(tmp_path, BERT), "masked_lm__masked_share": 0.01, "effective_batch_size": 4}
    whole, cut = (losses(tiny(**settings, micro_batch_size=size), 3) for size in (4, 1))
    assert cut == pytest.approx(whole, rel=1e-5)


def test_padding_is_masked_in_attention_and_labels(tmp_path: Path, short_documents: Path) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": "fixed_length"}
    shared: dict[str, Any] = {"model": folder_of(tmp_path, BERT), "task": "token_classification", **text}
    batch = tiny(**shared).prepare().train.batch(range(4))
    assert 0 < int(batch["attention_mask"].sum()) < batch["input_ids"].numel()
    assert torch.equal(batch["labels"] == IGNORED_LABEL, batch["attention_mask"] == 0)
    with pytest.raises(InvalidInputError, match="takes sequences of one length.* set sequences=packed or fixed_length"):
        tiny(**{**shared, "sequences": "padded"}).prepare()


def test_a_typical_step_has_the_mean_tokens_of_what_is_padded_to_one_length(
    tmp_path: Path, short_documents: Path
) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": "fixed_length"}
    bert: dict[str, Any] = {"model": folder_of(tmp_path, BERT), "task": "masked_lm"}
    for settings in ({}, bert, {"task": "dpo"}, {"sequences": "packed_documents"}):
        experiment = tiny(**{**text, **settings})
        train = experiment.prepare().train
        num_tokens, _ = train.count(train.batch(range(len(train) // 2 * 2)))
        typical = typical_step(experiment, experiment.prepare())
        assert typical.num_tokens == pytest.approx(experiment.effective_batch_size * num_tokens / len(train), rel=0.02)


@pytest.mark.parametrize("values", [VIT, CLIP], ids=lambda values: str(values["model_type"]))
def test_an_exported_model_of_a_task_keeps_its_own_loss(values: dict[str, Any], tmp_path: Path) -> None:
    files = export_files(tiny(model=folder_of(tmp_path, values), corpus="random_vectors"))
    assert "loss_type" not in files["training_arguments.py"]
    assert ("def optimizer_step" in files["accelerate_setup.py"]) is (values is VIT)


def test_without_a_task_the_configuration_says_it(tmp_path: Path) -> None:
    architectures = {"BertForSequenceClassification": "sequence_classification", "BertLMHeadModel": "causal_lm"}
    for number, (name, family) in enumerate(architectures.items()):
        folder = folder_of(tmp_path / str(number), {**BERT, "architectures": [name]})
        assert tiny(model=folder).family == family
    config = tiny(model=folder).model.configuration(folder, 1)  # type: ignore[attr-defined]
    assert config.is_decoder, "a causal model attends to earlier tokens alone"


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        ({**BERT, "architectures": ["BertModel"]}, {}, "is a BertModel, .* set task=causal_lm or masked_lm or .*"),
        ({"model_type": "qwen2_vl"}, RANDOM, "image_text knows .* a qwen2_vl, .* its text model, .*fitproof simulate"),
        (BERT, {"task": "seq2seq"}, "task=seq2seq needs .* is a bert; set task=causal_lm or masked_lm"),
        (VIT, {}, r"takes vectors \(pixel_values\), .*; set corpus=random_vectors"),
        ({**WHISPER, "model_type": "speech_to_text"}, RANDOM, "knows the inputs of whisper, .* is a speech_to_text"),
    ],
)
def test_what_it_is_not_for_is_refused(
    values: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny(model=folder_of(tmp_path, values), **more)


def test_a_preset_is_a_causal_model() -> None:
    with pytest.raises(InvalidInputError, match="gpt2-nano is trained for causal_lm, and task is masked_lm"):
        tiny(task="masked_lm")


def test_a_model_that_transformers_does_not_checkpoint_has_no_layers(tmp_path: Path) -> None:
    experiment = tiny(model=folder_of(tmp_path, RESNET), **RANDOM, image_classification__image_size=32)
    assert losses(experiment, 2)
    assert "train.py" not in export_files(experiment)  # which need no names of layers
    reason = tiny(**RANDOM, model=str(tmp_path), checkpointing="every_layer").unsupported()
    assert reason is not None and "none are known of" in reason


def test_its_files_for_other_trainers_count_labels_as_its_loss_does(tmp_path: Path) -> None:
    files = export_files(tiny(model=folder_of(tmp_path, BERT)))
    assert 'batch["labels"] != -100' in files["accelerate_setup.py"] and "train.py" not in files
