"""The tasks for which transformers has classes of models, and which of them a configuration is for."""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.data._support.checkpoints import file_of

CLASSES = {
    "ctc": "AutoModelForCTC",
    "contrastive": "AutoModelForZeroShotImageClassification",
    "speech_recognition": "AutoModelForSpeechSeq2Seq",
    "image_text": "AutoModelForImageTextToText",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "image_classification": "AutoModelForImageClassification",
}
"""transformers' class of each task; a type of several tasks is first for the one that comes first."""
OF_PAIRS = {"dpo": "AutoModelForCausalLM", "reward": "AutoModelForSequenceClassification"}
"""Likewise of causal language models whose examples are pairs of answers; no configuration says that it is for one."""
ELSEWHERE = (
    "or run your own training on a simulated card (fitproof simulate -- python train.py), or name a function of yours "
    "that returns a Trainable (path.to.module:function)"
)
"""What to do with a model of another task."""


def task_of(name: str) -> str | None:
    """Return the task of the model in a folder or on the hub; None if its configuration cannot be read here.

    It is that of the class which its configuration names, or else of its type.

    Raises:
        InvalidInputError: it is for none of the tasks.

    """
    is_folder = Path(name).is_dir()
    file = Path(name) / "config.json" if is_folder else _on_hub(name) if "/" in name else None
    if file is None or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    architectures = config.get("architectures") or [None]
    return _task_of(name, str(config.get("model_type")), architectures[0], bool(config.get("is_decoder")))


@lru_cache
def _task_of(name: str, model_type: str, architecture: str | None, is_decoder: bool) -> str | None:
    tasks = [task for task in CLASSES if model_type in _classes(task)]
    task = next(iter(tasks), None)
    if tasks[:2] == ["causal_lm", "masked_lm"] and not is_decoder:  # it attends to both sides: each token sees the next
        task = "masked_lm"
    if architecture is not None and task != "causal_lm" and tasks:
        named = (each for each in CLASSES if architecture in _classes(each).get(model_type, ()))
        task = next(named, None)
    if task is None and tasks:
        raise InvalidInputError(
            f"a model must be trained for a task, and {name} is a {architecture}, which is of none of "
            f"{', '.join(CLASSES)}; set task={' or '.join(tasks)}, {ELSEWHERE}"
        )
    return task


def check_task(name: str, model_type: str, task: str) -> None:
    """Raise InvalidInputError if transformers has no class for models of this type that is trained for a task."""
    if model_type in _classes(task):
        return
    tasks = [each for each in CLASSES if model_type in _classes(each)]
    remedy = f"set task={' or '.join(tasks)}" if tasks else "name another model"
    raise InvalidInputError(
        f"task={task} needs a model of which transformers has a class for it, and {name} is a {model_type}; {remedy}, "
        f"{ELSEWHERE}"
    )


@lru_cache
def _classes(task: str) -> dict[str, tuple[str, ...]]:
    """Return the names of transformers' classes for a task, by type of model."""
    from transformers.models.auto import modeling_auto

    named: dict[str, Any] = getattr(modeling_auto, CLASSES[task])._model_mapping._model_mapping
    return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in named.items()}


@lru_cache
def _on_hub(name: str) -> Path | None:
    with suppress(InvalidInputError):  # what cannot be read is refused where it is described
        return file_of(name, "config.json")
    return None
