"""Steps and operators that others measured on a GPU (benchmarks/published), on the simulated card of that name.

    python benchmarks/published.py             runs all, prints the operators and writes benchmarks/published_<date>.csv

LoRA and QLoRA on a Tesla T4 (57 runs, 8 of them repeats), and single operators on an A100. Models, loading and steps
follow the published conditions: adapters of peft, no autocast, and an output that stays alive until the step has ended.
Two conditions were not recorded and are chosen (published/README.md): how many weights are loaded ahead in QLoRA, and
that keys and values are repeated before attention.
"""

import csv
import datetime
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.contracts import Trainable
from pipeline.base.units import MIB
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.work import Work
from pipeline.prediction.card_processes import card_processes
from pipeline.prediction.card_run import give_memory
from pipeline.prediction.cards import find_hardware, variables_on
from pipeline.techniques.adapter import Adapter

FOLDER = Path(__file__).parent
DATA = FOLDER / "published"
COLUMNS = {
    "after_load": "after_load_allocated_mib",
    "forward": "peak_forward_mib",
    "backward": "peak_backward_mib",
    "optimizer": "peak_optimizer_mib",
    "allocated": "peak_allocated_mib",
    "reserved": "peak_reserved_mib",
}
"""Names of the measured values and their columns in t4_lora.csv."""
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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run does on the simulated card: peaks in bytes, and the work of a pass and of the update."""

    after_load: int
    forward: int
    backward: int
    optimizer: int
    allocated: int
    reserved: int
    pass_work: Work
    update_work: Work


def published() -> list[tuple[Run, dict[str, str]]]:
    """Return the published runs with their rows."""
    return [
        (
            Run(
                series=row["series"],
                model=row["model_id"],
                attention=row["attn_impl"],
                batch_size=int(row["batch_size"]),
                sequence_length=int(row["seq_len"]),
                quantized=row["quantization"] == "nf4",
            ),
            row,
        )
        for row in _read("t4_lora.csv")
    ]


def simulated(runs: Sequence[Run]) -> list[Measured]:
    """Return what each run does on a simulated T4, in a process of its own.

    Raises:
        Exception: of the first run that fails.

    """
    outcomes = dict(card_processes().call(measure, runs, [variables_on(find_hardware("t4"))] * len(runs)))
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return [outcomes[number] for number in range(len(runs))]


def measure(run: Run) -> Measured:
    """Run a measurement on this process's card: a warm-up, a step for the peaks, a step by phase, a recorded one."""
    with _repeated_keys():
        model = build(run)
        loaded = torch.cuda.memory_allocated()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)  # torch's default on CUDA
        tokens = torch.zeros((run.batch_size, run.sequence_length), dtype=torch.long, device="cuda")
        _step(model, optimizer, tokens)
        torch.cuda.reset_peak_memory_stats()
        _step(model, optimizer, tokens)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        phases: dict[str, int] = {}

        def mark(phase: str) -> None:
            phases[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

        torch.cuda.reset_peak_memory_stats()
        _step(model, optimizer, tokens, mark)
        with LifetimeRecorder(torch.device("cuda")) as recorder:
            recorder.mark(0, "load")
            _step(model, optimizer, tokens, lambda phase: recorder.mark(0, phase))
            timeline = recorder.timeline()
    return Measured(
        after_load=loaded,
        allocated=allocated,
        reserved=reserved,
        pass_work=timeline.pass_work(1),
        update_work=timeline.update_work,
        **phases,
    )


def operators() -> list[tuple[str, int, float]]:
    """Return the published operators on an A100: name, the size that varies, and the peak in MiB."""
    return [(row["kernel"], int(row["x"]), float(row["peak_allocated_mib"])) for row in _read("liger_a100.csv")]


def operator_peaks() -> list[int]:
    """Return the peaks in bytes of all published operators on a simulated A100."""
    calls = [(kernel, x) for kernel, x, _ in operators()]
    variables = [variables_on(find_hardware("a100"))] * len(calls)
    outcomes = dict(card_processes().call(measure_operator, calls, variables))
    return [outcomes[number] for number in range(len(calls))]


def measure_operator(call: tuple[str, int]) -> int:
    """Return the peak of a forward and backward pass to which gradients of earlier ones are added.

    The first pass has no gradients yet; the published figure is the median of ten.
    """
    kernel, x = call
    num_tokens, width, vocabulary_size = 8 * 2048, 4096, 128256
    if kernel == "cross_entropy":
        logits = torch.empty((num_tokens, x), device="cuda", requires_grad=True)
        targets = torch.zeros((num_tokens, 1), dtype=torch.long, device="cuda").squeeze(1)

        def loss() -> Tensor:
            return F.cross_entropy(logits, targets)
    else:
        inputs = torch.empty((x, width), dtype=torch.bfloat16, device="cuda", requires_grad=True)
        targets = torch.zeros((x, 1), dtype=torch.long, device="cuda").squeeze(1)
        # The script made a head for each variant that it compared.
        heads = [nn.Linear(width, vocabulary_size, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

        def loss() -> Tensor:
            return F.cross_entropy(heads[0](inputs), targets)

    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        loss().backward()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated()


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, mark: Callable[[str], None] = lambda _: None
) -> None:
    optimizer.zero_grad(set_to_none=True)
    output = model(input_ids=tokens, labels=tokens)
    mark("forward")
    output.loss.backward()
    mark("backward")
    optimizer.step()
    mark("optimizer")


def build(run: Run) -> nn.Module:
    """Return the model with its adapters on the card."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            _config(run.model), dtype=torch.float16, attn_implementation=run.attention
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
        adapter.add_to(Trainable(module=model, layers=tuple(model.model.layers), loss=_no_loss))
    if run.quantized:
        _load_quantized(model, empties_cache=EMPTIES_CACHE[run.series])
    else:
        give_memory(model)
        model.to("cuda")
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained


def _no_loss(*_: object) -> Tensor:
    raise NotImplementedError("the measured loss is the model's own")


def _config(name: str) -> Any:
    """Return the configuration of a row of benchmarks/published/models.csv."""
    from transformers import LlamaConfig, Qwen2Config

    [shape] = [row for row in _read("models.csv") if row["model_id"] == name]
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


def _load_quantized(model: Any, *, empties_cache: bool) -> None:
    """Move a model to the card as transformers and peft do: loaded in 4 bits, the rest made float32, then adapters.

    The order is that of transformers' core_model_loading.py: one allocation as large as the weights, which is freed at
    once (caching_allocator_warmup), then each weight by the order of its name.
    """
    from peft.tuners.lora import LoraLayer

    weights = {name: weight for name, weight in model.named_parameters() if "lora_" not in name}
    sizes = [weight.numel() // 2 if _is_four_bit(weight) else 2 * weight.numel() for weight in weights.values()]
    torch.empty(sum(sizes) // 2, dtype=torch.float16, device="cuda")
    loaded = deque[tuple[str, Tensor]]()
    for name in sorted(weights, key=_natural):
        loaded.append((name, torch.empty(weights[name].shape, dtype=torch.float16, device="cuda")))
        if len(loaded) > NUM_AHEAD:
            _place(model, *loaded.popleft())
    while loaded:
        _place(model, *loaded.popleft())
    model.tie_weights()
    for part in model.modules():
        for own_name, buffer in part._buffers.items():
            part._buffers[own_name] = None if buffer is None else torch.empty_like(buffer, device="cuda")
    for parameter in model.parameters():
        if parameter.is_cuda and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    if empties_cache:
        torch.cuda.empty_cache()
    for part in model.modules():
        if isinstance(part, LoraLayer):
            for linear in (*part.lora_A.values(), *part.lora_B.values()):
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="cuda"))


def _is_four_bit(weight: Tensor) -> bool:
    return type(weight).__name__ == "Params4bit"


def _place(model: nn.Module, name: str, loaded: Tensor) -> None:
    """Make a loaded weight that of the model, in 4 bits if its layer is."""
    owner, _, own_name = name.rpartition(".")
    part = model.get_submodule(owner)
    weight: Any = part._parameters[own_name]
    if not _is_four_bit(weight):
        part._parameters[own_name] = nn.Parameter(loaded, requires_grad=False)
        return
    kept = {each: value for each, value in vars(weight).items() if each != "module"}
    part._parameters[own_name] = type(weight)(loaded, **{**kept, "requires_grad": False, "module": part}).to("cuda")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which transformers sorts the names of weights (dot_natural_key)."""
    parts = name.replace(".base_layer.", ".").split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


@contextmanager
def _repeated_keys() -> Iterator[None]:
    """Repeat keys and values before attention, as the measurement did."""
    attention = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
            options.pop("enable_gqa", None)
        return attention(query, key, value, *args, **options)

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Simulate all, and write published and simulated MiB of the runs with the difference in percent."""
    for (kernel, x, mib), num_bytes in zip(operators(), operator_peaks(), strict=True):
        print(f"{kernel} {x}: {num_bytes / MIB:,.3f} MiB simulated, {mib:,.3f} published")
    rows, lines = published(), []
    found = dict(
        zip(dict.fromkeys(run for run, _ in rows), simulated(list(dict.fromkeys(run for run, _ in rows))), strict=True)
    )
    for number, (run, row) in enumerate(rows, start=1):
        line: dict[str, object] = {"number": number, **asdict(run), "repeats": bool(row["repeat_of"])}
        for name, column in COLUMNS.items():
            mib, theirs = getattr(found[run], name) / MIB, float(row[column])
            line |= {f"published_{name}_mib": theirs, f"simulated_{name}_mib": f"{mib:.3f}"}
            line |= {f"{name}_error_percent": f"{100 * (mib / theirs - 1):.4f}"}
        lines.append(line)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    with (FOLDER / f"published_{date}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    import published as this  # a process on a simulated card imports the functions that it calls by their module's name

    this.main()
