"""Programs in the style of public ones, of many frameworks, on a simulated card: what each needs, and how it ended.

    python benchmarks/simulated_scripts.py TABLE.csv --python ENVIRONMENT/bin/python
    python benchmarks/simulated_scripts.py TABLE.csv --python ENVIRONMENT/bin/python --rows 'Trainer|TRL'

It writes what the table does not have: all programs, or those whose names contain a regular expression. The interpreter
is of an environment with torch's CUDA build and the programs' packages: accelerate bitsandbytes datasets deepspeed
diffusers lightning liger-kernel peft timm torchao torchvision transformers trl; xformers with the torch that it is of.
"""

import argparse
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rows import add_missing

from pipeline.base.units import MIB
from pipeline.prediction.commands.simulation import Simulation, simulate
from pipeline.simulation.cards import find_card
from pipeline.simulation.run import Simulate

PROGRAMS = Path(__file__).parent / "scripts"
TIME_LIMIT_SECONDS = 400.0
TWO = "torchrun --nproc-per-node 2"
CASES = {
    "PyTorch, eager": ("rtx4090", "python language_model.py eager"),
    "PyTorch, torch.compile": ("rtx4090", "python language_model.py default"),
    "PyTorch, torch.compile with CUDA graphs": ("rtx4090", "python language_model.py reduce-overhead"),
    "Trainer, bf16, accumulation, checkpointing": ("rtx4090", "python trainer.py"),
    "Trainer, fp16": ("t4", "python trainer.py fp16"),
    "Trainer, torch.compile": ("rtx4090", "python trainer.py compile"),
    "Trainer, evaluation and saving": ("rtx4090", "python trainer.py evaluate save"),
    "Trainer, 8-bit AdamW of bitsandbytes": ("rtx4090", "python trainer.py adamw_bnb_8bit"),
    "Trainer, Adafactor": ("rtx4090", "python trainer.py adafactor"),
    "Accelerate, evaluation and saving": ("t4", "python accelerate_loop.py"),
    "accelerate launch, two cards": ("t4", "accelerate launch --num_processes 2 --multi_gpu accelerate_loop.py"),
    "Lightning, 16-bit, validation": ("t4", "python lightning_fit.py 16-mixed"),
    "Lightning, bf16, checkpointing, validation": ("rtx4090", "python lightning_fit.py bf16-mixed checkpoint"),
    "TRL SFT": ("rtx4090", "python fine_tuning.py full"),
    "TRL SFT, Liger's kernels": ("rtx4090", "python fine_tuning.py liger"),
    "TRL SFT, LoRA": ("rtx4090", "python fine_tuning.py lora"),
    "TRL SFT, QLoRA, paged 8-bit AdamW": ("rtx4090", "python fine_tuning.py qlora"),
    "TRL DPO": ("rtx4090", "python fine_tuning.py dpo"),
    "TRL KTO": ("rtx4090", "python fine_tuning.py kto"),
    "TRL reward model": ("rtx4090", "python fine_tuning.py reward"),
    "TRL GRPO, with generation": ("rtx4090", "python fine_tuning.py grpo"),
    "policy gradients, with generation": ("rtx4090", "python reinforcement.py"),
    "diffusers UNet": ("rtx4090", "python diffusion.py"),
    "torchvision ResNet-50, channels last, fp16": ("t4", "python vision.py resnet"),
    "timm ViT, fp16": ("t4", "python vision.py vit"),
    "torchvision Faster R-CNN": ("t4", "python vision.py detection"),
    "Whisper": ("rtx4090", "python speech.py whisper"),
    "wav2vec 2.0 with CTC": ("rtx4090", "python speech.py ctc"),
    "LSTM on packed sequences": ("t4", "python recurrent.py LSTM"),
    "GRU on packed sequences": ("t4", "python recurrent.py GRU"),
    "mixture of experts": ("a100", "python experts.py"),
    "torchao float8": ("h100", "python float8.py eager"),
    "torchao float8, torch.compile": ("h100", "python float8.py compiled"),
    "FlexAttention": ("a100", "python flexible_attention.py"),
    "xFormers' attention, several documents": ("a100", "python efficient_attention.py"),
    "saved, loaded, gone on": ("t4", "python resumed.py"),
    "generator and discriminator": ("t4", "python adversarial.py"),
    "graph network, sparse gradients": ("t4", "python graph_network.py"),
    "Gaussian process, Cholesky, L-BFGS": ("t4", "python second_order.py"),
    "torchrun, DistributedDataParallel, two cards": ("t4", f"{TWO} data_parallel.py ddp"),
    "torchrun, FSDP2, two cards": ("a100", f"{TWO} data_parallel.py fsdp"),
    "DeepSpeed ZeRO-1, one card": ("a100", "torchrun --nproc-per-node 1 zero.py 1"),
    "DeepSpeed ZeRO-2, two cards": ("a100", f"{TWO} zero.py 2"),
    "deepspeed, ZeRO-2, optimizer on the host": ("a100", "deepspeed --num_gpus 1 zero.py 2 --offload"),
    "DeepSpeed ZeRO-3, one card": ("a100", "torchrun --nproc-per-node 1 zero.py 3"),
}
"""The card and the command of each program."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one program; MiB of 2^20 bytes, seconds of all its runs together on a shared machine."""

    program: str
    command: str
    card: str
    num_cards: int
    torch: str
    verdict: str
    exit_code: int
    num_steps: int | None
    peak_allocated_mib: float | None
    peak_reserved_mib: float | None
    peak_device_mib: float | None
    line_of_peak: str
    phase_of_peak: str
    with_values: bool
    seconds: float
    notes: str


