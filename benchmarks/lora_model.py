"""The models of benchmarks/published on fake tensors, with the adapters of pipeline/techniques/adapter.py."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from pipeline.base.contracts import Trainable
from pipeline.prediction.fake_card import HOST, move_to_card
from pipeline.techniques.adapter import Adapter

RANK = 32
ADAPTED = "q_proj,k_proj,v_proj,o_proj"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of benchmarks/published/t4_lora.csv: the conditions of a measurement."""

    series: str
    model: str
    attention: str
    batch_size: int
    sequence_length: int
    quantized: bool


def build(run: Run, shape: dict[str, str]) -> nn.Module:
    """Return the model with its adapters on the card."""
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
        )
        adapter.on_host(Trainable(module=model, layers=tuple(model.model.layers), loss=_no_loss))
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
