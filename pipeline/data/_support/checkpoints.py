"""Checkpoints of transformers, in a folder or on the hub, checked before anything runs; it does not load torch."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit
from urllib.request import getproxies

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.user_functions import version_of

REFUSED = (401, 403)
"""HTTP status codes of a hub that refuses access."""
SECONDS_TO_CONNECT = 5.0
"""How long the hub may take to answer before it counts as out of reach."""


@contextmanager
def hub_or_cache(name: str) -> Iterator[None]:
    """Load a model from the cache alone where the hub is out of reach: its own library tries for 45 s each time."""
    from huggingface_hub import constants

    is_offline = constants.HF_HUB_OFFLINE or (not Path(name).is_dir() and not _reaches(constants.ENDPOINT))
    with patch.object(constants, "HF_HUB_OFFLINE", is_offline):
        yield


def _reaches(address: str) -> bool:
    """Whether a server accepts connections; true where a proxy makes them."""
    if getproxies():
        return True
    server = urlsplit(address)
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), SECONDS_TO_CONNECT).close()
    except OSError:
        return False
    return True


def read_configuration(name: str, *, pretrained: bool) -> Any:
    """Return transformers' configuration of a model in a folder or on the hub, which is asked once in a process.

    Raises:
        InvalidInputError: it cannot be loaded, or its weights are to be loaded and are quantized.

    """
    try:
        config = deepcopy(_configuration(name, version_of(name)))
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the configuration of {name} could not be loaded: {why_unread(error)}, or name a preset, such as gpt2, "
            "with pretrained=false for random weights"
        ) from error
    quantization = vars(config).pop("quantization_config", None)
    if pretrained:
        refuse_quantized(name, quantization)
    return config


@lru_cache
def _configuration(name: str, _version: str) -> Any:
    """Return transformers' configuration; that of a folder is read again when its file has changed."""
    from transformers import AutoConfig

    with hub_or_cache(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=False)


def check_weights(name: str, setting: str) -> None:
    """Raise InvalidInputError unless every file of a model's weights is there and, if it has a header, whole.

    `setting` is the one that asks for them. What the hub has is downloaded here, before any run: the download is no
    part of a run's time.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

    for filename in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if (file := file_of(name, filename)) is not None:
            if file.suffix == ".json":
                _check_shards(name, file)
            elif file.suffix == ".safetensors":
                _names_in(file)
            return
    raise InvalidInputError(
        f"pretrained weights need {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and {name} has neither; name "
        f"another model, or set {setting}=false for random weights of its shape"
    )


def refuse_quantized(name: str, quantization: Any) -> None:
    """Raise InvalidInputError if a configuration names a quantization, which None is not."""
    if quantization is None:
        return
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    method = values.get("quant_method", "a method without a name")
    raise InvalidInputError(
        f"weights must be those that a training can change, in 16 or 32 bits, and {name} has weights quantized by "
        f"{getattr(method, 'value', method)}; name the checkpoint that it was made from, and set adapter=qlora to "
        "train adapters on 4-bit weights"
    )


def why_unread(error: Exception) -> str:
    """Return what of a checkpoint could not be read, with a remedy that suits the cause."""
    causes = [error, error.__cause__, error.__context__]
    statuses = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
    if statuses & {*REFUSED} or any(type(cause).__name__ == "GatedRepoError" for cause in causes):
        remedy = "ask for access on its page, and log in with `hf auth login` or the variable HF_TOKEN"
    elif "trust_remote_code" in str(error):
        return (
            "it needs code of its own, which is never executed; name a model that transformers has a class for, or a "
            "function of yours that builds it (path.to.module:function)"
        )
    else:
        remedy = "check the network and the name, or give a local folder"
    return f"{first_line(error).rstrip('.')}; {remedy}"


def _check_shards(name: str, index: Path) -> None:
    """Check every shard that an index names and, if it has a header, that it has the tensors that the index says."""
    try:
        shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"the index of a sharded checkpoint must be JSON with a weight_map, and {index} is not "
            f"({first_line(error)}); write the checkpoint again"
        ) from error
    for shard in sorted({*shards.values()}):
        file = file_of(name, shard)
        if file is None:
            raise InvalidInputError(
                f"every shard that {index.name} names must be there, and {name} has no {shard}; copy or download it "
                "again"
            )
        if file.suffix != ".safetensors":
            continue
        missing = {tensor for tensor, place in shards.items() if place == shard} - _names_in(file)
        if missing:
            raise InvalidInputError(
                f"every tensor that {index.name} names must be in its shard, and {file} lacks {len(missing)} of them, "
                f"such as {min(missing)}; copy or download it again"
            )


def file_of(name: str, filename: str) -> Path | None:
    """Return a file of a model, downloaded if it is on the hub; None if the model does not have it."""
    if Path(name).is_dir():
        file = Path(name) / filename
        return file if file.is_file() else None
    from transformers.utils import cached_file

    try:
        with hub_or_cache(name):
            found: Any = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"the weights of {name} could not be loaded: {why_unread(error)}") from error
    return None if found is None else Path(found)


def _names_in(file: Path) -> set[str]:
    """Return the names of the tensors in a file of safetensors, whose length must be the one that its header says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            return set(content.keys())
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(
            f"weights must be files of safetensors, and {file} cannot be read as one ({first_line(error)}); copy or "
            "download it again"
        ) from error
