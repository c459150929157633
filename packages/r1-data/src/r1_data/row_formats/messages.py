"""Rows of OpenAI messages, the ground truth in one of several columns."""

PROMPTS = ("messages",)
GROUND_TRUTHS = ("answer", "solution", "ground_truth", "label", "target")
BEFORE = ("lmm_r1",)
