"""bitsandbytes on fake tensors: its own code, but for what reads values or addresses of tensors.

On a CPU its operators are functions of torch's operators, which are run in their place, so that what they allocate is
seen; those of 4 bits have fake kernels of its own, which allocate what they return.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library

from pipeline.config.experiment import Experiment
from pipeline.techniques._support import quantized_layers

CODES = 256
"""Numbers that 8 bits can have: those of a state, or of a scale that is quantized itself."""


@contextmanager
def quantized_states(experiment: Experiment) -> Iterator[None]:
    """Replace functions of bitsandbytes, if the experiment uses them, and restore them on exit.

    Enter it before any tensor is fake: bitsandbytes makes tensors as it is imported.
    """
    settings: Any = experiment.settings
    if not settings.optimizer.endswith("8bit"):
        yield
        return
    functional, on_cpu = import_module("bitsandbytes.functional"), import_module("bitsandbytes.backends.cpu.ops")
    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "create_dynamic_map", unread_map))
        for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
            stack.enter_context(patch.object(torch.ops.bitsandbytes, name, getattr(on_cpu, f"_{name}_cpu")))
        yield


def unread_map(*_: Any, **__: Any) -> Tensor:
    """Return a map of 8-bit codes in place of bitsandbytes' create_dynamic_map, which reads it."""
    return torch.empty(CODES)


@contextmanager
def four_bit_layers() -> Iterator[None]:
    """Let 4-bit layers be made of fake tensors; nothing of bitsandbytes is imported before the first one."""
    with ExitStack() as stack:

        @cache
        def register() -> None:
            stack.enter_context(_operators())

        def make(weight: Tensor, layer: nn.Module, *, double_quantization: bool) -> nn.Parameter:
            register()
            return _parameter(weight, layer, double_quantization)

        stack.enter_context(patch.object(quantized_layers, "four_bit_weight", make))
        yield


def quantize(module: nn.Module) -> None:
    """Quantize the weights of a module's 4-bit layers, as bitsandbytes does in Params4bit.to()."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and hasattr(weight, "four_bit_layer"):
                part._parameters[name] = _quantized(weight)


def _quantized(weight: Any) -> nn.Parameter:
    layer, double = weight.four_bit_layer, weight.compress_statistics
    functional = import_module("bitsandbytes.functional")
    packed, layer.quant_state = functional.quantize_4bit(
        weight.contiguous(), compress_statistics=double, quant_type="nf4"
    )
    return _parameter(packed, layer, double, layer.quant_state)


def _parameter(weight: Tensor, layer: nn.Module, double_quantization: bool, state: Any = None) -> nn.Parameter:
    """Return a parameter with the attributes of bitsandbytes' Params4bit, which cannot be made of fake tensors."""
    parameter: Any = nn.Parameter(weight, requires_grad=False)
    parameter.compress_statistics, parameter.quant_type, parameter.quant_state = double_quantization, "nf4", state
    if state is None:
        parameter.four_bit_layer = layer
    return parameter  # type: ignore[no-any-return]


@contextmanager
def _operators() -> Iterator[None]:
    """Register what bitsandbytes' operators consist of on a CPU, and restore its own on exit."""
    functional, utils, default = (
        import_module(f"bitsandbytes.{name}") for name in ("functional", "backends.utils", "backends.default.ops")
    )
    library = Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("gemm_4bit", _product, "AutogradCPU")  # type: ignore[no-untyped-call]
        library.impl("quantize_4bit", _quantize_on_cpu, "AutogradCPU")  # type: ignore[no-untyped-call]
        with (
            patch.object(functional, "create_dynamic_map", unread_map),
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


def _product(
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
    """Return the product of inputs [..., K] and a 4-bit weight [N, K], as bitsandbytes' _gemm_4bit_default_impl."""
    del codes
    if scales_8bit is not None and offset is not None:
        scales = torch.empty_like(scales_8bit, dtype=torch.float32) + offset
    weight = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, block_size, kind, shape, inputs.dtype)
    return F.linear(inputs, weight, bias)
