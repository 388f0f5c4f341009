"""Anybody's command on a simulated card: its memory, what fills it, and what would fit."""
