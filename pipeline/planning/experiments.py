"""The experiments of a plan on a device."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import Configurations, why_refused
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Refusals, Space
from pipeline.planning.checkpointing_policy import with_policies
from pipeline.runtime.shape_check import check_shapes


def experiments_on(
    target: Hardware, values: Mapping[str, Any], space: Space, mathematics: Mathematics, budget_bytes: int
) -> tuple[list[Experiment], list[Choice], Refusals]:
    """Return the experiments of the space, their choices, and how many others were refused for each reason.

    `budget_bytes` is that of `checkpointing=auto`.
    """
    configurations, refusals = Configurations(values, "plan"), Counter[str]()
    experiments, choices = [], []
    for choice in space.choices:
        experiment = configurations.experiment(choice)
        reason = why_refused(experiment, choice, target, mathematics)
        if reason is None:
            experiment, reason = with_policies(experiment, target, budget_bytes)
        if reason is None:
            experiments.append(experiment)
            choices.append(_explicit(choice, experiment))
        else:
            refusals[reason] += 1
    check_shapes(experiments)
    return experiments, choices, dict(refusals.most_common())


def _explicit(choice: Choice, experiment: Experiment) -> Choice:
    """Return the choice with the policies of the experiment in place of `checkpointing=auto`."""
    if choice.get("checkpointing") != "auto":
        return choice
    return {**choice, "checkpointing": experiment.settings.checkpointing}  # type: ignore[attr-defined]
