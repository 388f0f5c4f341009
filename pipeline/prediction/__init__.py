"""Memory and work of a step before it is trained: on a simulated card, for a CPU on fake tensors."""
