"""Devices, memory meters, recorded storage lifetimes, and a simulation of the CUDA caching allocator."""
