"""Files that run in a process on simulated cards: Python runs the first when it starts, the others follow torch."""
