"""The entry points that compare variants, and `main`: what does each variant cost, and what does it save?"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from pipeline.base.machines import this_machine
from pipeline.base.progress import Advance, progress
from pipeline.base.results import Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.config.variants import EntryPoint, Variant
from pipeline.jobs.live_page import LivePage
from pipeline.jobs.machines import agree_on_folder, check_machines, follow
from pipeline.jobs.notes import corpus_notes, document_lengths, predicted_truncations, published_type_note
from pipeline.jobs.printing import say, say_notes
from pipeline.report.sections import check_sections
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.rank import Work
from pipeline.runtime.run import Summarize, run
from pipeline.runtime.run_folder import folder_name
from pipeline.runtime.shape_check import check_shapes
from pipeline.searching.trial_length import PRECISION_PERCENT, TrialLength
from pipeline.tracking.job import Job, open_job
from pipeline.training.loop import Stop, never_stop, train
from pipeline.training.metrics import Row, Summary, against_baseline, common_settings
from pipeline.training.saving import Saving, check_saved
from pipeline.training.time_differences import with_times
from pipeline.training.timing import SLOWED, counting_timings, timing_of
from pipeline.training.typical_step import evaluation_note, lengths_note

if TYPE_CHECKING:
    from pipeline.report.comparison import ComparisonFindings


def measure(plan: EntryPoint, console: Console) -> int:
    """Run every variant of `plan`, print and log the report; return the exit code: 1 if none completed.

    On another than the first of several machines, which has the report, only train.
    """
    if this_machine().number:
        return follow(plan, console)
    return 0 if run_comparison(plan, console).any_completed else 1


def run_comparison(plan: EntryPoint, console: Console) -> "ComparisonFindings":
    """Run every variant of `plan`, print and log the report, and return the findings."""
    check_sections(plan.sections)
    experiments = [variant.experiment for variant in plan.variants]
    check_shapes(experiments)
    first = experiments[0]
    num_taken = check_saved(plan.resume, first) if plan.resume else 0
    check_machines(first)
    about = environment(first.device)
    notes = (
        *dict.fromkeys(one.description.note for one in experiments),
        *corpus_notes(first),
        lengths_note(first),
        evaluation_note(first),
    )
    say_notes(console, filter(None, notes))
    with open_job(plan.entry, first.settings.model, first.settings.output, about) as job:
        job.params(common_settings([one.params() for one in experiments]))
        job.tags({"device": str(first.device)})
        agree_on_folder(job.folder, plan.save_every is not None)
        measuring = _Measuring(plan, job, about, console)
        if plan.resume:
            text = f"going on from {plan.resume}, after {num_taken} of {first.num_steps} optimizer steps"
            say(console, text, "dim")
        say(console, measuring.amount, "dim")
        whole = None
        try:
            measuring.run_all()
            measuring.run_again()
            whole = measuring.findings()
            with progress("predicting the memory of other lengths"):
                whole = _with_predictions(plan, whole)
        finally:  # whoever has pressed Ctrl-C does not wait for runs or predictions
            if measuring.rows:
                measuring.send_times()
                findings = whole or replace(measuring.findings(), interrupted=measuring.progress)
                with progress("making the report"):
                    from pipeline.jobs.publish import publish

                publish(findings, job, console)
        job.succeeded = findings.any_completed
    return findings


class StepProgress(Observer):
    """Reports each optimizer step of a run, with its loss, as progress."""

    def __init__(self, advance: Advance, num_steps: int) -> None:
        self._advance, self._num_steps = advance, num_steps
        self._num_shown = 0

    def step(self, record: StepRecord) -> None:
        """Report an optimizer step."""
        num_taken = record.step + 1  # more than one if it was resumed
        self._advance(num_taken - self._num_shown, f"step {num_taken} of {self._num_steps}, loss {record.loss:.4f}")
        self._num_shown = num_taken


class _Measuring:
    """The runs of a job: each variant of each comparison, then all of them again for their times."""

    def __init__(self, plan: EntryPoint, job: Job, about: Mapping[str, str], console: Console) -> None:
        self._plan, self._job, self._about, self._console = plan, job, about, console
        self._num_variants = len(plan.variants)
        self._page = LivePage(job.folder, console)
        self._runs: list[tuple[Run, Observer] | None] = []
        """The first run of each row, and the observer that mirrors it in MLflow; None where it was skipped."""
        self._folders = {"plots"}
        """Names of the folders in that of the job."""
        self.rows: list[Row] = []
        """What was measured, with the metrics of first runs."""

    @property
    def amount(self) -> str:
        """What is going to be run."""
        num_steps = {variant.experiment.num_steps for variant in self._plan.variants}
        steps = " or ".join(map(str, sorted(num_steps)))
        if self._num_variants == 1:
            return f"training {steps} optimizer steps"
        return f"training {self._num_variants} variants, {steps} optimizer steps each"

    @property
    def progress(self) -> str:
        """How many of the variants have run and, once all have, how many of those to repeat have run again."""
        text, compared = f"{len(self.rows)} of {self._num_variants} variants", self._compared
        if len(self.rows) < self._num_variants or not compared or not self._plan.repeats:
            return text
        return f"{text}, {sum(not self._lacks_runs(number) for number in compared)} of {len(compared)} run again"

    def run_all(self) -> None:
        """Run every variant."""
        baselines: dict[str, Row] = {}
        for variant in self._plan.variants:
            row = self._run(variant, baselines.get(variant.comparison))
            if row.is_baseline:
                baselines[row.comparison] = row
            self.rows.append(row)
            if row.result is not None and len(self.rows) < self._num_variants:
                self._page.write(self.findings, self.progress)

    def run_again(self) -> None:
        """Run what is compared again for its time, in the same order, so that other load meets few runs of a variant.

        A variant with a run that was slowed is run once more. All this takes at most as long as the first runs.
        """
        compared, repeats = self._compared, self._plan.repeats
        if not compared or not repeats:
            return
        seconds_left = sum(row.result.seconds_total for row in self.rows if row.result is not None)
        text = f"running {len(compared)} variants again, to see the noise of their times: at most {seconds_left:.0f} s"
        say(self._console, text, "dim")
        for _ in range(repeats + 1):
            for number in compared:
                if self._lacks_runs(number) and seconds_left > 0:
                    seconds_left -= self._run_again(number)

    def findings(self) -> "ComparisonFindings":
        """Return the findings so far; pandas and Altair are imported here, between and after the runs."""
        from pipeline.report.comparison import ComparisonFindings

        return ComparisonFindings(
            entry=self._plan.entry,
            question=self._plan.question,
            rows=with_times(self.rows),
            environment=self._about,
            sections=self._plan.sections,
        )

    def send_times(self) -> None:
        """Send to MLflow the times by all runs, and their differences from the baselines."""
        for before, after, this in zip(self.rows, with_times(self.rows), self._runs, strict=False):
            changed = {name: value for name, value in after.metrics.items() if before.metrics.get(name) != value}
            if this is not None and changed:
                this[1].amended(changed)

    def _run(self, variant: Variant, baseline: Row | None) -> Row:
        make_row = partial(
            Row,
            comparison=variant.comparison,
            name=variant.name,
            is_baseline=variant.is_baseline,
            params=variant.experiment.params(),
        )
        is_only_comparison = len({one.comparison for one in self._plan.variants}) == 1
        name = variant.name if is_only_comparison else f"{variant.comparison}/{variant.name}"
        label = f"{name} ({len(self.rows) + 1} of {self._num_variants})"
        if variant.skipped:
            self._console.print(f"{label}: skipped", style="dim", highlight=False)
            self._runs.append(None)
            return make_row(result=None, skipped=variant.skipped, metrics={})
        this = Run(
            name=name,
            runnable=variant.experiment,
            folder=self._job.folder / self._new_folder(name),
            labels={
                "comparison": variant.comparison,
                "variant": variant.name,
                "baseline": str(variant.is_baseline).lower(),
            },
        )
        observer = self._job.children.observer()
        saving = Saving(this.folder / "saved", self._plan.save_every, self._plan.resume)
        try:
            work = partial(train, saving=saving)
            summarized = partial(summarize, variant.experiment, baseline)
            result, summary = self._measure(this, label, [observer], summarized, work=work)
        finally:
            if saved := saving.newest:
                say(self._console, f"saved: fitproof main --resume {saved} goes on from there", "dim")
        self._runs.append((this, observer))
        timing = timing_of(result.steps, variant.experiment.settings.timing_warmup_steps)
        return make_row(
            result=result,
            skipped=None,
            metrics=summary.metrics,
            timings=() if timing is None else (timing,),
            prediction=summary.prediction,
        )

    def _new_folder(self, name: str) -> str:
        """Return the name of a folder of the variant's own: those of names that differ in signs alone are numbered."""
        base = folder_name(name).strip(".") or "run"
        candidates = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
        folder = next(each for each in candidates if each not in self._folders)
        self._folders.add(folder)
        return folder

    def _run_again(self, number: int) -> float:
        """Run the variant of a row again until its median step time is known, and return the seconds that it took."""
        row, first = self.rows[number], self._runs[number]
        assert first is not None
        this, count = first[0], len(row.timings)
        assert isinstance(this.runnable, Experiment)
        settings = this.runnable.settings
        only_time = settings.model_copy(update={"eval_steps": 0, "gradient_underflow": False})
        warmup_steps = settings.timing_warmup_steps
        slowed = math.exp(row.timings[0].log_seconds + SLOWED)
        again = replace(
            this,
            name=f"{this.name}, run {count + 1}",
            runnable=Experiment(only_time),
            folder=this.folder.with_name(f"{this.folder.name}-run-{count + 1}"),
        )
        stop = TrialLength(warmup_steps, PRECISION_PERCENT, slowed)
        result, _ = self._measure(again, again.name, [], None, stop)
        timing = timing_of(result.steps, warmup_steps) if result.outcome.completed else None
        if timing is not None:
            self.rows[number] = replace(row, timings=(*row.timings, timing))
        else:
            note = f"{result.outcome} when it was run again{f', {result.detail}' if result.detail else ''}"
            self.rows[number] = replace(row, note=note)
        return result.seconds_total

    def _measure(
        self,
        this: Run,
        label: str,
        observers: Sequence[Observer],
        summarize: Summarize | None,
        stop: Stop = never_stop,
        work: Work | None = None,
    ) -> tuple[Result, Summary]:
        """Run under a progress line of the terminal."""
        num_steps = this.runnable.num_steps
        with progress(label, num_steps) as advance:
            shown = StepProgress(advance, num_steps)
            result, summary = run(this, [*observers, shown], stop=stop, work=work, summarize=summarize)
        say(self._console, f"{label}: {result_text(result, summary)}", "dim")
        return result, summary

    @property
    def _compared(self) -> list[int]:
        """The numbers of the rows whose times are compared: those with a baseline beside them, and that baseline."""
        timed = [(number, row) for number, row in enumerate(self.rows) if row.completed and row.timings]
        count = Counter(row.comparison for _, row in timed)
        with_baseline = {row.comparison for _, row in timed if row.is_baseline}
        return [number for number, row in timed if row.comparison in with_baseline and count[row.comparison] > 1]

    def _lacks_runs(self, number: int) -> bool:
        """Return whether a row that is compared is to be run again: too few of its runs count, and none has failed."""
        row = self.rows[number]
        return len(counting_timings(row.timings)) <= self._plan.repeats and not row.note


