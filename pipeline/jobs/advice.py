"""Advice from a profile: what dominates memory or time, the measurement that shows it, and the setting to change."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.base.units import MIB, divisors
from pipeline.report.page import Advice
from pipeline.training.metrics import Row
from pipeline.training.profiler import MATRIX_PRODUCTS, MemoryProfile, TimeProfile

DOMINANT_PERCENT = 40.0
"""Share of the peak from which one part of it dominates."""
SLOW_DATA_PERCENT = 10.0
"""Share of the time per step from which reading data is slow."""
SHORT_SECONDS = 20e-6
"""The time of an operator shorter than this is mostly the overhead of calling it."""
LAUNCH_BOUND_PERCENT = 30.0
"""Share of the time in short operators, or with an idle GPU, from which a step is bound by launches."""
STATE = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, kw_only=True)
class ProfiledRun:
    """A profiled run, from which advice is derived."""

    row: Row
    vocabulary_size: int
    """Size of the vocabulary; 0 without tokens."""
    can_chunk_loss: bool
    """Whether loss_kernel=chunked is another setting that the model takes."""
    can_checkpoint: bool
    """Whether checkpointing=every_layer is another setting that the model takes."""
    autocast: str
    """The 16-bit value of precision that suits the device."""
    memory: MemoryProfile | None
    time: TimeProfile | None

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass."""
        return int(self.row.params["micro_batch_size"])

    def logits_bytes(self, *categories: str) -> int:
        """Return the bytes of logits and of tensors of their shape, among the largest tensors at the peak."""
        if self.memory is None or not self.vocabulary_size:
            return 0
        tensors = [tensor for tensor in self.memory.peak.largest if tensor.category in categories]
        return sum(tensor.num_bytes for tensor in tensors if tensor.shape[-1:] == (self.vocabulary_size,))

    @property
    def short_operators_percent(self) -> float:
        """Share of the operators' time that is spent in short ones."""
        operators = self.time.operators if self.time else ()
        total = sum(cost.seconds for cost in operators)
        short = sum(cost.seconds for cost in operators if cost.seconds < SHORT_SECONDS * cost.calls)
        return 100 * short / total if total else 0.0


def advise(profiled: ProfiledRun) -> tuple[Advice, ...]:
    """Return the advice for a profiled run, on memory first."""
    return tuple(advice for rule in RULES if (advice := rule(profiled)) is not None)


def _logits(profiled: ProfiledRun) -> Advice | None:
    size = profiled.logits_bytes("activations", "temporary")
    percent = _share_of_peak(profiled, size)
    if percent < DOMINANT_PERCENT:
        return None
    text = "Logits and their loss dominate the peak. Checkpointing does not reduce them; "
    evidence = f"logits at the peak: {size / MIB:,.1f} MiB, {percent:.0f} %"
    if profiled.can_chunk_loss:
        text += "a loss in chunks of tokens does, and fewer tokens per forward pass do."
        return Advice(text=text, evidence=evidence, settings={"loss_kernel": "chunked"})
    return _other_cut(f"{text}fewer tokens per forward pass do.", evidence, profiled, larger=False)


def _activations(profiled: ProfiledRun) -> Advice | None:
    if profiled.memory is None:
        return None
    size = profiled.memory.peak.category_bytes.get("activations", 0) - profiled.logits_bytes("activations")
    percent = _share_of_peak(profiled, size)
    if percent < DOMINANT_PERCENT:
        return None
    text = "Activations kept for the backward pass dominate the peak."
    evidence = f"activations at the peak, without logits: {size / MIB:,.1f} MiB, {percent:.0f} %"
    if profiled.row.params["checkpointing"] == "none" and profiled.can_checkpoint:
        return Advice(text=text, evidence=evidence, settings={"checkpointing": "every_layer"})
    return _other_cut(text, evidence, profiled, larger=False)


