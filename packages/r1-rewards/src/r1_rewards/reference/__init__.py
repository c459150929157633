"""Rewards from a model's own log-probs of the reference answer."""
