"""What to try after a simulation: what reduces the largest parts of its peak, and where the command runs as it is."""

from collections.abc import Mapping

from pipeline.base.units import MIB
from pipeline.memory.allocator_options import EXPANDABLE_SEGMENTS
from pipeline.prediction.commands.simulation import Simulation, Verdict
from pipeline.report.page import Advice

LARGE_PERCENT = 20.0
"""Share of the peak from which it is worth reducing a part of it."""
REMEDIES: Mapping[str, tuple[str, ...]] = {
    "Gradient checkpointing keeps fewer activations for the backward pass, and computes them again; a smaller "
    "micro-batch with as many more accumulation steps keeps fewer too.": ("activations",),
    "A loss in chunks of tokens, or one fused with the head, keeps fewer logits; a smaller micro-batch with as many "
    "more accumulation steps does too.": ("logits and loss",),
    "Parameters, gradients and optimizer state are the same for any micro-batch: an 8-bit optimizer, LoRA, or sharding "
    "over several GPUs reduces them.": ("parameters", "gradients", "optimizer state"),
}
"""What reduces a part of a peak, with the purposes of that part."""


def suggestions(simulation: Simulation, command: str | None, on_larger: str | None) -> tuple[Advice, ...]:
    """Return what to try, the largest part of the peak first.

    `command` simulates it again, and `on_larger` on the smallest card that has the memory; None if Python called it.
    """
    if simulation.largest is None:
        return ()
    peak = simulation.largest.peak
    sizes = {text: sum(peak.category_bytes.get(name, 0) for name in names) for text, names in REMEDIES.items()}
    found = [
        Advice(text=text, evidence=f"{size / MIB:,.0f} MiB, {100 * size / peak.peak_bytes:.0f} % of the peak")
        for text, size in sorted(sizes.items(), key=lambda pair: -pair[1])
        if 100 * size >= LARGE_PERCENT * peak.peak_bytes
    ]
    plain, expandable = simulation.smallest_bytes, simulation.smallest_expandable_bytes
    if plain is not None and expandable is not None and expandable < plain:
        text = "Segments of the allocator that can grow leave less memory unused."
        less = f"{(plain - expandable) / MIB:,.0f} MiB less"
        found.append(Advice(text=text, evidence=less, command=command and f"{EXPANDABLE_SEGMENTS} {command}"))
    if simulation.verdict is Verdict.DOES_NOT_FIT and plain is not None and simulation.cards_that_fit:
        text = f"{simulation.cards_that_fit[0]} has enough memory for the command as it is."
        evidence = f"it runs on {plain / MIB:,.0f} MiB"
        found.append(Advice(text=text, evidence=evidence, command=on_larger))
    return tuple(found)
