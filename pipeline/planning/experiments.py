"""The experiments of a plan on a device."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import Configurations, why_refused
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Refusals, Space
from pipeline.runtime.shape_check import check_shapes


def experiments_on(
    target: Hardware, values: Mapping[str, Any], space: Space, mathematics: Mathematics
) -> tuple[list[Experiment], list[Choice], Refusals]:
    """Return the experiments of the space, their choices, and how many others were refused for each reason."""
    configurations, refusals = Configurations(values, "plan"), Counter[str]()
    experiments, choices = [], []
    for choice in space.choices:
        experiment = configurations.experiment(choice)
        reason = why_refused(experiment, choice, target, mathematics)
        if reason is None:
            experiments.append(experiment)
            choices.append(choice)
        else:
            refusals[reason] += 1
    check_shapes(experiments)
    return experiments, choices, dict(refusals.most_common())
