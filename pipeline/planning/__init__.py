"""What is worth training on a card: a space of configurations, their fit and expected time, and why."""
