"""The report of a search: answer, trials, plots, verification, and the configurations that were not measured."""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from typing import Any

from pipeline.base.units import MIB, mib
from pipeline.config.given import written as setting
from pipeline.report.answer_plots import certificate_plots, contributions_plot, losses_plots, reserved_plots
from pipeline.report.command import DERIVED, command_line
from pipeline.report.configurations import configurations_of, plane_plot
from pipeline.report.page import Headline, Report, Section
from pipeline.report.plot import mib_text
from pipeline.report.table import Form, Table, file_alone
from pipeline.report.trial_plots import NOT_COUNTED, over_time_plot, parallel_plot
from pipeline.searching.certificate import FAILING, NOT_PREDICTED, REPEATED_GAPS, Certificate
from pipeline.searching.results import OWN_COMMAND, SearchFindings, Verification
from pipeline.searching.trials import (
    FAILED,
    Trial,
    columns,
    label,
    one_per_configuration,
    pareto_front,
    speed_number,
    speeds,
)
from pipeline.training.metrics import limited_peak_mib

NEVER_RUN, RUNS = "never_run", "trials"
"""Names of the tables of what was not measured, and of every run."""
NUM_IN_TERMINAL = 15
"""Configurations that the terminal shows, the fastest."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""How a word begins that sets a variable before a command."""
NOISY = 0.25
"""Runs of one configuration that differ by a greater fraction are called noisy."""


def answer(findings: SearchFindings) -> str:
    """Return the fastest configuration that fits, its memory and speed, and how it compares with the baseline."""
    rows, budget, effective = findings.rows, findings.budget_bytes, findings.effective_batch_size
    best = findings.best
    space = f"{_num_measured(findings)} of {findings.num_configurations} configurations measured"
    if best is None:
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None and row.tokens_per_second is not None]
        if peaks and min(peaks) <= budget:
            return (
                f"Nothing that fits {budget / MIB:,.1f} MiB at an effective batch of {effective} trained when it was "
                f"run again, and the log of that run says why ({space})."
            )
        smallest = f"the smallest measured peak is {min(peaks) / MIB:,.1f} MiB" if peaks else "none completed"
        return f"Nothing fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {smallest} ({space})."
    peak, speed = best.peak_bytes or 0, findings.speed_of(best.choice)
    text = (
        f"The fastest that fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {label(best.choice)}. "
        f"It peaks at {peak / MIB:,.1f} MiB ({(budget - peak) / MIB:,.1f} MiB of headroom) "
        f"and trains {findings.speed_text(speed)}{_against_baseline(findings, best)}"
    )
    if findings.shows_front:
        text += f". Pareto front: {'; '.join(_on_front(row, findings) for row in pareto_front(findings.runs))}"
    check = "" if findings.verification is None else f" {findings.verification.verdict}."
    return f"{text} ({space}).{_about(findings)}{check}"


def _lead(findings: SearchFindings) -> str | None:
    """Return the answer in words beside its figures: the configuration, and what the rest of the space may hold."""
    best, verification = findings.best, findings.verification
    if best is None or findings.shows_front:
        return None
    check = "" if verification is None or verification.same_training else f" {verification.verdict}."
    return f"Train with {label(best.choice)}.{_about(findings)}{check}"


def _num_measured(findings: SearchFindings) -> int:
    return sum(row.outcome not in FAILED for row in one_per_configuration(findings.rows))


def _about(findings: SearchFindings) -> str:
    """Return what the memory and the times are of, how sure the answer is, and what failed, as sentences."""
    return f"{_where(findings)}{_proof(findings)}{_failing(findings)}{_noise(findings)}"


def _where(findings: SearchFindings) -> str:
    """Return what the memory and the times of a command are of, if a card was named and is not the device."""
    card, device = findings.settings.get("gpu"), findings.environment.get("device_name")
    if "gpu" not in findings.given or card == device:
        return ""
    return f" Memory is that of a simulated {card}, times are of {device}."


def _failing(findings: SearchFindings) -> str:
    """Return the error with which each failing value failed on this device, a sentence each."""
    sentences = []
    for cause in findings.certificate.causes(FAILING) if findings.certificate else ():
        failed = (row for row in findings.rows if row.outcome in FAILED and _has(row.choice, cause))
        error = next((row.detail.splitlines()[-1] for row in failed if row.detail), None)
        said = "failed" if error is None else f"failed on this machine with {error.rstrip('.')}"
        sentences.append(f" {cause} {said}: whether it would be faster elsewhere is not known.")
    return "".join(sentences)


