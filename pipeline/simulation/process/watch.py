"""Records the memory of a process on a simulated card: torch's own memory history, optimizer steps and phases.

It runs inside the user's process and imports the standard library and torch alone. When CUDA was used, it leaves two
files in the folder that SIMULATED_CARD_REPORT names: PID.json, which `simulation/record.py` reads, and PID.pickle,
torch's memory snapshot, which https://pytorch.org/memory_viz shows.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import operator
import os
import pickle
import site
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "SIMULATED_CARD_REPORT"
"""Variable that names the folder of what processes did."""
STEPS = "SIMULATED_CARD_STEPS"
"""Variable with the number of optimizer steps after which a process ends; it runs to its own end without it."""
TIME_LIMIT = "SIMULATED_CARD_TIME_LIMIT"
"""Variable with the time, in seconds since the epoch, at which a process ends."""
NEXT_STEP = "_simulated_card_next_step"
"""Attribute of torch by which a hook looks at the step after these: a function of the one that ends the process."""
SECONDS_FOR_OTHERS = 25.0
"""How long after the time limit a launcher waits for its processes to write their records."""
OWN_FOLDER = str(Path(__file__).parent.parent)
"""The code of the simulation, which is left out of stacks."""
NUM_EVENTS = 2_000_000
"""Events of the allocator that are kept, the latest ones."""
MOST_MARKS = 1000
"""Marks after which gradients of a script that updates itself are no longer noted."""
MARKED_STEPS = 8
"""Steps of an optimizer after which the addresses of its parameters, gradients and states are no longer noted."""
FEWEST_STEPS = 2
"""Steps of an optimizer after which the peak is known: the first has no optimizer state yet."""
PATIENCE = 10
"""How many times the given number of steps an optimizer may take while another one has taken too few.

