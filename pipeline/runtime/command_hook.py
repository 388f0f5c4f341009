"""Times the optimizer steps of a training command and sums the losses that it trains on, inside its own process.

It imports the standard library and torch alone. After each optimizer step it sends a line of JSON to the socket that
COMMAND_SOCKET names, and waits for the answer: `go`, or `end`, which ends the process before the script saves,
evaluates or uploads anything.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

SOCKET = "COMMAND_SOCKET"
"""Variable with the path of the socket of the process that measures the command."""
BUDGET = "COMMAND_BUDGET_BYTES"
"""Variable with the bytes that torch's CUDA allocator may reserve."""
METERED_STEPS = 2
"""Optimizer steps for which the profiler records allocations on a CPU: the second has all of the optimizer's state."""
END = "end"
FORMATS = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile leave a function out of what it compiles, without torch.compiler's import of seconds."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _noting(function: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls `note` with its arguments first."""

    @_not_compiled
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _noting_result(function: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls `note` with its result and its arguments at its end."""

    @_not_compiled
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    return call


class Steps:
    """The optimizer steps of this process so far."""

    def __init__(self, torch: Any, path: str) -> None:
        self._torch, self._path = torch, path
        self._connection: Any = None
        self._num_steps_of: dict[int, int] = {}
        self._num_steps = self._num_skipped = self._num_passes = 0
        self._has_stepped = False
        """Whether an optimizer has taken a step since the gradient scaler's last update."""
        self._losses: list[Any] = []
        self._formats: set[str] = set()
        self._peaks: dict[str, int] = {}
        self._profile: Any = None
        self._begin = time.perf_counter()

    def begin(self) -> None:
        """Begin to watch; torch has just been imported."""
        torch = self._torch
        from torch.amp import GradScaler, autocast
        from torch.optim import optimizer

        optimizer.register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = _noting(torch.autograd.backward, self._note_loss)
        GradScaler.scale = _noting_result(GradScaler.scale, _remember_unscaled)  # type: ignore[method-assign]
        GradScaler.update = _noting_result(GradScaler.update, self._after_update)  # type: ignore[method-assign]
        autocast.__enter__ = _noting(autocast.__enter__, self._note_format)  # type: ignore[method-assign]
        for module in (torch.cuda, torch.cuda.memory):  # the script may be about to reset them
            module.reset_peak_memory_stats = _noting(torch.cuda.memory.reset_peak_memory_stats, self._keep_peaks)
        if BUDGET in os.environ:
            torch.cuda._lazy_call(self._limit_memory)
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            with _silent():
                self._profile.__enter__()
            atexit.register(self._stop_profile)  # a process that ends with a profiler may crash
        sys.excepthook = functools.partial(self._failed, sys.excepthook)

    def _note_loss(self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        """Note the scalars that autograd's backward() is called on, which takes edges of its graph and generators too.

        A recomputed layer calls it with gradients of its own, and is no pass.
        """
        is_one = isinstance(tensors, (self._torch.Tensor, Iterator))  # left to autograd
        outputs = [tensors] if is_one else list(tensors)
        scalars = [one for one in outputs if isinstance(one, self._torch.Tensor) and one.numel() == 1]
        if grad_tensors is None and scalars:
            self._num_passes += 1
            self._losses += [getattr(one, "_unscaled", one).detach() for one in scalars]

    def _note_format(self, autocast: Any) -> None:
        if autocast._enabled:
            self._formats.add(str(autocast.fast_dtype))

    @_not_compiled
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_stepped = True
        done = self._num_steps_of[id(optimizer)] = self._num_steps_of.get(id(optimizer), 0) + 1
        if done + self._num_skipped > self._num_steps:  # several optimizers may take a step each
            self._end_step(optimizer)

    def _after_update(self, *_: Any, **__: Any) -> None:
        """End a step that the gradient scaler has skipped."""
        if not self._has_stepped and self._num_passes:
            self._num_skipped += 1
            self._end_step(None)
        self._has_stepped = False

    def _end_step(self, optimizer: Any) -> None:
        torch = self._torch
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._begin
        self._num_steps += 1
        if self._num_steps == METERED_STEPS:
            self._stop_profile()
        self._keep_peaks()
        groups = [] if optimizer is None else optimizer.param_groups
        if self._num_steps == 1:
            self._formats.update(str(tensor.dtype) for group in groups for tensor in group["params"])
        answer = self._send(
            {
                "seconds": seconds,
                "loss": self._loss(),
                "num_passes": self._num_passes,
                "learning_rate": float(groups[0]["lr"]) if groups and "lr" in groups[0] else None,
                "skipped": optimizer is None,
                "peaks": self._peaks,
                "process_bytes": _peak_process_bytes(),
                "formats": self._known_formats(),
            }
        )
        if answer == END:
            _end()
        self._losses.clear()
        self._num_passes = 0
        self._begin = time.perf_counter()

    def _loss(self) -> float | None:
        """Return the sum of the losses of this step; None if there was no scalar."""
        with contextlib.suppress(Exception):  # a tensor that has no number, as one that is spread over processes
            return sum(float(loss) for loss in self._losses) if self._losses else None
        return None

    def _known_formats(self) -> list[str]:
        torch = self._torch
        uses_tf32 = torch.cuda.is_initialized() and torch.get_float32_matmul_precision() != "highest"
        return sorted({FORMATS[name] for name in self._formats if name in FORMATS} | ({"tf32"} if uses_tf32 else set()))

    def _limit_memory(self) -> None:
        """Let torch's allocator reserve no more than the budget on the card of this process."""
        torch, number = self._torch, int(os.environ.get("LOCAL_RANK", "0"))
        if number >= torch.cuda.device_count():  # a launcher that shows each rank its own GPU alone
            number = 0
        total_bytes = torch.cuda.get_device_properties(number).total_memory
        share = (int(os.environ[BUDGET]) + 0.5) / total_bytes  # torch multiplies and rounds down
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), number)

    def _keep_peaks(self, *_: Any, **__: Any) -> None:
        """Note the peaks of CUDA's allocator."""
        cuda = self._torch.cuda
        for number in range(cuda.device_count()) if cuda.is_initialized() else ():
            stats = cuda.memory_stats(number)
            for kind in ("allocated", "reserved"):
                peak = stats.get(f"{kind}_bytes.all.peak", 0)
                self._peaks[kind] = max(self._peaks.get(kind, 0), peak)

    def _stop_profile(self) -> None:
        """Sum the allocations that the profiler has recorded; their largest sum is the peak."""
        if self._profile is None:
            return
        with _silent():
            self._profile.__exit__(None, None, None)
        events = [one for one in self._profile.kineto_results.events() if one.name() == "[memory]"]
        self._profile = None
        live = peak = 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        self._peaks["allocated"] = peak

    def _failed(self, hook: Any, kind: Any, error: Any, traceback: Any) -> None:
        """Send that an error ends this process for lack of memory, and whether it is torch's."""
        torch = self._torch
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            with contextlib.suppress(OSError):
                self._send({"out_of_memory": f"{kind.__name__}: {str(error).partition(chr(10))[0]}"})
        hook(kind, error, traceback)

    def _send(self, message: dict[str, Any]) -> str:
        """Send a message and return the answer."""
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._path)
            self._connection = connection.makefile("rw")
        self._connection.write(json.dumps({**self._rank(), **message}) + "\n")
        self._connection.flush()
        return str(self._connection.readline()).strip() or END

    def _rank(self) -> dict[str, int]:
        """Return which of how many ranks it is, by its process group, else by a launcher's variables."""
        group = self._torch.distributed
        if group.is_available() and group.is_initialized():
            return {"rank": group.get_rank(), "world_size": group.get_world_size()}
        values = {"rank": 0, "world_size": 1}
        return {name: int(os.environ.get(name.upper(), value)) for name, value in values.items()}


def _remember_unscaled(scaled: Any, _: Any, outputs: Any) -> None:
    """Let what the gradient scaler's scale() returns know the loss that it was made of."""
    if scaled is not outputs and hasattr(outputs, "detach"):
        scaled._unscaled = outputs.detach()


def _peak_process_bytes() -> int:
    """Return the most resident memory of this process; getrusage(2) counts that of the program before it as well."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:  # noqa: PTH123 (a start imports little)
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let nothing be written to stderr: the profiler announces its start and its end there."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _end() -> None:
    """End this process at once, and before that the run that it logs to MLflow, which would else seem to go on."""
    mlflow = sys.modules.get("mlflow")
    with contextlib.suppress(Exception):
        if mlflow is not None and mlflow.active_run() is not None:
            mlflow.end_run("KILLED")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "simulated_card_hook" and SOCKET in os.environ:
    Steps(sys.modules["torch"], os.environ[SOCKET]).begin()
