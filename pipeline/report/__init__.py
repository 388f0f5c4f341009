"""Findings -> tables, plots and one page."""