def _has(choice: Mapping[str, Any], value: str) -> bool:
    return value in (f"{name}={setting(own)}" for name, own in choice.items())


def _proof(findings: SearchFindings) -> str:
    """Return the certificate as sentences after another one: its claim, what limits it, and the command for more."""
    certificate = findings.certificate
    if certificate is None:
        return ""
    limit = "" if certificate.limit is None else f" The bound is limited by {certificate.limit}."
    return f" {certificate.summary}.{limit}{_tightened(findings, certificate) if limit else ''}"


def _noise(findings: SearchFindings) -> str:
    """Return how noisy the speeds are, as a sentence after another one; empty if they are not, or the bound says it."""
    certificate = findings.certificate
    if certificate is not None and certificate.limit is not None and not certificate.is_limited_by_trials:
        return ""
    ranges = [findings.speed_range(row.choice) for row in one_per_configuration(findings.rows)]
    spread = max((fastest / slowest - 1 for slowest, fastest in filter(None, ranges)), default=0.0)
    if spread < NOISY:
        return ""
    return (
        f" Speeds are noisy: one configuration was {100 * spread:.0f} % faster in one run than in another, as beside "
        "other load; the same search on a quiet machine is surer."
    )


def _tightened(findings: SearchFindings, certificate: Certificate) -> str:
    """Return the command that continues the search for a tighter bound, as a sentence after another one."""
    given = {name: value for name, value in findings.given.items() if name not in DERIVED}
    more: dict[str, object] = {}
    if len(findings.rows) >= findings.num_trials:
        more["num_trials"] = 2 * len(findings.rows)
    if not certificate.is_limited_by_trials:
        more["gap"] = f"{certificate.gap / REPEATED_GAPS:.1g}"  # up to which the two fastest are measured again
    return f" For a tighter one, continue this search: `{command_line('search', {**given, **more})}`."


def search_report(findings: SearchFindings) -> Report:
    """Return the report; at least one trial must have been measured."""
    best = findings.best
    varied = {"accumulation_steps", *(name for row in findings.rows for name in row.choice)}  # or follow from those
    configurations = configurations_of(findings)
    plane = plane_plot(findings, configurations)
    plots = (
        *contributions_plot(findings, configurations),
        over_time_plot(findings),
        *certificate_plots(findings, configurations),
        parallel_plot(findings),
    )
    return Report(
        entry="search",
        question=f"What is the fastest way to train {findings.model} at an effective batch of "
        f"{findings.effective_batch_size} within {findings.budget_bytes / MIB:,.0f} MiB?",
        answer=answer(findings),
        headlines=() if best is None else _headlines(findings, best),
        lead=_lead(findings),
        commands=()
        if best is None
        else (("Run it", findings.command), ("What fits another card", _elsewhere(findings))),
        sections=(
            Section(title=plane.title, plots=(plane,)),
            Section(title="why this one, and how sure it is", plots=plots, notes=_notes(findings)),
            *_verified(findings),
            Section(title="trials", tables=_tables(findings), notes=findings.notes),
        ),
        environment=findings.environment,
        settings={name: value for name, value in findings.settings.items() if name not in varied},
    )


def _elsewhere(findings: SearchFindings) -> str:
    """Return the command that says what of the answer's training fits another card."""
    own = findings.settings.get("gpu") or findings.environment.get("device_name", "")
    other = "rtx4090" if "T4" in own else "t4"
    if findings.command == OWN_COMMAND:
        return f"fitproof plan --config best.yaml --gpu {other} --budget none"
    words = shlex.split(findings.command)
    variables = [word.partition("=") for word in takewhile(ASSIGNMENT.match, words)]
    before = "".join(f"{name}={shlex.quote(value)} " for name, _, value in variables)
    return f"{before}fitproof simulate --gpu {other} -- {shlex.join(words[len(variables) :])}"


