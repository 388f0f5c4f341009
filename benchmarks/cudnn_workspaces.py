"""What cuDNN takes of a GPU for its workspaces: convolutions of well-known networks, recurrent nets, CTC.

    python benchmarks/cudnn_workspaces.py    writes benchmarks/cudnn_workspaces_cuda_<date>.csv

Each row is one operation: the most that torch's allocator held during it, less what it held before and what the
operation returns. `simulated_card` is the same number on a simulated card, where engines take nothing: copies in
another layout or type, which torch itself makes.
"""

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from exit_code import exit_code_of, files_parser
from torch import Tensor, nn

from pipeline.memory.device import device_name, find_device
from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import environment

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BATCH = 16


@dataclass(frozen=True)
class Convolution:
    """A convolution: sizes of its input, its filter and its steps; 1 or 2 dimensions."""

    network: str
    channels: int
    outputs: int
    size: tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    is_transposed: bool = False


CONVOLUTIONS = (
    Convolution("ResNet-50", 3, 64, (224, 224), 7, 2, 3),
    *(
        Convolution("ResNet-50", channels, outputs, (size, size), kernel, stride, kernel // 2)
        for channels, outputs, size, kernel, stride in (
            *((64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 128, 56, 1, 1)),
            *((128, 128, 56, 3, 2), (128, 512, 28, 1, 1), (256, 512, 56, 1, 2), (256, 256, 28, 3, 2)),
            *((256, 1024, 14, 1, 1), (256, 256, 14, 3, 1), (512, 512, 14, 3, 2), (512, 2048, 7, 1, 1)),
            *((512, 512, 7, 3, 1), (1024, 2048, 14, 1, 2)),
        )
    ),
    *(
        Convolution("UNet", channels, outputs, (size, size), 3, stride, 1)
        for channels, outputs, size, stride in (
            *((4, 320, 64, 1), (320, 320, 64, 1), (320, 320, 64, 2), (640, 640, 32, 1), (1280, 1280, 16, 1)),
            *((2560, 1280, 16, 1), (1920, 640, 32, 1), (960, 320, 64, 1), (320, 4, 64, 1)),
        )
    ),
    Convolution("ViT", 3, 768, (224, 224), 16, 16),
    Convolution("DCGAN", 128, 512, (4, 4), 4, 2, 1, is_transposed=True),
    Convolution("DCGAN", 512, 256, (8, 8), 4, 2, 1, is_transposed=True),
    Convolution("DCGAN", 256, 128, (16, 16), 4, 2, 1, is_transposed=True),
    Convolution("DCGAN", 128, 3, (32, 32), 4, 2, 1, is_transposed=True),
    Convolution("DCGAN", 3, 64, (64, 64), 4, 2, 1),
    Convolution("DCGAN", 64, 128, (32, 32), 4, 2, 1),
    Convolution("DCGAN", 128, 256, (16, 16), 4, 2, 1),
    Convolution("MobileNet", 144, 144, (56, 56), 3, 2, 1, 144),
    Convolution("ConvNeXt", 96, 96, (56, 56), 7, 1, 3, 96),
    Convolution("Whisper", 80, 768, (3000,), 3, 1, 1),
    Convolution("Whisper", 768, 768, (3000,), 3, 2, 1),
    Convolution("wav2vec 2.0", 1, 512, (32000,), 10, 5),
    Convolution("wav2vec 2.0", 512, 512, (6399,), 3, 2),
    Convolution("wav2vec 2.0", 768, 768, (99,), 128, 1, 64, 16),
)
LONGEST = 128
RECURRENT = [(cell, *shape) for cell in ("LSTM", "GRU", "RNN") for shape in ((256, 1), (512, 2), (1024, 2))]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The workspaces of one operation; bytes."""

    network: str
    operation: str
    dtype: str
    layout: str
    shape: str
    tensors: int
    """What it reads and writes."""
    taken: int
    """More than what it reads and writes."""


def taken(run: Callable[[], Any]) -> tuple[int, Any]:
    """Return what an operation takes for a while, and what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated()), made


def _bytes(*tensors: Tensor | None) -> int:
    return sum(it.numel() * it.element_size() for it in tensors if it is not None)


