"""The report of a search: answer, trials, plots, verification, and the configurations that were not measured."""

from collections.abc import Sequence

import pandas as pd

from pipeline.base.units import MIB
from pipeline.report.certificate_plots import certificate_plots
from pipeline.report.configurations import configurations_of, plane_plot
from pipeline.report.contributions import contributions_plot
from pipeline.report.page import Headline, Report, Section
from pipeline.report.reserved_plot import reserved_plots
from pipeline.report.table import Table
from pipeline.report.trial_plots import NOT_COUNTED, over_time_plot, parallel_plot, session_plot
from pipeline.searching.certificate import UNFIT, Certificate
from pipeline.searching.results import (
    SearchFindings,
    Trial,
    Verification,
    columns,
    is_counted,
    label,
    one_per_configuration,
    pareto_front,
    speed_of,
)
from pipeline.training.metrics import limited_peak_mib

COMMAND = "fitproof main --config best.yaml"
"""Runs the answer, in the job's folder."""


def question(findings: SearchFindings) -> str:
    """Return the question that the search answers."""
    return (
        f"What is the fastest way to train {findings.model} at an effective batch of "
        f"{findings.effective_batch_size} within {findings.budget_bytes / MIB:,.0f} MiB?"
    )


def answer(findings: SearchFindings) -> str:
    """Return the fastest configuration that fits, its memory and speed, and how it compares with the naive one."""
    rows, budget, effective = findings.rows, findings.budget_bytes, findings.effective_batch_size
    best = findings.best
    space = f"{len(one_per_configuration(rows))} of {findings.num_configurations} configurations measured"
    if best is None:
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None and row.tokens_per_second is not None]
        smallest = f"the smallest measured peak is {min(peaks) / MIB:,.1f} MiB" if peaks else "none completed"
        return f"Nothing fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {smallest} ({space})."
    peak, speed = best.peak_bytes or 0, speed_of(best.choice, rows)
    text = (
        f"The fastest that fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {label(best.choice)}. "
        f"It peaks at {peak / MIB:,.1f} MiB ({(budget - peak) / MIB:,.1f} MiB of headroom) "
        f"and trains {speed:,.0f} tokens/s{_against_naive(findings, best)}"
    )
    if findings.shows_front:
        text += f". Pareto front: {'; '.join(_on_front(row, rows) for row in pareto_front(rows))}"
    check = "" if findings.verification is None else f" {findings.verification.verdict}."
    return f"{text} ({space}).{_proof(findings)}{check}"


def _lead(findings: SearchFindings) -> str | None:
    """Return the answer in words beside its figures: the configuration, and what the rest of the space may hold."""
    best, verification = findings.best, findings.verification
    if best is None or findings.shows_front:
        return None
    check = "" if verification is None or verification.same_training else f" {verification.verdict}."
    return f"Train with {label(best.choice)}.{_proof(findings)}{check}"


def _proof(findings: SearchFindings) -> str:
    """Return the certificate as a sentence after another one."""
    return "" if findings.certificate is None else f" {findings.certificate.summary}."


def search_report(findings: SearchFindings) -> Report:
    """Return the report; at least one trial must have been measured."""
    rows, best = findings.rows, findings.best
    configurations = configurations_of(findings)
    plane = plane_plot(findings, configurations)
    plots = (
        *contributions_plot(findings, configurations),
        over_time_plot(rows),
        *certificate_plots(findings, configurations),
        *session_plot(findings.seconds),
        parallel_plot(rows, findings.budget_bytes, best),
    )
    return Report(
        entry=findings.entry,
        question=question(findings),
        answer=answer(findings),
        headlines=() if best is None else _headlines(findings, best),
        lead=_lead(findings),
        command=None if best is None else COMMAND,
        sections=(
            Section(title=plane.title, plots=(plane,)),
            Section(title="why this one, and how sure it is", plots=plots),
            *_verified(findings),
            Section(title="trials", tables=(trials_table(rows, best),), notes=findings.notes),
            *_certified(findings),
        ),
        environment=findings.environment,
        settings=findings.settings,
    )


def _headlines(findings: SearchFindings, best: Trial) -> tuple[Headline, ...]:
    """Return speed, memory, the bound and whether the training is the same, as far as they are known."""
    peak, speed = best.peak_bytes or 0, speed_of(best.choice, findings.rows)
    naive, speedup = findings.naive_trial, findings.speedup
    certificate, verification = findings.certificate, findings.verification
    written = f"{speed:,.0f} tokens/s"
    if naive is None or speedup is None:
        fast = Headline(title="speed", value=written, detail="no naive configuration that fits was measured")
    else:
        plain = f"{speed_of(naive.choice, findings.rows):,.0f} (defaults, {label(naive.choice)})"
        detail = f"{written}; naive: {plain}"
        fast = Headline(title="speed", value=f"{speedup:.2f} x naive", detail=detail)
    found = [
        fast,
        Headline(
            title="peak memory",
            value=f"{peak / MIB:,.1f} MiB",
            detail=f"{(findings.budget_bytes - peak) / MIB:,.1f} MiB of headroom in {findings.budget_bytes / MIB:,.0f}",
        ),
    ]
    if certificate is not None and certificate.is_adequate and certificate.bound is not None:
        bound = f"within {100 * max(certificate.bound, certificate.gap):.3g} %"
        detail = f"of the best of {certificate.num_configurations:,}, {100 * certificate.confidence:.0f} % confidence"
        found.append(Headline(title="bound", value=bound, detail=detail))
    elif certificate is not None:
        residual = f"the residual of the time model is {100 * certificate.residual_rms:.0f} %"
        detail = certificate.missing if certificate.is_adequate else residual
        found.append(Headline(title="bound", value="none", detail=detail))
    if verification is not None and verification.same_training is not None:
        value = "yes" if verification.same_training else "no"
        detail = f"losses differ by {verification.max_loss_difference:.2g}, tolerance {verification.tolerance:.2g}"
        found.append(Headline(title="same training", value=value, detail=detail))
    return tuple(found)


