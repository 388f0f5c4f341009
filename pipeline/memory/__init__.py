"""Budgets, devices and the meters that read them."""
