"""Memory meters: the exact bytes in live tensors, measured from before the model is built.

On an accelerator the caching allocator counts over the whole run. On a CPU the profiler reports each allocation; it
slows a step down, so it runs for the first two optimizer steps: the first allocates the optimizer state, the second is
like every later one.
"""

import resource
import sys
from collections.abc import Mapping

import torch
from torch.autograd.profiler import profile, record_function

from pipeline.base.results import MemoryUse, PhaseMemory
from pipeline.memory.device import used_bytes

WATCHED_STEPS = 2
"""Optimizer steps whose phases are recorded."""
PHASES = ("load", "forward", "backward", "optimizer")
"""The phases at whose end the allocated bytes are recorded."""
_MARK = "fitproof::"


class CpuMeter:
    """Sums the allocator's events, as the profiler records them."""

    def __init__(self) -> None:
        # torch.profiler's object of every operator takes longer than a run with many passes; this one makes none.
        self._profile: profile | None = profile(profile_memory=True, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._peak_bytes: int | None = None
        self._phases: tuple[PhaseMemory, ...] = ()

    def mark(self, step: int, phase: str) -> None:
        """Record the end of a phase of optimizer step `step`, counted from 0; of equal names the last counts."""
        if phase in PHASES:
            with record_function(f"{_MARK}{step}:{phase}"):
                pass

    def stop(self) -> None:
        """Stop the profiler and sum its events: the optimizer steps that it slows down have ended."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._peak_bytes, self._phases = _add_up(self._profile)
        self._profile = None

    def begin_evaluation(self) -> None:
        """Do nothing: the profiler has been stopped."""

    def read(self) -> MemoryUse:
        """Return the peaks so far; before stop() the allocator's is not known yet."""
        return MemoryUse(
            peak_allocated_bytes=self._peak_bytes,
            peak_process_bytes=_peak_process_bytes(),
            phases=self._phases,
        )


class AcceleratorMeter:
    """Reads the caching allocator's statistics, and on CUDA those of NVML."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used_bytes_before = used_bytes(device)
        torch.accelerator.reset_peak_memory_stats(device)
        self._allocated_bytes: dict[tuple[int, str], int] = {}
        self._training_peaks: tuple[int, int] | None = None
        """Allocated and reserved bytes; None before the evaluation."""

    def mark(self, step: int, phase: str) -> None:
        """Read the allocated bytes, which needs no synchronization."""
        if phase in PHASES:
            self._allocated_bytes[step, phase] = torch.accelerator.memory_allocated(self._device)

    def stop(self) -> None:
        """Do nothing: there is no profiler."""

    def begin_evaluation(self) -> None:
        """Keep the peaks of the training, and measure that of an evaluation by itself."""
        self._training_peaks = self._peaks()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryUse:
        """Return the peaks so far; device bytes are the reserved peak plus other memory, as its context."""
        before, now = self._used_bytes_before, used_bytes(self._device)
        allocated, reserved = self._peaks()
        of_training = self._training_peaks or (0, 0)
        peak_reserved = max(reserved, of_training[1])
        beside = (
            None if before is None or now is None else now - before - torch.accelerator.memory_reserved(self._device)
        )
        return MemoryUse(
            peak_allocated_bytes=max(allocated, of_training[0]),
            peak_reserved_bytes=peak_reserved,
            peak_device_bytes=None if beside is None else peak_reserved + beside,
            peak_process_bytes=_peak_process_bytes(),
            allocation_retries=torch.accelerator.memory_stats(self._device).get("num_alloc_retries"),
            phases=_phases(self._allocated_bytes),
            peak_evaluation_bytes=allocated if self._training_peaks else None,
        )

    def _peaks(self) -> tuple[int, int]:
        device = self._device
        return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)


def make_meter(device: torch.device) -> CpuMeter | AcceleratorMeter:
    """Return what measures the memory of this process on a device; to be made before the first tensor."""
    return CpuMeter() if device.type == "cpu" else AcceleratorMeter(device)


def _add_up(profiled: profile) -> tuple[int, tuple[PhaseMemory, ...]]:
    """Return the maximum of the running sum of the allocator's events, and its value at each mark."""
    assert profiled.kineto_results is not None  # it has been stopped
    events = [
        (event.start_ns(), event.name(), event.nbytes())  # type: ignore[attr-defined]
        for event in profiled.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(_MARK)
    ]
    live = peak = 0
    marked: dict[tuple[int, str], int] = {}
    for _, name, size in sorted(events, key=lambda event: event[0]):
        if name == "[memory]":
            live += size
            peak = max(peak, live)
        else:
            step, phase = name.removeprefix(_MARK).split(":")
            marked[int(step), phase] = live
    return peak, _phases(marked)


def _phases(allocated_bytes: Mapping[tuple[int, str], int]) -> tuple[PhaseMemory, ...]:
    return tuple(PhaseMemory(step=k[0], phase=k[1], allocated_bytes=size) for k, size in allocated_bytes.items())


def _peak_process_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB elsewhere
