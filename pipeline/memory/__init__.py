"""Devices, memory meters and recorded storage lifetimes."""
