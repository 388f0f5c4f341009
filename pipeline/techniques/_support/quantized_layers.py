"""Linear layers with weights of 4 bits (NF4: https://arxiv.org/abs/2305.14314) or 8, by bitsandbytes."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

OUTLIERS = 6.0


def quantize_layers(
    model: nn.Module,
    layers: Iterable[tuple[nn.Module, Mapping[str, nn.Module]]],
    *,
    num_bits: int,
    double_quantization: bool,
    float32_rest: bool,
) -> None:
    """Replace linear layers of a model by ones with weights of 4 or 8 bits, quantized when the model is moved.

    `layers` has the model's layers, each with the linear layers inside it by name. `float32_rest` converts all other
    16-bit parameters to float32, as peft's prepare_model_for_kbit_training does.
    """
    setattr(model, f"is_loaded_in_{num_bits}bit", True)  # peft asks
    quantized = set()
    for layer, linear_layers in layers:
        for name, linear in linear_layers.items():
            owner, _, own_name = name.rpartition(".")
            made = quantized_layer(linear, num_bits=num_bits, double_quantization=double_quantization)
            setattr(layer.get_submodule(owner), own_name, made)
            quantized.add(made.weight)
    for parameter in model.parameters():
        if float32_rest and parameter not in quantized and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def quantized_layer(linear: Any, *, num_bits: int, double_quantization: bool) -> Any:
    """Return a layer of bitsandbytes with the weight and bias of a linear layer, which may be a Conv1D of transformers.

    Of 4 bits, it computes in the type of autocast, and without autocast in that of the weight. Of 8 bits
    (https://arxiv.org/abs/2208.07339), it multiplies inputs of an absolute value beyond OUTLIERS in 16 bits, as with
    transformers' default.
    """
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt
    from torch.utils._python_dispatch import _disable_current_modes

    weight = linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()
    num_outputs, num_inputs = weight.shape
    with _disable_current_modes():  # bitsandbytes makes a weight of its own, which is replaced at once
        made = (
            Linear4bit(num_inputs, num_outputs, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
            if num_bits == 4
            else Linear8bitLt(num_inputs, num_outputs, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
        )
    made.bias = linear.bias
    if num_bits == 8:
        made.weight = Int8Params(weight.data.contiguous(), requires_grad=False, has_fp16_weights=False)
        return made
    made.weight = four_bit_weight(weight.data, made, double_quantization=double_quantization)
    made.support_avx512bf16_for_cpu = False  # evaluation would repack the weight for good, and training fails then
    made.register_forward_pre_hook(partial(_set_compute_type, weight.dtype))
    return made


def four_bit_weight(weight: Tensor, layer: nn.Module, *, double_quantization: bool) -> Any:
    """Return a parameter that is quantized when it is moved to its device, also if it is there already."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        weight, requires_grad=False, compress_statistics=double_quantization, quant_type="nf4", module=layer
    )


def _set_compute_type(dtype: torch.dtype, layer: Any, inputs: tuple[Any, ...]) -> None:
    kind = inputs[0].device.type
    layer.compute_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
