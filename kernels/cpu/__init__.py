"""Numba versions for the CPU. Each module compiles on first use, then from a cache."""
