"""The RLPR reward: how probable the reasoning makes the reference answer."""
