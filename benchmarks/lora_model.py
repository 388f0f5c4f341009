"""The models of benchmarks/published on fake tensors, loaded as transformers, bitsandbytes and peft load them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from four_bit import FourBitLinear
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from pipeline.prediction.fake_card import CARD, HOST, move_to_card

RANK = 32
EMPTIES_CACHE = {"2026-09-15": True, "2026-09-16": False}
"""Whether the peft of a series empties the cache after it has made weights float32 (0.20.0 does, 0.19.1 does not)."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")

NUM_AHEAD = 12
"""Weights that transformers' loading threads are ahead of the one that is quantized (core_model_loading.py).

It was not recorded and varies between runs. Chosen with SmolLM2-1.7B, whose reserved bytes are those published with 12
and whose allocated bytes do not depend on it.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of benchmarks/published/t4_lora.csv: the conditions of a measurement."""

    series: str
    model: str
    attention: str
    batch_size: int
    sequence_length: int
    quantized: bool


def build(run: Run, shape: dict[str, str], empty_cache: Callable[[], None]) -> nn.Module:
    """Return the model with its adapters on the card; `empty_cache` is called where torch.cuda.empty_cache is."""
    with HOST:
        model = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=torch.float16, attn_implementation=run.attention
        )
    model.config.use_cache = False
    if run.quantized:
        load_quantized(model)
        prepare_model_for_kbit_training(model)
        if EMPTIES_CACHE[run.series]:
            empty_cache()
    else:
        move_to_card(model)
    with HOST:
        adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", target_modules=list(ADAPTED))
        adapted = get_peft_model(model, adapters)
    move_adapters(adapted, torch.float32 if run.quantized else torch.float16)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return adapted.train()


def config_of(shape: dict[str, str]) -> PretrainedConfig:
    """Return the configuration of a row of benchmarks/published/models.csv."""
    kind = Qwen2Config if "Qwen2" in shape["model_id"] else LlamaConfig
    return kind(
        hidden_size=int(shape["hidden_size"]),
        num_hidden_layers=int(shape["num_layers"]),
        num_attention_heads=int(shape["num_attention_heads"]),
        num_key_value_heads=int(shape["num_kv_heads"]),
        intermediate_size=int(shape["intermediate_size"]),
        vocab_size=int(shape["vocab_size"]),
        tie_word_embeddings=shape["tie_word_embeddings"] == "true",
    )


def move_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Move the adapters to the card in `dtype`, then make all of them float32, in peft's order."""
    linears = [
        linear
        for part in model.modules()
        if isinstance(part, LoraLayer)
        for layers in (part.lora_A, part.lora_B)
        for linear in layers.values()
    ]
    for step in dict.fromkeys((dtype, torch.float32)):
        for linear in linears:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=step, device=CARD))


def load_quantized(model: PreTrainedModel) -> None:
    """Load a model onto the card: linear layers in 4 bits, except the head, and all else in float16.

    The order is that of transformers' core_model_loading.py: one allocation as large as the weights, which is freed at
    once (caching_allocator_warmup), then each weight by the order of its name.
    """
    layers = {
        f"{name}.weight": part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not model.get_output_embeddings()
    }
    for name, layer in layers.items():
        owner, _, child = name.removesuffix(".weight").rpartition(".")
        setattr(model.get_submodule(owner), child, FourBitLinear(layer, clones=child in ADAPTED))
    weights = dict(model.named_parameters())
    num_bytes = sum(weight.numel() // 2 if name in layers else 2 * weight.numel() for name, weight in weights.items())
    torch.empty(num_bytes // 2, dtype=torch.float16, device=CARD)
    loaded = deque[tuple[str, Tensor]]()
    for name in sorted(weights, key=_natural):
        loaded.append((name, torch.empty(weights[name].shape, dtype=torch.float16, device=CARD)))
        if len(loaded) > NUM_AHEAD:
            _place(model, *loaded.popleft())
    while loaded:
        _place(model, *loaded.popleft())
    model.tie_weights()
    for part in model.modules():
        for own_name, buffer in part._buffers.items():
            part._buffers[own_name] = None if buffer is None else torch.empty_like(buffer, device=CARD)


def _place(model: PreTrainedModel, name: str, loaded: Tensor) -> None:
    """Make a loaded weight that of the model, in 4 bits if its layer is."""
    owner, _, own_name = name.rpartition(".")
    part = model.get_submodule(owner)
    if isinstance(part, FourBitLinear) and own_name == "weight":
        part.quantize(loaded)
    else:
        part._parameters[own_name] = nn.Parameter(loaded, requires_grad=False)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which transformers sorts the names of weights (dot_natural_key)."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
