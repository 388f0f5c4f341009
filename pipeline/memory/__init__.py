"""Budgets, devices, the meters that read them, and the allocator that predicts what they will read."""
