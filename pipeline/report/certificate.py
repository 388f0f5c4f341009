"""What a search proves beside its answer: the bound that it has reached, what it left out and why, and the checks."""

import pandas as pd

from pipeline.base.units import MIB
from pipeline.report.table import Table
from pipeline.searching.certificate import Certificate
from pipeline.searching.results import Verification, heading


def unmeasured_table(certificate: Certificate) -> Table:
    """Return what was never run and why, the fastest predicted first."""
    ordered = sorted(certificate.unmeasured, key=lambda one: one.predicted_seconds_per_step or 0)
    lines = [
        {
            **{heading(name): value for name, value in one.choice.items()},
            "predicted MiB": None if one.predicted_peak_bytes is None else one.predicted_peak_bytes / MIB,
            "predicted s/step": one.predicted_seconds_per_step,
            "why": one.reason,
        }
        for one in ordered
    ]
    forms = {"predicted MiB": "{:,.1f}", "predicted s/step": "{:.3f}"}
    return Table(name="never_run", title="never run", frame=pd.DataFrame(lines), forms=forms, num_in_terminal=8)


def verification_table(verification: Verification) -> Table:
    """Return the answer beside the plain configuration."""
    pairs = [(verification.choice, verification.outcome, verification.metrics, "answer")]
    if verification.plain is not None:
        pairs.append((verification.plain, verification.plain_outcome or "", verification.plain_metrics, "plain"))
    lines = [
        {
            **{heading(name): value for name, value in choice.items()},
            "outcome": outcome,
            "peak MiB": metrics.get("peak_allocated_mib"),
            "tokens/s": metrics.get("tokens_per_second"),
            "final loss": metrics.get("final_loss"),
            "": label,
        }
        for choice, outcome, metrics, label in pairs
    ]
    forms = {"peak MiB": "{:,.1f}", "tokens/s": "{:,.0f}", "final loss": "{:.4f}"}
    return Table(name="verification", title="the answer, trained again", frame=pd.DataFrame(lines), forms=forms)
