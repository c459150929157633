"""EasyR1's rows, as its data sets name the columns."""

PROMPTS = ("problem",)
GROUND_TRUTHS = ("answer",)
BEFORE = ("r1v", "gsm8k", "messages", "lmm_r1")