def row(program: str, num_cards: int, found: Simulation, seconds: float) -> Row:
    """Return the row of a program that was simulated."""
    one = found.largest
    return Row(
        program=program,
        command=CASES[program][1],
        card=CASES[program][0],
        num_cards=num_cards,
        torch=found.assumptions.get("torch", ""),
        verdict=found.verdict.value,
        exit_code=found.exit_code,
        num_steps=None if one is None else one.num_steps,
        peak_allocated_mib=None if one is None else round(one.peak_allocated_bytes / MIB, 3),
        peak_reserved_mib=None if one is None else round(one.peak_reserved_bytes / MIB, 3),
        peak_device_mib=None if one is None else round(one.device_bytes / MIB, 3),
        line_of_peak="" if one is None or one.user_line is None else Path(one.user_line).name,
        phase_of_peak="" if one is None else one.peak.phase,
        with_values=found.with_values,
        seconds=round(seconds, 1),
        notes=re.sub(r"/\S*/(site-packages/|(?=benchmarks/scripts/))", "", " ".join(found.notes)),  # no machine's paths
    )


def run(program: str, python: Path) -> Row:
    """Simulate a program by the commands of an environment."""
    card, command = CASES[program]
    words = command.split()
    num_cards = 2 if re.search("(nproc-per-node|num_processes) 2", command) else 1
    own = tuple(str(PROGRAMS / word) if word.endswith(".py") else word for word in words[1:])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            Simulate(
                command=(str(python.parent / words[0]), *own),
                card=find_card(card),
                num_cards=num_cards,
                num_steps=None,
                time_limit_seconds=TIME_LIMIT_SECONDS,
            ),
            Path(folder),
            may_need_values=True,
            finds_smallest=False,
        )
    return row(program, num_cards, found, time.monotonic() - begin)


def main() -> None:
    """Run what the table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--rows", default="", help="a regular expression")
    arguments = parser.parse_args()
    names = (program for program in CASES if re.search(arguments.rows, program))
    add_missing(arguments.table, Row, names, lambda program: run(program, arguments.python.absolute()))


if __name__ == "__main__":
    main()
