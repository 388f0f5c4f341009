"""The models of benchmarks/published on fake tensors, with adapters and 4-bit layers of the technique `adapter`.

Here is what `adapter` does not do: transformers' order of loading a quantized model straight onto a card, on which the
allocator's rounding depends.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from pipeline.base.contracts import Trainable
from pipeline.prediction.fake_card import CARD, HOST, move_to_card
from pipeline.prediction.four_bit import is_four_bit, quantized_on_device
from pipeline.techniques.adapter import Adapter

RANK = 32
ADAPTED = "q_proj,k_proj,v_proj,o_proj"
EMPTIES_CACHE = {"2026-09-15": True, "2026-09-16": False}
"""Whether the peft of a series empties the cache after it has made weights float32 (0.20.0 does, 0.19.1 does not)."""
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
        adapter = Adapter(
            adapter="qlora" if run.quantized else "lora",
            adapter_rank=RANK,
            adapter_alpha=2 * RANK,
            adapter_targets=ADAPTED,
            qlora_double_quantization=False,
            qlora_float32_rest=not run.quantized,  # load_quantized() makes it float32 on the card
        )
        adapter.on_host(Trainable(module=model, layers=tuple(model.model.layers), loss=_no_loss))
    if run.quantized:
        load_quantized(model, empty_cache if EMPTIES_CACHE[run.series] else lambda: None)
    else:
        move_to_card(model)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def _no_loss(*_: object) -> Tensor:
    raise NotImplementedError("the measured loss is the model's own")


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


def load_quantized(model: PreTrainedModel, empty_cache: Callable[[], None]) -> None:
    """Move a model to the card as transformers and peft do: loaded in 4 bits, the rest made float32, then adapters.

    The order is that of transformers' core_model_loading.py: one allocation as large as the weights, which is freed at
    once (caching_allocator_warmup), then each weight by the order of its name.
    """
    weights = {name: weight for name, weight in model.named_parameters() if "lora_" not in name}
    sizes = [weight.numel() // 2 if is_four_bit(weight) else 2 * weight.numel() for weight in weights.values()]
    torch.empty(sum(sizes) // 2, dtype=torch.float16, device=CARD)
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
    for parameter in model.parameters():
        if parameter.device == CARD and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    empty_cache()
    for part in model.modules():
        if isinstance(part, LoraLayer):
            for linear in (*part.lora_A.values(), *part.lora_B.values()):
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=CARD))


def _place(model: PreTrainedModel, name: str, loaded: Tensor) -> None:
    """Make a loaded weight that of the model, in 4 bits if its layer is."""
    owner, _, own_name = name.rpartition(".")
    parameters = model.get_submodule(owner)._parameters
    packed = quantized_on_device(parameters[own_name], loaded)
    parameters[own_name] = nn.Parameter(loaded, requires_grad=False) if packed is None else packed


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which transformers sorts the names of weights (dot_natural_key)."""
    parts = name.replace(".base_layer.", ".").split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
