"""Rows of OpenAI messages, the ground truth in a column of any of TRL's names."""

PROMPTS = ("messages",)
GROUND_TRUTHS = ("answer", "solution", "ground_truth", "label", "target")
BEFORE = ("lmm_r1",)
