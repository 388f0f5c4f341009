"""The plots of a verification: the losses of the answer and of the plain configuration, and what torch reserved."""

import altair as alt

from pipeline.base.units import MIB
from pipeline.report.curves import curves
from pipeline.report.plot import Plot
from pipeline.searching.results import Verification


def losses_plots(verification: Verification) -> tuple[Plot, ...]:
    """Return the losses of both over the steps; none if they were not compared."""
    if verification.plain is None or verification.same_training is None:
        return ()
    runs = {"plain": verification.plain_losses, "answer": verification.losses}
    series = {name: list(enumerate(losses, 1)) for name, losses in runs.items()}
    title = "losses of the answer and of the plain configuration"
    return (Plot(name="verified_losses", title=title, panels=(curves(title, series, "loss"),)),)


def reserved_plots(verification: Verification, budget_bytes: int) -> tuple[Plot, ...]:
    """Return the reserved memory over the steps, beside its predicted peak and the budget; none of a CPU."""
    if not verification.reserved_bytes:
        return ()
    held_mib = [num_bytes / MIB for num_bytes in verification.reserved_bytes]
    limits_mib = {
        "budget": budget_bytes / MIB,
        "predicted peak": verification.answer.metrics.get("predicted_peak_reserved_mib"),
    }
    series = {"reserved": list(enumerate(held_mib, 1))}
    for name, limit_mib in limits_mib.items():
        if limit_mib is not None:
            series[f"{name} {limit_mib:,.0f} MiB"] = [(1, limit_mib), (len(held_mib), limit_mib)]
    title = "reserved memory over the steps of the answer"
    return (
        Plot(
            name="reserved_over_time", title=title, panels=(curves(title, series, "MiB", scale=alt.Scale(zero=True)),)
        ),
    )
