"""Settings, and the experiments, variants and spaces that they describe."""
