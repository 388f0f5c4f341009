"""The description of a run in MLflow: what it is, what it came to, and its settings, in Markdown."""

from collections.abc import Mapping
from typing import Any

from pipeline.base.results import Result
from pipeline.config.given import written
from pipeline.config.settings import default_values, in_use
from pipeline.runtime.observer import Run
from pipeline.training.metrics import limited_peak_mib

MEASURED: Mapping[str, str] = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "samples_per_second": "{:,.4g} samples/s",
    "final_loss": "final loss {:.4f}",
    "memory_saving_percent": "{:.1f} % less memory than the baseline",
}
"""Metrics of the description after the peak; samples only where tokens are not counted."""


def description(run: Run, result: Result, metrics: Mapping[str, float]) -> str:
    """Return the description of a run that has ended."""
    parts = [_what(run.labels), _outcome(result, metrics), _settings(run.runnable.params())]
    return "\n\n".join(filter(None, parts))


def _what(labels: Mapping[str, str]) -> str:
    """Return what a run is in its job: a variant of a comparison, a trial, or a run of the verification."""
    name = f"**{labels['variant']}**" if "variant" in labels else ""
    if "verification" in labels:
        role = "the answer, trained again" if labels["verification"] == "answer" else "what the answer is compared with"
        return f"Verification, {role}: {name}"
    if "trial" in labels:
        return f"Trial {labels['trial']}: {name}"
    if "comparison" in labels:
        role = "the baseline" if labels.get("baseline") == "true" else "a variant"
        return f"{name}, {role} of the comparison {labels['comparison']}"
    return name


def _outcome(result: Result, metrics: Mapping[str, float]) -> str:
    peak = limited_peak_mib(metrics)
    shown = {k: v for k, v in metrics.items() if k != "samples_per_second" or "tokens_per_second" not in metrics}
    found = [
        *([] if peak is None else [f"peak {peak:,.1f} MiB"]),
        *(text.format(shown[name]) for name, text in MEASURED.items() if name in shown and result.outcome.completed),
    ]
    detail = f"\n\n```\n{result.detail}\n```" if result.detail else ""
    return f"Outcome {': '.join(filter(None, [result.outcome.value, ', '.join(found)]))}.{detail}"


def _settings(params: Mapping[str, Any]) -> str:
    defaults = default_values()
    own = {name: value for name, value in in_use(params).items() if name not in defaults or value != defaults[name]}
    return "Settings: " + ", ".join(f"`{name}` {written(value)}" for name, value in own.items())
