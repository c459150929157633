"""LMM-R1's rows: messages written as JSON text."""

PROMPTS = ("message", "input")
GROUND_TRUTHS = ("answer", "label")
