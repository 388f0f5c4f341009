"""One file for each entry point: a run, a search or a plan, connected to its observers."""
