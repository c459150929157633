"""TRL's rows: text or messages in `prompt`, the ground truth in one of several columns."""

PROMPTS = ("prompt",)
GROUND_TRUTHS = ("answer", "solution", "ground_truth", "label", "target")
BEFORE = ("easyr1", "r1v", "gsm8k", "messages", "lmm_r1")
