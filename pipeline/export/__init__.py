"""A configuration as files for other frameworks, and as a script in plain PyTorch."""
