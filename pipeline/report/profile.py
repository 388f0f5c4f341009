"""The report of a profile: memory by phase, category, module and tensor; time by phase and operator."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from pipeline.base.units import MIB
from pipeline.memory.breakdown import Breakdown, StepMemory
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.breakdown import categories_of, categories_panel, in_mib, shares_table, tensors_table
from pipeline.report.comparison import notes, overview_table
from pipeline.report.page import Report, Section
from pipeline.report.plot import COLOURS, WARNING, Panel, Plot, bars_of, colour, short
from pipeline.report.table import Table
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, OperatorCost, TimeProfile

NUM_MODULES = 12
NUM_OPERATORS = 15
SHARE_WORTH_SAYING = 0.01
"""Share of the tensors' peak from which the report says that the measured peak has more."""
PHASE_COLOURS = {"data": "#BBBBBB", "forward": colour(4), "backward": colour(1), "optimizer": colour(3)}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a measurement says of memory or time, and the settings to change."""

    text: str
    evidence: str
    """The measurement that supports it."""
    setting: str | None
    """The settings to change, with their values, as in `name=value, name=value`; None if none helps."""


@dataclass(frozen=True, kw_only=True)
class ProfilingFindings:
    """The findings of a profile, from which its report is made."""

    entry: str
    question: str
    row: Row
    memory: MemoryProfile | None
    """None if the run failed before its first phase ended."""
    time: TimeProfile | None
    """None if the run failed before it was timed."""
    advice: tuple[Advice, ...]
    environment: Mapping[str, str]


def profiling_report(findings: ProfilingFindings) -> Report:
    """Return the report; what a failed run did not measure is left out."""
    sections = [
        Section(
            title="cost",
            tables=(overview_table("cost", [findings.row]),),
            notes=notes([findings.row]),
            plots=_phase_plot(findings.row),
        ),
        *([_advice_section(findings.advice)] if findings.advice else []),
        *([_memory_section(findings.memory.peak, findings.memory.course)] if findings.memory else []),
        *([_time_section(findings.time)] if findings.time else []),
    ]
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=_answer(findings),
        sections=tuple(sections),
        environment=findings.environment,
        settings=findings.row.params,
    )


def _answer(findings: ProfilingFindings) -> str:
    sentences = []
    if findings.row.result is not None and not findings.row.result.outcome.completed:
        sentences.append(f"The run did not complete: {findings.row.result.outcome}.")
    if findings.memory is not None:
        peak = findings.memory.peak
        parts = ", ".join(f"{name} {100 * size / peak.peak_bytes:.0f} %" for name, size in peak.category_bytes.items())
        sentences.append(
            f"Memory peaks at {peak.peak_bytes / MIB:,.1f} MiB in the {peak.phase} phase of optimizer step "
            f"{peak.step + 1}, at {peak.operator} in {peak.module or 'the model as a whole'}: {parts}."
        )
        sentences += _beside_tensors(findings.row, peak.peak_bytes / MIB)
    if findings.time is not None:
        phases = findings.time.phase_seconds
        greatest = max(phases, key=phases.__getitem__)
        percent = 100 * phases[greatest] / findings.time.seconds_per_step
        sentences.append(f"Most of the time goes into {greatest} ({percent:.0f} %).")
    sentences += [f"{one.text} Try {one.setting}." if one.setting else one.text for one in findings.advice[:1]]
    return " ".join(sentences)


def _beside_tensors(row: Row, tensors_mib: float) -> list[str]:
    """Return a sentence on what the allocator measured beside tensors, if that is a share worth saying."""
    measured_mib = row.metrics.get("peak_allocated_mib")
    is_complete = row.result is not None and row.result.outcome.completed
    if not is_complete or measured_mib is None or measured_mib < (1 + SHARE_WORTH_SAYING) * tensors_mib:
        return []
    return [
        f"The measured peak of {measured_mib:,.1f} MiB has {measured_mib - tensors_mib:,.1f} MiB more, which operators "
        "hold as workspaces and not as tensors."
    ]


def _advice_section(advice: Sequence[Advice]) -> Section:
    lines = [{"finding": one.text, "evidence": one.evidence, "setting": one.setting or "-"} for one in advice]
    return Section(title="advice", tables=(Table(name="advice", title="advice", frame=pd.DataFrame(lines)),))


def _phase_plot(row: Row) -> tuple[Plot, ...]:
    phases = {
        name.removeprefix("allocated_after_").removesuffix("_mib").replace("_", " "): value
        for name, value in row.metrics.items()
        if name.startswith("allocated_after_")
    }
    if not phases:
        return ()
    panel = partial(_phase_bars, phases=phases, peak_mib=row.metrics.get("peak_allocated_mib"))
    return (Plot(name="phases", title="memory at the end of each phase", panels=(panel,)),)


def _memory_section(peak: Breakdown, course: StepMemory | None) -> Section:
    sizes = Counter[str]()
    for name, size in peak.module_bytes.items():
        sizes[_without_numbers(name)] += size
    modules = dict(sizes.most_common())
    greatest = in_mib(dict(sizes.most_common(NUM_MODULES)))
    by_module = "at the peak, by module (* any layer)"
    panels: list[Panel] = [
        categories_panel(peak),
        partial(bars_of, values=greatest, title=by_module, unit="MiB", shades=COLOURS[:1]),
        *([partial(_course, course=course)] if course is not None else []),
    ]
    return Section(
        title="memory",
        tables=(
            shares_table("categories", "memory at the peak, by category", categories_of(peak)),
            shares_table("modules", f"memory {by_module}", modules),
            tensors_table("tensors", "the largest tensors alive at the peak", peak),
        ),
        plots=(Plot(name="memory", title="memory at the peak", panels=tuple(panels)),),
    )


def _time_section(profile: TimeProfile) -> Section:
    by_time = sorted(profile.operators, key=lambda cost: -cost.seconds)[:NUM_OPERATORS]
    by_memory = sorted(profile.operators, key=lambda cost: -cost.num_bytes)[:NUM_OPERATORS]
    total = sum(cost.seconds for cost in profile.operators) or 1.0
    seconds = partial(_seconds_by_phase, profile=profile)
    idle = profile.device_idle_percent
    return Section(
        title="time",
        tables=(
            _operators_table("operators_by_time", "operators by time, in one optimizer step", by_time, total),
            _operators_table("operators_by_memory", "operators by memory, in one optimizer step", by_memory, total),
        ),
        notes=(
            "Times include the profiler's overhead; open traces/trace.json.gz in ui.perfetto.dev.",
            *([f"The device was idle for {idle:.0f} % of the time."] if idle is not None else []),
        ),
        plots=(Plot(name="time", title="time per optimizer step", panels=(seconds,)),),
    )


def _operators_table(name: str, title: str, costs: Sequence[OperatorCost], total_seconds: float) -> Table:
    lines = [
        {
            "operator": cost.name,
            "calls": cost.calls,
            "ms": 1000 * cost.seconds,
            "%": 100 * cost.seconds / total_seconds,
            "MiB kept": cost.num_bytes / MIB,
        }
        for cost in costs
    ]
    forms = {"calls": "{:,.0f}", "ms": "{:,.3f}", "%": "{:.1f}", "MiB kept": "{:,.2f}"}
    return Table(name=name, title=title, frame=pd.DataFrame(lines), forms=forms)


def _without_numbers(name: str) -> str:
    """Return a module's name with * for the number of its layer, so that identical layers add up."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _phase_bars(axes: Axes, *, phases: Mapping[str, float], peak_mib: float | None) -> None:
    for index, (phase, mib) in enumerate(phases.items()):
        axes.barh(index, mib, color=PHASE_COLOURS.get(phase.split()[0], colour(7)))
        axes.annotate(f" {short(mib)}", (mib, index), va="center", fontsize="small")
    if peak_mib is not None:
        axes.axvline(peak_mib, color=WARNING, linestyle="--", label=f"peak {short(peak_mib)} MiB")
        axes.legend(fontsize="small", loc="lower right")
    axes.set_yticks(range(len(phases)), [f"after {phase}" for phase in phases])
    axes.invert_yaxis()
    axes.set(
        title="memory at the end of each phase", xlabel="MiB", xlim=(0, max([*phases.values(), peak_mib or 0]) * 1.15)
    )
    axes.grid(axis="x", alpha=0.3)


