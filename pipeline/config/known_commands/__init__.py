"""Training commands that many use: one file each, found by its name."""
