"""The kernel of scaled dot-product attention: the project's rule is torch's, for every kind of card."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from conftest import OnCard
from torch import Tensor
from torch.nn.attention import SDPBackend

from pipeline.prediction.attention import AttentionCall, choose_kernel

HALF = torch.bfloat16
NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LENGTHS = ((1, 1), (2, 2), (64, 64), (1000, 1000), (1024, 1024), (1, 64), (64, 1), (64, 96))
HEADS = ((4, 4, False), (4, 4, True), (4, 2, True), (4, 2, False))
CHANNELS = (8, 12, 20, 25, 30, 32, 64, 72, 80, 96, 100, 128, 136, 160, 192, 200, 224, 232, 256, 264, 288)
MASKS = ("none", "causal", "float", "bool", "bool of each batch", "bool of two axes", "expanded")
DROPOUTS = (0.0, 0.0625, 0.1, 0.125)


def call_of(
    channels: int = 64,
    *,
    dtype: torch.dtype = HALF,
    batch: int = 2,
    lengths: tuple[int, int] = (64, 64),
    heads: tuple[int, int, bool] = (4, 4, False),
    mask: str = "none",
    dropout: float = 0.0,
    trains: bool = True,
    device: str = "meta",
) -> AttentionCall:
    """Return a call as transformers makes it: heads are the second axis, but the third in memory."""
    (length, key_length), (num_heads, num_key_heads, enable_gqa) = lengths, heads
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": trains}
    key = torch.empty(batch, key_length, num_key_heads, channels, **options).transpose(1, 2)
    return AttentionCall(
        query=torch.empty(batch, length, num_heads, channels, **options).transpose(1, 2),
        key=key,
        value=key,
        mask=mask_of(mask, batch, lengths, dtype, device),
        dropout=dropout,
        is_causal=mask == "causal",
        enable_gqa=enable_gqa,
    )


def mask_of(kind: str, batch: int, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> Tensor | None:
    masks: dict[str, Any] = {
        "float": lambda: torch.empty(batch, 1, *lengths, dtype=dtype, device=device),
        "bool": lambda: torch.empty(1, 1, *lengths, dtype=torch.bool, device=device),
        "bool of each batch": lambda: torch.empty(batch, 1, *lengths, dtype=torch.bool, device=device),
        "bool of two axes": lambda: torch.empty(lengths, dtype=torch.bool, device=device),
        "expanded": lambda: torch.empty(batch, 1, 1, lengths[1], dtype=torch.bool, device=device).expand(
            batch, 1, *lengths
        ),
    }
    return masks[kind]() if kind in masks else None  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("capability", "case", "kernel"),
    [
        ((7, 5), {"dtype": torch.float16}, "efficient"),
        ((7, 5), {"dtype": torch.float32, "channels": 25}, "efficient"),  # aligned to one element below 8.0
        ((8, 0), {"dtype": torch.float32, "channels": 25}, "math"),
        ((8, 0), {}, "flash"),
        ((8, 0), {"channels": 256}, "flash"),
        ((8, 9), {"dtype": torch.float16, "channels": 80}, "flash"),
        ((8, 9), {"channels": 224}, "efficient"),
        ((8, 9), {"channels": 224, "trains": False}, "flash"),
        ((8, 9), {"channels": 256}, "flash"),
        ((8, 9), {"channels": 256, "dropout": 0.1}, "efficient"),
        ((8, 0), {"mask": "bool"}, "efficient"),
        ((8, 0), {"mask": "bool", "heads": (4, 2, True)}, "math"),
        ((8, 0), {"heads": (4, 2, True)}, "flash"),
        ((8, 0), {"heads": (4, 2, False)}, "math"),
        ((8, 0), {"mask": "causal", "lengths": (64, 96)}, "efficient"),
        ((9, 0), {}, "cudnn"),
        ((9, 0), {"mask": "bool", "heads": (4, 2, True)}, "cudnn"),
        ((9, 0), {"channels": 20}, "flash"),
        ((9, 0), {"channels": 256}, "cudnn"),
        ((9, 0), {"dropout": 0.1}, "flash"),  # cuDNN's dropout is a multiple of 1/16
        ((9, 0), {"dropout": 0.125}, "cudnn"),
        ((9, 0), {"dropout": 0.1, "mask": "bool"}, "efficient"),
        ((9, 0), {"dropout": 0.1, "mask": "bool", "heads": (4, 2, True)}, "math"),
        ((9, 0), {"lengths": (1, 1)}, "flash"),
        ((9, 0), {"dtype": torch.float32}, "efficient"),
        ((10, 0), {"channels": 128}, "cudnn"),
        ((10, 0), {"channels": 256}, "flash"),
        ((10, 3), {"channels": 224}, "flash"),
        ((12, 0), {"channels": 224}, "efficient"),
        ((12, 0), {"channels": 64}, "flash"),
    ],
)
def test_the_kernel_follows_the_card(capability: tuple[int, int], case: dict[str, Any], kernel: str) -> None:
    assert choose_kernel(capability, call_of(**case), (2, 13)) == kernel


@pytest.mark.parametrize(
    ("capability", "case", "kernels"),
    [
        ((9, 0), {}, "flash cudnn cudnn cudnn cudnn"),  # 2.10 has an older cuDNN
        ((9, 0), {"dropout": 0.1}, "flash cudnn flash flash flash"),
        ((9, 0), {"channels": 192}, "flash cudnn cudnn cudnn flash"),
        ((9, 0), {"channels": 192, "trains": False}, "flash cudnn cudnn cudnn cudnn"),
        ((10, 0), {"channels": 256}, "flash flash flash flash cudnn"),
        ((8, 0), {"dtype": torch.float32, "heads": (4, 2, True)}, "math math math math efficient"),
        ((8, 0), {"mask": "bool", "heads": (4, 2, True)}, "math math math math efficient"),
        ((8, 0), {"heads": (4, 2, True)}, "flash flash flash flash flash"),
    ],
)
def test_the_kernel_follows_the_version_of_torch(
    capability: tuple[int, int], case: dict[str, Any], kernels: str
) -> None:
    versions = ((2, 10), (2, 11), (2, 12), (2, 13), (2, 14))
    assert " ".join(choose_kernel(capability, call_of(**case), version) for version in versions) == kernels


def test_without_gradients_heads_of_any_size_take_the_flash_kernel() -> None:
    call = call_of(224)
    assert choose_kernel((8, 6), call) == "efficient"
    with torch.no_grad():
        assert choose_kernel((8, 6), call) == "flash"


def test_tensors_of_three_axes_and_columns_with_gaps_have_no_fused_kernel() -> None:
    heads = torch.empty(4, 64, 64, dtype=HALF, device="meta")
    assert choose_kernel((9, 0), AttentionCall(query=heads, key=heads, value=heads)) == "math"
    gaps = torch.empty(2, 4, 64, 128, dtype=HALF, device="meta")[..., ::2]
    assert choose_kernel((9, 0), AttentionCall(query=gaps, key=gaps, value=gaps)) == "math"


def all_cases() -> Iterator[dict[str, Any]]:
    names = ("dtype", "batch", "lengths", "heads", "channels", "mask", "dropout", "trains")
    axes = (DTYPES, (1, 4), LENGTHS, HEADS, CHANNELS, MASKS, DROPOUTS, (True, False))
    for values in product(*axes):
        yield dict(zip(names, values, strict=True))


@pytest.mark.gpu
def test_the_kernel_is_the_one_that_torch_chooses_on_this_card() -> None:
    capability = torch.cuda.get_device_capability()
    wrong = []
    for case in all_cases():
        call = call_of(**case, device="cuda")
        options = {"attn_mask": call.mask, "is_causal": call.is_causal, "dropout_p": call.dropout}
        chosen = torch._fused_sdp_choice(*call.heads, **options, enable_gqa=call.enable_gqa)
        if NAMES[SDPBackend(chosen)] != choose_kernel(capability, call):
            wrong.append(case)
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "10.0", "10.3", "12.0"])
def test_the_kernel_is_the_one_that_torch_chooses_on_other_cards(capability: str, on_card: OnCard) -> None:
    test = test_the_kernel_is_the_one_that_torch_chooses_on_this_card.__name__
    done = on_card("h200", "-m", "pytest", f"{__file__}::{test}", SIMULATED_CARD_CAPABILITY=capability)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