def _state(profiled: ProfiledRun) -> Advice | None:
    if profiled.memory is None:
        return None
    sizes = {name: profiled.memory.peak.category_bytes.get(name, 0) for name in STATE}
    percent = _share_of_peak(profiled, sum(sizes.values()))
    if percent < DOMINANT_PERCENT:
        return None
    parts = ", ".join(f"{name} {size / MIB:,.1f} MiB" for name, size in sizes.items())
    text = (
        "Optimizer state, parameters and gradients dominate the peak. Checkpointing and a smaller micro-batch "
        "do not reduce them, a smaller model does; a larger micro-batch costs little memory."
    )
    return _other_cut(text, f"at the peak: {parts}, {percent:.0f} %", profiled, larger=True)


def _autocast(profiled: ProfiledRun) -> Advice | None:
    if profiled.memory is None or profiled.time is None:
        return None
    percent = profiled.memory.matrix_products_float32_percent
    total = sum(cost.seconds for cost in profiled.time.operators)
    share = sum(cost.seconds for cost in profiled.time.operators if cost.name in MATRIX_PRODUCTS) / (total or 1.0)
    if percent is None or percent < 50 or share < 0.2:
        return None
    asked = profiled.row.params["precision"]
    if asked == "tf32":
        return None  # its results are float32, its arithmetic is not
    evidence = f"{percent:.0f} % of the matrix products' results are float32; they take {100 * share:.0f} % of the time"
    if asked == "fp32":
        text = "Autocast is not active: matrix products compute in float32."
        return Advice(text=text, evidence=evidence, settings={"precision": profiled.autocast})
    text = f"Autocast to {asked} does not reach most matrix products: the model casts to float32 in its own code."
    return Advice(text=text, evidence=evidence)


def _data(profiled: ProfiledRun) -> Advice | None:
    if profiled.time is None:
        return None
    seconds = profiled.time.phase_seconds.get("data", 0.0)
    percent = 100 * seconds / profiled.time.seconds_per_step
    if percent < SLOW_DATA_PERCENT:
        return None
    text = "Preparing the data takes a large part of the step."
    return _other_cut(text, f"data: {1000 * seconds:,.2f} ms per step, {percent:.0f} %", profiled, larger=True)


def _launches(profiled: ProfiledRun) -> Advice | None:
    if profiled.time is None:
        return None
    idle, short = profiled.time.device_idle_percent, profiled.short_operators_percent
    if idle is not None and idle >= LAUNCH_BOUND_PERCENT:
        text, evidence = "The device is idle between kernels.", f"the device is idle for {idle:.0f} % of the time"
    elif idle is None and short >= LAUNCH_BOUND_PERCENT:
        text = "The overhead of calling operators takes more time than their arithmetic."
        evidence = f"operators shorter than {SHORT_SECONDS * 1e6:.0f} µs take {short:.0f} % of the operators' time"
    else:
        return None
    return _other_cut(text, evidence, profiled, larger=True)


RULES: tuple[Callable[[ProfiledRun], Advice | None], ...] = (_logits, _activations, _state, _autocast, _data, _launches)


def _share_of_peak(profiled: ProfiledRun, num_bytes: int) -> float:
    return 100 * num_bytes / profiled.memory.peak.peak_bytes if profiled.memory else 0.0


def _other_cut(text: str, evidence: str, profiled: ProfiledRun, *, larger: bool) -> Advice:
    """Return advice to set the next micro-batch size at the same effective batch, or that says there is none."""
    effective, size = int(profiled.row.params["effective_batch_size"]), profiled.micro_batch_size
    sizes = [n for n in divisors(effective) if (n > size if larger else n < size)]
    if not sizes:
        which, other = (
            ("larger", "a larger effective_batch_size") if larger else ("smaller", "a shorter sequence_length")
        )
        none = f"No {which} micro-batch size divides the effective batch, and {other} changes the training."
        return Advice(text=f"{text} {none}", evidence=evidence)
    cut = sizes[0] if larger else sizes[-1]
    sizes_of_cut = {"micro_batch_size": cut, "accumulation_steps": effective // cut, "effective_batch_size": effective}
    return Advice(text=text, evidence=evidence, settings=sizes_of_cut)
