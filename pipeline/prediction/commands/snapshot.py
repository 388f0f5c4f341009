"""The memory history of a process on a simulated card as a timeline: each storage by source line, phase and purpose."""

import linecache
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.memory.timeline import Span, Storage, Timeline
from pipeline.simulation import record as record_module
from pipeline.simulation.record import Mark, PhaseTime, Record, StackFrame

BEFORE_FIRST_FORWARD = "load"
MODULE_CALL = "_call_impl"
"""The function of torch.nn.Module through which every forward pass goes."""
SIMULATION = str(Path(record_module.__file__).parent)
"""The folder of the code that runs in every simulated process, whose frames are on its stacks."""
VALUES = f"{SIMULATION}/hook/values.py"
"""The file of the dispatch mode that computes values, which is inside of each operator's call."""
AROUND_MODES = ("/torch/_dynamo/eval_frame.py", "/torch/_compile.py")
"""Files of torch's functions through which a dispatch mode is called."""
SENT = "<dynamic-code>"
"""The file name that cloudpickle gives to code that it sends, such as that of a notebook."""
INSTALLED = re.compile(r"/(site|dist)-packages/")
"""Folders of packages of which Python need not know: those of another environment."""
COMPILED = re.compile(r"/[a-z2-7]{2}/(c[a-z2-7]{7})[a-z2-7]{44}\.py$")
"""Modules that torch.compile writes into its cache, named by what is in them."""
LOSS = re.compile(r"logits|lm_head|cross_entropy|log_softmax|nll_loss|loss")
"""What a line of code, or the name of its function, mentions if it makes logits or a loss."""
BY_FUNCTION = (
    ("generation", re.compile(r"^generate$")),
    ("saving", re.compile(r"^(save|save_file|save_pretrained|save_model|_save_checkpoint)$")),
    (
        "evaluation",
        re.compile(r"^_?(eval|evaluate|evaluation|evaluation_loop|estimate_loss|valid\w*|prediction_step)$"),
    ),
)
"""Phases by the name of a function on the stack."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What torch's allocator gave out on a card."""

    timeline: Timeline
    """A storage's module is the innermost source line outside torch's code, its operator the innermost function."""
    user_lines: tuple[str | None, ...]
    """For each storage the innermost line of the user's own code, as file:line; None if only libraries' is known."""
    code: Mapping[str, str]
    """The text of each source line, by file:line."""

    @property
    def user_line_of_peak(self) -> str | None:
        """The line of the user's own code whose allocation reached the peak."""
        return self.user_lines[int(self.timeline.events_E[self.timeline.peak_event])]


def history_of(record: Record, device: int) -> History:
    """Return the storages that torch's allocator gave out on a card, each with its line, phase and purpose.

    Times mean nothing on a simulated card: that of an event is its number.
    """
    trace = [event for event in record.trace(device) if event["action"] in ("alloc", "free_requested")]
    phases, code = _Phases(record), SourceLines(record.own_code)
    storages: list[Storage] = []
    events: list[int] = []
    spans: list[Span] = []
    user_lines: list[str | None] = []
    alive: dict[int, int] = {}
    marks = sorted(record.marks, key=lambda mark: mark.time_us)
    for event in trace:
        now, address = event["time_us"], event["addr"]
        while marks and marks[0].time_us < now:
            _apply(marks.pop(0), alive, storages)
        step, phase, stack = phases.at(now, event["frames"])
        if event["action"] == "free_requested":
            number = alive.pop(address, None)
            if number is None:  # allocated before the history begins
                continue
            events.append(-1 - number)
        else:
            alive[address] = len(storages)
            events.append(len(storages))
            frames = [(frame["filename"], frame["line"], frame["name"]) for frame in event["frames"]]
            own = _without_simulation(frames)
            storages.append(_storage(event["size"], phase, own or stack, code))
            user_lines.append(code.user_line(own) or code.user_line(stack))
            if not spans or (spans[-1].step, spans[-1].phase) != (step, phase):
                spans.append(Span(step=step, phase=phase, begin=len(events) - 1))
    for mark in marks:
        _apply(mark, alive, storages)
    timeline = Timeline(
        storages=storages,
        events_E=np.array(events, np.int64),
        spans=tuple(spans),
        seconds=range(len(events)),
    )
    _find_activations(timeline)
    _find_workspaces(timeline, record.workspace_bytes)
    if record.updates_itself:
        _find_states(timeline)
    return History(timeline=timeline, user_lines=tuple(user_lines), code=code.texts)


def _without_simulation(frames: Sequence[StackFrame]) -> list[StackFrame]:
    """Return the frames of a stack that it would have without the simulation, the innermost first.

    What an operator calls of torch's own lies inside the dispatch mode, as does the Python code of a user's operator.
    """
    while any(frame[0] == VALUES for frame in frames):
        outside = list(dropwhile(lambda frame: frame[0] != VALUES and "/torch/" in frame[0], frames))
        if outside[0][0] != VALUES:
            break
        frames = list(dropwhile(lambda frame: frame[0] == VALUES or frame[0].endswith(AROUND_MODES), outside))
    return [frame for frame in frames if not frame[0].startswith(SIMULATION)]


def _apply(mark: Mark, alive: Mapping[int, int], storages: Sequence[Storage]) -> None:
    """Set the category of the storages at these addresses; what was parameters before stays so."""
    for address in mark.addresses:
        if address in alive:
            one = storages[alive[address]]
            if one.category not in ("parameters", "gradients", "optimizer state"):
                one.category = mark.category


