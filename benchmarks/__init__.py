"""Comparisons with peers, one module each; `python -m benchmarks.run` runs them all."""
