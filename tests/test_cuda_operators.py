"""What CUDA operators allocate inside their kernels: the table's rows against numbers of torch's sources, and a card.

On a simulated card the allocator, and all code that decides about memory, is torch's own.
"""

from collections.abc import Callable
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.memory.device import hardware_of
from pipeline.memory.inside import Buffer, Inside
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.prediction.attention_buffers import (
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
)
from pipeline.prediction.cards import find_card
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.product_workspaces import cublas_workspace_bytes
from pipeline.prediction.reductions import column_sum_bytes, embedding_buffer_bytes
from pipeline.prediction.workspaces import WorkspaceTable

MIB = 2**20
HALF, SINGLE = torch.float16, torch.float32


def heads(channels: int, dtype: torch.dtype = HALF, num_heads: int = 8) -> Tensor:
    """Return 2 sequences of 1,024 tokens, whose heads are the third axis in memory."""
    return torch.empty(2, 1024, num_heads, channels, dtype=dtype, device="meta").transpose(1, 2)


def signed(inside: Inside) -> list[int]:
    """Return the bytes of what follows the results, negative where they are freed."""
    seen: set[Buffer] = set()
    changes = []
    for buffer in inside.after:
        changes.append(-buffer.num_bytes if buffer in seen else buffer.num_bytes)
        seen.add(buffer)
    return changes


def test_flash_attention_expands_gradients_of_shared_heads() -> None:
    rows, query = 2 * 8 * 1024 * 4, 2 * 8 * 1024 * 64 * 4
    assert signed(flash_backward(heads(64), heads(64), heads(64), heads(64))) == [rows, query, -query, -rows]
    expanded = query // 2  # in 16 bits, once for keys and once for values
    shared = signed(flash_backward(heads(64), heads(64), heads(64, num_heads=2), heads(64)))
    assert shared == [rows, query, expanded, expanded, -expanded, -expanded, -query, -rows]


def test_flash_attention_divides_the_keys_if_there_are_few_rows() -> None:
    query = heads(64)  # 256 blocks of 64 rows, on 2 x 128 places
    assert signed(flash_forward(query, query, 0.0, 128)) == [
        0,
        0,
        0,
        0,
    ]  # of a size that may be needed for another batch
    rows = 4 * 2 * 8 * 512
    few = query[:, :, :512]  # 128 blocks: 2 parts of the keys fill all places
    assert signed(flash_forward(few, few, 0.0, 128)) == [2 * rows, 2 * rows * 64, -2 * rows * 64, -2 * rows]
    assert signed(flash_forward(few, few, 0.1, 128)) == []


def test_cudnn_attention_takes_a_gradient_in_float32_and_a_number_for_each_row() -> None:
    assert signed(cudnn_backward(heads(64))) == [2 * 8 * 1024 * 65 * 4, -2 * 8 * 1024 * 65 * 4]


