"""LMM-R1's rows: messages as JSON text."""

PROMPTS = ("message", "input")
GROUND_TRUTHS = ("answer", "label")
