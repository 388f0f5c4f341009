"""Prediction of the peak memory of an experiment, on fake tensors."""
