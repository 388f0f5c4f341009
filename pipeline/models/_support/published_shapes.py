"""The shapes of published decoders, as transformers' configurations name them, and where their weights are."""

from typing import Any


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {"model_type": "gpt2", "max_position_embeddings": 1024, "vocab_size": 50257, **shape}


def decoder(
    kind: str, layers: int, width: int, heads: tuple[int, int, int], inner: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Return transformers' configuration of a decoder; `heads` are query heads, key heads and channels of a head."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        **more,
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LLAMA_3 = {"max_position_embeddings": 131_072}
_QWEN_3 = {"max_position_embeddings": 40_960}
_GEMMA_3 = {"max_position_embeddings": 32_768, "sliding_window": 512, **_TIED}
_GEMMA_3_4B = {"max_position_embeddings": 131_072, "sliding_window": 1024, **_TIED}
_SMOLLM_2 = {"max_position_embeddings": 8192, **_TIED}
_MISTRAL_3 = {"max_position_embeddings": 32_768, "sliding_window": None}

SHAPES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, table 2, as published on the hub.
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Touvron et al. 2023, table 2 (LLaMA, 6.7 B parameters).
    "llama-7b": decoder("llama", 32, 4096, (32, 32, 128), 11_008, 32_000, max_position_embeddings=2048),
    # config.json on the hub; what changes neither a shape nor memory (rotary base, epsilon) is transformers' default.
    "llama-3.2-1b": decoder("llama", 16, 2048, (32, 8, 64), 8192, 128_256, **_LLAMA_3, **_TIED),
    "llama-3.2-3b": decoder("llama", 28, 3072, (24, 8, 128), 8192, 128_256, **_LLAMA_3, **_TIED),
    "llama-3.1-8b": decoder("llama", 32, 4096, (32, 8, 128), 14_336, 128_256, **_LLAMA_3),
    "llama-3.1-70b": decoder("llama", 80, 8192, (64, 8, 128), 28_672, 128_256, **_LLAMA_3),
    "qwen3-0.6b": decoder("qwen3", 28, 1024, (16, 8, 128), 3072, 151_936, **_QWEN_3, **_TIED),
    "qwen3-1.7b": decoder("qwen3", 28, 2048, (16, 8, 128), 6144, 151_936, **_QWEN_3, **_TIED),
    "qwen3-4b": decoder("qwen3", 36, 2560, (32, 8, 128), 9728, 151_936, **_QWEN_3, **_TIED),
    "qwen3-8b": decoder("qwen3", 36, 4096, (32, 8, 128), 12_288, 151_936, **_QWEN_3),
    "gemma-3-270m": decoder("gemma3_text", 18, 640, (4, 1, 256), 2048, 262_144, **_GEMMA_3),
    "gemma-3-1b": decoder("gemma3_text", 26, 1152, (4, 1, 256), 6912, 262_144, **_GEMMA_3),
    "gemma-3-4b": decoder("gemma3_text", 34, 2560, (8, 4, 256), 10_240, 262_208, **_GEMMA_3_4B),  # without its images
    "smollm2-135m": decoder("llama", 30, 576, (9, 3, 64), 1536, 49_152, **_SMOLLM_2),
    "smollm2-360m": decoder("llama", 32, 960, (15, 5, 64), 2560, 49_152, **_SMOLLM_2),
    "smollm2-1.7b": decoder("llama", 24, 2048, (32, 32, 64), 8192, 49_152, **_SMOLLM_2),
    "mistral-7b": decoder("mistral", 32, 4096, (32, 8, 128), 14_336, 32_768, **_MISTRAL_3),  # version 0.3
}
"""By the names of presets."""
HUB_NAMES = {
    "llama-7b": "huggyllama/llama-7b",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
}
"""The model with such weights on the hub, where it has another name."""

MULTIMODAL = ("gemma-3-4b",)
"""Presets that are the text model alone of what their name on the hub has."""
