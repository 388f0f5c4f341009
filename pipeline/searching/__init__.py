"""Search for the fastest configuration that fits a memory budget: proposals, trials, study and verification."""
