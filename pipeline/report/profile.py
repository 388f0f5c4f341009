"""The report of a profile: memory by phase, category, module and tensor; time by phase and operator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from pipeline.base.by_key import summed
from pipeline.base.units import MIB
from pipeline.memory.breakdown import StepMemory
from pipeline.report.breakdown import categories_of, shares_table, tensors_table
from pipeline.report.command import command_of
from pipeline.report.comparison import notes, overview_table
from pipeline.report.course import PHASE_COLOURS, course_plot, phases_plot
from pipeline.report.page import Advice, Headline, Report, Section
from pipeline.report.plot import Bar, Plot, bars, mib_text, short
from pipeline.report.table import Table
from pipeline.report.treemap import treemap_plot, without_numbers
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, OperatorCost, TimeProfile

NUM_OPERATORS = 15
SHARE_WORTH_SAYING = 0.01
"""Share of the tensors' peak from which the report says that the measured peak has more."""


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
    memory, time = findings.memory, findings.time
    plots = [
        *([_course_plot(memory.course, findings)] if memory and memory.course else []),
        *([treemap_plot(memory.modules)] if memory else []),
        *phases_plot(findings.row),
        *([_time_plot(time)] if time else []),
    ]
    tables = [
        overview_table("cost", [findings.row]),
        *(_memory_tables(memory) if memory else []),
        *(_time_tables(time) if time else []),
    ]
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=_answer(findings),
        headlines=_headlines(findings),
        commands=(_command(findings),),
        sections=(
            *_advice(findings),
            Section(title="memory and time", plots=tuple(plots), notes=(*notes([findings.row]), *_time_notes(time))),
            Section(title="tables", tables=tuple(tables)),
        ),
        environment=findings.environment,
        settings=findings.row.params,
    )


def _headlines(findings: ProfilingFindings) -> tuple[Headline, ...]:
    found = []
    for one in findings.advice[:1]:
        if one.settings:
            name, value = next(iter(one.settings.items()))
            found.append(Headline(title="to try", value=f"{name} {value}", detail=one.evidence))
    if findings.memory is not None:
        peak = findings.memory.peak
        largest, size = max(peak.category_bytes.items(), key=lambda pair: pair[1])
        where = f"{peak.phase} of step {peak.step + 1}, {peak.operator} in {peak.module or 'the whole model'}"
        found += [
            Headline(title="peak memory in tensors", value=mib_text(peak.peak_bytes / MIB), detail=where),
            Headline(
                title=f"largest part: {largest}",
                value=f"{100 * size / peak.peak_bytes:.0f} %",
                detail=f"{mib_text(size / MIB)} at the peak",
            ),
        ]
    if findings.time is not None:
        phase, percent = _longest_phase(findings.time)
        seconds = findings.row.metrics.get("seconds_per_step", findings.time.seconds_per_step)
        detail = f"{percent:.0f} % of it {phase}"
        found.append(Headline(title="time per optimizer step", value=f"{short(seconds)} s", detail=detail))
    return tuple(found)


def _command(findings: ProfilingFindings) -> tuple[str, str]:
    tried = findings.advice[0].settings if findings.advice else {}
    line = command_of("profiling", findings.row.params, tried)
    return "Profile it with that setting" if tried else "Profile it again", line


def _longest_phase(time: TimeProfile) -> tuple[str, float]:
    greatest = max(time.phase_seconds, key=time.phase_seconds.__getitem__)
    return greatest, 100 * time.phase_seconds[greatest] / time.seconds_per_step


def _answer(findings: ProfilingFindings) -> str:
    sentences = []
    if findings.row.outcome is not None and not findings.row.completed:
        sentences.append(f"The run did not complete: {findings.row.outcome}.")
    if findings.memory is not None:
        peak = findings.memory.peak
        largest, size = max(peak.category_bytes.items(), key=lambda pair: pair[1])
        sentences.append(
            f"Memory peaks at {peak.peak_bytes / MIB:,.1f} MiB in the {peak.phase} phase, "
            f"{100 * size / peak.peak_bytes:.0f} % of it {largest}."
        )
        sentences += _beside_tensors(findings.row, peak.peak_bytes / MIB)
    if findings.time is not None:
        phase, percent = _longest_phase(findings.time)
        sentences.append(f"Most of the time goes into {phase} ({percent:.0f} %).")
    for one in findings.advice[:1]:
        finding = one.text.partition(". ")[0].removesuffix(".")
        sentences.append(f"{finding}: try {one.change}." if one.settings else one.text)
    return " ".join(sentences)