def result_text(result: Result, summary: Summary) -> str:
    """Return how a run ended: its outcome, memory, speed and seconds."""
    metrics = summary.metrics
    memory = [f"{metrics['peak_allocated_mib']:,.1f} MiB"] if "peak_allocated_mib" in metrics else []
    speed = [f"{metrics['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in metrics else []
    return f"{', '.join((result.outcome.value, *memory, *speed))} in {result.seconds_total:.1f} s"


def summarize(experiment: Experiment, baseline: Row | None, result: Result) -> Summary:
    """Return the summary of a run, with the metrics against the baseline if there is one, but for its times."""
    from pipeline.prediction.summary import summary  # imported after the training has started

    own = summary(experiment, result)
    if baseline is None or baseline.result is None:
        return own
    compared = against_baseline(result, own.metrics, baseline.result, baseline.metrics)
    return replace(own, metrics={**own.metrics, **compared})


def _with_predictions(plan: EntryPoint, findings: "ComparisonFindings") -> "ComparisonFindings":
    """Return the findings with what other lengths, and the type of the checkpoint, would need.

    The note on the type is that of the first full fine-tuning, the lengths are those of the first run.
    """
    experiments = {(one.comparison, one.name): one.experiment for one in plan.variants}
    rows = list(findings.rows)
    for place, row in enumerate(rows):
        if note := published_type_note(experiments[row.comparison, row.name]):
            rows[place] = replace(row, note="; ".join(filter(None, (row.note, note))))
            break
    first = experiments[rows[0].comparison, rows[0].name]
    truncations, lengths = predicted_truncations(first), document_lengths(first)
    return replace(findings, rows=tuple(rows), truncations=truncations, lengths=lengths)
