"""Stored evaluations: figures with intervals, and paired comparisons."""
