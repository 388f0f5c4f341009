"""CUDA's autocast rules on CPU tensors: operators that run in float32, in the lower precision, or in the widest type.

The lists, operators separated by blanks, are those of torch's aten/src/ATen/autocast_mode.h (AT_FORALL_FP32 and its
siblings) and, in a build for CUDA, of aten/src/ATen/cudnn/AutocastRNN.cpp. Operators that the CPU and CUDA both run in
the lower precision keep the CPU's own kernels, and with them torch's cache of cast weights.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import fallthrough_kernel

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
FLOAT32_RESULT = """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList
"""
"""Computed in float32 through their argument `dtype`, unless it is given."""
FLOAT32_NORM = "norm.Scalar norm.ScalarOpt_dim"
"""Replaced by the overload that takes a type, with float32."""
LOWER_PRECISION = """
    _convolution convolution addmv addr einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    cudnn_convolution cudnn_convolution_transpose _cudnn_rnn
"""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"
HALVES = (torch.float16, torch.bfloat16)

Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def cuda_autocast() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield (operator, dispatch key, kernel) that give torch.autocast("cpu") the rules of torch.autocast("cuda")."""
    cuda = registered("AutocastCUDA")
    for name in sorted(registered("AutocastCPU") - cuda):
        yield name, "AutocastCPU", fallthrough_kernel
    for names, policy in (
        (FLOAT32, _in_float32),
        (FLOAT32_RESULT, _to_float32),
        (FLOAT32_NORM, _norm_to_float32),
        (LOWER_PRECISION, _in_lower_precision),
        (WIDEST, _in_widest),
    ):
        for name in cuda.intersection(names.split()):
            yield name, "AutocastCPU", _under(policy, _operator(name))


def registered(key: str) -> set[str]:
    """Return the names of the aten operators that have a kernel for a dispatch key."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _under(policy: Policy, operator: Any) -> Callable[..., Any]:
    outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(outside):
            return policy(operator, args, kwargs)

    return kernel


def _in_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _with_cast(operator, args, kwargs, torch.float32)


def _in_lower_precision(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _with_cast(operator, args, kwargs, torch.get_autocast_dtype("cpu"))


def _in_widest(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = any(value.dtype == torch.float32 for value in args if isinstance(value, Tensor))
    return _with_cast(operator, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


def _to_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if _castable(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return operator(given.pop(names[0]), **given)


def _norm_to_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _castable(args[0]):
        return operator(*args, **kwargs)
    power = args[1] if len(args) > 1 else 2
    return torch.ops.aten.norm(args[0], power, *args[2:], **kwargs, dtype=torch.float32)


def _with_cast(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(cast, value))
        return value.to(dtype) if _castable(value) else value

    return operator(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (*HALVES, torch.float32)
