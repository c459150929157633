"""Metrics of a step and of a validation."""
