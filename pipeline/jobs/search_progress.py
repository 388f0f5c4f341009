"""The progress of a search: the fastest configuration so far, its bound, the runs that go on, and where time goes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text

from pipeline.base.results import Result, StepRecord
from pipeline.base.units import MIB
from pipeline.jobs.printing import say
from pipeline.runtime.observer import Run
from pipeline.searching.certificate import at_most
from pipeline.searching.loop import SearchObserver
from pipeline.searching.trials import Proposal, Trial, best_speed, best_trial, label, speed_text, trials_in, unit_of
from pipeline.training.metrics import Summary

REFRESHES_PER_SECOND = 4
"""Of the terminal: each refresh takes time from a training that uses every core."""
PREDICTING, TRIALS, VERIFICATION, OVERHEAD = "predicting", "trials", "verification", "overhead"


class SearchClock:
    """Divides time by what runs: trials, else a verification, else predictions, else the session itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since, self._lock = now, now(), threading.Lock()
        self._running = dict.fromkeys((TRIALS, VERIFICATION, PREDICTING), 0)
        self._seconds = dict.fromkeys((PREDICTING, TRIALS, VERIFICATION, OVERHEAD), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each activity until now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time of the body to an activity."""
        self.begin(activity)
        try:
            yield
        finally:
            self.end(activity)

    def begin(self, activity: str) -> None:
        """Start one more run of an activity, of which several may run at once."""
        with self._lock:
            self._count()
            self._running[activity] += 1

    def end(self, activity: str) -> None:
        """End one of them."""
        with self._lock:
            self._count()
            self._running[activity] -= 1

    def _count(self) -> None:
        """Add the time since the last change to what ran in it."""
        activity = next((name for name, number in self._running.items() if number), OVERHEAD)
        now = self._now()
        self._seconds[activity] += now - self._since
        self._since = now


@dataclass
class _Running:
    """A run that goes on."""

    run: Run
    last: StepRecord | None = None

    @property
    def activity(self) -> str:
        """What the clock counts it as."""
        return VERIFICATION if "verification" in self.run.labels else TRIALS

    def __str__(self) -> str:
        """Return its optimizer step and its name."""
        if self.last is None:
            return f"starting {self.run.name}"
        num_steps = self.run.runnable.num_steps
        at_most = "at most " if self.activity == TRIALS else ""
        return f"step {self.last.step + 1} of {at_most}{num_steps}, loss {self.last.loss:.4f}: {self.run.name}"


class TrialLines(SearchObserver):
    """Prints a line for each trial that has ended; `lost` is called with the number of one whose worker died."""

    def __init__(self, console: Console, lost: Callable[[int], None]) -> None:
        self._console, self._lost = console, lost

    def trial(self, name: str, trial: Trial) -> None:
        """Print a trial that has ended."""
        self._print(f"{name}: {trial.summary}")

    def lost(self, number: int, is_measured_again: bool) -> None:
        """Print what follows for its configuration, and pass the number on."""
        what = "it is measured again" if is_measured_again else "its configuration counts as crashed"
        self._print(f"trial {number + 1}: its worker died; {what}")
        self._lost(number)

    def _print(self, line: str) -> None:
        say(self._console, line, "dim")


class SearchProgress(TrialLines):
    """Shows a search in the terminal, or as plain lines where there is none; a context manager.

    The events of one run come from one thread; several threads may run trials at the same time. `between_runs` is
    called before each trial and after each run of the verification.
    """

    def __init__(
        self,
        console: Console,
        num_trials: int,
        clock: SearchClock,
        between_runs: Callable[[], None],
        lost: Callable[[int], None],
    ) -> None:
        super().__init__(console, lost)
        self._clock, self._between_runs = clock, between_runs
        self._running: dict[int, _Running] = {}
        """By the thread that receives the events of the run."""
        self._best: Trial | None = None
        self._speed = 0.0
        self._bound: float | None = None
        self._state, self._last_line = "starting", ""
        self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("", total=num_trials)
        self._live = Live(
            console=console, get_renderable=self._shown, refresh_per_second=REFRESHES_PER_SECOND, transient=True
        )

    def __enter__(self) -> "SearchProgress":
        """Begin to show it, where there is a terminal."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it from the terminal."""
        if self._console.is_terminal:
            self._live.stop()

    def runs(self, runs: Sequence[Trial]) -> None:
        """Show how many trials have ended, and the fastest configuration that fits."""
        self._best, self._state = best_trial(runs), "choosing the next configuration"
        self._speed = best_speed(runs) or 0.0
        self._bar.update(self._task, completed=len(trials_in(runs)))
        self._between_runs()

    def proposed(self, proposal: Proposal) -> None:
        """Show the bound on the fastest configuration so far."""
        self._bound = proposal.bound
        line = f"so far: {self._speed_text}, {self._bound_text}"
        if not self._console.is_terminal and self._best is not None and line != self._last_line:
            self._print(line)
            self._last_line = line

    def waiting(self) -> None:
        """Show that other workers measure what is left."""
        self._state = "waiting for the trials of other workers"

    def started(self, run: Run) -> None:
        """Show a run that starts."""
        running = self._running[threading.get_ident()] = _Running(run)
        self._clock.begin(running.activity)

    def step(self, record: StepRecord) -> None:
        """Show an optimizer step."""
        self._running[threading.get_ident()].last = record

    def finished(self, result: Result, summary: Summary) -> None:
        """Show no more of a run."""
        self._clock.end(self._running.pop(threading.get_ident()).activity)
        self._state = "storing the result"

    def verified(self, name: str, result: Result) -> None:
        """Print a run of the verification that has ended."""
        self._print(f"{name}: {result.outcome} in {result.seconds_total:.1f} s")
        self._between_runs()

    @property
    def _so_far(self) -> str:
        """The fastest configuration so far and its bound, as text."""
        if self._best is None:
            return "nothing that was measured fits yet"
        peak_mib = (self._best.peak_bytes or 0) / MIB
        name = label(self._best.choice)
        return f"{self._speed_text}, {self._bound_text}, {peak_mib:,.1f} MiB: {name}"

    @property
    def _speed_text(self) -> str:
        """The speed of the fastest configuration so far, by all of its runs, as text."""
        return speed_text(self._speed, unit_of([] if self._best is None else [self._best]))

    @property
    def _bound_text(self) -> str:
        """The bound of its speed, as text."""
        return "no bound" if self._bound is None else at_most(self._bound)

    def _shown(self) -> RenderableType:
        """Return what the terminal shows now, each part in one line."""
        running = [str(one) for one in list(self._running.values())] or [self._state]
        lines = [Text(f"so far: {self._so_far}", style="bold"), *map(Text, running)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines, self._bar)
