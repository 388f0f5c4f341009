"""The summary metrics of a run, with its predicted peaks."""

from collections.abc import Mapping

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import Outcome, Result
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.memory.device import hardware_of
from pipeline.prediction.patches import notes_on
from pipeline.prediction.predict import predict_each, why_not_predicted
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.run import measured_summary
from pipeline.training.metrics import Summary


def summary(experiment: Experiment, result: Result) -> Summary:
    """Return the summary metrics of a run with its predicted peaks, and what to know of these.

    Nothing is predicted for a run that was interrupted.
    """
    measured = dict(measured_summary(experiment, result).metrics)
    if result.outcome is Outcome.INTERRUPTED:
        return Summary(measured)
    try:
        prediction = prediction_of(experiment)
        notes = notes_on([experiment], hardware_of(experiment.device))
        metrics = measured | _prediction_metrics(prediction, measured, result.outcome)
        return Summary(metrics, prediction="; ".join(notes) or None)
    except Exception as error:  # whatever it is, the measurement is kept
        return Summary(measured, prediction=f"not predicted: {first_line(why_not_predicted(error))}")


def prediction_of(experiment: Experiment) -> Prediction:
    """Return the predicted memory of a run on this machine.

    Raises:
        InvalidInputError: the run's device does not support it, or it reads the values of tensors.

    """
    target, budget_bytes = hardware_of(experiment.device), experiment.budget_bytes
    [(_, found)] = predict_each([experiment], target, budget_bytes=budget_bytes, is_recorded=False)
    if isinstance(found, InvalidInputError):
        raise found
    return found


def _prediction_metrics(prediction: Prediction, measured: Mapping[str, float], outcome: Outcome) -> dict[str, float]:
    """Return the predicted peaks as metrics, and their error if the run completed."""
    metrics = {"predicted_peak_allocated_mib": prediction.peak_allocated_bytes / MIB}
    if prediction.peak_reserved_bytes is not None:
        metrics["predicted_peak_reserved_mib"] = prediction.peak_reserved_bytes / MIB
    if outcome.completed and "peak_allocated_mib" in measured:
        ratio = metrics["predicted_peak_allocated_mib"] / measured["peak_allocated_mib"]
        metrics["prediction_error_percent"] = 100 * (ratio - 1)
    return metrics
