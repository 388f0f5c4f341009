"""The training step, the loop around it, and the metrics of a run."""