def of_convolution(one: Convolution, dtype: str, layout: str) -> Iterator[Row]:
    """Yield the rows of its forward pass and of both gradients."""
    num, device, type_of = len(one.size), "cuda", TYPES[dtype]
    ends = (one.channels, one.outputs) if one.is_transposed else (one.outputs, one.channels)
    x = torch.zeros(BATCH, one.channels, *one.size, device=device, dtype=type_of)
    weight = torch.zeros(ends[0], ends[1] // one.groups, *[one.kernel] * num, device=device, dtype=type_of)
    if num == 2:
        x, weight = x.to(memory_format=LAYOUTS[layout]), weight.to(memory_format=LAYOUTS[layout])
    rest = ([one.stride] * num, [one.padding] * num, [1] * num, one.is_transposed, [0] * num, one.groups)
    shape = f"{list(x.shape)} * {list(weight.shape)} / {one.stride}"

    def row(operation: str, most: int, *tensors: Tensor | None) -> Row:
        return Row(
            network=one.network,
            operation=operation,
            dtype=dtype,
            layout=layout,
            shape=shape,
            tensors=_bytes(*tensors),
            taken=most,
        )

    most, y = taken(lambda: torch.ops.aten.convolution(x, weight, None, *rest))
    yield row("convolution", most, x, weight, y)
    gradient = torch.zeros_like(y)
    for name, mask in (("gradient of input", [True, False, False]), ("gradient of weight", [False, True, False])):

        def backward(mask: list[bool] = mask) -> Any:
            return torch.ops.aten.convolution_backward(gradient, x, weight, None, *rest, mask)

        most, made = taken(backward)
        yield row(name, most, gradient, weight if mask[0] else x, *made)


def of_recurrent(cell: str, width: int, layers: int, dtype: str, shortest: int = LONGEST) -> Iterator[Row]:
    """Yield the rows of a recurrent net's forward and backward pass; forward it keeps what is no output.

    The lengths of the sequences grow evenly from the shortest one; if they differ, the sequences are packed.
    """
    net = getattr(nn, cell)(width, width, num_layers=layers).to("cuda", TYPES[dtype])
    x = torch.zeros(LONGEST, 32, width, device="cuda", dtype=TYPES[dtype], requires_grad=True)
    about: dict[str, Any] = {"dtype": dtype, "layout": ""}
    shape, given = f"{list(x.shape)}, {layers} layers", x
    if shortest < LONGEST:
        lengths = torch.linspace(LONGEST, shortest, 32).int()
        given = nn.utils.rnn.pack_padded_sequence(x, lengths)
        about["layout"], shape = "packed", f"{shape}, {int(lengths.sum())} of {LONGEST * 32} positions"
    before = torch.cuda.memory_allocated()
    most, made = taken(lambda: net(given))
    kept, out = torch.cuda.memory_allocated() - before, made[0] if given is x else made[0].data
    about |= {"shape": shape, "tensors": _bytes(x, out)}
    yield Row(network=cell, operation="forward", taken=most, **about)
    yield Row(network=cell, operation="kept for the backward pass, with the output", taken=kept, **about)
    most, _ = taken(lambda: out.sum().backward())
    yield Row(network=cell, operation="backward", taken=most, **about)


def of_ctc(num_frames: int, num_classes: int) -> Iterator[Row]:
    """Yield the rows of the loss with the lengths that cuDNN takes."""
    x = torch.zeros(num_frames, BATCH, num_classes, device="cuda").log_softmax(-1).requires_grad_()
    words = torch.ones(BATCH * 12, dtype=torch.int32, device="cuda")
    lengths = [torch.full((BATCH,), number, dtype=torch.int32, device="cuda") for number in (num_frames, 12)]
    most, loss = taken(lambda: nn.functional.ctc_loss(x, words, *lengths))
    about = {"dtype": "float32", "layout": "", "shape": str(list(x.shape)), "tensors": _bytes(x)}
    yield Row(network="CTC", operation="forward", taken=most, **about)
    most, _ = taken(loss.backward)
    yield Row(network="CTC", operation="backward", taken=most, **about)


def rows(*, has_convolutions: bool = True) -> Iterator[Row]:
    """Yield all rows."""
    for one in CONVOLUTIONS if has_convolutions else ():
        for dtype in TYPES:
            for layout in LAYOUTS if len(one.size) == 2 else ("contiguous",):
                yield from of_convolution(one, dtype, layout)
    for cell, width, layers in RECURRENT:
        for dtype in TYPES:
            yield from of_recurrent(cell, width, layers, dtype)
            for shortest in (1, 64):
                yield from of_recurrent(cell, width, layers, dtype, shortest)
    for num_frames, num_classes in ((100, 32), (400, 128)):
        yield from of_ctc(num_frames, num_classes)


def main() -> int:
    """Write the table of this machine's GPU, and beside each row that of a simulated card; return the exit code."""
    parser = files_parser(__doc__)
    parser.add_argument("--simulated", action="store_true", help="print what is taken on the card that is simulated")
    parser.add_argument("--without_convolutions", action="store_true", help="recurrent nets and CTC alone")
    given = parser.parse_args()
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    if given.simulated:
        print(*(one.taken for one in rows(has_convolutions=not given.without_convolutions)))
        return
    name = device_name(find_device("cuda"))
    card = environment(find_card(name), python=Path(sys.executable), base=os.environ)
    command = [sys.executable, __file__, "--simulated", *["--without_convolutions"] * given.without_convolutions]
    simulated = subprocess.Popen(command, env={**os.environ, **card}, stdout=subprocess.PIPE, text=True)
    found = list(rows(has_convolutions=not given.without_convolutions))
    of_card, _ = simulated.communicate()
    about = {"device_name": name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    file = given.folder / f"cudnn_workspaces_cuda_{given.date}.csv"
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, [*(field.name for field in fields(Row)), "simulated_card", *about])
        writer.writeheader()
        for one, other in zip(found, of_card.split(), strict=True):
            writer.writerow({**asdict(one), "simulated_card": int(other), **about})
    print(file)


if __name__ == "__main__":
    sys.exit(main())
