"""Experiments in clean processes, worker processes, signals, and the environment of a run."""