@pytest.mark.parametrize(
    ("capability", "channels", "dtype", "dropout", "blocks"),
    [
        ((8, 0), 64, HALF, 0.0, (64, 64)),
        ((8, 0), 96, HALF, 0.0, (128, 128)),
        ((9, 0), 128, HALF, 0.1, (128, 128)),
        ((8, 9), 96, HALF, 0.0, (128, 64)),
        ((7, 5), 128, HALF, 0.0, (128, 64)),
        ((8, 0), 128, SINGLE, 0.0, (128, 64)),
        ((8, 9), 128, SINGLE, 0.0, (64, 64)),
        ((7, 5), 256, SINGLE, 0.0, (64, 64)),
    ],
)
def test_memory_efficient_attention_keeps_a_block_of_the_querys_gradient_for_each_lock(
    capability: tuple[int, int], channels: int, dtype: torch.dtype, dropout: float, blocks: tuple[int, int]
) -> None:
    rows, columns = blocks
    num_blocks = 2 * 8 * (1024 // rows) * -(-channels // columns)
    workspace = num_blocks * (4 * rows * columns + 16)
    query = heads(channels, dtype)
    assert signed(efficient_backward(query, query, query, dropout, capability))[-4:][-1] == -workspace


def test_memory_efficient_attention_frees_its_product_before_the_workspace() -> None:
    rows, product, workspace = 2 * 8 * 1024 * 4, 2 * 8 * 1024 * 64 * 4, 2 * 8 * 16 * (4 * 64 * 64 + 16)
    assert signed(efficient_backward(heads(64), heads(64), heads(64), 0.0, (8, 0))) == [
        rows,
        workspace,
        -rows,
        -workspace,
    ]
    single = heads(64, SINGLE)
    changes = [product, rows, rows, -rows, -product, workspace, -rows, -workspace]
    assert signed(efficient_backward(single, single, single, 0.0, (8, 0))) == changes


def test_memory_efficient_attention_sums_keys_and_values_of_wide_heads_in_float32() -> None:
    splits = 200 // 16  # of at most 200 for all heads
    floats = 8 * 5 * (128 * 64 + 4) + 2 * splits * 64 * 384
    query = heads(264)
    assert signed(efficient_backward(query, query, query, 0.0, (8, 0)))[-1] == -2 * 8 * floats * 4
    assert signed(efficient_forward(query, query)) == [query.numel() * 4, -query.numel() * 4]
    assert signed(efficient_forward(heads(128), heads(128))) == []


@pytest.mark.parametrize(
    ("card", "rows", "columns", "mib"),
    [
        ("h200", 512, 768, 0),
        ("h200", 1024, 768, 6),
        ("h200", 8192, 768, 48),
        ("h200", 32768, 768, 132),  # 132 multiprocessors x 2,048 threads x 512 bytes
        ("a100", 32768, 768, 108),
        ("rtx4090", 32768, 768, 96),  # 128 x 1,536
        ("t4", 32768, 768, 20.25),  # 40 x 1,024, rounded up to whole rows of 6 blocks
        ("h200", 8192, 50257, 0),  # enough columns for all threads
    ],
)
def test_column_sums_take_partial_sums_until_all_threads_are_busy(
    card: str, rows: int, columns: int, mib: float
) -> None:
    assert column_sum_bytes(rows, columns, find_card(card))[0] == mib * MIB


def test_gradients_of_embeddings_take_partial_gradients_above_3072_tokens() -> None:
    assert embedding_buffer_bytes(3072, 50257, 768) == 0
    assert embedding_buffer_bytes(8192, 50257, 768) == (819 + 8192) * 768 * 4
    assert embedding_buffer_bytes(8192, 512, 768) == (819 + 512) * 768 * 4


def test_the_cublas_workspace_follows_the_card_and_the_environment() -> None:
    assert [cublas_workspace_bytes(capability, {}) for capability in ((7, 5), (8, 9), (9, 0), (12, 0))] == [
        8_519_680,
        8_519_680,
        32 * MIB,
        32 * MIB,
    ]
    assert cublas_workspace_bytes((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}) == 8_519_680
    assert cublas_workspace_bytes((8, 0), {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == 0


Case = Callable[[str], Tensor]
"""A device -> the result of some operators on new tensors."""


def leaf(device: str, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)


def attention(
    *,
    dtype: torch.dtype = HALF,
    channels: int = 64,
    key_heads: int = 8,
    length: int = 512,
    masked: bool = False,
    dropout: float = 0.0,
) -> Case:
    def attend(device: str) -> Tensor:
        query = leaf(device, 2, length, 8, channels, dtype=dtype).transpose(1, 2)
        key, value = (leaf(device, 2, length, key_heads, channels, dtype=dtype).transpose(1, 2) for _ in range(2))
        mask = torch.empty(2, 1, length, length, dtype=torch.bool, device=device) if masked else None
        options = {"attn_mask": mask, "is_causal": not masked, "dropout_p": dropout}
        return F.scaled_dot_product_attention(query, key, value, **options, enable_gqa=key_heads != 8)

    return attend


def attention_then_transposed(device: str) -> Tensor:
    """Return attention whose gradient arrives by head instead of by token."""
    return attention(dropout=0.1)(device).contiguous()


def transposed_with_bias(device: str) -> Tensor:
    return F.linear(leaf(device, 1024, 4, 768).transpose(0, 1), leaf(device, 2304, 768), leaf(device, 2304))


def with_bias(device: str) -> Tensor:
    return F.linear(leaf(device, 4, 1024, 768), leaf(device, 2304, 768), leaf(device, 2304))


def with_weight(device: str) -> Tensor:
    return (leaf(device, 4, 8, 1024, 64, dtype=SINGLE).transpose(1, 2) * leaf(device, 64, dtype=SINGLE)).float()


def embedded(device: str) -> Tensor:
    return F.embedding(torch.zeros(4, 1024, dtype=torch.long, device=device), leaf(device, 5000, 768, dtype=SINGLE))


def norms(device: str) -> Tensor:
    tensors = [leaf(device, 1024, size, dtype=SINGLE) for size in (4096, 1024, 64)]
    return torch.stack(torch._foreach_norm(tensors))


CASES: dict[str, Case] = {
    "attention": attention(),
    "attention in float32": attention(dtype=SINGLE),
    "attention, 96 channels": attention(channels=96),
    "attention, 128 channels in float32": attention(channels=128, dtype=SINGLE),
    "attention, 160 channels and a mask": attention(channels=160, masked=True),
    "attention, 160 channels with dropout": attention(channels=160, dropout=0.1),
    "attention, 200 channels with dropout": attention(channels=200, dropout=0.1),
    "attention of few rows": attention(length=300),
    "attention of few rows, 160 channels": attention(length=300, channels=160),
    "attention with a mask": attention(masked=True),
    "attention with a mask in float32": attention(masked=True, dtype=SINGLE),
    "attention with a mask and rows of 500": attention(masked=True, length=500),
    "attention with dropout": attention(dropout=0.1),
    "attention with dropout and a mask": attention(dropout=0.1, masked=True),
    "grouped attention": attention(key_heads=2),
    "grouped attention with a mask": attention(key_heads=2, masked=True),
    "grouped attention in float32": attention(key_heads=2, dtype=SINGLE),
    "grouped attention in float32 with dropout": attention(key_heads=2, dtype=SINGLE, dropout=0.1),
    "softmax to float32": lambda device: F.softmax(leaf(device, 4, 8, 256, 256), -1, dtype=SINGLE),
    "log_softmax to float32": lambda device: F.log_softmax(leaf(device, 1024, 5000), -1, dtype=SINGLE),
    "softmax of bfloat16": lambda device: F.softmax(
        leaf(device, 4, 8, 256, 256, dtype=torch.bfloat16), -1, dtype=SINGLE
    ),
    "dropout": lambda device: F.dropout(leaf(device, 4, 1024, 768), 0.1),
    "attention, then contiguous": attention_then_transposed,
    "attention, then contiguous, without dropout": lambda device: attention()(device).contiguous(),
    "attention, then contiguous, in float32": lambda device: attention(dtype=SINGLE)(device).contiguous(),
    "linear with a bias": with_bias,
    "linear of transposed inputs": transposed_with_bias,
    "product with a weight": with_weight,
    "embedding": embedded,
    "norms of a list": norms,
}
WIDE_HALF = ("softmax of bfloat16",)


@pytest.mark.gpu
@pytest.mark.every_card
@pytest.mark.parametrize("name", CASES)
def test_operators_allocate_what_the_table_says(name: str) -> None:
    if name in WIDE_HALF and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0")
    assert predicted_changes(CASES[name]) == measured_changes(CASES[name])


@pytest.mark.gpu
@pytest.mark.every_card
def test_torch_has_the_cublas_workspace_of_the_rule() -> None:
    assert torch.backends.cuda.cublas_workspace_size() == cublas_workspace_bytes(torch.cuda.get_device_capability())


@pytest.mark.parametrize("tensor", [torch.empty(()), torch.empty(300_000, 0), torch.empty(0, 8)])
def test_sums_of_nothing_allocate_nothing(tensor: Tensor) -> None:
    assert WorkspaceTable(find_card("t4"))(torch.ops.aten.sum.dim_IntList, (tensor, [0])).after == ()


def predicted_changes(case: Case) -> list[tuple[str, int]]:
    hardware = hardware_of(torch.device("cuda", 0))
    with simulated(hardware) as mode:
        recorder = LifetimeRecorder(torch.device("cpu"), WorkspaceTable(hardware), mode.run)
        with recorder:
            result = case("cpu")
            gradient = torch.empty_like(result)
            result.backward(gradient)
        timeline = recorder.timeline()
    changes = []
    lifetimes = timeline.lifetimes
    for event in timeline.events_E:
        lifetime = lifetimes[event if event >= 0 else -1 - event]
        changes.append(("+" if event >= 0 else "-", lifetime.num_bytes))
    return comparable(changes)


def measured_changes(case: Case) -> list[tuple[str, int]]:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        result = case("cuda")
        gradient = torch.empty_like(result)
        result.backward(gradient)
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": "+", "free_completed": "-"}
    return comparable([(signs[entry["action"]], entry["size"]) for entry in entries if entry["action"] in signs])


def comparable(changes: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return rounded changes above 128 KiB (cub's are smaller) without cuBLAS's, consecutive releases sorted."""
    workspace = cublas_workspace_bytes(torch.cuda.get_device_capability())
    rounded = [(sign, -(-num_bytes // 512) * 512) for sign, num_bytes in changes]
    kept = [change for change in rounded if change[1] > 128 * 1024 and change[1] != workspace]
    runs = [list(run) for _, run in groupby(kept, key=lambda change: change[0])]
    return [change for run in runs for change in (sorted(run) if run[0][0] == "-" else run)]
