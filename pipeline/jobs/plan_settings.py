"""The settings that the entry point `plan` adds."""

from pipeline.config.space import SpaceSettings


class PlanSettings(SpaceSettings):
    """What is planned, and for which cards."""

    gpu: str = "auto"
    """Cards to plan for, separated by commas (h100, rtx4090, t4, ...); cpu; auto: what this machine trains on."""
    expandable_segments: bool = False
    """Predict for expandable_segments:True, even where the environment of a run does not set it."""
