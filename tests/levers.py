"""One row for each value of a technique: the contracts of tests/test_levers.py hold for every row."""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pipeline.techniques.loss_kernel import has_fused

CAUSAL = ("gpt2-nano", "llama-nano")
"""Models with a head over a vocabulary."""
WHOLE = {"micro_batch_size": 8, "accumulation_steps": 1}
"""An optimizer step of eight sequences in one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One technique with one set of its settings."""

    technique: str
    """Name of its file in pipeline/techniques/."""
    settings: Mapping[str, Any]
    """What differs from the plain step."""
    companions: Mapping[str, Any] = field(default_factory=dict)
    """What it needs; the plain step that it is compared with has it too."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Kinds of devices on which it runs here; none for a lever whose contracts are in a file of its own."""
    models: tuple[str, ...] = ("gpt2-nano", "encoder_stack")
    """Models on which the losses and gradients are compared; the first one is used wherever one suffices."""
    tolerance: float | None = None
    """Largest relative difference of a loss within ten optimizer steps; None: it is exact, and the tests know it."""
    accumulates: bool = True
    """Whether it can be combined with more than one micro-batch in an optimizer step."""
    same_dropout: bool = True
    """Whether it draws the dropout masks of the plain step; without, the two are compared without dropout."""
    available: bool = True
    """Whether this version of torch has it."""
    package: str | None = None
    """A package that it needs and that may be absent."""
    predicted: bool = True
    """Whether its memory is predicted to the byte."""
    same_training: bool = True
    """Whether it trains as the plain step does; without, a test of its own compares it with a plain loop in torch."""
    waits: bool = False
    """Whether the host waits for the GPU: torch reads the values of tensors, or a library waits for its own kernels."""
    slow: bool = False
    """Whether its tests take long, and are left to `make test-all`."""

    @property
    def plain(self) -> dict[str, Any]:
        """Settings of the plain step that it is compared with."""
        return {**({} if self.accumulates else WHOLE), **self.companions}

    @property
    def takes_bf16(self) -> bool:
        """Whether it leaves the number format open."""
        return "precision" not in {**self.settings, **self.companions}

    @property
    def name(self) -> str:
        """Its settings, as the name of a test."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


LEVERS = (
    Lever(
        technique="accumulation",
        settings={"micro_batch_size": 2, "accumulation_steps": 4},
        companions=WHOLE,
        same_dropout=False,
    ),
    Lever(technique="precision", settings={"precision": "tf32"}, devices=("cuda",), tolerance=1e-3),
    Lever(technique="precision", settings={"precision": "bf16"}, tolerance=2e-3),
    Lever(technique="precision", settings={"precision": "fp16"}, tolerance=1e-3),
    Lever(technique="checkpointing", settings={"checkpointing": "every_layer"}),
    Lever(technique="checkpointing", settings={"checkpointing": "every_2_layers"}),
    Lever(technique="checkpointing", settings={"checkpointing": "attention_saved"}),
    Lever(technique="checkpointing", settings={"checkpointing": "offloaded"}),
    Lever(technique="checkpointing", settings={"checkpointing": "full:0,attention_saved:1"}),
    Lever(
        technique="activation_offloading",
        settings={"activation_offloading": True, "offloading_min_mib": 0.01},  # tiny models save nothing larger
    ),
    Lever(technique="loss_kernel", settings={"loss_kernel": "chunked"}, models=CAUSAL),
    Lever(technique="loss_kernel", settings={"loss_kernel": "chunked", "loss_chunk_tokens": 24}, models=CAUSAL),
    Lever(
        technique="loss_kernel",
        settings={"loss_kernel": "fused"},
        companions={"precision": "fp32"},
        models=CAUSAL,
        available=has_fused(),
    ),
    Lever(
        technique="loss_kernel",
        settings={"loss_kernel": "liger"},
        devices=("cuda",),
        models=CAUSAL,
        tolerance=1e-3,
        package="liger_kernel",
        predicted=False,
    ),
    Lever(
        technique="optimizer_in_backward",
        settings={"optimizer_in_backward": True},
        companions={"max_grad_norm": None},
        accumulates=False,
    ),
    Lever(technique="attention", settings={"attention": "eager"}, models=CAUSAL, tolerance=1e-5),
    Lever(
        technique="attention",
        settings={"attention": "flash"},
        devices=("cuda",),
        models=CAUSAL,
        tolerance=1e-3,
        package="flash_attn",
        predicted=False,
    ),
    Lever(technique="compile", settings={"compile": "layers"}, tolerance=1e-5, predicted=False, slow=True),
    Lever(technique="expandable_segments", settings={"expandable_segments": True}, devices=("cuda",)),
    Lever(technique="gelu", settings={"gelu": "fused"}, models=("gpt2-nano",), tolerance=1e-5),
    Lever(technique="adapter", settings={"adapter": "lora"}, models=CAUSAL, same_training=False),
    Lever(
        technique="adapter",
        settings={"adapter": "lora", "adapter_weights": "bfloat16"},
        models=CAUSAL,
        same_training=False,
    ),
    Lever(
        technique="adapter",
        settings={"adapter": "qlora"},
        models=CAUSAL,
        same_training=False,
        package="bitsandbytes",
    ),
    Lever(
        technique="adapter",
        settings={"adapter": "qlora", "qlora_double_quantization": False},
        models=CAUSAL,
        same_training=False,
        package="bitsandbytes",
    ),
    Lever(
        technique="reference",
        settings={"reference": "none"},
        companions={"task": "dpo"},
        models=CAUSAL,
        same_training=False,
        devices=(),
    ),
    Lever(technique="sharding", settings={"sharding": "fsdp"}, devices=()),
    Lever(technique="sharding", settings={"sharding": "fsdp", "reshard_after_forward": False}, devices=()),
    Lever(technique="sharding", settings={"sharding": "fsdp", "sharded_accumulation": False}, devices=()),
    Lever(technique="sharding", settings={"sharding": "fsdp", "sharded_offloading": True}, devices=()),
    Lever(technique="tensor_parallel", settings={"tensor_parallel": 2}, models=CAUSAL[1:], devices=()),
    Lever(
        technique="adapter",
        settings={"adapter": "qlora", "qlora_weights": "int8"},
        devices=("cuda",),
        models=CAUSAL,
        same_training=False,
        package="bitsandbytes",
        waits=True,
    ),
    Lever(technique="weights", settings={"weights": "bfloat16"}, same_training=False),
    Lever(
        technique="weights", settings={"weights": "bfloat16_master"}, companions={"precision": "fp32"}, tolerance=5e-3
    ),
    Lever(technique="optimizer", settings={"optimizer_implementation": "foreach"}, tolerance=1e-5),
    Lever(technique="optimizer", settings={"optimizer_implementation": "loop"}, tolerance=1e-5),
    Lever(
        technique="optimizer",
        settings={"optimizer": "adamw_8bit"},
        package="bitsandbytes",
        same_training=False,
        waits=True,
    ),
    Lever(
        technique="optimizer",
        settings={"optimizer": "adamw_8bit", "adamw_8bit_embeddings": "8bit"},
        package="bitsandbytes",
        same_training=False,
        waits=True,
    ),
    Lever(
        technique="optimizer",
        settings={"optimizer": "paged_adamw_8bit"},
        devices=("cuda",),
        package="bitsandbytes",
        same_training=False,
        waits=True,
    ),
    Lever(technique="optimizer", settings={"optimizer": "adafactor"}, same_training=False, waits=True),
    Lever(technique="optimizer", settings={"optimizer": "sgd"}, same_training=False),
    Lever(technique="optimizer", settings={"optimizer": "muon"}, same_training=False),
    Lever(technique="optimizer", settings={"optimizer": "muon", "muon_scaling": "original"}, same_training=False),
)
BESIDE_ANOTHER = {("qlora_float32_rest", False)}
"""Values that another technique has to accompany, and which have tests of their own: weights=bfloat16 (test_qlora)."""
TOGETHER = Lever(
    technique="all",
    settings={
        "precision": "bf16",
        "loss_kernel": "chunked",
        "checkpointing": "every_layer",
        "optimizer_in_backward": True,
        "gelu": "fused",
    },
    companions={"max_grad_norm": None},
    models=("gpt2-nano",),
    tolerance=2e-3,
    accumulates=False,
)
"""Levers that can be combined on any device."""
ON_CARD = {"activation_offloading": True, "offloading_min_mib": 0.01, "expandable_segments": True}
"""What a GPU adds."""
EXPORTED = tuple(lever for lever in LEVERS if lever.technique != "reference")
"""Pairs, which alone have a reference, have no files for other frameworks."""
ON_CPU = (*(lever for lever in LEVERS if "cpu" in lever.devices), TOGETHER)
ON_CUDA = (
    *(lever for lever in LEVERS if "cuda" in lever.devices),
    replace(TOGETHER, settings={**TOGETHER.settings, **ON_CARD}),
)


def each(levers: Iterable[Lever]) -> pytest.MarkDecorator:
    """Return the mark that makes a test of each of these levers."""
    cases = [pytest.param(lever, id=lever.name, marks=[pytest.mark.slow] if lever.slow else []) for lever in levers]
    return pytest.mark.parametrize("lever", cases)


def needs_package(lever: Lever) -> None:
    """Skip the test if a package is absent that the lever needs, or torch is too old for it."""
    if not lever.available:
        pytest.skip("needs another version of torch")
    if lever.package and importlib.util.find_spec(lever.package) is None:
        pytest.skip(f"needs {lever.package}")
