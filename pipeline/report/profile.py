"""The report of a profile: memory by phase, category, module and tensor; time by phase and operator."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from pipeline.base.units import MIB
from pipeline.memory.breakdown import Breakdown, StepMemory
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.breakdown import categories_of, categories_panel, shares_table, tensors_table
from pipeline.report.comparison import notes, overview_table
from pipeline.report.page import Report, Section
from pipeline.report.plot import ABOUT, COLOURS, WARNING, Bar, Panel, Plot, bars, colour, data, layered, short
from pipeline.report.table import Table
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, OperatorCost, TimeProfile

NUM_MODULES = 12
NUM_OPERATORS = 15
NUM_MOMENTS = 600
"""Points in time of the memory during a step."""
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
    values = [
        Bar(name=f"after {phase}", value=mib, shade=PHASE_COLOURS.get(phase.split()[0], colour(7)))
        for phase, mib in phases.items()
    ]
    peak_mib = row.metrics.get("peak_allocated_mib")
    title = "memory at the end of each phase"
    panel = bars(title, values, "MiB", marks={} if peak_mib is None else {"peak": peak_mib})
    return (Plot(name="phases", title=title, panels=(panel,)),)


def _memory_section(peak: Breakdown, course: StepMemory | None) -> Section:
    sizes = Counter[str]()
    for name, size in peak.module_bytes.items():
        sizes[_without_numbers(name)] += size
    modules = dict(sizes.most_common())
    greatest = [Bar(name=name, value=size / MIB, shade=COLOURS[0]) for name, size in sizes.most_common(NUM_MODULES)]
    by_module = "at the peak, by module (* any layer)"
    panels: list[Panel] = [
        *([_course(course)] if course is not None else []),
        categories_panel(peak),
        bars(by_module, greatest, "MiB"),
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
        plots=(Plot(name="time", title="time per optimizer step", panels=(_seconds_by_phase(profile),)),),
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


def _course(course: StepMemory) -> Panel:
    """Return memory over time as stacked categories, with the phases shaded behind and the peak marked."""
    last, moments = 1000 * course.seconds[-1], _moments(course)
    highest = max(moments, key=lambda moment: moment["total"])
    ends = [*(1000 * begin for _, begin in course.phases[1:]), last]
    phases = [
        {"start": 1000 * begin, "end": end, "middle": (1000 * begin + end) / 2, "shade": PHASE_COLOURS[phase]}
        | {"phase": phase if end - 1000 * begin > 0.12 * last else ""}
        for (phase, begin), end in zip(course.phases, ends, strict=True)
    ]
    shades = alt.Scale(domain=list(CATEGORIES), range=[colour(index) for index in range(len(CATEGORIES))])
    x = alt.X("ms:Q", title="ms (with the recorder's overhead)", scale=alt.Scale(domain=[0, last], nice=False))
    top = alt.Scale(domain=[0, 1.12 * highest["total"]], nice=False)
    behind = alt.Chart(data(phases))
    over = alt.Chart(data(moments))
    peak = alt.Chart(data([highest])).encode(x="ms:Q", y="total:Q", **ABOUT)
    areas = over.transform_fold(list(CATEGORIES), as_=["category", "MiB"]).transform_calculate(
        order=f"indexof({list(CATEGORIES)}, datum.category)"
    )
    chart = layered(
        behind.mark_rect(opacity=0.18).encode(x="start:Q", x2="end:Q", color=alt.Color("shade:N", scale=None)),
        areas.mark_area(interpolate="step-after", opacity=0.85).encode(
            x=x,
            y=alt.Y("MiB:Q", stack="zero", title="MiB", scale=top),
            color=alt.Color("category:N", scale=shades),
            order="order:Q",
        ),
        behind.mark_text(baseline="top", dy=2).encode(x="middle:Q", y=alt.value(0), text="phase:N"),
        over.mark_rect(opacity=0).encode(x="ms:Q", x2="end:Q", **ABOUT),
        peak.mark_point(shape="triangle-down", filled=True, size=90, color=WARNING, yOffset=-6, opacity=1),
        peak.mark_text(color=WARNING, dy=-16).encode(text=alt.value(f"peak {short(highest['total'])} MiB")),
    )
    return Panel(title="memory during the second optimizer step, by category", chart=chart)


def _moments(course: StepMemory) -> list[dict[str, Any]]:
    """Return the memory at the highest event of each of NUM_MOMENTS stretches of the step, in MiB by category."""
    totals = [sum(parts) / MIB for parts in zip(*(course.category_bytes[name] for name in CATEGORIES), strict=True)]
    every = -(-len(totals) // NUM_MOMENTS)
    stretches = [range(start, min(start + every, len(totals))) for start in range(0, len(totals), every)]
    shown = [max(stretch, key=totals.__getitem__) for stretch in stretches]
    moments = []
    for event, following in zip(shown, [*shown[1:], len(totals) - 1], strict=True):
        parts = {name: course.category_bytes[name][event] / MIB for name in CATEGORIES}
        sizes = "\n".join(f"{name} {size:,.1f} MiB" for name, size in parts.items() if size)
        at, end = 1000 * course.seconds[event], 1000 * course.seconds[following]
        about = f"{totals[event]:,.1f} MiB at {short(at)} ms\n{sizes}"
        moments.append({"ms": at, "end": end, "total": totals[event], "about": about, **parts})
    return moments


def _seconds_by_phase(profile: TimeProfile) -> Panel:
    values = []
    for phase, seconds in profile.phase_seconds.items():
        text = f"{short(1000 * seconds)} ms, {100 * seconds / profile.seconds_per_step:.0f} %"
        values.append(Bar(name=phase, value=1000 * seconds, shade=PHASE_COLOURS[phase], text=text))
    return bars("time in one optimizer step", values, "ms")
