"""What clipping costs in memory: the gradients of all parameters exist until their norm is known."""

from collections.abc import Iterable

from pipeline.base.contracts import Hardware
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.prediction.predict import predict_each
from pipeline.prediction.prediction import Prediction

WITHOUT = {"max_grad_norm": None, "optimizer_in_backward": True}
"""The settings with which a gradient is freed as soon as its parameter is updated."""


def cost_of_clipping(predicted: Iterable[tuple[Experiment, int]], target: Hardware, budget_bytes: int) -> str | None:
    """Return what the leanest experiment would need without clipping, updated in its backward pass, as a sentence.

    `predicted` has each experiment with its predicted peak in bytes. It is None if none of them clips, if what it needs
    otherwise (one micro-batch, no loss scaling) rules it out for all, or if it would not lower the peak.
    """
    others = ((Experiment(one.settings.model_copy(update=WITHOUT)), one, peak) for one, peak in predicted)
    possible = [
        (peak, other, one)
        for other, one, peak in others
        if one.settings.max_grad_norm is not None and other.unsupported(target) is None
    ]
    if not possible:
        return None
    before, other, one = min(possible, key=lambda each: each[0])
    try:
        [(_, prediction)] = predict_each([other], target, budget_bytes=budget_bytes)
    except RuntimeError:  # its process has ended: the rest of the answer stands
        return None
    if not isinstance(prediction, Prediction) or prediction.peak_bytes >= before:
        return None
    fits = ", which fits" if prediction.fits(budget_bytes) and before > budget_bytes else ""
    return (
        f"Clipping to max_grad_norm={one.settings.max_grad_norm:g} keeps all gradients until their norm is known. "
        "Without it, which is another training and needs one micro-batch without loss scaling, the smallest predicted "
        f"peak of such configurations would be {prediction.peak_bytes / MIB:,.1f} MiB instead of "
        f"{before / MIB:,.1f} MiB{fits} (max_grad_norm=none, optimizer_in_backward=true)."
    )
