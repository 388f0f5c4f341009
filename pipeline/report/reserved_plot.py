"""The plot of what the caching allocator holds after each optimizer step of a verified answer."""

from functools import partial

from matplotlib.axes import Axes

from pipeline.base.units import MIB
from pipeline.report.plot import WARNING, Plot, colour
from pipeline.searching.results import Verification


def reserved_plots(verification: Verification, budget_bytes: int) -> tuple[Plot, ...]:
    """Return the reserved memory over the steps, beside its predicted peak and the budget; none of a CPU."""
    if not verification.reserved_bytes:
        return ()
    panel = partial(_reserved, verification=verification, budget_mib=budget_bytes / MIB)
    return (Plot(name="reserved_over_time", title="reserved memory over time", panels=(panel,)),)


def _reserved(axes: Axes, *, verification: Verification, budget_mib: float) -> None:
    held_mib = [num_bytes / MIB for num_bytes in verification.reserved_bytes]
    axes.plot(range(1, len(held_mib) + 1), held_mib, color=colour(0), label="reserved")
    predicted_mib = verification.metrics.get("predicted_peak_reserved_mib")
    if predicted_mib is not None:
        axes.axhline(predicted_mib, color=colour(2), linestyle="--", label=f"predicted peak {predicted_mib:,.0f} MiB")
    axes.axhline(budget_mib, color=WARNING, label=f"budget {budget_mib:,.0f} MiB")
    axes.set(title="reserved memory over time", xlabel="optimizer step", ylabel="MiB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
