"""The prediction for a CPU: the step is recorded on fake tensors."""
