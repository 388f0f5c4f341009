"""bitsandbytes' 4-bit layers on fake tensors: its own code, but for what reads values or addresses of tensors.

Its operators have fake kernels of its own, which allocate what they return. What its product allocates besides that is
told by the operators that it consists of.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.base import four_bit
from pipeline.base.contracts import Hardware

NUM_CODES = 256
"""Values of the 8 bits of a scale that is quantized itself (bitsandbytes, create_dynamic_map)."""


@contextmanager
def four_bit_layers(target: Hardware) -> Iterator[None]:
    """Let 4-bit layers be made of fake tensors; nothing of bitsandbytes is imported before the first one."""
    with ExitStack() as stack:

        @cache
        def register() -> None:
            stack.enter_context(_operators(target))

        def make(weight: Tensor, layer: nn.Module, *, double_quantization: bool) -> nn.Parameter:
            register()
            return _parameter(weight, layer, double_quantization)

        stack.enter_context(patch.object(four_bit, "four_bit_weight", make))
        yield


def is_four_bit(weight: Tensor) -> bool:
    """Whether a parameter is the weight of a 4-bit layer that has not been quantized yet."""
    return hasattr(weight, "four_bit_layer")


def quantized_on_device(weight: Any, moved: Tensor) -> nn.Parameter | None:
    """Return the 4-bit form of `weight`, quantized where `moved` is, or None if it is no weight of a 4-bit layer.

    bitsandbytes does so in Params4bit.to().
    """
    if not is_four_bit(weight):
        return None
    layer = weight.four_bit_layer
    functional = import_module("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(moved, compress_statistics=weight.compress_statistics, quant_type="nf4")
    layer.quant_state = state
    return _parameter(packed, layer, weight.compress_statistics, state)


def quantize(module: nn.Module) -> None:
    """Quantize the weights of a module's 4-bit layers on the device that they are on."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and (packed := quantized_on_device(weight, weight.contiguous())) is not None:
                part._parameters[name] = packed


def _parameter(weight: Tensor, layer: nn.Module, double_quantization: bool, state: Any = None) -> nn.Parameter:
    """Return a parameter with the attributes of bitsandbytes' Params4bit, which cannot be made of fake tensors."""
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    parameter.compress_statistics, parameter.quant_type, parameter.quant_state = double_quantization, "nf4", state
    if state is None:
        parameter.four_bit_layer = layer
    return parameter  # type: ignore[no-any-return]


@contextmanager
def _operators(target: Hardware) -> Iterator[None]:
    """Register what bitsandbytes' operators consist of on `target`, and restore its own on exit."""
    functional, utils, default = (
        import_module(f"bitsandbytes.{name}") for name in ("functional", "backends.utils", "backends.default.ops")
    )
    is_enabled = torch.is_autocast_enabled
    library = Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("gemm_4bit", _product_on(target), "AutogradCPU")  # type: ignore[no-untyped-call]
        if target.capability is None:
            library.impl("quantize_4bit", _quantize_on_cpu, "AutogradCPU")  # type: ignore[no-untyped-call]
        with (
            # peft asks whether CUDA's autocast is on, which that of a CPU stands for here, but not on a CPU.
            patch.object(torch, "is_autocast_enabled", lambda kind="cpu": is_enabled(kind))
            if target.capability
            else nullcontext(),
            patch.object(functional, "create_dynamic_map", lambda *_, **__: torch.empty(NUM_CODES)),
            patch.dict(functional.name2qmap, clear=True),
            patch.dict(utils._code_4bit_cache, clear=True),
            patch.object(default, "_get_4bit_quantize_bounds", cache(default._get_4bit_quantize_bounds.__wrapped__)),
        ):
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _quantize_on_cpu(weight: Tensor, block_size: int, kind: str, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return packed weights and scales, as bitsandbytes' default kernel of quantize_4bit allocates memory for them."""
    default: Any = import_module("bitsandbytes.backends.default.ops")
    default._get_4bit_quantize_bounds(kind, weight.device)  # it keeps them
    flat = weight.reshape(-1).float()
    scales = flat.new_empty(-(-flat.numel() // block_size))
    scaled = torch.empty_like(flat)
    codes = torch.empty_like(scaled, dtype=torch.int32)
    codes_8bit = codes.to(torch.uint8)
    packed = (codes_8bit[::2] << 4) | codes_8bit[1::2]
    return packed.view(storage).unsqueeze(1), scales


def _product_on(target: Hardware) -> Callable[..., Tensor]:
    """Return the product of inputs [..., K] and a 4-bit weight [N, K] as operators.

    They are those of bitsandbytes' _gemm_4bit_default_impl on a CPU, and of _dequant_linear_fallback on CUDA, where
    there is a kernel that unpacks the weight by itself too.
    """

    def product(
        inputs: Tensor,
        packed: Tensor,
        shape: Sequence[int],
        scales: Tensor,
        block_size: int,
        kind: str,
        bias: Tensor | None = None,
        scales_8bit: Tensor | None = None,
        codes: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        del codes
        if target.capability is not None and _has_kernel(target, inputs, shape, block_size):
            inputs.contiguous()
            return inputs.new_empty((*inputs.shape[:-1], shape[0]))
        if scales_8bit is not None and offset is not None:
            unpacked = torch.empty_like(scales_8bit, dtype=torch.float32)
            scales = unpacked + offset
            if target.capability is None:
                del unpacked
        weight = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, block_size, kind, shape, inputs.dtype)
        return F.linear(inputs, weight, bias)

    return product


def packed_rows(num_tokens: int) -> int | None:
    """Return the rows of a product on which it depends whether its kernel unpacks the weight; None for many rows."""
    return num_tokens if num_tokens <= _cuda_kernels()._gemm_4bit_custom_max_m else None


def _has_kernel(target: Hardware, inputs: Tensor, shape: Sequence[int], block_size: int) -> bool:
    """Whether bitsandbytes unpacks the weight inside the kernel of the product: a rule of its own."""
    kernels, (num_outputs, num_inputs) = _cuda_kernels(), shape
    num_rows = inputs.numel() // num_inputs
    if num_rows > kernels._gemm_4bit_custom_max_m or num_inputs % block_size:
        return False
    with patch.object(kernels, "_gpu_dispatch_props", lambda _: (target.num_multiprocessors, *target.capability)):  # type: ignore[misc]
        choose = kernels._gemm_4bit_use_custom_cuda.__wrapped__
        return bool(choose(0, inputs.dtype, num_rows, num_outputs, num_inputs))


@cache
def _cuda_kernels() -> Any:
    """Return bitsandbytes' module of CUDA's kernels, which names a function that torch's build for a CPU lacks."""
    with _disable_current_modes(), ExitStack() as stack:
        if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
            stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", None, create=True))
        return import_module("bitsandbytes.backends.cuda.ops")