def _headlines(findings: SearchFindings, best: Trial) -> tuple[Headline, ...]:
    peak, speed = best.peak_bytes or 0, findings.speed_of(best.choice)
    baseline, speedup = findings.baseline_trial, findings.speedup
    certificate, verification = findings.certificate, findings.verification
    written, headroom = findings.speed_text(speed), mib_text((findings.budget_bytes - peak) / MIB)
    if baseline is None or speedup is None:
        fast = Headline(title="speed", value=written, detail="no baseline that fits was measured")
    else:
        plain = speed_number(findings.speed_of(baseline.choice), findings.unit)
        num_runs = len(list(speeds(baseline.choice, filter(findings.is_counted, findings.runs))))
        by = f"by {num_runs} run{'s' * (num_runs != 1)}"
        detail = f"{written}; baseline: {plain} {by} (defaults, {label(baseline.choice)}){_range(findings, best)}"
        fast = Headline(title="speed", value=f"{speedup:.2f} x baseline", detail=detail)
    found = [
        Headline(
            title="the fastest that fits",
            value=label(best.choice),
            detail=f"of {_num_measured(findings):,} measured configurations, "
            f"{findings.num_configurations:,} in all; to copy: the searched settings, as YAML",
            copied="\n".join(f"{name}: {setting(value)}" for name, value in best.choice.items()),
        ),
        fast,
        Headline(
            title="peak memory",
            value=mib_text(peak / MIB),
            detail=f"{headroom} of headroom in {findings.budget_bytes / MIB:,.0f}",
        ),
    ]
    if certificate is not None and certificate.is_adequate and certificate.stated_bound is not None:
        bound = f"at most {100 * certificate.stated_bound:.3g} % slower"
        sure = f"{100 * certificate.confidence:.0f} %"
        detail = f"than the best of these configurations: true with a probability of {sure}, by the time model"
        found.append(Headline(title="bound", value=bound, detail=detail))
    elif certificate is not None:
        residual = f"the time model misses the measured times by {100 * certificate.residual_rms:.0f} %"
        detail = certificate.missing if certificate.is_adequate else residual
        found.append(Headline(title="bound", value="none", detail=detail))
    if verification is not None and verification.max_loss_difference is not None:
        value = {True: "yes", False: "no", None: "not known"}[verification.same_training]
        detail = f"losses differ by {verification.max_loss_difference:.2g}, tolerance {verification.tolerance:.2g}"
        found.append(Headline(title="same training", value=value, detail=detail))
    return tuple(found)


def _range(findings: SearchFindings, best: Trial) -> str:
    """Return between which speeds the runs of the answer lie, after another clause; empty if they are alike."""
    found = speeds(best.choice, filter(findings.is_counted, findings.runs))
    if not found or max(found) / min(found) - 1 < NOISY:
        return ""
    slowest, fastest = (speed_number(speed, findings.unit) for speed in (min(found), max(found)))
    return f"; the answer's runs: {slowest} to {fastest}"


def _verified(findings: SearchFindings) -> tuple[Section, ...]:
    verification = findings.verification
    if verification is None:
        return ()
    table = verification_table(verification)
    plots = (*losses_plots(verification), *reserved_plots(verification, findings.budget_bytes))
    return (Section(title="verified", tables=(table,), notes=(f"{verification.summary}.",), plots=plots),)


def _notes(findings: SearchFindings) -> tuple[str, ...]:
    """Return where the time went, what the predictions saved of it, and where what was not measured stands."""
    certificate, total = findings.certificate, sum(findings.seconds.values())
    parts = ", ".join(f"{100 * seconds / total:.0f} % {name}" for name, seconds in findings.seconds.items() if seconds)
    notes = [f"This session took {total:,.0f} s: {parts}."] if parts else []
    if certificate is not None and certificate.saved_time:
        notes.append(f"{certificate.saved_time}.")
    if certificate is not None and certificate.unmeasured:
        causes = "; ".join(certificate.causes(NOT_PREDICTED))
        not_predicted = f" Not predicted: {causes}." if causes else ""
        num = len(certificate.unmeasured)
        notes.append(f"Each of the {num:,} that were not measured, and why, is in {NEVER_RUN}.csv.{not_predicted}")
    return tuple(notes)


def _tables(findings: SearchFindings) -> tuple[Table, ...]:
    certificate = findings.certificate
    unmeasured = (unmeasured_table(certificate),) if certificate is not None and certificate.unmeasured else ()
    return (ranking_table(findings), runs_table(findings), *unmeasured)


def runs_table(findings: SearchFindings) -> Table:
    """Return a file with a row for each trial and each run of a verification, with every metric."""
    lines = [
        {
            "run": run.name,
            **run.choice,
            "outcome": run.outcome,
            "fits": run.fits,
            "counts": findings.is_counted(run),
            "detail": run.detail,
            **run.metrics,
        }
        for run in findings.runs
    ]
    return file_alone(RUNS, "every run", lines)