def _storage(num_bytes: int, phase: str, stack: Sequence[StackFrame], code: "SourceLines") -> Storage:
    is_loss = phase in ("forward", "evaluation") and any(map(code.mentions_loss, code.innermost(stack)))
    return Storage(
        num_bytes=num_bytes,
        shape=(),
        dtype="uint8",
        operator=stack[0][2] if stack and phase != "backward" else phase,
        module=code.line(stack) or "unknown",
        category="logits and loss" if is_loss else "temporary",
    )


def _find_activations(timeline: Timeline) -> None:
    """Call activations what a forward pass made and the backward pass that follows it still finds."""
    begins = [span.begin for span in timeline.spans]
    for one, begin, end in zip(timeline.storages, timeline.allocated_at_N, timeline.freed_at_N, strict=True):
        span = bisect_right(begins, begin) - 1
        if one.category != "temporary" or timeline.spans[span].phase != "forward":
            continue
        following = next((later for later in timeline.spans[span + 1 :] if later.phase != "forward"), None)
        if following is not None and following.phase == "backward" and end > following.begin:
            one.category = "activations"


def _find_workspaces(timeline: Timeline, sizes: Sequence[int]) -> None:
    """Call workspaces what has the size of one and is never freed."""
    for number in _never_freed(timeline):
        if timeline.storages[number].num_bytes in sizes:
            timeline.storages[number].category = "workspaces"


def _find_states(timeline: Timeline) -> None:
    """Call optimizer state what a script that updates itself has made after its first backward pass and never frees.

    What it has made since the last but one may be of its last step alone, as its batch.
    """
    backward = [span.begin for span in timeline.spans if span.phase == "backward"]
    for number in _never_freed(timeline):
        span = timeline.span_of(timeline.allocated_at_N[number])
        if span.phase != "backward" and len(backward) > 1 and backward[0] < span.begin < backward[-2]:
            timeline.storages[number].category = "optimizer state"


def _never_freed(timeline: Timeline) -> list[int]:
    """Return the numbers of the storages that are never freed and whose purpose is not known otherwise."""
    alive: list[int] = timeline.alive(len(timeline.events_E) - 1).tolist()
    return [number for number in alive if timeline.storages[number].category in ("temporary", "activations")]


class _Phases:
    """The phases of a process, asked for in the order of time."""

    def __init__(self, record: Record) -> None:
        self._coming = sorted(record.phases, key=lambda phase: (phase.begin_us, -phase.end_us), reverse=True)
        self._running: list[PhaseTime] = []
        self._steps = record.steps
        self._has_begun = False

    def at(self, time_us: int, frames: Sequence[Mapping[str, Any]]) -> tuple[int, str, tuple[StackFrame, ...]]:
        """Return the optimizer step, the innermost phase, and where the script started it, of an event."""
        while self._coming and self._coming[-1].begin_us <= time_us:
            self._running.append(self._coming.pop())
        self._running = [phase for phase in self._running if phase.end_us >= time_us]
        step, names = bisect_left(self._steps, time_us), [frame["name"] for frame in frames]
        self._has_begun = self._has_begun or MODULE_CALL in names or bool(self._running)
        if self._running:
            return step, self._running[-1].phase, self._running[-1].stack
        named = next((phase for phase, pattern in BY_FUNCTION if any(map(pattern.match, names))), None)
        return step, named or ("forward" if self._has_begun else BEFORE_FIRST_FORWARD), ()


class SourceLines:
    """Tells the user's own lines of code from those of libraries."""

    def __init__(self, own_code: Sequence[str]) -> None:
        linecache.checkcache()  # files may have changed since an earlier simulation of this process
        self._libraries = own_code
        self._mentions_loss: dict[StackFrame, bool] = {}
        self.texts: dict[str, str] = {}
        """The text of each line that line() has returned."""

    def user_line(self, stack: Sequence[StackFrame]) -> str | None:
        """Return the innermost line of the user's code as file:line; None if there is none."""
        return next((_written(frame) for frame in stack if self.is_users(frame)), None)

    def line(self, stack: Sequence[StackFrame]) -> str | None:
        """Return the innermost line outside torch's code as file:line; None if there is none."""
        frame = next((frame for frame in stack if not self.is_torchs(frame)), None)
        if frame is None:
            return None
        line = _written(frame)
        if line not in self.texts:
            self.texts[line] = linecache.getline(frame[0], frame[1]).strip()
        return line

    def is_users(self, frame: StackFrame) -> bool:
        """Whether a frame is of the user's own code."""
        is_elsewhere = frame[0].startswith(("<", *self._libraries)) or INSTALLED.search(frame[0])
        return frame[0] == SENT or not is_elsewhere

    def innermost(self, stack: Sequence[StackFrame]) -> Sequence[StackFrame]:
        """Return the frames of torch's code at the inner end of a stack, and the first that is not torch's."""
        outside = next((number for number, frame in enumerate(stack) if not self.is_torchs(frame)), len(stack))
        return stack[: outside + 1]

    def is_torchs(self, frame: StackFrame) -> bool:
        """Whether a frame is of torch's own code."""
        return "/torch/" in frame[0] and not self.is_users(frame)

    def mentions_loss(self, frame: StackFrame) -> bool:
        """Whether a line or its function mentions logits or a loss."""
        if frame not in self._mentions_loss:
            found = LOSS.search(f"{frame[2]} {linecache.getline(frame[0], frame[1])}")
            self._mentions_loss[frame] = found is not None
        return self._mentions_loss[frame]


def _written(frame: StackFrame) -> str:
    """Return a frame as file:line, the file below the current folder, or with the folder that holds it."""
    compiled = COMPILED.search(frame[0])
    if compiled:
        return f"torch.compile's {compiled[1]}:{frame[1]}"
    path = Path(frame[0])
    below = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
    return f"{below}:{frame[1]}"
