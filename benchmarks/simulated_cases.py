"""What benchmarks/cuda_without_gpu.py runs: shapes of published models, in several configurations on every card."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from pipeline.base.published_shapes import decoder

DECODER = {
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
UNTIED = {**DECODER, "tie_word_embeddings": False}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": decoder("llama", 2, 2048, (32, 8, 64), 8192, 128_256, **DECODER),
    "llama-3.2-3b": decoder("llama", 1, 3072, (24, 8, 128), 8192, 128_256, **DECODER),
    "llama, untied, heads of 80": decoder("llama", 3, 1280, (16, 16, 80), 3584, 32_000, **UNTIED),
    "llama, heads of 96": decoder("llama", 3, 1536, (16, 4, 96), 4096, 32_064, **DECODER),
    "llama, heads of 192": decoder("llama", 3, 1536, (8, 2, 192), 4096, 32_064, **DECODER),
    "qwen3-0.6b": decoder("qwen3", 4, 1024, (16, 8, 128), 3072, 151_936, **DECODER),
    "qwen3-1.7b": decoder("qwen3", 2, 2048, (16, 8, 128), 6144, 151_936, **DECODER),
    "gemma-3-270m": decoder("gemma3_text", 6, 640, (4, 1, 256), 2048, 262_144, sliding_window=512, **DECODER),
    "gemma-3-1b": decoder("gemma3_text", 2, 1152, (4, 1, 256), 6912, 262_144, sliding_window=512, **DECODER),
    "gemma-2b": decoder("gemma", 1, 2048, (8, 1, 256), 16_384, 256_000, **DECODER),
    "bert": {
        "model_type": "bert",
        "num_hidden_layers": 6,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "vocab_size": 30_522,
    },
}
"""Configurations of transformers, by name: the published widths and vocabularies, with fewer layers."""
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2"},
    "gpt2-medium": {"model": "gpt2-medium", "causal_lm.num_layers": 12},
    "encoder_stack": {"model": "encoder_stack", "corpus": "random_vectors"},
    **{name: {"model": name} for name in CONFIGURATIONS},
}
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "h200": ((8, 1024), (32, 512), (3, 1000), (16, 1024)),
    "a100": ((4, 1024), (16, 512), (5, 777), (8, 1024)),
    "rtx4090": ((2, 1024), (4, 512), (3, 500), (1, 1024)),
    "t4": ((1, 512), (2, 256), (3, 200), (1, 1000)),
}
"""Sequences in a micro-batch and their length, on each card."""
PRECISIONS = {"t4": ("fp32", "fp16", "fp16")}
POLICIES = ("none", "every_layer", "none", "every_2_layers", "every_3_layers")
ACCUMULATION = (1, 1, 4, 1, 2, 1, 1, 3)
ROWS_OF_SHAPE = 4
BUDGETS_OF_CARD = 5
FINE_TUNING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3.2-1b", {"adapter": "qlora"}),
    ("qwen3-0.6b", {"adapter": "qlora", "weights": "bfloat16", "loss_kernel": "chunked"}),
    ("llama, untied, heads of 80", {"adapter": "qlora", "weights": "bfloat16", "qlora_float32_rest": False}),
    ("gemma-3-270m", {"adapter": "qlora", "qlora_double_quantization": False, "adapter_targets": "attention"}),
    ("qwen3-1.7b", {"adapter": "lora", "weights": "bfloat16", "adapter_weights": "bfloat16"}),
    ("gpt2", {"optimizer": "adamw_8bit"}),
    ("qwen3-0.6b", {"optimizer": "adamw_8bit", "weights": "bfloat16", "adamw_8bit_embeddings": "8bit"}),
    ("llama, heads of 96", {"adapter": "qlora", "optimizer": "adamw_8bit"}),
)
"""Shapes and what they are fine-tuned with, on every card: 4-bit weights, adapters, 8-bit state."""
NEED_BF16 = ("weights", "adapter_weights", "qlora_float32_rest")
LONGEST = {"gpt2": 1024, "gpt2-medium": 1024, "bert": 512}
HALVED = ("gemma-2b", "llama-3.2-3b")
"""Shapes whose parameters leave little room on the smaller cards."""


@dataclass(frozen=True)
class Case:
    """One configuration on one card."""

    card: str
    shape: str
    expandable_segments: bool
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """All that distinguishes it, as text."""
        shown = {key: value for key, value in self.settings.items() if key not in SHAPES[self.shape]}
        parts = [self.card, self.shape, *(f"{key.partition('.')[2] or key}={value}" for key, value in shown.items())]
        return ", ".join([*parts, *(["expandable_segments"] if self.expandable_segments else [])])


def cases() -> Iterator[Case]:
    """Yield every shape several times on every card; the other settings alternate in cycles of different lengths."""
    policies, accumulation = cycle(POLICIES), cycle(ACCUMULATION)
    sequences, dropouts = cycle(("packed", "packed", "fixed_length")), cycle((0.0, 0.1, 0.1, 0.0, 0.0, 0.1, 0.0))
    expandable = cycle((False, False, True, False, True, False, False, True, False, False, False))
    for card, sizes in SIZES.items():
        precisions = cycle(PRECISIONS.get(card, ("bf16", "fp32", "bf16", "fp16", "tf32", "bf16", "fp16")))
        for shape, size in ((shape, size) for shape in SHAPES for size in sizes[:ROWS_OF_SHAPE]):
            settings = _settings(card, shape, *size, next(precisions))
            settings["checkpointing"] = next(policies)
            settings["accumulation_steps"] = next(accumulation)
            padded, dropout = next(sequences), next(dropouts)
            if shape != "encoder_stack":
                settings["sequences"] = padded
            settings["encoder_stack.dropout" if shape == "encoder_stack" else "causal_lm.dropout"] = dropout
            yield Case(card, shape, next(expandable), settings)


def fine_tuning_cases() -> Iterator[Case]:
    """Yield FINE_TUNING on every card, on a T4 without what needs bfloat16."""
    policies, accumulation = cycle(("every_layer", "none", "every_layer")), cycle((1, 4, 1, 2, 1))
    expandable = cycle((False, False, True))
    for card, sizes in SIZES.items():
        precisions, cut = cycle(("fp16", "fp32") if card == "t4" else ("bf16", "bf16", "fp32")), cycle(sizes)
        for shape, changes in FINE_TUNING:
            settings = _settings(card, shape, *next(cut), next(precisions))
            settings |= {"checkpointing": next(policies), "accumulation_steps": next(accumulation)}
            settings |= {name: value for name, value in changes.items() if card != "t4" or name not in NEED_BF16}
            yield Case(card, shape, next(expandable), settings)


def _settings(card: str, shape: str, size: int, length: int, precision: str) -> dict[str, Any]:
    if shape in HALVED and card in ("rtx4090", "t4"):
        size, length = 1, length // 2
    length = min(length, LONGEST.get(shape, length))
    batch = {"micro_batch_size": size, "sequence_length": length, "precision": precision}
    return {**SHAPES[shape], **batch}


def budget_cases() -> Iterator[Case]:
    """Yield the configurations whose smallest budget is searched: five of each card, evenly spaced."""
    for card in SIZES:
        of_card = [case for case in cases() if case.card == card]
        yield from chosen(of_card, "", BUDGETS_OF_CARD)


def chosen(among: Iterable[Case], pattern: str, sample: int | None) -> list[Case]:
    """Return the cases whose names contain the regular expression, or `sample` of them evenly spaced."""
    found = [case for case in among if re.search(pattern, case.name)]
    if sample is None or sample >= len(found):
        return found
    return [found[index * len(found) // sample] for index in range(sample)]