So often too a script updates its parameters without an optimizer of torch: it may make one after passes of another use.
"""


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile leave a function out of what it compiles, without torch.compiler's import of seconds."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class Watch:
    """What is known of this process so far."""

    def __init__(self, torch: Any, folder: Path, num_steps: int) -> None:
        self._torch, self._folder, self._num_steps = torch, folder, num_steps
        self._writing = threading.RLock()
        self._exit = os._exit
        self._is_written = False
        self._steps_of: dict[int, int] = {}
        self._steps_of_parameter: dict[int, int] = {}
        self._frozen: list[weakref.ref[Any]] = []
        self._trained: list[weakref.ref[Any]] = []
        self._gradients: list[tuple[int, int]] = []
        self._searches_left = MARKED_STEPS
        self._may_update_itself = True
        self._open: list[tuple[str, int, list[list[Any]]]] = []
        self.phases: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self._peaks: dict[int, dict[str, int]] = {}
        self.steps: list[int] = []
        """Microseconds at which the optimizer steps ended."""
        self.out_of_memory: list[dict[str, Any]] = []
        self.has_late_optimizer = False
        self.ended_by = "the end of the script"
        self.is_out_of_memory: bool | None = None

    def begin(self) -> None:
        """Start recording as soon as the process uses CUDA."""
        torch = self._torch
        self._record_memory_history = torch.cuda.memory._record_memory_history
        # A script that begins and ends a history of its own would end this one.
        torch.cuda.memory._record_memory_history = lambda *_, **__: None
        torch.cuda._lazy_call(self._record_history)
        from torch.optim import optimizer

        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, self._around_backward(getattr(torch.autograd, name)))
        torch.save = self._within("saving", torch.save)
        for module in (torch.cuda, torch.cuda.memory):
            module.reset_peak_memory_stats = self._keeping_peaks(torch.cuda.memory.reset_peak_memory_stats)
        sys.excepthook = functools.partial(self._remember, sys.excepthook)
        gc.freeze = self._noting_frozen(gc.freeze)
        os._exit = self.exit  # which skips what follows
        atexit.register(self.write)
        multiprocessing.util.Finalize(None, self.write, exitpriority=-1)  # a process of multiprocessing skips atexit

    def end(self, ended_by: str) -> None:
        """Write the record and end this process, without the handlers that its libraries have for its exit."""
        self.ended_by = ended_by
        with contextlib.suppress(Exception):
            self.write()
            sys.stdout.flush()
            sys.stderr.flush()
        self._exit(0)

    def end_in_time(self) -> None:
        """End this process at its time limit: one without CUDA, as torchrun, after those that it has started."""
        latest = time.time() + SECONDS_FOR_OTHERS
        while not self._torch.cuda.is_initialized() and _has_children() and time.time() < latest:
            time.sleep(0.1)
        self.end("the time limit")

    def exit(self, status: int) -> NoReturn:
        """Write the record and end this process at once; this takes the place of os._exit."""
        try:
            self.write()
        finally:
            self._exit(status)

    def write(self) -> None:
        """Write the record, once, if this process has used CUDA."""
        with self._writing:
            torch = self._torch
            if self._is_written or not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
                return
            self._is_written = True
            if self._may_update_itself and self._has_optimizer():
                self.steps = []
            self._mark_modules()
            while self._open:
                self._leave()
            snapshot = _snapshot(torch)
            is_whole = all(len(trace) < NUM_EVENTS for trace in snapshot["device_traces"])
            content = {**self._content(), "is_whole": is_whole, "allocator": _allocator_options(snapshot)}
            _write(self._folder / f"{os.getpid()}.pickle", pickle.dumps(snapshot))
            _write(self._folder / f"{os.getpid()}.json", json.dumps(content).encode())

    def _content(self) -> dict[str, Any]:
        torch = self._torch
        self._keep_peaks()
        return {
            "pid": os.getpid(),
            "command": [sys.executable, *getattr(sys, "orig_argv", ["", *sys.argv])[1:]],
            "rank": int(os.environ.get("RANK", "0")),
            "begin_us": _begin(),
            "end_us": _now(),
            "ended_by": self.ended_by,
            "is_out_of_memory": self.is_out_of_memory,
            "phases": self.phases,
            "marks": self.marks,
            "steps": self.steps,
            "has_late_optimizer": self.has_late_optimizer,
            "out_of_memory": self.out_of_memory,
            "devices": [self._peaks[number] for number in sorted(self._peaks)],
            "workspace_bytes": _workspace_bytes(torch),
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA": torch.version.cuda},
            "own_code": _own_code(),
            "num_communicators": getattr(torch, "_simulated_card_communicators", 0),
        }

    def _keep_peaks(self) -> None:
        """Note the peaks of all cards, which the script may be about to reset."""
        for number in range(self._torch.cuda.device_count()) if self._torch.cuda.is_initialized() else ():
            stats, peaks = self._torch.cuda.memory_stats(number), self._peaks.setdefault(number, {})
            for kind in ("allocated", "reserved"):
                name = f"peak_{kind}_bytes"
                peaks[name] = max(peaks.get(name, 0), stats.get(f"{kind}_bytes.all.peak", 0))

    def _keeping_peaks(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        @_not_compiled
        @functools.wraps(reset)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._keep_peaks()
            return reset(*args, **kwargs)

        return call

    def _record_history(self) -> None:
        self._record_memory_history("all", "alloc", "python", NUM_EVENTS)
        self._torch._C._cuda_attach_out_of_memory_observer(self._observe)

    def _observe(self, device: int, wanted_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Note an allocation that failed, from whichever thread."""
        event = {"time_us": _now(), "wanted_bytes": wanted_bytes, "free_bytes": free_bytes, "stack": _stack()}
        self.out_of_memory.append(event)

    @_not_compiled
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_written:
            return
        if self._may_update_itself:
            self._may_update_itself, self.steps = False, []
        if self._steps_of.get(id(optimizer), 0) < MARKED_STEPS:
            parameters = _parameters(optimizer)
            if not self.steps:
                self._mark_modules()
            self._mark("parameters", parameters)
            self._mark("gradients", [tensor.grad for tensor in parameters if tensor.grad is not None])
        self._enter("optimizer")

    @_not_compiled
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_written:
            return
        self._leave()
        done = self._steps_of[id(optimizer)] = self._steps_of.get(id(optimizer), 0) + 1
        if done <= MARKED_STEPS:
            self._mark("optimizer state", [it for state in optimizer.state.values() for it in _values(state)])
        self._steps_of_parameter.update((id(it), done) for it in _parameters(optimizer))
        if done > len(self.steps):  # several optimizers may take a step each
            self.steps.append(_now())
            if self._num_steps and done >= self._num_steps:
                self.has_late_optimizer = self._is_one_late(min(FEWEST_STEPS, self._num_steps))
                if not self.has_late_optimizer or done >= PATIENCE * self._num_steps:
                    self._end_of_steps()

    def _around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a backward pass, before and after which it is seen whether the script updates itself.

        Gradients that have changed since the last backward pass, or are gone, were used: that ends an optimizer step.
        """
        within = self._within("backward", backward)

        @_not_compiled
        @functools.wraps(backward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._may_update_itself or self._is_written or self._open:  # one inside another, as of checkpoints
                return within(*args, **kwargs)
            with contextlib.suppress(Exception):  # modules may be of any kind, and none fails for being looked at
                if self._gradients and self._gradients != self._gradients_now():
                    self._after_update()
            try:
                return within(*args, **kwargs)
            finally:
                with contextlib.suppress(Exception):
                    self._after_backward()

        return call

    def _after_backward(self) -> None:
        """Note the gradients, unless torch has an optimizer; modules are looked for until some have gradients."""
        if self._searches_left:
            self._may_update_itself = not self._has_optimizer()
            if not self._may_update_itself:
                return
            self._trained = [weakref.ref(it) for it in self._mark_modules() if getattr(it, "_parameters", None)]
            self._searches_left = 0 if self._with_gradients() else self._searches_left - 1
        if len(self.steps) < MARKED_STEPS and len(self.marks) < MOST_MARKS:
            self._mark("gradients", [tensor.grad for tensor in self._with_gradients()])
        self._gradients = self._gradients_now()

    def _has_optimizer(self) -> bool:
        """Whether an optimizer of torch has parameters, on a card or on the host."""
        return any(map(_parameters, self._objects("optim.Optimizer")))

    def _after_update(self) -> None:
        """Count an optimizer step that was none of torch's optimizers; before the end it is asked for them again."""
        self.steps.append(_now())
        if self._num_steps and len(self.steps) >= PATIENCE * self._num_steps:
            if self._has_optimizer():
                self._may_update_itself, self.steps = False, []
            else:
                self.end("its number of steps")

    def _with_gradients(self) -> list[Any]:
        modules = [module for found in self._trained if (module := found()) is not None]
        own = {id(it): it for module in modules for it in module._parameters.values() if it is not None}
        return [it for it in own.values() if it.is_leaf and it.grad is not None]

    def _gradients_now(self) -> list[tuple[int, int]]:
        """Return what differs once a gradient is another one, or was changed in place."""
        return [(id(it.grad), it.grad._version) for it in self._with_gradients()]

    def _is_one_late(self, fewest_steps: int) -> bool:
        """Whether an optimizer has taken fewer steps, as that of a generator whose critic takes five for each.

        Steps are those of its parameters: an optimizer that wraps another one takes none itself.
        """
        optimizers = self._objects("optim.Optimizer")
        on_cards = ([tensor for tensor in _parameters(it) if tensor.is_cuda] for it in optimizers)
        return any(max(self._steps_of_parameter.get(id(it), 0) for it in own) < fewest_steps for own in on_cards if own)

    def _end_of_steps(self) -> None:
        """End the process; a hook that looks at the next step ends it itself, and the record is without that step."""
        self.ended_by = "its number of steps"
        self.write()
        look, end = getattr(self._torch, NEXT_STEP, None), functools.partial(self.end, self.ended_by)
        if look is not None and self._is_written:
            look(end)
        else:
            end()

    def _mark_modules(self) -> list[Any]:
        """Note the addresses of all parameters and buffers, of frozen modules too, and return the modules."""
        modules = self._objects("nn.Module")
        kinds = [getattr(module, name, None) for module in modules for name in ("_parameters", "_buffers")]
        self._mark("parameters", [it for kind in kinds if kind for it in kind.values() if it is not None])
        return modules

    def _noting_frozen(self, freeze: Callable[[], None]) -> Callable[[], None]:
        """Return gc.freeze, after which gc.get_objects leaves out what there is so far."""

        @functools.wraps(freeze)
        def call() -> None:
            self._frozen = [*map(weakref.ref, self._objects("nn.Module", "optim.Optimizer"))]
            freeze()

        return call

    def _objects(self, *kinds: str) -> list[Any]:
        """Return the objects of some of torch's classes that this process has, each once.

        The classes have names here: torch.compile compiles a function that is given a class of modules.
        """
        classes = tuple(operator.attrgetter(kind)(self._torch) for kind in kinds)
        found = [it for it in gc.get_objects() if issubclass(type(it), classes)]
        found += [it for frozen in self._frozen if issubclass(type(it := frozen()), classes)]
        return [*{id(it): it for it in found}.values()]

    def _mark(self, category: str, tensors: list[Any]) -> None:
        addresses = {address for tensor in tensors for address in _addresses(self._torch, tensor)}
        if addresses:
            self.marks.append({"time_us": _now(), "category": category, "addresses": sorted(addresses)})

    def _within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which notes the time that it takes as that of a phase."""

        @_not_compiled
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                if self._open:
                    self._leave()

        return call

    def _enter(self, phase: str) -> None:
        self._open.append((phase, _now(), _stack()))

    def _leave(self) -> None:
        phase, begin, stack = self._open.pop()
        self.phases.append({"phase": phase, "begin_us": begin, "end_us": _now(), "stack": stack})

    def _remember(self, hook: Any, kind: Any, error: Any, traceback: Any) -> None:
        """Note the error that ends the process."""
        if not issubclass(kind, KeyboardInterrupt):  # with which a launcher may end its processes
            self.ended_by = "an error"
            self.is_out_of_memory = isinstance(error, self._torch.OutOfMemoryError)
        hook(kind, error, traceback)


def watch(torch: Any) -> None:
    """Watch this process, as the environment asks for; `torch` has just been imported."""
    folder = os.environ[FOLDER]
    found = Watch(torch, Path(folder), int(os.environ.get(STEPS, "0")))
    found.begin()
    if TIME_LIMIT in os.environ:
        left = max(0.0, float(os.environ[TIME_LIMIT]) - time.time())
        timer = threading.Timer(left, found.end_in_time)
        timer.daemon = True
        timer.start()


def _has_children() -> bool:
    """Whether processes that this one has started still run, or have ended and not been asked for how."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name first: a reader finds either all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def _now() -> int:
    return time.time_ns() // 1000


