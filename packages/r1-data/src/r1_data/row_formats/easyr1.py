"""EasyR1's rows."""

PROMPTS = ("problem",)
GROUND_TRUTHS = ("answer",)
BEFORE = ("r1v", "gsm8k", "messages", "lmm_r1")
