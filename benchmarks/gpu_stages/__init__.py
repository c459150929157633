"""The stages of `benchmarks/gpu.py`, a module each."""