def ranking_table(findings: SearchFindings) -> Table:
    """Return every measured configuration with its speed: those that fit first, the fastest on top."""
    runs = findings.runs
    ordered = sorted(one_per_configuration(runs), key=lambda row: (not row.fits, -findings.speed_of(row.choice)))
    shown, unit = columns(row.choice for row in ordered), findings.unit
    labelled = {"answer": findings.best, "baseline": findings.baseline_trial}
    lines = [
        {
            **{shown[name]: row.choice[name] for name in shown},
            unit: findings.speed_of(row.choice) or None,
            "": next((text for text, one in labelled.items() if one is not None and one.choice == row.choice), ""),
            **_measured(row, findings),
        }
        for row in ordered
    ]
    number = partial(speed_number, unit=unit)
    forms: dict[str, Form] = {
        "peak MiB": "{:,.1f}",
        "predicted MiB": "{:,.1f}",
        "s/step": "{:.3f}",
        "predicted s/step": "{:.3f}",
        "loss": "{:.4f}",
        "slowest run": number,
        "fastest run": number,
        unit: number,
    }
    expendable = (
        *("predicted s/step", "predicted MiB", "loss", "s/step", "outcome"),
        *("not counted", "slowest run", "fastest run", "runs"),
    )
    return Table.of(
        "ranking",
        "measured configurations",
        lines,
        forms=forms,
        note=f"Every run is in {RUNS}.csv; loss is the mean of the steps that all trials have, and predicted s/step "
        "what was expected before the first run.",
        num_in_terminal=NUM_IN_TERMINAL,
        expendable=expendable,
    )


def _measured(row: Trial, findings: SearchFindings) -> dict[str, Any]:
    """Return what the runs of a configuration measured, by the headings of its line; `row` stands for them."""
    own, row = [run for run in findings.runs if run.choice == row.choice], findings.of_all_its_runs(row)
    predicted_mib = (run.predicted_mib for run in own)
    predicted_seconds = (run.metrics.get("predicted_seconds_per_step") for run in own)
    ends = findings.speed_range(row.choice) if len(own) > 1 else None
    return {
        "outcome": row.outcome,
        "peak MiB": mib(row.peak_bytes),
        "predicted MiB": next(filter(None, predicted_mib), None),
        "s/step": row.metrics.get("seconds_per_step"),
        "predicted s/step": next(filter(None, predicted_seconds), None),
        "loss": row.metrics.get("common_steps_loss"),
        "runs": len(own),
        NOT_COUNTED: sum(not findings.is_counted(run) for run in own) or None,
        "slowest run": ends and ends[0],
        "fastest run": ends and ends[1],
    }


def unmeasured_table(certificate: Certificate) -> Table:
    """Return the configurations that were not measured and the reasons: those that may fit, then the fastest first."""
    ordered = sorted(certificate.unmeasured, key=lambda one: (one.is_refused, one.predicted_seconds_per_step or 0))
    shown, has_causes = columns(one.choice for one in ordered), any(one.cause for one in ordered)
    lines = [
        {
            **{shown[name]: one.choice[name] for name in shown},
            "predicted MiB": mib(one.predicted_peak_bytes),
            "predicted s/step": one.predicted_seconds_per_step,
            "why": one.reason,
            **({"cause": one.cause} if has_causes else {}),
        }
        for one in ordered
    ]
    return file_alone(NEVER_RUN, "not measured", lines)


def verification_table(verification: Verification) -> Table:
    """Return the answer and the plain configuration, both trained again."""
    runs = {"answer": verification.answer}
    if verification.plain is not None:
        runs["plain"] = verification.plain
    shown = columns(run.choice for run in runs.values())
    lines = [
        {
            **{shown[name]: run.choice[name] for name in shown},
            "outcome": run.outcome,
            "peak MiB": limited_peak_mib(run.metrics),
            "final loss": run.metrics.get("final_loss"),
            "": role,
        }
        for role, run in runs.items()
    ]
    forms = {"peak MiB": "{:,.1f}", "final loss": "{:.4f}"}
    return Table.of("verification", "the answer, trained again", lines, forms=forms)


def _on_front(row: Trial, findings: SearchFindings) -> str:
    peak_mib, speed = (findings.of_all_its_runs(row).peak_bytes or 0) / MIB, findings.speed_of(row.choice)
    return f"{label(row.choice)}: {row.outcome}, {peak_mib:,.1f} MiB, {findings.speed_text(speed)}"


def _against_baseline(findings: SearchFindings, best: Trial) -> str:
    baseline, speedup = findings.baseline_trial, findings.speedup
    if baseline is not None and baseline.choice == best.choice:
        return ", and is the baseline itself"
    if baseline is None or speedup is None:
        return ""
    return f", {speedup:.2f} x the baseline ({label(baseline.choice)})"
