"""The fastest configuration that fits a memory budget: choosing a trial, running it and judging it are three things."""
