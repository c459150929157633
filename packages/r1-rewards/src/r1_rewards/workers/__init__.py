"""Rewards that run anybody's code: killable processes, what they are sent, and what becomes of their failures."""
