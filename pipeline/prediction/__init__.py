"""The memory of an experiment, predicted on fake tensors before anything runs."""
