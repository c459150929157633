"""Rewards that are log-probs of the reference answer: whom they ask, and what they are held against."""