def _verified(findings: SearchFindings) -> tuple[Section, ...]:
    verification = findings.verification
    if verification is None:
        return ()
    table = verification_table(verification)
    plots = reserved_plots(verification, findings.budget_bytes)
    return (Section(title="verified", tables=(table,), notes=(f"{verification.summary}.",), plots=plots),)


def _certified(findings: SearchFindings) -> tuple[Section, ...]:
    certificate = findings.certificate
    if certificate is None:
        return ()
    saved = certificate.saved_time
    notes = (f"{saved}.",) if saved else ()
    tables = (unmeasured_table(certificate),) if certificate.unmeasured else ()
    return (Section(title="certificate", tables=tables, notes=notes),)


def trials_frame(rows: Sequence[Trial]) -> pd.DataFrame:
    """Return a row for each trial, with every metric."""
    return pd.DataFrame(
        {
            "trial": row.number,
            **row.choice,
            "outcome": row.outcome,
            "fits": row.fits,
            "detail": row.detail,
            **row.metrics,
        }
        for row in rows
    )


def trials_table(rows: Sequence[Trial], best: Trial | None) -> Table:
    """Return the trials, those that fit first, the fastest on top."""
    ordered = sorted(rows, key=lambda row: (not row.fits, -(row.tokens_per_second or 0)))
    shown = columns(row.choice for row in rows)
    lines = [
        {
            **{shown[name]: row.choice[name] for name in shown},
            "outcome": row.outcome,
            "peak MiB": None if row.peak_bytes is None else row.peak_bytes / MIB,
            "predicted MiB": row.predicted_mib,
            "s/step": row.metrics.get("seconds_per_step"),
            "predicted s/step": row.metrics.get("predicted_seconds_per_step"),
            "tokens/s": row.tokens_per_second,
            "loss": row.metrics.get("common_steps_loss"),
            "": "best" if row is best else "" if is_counted(row, rows) else NOT_COUNTED,
        }
        for row in ordered
    ]
    forms = {
        "peak MiB": "{:,.1f}",
        "predicted MiB": "{:,.1f}",
        "s/step": "{:.3f}",
        "predicted s/step": "{:.3f}",
        "tokens/s": "{:,.0f}",
        "loss": "{:.4f}",
    }
    expendable = ("predicted s/step", "predicted MiB", "loss", "s/step", "outcome")
    return Table(name="ranking", title="trials", frame=pd.DataFrame(lines), forms=forms, expendable=expendable)


def unmeasured_table(certificate: Certificate) -> Table:
    """Return the configurations that were not measured and the reasons: those that may fit, then the fastest first."""
    ordered = sorted(certificate.unmeasured, key=lambda one: (one.reason == UNFIT, one.predicted_seconds_per_step or 0))
    shown, has_causes = columns(one.choice for one in ordered), any(one.cause for one in ordered)
    lines = [
        {
            **{shown[name]: one.choice[name] for name in shown},
            "predicted MiB": None if one.predicted_peak_bytes is None else one.predicted_peak_bytes / MIB,
            "predicted s/step": one.predicted_seconds_per_step,
            "why": one.reason,
            **({"cause": one.cause} if has_causes else {}),
        }
        for one in ordered
    ]
    forms = {"predicted MiB": "{:,.1f}", "predicted s/step": "{:.3f}"}
    return Table(
        name="never_run",
        title="not measured",
        frame=pd.DataFrame(lines),
        forms=forms,
        num_in_terminal=8,
        expendable=("cause",),
    )


def verification_table(verification: Verification) -> Table:
    """Return the answer and the plain configuration, both trained again."""
    pairs = [(verification.choice, verification.outcome, verification.metrics, "answer")]
    if verification.plain is not None:
        pairs.append((verification.plain, verification.plain_outcome or "", verification.plain_metrics, "plain"))
    shown = columns(choice for choice, *_ in pairs)
    lines = [
        {
            **{shown[name]: choice[name] for name in shown},
            "outcome": outcome,
            "peak MiB": limited_peak_mib(metrics),
            "tokens/s": metrics.get("tokens_per_second"),
            "final loss": metrics.get("final_loss"),
            "": label,
        }
        for choice, outcome, metrics, label in pairs
    ]
    forms = {"peak MiB": "{:,.1f}", "tokens/s": "{:,.0f}", "final loss": "{:.4f}"}
    return Table(name="verification", title="the answer, trained again", frame=pd.DataFrame(lines), forms=forms)


def _on_front(row: Trial, rows: Sequence[Trial]) -> str:
    """Return a configuration of the Pareto front as text, with its peak and speed."""
    peak_mib, speed = (row.peak_bytes or 0) / MIB, speed_of(row.choice, rows)
    return f"{label(row.choice)}: {row.outcome}, {peak_mib:,.1f} MiB, {speed:,.0f} tokens/s"


def _against_naive(findings: SearchFindings, best: Trial) -> str:
    """Compare with the first naive configuration that fits, if it has been measured."""
    naive, speedup = findings.naive_trial, findings.speedup
    if naive is best:
        return ", and is the naive configuration itself"
    if naive is None or speedup is None:
        return ""
    return f", {speedup:.2f} x the naive configuration ({label(naive.choice)})"
