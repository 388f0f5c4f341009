"""What runs in a process of its own and is measured."""

from pipeline.config.command import Command
from pipeline.config.experiment import Experiment

Runnable = Experiment | Command
