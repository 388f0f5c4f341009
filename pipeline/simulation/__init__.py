"""The simulated card: a process whose NVIDIA libraries count memory and compute nothing."""