def _beside_tensors(row: Row, tensors_mib: float) -> list[str]:
    """Return a sentence on what the allocator measured beside tensors, if that is a share worth saying."""
    measured_mib = row.metrics.get("peak_allocated_mib")
    if not row.completed or measured_mib is None or measured_mib < (1 + SHARE_WORTH_SAYING) * tensors_mib:
        return []
    return [
        f"The measured peak of {measured_mib:,.1f} MiB has {measured_mib - tensors_mib:,.1f} MiB more, which operators "
        "hold as workspaces and not as tensors."
    ]


def _advice(findings: ProfilingFindings) -> tuple[Section, ...]:
    """Return what to try, with a command for each; the terminal shows it as a table."""
    if not findings.advice:
        return ()
    lines = [{"finding": one.text, "evidence": one.evidence, "setting": one.change or "-"} for one in findings.advice]
    table = Table.of("advice", "advice", lines, num_on_page=0)
    suggestions = tuple(
        replace(one, command=command_of("profiling", findings.row.params, one.settings)) if one.settings else one
        for one in findings.advice
    )
    return (Section(title="what to try", suggestions=suggestions, tables=(table,)),)


def _course_plot(course: StepMemory, findings: ProfilingFindings) -> Plot:
    """Return memory over the second step, with phases as long as without the recorder, if that is known."""
    time, title = findings.time, "memory during the second optimizer step, by category"
    if time is None or not {phase for phase, _ in course.phases} <= {*time.phase_seconds}:
        return course_plot(course, title, "ms, with the recorder's overhead")
    slower = findings.row.metrics.get("seconds_per_step", time.seconds_per_step) / time.seconds_per_step
    begins = [*(begin for _, begin in course.phases), course.seconds[-1]]
    recorded = dict.fromkeys(time.phase_seconds, 0.0)
    for (phase, _), (begin, end) in zip(course.phases, pairwise(begins), strict=True):
        recorded[phase] += end - begin
    lengths = [
        (end - begin) * slower * time.phase_seconds[phase] / (recorded[phase] or 1.0)
        for (phase, _), (begin, end) in zip(course.phases, pairwise(begins), strict=True)
    ]
    measured = [0.0, *accumulate(lengths)]
    phases = tuple((phase, begin) for (phase, _), begin in zip(course.phases, measured, strict=False))
    seconds = tuple(np.interp(course.seconds, begins, measured).tolist())
    return course_plot(replace(course, phases=phases, seconds=seconds), title, "ms of the optimizer step")


def _memory_tables(memory: MemoryProfile) -> tuple[Table, ...]:
    sizes = summed((without_numbers(name), size) for name, size in memory.peak.module_bytes.items())
    return (
        replace(
            shares_table("categories", "memory at the peak, by category", categories_of(memory.peak)), num_on_page=0
        ),
        shares_table("modules", "memory at the peak, by module (* any layer)", dict(sizes.most_common())),
        tensors_table("tensors", "the largest tensors alive at the peak", memory.peak),
    )


def _time_plot(profile: TimeProfile) -> Plot:
    values = []
    for phase, seconds in profile.phase_seconds.items():
        text = f"{short(1000 * seconds)} ms, {100 * seconds / profile.seconds_per_step:.0f} %"
        values.append(Bar(name=phase, value=1000 * seconds, shade=PHASE_COLOURS[phase], text=text))
    return bars("time in one optimizer step, by phase", values, "ms").alone("time")


def _time_notes(profile: TimeProfile | None) -> tuple[str, ...]:
    if profile is None:
        return ()
    idle = profile.device_idle_percent
    return (
        "Times by phase and operator include the profiler's overhead; open traces/trace.json.gz in ui.perfetto.dev.",
        *([f"The device was idle for {idle:.0f} % of the time."] if idle is not None else []),
    )


def _time_tables(profile: TimeProfile) -> tuple[Table, ...]:
    by_time = sorted(profile.operators, key=lambda cost: -cost.seconds)[:NUM_OPERATORS]
    by_memory = sorted(profile.operators, key=lambda cost: -cost.num_bytes)[:NUM_OPERATORS]
    total = sum(cost.seconds for cost in profile.operators) or 1.0
    return (
        _operators_table("operators_by_time", "operators by time, in one optimizer step", by_time, total),
        _operators_table("operators_by_memory", "operators by memory, in one optimizer step", by_memory, total),
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
    return Table.of(name, title, lines, forms=forms)