def _begin() -> int:
    """Return when this process was started, which is before its slow imports."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return _now() - int(age_seconds * 1e6)


def _stack() -> list[list[Any]]:
    """Return the Python frames of this thread, the innermost first, as [file, line, function]."""
    found: list[list[Any]] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OWN_FOLDER):
            found.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return found


def _parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, which has no groups of them before it is made."""
    return [tensor for group in getattr(optimizer, "param_groups", ()) for tensor in group["params"]]


def _values(state: Any) -> list[Any]:
    """Return the values of an optimizer's state of one parameter, which need not be a dictionary."""
    return [*state.values()] if isinstance(state, dict) else []


def _addresses(torch: Any, tensor: Any) -> Iterator[int]:
    """Yield the addresses of the storages of a tensor on a card, or of those that a tensor subclass wraps."""
    if not isinstance(tensor, torch.Tensor):
        return
    quantized = getattr(tensor, "quant_state", None)  # bitsandbytes keeps its scales beside the weight
    for inner in vars(quantized).values() if quantized is not None else ():
        yield from _addresses(torch, inner)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _addresses(torch, getattr(tensor, name))
    elif tensor.is_cuda:
        with contextlib.suppress(RuntimeError):  # a tensor without a storage
            yield tensor.untyped_storage().data_ptr()


def _snapshot(torch: Any) -> dict[str, Any]:
    """Return torch's memory snapshot, which imports torch's compiler for the lines of its code, if there may be any."""
    if "torch._inductor" in sys.modules:
        return dict(torch.cuda.memory._snapshot())
    torch._inductor = None
    try:
        return dict(torch.cuda.memory._snapshot())
    finally:
        del torch._inductor


def _allocator_options(snapshot: dict[str, Any]) -> str:
    """Return the options that torch's allocator has; those of the environment where a snapshot does not name them."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return str(snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", given))


def _workspace_bytes(torch: Any) -> list[int]:
    """Return the sizes of the workspaces that torch allocates for cuBLAS and cuBLASLt."""
    found: list[int] = []
    for name in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        with contextlib.suppress(Exception):
            found.append(int(getattr(torch._C, name)()))
    return found


def _own_code() -> list[str]:
    """Return the folders whose code is not the user's: of Python, installed packages, and what torch.compile wrote."""
    folders: set[str] = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    compiled = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return sorted({*folders, *site.getsitepackages(), *([] if compiled is None else [compiled.cache_dir()])})


if __name__ == "simulated_card_hook":
    watch(sys.modules["torch"])