def _course(axes: Axes, *, course: StepMemory) -> None:
    """Draw memory over time as stacked categories, with the phases shaded behind."""
    mib = [[size / MIB for size in course.category_bytes[name]] for name in CATEGORIES]
    milliseconds = [1000 * moment for moment in course.seconds]
    colours = [colour(index) for index in range(len(CATEGORIES))]
    axes.stackplot(milliseconds, mib, labels=CATEGORIES, colors=colours, step="post", alpha=0.85)
    ends = [*(1000 * begin for _, begin in course.phases[1:]), milliseconds[-1]]
    top = axes.get_ylim()[1] * 1.1
    for (phase, begin), end in zip(course.phases, ends, strict=True):
        axes.axvspan(1000 * begin, end, color=PHASE_COLOURS[phase], alpha=0.15, zorder=0)
        if end - 1000 * begin > 0.12 * milliseconds[-1]:
            axes.text((1000 * begin + end) / 2, top * 0.96, phase, ha="center", va="top", fontsize="small")
    axes.set(
        title="during the second optimizer step",
        xlabel="ms (with the recorder's overhead)",
        ylabel="MiB",
        ylim=(0, top),
    )
    totals = [sum(parts) for parts in zip(*mib, strict=True)]
    highest = max(range(len(totals)), key=totals.__getitem__)
    axes.plot(milliseconds[highest], totals[highest], "v", color=WARNING, label=f"peak {short(totals[highest])} MiB")
    axes.margins(x=0)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)


def _seconds_by_phase(axes: Axes, *, profile: TimeProfile) -> None:
    for index, (phase, seconds) in enumerate(profile.phase_seconds.items()):
        percent = 100 * seconds / profile.seconds_per_step
        axes.barh(index, 1000 * seconds, color=PHASE_COLOURS[phase])
        axes.annotate(
            f" {short(1000 * seconds)} ms, {percent:.0f} %", (1000 * seconds, index), va="center", fontsize="small"
        )
    axes.set_yticks(range(len(profile.phase_seconds)), list(profile.phase_seconds))
    axes.invert_yaxis()
    axes.set(title="time in one optimizer step", xlabel="ms", xlim=(0, 1300 * max(profile.phase_seconds.values())))
    axes.grid(axis="x", alpha=0.3)
